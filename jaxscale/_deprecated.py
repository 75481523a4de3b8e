"""Names that go in the next release: the warning, and what to write instead."""

import functools
import sys
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])

_SIZES = (
    "`jaxscale.diagnostics.sizes(grads, dtype, loss_scale)` counts what a format loses, leaf by "
    "leaf, and `plot(grads)` draws it."
)
_AVERAGES = (
    "Choose after the step, by `jaxscale.tree_where(opt_state.step_applied, new, old)`: the page "
    "Recipes has averages and target networks."
)
# For each, what goes, and what to write instead.
_GOES = {
    "adaptive": (
        '`AdaptiveLossScale`, or `"adaptive"`,',
        "Copy the policy in `examples/adaptive_scale.py`, or write "
        "`DynamicLossScale(growth_interval=200)`, and `retries=10` to lose no batch.",
    ),
    "on_skip": (
        "`on_skip=`",
        "Call `jax.debug.callback` with `jaxscale.metrics` of the new state: the page Recipes has "
        "the lines around `tx.update`.",
    ),
    "after": ("`after=`", _AVERAGES),
    "keep": (
        "`apply_gradients(keep=...)`",
        "`jaxscale.tree_where(opt_state.step_applied, new, old)` after it makes the same choice.",
    ),
    "histogram": ("`jaxscale.diagnostics.histogram`", _SIZES),
    "shares": ("`jaxscale.diagnostics.shares`", _SIZES),
    "table": ("`jaxscale.diagnostics.table`", _SIZES),
    "trace": (
        "`jaxscale.diagnostics.trace`",
        "`jaxscale.diagnostics.doctor(loss_fn, params, batch)` names the lines.",
    ),
    "calibrate": (
        "`jaxscale.diagnostics.calibrate` of several batches",
        "Call it for each: `min(calibrate(loss_fn, params, [batch]).init_scale for batch in "
        "batches)`.",
    ),
    "quick": ("`jaxscale doctor --quick`", "Leave it out."),
}
# Files between a name that goes and the line that wrote it: those of `jax.jit(histogram)`, and of
# `dataclasses.replace(policy)`.
_PASSED_ON_BY = ("jaxscale", "jax", "contextlib", "dataclasses")


def say_goes(name: str) -> str:
    """Says what goes, when, and what to write instead."""
    what, instead = _GOES[name]
    return f"{what} goes in jaxscale 0.7.0. {instead}"


def warn_of(name: str) -> None:
    """Warns, at the line of the user, of something that goes."""
    frame = sys._getframe(1)
    stacklevel = 2
    while frame is not None and _package_of(frame.f_globals) in _PASSED_ON_BY:
        frame = frame.f_back
        stacklevel += 1
    warnings.warn(say_goes(name), DeprecationWarning, stacklevel=stacklevel)


def _package_of(module: dict[str, object]) -> str:
    return str(module.get("__name__", "")).partition(".")[0]


def going(function: _Function) -> _Function:
    """Makes a function that goes warn of that where it is called."""

    @functools.wraps(function)
    def warn_and_call(*args: Any, **kwargs: Any) -> Any:
        warn_of(function.__name__)
        return function(*args, **kwargs)

    goes: Any = warn_and_call
    return goes
