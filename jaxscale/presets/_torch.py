"""The presets for PyTorch, and for the libraries and training engines on top of it."""

from typing import Any

from .._policies.base import LossScale
from .._policies.fixed import NoOpLossScale
from .._policies.spikes import OlmoSpikeRule, SpikeRule, check_sigmas
from .._policies.tolerance import ToleranceLossScale
from .._trees.checks import finite_number, int32, normal_float32
from ._rule import (
    NO_MAX,
    PresetLossScale,
    at_least_one,
    check_floor,
    preset,
    rule,
    split_factor,
)


@preset
def torch(
    *,
    init_scale: Any = 2.0**16,
    growth_factor: Any = 2.0,
    backoff_factor: Any = 0.5,
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
    init_scale: Any = 2.0**16,
    scale_factor: Any = 2.0,
    scale_window: int = 2000,
    min_loss_scale: Any = None,
    max_loss_scale: Any = 2.0**24,
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
def apex_fp16_utils(
    *, init_scale: Any = 2.0**32, scale_factor: Any = 2.0, scale_window: int = 1000
) -> PresetLossScale:
    """Returns the rule of Apex' `fp16_utils.DynamicLossScaler`.

    After `scale_window` finite steps in a row the scale is multiplied; a non-finite step divides
    it, down to 1. Its ancestors in Megatron-LM and FP16_Optimizer have the same rule. Source:
    NVIDIA/apex, `apex/fp16_utils/loss_scaler.py`. What differs: Apex's scale can leave float32.
    """
    return rule(min_scale=1.0, clamp="moves")


@preset
def apex_hysteresis(
    *,
    init_scale: Any = 2.0**16,
    growth_factor: Any = 2.0,
    backoff_factor: Any = 0.5,
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
    init_scale: Any = 2.0**32,
    scale_window: int = 1000,
    min_scale: Any = 1.0,
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
    `amp/naive_amp/grad_scaler`. What differs: in ColossalAI, without a maximum, a growth may end at
    inf for good; here the scale stays. `max_scale=None` means no maximum, and `hysteresis=0`
    counts as 1.
    """
    call = "presets.colossalai"
    return rule(
        min_scale=check_floor(call, "min_scale", min_scale),
        max_scale=max_scale or NO_MAX,
        hysteresis=at_least_one(call, "hysteresis", hysteresis),
        clip_growth=bool(max_scale),
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

    After `scale_window` finite steps in a row the scale is multiplied; a non-finite step divides
    it, down to `threshold`, if the rate of such steps has reached `tolerance`. Source:
    facebookresearch/fairseq, `optim/dynamic_loss_scaler.py`. What differs: fairseq's scale can
    leave float32's range, and fairseq raises an error when it reaches `min_loss_scale`. Here that
    is a floor, like `threshold`, and the larger of the two counts: call `jaxscale.check`.
    """
    call = "presets.fairseq"
    finite_number(call, "threshold", threshold or 0.0)
    finite_number(call, "min_loss_scale", min_loss_scale or 0.0)
    floor = max(threshold or 0.0, min_loss_scale)
    return ToleranceLossScale(
        init_scale=init_scale,
        growth_interval=scale_window,
        tolerance=tolerance,
        min_scale=check_floor(call, "min_loss_scale", floor),
        max_scale=NO_MAX,
        **split_factor(call, "scale_factor", scale_factor),
    )


def olmo(*, rolling_interval_length: int = 128, sigma_factor: Any = 6) -> SpikeRule:
    """Returns the spike rule of OLMo-core's `SkipStepOptimizer`, to pass as `spikes=`.

    A step is skipped if its loss or its gradient norm exceeds the mean of the last
    `rolling_interval_length` ones by more than `sigma_factor` standard deviations, from the step
    `rolling_interval_length // 2` on. A spike enters the windows as it is. So after a large spike
    little stands out until the spike has left the window. After equal losses any rise is a spike.
    Source: OLMo-core 2.5.0, `olmo_core/optim/skip_step_optimizer.py`. MaxText's
    `skip_step_on_spikes` (August 2026) is the same rule, except for the second step (see below). In
    levanter's `SkipStepConfig` (September 2025) the standard deviation is not the unbiased one and
    is at least 1e-6, and judging starts one step later.

    What differs: a step that is not finite enters neither window, and `jaxscale` skips it anyway.
    In OLMo-core one NaN skips all steps until it has left the window, and is applied if it comes
    in the first half of the first window. If `rolling_interval_length` is below 6, OLMo-core always
    skips the second step, because the standard deviation of a single number is NaN.
    """
    call = "presets.olmo"
    window = int32(call, "rolling_interval_length", rolling_interval_length, least=2)
    sigmas = check_sigmas(call, "sigma_factor", sigma_factor)
    # One less than one would think: OLMo also counts the step that is being judged.
    min_history = max(2, window // 2 - 1)
    return OlmoSpikeRule(window=window, sigmas=sigmas, min_history=min_history)
