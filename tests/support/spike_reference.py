"""`SpikeRule` in plain Python, in float64 and on lists, as a reference for the real rule."""

import math
import statistics
from typing import NamedTuple

import numpy as np


class Look(NamedTuple):
    """What a window says of a value."""

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
        self.level = ReferenceLevel()
        self.total = 0
        self.num_in_row = 0
        self.overflows = 0
        self.cooldown = 0

    def find_spikes(self, losses, norms, finite=None):
        """Whether each step is skipped."""
        if finite is None:
            finite = np.isfinite(losses) & np.isfinite(norms)
        steps = zip(losses, norms, finite, strict=True)
        return [self.step(*values) for values in steps]

    def step(self, loss, norm, is_finite):
        if not is_finite or norm == 0:
            nothing = (Look(False), Look(False))
            self.looks.append(self.looks[-1] if self.looks else nothing)
            self.level.wait()
            return False
        limit = self.find_limit()
        of_loss = self.look(self.losses, loss, limit)
        of_norm = self.look(self.norms, norm, limit)
        self.looks.append((of_loss, of_norm))
        self.level.step(loss)
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
        """How many times as far above the mean as the threshold the next spike may enter."""
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


class ReferenceLevel:
    """The level of the loss, as `SpikeRule` follows it.

    Attributes:
      count: for how many steps in a row the level has stood above its past.
      threshold: what the next level must exceed for that.
      margins: how close each decision was, as a part of the threshold.
    """

    def __init__(self):
        self.losses = [0.0] * 8
        self.past = []
        self.num_losses = 0  # since a level last could enter the past
        self.count = 0
        self.threshold = math.inf
        self.margins = []

    def step(self, loss):
        self.losses = [*self.losses[1:], loss]
        level = statistics.median(self.losses)
        if math.isfinite(self.threshold) and level != self.threshold:
            margin = abs(level - self.threshold)
            self.margins.append(margin / max(abs(self.threshold), 1e-9))
        self.count = self.count + 1 if level > self.threshold else 0
        self.num_losses += 1
        if self.num_losses == 8:
            self.num_losses = 0
            if self.count == 0:
                self.past = [*self.past, level][-64:]
        if self.count >= 2048:
            self.past = []
            self.count = 0
        self.threshold = self.find_threshold()

    def find_threshold(self):
        if len(self.past) < 64:
            return math.inf
        levels = sorted(self.past[:60])  # the newest do not count yet
        median = statistics.median(levels)
        first_quartile = levels[15]
        third_quartile = levels[44]
        fourth_highest = levels[56]
        deviation = (third_quartile - first_quartile) / 1.349
        deviation = max(deviation, 1e-6 * abs(median))
        by_spread = median + 10 * deviation
        by_tail = median + 6 * (fourth_highest - median)
        return max(by_spread, by_tail, levels[-1])

    def wait(self):
        """Counts a step that says nothing of the loss."""
        if self.count:
            self.count += 1
