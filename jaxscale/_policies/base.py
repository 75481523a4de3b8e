"""The base class of all policies: how a loss scale starts, and how it moves.

`LossScale.update` is what a training step calls: it decides whether the gradients are
finite and leaves the rest to `adjust`, which each policy defines. `get_config` and
`from_config` come from the fields of the dataclass.
"""

import abc
import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any, Self

import jax

from .._state import LossScaleState, Scaled, policy_state
from .._verdict import all_finite, largest


class LossScale(abc.ABC):
    """How a loss scale starts and how it moves: a policy.

    Loss scaling multiplies the backward pass of a network by a number, the loss scale,
    and divides the gradients by it again. In exact arithmetic that changes nothing; in
    float16 it keeps small gradients from becoming zero.

    A policy is a frozen dataclass of Python values, checked once when it is made. It is
    hashable and not a pytree; what changes from step to step is in the
    `jaxscale.LossScaleState` that `init` returns. To write your own, derive a frozen
    dataclass from this class and define `init` and `adjust`. If its state needs other
    fields, write a `NamedTuple` with a field `loss_scale`, and mark it by a line in its
    body, without an annotation: `is_loss_scale_state = True`.

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
      The interface is that of TensorFlow's
      `tf.train.experimental.LossScale`.
    """

    @abc.abstractmethod
    def init(self) -> LossScaleState:
        """Returns the initial state."""

    @abc.abstractmethod
    def adjust(
        self,
        state: LossScaleState,
        grads_finite: jax.Array,
        *,
        grads: Any = None,
        axis_name: Any = None,
    ) -> LossScaleState:
        """Returns the state of the next step, given whether the gradients were finite.

        Call this instead of `update` if you already know whether they were. A policy of
        your own may leave out `grads` and `axis_name` if it does not look at the gradients. If
        all that it looks at is the largest of them, let it take a keyword argument `largest`,
        too: it then gets that in their place, an `f32[]` that comes from the same pass as the
        verdict.

        Args:
          state: the state of this step.
          grads_finite: a `bool[]`, whether the gradients of this step were finite, on
            all devices.
          grads: the gradients, unscaled, for a policy that looks at the gradients
            themselves.
          axis_name: as in `jaxscale.all_finite`, for such a policy.

        Returns:
          The next state, with the shapes and dtypes of `state`.

        Raises:
          TypeError: if `grads_finite` is not a scalar bool.
        """

    def update(
        self, state: LossScaleState, grads: Any, *, axis_name: Any = None
    ) -> tuple[LossScaleState, jax.Array]:
        """Returns the state of the next step, and whether to apply the gradients.

        Args:
          state: the state of this step, with which the gradients were scaled.
          grads: a pytree of gradients, unscaled. `None` is accepted and ignored.
          axis_name: as in `jaxscale.all_finite`.

        Returns:
          The next state, with the shapes and dtypes of `state`, and a `bool[]`: if it is
          `False`, the gradients are not finite and the step must be skipped.

        Raises:
          TypeError: if `state` is the state of an optimizer, or was passed second.
          ValueError: if it is the state of a population: call this under `jax.vmap`.
        """
        state = policy_state(f"{type(self).__name__}.update", state, grads=grads)
        size = largest(Scaled(grads), axis_name) if takes_largest(self) else None
        if size is None:
            grads_finite = all_finite(grads, axis_name=axis_name)
        else:
            grads_finite = jax.lax.is_finite(size)
        return moved(self, state, grads_finite, Scaled(grads), size, axis_name), grads_finite

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments that make this policy again, as JSON types."""
        policy: Any = self  # every subclass is a dataclass, which the type does not say
        return dataclasses.asdict(policy)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Returns the policy that `get_config` describes.

        Args:
          config: a mapping from argument names to values; a missing argument takes its
            default.

        Returns:
          A policy of the class on which this is called.

        Raises:
          TypeError: if a key is not an argument of the class, or if the class is the
            abstract base class.
          ValueError: if a value is out of range.
        """
        if not dataclasses.is_dataclass(cls):
            raise TypeError(
                f"`{cls.__name__}.from_config` needs a policy that is a dataclass. Call it "
                "on the class whose `get_config` wrote this, such as `DynamicLossScale`."
            )
        known = [field.name for field in dataclasses.fields(cls) if field.init]
        unknown = sorted(set(config) - set(known))
        if unknown:
            raise TypeError(
                f"`{cls.__name__}.from_config(config)` got unknown keys "
                f"{', '.join(map(repr, unknown))}. It takes {', '.join(known)}."
            )
        return cls(**config)


def takes_largest(policy: LossScale) -> bool:
    """Returns whether `policy.adjust` takes the largest gradient."""
    return "largest" in inspect.signature(policy.adjust).parameters


def takes_gradients(policy: LossScale) -> bool:
    """Returns whether `policy.adjust` takes the gradients themselves."""
    parameters = inspect.signature(policy.adjust).parameters.values()
    return any(p.name == "grads" or p.kind is p.VAR_KEYWORD for p in parameters)


def moved(
    policy: LossScale,
    state: Any,
    grads_finite: jax.Array,
    grads: Scaled,
    largest: jax.Array | None,
    axis_name: Any,
) -> Any:
    """Returns what `policy.adjust` does, with what it takes of the gradients.

    Args:
      policy: the policy.
      state: its state.
      grads_finite: the verdict.
      grads: the gradients.
      largest: the largest of them on all devices, unscaled, for a policy that takes it. `None` if
        there are no gradients.
      axis_name: as in `jaxscale.all_finite`.
    """
    adjust: Any = policy.adjust  # of a policy that takes more than the base class says
    if largest is not None:
        return adjust(state, grads_finite, largest=largest)
    if takes_gradients(policy):
        # By the reciprocal: they would be stored if they were divided as the verdict divides.
        unscaled = grads.unscale(grads.grads)
        return adjust(state, grads_finite, grads=unscaled, axis_name=axis_name)
    return adjust(state, grads_finite)
