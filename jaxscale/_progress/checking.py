"""`check`: an error if training is stuck, and warnings of what may soon ruin it."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from .._policies.adaptive import UNSEEN
from .._state.find import find_optimizer_state, is_loss_scaled, restore_types
from .._state.optimizer import WINDOW_STATES, MultiStepsState
from .._state.scale import AdaptiveState, unwrap
from .._step.bare import (
    as_optimizer,
    holds_loss_scaled,
    possible_states,
    say_inside,
)
from .._step.wrapped_optimizer import find_wrapped_optimizer
from .._trees.checks import int32
from .._trees.leaf import check_in_reach, is_inexact_leaf, parts_in_reach
from .causes import explain_row, find_nan
from .limits import MANY_ZEROS
from .symptoms import list_warnings
from .texts import ZEROS


class LossScaleStuckError(RuntimeError):
    """Training makes no progress: too many steps in a row were skipped.

    Example:
      >>> import jaxscale
      >>> issubclass(jaxscale.LossScaleStuckError, RuntimeError)
      True
    """


def check(
    tree: Any,
    *,
    tx: optax.GradientTransformation | None = None,
    max_consecutive: int = 50,
) -> None:
    """Raises an error if training is stuck, and warns of signs that something is wrong.

    Call it on the host, outside `jit`, and only as often as you log, because it waits for the
    device. A dynamic loss scale skips a step now and then, and falls after it has grown; that is
    normal.

    Args:
      tree: a `jaxscale.LossScaledState`, or a tree that holds exactly one. In the state of a
        population each member is judged separately, and the worst one is reported.
      tx: the optimizer, which knows how far the scale can fall, and how many steps are lost to its
        growth alone. With it the message can tell a scale at its floor from one that is fixed or
        still falling. A `TrainState` holds its
        optimizer, so it needs no `tx`.
      max_consecutive: how many steps skipped in a row are still accepted, at least 0. Halving takes
        24 of them from 2**24 down to 1.

    Warns:
      UserWarning: in each of these cases. Python shows each text once in a run.

        - One step in 20 is lost: the `skip_rate` is 0.05 or more, over enough steps. 6 % of skipped
          steps are enough after about 1800 steps, 10 % after 700, 50 % after 105.
        - The loss itself was not finite in 10 steps in a row. (More than `max_consecutive` of them
          are an error.)
        - The optimizer has moments, and they are all 0 after 50 steps, so all gradients were 0.
          Something else may clean them before the optimizer gets them, and hide every overflow.
        - The `loss_scaled` optimizer is inside of another one, which a skipped step still changes.
          With `tx`, or in a `TrainState`, this is always seen.
        - `tree` is a `TrainState` that has made more steps than its optimizer. Then the optimizer
          was not restored from a checkpoint.
        - The loss scale decays: it is below 2**15 with a `backoff_count` of 6 or more, or an
          `AdaptiveLossScale` has made more and more room for gradients that never came. With
          `max_norm` or `spikes` the text says whether the gradients themselves have grown. A policy
          that raises its scale in every finite step, such as
          `DynamicLossScale(growth_interval=1)`, never decays.
        - The scale may be useless: it has grown to 2**24 or more after 10,000 steps, none of which
          overflowed. (From 2**15, the default policy gets there after 18,000.) A scale that follows
          the gradients gives no such warning.
        - Retries do not help: `total_exhausted` is 6 or more.
        - Spikes are skipped again and again: 20 in a row, or more than one step in 20 of at least
          1000.

    Raises:
      LossScaleStuckError: if more than `max_consecutive` steps in a row were skipped, or if an
        `AdaptiveLossScale` has seen nothing but zeros in more steps of the optimizer than that. The
        message has the numbers, the likely cause and, with `track_leaves=True`, the leaves of the
        last overflow. The cause is that of the steps in this row. If the state of the optimizer
        itself holds a NaN, which it made of finite gradients, that is the cause.
      ValueError: if `tree` holds no such state, or several, or if `max_consecutive` is below 0.
      TypeError: if called inside `jit`.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> import jaxscale
      >>> tx = jaxscale.loss_scaled(optax.adam(0.1))
      >>> state = tx.init(jnp.zeros(3))
      >>> jaxscale.check(state)
      >>> for _ in range(3):
      ...     _, state = tx.update(jnp.full(3, jnp.nan), state)
      >>> jaxscale.check(state, max_consecutive=2)  # doctest: +IGNORE_EXCEPTION_DETAIL
      Traceback (most recent call last):
      jaxscale.LossScaleStuckError: 3 steps in a row were skipped (3 of 3 in all, ...)
    """
    most = int32("check", "max_consecutive", max_consecutive, least=0)
    state = find_optimizer_state("check", restore_types(tree))
    if tx is not None:
        as_optimizer("check", tx)
    tx = tx or getattr(tree, "tx", None)
    if _is_inside_of_another(tree, tx):
        warnings.warn(say_inside("check"), stacklevel=2)
    inner_state = unwrap(state.inner_state)
    # Only counters are read, as processes may have only parts of what is larger.
    state = unwrap(state._replace(inner_state=None))
    state = state._replace(spikes=_without_windows(state.spikes))
    state = jax.tree.map(_on_host, state)
    _warn_if_lost(unwrap(getattr(tree, "step", None)), state, inner_state)
    axes = np.shape(state.notfinite_count)  # those of a population
    steps = np.broadcast_to(_count_optimizer_steps(state, inner_state), axes)
    members = jax.tree.map(
        lambda leaf: leaf.reshape(-1, *leaf.shape[len(axes) :]), state
    )
    optimizer = find_wrapped_optimizer(tx)
    policy = None
    checks_updates = False
    if optimizer is not None:
        policy = optimizer.policy
        checks_updates = optimizer.check_updates

    worst = int(np.argmax(members.notfinite_count))
    if members.notfinite_count[worst] > most:
        member = jax.tree.map(lambda leaf: leaf[worst], members)
        place_of_nan = find_nan(inner_state, _place_of(worst, axes))
        text = explain_row(member, policy, place_of_nan, checks_updates)
        raise LossScaleStuckError(_name_member(worst, axes) + text)
    _raise_if_blind(members, steps.reshape(-1), most, axes)
    if steps.min() >= MANY_ZEROS and _are_all_zero(inner_state, len(axes)):
        warnings.warn(ZEROS, stacklevel=2)
    for text in list_warnings(members, policy):
        warnings.warn(text, stacklevel=2)


def _name_member(index: int, axes: tuple[int, ...]) -> str:
    """Returns which member of a population is meant, nothing for a run that is alone."""
    if not axes:
        return ""
    place = list(_place_of(index, axes))
    return f"Of a population of shape {axes}, the member at {place}: "


def _place_of(index: int, axes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(index, axes))


def _count_optimizer_steps(state: Any, inner_state: Any) -> Any:
    """Returns how many steps the optimizer has made under this state, as far as that is known."""
    applied = state.total_steps - state.total_notfinite
    if isinstance(inner_state, WINDOW_STATES):
        # A window of another run has also counted the steps of that.
        return np.minimum(applied, np.asarray(inner_state.gradient_step))
    return applied


def _is_inside_of_another(tree: Any, tx: Any) -> bool:
    """Returns whether a `loss_scaled` optimizer is inside of another one, as far as one can see."""
    if tx is not None and find_wrapped_optimizer(tx) is None:
        return any(map(holds_loss_scaled, possible_states(tx)))
    if _is_chain(tree):
        return True
    outer = jax.tree.leaves(tree, is_leaf=_is_outer)
    return any(map(_is_outer, outer))


def _is_outer(node: Any) -> bool:
    """Returns whether a node is a state of Optax around that of a `loss_scaled` optimizer."""
    return _is_of_optax(node) and holds_loss_scaled(node)


def _is_chain(tree: Any) -> bool:
    """Returns whether a tree is the state of an `optax.chain` with a `loss_scaled` part.

    It is a plain tuple. So are the states of several optimizers that a loop carries, but they hold
    tuples, or dictionaries of parameters.
    """
    if type(tree) is not tuple:
        return False
    others = [node for node in tree if not is_loss_scaled(node)]
    return 0 < len(others) < len(tree) and all(map(_is_of_optax, others))


def _is_of_optax(node: Any) -> bool:
    is_named_tuple = isinstance(node, tuple) and hasattr(node, "_fields")
    return is_named_tuple and type(node).__module__.partition(".")[0] == "optax"


def _on_host(leaf: Any) -> np.ndarray:
    if isinstance(leaf, Tracer):
        raise TypeError(
            "`check` reads values, so it cannot run inside `jit`. Call it on the state that "
            "the step returns; inside, use `jaxscale.metrics`."
        )
    check_in_reach("`check(tree)`: a counter of a population", leaf)
    return np.asarray(leaf)


def _without_windows(spikes: Any) -> Any:
    """Returns the state of a `SpikeRule` with its counters alone."""
    if spikes is None:
        return None
    num_axes = jnp.ndim(spikes.total_spikes)  # those of a population
    return type(spikes)(
        *[leaf if jnp.ndim(leaf) == num_axes else None for leaf in spikes]
    )


def _warn_if_lost(step: Any, state: Any, inner_state: Any) -> None:
    """Warns if a restored `TrainState` has made more steps than the optimizer that it holds."""
    is_population = np.ndim(state.total_steps) > 0
    if step is None or is_population or not np.all(step > state.total_steps):
        return
    if _is_lost(step, state, inner_state):
        warnings.warn(
            f"`check`: the training state has made {int(step)} steps, but its optimizer only "
            f"{int(state.total_steps)}, so the optimizer was not restored. Flax's "
            "`restore_checkpoint` leaves it out silently if it was saved before it was wrapped. "
            "Restore with the bare optimizer, and then pass "
            "`tx.init(params)._replace(inner_state=restored.opt_state)`.",
            stacklevel=3,
        )


def _is_lost(step: Any, state: Any, inner_state: Any) -> Any:
    """Returns whether an optimizer that made fewer steps than `step` was not restored."""
    applied = state.total_steps - state.total_notfinite
    counts = []
    for _, count in optax.tree.get_all_with_path(inner_state, "count"):
        counts.append(np.max(count))
    if isinstance(inner_state, optax.MultiStepsState):
        # Its optimizer steps once in a few micro-batches, and how many is not known here. So only
        # a fresh one can be told: one of another run has made a step, or is further in its window.
        return inner_state.gradient_step == 0 and inner_state.mini_step <= applied
    if isinstance(inner_state, MultiStepsState):
        # Here `step` counts the steps of the optimizer, as its window does.
        window_steps = inner_state.gradient_step
        if counts:
            return step > window_steps and max(counts) <= window_steps
        return step > window_steps and window_steps == 0
    if counts:
        return max(counts) <= applied
    # Momentum and the like are 0 at first.
    leaves = jax.tree.leaves(inner_state)
    return len(leaves) > 0 and state.total_steps == 0 and all(map(_is_zero, leaves))


def _is_zero(leaf: Any) -> bool:
    """Returns whether an array is 0, or the parts of it that this process has."""
    return not any(map(np.any, parts_in_reach(leaf)))


def _are_all_zero(inner_state: Any, num_axes: int) -> bool:
    """Returns whether an optimizer keeps moments, and each of them is 0.

    They are its arrays, in a population with axes before them. In a healthy run the first one that
    is read is not 0.
    """
    if isinstance(inner_state, WINDOW_STATES):  # whose sums are 0 after each step
        inner_state = inner_state.inner_opt_state
    leaves = jax.tree.leaves(inner_state)
    moments = [
        leaf for leaf in leaves if is_inexact_leaf(leaf) and jnp.ndim(leaf) > num_axes
    ]
    for leaf in moments:
        # Where it is: it may be large.
        if any(bool(jnp.any(part)) for part in parts_in_reach(leaf)):
            return False
    return len(moments) > 0


def _raise_if_blind(members: Any, steps: Any, most: int, axes: tuple[int, ...]) -> None:
    """Raises an error if a policy that follows the largest gradient has only ever seen zeros.

    The steps are those of the optimizer: a window of micro-batches shows the policy only its mean.
    """
    if not isinstance(members.scaling, AdaptiveState):
        return
    is_blind = (members.scaling.peak <= UNSEEN) & (steps > most)
    if not is_blind.any():
        return
    worst = int(np.argmax(np.where(is_blind, steps, 0)))
    raise LossScaleStuckError(
        f"{_name_member(worst, axes)}All gradients were 0 in {steps[worst]} steps at loss scale "
        f"{members.scaling.loss_scale[worst]:g}, "
        "where `AdaptiveLossScale` learns nothing. If they are flushed to 0, start higher, as "
        "with `AdaptiveLossScale(init_scale=2.0**15)`, or where "
        "`jaxscale.diagnostics.calibrate` says. If `jax.value_and_grad` makes them, nothing "
        "scales them: use `jaxscale.value_and_grad(loss_fn, opt_state)`. If neither, the loss "
        "does not depend on the parameters."
    )
