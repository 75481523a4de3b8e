"""The presets for TensorFlow and Keras, MindSpore, Paddle and Chainer, and the scalers of JAX."""

from typing import Any

import jax.numpy as jnp

from .._policies.base import LossScale
from .._policies.fixed import FixedLossScale, NoOpLossScale
from .._policies.gradual import GradualLossScale
from .._policies.logmax import LogMaxLossScale
from .._policies.window import WindowLossScale
from .._trees.checks import int32, normal_float32
from ._rule import (
    NO_MAX,
    NO_MIN,
    PresetLossScale,
    at_least_one,
    make_preset,
    split_factor,
    to_python_number,
)


def tensorflow(
    *, initial_loss_scale: Any = 2.0**15, increment_period: int = 2000, multiplier: Any = 2.0
) -> PresetLossScale:
    """Returns the rule of `tf.mixed_precision.experimental.DynamicLossScale`.

    After `increment_period` finite steps in a row (0 means 1) the scale is multiplied, and stays if
    the product is not finite; a non-finite step divides it, down to 1. Source: TensorFlow 2.21,
    `python/training/experimental/loss_scale.py`, also in `tf.compat.v1`. Behaves identically.
    """
    return make_preset(
        "presets.tensorflow",
        initial_loss_scale=initial_loss_scale,
        growth_interval=at_least_one("presets.tensorflow", "increment_period", increment_period),
        multiplier=multiplier,
        min_scale=1.0,
        clamp="moves",
    )


def tensorflow_contrib(
    *,
    init_loss_scale: Any,
    incr_every_n_steps: int,
    decr_every_n_nan_or_inf: int = 2,
    incr_ratio: Any = 2,
    decr_ratio: Any = 0.8,
) -> PresetLossScale:
    """Returns the rule of TensorFlow 1's `ExponentialUpdateLossScaleManager`.

    After `incr_every_n_steps` finite steps in a row the scale grows, and stays if the product is
    not finite. On every `decr_every_n_nan_or_inf`-th non-finite step since it last moved, in a row
    or not, it backs off, down to 1. Source: TensorFlow 1.15, `contrib/mixed_precision`. Its
    documentation says that a backoff below 1 is refused; the code backs off to 1. Behaves
    identically. For its `FixedLossScaleManager`, use `FixedLossScale` in a `loss_scaled` optimizer.
    """
    return make_preset(
        "presets.tensorflow_contrib",
        init_loss_scale=init_loss_scale,
        incr_every_n_steps=incr_every_n_steps,
        decr_every_n_nan_or_inf=decr_every_n_nan_or_inf,
        incr_ratio=incr_ratio,
        decr_ratio=decr_ratio,
        refill_on_backoff=True,
        min_scale=1.0,
        clamp="moves",
    )


def tf_keras(
    *, dynamic: bool = True, initial_scale: Any = None, dynamic_growth_steps: int | None = None
) -> LossScale:
    """Returns the rule of `tf_keras.mixed_precision.LossScaleOptimizer`.

    The rule of `tensorflow` with a multiplier of 2; `None` means 2**15 and 2000. Without `dynamic`
    the scale stays at `initial_scale`, which must be given. Source: tf_keras 2.21,
    `mixed_precision/loss_scale_optimizer.py`. What differs: without `dynamic`, tf_keras applies
    non-finite gradients; a `loss_scaled` optimizer never does.
    """
    if not dynamic:
        if initial_scale is None or dynamic_growth_steps is not None:
            raise ValueError(
                "`presets.tf_keras(dynamic=False)` needs `initial_scale`, the scale that stays, "
                f"and no `dynamic_growth_steps`, got {initial_scale} and {dynamic_growth_steps}."
            )
        return FixedLossScale(initial_scale)
    if initial_scale is None:
        initial_scale = 2.0**15
    if dynamic_growth_steps is None:
        dynamic_growth_steps = 2000
    return make_preset(
        "presets.tf_keras",
        initial_scale=initial_scale,
        dynamic_growth_steps=dynamic_growth_steps,
        min_scale=1.0,
        clamp="moves",
    )


def keras(*, initial_scale: Any = 2.0**15, dynamic_growth_steps: int = 2000) -> PresetLossScale:
    """Returns the rule of Keras 3's `LossScaleOptimizer`.

    After `dynamic_growth_steps` finite steps in a row the scale doubles; a non-finite step halves
    it. Source: Keras 3.15, `optimizers/loss_scale_optimizer.py`. What differs: here the scale stays
    within float32's normal numbers.
    """
    return make_preset(
        "presets.keras",
        initial_scale=initial_scale,
        dynamic_growth_steps=dynamic_growth_steps,
    )


