"""Which loss scales suit the gradients in a histogram, and whether one is needed at all.

Every power of two is tried: a histogram tells exactly what a format would lose at each.
"""

from typing import NamedTuple

from .._trees.checks import finite_number, one_of
from ._formats import FORMATS
from ._histogram import Histogram, Numbers, Shares, outcomes, read
from ._text import percent, power, span

_SCALES = range(-126, 127)  # exponents of the loss scales whose reciprocals are normal numbers


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
    at most `tolerance`. If there is no such scale, the range is that of the scales that flush the
    fewest without an overflow. Only the gradients in the histogram are judged. Those of
    activations, computed on the way, may be larger: `calibrate` tries the whole backward pass.
    For the host: it waits for the device.

    Args:
      histogram: what `histogram` returned; leading axes are summed up. Compute the gradients in
        float32 or at a high scale: those that float16 flushed on the way count as 0.
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
    numbers = read("suggest_scale", histogram)
    total = numbers.counts.sum()
    if not total:
        none = Shares(0.0, 0.0, 0.0, 0.0)
        words = "No gradient is finite and nonzero, so no loss scale can be suggested."
        words += _left_out(numbers)
        return Suggestion(dtype, None, None, None, None, None, none, none, words)
    lost = {k: Shares(*outcomes(numbers.counts, dtype, k).sum(axis=1)) for k in _SCALES}
    fits = [k for k in _SCALES if not lost[k].overflowed]
    # More scale never flushes more, so the last of them flushes the fewest.
    most = max(tolerance * total, lost[fits[-1]].flushed)
    best = [k for k in fits if lost[k].flushed <= most]
    lossless = [k for k in best if not lost[k].flushed]
    needed = 0 not in best
    middle = (best[0] + best[-1]) // 2 if needed else 0
    unscaled, scaled = (Shares(*(float(number / total) for number in lost[k])) for k in (0, middle))
    words = _say_need(dtype, needed, unscaled, tolerance)
    if needed:
        words += _say_range(best, lossless, lost[best[0]].flushed / total)
    return Suggestion(
        dtype,
        needed,
        *(2.0**k for k in (best[0], best[-1], middle)),
        lossless=(2.0 ** lossless[0], 2.0 ** lossless[-1]) if lossless else None,
        unscaled=unscaled,
        scaled=scaled,
        sentence=words + _left_out(numbers),
    )


def _say_need(dtype: str, needed: bool, unscaled: Shares, tolerance: float) -> str:
    flushed, overflowed = percent(unscaled.flushed), percent(unscaled.overflowed)
    without = "without one it loses nothing"
    if unscaled.lost:
        without = f"without one {flushed} of the nonzero gradients are flushed to zero, and "
        without += f"{overflowed} overflow"
    if needed or unscaled.lost <= tolerance:
        return f"{dtype} needs {'a' if needed else 'no'} loss scale: {without}."
    return f"{dtype} gains nothing from a loss scale: {without}, and no scale loses less."


def _say_range(best: list[int], lossless: list[int], flushed: float) -> str:
    words = f" Scales that lose nothing: {_ends(lossless) if lossless else 'none'}."
    if lossless == best:
        return words
    share = "less than 0.1%" if flushed < 0.001 else f"at most {percent(flushed)}"
    return f" Scales that flush {share} without an overflow: {_ends(best)}.{words}"


def _ends(exponents: list[int]) -> str:
    return span(power(2.0 ** exponents[0]), power(2.0 ** exponents[-1]))


def _left_out(numbers: Numbers) -> str:
    words = ""
    if numbers.zero:
        words += (
            f" {percent(numbers.zero / numbers.everything)} of all gradients are exactly 0: true "
            "zeros, or flushed before they were counted. To tell, compute them in float32 or at a "
            "high scale."
        )
    if numbers.inf + numbers.nan:
        words += f" Inf or NaN, which are left out: {numbers.inf + numbers.nan:.0f}."
    return words
