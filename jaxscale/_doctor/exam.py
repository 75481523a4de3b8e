"""The exam: the measurements that all findings are made of."""

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from .._jax.jaxprs import has_narrow_range
from ..diagnostics._calibrate import Calibration
from ..diagnostics._histogram import Histogram, Shares
from ..diagnostics._leaves import LeafTable
from ..diagnostics._switches.operations import Rounded
from .compiled import BackwardTrial
from .faults import Check, Fault
from .gradients import Comparison
from .start import Start
from .sums_of_gradients import SumOfGradient


class Relief(NamedTuple):
    """A higher loss scale, and the lines that must be in float32 for it to fit."""

    loss_scale: float
    lines: tuple[str, ...]


class Exam(NamedTuple):
    """The measurements. Everything is on the host, and has the name that it has in the JSON.

    A loss scale *fits* if nothing overflows at it. The *largest* scale is the largest that fits
    (`largest_scale`). If none is known, what is described below as "at the largest scale" was
    measured at `loss_scale`: in both cases that is `best_scale`.

    Attributes:
      target: the model, as named on the command line.
      autocast: the format in which `jaxscale.autocast` computed the loss, or `""`.
      is_quick: whether nothing was compared with float32, and lines were only looked at to find
        inf and NaN.
      is_auto: whether no loss scale was asked for.
      loss: the loss, under `jaxscale.autocast` if that was used.
      loss_as_written: the loss without `jaxscale.autocast`, or `None` if that was not used.
      halves_left: which products `jaxscale.autocast` leaves in the other half precision, and what
        helps, as sentences. None without such products.
      dtypes: the formats in which the loss is computed.
      dtypes_of_parameters: in which they are stored.
      sums_of_gradients: of how many numbers the gradient of each half-precision parameter is a
        sum.
      backward_rules: the name of each custom backward rule, by the source line that calls its
        function.
      loss_scale: the loss scale of `leaves` and of what is not finite: the one asked for. If
        `is_auto`, it is the largest scale, or 1 if none is known.
      shown_scale: the loss scale at which formats are judged: the one asked for, or 1 if
        `is_auto`.
      calibration: the search for the largest scale. `None` if no format of the model needs a loss
        scale, or the loss itself is not finite.
      start: how to start training at the largest scale, if one is known.
      trial: what `jaxscale.scale_backward` does on this loss. It is not tried without a
        `calibration`, and in a quick exam.
      largest: the largest magnitude of a gradient, unscaled, at the largest scale.
      is_limited: whether the largest scale is limited by an intermediate number of the backward
        pass that is far larger than all gradients.
      ceiling: where the backward pass overflows, at the lowest scale that was tried and does not
        fit. `None` if every scale that was tried fits, if the outputs are not finite, or if no such
        place was found.
      relief: a higher scale, and the lines that must be in float32 for it to fit. They are looked
        for in a full exam with a `ceiling` at a known line, if `is_limited` or the largest scale is
        below 1. `None` if they were not looked for, or not found.
      comparison: the gradients at the shown scale against those at the largest, if that is known
        and higher, else `None`.
      nonfinite_arguments: the names of the parameters and of what is in the batch that hold inf or
        NaN.
      nonfinite_outputs: which of the loss, the auxiliary output and the gradients do so, at
        `loss_scale`.
      constants: the numbers of the source that a format rounds to 0, 1 or inf.
      not_entered: the names of operations that hold others which were not looked at.
      check: the comparison of the gradients with float32, at `loss_scale` or at the largest scale
        if that is higher, and what helps if they are wrong. Nothing is compared in a quick exam, or
        if not everything is finite.
      half_draws: the dtype and the line of each draw of random numbers in half precision.
      zero: the names of the gradients that are 0 everywhere in float32. Where the float32
        gradients are not known, those at the largest scale count.
      leaves: the gradients at `loss_scale`, leaf by leaf.
      histogram: the gradients at the largest scale, where the fewest are flushed to 0 in the
        backward pass.
      shares: what each format would keep of the gradients in `histogram`, at the shown scale.
      layers: the same of each leaf.
    """

    # What was examined, and how.
    target: str
    autocast: str
    is_quick: bool
    is_auto: bool
    loss: float
    loss_as_written: float | None
    halves_left: tuple[str, ...]
    dtypes: tuple[str, ...]
    dtypes_of_parameters: tuple[str, ...]
    sums_of_gradients: tuple[SumOfGradient, ...]
    backward_rules: dict[str, str]

    # The loss scale.
    loss_scale: float
    shown_scale: float
    calibration: Calibration | None
    start: Start | None
    trial: BackwardTrial
    largest: float
    is_limited: bool
    ceiling: Fault | None
    relief: Relief | None
    comparison: Comparison | None

    # Where numbers get lost.
    nonfinite_arguments: tuple[str, ...]
    nonfinite_outputs: tuple[str, ...]
    constants: tuple[Rounded, ...]
    not_entered: tuple[str, ...]
    check: Check
    half_draws: tuple[tuple[str, str], ...]
    zero: tuple[str, ...]

    # The finished gradients, and what storing them would lose.
    leaves: LeafTable
    histogram: Histogram
    shares: dict[str, Shares]
    layers: dict[str, dict[str, Shares]]

    @property
    def has_narrow_range(self) -> bool:
        """A format of the model has a smaller range than float32."""
        return any(has_narrow_range(jnp.dtype(name)) for name in self.dtypes)

    @property
    def is_right(self) -> bool:
        """Gradients were compared with float32, and none is wrong."""
        check = self.check
        if check.float32 is None or check.compares_nothing:
            return False
        return not check.wrong

    @property
    def is_all_zero(self) -> bool:
        """All gradients are 0 at the largest scale, and all are finite at `loss_scale`."""
        # Gradients are finite at a scale that fits. If none is known, that scale is `loss_scale`,
        # as for `leaves`.
        has_finite_nonzero = np.any(self.histogram.counts)
        return not has_finite_nonzero and not self.leaves.nonfinite_rows

    @property
    def blames_autocast(self) -> bool:
        """`jaxscale.autocast` is blamed for a fault, if there is one.

        True if autocast was used and the loss without it is finite.
        """
        if self.loss_as_written is None:
            return False
        return math.isfinite(self.loss_as_written)

    @property
    def largest_scale(self) -> float | None:
        """The largest loss scale that fits, or `None` if none is known.

        No scale is known if none was looked for, or if no scale that was tried fits.
        """
        if self.calibration is None:
            return None
        return self.calibration.init_scale

    @property
    def best_scale(self) -> float:
        """The loss scale at which the fewest gradients are flushed on the way."""
        return self.largest_scale or self.loss_scale

    @property
    def overflows_at(self) -> float | None:
        """The least loss scale that was seen to overflow, if one was."""
        if self.calibration is None:
            return None
        return self.calibration.overflows_at
