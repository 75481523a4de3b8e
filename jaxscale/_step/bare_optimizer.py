"""`BareOptimizer`: one that `loss_scaled` has not wrapped, as a wrapped one without judges."""

import contextlib
import dataclasses
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from .._jax import stacklevel_outside
from .._policies.fixed import NoOpLossScale
from .._state.find import find_optimizer_state, find_scale, is_loss_scaled, is_scaling
from .._state.optimizer import LossScaledState
from .._trees.overwrites import holds_overwrites, overwrite, zero_overwrites
from .._trees.params import apply_updates
from .._trees.pytrees import OptState, Params
from .._trees.selection import tree_where
from .backward_pass import Pass
from .call_update import call_update
from .checks import as_transformation
from .counters import start_state
from .matching_trees import TreeTypes, types_of
from .wrapped_optimizer import WrappedOptimizer, find_wrapped_optimizer


@dataclasses.dataclass(frozen=True)
class BareOptimizer(WrappedOptimizer):
    """An optimizer that applies every step, and sees what Optax alone would show it.

    Its state is its own. There may be a `loss_scaled` optimizer further inside, whose state then is
    a part of that: its scale is that of the pass, and its verdict that of the step.
    """

    def enter(self, argument: str, state: OptState, order: str) -> LossScaledState:
        if holds_loss_scaled(state):
            if is_loss_scaled(state) and not self.hides_loss_scaled():
                raise TypeError(
                    f"`{argument}` is a `LossScaledState`, but `tx` is a bare optimizer. Pass the "
                    "one that `loss_scaled` returned, or `opt_state.inner_state` to go on without "
                    "it."
                )
            message = say_inside(argument.partition("(")[0])
            warnings.warn(message, stacklevel=stacklevel_outside())
        return start_state(self.policy.init(), state)

    def leave(self, state: LossScaledState) -> Any:
        return state.inner_state

    def apply(
        self,
        run: Pass,
        state: LossScaledState,
        params: Params,
        extra_args: Mapping[str, Any],
    ) -> tuple[Any, LossScaledState]:
        grads = run.grads.divided
        optimizer_grads = grads
        overwrites = holds_overwrites(grads)
        if overwrites:
            optimizer_grads = zero_overwrites(grads)
        updates, inner_state = call_update(
            self.inner, optimizer_grads, state.inner_state, params, run.loss, extra_args
        )
        state = state._replace(inner_state=inner_state)
        outcome = apply_updates(params, updates)
        if overwrites:
            outcome = overwrite(outcome, grads, params)
            verdict = self.find_verdict(state)
            if verdict is not None:
                outcome = tree_where(verdict.step_applied, outcome, params)
        return outcome, state

    def find_start_scale(self, state: LossScaledState) -> Any:
        nodes = jax.tree.leaves(state.inner_state, is_leaf=is_scaling)
        if not any(map(is_scaling, nodes)):
            return state.scaling
        return find_scale("train_step", "opt_state", state.inner_state)

    def find_verdict(self, state: LossScaledState) -> LossScaledState | None:
        if not holds_loss_scaled(state.inner_state):
            return None
        return find_optimizer_state("train_step", state.inner_state)

    def expected_types(self, params: optax.Params) -> TreeTypes:
        return types_of(jax.eval_shape(self.inner.init, params))

    def hides_loss_scaled(self) -> bool:
        """Returns whether this is another optimizer around a `loss_scaled` one."""
        return any(map(holds_loss_scaled, possible_states(self.inner)))


def as_optimizer(call: str, tx: object) -> WrappedOptimizer:
    """Returns an optimizer, wrapped or bare, or raises a `TypeError` if it is not one."""
    wrapped = find_wrapped_optimizer(tx)
    if wrapped is not None:
        return wrapped
    inner = as_transformation(f"{call}(tx, ...)", tx)
    return BareOptimizer(inner, NoOpLossScale(), skips=False)


def holds_loss_scaled(state: OptState) -> bool:
    """Returns whether a state is, or holds, that of a `loss_scaled` optimizer."""
    nodes = jax.tree.leaves(state, is_leaf=is_loss_scaled)
    return any(map(is_loss_scaled, nodes))


def possible_states(tx: Any) -> Iterator[Any]:
    """Yields the states that `tx.init` makes for two dummies of parameters.

    A `loss_scaled` inside of another optimizer shows in nothing but a state. One dummy is an empty
    tree, the other a single vector. A dummy that `init` rejects is skipped.
    """
    for params in ({}, jax.ShapeDtypeStruct((1,), jnp.float32)):
        with contextlib.suppress(Exception):
            yield jax.eval_shape(tx.init, params)


def say_inside(call: str) -> str:
    """Returns what a call says of a `loss_scaled` optimizer that is inside of another one."""
    return (
        f"`{call}`: the `loss_scaled` optimizer, or one that another function of jaxscale made, is "
        "inside of another one, whose state and updates a bad step can corrupt for good, and whose "
        "changes `master_weights` and `stochastic_rounding` never see. Make it the outermost: "
        "write `loss_scaled(outer(inner))` for `outer(loss_scaled(inner))`, as with `optax.chain`, "
        "`masked`, `partition`, `flatten`, `inject_hyperparams` and `MultiSteps`. For "
        "`apply_if_finite(loss_scaled(inner))` write `loss_scaled(inner)`."
    )
