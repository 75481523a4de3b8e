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
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.custom_derivatives import SymbolicZero

from .. import _jax
from .._jax import JaxprEqn, Literal, bind, cast, context, source, stand_in
from .readers import equations
from .table import CHAINED_MOVES
from .values import FLOAT32

# A longer chain is cut, so that no equation is computed more often than this.
LONGEST = 32

# Without derivatives that depend on their inputs: they keep nothing for the backward pass.
_LINEAR = {"add", "convert_element_type", "neg", "stop_gradient", "sub"} | CHAINED_MOVES

_order = itertools.count()


class Narrow(NamedTuple):
    """A half-precision array and its cast to float32, from which chains start.

    They compute with the first, which the backward pass keeps. Their gradients go to the second,
    so that those of several chains are added in float32: in a softmax they nearly cancel.
    """

    half: Any
    wide: Any


class Link:
    """An equation that is not computed yet, and the arrays or links that it reads.

    It is a pytree of the arrays that its chain starts from. `index` says which of the outputs of
    the equation it is, and `size` how many equations it and the links before it have.
    """

    __slots__ = ("eqn", "index", "inputs", "order", "size")

    def __init__(self, eqn: JaxprEqn, inputs: Sequence[Any], index: int = 0) -> None:
        self.eqn, self.inputs, self.index = eqn, inputs, index
        self.order = next(_order)
        links = [each for each in inputs if isinstance(each, Link)]
        self.size = len(list(equations(eqn))) + sum(link.size for link in links)


def compute_chain(last: Link, dtype: Any, scopes: Any, in_loop: bool) -> tuple[Any, int]:
    """Returns the value of a chain, cast to `dtype` inside of it, and how many equations it has.

    In the body of a loop XLA cannot take what the forward pass computed for what the backward pass
    computes again, and needs no barrier against it.
    """
    links, arrays = collected(last)
    leaves, tree = jax.tree.flatten(list(arrays.values()))
    is_linear = all(map(_is_linear, links))

    def run(*given: Any) -> list[Any]:
        values = dict(zip(arrays, jax.tree.unflatten(tree, given), strict=True))
        inside = _jax.current_scopes()

        def read(atom: Any, given: Any) -> Any:
            if isinstance(atom, Literal):
                return atom.val
            value = values[_key(given)]
            if isinstance(value, Narrow):
                wide = value.wide if is_linear else stand_in(*value, FLOAT32)
                value = values[_key(given)] = wide
            return value

        for link in links:
            with context(link.eqn), source(link.eqn, inside):
                inputs = [*map(read, link.eqn.invars, link.inputs)]
                values[link] = bind(link.eqn, inputs)[link.index]
                if link is last and dtype != FLOAT32:
                    return [cast(values[link], dtype)]
        return [values[last]]

    with source(last.eqn, scopes, own=False):
        if is_linear:
            return run(*leaves)[0], len(links)
        program = jax.make_jaxpr(run)(*map(jax.typeof, leaves))
        (value,) = _jax.rematerialize(program, leaves, prevent_cse=not in_loop)
    return value, len(links)


def named(last: Link, name: Callable[[Any], Any]) -> Link:
    """Returns a chain whose half-precision arrays, which the backward pass keeps, have a name."""
    arrays, links_and_keys = _flatten(last)
    for i, given in enumerate(arrays):
        if isinstance(given, Narrow):
            arrays[i] = given._replace(half=name(given.half))
    return _unflatten(links_and_keys, arrays)


def collected(last: Link) -> tuple[list[Link], dict[Any, Any]]:
    """Returns the links of a chain in the order of the program, and the arrays they start from."""
    found, arrays, waiting = {last}, {}, [last]
    while waiting:
        for given in waiting.pop().inputs:
            if isinstance(given, Link):
                if given not in found:
                    found.add(given)
                    waiting.append(given)
            elif given is not None:
                arrays[_key(given)] = given
    return sorted(found, key=lambda link: link.order), arrays


def _flatten(last: Link) -> tuple[list[Any], Any]:
    links, arrays = collected(last)
    return list(arrays.values()), (links, list(arrays))


def _unflatten(links_and_keys: Any, arrays: Sequence[Any]) -> Link:
    links, keys = links_and_keys
    found = dict(zip(keys, arrays, strict=True))
    for link in links:
        inputs = [None if each is None else found[_key(each)] for each in link.inputs]
        found[link] = Link(link.eqn, inputs, link.index)
    return found[links[-1]]


jax.tree_util.register_pytree_node(Link, _flatten, _unflatten)


def _key(given: Any) -> Any:
    """Returns what tells a link or an array from others: variables are those of one jaxpr."""
    if isinstance(given, Link):
        return given
    return id(given.half if isinstance(given, Narrow) else given)


def _is_linear(link: Link) -> bool:
    name, atoms = link.eqn.primitive.name, link.eqn.invars
    scaled = name == "mul" and any(isinstance(atom, Literal) for atom in atoms)
    divided = name == "div" and isinstance(atoms[1], Literal)
    return scaled or divided or name in _LINEAR


@jax.custom_jvp
def joined(*operands: Any) -> Any:
    """Returns the operands of a product of activations, whose gradients are read together.

    Both operands of a product with batch dimensions are large, as in attention. Its gradients need
    one operand each. If XLA goes on with what follows from the first gradient, it keeps the operand
    of the second meanwhile: another array of queries times keys.
    """
    return operands


def _joined_jvp(operands: Any, tangents: Any) -> Any:
    # The gradient of an operand that is a constant is not computed for this.
    if not any(isinstance(each, SymbolicZero) for each in tangents):
        tangents = jax.lax.optimization_barrier(tangents)
    return tuple(operands), tuple(tangents)


joined.defjvp(_joined_jvp, symbolic_zeros=True)
