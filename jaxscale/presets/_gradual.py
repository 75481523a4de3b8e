"""The presets whose scale moves in every step: Chainer, DALL-E and PopART."""

from typing import Any

from .._checks import int32
from .._policies.base import LossScale
from .._policies.fixed import FixedLossScale
from .._policies.gradual import GradualLossScale
from ._common import dynamic
from ._rule import PresetLossScale


def chainer(*, interval: int = 1000, scale: Any = None) -> LossScale:
    """Returns the rule of Chainer's `GradientMethod.loss_scaling`.

    The scale starts at 1 and doubles in every finite step until the first non-finite one. From
    then on it doubles gradually over `interval` finite steps, and a non-finite step halves it,
    between 1 and 65504. Source: Chainer 7, `chainer/optimizer.py`. What differs: in Chainer the
    scale is a Python float; here it is a float32, which rounds each growth.

    Args:
      interval: over how many finite steps the scale doubles.
      scale: a scale that does not move; `None` means that it does.

    Raises:
      ValueError: if an argument is out of range.
      TypeError: if an argument is not a number.

    Example:
      >>> from jaxscale import presets
      >>> presets.chainer(interval=1).growth_factor
      2.0
    """
    if scale is not None:
        return FixedLossScale(scale)
    interval = int32("presets.chainer", "interval", interval)
    return GradualLossScale(growth_factor=2.0 ** (1 / interval), max_scale=65504.0)


def dalle(*, replicas: int = 1) -> GradualLossScale:
    """Returns the rule of DALL-E's gradient scales, for one scale.

    The scale starts at `replicas * 2**13` and doubles gradually over 1000 finite steps; a
    non-finite step divides it by the square root of 2, but not twice within 125 steps, between
    `replicas * 2**7` and `replicas * 2**24`. Source: Ramesh et al., Zero-Shot Text-to-Image
    Generation, 2021, appendix D. What differs: DALL-E has one such scale for each residual
    block; here there is one for the loss.

    Args:
      replicas: the number of data-parallel replicas whose gradients are added up.

    Raises:
      ValueError: if `replicas` is below 1.
      TypeError: if `replicas` is not an integer.

    Example:
      >>> from jaxscale import presets
      >>> presets.dalle(replicas=8).init_scale
      65536.0
    """
    replicas = int32("presets.dalle", "replicas", replicas)
    factor = 2.0 ** (1 / 1000)
    return GradualLossScale(
        init_scale=replicas * 2.0**13,
        growth_factor=factor,
        backoff_factor=2.0**-0.5,
        search_factor=factor,
        cooldown=125,
        min_scale=replicas * 2.0**7,
        max_scale=replicas * 2.0**24,
    )


def popart(*, init_scale: Any = 1.0) -> PresetLossScale:
    """Returns the rule of PopART's automatic loss scaling.

    Every good step doubles the scale and every other one halves it. Source: PopART,
    `willow/src/popx/op/lossscaleupdatex.cpp`, with an `updatePeriod` of 1. What differs: PopART
    calls a step good if at most a share of 1e-7 of the scaled gradients lies near the end of
    float16's range, and so halves the scale before anything overflows. To have that, pass such
    a verdict to `adjust`; in a `loss_scaled` optimizer the verdict is that all gradients are
    finite, and every other step is skipped.

    Args:
      init_scale: the scale of the first step.

    Raises:
      ValueError: if `init_scale` is out of range.
      TypeError: if `init_scale` is not a number.

    Example:
      >>> from jaxscale import presets
      >>> policy = presets.popart(init_scale=8.0)
      >>> policy.adjust(policy.init(), True).loss_scale
      Array(16., dtype=float32)
    """
    return dynamic("presets.popart", {}, init_scale=init_scale, growth_interval=1)
