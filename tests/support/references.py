"""How the scale of a policy moves, in plain Python, as a reference for the real policies."""

import dataclasses
import math

import numpy as np

import jaxscale
from jaxscale import presets

F32 = np.float32


def preset(policy, state, finite, largest=None):
    """One step of the rule of `PresetLossScale`, as its docstring has it."""
    scale, streak, left = state
    scale = F32(scale)
    low = F32(policy.min_scale)
    high = F32(policy.max_scale)
    if finite:
        streak += 1
        if policy.refill_on_finite:
            left = policy.hysteresis
        if streak >= policy.growth_interval:
            streak = 0
            left = policy.hysteresis
            grown = scale * F32(policy.growth_factor)
            if grown > high and policy.clip_growth:
                grown = high
            elif grown > high:
                grown = scale
            if policy.clamp == "never":
                grown = max(scale, grown)
            scale = grown
    else:
        streak = -policy.growth_delay
        left = max(left - 1, 0)
        if left == 0:
            lower = max(scale * F32(policy.backoff_factor), low)
            if policy.clamp == "never":
                lower = min(scale, lower)
            scale = lower
            if policy.refill_on_backoff:
                left = policy.hysteresis
    return float(scale), streak, left


# An integer of a logarithm, and of a level, is in these units.
LOG = 2**16
LEVEL = 2**20
UNKNOWN = -256 * LOG  # in the place of a peak or a crest
HIGHEST = 128 * LOG
LAST_INT = 2**31 - 1


@dataclasses.dataclass
class Adapting:
    """The state of `AdaptiveLossScale`, whose logarithms and levels are integers here."""

    exponent: int
    peak: int
    level: int
    crest: int
    finite_steps: int
    held_steps: int
    overflows: int

    def is_level_above(self, log):
        """Returns whether the level is above a gradient by more than the scale."""
        return self.level // 16 - log >= (self.exponent + 1) * LOG


def adaptive(policy, state, finite, largest=None):
    """One step of the rule of `AdaptiveLossScale`, as its docstring has it.

    `largest` is the largest gradient of a finite step, `None` if there are no gradients.
    """
    scale, peak, level, crest, *counts = state
    lowest = exponent_of(policy.min_scale)
    highest = exponent_of(policy.max_scale)
    exponent = min(exponent_of(scale), highest)
    logs = int(peak * LOG), int(level * LEVEL), int(crest * LOG)
    new = Adapting(exponent, *logs, *counts)
    if not finite:
        back_off(policy, new, lowest)
    elif largest is None or largest > 0:
        new.level = rise(policy, new, largest)
        new.overflows = 0
        target = (new.level // 16 - max(new.peak, new.crest)) // LOG
        new.exponent = min(max(min(target, new.exponent + 1), lowest), highest)
    return (
        2.0**new.exponent,
        new.peak / LOG,
        new.level / LEVEL,
        new.crest / LOG,
        new.finite_steps,
        new.held_steps,
        new.overflows,
    )


def exponent_of(scale):
    _, power = math.frexp(scale)
    return power - 1


def back_off(policy, new, lowest):
    """Lowers the scale after a step that is not finite. The first of a row teaches something."""
    fall = (1, 8, 16)[min(new.overflows, 2)]
    if new.overflows == 0 and new.peak > UNKNOWN:
        fall = learn(policy, new, lowest, fall)
    new.exponent = min(new.exponent, max(new.exponent - fall, lowest))
    new.overflows += 1


def learn(policy, new, lowest, fall):
    """Lowers the level or raises the crest, and returns by how many powers the scale falls."""
    top = max(new.peak, new.crest)
    is_ahead = new.is_level_above(top)
    is_repeated = not is_ahead and new.finite_steps < policy.period // 4
    higher = top + 3 * LOG
    if new.held_steps == new.finite_steps or top - new.peak < 3 * LOG:
        higher += 3 * (top - new.peak)  # a guess
    if is_ahead:
        new.level = new.exponent * LEVEL + top * 16 + LEVEL // 2
    else:
        new.finite_steps = 0
    new.level -= LEVEL
    missing = max(int(policy.min_level * LEVEL) - new.level, 0)
    new.level += missing
    new.peak = min(new.peak + math.ceil(missing / 16), HIGHEST)
    if is_repeated:
        most = max(new.level // 16 - lowest * LOG, top)
        new.crest = min(higher, most, HIGHEST)
        new.held_steps = 0
        fall = max(fall, new.exponent - (new.level // 16 - new.crest) // LOG)
    return fall


def rise(policy, new, largest):
    """Follows the gradients of a finite step, and returns the level after it."""
    period = policy.period
    if new.finite_steps >= policy.period:
        period = policy.search_period
    raised = new.level + max(1, round(LEVEL / period))
    most = int(policy.max_level * LEVEL)
    new.finite_steps = min(new.finite_steps + 1, LAST_INT)
    new.held_steps = min(new.held_steps + 1, LAST_INT)
    if largest is None:
        reached = min(raised, most)
        if new.is_level_above(new.peak):
            new.peak = new.level // 16 - new.exponent * LOG
        new.peak -= math.ceil((raised - reached) / 16)
        new.crest = UNKNOWN
        return reached
    mantissa, power = math.frexp(largest)
    log = (power - 1) * LOG + int((2 * mantissa - 1) * LOG)
    shown = log * 16 + (new.exponent - 2) * LEVEL
    reached = min(max(raised, shown), most)
    follow(policy, new, log, reached)
    return reached


def follow(policy, new, log, reached):
    """Moves the peak and the crest after a largest gradient."""
    faded = new.peak + math.trunc((log - new.peak) / policy.memory)
    rise_above_faded = log - faded
    new.peak = max(log, faded)
    if new.crest < faded:
        new.crest = UNKNOWN
    elif rise_above_faded >= (new.crest - faded) / 4:
        is_unlearnt = new.held_steps == new.finite_steps
        low = int((policy.level - 2) * LEVEL)
        if is_unlearnt and reached < low:
            new.finite_steps = policy.period
        new.crest = max(log, (new.crest + log) // 2)
        new.held_steps = 0
    elif new.held_steps >= policy.period // 2:
        difference = log - new.crest
        new.crest += math.trunc(difference / policy.memory)


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
