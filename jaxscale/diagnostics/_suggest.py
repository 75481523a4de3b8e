"""Which loss scales suit the gradients in a histogram, and whether one is needed at all.

Every power of two is tried: a histogram tells exactly what a format would lose at each.
"""

from typing import NamedTuple

import numpy as np

from .._trees.checks import finite_number, one_of
from ._formats import FORMATS
from ._histogram import (
    Histogram,
    HostHistogram,
    Shares,
    fetch_histogram,
    find_outcomes,
    find_shares,
)
from ._text import join_ends, percent, power

# exponents of the loss scales whose reciprocals are normal numbers
_SCALES = range(-126, 127)


class Suggestion(NamedTuple):
    """What `suggest_scale` found; `print` it for the sentence.

    Attributes:
      dtype: the name of the format.
      needed: whether a scale other than 1 is needed; `None` if no gradient is nonzero and finite.
      lowest: the least scale in the range that `suggest_scale` returns.
      highest: the largest scale in it. At twice that, something overflows.
      suggested: 1 if none is needed, or the middle one, which leaves equal room on both sides.
      lossless: the least and the largest scale that lose nothing at all, or `None`.
      unscaled: what the format makes of the gradients at scale 1, a `Shares`.
      scaled: what it makes of them at the suggested scale.
      sentence: the result in words.
    """

    dtype: str
    needed: bool | None
    lowest: float | None
    highest: float | None
    suggested: float | None
    lossless: tuple[float, float] | None
    unscaled: Shares
    scaled: Shares
    sentence: str

    def __str__(self) -> str:
        return self.sentence


def suggest_scale(
    histogram: Histogram, *, dtype: str = "float16", tolerance: float = 0.001
) -> Suggestion:
    """Returns the range of power-of-two loss scales that lose nothing, or least.

    A scale is in the range if no gradient overflows at it and the share that is flushed to zero is
    at most `tolerance`. If there is no such scale, the range holds the scales that flush the
    fewest gradients without an overflow. Only the gradients in the histogram are judged. Gradients
    of activations, computed on the way, may be larger: `calibrate` tries the whole backward pass.
    Call it on the host: it waits for the device.

    Args:
      histogram: what `histogram` returned; leading axes are summed up. Compute the gradients in
        float32 or at a high scale: gradients that float16 flushed on the way count as 0.
      dtype: `"float16"`, `"bfloat16"`, `"float8_e4m3fn"` or `"float8_e5m2"`.
      tolerance: the share of nonzero gradients that may be flushed to zero, from 0 to 1.

    Raises:
      ValueError: if `dtype` or `tolerance` is out of range.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxscale import diagnostics
      >>> histogram = diagnostics.histogram({"w": jnp.array([2.0**-30, 1.0])})
      >>> print(diagnostics.suggest_scale(histogram))
      float16 needs a loss scale: without one 50.0% of the nonzero gradients are flushed to \
zero, and 0% overflow. Scales that lose nothing: 2**6 to 2**15.
      >>> print(diagnostics.suggest_scale(histogram, dtype="bfloat16"))
      bfloat16 needs no loss scale: without one it loses nothing.
    """
    one_of("suggest_scale", "dtype", dtype, FORMATS)
    tolerance = finite_number("suggest_scale", "tolerance", tolerance)
    if not 0 <= tolerance <= 1:
        raise ValueError(
            f"`suggest_scale(tolerance=...)` must lie between 0 and 1, got {tolerance}. It is "
            "the share of gradients that may be flushed to zero."
        )
    numbers = fetch_histogram("suggest_scale", histogram)
    counts = numbers.counts
    if not counts.sum():
        return _suggest_nothing(dtype, numbers)
    scales = _find_best_scales(counts, dtype, tolerance)
    unscaled = find_shares(counts, dtype, 0)
    is_needed = 0 not in scales.best
    middle = 0
    if is_needed:
        middle = (scales.best[0] + scales.best[-1]) // 2
    lowest, highest = _find_ends(scales.best)
    lossless = None
    if scales.lossless:
        lossless = _find_ends(scales.lossless)

    sentence = _say_need(dtype, is_needed, unscaled, tolerance)
    if is_needed:
        sentence += _say_range(
            scales, find_shares(counts, dtype, scales.best[0]).flushed
        )
    return Suggestion(
        dtype=dtype,
        needed=is_needed,
        lowest=lowest,
        highest=highest,
        suggested=2.0**middle,
        lossless=lossless,
        unscaled=unscaled,
        scaled=find_shares(counts, dtype, middle),
        sentence=sentence + _say_left_out(numbers),
    )


