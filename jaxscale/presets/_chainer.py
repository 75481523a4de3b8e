"""The preset for Chainer, whose scale moves in every finite step."""

from typing import Any

from .._policies.base import LossScale
from .._policies.fixed import FixedLossScale
from .._policies.gradual import GradualLossScale
from .._trees.checks import int32


def chainer(*, interval: int = 1000, scale: Any = None) -> LossScale:
    """Returns the rule of Chainer's `GradientMethod.loss_scaling`.

    The scale starts at 1 and doubles in every finite step until the first non-finite one. From
    then on it doubles gradually over `interval` finite steps, and a non-finite step halves it,
    between 1 and 65504. Source: Chainer 7, `chainer/optimizer.py`. What differs: in Chainer the
    scale is a Python float; here it is a float32, which rounds each growth.

    Args:
      interval: over how many finite steps the scale doubles.
      scale: a scale that does not move; `None` means that it does.
    """
    if scale is not None:
        return FixedLossScale(scale)
    interval = int32("presets.chainer", "interval", interval)
    return GradualLossScale(growth_factor=2.0 ** (1 / interval), max_scale=65504.0)
