"""The public transformations: `loss_scaled`, `skip_nonfinite`, `multi_steps`.

In any order of nesting they put their arguments into one `WrappedOptimizer`.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal, Never

import jax
import optax

from .._jax import AxisNames
from .._policies import read_loss_scale
from .._policies.base import LossScale
from .._policies.fixed import NoOpLossScale
from .._policies.spikes import SpikeRule, check_spikes
from .._trees.arguments import int32, positive
from .._trees.grammar import with_article
from .._went import refuse
from .checks import as_transformation
from .window import Window
from .wrapped_optimizer import WrappedOptimizer, find_wrapped_optimizer


def loss_scaled(
    inner: optax.GradientTransformation,
    loss_scale: LossScale | float | Literal["dynamic"] | None = "dynamic",
    *,
    axis_name: AxisNames = None,
    max_norm: float | None = None,
    skip_nonfinite: bool = True,
    check_updates: bool = False,
    track_leaves: bool = False,
    spikes: SpikeRule | None = None,
    **went: Never,
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer, so that it skips non-finite steps and moves a loss scale.

    Wrap the whole optimizer: clipping, weight decay, schedules and accumulation go inside. Feed it
    the gradients of `jaxscale.value_and_grad`, which are unscaled. On its own this scales nothing:
    in a trainer that calls `jax.value_and_grad` itself, wrap the loss in `jaxscale.scale_backward`,
    and the optimizer in `jaxscale.skip_nonfinite`.

    If all gradients are finite, the step is that of `inner`. If any is not, nothing changes but the
    loss scale and the counters, however many steps are skipped in a row.

    Args:
      inner: the transformation to wrap. It sees float32 (or wider) gradients and, where
        parameters are float16 or bfloat16, float32 copies of them.
      loss_scale: a policy, or a short form of one, as `jaxscale.as_loss_scale` takes it.
      axis_name: an axis name of `shard_map` or `pmap`, or a tuple of several: what the devices
        along them decide together. They get one verdict. They clip by one norm, and a spike is
        judged by it: that of all parts, if types say which gradients vary along the axes, as in
        `shard_map`. With `check_vma=False` and in `pmap` types do not say it, and the norm is the
        largest that any device has of its own part, so that copies of a parameter stay equal; that
        is the norm of all if no gradient is split. `inner`, the spikes and a window get the mean of
        their losses as `value`. What `inner` itself computes from all parameters, as
        `optax.clip_by_global_norm` and `optax.polyak_sgd` do, is that of one device's part. Leave
        `axis_name` out under plain `jit`, where arrays are whole.
      max_norm: the largest global norm of the gradients. Gradients with a larger norm are clipped
        to it first, by the rule of `optax.clip_by_global_norm`. It may be any number above 0. A
        number that the dtype of the gradients cannot hold, such as `math.inf`, clips nothing. This
        takes no extra pass. (If the squares overflow, beyond a norm of 1.8e19, the gradients are
        clipped to 0, as by optax.)
      skip_nonfinite: whether to skip at all. `False` is for scales that never move, and
        switches everything off: there is no verdict and there are no counters. If `loss_scale` is
        also `None`, the program is that of `inner` alone, on float32 values where parameters or
        gradients are in half precision. The state keeps its fields. (If `loss_scale` is `None`,
        `scaling` has a type of its own; `jaxscale.to_state_dict` and `jaxscale.from_state_dict`
        move a run from one type to the other.)
      check_updates: whether the verdict also covers what `inner` makes of finite gradients: its
        updates, its new state and the new parameters. Set it for optimizers that compute gradients
        inside `update`: `optax.contrib.sam` with `opaque_mode=True`, or a line search. Set it also
        for those that may make a NaN of finite gradients, such as `optax.contrib.prodigy` of a
        first gradient of 0, and where a single huge gradient may set a second moment to inf for
        good. Such a step is skipped, and the scale stays where it is. What was not finite before
        may stay so. It takes one more pass, over all of these.
      track_leaves: whether `nonfinite_leaves` of the state says which leaves the last overflow was
        in, so that `jaxscale.metrics` and `jaxscale.check` can name them. This takes no extra pass.
      spikes: a `jaxscale.SpikeRule`. A step is then also skipped if its loss, or the norm of its
        gradients, is finite but stands out among those of the last steps. The scale stays where it
        is. With `multi_steps` each micro-batch is judged by itself. This takes no extra pass.
      **went: none. Arguments of earlier releases are an error that says what to write.

    Returns:
      An `optax.GradientTransformationExtraArgs` whose state is a `jaxscale.LossScaledState`.
      Its `update(grads, state, params=None, *, value=None, **extra_args)` passes extra
      arguments to `inner` unchanged. Pass the loss as `value`: a step whose loss is not finite is
      then skipped without lowering the scale, because the scale is not to blame. The state keeps
      its shapes and dtypes from step to step. Updates have the dtypes that `inner` gives them; for
      half-precision parameters both are float32. The updates of a skipped step are -0.0. Adding
      them keeps the bits of every parameter except subnormal numbers, which a CPU flushes to 0 as
      it adds; `jaxscale.apply_gradients` also keeps those.

      Gradients that `inner` certainly never reads do not count: not for the verdict, nor for
      `max_norm` and `spikes`. They are those of parameters that an `optax.partition` with
      `set_to_zero` in it keeps frozen, or `optax.transforms.freeze` in front of the optimizer.

    Warns:
      UserWarning: once, at `init`, if bfloat16 or float16 parameters are trained without
        `jaxscale.master_weights` or `jaxscale.stochastic_rounding`.

    Raises:
      TypeError: if `inner` is not a gradient transformation, or is wrapped with a scale already,
        or if `loss_scale` is not a policy.
      ValueError: if `max_norm` is not above 0, or if `skip_nonfinite=False` comes with something
        that needs a verdict: a dynamic scale, `check_updates`, `track_leaves`, `spikes`, a window
        of `multi_steps`; at `init`, if `max_norm` would clip each micro-batch of an
        `optax.MultiSteps` inside, and not their mean.

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
    refuse("loss_scaled", went)
    return _wrap_scaled(
        "loss_scaled",
        inner,
        loss_scale,
        skips=skip_nonfinite,
        axis_name=axis_name,
        max_norm=max_norm,
        check_updates=check_updates,
        track_leaves=track_leaves,
        spikes=spikes,
    )


def _wrap_scaled(
    call: str,
    inner: optax.GradientTransformation,
    loss_scale: object,
    *,
    skips: bool = True,
    **options: Any,
) -> optax.GradientTransformationExtraArgs:
    """Does what `loss_scaled` does, with errors in the name of `call`."""
    optimizer = wrap(call, inner)
    if optimizer.policy != NoOpLossScale():
        raise TypeError(
            f"`{call}(inner)`: `inner` is wrapped already, with a "
            f"{type(optimizer.policy).__name__}. Two skips of one step cannot agree: wrap "
            "once, outermost."
        )
    max_norm = options["max_norm"]
    if max_norm is not None and max_norm != math.inf:
        options["max_norm"] = positive(call, "max_norm", max_norm)
    check_spikes(call, options["spikes"])
    policy = read_loss_scale(f"{call}(loss_scale=...)", loss_scale)
    # What is not given here may have been given to a `skip_nonfinite` inside.
    given = {}
    for name, value in options.items():
        if value is not None and value is not False:
            given[name] = value
    return rewrap(optimizer, call, policy=policy, skips=skips, **given)


def _check_needs_no_verdict(optimizer: WrappedOptimizer) -> None:
    """Raises a `ValueError` if an optimizer that skips nothing has a part that needs a verdict."""
    parts = {
        with_article(type(optimizer.policy).__name__): optimizer.can_back_off,
        "check_updates=True": optimizer.check_updates,
        "track_leaves=True": optimizer.track_leaves,
        "a `SpikeRule`": optimizer.spikes is not None,
        "a window of `multi_steps`": optimizer.window is not None,
    }
    names = [name for name, needs_verdict in parts.items() if needs_verdict]
    if names:
        raise ValueError(
            f"`loss_scaled(skip_nonfinite=False)` with {', '.join(names)}: these need the check "
            "for inf and NaN that `skip_nonfinite=False` turns off. It is for scales that never "
            "move: pass None or a number, or leave it out."
        )


def skip_nonfinite(
    inner: optax.GradientTransformation,
    *,
    axis_name: AxisNames = None,
    max_norm: float | None = None,
    check_updates: bool = False,
    track_leaves: bool = False,
    spikes: SpikeRule | None = None,
    **went: Never,
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer, so that it skips non-finite steps, without any scaling.

    Use it for bfloat16 and float32, where gradients do not underflow but a bad batch may still ruin
    a run. Unlike `optax.apply_if_finite` it never gives up. It is the same as
    `loss_scaled(inner, None)`, and raises the same errors.

    A skipped step is an update of 0. A solver that stops at small updates, such as that of
    Optimistix, takes it for convergence: set its tolerances to 0 and bound its steps, or look at
    `total_notfinite` before you trust its result. A solver that stops at small gradients, such as
    `run` of jaxopt, stops at the first gradient that is NaN, whatever its tolerance is.

    bfloat16 and float16 parameters have float32 moments and float32 updates here: 8 bytes for those
    of Adam, where Optax keeps 4. (Optax's own are wrong there: in float16, 10 of 19 optimizers
    turn to NaN at the first gradient of 0.) The parameters themselves still lose the updates that
    are smaller than half a unit. `jaxscale.master_weights` and `jaxscale.stochastic_rounding` mend
    that, and `jaxscale.compact_state` halves the bytes.

    Args:
      inner: the transformation to wrap, as in `loss_scaled`.
      axis_name: as in `loss_scaled`.
      max_norm: as in `loss_scaled`.
      check_updates: as in `loss_scaled`.
      track_leaves: as in `loss_scaled`.
      spikes: as in `loss_scaled`.
      **went: none, as in `loss_scaled`.

    Warns:
      UserWarning: as `loss_scaled`.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> import jaxscale
      >>> tx = jaxscale.skip_nonfinite(optax.adam(0.1))
      >>> params = jnp.array(1.0)
      >>> updates, state = tx.update(jnp.array(jnp.nan), tx.init(params), params)
      >>> print(params + updates, state.total_notfinite)
      1.0 1
    """
    refuse("skip_nonfinite", went)
    return _wrap_scaled(
        "skip_nonfinite",
        inner,
        None,
        axis_name=axis_name,
        max_norm=max_norm,
        check_updates=check_updates,
        track_leaves=track_leaves,
        spikes=spikes,
    )


