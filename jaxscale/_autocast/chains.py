"""Chains of float32 operations between half-precision arrays, which are computed when needed.

A float32 model written for half precision keeps half-precision arrays for the backward pass. A
softmax or a GELU in float32 between two products would keep several float32 arrays instead. So
such elementwise operations are left to be computed when something else reads their result, and
are then computed together, inside of `jax.checkpoint`: the backward pass keeps the half-precision
arrays that they start from, and computes them again. Their numbers are the same.

The result is computed once in each precision in which it is read. What another chain reads of it
is part of that chain, so one equation may be in several. XLA finds these again in one pass.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from .._jax import (
    JaxprEqn,
    Literal,
    bind,
    cast,
    context,
    current_scopes,
    rematerialize,
    source,
)
from .atoms import FLOAT32

# A longer chain is cut, so that no equation is computed more often than this.
LONGEST = 32

# Without derivatives that depend on their inputs: they keep nothing for the backward pass.
_LINEAR = {"add", "broadcast_in_dim", "expand_dims", "neg", "reshape", "squeeze", "sub"}


_order = itertools.count()


class Narrow(NamedTuple):
    """A half-precision array and its cast to float32, from which chains start.

    They compute with the first, which the backward pass keeps. Their gradients go to the second,
    so that those of several chains are added in float32: in a softmax they nearly cancel.
    """

    half: Any
    wide: Any


@jax.custom_jvp
def _widened(half: Any, wide: Any) -> Any:
    del wide
    return cast(half, FLOAT32)


@_widened.defjvp
def _widened_jvp(primals: Any, tangents: Any) -> Any:
    # Not `_widened` again: with that, the backward pass would keep `wide` for its own derivative.
    return cast(primals[0], FLOAT32), tangents[1]


class Link:
    """An equation that is not computed yet, and the arrays or links that it reads."""

    __slots__ = ("eqn", "inputs", "order", "size")

    def __init__(self, eqn: JaxprEqn, inputs: Sequence[Any]) -> None:
        self.eqn, self.inputs, self.order = eqn, inputs, next(_order)
        self.size = 1 + sum(each.size for each in inputs if isinstance(each, Link))


def compute(last: Link, dtype: Any, scopes: Any, in_loop: bool) -> tuple[Any, int]:
    """Returns the value of a chain, and how many equations it has.

    Args:
      last: its last link.
      dtype: float32 or half precision, to which the value is then cast inside of the chain.
      scopes: the named scopes around the program.
      in_loop: whether it is computed in the body of a loop. There XLA cannot take what the forward
        pass computed for what the backward pass computes again, and needs no barrier against it.
    """
    links, arrays = _collected(last)
    leaves, tree = jax.tree.flatten(list(arrays.values()))

    def run(*given: Any) -> list[Any]:
        values = dict(zip(arrays, jax.tree.unflatten(tree, given), strict=True))
        inside = current_scopes()

        def read(atom: Any) -> Any:
            if isinstance(atom, Literal):
                return atom.val
            if isinstance(values[atom], Narrow):
                values[atom] = _widened(*values[atom])
            return values[atom]

        for link in links:
            with context(link.eqn), source(link.eqn, inside):
                (values[link.eqn.outvars[0]],) = bind(link.eqn, [*map(read, link.eqn.invars)])
                if link is last and dtype != FLOAT32:
                    return [cast(values[link.eqn.outvars[0]], dtype)]
        return [values[last.eqn.outvars[0]]]

    with source(last.eqn, scopes, own=False):
        if all(map(_is_linear, links)):
            return run(*leaves)[0], len(links)
        program = jax.make_jaxpr(run)(*map(jax.typeof, leaves))
        (value,) = rematerialize(program, leaves, prevent_cse=not in_loop)
    return value, len(links)


def _collected(last: Link) -> tuple[list[Link], dict[Any, Any]]:
    """Returns the links of a chain in the order of the program, and the arrays they start from."""
    found: dict[Any, Link] = {last.eqn.outvars[0]: last}
    arrays: dict[Any, Any] = {}
    waiting = [last]
    while waiting:
        link = waiting.pop()
        for atom, given in zip(link.eqn.invars, link.inputs, strict=True):
            if isinstance(given, Link):
                if atom not in found:
                    found[atom] = given
                    waiting.append(given)
            elif not isinstance(atom, Literal):
                arrays[atom] = given
    return sorted(found.values(), key=lambda link: link.order), arrays


def _is_linear(link: Link) -> bool:
    name, atoms = link.eqn.primitive.name, link.eqn.invars
    scaled = name == "mul" and any(isinstance(atom, Literal) for atom in atoms)
    divided = name == "div" and isinstance(atoms[1], Literal)
    return scaled or divided or name in _LINEAR
