"""What one equation did to its numbers: whether it made an inf or a NaN, and what it lost.

Each equation is judged by its own inputs. A value that was lost earlier is a zero here, in
float32 too, so it counts once, where it was lost.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ... import _jax
from ..._jax import JaxprEqn, is_ref, new_ref
from .jaxpr import results

# Primitives that take refs outside of `jit`, under their names in any version of JAX.
_ON_REFS = {"new_ref", "mutable_array", "get", "swap", "addupdate", "freeze", "free_ref"}

# These give an exact result or a copy if it is below the smallest normal number: a sum of
# floating-point numbers is a multiple of the smallest subnormal, so a tiny one is not rounded.
_NEVER_LOSE = {
    *("add", "add_any", "sub", "neg", "abs", "max", "min", "select_n", "clamp", "copy", "iota"),
    *("broadcast_in_dim", "reshape", "transpose", "squeeze", "expand_dims", "rev", "pad"),
    *("slice", "dynamic_slice", "dynamic_update_slice", "concatenate", "split", "gather"),
    *("scatter", "scatter-add", "sort", "stop_gradient", "optimization_barrier", "name"),
    *("reduce_sum", "reduce_max", "reduce_min", "cumsum", "cummax", "cummin"),
    *("reduce_window_sum", "reduce_window_max", "select_and_scatter_add", "bitcast_convert_type"),
    *_ON_REFS,
    "empty_ref",
}
# These give finite numbers if they are given finite ones.
_NEVER_MAKE = _NEVER_LOSE - {
    *("add", "add_any", "sub", "scatter-add", "reduce_sum", "cumsum", "reduce_window_sum"),
    *("select_and_scatter_add", "gather", "scatter", "bitcast_convert_type", "addupdate"),
    *("dynamic_slice", "pad", "reduce_max", "reduce_min", "reduce_window_max", "iota"),
}
CONTRACTIONS = {"dot_general", "conv_general_dilated"}
_SCATTERS = {
    "scatter": jax.lax.scatter,
    "scatter-add": jax.lax.scatter_add,
    "scatter_add": jax.lax.scatter_add,
}


class IncomparableError(Exception):
    """Raised for an equation that float32 cannot replace, such as a kernel for one dtype."""


class Birth(NamedTuple):
    """An inf or a NaN that an equation made."""

    output: int
    elements: int
    share: float  # of the elements of that output
    cause: str
    least_input: float = math.nan
    largest_input: float = math.nan
    float32_result: float = math.nan


class Lost(NamedTuple):
    """Nonzero values that an equation flushed to zero, or rounded to a subnormal number."""

    output: int
    nonzero: int
    zeros: int
    subnormals: int
    lost_sum: float

    @property
    def share(self) -> float:
        return (self.zeros + self.subnormals) / max(self.nonzero, 1)


def evaluate(eqn: JaxprEqn, inputs: Sequence[Any], params: dict[str, Any] | None = None) -> Any:
    """Returns the results of an equation, as arrays, and works on copies of what refs hold.

    Inputs in float32 are cast to what the equation takes, unless it has new `params`.
    """
    if params is None:
        inputs = list(map(_as_taken, inputs, eqn.invars))

    def bind(*inputs: Any) -> list[Any]:
        pairs = zip(eqn.invars, inputs, strict=True)
        given = [new_ref(jnp.asarray(value)) if is_ref(atom) else value for atom, value in pairs]
        outputs = _jax.bind(eqn, given, params)
        refs = itertools.compress(given, map(is_ref, eqn.invars))
        pairs = zip(results(eqn), [*outputs, *refs], strict=True)
        return [value[...] if is_ref(atom) else value for atom, value in pairs]

    if eqn.primitive.name in _ON_REFS or not any(map(is_ref, results(eqn))):
        return bind(*inputs)
    return jax.jit(bind)(*inputs)  # others, such as a `shard_map`, take refs only in `jit`


def _as_taken(value: Any, atom: Any) -> Any:
    dtype: Any = getattr(atom.aval, "dtype", None)
    if is_narrow(dtype) and getattr(value, "dtype", None) == np.float32:
        return jax.lax.convert_element_type(value, dtype)
    return value


def nonfinite_mask(value: Any) -> np.ndarray:
    """Returns where a value is inf or NaN: nowhere, unless it is floating-point or complex."""
    return ~np.isfinite(_inexact(value))


def _inexact(value: Any) -> np.ndarray:
    """Returns a floating-point or complex value on the host, and zeros for any other."""
    is_inexact = jnp.issubdtype(_dtype(value), jnp.inexact)
    return np.asarray(value) if is_inexact else np.zeros(np.shape(value), np.float32)


def birth(
    eqn: JaxprEqn, inputs: Sequence[Any], outputs: Sequence[Any], *, explained: bool
) -> Birth | None:
    """Returns the first output in which an equation made inf or NaN itself, or `None`.

    It is `explained` if an earlier equation, not the user, made an inf or NaN among the inputs.
    """
    fresh, cause = [nonfinite_mask(output) for output in outputs], None
    if any(nonfinite_mask(value).any() for value in inputs):
        # An output that stays inf or NaN when these inputs are replaced was made here.
        repaired = [_repair(value) for value in inputs]
        if _jax.operation(eqn) in _NEVER_MAKE:
            fresh = [np.zeros_like(mask) for mask in fresh]
        else:
            again = evaluate(eqn, repaired)
            fresh = [a & nonfinite_mask(b) for a, b in zip(fresh, again, strict=True)]
        if explained or any(mask.any() for mask in fresh):
            inputs = repaired
        elif any(np.isnan(_inexact(value)).any() for value in inputs):
            return None
        else:
            # Infinities put there on purpose, such as a mask of -inf, and a row of nothing else.
            fresh, cause = [np.isnan(_inexact(output)) for output in outputs], "infinities"
    for output, mask in enumerate(fresh):
        if mask.any():
            try:
                exact = np.asarray(evaluate_in_float32(eqn, inputs)[output])
                wide = float(np.abs(exact[mask]).max())
            except IncomparableError:
                wide = math.nan
            if cause is None:
                cause = "range" if math.isfinite(wide) else "value"
            elements, share = int(mask.sum()), float(mask.mean())
            return Birth(output, elements, share, cause, *_find_ends(inputs), wide)
    return None


def _find_ends(values: Sequence[Any]) -> tuple[float, float]:
    """Returns the least and the largest finite number among floating-point values."""
    floating = [value for value in values if jnp.issubdtype(_dtype(value), jnp.floating)]
    numbers = np.concatenate([np.zeros(0), *(np.asarray(x, np.float64).ravel() for x in floating)])
    numbers = numbers[np.isfinite(numbers)]
    return (float(numbers.min()), float(numbers.max())) if numbers.size else (math.nan, math.nan)


def lost_values(
    eqn: JaxprEqn, inputs: Sequence[Any], outputs: Sequence[Any], *, least: float
) -> Lost | None:
    """Returns what an equation lost in the output that lost most, or `None`.

    A value is lost if the equation gives zero or a subnormal number in the dtype of its output, and
    another number in float32. The zeros of a mask, a ReLU or a padding are zeros there, too. An
    exact subnormal number counts only if no input was subnormal: otherwise it may have been so
    before. A share of up to `least` of the nonzero values is no loss. Raises `IncomparableError`.
    """
    if _jax.operation(eqn) in _NEVER_LOSE:
        return None
    # Values that are neither zero nor subnormal were not lost, so not more than the others were.
    suspects = [i for i, output in enumerate(outputs) if _share_of_tiny(output) > least]
    if not suspects:
        return None
    wide = evaluate_in_float32(eqn, inputs)
    subnormal_inputs = any(_is_subnormal(value).any() for value in inputs)
    found = []
    for i in suspects:
        actual, exact = (np.asarray(each[i], np.float32) for each in (outputs, wide))
        size = np.abs(exact)
        nonzero = size > _bound_noise(eqn, inputs)
        tiny = nonzero & (size < _smallest_normal(outputs[i]))
        zeros = tiny & (actual == 0)
        subnormals = tiny & ~zeros & _is_subnormal(outputs[i])
        if subnormal_inputs:
            subnormals &= actual != exact
        sizes = np.where(nonzero & np.isfinite(size), size, 0).astype(np.float64)
        lost_sum = float(sizes[zeros].sum() / sizes.sum()) if zeros.any() else 0.0
        count, flushed, rounded = (int(mask.sum()) for mask in (nonzero, zeros, subnormals))
        found.append(Lost(i, count, flushed, rounded, lost_sum))
    worst = max(found, key=lambda lost: lost.zeros + lost.subnormals)
    return worst if worst.share > least else None


def _bound_noise(eqn: JaxprEqn, inputs: Sequence[Any]) -> Any:
    """Returns how much of a float32 sum of products may be rounding, if its terms cancel."""
    if eqn.primitive.name not in CONTRACTIONS:
        return 0.0
    magnitudes = evaluate_in_float32(eqn, [jnp.abs(value) for value in inputs])
    return np.asarray(magnitudes[0], np.float32) * np.float32(2.0**-20)


def evaluate_in_float32(eqn: JaxprEqn, inputs: Sequence[Any]) -> list[Any]:
    """Returns the outputs of an equation in float32, or raises an `IncomparableError`."""
    if eqn.primitive.name == "bitcast_convert_type":  # its bits mean something in one dtype only
        return evaluate(eqn, inputs)
    params = {k: np.dtype(np.float32) if is_narrow(v) else v for k, v in eqn.params.items()}
    inputs = [
        jax.lax.convert_element_type(value, jnp.float32) if is_narrow(_dtype(value)) else value
        for value in inputs
    ]
    scatter: Any = _SCATTERS.get(eqn.primitive.name)
    if scatter is not None:  # what is made for the narrow dtype: the function makes its own
        params = {name: v for name, v in params.items() if not name.startswith("update_")}
    try:
        outputs = evaluate(eqn, inputs, params) if scatter is None else [scatter(*inputs, **params)]
    except (TypeError, ValueError, NotImplementedError, RuntimeError) as error:
        raise IncomparableError(eqn.primitive.name) from error
    if any(is_narrow(_dtype(output)) for output in outputs):
        raise IncomparableError(eqn.primitive.name)
    return outputs


def _repair(value: Any) -> Any:
    # One half is in the domain of nearly every function, and a product with it cannot overflow.
    bad = nonfinite_mask(value)
    return jnp.asarray(np.where(bad, np.asarray(0.5, _dtype(value)), value)) if bad.any() else value


def _dtype(value: Any) -> Any:
    return value.dtype if hasattr(value, "dtype") else np.result_type(value)


def is_narrow(dtype: Any) -> bool:
    """Returns whether a dtype is floating-point with fewer bits than float32."""
    is_floating = isinstance(dtype, np.dtype) and jnp.issubdtype(dtype, jnp.floating)
    return is_floating and jnp.finfo(dtype).bits < 32


def _smallest_normal(value: Any) -> float:
    return float(jnp.finfo(_dtype(value)).smallest_normal)


def _is_subnormal(value: Any) -> np.ndarray:
    magnitude = np.abs(_inexact(value))
    return (magnitude > 0) & (magnitude < magnitude.dtype.type(_smallest_normal(magnitude)))


def _share_of_tiny(value: Any) -> float:
    """Returns the share of numbers below the normal range, if float32 would hold them."""
    if not is_narrow(_dtype(value)) or not value.size:
        return 0.0
    # bfloat16 has the range of float32, so a comparison with float32 would show nothing.
    smallest, array = _smallest_normal(value), np.asarray(value)
    if smallest <= jnp.finfo(jnp.float32).smallest_normal:
        return 0.0
    return float((np.abs(array) < array.dtype.type(smallest)).mean())
