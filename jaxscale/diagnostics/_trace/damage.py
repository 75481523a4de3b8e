"""Damage of one equation to its numbers: an inf or a NaN that it made, and what it lost.

Each equation is judged by its own inputs. A value that was lost earlier is a zero here, also in
float32, so it counts once, where it was lost.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from ... import _jax
from ..._jax import JaxprEqn, Op, has_narrow_range, is_inexact
from .evaluate import (
    IncomparableError,
    dtype_of,
    evaluate,
    evaluate_in_float32,
)


class Birth(NamedTuple):
    """An inf or a NaN that an equation made. The fields but `output` are in `TracedNonfinite`."""

    output: int  # the index of the first output that has one
    elements: int
    share: float  # of the elements of that output
    cause: str
    least_input: float = math.nan
    largest_input: float = math.nan
    float32_result: float = math.nan


class Lost(NamedTuple):
    """Nonzero values that an equation flushed to zero, or rounded to a subnormal number.

    The fields but `output` are those of `TracedUnderflow`.
    """

    output: int  # the index of the output that lost most
    nonzero: int
    zeros: int
    subnormals: int
    lost_sum: float

    @property
    def share(self) -> float:
        return (self.zeros + self.subnormals) / max(self.nonzero, 1)


def is_product(eqn: JaxprEqn) -> bool:
    return Op.PRODUCT in _jax.does(eqn.primitive.name)


def nonfinite_mask(value: Any) -> np.ndarray:
    """Returns where a value is inf or NaN: nowhere, unless it is floating-point or complex."""
    return ~np.isfinite(_inexact_or_zeros(value))


def has_nonfinite(value: Any) -> bool:
    return bool(nonfinite_mask(value).any())


def _inexact_or_zeros(value: Any) -> np.ndarray:
    """Returns a floating-point or complex value on the host, and zeros for any other."""
    if is_inexact(dtype_of(value)):
        return np.asarray(value)
    return np.zeros(np.shape(value), np.float32)


def find_birth(
    eqn: JaxprEqn, inputs: Sequence[Any], outputs: Sequence[Any], *, is_explained: bool
) -> Birth | None:
    """Returns the first output in which an equation made inf or NaN itself, or `None`.

    It is explained if an earlier equation, not the user, made an inf or NaN among the inputs.
    """
    masks = list(map(nonfinite_mask, outputs))
    if not any(map(has_nonfinite, inputs)):
        return _describe_birth(eqn, inputs, masks)
    # An output that stays inf or NaN when these inputs are replaced was made here.
    repaired = list(map(_repair, inputs))
    masks = _find_remaining(eqn, repaired, masks)
    if is_explained or any(map(np.any, masks)):
        return _describe_birth(eqn, repaired, masks)
    if any(map(np.any, map(_nan_mask, inputs))):
        return None
    # Infinities put there on purpose, such as a mask of -inf, and a row of nothing else.
    nans = list(map(_nan_mask, outputs))
    return _describe_birth(eqn, inputs, nans, cause="infinities")


def _nan_mask(value: Any) -> np.ndarray:
    return np.isnan(_inexact_or_zeros(value))


def _find_remaining(
    eqn: JaxprEqn, repaired: Sequence[Any], masks: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """Returns where outputs, inf or NaN at the masks, are so for repaired inputs as well."""
    if Op.MAKES_NOTHING in _jax.does(_jax.operation(eqn)):
        return list(map(np.zeros_like, masks))
    remaining = []
    for mask, output in zip(masks, evaluate(eqn, repaired), strict=True):
        remaining.append(mask & nonfinite_mask(output))
    return remaining


def describe_nonfinite(masks: Sequence[np.ndarray], cause: str) -> Birth | None:
    """Returns how many inf and NaN the first output has that has one at its mask."""
    for output, mask in enumerate(masks):
        if mask.any():
            num_nonfinite = int(mask.sum())
            return Birth(output, num_nonfinite, float(mask.mean()), cause)
    return None


def _describe_birth(
    eqn: JaxprEqn,
    inputs: Sequence[Any],
    masks: Sequence[np.ndarray],
    cause: str = "value",
) -> Birth | None:
    """Returns what is known of the first output that has an inf or a NaN at its mask."""
    birth = describe_nonfinite(masks, cause)
    if birth is None:
        return None
    mask = masks[birth.output]
    float32_result = _find_largest_in_float32(eqn, inputs, birth.output, mask)
    if cause == "value" and math.isfinite(float32_result):
        birth = birth._replace(cause="range")
    numbers = _finite_numbers(inputs)
    if numbers.size:
        least = float(numbers.min())
        largest = float(numbers.max())
        birth = birth._replace(least_input=least, largest_input=largest)
    return birth._replace(float32_result=float32_result)


def _find_largest_in_float32(
    eqn: JaxprEqn, inputs: Sequence[Any], output: int, mask: np.ndarray
) -> float:
    """Returns the largest magnitude of some elements in float32, or NaN if it is not known."""
    try:
        exact = np.asarray(evaluate_in_float32(eqn, inputs)[output])
    except IncomparableError:
        return math.nan
    return float(np.abs(exact[mask]).max())


def _finite_numbers(values: Sequence[Any]) -> np.ndarray:
    """Returns all finite numbers among floating-point values, in float64."""
    parts = [np.zeros(0)]
    for value in values:
        if jnp.issubdtype(dtype_of(value), jnp.floating):
            parts.append(np.asarray(value, np.float64).ravel())
    numbers = np.concatenate(parts)
    return numbers[np.isfinite(numbers)]


def find_lost(
    eqn: JaxprEqn, inputs: Sequence[Any], outputs: Sequence[Any], *, least: float
) -> Lost | None:
    """Returns what an equation lost in the output that lost most, or `None`.

    A value is lost if the equation gives zero or a subnormal number in the dtype of its output, and
    another number in float32. The zeros of a mask, a ReLU or a padding are zeros there as well. An
    exact subnormal number counts only if no input was subnormal: otherwise it may have been so
    before. A share of up to `least` of the nonzero values is no loss. Raises `IncomparableError`.
    """
    if Op.LOSES_NOTHING in _jax.does(_jax.operation(eqn)):
        return None
    # Values that are neither zero nor subnormal were not lost, so not more than the others were.
    suspects = [i for i, output in enumerate(outputs) if _share_of_tiny(output) > least]
    if not suspects:
        return None
    in_float32 = evaluate_in_float32(eqn, inputs)
    noise = _bound_noise(eqn, inputs)
    are_inputs_normal = not any(_is_subnormal(value).any() for value in inputs)
    losses = []
    for index in suspects:
        output = outputs[index]
        exact = np.asarray(in_float32[index], np.float32)
        is_changed = np.asarray(output, np.float32) != exact
        is_subnormal = _is_subnormal(output) & (is_changed | are_inputs_normal)
        losses.append(_count_lost(index, output, exact, noise, is_subnormal))
    worst = max(losses, key=lambda lost: lost.zeros + lost.subnormals)
    if worst.share <= least:
        return None
    return worst


def _count_lost(
    index: int, output: Any, exact: np.ndarray, noise: Any, is_subnormal: np.ndarray
) -> Lost:
    """Counts the values that one output lost. What float32 gives may be off by `noise`."""
    size = np.abs(exact)
    is_nonzero = size > noise
    is_tiny = is_nonzero & (size < _smallest_normal(output))
    is_zero = is_tiny & (np.asarray(output, np.float32) == 0)
    is_subnormal = is_tiny & is_subnormal
    lost_sum = 0.0
    if is_zero.any():
        sizes = np.where(is_nonzero & np.isfinite(size), size, 0).astype(np.float64)
        lost_sum = float(sizes[is_zero].sum() / sizes.sum())
    return Lost(
        output=index,
        nonzero=int(is_nonzero.sum()),
        zeros=int(is_zero.sum()),
        subnormals=int(is_subnormal.sum()),
        lost_sum=lost_sum,
    )


def _bound_noise(eqn: JaxprEqn, inputs: Sequence[Any]) -> Any:
    """Returns how much of a float32 sum of products may be rounding, if its terms cancel."""
    if not is_product(eqn):
        return 0.0
    magnitudes = evaluate_in_float32(eqn, list(map(jnp.abs, inputs)))
    return np.asarray(magnitudes[0], np.float32) * np.float32(2.0**-20)


def _repair(value: Any) -> Any:
    """Returns a value with a harmless number in the place of inf and NaN."""
    is_bad = nonfinite_mask(value)
    if not is_bad.any():
        return value
    # One half is in the domain of nearly every function, and a product with it cannot overflow.
    half = np.asarray(0.5, dtype_of(value))
    return jnp.asarray(np.where(is_bad, half, value))


def _smallest_normal(value: Any) -> float:
    return float(jnp.finfo(dtype_of(value)).smallest_normal)


def _is_subnormal(value: Any) -> np.ndarray:
    magnitude = np.abs(_inexact_or_zeros(value))
    smallest_normal = magnitude.dtype.type(_smallest_normal(magnitude))
    return (magnitude > 0) & (magnitude < smallest_normal)


def _share_of_tiny(value: Any) -> float:
    """Returns the share of numbers below the normal range, if float32 would hold them."""
    # bfloat16 has the range of float32, so a comparison with float32 would show nothing.
    if not has_narrow_range(dtype_of(value)) or not value.size:
        return 0.0
    array = np.asarray(value)
    smallest_normal = array.dtype.type(_smallest_normal(value))
    return float((np.abs(array) < smallest_normal).mean())
