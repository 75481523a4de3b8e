"""A backward pass as one compiled program with a switch at each line of the model.

Every half-precision value is carried in float32. An equation whose result is half precision is
computed in float32, and its result is rounded where the switch of its place is on. So one program
evaluates any set of lines in half precision, at any loss scale: none of them is the truth, all of
them is the model. At lines to blame each kind of operation has a switch, and each limit of the
format. Refs are carried as the arrays that they hold.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax

from ..._jaxprs import is_ref
from .backward import OF_GRADIENT, Backward, compile_fast
from .interpreter import Run
from .notes import Numbers
from .operations import Operations, Place
from .places import Line
from .switches import ALL_LIMITS, PLAIN, Limits, Variant, list_noted, switch_of


class Outcome(NamedTuple):
    """What one evaluation gives, on the host.

    Attributes:
      outputs: the loss, the auxiliary output and the gradients, by their names.
      births: the places that make inf or NaN of finite numbers, in the order in which they run, if
        the program looks for them.
      numbers: what was measured, by the places.
    """

    outputs: dict[str, np.ndarray]
    births: tuple[Place, ...]
    numbers: dict[Place, Numbers]

    @property
    def loss(self) -> float:
        return float(np.mean(self.outputs["loss"], dtype=np.float64))

    @property
    def grads(self) -> dict[str, np.ndarray]:
        """The gradients, by the names of their leaves."""
        grads = {}
        for name, output in self.outputs.items():
            if name.startswith(OF_GRADIENT):
                grads[name.removeprefix(OF_GRADIENT)] = output
        return grads

    @property
    def has_finite_grads(self) -> bool:
        return are_finite(self.grads)

    @property
    def is_finite(self) -> bool:
        return not self.nonfinite

    @property
    def nonfinite(self) -> tuple[str, ...]:
        """The names of the outputs that hold inf or NaN."""
        names = self.outputs.items()
        return tuple(name for name, leaf in names if not np.isfinite(leaf).all())


def are_finite(leaves: Mapping[str, np.ndarray]) -> bool:
    return all(np.isfinite(leaf).all() for leaf in leaves.values())


class Switchboard:
    """The loss and its gradients as a function of the loss scale and of switches.

    Attributes:
      operations: what the program does.
      places: the places that have a switch, in the order in which they last run.
      lines: the lines among them at which something is rounded, in the order in which they
        last run: there a loss scale overflows first.
    """

    def __init__(self, backward: Backward) -> None:
        self._backward = backward
        self.operations = Operations(backward)
        self.places = self.operations.places
        self.rounding = [p for p in self.places if p in self.operations.dtypes]
        last: dict[Line, None] = {}
        for place in self.rounding:
            last.pop(place.line, None)
            last[place.line] = None
        self.lines = list(last)
        self._programs: dict[Variant, Callable[..., Any]] = {}

    def places_of(self, lines: Collection[Line]) -> list[Place]:
        return [place for place in self.rounding if place.line in lines]

    def evaluate(
        self,
        loss_scale: float,
        on: Collection[Place],
        limits: Limits = ALL_LIMITS,
        variant: Variant = PLAIN,
    ) -> Outcome:
        """Evaluates with these places in half precision, and all others in float32."""
        if variant not in self._programs:
            self._programs[variant] = self._compile(variant)
        chosen = {switch_of(place, variant) for place in on}
        switches = np.array([s in chosen for s in self._list_switches(variant)], bool)
        closed = self._backward.closed
        consts = [
            const[...] if is_ref(var) else const
            for const, var in zip(closed.consts, closed.jaxpr.constvars, strict=True)
        ]
        with jax.debug_nans(False), jax.debug_infs(False):
            outputs, notes = jax.device_get(
                self._programs[variant](
                    consts, np.float32(loss_scale), switches, np.array(limits)
                )
            )
        named = dict(zip(self._backward.names, outputs, strict=True))
        births = []
        numbers = {}
        for place, note in zip(list_noted(self.places, variant), notes, strict=True):
            if place in variant.measured:
                numbers[place] = Numbers(*note.largest, *note.sums)._replace(
                    least_input=-note.largest[2]
                )
            elif note.sums.any():
                births.append(place)
        return Outcome(named, tuple(births), numbers)

    def _list_switches(self, variant: Variant) -> list[Place | Line]:
        return list(dict.fromkeys(switch_of(place, variant) for place in self.places))

    def _compile(self, variant: Variant) -> Callable[..., Any]:
        backward = self._backward

        def compute(consts: Any, loss_scale: Any, switches: Any, limits: Any) -> Any:
            on = {}
            for i, switch in enumerate(self._list_switches(variant)):
                on[switch] = lax.index_in_dim(switches, i, keepdims=False)
            run = Run(self.operations, on, Limits(*limits), variant)
            inputs = [*consts, loss_scale]
            outputs = run.run(backward.closed.jaxpr, inputs, backward.needs, ())
            return outputs, run.list_notes()

        return compile_fast(compute, xla_allow_excess_precision=False)
