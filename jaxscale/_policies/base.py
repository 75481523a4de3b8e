"""The base classes of policies: `LossScale`, and `CheckedLossScale` for those of this library."""

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp

from .._gradients.scaled import Scaled
from .._gradients.verdict import all_finite
from .._gradients.verdict import largest as largest_of
from .._jax import AxisNames
from .._state.find import is_scaling
from .._state.optimizer import LossScaledState
from .._state.scale import LossScaleState, check_alone, is_wrapped, unwrap
from .._trees.arguments import Check, check_fields, normal_float32
from .._trees.numbers import SMALLEST_NORMAL
from .._trees.pytrees import Grads, PyTree, ScaleState
from .._trees.selection import scalar_bool


class LossScale(abc.ABC):
    """A policy: the first loss scale, and the rule by which it moves.

    Loss scaling multiplies the backward pass of a network by a number, the loss scale, and divides
    the gradients by it again. In exact arithmetic that changes nothing; in float16 it keeps small
    gradients from becoming zero.

    A policy is a frozen dataclass of Python values, checked once when it is made. It is hashable
    and not a pytree; what changes from step to step is in the `jaxscale.LossScaleState` that `init`
    returns. To write your own, derive a frozen dataclass from this class and define `init` and
    `adjust`. If its state needs other fields, write a `NamedTuple` with a field `loss_scale`, and
    mark it with a line in its body, without an annotation: `is_loss_scale_state = True`. If the
    rule depends on the size of the gradients, write `needs_largest = True` in the class. Then
    `adjust` gets the largest gradient, which comes from the same pass as the verdict.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxscale
      >>> loss_scale = jaxscale.DynamicLossScale()
      >>> state = loss_scale.init()
      >>> state, should_apply = loss_scale.update(state, {"w": jnp.array(jnp.inf)})
      >>> state.loss_scale, should_apply
      (Array(16384., dtype=float32), Array(False, dtype=bool))

    References:
      Micikevicius et al., Mixed Precision Training, 2017, https://arxiv.org/abs/1710.03740.
      The interface is that of TensorFlow's `tf.train.experimental.LossScale`.
    """

    # Whether `adjust` is given the largest gradient.
    needs_largest: ClassVar[bool] = False

    @abc.abstractmethod
    def init(self) -> LossScaleState:
        """Returns the initial state."""

    @abc.abstractmethod
    def adjust(
        self,
        state: LossScaleState,
        grads_finite: jax.Array,
        largest: jax.Array | None = None,
    ) -> LossScaleState:
        """Returns the state of the next step, given whether the gradients were finite.

        Call this instead of `update` if you know whether they were. The next state has the shapes
        and dtypes of `state`. A policy must take `largest` only if it has `needs_largest = True`.

        Args:
          state: the state of this step.
          grads_finite: a `bool[]`, whether the gradients of this step were finite, on all devices.
          largest: an `f32[]`, the largest absolute value among the unscaled gradients of all
            devices, for a policy that needs it. `None` if it is not known, or if there are no
            gradients.

        Raises:
          TypeError: if `grads_finite` is not a scalar bool, or if `state` is that of another
            policy.
          ValueError: if `state` is the state of a population: call this under `jax.vmap`.
        """

    def update(
        self, state: LossScaleState, grads: Grads, *, axis_name: AxisNames = None
    ) -> tuple[LossScaleState, jax.Array]:
        """Returns the state of the next step, and whether to apply the gradients.

        Args:
          state: the state of this step, with which the gradients were scaled.
          grads: a pytree of gradients, unscaled. `None` is accepted and ignored.
          axis_name: as in `jaxscale.all_finite`.

        Returns:
          The next state, with the shapes and dtypes of `state`, and a `bool[]`. If the `bool[]` is
          `False`, the gradients are not finite and the step must be skipped.

        Raises:
          TypeError: if `state` is the state of an optimizer, or was passed second.
          ValueError: if it is the state of a population: call this under `jax.vmap`.
        """
        state = check_policy_state(f"{type(self).__name__}.update", state, grads=grads)
        largest = None
        if self.needs_largest:
            largest = largest_of(Scaled(grads), axis_name)
        if largest is None:
            grads_finite = all_finite(grads, axis_name=axis_name)
        else:
            grads_finite = jax.lax.is_finite(largest)
        return adjust_scale(self, state, grads_finite, largest), grads_finite

    def clip_to_bounds(self, state: ScaleState) -> Any:
        """Returns a state with a scale that this policy may have, if a restored one is not such.

        A policy of the user's own keeps what it gets, as its range is not known.
        """
        return state

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments from which this policy can be made again, as JSON types."""
        policy: Any = self  # every subclass is a dataclass, which the type does not say
        return dataclasses.asdict(policy)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Returns the policy of this class that `get_config` describes.

        A missing argument takes its default; an unknown one is a `TypeError`.
        """
        return cls(**config)


