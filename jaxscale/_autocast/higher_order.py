"""The rules for equations that hold jaxprs: calls, loops, branches, devices.

Each of these jaxprs is rewritten for the inputs that it comes with: see `rewriting.py`. What a
loop carries and what branches return keep the dtypes that the jaxpr declares. What a call returns
and what a `scan` stacks may be narrow.
"""

from collections.abc import Sequence
from typing import Any

import jax

from .._jax import jaxprs
from .._jax.jaxprs import (
    Flags,
    Form,
    JaxprEqn,
    bind,
    form_of,
    open_equation,
    with_programs,
)
from .cast_products import has_products
from .environment import Environment
from .half_sums import adds_halves_inside
from .narrow_values import Narrow, as_declared, is_float32, is_half, without_mark
from .rewriting import RewriteOptions, read_inputs, rewrite
from .rules import Outputs, run_as_written


def _count_leaves(args: Sequence[Any]) -> list[int]:
    """Counts the arrays of each argument."""
    return [len(jax.tree.leaves(arg)) for arg in args]


def _find_rounded_outputs(env: Environment, eqn: JaxprEqn) -> Flags:
    """Returns a flag for each output of an equation: it is only read to be rounded."""
    return tuple(map(env.is_only_rounded, eqn.outvars))


def changes_nothing(env: Environment, eqn: JaxprEqn) -> bool:
    """Returns whether nothing changes in a call: neither products, nor sums, nor what it reads."""
    reads_narrow = any(map(env.is_narrow, filter(is_float32, eqn.invars)))
    return not (reads_narrow or _changes_inside(env, eqn))


def _changes_inside(env: Environment, eqn: JaxprEqn) -> bool:
    """Returns whether an equation holds a product, or a sum of cotangents in half precision."""
    return has_products(eqn, env.site) or adds_halves_inside(eqn)


def _is_left(env: Environment, eqn: JaxprEqn) -> bool:
    """Returns whether a loop or a branch runs as it is written: it has refs, or nothing changes."""
    return any(map(jaxprs.is_ref, eqn.invars)) or not _changes_inside(env, eqn)


def rewrite_jit(env: Environment, eqn: JaxprEqn) -> Outputs:
    """Evaluates `jit`: it calls a rewritten jaxpr."""
    called = jaxprs.callee(eqn)
    if changes_nothing(env, eqn):
        return run_as_written(env, eqn)
    args = read_inputs(env, eqn)
    rewritten = rewrite(env, eqn, called, args)
    params = with_programs(eqn, [rewritten.program])
    params = jaxprs.with_inputs(params, _count_leaves(args))
    return rewritten.mark(bind(eqn, jax.tree.leaves(args), params))


def run_inline(env: Environment, eqn: JaxprEqn) -> Outputs:
    """Evaluates a call that does nothing but run its jaxpr."""
    called = jaxprs.callee(eqn)
    return env.autocast.run(
        called,
        read_inputs(env, eqn),
        env.site.inside(eqn, called),
        _find_rounded_outputs(env, eqn),
    )


def rewrite_remat(env: Environment, eqn: JaxprEqn) -> Outputs:
    """Evaluates `jax.checkpoint`, with its policy."""
    called = jaxprs.callee(eqn)
    if changes_nothing(env, eqn):
        return run_as_written(env, eqn)
    args = read_inputs(env, eqn)
    options = RewriteOptions(rounded_outputs=_find_rounded_outputs(env, eqn))
    rewritten = rewrite(env, eqn, called, args, options)
    jaxpr, consts = jaxprs.without_constants(rewritten.program)
    leaves = jax.tree.leaves(args)
    params = jaxprs.with_rematted(eqn, jaxpr, _count_leaves(args))
    outputs = bind(eqn, [*consts, *leaves], params)
    return rewritten.mark(outputs)


