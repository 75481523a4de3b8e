"""The rules for equations that hold programs: calls, loops, branches, devices.

Each of these programs is rewritten for the inputs that it comes with: see `rewriting.py`. What a
loop carries and what branches return keep the dtypes that the program declares. Only a `scan` with
`half_carries` may carry narrow values. What a call returns and what a `scan` stacks may be narrow.
"""

from collections.abc import Sequence
from typing import Any

import jax

from .. import _jax
from .._jax import (
    JaxprEqn,
    bind,
    closed,
    programs,
    with_programs,
)
from .callers import owner_of
from .carries import find_half_carries
from .casts import has_products
from .chains import is_call_for_chain
from .frame import Frame
from .recompute import Narrow
from .rewriting import Inputs, Way, place_inside, read_inputs, rewrite
from .rules import Outputs, leave_to_chain, run_as_written
from .values import (
    Kind,
    Parameter,
    as_declared,
    kind_of_input,
    without_mark,
)


def _count_leaves(args: Sequence[Any]) -> list[int]:
    """Returns of how many arrays each argument consists."""
    return [len(jax.tree.leaves(arg)) for arg in args]


def _find_rounded_outputs(frame: Frame, eqn: JaxprEqn) -> tuple[bool, ...]:
    """Returns for each output of an equation whether it is only read to be rounded."""
    return tuple(map(frame.is_only_rounded, eqn.outvars))


def _changes_nothing(frame: Frame, eqn: JaxprEqn) -> bool:
    """Returns whether nothing changes in a call: neither a product nor what it reads."""
    if has_products(eqn, frame.place.owner):
        return False
    return not frame.reads_narrow(eqn) and not frame.reads_link(eqn)


def _is_left(frame: Frame, eqn: JaxprEqn) -> bool:
    """Returns whether a loop or a branch runs as it is written: it has refs, or no products."""
    return any(map(_jax.is_ref, eqn.invars)) or not has_products(eqn, frame.place.owner)


def rewrite_jit(frame: Frame, eqn: JaxprEqn) -> Outputs:
    """Evaluates `jit`: it calls a rewritten program."""
    called = _jax.callee(eqn)
    if is_call_for_chain(frame, eqn):
        return leave_to_chain(frame, eqn)
    if _changes_nothing(frame, eqn):
        return run_as_written(frame, eqn)
    # What a chain starts from has no sharding or layout of its own.
    inputs = read_inputs(frame, eqn, with_links=not _jax.is_placed(eqn))
    rewritten = rewrite(frame, eqn, called, inputs)
    frame.write_kinds(eqn, rewritten.kinds)
    params = with_programs(eqn, [rewritten.program])
    params = _jax.with_inputs(params, _count_leaves(inputs.args))
    return rewritten.mark(bind(eqn, jax.tree.leaves(inputs.args), params))


def run_inline(frame: Frame, eqn: JaxprEqn) -> Outputs:
    """Evaluates a call that does nothing but run its program."""
    inputs = read_inputs(frame, eqn, with_links=True)
    result = frame.autocast.run(
        _jax.callee(eqn),
        inputs.args,
        inputs.kinds,
        place_inside(frame, eqn),
        _find_rounded_outputs(frame, eqn),
    )
    frame.write_kinds(eqn, result.kinds)
    return result.outputs


def rewrite_remat(frame: Frame, eqn: JaxprEqn) -> Outputs:
    """Evaluates `jax.checkpoint`, with its policy."""
    called = _jax.callee(eqn)
    if _changes_nothing(frame, eqn):
        return run_as_written(frame, eqn)
    inputs = read_inputs(frame, eqn, with_links=True)
    way = Way(rounded_outputs=_find_rounded_outputs(frame, eqn))
    rewritten = rewrite(frame, eqn, called, inputs, way)
    jaxpr, consts = _jax.without_constants(rewritten.program)
    leaves = jax.tree.leaves(inputs.args)
    params = _jax.with_rematted(eqn, jaxpr, _count_leaves(inputs.args))
    outputs = bind(eqn, [*consts, *leaves], params)
    return rewritten.mark(outputs)


def rewrite_scan(frame: Frame, eqn: JaxprEqn) -> Outputs:
    """Evaluates `scan`. What it carries keeps its dtype by default; what it stacks need not."""
    loop = _jax.scan(eqn)
    if _is_left(frame, eqn):
        return run_as_written(frame, eqn)
    half_carries = [False] * loop.carries
    if frame.autocast.half_carries:
        half_carries = find_half_carries(loop, owner_of(eqn, frame.place.owner))
    inputs = _read_scan_inputs(frame, eqn, loop, half_carries)
    rounded_stacks = _find_rounded_outputs(frame, eqn)[loop.carries :]
    way = Way(
        fixed=tuple(half_carries),
        rounded_outputs=(*half_carries, *rounded_stacks),
        in_loop=True,
    )
    rewritten = rewrite(frame, eqn, loop.body, inputs, way)
    args = inputs.args
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


