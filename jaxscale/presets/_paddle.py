"""The presets for the two scalers of Paddle, which differ."""

from typing import Any

from .._policies.base import LossScale
from .._policies.fixed import FixedLossScale, NoOpLossScale
from ._common import dynamic
from ._rule import PresetLossScale

_PADDLE = {
    "init_scale": "init_loss_scaling",
    "growth_factor": "incr_ratio",
    "backoff_factor": "decr_ratio",
    "growth_interval": "incr_every_n_steps",
    "hysteresis": "decr_every_n_nan_or_inf",
}


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
    `decr_every_n_nan_or_inf` non-finite steps in a row (Paddle's documentation says
    something else) it backs off. Source: PaddlePaddle 3.3, `paddle/amp/grad_scaler.py`.
    What differs: in Paddle the scale has no bounds, and is lost for good at inf and at 0;
    here it stays within float32's normal numbers.

    Args:
      enable: if it is `False`, nothing is scaled.
      init_loss_scaling: the scale of the first step.
      incr_ratio: the scale is multiplied by this when it grows.
      decr_ratio: the scale is multiplied by this when it backs off.
      incr_every_n_steps: how many finite steps in a row it takes to grow.
      decr_every_n_nan_or_inf: how many non-finite steps in a row it takes to back off,
        each time.
      use_dynamic_loss_scaling: if it is `False`, the scale stays.
    """
    if not enable:
        return NoOpLossScale()
    if not use_dynamic_loss_scaling:
        return FixedLossScale(init_loss_scaling)
    return dynamic(
        "presets.paddle",
        _PADDLE,
        init_scale=init_loss_scaling,
        growth_factor=incr_ratio,
        backoff_factor=decr_ratio,
        growth_interval=incr_every_n_steps,
        hysteresis=decr_every_n_nan_or_inf,
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

    The rule of `paddle`, with a minimum of 1; a growth that is not finite leaves the scale.
    Source: the CPU kernel of PaddlePaddle 3.3; the defaults are those of
    `paddle.static.amp.decorate`. Behaves identically.

    Args:
      init_loss_scaling: the scale of the first step.
      incr_every_n_steps: how many finite steps in a row it takes to grow.
      decr_every_n_nan_or_inf: how many non-finite steps in a row it takes to back off,
        each time.
      incr_ratio: the scale is multiplied by this when it grows.
      decr_ratio: the scale is multiplied by this when it backs off.
    """
    return dynamic(
        "presets.paddle_op",
        _PADDLE,
        init_scale=init_loss_scaling,
        growth_factor=incr_ratio,
        backoff_factor=decr_ratio,
        growth_interval=incr_every_n_steps,
        hysteresis=decr_every_n_nan_or_inf,
        refill_on_finite=True,
        refill_on_backoff=True,
        min_scale=1.0,
        clamp="moves",
    )
