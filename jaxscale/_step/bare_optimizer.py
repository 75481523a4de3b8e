"""`BareOptimizer`: an optimizer that `loss_scaled` has not wrapped."""

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from .._gradients.value_and_grad import BackwardPass
from .._jax import users_stacklevel
from .._policies.fixed import NoOpLossScale
from .._state.find import (
    find_optimizer_state,
    find_scale,
    is_loss_scaled,
    is_scaling,
)
from .._state.nodes import states_in
from .._state.optimizer import LossScaledState
from .._trees.gradient_leaves import holds_overwrites, overwrite, zero_overwrites
from .._trees.params import apply_updates
from .._trees.pytrees import OptState, Params
from .._trees.selection import where
from .checks import TreeTypes, as_transformation, types_of
from .counters import start_state
from .wrapped_optimizer import WrappedOptimizer, find_wrapped_optimizer


class BareOptimizer(WrappedOptimizer):
    """An optimizer that applies every step, and sees what Optax alone would show it.

    Its state is its own. There may be a `loss_scaled` optimizer further inside, whose state then is
    a part of that: its scale is that of the pass, and its verdict that of the step.

    Its `apply` is a body of its own, and not an `advance` that refuses nothing: nothing is widened
    here, the state keeps what `update` returned, FP8 statistics enter as zeros, and the verdict
    comes from inside. In one body, each of these would be a condition that every reader of the
    default step reads.
    """

    widens = False

    def enter(self, argument: str, state: OptState, order: str) -> LossScaledState:
        if holds_loss_scaled(state):
            if is_loss_scaled(state) and not self.hides_loss_scaled():
                raise TypeError(
                    f"`{argument}` is a `LossScaledState`, but `tx` is a bare optimizer. Pass the "
                    "one that `loss_scaled` returned, or `opt_state.inner_state` to go on without "
                    "it."
                )
            message = say_inside(argument.partition("(")[0])
            warnings.warn(message, stacklevel=users_stacklevel())
        return start_state(self.policy.init(), state)

    def leave(self, state: LossScaledState) -> Any:
        return state.inner_state

    def apply(
        self,
        backward_pass: BackwardPass,
        state: LossScaledState,
        params: Params,
        extra_args: Mapping[str, Any],
    ) -> tuple[Any, LossScaledState]:
        grads = backward_pass.grads.divided
        optimizer_grads = grads
        overwrites = holds_overwrites(grads)
        if overwrites:
            optimizer_grads = zero_overwrites(grads)
        updates, inner_state = self.inner.update(
            optimizer_grads,
            state.inner_state,
            params,
            value=backward_pass.loss,
            **extra_args,
        )
        state = state._replace(inner_state=inner_state)
        outcome = apply_updates(params, updates)
        if overwrites:
            outcome = overwrite(outcome, grads, params)
            verdict = self.find_verdict(state)
            if verdict is not None:
                outcome = where(verdict.step_applied, outcome, params)
        return outcome, state

    def find_start_scale(self, state: LossScaledState) -> Any:
        if not states_in(state.inner_state, is_scaling):
            return state.scaling
        return find_scale(self.call, "opt_state", state.inner_state)

    def find_verdict(self, state: LossScaledState) -> LossScaledState | None:
        if not holds_loss_scaled(state.inner_state):
            return None
        return find_optimizer_state(self.call, state.inner_state)

    def expected_types(self, params: optax.Params) -> TreeTypes:
        return types_of(jax.eval_shape(self.inner.init, params))

    def hides_loss_scaled(self) -> bool:
        """True if this is another optimizer around a `loss_scaled` one."""
        return any(map(holds_loss_scaled, possible_states(self.inner)))


def as_optimizer(call: str, tx: object) -> WrappedOptimizer:
    """Returns an optimizer, wrapped or bare, or raises a `TypeError` if it is not one."""
    wrapped = find_wrapped_optimizer(tx)
    if wrapped is not None:
        return wrapped
    inner = as_transformation(f"{call}(tx, ...)", tx)
    return BareOptimizer(inner, NoOpLossScale(), call=call, skips=False)


def holds_loss_scaled(state: OptState) -> bool:
    """True if a state is, or holds, that of a `loss_scaled` optimizer."""
    return bool(states_in(state, is_loss_scaled))


def possible_states(tx: Any) -> Iterator[Any]:
    """Yields the states that `tx.init` makes for two dummies of parameters.

    A `loss_scaled` inside of another optimizer shows in nothing but a state. One dummy is an empty
    tree, the other a single vector. A dummy that `init` rejects is skipped.
    """
    for params in ({}, jax.ShapeDtypeStruct((1,), jnp.float32)):
        with contextlib.suppress(Exception):
            yield jax.eval_shape(tx.init, params)


def say_inside(call: str) -> str:
    """The message of a call about a `loss_scaled` optimizer inside of another one."""
    return (
        f"`{call}`: the `loss_scaled` optimizer, or one that another function of jaxscale made, is "
        "inside of another one, whose state and updates a bad step can corrupt for good, and whose "
        "changes `master_weights` and `stochastic_rounding` never see. Make it the outermost: "
        "write `loss_scaled(outer(inner))` for `outer(loss_scaled(inner))`, as with `optax.chain`, "
        "`masked`, `partition`, `flatten`, `inject_hyperparams` and `MultiSteps`. For "
        "`apply_if_finite(loss_scaled(inner))` write `loss_scaled(inner)`."
    )
