"""A traced program in two parts: the half-precision part, and what follows it in float32.

The *head* is every equation that a half-precision value comes from, and those that take one. The
*tail* is the rest. No half-precision value is reached from it, so that its backward pass needs no
scale; and the cotangents that leave it for the head say which scale the head needs.

Control flow and functions with derivative rules belong to one part as a whole. Calls that mean
nothing but their program, such as `jit` and `jax.checkpoint`, are divided in two, and so is
`shard_map`.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from .. import _jax
from .._autocast.readers import reads_half
from .._jax import ClosedJaxpr, JaxprEqn, Literal, UnknownFormError, bind, context, programs, source


class Part:
    """Some equations of a program, as a function of lists of arrays.

    Attributes:
      inputs: the variables that it reads and does not compute.
      outputs: the variables that it returns. Those of the program may be literals.
    """

    def __init__(
        self,
        name: str,
        eqns: Sequence[JaxprEqn],
        inputs: Iterable[Any],
        outputs: Sequence[Any],
        constants: dict[Any, Any],
    ) -> None:
        self.__name__ = self.__qualname__ = name
        self._eqns, self._constants = eqns, constants
        read = set(_variables(outputs)).union(*(_variables(eqn.invars) for eqn in eqns))
        self.inputs = [var for var in inputs if var in read]
        self.outputs = outputs

    @property
    def is_empty(self) -> bool:
        """Whether it computes nothing."""
        return not self._eqns

    def __call__(self, *args: Any) -> list[Any]:
        env = self._constants | dict(zip(self.inputs, args, strict=True))
        for eqn in self._eqns:
            _evaluate(eqn, env)
        return [_read(env, atom) for atom in self.outputs]

    def without_casts(self, by: Iterable[Any]) -> tuple["Part", dict[Any, Any]]:
        """Returns the part without the casts of some inputs to half precision.

        Args:
          by: the inputs. What each is cast to becomes an input of the part.

        Returns:
          The part, and for each new input the one that it is a cast of.
        """
        wide = {var for var in by if not is_half(var.aval)}
        casts = [
            eqn
            for eqn in self._eqns
            if _is_cast_to_half(eqn) and not wide.isdisjoint(_variables(eqn.invars))
        ]
        sources: dict[Any, Any] = {eqn.outvars[0]: eqn.invars[0] for eqn in casts}
        eqns = [eqn for eqn in self._eqns if eqn.outvars[0] not in sources]
        inputs = [*self.inputs, *sources]
        return Part(self.__name__, eqns, inputs, self.outputs, self._constants), sources

    def derived(self, by: Iterable[Any]) -> set[Any]:
        """Returns the variables that may have a derivative by some of the inputs, and these."""
        found = set(by)
        for eqn in self._eqns:
            if eqn.primitive.name != "stop_gradient" and not found.isdisjoint(
                _variables(eqn.invars)
            ):
                found.update(var for var in eqn.outvars if is_inexact(var.aval))
        return found


class Split(NamedTuple):
    """A program in two parts."""

    inputs: list[Any]  # the variables of its inputs
    head: Part  # returns what the tail reads of it
    tail: Part  # returns what the program does


def split(program: ClosedJaxpr, under_autocast: bool) -> Split:
    """Returns a program in its two parts.

    Matrix products in float32 count as half precision if an `autocast` may yet make them that.

    Args:
      program: the program.
      under_autocast: whether it was traced for one. Even if not, one may come later, so that
        products also count if nothing else in the program is in half precision.
    """
    has_half = any(_holds(eqn, _is_typed_half) for eqn in program.jaxpr.eqns)
    of_half = _is_typed_half if has_half and not under_autocast else _is_half_or_cast
    return _split(program, lambda eqn: _holds(eqn, of_half))


def is_half(aval: Any) -> bool:
    """Returns whether arrays of a type are floating-point numbers of 16 bits or fewer."""
    return is_inexact(aval) and jnp.finfo(aval.dtype).bits < 32


def is_inexact(aval: Any) -> bool:
    """Returns whether arrays of a type are floating-point or complex numbers."""
    dtype = getattr(aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def _split(
    program: ClosedJaxpr,
    holds_half: Callable[[JaxprEqn], bool],
    trace: Callable[[Callable[..., list[Any]]], ClosedJaxpr] | None = None,
) -> Split:
    """Returns a program in two, which `trace` can trace anew where its axes have names."""
    program = _with_divided_calls(program, holds_half, trace)
    jaxpr = program.jaxpr
    needed: set[Any] = set()
    head, tail = [], []
    for eqn in reversed(jaxpr.eqns):
        if holds_half(eqn) or not needed.isdisjoint(eqn.outvars):
            head.append(eqn)
            needed.update(_variables(eqn.invars))
        else:
            tail.append(eqn)
    made = [var for eqn in reversed(head) for var in eqn.outvars]
    constants = dict(zip(jaxpr.constvars, program.consts, strict=True))
    after = Part("tail", tail[::-1], [*made, *jaxpr.invars], jaxpr.outvars, constants)
    crossing = [var for var in after.inputs if var in set(made)]
    before = Part("head", head[::-1], jaxpr.invars, crossing, constants)
    return Split(list(jaxpr.invars), before, after)


def _with_divided_calls(
    program: ClosedJaxpr,
    holds_half: Callable[[JaxprEqn], bool],
    trace: Callable[[Callable[..., list[Any]]], ClosedJaxpr] | None,
) -> ClosedJaxpr:
    """Returns the same program with two calls for each that has a head and a tail."""
    jaxpr = program.jaxpr
    divided: dict[int, Split] = {}
    for index, eqn in enumerate(jaxpr.eqns):
        is_mapped = eqn.primitive.name == "shard_map"
        if (is_mapped or _jax.is_divisible(eqn)) and holds_half(eqn):
            try:
                if is_mapped:
                    inner, retrace = _jax.mapped(eqn).program, functools.partial(_trace_in, eqn)
                    parts = _split(inner, holds_half, retrace)
                else:
                    parts = _split(_jax.callee(eqn), holds_half, trace)
            except UnknownFormError:
                continue
            if not parts.tail.is_empty:
                divided[index] = parts
    if not divided:
        return program

    def run(*args: Any) -> list[Any]:
        env = dict(zip(jaxpr.constvars, program.consts, strict=True))
        env |= zip(jaxpr.invars, args, strict=True)
        for index, eqn in enumerate(jaxpr.eqns):
            if index not in divided:
                _evaluate(eqn, env)
                continue
            parts = divided[index]
            values = [_read(env, atom) for atom in eqn.invars]
            inner = dict(zip(parts.inputs, values, strict=True))
            with context(eqn), source(eqn, _jax.current_scopes()):
                if eqn.primitive.name == "shard_map":
                    env |= zip(eqn.outvars, _call_mapped(eqn, parts, inner), strict=True)
                    continue
                crossing = _call(eqn, parts.head, inner)
                inner |= zip(parts.head.outputs, crossing, strict=True)
                outputs = _call(eqn, parts.tail, inner)
            env |= zip(eqn.outvars, outputs, strict=True)
        return [_read(env, atom) for atom in jaxpr.outvars]

    return trace(run) if trace else jax.make_jaxpr(run)(*program.in_avals)


def _trace_in(eqn: JaxprEqn, run: Callable[..., list[Any]]) -> ClosedJaxpr:
    """Returns a function as the program of a `shard_map`, in which axes have names."""
    avals = [atom.aval for atom in eqn.invars]
    with context(eqn):
        traced = jax.make_jaxpr(_jax.mapped(eqn).map(lambda *args: tuple(run(*args))))(*avals)
    return _jax.mapped(traced.eqns[-1]).program


def _call_mapped(eqn: JaxprEqn, parts: Split, env: dict[Any, Any]) -> list[Any]:
    """Returns the outputs of a `shard_map` in two, for the values of its inputs.

    What goes from one to the other gets an axis in front, along which devices that may differ hold
    a piece each.
    """
    each, crossing = _jax.mapped(eqn), parts.head.outputs
    specs = dict(zip(parts.inputs, each.options["in_specs"], strict=True))
    is_checked, axes = each.options["check_vma"], each.options["axis_names"]
    for var in crossing:
        along = _jax.varying(var.aval) if is_checked else axes
        specs[var] = PartitionSpec(tuple(sorted(along, key=repr)) or None)

    def call(part: Part, of: Callable[..., Any], **out_specs: Any) -> list[Any]:
        in_specs = tuple(specs[var] for var in part.inputs)
        mapped = each.map(of, in_specs=in_specs, **out_specs)
        return list(mapped(*(env[var] for var in part.inputs)))

    def head(*args: Any) -> tuple[Any, ...]:
        return tuple(jnp.expand_dims(output, 0) for output in parts.head(*args))

    def tail(*args: Any) -> tuple[Any, ...]:
        pairs = zip(args, parts.tail.inputs, strict=True)
        return tuple(parts.tail(*(x[0] if var in crossed else x for x, var in pairs)))

    crossed = set(crossing)
    values = call(parts.head, head, out_specs=tuple(specs[var] for var in crossing))
    env = env | dict(zip(crossing, values, strict=True))
    return call(parts.tail, tail)


def _call(eqn: JaxprEqn, part: Part, env: dict[Any, Any]) -> list[Any]:
    return _jax.call_part(eqn, part, [env[var] for var in part.inputs])


def _evaluate(eqn: JaxprEqn, env: dict[Any, Any]) -> None:
    with context(eqn), source(eqn, _jax.current_scopes()):
        values = bind(eqn, [_read(env, atom) for atom in eqn.invars])
    env.update(zip(eqn.outvars, values, strict=True))


def _read(env: dict[Any, Any], atom: Any) -> Any:
    return atom.val if isinstance(atom, Literal) else env[atom]


def _variables(atoms: Iterable[Any]) -> Iterator[Any]:
    return (atom for atom in atoms if not isinstance(atom, Literal))


def _holds(eqn: JaxprEqn, of_half: Callable[[JaxprEqn], bool]) -> bool:
    inner = (each for program in programs(eqn) for each in program.eqns)
    return of_half(eqn) or any(_holds(each, of_half) for each in inner)


def _is_typed_half(eqn: JaxprEqn) -> bool:
    return any(is_half(atom.aval) for atom in (*eqn.invars, *eqn.outvars))


def _is_cast_to_half(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name == "convert_element_type" and is_half(eqn.outvars[0].aval)


def _is_half_or_cast(eqn: JaxprEqn) -> bool:
    return _is_typed_half(eqn) or reads_half(eqn)
