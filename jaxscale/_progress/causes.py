"""Causes of skipped steps, as far as the numbers of a run, its policy and its leaves tell."""

import math
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp

from .._policies.base import adjust_scale
from .._policies.fixed import FixedLossScale
from .._trees.grammar import list_some
from .._trees.pytrees import ScaleState
from . import texts
from .optimizers import find_nan
from .symptoms import is_row_of_losses

_FLAG = "nonfinite_leaves/"  # how `metrics` calls a gradient that overflowed


def explain_row(run: SimpleNamespace) -> str:
    """Returns how many steps in a row were skipped, why, and in which leaves.

    In the text names stand for numbers of the run, some of which are found here.
    """
    words = run.words
    run.place_of_nan = find_nan(run.inner_state, run.place)
    if run.place_of_nan is not None:
        return f"{words.row}. {texts.OF_OPTIMIZER}"
    if is_row_of_losses(run):
        cause = words.loss_never
        if run.applied:
            cause = words.loss_now
    else:
        cause = f"{texts.TOLD_APART} {words.gradients or _explain_gradients(run)}"
        if run.checks_updates:
            cause = f"{texts.OF_UPDATES} Otherwise: {cause}"
    run.bad_leaves = _name_bad_leaves(run)
    return f"{words.row}. {cause}{{bad_leaves}} {words.doctor}"


def _name_bad_leaves(run: SimpleNamespace) -> str:
    """Returns which gradients overflowed last, if that was tracked."""
    flags = [name for name in run.numbers if name.startswith(_FLAG)]
    bad = [name.removeprefix(_FLAG) for name in flags if getattr(run, name)]
    if not bad:
        return ""
    number = f"({len(bad)} of {len(flags)} leaves)"
    return f" The last gradients that were not finite: {list_some(bad, 5)} {number}."


def _explain_gradients(run: SimpleNamespace) -> str:
    """Returns why the gradients overflow at this scale."""
    scale = float(run.loss_scale)
    run.lowest = _find_lowest_scale(run)
    run.floor_exponent = max(math.frexp(scale)[1] - 15, -126)
    if run.lowest < scale:
        return texts.FALLING
    if scale == 1:
        return texts.AT_ONE
    if run.policy is None:
        return texts.UNKNOWN
    if isinstance(run.policy, FixedLossScale):
        return texts.FIXED
    return texts.AT_FLOOR


def _find_lowest_scale(run: SimpleNamespace) -> float:
    """Returns where the scale ends if all further steps are bad, as far as its policy is known."""
    if run.policy is None:
        return run.loss_scale
    start = run.policy.init()
    numbers = {name: jnp.asarray(getattr(run, name)) for name in start._fields}
    is_finite = jnp.array(False)

    def skip(_: Any, scaling: ScaleState) -> Any:
        return adjust_scale(run.policy, scaling, is_finite, None)

    last = jax.lax.fori_loop(0, 10_000, skip, start._replace(**numbers))
    return float(last.loss_scale)
