"""Chains of float32 operations between half-precision arrays, which are computed when needed.

A float32 model written for half precision keeps half-precision arrays for the backward pass. A
softmax or a GELU in float32 between two products would keep several float32 arrays instead. So
such elementwise operations are postponed until something else reads their result, and are then
computed together, inside of `jax.checkpoint`: the backward pass keeps the half-precision arrays
that they start from, and computes them again. Their numbers are the same.

The result is computed once in each precision in which it is read. A chain whose value another chain
reads becomes part of that one too, so an equation may be computed in several chains. XLA merges
such duplicates in the forward pass. In the backward pass it does so only in loops: elsewhere each
chain has a barrier of its own.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
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
    walk_equation,
)
from .table import CHAINED_MOVES
from .values import FLOAT32

# A longer chain is cut. Values along a chain may also be read elsewhere, and each is then computed
# with all equations before it: this limits their number.
LONGEST = 32

# Primitives whose derivatives do not depend on their inputs: no input is kept for them.
_LINEAR = {"add", "convert_element_type", "neg", "stop_gradient", "sub"} | CHAINED_MOVES

_order = itertools.count()


class Narrow(NamedTuple):
    """A half-precision array and its cast to float32, from which chains start.

    They compute with the first, which the backward pass keeps. Their gradients go to the second,
    so that those of several chains are added in float32: in a softmax they nearly cancel.
    """

    half: jax.Array
    wide: jax.Array


class Half(NamedTuple):
    """A `Single` in a chain that shares no equation: one cotangent needs no float32 view."""

    half: jax.Array


class Single:
    """A half-precision array that gets its cotangents from one equation.

    If only one chain contains that equation, this is one cotangent. If several do, their cotangents
    are added, and that must happen in float32: `both` makes the cast for it.
    """

    __slots__ = ("_wide", "half")

    def __init__(self, half: jax.Array) -> None:
        self.half = half
        self._wide: jax.Array | None = None

    def both(self) -> Narrow:
        """Returns both views. The cast is made once, however often they are asked for."""
        wide = self._wide
        if wide is None:
            wide = self._wide = cast(self.half, FLOAT32)
        return Narrow(self.half, wide)


class Link:
    """An equation that is not computed yet: a pytree of the arrays that its chain starts from.

    Attributes:
      inputs: for each operand a `Link`, an array, `Narrow` or `Single`; `None` for a literal.
      index: which output of the equation this is.
      is_shared: whether several chains may contain the equation. Each output of one with several
        may end a chain of its own. `Frame` also sets it, for a link with several readers.
      order: the number of the link. Links are made in the order of the program.
      size: how many equations its chain has, those in calls and repeated ones included.
    """

    __slots__ = ("eqn", "index", "inputs", "is_shared", "order", "size")

    def __init__(self, eqn: JaxprEqn, inputs: Sequence[Any], index: int = 0) -> None:
        self.eqn = eqn
        self.inputs = inputs
        self.index = index
        self.is_shared = len(eqn.outvars) > 1
        self.order = next(_order)
        self.size = len(list(walk_equation(eqn)))
        for value in inputs:
            if isinstance(value, Link):
                self.size += value.size


class Recomputed:
    """The chains of one `Frame` as functions, which the backward pass computes again.

    Equal chains share one, as `assemble` returns the same jaxpr for them. Inside a loop body XLA
    cannot merge backward and forward pass, so they need no barrier there.
    """

    def __init__(self, in_loop: bool) -> None:
        self._in_loop = in_loop
        self._functions: dict[Any, Callable[..., list[Any]]] = {}

    def run(self, program: ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
        """Runs a program so that the backward pass computes it again, and returns its outputs."""
        jaxpr = program.jaxpr
        if jaxpr not in self._functions:
            fun = _jax.rematerialized(program, prevent_cse=not self._in_loop)
            self._functions[jaxpr] = fun
        return self._functions[jaxpr](*args)


class Computed(NamedTuple):
    """The value of a chain, and how many equations were computed for it."""

    value: jax.Array
    equations: int


class Chain(NamedTuple):
    """The equations of a value that is not computed yet, and the arrays that they start from.

    Attributes:
      links: the equations, in the order of the program.
      starts: the arrays, by their keys (see `_key_of`). Half-precision ones are `Narrow` or
        `Single`, and after `_open_singles` they are `Narrow` or `Half`.
    """

    links: list[Link]
    starts: dict[Any, Any]


def collect(last: Link) -> Chain:
    """Returns the chain that ends in a link."""
    links = {last}
    starts = {}
    waiting = [last]
    while waiting:
        for value in waiting.pop().inputs:
            if value is None:
                continue  # a literal
            if not isinstance(value, Link):
                starts[_key_of(value)] = value
            elif value not in links:
                links.add(value)
                waiting.append(value)
    return Chain(sorted(links, key=lambda link: link.order), starts)


def _key_of(value: Any) -> Any:
    """Returns a key of a value. It is no variable: a chain may have links of several jaxprs."""
    if isinstance(value, Link):
        return value
    if isinstance(value, Narrow | Single):
        return id(value.half)
    return id(value)  # of an array: `Half` is never looked up


def compute_chain(
    last: Link, dtype: np.dtype, scopes: Any, recomputed: Recomputed
) -> Computed:
    """Computes the chain that ends in `last`, and as a part of it the cast to `dtype`."""
    chain = collect(last)
    with source(last.eqn, scopes, own=False):
        if all(map(_is_linear, chain.links)):
            # not alone, as a linear chain computes with the float32 views
            chain = _open_singles(chain, is_alone=False)
            value = _compute_linear(chain, dtype)
        else:
            is_alone = not any(link.is_shared for link in chain.links)
            chain = _open_singles(chain, is_alone)
            program = _assemble(chain, dtype)
            views: list[jax.Array] = []
            for start in chain.starts.values():
                views += _views_of(start)
            (value,) = recomputed.run(program, views)
    return Computed(value, len(chain.links))


def _open_singles(chain: Chain, is_alone: bool) -> Chain:
    """Returns a chain that starts from one or from both views of each `Single`.

    A chain that shares no equation with another needs only one.
    """
    starts = {}
    for key, start in chain.starts.items():
        if not isinstance(start, Single):
            starts[key] = start
        elif is_alone:
            starts[key] = Half(start.half)
        else:
            starts[key] = start.both()
    return chain._replace(starts=starts)


def _is_linear(link: Link) -> bool:
    """Returns whether the derivative of an equation does not depend on what it reads."""
    name = link.eqn.primitive.name
    atoms = link.eqn.invars
    if name == "mul":
        return any(isinstance(atom, Literal) for atom in atoms)
    if name == "div":
        return isinstance(atoms[1], Literal)
    return name in _LINEAR


def _compute_linear(chain: Chain, dtype: np.dtype) -> jax.Array:
    """Returns the value of a chain that keeps nothing for the backward pass."""
    values: dict[Any, Any] = {}
    for key, start in chain.starts.items():
        if isinstance(start, Narrow):
            start = start.wide
        values[key] = start
    scopes = _jax.current_scopes()
    for link in chain.links:
        inputs = []
        for atom, value in zip(link.eqn.invars, link.inputs, strict=True):
            if isinstance(atom, Literal):
                inputs.append(atom.val)
            else:
                inputs.append(values[_key_of(value)])
        with context(link.eqn), source(link.eqn, scopes):
            values[link] = bind(link.eqn, inputs)[link.index]
    last = chain.links[-1]
    if dtype == FLOAT32:
        return values[last]
    with context(last.eqn), source(last.eqn, scopes):
        return cast(values[last], dtype)


class _Assembler:
    """Puts the program of a chain together from copies of its equations.

    Attributes:
      types: those of the inputs of the program: the views of what the chain starts from.
      copies: the equations of the program.
      numbers: by key (see `_key_of`), the number of each value that equations can read.
      half_numbers: by key, the input numbers of a half-precision start. Equations read its cast to
        float32, which is added when it is first read.
      number_of_values: the number of values so far, inputs included.
    """

    def __init__(self, starts: dict[Any, Any]) -> None:
        self.types: list[Any] = []
        self.copies: list[Copy] = []
        self.numbers: dict[Any, int] = {}
        self.half_numbers: dict[Any, range] = {}
        for key, start in starts.items():
            first = len(self.types)
            self.types += map(jax.typeof, _views_of(start))
            if isinstance(start, Narrow | Half):
                self.half_numbers[key] = range(first, len(self.types))
            else:
                self.numbers[key] = first
        self.number_of_values = len(self.types)

    def add_link(self, link: Link) -> None:
        """Adds the equation of a link."""
        inputs: list[int | None] = []
        for value in link.inputs:
            if value is None:
                inputs.append(None)
            else:
                inputs.append(self._number_of(_key_of(value), link.eqn))
        first = self._add(copy_of(link.eqn, inputs))
        self.numbers[link] = first + link.index

    def add_cast(self, link: Link, dtype: np.dtype) -> int:
        """Adds a cast of the value of a link, and returns its number."""
        aval = link.eqn.outvars[link.index].aval
        return self._add(copy_of_cast(self.numbers[link], aval, dtype, link.eqn))

    def _number_of(self, key: Any, reader: JaxprEqn) -> int:
        """Returns the number of a value. A start is cast in the line of its first `reader`."""
        if key not in self.numbers:
            self.numbers[key] = self._add(self._widen(self.half_numbers[key], reader))
        return self.numbers[key]

    def _widen(self, views: range, reader: JaxprEqn) -> Copy:
        """Returns the cast of a start to float32. The gradient goes to its `wide` view, if any."""
        half = views[0]
        aval = self.types[half]
        if len(views) == 1:
            return copy_of_cast(half, aval, FLOAT32, reader)
        return copy_of_stand_in(half, views[1], aval, FLOAT32, reader)

    def _add(self, copy: Copy) -> int:
        """Adds an equation, and returns the number of its first output."""
        first = self.number_of_values
        self.copies.append(copy)
        self.number_of_values += len(copy.types)
        return first


def _assemble(chain: Chain, dtype: np.dtype) -> ClosedJaxpr:
    """Returns a chain as a program that takes the views of its starts."""
    assembler = _Assembler(chain.starts)
    for link in chain.links:
        assembler.add_link(link)
    last = chain.links[-1]
    output = assembler.numbers[last]
    if dtype != FLOAT32:
        output = assembler.add_cast(last, dtype)
    return assemble(assembler.types, assembler.copies, output)


def _views_of(start: Any) -> tuple[jax.Array, ...]:
    """Returns the arrays that a program takes for one start."""
    if isinstance(start, Narrow | Half):
        return tuple(start)
    return (start,)


def name_starts(last: Link, name: Callable[[jax.Array], jax.Array]) -> Link:
    """Applies `name`, such as `checkpoint_name`, to the half-precision arrays of a chain."""
    chain = collect(last)
    starts = {}
    for key, start in chain.starts.items():
        if isinstance(start, Narrow):
            start = start._replace(half=name(start.half))
        elif isinstance(start, Single):
            start = Single(name(start.half))
        starts[key] = start
    return _link_again(chain.links, starts)


def _link_again(links: Sequence[Link], starts: dict[Any, Any]) -> Link:
    """Returns a chain of the same equations that starts from other arrays."""
    values = dict(starts)
    for link in links:
        inputs: list[Any] = []
        for value in link.inputs:
            if value is not None:
                value = values[_key_of(value)]
            inputs.append(value)
        other = Link(link.eqn, inputs, link.index)
        other.is_shared = link.is_shared
        values[link] = other
    return values[links[-1]]


def _flatten(last: Link) -> tuple[list[Any], tuple[list[Link], list[Any]]]:
    """Opens each `Single`, which is no pytree: after unflattening it is `Narrow`."""
    chain = _open_singles(collect(last), is_alone=False)
    return list(chain.starts.values()), (chain.links, list(chain.starts))


def _unflatten(
    links_and_keys: tuple[list[Link], list[Any]], starts: Sequence[Any]
) -> Link:
    links, keys = links_and_keys
    return _link_again(links, dict(zip(keys, starts, strict=True)))


jax.tree_util.register_pytree_node(Link, _flatten, _unflatten)


@jax.custom_jvp
def join_operands(*operands: Any) -> Any:
    """Returns the operands of a product. XLA computes both of their gradients before it uses one.

    Both operands of a product with batch dimensions are large, as in attention, and each of its
    gradients needs one of them. If XLA first computes what follows from one gradient, it keeps the
    operand of the other meanwhile: another array of queries times keys.
    """
    return operands


def _joined_jvp(operands: Any, tangents: Any) -> Any:
    # Transposed, the barrier joins the two gradients. If an operand is a constant, there is nothing
    # to join, and a barrier would force its gradient to be computed.
    if not any(isinstance(tangent, SymbolicZero) for tangent in tangents):
        tangents = jax.lax.optimization_barrier(tangents)
    return tuple(operands), tuple(tangents)


join_operands.defjvp(_joined_jvp, symbolic_zeros=True)
