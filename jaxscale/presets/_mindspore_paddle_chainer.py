"""The presets for MindSpore and MindFormers, Paddle, and Chainer."""

from typing import Any

from .._policies.base import LossScale
from .._policies.fixed import FixedLossScale, NoOpLossScale
from .._policies.gradual import GradualLossScale
from .._policies.window import WindowLossScale
from .._trees.checks import int32, normal_float32
from ._rule import NO_MAX, PresetLossScale, preset, rule, split_factor


@preset
def mindspore(
    *, scale_value: Any, scale_factor: Any, scale_window: int
) -> PresetLossScale:
    """Returns the rule of `mindspore.amp.DynamicLossScaler`.

    The rule of `jmp`, with a minimum of 1. Source: MindSpore 2.10, `mindspore/amp.py`. Behaves
    identically.
    """
    return rule(min_scale=1.0, clamp="moves")


@preset
def mindspore_cell(
    *, loss_scale_value: Any, scale_factor: Any, scale_window: int
) -> PresetLossScale:
    """Returns the rule of `mindspore.nn.DynamicLossScaleUpdateCell`.

    The rule of `mindspore`. Source: MindSpore 2.10, `mindspore/nn/wrap/loss_scale.py`. What
    differs: in MindSpore a growth may end at inf for good; here the scale stays.
    """
    return rule(min_scale=1.0, clamp="moves")


@preset
def mindspore_manager(
    *, init_loss_scale: Any = 2.0**24, scale_factor: Any = 2, scale_window: int = 2000
) -> PresetLossScale:
    """Returns the rule of MindSpore's `DynamicLossScaleManager`.

    The rule of `mindspore`. Source: MindSpore 2.10, `mindspore/train/loss_scale_manager.py`. What
    differs: the manager's scale is a Python float that can leave float32's range, and it raises an
    error after more than 1000 non-finite steps in a row: call `jaxscale.check`.
    """
    return rule(min_scale=1.0, clamp="moves")


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
    `max_scale_window`. Every third growth moves it to the next longer one. The third non-finite
    step without a growth in between sets it to 1. It starts at `scale_window`, or at the
    shortest if that is not in the list. Source: MindFormers,
    `mindformers/wrapper/adaptive_loss_scale.py`. What differs: in MindFormers a growth may end at
    inf for good; here the scale stays. MindFormers makes a window of 0 for some limits; here it is
    1.
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
    return WindowLossScale(
        init_scale=normal_float32(call, "loss_scale_value", loss_scale_value),
        windows=windows,
        start=start,
        max_scale=NO_MAX,
        **split_factor(call, "scale_factor", scale_factor),
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


@preset
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
    return rule(refill_on_finite=True, refill_on_backoff=True)


@preset
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
    return rule(
        refill_on_finite=True, refill_on_backoff=True, min_scale=1.0, clamp="moves"
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