def openseq2seq_backoff(
    *,
    scale_min: Any = 1.0,
    scale_max: Any = 2.0**14,
    step_factor: Any = 2.0,
    step_window: int = 2000,
) -> PresetLossScale:
    """Returns the rule of OpenSeq2Seq's `BackoffScaler`.

    It starts at `scale_max`; after `step_window` finite steps in a row it is multiplied by
    `step_factor`, and a non-finite step divides it, both within the bounds. Source:
    NVIDIA/OpenSeq2Seq at 8681d38, `optimizers/automatic_loss_scaler.py`; other revisions start at
    2**24. What differs: in OpenSeq2Seq a growth may come one step late, as reads are not ordered.
    """
    return make_preset(
        "presets.openseq2seq_backoff",
        scale_min=scale_min,
        scale_max=scale_max,
        step_factor=step_factor,
        step_window=step_window,
        max_scale=scale_max,
        clip_growth=True,
    )


def openseq2seq_logmax(
    *,
    scale_min: Any = 1.0,
    scale_max: Any = 2.0**14,
    log_max: Any = 16.0,
    beta1: Any = 0.99,
    beta2: Any = 0.999,
    overflow_std_dev: Any = 3.09,
) -> LogMaxLossScale:
    """Returns the rule of OpenSeq2Seq's `LogMaxScaler`, a `LogMaxLossScale`.

    The scale keeps the largest gradient some standard deviations below 2**16, from moving averages
    of its logarithm, between `scale_min` and `scale_max`; `log_max`, `beta1`, `beta2` and
    `overflow_std_dev` are those of `LogMaxLossScale`. Source: NVIDIA/OpenSeq2Seq at 8681d38,
    `optimizers/automatic_loss_scaler.py`. What differs: two defects are not reproduced. In
    OpenSeq2Seq a non-finite step counts as 2**`log_max`, although a binary logarithm is meant,
    which holds the scale at its minimum for many steps; here it counts as `log_max`. In OpenSeq2Seq
    one all-zero gradient makes the scale NaN for good; here such a step does not count.
    """
    return LogMaxLossScale(
        min_scale=scale_min,
        max_scale=scale_max,
        log_max=log_max,
        beta1=beta1,
        beta2=beta2,
        overflow_std_dev=overflow_std_dev,
    )


def mindspore(*, scale_value: Any, scale_factor: Any, scale_window: int) -> PresetLossScale:
    """Returns the rule of `mindspore.amp.DynamicLossScaler`.

    That of `jmp`, with a minimum of 1. Source: MindSpore 2.10, `mindspore/amp.py`. No difference.
    """
    return make_preset(
        "presets.mindspore",
        scale_value=scale_value,
        scale_factor=scale_factor,
        scale_window=scale_window,
        min_scale=1.0,
        clamp="moves",
    )


def mindspore_cell(
    *, loss_scale_value: Any, scale_factor: Any, scale_window: int
) -> PresetLossScale:
    """Returns the rule of `mindspore.nn.DynamicLossScaleUpdateCell`.

    The rule of `mindspore`. Source: MindSpore 2.10, `mindspore/nn/wrap/loss_scale.py`. What
    differs: in MindSpore a growth may end at inf for good; here the scale stays.
    """
    return make_preset(
        "presets.mindspore_cell",
        loss_scale_value=loss_scale_value,
        scale_factor=scale_factor,
        scale_window=scale_window,
        min_scale=1.0,
        clamp="moves",
    )


def mindspore_manager(
    *, init_loss_scale: Any = 2.0**24, scale_factor: Any = 2, scale_window: int = 2000
) -> PresetLossScale:
    """Returns the rule of MindSpore's `DynamicLossScaleManager`.

    The rule of `mindspore`. Source: MindSpore 2.10, `mindspore/train/loss_scale_manager.py`. What
    differs: the manager's scale is a Python float that can leave float32's range, and it raises an
    error after more than 1000 non-finite steps in a row: call `jaxscale.check`.
    """
    return make_preset(
        "presets.mindspore_manager",
        init_loss_scale=init_loss_scale,
        scale_factor=scale_factor,
        scale_window=scale_window,
        min_scale=1.0,
        clamp="moves",
    )


