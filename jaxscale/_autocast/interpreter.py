"""A traced program, run again with its matrix products in half precision.

`Autocast.run` goes through a jaxpr once, in one flat loop, and binds each equation in whatever
trace is current, so that `grad`, `vmap` and `jit` outside see ordinary operations. A value that the
program declares as float32 may be *narrow*: computed in half precision. A `Frame` holds the values
of one jaxpr, each in the precision it was computed in, and casts each once, on demand.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from contextvars import copy_context
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import jax

from .. import _jax
from .._boundary import under_autocast
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
from .custom_rules import rewrite_custom_jvp, rewrite_custom_vjp, rewrite_object
from .frame import Frame
from .higher_order import (
    rewrite_branches,
    rewrite_jit,
    rewrite_mapped,
    rewrite_remat,
    rewrite_scan,
    rewrite_while,
    run_inline,
)
from .readers import find_last_uses
from .recompute import Link
from .rules import SIMPLE_RULES, Outputs, Rule, run_as_written
from .unsaid import forget_warnings, warn_if_unchanged, warn_of_what_is_left
from .values import Kind, Precision, as_declared, is_full_precision, kind_of_input

# Which rule rewrites an equation, by the name of its primitive.
RULES: dict[str, Rule] = SIMPLE_RULES | {
    **dict.fromkeys(("jit", "pjit"), rewrite_jit),
    **dict.fromkeys(("closed_call", "call", "eval_jaxpr"), run_inline),
    **dict.fromkeys(("shard_map", "xla_pmap"), rewrite_mapped),
    "remat2": rewrite_remat,
    "scan": rewrite_scan,
    "while": rewrite_while,
    "cond": rewrite_branches,
    "custom_jvp_call": rewrite_custom_jvp,
    "custom_vjp_call": rewrite_custom_vjp,
    _jax.OBJECT: rewrite_object,
}


_WAY_OUT = (
    "Mark the function around that line with `jaxscale.full_precision`, or leave it outside of the "
    "function that `autocast` wraps."
)


class RunResult(NamedTuple):
    """What a program returned.

    Attributes:
      outputs: the values, some of them narrow.
      kinds: what else is known of them.
    """

    outputs: list[Any]
    kinds: list[Kind]


class _Traced(NamedTuple):
    """A function that was traced.

    Attributes:
      flat: the function, as one of arrays.
      program: what it does.
    """

    flat: Flat
    program: ClosedJaxpr


class Autocast:
    """Runs traced programs with their products in one half-precision dtype.

    It remembers the bodies of loops and calls that it has rewritten, for as long as the program
    lives that they are from: a function that is called many times is rewritten once.

    Attributes:
      precision: that of the products, and of what they read and return.
      half_carries: whether a `scan` may carry half precision.
      rewritten: for each jaxpr, by its signature, what it was rewritten to.
    """

    rules = RULES

    def __init__(self, precision: Precision, half_carries: bool) -> None:
        self.precision = precision
        self.half_carries = half_carries
        self.rewritten: WeakKeyDictionary[Any, dict[Any, Any]] = WeakKeyDictionary()

    def run(
        self,
        closed: ClosedJaxpr,
        args: Sequence[Any],
        kinds: Sequence[Kind],
        place: Place,
        rounded_outputs: Sequence[bool] = (),
    ) -> RunResult:
        """Runs a program with its products in half precision.

        Some of the arguments may be narrow, or links. `rounded_outputs` is as in `find_readers`.
        """
        warn_of_what_is_left(closed, RULES)
        jaxpr = closed.jaxpr
        frame = Frame(self, jaxpr, place, rounded_outputs)
        frame.kinds.update(
            zip(jaxpr.constvars, map(kind_of_input, jaxpr.constvars), strict=True)
        )
        frame.kinds.update(zip(jaxpr.invars, kinds, strict=True))
        variables = [*jaxpr.constvars, *jaxpr.invars]
        for var, arg in zip(variables, [*closed.consts, *args], strict=True):
            if isinstance(arg, Link):
                frame.defer(var, arg)
            else:
                frame.write(var, arg)
        pairs = zip(jaxpr.eqns, find_last_uses(jaxpr), strict=True)
        # To enter a context takes as long as to find a rule, and most programs have one.
        for _, group in itertools.groupby(pairs, key=lambda pair: context_key(pair[0])):
            self._run_in_one_context(frame, list(group))
        return RunResult(
            outputs=list(map(frame.read_output, jaxpr.outvars)),
            kinds=list(map(frame.kind_of, jaxpr.outvars)),
        )

    def run_from_outside(
        self,
        closed: ClosedJaxpr,
        args: Sequence[Any],
        kinds: Sequence[Kind],
        place: Place,
    ) -> list[Any]:
        """Returns the outputs of a program that is not part of another one that runs.

        What cannot be transformed is an error that names the user's line.
        """
        with _jax.naming_the_line("autocast(fun)", _WAY_OUT):
            return self.run(closed, args, kinds, place).outputs

    def _run_in_one_context(
        self, frame: Frame, eqns: Sequence[tuple[JaxprEqn, Iterable[Any]]]
    ) -> None:
        """Evaluates equations, and lets go of what is not read after each."""
        first, _ = eqns[0]
        with context(first):
            for eqn, last_used in eqns:
                with source(eqn, frame.scopes):
                    outputs = self._evaluate(frame, eqn)
                if outputs:  # otherwise they are left to be computed
                    for var, value in zip(eqn.outvars, outputs, strict=True):
                        frame.write(var, value)
                for var in last_used:
                    frame.forget(var)

    def _evaluate(self, frame: Frame, eqn: JaxprEqn) -> Outputs:
        """Returns the outputs of an equation by its rule, or none if they are left for later."""
        if is_full_precision(eqn):
            return run_as_written(frame, eqn)
        rule = RULES.get(operation(eqn), run_as_written)
        try:
            return rule(frame, eqn)
        except UnknownFormError:
            return run_as_written(frame, eqn)

    def call(self, fun: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Calls a function that a user wrapped, with products in half precision.

        Warns of what stays as it is written. Only the outermost call warns of a function in which
        nothing changes.
        """
        is_outermost = not under_autocast.get()
        traced = _trace(fun, args, kwargs)

        def run_and_warn() -> list[Any]:
            forget_warnings()
            outputs = self._run_traced(traced, Place())
            if is_outermost:
                warn_if_unchanged(
                    traced.program, traced.flat.__name__, self.half_carries
                )
            return outputs

        # In a copy of the context, which forgets what was warned of when the call is over.
        return traced.flat.restored(copy_context().run(run_and_warn))

    def call_rule(self, fun: Callable[..., Any], place: Place, *args: Any) -> Any:
        """Calls a derivative rule of a function whose call is still under way."""
        traced = _trace(fun, args, {})
        return traced.flat.restored(self._run_traced(traced, place))

    def _run_traced(self, traced: _Traced, place: Place) -> list[Any]:
        jaxpr = traced.program.jaxpr
        kinds = list(map(kind_of_input, jaxpr.invars))
        outputs = self.run_from_outside(
            traced.program, traced.flat.arrays, kinds, place
        )
        return list(map(as_declared, outputs, jaxpr.outvars))


def _trace(fun: Callable[..., Any], args: Any, kwargs: Any) -> _Traced:
    flat = Flat(fun, args, kwargs, getattr(fun, "__name__", "autocast"))
    token = under_autocast.set(True)
    try:
        program = jax.make_jaxpr(flat)(*flat.arrays)
    finally:
        under_autocast.reset(token)
    return _Traced(flat, program)