def multi_steps(
    inner: optax.GradientTransformation,
    every_k_schedule: int | Callable[[jax.Array], Any],
    **went: Never,
) -> optax.GradientTransformationExtraArgs:
    """Makes an optimizer take one step for several micro-batches.

    It does what `optax.MultiSteps` does, but a non-finite micro-batch cannot ruin the sum:
    gradients are added in float32 or wider, and only if they are finite. It may go inside or
    outside `loss_scaled`, with the same effect; on its own it skips as `skip_nonfinite` does. (Put
    an `optax.MultiSteps` only inside: outside, its accumulator never recovers from an overflow.)

    Each micro-batch takes one `update`, with its own loss as `value`. Until the window is full
    the updates are zero. Then `inner` sees the mean gradients of the micro-batches that counted,
    and as `value` their mean loss. A non-finite micro-batch lowers the loss scale at once, so
    that the rest of its window has a chance; the scale grows by the steps of the optimizer. The
    step is made from the other micro-batches, if any. Other state of a loop, such as batch
    statistics, follows `step_applied`, so it is kept or replaced for each micro-batch.

    Args:
      inner: the transformation to wrap, or a `loss_scaled` one.
      every_k_schedule: how many micro-batches make a window. It is an integer, or a schedule: a
        function of the number of steps made so far, an `i32[]`. The number that the schedule
        returns is rounded down, and a number below 1 counts as 1. If a run is resumed with another
        number, that ends the window at hand, whose step is made from the mean of what it holds.
      **went: none. Arguments of earlier releases are an error that says what to write.

    Returns:
      An `optax.GradientTransformationExtraArgs` as `loss_scaled` returns it. The `inner_state` of
      its state is a `jaxscale.MultiStepsState`, and its counters count micro-batches.

    Raises:
      TypeError: if `inner` is not a gradient transformation or has a window already, or if
        `every_k_schedule` is neither an integer nor a function.
      ValueError: if `every_k_schedule` is below 1, or if `inner` has `skip_nonfinite=False`.

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
    refuse("multi_steps", went)
    optimizer = wrap("multi_steps", inner)
    if optimizer.window is not None:
        raise TypeError(
            "`multi_steps(inner)`: `inner` has a window already. Make that one longer instead."
        )
    if not callable(every_k_schedule):
        every_k_schedule = int32("multi_steps", "every_k_schedule", every_k_schedule)
    window = Window(every_k_schedule)
    return rewrap(optimizer, "multi_steps", window=window)


def wrap(call: str, inner: object) -> WrappedOptimizer:
    """Returns the optimizer that is wrapped already, or wraps one, without any scaling."""
    optimizer = find_wrapped_optimizer(inner)
    if optimizer is not None:
        return optimizer
    inner = as_transformation(f"{call}(inner)", inner)
    return WrappedOptimizer(inner, NoOpLossScale())


def rewrap(
    optimizer: WrappedOptimizer, call: str, **changes: Any
) -> optax.GradientTransformationExtraArgs:
    """Returns an optimizer with other options as users get it. It knows no earlier calls."""
    optimizer = dataclasses.replace(
        optimizer, call=call, known_types={}, known_unread={}, **changes
    )
    if not optimizer.skips:
        _check_needs_no_verdict(optimizer)
    return optax.GradientTransformationExtraArgs(optimizer.init, optimizer.update)
