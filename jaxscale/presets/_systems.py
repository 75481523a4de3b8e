"""The presets. Each has the arguments of a library, and the rest of its rule."""

import jax.numpy as jnp

from .._policies.base import LossScale
from .._policies.fixed import FixedLossScale, NoOpLossScale
from .._trees.arguments import int32, normal_float32
from ._rule import (
    NO_MAX,
    NO_MIN,
    PresetLossScale,
    at_least_one,
    preset,
    rule,
    to_python_number,
)


@preset
def torch(
    *,
    init_scale: float = 2.0**16,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    enabled: bool = True,
) -> LossScale:
    """Returns the rule of PyTorch's `GradScaler`.

    After `growth_interval` finite steps in a row the scale grows, and stays if the product is not
    finite; a non-finite step backs off. Source: PyTorch 2.13, `torch/amp/grad_scaler.py`. What
    differs: in PyTorch the scale has no floor, and at 0 the parameters become NaN; here it stops at
    float32's smallest normal number. With a tracker restored beyond the interval the scale grows at
    once; in PyTorch it never grows.
    """
    if not enabled:
        return NoOpLossScale()
    return rule()


@preset
def apex(
    *,
    init_scale: float = 2.0**16,
    scale_factor: float = 2.0,
    scale_window: int = 2000,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
) -> PresetLossScale:
    """Returns the rule of NVIDIA Apex' `amp.scaler.LossScaler`.

    After `scale_window` finite steps in a row the scale doubles, up to `max_loss_scale`; a
    non-finite step halves it, down to `min_loss_scale`. Source: NVIDIA/apex, `apex/amp/scaler.py`,
    before it was removed. Behaves identically: `scale_factor` is accepted and ignored, and a start
    above the maximum is lowered to it.
    """
    call = "presets.apex"
    start = normal_float32(call, "init_scale", init_scale)
    highest = normal_float32(call, "max_loss_scale", max_loss_scale)
    return rule(
        init_scale=min(start, highest),
        scale_factor=2.0,
        clip_growth=True,
        clamp="moves",
    )


@preset
def apex_hysteresis(
    *,
    init_scale: float = 2.0**16,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    hysteresis: int = 1,
) -> PresetLossScale:
    """Returns the rule of Apex' `update_scale_hysteresis` kernel.

    The rule of `torch`, but only the `hysteresis`-th non-finite step in a row, and each one after
    it, backs off. Source: NVIDIA/apex, `csrc/update_scale_hysteresis.cu`, as used in NeMo, whose
    defaults these are. What differs: as in `torch`; and the hysteresis tracker stops at 0.
    """
    return rule(refill_on_finite=True)


@preset
def apex_fp16_utils(
    *, init_scale: float = 2.0**32, scale_factor: float = 2.0, scale_window: int = 1000
) -> PresetLossScale:
    """Returns the rule of Apex' `fp16_utils.DynamicLossScaler`.

    After `scale_window` finite steps in a row the scale is multiplied; a non-finite step divides
    it, down to 1. Its ancestors in Megatron-LM and FP16_Optimizer have the same rule. Source:
    NVIDIA/apex, `apex/fp16_utils/loss_scaler.py`. What differs: Apex's scale can leave float32.
    """
    return rule(min_scale=1.0, clamp="moves")


@preset
def megatron(
    *,
    initial_scale: float = 2.0**32,
    min_scale: float = 1.0,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 1000,
    hysteresis: int = 2,
) -> PresetLossScale:
    """Returns the rule of Megatron-LM's `DynamicGradScaler`.

    After `growth_interval` finite steps in a row the scale grows; the `hysteresis`-th non-finite
    step since the last growth, and each one after it, backs off, down to `min_scale`. Source:
    NVIDIA/Megatron-LM, `core/optimizer/grad_scaler.py`; the class has no defaults, these are the
    defaults of its command line. What differs: in Megatron a growth may end at inf for good; here
    the scale stays. The hysteresis tracker stops at 0.
    """
    return rule(clamp="moves")


@preset
def deepspeed(
    *,
    init_scale: float = 2.0**32,
    scale_window: int = 1000,
    min_scale: float = 1.0,
    delayed_shift: int = 1,
    consecutive_hysteresis: bool = False,
    raise_error_at_min_scale: bool = True,
) -> PresetLossScale:
    """Returns the rule of DeepSpeed's `DynamicLossScaler`.

    After `scale_window` finite steps in a row, one more at the start and after each non-finite
    step, the scale doubles. The `delayed_shift`-th non-finite step since the last growth (or, with
    `consecutive_hysteresis`, in a row), and each one after it, halves it, down to `min_scale`.
    Source: DeepSpeed, `runtime/fp16/loss_scaler.py`, whose factor is fixed. What differs:
    DeepSpeed's scale is a Python float that can leave float32's range, and by default it raises an
    error at the minimum. Here `raise_error_at_min_scale` is ignored: call `jaxscale.check`.
    """
    return rule(
        consecutive_hysteresis=bool(consecutive_hysteresis),
        growth_delay=1,
        clamp="moves",
    )


