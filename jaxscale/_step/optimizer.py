"""An optimizer as a training step sees it: wrapped by `loss_scaled`, or bare.

`as_optimizer` asks which of the two it is, once, at the door of every step. A `Wrapper` and a
`Bare` optimizer then answer the same questions: what their state is to be, which scale a backward
pass starts with, whether a step may be skipped, and what it comes to.
"""

import dataclasses
import warnings
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import optax

from .._gradients.scaled import Scaled
from .._state.find import find, find_scale_or_none, is_loss_scaled
from .._state.optimizer import LossScaledState
from .._trees.checks import explain_errors
from .._trees.leaf import is_array_like
from .._trees.overwrite import holds_overwrites, overwrite, zero_overwrites
from .._trees.tree import apply_updates, combine, partition, tree_where
from .inner import with_loss
from .retry import BackwardResult
from .wrapper import Wrapper, types_of, wrapper_of


@dataclasses.dataclass(frozen=True)
class Bare:
    """An optimizer of Optax that `loss_scaled` has not wrapped. It applies every step."""

    tx: Any

    axis_name = policy = None
    skips = can_back_off = False

    def init(self, params: Any) -> Any:
        return self.tx.init(params)

    def inner_state(self, state: Any) -> Any:
        """Returns the part of a state that belongs to the optimizer itself."""
        return state

    def expected_types(self, params: Any) -> Any:
        """Returns the structure and the types of that part for some parameters."""
        return types_of(jax.eval_shape(self.init, params))

    def check_state(self, given: str, state: Any, order: str) -> Any:
        """Returns the state that a step was given, or raises an error; see `Wrapper`."""
        del order
        if isinstance(state, LossScaledState):
            raise TypeError(
                f"`{given}` is a `LossScaledState`, but `tx` is a bare optimizer. Pass the one "
                "that `loss_scaled` returned, or `opt_state.inner_state` to go on without it."
            )
        return state

    def scale_state(self, call: str, state: Any) -> Any:
        """Returns the scale state of a `loss_scaled` optimizer inside of this one, if any."""
        scaling = find_scale_or_none(call, state)
        if scaling is not None:
            warnings.warn(
                f"`{call}`: the `loss_scaled` optimizer is inside of another one, whose state a "
                "bad step may ruin for good. Wrap outermost: `tx = loss_scaled(tx)`.",
                stacklevel=4,
            )
        return scaling

    def judge(self, *args: Any) -> None:
        """Returns no verdict: every step is applied."""
        del args

    def apply(
        self,
        grads: Scaled,
        state: Any,
        params: Any,
        value: Any = None,
        extra_args: Mapping[str, Any] = MappingProxyType({}),
        verdict: Any = None,
        retries: Any = None,
    ) -> tuple[Any, Any]:
        """Returns the parameters after one step, and the next state; see `Wrapper`."""
        del retries
        tx = self.tx
        tx = tx.gradient_transformation() if isinstance(tx, optax.MultiSteps) else tx
        update = optax.with_extra_args_support(tx).update
        extra_args = with_loss(update, value, extra_args)
        new, overwrites = grads.divided, holds_overwrites(grads.grads)
        with explain_errors():
            seen = zero_overwrites(new) if overwrites else new
            updates, state = update(seen, state, params, **extra_args)
        outcome = apply_updates(params, updates)
        if overwrites:
            outcome = overwrite(outcome, new, params)
            verdict = self.find_verdict("apply_gradients", state)
            if verdict is not None:
                outcome = tree_where(verdict.step_applied, outcome, params)
        return outcome, state

    def find_verdict(self, call: str, state: Any) -> LossScaledState | None:
        """Returns the state that tells whether a step was applied, if there is one inside."""
        nodes = jax.tree.leaves(state, is_leaf=is_loss_scaled)
        if not any(map(is_loss_scaled, nodes)):
            return None
        return find(call, state, is_loss_scaled, "`LossScaledState`")


Optimizer = Wrapper | Bare


def as_optimizer(call: str, tx: Any) -> Optimizer:
    """Returns an optimizer, wrapped or bare, or raises a `TypeError` if it is not one.

    Args:
      call: the public function, for the message.
      tx: what was passed as the optimizer.
    """
    # An `optax.MultiSteps` has `init` and `update`, but is not a transformation.
    if not isinstance(tx, (optax.GradientTransformation, optax.MultiSteps)):
        raise TypeError(
            f"`{call}(tx, ...)`: `tx` must be an `optax.GradientTransformation`, got "
            f"{tx!r}. Call the function that makes it, as in `optax.adamw(1e-3)`."
        )
    return wrapper_of(tx) or Bare(tx)


def apply_step(
    optimizer: Optimizer,
    opt_state: Any,
    params: Any,
    made: BackwardResult,
    extra_args: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[Any, Any]:
    """Returns the parameters and the state after one step.

    Args:
      optimizer: the optimizer.
      opt_state: its state, checked.
      params: the parameters.
      made: the backward pass, with its verdict if it is known.
      extra_args: further arguments of the optimizer.
    """
    # Leaves without a gradient go around the step, as only arrays can be selected and compiled.
    trained, rest = partition(params, made.grads.grads)
    trained, state = optimizer.apply(
        made.grads, opt_state, trained, made.loss, extra_args, made.verdict, made.retries
    )
    return combine(trained, rest), state


def check_same_optimizer(
    given: str,
    optimizer: Optimizer,
    opt_state: Any,
    params: Any,
    way: str = "Pass the state that `init` of this optimizer returned for these parameters.",
) -> None:
    """Raises a `ValueError` if a state is not like the one that `tx.init(params)` makes.

    Args:
      given: the step and its argument, for the message.
      optimizer: the optimizer.
      opt_state: what was passed as its state, checked.
      params: the parameters.
      way: the way out, for the message.
    """
    if not all(map(is_array_like, jax.tree.leaves(params))):
        return  # for such parameters `init` saw only a part of them, and which is not known
    try:
        expected, types = optimizer.expected_types(params)
    except Exception:  # an `init` that needs values cannot be asked here
        return
    state = optimizer.inner_state(opt_state)
    structure, got_types = types_of(state)
    if structure != expected:
        makes, got = map(str, (expected, structure))
    else:
        shapes = [(a, b) for (a, _), (b, _) in zip(types, got_types, strict=True)]
        # A scalar may have been replaced by numbers of the user's own, such as learning rates.
        others = [i for i, (a, b) in enumerate(shapes) if a and a != b]
        if not others:
            return
        path, _ = jax.tree_util.tree_leaves_with_path(state)[others[0]]
        makes = f"an array of shape {shapes[others[0]][0]} at {jax.tree_util.keystr(path)}"
        got = f"one of shape {shapes[others[0]][1]}"
    raise ValueError(
        f"`{given}` is the state of another optimizer or of other parameters. `tx.init(params)` "
        f"makes {makes}, got {got}. {way}"
    )