def adjust_scale(
    policy: LossScale,
    state: ScaleState,
    grads_finite: jax.Array,
    largest: jax.Array | None,
) -> Any:
    """Calls `policy.adjust`, with the largest gradient only if the policy needs that."""
    if policy.needs_largest:
        return policy.adjust(state, grads_finite, largest=largest)
    return policy.adjust(state, grads_finite)


def check_policy_state(
    call: str, state: PyTree, kind: type = object, grads: Grads = None
) -> Any:
    """Returns the state that a policy was given, as arrays, or raises a `TypeError`.

    The `grads` that came with it tell whether the arguments were swapped.
    """
    are_swapped = grads is not None and is_scaling(grads) and not is_scaling(state)
    holds_state = isinstance(state, LossScaledState) or hasattr(state, "opt_state")
    if isinstance(state, kind) and not are_swapped and not holds_state:
        if is_wrapped(getattr(state, "loss_scale", None)):
            state = unwrap(state)
        check_alone(f"{call}(state=...)", state)
        return state
    if are_swapped:
        hint = "The order of the arguments is (state, grads)."
    elif holds_state:
        hint = (
            "Pass `opt_state.scaling`, or call `tx.update`, which moves the scale too."
        )
    else:
        hint = (
            "Pass what the policy's `init`, or its last step, returned. To take over the state of "
            "another policy, use `jaxscale.from_state_dict(policy.init(), "
            "jaxscale.to_state_dict(state))`."
        )
    expected = "the state of a policy" if kind is object else f"a `{kind.__name__}`"
    raise TypeError(
        f"`{call}(state=...)` must be {expected}, got {type(state).__name__}. {hint}"
    )


class CheckedLossScale(LossScale):
    """A policy whose arguments are checked by name, and whose `adjust` checks what it gets.

    A subclass is a frozen dataclass with fields `init_scale`, `min_scale` and `max_scale`. It
    defines `init`, and `_move` in the place of `adjust`.
    """

    init_scale: float
    min_scale: float
    max_scale: float
    # For each argument the function that checks it and returns it.
    _checks: ClassVar[dict[str, Check]] = dict.fromkeys(
        ("init_scale", "min_scale", "max_scale"), normal_float32
    )

    def __post_init__(self) -> None:
        call = type(self).__name__
        check_fields(self, self._checks)
        for names in self._list_ascending():
            values = [getattr(self, name) for name in names]
            if values != sorted(values):
                *others, last = map(str, values)
                raise ValueError(
                    f"`{call}` needs {' <= '.join(names)}, got {', '.join(others)} and {last}."
                )

    def _list_ascending(self) -> tuple[tuple[str, ...], ...]:
        """Returns rows of arguments. In a row none may be above the next."""
        return (("min_scale", "init_scale", "max_scale"),)

    def adjust(
        self,
        state: LossScaleState,
        grads_finite: jax.Array,
        largest: jax.Array | None = None,
    ) -> LossScaleState:
        call = f"{type(self).__name__}.adjust"
        grads_finite = scalar_bool(call, "grads_finite", grads_finite)
        state = check_policy_state(call, state, LossScaleState)
        return self._move(self.clip_to_bounds(state), grads_finite)

    def clip_to_bounds(self, state: ScaleState) -> Any:
        """Returns a state whose scale is between the bounds.

        A state may come from a checkpoint of another scaler, whose scale had run away. A scale of
        0, inf or NaN is that of the first step. A subnormal number counts as 0, as most devices
        flush it.
        """
        scale = jnp.asarray(state.loss_scale, jnp.float32)
        is_usable = jnp.isfinite(scale) & (scale >= SMALLEST_NORMAL)
        scale = jnp.where(is_usable, scale, self.init_scale)
        # Some presets may start outside of their bounds, as their libraries do.
        lowest = jnp.minimum(self.min_scale, self.init_scale)
        highest = jnp.maximum(self.max_scale, self.init_scale)
        return state._replace(loss_scale=jnp.clip(scale, lowest, highest))

    @abc.abstractmethod
    def _move(self, state: ScaleState, grads_finite: jax.Array) -> Any:
        """Returns the next state, given one that is checked and whose scale is in range."""


def new_state(kind: type, **numbers: float) -> Any:
    """Returns an initial state: floats become `f32[]`, integers `i32[]`.

    Counters that are not named start at 0. Each number is in a buffer of its own: a state that
    holds one twice cannot be donated.
    """
    fields = {}
    for name in kind._fields:
        number = numbers.get(name, 0)
        dtype = jnp.float32 if isinstance(number, float) else jnp.int32
        fields[name] = jnp.array(number, dtype)
    return kind(**fields)
