"""The rules for equations that hold no programs, and for those that are computed when needed.

A rule evaluates an equation: it returns the outputs. Those that the program declares as float32 may
be narrow. It returns none if they are left to be computed with what follows them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .._jax import JaxprEqn, bind, cast, dot_dimensions, operation, programs, with_preferred_type
from . import table
from .frame import Frame
from .readers import equations, is_cast
from .recompute import LONGEST, collected, joined, named
from .values import FLOAT32, Constant, Parameter, Product, elements, is_float32

Rule = Callable[[Frame, JaxprEqn], Sequence[Any]]


def as_written(frame: Frame, eqn: JaxprEqn) -> Sequence[Any]:
    """Evaluates an equation in the dtypes that the program declares."""
    return bind(eqn, [frame.wide(atom) for atom in eqn.invars])


def in_float32(frame: Frame, eqn: JaxprEqn) -> Sequence[Any]:
    """Evaluates an equation in float32, or leaves it to be computed with what follows it."""
    return chained(frame, eqn) if _is_chained(frame, eqn) else as_written(frame, eqn)


def chained(frame: Frame, eqn: JaxprEqn) -> Sequence[Any]:
    """Leaves an equation to be computed with what follows it, unless there is too much of that."""
    links = filter(None, map(frame.link, eqn.invars))
    if 1 + sum(link.size for link in links) > LONGEST or frame.repeats < 0:
        for atom in filter(frame.link, eqn.invars):
            frame.values[atom] = frame.wide(atom)
            del frame.links[atom]
        if not any(map(frame.is_narrow, eqn.invars)):
            return as_written(frame, eqn)
    for index, var in enumerate(eqn.outvars):
        frame.defer(var, frame.linked(eqn, index))
    return ()


def is_chained_call(frame: Frame, eqn: JaxprEqn) -> bool:
    """Returns whether a call is of elementwise operations in float32, and may be in a chain."""
    inner = (operation(each) for each in equations(eqn))
    has_float32 = not table.FLOAT32_ELEMENTWISE.isdisjoint(inner)
    return (has_float32 or any(map(frame.link, eqn.invars))) and _is_chained(frame, eqn)


def _is_chained(frame: Frame, eqn: JaxprEqn) -> bool:
    inner = (operation(each) for each in equations(eqn))
    if not (all(map(is_float32, eqn.outvars)) and table.CHAINED.issuperset(inner)):
        return False
    is_linked = any(map(frame.link, eqn.invars))
    if eqn.primitive.name != "add":
        return is_linked or any(map(frame.is_narrow, eqn.invars))

    def fits(atom: Any) -> bool:
        is_known = isinstance(frame.kind(atom), Constant | Parameter)
        return is_known or frame.is_narrow(atom) or frame.link(atom) is not None

    return is_linked and not _is_residual(frame, eqn) and all(map(fits, eqn.invars))


def _is_residual(frame: Frame, eqn: JaxprEqn) -> bool:
    """Returns whether a sum is that of a residual connection, from which the next layer starts.

    What it adds to is read by others, too, and comes from other products.
    """
    links = [(atom, frame.link(atom)) for atom in eqn.invars]
    one, other = ({*collected(link)[1]} if link else {id(frame.read(atom))} for atom, link in links)
    return one != other and any(link and frame.readers[atom] > 1 for atom, link in links)


def product(frame: Frame, eqn: JaxprEqn) -> Sequence[Any]:
    """Evaluates a matrix product or a convolution in half precision, and others as written."""
    if not is_cast(eqn):
        return as_written(frame, eqn)
    # JAX writes float32 in a float32 program by itself. Hardware accumulates in float32 anyway.
    params = with_preferred_type(eqn, FLOAT32, frame.dtype)
    frame.kinds[eqn.outvars[0]] = Product()
    operands = [frame.half(atom) for atom in eqn.invars]
    if eqn.primitive.name == "dot_general" and any(batch for _, batch in dot_dimensions(eqn)):
        operands = joined(*operands)
    return bind(eqn, operands, params)


def follow(frame: Frame, eqn: JaxprEqn) -> Sequence[Any]:
    """Evaluates an equation in half precision if all its floating-point arrays are in it."""
    others = [atom for atom in eqn.invars if is_float32(atom) and not frame.is_narrow(atom)]
    if not all(isinstance(frame.kind(atom), Constant) for atom in others):
        return in_float32(frame, eqn)
    if not any(map(frame.is_narrow, eqn.invars)) or any(programs(eqn)):  # typed in float32
        return as_written(frame, eqn)
    if eqn.primitive.name not in table.SUMMED_BACKWARD:
        return bind(eqn, [frame.half(atom) for atom in eqn.invars])
    pairs = zip(as_written(frame, eqn), eqn.outvars, strict=True)
    return [cast(value, frame.dtype) if is_float32(var) else value for value, var in pairs]


def elementwise(frame: Frame, eqn: JaxprEqn) -> Sequence[Any]:
    """Evaluates an elementwise equation that follows its inputs."""
    var: Any = eqn.outvars[0]
    narrow: list[Any] = [*filter(frame.is_narrow, eqn.invars)]
    # Where it broadcasts by itself, the derivative is a sum.
    broadcasts = is_float32(var) and any(atom.aval.shape != var.aval.shape for atom in narrow)
    return (chained if broadcasts else follow)(frame, eqn)


def move(frame: Frame, eqn: JaxprEqn) -> Sequence[Any]:
    """Evaluates an equation that moves the elements of its first input."""
    moved, *_ = eqn.invars
    kind = frame.kind(moved)
    for var in eqn.outvars:
        smaller = isinstance(kind, Parameter) and elements(var) < kind.size
        frame.kinds[var] = Parameter(elements(var)) if smaller else kind
    if eqn.primitive.name == "broadcast_in_dim" and is_float32(moved):
        frame.grown[eqn.outvars[0]] = frame.linked(eqn)
    link = frame.link(moved)
    if operation(eqn) == "name" and link:
        frame.defer(eqn.outvars[0], named(link, lambda half: bind(eqn, [half])[0]))
        return ()
    return follow(frame, eqn)


def add(frame: Frame, eqn: JaxprEqn) -> Sequence[Any]:
    """Evaluates a sum. What is added to a product, such as a bias, is added in float32.

    The sum is rounded for what reads it in half precision, and for nothing else.
    """
    kinds = [frame.kind(atom) for atom in eqn.invars]
    var: Any = eqn.outvars[0]
    for (one, other), atom in zip((kinds, kinds[::-1]), eqn.invars, strict=True):
        smaller = isinstance(other, Parameter) and (
            var.aval.ndim <= 1 or other.size < elements(var)
        )
        if isinstance(one, Product) and (smaller or isinstance(other, Product)):
            frame.kinds[var] = Product()
            if smaller and (frame.is_narrow(atom) or frame.link(atom)):
                return chained(frame, eqn)
    return elementwise(frame, eqn)


def multiply(frame: Frame, eqn: JaxprEqn) -> Sequence[Any]:
    """Evaluates a product of elements. That of a value with itself is a power."""
    one, other = eqn.invars
    return in_float32(frame, eqn) if one is other else elementwise(frame, eqn)


def subtract(frame: Frame, eqn: JaxprEqn) -> Sequence[Any]:
    """Evaluates a difference. It cancels digits, so it is rounded only if something needs that.

    Before an exponential or a power, as in softmax, a variance or a loss, nothing does.
    """
    is_exact = eqn.outvars[0] in frame.only_float32
    return in_float32(frame, eqn) if is_exact else elementwise(frame, eqn)


def convert(frame: Frame, eqn: JaxprEqn) -> Sequence[Any]:
    """Evaluates a cast of the program's own."""
    atom: Any = eqn.invars[0]
    var: Any = eqn.outvars[0]
    dtype = np.dtype(var.aval.dtype)
    if is_float32(atom) and dtype == frame.dtype:
        return [frame.half(atom)]
    if frame.is_narrow(atom):
        if dtype != FLOAT32:  # what half precision holds is what there is
            return bind(eqn, [frame.read(atom)])
        frame.kinds[var] = frame.kind(atom)
        return [frame.read(atom)]
    if is_float32(atom) and dtype == FLOAT32:
        return move(frame, eqn)
    if dtype == FLOAT32 and atom.aval.dtype == frame.dtype:
        frame.halves[var] = frame.read(atom)  # to cast it back would be exact
    return as_written(frame, eqn)


SIMPLE_RULES: dict[str, Rule] = (
    dict.fromkeys(table.FLOAT32, in_float32)
    | dict.fromkeys(table.PRODUCTS, product)
    | dict.fromkeys(table.ELEMENTWISE, elementwise)
    | dict.fromkeys(table.MOVES, move)
    | dict.fromkeys(table.CHOICES, follow)
    | {
        "add": add,
        "mul": multiply,
        "sub": subtract,
        "convert_element_type": convert,
        # Its outputs are its inputs, one by one.
        "optimization_barrier": lambda frame, eqn: bind(eqn, [*map(frame.read, eqn.invars)]),
    }
)
