"""Loops, branches and `shard_map`."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import JaxprEqn, jaxpr_as_fun

from ..jaxpr_types import Arrays
from ..pruned_jaxprs import ClosedJaxpr
from .equation_forms import reads_form
from .inner_jaxprs import check_programs, fit


class Scan(NamedTuple):
    """A `scan`: the numbers of its constants and carries, which come first, and its body."""

    body: ClosedJaxpr
    consts: int
    carries: int
    length: int
    reverse: bool


@reads_form
def scan(eqn: JaxprEqn) -> Scan:
    """Reads the equation of a `scan`."""
    params = eqn.params
    if "ft_in" in params:  # since JAX 0.11: https://github.com/jax-ml/jax/pull/39005
        consts, carries, _ = map(len, params["ft_in"].unpack())
        carried, _ = map(len, params["ft_out"].unpack())
        if carried != carries:
            raise ValueError("other carries come out than go in")
    else:
        consts = params["num_consts"]
        carries = params["num_carry"]
    check_programs(eqn, params["jaxpr"])
    body = fit(params["jaxpr"], eqn.invars, eqn.outvars)
    return Scan(body, consts, carries, int(params["length"]), bool(params["reverse"]))


def scan_again(
    eqn: JaxprEqn,
    body: ClosedJaxpr,
    consts: Sequence[Any],
    carries: Sequence[Any],
    xs: Arrays,
) -> list[Any]:
    """Returns the outputs of a `scan` with another body, which may take more arrays."""
    run_body = jaxpr_as_fun(body)
    num_carries = len(carries)

    def step(carries: Arrays, sliced: Arrays) -> Any:
        outputs = run_body(*consts, *carries, *sliced)
        return tuple(outputs[:num_carries]), outputs[num_carries:]

    options = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
    carried, stacked = jax.lax.scan(step, tuple(carries), tuple(xs), **options)
    return [*carried, *stacked]


class While(NamedTuple):
    """A `while`: its test and its body, with the numbers of the constants that each takes."""

    test: ClosedJaxpr
    test_consts: int
    body: ClosedJaxpr
    body_consts: int


@reads_form
def while_loop(eqn: JaxprEqn) -> While:
    """Reads the equation of a `while`."""
    params = eqn.params
    test = params["cond_jaxpr"]
    body = params["body_jaxpr"]
    check_programs(eqn, test, body)
    test_consts = params["cond_nconsts"]
    return While(
        test=fit(test, [*eqn.invars[:test_consts], *eqn.outvars], None),
        test_consts=test_consts,
        body=fit(body, eqn.invars[test_consts:], eqn.outvars),
        body_consts=params["body_nconsts"],
    )


@reads_form
def branches(eqn: JaxprEqn) -> list[ClosedJaxpr]:
    """Returns the branches of a `cond`, whose first input is the index."""
    programs = eqn.params["branches"]
    check_programs(eqn, *programs)
    return [fit(branch, eqn.invars[1:], eqn.outvars) for branch in programs]


class Mapped(NamedTuple):
    """A `shard_map`: its jaxpr, and what maps another function in the same way.

    `map` calls `jax.shard_map` again, so any parameter that is not read here would be lost. It
    takes other options than the equation's own by their names.
    """

    program: ClosedJaxpr
    map: Callable[..., Callable[..., Any]]
    options: dict[str, Any]  # those of `jax.shard_map`


@reads_form
def mapped(eqn: JaxprEqn) -> Mapped:
    """Reads the equation of a `shard_map`."""
    params = dict(eqn.params)
    program = params.pop("jaxpr")
    options = {
        "axis_names": set(params.pop("newly_manual_axes")),
        "in_specs": tuple(params.pop("in_specs")),
        "out_specs": tuple(params.pop("out_specs")),
        "mesh": params.pop("mesh"),
        "check_vma": params.pop("check_vma"),
    }
    if params:
        raise ValueError(f"more parameters: {', '.join(params)}")

    def map_alike(fun: Callable[..., Any], **other_options: Any) -> Callable[..., Any]:
        return jax.shard_map(fun, **options | other_options)

    return Mapped(fit(program, eqn.invars, None), map_alike, options)
