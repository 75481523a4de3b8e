"""How functions with derivative rules of their own are rewritten.

What JAX does to derive the equation as it is written is traced by `jax.jvp` or `jax.vjp`, and then
runs like any other program: nothing here depends on how JAX keeps a rule. The new rules do not hold
the frame, whose arrays would live as long as they do.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.lax import stop_gradient

from .. import _jax
from .._boundary import check_cotangent, is_boundary
from .._jax import (
    ClosedJaxpr,
    JaxprEqn,
    bind,
    cast,
    context,
    has_narrow_range,
    jaxpr_as_fun,
    programs,
)
from .._trees.tree import blank
from .frame import Frame
from .higher_order import inlined, place_inside, read_inputs, rewrite
from .readers import has_products
from .recompute import Narrow
from .rules import as_written, chained, is_chained_call
from .values import ToRound, has_dtype


def custom_jvp(frame: Frame, eqn: JaxprEqn) -> Sequence[Any]:
    """Evaluates a `custom_jvp` function, and keeps its rule."""
    autocast, declared = frame.autocast, _jax.callee(eqn)
    place = place_inside(frame, eqn)
    if is_chained_call(frame, eqn):
        return chained(frame, eqn)
    if any(map(frame.is_narrow, eqn.invars)) and _is_relu(declared):
        return _narrow_relu(frame, eqn)
    if not any(map(frame.is_narrow, eqn.invars)) and not has_products(eqn, frame.place.owner):
        is_rounded = any(var in frame.rounded for var in eqn.outvars)  # there may be no outputs
        if is_rounded and _is_relu(declared):
            return [_relu(frame.wide(eqn.invars[0]), frame.dtype)]
        return as_written(frame, eqn)
    args, kinds = read_inputs(frame, eqn)
    program, out_kinds, _ = rewrite(frame, eqn, declared, args, kinds)
    leaves, tree = jax.tree.flatten(args)

    @_jax.remember_by_form
    def derived(perturbed: tuple[bool, ...]) -> ClosedJaxpr:
        """Returns a program of values and tangents, given which inputs have a tangent."""

        def derive(values: Any, tangents: Any) -> Any:
            fun, given = _of_perturbed(eqn, values, perturbed)
            outputs, derivatives = jax.jvp(fun, given, tangents)
            return outputs, [each for each in derivatives if _is_inexact(each)]

        tangents = itertools.compress(map(_jax.tangent_type, declared.in_avals), perturbed)
        return jax.make_jaxpr(derive)(tuple(declared.in_avals), tuple(tangents))

    @jax.custom_jvp
    def fun(*leaves: Any) -> Any:
        return tuple(jaxpr_as_fun(program)(*leaves))

    def jvp(primals: Any, tangents: Any) -> Any:
        tangents = _of_sources(jax.tree.unflatten(tree, tangents))
        perturbed = tuple(not isinstance(each, SymbolicZero) for each in tangents)
        values = [*jax.tree.unflatten(tree, primals), *itertools.compress(tangents, perturbed)]
        known = [*kinds, *[None] * sum(perturbed)]
        token = _jax.in_forward_rule.set(True)
        try:
            outputs, _ = autocast.run_from_outside(derived(perturbed), values, known, place)
        finally:
            _jax.in_forward_rule.reset(token)
        avals = program.out_avals
        derivatives = iter(outputs[len(avals) :])
        return tuple(map(_as_aval, outputs, avals)), tuple(
            _as_aval(next(derivatives), aval) if _is_inexact(aval) else _float0(aval)
            for aval in avals
        )

    fun.defjvp(jvp, symbolic_zeros=True)
    frame.kinds.update(zip(eqn.outvars, out_kinds, strict=True))
    return fun(*leaves)


def _of_sources(args: Sequence[Any]) -> list[Any]:
    """Returns what belongs to each input: of two views of a value, the second has the gradient."""
    return [arg.wide if isinstance(arg, Narrow) else arg for arg in args]


def _narrow_relu(frame: Frame, eqn: JaxprEqn) -> Sequence[Any]:
    """Evaluates a ReLU by JAX's own, which takes any dtype, instead of a rule made of its rule."""
    var, read = eqn.outvars[0], eqn.invars[0]
    if frame.meets(read) and var not in frame.only_half:
        return [ToRound(jax.nn.relu(frame.wide(read)))]
    return [jax.nn.relu(frame.own_half(read))]


