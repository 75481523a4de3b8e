"""The presets for the training engines on top of PyTorch."""

from typing import Any

from .._policies.tolerance import ToleranceLossScale
from .._trees.checks import finite_number
from ._common import NO_MAX, dynamic, factors, floor, steps
from ._rule import PresetLossScale


def deepspeed(
    *,
    init_scale: Any = 2.0**32,
    scale_window: int = 1000,
    min_scale: Any = 1.0,
    delayed_shift: int = 1,
    consecutive_hysteresis: bool = False,
    raise_error_at_min_scale: bool = True,
) -> PresetLossScale:
    """Returns the rule of DeepSpeed's `DynamicLossScaler`.

    After `scale_window` finite steps in a row, one more at the start and after each
    non-finite step, the scale doubles. The `delayed_shift`-th non-finite step since the
    last growth (or, with `consecutive_hysteresis`, in a row), and each one after it,
    halves it, down to `min_scale`. Source: DeepSpeed, `runtime/fp16/loss_scaler.py`,
    whose factor is fixed. What differs: DeepSpeed's scale is a Python float that can
    leave float32's range, and by default DeepSpeed raises an error at the minimum. A
    compiled step cannot, so `raise_error_at_min_scale` is ignored: call `jaxscale.check`.
    """
    del raise_error_at_min_scale
    return dynamic(
        "presets.deepspeed",
        init_scale=init_scale,
        scale_window=scale_window,
        min_scale=min_scale,
        delayed_shift=delayed_shift,
        refill_on_finite=bool(consecutive_hysteresis),
        growth_delay=1,
        clamp="moves",
    )


def colossalai(
    *,
    initial_scale: Any = 2.0**16,
    growth_factor: Any = 2.0,
    backoff_factor: Any = 0.5,
    growth_interval: int = 1000,
    min_scale: Any = None,
    max_scale: Any = None,
    hysteresis: int = 2,
) -> PresetLossScale:
    """Returns the rule of ColossalAI's `DynamicGradScaler`.

    The rule of `megatron` with optional bounds. Source: hpcaitech/ColossalAI,
    `amp/naive_amp/grad_scaler`. What differs: in ColossalAI, without a maximum, a growth
    may end at inf for good; here the scale stays. With `None` for `max_scale` there is none,
    and a `hysteresis` of 0 means 1.
    """
    call = "presets.colossalai"
    return dynamic(
        call,
        initial_scale=initial_scale,
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=growth_interval,
        min_scale=floor(call, "min_scale", min_scale),
        max_scale=max_scale or NO_MAX,
        clip_growth=bool(max_scale),
        hysteresis=steps(call, "hysteresis", hysteresis),
        clamp="moves",
    )


def fairseq(
    *,
    init_scale: Any = 2.0**15,
    scale_factor: Any = 2.0,
    scale_window: int = 2000,
    tolerance: Any = 0.0,
    threshold: Any = None,
    min_loss_scale: Any = 1e-4,
) -> ToleranceLossScale:
    """Returns the rule of fairseq's `DynamicLossScaler`.

    After `scale_window` finite steps in a row the scale is multiplied; a non-finite
    step divides it, down to `threshold`, if the rate of such steps has reached
    `tolerance`. Source: facebookresearch/fairseq, `optim/dynamic_loss_scaler.py`.
    What differs: fairseq's scale is a Python float that can leave float32's range, and
    fairseq raises an error when it reaches `min_loss_scale`. Here that is a floor, like
    `threshold`, and the larger of the two counts: call `jaxscale.check`.
    """
    call = "presets.fairseq"
    for name, value in {"threshold": threshold, "min_loss_scale": min_loss_scale}.items():
        finite_number(call, name, value or 0.0)
    return ToleranceLossScale(
        init_scale=init_scale,
        growth_interval=scale_window,
        tolerance=tolerance,
        min_scale=floor(call, "min_loss_scale", max(threshold or 0.0, min_loss_scale)),
        max_scale=NO_MAX,
        **factors(call, "scale_factor", scale_factor),
    )
