"""Rules for functions with derivative rules of their own.

`jax.jvp` or `jax.vjp` traces how JAX differentiates the equation as it is written, and the result
runs like any other jaxpr. So nothing here depends on how JAX keeps a rule. The new rules do not
hold the environment, whose arrays would live as long as they do.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.lax import stop_gradient
from jax.tree_util import Partial

from .._boundary import NO_FORWARD, check_cotangent, is_boundary
from .._jax import jaxprs
from .._jax.jaxprs import (
    AbstractValue,
    Arrays,
    ClosedJaxpr,
    Flags,
    JaxprEqn,
    ShapedArray,
    SymbolicTangent,
    SymbolicTangents,
    bind,
    cast,
    context,
    has_narrow_range,
    holds_inexact,
    jaxpr_as_fun,
    spread,
)
from .cast_products import has_products
from .environment import Environment, Rewriter
from .higher_order import changes_nothing, run_inline
from .narrow_values import Narrow, ToRound, Value, has_dtype, without_mark
from .rewriting import RewriteOptions, read_inputs, rewrite
from .rules import Outputs, run_as_written

_NO_FORWARD = (
    "`autocast(fun)` was differentiated in forward mode (`jax.jvp`, `jax.jacfwd`, "
    "`jax.linearize`), and `fun` calls a function with a backward rule of its own "
    "(`jax.custom_vjp`), which has no forward mode. Use reverse mode: `jax.grad`, `jax.vjp`."
)


def rewrite_object(env: Environment, eqn: JaxprEqn) -> Outputs:
    """Evaluates an operation with rules of its own that is an object, such as a `custom_root`.

    An object without a product stays in float32, as nothing is known of what it computes.
    """
    jaxprs.callee(eqn)  # raises if it has another form
    if not has_products(eqn, env.site):
        return run_as_written(env, eqn)
    match jaxprs.differentiated_by(eqn):
        case "jvp":
            return rewrite_custom_jvp(env, eqn)
        case "vjp":
            return rewrite_custom_vjp(env, eqn)
    return run_inline(env, eqn)


def rewrite_custom_jvp(env: Environment, eqn: JaxprEqn) -> Outputs:
    """Evaluates a `custom_jvp` function, and keeps its rule."""
    declared = jaxprs.callee(eqn)
    if changes_nothing(env, eqn):
        return run_as_written(env, eqn)
    autocast = env.autocast
    site = env.site.inside(eqn, declared)
    args = read_inputs(env, eqn)
    rewritten = rewrite(env, eqn, declared, args, RewriteOptions(in_float32=True))
    program = rewritten.program
    leaves, views = jax.tree.flatten(args)
    trace = jaxprs.remember_by_form(
        functools.partial(_trace_jvp, autocast, eqn, declared)
    )

    @jax.custom_jvp
    def fun(*leaves: jax.Array) -> Any:
        return tuple(jaxpr_as_fun(program)(*leaves))

    def jvp(primals: Arrays, tangents: SymbolicTangents) -> Any:
        tangents_of_sources = _select_sources(jax.tree.unflatten(views, tangents))
        perturbed = tuple(not isinstance(t, SymbolicZero) for t in tangents_of_sources)
        values = jax.tree.unflatten(views, primals)
        values += itertools.compress(tangents_of_sources, perturbed)
        with jaxprs.making_forward_rule():
            results = autocast.run_from_outside(trace(perturbed), values, site)
        types = program.out_avals
        derivatives = _fill_in(results[len(types) :], types)
        outputs = tuple(map(_cast_as, results, types))
        return outputs, derivatives

    fun.defjvp(jvp, symbolic_zeros=True)
    return rewritten.mark(fun(*leaves))


def _trace_jvp(
    autocast: Rewriter,
    eqn: JaxprEqn,
    declared: ClosedJaxpr,
    perturbed: Flags,
) -> ClosedJaxpr:
    """Traces an equation and its derivative by the inputs that have a tangent.

    The jaxpr takes values and tangents. It returns no derivatives of integers.
    """

    def derive(values: Arrays, tangents: Arrays) -> Any:
        fun = _vary(eqn, values, perturbed)
        varied = tuple(itertools.compress(values, perturbed))
        outputs, derivatives = jax.jvp(fun, varied, tangents)
        return outputs, list(filter(holds_inexact, derivatives))

    types = tuple(declared.in_avals)
    perturbed_types = itertools.compress(types, perturbed)
    tangent_types = tuple(map(jaxprs.tangent_type, perturbed_types))
    with autocast.tracing():
        return jax.make_jaxpr(derive)(types, tangent_types)


def _fill_in(derivatives: Sequence[Any], types: Sequence[Any]) -> tuple[Any, ...]:
    """Returns a derivative of each output, given those of outputs that are not integers."""
    remaining = iter(derivatives)
    filled = []
    for aval in types:
        if holds_inexact(aval):
            filled.append(_cast_as(next(remaining), aval))
        else:
            filled.append(_float0(aval))
    return tuple(filled)


class _Forward(NamedTuple):
    """The forward pass of a function with a backward rule.

    Attributes:
      program: gives the outputs, and then the residuals, which the backward pass reads.
      pullback: the tree of the residuals, which makes the backward pass of them.
    """

    program: ClosedJaxpr
    pullback: Any


def rewrite_custom_vjp(env: Environment, eqn: JaxprEqn) -> Outputs:
    """Evaluates a `custom_vjp` function, and keeps its rule.

    Values cross the boundary of a `scale_backward` in float32. It takes no cotangent in float16,
    not even zeros: a cotangent that flushed before it was scaled looks the same.
    """
    declared = jaxprs.callee(eqn)
    if changes_nothing(env, eqn):
        return run_as_written(env, eqn)
    autocast = env.autocast
    site = env.site.inside(eqn, declared)
    args = read_inputs(env, eqn)
    options = RewriteOptions(in_float32=True)
    at_boundary = is_boundary(eqn)
    if at_boundary:
        args = env.read_inputs_wide(eqn)
        options = RewriteOptions(fixed=(False,) * len(declared.out_avals))
    rewritten = rewrite(env, eqn, declared, args, options)
    program = rewritten.program
    leaves, views = jax.tree.flatten(args)

    def run_forward(perturbed_leaves: Flags, *leaves: jax.Array) -> Any:
        perturbed = tuple(_select_sources(jax.tree.unflatten(views, perturbed_leaves)))
        values = jax.tree.unflatten(views, leaves)
        forward = _trace_vjp(autocast, eqn, declared, at_boundary, perturbed)
        results = autocast.run_from_outside(forward.program, values, site)
        types = program.out_avals
        residuals = []
        for value in results[len(types) :]:
            if isinstance(value, ToRound):
                # what is kept may be narrow
                value = cast(value.wide, autocast.dtype)
            residuals.append(value)
        pull = functools.partial(run_backward, forward, perturbed)
        return list(map(_cast_as, results, types)), Partial(pull, residuals)

    def run_backward(
        forward: _Forward,
        perturbed: Flags,
        residuals: Sequence[Any],
        cotangents: Sequence[Any],
    ) -> Any:
        if at_boundary:
            for cotangent in cotangents:
                check_cotangent(cotangent)
        types = declared.out_avals
        values = list(map(_cast_as, residuals, forward.program.out_avals[len(types) :]))
        cotangents = tuple(map(_cast_cotangent, cotangents, types))

        def pull(values: Arrays, cotangents: Sequence[jax.Array | None]) -> Any:
            run_pullback = forward.pullback.unflatten(values)
            # The rule may ask which cotangents are zeros, so these are not made arrays.
            return run_pullback(tuple(map(_fill_zero, cotangents, types)))

        gradients = autocast.call_rule(pull, site, values, cotangents)
        in_types = jax.tree.unflatten(views, program.in_avals)
        return _give_to_sources(gradients, perturbed, in_types)

    no_forward = NO_FORWARD if at_boundary else _NO_FORWARD
    outputs = jaxprs.keep_rule(program, run_forward, no_forward, *leaves)
    return rewritten.mark(outputs)


def _trace_vjp(
    autocast: Rewriter,
    eqn: JaxprEqn,
    declared: ClosedJaxpr,
    at_boundary: bool,
    perturbed: Flags,
) -> _Forward:
    """Traces the forward pass of an equation, for its derivative by some of its inputs."""
    pullbacks = []

    def derive(*values: jax.Array) -> Any:
        fun = _vary(eqn, values, perturbed)
        if at_boundary:
            fun = _stop_narrow_outputs(fun)
        outputs, pullback = jax.vjp(fun, *itertools.compress(values, perturbed))
        residuals, tree = jax.tree.flatten(pullback)
        pullbacks.append(tree)
        return [*outputs, *residuals]

    with autocast.tracing():
        program = jax.make_jaxpr(derive)(*declared.in_avals)
    return _Forward(program, pullbacks[0])


def _stop_narrow_outputs(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that nothing is differentiated through in float16."""

    def stopped(*args: jax.Array) -> Any:
        outputs = []
        for output in fun(*args):
            if has_narrow_range(output.dtype):
                output = stop_gradient(output)
            outputs.append(output)
        return tuple(outputs)

    return stopped


