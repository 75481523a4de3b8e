"""Helpers that the presets share: a policy under the argument names of another library."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from .._trees.checks import backoff_factor, growth_factor, int32, normal_float32
from ._rule import PresetLossScale

# Where a library has no minimum or maximum, the scale stays within float32's normal numbers.
NO_MIN = float(jnp.finfo(jnp.float32).smallest_normal)
NO_MAX = float(jnp.finfo(jnp.float32).max)

_CHECKS = {
    "init_scale": normal_float32,
    "growth_factor": growth_factor,
    "backoff_factor": backoff_factor,
    "growth_interval": int32,
    "hysteresis": int32,
    "min_scale": normal_float32,
    "max_scale": normal_float32,
}


def dynamic(call: str, names: dict[str, str], **arguments: Any) -> PresetLossScale:
    """Returns a policy, or raises an error that names the arguments of the preset.

    Args:
      call: the preset, for errors.
      names: what the preset calls an argument of `PresetLossScale`, if the names differ.
      **arguments: arguments of `PresetLossScale`. The defaults here are those of most
        libraries: no bounds, and a growth that would leave float32 keeps the scale.
    """
    for name, value in arguments.items():
        if name in _CHECKS:
            _CHECKS[name](call, names.get(name, name), value)
    unbounded = {"min_scale": NO_MIN, "max_scale": NO_MAX, "clip_growth": False}
    return PresetLossScale(**(unbounded | arguments))


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
