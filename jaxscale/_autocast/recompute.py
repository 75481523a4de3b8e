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
        self.eqn = eqn
        self.inputs = inputs
        self.index = index
        self.is_shared = len(eqn.outvars) > 1
        self.order = next(_order)
        self.size = len(list(equations(eqn)))
        for value in inputs:
            if isinstance(value, Link):
                self.size += value.size


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
        for key, array in arrays.items():
            if isinstance(array, Single):
                arrays[key] = Half(array.half) if is_alone else array.both()
        if is_linear:
            return Computed(_compute_linear(links, arrays, dtype), len(links))
        program = _assemble(links, arrays, dtype)
        views = itertools.chain.from_iterable(map(_views, arrays.values()))
        (value,) = recomputed.run(program, list(views))
    return Computed(value, len(links))


def _compute_linear(links: Sequence[Link], arrays: dict[Any, Any], dtype: Any) -> Any:
    """Returns the value of a chain that keeps nothing for the backward pass."""
    values: dict[Any, Any] = {}
    for key, array in arrays.items():
        values[key] = array.wide if isinstance(array, Narrow) else array
    scopes = _jax.current_scopes()
    for link in links:
        inputs = []
        for atom, source_of_atom in zip(link.eqn.invars, link.inputs, strict=True):
            if isinstance(atom, Literal):
                inputs.append(atom.val)
            else:
                inputs.append(values[_key(source_of_atom)])
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
    for key, start in arrays.items():
        views = _views(start)
        numbers[key] = tuple(range(len(inputs), len(inputs) + len(views)))
        inputs += map(jax.typeof, views)
    copies: list[Copy] = []
    widened: set[Any] = set()
    number_of_values = len(inputs)
    for link in links:
        read: list[int | None] = []
        for value in link.inputs:
            if value is None:
                read.append(None)
                continue
            key = _key(value)
            start = arrays.get(key)
            if isinstance(start, Narrow | Half) and key not in widened:
                half, *wide = numbers[key]
                if wide:
                    (source,) = wide
                    copies.append(copy_of_stand_in(half, source, inputs[half], FLOAT32, link.eqn))
                else:
                    copies.append(copy_of_cast(half, inputs[half], FLOAT32, link.eqn))
                widened.add(key)
                numbers[key] = (number_of_values,)
                number_of_values += 1
            read += numbers[key]
        copies.append(copy_of(link.eqn, read))
        numbers[link] = (number_of_values + link.index,)
        number_of_values += len(link.eqn.outvars)
    (output,) = numbers[links[-1]]
    if dtype != FLOAT32:
        last = links[-1].eqn
        copies.append(copy_of_cast(output, last.outvars[links[-1].index].aval, dtype, last))
        output = number_of_values
    return assemble(inputs, copies, output)


def _views(start: Any) -> tuple[Any, ...]:
    """Returns what a chain takes for an array that it starts from."""
    if isinstance(start, Narrow | Half):
        return tuple(start)
    return (start,)


def named(last: Link, name: Callable[[Any], Any]) -> Link:
    """Returns a chain whose half-precision arrays, which the backward pass keeps, have a name."""
    links, starts = collected(last)
    arrays = []
    for array in starts.values():
        if isinstance(array, Narrow):
            array = array._replace(half=name(array.half))
        elif isinstance(array, Single):
            array = Single(name(array.half))
        arrays.append(array)
    return _unflatten((links, list(starts)), arrays)


def collected(last: Link) -> tuple[list[Link], dict[Any, Any]]:
    """Returns the links of a chain in the order of the program, and the arrays they start from."""
    links = {last}
    arrays = {}
    waiting = [last]
    while waiting:
        for value in waiting.pop().inputs:
            if isinstance(value, Link):
                if value not in links:
                    links.add(value)
                    waiting.append(value)
            elif value is not None:
                arrays[_key(value)] = value
    return sorted(links, key=lambda link: link.order), arrays


def _flatten(last: Link) -> tuple[list[Any], Any]:
    links, arrays = collected(last)
    views = []
    for array in arrays.values():
        views.append(array.both() if isinstance(array, Single) else array)
    return views, (links, list(arrays))


def _unflatten(links_and_keys: Any, arrays: Sequence[Any]) -> Link:
    links, keys = links_and_keys
    values = dict(zip(keys, arrays, strict=True))
    for link in links:
        inputs = []
        for value in link.inputs:
            inputs.append(None if value is None else values[_key(value)])
        copy = Link(link.eqn, inputs, link.index)
        copy.is_shared = link.is_shared
        values[link] = copy
    return values[links[-1]]


jax.tree_util.register_pytree_node(Link, _flatten, _unflatten)


def _key(value: Any) -> Any:
    """Returns what tells a link or an array from others: variables are those of one jaxpr."""
    if isinstance(value, Link):
        return value
    if isinstance(value, Narrow | Single):
        return id(value.half)
    return id(value)


def _is_linear(link: Link) -> bool:
    """Returns whether the derivative of an equation does not depend on what it reads."""
    name = link.eqn.primitive.name
    atoms = link.eqn.invars
    if name == "mul":
        return any(isinstance(atom, Literal) for atom in atoms)
    if name == "div":
        return isinstance(atoms[1], Literal)
    return name in _LINEAR


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
