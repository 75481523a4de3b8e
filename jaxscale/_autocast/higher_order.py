"""The rules for equations that hold programs: calls, loops, branches, devices.

Each of these programs is rewritten once for each combination of precisions that its inputs come
in, and takes the place of the one that the program has. What a loop carries and what branches
return keep the dtypes that the program declares; a `scan` with `half_carries` may carry narrow
values. What a call returns, and what a `scan` stacks, may be narrow.
"""

from collections.abc import Sequence
from typing import Any

import jax

from .. import _jax
from .._jax import (
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    bind,
    cast,
    closed,
    programs,
    with_programs,
)
from .frame import Frame
from .readers import half_carries, has_products
from .recompute import Link
from .rules import as_written, chained, is_chained_call
from .values import Kind, Parameter, as_declared, has_dtype, is_float32, parameter


def rewrite(
    frame: Frame,
    program: Jaxpr | ClosedJaxpr,
    args: Sequence[Any],
    kinds: Sequence[Kind],
    fixed: Sequence[bool] = (),
    in_loop: bool = False,
    wanted: Sequence[bool] = (),
) -> tuple[ClosedJaxpr, list[Kind]]:
    """Returns a program that an equation holds, rewritten, and the kinds of its outputs.

    In the place of each link it takes the arrays that the link starts from. `fixed` says for each
    of its first outputs, whose dtypes are fixed, whether that is half precision, and not what it
    declares; the others come in the precision they were computed in. `wanted` is as in
    `rounded_reads`.
    """
    autocast, in_loop = frame.autocast, in_loop or frame.in_loop
    jaxpr = closed(program).jaxpr
    pairs = list(zip(jaxpr.invars, args, strict=True))
    halves = tuple(is_float32(var) and has_dtype(arg, autocast.dtype) for var, arg in pairs)
    # A link belongs to one place of one program.
    has_links = any(isinstance(arg, Link) for arg in args)
    known = {} if has_links else autocast.rewritten.setdefault(program, {})
    key = (halves, tuple(kinds), in_loop, tuple(wanted), tuple(fixed), _jax.form_asked_for())
    if key in known:
        return known[key]
    out_kinds: list[Kind] = []
    tree = jax.tree.structure(list(args))

    def run(*leaves: Any) -> list[Any]:
        outputs, found = autocast.run(
            closed(program), jax.tree.unflatten(tree, leaves), kinds, in_loop, wanted
        )
        out_kinds[:] = found
        for i, is_half in enumerate(fixed):
            value, var = outputs[i], jaxpr.outvars[i]
            outputs[i] = cast(value, autocast.dtype) if is_half else as_declared(value, var)
        return outputs

    avals: list[Any] = []
    for (var, arg), is_half in zip(pairs, halves, strict=True):
        if isinstance(arg, Link):
            avals += map(jax.typeof, jax.tree.leaves(arg))
        else:
            avals.append(var.aval.update(dtype=autocast.dtype) if is_half else var.aval)
    known[key] = jax.make_jaxpr(run)(*avals), out_kinds
    return known[key]


def read_inputs(
    frame: Frame, eqn: JaxprEqn, with_links: bool = False
) -> tuple[list[Any], list[Kind]]:
    """Returns the inputs of an equation, maybe with links in the place of values, and kinds."""
    links = [frame.link(atom) if with_links else None for atom in eqn.invars]
    args = [link or frame.read(atom) for link, atom in zip(links, eqn.invars, strict=True)]
    return args, [frame.kind(atom) for atom in eqn.invars]


def _wanted(frame: Frame, eqn: JaxprEqn) -> list[bool]:
    return [var in frame.only_half for var in eqn.outvars]


def _is_as_written(frame: Frame, eqn: JaxprEqn) -> bool:
    return not has_products(eqn) and not any(
        frame.is_narrow(atom) or frame.link(atom) for atom in eqn.invars
    )


def _is_left(eqn: JaxprEqn) -> bool:
    return any(map(_jax.is_ref, eqn.invars)) or not has_products(eqn)


def call(frame: Frame, eqn: JaxprEqn) -> Sequence[Any]:
    """Evaluates `jit`: it calls a rewritten program."""
    called = _jax.callee(eqn)
    if is_chained_call(frame, eqn):
        return chained(frame, eqn)
    if _is_as_written(frame, eqn):
        return as_written(frame, eqn)
    # What a chain starts from has no sharding or layout of its own.
    args, kinds = read_inputs(frame, eqn, with_links=not _jax.is_placed(eqn))
    program, out_kinds = rewrite(frame, called, args, kinds)
    frame.kinds.update(zip(eqn.outvars, out_kinds, strict=True))
    numbers = [len(jax.tree.leaves(arg)) for arg in args]
    params = _jax.with_inputs(with_programs(eqn, [program]), numbers)
    return bind(eqn, jax.tree.leaves(args), params)


