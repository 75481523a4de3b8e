"""The public wrappers of an optimizer, and the step that applies its updates.

`loss_scaled`, `skip_nonfinite` and `multi_steps` check their arguments and put them into one
`Wrapper`, whichever is called first; `_step.py` has the step itself. `apply_gradients` makes the
step and applies it in one, for wrapped optimizers and bare ones.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal, TypeVar, overload

import jax
import jax.numpy as jnp
import optax

from ._accumulate import MultiStepsState, Window
from ._checks import explained, int32, one_of, positive, with_article
from ._policies.base import LossScale
from ._policies.fixed import FixedLossScale, NoOpLossScale
from ._policies.spec import as_loss_scale
from ._scaling import is_loss_scaled
from ._state import Scaled, find
from ._step import LossScaledState, Verdict, Wrapper, checked_state, takes_value, wrapper_of
from ._tree import apply_updates, joined, keep, split

_Params = TypeVar("_Params")
_State = TypeVar("_State")
_Kept = TypeVar("_Kept")

# Policies whose scale stays as it is.
NEVER_MOVE = (NoOpLossScale, FixedLossScale)

# The states of windows, each with the number of steps that the optimizer has made.
WINDOWS = (MultiStepsState, optax.MultiStepsState)


def loss_scaled(
    inner: optax.GradientTransformation,
    loss_scale: LossScale | float | Literal["dynamic", "adaptive"] | None = "dynamic",
    *,
    axis_name: Any = None,
    max_norm: float | None = None,
    skip_nonfinite: bool = True,
    check_updates: bool = False,
    track_leaves: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Returns a transformation that skips non-finite steps and moves the loss scale.

    Wrap the whole optimizer: clipping, weight decay, schedules and accumulation go
    inside. Feed it the gradients of `jaxscale.value_and_grad`, which are unscaled.

    If all gradients are finite, the step is that of `inner`. If any is not, nothing
    changes but the loss scale and the counters: the updates are zero and `inner` keeps
    its state, however many steps are skipped in a row.

    Args:
      inner: the transformation to wrap. It sees float32 (or wider) gradients and, where
        parameters are float16 or bfloat16, float32 copies of them.
      loss_scale: a policy, or a short form of one, as `jaxscale.as_loss_scale` takes it.
      axis_name: as in `jaxscale.all_finite`, inside `shard_map` and `pmap`: needed
        where devices may hold different gradients, or different losses as `value`.
      max_norm: the largest global norm of the gradients, which are clipped to it first, by
        the rule of `optax.clip_by_global_norm`. Any number above 0; one that the dtype of
        the gradients cannot hold, such as `math.inf`, clips nothing. This takes no extra
        pass. (If the squares overflow, beyond a norm of 1.8e19, the gradients are clipped
        to 0, as by optax.)
      skip_nonfinite: whether to skip at all. `False` is for scales that never move, and
        switches everything off: no verdict, no counters, and if `loss_scale` is `None`, the
        program is that of `inner` alone. The state keeps its fields. (Its `scaling` has a type of
        its own if `loss_scale` is `None`, skips or not; `jaxscale.to_state_dict` and
        `jaxscale.from_state_dict` move a run from one to the other.)
      check_updates: whether the verdict also covers the updates that `inner` returns. Some
        transformations compute gradients inside of `update`, where the verdict does not see
        them: `optax.contrib.sam` with `opaque_mode=True`, or a line search. It takes one more
        pass, over the updates.
      track_leaves: whether the state records in `nonfinite_leaves` which leaves the last
        overflow was in, so that `jaxscale.metrics` and `jaxscale.check` can name them. This
        takes no extra pass over the gradients.

    Returns:
      An `optax.GradientTransformationExtraArgs` whose state is a `jaxscale.LossScaledState`.
      Its `update(grads, state, params=None, *, value=None, **extra_args)` passes extra
      arguments to `inner` unchanged. Pass the loss as `value`, and a step whose loss itself is
      not finite is skipped and counted without lowering the scale, which is not to blame then.
      Updates and state have the same shapes and dtypes after each step. The updates of a skipped
      step are -0.0. Adding them keeps the bits of every parameter except subnormal numbers, which
      a CPU flushes to 0 as it adds; `jaxscale.apply_gradients` keeps those, too.

    Raises:
      TypeError: if `inner` is not a gradient transformation, or `loss_scale` is not a policy.
      ValueError: if `max_norm` is not above 0, if a flag is not a bool, or if
        `skip_nonfinite=False` comes with something that needs a verdict: a dynamic scale,
        `check_updates`, `track_leaves`, a window of `multi_steps`.

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
    wrapper = _wrapper("loss_scaled", inner)
    if wrapper.policy != NoOpLossScale():
        raise TypeError(
            "`loss_scaled(inner)`: `inner` is wrapped already, with a "
            f"{type(wrapper.policy).__name__}. Two skips of one step cannot agree: wrap "
            "once, outermost."
        )
    checks = one_of("loss_scaled", "check_updates", check_updates, (False, True))
    tracks = one_of("loss_scaled", "track_leaves", track_leaves, (False, True))
    if max_norm is not None and max_norm != math.inf:
        max_norm = positive("loss_scaled", "max_norm", max_norm)
    wrapper = dataclasses.replace(
        wrapper,
        policy=as_loss_scale(loss_scale),
        axis_name=wrapper.axis_name if axis_name is None else axis_name,
        max_norm=wrapper.max_norm if max_norm is None else max_norm,
        skips=one_of("loss_scaled", "skip_nonfinite", skip_nonfinite, (False, True)),
        check_updates=checks or wrapper.check_updates,
        track_leaves=tracks or wrapper.track_leaves,
    )
    if not wrapper.skips:
        _check_needs_no_verdict(wrapper)
    return _transformation(wrapper)


def skip_nonfinite(
    inner: optax.GradientTransformation,
    *,
    axis_name: Any = None,
    max_norm: float | None = None,
    check_updates: bool = False,
    track_leaves: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Returns a transformation that skips non-finite steps, without any scaling.

    For bfloat16 and float32, where gradients do not underflow but a bad batch may still
    ruin a run. Unlike `optax.apply_if_finite` it never gives up.

    Args:
      inner: the transformation to wrap, as in `loss_scaled`.
      axis_name: as in `loss_scaled`.
      max_norm: as in `loss_scaled`.
      check_updates: as in `loss_scaled`.
      track_leaves: as in `loss_scaled`.

    Returns:
      `loss_scaled(inner, None)`.

    Raises:
      TypeError: if `inner` is not a gradient transformation.
      ValueError: if `max_norm` is not above 0, or if a flag is not a bool.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> import jaxscale
      >>> tx = jaxscale.skip_nonfinite(optax.adam(0.1))
      >>> params = jnp.array(1.0)
      >>> updates, state = tx.update(jnp.array(jnp.nan), tx.init(params), params)
      >>> print(params + updates, state.total_notfinite)
      1.0 1
    """
    return loss_scaled(
        inner,
        None,
        axis_name=axis_name,
        max_norm=max_norm,
        check_updates=check_updates,
        track_leaves=track_leaves,
    )


