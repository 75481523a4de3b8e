"""The rules for equations that hold programs: calls, loops, branches, devices.

Each of these programs is rewritten once for each combination of precisions that its inputs come
in, and takes the place of the one that the program has. What a loop carries and what branches
return keep the dtypes that the program declares; a `scan` with `half_carries` may carry narrow
values. What a call returns, and what a `scan` stacks, may be narrow.
"""

import itertools
from collections.abc import Iterator, Sequence
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
    is_ref,
    programs,
    with_programs,
    without_constants,
)
from .frame import Frame, Outputs, as_written, atom_in, chained, is_chained_call
from .interpreter import Autocast, as_declared, parameter
from .products import is_cast, reads_half
from .readers import through_products
from .recompute import Link, parts
from .table import FLOAT32 as FLOAT32_OPERATIONS
from .table import KERNELS
from .values import Kind, Parameter, has_dtype, is_float32, is_full_precision


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
    is_left = name in KERNELS or name in FLOAT32_OPERATIONS
    return iter(()) if is_left else programs(eqn)


def rewrite(
    frame: Frame,
    program: Jaxpr | ClosedJaxpr,
    args: Sequence[Any],
    kinds: Sequence[Kind],
    declared: int = 0,
    in_loop: bool = False,
    wanted: Sequence[bool] = (),
    halved: Sequence[bool] = (),
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
      halved: for each of the outputs that are `declared` whether it is in half precision instead.
    """
    autocast, in_loop = frame.autocast, in_loop or frame.in_loop
    jaxpr = closed(program).jaxpr
    halves = tuple(
        is_float32(var) and has_dtype(arg, autocast.dtype)
        for var, arg in zip(jaxpr.invars, args, strict=True)
    )
    known = autocast.rewritten.setdefault(program, {})
    key = (halves, tuple(kinds), declared, in_loop, tuple(wanted), tuple(halved))
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
        for i, var in enumerate(jaxpr.outvars[:declared]):
            is_half = i < len(halved) and halved[i]
            outputs[i] = (
                cast(outputs[i], autocast.dtype) if is_half else as_declared(outputs[i], var)
            )
        return outputs

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


def narrow(eqn: JaxprEqn, outputs: Sequence[Any], dtype: Any) -> list[bool]:
    return [
        is_float32(var) and has_dtype(value, dtype)
        for var, value in zip(eqn.outvars, outputs, strict=True)
    ]


def read_inputs(frame: Frame, eqn: JaxprEqn) -> tuple[list[Any], list[Kind]]:
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
    return not entered and is_unchanged(frame, eqn)


def is_unchanged(frame: Frame, eqn: JaxprEqn) -> bool:
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
    args, kinds = (read_inputs if _jax.is_placed(eqn) else _links)(frame, eqn)
    program, out_kinds = rewrite(frame, called, args, kinds)
    arrays = [*map(_arrays, args)]
    params = _jax.with_inputs(with_programs(eqn, [program]), [*map(len, arrays)])
    outputs = bind(eqn, [*itertools.chain(*arrays)], params)
    frame.kinds.update(zip(eqn.outvars, out_kinds, strict=True))
    return outputs, narrow(eqn, outputs, frame.dtype)


def inlined(frame: Frame, eqn: JaxprEqn) -> Outputs:
    """Evaluates a call that means nothing but its program."""
    args, kinds = _links(frame, eqn)
    run, wanted = frame.autocast.run, _wanted(frame, eqn)
    outputs, out_kinds = run(_jax.callee(eqn), args, kinds, frame.in_loop, wanted)
    frame.kinds.update(zip(eqn.outvars, out_kinds, strict=True))
    return outputs, narrow(eqn, outputs, frame.dtype)


def remat(frame: Frame, eqn: JaxprEqn) -> Outputs:
    """Evaluates `jax.checkpoint`, with its policy."""
    called = _jax.callee(eqn)
    if _is_as_written(frame, eqn):
        return as_written(frame, eqn)
    args, kinds = _links(frame, eqn)
    program, _ = rewrite(frame, called, args, kinds, wanted=_wanted(frame, eqn))
    jaxpr, consts = without_constants(program)
    arrays = itertools.chain(*map(_arrays, args))
    outputs = bind(eqn, [*consts, *arrays], with_programs(eqn, [jaxpr]))
    return outputs, narrow(eqn, outputs, frame.dtype)


def scan(frame: Frame, eqn: JaxprEqn) -> Outputs:
    """Evaluates `scan`. What it carries keeps its dtype by default; what it stacks need not."""
    loop = _jax.scan(eqn)
    if _holds_refs(eqn) or is_unchanged(frame, eqn):
        return run_as_written(frame, eqn)
    args, kinds = read_inputs(frame, eqn)
    halved = _halved_carries(frame, loop)
    last = loop.consts + loop.carries
    for i, var in enumerate(loop.body.jaxpr.invars):
        if loop.consts <= i < last:
            is_half = halved[i - loop.consts]
            args[i] = frame.half(eqn.invars[i]) if is_half else as_declared(args[i], var)
            kinds[i] = None
        elif i >= last and isinstance(kinds[i], Parameter):
            kinds[i] = parameter(var)  # a slice of it
    wanted = [*halved, *_wanted(frame, eqn)[loop.carries :]]
    program, _ = rewrite(
        *(frame, loop.body, args, kinds, loop.carries), in_loop=True, wanted=wanted, halved=halved
    )
    outputs = bind(eqn, args, with_programs(eqn, [program]))
    return outputs, narrow(eqn, outputs, frame.dtype)


def _halved_carries(frame: Frame, loop: _jax.Scan) -> list[bool]:
    """Returns for each carry of a loop whether it is in half precision: see `half_carries`."""
    if not frame.autocast.half_carries:
        return [False] * loop.carries
    body = loop.body.jaxpr
    carried = body.invars[loop.consts : loop.consts + loop.carries]
    through = through_products(body, reads_half, loop.consts, loop.carries)
    pairs = zip(carried, through, strict=True)
    return [is_float32(var) and is_through for var, is_through in pairs]


def while_loop(frame: Frame, eqn: JaxprEqn) -> Outputs:
    """Evaluates `while`. What it carries keeps its dtype."""
    loop = _jax.while_loop(eqn)
    if _holds_refs(eqn) or is_unchanged(frame, eqn):
        return run_as_written(frame, eqn)
    args, kinds = read_inputs(frame, eqn)
    tested = loop.test_consts
    first = tested + loop.body_consts
    variables = loop.body.jaxpr.invars[loop.body_consts :]
    args[first:] = [as_declared(*each) for each in zip(args[first:], variables, strict=True)]
    kinds[first:] = [None] * len(variables)
    test, _ = rewrite(
        frame, loop.test, args[:tested] + args[first:], kinds[:tested] + kinds[first:], declared=1
    )
    body, _ = rewrite(
        frame, loop.body, args[tested:], kinds[tested:], declared=len(variables), in_loop=True
    )
    in_order = [test if closed(own) is loop.test else body for own in programs(eqn)]
    outputs = bind(eqn, args, with_programs(eqn, in_order))
    return outputs, (False,) * len(outputs)


def cond(frame: Frame, eqn: JaxprEqn) -> Outputs:
    """Evaluates `cond` and `switch`. The branches return the dtypes that they declare."""
    branches = _jax.branches(eqn)
    if _holds_refs(eqn) or is_unchanged(frame, eqn):
        return run_as_written(frame, eqn)
    args, kinds = read_inputs(frame, eqn)
    branches = [
        rewrite(frame, branch, args[1:], kinds[1:], declared=len(eqn.outvars))[0]
        for branch in branches
    ]
    outputs = bind(eqn, args, with_programs(eqn, branches))
    return outputs, (False,) * len(outputs)


def mapped(frame: Frame, eqn: JaxprEqn) -> Outputs:
    """Evaluates `shard_map` and `pmap`: the program of each device is rewritten."""
    each = _jax.mapped(eqn)
    if is_unchanged(frame, eqn):
        return as_written(frame, eqn)
    (args, kinds), out_narrow = read_inputs(frame, eqn), []

    def run(*args: Any) -> Any:
        outputs, _ = frame.autocast.run(each.program, args, kinds, frame.in_loop)
        out_narrow[:] = narrow(eqn, outputs, frame.dtype)
        return tuple(outputs)

    return each.map(run)(*args), out_narrow


def run_as_written(
    frame: Frame, eqn: JaxprEqn, reason: str = "`autocast` has no rule for it"
) -> Outputs:
    """Evaluates an equation as it is written, and warns if there are products in it."""
    name = eqn.primitive.name
    # A rule that found no program knows nothing of what is in it.
    is_unknown = name in frame.autocast.rules and not any(programs(eqn))
    if name not in KERNELS and (is_unknown or not is_unchanged(frame, eqn)):
        frame.autocast.warn(name, reason)
    return as_written(frame, eqn)