def mindformers(
    *,
    loss_scale_value: Any,
    scale_factor: Any,
    scale_window: int,
    max_scale_window: int = 1000,
    min_scale_window: int = 20,
) -> WindowLossScale:
    """Returns the rule of MindFormers' `AdaptiveLossScaleUpdateCell`.

    The rule of `mindspore_cell`, but the window moves along a list from `min_scale_window` to
    `max_scale_window`: with each third growth to the next longer one, and with the third
    non-finite step without a growth between them to 1. It starts at `scale_window`, or at the
    shortest if that is not in the list. Source: MindFormers,
    `mindformers/wrapper/adaptive_loss_scale.py`. What differs: in MindFormers a growth may end at
    inf for good; here the scale stays. A window of 0, which it makes for some limits, is 1 here.
    """
    call = "presets.mindformers"
    int32(call, "scale_window", scale_window)
    longest = int32(call, "max_scale_window", max_scale_window)
    shortest = int32(call, "min_scale_window", min_scale_window)
    if not shortest < longest:
        raise ValueError(
            f"`{call}` needs min_scale_window < max_scale_window, got {shortest} and {longest}. "
            "For one window, use `presets.mindspore_cell`."
        )
    windows = _list_windows(longest, shortest)
    start = windows.index(scale_window) if scale_window in windows else 0
    factors = split_factor(call, "scale_factor", scale_factor)
    return WindowLossScale(
        init_scale=normal_float32(call, "loss_scale_value", loss_scale_value),
        growth_factor=factors.growth_factor,
        backoff_factor=factors.backoff_factor,
        windows=windows,
        start=start,
        max_scale=NO_MAX,
    )


def _list_windows(longest: int, shortest: int) -> tuple[int, ...]:
    """Returns the windows, shortest first: halves in hundreds down to 50, then a line."""
    windows = [longest]
    window = float(longest)
    while window > shortest:
        if window > 100:
            window = float(int(window / 200) * 100)
        elif window == 100:
            window = 50.0
        else:
            window -= shortest / 2
        windows.append(max(1, int(window)))
    windows.reverse()
    return tuple(windows)


def paddle(
    *,
    enable: bool = True,
    init_loss_scaling: Any = 2.0**16,
    incr_ratio: Any = 2.0,
    decr_ratio: Any = 0.5,
    incr_every_n_steps: int = 2000,
    decr_every_n_nan_or_inf: int = 1,
    use_dynamic_loss_scaling: bool = True,
) -> LossScale:
    """Returns the rule of `paddle.amp.GradScaler`.

    After `incr_every_n_steps` finite steps in a row the scale grows; after
    `decr_every_n_nan_or_inf` non-finite steps in a row (Paddle's documentation says something else)
    it backs off. Without `use_dynamic_loss_scaling` it stays. Source: PaddlePaddle 3.3,
    `paddle/amp/grad_scaler.py`. What differs: here the scale stays within float32's normal numbers.
    """
    if not enable:
        return NoOpLossScale()
    if not use_dynamic_loss_scaling:
        return FixedLossScale(init_loss_scaling)
    return make_preset(
        "presets.paddle",
        init_loss_scaling=init_loss_scaling,
        incr_ratio=incr_ratio,
        decr_ratio=decr_ratio,
        incr_every_n_steps=incr_every_n_steps,
        decr_every_n_nan_or_inf=decr_every_n_nan_or_inf,
        refill_on_finite=True,
        refill_on_backoff=True,
    )


def paddle_op(
    *,
    init_loss_scaling: Any = 2.0**15,
    incr_every_n_steps: int = 1000,
    decr_every_n_nan_or_inf: int = 2,
    incr_ratio: Any = 2.0,
    decr_ratio: Any = 0.8,
) -> PresetLossScale:
    """Returns the rule of Paddle's `update_loss_scaling` operation.

    The rule of `paddle`, with a minimum of 1; a growth that is not finite leaves the scale. Source:
    the CPU kernel of PaddlePaddle 3.3; the defaults are those of `paddle.static.amp.decorate`.
    Behaves identically.
    """
    return make_preset(
        "presets.paddle_op",
        init_loss_scaling=init_loss_scaling,
        incr_every_n_steps=incr_every_n_steps,
        decr_every_n_nan_or_inf=decr_every_n_nan_or_inf,
        incr_ratio=incr_ratio,
        decr_ratio=decr_ratio,
        refill_on_finite=True,
        refill_on_backoff=True,
        min_scale=1.0,
        clamp="moves",
    )


def chainer(*, interval: int = 1000, scale: Any = None) -> LossScale:
    """Returns the rule of Chainer's `GradientMethod.loss_scaling`.

    The scale starts at 1 and doubles in every finite step until the first non-finite one. From
    then on it doubles gradually over `interval` finite steps, and a non-finite step halves it,
    between 1 and 65504. A `scale` that is given does not move. Source: Chainer 7,
    `chainer/optimizer.py`. What differs: the scale is a float32 here, which rounds each growth.
    """
    if scale is not None:
        return FixedLossScale(scale)
    interval = int32("presets.chainer", "interval", interval)
    return GradualLossScale(growth_factor=2.0 ** (1 / interval), max_scale=65504.0)


