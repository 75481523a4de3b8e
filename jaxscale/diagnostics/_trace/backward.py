"""The scaled backward pass, run equation by equation to see where numbers get lost.

`TracedBackward` holds the jaxpr of the loss and its scaled gradients. It runs in the `Interpreter`
at any loss scale, and with any part of it in float32. After each equation the interpreter calls
`Findings.watch`, which notes what was lost.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..._gradients.scaled import divide
from ..._gradients.value_and_grad import seed_cotangent, unpacked
from ..._jax import JaxprEqn
from ..._state.scale import LossScaleState
from ..._trees.leaf import is_inexact
from ..._trees.tree import widen
from .._formats import is_array
from .constants import Constants
from .findings import Findings, Found
from .interpreter import NOTHING, EquationKey, Inside, Interpreter, Value, Visit
from .jaxpr import BACKWARD, FORWARD
from .places import lines
from .plan import Planner, RoundedAt
from .report import TracedNonfinite, TraceReport


class TracedBackward:
    """The loss and its scaled gradients as a program that can be run in many ways.

    It takes the arguments of `trace`, and `constants`: the numbers of the source that were rounded
    when `fun` was traced before.
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        args: tuple[Any, ...],
        fun_kwargs: dict[str, Any],
        constants: Constants | None = None,
        *,
        transform: Callable[..., Any] = jax.value_and_grad,
        has_aux: bool = False,
        **kwargs: Any,
    ) -> None:
        def backward(loss_scale: jax.Array) -> dict[str, Any]:
            # Not the state itself: with that of a `NoOpLossScale` no cotangent is scaled, and
            # there would be none to follow.
            state = LossScaleState(loss_scale, jnp.zeros(()), jnp.zeros(()))
            seeded, one_seed = seed_cotangent("trace", fun, state, has_aux)
            differentiated = transform(seeded, has_aux=True, **kwargs)
            # Copied inside the traced function: modules of Flax NNX may only change there.
            copies, copied_kwargs = jax.tree.map(lambda leaf: leaf, (args, fun_kwargs))
            output = differentiated(*copies, **copied_kwargs)
            loss, (aux, seed), grads = unpacked("trace", output)
            # In float32: the bounds of the divisor would be 0 and inf in float16, and the trace
            # would report them.
            grads = divide(grads, widen(one_seed(seed)))
            return {"loss": loss} | _inexact("aux", aux) | _inexact("grads", grads)

        constants = Constants() if constants is None else constants
        # The arguments are constants of the jaxpr, so that a leaf that is not an array is kept.
        with constants.notice():
            self._closed, shapes = jax.make_jaxpr(backward, return_shape=True)(jnp.float32(1))
        self._names = sorted(shapes)  # in the order in which a dictionary is flattened
        self._needs = tuple(
            BACKWARD if name.startswith("grads") else FORWARD for name in self._names
        )
        self._planner = Planner(constants)
        self._arguments = _inexact("args", args) | _inexact("kwargs", fun_kwargs)
        # For `how_far`: the equations of the last pass and of this, and where this one is.
        self._total, self._done = 0, 0
        self._inside = NOTHING

    def run(
        self,
        loss_scale: Any,
        is_wide: Callable[[EquationKey], bool] = lambda key: False,
        look: Callable[[Visit], None] | None = None,
        is_brief: bool = False,
        is_shaken: bool = False,
    ) -> "Run":
        """Returns what one pass gives and does.

        Args:
          loss_scale: a `f32[]`.
          is_wide: whether an equation is computed in float32, if it can be.
          look: is shown each equation.
          is_brief: whether to leave out what is made of numbers that are inf or NaN already.
          is_shaken: whether what is computed in float32 is changed by as much as float32 rounds.
        """
        findings = Findings(look, is_brief)
        outputs = self._interpret(findings, loss_scale, is_wide, is_shaken)
        values = dict(zip(self._names, outputs, strict=True))
        return Run(values, findings, self._arguments, self._planner.rounded, float(loss_scale))

    def first_overflow(self, loss_scale: float) -> TracedNonfinite | None:
        """Returns the first place that depends on the loss scale and makes inf or NaN.

        The pass stops there. So it is not known whether that reaches the gradients.
        """
        findings = Findings(None, True, is_hasty=True)
        try:
            self._interpret(findings, loss_scale)
        except Found:
            return findings.born({})[-1]
        return None

    def _interpret(
        self,
        findings: Findings,
        loss_scale: Any,
        is_wide: Callable[[EquationKey], bool] = lambda key: False,
        is_shaken: bool = False,
    ) -> list[Value]:
        def watch(visit: Visit) -> list[frozenset[Any]]:
            self._inside = Inside(visit.around, visit.iteration)
            return findings.watch(visit)

        def count(key: EquationKey) -> bool:  # it is asked of each equation
            self._done += 1
            return is_wide(key)

        self._total, self._done, self._inside = self._done, 0, NOTHING
        interpreter = Interpreter(self._planner, watch, count, is_shaken=is_shaken)
        scale = Value(jnp.float32(loss_scale), True)
        with jax.debug_nans(False), jax.debug_infs(False):
            return interpreter.run(self._closed, [scale], self._needs)

    def how_far(self) -> str:
        """Returns how far the pass that runs now has come, in words. Another thread may ask."""
        words = f"operation {self._done}" + f" of about {self._total}" * (self._total > 0)
        around, iteration = self._inside
        loops = [eqn for eqn in around if eqn.primitive.name in ("scan", "while")]
        return ", ".join([words, *map(_how_far, loops, iteration)])


class Run(NamedTuple):
    """One pass."""

    values: dict[str, Value]  # the loss, the gradients and what else is returned, by their names
    findings: Findings  # what was seen on the way
    arguments: dict[str, Any]  # the floating-point arguments, by their names
    rounded: Sequence[RoundedAt]  # the numbers that a narrow format rounded to 0 or inf, and where
    loss_scale: float

    @property
    def grads(self) -> dict[str, np.ndarray]:
        """The gradients, by their names."""
        values = self.values.items()
        return {name: np.asarray(v.array) for name, v in values if name.startswith("grads")}

    def report(self) -> TraceReport:
        """Returns all that was seen, as Python values."""
        return self.findings.report(self.values, self.arguments, self.rounded, self.loss_scale)


def _how_far(loop: JaxprEqn, iteration: int) -> str:
    words, length = f"iteration {iteration + 1}", loop.params.get("length")
    if length is not None:  # a `while` has none
        done = length - iteration if loop.params["reverse"] else iteration + 1
        words = f"iteration {done} of {length}"
    return " at ".join([words, *map(str, lines(loop, ())[:1])])


def _inexact(name: str, tree: Any) -> dict[str, Any]:
    """Returns the floating-point and complex arrays of a tree, by their paths."""
    return {
        name + jax.tree_util.keystr(path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if is_array(leaf) and is_inexact(leaf)
    }
