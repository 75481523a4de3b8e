"""A primitive of our own: a jaxpr whose derivatives keep its inputs, and compute the rest again.

It is what `jax.checkpoint` is, but for the barrier that keeps XLA from taking what the forward pass
computed. XLA for CPUs needs one, and one for XLA on accelerators only costs: it decides by itself
what to compute again, and moves more bytes if it may not. `jax.checkpoint` has one or has none, on
all platforms. What is transposed is also one equation here, whatever form JAX gives
`jax.checkpoint`.

A derivative forward and its transpose are jaxprs of this kind, too, and so on.
"""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import JaxprEqn, jaxpr_as_fun
from jax.interpreters import ad

from ..dtypes import holds_half, holds_inexact
from ..jaxpr_types import (
    AbstractValue,
    Arrays,
    BatchAxis,
    BatchDims,
    Flags,
    Tangents,
)
from ..pruned_jaxprs import (
    ClosedJaxpr,
    Pruned,
    find_dependent_outputs,
    spread,
    without_unused,
)
from . import hijax
from .barriers import barrier
from .batching import over_batch, set_batching
from .derivatives import tangent_type
from .equation_forms import RECOMPUTED
from .known_outputs import (
    evaluate,
    find_known,
    is_small,
    read_outputs,
    size_of,
    tell_signs,
)
from .program_primitives import program_primitive
from .stand_ins import is_stand_in, value_of_stand_in

_MOST_READ = 4.5  # numbers that a recipe reads, for each one that it computes


class _Derivative(NamedTuple):
    """The origin of a derivative: another jaxpr, differentiated by some of its inputs.

    Its inputs are those outputs and inputs of the other that are `used`, and then tangents of
    those inputs that are `varied`. It returns the tangents of those outputs of the other that are
    `returned`. All other derivatives are zeros, and whoever reads them may ask.

    The tangents of some inputs that are `perturbed` may not be read. A rule inside may have asked
    for them, so the backward pass must be of the same inputs.
    """

    function: "Recomputed"
    perturbed: Flags
    varied: Flags
    used: Flags
    returned: Flags