def _vary(
    eqn: JaxprEqn, values: Sequence[Any], perturbed: Flags
) -> Callable[..., tuple[Any, ...]]:
    """Returns an equation as a function of those of its inputs that are perturbed."""

    def fun(*varied: jax.Array) -> tuple[Any, ...]:
        with context(eqn):
            return tuple(bind(eqn, spread(perturbed, varied, values)))

    return fun


def _select_sources(args: Sequence[Any]) -> list[Any]:
    """Returns the array that takes the gradient of each input: of two views, the second."""
    sources = []
    for arg in args:
        if isinstance(arg, Narrow):
            sources.append(arg.wide)
        else:
            sources.append(arg)
    return sources


def _give_to_sources(
    gradients: Sequence[Any], perturbed: Sequence[bool], types: Sequence[Any]
) -> tuple[Any, ...]:
    """Returns a cotangent for each array that a function takes, or `None` where there is none.

    `types` has the type of each input, or both types if it has two views.
    """
    remaining = iter(gradients)
    cotangents: list[Any] = []
    for is_perturbed, aval in zip(perturbed, types, strict=True):
        if isinstance(aval, Narrow):
            cotangents.append(None)
            (aval,) = _select_sources([aval])
        cotangent = None
        if is_perturbed:
            cotangent = _cast_as(next(remaining), aval)
        cotangents.append(cotangent)
    return tuple(cotangents)


def _cast_cotangent(cotangent: SymbolicTangent, aval: Any) -> Any:
    """Returns a cotangent in the dtype of its output, `None` for what is zero."""
    if isinstance(cotangent, SymbolicZero) or not holds_inexact(aval):
        return None
    return _cast_as(cotangent, aval)


def _fill_zero(cotangent: jax.Array | None, aval: AbstractValue) -> Any:
    """Returns a cotangent as the function of `jax.vjp` takes it, also for what is zero."""
    if cotangent is None:
        return jaxprs.zero_cotangent(aval)
    return cotangent


def _float0(aval: ShapedArray) -> np.ndarray:
    """Returns the derivative of what has none: integers, bools, keys."""
    return np.zeros(aval.shape, jax.dtypes.float0)


def _cast_as(value: Value, aval: Any) -> Any:
    """Returns a value in the dtype of a type."""
    array = without_mark(value)
    if has_dtype(array, aval.dtype):
        return array
    return cast(array, aval.dtype)
