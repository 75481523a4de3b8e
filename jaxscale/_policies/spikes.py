"""The rule by which a finite step is skipped: its loss or gradient norm stands out.

A window of the last losses and one of the last norms are judged alike, each by itself. All is done
in float32, on windows that are scaled to about 1 first: their squares would overflow else, and a
single 1e30 would hide every spike until it leaves the window.
"""

import dataclasses
import numbers
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax

from .._state.optimizer import SpikeState
from .._trees.checks import int32
from .._trees.tree import tree_where

# The standard deviation is at least this part of the mean: float32 has about 1e-7.
_LEAST = 1e-6
# An entry stands at most this many thresholds away from the mean.
_REACH = 5.0
# From so many entries on that holds before anything is judged: an early spike would hide others.
_FEW = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpikeRule:
    """A rule that skips steps which are finite, and bad: their loss or gradient norm stands out.

    Pass it as `spikes=` to `jaxscale.loss_scaled` or `jaxscale.skip_nonfinite`. A step is skipped
    if its loss, or the global norm of its gradients, exceeds the mean of the last `window` ones by
    more than `sigmas` standard deviations. Without a loss, a step is judged by its norm alone.

    - Nothing is judged by a window that has fewer than `min_history` entries: by default the first
      64 steps are taken as they are, and a spike among them is applied.
    - A step that is not finite enters neither window; it is skipped by another rule.
    - What stands more than `5 * sigmas` standard deviations from the mean enters as that, from the
      fifth step on. So one spike does not hide the next, and a new level is accepted after a few
      steps: with the defaults after 5 skipped steps where it is 100 standard deviations higher, 7
      where it is 1000, and 12 where it is 100 000.
    - The standard deviation counts as at least 1e-6 of the mean, and as half the spacing of numbers
      in the dtype of the loss, so that rounding alone is never a spike. A window of zeros judges
      nothing. A loss below zero is judged alike, and a low one is never a spike.

    Args:
      window: how many of the last steps are kept, at least 2.
      sigmas: how many standard deviations above the mean a step may stand, above 0 and at most
        1e6. Norms are often far from a normal distribution: with a logarithm whose standard
        deviation is 0.3, 0.6 or 1, the default takes 3, 22 or 57 of 10 000 good steps for spikes.
      min_history: from how many entries on a window judges, from 2 to `window`; by default from
        half of it.

    Raises:
      ValueError: if an argument is out of range.
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
      OLMo-core's `SkipStepOptimizer`, which `jaxscale.presets.olmo` follows to the letter. Its
      spikes enter the windows as they are.
    """

    window: int = 128
    sigmas: float = 6.0
    min_history: int | None = None

    _is_guarded: ClassVar[bool] = True  # against constant windows, and spikes that hide others

    def __post_init__(self) -> None:
        call = type(self).__name__
        object.__setattr__(self, "window", int32(call, "window", self.window, least=2))
        object.__setattr__(self, "sigmas", check_sigmas(call, "sigmas", self.sigmas))
        if self.min_history is not None:
            min_history = int32(call, "min_history", self.min_history, least=2)
            if min_history > self.window:
                raise ValueError(
                    f"`{call}(min_history=...)` must be at most window={self.window}, got "
                    f"{min_history}: no step would ever be judged."
                )
            object.__setattr__(self, "min_history", min_history)

    def init(self) -> SpikeState:
        """Returns the initial state: both windows are empty."""
        zeros = [jnp.zeros((self.window,), jnp.float32) for _ in range(2)]
        counts = [jnp.zeros((), jnp.int32) for _ in range(4)]
        thresholds = [jnp.full((), jnp.inf, jnp.float32) for _ in range(2)]
        deviations = [jnp.zeros((), jnp.float32) for _ in range(2)]
        return SpikeState(*zeros, *counts, *thresholds, *deviations)

    def judge(
        self, state: SpikeState, loss: Any, grad_norm: Any, finite: Any
    ) -> tuple[jax.Array, SpikeState]:
        """Returns whether a step is a spike, and the state of the next step.

        Args:
          state: the state of this step.
          loss: the loss, a floating scalar. If it is `None`, the window of losses stays as it is.
          grad_norm: the global norm of the gradients, a floating scalar; inf if the squares of
            finite gradients overflow, which is a spike where steps are judged.
          finite: a `bool[]`, whether the gradients and the loss are finite. If not, the step is no
            spike, and the state stays as it is.

        Returns:
          A `bool[]`, and the next state with the shapes and dtypes of `state`.
        """
        is_spike, *norm = self._look(state.grad_norms, state.norm_count, grad_norm)
        fields = ("grad_norms", "norm_count", "norm_threshold", "norm_deviation")
        seen = state._replace(**dict(zip(fields, norm, strict=True)))
        if loss is not None:
            is_high, *value = self._look(state.losses, state.loss_count, loss)
            is_spike |= is_high
            fields = ("losses", "loss_count", "loss_threshold", "loss_deviation")
            seen = seen._replace(**dict(zip(fields, value, strict=True)))
        one_more = optax.safe_increment
        seen = seen._replace(
            total_spikes=jnp.where(is_spike, one_more(state.total_spikes), state.total_spikes),
            spike_count=jnp.where(is_spike, one_more(state.spike_count), 0),
        )
        return is_spike & finite, tree_where(finite, seen, state)

    def _look(self, window: jax.Array, count: jax.Array, value: Any) -> tuple[jax.Array, ...]:
        """Judges a value by its window, and puts it there.

        Returns whether it is a spike, and then what a state keeps: the window, how many entries it
        has, the threshold and the deviation.
        """
        (mean, std, filled, unit, per_unit), dtype = _measure(window, count), jnp.result_type(value)
        value = jnp.asarray(value).astype(jnp.float32)
        scaled = value * per_unit  # may be inf, which compares right
        history = max(2, self.window // 2) if self.min_history is None else self.min_history
        entry, judged = value, filled >= history
        if self._is_guarded:
            # Constant entries have some deviation, too; zeros say nothing of how large a value is.
            is_floating = jnp.issubdtype(dtype, jnp.floating)
            least = max(_LEAST, float(jnp.finfo(dtype).eps) / 2) if is_floating else _LEAST
            std = jnp.maximum(std, least * jnp.abs(mean))
            judged &= std > 0
            # What stands far out would hide all that follow; below the mean, too.
            reach = _REACH * (self.sigmas * std)
            inside = jnp.clip(scaled, mean - reach, mean + reach)
            is_level = judged | ((filled >= _FEW) & (std > 0))
            entry = jnp.where(is_level & (inside != scaled), inside * unit, value)
        threshold = mean + self.sigmas * std
        enters = jnp.isfinite(entry)  # a norm of inf from finite gradients, before it is judged
        moved = jnp.concatenate([window[1:], entry[None]])
        return (
            judged & (scaled > threshold),
            jnp.where(enters, moved, window),
            jnp.where(enters, jnp.minimum(count, self.window - 1) + 1, count),
            jnp.where(judged, threshold * unit, jnp.inf),
            jnp.where(judged, (scaled - mean) / jnp.where(judged, std, 1.0), 0.0),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class OlmoSpikeRule(SpikeRule):
    """A `SpikeRule` without what that adds to OLMo's: see `jaxscale.presets.olmo`."""

    _is_guarded: ClassVar[bool] = False


def check_spikes(call: str, spikes: Any) -> SpikeRule | None:
    """Returns the argument `spikes` of a call, or raises a `TypeError` if it is not a rule."""
    if spikes is None or isinstance(spikes, SpikeRule):
        return spikes
    raise TypeError(
        f"`{call}(spikes=...)` must be a `SpikeRule` or None, got {spikes!r}. Pass "
        "`spikes=jaxscale.SpikeRule()` for the default rule."
    )


def check_sigmas(call: str, name: str, sigmas: Any) -> float:
    """Returns a number of standard deviations as a Python float, or raises an error."""
    given = (
        f"`{call}({name}=...)` must be a number above 0 and at most 1e6, got {sigmas!r}. It is "
        "how many standard deviations above the mean a step may stand: pass 6.0, or leave "
        "`spikes` out to skip no finite step."
    )
    if not isinstance(sigmas, numbers.Real):
        raise TypeError(given)
    number = float(sigmas)
    if isinstance(sigmas, bool) or not 0 < number <= 1e6:
        raise ValueError(given)
    return number


def _measure(window: jax.Array, count: jax.Array) -> tuple[jax.Array, ...]:
    """Returns the mean and the unbiased standard deviation of the entries of a window.

    Both are in units of a power of two; how many entries there are, the unit and its inverse
    follow. The passes are two, with the newest entry as the origin: exact for a constant window,
    where a sum of 128 numbers is off by several roundings.
    """
    length = window.shape[0]
    # A restored window may hold what is not finite, which would make all of it useless.
    entries = (jnp.arange(length, dtype=jnp.int32) >= length - count) & jnp.isfinite(window)
    filled = jnp.sum(entries, dtype=jnp.int32)
    unit, per_unit = _powers_of_two(jnp.max(jnp.where(entries, jnp.abs(window), 0.0)))
    newest = window[-1] * per_unit
    offsets = jnp.where(entries, window * per_unit - newest, 0.0)
    number = jnp.maximum(filled, 2).astype(jnp.float32)
    mean = jnp.sum(offsets) / number
    squares = jnp.where(entries, jnp.square(offsets - mean), 0.0)
    std = jnp.sqrt(jnp.sum(squares) / (number - 1))
    return newest + mean, std, filled, unit, per_unit


def _powers_of_two(size: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the largest power of two up to `size`, and its inverse, both normal numbers.

    From the bits, as a logarithm is rounded, and division is not exact on every device.
    """
    one = 127 << 23  # the bits of 1.0: its exponent in the upper part, no fraction in the lower
    bits = jax.lax.bitcast_convert_type(size, jnp.int32) & (0xFF << 23)
    bits = jnp.clip(bits, 1 << 23, 2 * one - (1 << 23))
    both = jnp.stack([bits, 2 * one - bits])
    unit, per_unit = jax.lax.bitcast_convert_type(both, jnp.float32)
    return unit, per_unit
