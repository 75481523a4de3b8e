"""Programs that are put together from equations of others, without tracing.

Tracing a few equations as a function takes JAX many times as long as copying them. Equal programs
are one object, so that JAX differentiates them once.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import jax
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from .binding import cast
from .inner_programs import ClosedJaxpr, closed
from .stand_ins import stand_in


class Copy(NamedTuple):
    """An equation that is to be copied.

    Values have numbers: first the inputs of the program, then the outputs of the copies in order.
    """

    eqn: JaxprEqn
    # the numbers of what it reads, `None` for its literals
    inputs: tuple[int | None, ...]
    types: tuple[Any, ...]  # of its outputs
    like: JaxprEqn  # has the line and the scopes of the copy


def copy_of(eqn: JaxprEqn, inputs: Sequence[int | None]) -> Copy:
    """Returns the copy of an equation of a traced program."""
    types = tuple(var.aval for var in eqn.outvars)
    return Copy(eqn, tuple(inputs), types, like=eqn)


def copy_of_cast(value: int, aval: Any, dtype: Any, like: JaxprEqn) -> Copy:
    """Returns the cast of a value of a type, in the line and the scopes of another equation."""
    eqn = _cast_to(np.dtype(dtype))
    return Copy(eqn, inputs=(value,), types=(_typed(aval, dtype),), like=like)


def copy_of_stand_in(
    value: int, source: int, aval: Any, dtype: Any, like: JaxprEqn
) -> Copy:
    """Returns a `stand_in` for a value of a type, in the line and scopes of another equation."""
    eqn = _stand_in_as(np.dtype(dtype))
    return Copy(eqn, inputs=(value, source), types=(_typed(aval, dtype),), like=like)


@functools.lru_cache(maxsize=4096)
def _typed(aval: Any, dtype: Any) -> Any:
    return aval.update(dtype=np.dtype(dtype), weak_type=False)


@functools.cache
def _cast_to(dtype: Any) -> JaxprEqn:
    program = jax.make_jaxpr(lambda x: cast(x, dtype))(np.int32(0))
    return program.eqns[0]


@functools.cache
def _stand_in_as(dtype: Any) -> JaxprEqn:
    program = jax.make_jaxpr(lambda x: stand_in(x, x, dtype))(np.float32(0))
    return program.eqns[0]


# By what they are copied from. An entry lives as long as an equation holds the program.
_assembled: WeakValueDictionary[Any, Jaxpr] = WeakValueDictionary()


def assemble(inputs: Sequence[Any], copies: Sequence[Copy], output: int) -> ClosedJaxpr:
    """Returns a program of inputs of some types, which returns one of its values.

    It is the program that was returned before if that still exists and is equal in everything, the
    lines and scopes of its equations included.
    """
    key = (tuple(inputs), tuple(map(_key, copies)), output)
    try:
        known = _assembled.get(key)
    except TypeError:  # a parameter that has no hash
        return closed(_copy_all(inputs, copies, output))
    if known is None:
        known = _copy_all(inputs, copies, output)
        _assembled[key] = known
    return closed(known)


def _key(copy: Copy) -> Any:
    """Returns what is equal for copies that are the same."""
    eqn = copy.eqn
    literals = []
    for atom in eqn.invars:
        if isinstance(atom, Literal):
            literals.append(_literal_key(atom))
    info: Any = copy.like.source_info
    place = (info.traceback, info.name_stack, copy.like.ctx)
    # in the order in which JAX made them, which is one
    params = tuple(eqn.params.items())
    return (eqn.primitive, params, copy.inputs, copy.types, tuple(literals), place)


def _literal_key(literal: Any) -> Any:
    value = np.asarray(literal.val)
    # as 0.0 == -0.0, and NaN equals nothing
    return literal.aval, value.dtype, value.tobytes()


def _copy_all(inputs: Sequence[Any], copies: Sequence[Copy], output: int) -> Jaxpr:
    """Returns a new program of copies, which returns the value with the number `output`."""
    values = [Var(aval) for aval in inputs]
    invars = list(values)
    eqns = []
    for copy in copies:
        eqn = _copy_equation(copy, values)
        eqns.append(eqn)
        values += eqn.outvars
    jaxpr = Jaxpr(
        constvars=(),
        invars=invars,
        outvars=[values[output]],
        eqns=eqns,
        debug_info=_names(),
    )
    if any(map(_is_high, eqns)):
        return jaxpr.replace(is_high=True)
    return jaxpr


def _copy_equation(copy: Copy, values: Sequence[Var]) -> JaxprEqn:
    """Returns a copy that reads some of the values before it, and has outputs of its own."""
    inputs: list[Any] = []
    for number, atom in zip(copy.inputs, copy.eqn.invars, strict=True):
        if number is None:
            inputs.append(atom)  # a literal
        else:
            inputs.append(values[number])
    return copy.eqn.replace(
        invars=inputs,
        outvars=[Var(aval) for aval in copy.types],
        source_info=copy.like.source_info,
        ctx=copy.like.ctx,
    )


def _is_high(eqn: JaxprEqn) -> bool:
    """Returns whether an equation holds operations that are objects: JAX asks its program."""
    # before, there are no such operations, and `is_high` takes other arguments
    if jax.__version_info__ < (0, 8):
        return False
    primitive: Any = eqn.primitive
    types = [atom.aval for atom in eqn.invars]
    return bool(primitive.is_high(*types, **eqn.params))


@functools.cache
def _names() -> Any:
    """Returns debug information in which inputs and outputs have no names, however many."""
    empty = jax.make_jaxpr(lambda: ())()
    info: Any = empty.jaxpr.debug_info
    if hasattr(info, "with_unknown_names"):
        return info.with_unknown_names()
    return info
