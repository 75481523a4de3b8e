"""The presets for the three scalers of MindSpore."""

from typing import Any

from ._common import dynamic, factors
from ._rule import PresetLossScale


def mindspore(*, scale_value: Any, scale_factor: Any, scale_window: int) -> PresetLossScale:
    """Returns the rule of `mindspore.amp.DynamicLossScaler`.

    The rule of `jmp`, with a minimum of 1. Source: MindSpore 2.10, `mindspore/amp.py`.
    Nothing differs.

    Args:
      scale_value: the scale of the first step.
      scale_factor: the scale is multiplied by this when it grows, and divided by it when it
        backs off.
      scale_window: how many finite steps in a row it takes to grow.

    Raises:
      ValueError: if an argument is out of range.
      TypeError: if an argument is not a number.

    Example:
      >>> from jaxscale import presets
      >>> presets.mindspore(scale_value=8, scale_factor=2, scale_window=9).min_scale
      1.0
    """
    return _mindspore("presets.mindspore", "scale_value", scale_value, scale_factor, scale_window)


def mindspore_cell(
    *, loss_scale_value: Any, scale_factor: Any, scale_window: int
) -> PresetLossScale:
    """Returns the rule of `mindspore.nn.DynamicLossScaleUpdateCell`.

    The rule of `mindspore`. Source: MindSpore 2.10,
    `mindspore/nn/wrap/loss_scale.py`. What differs: in MindSpore a growth may end at inf
    for good; here the scale stays.

    Args:
      loss_scale_value: the scale of the first step.
      scale_factor: the scale is multiplied by this when it grows, and divided by it when it
        backs off.
      scale_window: how many finite steps in a row it takes to grow.

    Raises:
      ValueError: if an argument is out of range.
      TypeError: if an argument is not a number.

    Example:
      >>> from jaxscale import presets
      >>> presets.mindspore_cell(loss_scale_value=8, scale_factor=4, scale_window=9).backoff_factor
      0.25
    """
    return _mindspore(
        "presets.mindspore_cell", "loss_scale_value", loss_scale_value, scale_factor, scale_window
    )


def mindspore_manager(
    *, init_loss_scale: Any = 2.0**24, scale_factor: Any = 2, scale_window: int = 2000
) -> PresetLossScale:
    """Returns the rule of MindSpore's `DynamicLossScaleManager`.

    The rule of `mindspore`. Source: MindSpore 2.10,
    `mindspore/train/loss_scale_manager.py`. What differs: the manager's scale is a Python
    float that can leave float32's range, and the manager raises an error after more than
    1000 non-finite steps in a row. A compiled step cannot: call `jaxscale.check`.

    Args:
      init_loss_scale: the scale of the first step.
      scale_factor: the scale is multiplied by this when it grows, and divided by it when it
        backs off.
      scale_window: how many finite steps in a row it takes to grow.

    Raises:
      ValueError: if an argument is out of range.
      TypeError: if an argument is not a number.

    Example:
      >>> from jaxscale import presets
      >>> presets.mindspore_manager().init_scale
      16777216.0
    """
    return _mindspore(
        "presets.mindspore_manager", "init_loss_scale", init_loss_scale, scale_factor, scale_window
    )


def _mindspore(call: str, name: str, init: Any, factor: Any, window: Any) -> PresetLossScale:
    """Returns the rule that the three scalers of MindSpore share."""
    return dynamic(
        call,
        {"init_scale": name, "growth_interval": "scale_window"},
        init_scale=init,
        growth_interval=window,
        min_scale=1.0,
        clamp="moves",
        **factors(call, "scale_factor", factor),
    )
