"""The presets for the loss scalers of JAX: Flax, jmp, jamp, jaxamp and MPX."""

from typing import Any

import jax.numpy as jnp

from .._trees.checks import int32
from ._rule import NO_MAX, NO_MIN, PresetLossScale, preset, rule, to_python_number


@preset
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
    interval = int32("presets.flax", "growth_interval", growth_interval, least=0)
    return rule(growth_interval=interval + 1, clip_growth=True, clamp="moves")


@preset
def jmp(
    loss_scale: Any, *, period: int = 2000, factor: Any = 2, min_loss_scale: Any = 1.0
) -> PresetLossScale:
    """Returns the rule of `jmp.DynamicLossScale`.

    After `period` finite steps in a row the scale is multiplied, and stays if the product is not
    finite in its dtype; a non-finite step divides it, down to `min_loss_scale`. Source: jmp 0.0.4,
    `jmp/_src/loss_scale.py`. What differs: in jmp `jit` and every tree map reset the minimum to 1.
    The scale is a float32 here, and a float16 or bfloat16 `loss_scale` sets its maximum only.
    """
    return _rule_of_jmp(loss_scale, min_loss_scale)


@preset
def jamp(
    loss_scale: Any, *, period: int = 2000, factor: Any = 2, min_loss_scale: Any = 1.0
) -> PresetLossScale:
    """Returns the rule of jamp's `DynamicLossScale`.

    The rule of `jmp`, of which jamp is a copy that keeps the minimum under `jit`. Source: jamp
    0.0.6, `jmp/loss_scale.py`. Behaves identically. The dtype of the scale is as in `jmp`.
    """
    return _rule_of_jmp(loss_scale, min_loss_scale)


def _rule_of_jmp(loss_scale: Any, min_loss_scale: Any) -> Any:
    dtype = getattr(loss_scale, "dtype", jnp.float32)
    return rule(
        loss_scale=to_python_number(loss_scale),
        min_loss_scale=to_python_number(min_loss_scale),
        max_scale=min(float(jnp.finfo(dtype).max), NO_MAX),
        clamp="moves",
    )


@preset
def jaxamp(
    *, patience: int = 2000, adjust_factor: Any = 2.0, scaler: Any = 2.0**15
) -> PresetLossScale:
    """Returns the rule of jaxamp's `DynamicScalerState`.

    After `patience + 1` finite steps in a row (that is how jaxamp counts) the scale is multiplied;
    a non-finite step divides it. Source: jaxamp 0.0.4, `jaxamp/_dynamic_scaler.py`. What differs:
    the scale stays within float32's normal numbers. jaxamp repeats a step that is not finite with
    the next scale, up to 10 times, even if the loss itself is NaN.
    """
    steps = to_python_number(patience)
    interval = int32("presets.jaxamp", "patience", steps, least=0)
    return rule(
        scaler=to_python_number(scaler),
        patience=interval + 1,
        adjust_factor=to_python_number(adjust_factor),
    )


@preset
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
    return rule(
        loss_scaling=to_python_number(loss_scaling),
        min_loss_scaling=to_python_number(min_loss_scaling),
        max_scale=float(jnp.asarray(65504.0, dtype)),
        clip_growth=dtype != jnp.float16,
        clamp="steps",
    )
