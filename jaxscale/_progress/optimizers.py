"""The optimizer's own state: where it stands, whether it was restored, and what it holds."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .._state.find import is_loss_scaled
from .._state.nodes import states_in
from .._state.optimizer import WINDOW_STATES
from .._step.bare_optimizer import holds_loss_scaled, possible_states
from .._step.wrapped_optimizer import find_wrapped_optimizer
from .._trees.gradient_leaves import leaf_name
from .._trees.leaves import is_inexact_leaf, parts_in_reach
from .._trees.pytrees import Leaf, OptState, PyTree


def is_inside_of_another(tree: PyTree, tx: Any) -> bool:
    """Returns whether a `loss_scaled` optimizer is inside of another one, as far as one can see."""
    if tx is not None and find_wrapped_optimizer(tx) is None:
        return any(map(holds_loss_scaled, possible_states(tx)))
    return _is_chain(tree) or bool(states_in(tree, _is_outer))


def _is_outer(node: PyTree) -> bool:
    """Returns whether a node is a state of Optax around that of a `loss_scaled` optimizer."""
    return _is_of_optax(node) and holds_loss_scaled(node)


def _is_chain(tree: PyTree) -> bool:
    """Returns whether a tree is the state of an `optax.chain` with a `loss_scaled` part.

    It is a plain tuple. So are the states of several optimizers that a loop carries, but they hold
    tuples, or dictionaries of parameters.
    """
    if type(tree) is not tuple:
        return False
    others = [part for part in tree if not is_loss_scaled(part)]
    return 0 < len(others) < len(tree) and all(map(_is_of_optax, others))


def _is_of_optax(node: PyTree) -> bool:
    return type(node).__module__.partition(".")[0] == "optax"


def is_lost(step: Any, run: SimpleNamespace) -> bool:
    """Returns whether a `TrainState` with this step holds an optimizer that was not restored.

    That has made no more steps than were counted here.
    """
    if step is None or run.axes or not np.all(step > run.total_steps):
        return False
    inner_state = run.inner_state
    if isinstance(inner_state, optax.MultiStepsState):
        # Its optimizer steps once in a few micro-batches, and how many is not known here. So only
        # a fresh one can be told: one of another run has made a step, or is further in its window.
        is_fresh = inner_state.gradient_step == 0
        return bool(is_fresh & (inner_state.mini_step <= run.applied))
    counts = optax.tree.get_all_with_path(inner_state, "count")
    if counts:
        return max(np.max(count) for _, count in counts) <= run.optimizer_steps
    # Momentum and the like are 0 at first.
    leaves = jax.tree.leaves(inner_state)
    return len(leaves) > 0 and run.total_steps == 0 and all(map(is_zero, leaves))


def list_moments(inner_state: OptState, num_axes: int) -> list[Any]:
    """Returns the moments of an optimizer: its arrays, in a population with axes before them."""
    if isinstance(inner_state, WINDOW_STATES):  # whose sums are 0 after each step
        inner_state = inner_state.inner_opt_state
    moments = []
    for leaf in jax.tree.leaves(inner_state):
        if is_inexact_leaf(leaf) and jnp.ndim(leaf) > num_axes:
            moments.append(leaf)
    return moments


def find_nan(inner_state: OptState, member: tuple[int, ...]) -> str | None:
    """Returns where the state of an optimizer holds a NaN, `None` if it holds none.

    `member` is the place of a run in a population, empty for a run that is alone.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(inner_state):
        if is_inexact_leaf(leaf) and _holds(
            jnp.isnan, leaf[member] if member else leaf
        ):
            return leaf_name(path)
    return None


def are_finite(leaves: list[Any]) -> bool:
    """Returns whether all numbers of some arrays are finite, of those that this process has."""
    # All are asked for before the first answer is waited for.
    flags = [
        jnp.all(jnp.isfinite(part)) for leaf in leaves for part in parts_in_reach(leaf)
    ]
    return all(jax.device_get(flags))


def is_zero(leaf: Leaf) -> bool:
    """Returns whether an array is 0, or the parts of it that this process has."""
    return not _holds(jnp.bool_, leaf)


def _holds(test: Callable[[Any], Any], leaf: Leaf) -> bool:
    """Returns whether any number of an array passes a test, of those that this process has."""
    # Part by part, where it is: it may be large, and a reduction over devices of several processes
    # would wait for them all.
    return any(bool(jnp.any(test(part))) for part in parts_in_reach(leaf))