def _is_relu(program: ClosedJaxpr) -> bool:
    """Returns whether a program is that of `jax.nn.relu`, whose derivative rule is known."""
    eqns = program.jaxpr.eqns
    inner = [each for eqn in eqns for called in programs(eqn) for each in called.eqns]
    is_single = len(eqns) == len(inner) == 1
    return is_single and ("nn/functions.py", "relu") in _jax.frames_of_jax(inner[0])


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _relu(x: Any, dtype: Any) -> Any:
    """Computes a ReLU in float32 that a product in half precision reads.

    Its derivative is 0 where what the product reads is 0. XLA keeps the rounded output for the
    product anyway. Of the sum before it, such as that of a residual connection, it would keep all
    of the float32 array, only to compare it with 0.
    """
    return jax.nn.relu(x)


@_relu.defjvp
def _relu_jvp(dtype: Any, primals: Any, tangents: Any) -> Any:
    output, (tangent,) = _relu(*primals, dtype), tangents
    return output, jnp.where(cast(output, dtype) > 0, tangent, 0)


def custom_vjp(frame: Frame, eqn: JaxprEqn) -> Sequence[Any]:
    """Evaluates a `custom_vjp` function, and keeps its rule.

    What goes through the boundary of a `scale_backward` does so in float32. It takes no cotangent
    in float16, not even zeros: one that flushed before it was scaled looks the same.
    """
    autocast, declared = frame.autocast, _jax.callee(eqn)
    place = place_inside(frame, eqn)
    if not any(map(frame.is_narrow, eqn.invars)) and not has_products(eqn, frame.place.owner):
        return as_written(frame, eqn)
    args, kinds = read_inputs(frame, eqn)
    size, at_boundary = len(declared.out_avals), is_boundary(eqn)
    if at_boundary:
        args = [frame.wide(atom) for atom in eqn.invars]
    fixed = [False] * size if at_boundary else []
    program, out_kinds, _ = rewrite(frame, eqn, declared, args, kinds, fixed)
    leaves, views = jax.tree.flatten(args)

    # Whatever flags are set: the backward pass needs the program that made its residuals.
    @functools.cache
    def derived(perturbed: tuple[bool, ...]) -> tuple[ClosedJaxpr, Any]:
        """Returns a program that gives outputs and residuals, and the tree of the residuals."""
        trees = []

        def derive(*values: Any) -> Any:
            fun, given = _of_perturbed(eqn, values, perturbed)

            def stopped(*given: Any) -> Any:
                return tuple(
                    stop_gradient(y) if has_narrow_range(y.dtype) else y for y in fun(*given)
                )

            outputs, pullback = jax.vjp(stopped if at_boundary else fun, *given)
            residuals, tree = jax.tree.flatten(pullback)
            trees.append(tree)
            return [*outputs, *residuals]

        return jax.make_jaxpr(derive)(*declared.in_avals), trees[0]

    @jax.custom_vjp
    def fun(*leaves: Any) -> Any:
        return tuple(jaxpr_as_fun(program)(*leaves))

    def fwd(*given: Any) -> Any:
        sources = _of_sources(jax.tree.unflatten(views, given))
        perturbed = tuple(each.perturbed and _is_inexact(each.value) for each in sources)
        forward, _ = derived(perturbed)
        values = jax.tree.unflatten(views, [each.value for each in given])
        outputs, _ = autocast.run_from_outside(forward, values, kinds, place)
        primals = tuple(map(_as_aval, outputs, program.out_avals))
        # The second holds no array: its structure says by which inputs something is differentiated.
        # What is kept is narrow where it may be.
        kept = [
            cast(each.wide, autocast.dtype) if isinstance(each, ToRound) else each
            for each in outputs[size:]
        ]
        return primals, (kept, [() if each else None for each in perturbed])

    def bwd(residuals: Any, cotangents: Any) -> Any:
        for cotangent in cotangents if at_boundary else ():
            check_cotangent(cotangent)
        kept, perturbed = residuals[0], tuple(each is not None for each in residuals[1])
        forward, tree = derived(perturbed)
        values = list(map(_as_aval, kept, forward.out_avals[size:]))
        cotangents = tuple(map(_cotangent, cotangents, declared.out_avals))

        def pull(values: Any, cotangents: Any) -> Any:
            # The rule may ask which cotangents are zeros, so these are not made arrays.
            pairs = zip(cotangents, declared.out_avals, strict=True)
            return tree.unflatten(values)(
                tuple(_zero(aval) if each is None else each for each, aval in pairs)
            )

        gradients = iter(autocast.call_rule(pull, place, values, cotangents))
        avals = jax.tree.unflatten(views, program.in_avals)
        pulled: list[Any] = []
        for given, aval in zip(perturbed, avals, strict=True):
            if isinstance(aval, Narrow):
                pulled.append(None)
                aval = aval.wide
            pulled.append(_as_aval(next(gradients), aval) if given else None)
        return tuple(pulled)

    fun.defvjp(fwd, bwd, symbolic_zeros=True)
    frame.kinds.update(zip(eqn.outvars, out_kinds, strict=True))
    return fun(*leaves)