class Recomputed:
    """A jaxpr that the backward pass computes again, and what is derived from it, each once.

    Attributes:
      program: the jaxpr.
      in_loop: whether it is part of the body of a loop, where XLA cannot merge forward and backward
        pass.
      recipes: by their numbers, inputs that derivatives compute from those behind them, which
        nothing else reads, so that they are not kept.
      blocked: of a backward pass, the inputs round which GPUs have a barrier, too.
      derivative: of what it is the derivative, if it is one.
    """

    def __init__(
        self,
        program: ClosedJaxpr,
        in_loop: bool,
        recipes: Mapping[int, ClosedJaxpr] = {},
        blocked: Flags | None = None,
        derivative: _Derivative | None = None,
    ) -> None:
        self.program = program
        self.in_loop = in_loop
        self.recipes = recipes
        self.blocked = blocked
        self.derivative = derivative
        self.differentiate = functools.cache(self._differentiate)
        self.transpose = functools.cache(self._transpose)
        self.telling = functools.cache(self._telling)
        self.recipe = functools.cache(self._recipe)

    def run(self, *args: jax.Array) -> list[Any]:
        """Computes the outputs."""
        if hijax.in_forward_rule.get():
            return _run_by_inputs(self.program, self.in_loop, args)
        return _bind(self, *args)

    def _telling(self, telling: Flags) -> "Recomputed":
        """Returns this function with outputs from which its derivative can read signs."""
        program = tell_signs(self.program, telling)
        if program is self.program:
            return self
        return Recomputed(program, self.in_loop, self.recipes)

    def _make_again(self, inputs: Sequence[Any]) -> list[Any]:
        """Returns the inputs, of which some are computed from those behind them."""
        made = list(inputs)
        for number, recipe in self.recipes.items():
            end = number + 1 + len(recipe.in_avals)
            (made[number],) = jaxpr_as_fun(recipe)(*inputs[number + 1 : end])
        return made

    def _recipe(self, number: int) -> Pruned | None:
        """Returns a jaxpr of an output, from statistics and what a derivative starts from.

        Which of the outputs and inputs these are is `used`. It is None if that would read too much.
        """
        types = self.program.out_avals
        # What has the gradient of a stand-in is not read for its value.
        stand_ins = filter(is_stand_in, self.program.jaxpr.eqns)
        values = dict.fromkeys(map(id, stand_ins), value_of_stand_in)

        def make(*inputs: jax.Array) -> list[Any]:
            outputs = evaluate(self.program, self._make_again(inputs), values)
            return [*outputs, outputs[number]]

        program = jax.make_jaxpr(make)(*self.program.in_avals)
        known = find_known(program, len(types)).values()
        # A rounded copy tells signs only where something is differentiated.
        given = tuple(n in known and not holds_half(t) for n, t in enumerate(types))
        program, used = without_unused(read_outputs(program, given))
        if sum(map(size_of, program.in_avals)) > _MOST_READ * size_of(types[number]):
            return None
        return Pruned(program, (*_where(given, used), *used[sum(given) :]))

    def _differentiate(self, perturbed: Flags) -> "Recomputed":
        """Returns the derivative by some of the inputs, of all outputs that depend on them."""
        types = self.program.in_avals
        returned = tuple(map(holds_inexact, self.program.out_avals))

        def derive(*args: jax.Array) -> Any:
            inputs, tangents = args[: len(types)], args[len(types) :]
            inputs = self._make_again(inputs)
            fun = self._of_some(inputs, perturbed, returned)
            varied = tuple(itertools.compress(inputs, perturbed))
            _, derivatives, outputs = jax.jvp(fun, varied, tangents, has_aux=True)
            return outputs, derivatives

        tangents = list(map(tangent_type, itertools.compress(types, perturbed)))
        program = jax.make_jaxpr(derive)(*types, *tangents)
        count = len(self.program.out_avals)
        known = set(find_known(program, count).values())
        given = tuple(number in known for number in range(count))
        program = read_outputs(program, given)
        is_tangent = [False] * (sum(given) + len(types)) + [True] * len(tangents)
        depends = find_dependent_outputs(program, is_tangent)
        returned = _where(returned, depends)
        program, used = without_unused(program, returned=depends)
        varied = _where(perturbed, used[sum(given) + len(types) :])
        used = (*_where(given, used), *used[sum(given) :][: len(types)])
        derivative = _Derivative(self, perturbed, varied, used, returned)
        return Recomputed(program, self.in_loop, derivative=derivative)

    def _transpose(
        self, perturbed: Flags, wanted: Flags, used: Flags, returned: Flags
    ) -> "Recomputed":
        """Returns the backward pass: from cotangents of some outputs to those of some inputs.

        It takes the outputs and inputs that the derivative depends on, and then the cotangents.

        Args:
          perturbed: by which inputs the jaxpr is differentiated.
          wanted: which of them get a cotangent.
          used: on which outputs and inputs the derivative depends.
          returned: which outputs have a cotangent.
        """
        types = self.program.in_avals
        count = len(self.program.out_avals)
        given, used = used[:count], used[count:]

        def pull(*args: jax.Array) -> Any:
            remaining = iter(args)
            inputs = []
            for aval, is_used in zip(types, used, strict=True):
                inputs.append(next(remaining) if is_used else _zeros(aval))
            inputs = self._make_again(inputs)
            fun = self._of_some(inputs, perturbed, returned)
            varied = itertools.compress(inputs, perturbed)
            _, vjp, outputs = jax.vjp(fun, *varied, has_aux=True)
            pulled = vjp(tuple(remaining))
            return outputs, list(
                itertools.compress(pulled, itertools.compress(wanted, perturbed))
            )

        cotangents = itertools.compress(self.program.out_avals, returned)
        kept = itertools.compress(types, used)
        program = jax.make_jaxpr(pull)(*kept, *map(tangent_type, cotangents))
        program = read_outputs(program, given)
        program, _ = without_unused(program, kept=True)
        blocked = [False] * len(program.in_avals)
        starts = program.in_avals[sum(given) :][: sum(used)]
        if self.recipes or _are_half(starts):
            blocked[sum(given) : sum(given) + len(starts)] = map(holds_half, starts)
        return Recomputed(program, self.in_loop, blocked=tuple(blocked))

    def _of_some(
        self, inputs: Sequence[Any], varied: Flags, returned: Flags
    ) -> Callable[..., tuple[Any, Any]]:
        """Returns a function of some inputs. It returns some outputs, and besides all of them."""

        def fun(*given: jax.Array) -> tuple[Any, Any]:
            args = spread(varied, given, inputs)
            outputs = evaluate(self.program, args)
            return tuple(itertools.compress(outputs, returned)), outputs

        return fun


def _run_by_inputs(
    program: ClosedJaxpr, in_loop: bool, args: Sequence[Any]
) -> list[Any]:
    """Runs a jaxpr as one equation for each set of inputs it reads.

    A forward rule computes values and tangents, and JAX takes all outputs of an equation for
    tangents if it reads one.
    """
    numbers: dict[Flags, list[int]] = {}
    count = len(program.out_avals)
    for number in range(count):
        alone = [number == other for other in range(count)]
        used = without_unused(program, returned=alone).used
        numbers.setdefault(used, []).append(number)
    values: dict[int, Any] = {}
    for used, outputs in numbers.items():
        returned = [number in outputs for number in range(count)]
        part = without_unused(program, returned=returned).program
        results = _bind(Recomputed(part, in_loop), *itertools.compress(args, used))
        values |= zip(outputs, results, strict=True)
    return [values[number] for number in range(count)]


