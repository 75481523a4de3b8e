"""The rules for equations that hold no programs, and for those that are computed when needed.

A rule evaluates one equation and returns its outputs. An output that the program declares as
float32 may be narrow. A rule returns no outputs if it leaves the equation to be computed later,
together with what follows it: as a link of a chain (see `recompute.py`).
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.custom_derivatives import SymbolicZero

from .._jax import JaxprEqn, bind, cast, dot_dimensions, operation, programs, with_preferred_type
from . import table
from .frame import Frame
from .readers import equations, has_gradient, is_logits
from .recompute import LONGEST, collected, joined, named
from .values import FLOAT32, Constant, Kind, Parameter, Product, ToRound, elements, is_float32

Rule = Callable[[Frame, JaxprEqn], Sequence[Any]]


def as_written(frame: Frame, eqn: JaxprEqn) -> Sequence[Any]:
    """Evaluates an equation in the dtypes that the program declares."""
    return bind(eqn, [frame.wide(atom) for atom in eqn.invars])


def in_float32(frame: Frame, eqn: JaxprEqn) -> Sequence[Any]:
    """Evaluates an equation in float32, or leaves it to a chain."""
    if _fits_chain(frame, eqn):
        return chained(frame, eqn)
    return as_written(frame, eqn)


def chained(frame: Frame, eqn: JaxprEqn) -> Sequence[Any]:
    """Leaves an equation to the chain of what it reads, or to a new one if that is too long."""
    length = 1
    for atom in eqn.invars:
        link = frame.link(atom)
        if link is not None:
            length += link.size
    if length > LONGEST or frame.repeats < 0:
        _end_chains(frame, eqn)
        if not _reads_narrow(frame, eqn):
            return as_written(frame, eqn)
    for index, var in enumerate(eqn.outvars):
        frame.defer(var, frame.linked(eqn, index))
    return ()


def _end_chains(frame: Frame, eqn: JaxprEqn) -> None:
    """Computes what an equation reads, so that no longer chain comes of it."""
    for atom in eqn.invars:
        if frame.link(atom) is not None:
            frame.values[atom] = frame.wide(atom)
            del frame.links[atom]


def is_chained_call(frame: Frame, eqn: JaxprEqn) -> bool:
    """Returns whether a call is of elementwise operations in float32, and may be in a chain."""
    has_float32 = not table.FLOAT32_ELEMENTWISE.isdisjoint(_primitives(eqn))
    if not has_float32 and not _reads_link(frame, eqn):
        return False
    return _fits_chain(frame, eqn)


def _fits_chain(frame: Frame, eqn: JaxprEqn) -> bool:
    """Returns whether an equation may be part of a chain, as its start or further on."""
    if operation(eqn) not in table.CHAINED or not all(map(is_float32, eqn.outvars)):
        return False
    if any(programs(eqn)) and not table.CHAINED.issuperset(_primitives(eqn)):
        return False
    if eqn.primitive.name == "add":
        return _sum_fits_chain(frame, eqn)
    return _reads_link(frame, eqn) or _reads_narrow(frame, eqn)


def _sum_fits_chain(frame: Frame, eqn: JaxprEqn) -> bool:
    """Returns whether a sum may be part of a chain: it goes on with one, but never starts it."""
    if not _reads_link(frame, eqn) or _is_residual(frame, eqn):
        return False
    for atom in eqn.invars:
        is_constant = isinstance(frame.kind(atom), Constant | Parameter)
        if not (is_constant or frame.is_narrow(atom) or frame.link(atom)):
            return False
    return True


def _is_residual(frame: Frame, eqn: JaxprEqn) -> bool:
    """Returns whether a sum is that of a residual connection, from which the next layer starts.

    One of its inputs is also read elsewhere, and they are computed from different arrays.
    """
    is_shared = False
    for atom in eqn.invars:
        if frame.link(atom) is not None and frame.readers[atom] > 1:
            is_shared = True
    first, second = eqn.invars
    return is_shared and _sources(frame, first) != _sources(frame, second)


def _sources(frame: Frame, atom: Any) -> set[Any]:
    """Returns the identities of the arrays that a value is computed from."""
    link = frame.link(atom)
    if link is None:
        return {frame.identity(atom)}
    _, arrays = collected(link)
    return set(arrays)


def _reads_link(frame: Frame, eqn: JaxprEqn) -> bool:
    """Returns whether an equation reads a value that is not computed yet."""
    return any(map(frame.link, eqn.invars))


def _reads_narrow(frame: Frame, eqn: JaxprEqn) -> bool:
    return any(map(frame.is_narrow, eqn.invars))


def _primitives(eqn: JaxprEqn) -> Iterator[str]:
    """Yields the names of the primitives of an equation and of the programs that it holds."""
    for inner in equations(eqn):
        yield operation(inner)


def product(frame: Frame, eqn: JaxprEqn) -> Sequence[Any]:
    """Evaluates a matrix product or a convolution in half precision, and others as written."""
    if id(eqn) not in frame.half_readers:
        return as_written(frame, eqn)
    operands = [frame.half(atom) for atom in eqn.invars]
    if eqn.primitive.name == "dot_general" and any(batch for _, batch in dot_dimensions(eqn)):
        operands = joined(*operands)
    if is_logits(eqn, frame.place.owner):
        return [_multiply_into_float32(eqn, operands, frame.dtype)]
    frame.kinds[eqn.outvars[0]] = Product()
    # JAX asks for float32 outputs in any float32 program. In half precision nothing is lost, as
    # hardware accumulates in float32 anyway.
    params = with_preferred_type(eqn, FLOAT32, frame.dtype)
    return bind(eqn, operands, params)


def _multiply_into_float32(eqn: JaxprEqn, operands: Sequence[Any], dtype: Any) -> Any:
    """Returns a product of half-precision arrays in float32. Its derivative is in half precision.

    JAX's own derivative would multiply float32 cotangents by half-precision operands, for which
    hardware has no fast product.
    """
    params = with_preferred_type(eqn, FLOAT32, dtype)

    @jax.custom_jvp
    def multiply(*operands: Any) -> Any:
        return bind(eqn, operands)[0]

    def derive(operands: Any, tangents: Any) -> Any:
        terms = []
        for i, tangent in enumerate(tangents):
            if not isinstance(tangent, SymbolicZero):
                varied = [*operands[:i], tangent, *operands[i + 1 :]]
                terms.append(cast(bind(eqn, varied, params)[0], FLOAT32))
        return multiply(*operands), sum(terms[1:], start=terms[0])

    multiply.defjvp(derive, symbolic_zeros=True)
    return multiply(*operands)


def follow(frame: Frame, eqn: JaxprEqn) -> Sequence[Any]:
    """Evaluates an equation in half precision if all its floating-point arrays are in it.

    What it reads may have other readers, whose cotangents its own are to meet in float32. It runs
    in float32 then, unless its own come from products, and are rounded already.
    """
    for atom in eqn.invars:
        is_wide = is_float32(atom) and not frame.is_narrow(atom)
        if is_wide and not isinstance(frame.kind(atom), Constant):
            return in_float32(frame, eqn)
    holds_programs = any(programs(eqn))  # such as a comparator, which is typed in float32
    if holds_programs or not _reads_narrow(frame, eqn):
        return as_written(frame, eqn)
    if not has_gradient(eqn):
        return bind(eqn, [frame.only_half_of(atom) for atom in eqn.invars])
    is_summed = eqn.primitive.name in table.SUMMED_BACKWARD
    if any(map(frame.meets, eqn.invars)) and (is_summed or not _is_only_rounded(frame, eqn)):
        return _follow_in_float32(frame, eqn)
    if not is_summed:
        return bind(eqn, [frame.own_half(atom) for atom in eqn.invars])
    outputs = []
    for value, var in zip(as_written(frame, eqn), eqn.outvars, strict=True):
        if is_float32(var):
            frame.wides[var] = value
            value = cast(value, frame.dtype)
        outputs.append(value)
    return outputs


def _is_only_rounded(frame: Frame, eqn: JaxprEqn) -> bool:
    """Returns whether what an equation returns is only read to be rounded, as by a product."""
    return all(var in frame.only_half for var in eqn.outvars if is_float32(var))


def _follow_in_float32(frame: Frame, eqn: JaxprEqn) -> Sequence[Any]:
    """Evaluates an equation in float32, or leaves it to a chain. What it returns is narrow."""
    if _fits_chain(frame, eqn):
        return chained(frame, eqn)
    pairs = zip(as_written(frame, eqn), eqn.outvars, strict=True)
    return [ToRound(value) if is_float32(var) else value for value, var in pairs]


def elementwise(frame: Frame, eqn: JaxprEqn) -> Sequence[Any]:
    """Evaluates an elementwise equation that follows its inputs."""
    var: Any = eqn.outvars[0]
    narrow: list[Any] = [atom for atom in eqn.invars if frame.is_narrow(atom)]
    broadcasts = any(atom.aval.shape != var.aval.shape for atom in narrow)
    if broadcasts and is_float32(var):
        # The derivative of broadcasting is a sum, which is to be computed in float32.
        return chained(frame, eqn)
    return follow(frame, eqn)


def move(frame: Frame, eqn: JaxprEqn) -> Sequence[Any]:
    """Evaluates an equation that moves the elements of its first input."""
    moved = eqn.invars[0]
    kind = frame.kind(moved)
    for var in eqn.outvars:
        size = elements(var)
        if isinstance(kind, Parameter) and size < kind.size:
            frame.kinds[var] = Parameter(size)
        else:
            frame.kinds[var] = kind
    if eqn.primitive.name == "broadcast_in_dim" and is_float32(moved):
        frame.grown[eqn.outvars[0]] = frame.linked_besides(eqn)
    link = frame.link(moved)
    if operation(eqn) == "name" and link is not None:
        # Name what the backward pass keeps: the arrays that the chain starts from.
        link = named(link, lambda half: bind(eqn, [half])[0])
        frame.defer(eqn.outvars[0], link)
        return ()
    if operation(eqn) == "name" and frame.meets(moved):
        # The named array is what the backward pass keeps, and that is the half-precision one.
        views = frame.both(moved)
        return [views._replace(half=bind(eqn, [views.half])[0])]
    return follow(frame, eqn)


def add(frame: Frame, eqn: JaxprEqn) -> Sequence[Any]:
    """Evaluates a sum. What is added to a product, such as a bias, is added in float32.

    The sum is rounded for what reads it in half precision, and for nothing else.
    """
    first, second = eqn.invars
    var = eqn.outvars[0]
    for atom, added in ((first, second), (second, first)):
        if not isinstance(frame.kind(atom), Product):
            continue
        added_kind = frame.kind(added)
        is_bias = _is_bias(added_kind, var)
        if is_bias or isinstance(added_kind, Product):
            frame.kinds[var] = Product()
        if is_bias and (frame.is_narrow(atom) or frame.link(atom) is not None):
            return chained(frame, eqn)
    return elementwise(frame, eqn)


def _is_bias(kind: Kind, total: Any) -> bool:
    """Returns whether what is added is a parameter, and smaller than the sum if that has rows."""
    if not isinstance(kind, Parameter):
        return False
    return total.aval.ndim <= 1 or kind.size < elements(total)


def multiply(frame: Frame, eqn: JaxprEqn) -> Sequence[Any]:
    """Evaluates a product of elements. That of a value with itself is a power."""
    first, second = eqn.invars
    if first is second:
        return in_float32(frame, eqn)
    return elementwise(frame, eqn)


def subtract(frame: Frame, eqn: JaxprEqn) -> Sequence[Any]:
    """Evaluates a difference. It cancels digits, so it is rounded only if something needs that.

    Before an exponential or a power, as in softmax, a variance or a loss, nothing does.
    """
    if eqn.outvars[0] in frame.only_float32:
        return in_float32(frame, eqn)
    return elementwise(frame, eqn)


def convert(frame: Frame, eqn: JaxprEqn) -> Sequence[Any]:
    """Evaluates a cast that the program itself makes."""
    atom: Any = eqn.invars[0]
    var: Any = eqn.outvars[0]
    dtype = np.dtype(var.aval.dtype)
    if is_float32(atom) and dtype == frame.dtype:
        return [frame.own_half(atom)]
    if frame.is_narrow(atom) and dtype == FLOAT32:
        frame.kinds[var] = frame.kind(atom)
        return [frame.passed(atom)]
    if frame.is_narrow(atom):
        # Cast from half precision: a cast to float32 first would restore no digits.
        return bind(eqn, [frame.own_half(atom)])
    if is_float32(atom) and dtype == FLOAT32:
        return move(frame, eqn)
    if atom.aval.dtype == frame.dtype and dtype == FLOAT32:
        frame.written[var] = frame.wide(atom)  # what casting it back would give, exactly
    return as_written(frame, eqn)


def barrier(frame: Frame, eqn: JaxprEqn) -> Sequence[Any]:
    """Evaluates an `optimization_barrier`, whose outputs are its inputs, each in its precision."""
    inputs = []
    for atom in eqn.invars:
        inputs.append(frame.own_half(atom) if frame.is_narrow(atom) else frame.wide(atom))
    return bind(eqn, inputs)


SIMPLE_RULES: dict[str, Rule] = {
    **dict.fromkeys(table.FLOAT32, in_float32),
    **dict.fromkeys(table.PRODUCTS, product),
    **dict.fromkeys(table.ELEMENTWISE, elementwise),
    **dict.fromkeys(table.MOVES, move),
    **dict.fromkeys(table.CHOICES, follow),
    # Some of the operations above, by rules of their own.
    "add": add,
    "mul": multiply,
    "sub": subtract,
    "convert_element_type": convert,
    "optimization_barrier": barrier,
}
