"""Helpers that the presets share: a policy under the argument names of another library."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from .._trees.checks import backoff_factor, growth_factor, int32, normal_float32
from ._rule import PresetLossScale

# Where a library has no minimum or maximum, the scale stays within float32's normal numbers.
NO_MIN = float(jnp.finfo(jnp.float32).smallest_normal)
NO_MAX = float(jnp.finfo(jnp.float32).max)

# What libraries call the arguments of `PresetLossScale`; and a factor that grows and backs off.
_NAMES = {
    "init_scale": "initial_scale init_loss_scale initial_loss_scale init_loss_scaling loss_scale "
    "loss_scale_value loss_scaling scale_value scaler scale scale_max",
    "growth_factor": "incr_ratio",
    "backoff_factor": "decr_ratio",
    "growth_interval": "scale_window incr_every_n_steps dynamic_growth_steps period step_window",
    "hysteresis": "delayed_shift decr_every_n_nan_or_inf",
    "min_scale": "scale_min min_loss_scaling",
}
_FIELDS = {name: field for field, names in _NAMES.items() for name in names.split()}
_FACTORS = ("factor", "scale_factor", "step_factor", "multiplier", "adjust_factor")

_CHECKS = {
    "init_scale": normal_float32,
    "growth_factor": growth_factor,
    "backoff_factor": backoff_factor,
    "growth_interval": int32,
    "hysteresis": int32,
    "min_scale": normal_float32,
    "max_scale": normal_float32,
}


def dynamic(call: str, **arguments: Any) -> PresetLossScale:
    """Returns a policy, or raises an error that names the arguments of the preset.

    Args:
      call: the preset, for errors.
      **arguments: arguments of `PresetLossScale`, under the names of the library. The defaults are
        those of most libraries: no bounds, and a growth that would leave float32 keeps the scale.
    """
    fields: dict[str, Any] = {"min_scale": NO_MIN, "max_scale": NO_MAX, "clip_growth": False}
    for name, value in arguments.items():
        field = _FIELDS.get(name, name)
        if name in _FACTORS:
            fields |= factors(call, name, value)
        else:
            fields[field] = _CHECKS[field](call, name, value) if field in _CHECKS else value
    return PresetLossScale(**fields)


def factors(call: str, name: str, value: Any) -> dict[str, float]:
    """Returns both factors of a library that multiplies and divides by the same number."""
    value = growth_factor(call, name, value)
    # Round the reciprocal down. Rounded up, it would back off from the maximum to a scale
    # whose next growth passes the maximum and is refused, which a division never does. The
    # reciprocal of a power of two is exact.
    reciprocal = np.float32(1 / value)
    if float(reciprocal) * float(np.float32(value)) > 1:
        reciprocal = np.nextafter(reciprocal, np.float32(0))
    return {"growth_factor": value, "backoff_factor": float(reciprocal)}


def floor(call: str, name: str, value: Any) -> float:
    """Returns a minimum of the scale; 0 and `None` mean none but that of float32."""
    return normal_float32(call, name, value) if value else NO_MIN


def steps(call: str, name: str, value: Any) -> int:
    """Returns a number of steps; 0 means 1, as in libraries that count before they compare."""
    return max(1, int32(call, name, value, least=0))


def number(value: Any) -> Any:
    """Returns a Python number for an array or a tensor without dimensions, or else `value`."""
    return value.item() if hasattr(value, "item") else value
