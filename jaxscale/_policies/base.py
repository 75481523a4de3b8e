"""The base class of all policies: how a loss scale starts, and how it moves."""

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any, Self

import jax

from .._state import LossScaleState, policy_state
from .._verdict import all_finite


class LossScale(abc.ABC):
    """How a loss scale starts and how it moves: a policy.

    Loss scaling multiplies what flows backward through a network by a number, the loss
    scale, and divides the gradients by it again. In exact arithmetic that changes
    nothing; in float16 it keeps small gradients from becoming zero.

    A policy is a frozen dataclass of Python values, checked once when it is made. It is
    hashable and no pytree; what changes from step to step is in the
    `jaxscale.LossScaleState` that `init` returns. A policy of your own is a
    frozen dataclass that derives from this class and defines `init` and
    `adjust`. If its state is of a type of its own, that is a `NamedTuple` with a
    field `loss_scale`, marked as such by a line in its body, without an annotation:
    `is_loss_scale_state = True`.

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
        """Returns the state before the first step."""

    @abc.abstractmethod
    def adjust(self, state: LossScaleState, grads_finite: jax.Array) -> LossScaleState:
        """Returns the state of the next step, for who has the verdict already.

        Args:
          state: the state of this step.
          grads_finite: a `bool[]`, whether the gradients of this step were finite.

        Returns:
          The next state, with the avals of `state`.

        Raises:
          TypeError: if `grads_finite` is not a scalar bool.
        """

    def observe(
        self, state: Any, grads: Any, grads_finite: jax.Array, *, axis_name: Any = None
    ) -> Any:
        """Returns the state of the next step, from the gradients and their verdict.

        What `jaxscale.loss_scaled` calls. A policy that looks at more than the
        verdict overrides this; for all others it is `adjust`.

        Args:
          state: the state of this step.
          grads: the gradients of this step, unscaled.
          grads_finite: a `bool[]`, whether they were finite, on all devices.
          axis_name: as in `jaxscale.all_finite`.

        Returns:
          The next state, with the avals of `state`.
        """
        del grads, axis_name
        return self.adjust(state, grads_finite)

    def update(
        self, state: LossScaleState, grads: Any, *, axis_name: Any = None
    ) -> tuple[LossScaleState, jax.Array]:
        """Returns the state of the next step, and whether to apply the gradients.

        Args:
          state: the state of this step, which the gradients were scaled with.
          grads: a pytree of gradients, unscaled. `None` is accepted and ignored.
          axis_name: as in `jaxscale.all_finite`.

        Returns:
          The next state, with the avals of `state`, and a `bool[]`: if it is
          `False`, the gradients are not finite and the step must be skipped.

        Raises:
          TypeError: if `state` is that of an optimizer, or comes second.
          ValueError: if it is that of a population: call this under `jax.vmap`.
        """
        state = policy_state(f"{type(self).__name__}.update", state, grads=grads)
        grads_finite = all_finite(grads, axis_name=axis_name)
        return self.observe(state, grads, grads_finite, axis_name=axis_name), grads_finite

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments that make this policy again, as JSON types."""
        policy: Any = self  # of a subclass, and those are dataclasses
        return dataclasses.asdict(policy)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Returns the policy that `get_config` describes.

        Args:
          config: a mapping from argument names to values; what is left out takes its
            default.

        Returns:
          A policy of the class that this is called on.

        Raises:
          TypeError: if a key is no argument of the class, or if it is the base class.
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
