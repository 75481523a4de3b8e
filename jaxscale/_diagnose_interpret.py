"""A jaxpr run equation by equation, in the loops and calls inside of it too."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal

from ._diagnose_jaxpr import Analysis, Needs, callee, union
from ._diagnose_numbers import evaluate


class Value(NamedTuple):
    """A value, whether it depends on the loss scale, and where its inf and NaN are from."""

    array: Any
    scaled: bool = False
    origins: frozenset[Any] = frozenset()


class Visit(NamedTuple):
    """One evaluation of an equation that holds no others.

    Attributes:
      eqn: the equation.
      inputs: the values that went in.
      outputs: the arrays that came out.
      around: the equations that hold it, outermost first.
      iteration: at what index each loop around it was; for a scan that of the slice, also
        where it runs in reverse.
      need: what it is needed for, as bits.
    """

    eqn: JaxprEqn
    inputs: Sequence[Value]
    outputs: Sequence[Any]
    around: tuple[JaxprEqn, ...]
    iteration: tuple[int, ...]
    need: int


# Says where the inf and NaN of each output are from.
Watch = Callable[[Visit], Sequence[frozenset[Any]]]

# Stands for values that nothing needs: their equations are not run.
_UNUSED = Value(None)


class Interpreter:
    """Evaluates jaxprs, and shows each equation to ``watch``.

    What else evaluates an equation, such as :func:`in_float32`, can be passed.
    """

    def __init__(self, watch: Watch, evaluate: Callable[..., Any] = evaluate) -> None:
        self._watch, self._evaluate = watch, evaluate
        self._analysis = Analysis()

    def run(
        self,
        closed: ClosedJaxpr,
        inputs: Sequence[Value],
        needs: Needs,
        around: tuple[JaxprEqn, ...] = (),
        iteration: tuple[int, ...] = (),
    ) -> list[Value]:
        """Returns the outputs of a jaxpr.

        Args:
          closed: a jaxpr and its constants.
          inputs: a value for each of its inputs.
          needs: what each of its outputs is needed for, as bits.
          around: the equations that hold this jaxpr.
          iteration: at what index each loop around it is.
        """
        jaxpr = closed.jaxpr
        values: dict[Any, Value] = {
            var: Value(const) for var, const in zip(jaxpr.constvars, closed.consts, strict=True)
        }
        values.update(zip(jaxpr.invars, inputs, strict=True))

        def read(atom: Any) -> Value:
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

    def _equation(
        self,
        inputs: list[Value],
        eqn: JaxprEqn,
        needs: Needs,
        around: tuple[JaxprEqn, ...],
        iteration: tuple[int, ...],
    ) -> list[Value]:
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
            case "scan" if eqn.params["length"]:
                return self._scan(inputs, eqn, needs, inside, iteration)
        outputs = self._evaluate(eqn, [value.array for value in inputs])
        need = union(eqn, needs)
        origins = self._watch(Visit(eqn, inputs, outputs, around, iteration, need))
        scaled = any(value.scaled for value in inputs)
        return [Value(a, scaled, of) for a, of in zip(outputs, origins, strict=True)]

    def _while(
        self,
        inputs: list[Value],
        eqn: JaxprEqn,
        needs: Needs,
        inside: tuple[JaxprEqn, ...],
        iteration: tuple[int, ...],
    ) -> list[Value]:
        tested, done = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        carry, index = inputs[tested + done :], 0
        need = union(eqn, needs)

        def call(name: str, consts: list[Value], needs: Needs) -> list[Value]:
            at = (*iteration, index)
            return self.run(eqn.params[name], [*consts, *carry], needs, inside, at)

        while call("cond_jaxpr", inputs[:tested], (need,))[0].array:
            carry = call("body_jaxpr", inputs[tested : tested + done], (need,) * len(carry))
            index += 1
        return carry

    def _scan(
        self,
        inputs: list[Value],
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
            slices = [_slice(value, i) for value in scanned]
            outputs = self.run(
                eqn.params["jaxpr"],
                [*inputs[:consts], *carry, *slices],
                needs,
                inside,
                (*iteration, i),
            )
            carry, stacked[i] = outputs[:size], outputs[size:]
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


def _slice(value: Value, index: int) -> Value:
    if value is _UNUSED:
        return value
    # By NumPy where it can: JAX would compile a program for each shape.
    array = value.array if _is_extended(value.array) else np.asarray(value.array)
    return value._replace(array=jnp.asarray(array[index]))


def _stack(values: Sequence[Value]) -> Value:
    if values[0] is _UNUSED:
        return _UNUSED
    arrays = [value.array for value in values]
    return Value(
        jnp.stack(arrays) if _is_extended(arrays[0]) else jnp.asarray(np.stack(arrays)),
        any(value.scaled for value in values),
        frozenset().union(*(value.origins for value in values)),
    )
