"""The law of additions: which sums in half precision have a summand that is no product.

A product is rounded to half precision anyway, and nothing is lost if two of them are added so.
Whatever else is added in half precision was exact before, and is lost where the sum cancels.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

HALF = ("float16", "bfloat16")
PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general")
ADDITIONS = (
    "add",
    "add_any",
    "sub",
    "reduce_sum",
    "cumsum",
    "scatter-add",
    "scatter-sub",
    "psum",
)
ADDITIONS += (
    "reduce_window_sum",
    "select_and_scatter_add",
    "psum_invariant",
    "add_jaxvals",
)
# They move numbers, round them, or turn their signs. What they return is from where they have it.
MOVES = (
    "convert_element_type",
    "reshape",
    "transpose",
    "broadcast_in_dim",
    "slice",
    "squeeze",
)
MOVES += (
    "dynamic_slice",
    "dynamic_update_slice",
    "rev",
    "concatenate",
    "pad",
    "gather",
    "select_n",
)
MOVES += (
    "copy",
    "copy_p",
    "scatter",
    "optimization_barrier",
    "neg",
    "name",
    "expand_dims",
)
MOVES += (
    "split",
    "sharding_constraint",
    "pvary",
    "reduce_precision",
    "stop_gradient",
    "pbroadcast",
)
MOVES += (
    "device_put",
    "all_gather",
    "all_to_all",
    "ppermute",
    "copy_to_host",
    "tile",
    "unstack",
)

# Where a value comes from: it is 0, another number of the program's text, or comes from a product
# or from elsewhere. What is joined of several is from the last of these.
ZERO, NUMBER, PRODUCT, OTHER = range(4)


def find_foreign_additions(program: Any) -> list[str]:
    """Returns the additions in half precision with a summand that comes from no product."""
    jaxpr = getattr(program, "jaxpr", program)
    found: dict[str, None] = {}
    _walk(jaxpr, [OTHER] * len(jaxpr.invars), found)
    return list(found)


def _walk(jaxpr: Any, given: Sequence[int], found: dict[str, None]) -> list[int]:
    """Returns where the outputs of a program come from, and notes its additions."""
    origins = dict.fromkeys(jaxpr.constvars, OTHER)
    origins |= zip(jaxpr.invars, given, strict=True)

    def read(atom: Any) -> int:
        if not hasattr(atom, "val"):
            return origins.get(atom, OTHER)
        if np.ndim(atom.val):
            return OTHER
        return NUMBER if atom.val else ZERO

    for eqn in jaxpr.eqns:
        outputs = _origins_of(eqn, [read(atom) for atom in eqn.invars], found)
        origins |= zip(eqn.outvars, outputs, strict=True)
    return [read(atom) for atom in jaxpr.outvars]


def _origins_of(eqn: Any, inputs: list[int], found: dict[str, None]) -> list[int]:
    name = eqn.primitive.name
    programs = list(_programs(eqn))
    if programs:
        return _origins_of_call(eqn, programs, inputs, found)
    if name in PRODUCTS:
        return [PRODUCT]
    if name == "optimization_barrier":  # each output is one of the inputs
        return inputs
    is_half = [_is_half(atom) for atom in eqn.outvars]
    # Indices and masks say nothing of where numbers come from.
    floating = [
        o for o, atom in zip(inputs, eqn.invars, strict=True) if _is_floating(atom)
    ]
    joined = max(floating, default=ZERO)
    if name in ADDITIONS and any(is_half):
        is_with_zero = len(floating) == 2 and ZERO in floating and "scatter" not in name
        if joined == OTHER and not is_with_zero:  # a sum with 0 is exact
            found[_describe(eqn, inputs)] = None
            return [PRODUCT] * len(is_half)  # noted once
        return [joined] * len(is_half)
    if name in MOVES or all(is_half):
        return [joined] * len(is_half)
    return [OTHER] * len(is_half)


def _origins_of_call(
    eqn: Any, programs: list[Any], inputs: list[int], found: dict[str, None]
) -> list[int]:
    name = eqn.primitive.name
    if name == "cond":
        branches = [_walk(branch, inputs[1:], found) for branch in programs]
        return [max(origins) for origins in zip(*branches, strict=True)]
    if name == "scan":
        consts, carries = _parts_of_scan(eqn)
        return _walk_loop(programs[0], inputs, consts, carries, found)
    if name == "while":
        tested = eqn.params["cond_nconsts"]
        inside, carries = inputs[tested:], len(eqn.outvars)
        return _walk_loop(programs[-1], inside, len(inside) - carries, carries, found)
    fitting = [p for p in programs if len(p.invars) == len(inputs)]
    if len(fitting) == 1 and len(fitting[0].outvars) == len(eqn.outvars):
        return _walk(fitting[0], inputs, found)
    # of a form that is not known here: as if everything came from afar
    for program in programs:
        _walk(program, [OTHER] * len(program.invars), found)
    return [OTHER] * len(eqn.outvars)


def _walk_loop(
    body: Any, inputs: list[int], consts: int, carries: int, found: dict[str, None]
) -> list[int]:
    """Walks through a loop until nothing new comes round."""
    given = list(inputs)
    while True:
        outputs = _walk(body, given, {})
        after = [
            max(pair) for pair in zip(given[consts:], outputs[:carries], strict=False)
        ]
        if after == given[consts : consts + carries]:
            return _walk(body, given, found)
        given[consts : consts + carries] = after


def _parts_of_scan(eqn: Any) -> tuple[int, int]:
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carries, _ = map(len, eqn.params["ft_in"].unpack())
    return consts, carries


def _programs(eqn: Any) -> Iterator[Any]:
    for value in eqn.params.values():
        for each in value if isinstance(value, tuple | list) else (value,):
            inner = getattr(each, "jaxpr", each)
            if hasattr(inner, "eqns"):
                yield inner


def _is_half(atom: Any) -> bool:
    return getattr(atom.aval, "dtype", None) in HALF


def _is_floating(atom: Any) -> bool:
    dtype = getattr(atom.aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def _describe(eqn: Any, inputs: list[int]) -> str:
    words = ("0", "a number", "a product", "elsewhere")
    summands = ", ".join(words[origin] for origin in inputs)
    user = [
        f
        for f in getattr(eqn.source_info.traceback, "frames", ())
        if "/programs/" in f.file_name
    ]
    place = (
        f"{user[0].file_name.rsplit('/', 1)[-1]}:{user[0].line_num}" if user else "?"
    )
    return f"{eqn.primitive.name} {eqn.outvars[0].aval.str_short()} at {place}: from {summands}"
