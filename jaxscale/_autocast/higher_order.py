"""The rules for equations that hold programs: calls, loops, branches, devices.

Each of these programs is rewritten once for each combination of precisions that its inputs come
in, and takes the place of the one that the program has. What a loop carries and what branches
return keep the dtypes that the program declares; a `scan` with `half_carries` may carry narrow
values. What a call returns, and what a `scan` stacks, may be narrow.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

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
from .callers import Place, owner_of
from .frame import Frame
from .readers import half_carries, has_products
from .recompute import Link, Narrow
from .rules import as_written, chained, is_chained_call
from .values import Kind, Parameter, ToRound, as_declared, has_dtype, is_float32, parameter


class Rewritten(NamedTuple):
    """A program, rewritten, with what is known of its outputs."""

    program: ClosedJaxpr
    kinds: list[Kind]
    to_round: list[bool]  # narrow, and given back in float32: see `ToRound`

    def outputs(self, values: Sequence[Any]) -> list[Any]:
        """Returns what an equation with this program gave back as its rule returns it."""
        pairs = zip(values, self.to_round, strict=True)
        return [ToRound(value) if is_to_round else value for value, is_to_round in pairs]


def rewrite(
    frame: Frame,
    eqn: JaxprEqn,
    program: Jaxpr | ClosedJaxpr,
    args: Sequence[Any],
    kinds: Sequence[Kind],
    fixed: Sequence[bool] = (),
    in_loop: bool = False,
    wanted: Sequence[bool] = (),
) -> Rewritten:
    """Returns a program that an equation holds, rewritten for its place in the program around.

    In the place of each link it takes the arrays that the link starts from, and in the place of a
    narrow value whose cotangents meet both views of it. `fixed` says for each
    of its first outputs, whose dtypes are fixed, whether that is half precision, and not what it
    declares; the others come in the precision they were computed in. `wanted` is as in
    `rounded_reads`.
    """
    autocast, place = frame.autocast, place_inside(frame, eqn, in_loop)
    jaxpr = closed(program).jaxpr
    # A link belongs to one place of one program.
    has_links = any(isinstance(arg, Link) for arg in args)
    known = {} if has_links else autocast.rewritten.setdefault(program, {})
    avals: list[Any] = []
    views = []
    for var, arg in zip(jaxpr.invars, args, strict=True):
        half = is_float32(var) and var.aval.update(dtype=autocast.dtype)
        if isinstance(arg, Link):
            views.append("link")
            avals += map(jax.typeof, jax.tree.leaves(arg))
        elif isinstance(arg, Narrow):
            views.append("both")
            avals += Narrow(half, var.aval)
        else:
            is_half = is_float32(var) and has_dtype(arg, autocast.dtype)
            views.append("half" if is_half else "declared")
            avals.append(half if is_half else var.aval)
    how = (place, tuple(wanted), tuple(fixed), _jax.form_asked_for())
    key = (tuple(views), tuple(kinds), how)
    if key in known:
        return known[key]
    out_kinds: list[Kind] = []
    to_round: list[bool] = []
    tree = jax.tree.structure(list(args))

    def run(*leaves: Any) -> list[Any]:
        outputs, out_kinds[:] = autocast.run(
            closed(program), jax.tree.unflatten(tree, leaves), kinds, place, wanted
        )
        for i, is_half in enumerate(fixed):
            value = outputs[i].wide if isinstance(outputs[i], ToRound) else outputs[i]
            if is_half:
                outputs[i] = cast(value, autocast.dtype)
            else:
                outputs[i] = as_declared(value, jaxpr.outvars[i])
        to_round[:] = [isinstance(output, ToRound) for output in outputs]
        return [each.wide if isinstance(each, ToRound) else each for each in outputs]

    program = jax.make_jaxpr(run)(*avals)
    known[key] = Rewritten(program, out_kinds, to_round)
    return known[key]


def place_inside(frame: Frame, eqn: JaxprEqn, in_loop: bool = False) -> Place:
    """Returns what programs that an equation holds know of where they are."""
    return Place(in_loop or frame.place.in_loop, owner_of(eqn, frame.place.owner))


def read_inputs(
    frame: Frame, eqn: JaxprEqn, with_links: bool = False
) -> tuple[list[Any], list[Kind]]:
    """Returns the inputs of an equation as calls take them, maybe with links, and their kinds."""
    links = [frame.link(atom) if with_links else None for atom in eqn.invars]
    args = [link or frame.passed(atom) for link, atom in zip(links, eqn.invars, strict=True)]
    return args, [frame.kind(atom) for atom in eqn.invars]


def _wanted(frame: Frame, eqn: JaxprEqn) -> list[bool]:
    return [var in frame.only_half for var in eqn.outvars]


def _is_as_written(frame: Frame, eqn: JaxprEqn) -> bool:
    return not has_products(eqn, frame.place.owner) and not any(
        frame.is_narrow(atom) or frame.link(atom) for atom in eqn.invars
    )


def _is_left(frame: Frame, eqn: JaxprEqn) -> bool:
    return any(map(_jax.is_ref, eqn.invars)) or not has_products(eqn, frame.place.owner)


def call(frame: Frame, eqn: JaxprEqn) -> Sequence[Any]:
    """Evaluates `jit`: it calls a rewritten program."""
    called = _jax.callee(eqn)
    if is_chained_call(frame, eqn):
        return chained(frame, eqn)
    if _is_as_written(frame, eqn):
        return as_written(frame, eqn)
    # What a chain starts from has no sharding or layout of its own.
    args, kinds = read_inputs(frame, eqn, with_links=not _jax.is_placed(eqn))
    rewritten = rewrite(frame, eqn, called, args, kinds)
    frame.kinds.update(zip(eqn.outvars, rewritten.kinds, strict=True))
    numbers = [len(jax.tree.leaves(arg)) for arg in args]
    params = _jax.with_inputs(with_programs(eqn, [rewritten.program]), numbers)
    return rewritten.outputs(bind(eqn, jax.tree.leaves(args), params))


def inlined(frame: Frame, eqn: JaxprEqn) -> Sequence[Any]:
    """Evaluates a call that means nothing but its program."""
    args, kinds = read_inputs(frame, eqn, with_links=True)
    run, wanted = frame.autocast.run, _wanted(frame, eqn)
    outputs, out_kinds = run(_jax.callee(eqn), args, kinds, place_inside(frame, eqn), wanted)
    frame.kinds.update(zip(eqn.outvars, out_kinds, strict=True))
    return outputs


def remat(frame: Frame, eqn: JaxprEqn) -> Sequence[Any]:
    """Evaluates `jax.checkpoint`, with its policy."""
    called = _jax.callee(eqn)
    if _is_as_written(frame, eqn):
        return as_written(frame, eqn)
    args, kinds = read_inputs(frame, eqn, with_links=True)
    rewritten = rewrite(frame, eqn, called, args, kinds, wanted=_wanted(frame, eqn))
    jaxpr, consts = _jax.without_constants(rewritten.program)
    numbers = [len(jax.tree.leaves(arg)) for arg in args]
    params = _jax.with_rematted(eqn, jaxpr, numbers)
    return rewritten.outputs(bind(eqn, [*consts, *jax.tree.leaves(args)], params))


def scan(frame: Frame, eqn: JaxprEqn) -> Sequence[Any]:
    """Evaluates `scan`. What it carries keeps its dtype by default; what it stacks need not."""
    loop = _jax.scan(eqn)
    if _is_left(frame, eqn):
        return as_written(frame, eqn)
    halved = (
        half_carries(loop, owner_of(eqn, frame.place.owner))
        if frame.autocast.half_carries
        else [False] * loop.carries
    )
    args, kinds = read_inputs(frame, eqn)
    last = loop.consts + loop.carries
    for i, (atom, var) in enumerate(zip(eqn.invars, loop.body.jaxpr.invars, strict=True)):
        if i < loop.consts and frame.is_narrow(atom):
            args[i] = frame.both(atom)  # the cotangents of all turns are added
        elif loop.consts <= i < last:
            is_half = halved[i - loop.consts]
            args[i] = frame.own_half(atom) if is_half else as_declared(frame.wide(atom), var)
            kinds[i] = None
        elif i >= last and isinstance(kinds[i], Parameter):
            kinds[i] = parameter(var)  # a slice of it
    wanted = [*halved, *_wanted(frame, eqn)[loop.carries :]]
    rewritten = rewrite(frame, eqn, loop.body, args, kinds, halved, in_loop=True, wanted=wanted)
    if any(isinstance(arg, Narrow) for arg in args):
        of_body = args[: loop.consts], args[loop.consts : last], args[last:]
        outputs = _jax.scan_again(eqn, rewritten.program, *map(jax.tree.leaves, of_body))
    else:
        outputs = bind(eqn, args, with_programs(eqn, [rewritten.program]))
    return rewritten.outputs(outputs)


def while_loop(frame: Frame, eqn: JaxprEqn) -> Sequence[Any]:
    """Evaluates `while`. What it carries keeps its dtype."""
    loop = _jax.while_loop(eqn)
    if _is_left(frame, eqn):
        return as_written(frame, eqn)
    args = [frame.only(atom) for atom in eqn.invars]
    kinds = [frame.kind(atom) for atom in eqn.invars]
    tested = loop.test_consts
    first = tested + loop.body_consts
    variables = loop.body.jaxpr.invars[loop.body_consts :]
    args[first:] = map(as_declared, map(frame.wide, eqn.invars[first:]), variables)
    kinds[first:] = [None] * len(variables)
    test = rewrite(
        frame, eqn, loop.test, args[:tested] + args[first:], kinds[:tested] + kinds[first:], [False]
    )
    carried = [False] * len(variables)
    body = rewrite(frame, eqn, loop.body, args[tested:], kinds[tested:], carried, in_loop=True)
    in_order = [test.program if closed(own) is loop.test else body.program for own in programs(eqn)]
    return bind(eqn, args, with_programs(eqn, in_order))


def cond(frame: Frame, eqn: JaxprEqn) -> Sequence[Any]:
    """Evaluates `cond` and `switch`. The branches return the dtypes that they declare."""
    branches = _jax.branches(eqn)
    if _is_left(frame, eqn):
        return as_written(frame, eqn)
    args, kinds = read_inputs(frame, eqn)
    fixed = [False] * len(eqn.outvars)
    rewritten = [rewrite(frame, eqn, branch, args[1:], kinds[1:], fixed) for branch in branches]
    params = with_programs(eqn, [each.program for each in rewritten])
    return bind(eqn, jax.tree.leaves(args), params)


def mapped(frame: Frame, eqn: JaxprEqn) -> Sequence[Any]:
    """Evaluates `shard_map` and `pmap`: the program of each device is rewritten."""
    each = _jax.mapped(eqn)
    if not has_products(eqn, frame.place.owner):
        return as_written(frame, eqn)
    args: list[Any] = []
    specs: list[Any] = []
    for atom, spec in zip(eqn.invars, each.options[each.inputs], strict=True):
        # Where devices share an input, what comes back to it is added.
        arg = frame.both(atom) if frame.is_narrow(atom) else frame.wide(atom)
        args.append(arg)
        specs += [spec] * len(jax.tree.leaves(arg))
    kinds = [frame.kind(atom) for atom in eqn.invars]
    leaves, tree = jax.tree.flatten(args)

    def run(*leaves: Any) -> Any:
        args = jax.tree.unflatten(tree, leaves)
        outputs, _ = frame.autocast.run(each.program, args, kinds, place_inside(frame, eqn))
        return tuple(each.wide if isinstance(each, ToRound) else each for each in outputs)

    return each.map(run, **{each.inputs: tuple(specs)})(*leaves)
