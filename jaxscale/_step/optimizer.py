"""An optimizer as a training step sees it: wrapped by `loss_scaled`, or bare.

Both answer the same questions: what their state is to be, which scale a backward pass starts with,
whether a step may be skipped, and what it comes to.
"""

import contextlib
import dataclasses
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from .._state.find import find_optimizer_state, find_scale, is_loss_scaled, is_scaling
from .._state.optimizer import LossScaledState
from .._trees.overwrites import holds_overwrites, overwrite, zero_overwrites
from .._trees.params import apply_updates, combine, trained_params
from .._trees.selection import tree_where
from .call_update import NO_ARGS, call_update
from .checks import as_transformation, check_outcome
from .matching import StepTrees, TreeTypes, explaining_mismatch, types_of
from .retry import BackwardResult
from .wrapped_optimizer import WrappedOptimizer, find_wrapped_optimizer


@dataclasses.dataclass(frozen=True)
class BareOptimizer:
    """An optimizer that `loss_scaled` has not wrapped. It applies every step.

    It has the attributes and methods of a `WrappedOptimizer` that a training step uses. There may
    be a `loss_scaled` optimizer further inside, whose state then is part of its own.

    Attributes:
      tx: the optimizer itself.
    """

    tx: optax.GradientTransformationExtraArgs

    axis_name = None
    policy = None
    skips = False
    can_back_off = False

    def expected_types(self, params: optax.Params) -> TreeTypes:
        state = jax.eval_shape(self.tx.init, params)
        if is_loss_scaled(state):
            state = state.inner_state
        return types_of(state)

    def check_state(self, argument: str, state: Any, order: str) -> Any:
        if holds_loss_scaled(state):
            call = argument.partition("(")[0]
            self._warn_of_loss_scaled(call, argument, state)
        return state

    def _warn_of_loss_scaled(self, call: str, argument: str, state: Any) -> None:
        """Warns that the `loss_scaled` optimizer is inside, or raises an error if there is none."""
        if is_loss_scaled(state) and not self.hides_loss_scaled():
            raise TypeError(
                f"`{argument}` is a `LossScaledState`, but `tx` is a bare optimizer. Pass the one "
                "that `loss_scaled` returned, or `opt_state.inner_state` to go on without it."
            )
        warnings.warn(say_inside(call), stacklevel=4)

    def hides_loss_scaled(self) -> bool:
        """Returns whether this is another optimizer around a `loss_scaled` one."""
        return any(map(holds_loss_scaled, possible_states(self.tx)))

    def find_start_scale(self, call: str, state: Any) -> Any:
        """Returns the scale state of a `loss_scaled` optimizer inside of this one, if any."""
        if not any(map(is_scaling, jax.tree.leaves(state, is_leaf=is_scaling))):
            return None
        return find_scale(call, "opt_state", state)

    def find_verdict_state(self, call: str, state: Any) -> LossScaledState | None:
        if not holds_loss_scaled(state):
            return None
        return find_optimizer_state(call, state)

    def leave_out_unread(self, result: BackwardResult, *args: Any) -> BackwardResult:
        """Returns a backward pass as it is: nothing looks at it but the optimizer."""
        return result

    def judge_pass(self, *args: Any) -> None:
        """Returns no verdict: every step is applied."""

    def apply(
        self,
        result: BackwardResult,
        state: Any,
        params: optax.Params,
        extra_args: Mapping[str, Any],
    ) -> tuple[optax.Params, Any]:
        grads = result.grads.divided
        overwrites = holds_overwrites(result.grads.grads)
        optimizer_grads = grads
        if overwrites:
            optimizer_grads = zero_overwrites(grads)
        updates, state = call_update(
            self.tx, optimizer_grads, state, params, result.loss, extra_args
        )
        check_outcome(updates, params)
        outcome = apply_updates(params, updates)
        if overwrites:
            outcome = overwrite(outcome, grads, params)
            verdict_state = self.find_verdict_state("apply_gradients", state)
            if verdict_state is not None:
                outcome = tree_where(verdict_state.step_applied, outcome, params)
        return outcome, state


Optimizer = WrappedOptimizer | BareOptimizer


def holds_loss_scaled(state: Any) -> bool:
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
        f"`{call}`: the `loss_scaled` optimizer is inside of another one, whose state and updates "
        "a bad step can corrupt for good, and whose changes `master_weights` and "
        "`stochastic_rounding` never see. Make it the outermost: write `loss_scaled(outer(inner))` "
        "for `outer(loss_scaled(inner))`, as with `optax.chain`, `masked`, `partition`, `flatten`, "
        "`inject_hyperparams` and `MultiSteps`. For `apply_if_finite(loss_scaled(inner))` write "
        "`loss_scaled(inner)`."
    )


def as_optimizer(call: str, tx: Any) -> Optimizer:
    """Returns an optimizer, wrapped or bare, or raises a `TypeError` if it is not one."""
    wrapped = find_wrapped_optimizer(tx)
    if wrapped is not None:
        return wrapped
    return BareOptimizer(as_transformation(f"{call}(tx, ...)", tx))


def apply_step(
    optimizer: Optimizer,
    opt_state: Any,
    params: Any,
    result: BackwardResult,
    extra_args: Mapping[str, Any] = NO_ARGS,
) -> tuple[Any, Any]:
    """Applies a backward pass: returns the parameters and the state after one step.

    The state was checked.
    """
    # Leaves without a gradient go around the step, as only arrays can be selected and compiled.
    trained = trained_params(params, result.grads.grads)
    trained, state = optimizer.apply(result, opt_state, trained, extra_args)
    return combine(trained, params), state


def apply_users_gradients(
    argument: str,
    optimizer: Optimizer,
    opt_state: Any,
    params: Any,
    result: BackwardResult,
    extra_args: Mapping[str, Any],
) -> tuple[Any, Any]:
    """Does what `apply_step` does, and checks the gradients, which are an `argument` of a call."""
    call = argument.partition("(")[0]
    trees = StepTrees(
        argument, result.grads.grads, params, f"{call}(opt_state=...)", opt_state
    )
    with explaining_mismatch(trees, optimizer):
        return apply_step(optimizer, opt_state, params, result, extra_args)
