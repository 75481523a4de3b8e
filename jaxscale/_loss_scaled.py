"""The optax wrapper: it never lets a non-finite gradient through, and moves the scale."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ._loss_scale import LossScale
from ._skip import step_if
from ._spec import as_loss_scale
from ._state import LossScaleState
from ._tree import (
    agree,
    all_finite,
    apply_updates,
    cast,
    cast_like,
    check_same_structure,
    map_gradients,
    tree_where,
    widen,
)


class LossScaledState(NamedTuple):
    """What :func:`loss_scaled` carries from one step to the next.

    Attributes:
      scaling: the state of the loss scale.
      inner_state: the state of the wrapped transformation.
      grads_finite: ``bool[]``, whether the last step was applied.
      notfinite_count: ``i32[]``, steps skipped in a row, up to now.
      total_notfinite: ``i32[]``, steps skipped since ``init``.
      total_notfinite_loss: ``i32[]``, those of them whose loss itself was not finite.
      total_steps: ``i32[]``, steps since ``init``, skipped or not.
      nonfinite_leaves: ``None``; kept for which leaves the last overflow was in.

    Counters stay at their largest value instead of wrapping around.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> import jaxscale
      >>> jaxscale.loss_scaled(optax.sgd(0.1)).init(jnp.zeros(2)).total_steps
      Array(0, dtype=int32)
    """

    scaling: LossScaleState
    inner_state: optax.OptState
    grads_finite: jax.Array  # bool[]
    notfinite_count: jax.Array  # i32[]
    total_notfinite: jax.Array  # i32[]
    total_notfinite_loss: jax.Array  # i32[]
    total_steps: jax.Array  # i32[]
    nonfinite_leaves: Any = None


def loss_scaled(
    inner: optax.GradientTransformation,
    loss_scale: Any = "dynamic",
    *,
    axis_name: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """Returns a transformation that skips non-finite steps and moves the loss scale.

    Wrap the whole optimizer: clipping, weight decay, schedules and accumulation go
    inside. Feed it the gradients of :func:`jaxscale.value_and_grad`, which are unscaled.

    If all gradients are finite, the step is that of ``inner``. If any is not, nothing
    changes but the loss scale and the counters: the updates are zero and ``inner`` keeps
    its state, however many steps are skipped in a row.

    Args:
      inner: the transformation to wrap. It sees float32 (or wider) gradients and, where
        parameters are float16 or bfloat16, float32 views of them.
      loss_scale: a policy, or what :func:`jaxscale.as_loss_scale` accepts for one.
      axis_name: as in :func:`jaxscale.all_finite`, inside ``shard_map`` and ``pmap``.

    Returns:
      A :class:`optax.GradientTransformationExtraArgs` whose state is a
      :class:`jaxscale.LossScaledState`. Its ``update(grads, state, params=None, *,
      value=None, **extra_args)`` hands extra arguments to ``inner`` untouched. Pass the
      loss as ``value``, and a step whose loss itself is not finite is skipped and counted
      without lowering the scale, which is not to blame then. Update and state have the
      same avals after each step.

    Raises:
      TypeError: if ``inner`` is no gradient transformation or ``loss_scale`` no policy.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> import jaxscale
      >>> tx = jaxscale.loss_scaled(optax.sgd(0.5))
      >>> params = {"w": jnp.array(1.0)}
      >>> state = tx.init(params)
      >>> updates, state = tx.update({"w": jnp.array(jnp.inf)}, state, params)
      >>> print(optax.apply_updates(params, updates)["w"], state.scaling.loss_scale)
      1.0 16384.0
      >>> updates, state = tx.update({"w": jnp.array(1.0)}, state, params)
      >>> print(optax.apply_updates(params, updates)["w"], state.total_notfinite)
      0.5 1
    """
    rule = LossScaled(_as_transformation(inner), as_loss_scale(loss_scale), axis_name)
    return optax.GradientTransformationExtraArgs(rule.init, rule.update)


def skip_nonfinite(
    inner: optax.GradientTransformation, *, axis_name: Any = None
) -> optax.GradientTransformationExtraArgs:
    """Returns a transformation that skips non-finite steps, without any scaling.

    For bfloat16 and float32, where gradients do not underflow but a bad batch may still
    ruin a run. Unlike ``optax.apply_if_finite`` it never gives up.

    Args:
      inner: the transformation to wrap, as in :func:`loss_scaled`.
      axis_name: as there.

    Returns:
      ``loss_scaled(inner, None)``.

    Raises:
      TypeError: if ``inner`` is no gradient transformation.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> import jaxscale
      >>> tx = jaxscale.skip_nonfinite(optax.adam(0.1))
      >>> params = jnp.array(1.0)
      >>> updates, state = tx.update(jnp.array(jnp.nan), tx.init(params), params)
      >>> print(params + updates, state.total_notfinite)
      1.0 1
    """
    return loss_scaled(inner, None, axis_name=axis_name)


@dataclasses.dataclass(frozen=True)
class LossScaled:
    """The two functions of :func:`loss_scaled`, and ``apply``: update and apply in one skip."""

    inner: optax.GradientTransformationExtraArgs
    policy: LossScale
    axis_name: Any

    def init(self, params: optax.Params) -> LossScaledState:
        # Of float32 views, as `update` will show them, so that moments keep their dtype;
        # and strongly typed, as what starts from a Python number is not.
        inner_state = self.inner.init(map_gradients(widen, params))
        return LossScaledState(
            scaling=self.policy.init(),
            inner_state=cast_like(inner_state, inner_state),
            grads_finite=jnp.array(True),
            notfinite_count=jnp.array(0, jnp.int32),
            total_notfinite=jnp.array(0, jnp.int32),
            total_notfinite_loss=jnp.array(0, jnp.int32),
            total_steps=jnp.array(0, jnp.int32),
        )

    def update(
        self,
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        *,
        value: Any = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, LossScaledState]:
        def finish(updates: optax.Updates) -> optax.Updates:
            return updates

        return self._advance(updates, state, params, value, extra_args, finish, _no_updates)

    def apply(
        self,
        grads: optax.Updates,
        state: optax.OptState,
        params: optax.Params,
        *,
        value: Any = None,
        **extra_args: Any,
    ) -> tuple[optax.Params, LossScaledState]:
        def finish(updates: optax.Updates) -> optax.Params:
            return apply_updates(params, updates)

        def skipped(avals: Any, grads: Any) -> optax.Params:
            del avals, grads
            return params

        return self._advance(grads, state, params, value, extra_args, finish, skipped)

    def _advance(
        self,
        grads: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None,
        value: Any,
        extra_args: dict[str, Any],
        finish: Callable[[optax.Updates], Any],
        skipped: Callable[[Any, optax.Updates], Any],
    ) -> tuple[Any, LossScaledState]:
        """Returns ``finish`` of the inner updates, or ``skipped``, and the next state."""
        if not isinstance(state, LossScaledState):
            raise TypeError(
                "`loss_scaled(...).update(state=...)` must be the `LossScaledState` that `init` "
                f"or the last step returned, got {type(state).__name__}. The order of arguments "
                "is (grads, opt_state, params)."
            )
        if value is not None and jax.tree.map(jnp.shape, value) != ():
            raise TypeError(
                "`loss_scaled(...).update(value=...)` must be the loss, one number, got "
                f"{jax.tree.map(jnp.shape, value)}. With has_aux=True, pass only the loss."
            )
        grads = map_gradients(widen, grads)
        # The verdict is on the gradients: inner transformations may hide an inf, as
        # clipping by value and sign-based updates do. No value at all counts as finite.
        local = jnp.stack([all_finite(grads), all_finite(value)])
        grads_finite, loss_finite = agree(local, self.axis_name)
        should_apply = grads_finite & loss_finite
        if value is not None:
            extra_args = {"value": value, **extra_args}

        def inner_step(grads: optax.Updates) -> tuple[Any, optax.OptState]:
            updates, inner_state = self.inner.update(
                grads, state.inner_state, map_gradients(widen, params), **extra_args
            )
            check_same_structure(
                "`loss_scaled`, whose `inner.update` must keep the structure of its state,",
                inner_state,
                state.inner_state,
            )
            return finish(updates), cast_like(inner_state, state.inner_state)

        outcome, inner_state = step_if(
            should_apply,
            inner_step,
            grads,
            lambda avals: (skipped(avals[0], grads), state.inner_state),
        )
        scaling = self.policy.observe(state.scaling, grads, grads_finite, axis_name=self.axis_name)
        return outcome, LossScaledState(
            # If the loss is to blame, the scale is not.
            scaling=tree_where(loss_finite, scaling, state.scaling),
            inner_state=inner_state,
            grads_finite=should_apply,
            notfinite_count=jnp.where(should_apply, 0, optax.safe_increment(state.notfinite_count)),
            total_notfinite=_count(~should_apply, state.total_notfinite),
            total_notfinite_loss=_count(~loss_finite, state.total_notfinite_loss),
            total_steps=jnp.asarray(optax.safe_increment(state.total_steps)),
        )


def _as_transformation(inner: Any) -> optax.GradientTransformationExtraArgs:
    if isinstance(inner, optax.MultiSteps):  # has `init` and `update`, but is none itself
        inner = inner.gradient_transformation()
    if not isinstance(inner, optax.GradientTransformation):
        raise TypeError(
            "`loss_scaled(inner)` must be an `optax.GradientTransformation`, got "
            f"{inner!r}. Pass an optimizer such as `optax.adam(1e-3)`."
        )
    return optax.with_extra_args_support(inner)


def _count(event: jax.Array, counter: jax.Array) -> jax.Array:
    return jnp.where(event, optax.safe_increment(counter), counter)


def _no_updates(avals: optax.Updates, grads: optax.Updates) -> optax.Updates:
    def no_update(aval: Any, grad: Any) -> jax.Array:
        # Minus zero: adding it keeps the bits of every number, whereas -0.0 + 0.0 is 0.0. Of
        # a complex number, both parts.
        is_complex = jnp.issubdtype(aval.dtype, jnp.complexfloating)
        zero = complex(-0.0, -0.0) if is_complex else -0.0
        # The selection folds to that constant, with the type that an update has on a mesh:
        # that of its gradient. A bare constant varies along no axis of a `shard_map`.
        like = cast(grad, aval.dtype)
        return jax.lax.select(jnp.zeros((), jnp.bool_), like, jax.lax.full_like(like, zero))

    return jax.tree.map(no_update, avals, grads)
