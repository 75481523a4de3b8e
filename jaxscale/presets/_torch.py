"""The presets for PyTorch, NVIDIA Apex and Megatron-LM."""

from typing import Any

from .._policies.base import LossScale
from .._policies.fixed import NoOpLossScale
from .._trees.checks import normal_float32
from ._common import dynamic, floor
from ._rule import PresetLossScale


def torch(
    *,
    init_scale: Any = 2.0**16,
    growth_factor: Any = 2.0,
    backoff_factor: Any = 0.5,
    growth_interval: int = 2000,
    enabled: bool = True,
) -> LossScale:
    """Returns the rule of PyTorch's `GradScaler`.

    After `growth_interval` finite steps in a row the scale grows, and stays if the
    product is not finite; a non-finite step backs off. Source: PyTorch 2.13,
    `torch/amp/grad_scaler.py`. What differs: in PyTorch the scale has no floor, and at 0
    the parameters become NaN; here it stops at float32's smallest normal number. A
    tracker restored beyond the interval grows at once; in PyTorch it never grows.
    """
    if not enabled:
        return NoOpLossScale()
    return dynamic(
        "presets.torch",
        init_scale=init_scale,
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=growth_interval,
    )


def apex(
    *,
    init_scale: Any = 2.0**16,
    scale_factor: Any = 2.0,
    scale_window: int = 2000,
    min_loss_scale: Any = None,
    max_loss_scale: Any = 2.0**24,
) -> PresetLossScale:
    """Returns the rule of NVIDIA Apex' `amp.scaler.LossScaler`.

    After `scale_window` finite steps in a row the scale doubles, up to
    `max_loss_scale`; a non-finite step halves it, down to `min_loss_scale`. Source:
    NVIDIA/apex, `apex/amp/scaler.py`, before it was removed. Behaves identically:
    `scale_factor` is accepted and ignored, and a start above the maximum is lowered to it.
    """
    call = "presets.apex"
    del scale_factor
    normal_float32(call, "init_scale", init_scale)
    normal_float32(call, "max_loss_scale", max_loss_scale)
    return dynamic(
        call,
        init_scale=min(init_scale, max_loss_scale),
        scale_window=scale_window,
        min_scale=floor(call, "min_loss_scale", min_loss_scale),
        max_scale=max_loss_scale,
        clip_growth=True,
        clamp="moves",
    )


def apex_fp16_utils(
    *, init_scale: Any = 2.0**32, scale_factor: Any = 2.0, scale_window: int = 1000
) -> PresetLossScale:
    """Returns the rule of Apex' `fp16_utils.DynamicLossScaler`.

    After `scale_window` finite steps in a row the scale is multiplied; a non-finite
    step divides it, down to 1. Its ancestors in Megatron-LM and FP16_Optimizer have the
    same rule. Source: NVIDIA/apex, `apex/fp16_utils/loss_scaler.py`. What differs: Apex's
    scale is a Python float that can leave float32's range; here it stays within.
    """
    return dynamic(
        "presets.apex_fp16_utils",
        init_scale=init_scale,
        scale_window=scale_window,
        scale_factor=scale_factor,
        min_scale=1.0,
        clamp="moves",
    )


def apex_hysteresis(
    *,
    init_scale: Any = 2.0**16,
    growth_factor: Any = 2.0,
    backoff_factor: Any = 0.5,
    growth_interval: int = 2000,
    hysteresis: int = 1,
) -> PresetLossScale:
    """Returns the rule of Apex' `update_scale_hysteresis` kernel.

    The rule of `torch`, but only the `hysteresis`-th non-finite step in a row, and each
    one after it, backs off. Source: NVIDIA/apex, `csrc/update_scale_hysteresis.cu`, as
    used in NeMo, whose defaults these are. What differs: the same as in `torch`; and the
    hysteresis tracker stops at 0, where Apex counts on below it.
    """
    return dynamic(
        "presets.apex_hysteresis",
        init_scale=init_scale,
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=growth_interval,
        hysteresis=hysteresis,
        refill_on_finite=True,
    )


def megatron(
    *,
    initial_scale: Any = 2.0**32,
    min_scale: Any = 1.0,
    growth_factor: Any = 2.0,
    backoff_factor: Any = 0.5,
    growth_interval: int = 1000,
    hysteresis: int = 2,
) -> PresetLossScale:
    """Returns the rule of Megatron-LM's `DynamicGradScaler`.

    After `growth_interval` finite steps in a row the scale grows; the `hysteresis`-th
    non-finite step since the last growth, and each one after it, backs off, down to
    `min_scale`. Source: NVIDIA/Megatron-LM, `core/optimizer/grad_scaler.py`; the class
    has no defaults, these are the defaults of its command line. What differs: in Megatron
    a growth may end at inf for good; here the scale stays. The hysteresis tracker stops
    at 0.
    """
    return dynamic(
        "presets.megatron",
        initial_scale=initial_scale,
        min_scale=min_scale,
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=growth_interval,
        hysteresis=hysteresis,
        clamp="moves",
    )
