"""Causes of skipped steps, as far as a state, its policy and its leaves tell."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from .._gradients.facts import flagged_paths
from .._policies.base import LossScale
from .._policies.fixed import FixedLossScale
from .._state.scale import AdaptiveState
from .._trees.gradient_leaves import leaf_name
from .._trees.grammar import and_more
from .._trees.leaf import is_inexact_leaf, parts_in_reach
from .symptoms import blames_loss, is_unscaled
from .texts import (
    ALL_FLUSHED,
    AT_ANY_SCALE,
    DOCTOR,
    DOCTOR_WITHOUT_HALF,
    OF_UPDATES,
    ON_CPU,
    WITHOUT_HALF,
    say_of_optimizer,
)


def explain_row(
    state: Any,
    policy: LossScale | None,
    place_of_nan: str | None,
    checks_updates: bool,
) -> str:
    """Returns how many steps in a row were skipped, why, and in which leaves.

    `place_of_nan` is where the state of the optimizer holds a NaN, if it does. With
    `checks_updates` a step is also skipped for what the optimizer makes of its gradients.
    """
    text = (
        f"{state.notfinite_count} steps in a row were skipped ({state.total_notfinite} of "
        f"{state.total_steps} in all, {state.total_notfinite_loss} of them with a non-finite loss)"
    )
    doctor = DOCTOR_WITHOUT_HALF
    if not is_unscaled(state, policy):
        text += f"; the loss scale is {state.scaling.loss_scale}"
        doctor = DOCTOR
    if place_of_nan is not None:
        return f"{text}. {say_of_optimizer(place_of_nan)}"
    cause = _likely_cause(state, policy)
    if checks_updates and not blames_loss(state):
        cause = f"{OF_UPDATES} Otherwise: {cause}"
    return f"{text}. {cause}{_name_bad_leaves(state.nonfinite_leaves)} {doctor}"


def find_nan(inner_state: Any, member: tuple[int, ...]) -> str | None:
    """Returns where the state of an optimizer holds a NaN, `None` if it holds none.

    `member` is the place of a run in a population, empty for a run that is alone.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(inner_state):
        if is_inexact_leaf(leaf) and _holds_nan(leaf, member):
            return leaf_name(path)
    return None


def _holds_nan(leaf: Any, member: tuple[int, ...]) -> bool:
    if member:
        return bool(jnp.isnan(leaf[member]).any())
    # Part by part, where it is: a sum over devices of several processes would wait for them all.
    return any(bool(jnp.isnan(part).any()) for part in parts_in_reach(leaf))


def _name_bad_leaves(flags: Any) -> str:
    """Returns which gradients overflowed last, if that was tracked."""
    bad = flagged_paths(flags)
    if not bad:
        return ""
    shown = " ".join([", ".join(bad[:5]), *and_more(bad, 5)])
    number = f"({len(bad)} of {len(jax.tree.leaves(flags))} leaves)"
    return f" The last gradients that were not finite: {shown} {number}."


def _likely_cause(state: Any, policy: LossScale | None) -> str:
    """Returns why the steps of the present row were skipped."""
    if blames_loss(state):
        return _cause_in_loss(state, is_unscaled(state, policy))
    told_apart = (
        "If the loss was passed as `value`, it is finite, and the backward pass overflows; if "
        "not, pass it, so that a bad forward pass is told apart."
    )
    if not is_unscaled(state, policy):
        return f"{told_apart} {_cause_in_backward_pass(state, policy)}"
    return (
        f"{told_apart} {WITHOUT_HALF} {ALL_FLUSHED} "
        "To find the line, run one step under `with jax.disable_jit(), "
        f"jax.debug_infs(True)`. {ON_CPU}"
    )


def _cause_in_loss(state: Any, unscaled: bool) -> str:
    """Returns the likely cause if the loss itself is not finite."""
    symptom = "The loss itself is not finite"
    if state.row_notfinite_loss < state.notfinite_count:
        symptom += (
            f" in {state.row_notfinite_loss} of these {state.notfinite_count} steps"
        )
    if not unscaled:
        symptom += ", so no loss scale can help"
    applied = state.total_steps - state.total_notfinite
    if applied:
        return (
            f"{symptom}. {applied} steps were fine: look for a stretch of bad data, or for "
            "parameters that have diverged."
        )
    if unscaled:
        return f"{symptom}. It never was. {WITHOUT_HALF}"
    return (
        f"{symptom}. It never was: look for NaN in the data, and for an operation in the forward "
        "pass that leaves the range of its dtype; compute norms, softmax and the loss in float32."
    )


def _cause_in_backward_pass(state: Any, policy: LossScale | None) -> str:
    """Returns the likely cause if the backward pass overflows."""
    unscaled = f"at any scale: {AT_ANY_SCALE}"
    stale = "`jaxscale.value_and_grad` was called outside of the step and uses an older scale"
    scale = float(state.scaling.loss_scale)
    name = "DynamicLossScale"
    if isinstance(state.scaling, AdaptiveState):
        name = "AdaptiveLossScale"
    floor_exponent = max(math.frexp(scale)[1] - 15, -126)
    large = (
        "Most often the loss is too large for float16: take a mean instead of a sum, or lower "
        f"`min_scale`: `jaxscale.loss_scaled(tx, jaxscale.{name}("
        f"min_scale=2.0**{floor_exponent}))`. Or it overflows {unscaled}, or {stale}."
    )
    lowest = scale
    if policy is not None:
        lowest = _lowest_scale(state.scaling, policy)
    if lowest < scale:
        return (
            f"The scale is still on its way down, to {lowest:g}: start lower, or accept more "
            f"skipped steps in a row. Or {stale}."
        )
    if scale == 1:
        return f"A scale of 1 scales nothing. {large}"
    if policy is None:
        return (
            f"It does so {unscaled}, or because the scale is fixed and too high, or still on its "
            f"way down, or {stale}. Pass `tx` to `check` to have these told apart."
        )
    if isinstance(policy, FixedLossScale):
        return f"The scale is fixed, and too high. Or it overflows {unscaled}."
    return f"The scale is at its floor, and too high. {large}"


def _lowest_scale(scaling: Any, policy: LossScale) -> float:
    """Returns where a scale ends if all further steps are bad."""
    scaling = policy.init()._replace(**scaling._asdict())
    scaling = jax.tree.map(jnp.asarray, scaling)
    is_finite = jnp.array(False)

    def skip(_: Any, scaling: Any) -> Any:
        return policy.adjust(scaling, is_finite)

    last = jax.lax.fori_loop(0, 10_000, skip, scaling)
    return float(last.loss_scale)