def own_rules(frame: Frame, eqn: JaxprEqn) -> Sequence[Any]:
    """Evaluates an operation with rules of its own that is an object, such as a `custom_root`.

    Of what it computes without a product nothing is known: that stays in float32.
    """
    _jax.callee(eqn)  # raises if it has another form
    if not has_products(eqn, frame.place.owner):
        return as_written(frame, eqn)
    match _jax.differentiated_by(eqn):
        case "jvp":
            return custom_jvp(frame, eqn)
        case "vjp":
            return custom_vjp(frame, eqn)
    return inlined(frame, eqn)


def _of_perturbed(
    eqn: JaxprEqn, values: Sequence[Any], perturbed: tuple[bool, ...]
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns an equation as a function of some of its inputs, and the values of these."""

    def fun(*given: Any) -> Any:
        of = iter(given)
        inputs = [next(of) if given else x for x, given in zip(values, perturbed, strict=True)]
        with context(eqn):
            return tuple(bind(eqn, inputs))

    return fun, tuple(itertools.compress(values, perturbed))


def _is_inexact(value: Any) -> bool:
    return jnp.issubdtype(value.dtype, np.inexact)


def _float0(aval: Any) -> Any:
    """Returns the derivative of what has none: integers, bools, keys."""
    return np.zeros(aval.shape, jax.dtypes.float0)


def _cotangent(cotangent: Any, aval: Any) -> Any:
    """Returns a cotangent in the dtype of its output, `None` for what is zero."""
    if not _is_inexact(aval) or isinstance(cotangent, SymbolicZero):
        return None
    return _as_aval(cotangent, aval)


def _zero(aval: Any) -> Any:
    """Returns a cotangent that is zero, as the function of `jax.vjp` takes it."""
    zero = _jax.zero_cotangent(aval)
    if zero is not None:
        return zero
    return blank(aval) if _is_inexact(aval) else _float0(aval)


def _as_aval(value: Any, aval: Any) -> Any:
    if isinstance(value, ToRound):
        value = value.wide
    return value if has_dtype(value, aval.dtype) else cast(value, aval.dtype)
