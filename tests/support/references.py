"""How the scale of a policy moves, in plain Python, as a reference for the real policies."""

import math

import numpy as np

import jaxscale
from jaxscale import presets

F32 = np.float32


def preset(policy, state, finite, largest=None):
    """One step of the rule of `PresetLossScale`, as its docstring has it."""
    scale, streak, left = state
    scale, low, high = F32(scale), F32(policy.min_scale), F32(policy.max_scale)
    if finite:
        streak += 1
        if policy.refill_on_finite:
            left = policy.hysteresis
        if streak >= policy.growth_interval:
            streak, left = 0, policy.hysteresis
            grown = scale * F32(policy.growth_factor)
            if grown > high:
                grown = high if policy.clip_growth else scale
            scale = max(scale, grown) if policy.clamp == "never" else grown
    else:
        streak, left = -policy.growth_delay, max(left - 1, 0)
        if left == 0:
            lower = max(scale * F32(policy.backoff_factor), low)
            scale = min(scale, lower) if policy.clamp == "never" else lower
            if policy.refill_on_backoff:
                left = policy.hysteresis
    if policy.clamp == "steps":
        scale = min(max(scale, low), high)
    return float(scale), streak, left


def tolerance(policy, state, finite, largest=None):
    """One step of the rule of `ToleranceLossScale`, as its docstring has it."""
    scale, streak, steps, overflows = state
    scale, steps = F32(scale), steps + 1
    if finite:
        streak += 1
        if streak >= policy.growth_interval:
            grown = min(scale * F32(policy.growth_factor), F32(policy.max_scale))
            scale, streak, steps = max(scale, grown), 0, 0
    else:
        streak, overflows = 0, overflows + 1
        if F32(overflows) / F32(steps) >= F32(policy.tolerance):
            scale = max(scale * F32(policy.backoff_factor), F32(policy.min_scale))
            steps, overflows = 0, 0
    return float(scale), streak, steps, overflows


def adaptive(policy, state, finite, largest=None):
    """One step of the rule of `AdaptiveLossScale`, as its docstring has it.

    Logarithms are integers, in units of 2**-16, and levels in units of 2**-20. `largest` is the
    largest gradient of a finite step, `None` if there are no gradients.
    """
    scale, peak, level, crest, finite_steps, held_steps, overflows = state
    exponent = math.frexp(scale)[1] - 1
    peak, level, crest = int(peak * 2**16), int(level * 2**20), int(crest * 2**16)
    lowest, highest = (
        math.frexp(s)[1] - 1 for s in (policy.min_scale, policy.max_scale)
    )
    exponent = min(exponent, highest)
    if not finite:
        fall = (1, 8, 16)[min(overflows, 2)]
        if overflows == 0 and peak > -256 * 2**16:
            top = max(peak, crest)
            is_ahead = level // 16 - top >= (exponent + 1) * 2**16
            is_repeated = not is_ahead and finite_steps < policy.period // 4
            is_guess = held_steps == finite_steps or top - peak < 3 * 2**16
            higher = peak + (4 if is_guess else 1) * (top - peak) + 3 * 2**16
            if is_ahead:
                level = exponent * 2**20 + top * 16 + 2**19
            else:
                finite_steps = 0
            level -= 2**20
            missing = max(int(policy.min_level * 2**20) - level, 0)
            level, peak = (
                level + missing,
                min(peak + math.ceil(missing / 16), 128 * 2**16),
            )
            if is_repeated:
                crest = min(higher, max(level // 16 - lowest * 2**16, top), 128 * 2**16)
                fall = max(fall, exponent - (level // 16 - crest) // 2**16)
                held_steps = 0
        exponent = min(exponent, max(exponent - fall, lowest))
        overflows += 1
    elif largest is None or largest > 0:
        period = (
            policy.search_period if finite_steps >= policy.period else policy.period
        )
        raised = level + max(1, round(2**20 / period))
        reached = min(raised, int(policy.max_level * 2**20))
        finite_steps, held_steps = (
            min(n + 1, 2**31 - 1) for n in (finite_steps, held_steps)
        )
        overflows = 0
        if largest is None:
            if level // 16 - peak >= (exponent + 1) * 2**16:
                peak = level // 16 - exponent * 2**16
            peak -= math.ceil((raised - reached) / 16)
            crest = -256 * 2**16
        else:
            mantissa, power = math.frexp(largest)
            x = (power - 1) * 2**16 + int((2 * mantissa - 1) * 2**16)
            shown = x * 16 + (exponent - 2) * 2**20
            reached = min(max(raised, shown), int(policy.max_level * 2**20))
            faded = peak + math.trunc((x - peak) / policy.memory)
            peak = max(x, faded)
            if crest < faded:
                crest = -256 * 2**16
            elif x - faded >= (crest - faded) / 4:
                if held_steps == finite_steps and reached < int(
                    (policy.level - 2) * 2**20
                ):
                    finite_steps = policy.period
                crest, held_steps = max(x, (crest + x) // 2), 0
            elif held_steps >= policy.period // 2:
                crest += math.trunc((x - crest) / policy.memory)
        level = reached
        target = (level // 16 - max(peak, crest)) // 2**16
        exponent = min(max(min(target, exponent + 1), lowest), highest)
    values = 2.0**exponent, peak / 2**16, level / 2**20, crest / 2**16
    return *values, finite_steps, held_steps, overflows


RULES = {
    presets.PresetLossScale: preset,
    presets.ToleranceLossScale: tolerance,
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
    states = []
    for step in steps:
        if step is not None:
            seen = step if isinstance(step, tuple) else (step,)
            state = RULES[type(policy)](policy, state, *seen)
        states.append(state)
    return states