def _suggest_nothing(dtype: str, numbers: HostHistogram) -> Suggestion:
    """Returns the suggestion for gradients none of which is finite and nonzero."""
    nothing = find_shares(numbers.counts, dtype, 0)
    sentence = "No gradient is finite and nonzero, so no loss scale can be suggested."
    return Suggestion(
        dtype=dtype,
        needed=None,
        lowest=None,
        highest=None,
        suggested=None,
        lossless=None,
        unscaled=nothing,
        scaled=nothing,
        sentence=sentence + _say_left_out(numbers),
    )


class _BestScales(NamedTuple):
    """Exponents of loss scales at which nothing overflows, from the least to the largest."""

    best: list[int]  # those that flush as few gradients as possible
    lossless: list[int]  # those of them that flush none


def _find_best_scales(counts: np.ndarray, dtype: str, tolerance: float) -> _BestScales:
    flushed = {}
    for exponent in _SCALES:
        outcomes = find_outcomes(counts, dtype, exponent)
        if not outcomes.overflowed.any():
            flushed[exponent] = outcomes.flushed.sum()
    # A larger scale never flushes more, so the largest of these flushes the fewest.
    fewest = flushed[max(flushed)]
    most = max(tolerance * counts.sum(), fewest)
    best = [exponent for exponent in flushed if flushed[exponent] <= most]
    lossless = [exponent for exponent in best if not flushed[exponent]]
    return _BestScales(best, lossless)


def _say_need(dtype: str, is_needed: bool, unscaled: Shares, tolerance: float) -> str:
    without = "without one it loses nothing"
    if unscaled.lost:
        without = (
            f"without one {percent(unscaled.flushed)} of the nonzero gradients are flushed to "
            f"zero, and {percent(unscaled.overflowed)} overflow"
        )
    if is_needed:
        return f"{dtype} needs a loss scale: {without}."
    if unscaled.lost <= tolerance:
        return f"{dtype} needs no loss scale: {without}."
    return (
        f"{dtype} gains nothing from a loss scale: {without}, and no scale loses less."
    )


def _say_range(scales: _BestScales, flushed: float) -> str:
    """Returns which scales are best. The least of them flushes a share `flushed`."""
    ends = "none"
    if scales.lossless:
        ends = _say_ends(scales.lossless)
    words = f" Scales that lose nothing: {ends}."
    if scales.lossless == scales.best:
        return words
    share = f"at most {percent(flushed)}"
    if flushed < 0.001:
        share = "less than 0.1%"
    return f" Scales that flush {share} without an overflow: {_say_ends(scales.best)}.{words}"


def _find_ends(exponents: list[int]) -> tuple[float, float]:
    """Returns the least and the largest of some loss scales, given their exponents."""
    return 2.0 ** exponents[0], 2.0 ** exponents[-1]


def _say_ends(exponents: list[int]) -> str:
    return join_ends(*map(power, _find_ends(exponents)))


def _say_left_out(numbers: HostHistogram) -> str:
    words = ""
    if numbers.zero:
        words += (
            f" {percent(numbers.zero / numbers.total)} of all gradients are exactly 0: true "
            "zeros, or flushed before they were counted. To tell, compute them in float32 or at a "
            "high scale."
        )
    num_nonfinite = numbers.inf + numbers.nan
    if num_nonfinite:
        words += f" Inf or NaN, which are left out: {num_nonfinite:.0f}."
    return words
