"""The policy that follows the largest gradient, instead of probing for the highest scale.

The largest gradient does not say how much larger the numbers between the layers are, which
overflow first: that is learned from overflows, as the `level`. Nor does it say how large the
gradients of rare batches are, as a step that overflows shows no size: that is tried, as the
`crest`.

All arithmetic is that of integers. Binary logarithms count in units of 2**-16, levels in units of
2**-20; both are whole numbers that float32 holds exactly, so the state shows them as floats. The
logarithm of a float comes from its bits, and a scale is built from its exponent: `log2` and `exp2`
may be off by an ulp, and a scale that is not a power of two rounds every gradient.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._state.scale import AdaptiveState
from .._trees.checks import finite_number, int32, power_of_two
from .._trees.tree import tree_where
from .base import CheckedLossScale, new_state

# In units: a binade of a logarithm, and of a level, which rises in smaller steps.
_BINADE, _LEVEL = 2**16, 2**20
_SHIFT = 4  # from units of a level to those of a logarithm
# The logarithm of the usual largest gradient as long as none was seen, and of a rare one.
UNSEEN = -256
_SMALLEST = float(jnp.finfo(jnp.float32).smallest_normal)


def _check_scale(call: str, name: str, scale: Any) -> float:
    return 2.0 ** power_of_two(call, name, scale)


def _check_level(call: str, name: str, level: Any) -> float:
    level = finite_number(call, name, level)
    if not -14 <= level < 16:
        raise ValueError(
            f"`{call}({name}=...)` must be at least -14 and below 16, got {level}. It is a binary "
            "logarithm, of what the largest scaled gradient may reach, and float16 holds normal "
            "numbers from 2**-14 to below 2**16: pass 13.0, or leave it out."
        )
    return level


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaptiveLossScale(CheckedLossScale):
    """A loss scale that follows the largest gradient.

    The scale is the largest power of two that keeps the usual largest gradient below
    `2**level`, the point beyond which runs like this one have overflowed. An overflow lowers
    the level by one and finite steps raise it slowly; several overflows in a row mean that
    the gradients have grown, and the scale falls fast. Single overflows that repeat mean that
    some batches have much larger gradients than usual: the scale makes room for them, by more
    and more until one of them passes, at the price of a handful. With
    `jaxscale.train_step(..., retries=10)` none is lost.

    In detail, with `x` the binary logarithm of the largest absolute value among the unscaled
    gradients (linear between two powers of two):

    - Finite step: `peak <- max(x, peak + (x - peak) / memory)`. The level rises by
      `1 / period`, or by `1 / search_period` at the start and when the last overflow is `period`
      finite steps ago, and at least to 2 below what this step has shown to fit, up to `max_level`.
      Then `loss_scale <- 2**floor(level - max(peak, crest))`, but at most twice the last scale.
    - First overflow in a row: `loss_scale <- loss_scale / 2`. The level falls by one; if the scale
      was still rising towards it, to 1/2 below the levels that the scale stood for, and a search
      goes on. Instead of the level falling below `min_level`, the peak rises, which wears off.
    - If there was another one less than `period / 4` finite steps ago, the crest rises, too: to 3
      above itself or the peak. If it was raised then and not reached since, or is less than 3 above
      the peak, its distance is multiplied by 4 before, so that it is 3, 15 and 63 above. A finite
      step reaches it whose `x` is a quarter of the way up or more: then it falls half the way to
      `x`, or rises to `x`; and if the first one finds the level more than 2 below that at the
      start, a search begins. If none reaches it in `period / 2` finite steps it fades as the peak.
    - Second overflow in a row: `loss_scale <- loss_scale / 2**8`; each further one:
      `loss_scale <- loss_scale / 2**16`. Level, peak and crest stay.
    - All gradients are zero: nothing changes. If they are flushed to zero at `init_scale`, start
      higher: `jaxscale.check` says so.
    - Finite step without gradients, as in `adjust(state, True)`: the peak stays, or is raised where
      the scale has been lowered, so that the scale grows by the rise of the level alone. At
      `max_level` the peak falls in its place.

    The scale is always a power of two between `min_scale` and `max_scale`. In a step the largest
    gradient comes from the pass that finds whether all are finite: no gradient is read once more
    than with `DynamicLossScale`, unless they are also clipped by `max_norm`.

    Args:
      init_scale: the scale of the first step, a power of two. The next steps at most double
        it, so that a low one finds its level within a few dozen steps and without a skip.
      level: the level at the start, from -14 to below 16: float16 holds numbers below 2**16.
      min_level: the level never falls below this.
      max_level: the level never rises above this. Half a binade below 16 leaves room for
        gradients that are larger than usual.
      memory: after how many steps a peak has lost most of its weight.
      period: how many finite steps it takes to raise the level by one after an overflow, and
        then to search again. Where gradients vary, about one step in `period` overflows.
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

    def _ascending(self) -> list[tuple[str, ...]]:
        return [*super()._ascending(), ("min_level", "level", "max_level")]

    def init(self) -> Any:
        """Returns the initial `AdaptiveState`."""
        level, unseen = _units(self.level) / _LEVEL, float(UNSEEN)
        return new_state(AdaptiveState, self.init_scale, unseen, level, unseen, self.period, 0, 0)

    def _move(self, state: Any, grads_finite: jax.Array, largest: jax.Array | None) -> Any:
        """Returns the next state. Without `largest` a scale doubles in `period` finite steps."""
        now = self._counted(state)
        if largest is None:
            after_finite = self._follow(now, None)
        else:
            # False for 0. XLA may take subnormal numbers for 0, or may not.
            is_seen = largest >= _SMALLEST
            after_finite = tree_where(is_seen, self._follow(now, _log2(largest)), now)
        after = tree_where(grads_finite, after_finite, self._after_overflow(now))
        return AdaptiveState(
            # 2 to the power of the exponent, which is that of a normal number of float32.
            loss_scale=jax.lax.bitcast_convert_type((after.exponent + 127) << 23, jnp.float32),
            peak=after.peak.astype(jnp.float32) / _BINADE,
            level=after.level.astype(jnp.float32) / _LEVEL,
            crest=after.crest.astype(jnp.float32) / _BINADE,
            finite_steps=after.finite_steps,
            held_steps=after.held_steps,
            overflows=after.overflows,
        )

    def _counted(self, state: AdaptiveState) -> "_Counted":
        """Returns a state in integers. Numbers that no step leaves behind are replaced."""
        level = jnp.where(jnp.isfinite(state.level), state.level, self.level)
        level = jnp.clip(level, self.min_level, self.max_level)
        peak, crest = (jnp.where(jnp.abs(x) <= 128, x, UNSEEN) for x in (state.peak, state.crest))
        return _Counted(
            exponent=jnp.minimum(_log2(state.loss_scale) // _BINADE, _exponent(self.max_scale)),
            peak=(peak * _BINADE).astype(jnp.int32),
            level=(level * _LEVEL).astype(jnp.int32),
            crest=(crest * _BINADE).astype(jnp.int32),
            finite_steps=jnp.maximum(jnp.asarray(state.finite_steps, jnp.int32), 0),
            held_steps=jnp.maximum(jnp.asarray(state.held_steps, jnp.int32), 0),
            overflows=jnp.maximum(jnp.asarray(state.overflows, jnp.int32), 0),
        )

    def _after_overflow(self, now: "_Counted") -> "_Counted":
        run, lowest = now.overflows, _exponent(self.min_scale)
        top = jnp.maximum(now.peak, now.crest)
        # While the scale is rising, or if `max_scale` holds it, the level lies beyond the levels
        # that it stands for. Then the middle of these is what overflowed.
        beyond = (now.exponent + 1) * _LEVEL + top * 2**_SHIFT
        is_ahead = now.level >= beyond
        # Before the first gradients the level is not known to be wrong.
        is_blamed = (run == 0) & (now.peak > UNSEEN * _BINADE)
        is_repeated = is_blamed & ~is_ahead & (now.finite_steps < self.period // 4)

        level = jnp.where(is_ahead, beyond - _LEVEL // 2, now.level) - _LEVEL
        short = jnp.maximum(_units(self.min_level) - level, 0)
        level += short
        peak = jnp.minimum(now.peak + (short + 2**_SHIFT - 1) // 2**_SHIFT, 128 * _BINADE)

        # The last crest was not enough if nothing finite has come near it. Usual gradients come
        # near a low one.
        room = top - now.peak
        is_guess = (now.held_steps == now.finite_steps) | (room < 3 * _BINADE)
        higher = top + 3 * _BINADE + jnp.where(is_guess, 3 * room, 0)
        # Beyond this the scale would not fall any further.
        last = jnp.maximum(level // 2**_SHIFT - lowest * _BINADE, top)
        crest = jnp.minimum(jnp.minimum(higher, last), 128 * _BINADE)

        lowered = now.exponent - jnp.where(run == 0, 1, jnp.where(run == 1, 8, 16))
        fitting = (level // 2**_SHIFT - crest) // _BINADE
        lowered = jnp.where(is_repeated, jnp.minimum(lowered, fitting), lowered)
        return _Counted(
            exponent=jnp.minimum(now.exponent, jnp.maximum(lowered, lowest)),
            peak=jnp.where(is_blamed, peak, now.peak),
            level=jnp.where(is_blamed, level, now.level),
            crest=jnp.where(is_repeated, crest, now.crest),
            # If the level was ahead, it may have fallen far for one bad batch: a search goes on.
            finite_steps=jnp.where(is_blamed & ~is_ahead, 0, now.finite_steps),
            held_steps=jnp.where(is_repeated, 0, now.held_steps),
            overflows=jnp.asarray(optax.safe_increment(run)),
        )

    def _follow(self, now: "_Counted", x: jax.Array | None) -> "_Counted":
        """Returns what follows a finite step, with `x` the logarithm of its largest gradient."""
        slow, fast = (max(1, round(_LEVEL / p)) for p in (self.period, self.search_period))
        rise = jnp.where(now.finite_steps >= self.period, fast, slow)
        raised, highest = now.level + rise, _units(self.max_level)
        finite_steps = jnp.asarray(optax.safe_increment(now.finite_steps))
        held_steps = jnp.asarray(optax.safe_increment(now.held_steps))
        if x is None:
            level = jnp.minimum(raised, highest)
            held = now.level // 2**_SHIFT - now.exponent * _BINADE
            peak = jnp.where(held - _BINADE >= now.peak, held, now.peak)
            peak -= (raised - level + 2**_SHIFT - 1) // 2**_SHIFT
            crest = jnp.full_like(now.crest, UNSEEN * _BINADE)  # the peak holds the scale
        else:
            seen = x * 2**_SHIFT + (now.exponent - 2) * _LEVEL
            level = jnp.minimum(jnp.maximum(raised, seen), highest)
            faded = self._faded(now.peak, x)
            peak = jnp.maximum(x, faded)
            above = now.crest - faded
            is_reached = (above >= 0) & (4 * (x - faded) >= above)
            # If the level was lowered far, it may have been for a batch like this one.
            is_low = (held_steps == finite_steps) & (level < _units(self.level) - 2 * _LEVEL)
            finite_steps = jnp.where(is_reached & is_low, self.period, finite_steps)
            is_held = held_steps < self.period // 2
            waiting = jnp.where(is_held, now.crest, self._faded(now.crest, x))
            crest = jnp.where(is_reached, jnp.maximum(x, (now.crest + x) // 2), waiting)
            crest = jnp.where(above >= 0, crest, UNSEEN * _BINADE)
            held_steps = jnp.where(is_reached, 0, held_steps)
        target = (level // 2**_SHIFT - jnp.maximum(peak, crest)) // _BINADE
        bounds = _exponent(self.min_scale), _exponent(self.max_scale)
        exponent = jnp.clip(jnp.minimum(target, now.exponent + 1), *bounds)
        overflows = jnp.zeros_like(now.overflows)
        return _Counted(exponent, peak, level, crest, finite_steps, held_steps, overflows)

    def _faded(self, old: jax.Array, x: jax.Array) -> jax.Array:
        return old + jax.lax.div(x - old, jnp.asarray(self.memory, jnp.int32))


class _Counted(NamedTuple):
    """An `AdaptiveState` in integers: the exponent of the scale, and units."""

    exponent: jax.Array
    peak: jax.Array  # in units of 2**-16
    level: jax.Array  # in units of 2**-20
    crest: jax.Array  # in units of 2**-16
    finite_steps: jax.Array
    held_steps: jax.Array
    overflows: jax.Array


def _units(level: float) -> int:
    return int(level * _LEVEL)


def _exponent(power: float) -> int:
    return power_of_two("AdaptiveLossScale", "a scale", power)


def _log2(number: jax.Array) -> jax.Array:
    """Returns the binary logarithm of a positive normal number in units, rounded down.

    It is exact at powers of two and linear between them, at most 0.09 below the logarithm: the
    exponent, and the first bits of the mantissa behind it.
    """
    return (jax.lax.bitcast_convert_type(number, jnp.int32) >> 7) - 127 * _BINADE
