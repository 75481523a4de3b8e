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
from .values import (
    Kind,
    Parameter,
    ToRound,
    as_declared,
    has_dtype,
    is_float32,
    parameter,
    without_mark,
)


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

    It takes the arrays that a link starts from in the place of the link, and both views of a narrow
    value whose cotangents meet. The dtypes of its first outputs are fixed: `fixed` says for each of
    them whether it is half precision or what the program declares. The others come in the precision
    that they were computed in. `wanted` is as in `rounded_reads`.
    """
    autocast = frame.autocast
    place = place_inside(frame, eqn, in_loop)
    jaxpr = closed(program).jaxpr
    # A link belongs to one place of one program.
    has_links = any(isinstance(arg, Link) for arg in args)
    known = {} if has_links else autocast.rewritten.setdefault(program, {})
    views = []
    for var, arg in zip(jaxpr.invars, args, strict=True):
        views.append(_view_of(var, arg, autocast.dtype))
    how = (place, tuple(wanted), tuple(fixed), _jax.form_asked_for())
    key = (tuple(views), tuple(kinds), how)
    if key in known:
        return known[key]
    out_kinds: list[Kind] = []
    to_round: list[bool] = []
    tree = jax.tree.structure(list(args))

    def run(*leaves: Any) -> list[Any]:
        inputs = jax.tree.unflatten(tree, leaves)
        outputs, out_kinds[:] = autocast.run(closed(program), inputs, kinds, place, wanted)
        for i, is_half in enumerate(fixed):
            if is_half:
                outputs[i] = cast(without_mark(outputs[i]), autocast.dtype)
            else:
                outputs[i] = as_declared(outputs[i], jaxpr.outvars[i])
        to_round[:] = [isinstance(output, ToRound) for output in outputs]
        return list(map(without_mark, outputs))

    types: list[Any] = []
    for var, arg, view in zip(jaxpr.invars, args, views, strict=True):
        types += _types_of(var, arg, view, autocast.dtype)
    rewritten = jax.make_jaxpr(run)(*types)
    known[key] = Rewritten(rewritten, out_kinds, to_round)
    return known[key]


def _view_of(var: Any, arg: Any, dtype: Any) -> str:
    """Returns in which form a program is passed the value of a variable."""
    if isinstance(arg, Link):
        return "link"
    if isinstance(arg, Narrow):
        return "both"
    if is_float32(var) and has_dtype(arg, dtype):
        return "half"
    return "declared"


def _types_of(var: Any, arg: Any, view: str, dtype: Any) -> list[Any]:
    """Returns the types of the arrays that a program takes for a variable in a view."""
    match view:
        case "link":
            return list(map(jax.typeof, jax.tree.leaves(arg)))
        case "both":
            return [var.aval.update(dtype=dtype), var.aval]
        case "half":
            return [var.aval.update(dtype=dtype)]
    return [var.aval]


def place_inside(frame: Frame, eqn: JaxprEqn, in_loop: bool = False) -> Place:
    """Returns what programs that an equation holds know of where they are."""
    return Place(in_loop or frame.place.in_loop, owner_of(eqn, frame.place.owner))


def read_inputs(
    frame: Frame, eqn: JaxprEqn, with_links: bool = False
) -> tuple[list[Any], list[Kind]]:
    """Returns the inputs of an equation as calls take them, maybe with links, and their kinds."""
    args = []
    for atom in eqn.invars:
        link = frame.link(atom)
        if with_links and link is not None:
            args.append(link)
        else:
            args.append(frame.passed(atom))
    return args, list(map(frame.kind, eqn.invars))


def _number_of_leaves(args: Sequence[Any]) -> list[int]:
    """Returns of how many arrays each argument consists."""
    return [len(jax.tree.leaves(arg)) for arg in args]


def _wanted(frame: Frame, eqn: JaxprEqn) -> list[bool]:
    """Returns for each output of an equation whether it is only read to be rounded."""
    return [var in frame.only_half for var in eqn.outvars]


def _is_as_written(frame: Frame, eqn: JaxprEqn) -> bool:
    """Returns whether nothing changes in a call: neither a product nor what it reads."""
    if has_products(eqn, frame.place.owner):
        return False
    reads_narrow = any(map(frame.is_narrow, eqn.invars))
    reads_link = any(map(frame.link, eqn.invars))
    return not reads_narrow and not reads_link


def _is_left(frame: Frame, eqn: JaxprEqn) -> bool:
    """Returns whether a loop or a branch runs as it is written: it has refs, or no products."""
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
    params = with_programs(eqn, [rewritten.program])
    params = _jax.with_inputs(params, _number_of_leaves(args))
    return rewritten.outputs(bind(eqn, jax.tree.leaves(args), params))


def inlined(frame: Frame, eqn: JaxprEqn) -> Sequence[Any]:
    """Evaluates a call that means nothing but its program."""
    args, kinds = read_inputs(frame, eqn, with_links=True)
    place = place_inside(frame, eqn)
    wanted = _wanted(frame, eqn)
    outputs, out_kinds = frame.autocast.run(_jax.callee(eqn), args, kinds, place, wanted)
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
    params = _jax.with_rematted(eqn, jaxpr, _number_of_leaves(args))
    return rewritten.outputs(bind(eqn, [*consts, *jax.tree.leaves(args)], params))


def scan(frame: Frame, eqn: JaxprEqn) -> Sequence[Any]:
    """Evaluates `scan`. What it carries keeps its dtype by default; what it stacks need not."""
    loop = _jax.scan(eqn)
    if _is_left(frame, eqn):
        return as_written(frame, eqn)
    halved = [False] * loop.carries
    if frame.autocast.half_carries:
        halved = half_carries(loop, owner_of(eqn, frame.place.owner))
    args, kinds = read_inputs(frame, eqn)
    last = loop.consts + loop.carries
    for i, (atom, var) in enumerate(zip(eqn.invars, loop.body.jaxpr.invars, strict=True)):
        if i < loop.consts and frame.is_narrow(atom):
            args[i] = frame.both(atom)  # the cotangents of all turns are added
        elif loop.consts <= i < last:
            if halved[i - loop.consts]:
                args[i] = frame.own_half(atom)
            else:
                args[i] = as_declared(frame.wide(atom), var)
            kinds[i] = None
        elif i >= last and isinstance(kinds[i], Parameter):
            kinds[i] = parameter(var)  # a slice of it
    wanted = [*halved, *_wanted(frame, eqn)[loop.carries :]]
    rewritten = rewrite(frame, eqn, loop.body, args, kinds, halved, in_loop=True, wanted=wanted)
    if any(isinstance(arg, Narrow) for arg in args):
        outputs = _jax.scan_again(
            eqn,
            rewritten.program,
            consts=jax.tree.leaves(args[: loop.consts]),
            carries=jax.tree.leaves(args[loop.consts : last]),
            xs=jax.tree.leaves(args[last:]),
        )
    else:
        outputs = bind(eqn, args, with_programs(eqn, [rewritten.program]))
    return rewritten.outputs(outputs)


def while_loop(frame: Frame, eqn: JaxprEqn) -> Sequence[Any]:
    """Evaluates `while`. What it carries keeps its dtype."""
    loop = _jax.while_loop(eqn)
    if _is_left(frame, eqn):
        return as_written(frame, eqn)
    args = list(map(frame.without_gradient, eqn.invars))
    kinds = list(map(frame.kind, eqn.invars))
    first_of_body = loop.test_consts
    first_carry = loop.test_consts + loop.body_consts
    carries = []
    for atom, var in zip(
        eqn.invars[first_carry:], loop.body.jaxpr.invars[loop.body_consts :], strict=True
    ):
        carries.append(as_declared(frame.wide(atom), var))
    args[first_carry:] = carries
    kinds[first_carry:] = [None] * len(carries)
    test = rewrite(
        frame,
        eqn,
        loop.test,
        args[:first_of_body] + carries,
        kinds[:first_of_body] + kinds[first_carry:],
        fixed=[False],
    )
    body = rewrite(
        frame,
        eqn,
        loop.body,
        args[first_of_body:],
        kinds[first_of_body:],
        fixed=[False] * len(carries),
        in_loop=True,
    )
    in_order = []
    for program in programs(eqn):
        is_test = closed(program) is loop.test
        in_order.append(test.program if is_test else body.program)
    return bind(eqn, args, with_programs(eqn, in_order))


def cond(frame: Frame, eqn: JaxprEqn) -> Sequence[Any]:
    """Evaluates `cond` and `switch`. The branches return the dtypes that they declare."""
    branches = _jax.branches(eqn)
    if _is_left(frame, eqn):
        return as_written(frame, eqn)
    args, kinds = read_inputs(frame, eqn)
    fixed = [False] * len(eqn.outvars)
    rewritten = []
    for branch in branches:
        rewritten.append(rewrite(frame, eqn, branch, args[1:], kinds[1:], fixed).program)
    return bind(eqn, jax.tree.leaves(args), with_programs(eqn, rewritten))


def mapped(frame: Frame, eqn: JaxprEqn) -> Sequence[Any]:
    """Evaluates `shard_map` and `pmap`: the program of each device is rewritten."""
    mapping = _jax.mapped(eqn)
    if not has_products(eqn, frame.place.owner):
        return as_written(frame, eqn)
    args: list[Any] = []
    specs: list[Any] = []
    for atom, spec in zip(eqn.invars, mapping.options[mapping.inputs], strict=True):
        # Where devices share an input, what comes back to it is added.
        arg = frame.both(atom) if frame.is_narrow(atom) else frame.wide(atom)
        args.append(arg)
        specs += [spec] * len(jax.tree.leaves(arg))
    kinds = list(map(frame.kind, eqn.invars))
    leaves, tree = jax.tree.flatten(args)

    def run(*leaves: Any) -> Any:
        args = jax.tree.unflatten(tree, leaves)
        outputs, _ = frame.autocast.run(mapping.program, args, kinds, place_inside(frame, eqn))
        return tuple(map(without_mark, outputs))

    return mapping.map(run, **{mapping.inputs: tuple(specs)})(*leaves)
