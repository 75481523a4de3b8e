"""Segments: computed in float32, and again in the backward pass.

A segment is what lies between products (see `segmentation.py`). It computes in float32 from the
half-precision arrays that products returned, inside of `jax.checkpoint`. So the backward pass keeps
these arrays, which are half as large as anything in the segment, and computes the rest again. What
only products read of it is rounded once, at its end. Nothing within it is rounded.
"""

import collections
import functools
import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax

from .._jax import jaxprs
from .._jax.jaxprs import (
    Atom,
    Form,
    JaxprEqn,
    Literal,
    NameStack,
    Recomputed,
    Search,
    at_line,
    bind,
    cast,
    context,
    form_of,
    is_small,
    is_statistic,
    operation,
    size_of,
    source,
    stand_in,
    variables,
)
from . import table
from .environment import Environment, Made
from .half_sums import adds_halves_inside, find_pulled_halves, find_repeated
from .narrow_values import FLOAT32, Narrow, Value, has_dtype, is_float32, is_half
from .segmentation import Part


def run_segment(env: Environment, part: Part) -> list[Any]:
    """Returns the values of a segment that are read outside of it.

    It also rounds those in float32 that products and poolings read, so that its derivative may read
    their signs from these copies, and keep nothing in float32 for them.
    """
    if not part.outputs:
        return []
    starts = _name_starts(part, list(map(env.read_for_call, part.inputs)))
    largest = max((var.aval for var in part.outputs), key=size_of)
    rounded = []
    shared = []
    for var in part.outputs:
        rounded.append(is_float32(var) and env.is_only_rounded(var))
        if is_float32(var) and not rounded[-1] and var in env.plan.kept:
            shared.append(var)
    recipes = {}
    are_kept = True
    arrays: list[Any] = []
    for number, var in enumerate(part.inputs):
        start = starts[number]
        if has_dtype(start, FLOAT32) and not is_small(var.aval, largest):
            made = env.made.get(var)
            if not _is_kept(part, var):
                are_kept = False
            # One with a name is another array, and is to be kept.
            elif made and made.arrays[made.number] is start:
                recipe = made.segment.recipe(made.number)
                if recipe:
                    recipes[len(arrays)] = recipe.program
                    sources = itertools.compress(made.arrays, recipe.used)
                    starts[number] = _Sourced(start, tuple(sources))
        arrays += jax.tree.leaves(starts[number])
    tree = jax.tree.structure(starts)
    scopes = jaxprs.common_scopes(part.eqns)
    outer = len(scopes)
    scopes = env.scopes + scopes

    def compute(scopes: NameStack, *arrays: jax.Array) -> list[Any]:
        with source(part.eqns[0], scopes, outer):
            values = _start(part, jax.tree.unflatten(tree, arrays))
        statistics = _run_equations(part.eqns, values, scopes, outer)
        outputs = []
        with source(part.eqns[-1], scopes, outer):
            for var, is_rounded in zip(part.outputs, rounded, strict=True):
                output = _read(values, var)
                if is_rounded:
                    output = cast(output, env.dtype)
                outputs.append(output)
            for var in shared:
                half = cast(values[var], env.dtype, var.aval.weak_type)
                outputs.append(half)
        return outputs + statistics

    def write(outputs: list[Any]) -> list[Any]:
        env.halves |= zip(shared, outputs[len(part.outputs) :], strict=False)
        return outputs[: len(part.outputs)]

    if not any(map(_keeps_something, part.eqns)):
        # The backward pass keeps nothing of it.
        return write(compute(scopes, *arrays))
    types = tuple(map(jax.typeof, arrays))
    key = (
        jaxprs.key_of(part.eqns, part.inputs, part.outputs, outer),
        tree,
        types,
        tuple(rounded),
        tuple(map(part.outputs.index, shared)),
        tuple(recipes.items()),
    )

    def make() -> Recomputed:
        # Layers that differ in their names alone share a jaxpr: the scopes that are around all of a
        # segment are those of its one equation, not of what is in it.
        alone = functools.partial(compute, jaxprs.no_scopes())
        program = jax.make_jaxpr(alone)(*types)
        return Recomputed(program, env.site.in_loop, recipes)

    with at_line(part.eqns[-1], scopes):
        segment = _share(env, key, make)
        outputs = segment.run(*arrays)
    for number, var in enumerate(part.outputs):
        if are_kept and is_float32(var) and not rounded[number]:
            env.made[var] = Made(segment, number, [*outputs, *arrays])
    return write(outputs)


class _Sourced(NamedTuple):
    """A value, and what a derivative computes it from again."""

    value: jax.Array
    sources: tuple[jax.Array, ...]


def _is_kept(part: Part, start: Any) -> bool:
    """Returns whether the derivative of a segment reads an input, but does not normalize it.

    What is normalized is read so often that it is dearer to compute it each time.
    """
    is_read = False
    depend = {start}
    for eqn in part.eqns:
        inputs = depend.intersection(variables(eqn.invars))
        if not (inputs and eqn.outvars):
            continue
        is_read |= _keeps_something(eqn)
        made = eqn.outvars[0].aval
        is_spread = any(is_small(var.aval, start.aval) for var in inputs)
        if is_spread and not is_small(made, start.aval):
            return False
        depend.update(eqn.outvars)
    return is_read


def _name_starts(part: Part, starts: Sequence[Any]) -> list[Any]:
    """Gives the names in a segment to the arrays that the named values are computed from.

    A policy of `jax.checkpoint` names what the backward pass is to keep. Of a segment, that is what
    it starts from, in half precision where it can.
    """
    named = dict(zip(part.inputs, starts, strict=True))
    for eqn in part.eqns:
        if operation(eqn) not in table.NAMES:
            continue
        sources = _find_sources(part, eqn)
        halves = [var for var in sources if _is_half(var, named[var])]
        for var in halves or filter(is_float32, sources):
            start = named[var]
            if isinstance(start, Narrow):
                named[var] = start._replace(half=bind(eqn, [start.half])[0])
            else:
                named[var] = bind(eqn, [start])[0]
    return list(named.values())


