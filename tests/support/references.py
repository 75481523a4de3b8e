"""The scale of a policy in plain Python, as a reference for the real policies."""

import numpy as np
from following import Following

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


def following(policy, state, finite, largest=None):
    """One step of the rule of `Following`. `largest` is `None` if there are no gradients."""
    scale, peak, overflows = state
    if not finite:
        return max(scale / 2, policy.min_scale), 0.0, overflows + 1
    peak = max(peak, largest or 0.0)
    doubled = min(2 * scale, policy.max_scale)
    return doubled if doubled * peak <= policy.level else scale, peak, 0


RULES = {
    presets.PresetLossScale: preset,
    Following: following,
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
