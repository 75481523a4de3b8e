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
from .._jax import (
    ClosedJaxpr,
    Copy,
    JaxprEqn,
    Literal,
    assemble,
    bind,
    cast,
    context,
    copy_of,
    copy_of_cast,
    copy_of_stand_in,
    source,
)
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


class Half(NamedTuple):
    """A half-precision array from which one chain starts, and nothing else."""

    half: Any


class Single:
    """A half-precision array that one equation reads: its cotangents meet no others there.

    They may where several chains have that equation. The cast to float32 is made for these.
    """

    __slots__ = ("_wide", "half")

    def __init__(self, half: Any) -> None:
        self.half = half
        self._wide: Any = None

    def both(self) -> Narrow:
        """Returns both views, of which there are two at most however often they are asked for."""
        if self._wide is None:
            self._wide = cast(self.half, FLOAT32)
        return Narrow(self.half, self._wide)


class Link:
    """An equation that is not computed yet, and the arrays or links that it reads.

    It is a pytree of the arrays that its chain starts from. `index` says which of the outputs of
    the equation it is, `size` how many equations it and the links before it have, and `is_shared`
    whether its equation may be in several chains.
    """

    __slots__ = ("eqn", "index", "inputs", "is_shared", "order", "size")

    def __init__(self, eqn: JaxprEqn, inputs: Sequence[Any], index: int = 0) -> None:
        self.eqn, self.inputs, self.index = eqn, inputs, index
        self.is_shared = len(eqn.outvars) > 1
        self.order = next(_order)
        links = [each for each in inputs if isinstance(each, Link)]
        self.size = len(list(equations(eqn))) + sum(link.size for link in links)


class Recomputed:
    """The programs that one run computes again in the backward pass: equal chains share one.

    In the body of a loop XLA cannot take what the forward pass computed for what the backward pass
    computes again, and needs no barrier against it.
    """

    def __init__(self, in_loop: bool) -> None:
        self._in_loop = in_loop
        self._functions: dict[Any, Callable[..., list[Any]]] = {}

    def run(self, program: ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
        """Returns the outputs of a program."""
        jaxpr = program.jaxpr
        if jaxpr not in self._functions:
            fun = _jax.rematerialized(program, prevent_cse=not self._in_loop)
            self._functions[jaxpr] = fun
        return self._functions[jaxpr](*args)


class Computed(NamedTuple):
    """The value of a chain."""

    value: Any
    equations: int  # how many were computed


def compute_chain(last: Link, dtype: Any, scopes: Any, recomputed: Recomputed) -> Computed:
    """Computes a chain, and casts its value to `dtype` inside of it."""
    links, arrays = collected(last)
    with source(last.eqn, scopes, own=False):
        is_linear = all(map(_is_linear, links))
        is_alone = not is_linear and not any(link.is_shared for link in links)
        for key, given in arrays.items():
            if isinstance(given, Single):
                arrays[key] = Half(given.half) if is_alone else given.both()
        if is_linear:
            return Computed(_compute_linear(links, arrays, dtype), len(links))
        program = _assemble(links, arrays, dtype)
        views = itertools.chain.from_iterable(map(_views, arrays.values()))
        (value,) = recomputed.run(program, list(views))
    return Computed(value, len(links))


def _compute_linear(links: Sequence[Link], arrays: dict[Any, Any], dtype: Any) -> Any:
    """Returns the value of a chain that keeps nothing for the backward pass."""
    values = {key: x.wide if isinstance(x, Narrow) else x for key, x in arrays.items()}
    scopes = _jax.current_scopes()
    for link in links:
        pairs = zip(link.eqn.invars, link.inputs, strict=True)
        inputs = [
            atom.val if isinstance(atom, Literal) else values[_key(given)] for atom, given in pairs
        ]
        with context(link.eqn), source(link.eqn, scopes):
            values[link] = bind(link.eqn, inputs)[link.index]
    last = links[-1]
    if dtype == FLOAT32:
        return values[last]
    with context(last.eqn), source(last.eqn, scopes):
        return cast(values[last], dtype)


def _assemble(links: Sequence[Link], arrays: dict[Any, Any], dtype: Any) -> ClosedJaxpr:
    """Returns the program of a chain, of the arrays that it starts from."""
    inputs: list[Any] = []
    numbers: dict[Any, Any] = {}  # of values; of an array in two views, of both
    for key, given in arrays.items():
        views = _views(given)
        numbers[key] = tuple(range(len(inputs), len(inputs) + len(views)))
        inputs += map(jax.typeof, views)
    copies: list[Copy] = []
    widened: set[Any] = set()
    made = len(inputs)
    for link in links:
        read: list[int | None] = []
        for given in link.inputs:
            if given is None:
                read.append(None)
                continue
            key = _key(given)
            start = arrays.get(key)
            if isinstance(start, Narrow | Half) and key not in widened:
                half, *wide = numbers[key]
                if wide:
                    (source,) = wide
                    copies.append(copy_of_stand_in(half, source, inputs[half], FLOAT32, link.eqn))
                else:
                    copies.append(copy_of_cast(half, inputs[half], FLOAT32, link.eqn))
                widened.add(key)
                numbers[key] = (made,)
                made += 1
            read += numbers[key]
        copies.append(copy_of(link.eqn, read))
        numbers[link] = (made + link.index,)
        made += len(link.eqn.outvars)
    (output,) = numbers[links[-1]]
    if dtype != FLOAT32:
        last = links[-1].eqn
        copies.append(copy_of_cast(output, last.outvars[links[-1].index].aval, dtype, last))
        output = made
    return assemble(inputs, copies, output)


def _views(given: Any) -> tuple[Any, ...]:
    """Returns what a chain takes for an array that it starts from."""
    return tuple(given) if isinstance(given, Narrow | Half) else (given,)


def named(last: Link, name: Callable[[Any], Any]) -> Link:
    """Returns a chain whose half-precision arrays, which the backward pass keeps, have a name."""
    links, starts = collected(last)
    arrays, links_and_keys = list(starts.values()), (links, list(starts))
    for i, given in enumerate(arrays):
        if isinstance(given, Narrow):
            arrays[i] = given._replace(half=name(given.half))
        elif isinstance(given, Single):
            arrays[i] = Single(name(given.half))
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
    views = [each.both() if isinstance(each, Single) else each for each in arrays.values()]
    return views, (links, list(arrays))


def _unflatten(links_and_keys: Any, arrays: Sequence[Any]) -> Link:
    links, keys = links_and_keys
    found = dict(zip(keys, arrays, strict=True))
    for link in links:
        inputs = [None if each is None else found[_key(each)] for each in link.inputs]
        found[link] = Link(link.eqn, inputs, link.index)
        found[link].is_shared = link.is_shared
    return found[links[-1]]


jax.tree_util.register_pytree_node(Link, _flatten, _unflatten)


def _key(given: Any) -> Any:
    """Returns what tells a link or an array from others: variables are those of one jaxpr."""
    if isinstance(given, Link):
        return given
    return id(given.half if isinstance(given, Narrow | Single) else given)


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
