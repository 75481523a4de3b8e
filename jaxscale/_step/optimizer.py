"""An optimizer as a training step sees it: wrapped by `loss_scaled`, or bare.

Both answer the same questions: what their state is to be, which scale a backward pass starts with,
whether a step may be skipped, and what it comes to.
"""

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any

import jax
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
        return types_of(jax.eval_shape(self.tx.init, params))

    def check_state(self, argument: str, state: Any, order: str) -> Any:
        if isinstance(state, LossScaledState):
            raise TypeError(
                f"`{argument}` is a `LossScaledState`, but `tx` is a bare optimizer. Pass the one "
                "that `loss_scaled` returned, or `opt_state.inner_state` to go on without it."
            )
        return state

    def find_start_scale(self, call: str, state: Any) -> Any:
        """Returns the scale state of a `loss_scaled` optimizer inside of this one, if any."""
        if not any(map(is_scaling, jax.tree.leaves(state, is_leaf=is_scaling))):
            return None
        scaling = find_scale(call, "opt_state", state)
        warnings.warn(
            f"`{call}`: the `loss_scaled` optimizer is inside of another one, whose state a bad "
            "step may ruin for good. Wrap outermost: `tx = loss_scaled(tx)`.",
            stacklevel=4,
        )
        return scaling

    def find_verdict_state(self, call: str, state: Any) -> LossScaledState | None:
        nodes = jax.tree.leaves(state, is_leaf=is_loss_scaled)
        if not any(map(is_loss_scaled, nodes)):
            return None
        return find_optimizer_state(call, state)

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
