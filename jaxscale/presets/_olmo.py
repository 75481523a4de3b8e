"""The preset for the spike rule of OLMo-core, which MaxText and levanter ported to JAX."""

import dataclasses
from typing import Any

import jax

from .._policies.spikes import Level, SpikeRule, check_sigmas
from .._trees.checks import int32


@dataclasses.dataclass(frozen=True, kw_only=True)
class OlmoSpikeRule(SpikeRule):
    """A `SpikeRule` without what that adds to OLMo's: see `olmo`."""

    def _history(self) -> int:
        # One less than one would think: OLMo counts the step that is being judged, too.
        return max(2, max(2, self.window // 2) - 1)

    def _is_ready(self, level: Level, std: jax.Array) -> jax.Array:
        return level.filled >= self._history()

    def _widen(self, level: Level, least: float) -> jax.Array:
        return level.std

    def _confine(
        self, value: jax.Array, scaled: jax.Array, level: Level, std: jax.Array
    ) -> jax.Array:
        return value


def olmo(*, rolling_interval_length: int = 128, sigma_factor: Any = 6) -> SpikeRule:
    """Returns the spike rule of OLMo-core's `SkipStepOptimizer`, to pass as `spikes=`.

    A step is skipped if its loss or its gradient norm exceeds the mean of the last
    `rolling_interval_length` ones by more than `sigma_factor` standard deviations, from the step
    `rolling_interval_length // 2` on. A spike enters the windows as it is: after a large one
    little stands out until it has left the window; and after equal losses any rise is a spike.
    Source: OLMo-core 2.5.0, `olmo_core/optim/skip_step_optimizer.py`. MaxText's
    `skip_step_on_spikes` (August 2026) is the same rule, but for the second step, below. In
    levanter's `SkipStepConfig` (September 2025) the standard deviation is not the unbiased one, and
    at least 1e-6, and judging starts one step later.

    What differs: a step that is not finite enters neither window, and `jaxscale` skips it anyway.
    In OLMo-core one NaN skips all steps until it has left the window, and is applied if it comes
    in the first half of the first window. If `rolling_interval_length` is below 6, OLMo-core always
    skips the second step, as the standard deviation of a single number is NaN.

    Args:
      rolling_interval_length: how many of the last steps are kept, at least 2.
      sigma_factor: how many standard deviations above the mean a step may stand, above 0.
    """
    call = "presets.olmo"
    return OlmoSpikeRule(
        window=int32(call, "rolling_interval_length", rolling_interval_length, least=2),
        sigmas=check_sigmas(call, "sigma_factor", sigma_factor),
    )
