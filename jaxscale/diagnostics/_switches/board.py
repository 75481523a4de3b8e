"""A backward pass as one compiled program with a switch at each line of the model.

Every half-precision value is carried in float32. An equation whose result is half precision is
computed in float32, and its result is rounded where the switch of its place is on. So one program
evaluates any set of lines in half precision, at any loss scale: none of them is the truth, all of
them is the model. At lines to blame each kind of operation has a switch, and each limit of the
format.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax

from .backward import OF_GRADIENT, Backward, compile_fast
from .evaluate import widen
from .interpreter import Run
from .notes import Numbers, is_floating
from .operations import Operations, Place, places_at
from .places import Line
from .switches import ALL_LIMITS, PLAIN, Limits, Variant

_SHAKE = 2.0**-22  # a few times what float32 rounds by
_WHOLE = 2.0**24  # float32 holds all whole numbers up to here


class Outcome(NamedTuple):
    """The results of one evaluation, on the host.

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
        self._consts = list(map(widen, backward.consts))
        self.operations = Operations(backward)
        self.places = self.operations.places
        last: dict[Line, None] = {}
        for place in self._list_rounding():
            last.pop(place.line, None)
            last[place.line] = None
        self.lines = list(last)
        self._programs: dict[Variant, Callable[..., Any]] = {}
        self._noted: list[tuple[Place, Any]] = []

    def _list_rounding(self) -> list[Place]:
        return [place for place in self.places if place in self.operations.dtypes]

    def places_of(self, lines: Collection[Line]) -> list[Place]:
        """Returns the places at some lines at which something is rounded."""
        return places_at(self._list_rounding(), lines)

    def evaluate(
        self,
        loss_scale: float,
        on: Collection[Place],
        limits: Limits = ALL_LIMITS,
        variant: Variant = PLAIN,
        *,
        seed: int | None = None,
    ) -> Outcome:
        """Evaluates with these places in half precision, and all others in float32.

        With a seed, all arguments change by as little as float32 rounds, so that each number
        is rounded in another way.
        """
        if variant not in self._programs:
            self._programs[variant] = self._compile(variant)
        chosen = set(map(variant.switch_of, on))
        switches = np.array([s in chosen for s in self._list_switches(variant)], bool)
        consts = self._consts
        if seed is not None:
            rng = np.random.default_rng(seed)
            consts = [_shake(x, rng) for x in consts]
        self._noted.clear()
        with jax.debug_nans(False), jax.debug_infs(False):
            outputs = self._programs[variant](
                consts, np.float32(loss_scale), switches, np.array(limits)
            )
            outputs = jax.device_get(outputs)
        named = dict(zip(self._backward.names, outputs, strict=False))
        return self._read_notes(Outcome(named, (), {}), variant)

    def _read_notes(self, outcome: Outcome, variant: Variant) -> Outcome:
        """Adds what was noted meanwhile."""
        jax.effects_barrier()
        births = set()
        numbers = dict.fromkeys(variant.limited, Numbers())
        for place, noted in self._noted:
            if place in numbers:
                numbers[place] = numbers[place].add(np.asarray(noted).tolist())
            elif noted:
                births.add(place)
        in_order = tuple(place for place in self.places if place in births)
        return outcome._replace(births=in_order, numbers=numbers)

    def measure(
        self, place: Place, loss_scale: float, on: Collection[Place]
    ) -> Numbers:
        """Returns the numbers at a place, by a program that was compiled before if one has them."""
        variant = Variant(limited=frozenset([place]))
        for compiled in self._programs:
            if place in compiled.limited:
                variant = compiled
        return self.evaluate(loss_scale, on, variant=variant).numbers[place]

    def _list_switches(self, variant: Variant) -> list[Place | Line]:
        return list(dict.fromkeys(map(variant.switch_of, self.places)))

    def _compile(self, variant: Variant) -> Callable[..., Any]:
        def note(place: Place, noted: Any) -> None:
            self._noted.append((place, noted))

        def compute(consts: Any, loss_scale: Any, switches: Any, limits: Any) -> Any:
            on = {}
            for i, switch in enumerate(self._list_switches(variant)):
                on[switch] = lax.index_in_dim(switches, i, keepdims=False)
            run = Run(self.operations, on, Limits(*limits), variant, note)
            return run.run(self._backward.jaxpr, [*consts, loss_scale])

        return compile_fast(compute, xla_allow_excess_precision=False)


def _shake(x: Any, rng: np.random.Generator) -> Any:
    """Returns numbers changed by little, each by itself, but for whole ones, such as positions."""
    if not is_floating(x):
        return x
    # Each by itself: one sign for all would cancel in a quotient, as in a softmax.
    change = rng.choice(np.array([-_SHAKE, _SHAKE], np.float32), np.shape(x))
    # By NumPy: JAX would compile each operation for each shape.
    values = np.asarray(x)
    is_whole = (np.abs(values) < _WHOLE) & (np.floor(values) == values)
    shaken = np.where(is_whole, values, values * (1 + change)).astype(values.dtype)
    if getattr(x, "committed", False):
        return jax.device_put(shaken, x.sharding)
    return shaken
