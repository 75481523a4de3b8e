"""`SpikeRule` in plain Python, in float64 and on lists, as a reference for the real rule."""

import math
from typing import NamedTuple

import numpy as np


class Look(NamedTuple):
    """A window's judgement of a value."""

    is_spike: bool
    threshold: float = math.inf
    deviation: float = 0.0


class ReferenceRule:
    """`SpikeRule`, as its docstring has it.

    Attributes:
      losses: the entries of the window of losses, the newest at the end.
      norms: those of the window of norms.
      margins: how close each decision was, in standard deviations.
      looks: for each step what the windows said of its loss and of its norm.
    """

    def __init__(self, window=128, sigmas=6.0, min_history=None):
        if min_history is None:
            min_history = max(2, window // 2)
        self.window = window
        self.sigmas = sigmas
        self.min_history = min_history
        self.losses = []
        self.norms = []
        self.margins = []
        self.looks = []
        self.total = 0
        self.num_in_row = 0
        self.overflows = 0
        self.cooldown = 0

    def find_spikes(self, losses, norms, finite=None):
        """Returns whether each step is skipped."""
        if finite is None:
            finite = np.isfinite(losses) & np.isfinite(norms)
        steps = zip(losses, norms, finite, strict=True)
        return [self.step(*values) for values in steps]

    def step(self, loss, norm, is_finite):
        if not is_finite or norm == 0:
            nothing = (Look(False), Look(False))
            self.looks.append(self.looks[-1] if self.looks else nothing)
            return False
        limit = self.find_limit()
        of_loss = self.look(self.losses, loss, limit)
        of_norm = self.look(self.norms, norm, limit)
        self.looks.append((of_loss, of_norm))
        is_spike = of_loss.is_spike or of_norm.is_spike or math.isinf(norm)
        self.overflows += math.isinf(norm)
        if is_spike:
            self.total += 1
            self.num_in_row += 1
            self.cooldown = self.window
        else:
            self.num_in_row = 0
            self.cooldown = max(self.cooldown - 1, 0)
        return is_spike

    def find_limit(self):
        """Returns how many thresholds above the mean the next spike may enter."""
        if self.cooldown == 0:
            return 1
        if self.num_in_row >= 9:
            return math.inf
        return max(5, 5**self.num_in_row)

    def look(self, window, value, limit):
        """Judges a value, and enters it into its window."""
        look = Look(False)
        entry = value
        judges = len(window) >= self.min_history
        if judges or len(window) >= 4:
            mean = math.fsum(window) / len(window)
            squares = math.fsum((x - mean) ** 2 for x in window)
            std = math.sqrt(squares / (len(window) - 1))
            std = max(std, 1e-6 * abs(mean))
            distance = self.sigmas * std
            if judges and std > 0:
                deviation = (value - mean) / std
                look = Look(value > mean + distance, mean + distance, deviation)
                self.margins.append(abs(deviation - self.sigmas))
            if std > 0:
                highest = mean + (limit if judges else 5) * distance
                entry = min(max(value, mean - 5 * distance), highest)
        if math.isfinite(value):
            window.append(entry)
            del window[: -self.window]
        return look