def _find_sources(part: Part, last: JaxprEqn) -> list[Any]:
    """Returns the inputs of a segment that one of its equations depends on."""
    needed = set(variables(last.invars))
    for eqn in reversed(part.eqns):
        if not needed.isdisjoint(eqn.outvars):
            needed.update(variables(eqn.invars))
    return [var for var in part.inputs if var in needed]


def _is_half(var: Atom, start: Value) -> bool:
    """Returns whether a segment starts from a half-precision array of a variable."""
    return isinstance(start, Narrow) or (
        is_float32(var) and not has_dtype(start, FLOAT32)
    )


def _start(part: Part, starts: Sequence[Any]) -> dict[Any, Any]:
    """Returns the values that a segment starts from, in the dtypes that the jaxpr declares.

    Of those that are declared in half precision, both views: each equation is a reader of its own.
    """
    values: dict[Any, Any] = {}
    for var, start in zip(part.inputs, starts, strict=True):
        if isinstance(start, _Sourced):
            start = start.value
        elif isinstance(start, Narrow):
            if is_float32(var):
                start = stand_in(start.half, start.wide, FLOAT32)
        elif _is_half(var, start):
            start = cast(start, FLOAT32, var.aval.weak_type)
        values[var] = start
    return values


def _run_equations(
    eqns: Sequence[JaxprEqn], values: dict[Any, Any], scopes: NameStack, outer: int
) -> list[Any]:
    """Evaluates equations as they are written, and adds their outputs to `values`.

    Returns the results of reductions.
    """
    statistics: list[Any] = []
    reads: collections.Counter[Any] = collections.Counter()
    for eqn in eqns:
        reads.update(find_pulled_halves(eqn))

    def keep(var: Atom, value: Any) -> None:
        if reads[var] > 1:
            value = _view_twice(value)
        values[var] = value

    for var, value in list(values.items()):
        keep(var, value)
    for eqn in eqns:
        inputs = [_read(values, atom) for atom in eqn.invars]
        if operation(eqn) in table.NAMES:  # what it starts from has the name
            outputs = inputs
        elif form_of(eqn) is Form.JIT and (adds_halves_inside(eqn) or _reduces(eqn)):
            # Several equations inside read one half-precision array, or one is a reduction.
            called = jaxprs.callee(eqn)
            inside = dict(zip(called.jaxpr.invars, inputs, strict=True))
            inside |= zip(called.jaxpr.constvars, called.consts, strict=True)
            statistics += _run_equations(called.jaxpr.eqns, inside, scopes, outer)
            outputs = [_read(inside, atom) for atom in called.jaxpr.outvars]
        else:
            with context(eqn), source(eqn, scopes, outer):
                outputs = _bind_adding_in_float32(eqn, values, inputs)
        if is_statistic(eqn):
            statistics += outputs
        for var, output in zip(eqn.outvars, outputs, strict=True):
            keep(var, output)
    return statistics


def _bind_adding_in_float32(
    eqn: JaxprEqn, values: dict[Any, Any], inputs: list[Any]
) -> list[Any]:
    """Evaluates an equation. What comes back to a half that it repeats is added in float32."""
    if operation(eqn) in table.SUMMED_BACKWARD and is_half(eqn.outvars[0]):
        views = []
        for atom in eqn.invars:
            value = atom.val if isinstance(atom, Literal) else values[atom]
            views.append(_view_twice(value))
        (half,) = bind(eqn, [view.half for view in views])
        (wide,) = bind(eqn, [view.wide for view in views])
        return [Narrow(half, wide)]
    for number, is_repeated in enumerate(find_repeated(eqn)):
        if is_repeated:
            output: Any = eqn.outvars[0]
            views = _view_twice(values[eqn.invars[number]])
            inputs[number] = _repeat(views, output.aval.shape)
    return bind(eqn, inputs)


def _view_twice(value: Any) -> Narrow:
    """Returns both views of a half-precision array."""
    if isinstance(value, Narrow):
        return value
    return Narrow(value, cast(value, FLOAT32))


def _repeat(views: Narrow, shape: tuple[int, ...]) -> Any:
    """Returns a half-precision array in a shape, whose gradient goes to the float32 view."""
    axes = range(views.half.ndim)
    half = jax.lax.broadcast_in_dim(views.half, shape, axes)
    wide = jax.lax.broadcast_in_dim(views.wide, shape, axes)
    return stand_in(half, wide, half.dtype)


def _read(values: dict[Any, Any], atom: Atom) -> Any:
    """Returns a value in the dtype that the jaxpr declares."""
    if isinstance(atom, Literal):
        return atom.val
    value = values[atom]
    if isinstance(value, Narrow):
        return stand_in(value.half, value.wide, atom.aval.dtype)
    return value


def _is_nonlinear(eqn: JaxprEqn) -> bool:
    """Returns whether the derivative of an equation depends on what it reads."""
    return operation(eqn) not in table.KEEP_NOTHING


_keeps_something = Search(_is_nonlinear)
_reduces = Search(is_statistic)


def _share(
    env: Environment, key: Hashable, make: Callable[[], Recomputed]
) -> Recomputed:
    """Returns what the backward pass computes again, the same for equal segments."""
    try:
        known = env.segments.get(key)
    except TypeError:  # a parameter that has no hash
        return make()
    if known is None:
        known = env.segments[key] = make()
    return known