def inlined(frame: Frame, eqn: JaxprEqn) -> Sequence[Any]:
    """Evaluates a call that means nothing but its program."""
    args, kinds = read_inputs(frame, eqn, with_links=True)
    run, wanted = frame.autocast.run, _wanted(frame, eqn)
    outputs, out_kinds = run(_jax.callee(eqn), args, kinds, frame.in_loop, wanted)
    frame.kinds.update(zip(eqn.outvars, out_kinds, strict=True))
    return outputs


def remat(frame: Frame, eqn: JaxprEqn) -> Sequence[Any]:
    """Evaluates `jax.checkpoint`, with its policy."""
    called = _jax.callee(eqn)
    if _is_as_written(frame, eqn):
        return as_written(frame, eqn)
    args, kinds = read_inputs(frame, eqn, with_links=True)
    program, _ = rewrite(frame, called, args, kinds, wanted=_wanted(frame, eqn))
    jaxpr, consts = _jax.without_constants(program)
    numbers = [len(jax.tree.leaves(arg)) for arg in args]
    params = _jax.with_rematted(eqn, jaxpr, numbers)
    return bind(eqn, [*consts, *jax.tree.leaves(args)], params)


def scan(frame: Frame, eqn: JaxprEqn) -> Sequence[Any]:
    """Evaluates `scan`. What it carries keeps its dtype by default; what it stacks need not."""
    loop = _jax.scan(eqn)
    if _is_left(eqn):
        return as_written(frame, eqn)
    halved = half_carries(loop) if frame.autocast.half_carries else [False] * loop.carries
    args, kinds = read_inputs(frame, eqn)
    last = loop.consts + loop.carries
    for i, var in enumerate(loop.body.jaxpr.invars):
        if loop.consts <= i < last:
            is_half = halved[i - loop.consts]
            args[i] = frame.half(eqn.invars[i]) if is_half else as_declared(args[i], var)
            kinds[i] = None
        elif i >= last and isinstance(kinds[i], Parameter):
            kinds[i] = parameter(var)  # a slice of it
    wanted = [*halved, *_wanted(frame, eqn)[loop.carries :]]
    program, _ = rewrite(frame, loop.body, args, kinds, halved, in_loop=True, wanted=wanted)
    return bind(eqn, args, with_programs(eqn, [program]))


def while_loop(frame: Frame, eqn: JaxprEqn) -> Sequence[Any]:
    """Evaluates `while`. What it carries keeps its dtype."""
    loop = _jax.while_loop(eqn)
    if _is_left(eqn):
        return as_written(frame, eqn)
    args, kinds = read_inputs(frame, eqn)
    tested = loop.test_consts
    first = tested + loop.body_consts
    variables = loop.body.jaxpr.invars[loop.body_consts :]
    args[first:] = map(as_declared, args[first:], variables)
    kinds[first:] = [None] * len(variables)
    test, _ = rewrite(
        frame, loop.test, args[:tested] + args[first:], kinds[:tested] + kinds[first:], [False]
    )
    carried = [False] * len(variables)
    body, _ = rewrite(frame, loop.body, args[tested:], kinds[tested:], carried, in_loop=True)
    in_order = [test if closed(own) is loop.test else body for own in programs(eqn)]
    return bind(eqn, args, with_programs(eqn, in_order))


def cond(frame: Frame, eqn: JaxprEqn) -> Sequence[Any]:
    """Evaluates `cond` and `switch`. The branches return the dtypes that they declare."""
    branches = _jax.branches(eqn)
    if _is_left(eqn):
        return as_written(frame, eqn)
    args, kinds = read_inputs(frame, eqn)
    fixed = [False] * len(eqn.outvars)
    rewritten = [rewrite(frame, branch, args[1:], kinds[1:], fixed)[0] for branch in branches]
    return bind(eqn, args, with_programs(eqn, rewritten))


def mapped(frame: Frame, eqn: JaxprEqn) -> Sequence[Any]:
    """Evaluates `shard_map` and `pmap`: the program of each device is rewritten."""
    each = _jax.mapped(eqn)
    if not has_products(eqn):
        return as_written(frame, eqn)
    args, kinds = read_inputs(frame, eqn)

    def run(*args: Any) -> Any:
        return tuple(frame.autocast.run(each.program, args, kinds, frame.in_loop)[0])

    return each.map(run)(*args)
