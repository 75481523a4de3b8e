"""One step of an optimizer under a loss scale: what it keeps, and how it advances."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ._accumulate import MultiStepsState, NoWindow, Window
from ._clip import clip_by_global_norm, global_norm
from ._finite import agree, all_finite, combined, evidence, is_finite, nans_are_errors
from ._loss_scale import LossScale
from ._nonfinite_leaves import flags_by_leaf, last_flags
from ._skip import step_if
from ._state import LossScaleState
from ._tree import (
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
      inner_state: the state of the wrapped transformation; inside a ``MultiStepsState``
        if gradients are accumulated by :func:`multi_steps`.
      grads_finite: ``bool[]``, whether the last step was applied, or the last
        micro-batch counted.
      notfinite_count: ``i32[]``, steps skipped in a row, up to now.
      total_notfinite: ``i32[]``, steps skipped since ``init``.
      total_notfinite_loss: ``i32[]``, those of them whose loss itself was not finite.
      total_steps: ``i32[]``, steps since ``init``, skipped or not.
      nonfinite_leaves: ``None``, or with ``track_leaves=True`` which leaves the last
        overflow was in: a tree with the structure of the parameters, a ``bool[]`` for each
        gradient. :func:`jaxscale.metrics` and :func:`jaxscale.check` name them.

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


@dataclasses.dataclass(frozen=True)
class LossScaled:
    """The two functions of the wrappers, and ``apply``: update and apply in one skip."""

    inner: optax.GradientTransformationExtraArgs
    policy: LossScale
    axis_name: Any
    window: NoWindow | Window
    track_leaves: bool = False
    max_norm: float | None = None
    skips: bool = True

    def init(self, params: optax.Params) -> LossScaledState:
        # Of float32 views, as `update` will show them, so that moments keep their dtype;
        # and strongly typed, as what starts from a Python number is not.
        params = map_gradients(widen, params)
        inner_state = self.inner.init(params)
        _check_not_nested(inner_state)
        inner_state = self.window.init(params, cast_like(inner_state, inner_state))
        return LossScaledState(
            scaling=self.policy.init(),
            inner_state=inner_state,
            grads_finite=jnp.array(True),
            notfinite_count=jnp.array(0, jnp.int32),
            total_notfinite=jnp.array(0, jnp.int32),
            total_notfinite_loss=jnp.array(0, jnp.int32),
            total_steps=jnp.array(0, jnp.int32),
            nonfinite_leaves=flags_by_leaf(params) if self.track_leaves else None,
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
        if not self.skips:
            outcome, inner_state = self._step(
                grads, None, value, state.inner_state, params, extra_args, finish
            )
            return outcome, state._replace(inner_state=inner_state)

        # The verdict is on the gradients: inner transformations may hide an inf, as
        # clipping by value and sign-based updates do. No value at all counts as finite.
        # A state of an optimizer that tracks keeps its structure, whatever the optimizer.
        tracks = state.nonfinite_leaves is not None
        numbers = evidence(grads, by_leaf=tracks, squares=self._shares_norm)
        verdict, squares = combined(numbers)
        local = [verdict, all_finite(value), *(map(is_finite, numbers) if tracks else ())]
        grads_finite, loss_finite, *leaves_finite = agree(jnp.stack(local), self.axis_name)
        should_apply = grads_finite & loss_finite
        window, due = self.window.add(state.inner_state, grads, value, should_apply)
        opt_state, operand, gradients = self.window.step(window, grads, value)
        norm = jnp.sqrt(squares) if self._shares_norm else None

        def step(operand: Any) -> tuple[Any, optax.OptState]:
            stored, norm = operand
            step_grads, step_value = gradients(stored)
            return self._step(step_grads, norm, step_value, opt_state, params, extra_args, finish)

        outcome, new_state = step_if(
            due, step, (operand, norm), lambda avals: (skipped(avals[0], grads), opt_state)
        )
        scaling = self.policy.observe(state.scaling, grads, grads_finite, axis_name=self.axis_name)
        # If the loss is to blame, the scale is not.
        observed = loss_finite
        if self.window.growth_unit == "optimizer_step":
            observed &= due | ~grads_finite
        flags = flags_by_leaf(grads, leaves_finite) if tracks else None
        return outcome, LossScaledState(
            scaling=tree_where(observed, scaling, state.scaling),
            inner_state=self.window.turn(window, new_state, due),
            grads_finite=should_apply,
            notfinite_count=jnp.where(should_apply, 0, optax.safe_increment(state.notfinite_count)),
            total_notfinite=_count(~should_apply, state.total_notfinite),
            total_notfinite_loss=_count(~loss_finite, state.total_notfinite_loss),
            total_steps=jnp.asarray(optax.safe_increment(state.total_steps)),
            nonfinite_leaves=last_flags(state.nonfinite_leaves, flags, grads_finite),
        )

    @property
    def _shares_norm(self) -> bool:
        """Whether the norm comes from the pass that gives the verdict.

        Not where it is the norm of a mean of several gradients.
        """
        one_batch = isinstance(self.window, NoWindow)
        return self.max_norm is not None and one_batch and not nans_are_errors()

    def _step(
        self,
        grads: optax.Updates,
        norm: jax.Array | None,
        value: Any,
        opt_state: optax.OptState,
        params: optax.Params | None,
        extra_args: dict[str, Any],
        finish: Callable[[optax.Updates], Any],
    ) -> tuple[Any, optax.OptState]:
        """Returns ``finish`` of the inner updates, and the next inner state."""
        grads = map_gradients(widen, grads)
        if self.max_norm is not None:
            norm = global_norm(grads) if norm is None else norm
            grads = clip_by_global_norm(grads, norm, self.max_norm)
        given = {} if value is None else {"value": value}
        updates, new_state = self.inner.update(
            grads, opt_state, map_gradients(widen, params), **given, **extra_args
        )
        check_same_structure(
            "`loss_scaled`, whose `inner.update` must keep the structure of its state,",
            new_state,
            opt_state,
        )
        return finish(updates), cast_like(new_state, opt_state)


def stepped(before: LossScaledState, after: LossScaledState) -> jax.Array:
    """Returns whether the optimizer made a step, which a micro-batch need not be."""
    windows: Any = before.inner_state, after.inner_state
    if isinstance(windows[0], MultiStepsState):
        return windows[0].gradient_step != windows[1].gradient_step
    return after.grads_finite


def _check_not_nested(inner_state: optax.OptState) -> None:
    nodes = jax.tree_util.tree_leaves_with_path(
        inner_state, is_leaf=lambda node: isinstance(node, LossScaledState)
    )
    for path, node in nodes:
        if isinstance(node, LossScaledState):
            raise ValueError(
                "`loss_scaled(inner).init`: `inner` already holds a `LossScaledState`, at "
                f"{jax.tree_util.keystr(path)} of its state. Two skips of one step cannot agree: "
                "wrap once, outermost, with `inner` as it was before."
            )


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