def multi_steps(
    inner: optax.GradientTransformation,
    every_k_schedule: int | Callable[[jax.Array], Any],
    *,
    drop: Literal["micro_batch", "window"] = "micro_batch",
    growth_unit: Literal["optimizer_step", "micro_batch"] = "optimizer_step",
) -> optax.GradientTransformationExtraArgs:
    """Returns a transformation that steps once for several micro-batches.

    It does what `optax.MultiSteps` does, but a non-finite micro-batch cannot ruin the sum:
    gradients are added in float32 or wider, and only if they are finite. Put it inside or
    outside of `loss_scaled`, which is the same; on its own it skips as `skip_nonfinite` does.
    (Put an `optax.MultiSteps` inside only: outside, its accumulator never recovers from an
    overflow.)

    Each micro-batch takes one `update`, with its own loss as `value`. Until the window is full
    the updates are zero. Then `inner` sees the mean gradients of the micro-batches that counted,
    and as `value` their mean loss. A non-finite micro-batch lowers the loss scale at once, so
    that the rest of its window has a chance.

    Args:
      inner: the transformation to wrap, or a `loss_scaled` one.
      every_k_schedule: how many micro-batches make a window: an integer, or a schedule, which is
        a function of the number of steps made so far, an `i32[]`.
      drop: what a non-finite micro-batch costs. `"micro_batch"`: only itself; the step is
        made from the others, if there are any. `"window"`: its whole window; the optimizer
        makes no step. (Other state of a training loop, such as batch statistics, goes by
        `grads_finite`, which is about the micro-batch.)
      growth_unit: what the loss scale counts towards its growth: `"optimizer_step"` or
        `"micro_batch"`.

    Returns:
      An `optax.GradientTransformationExtraArgs` as `loss_scaled` returns it.
      The `inner_state` of its state is a `jaxscale.MultiStepsState`, and its
      counters count micro-batches.

    Raises:
      TypeError: if `inner` is not a gradient transformation or has a window already, or if
        `every_k_schedule` is neither an integer nor a function.
      ValueError: if an argument is out of range.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> import jaxscale
      >>> tx = jaxscale.multi_steps(jaxscale.loss_scaled(optax.sgd(1.0)), 3)
      >>> params = jnp.array(0.0)
      >>> state = tx.init(params)
      >>> for grad in [1.0, jnp.inf, 3.0]:  # the mean of those that count is 2
      ...     updates, state = tx.update(jnp.array(grad), state, params)
      ...     params = optax.apply_updates(params, updates)
      >>> print(params, state.total_notfinite, state.scaling.loss_scale)
      -2.0 1 16384.0
    """
    wrapper = _wrapper("multi_steps", inner)
    if wrapper.window is not None:
        raise TypeError(
            "`multi_steps(inner)`: `inner` has a window already. Make that one longer instead."
        )
    if not callable(every_k_schedule):
        length = int32("multi_steps", "every_k_schedule", every_k_schedule)
        every_k_schedule = functools.partial(_constant, length)
    if not wrapper.skips:
        raise ValueError(
            "`multi_steps(inner)`: `inner` has skip_nonfinite=False, but the verdict decides which "
            "micro-batches count. Leave it out."
        )
    window = Window(
        every_k_schedule,
        one_of("multi_steps", "drop", drop, ("micro_batch", "window")),
        one_of("multi_steps", "growth_unit", growth_unit, ("optimizer_step", "micro_batch")),
    )
    return _transformation(dataclasses.replace(wrapper, window=window))


