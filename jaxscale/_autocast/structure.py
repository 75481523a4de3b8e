"""The rules for equations that hold programs: calls, loops, branches, derivative rules, devices.

Each of these programs is rewritten once for each combination of precisions that its inputs come
in, and takes the place of the one that the program has. What a loop carries and what branches
return keep the dtypes that the program declares. What a call returns, and what a `scan` stacks,
may be narrow.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from .. import _jax
from .._jax import (
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    bind,
    cast,
    closed,
    context,
    is_ref,
    jaxpr_as_fun,
    programs,
    with_programs,
    without_constants,
)
from .._tree import blank
from .atoms import Kind, Parameter, has_dtype, is_float32, is_full_precision
from .chains import Link, parts
from .frame import Frame, Outputs, Rule, as_written, atom_in, chained, is_chained_call
from .products import is_cast
from .table import FLOAT32 as FLOAT32_OPERATIONS
from .transform import SIMPLE_RULES, Autocast, as_declared, parameter

# Kernels that are written for the precision that they have.
_KERNELS = {"pallas_call", "composite", "custom_partitioning", "core_map", "mpmd_map"}


def has_products(autocast: Autocast, program: Jaxpr | ClosedJaxpr) -> bool:
    """Returns whether there is anything in a program that `autocast` casts on its own account."""
    jaxpr = closed(program).jaxpr
    if jaxpr not in autocast.with_products:
        autocast.with_products[jaxpr] = any(
            is_cast(eqn) or any(has_products(autocast, inner) for inner in _entered(eqn))
            for eqn in jaxpr.eqns
            if not is_full_precision(eqn)
        )
    return autocast.with_products[jaxpr]


def _entered(eqn: JaxprEqn) -> Iterator[Jaxpr | ClosedJaxpr]:
    name = eqn.primitive.name
    is_left = name in _KERNELS or name in FLOAT32_OPERATIONS
    return iter(()) if is_left else programs(eqn)


def rewritten(
    frame: Frame,
    program: Jaxpr | ClosedJaxpr,
    args: Sequence[Any],
    kinds: Sequence[Kind],
    declared: int = 0,
    in_loop: bool = False,
    wanted: Sequence[bool] = (),
) -> tuple[ClosedJaxpr, list[Kind]]:
    """Returns a program that an equation holds, rewritten, and the kinds of its outputs.

    In the place of each link it takes the arrays that the link starts from.

    Args:
      frame: the frame of the equation.
      program: the program.
      args: arrays of the precisions in which its inputs come, or links.
      kinds: what is known of its inputs.
      declared: how many of its outputs, from the first, keep the dtypes that it declares.
      in_loop: whether it is the body of a loop.
      wanted: for each output whether nothing is lost if it is rounded to half precision.
    """
    autocast, in_loop = frame.autocast, in_loop or frame.in_loop
    jaxpr = closed(program).jaxpr
    halves = tuple(
        is_float32(var) and has_dtype(arg, autocast.dtype)
        for var, arg in zip(jaxpr.invars, args, strict=True)
    )
    known = autocast.rewritten.setdefault(program, {})
    key = (halves, tuple(kinds), declared, in_loop, tuple(wanted))
    opened = [parts(arg) if isinstance(arg, Link) else None for arg in args]
    if key in known and not any(opened):
        return known[key]
    out_kinds: list[Kind] = []

    def run(*leaves: Any) -> list[Any]:
        given = iter(leaves)
        args = [
            each[1]([*itertools.islice(given, len(each[0]))]) if each else next(given)
            for each in opened
        ]
        outputs, found = autocast.run(closed(program), args, kinds, in_loop, wanted)
        out_kinds[:] = found
        kept = zip(outputs[:declared], jaxpr.outvars, strict=False)
        return [*(as_declared(out, var) for out, var in kept), *outputs[declared:]]

    avals = [
        aval
        for var, half, each in zip(jaxpr.invars, halves, opened, strict=True)
        for aval in (
            map(jax.typeof, each[0])
            if each
            else [var.aval.update(dtype=autocast.dtype) if half else var.aval]
        )
    ]
    result = jax.make_jaxpr(run)(*avals), out_kinds
    if not any(opened):  # a link belongs to one place of one program
        known[key] = result
    return result


def _narrow(eqn: JaxprEqn, outputs: Sequence[Any], dtype: Any) -> list[bool]:
    return [
        is_float32(var) and has_dtype(value, dtype)
        for var, value in zip(eqn.outvars, outputs, strict=True)
    ]


def _inputs(frame: Frame, eqn: JaxprEqn) -> tuple[list[Any], list[Kind]]:
    return [frame.read(a) for a in eqn.invars], [frame.kind(a) for a in eqn.invars]


def _links(frame: Frame, eqn: JaxprEqn) -> tuple[list[Any], list[Kind]]:
    links = frame.links
    args = [links[a] if atom_in(a, links) else frame.read(a) for a in eqn.invars]
    return args, [frame.kind(a) for a in eqn.invars]


def _arrays(arg: Any) -> list[Any]:
    return parts(arg)[0] if isinstance(arg, Link) else [arg]


def _wanted(frame: Frame, eqn: JaxprEqn) -> list[bool]:
    return [var in frame.only_half for var in eqn.outvars]


def _is_as_written(frame: Frame, eqn: JaxprEqn) -> bool:
    entered = any(frame.is_narrow(a) or atom_in(a, frame.links) for a in eqn.invars)
    return not entered and _is_unchanged(frame, eqn)


def _is_unchanged(frame: Frame, eqn: JaxprEqn) -> bool:
    return not any(has_products(frame.autocast, each) for each in programs(eqn))


def _holds_refs(eqn: JaxprEqn) -> bool:
    return any(map(is_ref, eqn.invars))


def call(frame: Frame, eqn: JaxprEqn) -> Outputs:
    """Evaluates `jit`: it calls a rewritten program."""
    called = _jax.callee(eqn)
    if is_chained_call(frame, eqn):
        return chained(frame, eqn)
    if _is_as_written(frame, eqn):
        return as_written(frame, eqn)
    # What a chain starts from has no sharding or layout of its own.
    args, kinds = (_inputs if _jax.is_placed(eqn) else _links)(frame, eqn)
    program, out_kinds = rewritten(frame, called, args, kinds)
    arrays = [*map(_arrays, args)]
    params = _jax.with_inputs(with_programs(eqn, [program]), [*map(len, arrays)])
    outputs = bind(eqn, [*itertools.chain(*arrays)], params)
    frame.kinds.update(zip(eqn.outvars, out_kinds, strict=True))
    return outputs, _narrow(eqn, outputs, frame.dtype)


def inlined(frame: Frame, eqn: JaxprEqn) -> Outputs:
    """Evaluates a call that means nothing but its program."""
    args, kinds = _links(frame, eqn)
    run, wanted = frame.autocast.run, _wanted(frame, eqn)
    outputs, out_kinds = run(_jax.callee(eqn), args, kinds, frame.in_loop, wanted)
    frame.kinds.update(zip(eqn.outvars, out_kinds, strict=True))
    return outputs, _narrow(eqn, outputs, frame.dtype)


def remat(frame: Frame, eqn: JaxprEqn) -> Outputs:
    """Evaluates `jax.checkpoint`, with its policy."""
    called = _jax.callee(eqn)
    if _is_as_written(frame, eqn):
        return as_written(frame, eqn)
    args, kinds = _links(frame, eqn)
    program, _ = rewritten(frame, called, args, kinds, wanted=_wanted(frame, eqn))
    jaxpr, consts = without_constants(program)
    arrays = itertools.chain(*map(_arrays, args))
    outputs = bind(eqn, [*consts, *arrays], with_programs(eqn, [jaxpr]))
    return outputs, _narrow(eqn, outputs, frame.dtype)


def scan(frame: Frame, eqn: JaxprEqn) -> Outputs:
    """Evaluates `scan`. What it carries keeps its dtype; what it stacks need not."""
    loop = _jax.scan(eqn)
    if _holds_refs(eqn) or _is_unchanged(frame, eqn):
        return noted(frame, eqn)
    args, kinds = _inputs(frame, eqn)
    last = loop.consts + loop.carries
    for i, var in enumerate(loop.body.jaxpr.invars):
        if loop.consts <= i < last:
            args[i], kinds[i] = as_declared(args[i], var), None
        elif i >= last and isinstance(kinds[i], Parameter):
            kinds[i] = parameter(var)  # a slice of it
    program, _ = rewritten(
        *(frame, loop.body, args, kinds, loop.carries), in_loop=True, wanted=_wanted(frame, eqn)
    )
    outputs = bind(eqn, args, with_programs(eqn, [program]))
    return outputs, _narrow(eqn, outputs, frame.dtype)


def while_loop(frame: Frame, eqn: JaxprEqn) -> Outputs:
    """Evaluates `while`. What it carries keeps its dtype."""
    loop = _jax.while_loop(eqn)
    if _holds_refs(eqn) or _is_unchanged(frame, eqn):
        return noted(frame, eqn)
    args, kinds = _inputs(frame, eqn)
    tested = loop.test_consts
    first = tested + loop.body_consts
    variables = loop.body.jaxpr.invars[loop.body_consts :]
    args[first:] = [as_declared(*each) for each in zip(args[first:], variables, strict=True)]
    kinds[first:] = [None] * len(variables)
    test, _ = rewritten(
        frame, loop.test, args[:tested] + args[first:], kinds[:tested] + kinds[first:], declared=1
    )
    body, _ = rewritten(
        frame, loop.body, args[tested:], kinds[tested:], declared=len(variables), in_loop=True
    )
    in_order = [test if closed(own) is loop.test else body for own in programs(eqn)]
    outputs = bind(eqn, args, with_programs(eqn, in_order))
    return outputs, (False,) * len(outputs)


def cond(frame: Frame, eqn: JaxprEqn) -> Outputs:
    """Evaluates `cond` and `switch`. The branches return the dtypes that they declare."""
    branches = _jax.branches(eqn)
    if _holds_refs(eqn) or _is_unchanged(frame, eqn):
        return noted(frame, eqn)
    args, kinds = _inputs(frame, eqn)
    branches = [
        rewritten(frame, branch, args[1:], kinds[1:], declared=len(eqn.outvars))[0]
        for branch in branches
    ]
    outputs = bind(eqn, args, with_programs(eqn, branches))
    return outputs, (False,) * len(outputs)


def mapped(frame: Frame, eqn: JaxprEqn) -> Outputs:
    """Evaluates `shard_map` and `pmap`: the program of each device is rewritten."""
    each = _jax.mapped(eqn)
    if _is_unchanged(frame, eqn):
        return as_written(frame, eqn)
    (args, kinds), out_narrow = _inputs(frame, eqn), []

    def run(*args: Any) -> Any:
        outputs, _ = frame.autocast.run(each.program, args, kinds, frame.in_loop)
        out_narrow[:] = _narrow(eqn, outputs, frame.dtype)
        return tuple(outputs)

    return each.map(run)(*args), out_narrow


# Functions with a derivative rule of their own. What JAX does to derive the equation as it is
# written is traced by `jax.jvp` or `jax.vjp`, and then runs like any other program: nothing here
# depends on how JAX keeps a rule. The new rules do not hold the frame, whose arrays would live as
# long as they do.


def custom_jvp(frame: Frame, eqn: JaxprEqn) -> Outputs:
    """Evaluates a `custom_jvp` function, and keeps its rule."""
    autocast, in_loop, declared = frame.autocast, frame.in_loop, _jax.callee(eqn)
    if is_chained_call(frame, eqn):
        return chained(frame, eqn)
    if not any(map(frame.is_narrow, eqn.invars)) and _is_unchanged(frame, eqn):
        return as_written(frame, eqn)
    args, kinds = _inputs(frame, eqn)
    program, out_kinds = rewritten(frame, declared, args, kinds)

    @functools.cache
    def derived(perturbed: tuple[bool, ...]) -> ClosedJaxpr:
        """Returns a program of values and tangents, given which inputs have a tangent."""

        def derive(values: Any, tangents: Any) -> Any:
            fun, given = _of_perturbed(eqn, values, perturbed)
            outputs, derivatives = jax.jvp(fun, given, tangents)
            return outputs, [each for each in derivatives if _is_inexact(each)]

        tangents = itertools.compress(map(_jax.tangent_type, declared.in_avals), perturbed)
        return jax.make_jaxpr(derive)(tuple(declared.in_avals), tuple(tangents))

    @jax.custom_jvp
    def fun(*args: Any) -> Any:
        return tuple(jaxpr_as_fun(program)(*args))

    def jvp(primals: Any, tangents: Any) -> Any:
        perturbed = tuple(not isinstance(each, SymbolicZero) for each in tangents)
        given = list(itertools.compress(tangents, perturbed))
        known = [*kinds, *[None] * len(given)]
        outputs, _ = autocast.run(derived(perturbed), [*primals, *given], known, in_loop)
        avals = program.out_avals
        derivatives = iter(outputs[len(avals) :])
        return tuple(map(_as_aval, outputs, avals)), tuple(
            _as_aval(next(derivatives), aval) if _is_inexact(aval) else _float0(aval)
            for aval in avals
        )

    fun.defjvp(jvp, symbolic_zeros=True)
    outputs = fun(*args)
    frame.kinds.update(zip(eqn.outvars, out_kinds, strict=True))
    return outputs, _narrow(eqn, outputs, frame.dtype)


def custom_vjp(frame: Frame, eqn: JaxprEqn) -> Outputs:
    """Evaluates a `custom_vjp` function, and keeps its rule."""
    autocast, in_loop, declared = frame.autocast, frame.in_loop, _jax.callee(eqn)
    if not any(map(frame.is_narrow, eqn.invars)) and _is_unchanged(frame, eqn):
        return as_written(frame, eqn)
    args, kinds = _inputs(frame, eqn)
    program, out_kinds = rewritten(frame, declared, args, kinds)
    size = len(declared.out_avals)

    @functools.cache
    def derived(perturbed: tuple[bool, ...]) -> tuple[ClosedJaxpr, Any]:
        """Returns a program that gives outputs and residuals, and the tree of the residuals."""
        trees = []

        def derive(*values: Any) -> Any:
            fun, given = _of_perturbed(eqn, values, perturbed)
            outputs, pullback = jax.vjp(fun, *given)
            residuals, tree = jax.tree.flatten(pullback)
            trees.append(tree)
            return [*outputs, *residuals]

        return jax.make_jaxpr(derive)(*declared.in_avals), trees[0]

    @jax.custom_vjp
    def fun(*args: Any) -> Any:
        return tuple(jaxpr_as_fun(program)(*args))

    def fwd(*given: Any) -> Any:
        perturbed = tuple(each.perturbed and _is_inexact(each.value) for each in given)
        forward, _ = derived(perturbed)
        outputs, _ = autocast.run(forward, [each.value for each in given], kinds, in_loop)
        primals = tuple(map(_as_aval, outputs, program.out_avals))
        return primals, _Residuals(outputs[size:], perturbed)

    def bwd(residuals: Any, cotangents: Any) -> Any:
        forward, tree = derived(residuals.perturbed)
        values = list(map(_as_aval, residuals.values, forward.out_avals[size:]))
        cotangents = tuple(map(_cotangent, cotangents, declared.out_avals))

        def pull(values: Any, cotangents: Any) -> Any:
            return tree.unflatten(values)(cotangents)

        gradients = iter(autocast.call(pull, (values, cotangents), {}))
        return tuple(
            _as_aval(next(gradients), aval) if given else None
            for given, aval in zip(residuals.perturbed, program.in_avals, strict=True)
        )

    fun.defvjp(fwd, bwd, symbolic_zeros=True)
    outputs = fun(*args)
    frame.kinds.update(zip(eqn.outvars, out_kinds, strict=True))
    return outputs, _narrow(eqn, outputs, frame.dtype)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["values"], meta_fields=["perturbed"]
)
@dataclasses.dataclass(frozen=True)
class _Residuals:
    """What a forward pass keeps, and by which inputs something is differentiated."""

    values: Any
    perturbed: tuple[bool, ...]


def _of_perturbed(
    eqn: JaxprEqn, values: Sequence[Any], perturbed: tuple[bool, ...]
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns an equation as a function of some of its inputs, and the values of these."""

    def fun(*given: Any) -> Any:
        of = iter(given)
        pairs = zip(values, perturbed, strict=True)
        with context(eqn):
            return tuple(bind(eqn, [next(of) if is_given else value for value, is_given in pairs]))

    return fun, tuple(itertools.compress(values, perturbed))


