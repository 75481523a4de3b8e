"""How the scale of a policy moves, in plain Python, as a reference for the real policies."""

import numpy as np

import jaxscale
from jaxscale import presets

F32 = np.float32


def dynamic(policy, state, finite):
    """One step of the rule of `DynamicLossScale`, as its docstring has it."""
    scale, streak, left = state
    scale = F32(scale)
    if finite:
        streak += 1
        if streak >= policy.growth_interval:
            grown = min(scale * F32(policy.growth_factor), F32(policy.max_scale))
            scale, streak, left = max(scale, grown), 0, policy.hysteresis
    else:
        streak, left = 0, max(left - 1, 0)
        if left == 0:
            lower = max(scale * F32(policy.backoff_factor), F32(policy.min_scale))
            scale = min(scale, lower)
    return float(scale), streak, left


def preset(policy, state, finite):
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


def tolerance(policy, state, finite):
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


def still(policy, state, finite):
    """One step of a policy whose scale never moves."""
    del policy, finite
    return state


RULES = {
    jaxscale.DynamicLossScale: dynamic,
    presets.PresetLossScale: preset,
    presets.ToleranceLossScale: tolerance,
    jaxscale.FixedLossScale: still,
    jaxscale.NoOpLossScale: still,
}


def trajectory(policy, state, verdicts):
    """The state after each step; where a verdict is `None` the step does not count."""
    rule, states = RULES[type(policy)], []
    for finite in verdicts:
        if finite is not None:
            state = rule(policy, state, finite)
        states.append(state)
    return states