@overload
def apply_gradients(
    tx: optax.GradientTransformation,
    grads: Any,
    opt_state: _State,
    params: _Params,
    *,
    keep: None = None,
    **extra_args: Any,
) -> tuple[_Params, _State]: ...
@overload
def apply_gradients(
    tx: optax.GradientTransformation,
    grads: Any,
    opt_state: _State,
    params: _Params,
    *,
    keep: tuple[_Kept, _Kept],
    **extra_args: Any,
) -> tuple[_Params, _State, _Kept]: ...
def apply_gradients(
    tx: optax.GradientTransformation,
    grads: Any,
    opt_state: Any,
    params: Any,
    *,
    keep: tuple[Any, Any] | None = None,
    **extra_args: Any,
) -> Any:
    """Returns the parameters and the optimizer state after one step.

    The same as `tx.update` followed by `optax.apply_updates`, to rounding. If `tx` is a
    `loss_scaled` optimizer, both are skipped together, so no updates are stored.

    Leaves without a gradient stay as they are. If a gradient is `None`, as
    `equinox.filter_grad` returns it for functions, text and integers, the leaf may be anything,
    and the optimizer sees `None` for it. Integers and typed keys with `float0` gradients
    stay if the optimizer passes these on, as `optax.masked` does. A leaf whose update is
    `None` stays, too.

    Args:
      tx: the optimizer.
      grads: the gradients, with the structure of `params`, or `None` for a leaf.
      opt_state: the state of `tx`. For an Equinox module `model` it is made by
        `tx.init(equinox.filter(model, equinox.is_inexact_array))`.
      params: the parameters.
      keep: a pair `(new, old)` of any other state, as `jaxscale.tree_where` takes them: batch
        statistics, target networks, loss weights. A skipped step keeps the old one.
      **extra_args: passed to `tx.update`: `value=loss` and so on.

    Returns:
      The new parameters, with the shapes and dtypes of `params`, and the new state; with `keep`
      also what was chosen of the pair. After a non-finite step the parameters are the old ones,
      bit for bit.

    Raises:
      TypeError: if `tx` is not a gradient transformation, if `opt_state` is not its state, or if
        `keep` is not a pair.
      ValueError: if `grads` has another structure than `params`, and `params` hold leaves
        that are not arrays; or if the trees in `keep` differ in structure or shapes.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> import jaxscale
      >>> tx = jaxscale.loss_scaled(optax.sgd(0.5))
      >>> params, mean = jnp.array(1.0), jnp.array(0.0)
      >>> opt_state = tx.init(params)
      >>> for grad in [jnp.array(1.0), jnp.array(jnp.inf)]:
      ...     params, opt_state, mean = jaxscale.apply_gradients(
      ...         tx, grad, opt_state, params, keep=(mean + 1, mean)
      ...     )
      ...     print(params, mean)
      0.5 1.0
      0.5 1.0
    """
    if keep is not None and not (isinstance(keep, tuple) and len(keep) == 2):
        raise TypeError(
            f"`apply_gradients(keep=...)` must be a pair (new, old), got {type(keep).__name__}."
        )
    value = extra_args.pop("value", None)
    order = "(tx, grads, opt_state, params)"
    opt_state = check_optimizer("apply_gradients", tx, opt_state, order)
    params, opt_state = applied(tx, Scaled(grads), opt_state, params, value, extra_args)
    if keep is None:
        return params, opt_state
    return params, opt_state, chosen("apply_gradients(keep=...)", tx, opt_state, *keep)


