"""The loss and its gradients as one compiled program, fast enough to be run at many scales."""

from typing import Any, NamedTuple

import jax
import numpy as np

from .._backward.passes import PassReport, observer
from .._backward.scale_backward import scale_backward
from .._gradients.value_and_grad import value_and_grad
from .._gradients.verdict import all_finite
from .._state.scale import LossScaleState, init_state
from .._trees.pytrees import Params
from ..diagnostics._calibrate import Calibration, Search
from ..diagnostics._switches.backward import compile_fast
from .target import Target, TargetError, error_line

# Exponents of the loss scales to try, and how many to try at most.
_LEAST_EXPONENT = -14
_LARGEST_EXPONENT = 24
_MOST_PASSES = 10


class BackwardPass(NamedTuple):
    """The results of one pass, on the device."""

    loss: jax.Array
    grads: dict[str, jax.Array]  # the unscaled gradients
    is_finite: jax.Array  # bool[], of the gradients


class BackwardTrial(NamedTuple):
    """A trial of `jaxscale.scale_backward` on a loss.

    Attributes:
      repeats: how often it repeats a backward pass at another scale, and whether the gradients are
        finite in the end; `None` if that is not known.
      scale_backward_raised: what it raised, in one line, or `""`; `None` if it was not tried.
      is_raised: whether that scale is larger, as gradients were almost 0.
      is_divided: whether it pulls small and large cotangents back apart.
      is_lost: whether it returns NaN in the place of nothing but zeros.
    """

    repeats: tuple[int, bool] | None = None
    scale_backward_raised: str | None = None
    is_raised: bool = False
    is_divided: bool = False
    is_lost: bool = False


class CompiledBackward:
    """The backward pass of a target."""

    def __init__(self, target: Target) -> None:
        def backward(
            state: LossScaleState, params: Params, arrays: Any
        ) -> BackwardPass:
            loss, grads = value_and_grad(target.loss_fn, state)(params, arrays)
            return BackwardPass(loss, grads, all_finite(grads))

        self._target = target
        # As if each operation ran by itself, which is how the trace runs it.
        self._backward: Any
        self._backward = compile_fast(backward, xla_allow_excess_precision=False)
        self._gradients: dict[float, dict[str, np.ndarray]] = {}
        try:
            self._backward.trace(init_state(1.0), *target.args)
        except Exception as error:
            raise TargetError(
                f"The loss function of {target.name} cannot be differentiated: "
                f"{error_line(error)}"
            ) from error

    def differentiate(self, loss_scale: float) -> BackwardPass:
        return self._backward(init_state(loss_scale), *self._target.args)

    def find_gradients(self, loss_scale: float) -> dict[str, np.ndarray]:
        """Returns the gradients at a loss scale by their names, computed once for each."""
        if loss_scale not in self._gradients:
            grads = self.differentiate(loss_scale).grads
            self._gradients[loss_scale] = jax.device_get(grads)
        return self._gradients[loss_scale]

    def calibrate(self) -> Calibration:
        """Returns the largest loss scale that does not overflow on the batch."""

        def try_scale(exponent: int, batch: None) -> tuple[jax.Array, bool]:
            backward_pass = self.differentiate(2.0**exponent)
            return backward_pass.loss, bool(backward_pass.is_finite)

        search = Search(try_scale, _LEAST_EXPONENT, _LARGEST_EXPONENT, _MOST_PASSES)
        search.look_at(None)
        return search.result()

    def try_scale_backward(self) -> BackwardTrial:
        """Tries `jaxscale.scale_backward` on the loss, and raises nothing."""
        reports: list[PassReport] = []

        def are_gradients_finite(*args: Any) -> jax.Array:
            scaled = scale_backward(self._target.loss_fn)
            _, grads = value_and_grad(scaled, init_state(1.0))(*args)
            return all_finite(grads)

        token = observer.set(reports.append)
        try:
            compiled = compile_fast(
                are_gradients_finite, xla_allow_excess_precision=False
            )
            is_enough = bool(compiled(*self._target.args))
            jax.effects_barrier()
        except Exception as error:  # whatever it is: the exam can do without
            return BackwardTrial(scale_backward_raised=error_line(error))
        finally:
            observer.reset(token)
        num_repeats = sum(int(report.num_repeats) for report in reports)
        return BackwardTrial(
            repeats=(num_repeats, is_enough),
            scale_backward_raised="",
            is_raised=any(report.is_raised for report in reports),
            is_divided=any(report.is_divided for report in reports),
            is_lost=any(report.is_lost for report in reports),
        )
