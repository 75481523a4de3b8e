"""A traced program, run again with its matrix products in half precision.

`Autocast.run` goes through a jaxpr once, in one flat loop, and binds each equation in whatever
trace is current, so that `grad`, `vmap` and `jit` outside see ordinary operations. A value that the
program declares as float32 may be *narrow*: computed in half precision. A `Frame` holds the values
of one jaxpr, each in the precision it was computed in, and casts each once, on demand.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from contextvars import copy_context
from typing import Any
from weakref import WeakKeyDictionary

import jax
import numpy as np

from .. import _jax
from .._jax import (
    ClosedJaxpr,
    JaxprEqn,
    UnknownFormError,
    context,
    context_key,
    operation,
    source,
)
from .._trees.flat import Flat
from .callers import Place
from .custom_rules import custom_jvp, custom_vjp, own_rules
from .frame import Frame
from .higher_order import call, cond, inlined, mapped, remat, scan, while_loop
from .readers import last_uses, under_autocast
from .recompute import Link
from .rules import SIMPLE_RULES, Rule, as_written
from .unsaid import forget_warnings, warn_if_unchanged, warn_of_what_is_left
from .values import Kind, as_declared, is_full_precision, parameter

# Which rule rewrites an equation, by the name of its primitive.
RULES: dict[str, Rule] = SIMPLE_RULES | {
    **dict.fromkeys(("jit", "pjit"), call),
    **dict.fromkeys(("closed_call", "call", "eval_jaxpr"), inlined),
    **dict.fromkeys(("shard_map", "xla_pmap"), mapped),
    "remat2": remat,
    "scan": scan,
    "while": while_loop,
    "cond": cond,
    "custom_jvp_call": custom_jvp,
    "custom_vjp_call": custom_vjp,
    _jax.OBJECT: own_rules,
}


_WAY_OUT = (
    "Mark the function around that line with `jaxscale.full_precision`, or leave it outside of the "
    "function that `autocast` wraps."
)


class Autocast:
    """Runs traced programs with their products in one half-precision dtype.

    It remembers the bodies of loops and calls that it has rewritten, for as long as the program
    lives that they are from: a function that is called many times is rewritten once.
    """

    rules = RULES

    def __init__(self, dtype: Any, half_carries: bool) -> None:
        self.dtype, self.half_carries = np.dtype(dtype), half_carries
        # For each jaxpr, by its signature: what it was rewritten to.
        self.rewritten: WeakKeyDictionary[Any, dict[Any, Any]] = WeakKeyDictionary()

    def run(
        self,
        closed: ClosedJaxpr,
        args: Sequence[Any],
        kinds: Sequence[Kind],
        place: Place,
        wanted: Sequence[bool] = (),
    ) -> tuple[list[Any], list[Kind]]:
        """Returns the outputs of a program, some of them narrow, and their kinds.

        Some of the arguments may be narrow, or links. `wanted` is as in `rounded_reads`.
        """
        warn_of_what_is_left(closed, RULES)
        jaxpr = closed.jaxpr
        frame = Frame(self, jaxpr, place, wanted)
        invars = [*jaxpr.constvars, *jaxpr.invars]
        frame.kinds.update(zip(invars, [*map(parameter, jaxpr.constvars), *kinds], strict=True))
        for var, arg in zip(invars, [*closed.consts, *args], strict=True):
            (frame.defer if isinstance(arg, Link) else frame.write)(var, arg)
        pairs = zip(jaxpr.eqns, last_uses(jaxpr), strict=True)
        # To enter a context takes as long as to find a rule, and most programs have one.
        for _, group in itertools.groupby(pairs, key=lambda pair: context_key(pair[0])):
            self._run_in_one_context(frame, list(group))
        outvars = jaxpr.outvars
        return [frame.returned(atom) for atom in outvars], [frame.kind(atom) for atom in outvars]

    def run_from_outside(
        self, closed: ClosedJaxpr, args: Sequence[Any], kinds: Sequence[Kind], place: Place
    ) -> tuple[list[Any], list[Kind]]:
        """Returns what `run` does, for what is not part of another program that runs.

        What cannot be transformed is an error that names the user's line.
        """
        with _jax.naming_the_line("autocast(fun)", _WAY_OUT):
            return self.run(closed, args, kinds, place)

    def _run_in_one_context(
        self, frame: Frame, eqns: Sequence[tuple[JaxprEqn, Iterable[Any]]]
    ) -> None:
        """Evaluates equations, and lets go of what is not read after each."""
        first, _ = eqns[0]
        with context(first):
            for eqn, done in eqns:
                with source(eqn, frame.scopes):
                    outputs = self._evaluate(frame, eqn)
                if outputs:  # otherwise they are left to be computed
                    for var, value in zip(eqn.outvars, outputs, strict=True):
                        frame.write(var, value)
                for var in done:
                    frame.forget(var)

    def _evaluate(self, frame: Frame, eqn: JaxprEqn) -> Sequence[Any]:
        """Returns the outputs of an equation by its rule, or none if they are left for later."""
        if is_full_precision(eqn):
            return as_written(frame, eqn)
        try:
            return RULES.get(operation(eqn), as_written)(frame, eqn)
        except UnknownFormError:
            return as_written(frame, eqn)

    def call(self, fun: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Returns what a function that a user wrapped returns, with products in half precision.

        Warns of what stays as it is written. Of a function in which nothing changes, only the
        outermost call speaks.
        """
        is_outermost = not under_autocast.get()
        flat, program = self._trace(fun, args, kwargs)

        def run_and_tell() -> list[Any]:
            forget_warnings()
            outputs = self._run_traced(program, flat.arrays, Place())
            if is_outermost:
                warn_if_unchanged(program, flat.__name__, self.half_carries)
            return outputs

        # In a copy of the context, which forgets what was warned of when the call is over.
        return flat.restored(copy_context().run(run_and_tell))

    def call_rule(self, fun: Callable[..., Any], place: Place, *args: Any) -> Any:
        """Returns what a derivative rule returns: the call of a function is still under way."""
        flat, program = self._trace(fun, args, {})
        return flat.restored(self._run_traced(program, flat.arrays, place))

    def _trace(self, fun: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Flat, ClosedJaxpr]:
        flat = Flat(fun, args, kwargs, getattr(fun, "__name__", "autocast"))
        token = under_autocast.set(True)
        try:
            return flat, jax.make_jaxpr(flat)(*flat.arrays)
        finally:
            under_autocast.reset(token)

    def _run_traced(self, program: ClosedJaxpr, arrays: Sequence[Any], place: Place) -> list[Any]:
        kinds = [parameter(var) for var in program.jaxpr.invars]
        outputs, _ = self.run_from_outside(program, arrays, kinds, place)
        return list(map(as_declared, outputs, program.jaxpr.outvars))