def check_optimizer(call: str, tx: Any, opt_state: Any, order: str) -> Any:
    """Returns the state that a step with `tx` was given, or raises an error.

    Args:
      call: the step, for the message.
      tx: the optimizer, wrapped or not.
      opt_state: what was passed as its state.
      order: the order of the step's arguments.
    """
    check_transformation(call, tx)
    given, wrapper = f"{call}(opt_state=...)", wrapper_of(tx)
    if wrapper is not None:
        return checked_state(given, opt_state, wrapper.policy, order)
    if isinstance(opt_state, LossScaledState):
        raise TypeError(
            f"`{given}` is a `LossScaledState`, but `tx` is a bare optimizer. Pass the one that "
            "`loss_scaled` returned, or `opt_state.inner_state` to go on without it."
        )
    return opt_state


def check_transformation(call: str, tx: Any) -> None:
    """Raises a `TypeError` if `tx` is not an optimizer."""
    # An `optax.MultiSteps` has `init` and `update`, but is not a transformation.
    if not isinstance(tx, (optax.GradientTransformation, optax.MultiSteps)):
        raise TypeError(
            f"`{call}(tx, ...)`: `tx` must be an `optax.GradientTransformation`, got "
            f"{tx!r}. Call the function that makes it, as in `optax.adamw(1e-3)`."
        )


