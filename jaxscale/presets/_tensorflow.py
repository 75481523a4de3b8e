"""The presets for TensorFlow, Keras and OpenSeq2Seq."""

from typing import Any

from .._policies.base import LossScale
from .._policies.fixed import FixedLossScale
from .._policies.logmax import LogMaxLossScale
from ._rule import PresetLossScale, at_least_one, preset, rule


@preset
def tensorflow(
    *,
    initial_loss_scale: Any = 2.0**15,
    increment_period: int = 2000,
    multiplier: Any = 2.0,
) -> PresetLossScale:
    """Returns the rule of `tf.mixed_precision.experimental.DynamicLossScale`.

    After `increment_period` finite steps in a row (0 means 1) the scale is multiplied, and stays if
    the product is not finite; a non-finite step divides it, down to 1. Source: TensorFlow 2.21,
    `python/training/experimental/loss_scale.py`, also in `tf.compat.v1`. Behaves identically.
    """
    steps = at_least_one("presets.tensorflow", "increment_period", increment_period)
    return rule(increment_period=steps, min_scale=1.0, clamp="moves")


@preset
def tensorflow_contrib(
    *,
    init_loss_scale: Any,
    incr_every_n_steps: int,
    decr_every_n_nan_or_inf: int = 2,
    incr_ratio: Any = 2,
    decr_ratio: Any = 0.8,
) -> PresetLossScale:
    """Returns the rule of TensorFlow 1's `ExponentialUpdateLossScaleManager`.

    After `incr_every_n_steps` finite steps in a row the scale grows, and stays if the product is
    not finite. On every `decr_every_n_nan_or_inf`-th non-finite step since it last moved, in a row
    or not, it backs off, down to 1. Source: TensorFlow 1.15, `contrib/mixed_precision`. Its
    documentation says that a backoff below 1 is refused; the code backs off to 1. Behaves
    identically. For its `FixedLossScaleManager`, use `FixedLossScale` in a `loss_scaled` optimizer.
    """
    return rule(refill_on_backoff=True, min_scale=1.0, clamp="moves")


@preset
def tf_keras(
    *,
    dynamic: bool = True,
    initial_scale: Any = None,
    dynamic_growth_steps: int | None = None,
) -> LossScale:
    """Returns the rule of `tf_keras.mixed_precision.LossScaleOptimizer`.

    The rule of `tensorflow` with a multiplier of 2; `None` means 2**15 and 2000. Without `dynamic`
    the scale stays at `initial_scale`, which must be given. Source: tf_keras 2.21,
    `mixed_precision/loss_scale_optimizer.py`. What differs: without `dynamic`, tf_keras applies
    non-finite gradients; a `loss_scaled` optimizer never does.
    """
    if not dynamic:
        if initial_scale is None or dynamic_growth_steps is not None:
            raise ValueError(
                "`presets.tf_keras(dynamic=False)` needs `initial_scale`, the scale that stays, "
                f"and no `dynamic_growth_steps`, got {initial_scale} and {dynamic_growth_steps}."
            )
        return FixedLossScale(initial_scale)
    if initial_scale is None:
        initial_scale = 2.0**15
    if dynamic_growth_steps is None:
        dynamic_growth_steps = 2000
    return rule(
        initial_scale=initial_scale,
        dynamic_growth_steps=dynamic_growth_steps,
        min_scale=1.0,
        clamp="moves",
    )


@preset
def keras(
    *, initial_scale: Any = 2.0**15, dynamic_growth_steps: int = 2000
) -> PresetLossScale:
    """Returns the rule of Keras 3's `LossScaleOptimizer`.

    After `dynamic_growth_steps` finite steps in a row the scale doubles; a non-finite step halves
    it. Source: Keras 3.15, `optimizers/loss_scale_optimizer.py`. What differs: here the scale stays
    within float32's normal numbers.
    """
    return rule()


@preset
def openseq2seq_backoff(
    *,
    scale_min: Any = 1.0,
    scale_max: Any = 2.0**14,
    step_factor: Any = 2.0,
    step_window: int = 2000,
) -> PresetLossScale:
    """Returns the rule of OpenSeq2Seq's `BackoffScaler`.

    It starts at `scale_max`; after `step_window` finite steps in a row it is multiplied by
    `step_factor`, and a non-finite step divides it, both within the bounds. Source:
    NVIDIA/OpenSeq2Seq at 8681d38, `optimizers/automatic_loss_scaler.py`; other revisions start at
    2**24. What differs: in OpenSeq2Seq a growth may come one step late, as reads are not ordered.
    """
    return rule(max_scale=scale_max, clip_growth=True)


def openseq2seq_logmax(
    *,
    scale_min: Any = 1.0,
    scale_max: Any = 2.0**14,
    log_max: Any = 16.0,
    beta1: Any = 0.99,
    beta2: Any = 0.999,
    overflow_std_dev: Any = 3.09,
) -> LogMaxLossScale:
    """Returns the rule of OpenSeq2Seq's `LogMaxScaler`, a `LogMaxLossScale`.

    The scale keeps the largest gradient some standard deviations below 2**16, from moving averages
    of its logarithm, between `scale_min` and `scale_max`; `log_max`, `beta1`, `beta2` and
    `overflow_std_dev` are those of `LogMaxLossScale`. Source: NVIDIA/OpenSeq2Seq at 8681d38,
    `optimizers/automatic_loss_scaler.py`. What differs: two defects are not reproduced. In
    OpenSeq2Seq a non-finite step counts as 2**`log_max`, although a binary logarithm is meant,
    which holds the scale at its minimum for many steps; here it counts as `log_max`. In OpenSeq2Seq
    one all-zero gradient makes the scale NaN for good; here such a step does not count.
    """
    return LogMaxLossScale(
        min_scale=scale_min,
        max_scale=scale_max,
        log_max=log_max,
        beta1=beta1,
        beta2=beta2,
        overflow_std_dev=overflow_std_dev,
    )
