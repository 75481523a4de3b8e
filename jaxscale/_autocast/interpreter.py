"""A traced jaxpr, run again with its matrix products in half precision.

`Autocast.run` goes through a jaxpr once, in one flat loop, and binds each equation in whatever
trace is current, so that `grad`, `vmap` and `jit` outside see ordinary operations. A value that the
jaxpr declares as float32 may be *narrow*: computed in half precision. An `Environment` holds the
values of one jaxpr, each in the precision it was computed in, and casts each once, on demand.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import copy_context
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import jax
import numpy as np

from .._boundary import TracedFor, traced_for
from .._jax import jaxprs
from .._jax.jaxprs import (
    ClosedJaxpr,
    Form,
    JaxprEqn,
    UnknownFormError,
    context,
    jaxpr_as_fun,
    operation,
    primitives_of,
    source,
)
from .._trees.flat_functions import Flat
from .cast_products import holds_products
from .custom_rules import rewrite_custom_jvp, rewrite_custom_vjp, rewrite_object
from .environment import Environment
from .exact_products import Exact, find_exact
from .execution_plan import plan
from .half_sums import adds_halves
from .higher_order import (
    rewrite_jit,
    rewrite_loop_or_branches,
    rewrite_mapped,
    rewrite_remat,
    rewrite_scan,
    run_inline,
)
from .narrow_values import as_declared, is_full_precision
from .product_owner import CallSite, Owner
from .rules import SIMPLE_RULES, Outputs, Rule, run_as_written
from .segmentation import Part
from .segments import run_segment
from .table import INNER_AUTOCAST
from .uncast_warnings import (
    forget_warnings,
    warn_if_unchanged,
    warn_of_halves_left,
    warn_of_uncast_primitives,
)

_RULES_OF_FORMS: dict[Form, Rule] = {
    Form.JIT: rewrite_jit,
    Form.INLINED: run_inline,
    Form.REMAT: rewrite_remat,
    Form.CUSTOM_JVP: rewrite_custom_jvp,
    Form.CUSTOM_VJP: rewrite_custom_vjp,
    Form.OBJECT: rewrite_object,
    Form.SCAN: rewrite_scan,
    Form.WHILE: rewrite_loop_or_branches,
    Form.BRANCHES: rewrite_loop_or_branches,
    Form.SHARD_MAP: rewrite_mapped,
}
# Which rule rewrites an equation, by the name of its primitive.
RULES = dict(SIMPLE_RULES)
for _form, _rule in _RULES_OF_FORMS.items():
    RULES |= dict.fromkeys(primitives_of(_form), _rule)

_NOTE = (
    "`autocast(fun)` traces `fun` with float32 arrays in float32. If what raised this takes half "
    "precision alone, as a fused kernel may, wrap it with `jaxscale.half_precision`."
)
_WAY_OUT = (
    "Mark the function around that line with `jaxscale.full_precision`, or leave it outside of the "
    "function that `autocast` wraps."
)


_BFLOAT16 = np.dtype(jax.numpy.bfloat16)


class _Traced(NamedTuple):
    """A function that was traced.

    Attributes:
      flat: the function, as one of arrays.
      program: what it does.
    """

    flat: Flat
    program: ClosedJaxpr


class Autocast:
    """Runs traced jaxprs with their products in one half-precision dtype.

    It remembers the bodies of loops and calls that it has rewritten, for as long as the jaxpr
    lives that they are from: a function that is called many times is rewritten once.

    Attributes:
      dtype: that of the products, and of what they read and return.
      rewritten: for each jaxpr, by its signature, what it was rewritten to.
    """

    def __init__(self, dtype: np.dtype) -> None:
        self.dtype = dtype
        self.rewritten: WeakKeyDictionary[Any, dict[Any, Any]] = WeakKeyDictionary()

    def run(
        self,
        closed: ClosedJaxpr,
        args: Sequence[Any],
        site: CallSite,
        rounded_outputs: Sequence[bool] = (),
    ) -> list[Any]:
        """Runs a jaxpr with its products in half precision.

        Some of the arguments may be narrow, and some of the outputs. `rounded_outputs` is as in
        `plan`.
        """
        warn_of_uncast_primitives(closed)
        jaxpr = closed.jaxpr
        parts = plan(jaxpr, tuple(rounded_outputs), site)
        env = Environment(self, jaxpr, parts, site)
        variables = [*jaxpr.constvars, *jaxpr.invars]
        for var, arg in zip(variables, [*closed.consts, *args], strict=True):
            env.write(var, arg)
        changes = env.narrow or holds_products(closed, site)
        if not changes and not adds_halves(closed):
            return jaxpr_as_fun(closed)(*args)
        for part in env.plan.parts:
            outputs = self._run_part(env, part)
            for var, value in outputs:
                env.write(var, value)
            for var in part.last_used:
                env.forget(var)
        return list(map(env.read_output, jaxpr.outvars))

    def run_from_outside(
        self,
        closed: ClosedJaxpr,
        args: Sequence[Any],
        site: CallSite,
    ) -> list[Any]:
        """Returns the outputs of a jaxpr that is not part of another one that runs.

        What cannot be transformed is an error that names the user's line. What `site` knows of
        inputs and outputs is of the first ones of this jaxpr.
        """
        known = site.exact
        exact = find_exact(closed, known.inputs, known.outputs, known.lines)
        site = site._replace(exact=exact)
        with jaxprs.naming_the_line("autocast(fun)", _WAY_OUT):
            return self.run(closed, args, site)

    def _run_part(self, env: Environment, part: Part) -> Iterable[tuple[Any, Any]]:
        """Runs a part of a jaxpr: returns pairs of a variable and its value."""
        if part.is_segment:
            return zip(part.outputs, run_segment(env, part), strict=True)
        (eqn,) = part.eqns
        with context(eqn), source(eqn, env.scopes):
            return zip(eqn.outvars, _evaluate(env, eqn), strict=True)

    def call(
        self, fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Calls a function that a user wrapped, with products in half precision.

        Warns of what stays as it is written. Only the outermost call warns of a function in which
        nothing changes.
        """
        is_outermost = not traced_for.value.dtype
        traced = self._trace(fun, args, kwargs)
        scope: AbstractContextManager[Any] = nullcontext()
        if not is_outermost:
            scope = jax.named_scope(INNER_AUTOCAST)

        def run_and_warn() -> list[Any]:
            forget_warnings()
            warn_of_halves_left(traced.program, self.dtype.name)
            with scope:
                outputs = self._run_traced(traced, CallSite())
            if is_outermost:
                warn_if_unchanged(traced.program, traced.flat.__name__)
            return outputs

        # In a copy of the context, which forgets what was warned of when the call is over.
        return traced.flat.restored(copy_context().run(run_and_warn))

    def call_rule(self, fun: Callable[..., Any], site: CallSite, *args: object) -> Any:
        """Calls a derivative rule of a function whose call is still under way."""
        traced = self._trace(fun, args, {})
        # It takes other inputs than the call, and may compute products of the call again.
        site = site._replace(exact=Exact(lines=site.exact.lines))
        return traced.flat.restored(self._run_traced(traced, site))

    def tracing(self) -> AbstractContextManager[Any]:
        """Returns a context to trace functions of the user in."""
        return traced_for(TracedFor(self.dtype.name))

    def _trace(
        self, fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _Traced:
        flat = Flat(fun, args, kwargs, getattr(fun, "__name__", "autocast"))
        try:
            with self.tracing():
                program = jax.make_jaxpr(flat)(*flat.arrays)
        except Exception as error:
            if _may_want_half_precision(error):
                error.add_note(_NOTE)
            raise
        return _Traced(flat, program)

    def _run_traced(self, traced: _Traced, site: CallSite) -> list[Any]:
        jaxpr = traced.program.jaxpr
        outputs = self.run_from_outside(traced.program, traced.flat.arrays, site)
        return list(map(as_declared, outputs, jaxpr.outvars))


def add_in_float32(program: ClosedJaxpr) -> ClosedJaxpr:
    """Returns a jaxpr in which half cotangents are added in float32, and nothing is cast.

    `scale_backward` differentiates it before an `autocast` around sees it.
    """
    if not adds_halves(program):
        return program
    site = CallSite(owner=Owner.UNCAST)

    def run(*args: jax.Array) -> list[Any]:
        outputs = Autocast(_BFLOAT16).run(program, args, site)
        return list(map(as_declared, outputs, program.jaxpr.outvars))

    return jax.make_jaxpr(run)(*program.in_avals)


def _evaluate(env: Environment, eqn: JaxprEqn) -> Outputs:
    """Returns the outputs of an equation by its rule."""
    if is_full_precision(eqn):
        return run_as_written(env, eqn)
    rule = RULES.get(operation(eqn), run_as_written)
    try:
        return rule(env, eqn)
    except UnknownFormError:
        return run_as_written(env, eqn)


def _may_want_half_precision(error: Exception) -> bool:
    """Returns whether `half_precision` may be the way out of an error of the user's function."""
    if _NOTE in getattr(error, "__notes__", ()):
        return False
    return jaxprs.names_precision(error) and not jaxprs.passed_through(
        error, "half_precision_fun"
    )