def recomputed_like(eqn: JaxprEqn, program: ClosedJaxpr) -> Callable[..., list[Any]]:
    """Returns a function that runs another jaxpr as such an equation does."""
    return Recomputed(program, eqn.params["function"].in_loop).run


def _bind(function: Recomputed, *args: jax.Array) -> list[Any]:
    return _RECOMPUTED.bind(*args, call_jaxpr=function.program, function=function)


def _expand(
    *args: jax.Array, function: Recomputed, call_jaxpr: ClosedJaxpr
) -> list[Any]:
    """Returns the outputs by operations of JAX.

    Not by one call of a function: XLA for TPUs moved three times the bytes where it had to see
    through calls that forward and backward pass compute the same.
    """
    if function.blocked is not None and not function.in_loop:
        args = tuple(barrier(*args, on_gpu=function.blocked))
    return list(jaxpr_as_fun(call_jaxpr)(*args))


def _jvp(
    inputs: Arrays,
    tangents: Tangents,
    *,
    function: Recomputed,
    call_jaxpr: ClosedJaxpr,
) -> tuple[list[Any], list[Any]]:
    perturbed = tuple(type(tangent) is not ad.Zero for tangent in tangents)
    derived = function.differentiate(perturbed)
    made_of: Any = derived.derivative  # a derivative has one
    _, _, varied, used, returned = made_of
    outputs = _bind(function.telling(used[: len(call_jaxpr.out_avals)]), *inputs)
    given = [
        *itertools.compress([*outputs, *inputs], used),
        *itertools.compress(tangents, varied),
    ]
    made = _bind(derived, *given)
    zeros = map(ad.Zero, map(tangent_type, call_jaxpr.out_avals))
    return outputs, spread(returned, made, zeros)


def _transpose(
    cotangents: Tangents,
    *args: Any,
    function: Recomputed,
    call_jaxpr: ClosedJaxpr,
) -> list[Any]:
    linear = tuple(map(ad.is_undefined_primal, args))
    returned = tuple(type(cotangent) is not ad.Zero for cotangent in cotangents)
    given: list[Any] = list(itertools.compress(cotangents, returned))
    if function.derivative is None:
        # It is linear in these inputs, so its derivative is the same for any of their values.
        inputs = []
        for arg, is_linear in zip(args, linear, strict=True):
            inputs.append(_zeros(arg.aval) if is_linear else arg)
        all_inputs = (*[False] * len(cotangents), *[True] * len(args))
        backward = function.transpose(linear, linear, all_inputs, returned)
    else:
        function, perturbed, varied, used, has_tangent = function.derivative
        inputs = args[: sum(used)]
        of_outputs = _where(has_tangent, returned)
        of_inputs = _where(varied, linear[sum(used) :])
        backward = function.transpose(perturbed, of_inputs, used, of_outputs)
    pulled = _bind(backward, *inputs, *given)
    return spread(linear, pulled, itertools.repeat(None))


def _are_half(starts: Sequence[Any]) -> bool:
    """Returns whether all floats that a backward pass starts from are half precision, or small."""
    largest = max(starts, key=size_of, default=None)
    floats = filter(holds_inexact, starts)
    return all(holds_half(aval) or is_small(aval, largest) for aval in floats)


def _where(flags: Flags, of_those: Flags) -> Flags:
    """Returns flags, of which those that are set are given one by one."""
    return tuple(spread(flags, of_those, itertools.repeat(False)))


def _zeros(aval: AbstractValue) -> Any:
    return ad.instantiate_zeros(ad.Zero(aval))


def _batch(
    axis: BatchAxis,
    args: Arrays,
    dims: BatchDims,
    *,
    function: Recomputed,
    call_jaxpr: ClosedJaxpr,
) -> Any:
    run = over_batch(jaxpr_as_fun(call_jaxpr), axis, tuple(dims))
    batched = jax.make_jaxpr(run)(*map(jax.typeof, args))
    in_batch = Recomputed(batched, function.in_loop, blocked=function.blocked)
    return _bind(in_batch, *args), [0] * len(batched.out_avals)


_RECOMPUTED = program_primitive(RECOMPUTED, _expand)
ad.primitive_jvps[_RECOMPUTED] = _jvp
ad.primitive_transposes[_RECOMPUTED] = _transpose
set_batching(_RECOMPUTED, _batch)
