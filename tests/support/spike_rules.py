"""Rules for spikes in plain Python: what `SpikeRule` promises, and what three libraries do.

Each has `spikes(losses, norms)`, which says of each step whether it is skipped, and each of the
libraries' has `parameter(losses, norms)`, that of a training whose gradient is the norm. They do
not guard against NaN more than the libraries do.
"""

import math

import numpy as np


def mean_and_std(entries, ddof=1):
    """In float64: the mean, and the standard deviation."""
    mean = math.fsum(entries) / len(entries)
    squares = math.fsum((x - mean) ** 2 for x in entries)
    return mean, math.sqrt(squares / (len(entries) - ddof))


class Promised:
    """`SpikeRule`, in float64 and on lists. It also says by how little each decision was made."""

    def __init__(self, window=128, sigmas=6.0, min_history=None):
        self.window, self.sigmas = window, sigmas
        self.history = max(2, window // 2) if min_history is None else min_history

    def spikes(self, losses, norms):
        self.windows, self.margins, skipped = ([], []), [], []
        for values in zip(losses, norms, strict=True):
            if not all(map(math.isfinite, values)):
                skipped.append(False)
                continue
            looks = [self.look(*pair) for pair in zip(self.windows, values, strict=True)]
            skipped.append(any(looks))
        return skipped

    def look(self, window, value):
        is_spike = False
        if len(window) >= self.history:
            mean, std = mean_and_std(window)
            std = max(std, 1e-6 * abs(mean))
            if std > 0:
                is_spike = value > mean + self.sigmas * std
                self.margins.append(abs((value - mean) / std - self.sigmas))
                reach = 5 * self.sigmas * std
                value = min(max(value, mean - reach), mean + reach)
        window.append(value)
        del window[: -self.window]
        return is_spike


class Olmo:
    """`SkipStepOptimizer` of OLMo-core, June 2026: on lists that include the newest step."""

    applies_by_product = True  # it multiplies by 1 or 0, in its AdamW and its Lion

    def __init__(self, window=128, sigmas=6):
        self.window, self.sigmas = window, sigmas
        self.start = max(2, window // 2)

    def spikes(self, losses, norms):
        return [not ok for ok in self.steps(losses, norms)]

    def parameter(self, losses, norms):
        parameter = 0.0
        for ok, norm in zip(self.steps(losses, norms), norms, strict=True):
            if ok or self.applies_by_product:
                parameter -= float(ok) * norm
        return parameter

    def steps(self, losses, norms):
        kept = [], []
        for values in zip(losses, norms, strict=True):
            for window, value in zip(kept, values, strict=True):
                window.append(value)
                del window[: -(self.window + 1)]
            if len(kept[0]) < self.start:
                yield True
            else:
                yield all(self.is_ok(window[:-1], window[-1]) for window in kept)

    def is_ok(self, earlier, newest):
        mean, std = self.statistics(np.asarray(earlier))
        return bool(newest - mean <= self.sigmas * std)

    def statistics(self, earlier):
        return earlier.mean(), earlier.std(ddof=1)  # `torch.std_mean`: NaN if there is one entry


class MaxText(Olmo):
    """`skip_step_on_spikes` of MaxText, August 2026: a ring buffer in float32."""

    applies_by_product = False  # it branches

    def steps(self, losses, norms):
        rings = np.zeros((2, self.window), np.float32)
        for count, values in enumerate(zip(losses, norms, strict=True)):
            entries = min(count, self.window)
            ok = self.is_warm_up(count) or all(
                self.is_ok(ring[:entries], value) for ring, value in zip(rings, values, strict=True)
            )
            rings[:, count % self.window] = values
            yield ok

    def is_warm_up(self, count):
        return count + 1 < self.start


class Levanter(MaxText):
    """`SkipStepConfig` of levanter, September 2025."""

    applies_by_product = True

    def is_warm_up(self, count):
        return count < self.start

    def statistics(self, earlier):
        return earlier.mean(), np.maximum(earlier.std(), np.float32(1e-6))
