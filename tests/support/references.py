"""The scale of a policy in plain Python, as a reference for the real policies."""

import dataclasses
import math

import numpy as np

import jaxscale
from jaxscale import presets

F32 = np.float32


def in_range(policy, scale):
    """A restored scale, brought to the nearest one between the bounds and the first."""
    numbers = sorted([policy.min_scale, policy.init_scale, policy.max_scale])
    return min(max(scale, numbers[0]), numbers[-1])


def preset(policy, state, finite, largest=None):
    """One step of the rule of `PresetLossScale`, as its docstring has it."""
    scale, streak, left = state
    low = F32(policy.min_scale)
    high = F32(policy.max_scale)
    scale = F32(in_range(policy, scale))
    if finite:
        streak += 1
        if policy.refill_on_finite:
            left = policy.hysteresis
        if streak >= policy.growth_interval:
            streak = 0
            left = policy.hysteresis
            with np.errstate(over="ignore"):
                grown = scale * F32(policy.growth_factor)
            if grown > high and policy.clip_growth:
                grown = high
            elif grown > high:
                grown = scale
            scale = grown
    else:
        streak = -policy.growth_delay
        left = max(left - 1, 0)
        if left == 0:
            scale = max(scale * F32(policy.backoff_factor), low)
            if policy.refill_on_backoff:
                left = policy.hysteresis
    return float(scale), streak, left


# A logarithm is an integer in these units.
UNIT = 2**16
UNKNOWN = -256 * UNIT  # in the place of a peak or a crest
HIGHEST = 128 * UNIT
LAST_INT = 2**31 - 1


@dataclasses.dataclass
class Adapting:
    """The state of `AdaptiveLossScale`, whose logarithms are integers here."""

    exponent: int
    peak: int
    level: int
    crest: int
    finite_steps: int
    held_steps: int
    overflows: int

    def fitting(self):
        """Returns the exponent of the scale that fits."""
        return (self.level - max(self.peak, self.crest)) // UNIT

    def is_untried(self):
        return self.held_steps == self.finite_steps


def adaptive(policy, state, finite, largest=None):
    """One step of the rule of `AdaptiveLossScale`, as its docstring has it.

    `largest` is the largest gradient of a finite step, `None` if there are no gradients.
    """
    scale, peak, level, crest, *counts = state
    lowest = exponent_of(policy.min_scale)
    highest = exponent_of(policy.max_scale)
    exponent = exponent_of(in_range(policy, scale))
    logs = [int(log * UNIT) for log in (peak, level, crest)]
    new = Adapting(exponent, *logs, *counts)
    if not finite:
        fall = (1, 8, 16)[min(new.overflows, 2)]
        if new.overflows == 0 and new.peak > UNKNOWN:
            learn(policy, new)
        new.exponent = max(min(exponent - fall, new.fitting()), lowest)
        new.overflows += 1
    elif largest:
        follow(policy, new, largest)
        higher = min(new.fitting(), exponent + 1)
        new.exponent = min(max(higher, lowest), highest)
        new.overflows = 0
    return (
        2.0**new.exponent,
        new.peak / UNIT,
        new.level / UNIT,
        new.crest / UNIT,
        new.finite_steps,
        new.held_steps,
        new.overflows,
    )


def exponent_of(scale):
    _, power = math.frexp(scale)
    return power - 1


def learn(policy, new):
    """Lowers the level and raises the crest after the first overflow in a row."""
    lowest_level = int(policy.min_level * UNIT)
    distance = max(new.crest - new.peak, 0)
    top = new.peak + distance
    if new.fitting() > new.exponent:  # the scale is still rising
        level = (new.exponent + 1) * UNIT + top - UNIT // 2
    else:
        level = new.level
        if new.finite_steps < policy.period // 4:
            is_guess = new.is_untried() or distance < 3 * UNIT
            higher = top + 3 * UNIT + (3 * distance if is_guess else 0)
            new.crest = min(higher, HIGHEST)
            new.held_steps = 0
        new.finite_steps = 0
    new.level = max(level - UNIT, lowest_level)
    new.peak = min(new.peak + new.level - (level - UNIT), HIGHEST)


def follow(policy, new, largest):
    """Follows the largest gradient of a finite step."""
    mantissa, power = math.frexp(largest)
    log = (power - 1) * UNIT + int((2 * mantissa - 1) * UNIT)
    is_searching = new.finite_steps >= policy.period
    period = policy.search_period if is_searching else policy.period
    raised = new.level + max(1, round(UNIT / period))
    shown = log + (new.exponent - 2) * UNIT
    new.level = min(max(raised, shown), int(policy.max_level * UNIT))
    was_untried = new.is_untried()
    new.finite_steps = min(new.finite_steps + 1, LAST_INT)
    new.held_steps = min(new.held_steps + 1, LAST_INT)

    faded = new.peak + math.trunc((log - new.peak) / policy.memory)
    new.peak = max(log, faded)
    if new.crest < faded:
        new.crest = UNKNOWN
    elif log - faded >= (new.crest - faded) / 4:
        if was_untried and new.level < int(policy.level * UNIT) - 2 * UNIT:
            new.finite_steps = policy.period
        new.crest = max(log, (new.crest + log) // 2)
        new.held_steps = 0
    elif new.held_steps >= policy.period // 2:
        new.crest += math.trunc((log - new.crest) / policy.memory)


RULES = {
    presets.PresetLossScale: preset,
    jaxscale.AdaptiveLossScale: adaptive,
    jaxscale.FixedLossScale: lambda policy, state, *step: state,
    jaxscale.NoOpLossScale: lambda policy, state, *step: state,
}


def trajectory(policy, state, steps):
    """The state after each step: whether it was finite, or that and its largest gradient.

    A step that is `None` does not count.
    """
    # whose rule that of the presets is by default
    if type(policy) is jaxscale.DynamicLossScale:
        policy = presets.PresetLossScale(**policy.get_config())
    rule = RULES[type(policy)]
    states = []
    for step in steps:
        if isinstance(step, tuple):
            state = rule(policy, state, *step)
        elif step is not None:
            state = rule(policy, state, step)
        states.append(state)
    return states
