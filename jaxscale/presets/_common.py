"""What the presets share: how a policy is made under the argument names of a peer."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from .._checks import backoff_factor, growth_factor, int32, normal_float32
from .._policies.dynamic import DynamicLossScale

# Where a peer has no floor or no cap, the bounds are the end of the normal numbers.
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


def dynamic(call: str, names: dict[str, str], **arguments: Any) -> DynamicLossScale:
    """Returns a policy, or raises an error in the peer's own names.

    Args:
      call: the preset, for errors.
      names: for an argument of `DynamicLossScale`, what the peer calls it, where that
        is something else.
      **arguments: those of `DynamicLossScale`. Here a growth that would leave float32
        keeps the scale if nothing else is said, as in most peers.
    """
    for name, value in arguments.items():
        if name in _CHECKS:
            _CHECKS[name](call, names.get(name, name), value)
    unbounded = {"min_scale": NO_MIN, "max_scale": NO_MAX, "clip_growth": False}
    return DynamicLossScale(**(unbounded | arguments))


def factors(call: str, name: str, value: Any) -> dict[str, float]:
    """Returns both factors of a peer that multiplies and divides by the same number."""
    value = growth_factor(call, name, value)
    # A reciprocal that float32 rounds up would take a scale at the cap down to where the
    # next growth passes the cap and is refused, which a division never does. Of a power of
    # two it is exact.
    reciprocal = np.float32(1 / value)
    if float(reciprocal) * float(np.float32(value)) > 1:
        reciprocal = np.nextafter(reciprocal, np.float32(0))
    return {"growth_factor": value, "backoff_factor": float(reciprocal)}


def floor(call: str, name: str, value: Any) -> float:
    """Returns a floor, at least that of float32, of which 0 and `None` mean none."""
    return normal_float32(call, name, value) if value else NO_MIN


def steps(call: str, name: str, value: Any) -> int:
    """Returns a number of steps of which 0 means 1, as where a counter is compared late."""
    return max(1, int32(call, name, value, least=0))
