"""The rules for equations that hold programs: calls, loops, branches, devices.

Each of these programs is rewritten for the inputs that it comes with: see `rewriting.py`. What a
loop carries and what branches return keep the dtypes that the program declares. What a call returns
and what a `scan` stacks may be narrow.
"""

from collections.abc import Sequence
from typing import Any

import jax

from .. import _jax
from .._jax import (
    Form,
    JaxprEqn,
    bind,
    form_of,
    open_equation,
    with_programs,
)
from .casts import has_products
from .frame import Frame
from .half_sums import adds_halves_inside
from .rewriting import Way, read_inputs, rewrite
from .rules import Outputs, run_as_written
from .values import Narrow, as_declared, is_float32, is_half, without_mark


def _count_leaves(args: Sequence[Any]) -> list[int]:
    """Returns of how many arrays each argument consists."""
    return [len(jax.tree.leaves(arg)) for arg in args]


def _find_rounded_outputs(frame: Frame, eqn: JaxprEqn) -> tuple[bool, ...]:
    """Returns for each output of an equation whether it is only read to be rounded."""
    return tuple(map(frame.is_only_rounded, eqn.outvars))


def changes_nothing(frame: Frame, eqn: JaxprEqn) -> bool:
    """Returns whether nothing changes in a call: neither products, nor sums, nor what it reads."""
    reads_narrow = any(map(frame.is_narrow, filter(is_float32, eqn.invars)))
    return not (reads_narrow or _changes_inside(frame, eqn))


def _changes_inside(frame: Frame, eqn: JaxprEqn) -> bool:
    """Returns whether an equation holds a product, or a sum of cotangents in half precision."""
    return has_products(eqn, frame.place) or adds_halves_inside(eqn)


def _is_left(frame: Frame, eqn: JaxprEqn) -> bool:
    """Returns whether a loop or a branch runs as it is written: it has refs, or nothing changes."""
    return any(map(_jax.is_ref, eqn.invars)) or not _changes_inside(frame, eqn)


def rewrite_jit(frame: Frame, eqn: JaxprEqn) -> Outputs:
    """Evaluates `jit`: it calls a rewritten program."""
    called = _jax.callee(eqn)
    if changes_nothing(frame, eqn):
        return run_as_written(frame, eqn)
    args = read_inputs(frame, eqn)
    rewritten = rewrite(frame, eqn, called, args)
    params = with_programs(eqn, [rewritten.program])
    params = _jax.with_inputs(params, _count_leaves(args))
    return rewritten.mark(bind(eqn, jax.tree.leaves(args), params))


def run_inline(frame: Frame, eqn: JaxprEqn) -> Outputs:
    """Evaluates a call that does nothing but run its program."""
    called = _jax.callee(eqn)
    return frame.autocast.run(
        called,
        read_inputs(frame, eqn),
        frame.place.inside(eqn, called),
        _find_rounded_outputs(frame, eqn),
    )


def rewrite_remat(frame: Frame, eqn: JaxprEqn) -> Outputs:
    """Evaluates `jax.checkpoint`, with its policy."""
    called = _jax.callee(eqn)
    if changes_nothing(frame, eqn):
        return run_as_written(frame, eqn)
    args = read_inputs(frame, eqn)
    way = Way(rounded_outputs=_find_rounded_outputs(frame, eqn))
    rewritten = rewrite(frame, eqn, called, args, way)
    jaxpr, consts = _jax.without_constants(rewritten.program)
    leaves = jax.tree.leaves(args)
    params = _jax.with_rematted(eqn, jaxpr, _count_leaves(args))
    outputs = bind(eqn, [*consts, *leaves], params)
    return rewritten.mark(outputs)


