"""The equation at which gradients go wrong, and how it loses its numbers."""

from typing import NamedTuple

import numpy as np

from ..diagnostics._trace.evaluate import compute
from ..diagnostics._trace.interpreter import EquationKey, Visit
from ..diagnostics._trace.report import Place
from . import origins

_FLUSHED = 0.5  # it flushes if it makes this share of its nonzero numbers 0


class Culprit(NamedTuple):
    """The equation at which gradients go wrong.

    Attributes:
      place: the equation and its line.
      kind: `"overflow"` if it makes inf, which becomes finite later, `"underflow"` if most of its
        numbers become 0, otherwise `"rounding"`. Where inf or NaN is made later, of any 0 or of any
        1 or -1: `"underflow"` if some become 0, and `"saturation"` if some become 1 or -1.
      largest: the largest magnitude among its results in float32.
      error: the error of the gradients if this equation and all before it run as written, and the
        others in float32. If no one equation is to blame: if only its line runs as written.
      made_by: what made its numbers, such as a softmax, if that has a cure of its own: one of the
        names in `origins`, or `""`.
    """

    place: Place
    kind: str
    largest: float
    error: float
    made_by: str


class Loss(NamedTuple):
    """What an equation makes of its numbers, compared with what float32 makes of them."""

    is_infinite: bool  # whether there is inf or NaN among them
    share: float  # of those that are not 0 in float32: how many are 0
    saturated: float  # of those below 1 in magnitude in float32: how many are 1 or -1
    largest: float  # the largest magnitude in float32

    @property
    def badness(self) -> tuple[float, ...]:
        return self.is_infinite, self.share, self.saturated

    def find_kind(self, *, is_source: bool) -> str:
        """Returns the kind of a culprit, as `Culprit.kind` names it."""
        if self.is_infinite:
            return "overflow"
        if self.share > _FLUSHED:
            return "underflow"
        # Most zeros do no harm, as those in the tail of a softmax. So a 1 explains more.
        if is_source and self.saturated:
            return "saturation"
        if is_source and self.share:
            return "underflow"
        return "rounding"


def measure_loss(visit: Visit) -> Loss:
    exact_outputs = compute(visit.eqn, visit.arrays, True)
    is_infinite = False
    num_nonzero = 0
    num_flushed = 0
    num_below_one = 0
    num_saturated = 0
    largest = []
    for output, exact in zip(visit.outputs, exact_outputs, strict=True):
        numbers = np.asarray(output)
        if numbers.dtype.kind not in "fV":
            continue
        magnitudes = np.abs(np.asarray(exact))
        is_infinite |= not np.isfinite(numbers).all()
        num_nonzero += np.count_nonzero(magnitudes)
        num_flushed += np.count_nonzero((numbers == 0) & (magnitudes != 0))
        is_below_one = (magnitudes < 1) & (magnitudes != 0)
        num_below_one += np.count_nonzero(is_below_one)
        num_saturated += np.count_nonzero(is_below_one & (np.abs(numbers) == 1))
        largest.append(float(magnitudes.max(initial=0)))
    return Loss(
        is_infinite=is_infinite,
        share=num_flushed / max(num_nonzero, 1),
        saturated=num_saturated / max(num_below_one, 1),
        largest=max(largest, default=0.0),
    )


def find_maker(
    operations: origins.Operations, key: EquationKey, kind: str, *, is_source: bool
) -> str:
    """Returns what made the numbers of an equation, if that has a cure of its own, or `""`."""
    if kind == "overflow":
        return ""
    origin = operations.find_origin(key)
    # The logarithm of 1 minus a probability has a cure for a sigmoid alone.
    is_near_one = is_source and kind != "underflow"
    if is_near_one and origin != origins.SIGMOID:
        return ""
    if origin == origins.PRODUCT or operations.is_read_by_logarithm(key):
        return origin
    return ""
