"""Names that went, and names that go: the error, the warning, and what to write instead."""

import functools
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ._jax import users_stacklevel

_Function = TypeVar("_Function", bound=Callable[..., Any])

# What went, by the module or the function that had it.
_WENT = {
    "apply_gradients": "keep",
    "autocast": "half_carries",
    "flax.train_step": "after",
    "jaxscale": "AdaptiveLossScale AdaptiveState",
    "jaxscale.diagnostics": """
        History LeafCounts Suggestion TracedConstant TracedNonfinite TracedUnderflow Underflow
        leaf_counts leaf_histograms plot_histogram plot_underflow suggest_scale text_histogram
        to_json underflow
    """,
    "jaxscale.presets": """
        GradualLossScale GradualState LogMaxLossScale LogMaxState ToleranceLossScale ToleranceState
        WindowLossScale WindowState chainer colossalai fairseq from_flax from_jmp from_keras
        from_tensorflow from_torch jamp jaxamp mindformers mindspore mindspore_cell
        mindspore_manager mpx olmo openseq2seq_backoff openseq2seq_logmax paddle paddle_op to_torch
    """,
    "loss_scaled": "on_skip",
    "multi_steps": "drop growth_unit",
    "nnx.train_step": "after",
    "skip_nonfinite": "on_skip",
    "train_step": "after",
}
SEE_PAGE = "gone: the page *What went, and what goes* has what to write instead."

_SIZES = (
    "`jaxscale.diagnostics.sizes(grads, dtype, loss_scale)` counts what a format loses, leaf by "
    "leaf, and `plot(grads)` draws it."
)
# For each, what goes, and what to write instead.
_GOES = {
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


def missing_name(module: str, name: str) -> AttributeError:
    """Makes the error of a name that a module does not have."""
    message = f"module {module!r} has no attribute {name!r}"
    if name in _WENT[module].split():
        message += f". It is {SEE_PAGE}"
    return AttributeError(message, name=name, obj=sys.modules[module])


def refuse(call: str, unknown: Mapping[str, object]) -> None:
    """Raises a `TypeError` if a function was given arguments that it does not take."""
    refuse_gone(call, unknown)
    for name in unknown:
        raise TypeError(_say_unexpected(call, name))


def refuse_gone(call: str, passed_on: Mapping[str, object]) -> None:
    """Raises a `TypeError` if arguments that a function passes on are such as it took once."""
    for name in _WENT[call].split():
        if name in passed_on:
            raise TypeError(f"{_say_unexpected(call, name)}. It is {SEE_PAGE}")


def _say_unexpected(call: str, name: str) -> str:
    return f"{call}() got an unexpected keyword argument {name!r}"


def say_goes(name: str) -> str:
    """Says what goes, when, and what to write instead."""
    what, instead = _GOES[name]
    return f"{what} goes in jaxscale 0.7.0. {instead}"


def warn_of(name: str) -> None:
    """Warns, at the line of the user, of something that goes."""
    warnings.warn(say_goes(name), DeprecationWarning, stacklevel=users_stacklevel())


def going(function: _Function) -> _Function:
    """Makes a function that goes warn of that where it is called."""

    @functools.wraps(function)
    def warn_and_call(*args: Any, **kwargs: Any) -> Any:
        warn_of(function.__name__)
        return function(*args, **kwargs)

    goes: Any = warn_and_call
    return goes