def flax(
    *,
    growth_factor: Any = 2.0,
    backoff_factor: Any = 0.5,
    growth_interval: int = 2000,
    scale: Any = 2.0**16,
    minimum_scale: Any = NO_MIN,
) -> PresetLossScale:
    """Returns the rule of `flax.training.dynamic_scale.DynamicScale`.

    After `growth_interval + 1` finite steps in a row (that is how Flax counts) the scale grows, up
    to float32's largest number, which is not a power of two; a non-finite step backs off, down to
    `minimum_scale`. Source: Flax 0.12, `flax/training/dynamic_scale.py`. What differs: without a
    minimum the scale stops at float32's smallest normal number; in Flax it becomes 0.
    """
    interval = int32("presets.flax", "growth_interval", growth_interval, least=0) + 1
    return make_preset(
        "presets.flax",
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=interval,
        scale=scale,
        minimum_scale=minimum_scale,
        clip_growth=True,
        clamp="moves",
    )


def jmp(
    loss_scale: Any, *, period: int = 2000, factor: Any = 2, min_loss_scale: Any = 1.0
) -> PresetLossScale:
    """Returns the rule of `jmp.DynamicLossScale`.

    After `period` finite steps in a row the scale is multiplied, and stays if the product is not
    finite in its dtype; a non-finite step divides it, down to `min_loss_scale`. Source: jmp 0.0.4,
    `jmp/_src/loss_scale.py`. What differs: in jmp `jit` and every tree map reset the minimum to 1.
    The scale is a float32 here, and a float16 or bfloat16 `loss_scale` sets its maximum only.
    """
    return _make_jmp(
        "presets.jmp",
        loss_scale=loss_scale,
        period=period,
        factor=factor,
        min_loss_scale=min_loss_scale,
    )


def jamp(
    loss_scale: Any, *, period: int = 2000, factor: Any = 2, min_loss_scale: Any = 1.0
) -> PresetLossScale:
    """Returns the rule of jamp's `DynamicLossScale`.

    The rule of `jmp`, of which jamp is a copy that keeps the minimum under `jit`. Source: jamp
    0.0.6, `jmp/loss_scale.py`. Behaves identically; of the dtype of the scale the same holds.
    """
    return _make_jmp(
        "presets.jamp",
        loss_scale=loss_scale,
        period=period,
        factor=factor,
        min_loss_scale=min_loss_scale,
    )


def _make_jmp(
    call: str, *, loss_scale: Any, period: int, factor: Any, min_loss_scale: Any
) -> PresetLossScale:
    """Makes the policy of `jmp` or `jamp`."""
    dtype = getattr(loss_scale, "dtype", jnp.float32)
    return make_preset(
        call,
        loss_scale=to_python_number(loss_scale),
        period=period,
        factor=factor,
        min_loss_scale=to_python_number(min_loss_scale),
        max_scale=min(float(jnp.finfo(dtype).max), NO_MAX),
        clamp="moves",
    )


def jaxamp(
    *, patience: int = 2000, adjust_factor: Any = 2.0, scaler: Any = 2.0**15
) -> PresetLossScale:
    """Returns the rule of jaxamp's `DynamicScalerState`.

    After `patience + 1` finite steps in a row (that is how jaxamp counts) the scale is multiplied;
    a non-finite step divides it. Source: jaxamp 0.0.4, `jaxamp/_dynamic_scaler.py`. What differs:
    the scale stays within float32's normal numbers. jaxamp repeats a step that is not finite with
    the next scale, up to 10 times, even if the loss itself is NaN.
    """
    interval = int32("presets.jaxamp", "patience", to_python_number(patience), least=0) + 1
    return make_preset(
        "presets.jaxamp",
        scaler=to_python_number(scaler),
        growth_interval=interval,
        adjust_factor=to_python_number(adjust_factor),
    )


def mpx(
    loss_scaling: Any, min_loss_scaling: Any, *, factor: Any = 2, period: int = 2000
) -> PresetLossScale:
    """Returns the rule of `mpx.DynamicLossScaling`.

    The rule of `jmp`, but each step ends between `min_loss_scaling` and 65504, float16's largest
    number, which is not a power of two. Source: mixed-precision-for-JAX 0.1.8,
    `mpx/_loss_scaling.py`. Behaves identically. The scale is a float32 here; if `loss_scaling` is a
    bfloat16 the maximum is 65536, to which bfloat16 rounds 65504, and if it is a float16 the scale
    stays where a growth would overflow.
    """
    dtype = getattr(loss_scaling, "dtype", jnp.float32)
    return make_preset(
        "presets.mpx",
        loss_scaling=to_python_number(loss_scaling),
        period=period,
        factor=factor,
        min_loss_scaling=to_python_number(min_loss_scaling),
        max_scale=float(jnp.asarray(65504.0, dtype)),
        clip_growth=dtype != jnp.float16,
        clamp="steps",
    )
