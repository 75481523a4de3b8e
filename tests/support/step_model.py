"""A training step in plain Python: what a run does, as a reference for the real steps."""

import math

import numpy as np
from probe import Batch
from references import trajectory
from spike_reference import ReferenceRule

COUNTERS = [
    *("step_applied", "total_steps", "skip_rate", "mini_step", "gradient_step"),
    *("total_notfinite", "notfinite_count"),
    *("total_notfinite_loss", "row_notfinite_loss"),
    *("total_retries", "total_exhausted", "backoff_count"),
    *("nonfinite_leaves/0", "nonfinite_leaves/1"),
]


class Model:
    """A run of SGD on two parameters, with a learning rate of 1.

    Attributes:
      policy: moves the loss scale.
      window: how many micro-batches make a step.
      retries: how many times a backward pass may be repeated.
      rule: what is taken for a spike, `None` if nothing is.
      scaling: the numbers of the state of the policy.
      param: both parameters, which get the same gradients.
      numbers: what `metrics` shows beside the scale, by name.
    """

    def __init__(self, policy, window=1, retries=0, rule=None):
        self.policy = policy
        self.window = window
        self.retries = retries
        self.rule = None
        if rule is not None:
            self.rule = ReferenceRule(rule.window, rule.sigmas, rule.min_history)
        self.scaling = tuple(leaf.item() for leaf in policy.init())
        self.param = 0.0
        self.counted = []
        self.numbers = dict.fromkeys(COUNTERS, 0)
        self.numbers["step_applied"] = True

    def move(self, scaling, is_finite, largest=None):
        """Moves the scale by the rule of the policy."""
        return trajectory(self.policy, scaling, [(is_finite, largest)])[-1]

    def back_off(self, scaling):
        """Tells the policy of one overflow until it lowers the scale, at most 100 times."""
        lower = scaling
        for _ in range(100):
            if lower[0] < scaling[0]:
                break
            lower = self.move(lower, False)
        return lower

    def step(self, batch):
        """Makes a step: returns the parameter and all numbers after it, by name."""
        numbers = self.numbers
        is_early = numbers["total_steps"] < 25
        after_good = numbers["step_applied"]
        before = self.scaling

        loss_finite = math.isfinite(batch.loss)
        num_retries = 0
        while self.scaling[0] > batch.highest and loss_finite:
            lower = self.back_off(self.scaling)
            if num_retries == self.retries or lower[0] >= self.scaling[0]:
                break
            self.scaling = lower
            num_retries += 1
        fits = self.scaling[0] <= batch.highest
        is_exhausted = num_retries > 0 and not fits and (after_good or not is_early)
        if not fits:  # a batch that no scale helps says nothing of it
            self.scaling = before
        of_last_pass = self.scaling[0]

        is_finite = fits and loss_finite
        is_spike = False
        if self.rule is not None:
            norm = math.sqrt(2) * batch.size
            if batch.size > 2.0**63:  # then its square is beyond float32
                norm = math.inf
            is_spike = self.rule.step(batch.loss, norm, is_finite)
            numbers["total_spikes"] = self.rule.total
            numbers["spike_count"] = self.rule.num_in_row
            numbers["total_norm_overflows"] = self.rule.overflows
        is_good = is_finite and not is_spike

        numbers["mini_step"] += 1
        if is_good:
            self.counted.append(batch.size)
        is_full = numbers["mini_step"] == self.window
        is_stepped = is_full and len(self.counted) > 0
        if is_stepped:
            self.param -= math.fsum(self.counted) / len(self.counted)
            numbers["gradient_step"] += 1
        if is_full:
            numbers["mini_step"] = 0
            self.counted = []

        # Neither a bad loss nor a spike says anything of the scale.
        if loss_finite and not is_spike and (is_stepped or not fits):
            self.scaling = self.move(self.scaling, fits, batch.size if fits else None)
        overflowed = not fits or num_retries > 0
        if self.scaling[0] > of_last_pass:
            numbers["backoff_count"] = 0
        elif overflowed and self.scaling[0] < before[0] and after_good and not is_early:
            numbers["backoff_count"] += 1
        if not fits:
            for leaf in range(2):
                numbers[f"nonfinite_leaves/{leaf}"] = batch.leaf == leaf

        numbers["step_applied"] = is_good
        numbers["total_steps"] += 1
        numbers["total_retries"] += num_retries
        numbers["total_exhausted"] += is_exhausted
        numbers["total_notfinite"] += not is_finite
        numbers["total_notfinite_loss"] += not loss_finite
        numbers["notfinite_count"] = 0 if is_finite else numbers["notfinite_count"] + 1
        row = numbers["row_notfinite_loss"] + (not loss_finite)
        numbers["row_notfinite_loss"] = 0 if is_finite else row
        lost = (not is_good) - numbers["skip_rate"]
        numbers["skip_rate"] += lost / min(numbers["total_steps"], 1000)
        of_scale = zip(self.policy.init()._fields, self.scaling, strict=True)
        return {"param": self.param, **numbers, **dict(of_scale)}


def draw(seed, number, far=1024.0):
    """Draws the batches of a run: most are good, and others bad in each of several ways.

    `far` is a size that stands out.
    """
    rng = np.random.default_rng(seed)
    kinds = rng.choice(
        ["good", "high", "bad", "bad loss", "both bad", "far loss", "far norm", "zero"],
        p=[0.55, 0.15, 0.08, 0.06, 0.02, 0.04, 0.06, 0.04],
        size=number,
    )
    # At first every second step, so that some of them are the last or the first that counts.
    kinds[:30:2] = "bad"
    highest = np.where(kinds == "high", 2.0 ** rng.integers(-4, 16, number), 2.0**60)
    highest[np.isin(kinds, ["bad", "both bad"])] = 0
    size = 2.0 ** rng.integers(-1, 2, number)
    size[kinds == "far norm"] = far
    size[kinds == "zero"] = 0
    loss = 1 + 0.1 * rng.standard_normal(number)
    loss[kinds == "far loss"] += 100
    is_bad = np.isin(kinds, ["bad loss", "both bad"])
    loss[is_bad] = rng.choice([np.nan, np.inf, -np.inf], is_bad.sum())
    leaf = rng.integers(0, 2, number)
    return Batch(*map(np.float32, (highest, size, loss)), leaf.astype(np.int32))
