"""The policy that follows the largest gradient, instead of probing for the highest scale.

The numbers between the layers may be larger than the largest gradient, and these overflow first.
How much larger they are is learned from overflows, and stored as the `level`. The gradients of
rare batches may also be larger than usual, and a step that overflows hides their size. So larger
and larger sizes are tried, and the current guess is the `crest`.

All arithmetic is on integers: see `adaptive_units.py`.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from .._state.scale import AdaptiveState
from .._trees.checks import finite_number, int32, limited, power_of_two
from .._trees.numbers import SMALLEST_NORMAL, increment
from .._trees.selection import tree_where
from .adaptive_units import (
    BINADE,
    HIGHEST,
    LEVEL_BINADE,
    LEVEL_UNITS,
    UNSEEN,
    IntegerState,
    heal_count,
    heal_logarithm,
    is_untried,
    log2,
    to_floats,
    to_logarithm,
    to_logarithm_above,
    to_units,
)
from .base import CheckedLossScale, new_state

# A raised crest is at least this far above the last one and the peak, if `min_scale` allows it.
_CREST_ROOM = 3 * BINADE


def _check_scale(call: str, name: str, scale: Any) -> float:
    return 2.0 ** power_of_two(call, name, scale)


_check_level = limited(
    finite_number,
    lambda level: -14 <= level < 16,
    "be at least -14 and below 16",
    " It is a binary logarithm, of what the largest scaled gradient may reach, and float16 holds "
    "normal numbers from 2**-14 to below 2**16: pass 13.0, or leave it out.",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaptiveLossScale(CheckedLossScale):
    """A loss scale that follows the largest gradient.

    The scale is the largest power of two that keeps the usual largest gradient below
    `2**level`, the point beyond which runs like this one have overflowed. An overflow lowers
    the level by one, and finite steps raise it slowly. Several overflows in a row mean that
    the gradients have grown, and the scale falls fast. If single overflows repeat, some batches
    have much larger gradients than usual. The scale then makes more and more room for them until
    one of them passes, which costs a handful of batches. With
    `jaxscale.train_step(..., retries=10)` no batch is lost.

    In detail, the rule works with four binary logarithms. `x` is that of the largest absolute value
    among the unscaled gradients of a step (linear between two powers of two). `peak` is that of its
    usual size, and `crest` that of the size assumed for rare large batches, -256 if there are none.
    `level` is that of what the largest scaled gradient may reach.

    - Finite step: `peak <- max(x, faded_peak)`, with `faded_peak = peak + (x - peak) / memory`. The
      level rises by `1 / period`. In a *search*, that is while `finite_steps` is at least `period`,
      as at the start, it rises by `1 / search_period`. It rises at least to 2 below what the
      largest scaled gradient of this step has reached, and at most to `max_level`. Then
      `loss_scale <- 2**floor(level - max(peak, crest))`, but at most twice the last scale.
    - First overflow in a row: `loss_scale <- loss_scale / 2`. The level falls by one, and
      `finite_steps` restarts at 0. While the scale is still rising towards the level, though, an
      overflow says little about the level. It is then set 1/2 below the lowest level that gives the
      scale that overflowed, `finite_steps` goes on, and so does a search. In both cases the level
      stops at `min_level`: the peak rises instead, and then fades back. Before the first gradients
      only the scale falls.
    - If an overflow restarts `finite_steps` while it is below `period / 4`, the crest also rises,
      `held_steps` restarts at 0 too, and the scale falls at once to what the crest allows. With
      `d = max(crest - peak, 0)` before the overflow, the crest becomes `peak + 4 * d + 3` if it was
      untried or `d` was below 3, and otherwise `peak + d + 3`. So it is 3 above the peak, then 15,
      then 63, unless that would ask for a scale below `min_scale`. *Untried* means that
      `held_steps` equals `finite_steps`: the last overflow that restarted `finite_steps` also
      raised the crest, and no step has reached it since.
    - A finite step *reaches* the crest if its `x` is at least a quarter of the way up from
      `faded_peak` to the crest. Then the crest falls half the way to `x`, or rises to `x`, and
      `held_steps` restarts at 0. If the crest was untried, and the level is more than 2 below the
      initial level, a search begins: `finite_steps <- period`. If no step reaches the crest in
      `period / 2` finite steps, it fades like the peak. A crest below `faded_peak` is forgotten.
    - Second overflow in a row: `loss_scale <- loss_scale / 2**8`; each further one:
      `loss_scale <- loss_scale / 2**16`. Level, peak and crest stay.
    - All gradients are zero: nothing changes. If they are flushed to zero at `init_scale`, start
      higher: `jaxscale.check` says so.
    - Finite step without gradients, as in `adjust(state, True)`: the peak stays, and the crest is
      forgotten. If the scale has been lowered or has not risen yet, the peak rises, so that only
      the rise of the level makes the scale grow. At `max_level` the peak falls instead.

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
      period: how many finite steps it takes to raise the level by one after an overflow, and
        then to begin a new search. If gradients vary, about one step in `period` overflows.
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
    _ascending = (*CheckedLossScale._ascending, ("min_level", "level", "max_level"))
    _checks = (
        CheckedLossScale._checks
        | dict.fromkeys(("init_scale", "min_scale", "max_scale"), _check_scale)
        | dict.fromkeys(("level", "min_level", "max_level"), _check_level)
        | dict.fromkeys(("memory", "period", "search_period"), int32)
    )

    def init(self) -> Any:
        """Returns the initial `AdaptiveState`."""
        return new_state(
            AdaptiveState,
            loss_scale=self.init_scale,
            peak=float(UNSEEN),
            level=to_units(self.level) / LEVEL_BINADE,
            crest=float(UNSEEN),
            finite_steps=self.period,  # so that a search begins
        )

    def _move(
        self, state: Any, grads_finite: jax.Array, largest: jax.Array | None
    ) -> Any:
        """Returns the next state.

        `largest` is the largest absolute value among the unscaled gradients, or `None` if it is not
        known. Then the scale only follows the level: it doubles in `period` finite steps, and in a
        search in `search_period`.
        """
        now = self._to_integers(state)
        if largest is None:
            after_finite = self._after_finite_step(now, None)
        else:
            # Zero does not count as seen. Nor do subnormal numbers: some devices flush them to
            # zero and others do not, and the scale should not depend on that.
            is_seen = largest >= SMALLEST_NORMAL
            after_finite = tree_where(
                is_seen, self._after_finite_step(now, log2(largest)), now
            )
        after = tree_where(grads_finite, after_finite, self._after_overflow(now))
        return to_floats(after)

    def _to_integers(self, state: AdaptiveState) -> IntegerState:
        """Returns a state in integers.

        Numbers that no step writes, as in a damaged checkpoint, are replaced: a level that is not
        finite by the initial one, a peak or a crest by `UNSEEN`, and a negative count by 0. Level
        and scale are brought into their ranges, but a scale below `min_scale` is left as it is.
        """
        has_level = jnp.isfinite(state.level)
        level = jnp.where(has_level, state.level, self.level)
        level = jnp.clip(level, self.min_level, self.max_level)
        peak = heal_logarithm(state.peak)
        crest = heal_logarithm(state.crest)
        exponent = log2(state.loss_scale) // BINADE
        return IntegerState(
            exponent=jnp.minimum(exponent, _exponent(self.max_scale)),
            peak=(peak * BINADE).astype(jnp.int32),
            level=(level * LEVEL_BINADE).astype(jnp.int32),
            crest=(crest * BINADE).astype(jnp.int32),
            finite_steps=heal_count(state.finite_steps),
            held_steps=heal_count(state.held_steps),
            overflows=heal_count(state.overflows),
        )

    def _after_overflow(self, now: IntegerState) -> IntegerState:
        """Lowers the scale. The first overflow in a row also lowers the level.

        If it comes soon after the last one, it also raises the crest. If the gradients have grown,
        more overflows follow, and the scale alone falls.
        """
        top = jnp.maximum(now.peak, now.crest)
        # All levels in one binade give the same scale, and `binade_end` is the first level beyond
        # those that give the current scale. If the level is there or higher, the scale lags behind
        # it: the scale is still rising, or `max_scale` caps it. Then the overflow says little about
        # the level, and the middle of the binade is taken for the level that overflowed.
        binade_end = (now.exponent + 1) * LEVEL_BINADE + top * LEVEL_UNITS
        level_is_ahead = now.level >= binade_end
        # Before the first gradients the level is not known to be wrong.
        is_blamed = (now.overflows == 0) & (now.peak > UNSEEN * BINADE)
        is_soon = is_blamed & ~level_is_ahead & (now.finite_steps < self.period // 4)

        binade_middle = binade_end - LEVEL_BINADE // 2
        overflowed = jnp.where(level_is_ahead, binade_middle, now.level)
        level = overflowed - LEVEL_BINADE
        # The level stops at its minimum, and the peak rises by what is missing.
        below_minimum = jnp.maximum(to_units(self.min_level) - level, 0)
        level += below_minimum
        peak = jnp.minimum(now.peak + to_logarithm_above(below_minimum), HIGHEST)
        crest = self._raise_crest(now, top, level)
        exponent = self._lower_exponent(now, level, crest, is_soon)
        return IntegerState(
            exponent=exponent,
            peak=jnp.where(is_blamed, peak, now.peak),
            level=jnp.where(is_blamed, level, now.level),
            crest=jnp.where(is_soon, crest, now.crest),
            # If the level was ahead, it may have fallen far for one bad batch: a search goes on.
            finite_steps=jnp.where(is_blamed & ~level_is_ahead, 0, now.finite_steps),
            held_steps=jnp.where(is_soon, 0, now.held_steps),
            overflows=increment(now.overflows),
        )

    def _raise_crest(
        self, now: IntegerState, top: jax.Array, level: jax.Array
    ) -> jax.Array:
        """Returns the crest after an overflow soon after the last one.

        `top` is the higher of peak and crest before it, and `level` the lowered level.
        """
        # An untried crest was only a guess, and not high enough: the next one is much higher. The
        # same holds after a crest less than `_CREST_ROOM` above the peak: usual gradients reach
        # such a crest, so reaching it does not show that it is high enough.
        distance = top - now.peak
        is_guess = is_untried(now) | (distance < _CREST_ROOM)
        crest = top + _CREST_ROOM
        crest += jnp.where(is_guess, 3 * distance, 0)
        # A higher crest than this would ask for a scale below `min_scale`.
        lowest_scale = _exponent(self.min_scale) * BINADE
        highest_useful = jnp.maximum(to_logarithm(level) - lowest_scale, top)
        crest = jnp.minimum(crest, highest_useful)
        return jnp.minimum(crest, HIGHEST)

    def _lower_exponent(
        self,
        now: IntegerState,
        level: jax.Array,
        crest: jax.Array,
        is_soon: jax.Array,
    ) -> jax.Array:
        """Returns the exponent of the scale after an overflow.

        It is not below `min_scale` unless the old one was. `level` and `crest` are the new ones,
        and count only if the overflow came soon after the last one.
        """
        is_first = now.overflows == 0
        is_second = now.overflows == 1
        fall = jnp.where(is_first, 1, jnp.where(is_second, 8, 16))
        exponent = now.exponent - fall
        fitting = (to_logarithm(level) - crest) // BINADE
        exponent = jnp.where(is_soon, jnp.minimum(exponent, fitting), exponent)
        exponent = jnp.maximum(exponent, _exponent(self.min_scale))
        # A restored scale may lie below the minimum, and an overflow must not raise it.
        return jnp.minimum(now.exponent, exponent)

    def _after_finite_step(
        self, now: IntegerState, x: jax.Array | None
    ) -> IntegerState:
        """Returns the state after a finite step.

        `x` is the logarithm of its largest gradient in units, or `None` if it is not known.
        """
        slow = max(1, round(LEVEL_BINADE / self.period))
        fast = max(1, round(LEVEL_BINADE / self.search_period))
        is_searching = now.finite_steps >= self.period
        raised_level = now.level + jnp.where(is_searching, fast, slow)
        counted = now._replace(
            finite_steps=increment(now.finite_steps),
            held_steps=increment(now.held_steps),
        )
        if x is None:
            after = self._follow_level(counted, raised_level)
        else:
            after = self._follow_gradient(counted, raised_level, x)
        level = to_logarithm(after.level)
        top = jnp.maximum(after.peak, after.crest)
        target = (level - top) // BINADE
        target = jnp.minimum(target, now.exponent + 1)
        lowest = _exponent(self.min_scale)
        highest = _exponent(self.max_scale)
        return after._replace(
            exponent=jnp.clip(target, lowest, highest),
            overflows=jnp.zeros_like(now.overflows),
        )

    def _follow_level(self, now: IntegerState, raised_level: jax.Array) -> IntegerState:
        """Returns all but the scale after a finite step whose largest gradient is not known."""
        level = jnp.minimum(raised_level, to_units(self.max_level))
        # If the scale is a binade or more below what level and peak allow, an overflow or the crest
        # lowered it, or it has not risen yet. Raising the peak keeps it there.
        scale_logarithm = now.exponent * BINADE
        peak_of_scale = to_logarithm(now.level) - scale_logarithm
        is_lagging = peak_of_scale - BINADE >= now.peak
        peak = jnp.where(is_lagging, peak_of_scale, now.peak)
        # The level stops at its maximum, and the peak falls by what is missing.
        peak -= to_logarithm_above(raised_level - level)
        crest = jnp.full_like(now.crest, UNSEEN * BINADE)  # the peak holds the scale
        return now._replace(peak=peak, level=level, crest=crest)

    def _follow_gradient(
        self, now: IntegerState, raised_level: jax.Array, x: jax.Array
    ) -> IntegerState:
        """Returns all but the scale after a finite step whose largest gradient is known.

        `now` has counted this step already. `x` is the logarithm of the gradient in units.
        """
        # 2 binades below the largest scaled gradient of this step, which has proved to fit.
        shown_level = x * LEVEL_UNITS + (now.exponent - 2) * LEVEL_BINADE
        level = jnp.maximum(raised_level, shown_level)
        level = jnp.minimum(level, to_units(self.max_level))
        faded = self._fade(now.peak, x)
        peak = jnp.maximum(x, faded)

        # A step reaches the crest if it is a quarter of the way up or more. The way starts at the
        # faded peak, not at one that this very step has raised. A crest below it is forgotten.
        height = now.crest - faded
        is_reached = (height >= 0) & (4 * (x - faded) >= height)
        # Overflows of batches like this one may have lowered the level too far: search again.
        is_low = is_untried(now) & (level < to_units(self.level) - 2 * LEVEL_BINADE)
        finite_steps = jnp.where(is_reached & is_low, self.period, now.finite_steps)
        is_held = now.held_steps < self.period // 2
        crest_if_missed = jnp.where(is_held, now.crest, self._fade(now.crest, x))
        crest_if_reached = jnp.maximum(x, (now.crest + x) // 2)
        crest = jnp.where(is_reached, crest_if_reached, crest_if_missed)
        return now._replace(
            peak=peak,
            level=level,
            crest=jnp.where(height >= 0, crest, UNSEEN * BINADE),
            finite_steps=finite_steps,
            held_steps=jnp.where(is_reached, 0, now.held_steps),
        )

    def _fade(self, old: jax.Array, x: jax.Array) -> jax.Array:
        """Returns a logarithm moved towards that of the current step, by one part in `memory`."""
        return old + jax.lax.div(x - old, jnp.asarray(self.memory, jnp.int32))


def _exponent(power: float) -> int:
    return math.frexp(power)[1] - 1
