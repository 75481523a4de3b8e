"""The presets for TensorFlow and the libraries built on it: Keras and OpenSeq2Seq."""

from typing import Any

from .._policies.base import LossScale
from .._policies.fixed import FixedLossScale
from .._policies.logmax import LogMaxLossScale
from . import _common
from ._common import dynamic, steps
from ._rule import PresetLossScale


def tensorflow(
    *, initial_loss_scale: Any = 2.0**15, increment_period: int = 2000, multiplier: Any = 2.0
) -> PresetLossScale:
    """Returns the rule of `tf.mixed_precision.experimental.DynamicLossScale`.

    After `increment_period` finite steps in a row (0 means 1) the scale is multiplied, and
    stays if the product is not finite; a non-finite step divides it, down to 1. Also
    `tf.compat.v1.mixed_precision`. Source: TensorFlow 2.21,
    `python/training/experimental/loss_scale.py`. Behaves identically.
    """
    call = "presets.tensorflow"
    return dynamic(
        call,
        initial_loss_scale=initial_loss_scale,
        growth_interval=steps(call, "increment_period", increment_period),
        min_scale=1.0,
        multiplier=multiplier,
        clamp="moves",
    )


def tensorflow_contrib(
    *,
    init_loss_scale: Any,
    incr_every_n_steps: int,
    decr_every_n_nan_or_inf: int = 2,
    incr_ratio: Any = 2,
    decr_ratio: Any = 0.8,
) -> PresetLossScale:
    """Returns the rule of TensorFlow 1's `ExponentialUpdateLossScaleManager`.

    After `incr_every_n_steps` finite steps in a row the scale grows, and stays if the
    product is not finite. On every `decr_every_n_nan_or_inf`-th non-finite step since
    it last moved, in a row or not, it backs off, down to 1. Source: TensorFlow 1.15,
    `contrib/mixed_precision`. Its documentation says that a backoff below 1 is refused;
    the code backs off to 1. Behaves identically. For its `FixedLossScaleManager`, use
    `FixedLossScale` in a `loss_scaled` optimizer.
    """
    return dynamic(
        "presets.tensorflow_contrib",
        init_loss_scale=init_loss_scale,
        incr_every_n_steps=incr_every_n_steps,
        decr_every_n_nan_or_inf=decr_every_n_nan_or_inf,
        incr_ratio=incr_ratio,
        decr_ratio=decr_ratio,
        refill_on_backoff=True,
        min_scale=1.0,
        clamp="moves",
    )


def tf_keras(
    *, dynamic: bool = True, initial_scale: Any = None, dynamic_growth_steps: int | None = None
) -> LossScale:
    """Returns the rule of `tf_keras.mixed_precision.LossScaleOptimizer`.

    The rule of `tensorflow` with a multiplier of 2. Source: tf_keras 2.21,
    `mixed_precision/loss_scale_optimizer.py`. What differs: without `dynamic`, tf_keras
    applies non-finite gradients; a `loss_scaled` optimizer never does.

    Args:
      dynamic: whether the scale moves.
      initial_scale: the scale of the first step, 2**15 if `None`; without `dynamic`
        it must be given.
      dynamic_growth_steps: how many finite steps in a row it takes to grow, 2000 if
        `None`.
    """
    if not dynamic:
        if initial_scale is None or dynamic_growth_steps is not None:
            raise ValueError(
                "`presets.tf_keras(dynamic=False)` needs `initial_scale`, the scale that stays, "
                f"and no `dynamic_growth_steps`, got {initial_scale} and {dynamic_growth_steps}."
            )
        return FixedLossScale(initial_scale)
    return _common.dynamic(
        "presets.tf_keras",
        initial_scale=2.0**15 if initial_scale is None else initial_scale,
        dynamic_growth_steps=2000 if dynamic_growth_steps is None else dynamic_growth_steps,
        min_scale=1.0,
        clamp="moves",
    )


def keras(*, initial_scale: Any = 2.0**15, dynamic_growth_steps: int = 2000) -> PresetLossScale:
    """Returns the rule of Keras 3's `LossScaleOptimizer`.

    After `dynamic_growth_steps` finite steps in a row the scale doubles; a non-finite
    step halves it. Source: Keras 3.15, `optimizers/loss_scale_optimizer.py`. What
    differs: in Keras the scale has no bounds, and is lost for good at inf and at 0; here
    it stays within float32's normal numbers.
    """
    return dynamic(
        "presets.keras", initial_scale=initial_scale, dynamic_growth_steps=dynamic_growth_steps
    )


def openseq2seq_backoff(
    *,
    scale_min: Any = 1.0,
    scale_max: Any = 2.0**14,
    step_factor: Any = 2.0,
    step_window: int = 2000,
) -> PresetLossScale:
    """Returns the rule of OpenSeq2Seq's `BackoffScaler`.

    It starts at `scale_max`; after `step_window` finite steps in a row it is
    multiplied by `step_factor`, and a non-finite step divides it, both within the
    bounds. Source: NVIDIA/OpenSeq2Seq at 8681d38,
    `optimizers/automatic_loss_scaler.py`; other revisions start at 2**24. What differs:
    OpenSeq2Seq does not order the step counter and its readers, so that a growth may come
    one step late.
    """
    return dynamic(
        "presets.openseq2seq_backoff",
        scale_max=scale_max,
        scale_min=scale_min,
        max_scale=scale_max,
        step_window=step_window,
        step_factor=step_factor,
        clip_growth=True,
    )


def openseq2seq_logmax(
    *,
    scale_min: Any = 1.0,
    scale_max: Any = 2.0**14,
    log_max: Any = 16.0,
    beta1: Any = 0.99,
    beta2: Any = 0.999,
    overflow_std_dev: Any = 3.09,
) -> LogMaxLossScale:
    """Returns the rule of OpenSeq2Seq's `LogMaxScaler`.

    The scale keeps the largest gradient some standard deviations below 2**16, from moving
    averages of its logarithm. Source: NVIDIA/OpenSeq2Seq at 8681d38,
    `optimizers/automatic_loss_scaler.py`. What differs: two defects are not reproduced. In
    OpenSeq2Seq a non-finite step counts as 2**`log_max`, although a binary logarithm is
    meant, which holds the scale at its minimum for many steps; here it counts as
    `log_max`. In OpenSeq2Seq one all-zero gradient makes the scale NaN for good; here such
    a step does not count.

    Args:
      scale_min: the smallest scale.
      scale_max: the largest scale.
      log_max: what a non-finite step counts as.
      beta1: how much of the average is kept in a step.
      beta2: the same for the averages from which the standard deviation is computed.
      overflow_std_dev: how many standard deviations to keep away.
    """
    return LogMaxLossScale(
        min_scale=scale_min,
        max_scale=scale_max,
        log_max=log_max,
        beta1=beta1,
        beta2=beta2,
        overflow_std_dev=overflow_std_dev,
    )
