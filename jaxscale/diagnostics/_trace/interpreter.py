"""A jaxpr run equation by equation, including those in its loops and calls.

The interpreter evaluates each equation that something needs (see `jaxpr`) on its actual
inputs, and shows it to a `watch` function. Calls, `cond`, `while` and `scan` are opened, so that
`watch` only sees equations that hold no others. With each value it carries whether the value
depends on the loss scale, and where its inf and NaN come from.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal

from .jaxpr import Analysis, Needs, callee, is_ref, results, union
from .numbers import evaluate


class Value(NamedTuple):
    """A value, whether it depends on the loss scale, and where its inf and NaN come from."""

    array: Any
    scaled: bool = False
    origins: frozenset[Any] = frozenset()


class Cell:
    """What a ref holds at the moment. All equations that take the ref share one cell."""

    def __init__(self, value: Value) -> None:
        self.value = value


class Visit(NamedTuple):
    """One evaluation of an equation that holds no others.

    Attributes:
      eqn: the equation.
      inputs: its input values. For a ref, the value that it held.
      outputs: its output arrays, followed by what its refs hold now.
      around: the equations that hold it, outermost first.
      iteration: the index of each loop around it. For a scan it is the index of the slice,
        also if the scan runs in reverse.
      need: what it is needed for, as bits.
    """

    eqn: JaxprEqn
    inputs: Sequence[Value]
    outputs: Sequence[Any]
    around: tuple[JaxprEqn, ...]
    iteration: tuple[int, ...]
    need: int


# Returns where the inf and NaN of each output come from.
Watch = Callable[[Visit], Sequence[frozenset[Any]]]

# Stands for a value that nothing needs. The equations that compute it are not run.
_UNUSED = Value(None)


class Interpreter:
    """Evaluates jaxprs, and shows each equation to `watch`.

    Pass another `evaluate`, such as `in_float32`, to compute the equations differently.
    """

    def __init__(self, watch: Watch, evaluate: Callable[..., Any] = evaluate) -> None:
        self._watch, self._evaluate = watch, evaluate
        self._analysis = Analysis()
        self._cells: dict[int, Cell] = {}  # of refs from outside: these are not changed

    def run(
        self,
        closed: ClosedJaxpr,
        inputs: Sequence[Value | Cell],
        needs: Needs,
        around: tuple[JaxprEqn, ...] = (),
        iteration: tuple[int, ...] = (),
    ) -> list[Value]:
        """Returns the outputs of a jaxpr.

        Args:
          closed: a jaxpr and its constants.
          inputs: a value for each of its inputs, or the cell of a ref.
          needs: what each of its results is needed for, as bits.
          around: the equations that hold this jaxpr.
          iteration: the index of each loop around it.
        """
        jaxpr = closed.jaxpr
        values: dict[Any, Any] = {
            var: self._cell(const) if is_ref(var) else Value(const)
            for var, const in zip(jaxpr.constvars, closed.consts, strict=True)
        }
        values.update(zip(jaxpr.invars, inputs, strict=True))

        def read(atom: Any) -> Any:
            return Value(atom.val) if isinstance(atom, Literal) else values.get(atom, _UNUSED)

        all_needs = self._analysis.outputs(jaxpr, needs)
        last_uses = _last_uses(closed)
        for index, (eqn, eqn_needs) in enumerate(zip(jaxpr.eqns, all_needs, strict=True)):
            if union(eqn, eqn_needs):
                frame = (eqn, eqn_needs, around, iteration)
                with eqn.ctx.manager:
                    outputs = self._equation([read(atom) for atom in eqn.invars], *frame)
                values.update(zip(eqn.outvars, outputs, strict=True))
            for var in last_uses.get(index, ()):
                values.pop(var, None)
        return [read(atom) for atom in jaxpr.outvars]

    def _cell(self, ref: Any) -> Cell:
        return self._cells.setdefault(id(ref), Cell(Value(ref[...])))

    def _equation(
        self,
        inputs: list[Any],
        eqn: JaxprEqn,
        needs: Needs,
        around: tuple[JaxprEqn, ...],
        iteration: tuple[int, ...],
    ) -> Sequence[Value | Cell]:
        called, inside = callee(eqn), (*around, eqn)
        if called is not None:
            return self.run(called, inputs, needs, inside, iteration)
        match eqn.primitive.name:
            case "cond":
                index, *inputs = inputs
                branches = eqn.params["branches"]
                branch = branches[min(max(int(index.array), 0), len(branches) - 1)]
                return self.run(branch, inputs, needs, inside, iteration)
            case "while":
                return self._while(inputs, eqn, needs, inside, iteration)
            case "scan":
                return self._scan(inputs, eqn, needs, inside, iteration)
        given = [each.value if isinstance(each, Cell) else each for each in inputs]
        arrays = self._evaluate(eqn, [value.array for value in given])
        need = union(eqn, needs)
        origins = self._watch(Visit(eqn, given, arrays, around, iteration, need))
        scaled = any(value.scaled for value in given)
        values = [Value(a, scaled, of) for a, of in zip(arrays, origins, strict=True)]
        outputs, held = values[: len(eqn.outvars)], values[len(eqn.outvars) :]
        for cell, value in zip((c for c in inputs if isinstance(c, Cell)), held, strict=True):
            cell.value = value
        return [
            Cell(value) if is_ref(var) else value
            for var, value in zip(eqn.outvars, outputs, strict=True)
        ]

    def _while(
        self,
        inputs: list[Any],
        eqn: JaxprEqn,
        needs: Needs,
        inside: tuple[JaxprEqn, ...],
        iteration: tuple[int, ...],
    ) -> list[Value]:
        tested, done = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        carry, index = inputs[tested + done :], 0
        need = union(eqn, needs)

        def call(name: str, consts: list[Any]) -> list[Value]:
            closed, at = eqn.params[name], (*iteration, index)
            needs = (need,) * len(results(closed.jaxpr))
            return self.run(closed, [*consts, *carry], needs, inside, at)

        while call("cond_jaxpr", inputs[:tested])[0].array:
            carry = call("body_jaxpr", inputs[tested : tested + done])
            index += 1
        return carry

    def _scan(
        self,
        inputs: list[Any],
        eqn: JaxprEqn,
        needs: Needs,
        inside: tuple[JaxprEqn, ...],
        iteration: tuple[int, ...],
    ) -> list[Value]:
        length, consts = eqn.params["length"], eqn.params["num_consts"]
        size = eqn.params["num_carry"]
        needs = self._analysis.scanned(eqn, needs)
        carry, scanned = inputs[consts : consts + size], inputs[consts + size :]
        stacked: list[Any] = [None] * length
        for i in reversed(range(length)) if eqn.params["reverse"] else range(length):
            slices = [_slice(each, i) for each in scanned]
            outputs = self.run(
                eqn.params["jaxpr"],
                [*inputs[:consts], *carry, *slices],
                needs,
                inside,
                (*iteration, i),
            )
            carry, stacked[i] = outputs[:size], outputs[size:]
            for each, part in zip(scanned, slices, strict=True):
                if isinstance(each, Cell):
                    each.value = _with_slice(each.value, i, part.value)
        if not length:
            return [*carry, *(_empty(var.aval) for var in eqn.outvars[size:])]
        return [*carry, *map(_stack, zip(*stacked, strict=True))]


def _last_uses(closed: ClosedJaxpr) -> dict[int, list[Any]]:
    """Returns the variables that can be forgotten after each equation, by its index."""
    last: dict[Any, int] = {}
    for index, eqn in enumerate(closed.jaxpr.eqns):
        last |= {atom: index for atom in eqn.invars if not isinstance(atom, Literal)}
    kept = {atom for atom in closed.jaxpr.outvars if not isinstance(atom, Literal)}
    forgotten: dict[int, list[Any]] = {}
    for var, index in last.items():
        if var not in kept:
            forgotten.setdefault(index, []).append(var)
    return forgotten


def _is_extended(array: Any) -> bool:
    return jnp.issubdtype(array.dtype, jax.dtypes.extended)


def _slice(value: Any, index: int) -> Any:
    if isinstance(value, Cell):
        return Cell(_slice(value.value, index))
    if value is _UNUSED:
        return value
    # NumPy slices what it can: JAX would compile a program for each shape.
    array = value.array if _is_extended(value.array) else np.asarray(value.array)
    return value._replace(array=jnp.asarray(array[index]))


def _with_slice(value: Value, index: int, part: Value) -> Value:
    return Value(
        jnp.asarray(value.array).at[index].set(part.array),
        value.scaled or part.scaled,
        value.origins | part.origins,
    )


def _empty(aval: Any) -> Value:
    return Value(jax.lax.full(aval.shape, 0, aval.dtype))


def _stack(values: Sequence[Value]) -> Value:
    if values[0] is _UNUSED:
        return _UNUSED
    arrays = [value.array for value in values]
    return Value(
        jnp.stack(arrays) if _is_extended(arrays[0]) else jnp.asarray(np.stack(arrays)),
        any(value.scaled for value in values),
        frozenset().union(*(value.origins for value in values)),
    )
