"""The rules for equations that hold programs: calls, loops, branches, derivative rules, devices.

Each of these programs is rewritten once for each combination of precisions that its inputs come
in, and takes the place of the one that the program has. What a loop carries and what branches
return keep the dtypes that the program declares. What a call returns, and what a `scan` stacks,
may be narrow.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, jaxpr_as_fun

from .atoms import (
    FLOAT32,
    Kind,
    Parameter,
    bind,
    cast,
    has_dtype,
    is_float32,
    is_full_precision,
    without_constants,
)
from .table import FLOAT32 as FLOAT32_OPERATIONS
from .transform import (
    SIMPLE_RULES,
    Autocast,
    Frame,
    Outputs,
    Rule,
    as_declared,
    as_written,
    is_cast,
    parameter,
)

# Kernels that are written for the precision that they have.
_KERNELS = {"pallas_call", "composite", "custom_partitioning", "core_map", "mpmd_map"}


def closed(jaxpr: Jaxpr | ClosedJaxpr) -> ClosedJaxpr:
    """Returns a jaxpr with its constants, of which an open one has none."""
    return jaxpr if isinstance(jaxpr, ClosedJaxpr) else ClosedJaxpr(jaxpr, ())


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


def programs(eqn: JaxprEqn) -> Iterator[Jaxpr | ClosedJaxpr]:
    """Returns the programs that an equation holds."""
    for value in eqn.params.values():
        for each in value if isinstance(value, tuple | list) else (value,):
            if isinstance(each, Jaxpr | ClosedJaxpr):
                yield each


def rewritten(
    frame: Frame,
    program: Jaxpr | ClosedJaxpr,
    args: Sequence[Any],
    kinds: Sequence[Kind],
    declared: int = 0,
    in_loop: bool = False,
) -> tuple[ClosedJaxpr, list[Kind]]:
    """Returns a program that an equation holds, rewritten, and the kinds of its outputs.

    Args:
      frame: the frame of the equation.
      program: the program.
      args: arrays of the precisions in which its inputs come.
      kinds: what is known of its inputs.
      declared: how many of its outputs, from the first, keep the dtypes that it declares.
      in_loop: whether it is the body of a loop.
    """
    autocast, in_loop = frame.autocast, in_loop or frame.in_loop
    jaxpr = closed(program).jaxpr
    halves = tuple(
        is_float32(var) and has_dtype(arg, autocast.dtype)
        for var, arg in zip(jaxpr.invars, args, strict=True)
    )
    known = autocast.rewritten.setdefault(program, {})
    key = (halves, tuple(kinds), declared, in_loop)
    if key not in known:
        out_kinds: list[Kind] = []

        def run(*args: Any) -> list[Any]:
            outputs, found = autocast.run(closed(program), args, kinds, in_loop)
            out_kinds[:] = found
            kept = zip(outputs[:declared], jaxpr.outvars, strict=False)
            return [*(as_declared(out, var) for out, var in kept), *outputs[declared:]]

        avals = [
            var.aval.update(dtype=autocast.dtype) if half else var.aval
            for var, half in zip(jaxpr.invars, halves, strict=True)
        ]
        known[key] = jax.make_jaxpr(run)(*avals), out_kinds
    return known[key]


def _narrow(eqn: JaxprEqn, outputs: Sequence[Any], dtype: Any) -> list[bool]:
    return [
        is_float32(var) and has_dtype(value, dtype)
        for var, value in zip(eqn.outvars, outputs, strict=True)
    ]


def _inputs(frame: Frame, eqn: JaxprEqn) -> tuple[list[Any], list[Kind]]:
    return [frame.read(a) for a in eqn.invars], [frame.kind(a) for a in eqn.invars]


def _is_unchanged(frame: Frame, eqn: JaxprEqn) -> bool:
    return not any(has_products(frame.autocast, each) for each in programs(eqn))


def _holds_refs(eqn: JaxprEqn) -> bool:
    return any(hasattr(atom.aval, "inner_aval") for atom in eqn.invars)


def call(frame: Frame, eqn: JaxprEqn) -> Outputs:
    """Evaluates `jit`: it calls a rewritten program."""
    unchanged = not any(map(frame.is_narrow, eqn.invars)) and _is_unchanged(frame, eqn)
    if unchanged:
        return as_written(frame, eqn)
    args, kinds = _inputs(frame, eqn)
    program, out_kinds = rewritten(frame, eqn.params["jaxpr"], args, kinds)
    outputs = bind(eqn, args, eqn.params | {"jaxpr": program})
    frame.kinds.update(zip(eqn.outvars, out_kinds, strict=True))
    return outputs, _narrow(eqn, outputs, frame.dtype)


def inlined(frame: Frame, eqn: JaxprEqn) -> Outputs:
    """Evaluates a call that means nothing but its program."""
    args, kinds = _inputs(frame, eqn)
    program = closed(eqn.params["call_jaxpr"])
    outputs, out_kinds = frame.autocast.run(program, args, kinds, frame.in_loop)
    frame.kinds.update(zip(eqn.outvars, out_kinds, strict=True))
    return outputs, _narrow(eqn, outputs, frame.dtype)


def remat(frame: Frame, eqn: JaxprEqn) -> Outputs:
    """Evaluates `jax.checkpoint`, with its policy."""
    if not any(map(frame.is_narrow, eqn.invars)) and _is_unchanged(frame, eqn):
        return as_written(frame, eqn)
    args, kinds = _inputs(frame, eqn)
    program, _ = rewritten(frame, eqn.params["jaxpr"], args, kinds)
    jaxpr, consts = without_constants(program)
    outputs = bind(eqn, [*consts, *args], eqn.params | {"jaxpr": jaxpr})
    return outputs, _narrow(eqn, outputs, frame.dtype)


def scan(frame: Frame, eqn: JaxprEqn) -> Outputs:
    """Evaluates `scan`. What it carries keeps its dtype; what it stacks need not."""
    if _holds_refs(eqn) or _is_unchanged(frame, eqn):
        return noted(frame, eqn)
    consts, carries, body = (eqn.params[name] for name in ("num_consts", "num_carry", "jaxpr"))
    args, kinds = _inputs(frame, eqn)
    last = consts + carries
    for i, var in enumerate(body.jaxpr.invars):
        if consts <= i < last:
            args[i], kinds[i] = as_declared(args[i], var), None
        elif i >= last and isinstance(kinds[i], Parameter):
            kinds[i] = parameter(var)  # a slice of it
    program, _ = rewritten(frame, body, args, kinds, declared=carries, in_loop=True)
    outputs = bind(eqn, args, eqn.params | {"jaxpr": program})
    return outputs, _narrow(eqn, outputs, frame.dtype)


def while_loop(frame: Frame, eqn: JaxprEqn) -> Outputs:
    """Evaluates `while`. What it carries keeps its dtype."""
    if _holds_refs(eqn) or _is_unchanged(frame, eqn):
        return noted(frame, eqn)
    tested, done = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    test, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
    args, kinds = _inputs(frame, eqn)
    first = tested + done
    variables = body.jaxpr.invars[done:]
    args[first:] = [as_declared(*each) for each in zip(args[first:], variables, strict=True)]
    kinds[first:] = [None] * len(variables)
    test, _ = rewritten(
        frame, test, args[:tested] + args[first:], kinds[:tested] + kinds[first:], declared=1
    )
    body, _ = rewritten(
        frame, body, args[tested:], kinds[tested:], declared=len(variables), in_loop=True
    )
    outputs = bind(eqn, args, eqn.params | {"cond_jaxpr": test, "body_jaxpr": body})
    return outputs, (False,) * len(outputs)


def cond(frame: Frame, eqn: JaxprEqn) -> Outputs:
    """Evaluates `cond` and `switch`. The branches return the dtypes that they declare."""
    if _holds_refs(eqn) or _is_unchanged(frame, eqn):
        return noted(frame, eqn)
    args, kinds = _inputs(frame, eqn)
    branches = tuple(
        rewritten(frame, branch, args[1:], kinds[1:], declared=len(eqn.outvars))[0]
        for branch in eqn.params["branches"]
    )
    outputs = bind(eqn, args, eqn.params | {"branches": branches})
    return outputs, (False,) * len(outputs)


def shard_map(frame: Frame, eqn: JaxprEqn) -> Outputs:
    """Evaluates `shard_map`: the program of each device is rewritten."""
    if _is_unchanged(frame, eqn):
        return as_written(frame, eqn)
    args, kinds = _inputs(frame, eqn)
    params, out_narrow = eqn.params, []

    def run(*args: Any) -> Any:
        outputs, _ = frame.autocast.run(closed(params["jaxpr"]), args, kinds, frame.in_loop)
        out_narrow[:] = _narrow(eqn, outputs, frame.dtype)
        return tuple(outputs)

    axes = params["newly_manual_axes" if "newly_manual_axes" in params else "manual_axes"]
    mapped = jax.shard_map(
        run,
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=tuple(params["out_specs"]),
        axis_names=set(axes),
        check_vma=params["check_vma"],
    )
    return mapped(*args), out_narrow


def pmap(frame: Frame, eqn: JaxprEqn) -> Outputs:
    """Evaluates `pmap`, where it is an equation of its own: in older versions of JAX."""
    if _is_unchanged(frame, eqn):
        return as_written(frame, eqn)
    args, kinds = _inputs(frame, eqn)
    params, out_narrow = eqn.params, []

    def run(*args: Any) -> Any:
        outputs, _ = frame.autocast.run(closed(params["call_jaxpr"]), args, kinds)
        out_narrow[:] = _narrow(eqn, outputs, frame.dtype)
        return tuple(outputs)

    mapped = jax.pmap(
        run,
        params["axis_name"],
        in_axes=params["in_axes"],
        out_axes=params["out_axes"],
        devices=params["devices"],
        backend=params["backend"],
        axis_size=params["axis_size"],
    )
    return mapped(*args), out_narrow


def custom_jvp(frame: Frame, eqn: JaxprEqn) -> Outputs:
    """Evaluates a `custom_jvp` function, and keeps its rule."""
    if not any(map(frame.is_narrow, eqn.invars)) and _is_unchanged(frame, eqn):
        return as_written(frame, eqn)
    args, kinds = _inputs(frame, eqn)
    autocast, rule, consts = frame.autocast, eqn.params["jvp_jaxpr_fun"], eqn.params["num_consts"]
    program, out_kinds = rewritten(frame, eqn.params["call_jaxpr"], args, kinds)

    @jax.custom_jvp
    def fun(*args: Any) -> Any:
        return tuple(jaxpr_as_fun(program)(*args))

    def jvp(primals: Any, tangents: Any) -> Any:
        tangents = tangents[consts:]
        is_zero = [isinstance(tangent, SymbolicZero) for tangent in tangents]
        jaxpr, rule_consts, out_is_zero = rule.call_wrapped(*is_zero)
        nonzero = [t for t, zero in zip(tangents, is_zero, strict=True) if not zero]
        inputs = [*primals[consts:], *nonzero]
        known = [*kinds[consts:], *[None] * len(nonzero)]
        outputs, _ = autocast.run(ClosedJaxpr(jaxpr, rule_consts), inputs, known, frame.in_loop)
        size, avals = len(out_is_zero), program.out_avals
        nonzero_outputs = iter(outputs[size:])
        return tuple(map(_as_aval, outputs[:size], avals)), tuple(
            _zero_tangent(aval) if zero else _as_aval(next(nonzero_outputs), aval)
            for aval, zero in zip(avals, out_is_zero, strict=True)
        )

    fun.defjvp(jvp, symbolic_zeros=eqn.params["symbolic_zeros"])
    outputs = fun(*args)
    frame.kinds.update(zip(eqn.outvars, out_kinds, strict=True))
    return outputs, _narrow(eqn, outputs, frame.dtype)


def _as_aval(value: Any, aval: Any) -> Any:
    return value if has_dtype(value, aval.dtype) else cast(value, aval.dtype)


def _zero_tangent(aval: Any) -> Any:
    if not jax.numpy.issubdtype(aval.dtype, np.inexact):
        return np.zeros(aval.shape, jax.dtypes.float0)
    return jax.numpy.zeros(aval.shape, aval.dtype)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["values"], meta_fields=["types"])
@dataclasses.dataclass(frozen=True)
class _Residuals:
    """What a forward pass keeps, and the dtypes that the program declares for it."""

    values: Any
    types: tuple[Any, ...]


def custom_vjp(frame: Frame, eqn: JaxprEqn) -> Outputs:
    """Evaluates a `custom_vjp` function, and keeps its rule."""
    if not any(map(frame.is_narrow, eqn.invars)) and _is_unchanged(frame, eqn):
        return as_written(frame, eqn)
    args, kinds = _inputs(frame, eqn)
    params, autocast = eqn.params, frame.autocast
    symbolic = params["symbolic_zeros"]
    consts, thunk, backward = (params[k] for k in ("num_consts", "fwd_jaxpr_thunk", "bwd"))
    program, out_kinds = rewritten(frame, params["call_jaxpr"], args, kinds)
    declared = params["call_jaxpr"]
    in_avals, in_declared, out_declared = program.in_avals, declared.in_avals, declared.out_avals

    @jax.custom_vjp
    def fun(*args: Any) -> Any:
        return tuple(jaxpr_as_fun(program)(*args))

    def fwd(*given: Any) -> Any:
        values, is_perturbed = list(given[consts:]), [True] * (len(given) - consts)
        if symbolic:
            is_perturbed = [each.perturbed for each in values]
            values = [each.value for each in values]
        jaxpr, fwd_consts = thunk.call_wrapped(*is_perturbed)
        forward = ClosedJaxpr(jaxpr, fwd_consts)
        outputs, _ = autocast.run(forward, values, kinds[consts:], frame.in_loop)
        size = len(outputs) - len(out_declared)
        primals = tuple(map(_as_aval, outputs[size:], program.out_avals))
        kept = zip(outputs[:size], jaxpr.outvars, strict=False)
        kept = ((value, var.aval) for value, var in kept)
        # A residual that is an input is not an output of the jaxpr: JAX says which one it is.
        inputs = [(value, aval) for value, aval in zip(values, in_declared[consts:], strict=True)]
        residuals = [
            next(kept) if index is None else inputs[index - consts]
            for index in params["out_trees"]()[2]
        ]
        types = tuple(getattr(aval, "dtype", None) for _, aval in residuals)
        return primals, _Residuals([value for value, _ in residuals], types)

    def bwd(residuals: Any, cotangents: Any) -> Any:
        pairs = zip(residuals.values, residuals.types, strict=True)
        values = [cast(v, t) if getattr(v, "dtype", t) != t else v for v, t in pairs]
        cotangents = [
            SymbolicZero(aval.to_tangent_aval())
            if isinstance(ct, SymbolicZero)
            else (cast(ct, aval.dtype) if has_dtype(ct, autocast.dtype) else ct)
            for ct, aval in zip(cotangents, out_declared, strict=True)
        ]

        def pull(*given: Any) -> list[Any]:
            gradients = getattr(backward, "call_wrapped", backward)(*given)
            return [None if type(g).__name__ in _ZEROS else g for g in gradients]

        gradients = autocast.call(pull, (*values, *cotangents), {})
        return *[None] * consts, *(
            None if g is None else (_as_aval(g, aval) if has_dtype(g, FLOAT32) else g)
            for g, aval in zip(gradients, in_avals[consts:], strict=True)
        )

    fun.defvjp(fwd, bwd, symbolic_zeros=symbolic)
    outputs = fun(*args)
    frame.kinds.update(zip(eqn.outvars, out_kinds, strict=True))
    return outputs, _narrow(eqn, outputs, frame.dtype)


# What stands for a gradient of zero, of which JAX has two types.
_ZEROS = ("Zero", "SymbolicZero")


def noted(frame: Frame, eqn: JaxprEqn) -> Outputs:
    """Evaluates an equation as it is written, and warns if there are products in it."""
    name = eqn.primitive.name
    if name not in _KERNELS and not _is_unchanged(frame, eqn):
        frame.autocast.warn(name)
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
    "shard_map": shard_map,
    "xla_pmap": pmap,
    "custom_jvp_call": custom_jvp,
    "custom_vjp_call": custom_vjp,
}
