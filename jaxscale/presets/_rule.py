"""The policy behind most presets, and how a preset makes it under the names of its library.

Other libraries differ a little from `DynamicLossScale`: in which steps count, which non-finite ones
are tolerated, and what happens at a bound. Each method of `PresetLossScale` states a difference.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from .._policies.base import LossScale, new_state
from .._policies.dynamic import DynamicLossScale
from .._policies.factors import check_growth_factor
from .._state.scale import LossScaleState
from .._trees.arguments import int32, normal_float32, one_of
from .._trees.numbers import LARGEST, SMALLEST_NORMAL
from .._trees.pytrees import ScaleState

# Where a library has no minimum or maximum, the scale stays within float32's normal numbers.
NO_MIN = SMALLEST_NORMAL
NO_MAX = LARGEST

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
      clamp: whether `init_scale` may lie outside of the bounds. `"never"`: it must not. `"moves"`:
        it may, and a growth then ends at most at `max_scale` and a backoff at least at `min_scale`,
        even if that lowers or raises it.

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
        "clamp": functools.partial(one_of, choices=("never", "moves")),
    }

    def _list_ascending(self) -> tuple[tuple[str, ...], ...]:
        if self.clamp == "never":
            return super()._list_ascending()
        return (("min_scale", "max_scale"),)

    def init(self) -> LossScaleState:
        """Returns the initial state."""
        return new_state(
            LossScaleState,
            loss_scale=self.init_scale,
            growth_tracker=-self.growth_delay,
            hysteresis_tracker=self.hysteresis,
        )

    def _move(self, state: ScaleState, grads_finite: jax.Array) -> Any:
        after = super()._move(state, grads_finite)
        left = after.hysteresis_tracker
        if self.refill_on_finite:
            left = jnp.where(grads_finite, self.hysteresis, left)
        if self.refill_on_backoff:
            backed_off = ~grads_finite & (left == 0)
            left = jnp.where(backed_off, self.hysteresis, left)
        streak = jnp.where(grads_finite, after.growth_tracker, -self.growth_delay)
        return after._replace(growth_tracker=streak, hysteresis_tracker=left)

    def _grow(self, scale: jax.Array) -> jax.Array:
        grown = scale * self.growth_factor
        at_bound = self.max_scale if self.clip_growth else scale
        return jnp.where(grown > self.max_scale, at_bound, grown)


# What libraries call the arguments of `PresetLossScale`.
_NAMES = {
    "init_scale": "initial_scale init_loss_scale initial_loss_scale loss_scale scale",
    "growth_factor": "incr_ratio",
    "backoff_factor": "decr_ratio",
    "growth_interval": """scale_window incr_every_n_steps dynamic_growth_steps period
        increment_period""",
    "hysteresis": "delayed_shift decr_every_n_nan_or_inf",
    "refill_on_finite": "consecutive_hysteresis",
    "max_scale": "max_loss_scale",
}
_FIELDS = {name: field for field, names in _NAMES.items() for name in names.split()}
# A factor by which a growth multiplies, and a backoff divides.
_FACTORS = ("factor", "scale_factor", "multiplier")
# A minimum that may be `None` or 0.
_FLOORS = ("min_loss_scale", "minimum_scale")
# What a preset reads itself, or ignores.
_SWITCHES = ("enabled", "dynamic", "raise_error_at_min_scale")

_Preset = TypeVar("_Preset", bound=Callable[..., LossScale])

# What a preset returns: the arguments that it does not pass on as they are.
rule: Any = dict


def preset(function: _Preset) -> _Preset:
    """Makes a preset of a function with the arguments of a library.

    The function returns a `rule` of what it fixes, by names of `PresetLossScale` or by its own.
    Other arguments reach `PresetLossScale` as they are. Errors name the preset, and an argument as
    the library does. If the function returns a policy instead, that is the one.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def make(*args: Any, **kwargs: Any) -> Any:
        fixed: Any = function(*args, **kwargs)
        if isinstance(fixed, LossScale):
            return fixed
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        # What most libraries have: no bounds, and a growth that would leave float32 keeps the
        # scale.
        fields = {"min_scale": NO_MIN, "max_scale": NO_MAX, "clip_growth": False}
        for name, value in (bound.arguments | fixed).items():
            fields |= _read_argument(f"presets.{function.__name__}", name, value)
        return PresetLossScale(**fields)

    made: Any = make
    return made


def _read_argument(call: str, name: str, value: object) -> dict[str, Any]:
    """Returns the fields of a policy that an argument of a library stands for."""
    if name in _SWITCHES:
        return {}
    if name in _FACTORS:
        return split_factor(call, name, value)
    if name in _FLOORS:
        return {"min_scale": check_floor(call, name, value)}
    field = _FIELDS.get(name, name)
    check = PresetLossScale._checks[field]
    return {field: check(call, name, value)}


def split_factor(call: str, name: str, value: object) -> dict[str, float]:
    """Returns both factors of a library that multiplies and divides by the same number."""
    factor = check_growth_factor(call, name, value)
    # Round the reciprocal down. Rounded up, it would back off from the maximum to a scale whose
    # next growth passes the maximum and is refused, which a division never does.
    reciprocal = np.float32(1 / factor)
    product = float(reciprocal) * float(np.float32(factor))
    if product > 1:
        reciprocal = np.nextafter(reciprocal, np.float32(0))
    return {"growth_factor": factor, "backoff_factor": float(reciprocal)}


def check_floor(call: str, name: str, value: object) -> float:
    """Returns a minimum of the scale; 0 and `None` mean none but that of float32."""
    if not value:
        return NO_MIN
    return normal_float32(call, name, value)


def at_least_one(call: str, name: str, value: object) -> int:
    """Returns a number of steps; 0 means 1, as in libraries that count before they compare."""
    return max(1, int32(call, name, value, least=0))


def to_python_number(value: Any) -> Any:
    """Converts an array or a tensor without dimensions; what has no `item` stays as it is."""
    if hasattr(value, "item"):
        return value.item()
    return value