@preset
def flax(
    *,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    scale: float = 2.0**16,
    minimum_scale: float = NO_MIN,
) -> PresetLossScale:
    """Returns the rule of `flax.training.dynamic_scale.DynamicScale`.

    After `growth_interval + 1` finite steps in a row (that is how Flax counts) the scale grows, up
    to float32's largest number, which is not a power of two; a non-finite step backs off, down to
    `minimum_scale`. Source: Flax 0.12, `flax/training/dynamic_scale.py`. What differs: without a
    minimum the scale stops at float32's smallest normal number; in Flax it becomes 0.
    """
    interval = int32("presets.flax", "growth_interval", growth_interval, least=0)
    return rule(growth_interval=interval + 1, clip_growth=True, clamp="moves")


@preset
def jmp(
    loss_scale: float,
    *,
    period: int = 2000,
    factor: float = 2,
    min_loss_scale: float = 1.0,
) -> PresetLossScale:
    """Returns the rule of `jmp.DynamicLossScale`.

    After `period` finite steps in a row the scale is multiplied, and stays if the product is not
    finite in its dtype; a non-finite step divides it, down to `min_loss_scale`. Source: jmp 0.0.4,
    `jmp/_src/loss_scale.py`. What differs: in jmp `jit` and every tree map reset the minimum to 1.
    The scale is a float32 here, and a float16 or bfloat16 `loss_scale` sets its maximum only.
    """
    dtype = getattr(loss_scale, "dtype", jnp.float32)
    return rule(
        loss_scale=to_python_number(loss_scale),
        min_loss_scale=to_python_number(min_loss_scale),
        max_scale=min(float(jnp.finfo(dtype).max), NO_MAX),
        clamp="moves",
    )


@preset
def keras(
    *, initial_scale: float = 2.0**15, dynamic_growth_steps: int = 2000
) -> PresetLossScale:
    """Returns the rule of Keras 3's `LossScaleOptimizer`.

    After `dynamic_growth_steps` finite steps in a row the scale doubles; a non-finite step halves
    it. Source: Keras 3.15, `optimizers/loss_scale_optimizer.py`. What differs: here the scale stays
    within float32's normal numbers.
    """
    return rule()


@preset
def tf_keras(
    *,
    dynamic: bool = True,
    initial_scale: float | None = None,
    dynamic_growth_steps: int | None = None,
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
    return rule(
        initial_scale=initial_scale,
        dynamic_growth_steps=dynamic_growth_steps,
        min_scale=1.0,
        clamp="moves",
    )


@preset
def tensorflow(
    *,
    initial_loss_scale: float = 2.0**15,
    increment_period: int = 2000,
    multiplier: float = 2.0,
) -> PresetLossScale:
    """Returns the rule of `tf.mixed_precision.experimental.DynamicLossScale`.

    After `increment_period` finite steps in a row (0 means 1) the scale is multiplied, and stays if
    the product is not finite; a non-finite step divides it, down to 1. Source: TensorFlow 2.21,
    `python/training/experimental/loss_scale.py`, also in `tf.compat.v1`. Behaves identically.
    """
    steps = at_least_one("presets.tensorflow", "increment_period", increment_period)
    return rule(increment_period=steps, min_scale=1.0, clamp="moves")


@preset
def tensorflow_contrib(
    *,
    init_loss_scale: float,
    incr_every_n_steps: int,
    decr_every_n_nan_or_inf: int = 2,
    incr_ratio: float = 2,
    decr_ratio: float = 0.8,
) -> PresetLossScale:
    """Returns the rule of TensorFlow 1's `ExponentialUpdateLossScaleManager`.

    After `incr_every_n_steps` finite steps in a row the scale grows, and stays if the product is
    not finite. On every `decr_every_n_nan_or_inf`-th non-finite step since it last moved, in a row
    or not, it backs off, down to 1. Source: TensorFlow 1.15, `contrib/mixed_precision`. Its
    documentation says that a backoff below 1 is refused; the code backs off to 1. Behaves
    identically. For its `FixedLossScaleManager`, use `FixedLossScale` in a `loss_scaled` optimizer.
    """
    return rule(refill_on_backoff=True, min_scale=1.0, clamp="moves")