def rewrite_scan(env: Environment, eqn: JaxprEqn) -> Outputs:
    """Evaluates `scan`. What it carries keeps its dtype; what it stacks need not."""
    loop = jaxprs.scan(eqn)
    if _is_left(env, eqn):
        return run_as_written(env, eqn)
    args = _read_scan_inputs(env, eqn, loop)
    as_declared_carries = (False,) * loop.carries
    rounded_stacks = _find_rounded_outputs(env, eqn)[loop.carries :]
    options = RewriteOptions(
        fixed=as_declared_carries,
        rounded_outputs=(*as_declared_carries, *rounded_stacks),
        in_loop=True,
    )
    rewritten = rewrite(env, eqn, loop.body, args, options)
    if not any(isinstance(arg, Narrow) for arg in args):
        params = with_programs(eqn, [rewritten.program])
        return rewritten.mark(bind(eqn, args, params))
    last = loop.consts + loop.carries
    outputs = jaxprs.scan_again(
        eqn,
        rewritten.program,
        consts=jax.tree.leaves(args[: loop.consts]),
        carries=jax.tree.leaves(args[loop.consts : last]),
        xs=jax.tree.leaves(args[last:]),
    )
    return rewritten.mark(outputs)


def _read_scan_inputs(env: Environment, eqn: JaxprEqn, loop: jaxprs.Scan) -> list[Any]:
    """Returns the inputs of a `scan`, as its body takes them."""
    args = read_inputs(env, eqn)
    variables = loop.body.jaxpr.invars
    first_x = loop.consts + loop.carries
    for i, atom in enumerate(eqn.invars):
        if i < loop.consts:
            if env.is_narrow(atom):
                # the cotangents of all turns are added
                args[i] = env.read_views(atom)
        elif i < first_x:
            args[i] = as_declared(env.read_wide(atom), variables[i])
        elif is_half(atom):
            # each turn has a cotangent of its own: there is no sum to keep in float32
            args[i] = env.read_wide(atom)
    return args


def rewrite_loop_or_branches(env: Environment, eqn: JaxprEqn) -> Outputs:
    """Evaluates `while`, `cond` and `switch`, which keep the dtypes that they declare."""
    opened = open_equation(eqn)
    if _is_left(env, eqn):
        return run_as_written(env, eqn)
    args = _read_for_each(env, eqn, opened)
    rewritten = []
    for held in opened:
        options = RewriteOptions(
            fixed=(False,) * len(held.program.out_avals), in_loop=bool(held.fed_back)
        )
        inputs = [args[number] for number in held.inputs]
        rewritten.append(rewrite(env, eqn, held.program, inputs, options).program)
    return bind(eqn, jax.tree.leaves(args), with_programs(eqn, rewritten))


def _read_for_each(
    env: Environment, eqn: JaxprEqn, opened: Sequence[jaxprs.Held]
) -> list[Any]:
    """Returns the inputs of a loop or of branches, as their jaxprs take them."""
    if form_of(eqn) is Form.BRANCHES:
        return read_inputs(env, eqn)
    carried: dict[int, Any] = {}
    for held in opened:
        for _, number in held.fed_back:
            carried[held.inputs[number]] = held.program.jaxpr.invars[number]
    args = []
    for number, atom in enumerate(eqn.invars):
        if number in carried:
            args.append(as_declared(env.read_wide(atom), carried[number]))
        else:
            args.append(env.read_without_gradient(atom))
    return args


def rewrite_mapped(env: Environment, eqn: JaxprEqn) -> Outputs:
    """Evaluates `shard_map`: the jaxpr of each device is rewritten."""
    mapping = jaxprs.mapped(eqn)
    if not _changes_inside(env, eqn):
        return run_as_written(env, eqn)
    args: list[Any] = []
    specs: list[Any] = []
    for atom, spec in zip(eqn.invars, mapping.options["in_specs"], strict=True):
        if env.is_narrow(atom):
            # Where devices share an input, what comes back to it is added.
            args.append(env.read_views(atom))
            specs += [spec, spec]
        else:
            args.append(env.read_wide(atom))
            specs.append(spec)
    leaves, tree = jax.tree.flatten(args)

    def run(*leaves: jax.Array) -> tuple[Any, ...]:
        args = jax.tree.unflatten(tree, leaves)
        site = env.site.inside(eqn, mapping.program)
        outputs = env.autocast.run(mapping.program, args, site)
        return tuple(map(without_mark, outputs))

    run_on_devices = mapping.map(run, in_specs=tuple(specs))
    return run_on_devices(*leaves)
