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
from .._trees.leaf import is_array_like
from .._trees.tree import (
    apply_updates,
    combine,
    holds_overwrites,
    overwrite,
    trained_params,
    tree_where,
    zero_overwrites,
)
from .checks import as_transformation, check_grads, check_outcome, explain_structures
from .retry import BackwardResult
from .wrapped_optimizer import (
    NO_ARGS,
    TreeTypes,
    WrappedOptimizer,
    call_update,
    types_of,
    wrapped_optimizer,
)


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

    def scale_state(self, call: str, state: Any) -> Any:
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
    wrapped = wrapped_optimizer(tx)
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
    grads = result.grads.grads
    check_grads(argument, grads, params)
    try:
        return apply_step(optimizer, opt_state, params, result, extra_args)
    except (TypeError, ValueError) as error:
        # Some optimizers do take gradients of another structure. So ask only if one has failed.
        reason = explain_structures(argument, grads, params)
        if not reason:
            raise
        raise ValueError(reason) from error


def check_same_optimizer(
    argument: str,
    optimizer: Optimizer,
    opt_state: Any,
    params: Any,
    way_out: str = "Pass the state that `init` of this optimizer returned for these parameters.",
) -> None:
    """Raises a `ValueError` if a state is not like the one that `tx.init(params)` makes."""
    if not all(map(is_array_like, jax.tree.leaves(params))):
        return  # for such parameters `init` saw only a part of them, and which is not known
    try:
        expected = optimizer.expected_types(params)
    except Exception:  # an `init` that needs values cannot be asked here
        return
    state = opt_state
    if is_loss_scaled(opt_state):
        state = opt_state.inner_state
    difference = _explain_difference(state, expected)
    if difference:
        raise ValueError(
            f"`{argument}` is the state of another optimizer or of other parameters. "
            f"`tx.init(params)` {difference}. {way_out}"
        )


def _explain_difference(state: Any, expected: TreeTypes) -> str:
    """Returns what `init` makes and what a state has instead, empty if they are alike."""
    types = types_of(state)
    if types.structure != expected.structure:
        return f"makes {expected.structure}, got {types.structure}"
    leaves = jax.tree_util.tree_leaves_with_path(state)
    triples = zip(leaves, types.leaves, expected.leaves, strict=True)
    for (path, _), (shape, _), (expected_shape, _) in triples:
        # A scalar may have been replaced by numbers of the user's own, such as learning rates.
        if expected_shape and shape != expected_shape:
            place = jax.tree_util.keystr(path)
            return f"makes an array of shape {expected_shape} at {place}, got one of shape {shape}"
    return ""