def applied(
    tx: Any,
    grads: Scaled,
    opt_state: Any,
    params: Any,
    value: Any,
    extra_args: Mapping[str, Any] = MappingProxyType({}),
    verdict: Verdict | None = None,
) -> tuple[Any, Any]:
    """Returns the parameters and the state of an optimizer, wrapped or not, after one step.

    See `Wrapper.apply` for the arguments.
    """
    # Leaves without a gradient go around the step, as only arrays can be selected and compiled.
    trained, rest = split(params, grads.grads)
    wrapper = wrapper_of(tx)
    if wrapper is not None:
        trained, state = wrapper.apply(grads, opt_state, trained, value, extra_args, verdict)
        return joined(trained, rest), state
    tx = tx.gradient_transformation() if isinstance(tx, optax.MultiSteps) else tx
    update = optax.with_extra_args_support(tx).update
    if value is not None and takes_value(update):
        extra_args = {**extra_args, "value": value}
    with explained():
        updates, state = update(grads.unscaled, opt_state, trained, **extra_args)
    return joined(apply_updates(trained, updates), rest), state


def chosen(call: str, tx: Any, opt_state: Any, new: Any, old: Any) -> Any:
    """Returns `new` if the step that led to `opt_state` was applied, otherwise `old`.

    An optimizer without a verdict applies every step.
    """
    state = _with_verdict(call, tx, opt_state)
    return new if state is None else keep(call, state.grads_finite, new, old)


def completed(call: str, tx: Any, before: Any, after: Any, new: Any, old: Any) -> Any:
    """Returns `new` if the optimizer made a step between two of its states, otherwise `old`.

    A micro-batch of a window that is not full makes none, though it is not skipped either.
    """
    states = [_with_verdict(call, tx, each) for each in (before, after)]
    nodes = [
        given if state is None else state
        for given, state in zip((before, after), states, strict=True)
    ]
    windows: Any = [each.inner_state if is_loss_scaled(each) else each for each in nodes]
    if isinstance(windows[0], WINDOWS):
        stepped = windows[0].gradient_step != windows[1].gradient_step
    else:
        stepped = jnp.array(True) if states[1] is None else states[1].grads_finite
    return keep(call, stepped, new, old)


def _with_verdict(call: str, tx: Any, opt_state: Any) -> LossScaledState | None:
    """Returns the state of a verdict among those of an optimizer, `None` if it has none."""
    wrapper = wrapper_of(tx)
    nodes = jax.tree.leaves(opt_state, is_leaf=is_loss_scaled)
    if (wrapper is not None and not wrapper.skips) or not any(map(is_loss_scaled, nodes)):
        return None
    return find(call, opt_state, is_loss_scaled, "`LossScaledState`")


def _constant(length: int, step: jax.Array) -> int:
    del step
    return length


def _check_needs_no_verdict(wrapper: Wrapper) -> None:
    needs = [
        what
        for what, needed in {
            with_article(type(wrapper.policy).__name__): not isinstance(wrapper.policy, NEVER_MOVE),
            "check_updates=True": wrapper.check_updates,
            "track_leaves=True": wrapper.track_leaves,
            "a window of `multi_steps`": wrapper.window is not None,
        }.items()
        if needed
    ]
    if needs:
        raise ValueError(
            f"`loss_scaled(skip_nonfinite=False)` with {', '.join(needs)}: this needs to know "
            "which steps are finite, and nothing checks that then. `skip_nonfinite=False` is for "
            "scales that never move: pass None or a number, or leave it out."
        )


def _transformation(wrapper: Wrapper) -> optax.GradientTransformationExtraArgs:
    return optax.GradientTransformationExtraArgs(wrapper.init, wrapper.update)


def _wrapper(call: str, inner: Any) -> Wrapper:
    """Returns the wrapper that made a transformation, or a new one around it."""
    wrapper = wrapper_of(inner)
    if wrapper is not None:
        return wrapper
    if isinstance(inner, optax.MultiSteps):  # has `init` and `update`, but is not one itself
        inner = inner.gradient_transformation()
    if not isinstance(inner, optax.GradientTransformation):
        raise TypeError(
            f"`{call}(inner)` must be an `optax.GradientTransformation`, got "
            f"{inner!r}. Pass an optimizer such as `optax.adam(1e-3)`."
        )
    return Wrapper(optax.with_extra_args_support(inner), NoOpLossScale())
