"""The loss and its gradients as one compiled program, fast enough to be run at many scales."""

from typing import Any, NamedTuple

import jax

from .._gradients.boundary import scale_backward
from .._gradients.value_and_grad import value_and_grad
from .._gradients.verdict import all_finite
from .._state.scale import init_state
from .._trees.tree import combine
from ..diagnostics._calibrate import Calibration, Search
from ..diagnostics._formats import is_array
from ..diagnostics._trace.program import compile_fast
from .target import Target, error_line

_LEAST, _LARGEST, _MOST_PASSES = -14, 24, 10  # exponents of the loss scales to try


class BackwardTrial(NamedTuple):
    """What `jaxscale.scale_backward` does on a loss."""

    repeats: int  # how often it repeats the backward pass
    is_enough: bool  # whether the gradients are finite then
    raised: str  # what it raised, in one line, or `""`


class CompiledBackward:
    """The backward pass of a target: `loss_of` is its loss as a function of `args`."""

    def __init__(self, target: Target) -> None:
        def loss_of(params: Any, arrays: Any) -> Any:
            # Compiled programs take arrays. Everything else in a batch stays as it is.
            output = target.loss_fn(params, combine(arrays, target.batch))
            return output[0] if target.has_aux else output

        def backward(state: Any, params: Any, arrays: Any) -> tuple[Any, Any, Any]:
            loss, grads = value_and_grad(loss_of, state)(params, arrays)
            return loss, grads, all_finite(grads)

        arrays = jax.tree.map(lambda leaf: leaf if is_array(leaf) else None, target.batch)
        self.loss_of, self.args = loss_of, (target.params, arrays)
        # As if each operation ran by itself, which is how the trace runs it.
        self._backward = compile_fast(backward, xla_allow_excess_precision=False)
        self._tried = 0

    def run(self, loss_scale: float) -> tuple[float, Any]:
        loss, grads, _ = self._backward(init_state(loss_scale), *self.args)
        return float(loss), grads

    def calibrate(self) -> Calibration:
        def try_scale(exponent: int, batch: None) -> tuple[Any, bool]:
            self._tried += 1
            loss, _, finite = self._backward(init_state(2.0**exponent), *self.args)
            return loss, bool(finite)

        search = Search(try_scale, _LEAST, _LARGEST, _MOST_PASSES)
        search.look_at(None)
        return search.result()

    def try_scale_backward(self) -> BackwardTrial:
        """Returns what `jaxscale.scale_backward` does on the loss. It raises nothing."""
        passes = []

        def count(_: None, cotangents: Any) -> tuple[Any]:
            jax.debug.callback(lambda: passes.append(None))
            return (cotangents,)

        tap = jax.custom_vjp(lambda leaves: leaves)
        tap.defvjp(lambda leaves: (leaves, None), count)

        def tapped_loss(params: Any, arrays: Any) -> Any:
            # JAX rebuilds what a rule takes from types, which a class may refuse.
            leaves, structure = jax.tree.flatten(params)
            return self.loss_of(structure.unflatten(tap(leaves)), arrays)

        def are_gradients_finite(*args: Any) -> jax.Array:
            scaled = scale_backward(tapped_loss)
            return all_finite(value_and_grad(scaled, init_state(1.0))(*args)[1])

        try:
            run = compile_fast(are_gradients_finite, xla_allow_excess_precision=False)
            is_enough = bool(run(*self.args))
            jax.effects_barrier()
        except Exception as error:  # whatever it is: the exam can do without
            return BackwardTrial(repeats=0, is_enough=False, raised=error_line(error))
        return BackwardTrial(repeats=len(passes) - 1, is_enough=is_enough, raised="")

    def how_far(self) -> str:
        return f"{self._tried} tried"
