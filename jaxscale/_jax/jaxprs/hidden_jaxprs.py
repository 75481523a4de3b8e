"""A search for a jaxpr in an equation that no other file can read.

JAX keeps jaxprs in parameters of equations, and moves them: into objects, functions that are
closed over, and what may come. A list of the classes that hold none would be long and soon out of
date. So whatever a parameter consists of is searched for jaxprs.
"""

import contextlib
import enum
import functools
import types
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.core import AbstractValue
from jax.extend.core import Jaxpr, JaxprEqn, Primitive

from ..pruned_jaxprs import ClosedJaxpr

_STEPS = 6  # from a parameter to a jaxpr
_MOST = 2000  # objects that are looked at: a callback may close over the data of a run

# What holds no jaxpr, or only that of others.
_PLAIN = (
    *(
        str,
        bytes,
        int,
        float,
        complex,
        bool,
        type(None),
        type,
        enum.Enum,
        types.ModuleType,
    ),
    *(np.ndarray, np.generic, np.dtype, jax.Array, AbstractValue, Primitive),
    *(
        jax.sharding.Sharding,
        jax.sharding.Mesh,
        jax.sharding.AbstractMesh,
        jax.Device,
        jax.tree_util.PyTreeDef,
    ),
)
_CONTAINERS = (tuple, list, set, frozenset)
_MAPPINGS = (dict, types.MappingProxyType)


def reaches_program(eqn: JaxprEqn) -> bool:
    """Returns whether a jaxpr is reached from a parameter of an equation.

    The way goes through attributes, slots, containers and closures, in at most six steps.
    """
    level = [value for value in eqn.params.values() if not isinstance(value, _PLAIN)]
    reached = {id(value) for value in level}
    for _ in range(_STEPS + 1):
        if any(isinstance(value, Jaxpr | ClosedJaxpr) for value in level):
            return True
        following = []
        for value in level:
            for part in _parts(value):
                if not isinstance(part, _PLAIN) and id(part) not in reached:
                    reached.add(id(part))
                    following.append(part)
            if len(reached) > _MOST:
                return False
        level = following
    return False


def _parts(value: object) -> Iterator[Any]:
    """Yields the parts of an object. No code of the object runs for that."""
    if isinstance(value, _MAPPINGS):
        yield from value.keys()
        yield from value.values()
    elif isinstance(value, _CONTAINERS):
        yield from value
    elif isinstance(value, functools.partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, types.FunctionType):
        yield from (value.__defaults__, value.__kwdefaults__)
        for cell in value.__closure__ or ():
            with contextlib.suppress(ValueError):  # it is empty
                yield cell.cell_contents
    elif isinstance(value, types.MethodType):
        yield from (value.__self__, value.__func__)
    yield from getattr(value, "__dict__", {}).values()
    for slot in _slots(type(value)):
        with contextlib.suppress(AttributeError):  # it was never set
            yield slot.__get__(value)


@functools.lru_cache(maxsize=1024)
def _slots(cls: type) -> tuple[types.MemberDescriptorType, ...]:
    """Returns the slots of a class that was written in Python."""
    slots = []
    for base in cls.__mro__:
        if "__slots__" in base.__dict__:
            for member in base.__dict__.values():
                if isinstance(member, types.MemberDescriptorType):
                    slots.append(member)
    return tuple(slots)
