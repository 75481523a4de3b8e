"""Neighbouring equations that are compiled together, in float32 where that is asked for."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import optimization_barrier

from ..._jax import JaxprEqn, Literal, context_key
from .evaluate import compute
from .needs import Around, Needs

_SHAKE = 2.0**-22  # a few times what float32 rounds by


class Rounded(NamedTuple):
    """A number of the source that a narrow format rounded to 0 or inf, and what reads it."""

    literal: Literal  # what became of it
    exact: float
    eqn: JaxprEqn
    around: Around


Number = Literal | Rounded


# The slot that a value is kept in, a number, or `None` for a value that nothing needs.
Source = int | Number | None


class Step(NamedTuple):
    """An equation that is not a call."""

    eqn: JaxprEqn
    around: Around
    needs: Needs  # what each of its results is needed for
    reads: tuple[Source, ...]  # its inputs
    writes: tuple[int, ...]  # the slots of its outputs

    @property
    def read_slots(self) -> list[int]:
        """The slots among its inputs."""
        return slots_of(self.reads)


def slots_of(sources: Sequence[Source]) -> list[int]:
    return [source for source in sources if isinstance(source, int)]


class Program:
    """Steps that are compiled together, in each way in which some of them are in float32.

    `inputs` are the slots that it is given, and `kept` those that are read after it.
    """

    def __init__(
        self, steps: Sequence[Step], inputs: Sequence[int], kept: frozenset[int]
    ) -> None:
        self._steps = steps
        self._inputs = inputs
        self._kept = kept
        self._compiled: dict[tuple[bool, ...], Callable[..., list[list[Any]]]] = {}

    def evaluate(
        self, inputs: Sequence[Any], wide: tuple[bool, ...], is_shaken: bool
    ) -> list[list[Any]]:
        """Returns the outputs of each step, given which of them are computed in float32.

        If all are, those that nothing reads are `None`. If they are shaken, each is multiplied by
        a number near 1: what changes much by that is nothing but the rounding of float32.
        """
        if wide not in self._compiled:
            compute_outputs = functools.partial(self._compute_outputs, wide)
            self._compiled[wide] = compile_fast(compute_outputs)
        shake = np.float32(0)  # an argument, so that one program does both
        if is_shaken:
            shake = np.float32(_SHAKE)
        return self._compiled[wide](inputs, shake)

    def _compute_outputs(
        self, wide: tuple[bool, ...], inputs: Sequence[Any], shake: Any
    ) -> list[list[Any]]:
        values = dict(zip(self._inputs, inputs, strict=True))
        generator = np.random.default_rng(0)
        signs = generator.choice(np.array([-1, 1], np.float32), len(self._steps))
        is_all_wide = all(wide)
        for step, is_wide, sign in zip(self._steps, wide, signs, strict=True):
            args = [_find_argument(read, values, is_wide) for read in step.reads]
            outputs = compute(step.eqn, args, is_wide)
            # nobody looks at each number, so XLA may fuse the equations
            if is_all_wide:
                outputs = _multiply_float32(outputs, 1 + sign * shake)
            else:
                outputs = optimization_barrier(outputs)
            values.update(zip(step.writes, outputs, strict=True))
        if is_all_wide:
            values.update(dict.fromkeys(values.keys() - self._kept))
        return [[values[slot] for slot in step.writes] for step in self._steps]


def _find_argument(read: Any, values: Mapping[int, Any], is_wide: bool) -> Any:
    if isinstance(read, int):
        return values[read]
    # Behind a barrier, or NumPy would compute with the number while this is traced.
    return optimization_barrier(jnp.asarray(as_array(read, is_wide)))


def _multiply_float32(outputs: Sequence[Any], factor: Any) -> list[Any]:
    """Multiplies those of some outputs that are in float32 by a factor."""
    products = []
    for output in outputs:
        if output.dtype == np.float32:
            output = output * factor
        products.append(output)
    return products


def as_array(number: Number, is_wide: bool) -> Any:
    """Returns a number as an array, the exact one if it is used in float32."""
    if isinstance(number, Literal):
        aval: Any = number.aval
        return np.asarray(number.val, aval.dtype)
    if is_wide:
        return np.float32(number.exact)
    return as_array(number.literal, False)


def zeros_of(atom: Any) -> jax.Array:
    """Returns zeros in the place of a variable that is not computed."""
    return jax.lax.full(atom.aval.shape, 0, atom.aval.dtype)


def program_key(
    steps: Sequence[Step], inputs: Sequence[int], kept: frozenset[int]
) -> Any:
    """Returns a key that two lists of steps have in common if one program serves both."""
    # Slots differ. Their positions are the same: first what goes in, then what is written.
    positions = {slot: position for position, slot in enumerate(inputs)}
    equations = []
    for step in steps:
        eqn = step.eqn
        params = tuple(sorted(eqn.params.items(), key=lambda item: item[0]))
        reads = tuple(_read_key(read, positions) for read in step.reads)
        avals = tuple(atom.aval for atom in eqn.invars)
        equations.append((eqn.primitive, params, reads, avals, context_key(eqn)))
        for slot in step.writes:
            positions[slot] = len(positions)
    key = (tuple(equations), frozenset(map(positions.get, kept)))
    try:
        hash(key)
    # a parameter may be a list: then these have a program of their own
    except TypeError:
        return object()
    return key


def _read_key(read: Any, positions: Mapping[int, int]) -> Any:
    """Returns a key for what a step reads: the position of a slot, and a number by its bits."""
    if isinstance(read, int):
        return positions[read]
    if isinstance(read, Rounded):
        return read.exact, _read_key(read.literal, positions)
    value = np.asarray(read.val)
    return str(value.dtype), value.tobytes()


def compile_fast(fun: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Returns a function, which runs a few times at most, compiled fast; `options` are XLA's."""
    # Not optimised, a CPU contracts no products and sums, as in operations that run by themselves.
    if jax.default_backend() == "cpu":
        options["xla_backend_optimization_level"] = 0
    return jax.jit(fun, compiler_options=options)