def rewrite_scan(frame: Frame, eqn: JaxprEqn) -> Outputs:
    """Evaluates `scan`. What it carries keeps its dtype; what it stacks need not."""
    loop = _jax.scan(eqn)
    if _is_left(frame, eqn):
        return run_as_written(frame, eqn)
    args = _read_scan_inputs(frame, eqn, loop)
    as_declared_carries = (False,) * loop.carries
    rounded_stacks = _find_rounded_outputs(frame, eqn)[loop.carries :]
    way = Way(
        fixed=as_declared_carries,
        rounded_outputs=(*as_declared_carries, *rounded_stacks),
        in_loop=True,
    )
    rewritten = rewrite(frame, eqn, loop.body, args, way)
    if not any(isinstance(arg, Narrow) for arg in args):
        params = with_programs(eqn, [rewritten.program])
        return rewritten.mark(bind(eqn, args, params))
    last = loop.consts + loop.carries
    outputs = _jax.scan_again(
        eqn,
        rewritten.program,
        consts=jax.tree.leaves(args[: loop.consts]),
        carries=jax.tree.leaves(args[loop.consts : last]),
        xs=jax.tree.leaves(args[last:]),
    )
    return rewritten.mark(outputs)


def _read_scan_inputs(frame: Frame, eqn: JaxprEqn, loop: _jax.Scan) -> list[Any]:
    """Returns the inputs of a `scan`, as its body takes them."""
    args = read_inputs(frame, eqn)
    variables = loop.body.jaxpr.invars
    first_x = loop.consts + loop.carries
    for i, atom in enumerate(eqn.invars):
        if i < loop.consts:
            if frame.is_narrow(atom):
                # the cotangents of all turns are added
                args[i] = frame.read_views(atom)
        elif i < first_x:
            args[i] = as_declared(frame.read_wide(atom), variables[i])
        elif is_half(atom):
            # each turn has a cotangent of its own: there is no sum to keep in float32
            args[i] = frame.read_wide(atom)
    return args


def rewrite_loop_or_branches(frame: Frame, eqn: JaxprEqn) -> Outputs:
    """Evaluates `while`, `cond` and `switch`, which keep the dtypes that they declare."""
    opened = open_equation(eqn)
    if _is_left(frame, eqn):
        return run_as_written(frame, eqn)
    args = _read_for_each(frame, eqn, opened)
    rewritten = []
    for held in opened:
        way = Way(
            fixed=(False,) * len(held.program.out_avals), in_loop=bool(held.fed_back)
        )
        inputs = [args[number] for number in held.inputs]
        rewritten.append(rewrite(frame, eqn, held.program, inputs, way).program)
    return bind(eqn, jax.tree.leaves(args), with_programs(eqn, rewritten))


def _read_for_each(
    frame: Frame, eqn: JaxprEqn, opened: Sequence[_jax.Held]
) -> list[Any]:
    """Returns the inputs of a loop or of branches, as their programs take them."""
    if form_of(eqn) is Form.BRANCHES:
        return read_inputs(frame, eqn)
    carried: dict[int, Any] = {}
    for held in opened:
        for _, number in held.fed_back:
            carried[held.inputs[number]] = held.program.jaxpr.invars[number]
    args = []
    for number, atom in enumerate(eqn.invars):
        if number in carried:
            args.append(as_declared(frame.read_wide(atom), carried[number]))
        else:
            args.append(frame.read_without_gradient(atom))
    return args


def rewrite_mapped(frame: Frame, eqn: JaxprEqn) -> Outputs:
    """Evaluates `shard_map`: the program of each device is rewritten."""
    mapping = _jax.mapped(eqn)
    if not _changes_inside(frame, eqn):
        return run_as_written(frame, eqn)
    args: list[Any] = []
    specs: list[Any] = []
    for atom, spec in zip(eqn.invars, mapping.options["in_specs"], strict=True):
        if frame.is_narrow(atom):
            # Where devices share an input, what comes back to it is added.
            args.append(frame.read_views(atom))
            specs += [spec, spec]
        else:
            args.append(frame.read_wide(atom))
            specs.append(spec)
    leaves, tree = jax.tree.flatten(args)

    def run(*leaves: Any) -> tuple[Any, ...]:
        args = jax.tree.unflatten(tree, leaves)
        place = frame.place.inside(eqn, mapping.program)
        outputs = frame.autocast.run(mapping.program, args, place)
        return tuple(map(without_mark, outputs))

    run_on_devices = mapping.map(run, in_specs=tuple(specs))
    return run_on_devices(*leaves)
