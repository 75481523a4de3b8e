"""Neighbouring equations that are compiled together, in float32 where that is asked for."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import optimization_barrier

from ..._jax import JaxprEqn, Literal, context_key
from .evaluate import compute

_SHAKE = 2.0**-22  # a few times what float32 rounds by


class Rounded(NamedTuple):
    """A number of the source that a narrow format rounded to 0 or inf."""

    literal: Literal  # what became of it
    exact: float


Number = Literal | Rounded


class LocalStep(NamedTuple):
    """An equation of a program.

    What it reads is a number, or the index of a value: first come the inputs of the program, then
    the outputs of the equations before this one.
    """

    eqn: JaxprEqn
    reads: tuple[int | Number, ...]


class Program:
    """Equations that are compiled together, in each way in which some of them are in float32."""

    def __init__(self, steps: Sequence[LocalStep], kept: frozenset[int]) -> None:
        self._steps = steps
        self._kept = kept  # the indices of the values that are read after the program
        self._compiled: dict[tuple[bool, ...], Callable[..., list[Any]]] = {}

    def evaluate(
        self, inputs: Sequence[Any], wide: tuple[bool, ...], is_shaken: bool
    ) -> list[Any]:
        """Returns the outputs of all equations, given which are computed in float32.

        If all are, those that nothing reads are `None`. If they are shaken, each is multiplied by
        a number near 1: what changes much by that is nothing but the rounding of float32.
        """
        if wide not in self._compiled:

            def compute_outputs(inputs: Sequence[Any], shake: Any) -> list[Any]:
                return self._compute_outputs(wide, inputs, shake)

            self._compiled[wide] = compile_fast(compute_outputs)
        shake = np.float32(0)  # an argument, so that one program does both
        if is_shaken:
            shake = np.float32(_SHAKE)
        return self._compiled[wide](inputs, shake)

    def _compute_outputs(
        self, wide: tuple[bool, ...], inputs: Sequence[Any], shake: Any
    ) -> list[Any]:
        values = list(inputs)
        generator = np.random.default_rng(0)
        signs = generator.choice(np.array([-1, 1], np.float32), len(self._steps))
        is_all_wide = all(wide)
        for step, is_wide, sign in zip(self._steps, wide, signs, strict=True):
            args = [_find_argument(read, values, is_wide) for read in step.reads]
            outputs = compute(step.eqn, args, is_wide)
            # nobody looks at each number, so XLA may fuse the equations
            if is_all_wide:
                values += _multiply_float32(outputs, 1 + sign * shake)
            else:
                values += optimization_barrier(outputs)
        if is_all_wide:
            for index in range(len(inputs), len(values)):
                if index not in self._kept:
                    values[index] = None
        return values[len(inputs) :]


def _find_argument(read: int | Number, values: Sequence[Any], is_wide: bool) -> Any:
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


def program_key(steps: Sequence[LocalStep], kept: frozenset[int]) -> Any:
    """Returns a key that two lists of equations have in common if one program serves both."""
    equations = []
    for step in steps:
        eqn = step.eqn
        params = tuple(sorted(eqn.params.items(), key=lambda item: item[0]))
        reads = tuple(map(_read_key, step.reads))
        avals = tuple(atom.aval for atom in eqn.invars)
        equations.append((eqn.primitive, params, reads, avals, context_key(eqn)))
    key = (tuple(equations), kept)
    try:
        hash(key)
    # a parameter may be a list: then these have a program of their own
    except TypeError:
        return object()
    return key


def _read_key(read: int | Number) -> Any:
    """Returns a key for what an equation reads: an index as it is, and a number by its bits."""
    if isinstance(read, int):
        return read
    if isinstance(read, Rounded):
        return read.exact, _read_key(read.literal)
    value = np.asarray(read.val)
    return str(value.dtype), value.tobytes()


def compile_fast(fun: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Returns a function, which runs a few times at most, compiled fast; `options` are XLA's."""
    # Not optimised, a CPU contracts no products and sums, as in operations that run by themselves.
    if jax.default_backend() == "cpu":
        options["xla_backend_optimization_level"] = 0
    return jax.jit(fun, compiler_options=options)