def _is_inexact(value: Any) -> bool:
    return jnp.issubdtype(value.dtype, np.inexact)


def _float0(aval: Any) -> Any:
    """Returns the derivative of what has none: integers, bools, keys."""
    return np.zeros(aval.shape, jax.dtypes.float0)


def _cotangent(cotangent: Any, aval: Any) -> Any:
    if not _is_inexact(aval):
        return _float0(aval)
    return blank(aval) if isinstance(cotangent, SymbolicZero) else _as_aval(cotangent, aval)


def _as_aval(value: Any, aval: Any) -> Any:
    return value if has_dtype(value, aval.dtype) else cast(value, aval.dtype)


def noted(frame: Frame, eqn: JaxprEqn, reason: str = "`autocast` has no rule for it") -> Outputs:
    """Evaluates an equation as it is written, and warns if there are products in it."""
    name = eqn.primitive.name
    # A rule that found no program knows nothing of what is in it.
    is_unknown = name in RULES and not any(programs(eqn))
    if name not in _KERNELS and (is_unknown or not _is_unchanged(frame, eqn)):
        frame.autocast.warn(name, reason)
    return as_written(frame, eqn)


RULES: dict[str, Rule] = SIMPLE_RULES | {
    "jit": call,
    "pjit": call,
    "closed_call": inlined,
    "core_call": inlined,
    "call": inlined,
    "remat2": remat,
    "checkpoint": remat,
    "remat": remat,
    "scan": scan,
    "while": while_loop,
    "cond": cond,
    "shard_map": mapped,
    "xla_pmap": mapped,
    "custom_jvp_call": custom_jvp,
    "custom_vjp_call": custom_vjp,
}
