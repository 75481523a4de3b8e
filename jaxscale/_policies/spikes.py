"""The rule that skips finite steps whose loss or gradient norm stands out.

One window holds the last losses, another the last gradient norms. A value is a spike if it exceeds
the *threshold* of its window, which lies some standard deviations above the mean. Spike or not, the
value then enters the window, clipped if it is far out, so that one spike does not hide the next.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from .._state.optimizer import SPIKE_WINDOWS, SpikeState
from .._trees.arguments import check_fields, finite_number, int32, limited
from .._trees.selection import where
from .base import new_state
from .spike_statistics import Statistics, measure, min_relative_std

# How far from the mean a value that is not a spike may enter its window, in distances from the mean
# to the threshold. Upwards this matters only while the window does not judge yet.
_CLIP_FACTOR = 5.0

# The same for a spike that is not alone in its window, by the spikes in a row before it. If the
# limit did not grow, a new level that is a million times as high would be skipped for so long that
# `jaxscale.check` would raise an error. From the tenth spike in a row on, spikes enter as they are.
# With a full default window their level is then accepted in 6 more steps, however high it is.
_LIMITS_IN_ROW = (5.0, *(5.0**spikes for spikes in range(1, 9)), math.inf)

# Values that are not judged yet are clipped from this many entries on, as an early spike would hide
# others.
_MIN_CLIP_HISTORY = 4

_check_length = functools.partial(int32, least=2)
_check_sigmas = limited(
    finite_number,
    lambda sigmas: 0 < sigmas <= 1e6,
    "be above 0 and at most 1e6",
    " It is how many standard deviations above the mean a step may stand: pass 6.0, or leave "
    "`spikes` out to skip no finite step.",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpikeRule:
    """Skips steps that are finite but bad: their loss or gradient norm stands out.

    Pass it as `spikes=` to `jaxscale.loss_scaled` or `jaxscale.skip_nonfinite`. A step is skipped
    if its loss exceeds the mean of the last `window` losses by more than `sigmas` standard
    deviations, or if the global norm of its gradients does so among the last `window` norms.
    Without a loss, a step is judged by its norm alone.

    - A window judges nothing while it has fewer than `min_history` entries: by default the first 64
      steps are taken as they are, and a spike among them is applied.
    - A step that is not finite enters neither window; it is skipped anyway. A step whose norm is
      exactly 0 offers nothing to learn from: it is not judged, and enters neither window. So
      gradients that are rare among zeros are not spikes.
    - A step whose gradients are finite, but so large that their norm is not, is a spike from the
      first step on: it would set Adam's second moment to inf for good. No such level is accepted.
    - A spike is clipped as it enters its window. If there was no spike in the `window` steps before
      it, it enters as the threshold itself, so that it does not hide the next one. Any other spike
      is clipped to `5 * sigmas` standard deviations above the mean if it is the first or the second
      of its row, to 5 times more for each further one, and from the tenth on not at all. So a new
      level is accepted after a few skipped steps: with the defaults after 6 if it is 100 standard
      deviations higher, after 7 if it is 1000, after 8 if it is 100 000, and never after more than
      15.
    - Once its window has four entries, or judges, a value that is not a spike is clipped to
      `5 * sigmas` standard deviations from the mean as it enters.
    - The standard deviation counts as at least 1e-6 of the mean, and at least half the spacing of
      numbers in the dtype of the loss, so that rounding alone is never a spike. A window of zeros
      judges nothing. Losses below zero are judged in the same way. A low value is never a spike.

    This rule cannot tell a rare kind of batch from a bad one. A kind that stands out and makes up
    3, 4 or 5 % of the steps has 55, 30 or 15 % of its own steps skipped, and one that comes in
    every 50th step is hardly ever learned from. Gradients that are rare among tiny ones, such as
    1e-6, are also skipped; only those that are rare among exact zeros are kept. `total_spikes` of
    `jaxscale.metrics` counts what is lost.

    Nor can it tell a ruined run from new data, as it accepts either level.

    Args:
      window: how many of the last steps are kept, at least 2.
      sigmas: how many standard deviations above the mean a step may stand, above 0 and at most
        1e6. Norms are often far from a normal distribution: if the logarithm of the norm is normal
        with a standard deviation of 0.3, 0.6 or 1, the default takes 3, 22 or 57 of 10 000 good
        steps for spikes.
      min_history: how many entries a window must have before it judges, from 2 to `window`; by
        default half of `window`.

    Raises:
      ValueError: if an argument is out of range, or a bool.
      TypeError: if `sigmas` is not a number, or a count not an integer.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxscale
      >>> rule = jaxscale.SpikeRule(window=8, min_history=2)
      >>> state = rule.init()
      >>> for norm in [1.0, 1.1, 0.9, 50.0, 1.0]:
      ...     is_spike, state = rule.judge(state, None, jnp.array(norm), jnp.array(True))
      ...     print(is_spike)
      False
      False
      False
      True
      False

    References:
      OLMo-core's `SkipStepOptimizer`. In that rule spikes enter the windows unclipped.
    """

    window: int = 128
    sigmas: float = 6.0
    min_history: int | None = None

    def __post_init__(self) -> None:
        check_fields(self, {"window": _check_length, "sigmas": _check_sigmas})
        if self.min_history is None:
            return
        check_fields(self, {"min_history": _check_length})
        if self.min_history > self.window:
            raise ValueError(
                f"`{type(self).__name__}(min_history=...)` must be at most window={self.window}, "
                f"got {self.min_history}: no step would ever be judged."
            )

    def init(self) -> SpikeState:
        """Returns the initial state: both windows are empty."""
        state = new_state(
            SpikeState,
            losses=0.0,
            grad_norms=0.0,
            loss_threshold=math.inf,
            norm_threshold=math.inf,
            loss_deviation=0.0,
            norm_deviation=0.0,
        )
        return state._replace(
            losses=jnp.zeros(self.window, jnp.float32),
            grad_norms=jnp.zeros(self.window, jnp.float32),
        )

    def judge(
        self,
        state: SpikeState,
        loss: ArrayLike | None,
        grad_norm: ArrayLike,
        finite: ArrayLike,
    ) -> tuple[jax.Array, SpikeState]:
        """Judges whether a step is a spike, and returns that with the next state.

        A step that is not finite, or whose norm is 0, is not judged: it is not a spike, and the
        state stays as it is.

        Args:
          state: the state of this step.
          loss: the loss, a floating scalar. If it is `None`, the window of losses stays as it is.
          grad_norm: the global norm of the gradients, a floating scalar. It is inf if the squares
            of finite gradients overflow; that is a spike.
          finite: a `bool[]`, whether the gradients and the loss are finite.

        Returns:
          A `bool[]`, and the next state with the shapes and dtypes of `state`.
        """
        spike_limit = self._find_limit(state)
        is_spike, next_state = self._judge_value("norm", grad_norm, state, spike_limit)
        if loss is not None:
            is_high, next_state = self._judge_value(
                "loss", loss, next_state, spike_limit
            )
            is_spike |= is_high

        # A step whose norm is inf would set Adam's second moment to inf for good.
        norm_overflows = ~jnp.isfinite(grad_norm)
        is_spike |= norm_overflows
        next_state = self._count_step(next_state, is_spike, norm_overflows)
        # A step whose norm is 0 offers nothing to learn from, and would distort the judgement of
        # later steps.
        counts = jnp.asarray(finite) & (jnp.asarray(grad_norm) != 0)
        return is_spike & counts, where(counts, next_state, state)

    def _count_step(
        self, state: SpikeState, is_spike: jax.Array, norm_overflows: jax.Array
    ) -> SpikeState:
        """Counts a step that was judged."""
        total_spikes = optax.safe_increment(state.total_spikes)
        overflows = optax.safe_increment(state.total_norm_overflows)
        in_row = optax.safe_increment(state.spike_count)
        left = jnp.maximum(state.cooldown, 1) - 1
        return state._replace(
            total_spikes=jnp.where(is_spike, total_spikes, state.total_spikes),
            spike_count=jnp.where(is_spike, in_row, 0),
            total_norm_overflows=jnp.where(
                norm_overflows, overflows, state.total_norm_overflows
            ),
            cooldown=jnp.where(is_spike, self.window, left),
        )

    def _find_limit(self, state: SpikeState) -> jax.Array:
        """Returns the limit that the next spike is clipped to as it enters its window.

        It is a multiple of the distance from the mean to the threshold: 1 for a spike that is alone
        in its window, and inf for one that enters as it is.
        """
        last = len(_LIMITS_IN_ROW) - 1
        limits = jnp.array(_LIMITS_IN_ROW, jnp.float32)
        in_row = limits[jnp.minimum(state.spike_count, last)]
        # For `cooldown` more steps, a spike is not alone in its window.
        return jnp.where(state.cooldown == 0, 1.0, in_row)

    def _judge_value(
        self,
        kind: str,
        value: object,
        state: SpikeState,
        spike_limit: jax.Array,
    ) -> tuple[jax.Array, SpikeState]:
        """Judges a loss or a norm by the window of the last ones, and enters it there.

        Returns whether it is a spike, and the next state. `spike_limit` is what `_find_limit`
        returned.
        """
        fields = SPIKE_WINDOWS[kind]
        entries = getattr(state, fields[0])
        entry_count = getattr(state, fields[1])
        dtype = jnp.result_type(value)
        statistics = measure(entries, entry_count)
        mean = statistics.mean
        std = statistics.std
        value = jnp.asarray(value).astype(jnp.float32)
        # The value in multiples of the unit, as the statistics are. This may overflow to inf, which
        # still compares correctly.
        scaled = value * statistics.inverse_unit

        min_history = self.min_history
        if min_history is None:
            min_history = max(2, self.window // 2)
        # Equal entries would make any other value a spike.
        std = jnp.maximum(std, min_relative_std(dtype) * jnp.abs(mean))
        distance_to_threshold = self.sigmas * std
        # Zeros alone do not say how large a value may be.
        is_judged = (statistics.num_finite >= min_history) & (distance_to_threshold > 0)
        entry = _clip_entry(
            value, scaled, statistics, distance_to_threshold, is_judged, spike_limit
        )

        threshold = mean + distance_to_threshold
        is_spike = is_judged & (scaled > threshold)
        # The norm of finite gradients may be inf. A window that holds it could judge nothing.
        enters = jnp.isfinite(value)
        next_entries = jnp.concatenate([entries[1:], entry[None]])
        next_count = jnp.minimum(entry_count, self.window - 1) + 1
        safe_std = jnp.where(is_judged, std, 1.0)
        deviation = (scaled - mean) / safe_std
        judged = (
            jnp.where(enters, next_entries, entries),
            jnp.where(enters, next_count, entry_count),
            jnp.where(is_judged, threshold * statistics.unit, jnp.inf),
            jnp.where(is_judged, deviation, 0.0),
        )
        return is_spike, state._replace(**dict(zip(fields, judged, strict=True)))


def _clip_entry(
    value: jax.Array,
    scaled: jax.Array,
    statistics: Statistics,
    distance_to_threshold: jax.Array,
    is_judged: jax.Array,
    spike_limit: jax.Array,
) -> jax.Array:
    """Clips a value for its window, so that one far out does not hide the next spikes.

    Args:
      value: the value.
      scaled: the value in multiples of the unit of the statistics.
      statistics: those of the window.
      distance_to_threshold: the distance from the mean to the threshold, in the same unit.
      is_judged: whether the value is judged by this window.
      spike_limit: how far above the mean a judged value may enter, in multiples of
        `distance_to_threshold`.
    """
    # `spike_limit` is at least 1, the distance to the threshold. So a judged value is clipped from
    # above only if it is a spike.
    limit = jnp.where(is_judged, spike_limit, _CLIP_FACTOR)
    highest = statistics.mean + limit * distance_to_threshold
    lowest = statistics.mean - _CLIP_FACTOR * distance_to_threshold
    clipped = jnp.clip(scaled, lowest, highest)
    has_history = statistics.num_finite >= _MIN_CLIP_HISTORY
    may_clip = is_judged | (has_history & (distance_to_threshold > 0))
    # What is not clipped enters bit for bit as it is.
    is_clipped = may_clip & (clipped != scaled)
    return jnp.where(is_clipped, clipped * statistics.unit, value)


def check_spikes(call: str, spikes: object) -> SpikeRule | None:
    """Returns the argument `spikes` of a call, or raises a `TypeError` if it is not a rule."""
    if spikes is None or isinstance(spikes, SpikeRule):
        return spikes
    raise TypeError(
        f"`{call}(spikes=...)` must be a `SpikeRule` or None, got {spikes!r}. Pass "
        "`spikes=jaxscale.SpikeRule()` for the default rule."
    )
