"""Keys of equations, which are equal for equations that do the same.

Each call of a `jax.custom_jvp` function makes a jaxpr and a rule of its own. The jaxpr is compared
by what it does. The rule is not traced for this: to compare what rules do would never end, as a
rule may call its own function. What JAX wraps around the rule is made anew in each call; what the
user wrote is one object in all of them.
"""

import contextlib
from collections.abc import Sequence
from numbers import Number
from types import FunctionType
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn, Literal

from ..pruned_jaxprs import ClosedJaxpr, Jaxpr, closed
from ..python_frames import is_of_jax
from .equation_forms import Form, UnknownFormError, reads_form
from .hijax import form_of

# What JAX's functions remember of earlier calls, or note for each other.
_MEMORIES = {"cells", "sentinel", "out_store"}


def key_of(
    eqns: Sequence[JaxprEqn],
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    outer: int = 0,
) -> Any:
    """Returns a key that is equal for equations that do the same, in the same lines and scopes.

    `inputs` are the variables that they read, and `outputs` those of theirs that are read. Their
    `outer` scopes may differ.
    """
    numbers = {var: number for number, var in enumerate(inputs)}

    def key_each(atoms: Sequence[Any]) -> tuple[Any, ...]:
        parts = []
        for atom in atoms:
            is_literal = isinstance(atom, Literal)
            parts.append(_literal_key(atom) if is_literal else numbers[atom])
        return tuple(parts)

    keys = []
    for eqn in eqns:
        of_inputs = key_each(eqn.invars)
        for var in eqn.outvars:
            numbers[var] = len(numbers)
        info: Any = eqn.source_info
        place = (info.traceback, info.name_stack[outer:], eqn.ctx)
        keys.append((eqn.primitive, _params_key(eqn), of_inputs, place))
    return tuple(keys), key_each(outputs)


def _literal_key(literal: Literal) -> Any:
    value = np.asarray(literal.val)
    # as 0.0 == -0.0, and NaN equals nothing
    return literal.aval, value.dtype, value.tobytes()


def _params_key(eqn: JaxprEqn) -> Any:
    if form_of(eqn) is Form.CUSTOM_JVP:
        with contextlib.suppress(UnknownFormError):
            return _custom_jvp_key(eqn)
    # in the order in which JAX made them, which is one
    return tuple(eqn.params.items())


@reads_form
def _custom_jvp_key(eqn: JaxprEqn) -> Any:
    return _part_key(tuple(eqn.params.items()))


def _part_key(part: Any) -> Any:
    """Returns a key of what JAX keeps of a call of a `jax.custom_jvp` function.

    Functions of JAX are opened, and those of users equal themselves alone.
    """
    if isinstance(part, tuple | list):
        return type(part), tuple(map(_part_key, part))
    if isinstance(part, Jaxpr | ClosedJaxpr):
        return _program_key(closed(part))
    if isinstance(part, FunctionType) and is_of_jax(part.__code__.co_filename):
        return part.__code__, _part_key(_contents(part))
    if isinstance(part, Number):
        return type(part), repr(part)  # as 1 == True, and 0.0 == -0.0
    of_jax: Any = part
    match type(part).__name__:
        case "WrappedFun":
            return _part_key((of_jax.f, of_jax.transforms, of_jax.params))
        case "Unhashable":  # an argument that is not an array
            return _part_key(of_jax.val)
        case "CustomJVPTraced":  # the arguments that are not arrays are in the tree
            return _part_key((*of_jax.params.items(), of_jax.in_tree))
        case "Traced":
            return _part_key(of_jax.jaxpr)
    return part


def _contents(function: FunctionType) -> list[Any]:
    """Returns what a function holds besides its code."""
    contents: list[Any] = [function.__defaults__, function.__kwdefaults__]
    cells = function.__closure__ or ()
    for name, cell in zip(function.__code__.co_freevars, cells, strict=True):
        if name not in _MEMORIES:
            contents.append(cell.cell_contents)
    return contents


def _program_key(program: ClosedJaxpr) -> Any:
    jaxpr = program.jaxpr
    inputs = [*jaxpr.constvars, *jaxpr.invars]
    types = tuple(var.aval for var in inputs)
    consts = tuple(map(id, program.consts))
    return types, consts, key_of(jaxpr.eqns, inputs, jaxpr.outvars)
