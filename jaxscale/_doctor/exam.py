"""What the doctor measured: the results that all findings are made of."""

import math
from typing import NamedTuple

from ..diagnostics._calibrate import Calibration
from ..diagnostics._histogram import Histogram, Shares
from ..diagnostics._leaves import LeafTable
from ..diagnostics._suggest import Suggestion
from ..diagnostics._trace.report import TracedNonfinite, TraceReport
from ..diagnostics._underflow import Underflow
from .compiled import BackwardTrial
from .float32 import Float32Check
from .gradients import Comparison
from .origins import Sum
from .remedy import Relief


class Exam(NamedTuple):
    """What was measured. All of it is on the host, except for the histogram."""

    # What was examined, and how.
    target: str  # as named on the command line
    autocast: str  # the format in which `jaxscale.autocast` computed the loss, or `""`
    # whether nothing was compared with float32, and nothing finite was traced
    is_quick: bool
    # whether no scale was given, so that `loss_scale` is the largest that fits
    is_auto: bool
    loss: float
    # without `jaxscale.autocast`; `None` if that was not used
    loss_as_written: float | None
    dtypes: tuple[str, ...]  # the formats in which the loss is computed
    has_narrow_range: bool  # whether one of them has a smaller range than float32
    # their names, by the line that calls their functions
    backward_rules: dict[str, str]

    # The loss scale.
    loss_scale: float  # the scale of the trace and the table of leaves
    judged_scale: float  # the scale at which formats are judged: the one given, or 1
    # The largest scale that does not overflow. `None` if none of the model's dtypes needs one, or
    # the loss itself is not finite.
    calibration: Calibration | None
    # of `jaxscale.scale_backward`, after a calibration
    backward_trial: BackwardTrial | None
    largest_gradient: float  # its magnitude, at the largest scale
    # whether a number on the way, far larger than the gradients, limits it
    is_limited: bool
    # where the least loss scale that does not fit overflows
    ceiling: TracedNonfinite | None
    # What lets a higher scale fit, sought if the scale `is_limited` or the largest is below 1.
    # `None` otherwise, or if nothing was found.
    relief: Relief | None
    # The gradients at the judged scale against those at the largest, if that is higher.
    scale_comparison: Comparison | None

    # Where numbers get lost.
    trace: TraceReport  # at the loss scale
    float32: Float32Check  # the gradients against those in float32
    # lines with an exponential of a row without its maximum, too large
    unshifted: tuple[str, ...]
    loss_sums: tuple[Sum, ...]  # the sums that the loss is made of
    # whose gradient is 0 everywhere, in float32 if that is known
    zero_leaves: tuple[str, ...]

    # The finished gradients, and what storing them would lose.
    leaf_table: LeafTable  # the gradients, leaf by leaf
    # the gradients at the largest scale, where the fewest are flushed
    histogram: Histogram
    shares: dict[str, Shares]  # what each format keeps of these at the judged scale
    layers: Underflow  # the same for each layer
    # the scale at which float16 would store these gradients best
    suggestion: Suggestion

    @property
    def is_right(self) -> bool:
        """Whether the gradients were compared with float32, and none is wrong."""
        return self.float32.comparison is not None and not self.float32.wrong_leaves

    @property
    def is_all_zero(self) -> bool:
        """Whether all gradients are 0 at the largest scale, at which the histogram is taken."""
        return self.suggestion.needed is None and not self.leaf_table.nonfinite_rows

    @property
    def is_of_autocast(self) -> bool:
        """Whether half precision is due to autocast, and not written by hand."""
        return bool(self.autocast) and math.isfinite(self.loss_as_written or 0.0)

    @property
    def largest_scale(self) -> float | None:
        """The largest loss scale that does not overflow, or `None` if it is not known."""
        if self.calibration is None:
            return None
        return self.calibration.init_scale
