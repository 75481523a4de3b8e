"""The policy that follows the largest gradient, instead of probing for the highest scale.

The numbers between the layers may be larger than the largest gradient, and these overflow first.
How much larger they are is learned from overflows, and stored as the `level`. The gradients of
rare batches may also be larger than usual, and a step that overflows hides their size. So larger
and larger sizes are tried, and the current guess is the `crest`.

All arithmetic is on integers. `jnp.log2` and `jnp.exp2` may be off by an ulp, and a scale that is
not a power of two rounds every gradient. So the logarithm of a float comes from its bits, and a
scale is built from its exponent.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from .._state.scale import AdaptiveState
from .._trees.arguments import finite_number, int32, limited, power_of_two
from .._trees.numbers import (
    EXPONENT_BIAS,
    MANTISSA_BITS,
    SMALLEST_NORMAL,
    float_bits,
    float_of_bits,
)
from .._trees.pytrees import ScaleState
from .._trees.selection import where
from .._went import warn_of
from .base import CheckedLossScale, new_state

# The peak or the crest while nothing is known of it: lower than any logarithm.
UNSEEN = -256
# Binary logarithms are counted in units of 2**-16, which float32 holds exactly up to 2**8.
_BINADE = 2**16
# No largest gradient has a higher logarithm.
_HIGHEST = 128 * _BINADE

# A raised crest is at least this far above the last one and the peak.
_CREST_ROOM = 3 * _BINADE
# By how many binades the scale falls at the first overflow in a row, at the second, and later.
_FALLS = (1, 8, 16)


def _check_scale(call: str, name: str, scale: ArrayLike) -> float:
    return 2.0 ** power_of_two(call, name, scale)


_check_level = limited(
    finite_number,
    lambda level: -14 <= level < 16,
    "be at least -14 and below 16",
    " It is a binary logarithm, of what the largest scaled gradient may reach, and float16 holds "
    "normal numbers from 2**-14 to below 2**16: pass 13.0, or leave it out.",
)


class _Units(NamedTuple):
    """An `AdaptiveState` in integers: the exponent of the scale, and logarithms in units."""

    exponent: jax.Array
    peak: jax.Array
    level: jax.Array
    crest: jax.Array
    finite_steps: jax.Array
    held_steps: jax.Array
    overflows: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaptiveLossScale(CheckedLossScale):
    """A loss scale that follows the largest gradient.

    It goes in 0.7.0: `examples/adaptive_scale.py` has a policy of this kind to copy.

    The scale is the largest power of two that keeps the usual largest gradient below
    `2**level`, the point beyond which runs like this one have overflowed. An overflow lowers
    the level by one, and finite steps raise it slowly. Several overflows in a row mean that
    the gradients have grown, and the scale falls fast. If single overflows repeat, some batches
    have much larger gradients than usual. The scale then makes more and more room for them until
    one of them passes, which costs a handful of batches. With
    `jaxscale.train_step(..., retries=10)` no batch is lost.

    The rule works with binary logarithms, in units of 2**-16. `x` is that of the largest absolute
    value among the unscaled gradients of a step (linear between two powers of two). `peak` is that
    of its usual size, `crest` that of the size assumed for rare large batches, and `level` that of
    what the largest scaled gradient may reach. The scale that *fits* is
    `2**floor(level - max(peak, crest))`.

    - Finite step: `peak <- max(x, faded_peak)`, with `faded_peak = peak + (x - peak) / memory`. The
      level rises by `1 / period`. In a *search*, that is while `finite_steps` is at least `period`,
      as at the start, it rises by `1 / search_period`. It rises at least to 2 below what the
      largest scaled gradient of this step has reached, and at most to `max_level`. The scale
      becomes the one that fits, but at most doubles.
    - Overflow: the scale halves, at the second in a row it falls by `2**8`, and at each later one
      by `2**16`. The first in a row also lowers the level by one, and `finite_steps` restarts at 0;
      the scale falls at least to the one that then fits. While the scale is still rising towards
      the level, though, an overflow says little about the level: the level is then set 1/2 below
      the lowest one that gives the scale that overflowed, and a search goes on. At `min_level` the
      peak rises instead, and then fades back. Before the first gradients only the scale falls.
    - If an overflow restarts `finite_steps` while it is below `period / 4`, the crest rises too,
      and `held_steps` restarts at 0. With `d = max(crest - peak, 0)` it becomes `peak + 4 * d + 3`
      if it was untried or `d` was below 3, and otherwise `peak + d + 3`. So it is 3 above the peak,
      then 15, then 63. *Untried* means that no step has reached it since it rose:
      `held_steps == finite_steps`.
    - A finite step *reaches* the crest if its `x` is at least a quarter of the way up from
      `faded_peak` to the crest. Then the crest falls half the way to `x`, or rises to `x`, and
      `held_steps` restarts at 0. If the crest was untried, and the level is more than 2 below the
      initial one, a search begins. If no step reaches the crest in `period / 2` finite steps, it
      fades like the peak. A crest below `faded_peak` is forgotten.
    - Nothing changes in a finite step whose gradients are all zero, or not known, as in
      `adjust(state, True)`. If they are flushed to zero at `init_scale`, start higher:
      `jaxscale.check` says so.

    The scale is always a power of two between `min_scale` and `max_scale`. The largest gradient
    comes from the pass that finds whether all gradients are finite. So no gradient is read more
    often than with `DynamicLossScale`, unless `max_norm` also clips the gradients.

    Args:
      init_scale: the scale of the first step, a power of two. The next steps at most double
        it, so that a low one finds its level within a few dozen steps and without a skip.
      level: the level at the start, from -14 to below 16, the exponents of float16's normal
        numbers.
      min_level: the level never falls below this.
      max_level: the level never rises above this. Half a binade below 16 leaves room for
        gradients that are larger than usual.
      memory: after how many steps a peak has lost most of its weight.
      period: how many finite steps it takes to raise the level by one after an overflow, at most
        2**16, and then to begin a new search. If gradients vary, about one step in `period`
        overflows.
      search_period: how many finite steps it takes to raise the level by one in a search.
      min_scale: the smallest scale, a power of two.
      max_scale: the largest scale, a power of two.

    Raises:
      ValueError: if an argument is out of range, a scale is not a power of two, or not
        `min_scale <= init_scale <= max_scale` and `min_level <= level <= max_level`.
      TypeError: if an argument is not a number, or a count not an integer.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxscale
      >>> loss_scale = jaxscale.AdaptiveLossScale()
      >>> state = loss_scale.init()
      >>> for _ in range(20):
      ...     state, should_apply = loss_scale.update(state, {"w": jnp.array(2.0**-5)})
      >>> print(state.loss_scale == 2.0**18, state.peak)  # 2**13 / 2**-5
      True -5.0
      >>> state, should_apply = loss_scale.update(state, {"w": jnp.array(jnp.inf)})
      >>> print(state.loss_scale == 2.0**17, should_apply)
      True False

    References:
      The rule is jaxscale's own. OpenSeq2Seq's `LogMaxScaler` also follows the largest gradient,
      and Transformer Engine's `DelayedScaling` also divides by the largest of the past.
    """

    init_scale: float = 2.0**8
    level: float = 13.0
    min_level: float = 0.0
    max_level: float = 15.5
    memory: int = 2**9
    period: int = 2**14
    search_period: int = 2**10
    min_scale: float = 1.0
    max_scale: float = 2.0**60

    needs_largest = True
    _state_type = AdaptiveState
    _checks = (
        CheckedLossScale._checks
        | dict.fromkeys(("init_scale", "min_scale", "max_scale"), _check_scale)
        | dict.fromkeys(("level", "min_level", "max_level"), _check_level)
        | dict.fromkeys(("memory", "period", "search_period"), int32)
    )

    def __post_init__(self) -> None:
        warn_of("adaptive")
        super().__post_init__()

    def _list_ascending(self) -> tuple[tuple[str, ...], ...]:
        return (*super()._list_ascending(), ("min_level", "level", "max_level"))

    def init(self) -> Any:
        """Returns the initial `AdaptiveState`."""
        return new_state(
            AdaptiveState,
            loss_scale=self.init_scale,
            peak=float(UNSEEN),
            level=_to_units(self.level) / _BINADE,
            crest=float(UNSEEN),
            finite_steps=self.period,  # so that a search begins
        )

    def _move(
        self, state: ScaleState, grads_finite: jax.Array, largest: jax.Array | None
    ) -> Any:
        size = jnp.zeros(()) if largest is None else largest
        # Zero does not count as seen. Nor do subnormal numbers: some devices flush them to zero and
        # others do not, and the scale should not depend on that.
        is_seen = size >= SMALLEST_NORMAL
        now = self._to_units(state)
        after_finite = where(is_seen, self._after_finite(now, _log2(size)), now)
        after = where(grads_finite, after_finite, self._after_overflow(now))
        # 2 to the power of the exponent, which is that of a normal number of float32.
        bits = (after.exponent + EXPONENT_BIAS) << MANTISSA_BITS
        logarithms = after.peak, after.level, after.crest
        peak, level, crest = (
            units.astype(jnp.float32) / _BINADE for units in logarithms
        )
        return AdaptiveState(float_of_bits(bits), peak, level, crest, *after[4:])

    def _to_units(self, state: AdaptiveState) -> _Units:
        """Returns a state in integers, without numbers that no step writes.

        A damaged checkpoint may have such.
        """
        level = _heal(state.level, self.level)
        return _Units(
            _log2(state.loss_scale) // _BINADE,
            _heal(state.peak, UNSEEN),
            jnp.clip(level, _to_units(self.min_level), _to_units(self.max_level)),
            _heal(state.crest, UNSEEN),
            *state[4:],
        )

    def _after_overflow(self, now: _Units) -> _Units:
        """Lowers the scale. The first overflow in a row also lowers the level.

        If it comes soon after the last one, it also raises the crest. If the gradients have grown,
        more overflows follow, and the scale alone falls.
        """
        top = jnp.maximum(now.peak, now.crest)
        # All levels in one binade give the same scale, and `binade_end` is the first level beyond
        # those that give the current scale. If the level is there or higher, the scale lags behind
        # it: the scale is still rising, or `max_scale` caps it. Then the overflow says little about
        # the level, and the middle of the binade is taken for the level that overflowed.
        binade_end = (now.exponent + 1) * _BINADE + top
        is_ahead = now.level >= binade_end
        # Before the first gradients the level is not known to be wrong.
        is_blamed = (now.overflows == 0) & (now.peak > _to_units(UNSEEN))
        # If the level was ahead, it may have fallen far for one bad batch: a search goes on.
        restarts = is_blamed & ~is_ahead
        is_soon = restarts & (now.finite_steps < self.period // 4)

        overflowed = jnp.where(is_ahead, binade_end - _BINADE // 2, now.level)
        lowered = overflowed - _BINADE
        level = jnp.maximum(lowered, _to_units(self.min_level))
        # The level stops at its minimum, and the peak rises by what is missing.
        peak = jnp.minimum(now.peak + level - lowered, _HIGHEST)
        # An untried crest was only a guess, and not high enough: the next one is much higher. The
        # same holds after a crest that usual gradients reach.
        distance = top - now.peak
        is_guess = _is_untried(now) | (distance < _CREST_ROOM)
        crest = top + _CREST_ROOM + jnp.where(is_guess, 3 * distance, 0)
        crest = jnp.minimum(crest, _HIGHEST)
        peak = jnp.where(is_blamed, peak, now.peak)
        level = jnp.where(is_blamed, level, now.level)
        crest = jnp.where(is_soon, crest, now.crest)
        fall = jnp.array(_FALLS, jnp.int32)[jnp.minimum(now.overflows, 2)]
        lower = jnp.minimum(now.exponent - fall, _fitting(peak, level, crest))
        return _Units(
            exponent=jnp.maximum(lower, _exponent(self.min_scale)),
            peak=peak,
            level=level,
            crest=crest,
            finite_steps=jnp.where(restarts, 0, now.finite_steps),
            held_steps=jnp.where(is_soon, 0, now.held_steps),
            overflows=jnp.asarray(optax.safe_increment(now.overflows)),
        )

    def _after_finite(self, now: _Units, x: jax.Array) -> _Units:
        """Follows the logarithm of the largest gradient of a finite step."""
        finite_steps: Any = optax.safe_increment(now.finite_steps)
        held_steps: Any = optax.safe_increment(now.held_steps)
        is_searching = now.finite_steps >= self.period
        rise = jnp.where(is_searching, _rise(self.search_period), _rise(self.period))
        # 2 binades below the largest scaled gradient of this step, which has proved to fit.
        shown_level = x + (now.exponent - 2) * _BINADE
        level = jnp.maximum(now.level + rise, shown_level)
        level = jnp.minimum(level, _to_units(self.max_level))
        faded = self._fade(now.peak, x)
        peak = jnp.maximum(x, faded)

        # A step reaches the crest if it is a quarter of the way up or more. The way starts at the
        # faded peak, not at one that this very step has raised. A crest below it is forgotten.
        height = now.crest - faded
        is_reached = (height >= 0) & (4 * (x - faded) >= height)
        is_held = held_steps < self.period // 2
        if_missed = jnp.where(is_held, now.crest, self._fade(now.crest, x))
        if_reached = jnp.maximum(x, (now.crest + x) // 2)
        crest = jnp.where(is_reached, if_reached, if_missed)
        crest = jnp.where(height >= 0, crest, _to_units(UNSEEN))
        # Overflows of batches like this one may have lowered the level too far: search again.
        is_low = _is_untried(now) & (level < _to_units(self.level) - 2 * _BINADE)
        higher = jnp.minimum(_fitting(peak, level, crest), now.exponent + 1)
        bounds = _exponent(self.min_scale), _exponent(self.max_scale)
        return _Units(
            exponent=jnp.clip(higher, *bounds),
            peak=peak,
            level=level,
            crest=crest,
            finite_steps=jnp.where(is_reached & is_low, self.period, finite_steps),
            held_steps=jnp.where(is_reached, 0, held_steps),
            overflows=jnp.zeros_like(now.overflows),
        )

    def _fade(self, old: jax.Array, x: jax.Array) -> jax.Array:
        """Returns a logarithm moved towards that of the current step, by one part in `memory`."""
        return old + jax.lax.div(x - old, jnp.asarray(self.memory, jnp.int32))


def _is_untried(state: _Units) -> jax.Array:
    """Returns whether the last overflow raised the crest, and no finite step has reached it since.

    Both counters restart at 0 when an overflow raises the crest, and only `held_steps` restarts
    when a step reaches it.
    """
    return state.held_steps == state.finite_steps


def _fitting(peak: jax.Array, level: jax.Array, crest: jax.Array) -> jax.Array:
    """Returns the exponent of the largest scale that keeps peak and crest below the level."""
    return (level - jnp.maximum(peak, crest)) // _BINADE


def _exponent(power: float) -> int:
    return math.frexp(power)[1] - 1


def _to_units(level: float) -> int:
    return int(level * _BINADE)


def _rise(period: int) -> int:
    """Returns how much a level rises in a step if it rises by one in a period."""
    return max(1, round(_BINADE / period))


def _heal(logarithm: jax.Array, otherwise: float) -> jax.Array:
    """Returns a logarithm in units, or another one in place of one that no step writes."""
    is_usable = jnp.abs(logarithm) <= -UNSEEN
    return (jnp.where(is_usable, logarithm, otherwise) * _BINADE).astype(jnp.int32)


def _log2(number: jax.Array) -> jax.Array:
    """Returns the binary logarithm of a positive normal number in units, rounded down.

    It consists of the exponent and, behind the point, the first bits of the mantissa. So it is
    exact at powers of two and linear between them, at most 0.09 below the logarithm.
    """
    # 16 of the 23 bits of the mantissa stay, as a binade has 2**16 units.
    return (float_bits(number) >> (MANTISSA_BITS - 16)) - EXPONENT_BIAS * _BINADE
