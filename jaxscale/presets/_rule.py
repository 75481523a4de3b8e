"""The policy behind most presets, and how a preset makes it under the names of its library.

Other libraries differ a little from `DynamicLossScale`: in which steps count, which non-finite ones
are tolerated, and what happens at a bound. Each method of `PresetLossScale` states a difference.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._policies.base import new_state
from .._policies.checks import check_growth_factor
from .._policies.dynamic import DynamicLossScale
from .._state.scale import LossScaleState
from .._trees.checks import int32, normal_float32, one_of

# Where a library has no minimum or maximum, the scale stays within float32's normal numbers.
NO_MIN = float(jnp.finfo(jnp.float32).smallest_normal)
NO_MAX = float(jnp.finfo(jnp.float32).max)

_SWITCH = functools.partial(one_of, choices=(False, True))


@dataclasses.dataclass(frozen=True, kw_only=True)
class PresetLossScale(DynamicLossScale):
    """A `DynamicLossScale` with options for how the rules of other libraries differ.

    The functions of `jaxscale.presets` return it. Use it directly for a rule that none of
    them has. With the defaults the rule is that of `DynamicLossScale`.

    Args:
      init_scale: the scale of the first step.
      growth_factor: the scale is multiplied by this when it grows, above 1.
      backoff_factor: the scale is multiplied by this when it backs off, between 0 and 1.
      growth_interval: how many finite steps in a row it takes to grow.
      hysteresis: how many non-finite steps it takes to back off.
      min_scale: the lower bound of the scale.
      max_scale: the upper bound of the scale.
      growth_delay: how many finite steps do not count towards growth, at the start and
        after each non-finite step: the growth tracker starts from minus this.
      refill_on_finite: whether each finite step, not only a growth, resets the hysteresis counter.
        Then only non-finite steps in a row lead to a backoff.
      refill_on_backoff: whether each backoff takes `hysteresis` non-finite steps.
      clip_growth: whether a growth beyond `max_scale` ends at `max_scale`. Otherwise the scale
        stays, which keeps it a power of two even if `max_scale` is not one.
      clamp: when a scale outside the bounds is brought back. `"never"`: a growth never lowers it
        and a backoff never raises it. `"moves"`: a growth ends at most at `max_scale` and a backoff
        at least at `min_scale`, even if that lowers or raises it. `"steps"`: every step ends
        between the bounds. With the last two, `init_scale` may lie outside.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxscale import presets
      >>> policy = presets.PresetLossScale(init_scale=4.0, hysteresis=2, refill_on_backoff=True)
      >>> state = policy.init()
      >>> for grads_finite in [False, False, False]:
      ...     state = policy.adjust(state, jnp.array(grads_finite))
      ...     print(state.loss_scale)
      4.0
      2.0
      2.0
    """

    growth_delay: int = 0
    refill_on_finite: bool = False
    refill_on_backoff: bool = False
    clip_growth: bool = True
    clamp: str = "never"

    _checks = DynamicLossScale._checks | {
        "growth_delay": functools.partial(int32, least=0),
        "refill_on_finite": _SWITCH,
        "refill_on_backoff": _SWITCH,
        "clip_growth": _SWITCH,
        "clamp": functools.partial(one_of, choices=("never", "moves", "steps")),
    }

    def _list_ascending(self) -> list[tuple[str, ...]]:
        if self.clamp == "never":
            return super()._list_ascending()
        return [("min_scale", "max_scale")]

    def init(self) -> LossScaleState:
        """Returns the initial state."""
        return new_state(
            LossScaleState,
            loss_scale=self.init_scale,
            growth_tracker=-self.growth_delay,
            hysteresis_tracker=self.hysteresis,
        )

    def _move(
        self, state: LossScaleState, grads_finite: jax.Array, largest: jax.Array | None
    ) -> LossScaleState:
        after = super()._move(state, grads_finite, largest)
        if self.clamp == "steps":
            scale = jnp.clip(after.loss_scale, self.min_scale, self.max_scale)
            after = after._replace(loss_scale=scale)
        return after

    def _after_finite(self, state: LossScaleState) -> LossScaleState:
        after = super()._after_finite(state)
        if self.refill_on_finite:
            full = jnp.full_like(after.hysteresis_tracker, self.hysteresis)
            after = after._replace(hysteresis_tracker=full)
        return after

    def _after_nonfinite(self, state: LossScaleState) -> LossScaleState:
        after = super()._after_nonfinite(state)
        if self.refill_on_backoff:
            left = after.hysteresis_tracker
            refilled = jnp.where(left == 0, self.hysteresis, left)
            after = after._replace(hysteresis_tracker=refilled)
        delayed = jnp.full_like(after.growth_tracker, -self.growth_delay)
        return after._replace(growth_tracker=delayed)

    def _grow(self, scale: jax.Array, factor: Any) -> jax.Array:
        grown = scale * factor
        at_bound = self.max_scale if self.clip_growth else scale
        grown = jnp.where(grown > self.max_scale, at_bound, grown)
        if self.clamp == "never":
            return jnp.maximum(scale, grown)
        return grown

    def _back_off(self, scale: jax.Array) -> jax.Array:
        lowered = jnp.maximum(scale * self.backoff_factor, self.min_scale)
        if self.clamp == "never":
            return jnp.minimum(scale, lowered)
        return lowered


# What libraries call the arguments of `PresetLossScale`.
_FIELDS = {
    "initial_scale": "init_scale",
    "init_loss_scale": "init_scale",
    "initial_loss_scale": "init_scale",
    "init_loss_scaling": "init_scale",
    "loss_scale": "init_scale",
    "loss_scale_value": "init_scale",
    "loss_scaling": "init_scale",
    "scale_value": "init_scale",
    "scaler": "init_scale",
    "scale": "init_scale",
    "scale_max": "init_scale",
    "incr_ratio": "growth_factor",
    "decr_ratio": "backoff_factor",
    "scale_window": "growth_interval",
    "incr_every_n_steps": "growth_interval",
    "dynamic_growth_steps": "growth_interval",
    "period": "growth_interval",
    "step_window": "growth_interval",
    "delayed_shift": "hysteresis",
    "decr_every_n_nan_or_inf": "hysteresis",
    "scale_min": "min_scale",
    "min_loss_scaling": "min_scale",
    "max_loss_scale": "max_scale",
}
# A factor by which a growth multiplies, and a backoff divides.
_FACTORS = ("factor", "scale_factor", "step_factor", "multiplier", "adjust_factor")
# A minimum that may be `None` or 0.
_FLOORS = ("min_loss_scale", "minimum_scale")


def make_preset(call: str, **arguments: Any) -> PresetLossScale:
    """Makes a policy, or raises an error that names the arguments of the preset.

    The arguments are those of `PresetLossScale`, under their own names or those of the library. The
    defaults are what most libraries have: no bounds, and a growth that would leave float32 keeps
    the scale. `call` is the preset, for errors.
    """
    fields: dict[str, Any] = {
        "min_scale": NO_MIN,
        "max_scale": NO_MAX,
        "clip_growth": False,
    }
    for name, value in arguments.items():
        if name in _FACTORS:
            factors = split_factor(call, name, value)
            fields["growth_factor"] = factors.growth_factor
            fields["backoff_factor"] = factors.backoff_factor
        elif name in _FLOORS:
            fields["min_scale"] = check_floor(call, name, value)
        else:
            field = _FIELDS.get(name, name)
            check = PresetLossScale._checks[field]
            fields[field] = check(call, name, value)
    return PresetLossScale(**fields)


class Factors(NamedTuple):
    """What a scale is multiplied by."""

    growth_factor: float  # above 1
    backoff_factor: float  # below 1


def split_factor(call: str, name: str, value: Any) -> Factors:
    """Returns both factors of a library that multiplies and divides by the same number."""
    factor = check_growth_factor(call, name, value)
    # Round the reciprocal down. Rounded up, it would back off from the maximum to a scale whose
    # next growth passes the maximum and is refused, which a division never does.
    reciprocal = np.float32(1 / factor)
    product = float(reciprocal) * float(np.float32(factor))
    if product > 1:
        reciprocal = np.nextafter(reciprocal, np.float32(0))
    return Factors(growth_factor=factor, backoff_factor=float(reciprocal))


def check_floor(call: str, name: str, value: Any) -> float:
    """Returns a minimum of the scale; 0 and `None` mean none but that of float32."""
    if not value:
        return NO_MIN
    return normal_float32(call, name, value)


def at_least_one(call: str, name: str, value: Any) -> int:
    """Returns a number of steps; 0 means 1, as in libraries that count before they compare."""
    return max(1, int32(call, name, value, least=0))


def to_python_number(value: Any) -> Any:
    """Converts an array or a tensor without dimensions; what has no `item` stays as it is."""
    if hasattr(value, "item"):
        return value.item()
    return value
