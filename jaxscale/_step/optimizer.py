"""An optimizer as a training step sees it: a `Wrapper` of `loss_scaled`, or `Bare`.

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
from .._trees.tree import (
    apply_updates,
    combine,
    holds_overwrites,
    overwrite,
    trained_params,
    tree_where,
    zero_overwrites,
)
from .checks import as_transformation, check_grads, check_outcome, explaining_trees, types_of
from .retry import BackwardResult
from .wrapper import NO_ARGS, Wrapper, call_update, wrapper_of


@dataclasses.dataclass(frozen=True)
class Bare:
    """An optimizer that `loss_scaled` has not wrapped; it applies every step. See `Wrapper`."""

    tx: optax.GradientTransformationExtraArgs

    axis_name = policy = None
    skips = can_back_off = False

    def expected_types(self, params: Any) -> Any:
        return types_of(jax.eval_shape(self.tx.init, params))

    def check_state(self, given: str, state: Any, order: str) -> Any:
        if isinstance(state, LossScaledState):
            raise TypeError(
                f"`{given}` is a `LossScaledState`, but `tx` is a bare optimizer. Pass the one "
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

    def find_verdict(self, call: str, state: Any) -> LossScaledState | None:
        nodes = jax.tree.leaves(state, is_leaf=is_loss_scaled)
        return find_optimizer_state(call, state) if any(map(is_loss_scaled, nodes)) else None

    def judge(self, *args: Any) -> None:
        """Returns no verdict: every step is applied."""

    def apply(
        self, made: BackwardResult, state: Any, params: Any, extra_args: Mapping[str, Any]
    ) -> tuple[Any, Any]:
        new, overwrites = made.grads.divided, holds_overwrites(made.grads.grads)
        seen = zero_overwrites(new) if overwrites else new
        updates, state = call_update(self.tx, seen, state, params, made.loss, extra_args)
        check_outcome(updates, params)
        outcome = apply_updates(params, updates)
        if overwrites:
            outcome = overwrite(outcome, new, params)
            if (verdict := self.find_verdict("apply_gradients", state)) is not None:
                outcome = tree_where(verdict.step_applied, outcome, params)
        return outcome, state


Optimizer = Wrapper | Bare


def as_optimizer(call: str, tx: Any) -> Optimizer:
    """Returns an optimizer, wrapped or bare, or raises a `TypeError` if it is not one."""
    return wrapper_of(tx) or Bare(as_transformation(f"{call}(tx, ...)", tx))


def apply_step(
    optimizer: Optimizer,
    opt_state: Any,
    params: Any,
    made: BackwardResult,
    extra_args: Mapping[str, Any] = NO_ARGS,
    *,
    given: str = "",
) -> tuple[Any, Any]:
    """Returns the parameters and the state after one step, given a state that was checked.

    Gradients that were `given` by the user are checked, too.
    """
    if given:
        check_grads(given, made.grads.grads, params)
        state_given = f"{given.partition('(')[0]}(opt_state=...)"
        with explaining_trees(given, state_given, optimizer, made.grads.grads, opt_state, params):
            return apply_step(optimizer, opt_state, params, made, extra_args)
    # Leaves without a gradient go around the step, as only arrays can be selected and compiled.
    trained = trained_params(params, made.grads.grads)
    trained, state = optimizer.apply(made, opt_state, trained, extra_args)
    return combine(trained, params), state