def _read_scan_inputs(
    frame: Frame, eqn: JaxprEqn, loop: _jax.Scan, half_carries: Sequence[bool]
) -> Inputs:
    """Returns the inputs of a `scan`, and what is known of them in its body."""
    args, kinds = read_inputs(frame, eqn)
    variables = loop.body.jaxpr.invars
    first_x = loop.consts + loop.carries
    for i, atom in enumerate(eqn.invars):
        if i < loop.consts:
            if frame.is_narrow(atom):
                # the cotangents of all turns are added
                args[i] = frame.read_views(atom)
        elif i < first_x:
            kinds[i] = None
            if half_carries[i - loop.consts]:
                args[i] = frame.read_own_half(atom)
            else:
                args[i] = as_declared(frame.read_wide(atom), variables[i])
        elif isinstance(kinds[i], Parameter):
            kinds[i] = kind_of_input(variables[i])  # a slice of it
    return Inputs(args, kinds)


def rewrite_while(frame: Frame, eqn: JaxprEqn) -> Outputs:
    """Evaluates `while`. What it carries keeps its dtype."""
    loop = _jax.while_loop(eqn)
    if _is_left(frame, eqn):
        return run_as_written(frame, eqn)
    # The constants of the test come first, then those of the body, then what is carried.
    end_of_test = loop.test_consts
    end_of_body = loop.test_consts + loop.body_consts
    consts = eqn.invars[:end_of_body]
    args = list(map(frame.read_without_gradient, consts))
    kinds = list(map(frame.kind_of, consts))
    carries = []
    declared = loop.body.jaxpr.invars[loop.body_consts :]
    for atom, var in zip(eqn.invars[end_of_body:], declared, strict=True):
        carries.append(as_declared(frame.read_wide(atom), var))
    unknown: list[Kind] = [None] * len(carries)
    test = rewrite(
        frame,
        eqn,
        loop.test,
        Inputs(args[:end_of_test] + carries, kinds[:end_of_test] + unknown),
        Way(fixed=(False,)),
    )
    body = rewrite(
        frame,
        eqn,
        loop.body,
        Inputs(args[end_of_test:] + carries, kinds[end_of_test:] + unknown),
        Way(fixed=(False,) * len(carries), in_loop=True),
    )
    in_order = []
    for program in programs(eqn):
        if closed(program) is loop.test:
            in_order.append(test.program)
        else:
            in_order.append(body.program)
    return bind(eqn, args + carries, with_programs(eqn, in_order))


def rewrite_branches(frame: Frame, eqn: JaxprEqn) -> Outputs:
    """Evaluates `cond` and `switch`. The branches return the dtypes that they declare."""
    branches = _jax.branches(eqn)
    if _is_left(frame, eqn):
        return run_as_written(frame, eqn)
    args, kinds = read_inputs(frame, eqn)
    inputs = Inputs(args[1:], kinds[1:])  # the first says which branch it is
    way = Way(fixed=(False,) * len(eqn.outvars))
    rewritten_branches = []
    for branch in branches:
        rewritten = rewrite(frame, eqn, branch, inputs, way)
        rewritten_branches.append(rewritten.program)
    params = with_programs(eqn, rewritten_branches)
    return bind(eqn, jax.tree.leaves(args), params)


def rewrite_mapped(frame: Frame, eqn: JaxprEqn) -> Outputs:
    """Evaluates `shard_map` and `pmap`: the program of each device is rewritten."""
    mapping = _jax.mapped(eqn)
    if not has_products(eqn, frame.place.owner):
        return run_as_written(frame, eqn)
    args: list[Any] = []
    specs: list[Any] = []
    for atom, spec in zip(eqn.invars, mapping.options[mapping.inputs], strict=True):
        if frame.is_narrow(atom):
            # Where devices share an input, what comes back to it is added.
            args.append(frame.read_views(atom))
            specs += [spec, spec]
        else:
            args.append(frame.read_wide(atom))
            specs.append(spec)
    kinds = list(map(frame.kind_of, eqn.invars))
    leaves, tree = jax.tree.flatten(args)

    def run(*leaves: Any) -> tuple[Any, ...]:
        args = jax.tree.unflatten(tree, leaves)
        place = place_inside(frame, eqn)
        result = frame.autocast.run(mapping.program, args, kinds, place)
        return tuple(map(without_mark, result.outputs))

    run_on_devices = mapping.map(run, **{mapping.inputs: tuple(specs)})
    return run_on_devices(*leaves)
