"""Programs and their equations: which parameters they have, in which version of JAX.

An equation whose parameters have no form that is known here raises an `UnknownFormError`; whoever
reads it runs it as it is written, and says so.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, NamedTuple, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr as Jaxpr
from jax.extend.core import JaxprEqn as JaxprEqn
from jax.extend.core import Literal as Literal
from jax.extend.core import Primitive
from jax.extend.core import jaxpr_as_fun as jaxpr_as_fun
from jax.extend.core.primitives import convert_element_type_p
from jax.interpreters import ad, batching, mlir

from . import hijax
from .hijax import OBJECT, operation, takes_own_types
from .once import bind_once, differentiated_once, is_differentiated

if TYPE_CHECKING:  # JAX 0.12 has one class for both
    from jax.extend.core import Jaxpr as ClosedJaxpr
else:
    from jax.extend.core import ClosedJaxpr as ClosedJaxpr

# The versions of JAX that the tests were run with.
TESTED = "0.6.2 to 0.12.0"

_Read = TypeVar("_Read")
_More = ParamSpec("_More")


class UnknownFormError(Exception):
    """Raised for an equation whose parameters have no form that is known here."""


def _reader(
    read: Callable[Concatenate[JaxprEqn, _More], _Read],
) -> Callable[Concatenate[JaxprEqn, _More], _Read]:
    """Returns a function that reads the parameters of an equation, or says that it cannot."""

    @functools.wraps(read)
    def read_or_raise(eqn: JaxprEqn, *args: _More.args, **kwargs: _More.kwargs) -> _Read:
        try:
            return read(eqn, *args, **kwargs)
        except Exception as error:  # nobody knows what a form that is not known yet raises
            raise UnknownFormError(eqn.primitive.name) from error

    return read_or_raise


def closed(program: Jaxpr | ClosedJaxpr) -> ClosedJaxpr:
    """Returns a program with its constants, of which an open one has none.

    Since JAX 0.12 a `Jaxpr` holds its constants, and `ClosedJaxpr` is another name of it
    (https://github.com/jax-ml/jax/pull/39009). Before, equations held now one, now the other.
    """
    return program if isinstance(program, ClosedJaxpr) else ClosedJaxpr(program, ())


def without_constants(program: ClosedJaxpr) -> tuple[Jaxpr, list[Any]]:
    """Returns a program that takes its constants as its first inputs, and these constants."""
    jaxpr = program.jaxpr
    if not program.consts:
        return jaxpr, []
    info: Any = jaxpr.debug_info
    if hasattr(info, "with_unknown_names"):  # since JAX 0.7
        info = info.with_unknown_names()
    invars = [*jaxpr.constvars, *jaxpr.invars]
    return jaxpr.replace(constvars=[], invars=invars, debug_info=info), list(program.consts)


def programs(eqn: JaxprEqn) -> Iterator[Jaxpr | ClosedJaxpr]:
    """Returns the programs that an equation holds, in the order of its parameters."""
    if hijax.holds_program(eqn):
        with contextlib.suppress(UnknownFormError):
            yield _held(eqn)
    yield from _own_programs(eqn)


def _own_programs(eqn: JaxprEqn) -> Iterator[Jaxpr | ClosedJaxpr]:
    """Returns the programs among the parameters themselves."""
    for value in eqn.params.values():
        if isinstance(value, _PROGRAMS):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from filter(_is_program, value)


def with_programs(eqn: JaxprEqn, replaced: Sequence[Jaxpr | ClosedJaxpr]) -> dict[str, Any]:
    """Returns the parameters of an equation with other programs in the places of its own."""
    others = iter(replaced)

    def replace(value: Any) -> Any:
        if isinstance(value, tuple | list):
            return type(value)(map(replace, value)) if any(map(_is_program, value)) else value
        return next(others) if _is_program(value) else value

    return {name: replace(value) for name, value in eqn.params.items()}


def bind(eqn: JaxprEqn, args: Sequence[Any], params: dict[str, Any] | None = None) -> list[Any]:
    """Returns the outputs of an equation for other arguments, and maybe other parameters."""
    params = hijax.fitted(eqn, args, eqn.params if params is None else params)
    if is_differentiated(args) and not eqn.effects and not any(programs(eqn)):
        outputs = bind_once(eqn.primitive, args, params)
        return list(outputs) if eqn.primitive.multiple_results else [outputs]
    if eqn.primitive.name == OBJECT:
        # The rules of an object get what they are given, and ask numbers of literals for a shape.
        args = [x if hasattr(x, "shape") else _as_array(x) for x in args]
    given: Any = eqn.primitive.get_bind_params(params)
    # Until 0.7 or so a pair: functions, which come before the arguments, and the other parameters.
    functions, given = given if isinstance(given, tuple) else ((), given)
    outputs = eqn.primitive.bind(*functions, *args, **given)
    return list(outputs) if eqn.primitive.multiple_results else [outputs]


def _as_array(number: Any) -> Any:
    """Returns the number of a literal as an array of its type."""
    aval: Any = jax.typeof(number)
    return cast(number, aval.dtype, aval.weak_type)


def cast(array: Any, dtype: Any, weak_type: bool = False) -> Any:
    """Returns an array in another dtype. A program keeps this as one equation."""
    params = {"new_dtype": np.dtype(dtype), "weak_type": weak_type, "sharding": None}
    if is_differentiated((array,)):
        return bind_once(convert_element_type_p, (array,), params)
    return convert_element_type_p.bind(array, **params)


def demands_precision(eqn: JaxprEqn) -> bool:
    """Returns whether a product names how precise it is to be, and not all products do.

    An algorithm such as `F32_F32_F32` names the precision of each step.
    """
    precision = product_precision(eqn)
    if not isinstance(precision, tuple | jax.lax.Precision | None):
        return True
    highest = jax.lax.Precision.HIGHEST
    is_highest = precision is highest or (isinstance(precision, tuple) and highest in precision)
    # Set for all products, it says nothing of this one.
    return is_highest and jax.config.jax_default_matmul_precision not in ("highest", "float32")


def product_precision(eqn: JaxprEqn) -> Any:
    """Returns what a matrix product or a convolution asks of its precision, if it does."""
    return eqn.params.get("precision")


def dot_dimensions(eqn: JaxprEqn) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
    """Returns the contracted and the batch dimensions of both operands of a `dot_general`."""
    return zip(*eqn.params["dimension_numbers"], strict=True)


def with_preferred_type(eqn: JaxprEqn, old: Any, new: Any) -> dict[str, Any]:
    """Returns the parameters of a product, with another dtype if it asks to accumulate in `old`."""
    name = "preferred_element_type"
    return eqn.params | {name: new} if eqn.params.get(name) == old else eqn.params


def tangent_type(aval: Any) -> Any:
    """Returns the type of the derivatives of arrays of a type."""
    return aval.to_tangent_aval()


def zero_cotangent(aval: Any) -> Any:
    """Returns what says to a function of `jax.vjp` that nothing depends on an output.

    It is `None` if this JAX takes only arrays there. A derivative rule sees the difference: that of
    `vmap` raises an error for zeros which are one array for the whole batch.
    """
    if not _takes_zeros():
        return None
    return ad.Zero(aval.to_ct_aval() if hasattr(aval, "to_ct_aval") else tangent_type(aval))


@functools.cache
def _takes_zeros() -> bool:
    with jax.ensure_compile_time_eval():
        _, pull = jax.vjp(lambda x: (x, x), np.float32(1))
        try:
            pull((np.float32(1), ad.Zero(jax.typeof(np.float32(1)))))
        except Exception:  # nobody knows what a JAX that does not take it raises
            return False
    return True


_PROGRAMS = (Jaxpr, ClosedJaxpr)  # asked of each parameter of each equation: a union takes longer


def _is_program(value: Any) -> bool:
    return isinstance(value, _PROGRAMS)


def _check_programs(eqn: JaxprEqn, *known: Any) -> None:
    if any(all(each is not one for one in known) for each in _own_programs(eqn)):
        raise ValueError("it holds another program")


def _fitting(program: Any, inputs: Sequence[Any], outputs: Sequence[Any] | None) -> ClosedJaxpr:
    """Returns a program with its constants, or raises a `ValueError` if it takes other arrays."""
    jaxpr = closed(program).jaxpr
    for found, expected in ((jaxpr.invars, inputs), (jaxpr.outvars, outputs)):
        if expected is not None and len(found) != len(expected):
            raise ValueError(f"{len(found)} variables for {len(expected)}")
    return closed(program)


# Calls: the name of the equation, and the parameter with the program.
CALLS = {
    "jit": "jaxpr",  # since JAX 0.7
    "pjit": "jaxpr",  # before
    "closed_call": "call_jaxpr",
    "call": "call_jaxpr",  # before JAX 0.12
    "eval_jaxpr": "call_jaxpr",  # since: what a traced function leaves where it is called
    "remat2": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    OBJECT: "_prim",
}

# Those of them that mean no more than their program and could as well be two calls.
_JITS, _INLINED = ("jit", "pjit"), ("closed_call", "call", "eval_jaxpr")
_DIVISIBLE = (*_JITS, *_INLINED, "remat2")


@_reader
def callee(eqn: JaxprEqn) -> ClosedJaxpr:
    """Returns the program that an equation calls with its own inputs."""
    if eqn.primitive.name == OBJECT:
        if takes_own_types(eqn):
            raise ValueError("its program takes what these values consist of")
        _check_programs(eqn)
        return _fitting(_held(eqn), eqn.invars, eqn.outvars)
    program: Any = eqn.params[CALLS[eqn.primitive.name]]
    _check_programs(eqn, program)
    return _fitting(program, eqn.invars, eqn.outvars)


@_reader
def _held(eqn: JaxprEqn) -> ClosedJaxpr:
    """Returns the program of an object, which takes the arrays that its inputs consist of."""
    return closed(hijax.program_of(eqn))


def is_placed(eqn: JaxprEqn) -> bool:
    """Returns whether a `jit` says where its inputs are, or how they are laid out."""
    return not _is_open(eqn, "in")


def is_divisible(eqn: JaxprEqn) -> bool:
    """Returns whether an equation is a call that could as well be two, and says no placement."""
    is_call = operation(eqn) in _DIVISIBLE
    return is_call and _is_open(eqn, "in") and _is_open(eqn, "out")


def _is_open(eqn: JaxprEqn, side: str) -> bool:
    shardings, layouts = (eqn.params.get(f"{side}_{what}", ()) for what in ("shardings", "layouts"))
    unspecified = all(type(each).__name__ == "UnspecifiedValue" for each in shardings)
    return unspecified and all(each is None for each in layouts)


def with_inputs(params: dict[str, Any], numbers: Sequence[int]) -> dict[str, Any]:
    """Returns the parameters of a `jit` that takes a number of arrays for each of its inputs."""
    return params | {
        name: tuple(x for x, n in zip(params[name], numbers, strict=True) for _ in range(n))
        for name in ("in_shardings", "in_layouts", "donated_invars")
        if name in params
    }


@_reader
def with_rematted(
    eqn: JaxprEqn, program: Jaxpr, numbers: Sequence[int] | None = None
) -> dict[str, Any]:
    """Returns the parameters of a `jax.checkpoint` of another program.

    That takes a number of arrays for each of the inputs, after constants of its own; or inputs of
    which nothing is known.
    """
    held = eqn.params.get("_prim")
    options = eqn.params if held is None else held.params
    prevent_cse = options["prevent_cse"]
    if not isinstance(prevent_cse, bool):  # since JAX 0.12 one for each input
        size = len(program.invars)
        prevent_cse = _spread(prevent_cse, numbers, size) if numbers else any(prevent_cse)
    options = options | {"jaxpr": program, "prevent_cse": prevent_cse}
    return options if held is None else eqn.params | {"_prim": type(held)(**options)}


def _spread(of_inputs: Sequence[bool], numbers: Sequence[int], size: int) -> tuple[bool, ...]:
    of_arrays = [x for x, n in zip(of_inputs, numbers, strict=True) for _ in range(n)]
    return (*[False] * (size - len(of_arrays)), *of_arrays)


def rematerialized(program: ClosedJaxpr, *, prevent_cse: bool) -> Callable[..., list[Any]]:
    """Returns a function that runs a program, which the backward pass computes again.

    With `prevent_cse` a barrier keeps XLA from taking what the forward pass computed.
    """
    eqn, (jaxpr, consts) = _remat(prevent_cse), without_constants(program)
    if eqn.primitive.name == OBJECT and hijax.in_forward_rule.get():
        return _recomputed_transposed(program, prevent_cse)
    params = with_rematted(eqn, jaxpr)
    return differentiated_once(lambda *args: bind(eqn, [*consts, *args], params))


def _recomputed_transposed(program: ClosedJaxpr, prevent_cse: bool) -> Callable[..., list[Any]]:
    """Returns a function that runs a program, which the transposed program computes again.

    JAX's new `jax.checkpoint` cannot be transposed where it stands. A `custom_jvp` function can,
    and all that is kept for that are its arguments.
    """

    def run(*args: Any) -> list[Any]:
        # One barrier each: the outputs of a common one would all depend on what is transposed.
        given = map(jax.lax.optimization_barrier, args) if prevent_cse else args
        return list(jaxpr_as_fun(program)(*given))

    recomputed = jax.custom_jvp(run)
    recomputed.defjvp(functools.partial(jax.jvp, run))
    return recomputed


@hijax.remember_by_form
def _remat(prevent_cse: bool) -> JaxprEqn:
    # Its primitive and parameters come from JAX itself, as both have changed.
    negate = jax.checkpoint(jnp.negative, prevent_cse=prevent_cse)
    return jax.make_jaxpr(negate)(0.0).eqns[0]


def call_part(eqn: JaxprEqn, part: Callable[..., Any], args: Sequence[Any]) -> list[Any]:
    """Returns the outputs of a part of what a divisible equation calls, called as that is."""
    name = operation(eqn)
    if name in _JITS:
        return list(jax.jit(part)(*args))
    if name in _INLINED:
        return list(part(*args))
    jaxpr, consts = _traced(part, tuple(map(jax.typeof, args)))
    return bind(eqn, [*consts, *args], with_rematted(eqn, jaxpr))


_traced_parts: WeakKeyDictionary[Any, dict[Any, tuple[Jaxpr, list[Any]]]] = WeakKeyDictionary()


def _traced(part: Callable[..., Any], types: tuple[Any, ...]) -> tuple[Jaxpr, list[Any]]:
    """Returns the program of a part and its constants. It is one, however often it is called."""
    known = _traced_parts.setdefault(part, {})
    if types not in known:
        known[types] = without_constants(jax.make_jaxpr(part)(*types))
    return known[types]


def backward_rule(eqn: JaxprEqn) -> str | None:
    """Returns the name of the backward rule of a `custom_vjp` function, if it has one."""
    rules = getattr(eqn.params.get("_prim"), "params", eqn.params)
    name = getattr(rules.get("bwd"), "__name__", None)
    return None if name is None else str(name)


def refuse_transposing(array: Any, reason: str) -> Any:
    """Returns an array as it is, of which a reverse-mode derivative is a `TypeError`."""
    return _REFUSING.bind(array, reason=reason)


def note_transposing(array: Any, note: Callable[[], None]) -> Any:
    """Returns an array as it is. Tracing a reverse-mode derivative of it calls `note`."""
    return _NOTING.bind(array, note=note)


def _identity(name: str, transpose: Callable[..., Any]) -> Primitive:
    """Returns a primitive that does nothing, with a rule of its own for reverse mode."""
    primitive = Primitive(name)
    primitive.def_impl(lambda array, **_: array)
    primitive.def_abstract_eval(lambda aval, **_: aval)
    ad.deflinear2(primitive, transpose)
    batching.defvectorized(primitive)
    lowering = mlir.lower_fun(lambda array, **_: array, multiple_results=False)
    mlir.register_lowering(primitive, lowering)
    return primitive


def _raise_reason(*_: Any, reason: str) -> Any:
    raise TypeError(reason)


def _call_note(cotangent: Any, *_: Any, note: Callable[[], None]) -> list[Any]:
    note()
    return [cotangent]


_REFUSING = _identity("jaxscale_refuse_transposing", _raise_reason)
_NOTING = _identity("jaxscale_note_transposing", _call_note)


class Scan(NamedTuple):
    """A `scan`: the numbers of its constants and carries, which come first, and its body."""

    body: ClosedJaxpr
    consts: int
    carries: int
    length: int
    reverse: bool


@_reader
def scan(eqn: JaxprEqn) -> Scan:
    params = eqn.params
    if "ft_in" in params:  # since JAX 0.11: https://github.com/jax-ml/jax/pull/39005
        consts, carries, _ = map(len, params["ft_in"].unpack())
        carried, _ = map(len, params["ft_out"].unpack())
        if carried != carries:
            raise ValueError("other carries come out than go in")
    else:
        consts, carries = params["num_consts"], params["num_carry"]
    _check_programs(eqn, params["jaxpr"])
    body = _fitting(params["jaxpr"], eqn.invars, eqn.outvars)
    return Scan(body, consts, carries, int(params["length"]), bool(params["reverse"]))


def scan_again(
    eqn: JaxprEqn, body: ClosedJaxpr, consts: Sequence[Any], carries: Sequence[Any], xs: Any
) -> list[Any]:
    """Returns the outputs of a `scan` with another body, of more constants or slices."""

    def step(carries: Any, sliced: Any) -> Any:
        outputs = jaxpr_as_fun(body)(*consts, *carries, *sliced)
        return tuple(outputs[: len(carries)]), outputs[len(carries) :]

    names = ("length", "reverse", "unroll", "_split_transpose")  # the last until JAX 0.10
    options: Any = {name: eqn.params[name] for name in names if name in eqn.params}
    carried, stacked = jax.lax.scan(step, tuple(carries), tuple(xs), **options)
    return [*carried, *stacked]


class While(NamedTuple):
    """A `while`: its test and its body, with the numbers of the constants that each takes."""

    test: ClosedJaxpr
    test_consts: int
    body: ClosedJaxpr
    body_consts: int


@_reader
def while_loop(eqn: JaxprEqn) -> While:
    params = eqn.params
    test, body, number = params["cond_jaxpr"], params["body_jaxpr"], params["cond_nconsts"]
    _check_programs(eqn, test, body)
    test = _fitting(test, [*eqn.invars[:number], *eqn.outvars], None)
    body = _fitting(body, eqn.invars[number:], eqn.outvars)
    return While(test, number, body, params["body_nconsts"])


@_reader
def branches(eqn: JaxprEqn) -> list[ClosedJaxpr]:
    """Returns the branches of a `cond`, whose first input is the index."""
    found = eqn.params["branches"]
    _check_programs(eqn, *found)
    return [_fitting(branch, eqn.invars[1:], eqn.outvars) for branch in found]


class Mapped(NamedTuple):
    """A `shard_map` or a `pmap`: its program, and what maps another function alike.

    `map` makes a new one, so that a parameter more would be lost. It takes other specs than its
    own by their names in `jax.shard_map`.
    """

    program: ClosedJaxpr
    map: Callable[..., Callable[..., Any]]
    options: dict[str, Any]  # those of `jax.shard_map` or `jax.pmap`
    inputs: str  # the option that says for each input how it is mapped


@_reader
def mapped(eqn: JaxprEqn) -> Mapped:
    """Returns what a `shard_map` does, or a `pmap` where that is an equation: before JAX 0.8."""
    params = dict(eqn.params)
    if eqn.primitive.name == "shard_map":
        # Of JAX 0.6: `manual_axes`.
        axes = "newly_manual_axes" if "newly_manual_axes" in params else "manual_axes"
        program = params.pop("jaxpr")
        options = {
            "axis_names": set(params.pop(axes)),
            "in_specs": tuple(params.pop("in_specs")),
            "out_specs": tuple(params.pop("out_specs")),
            "mesh": params.pop("mesh"),
            "check_vma": params.pop("check_vma"),
        }
        transform, inputs = jax.shard_map, "in_specs"
    else:
        program = params.pop("call_jaxpr")
        names = ("axis_name", "in_axes", "out_axes", "devices", "backend", "axis_size")
        options = {name: params.pop(name) for name in names}
        for name in ("name", "donated_invars", "global_axis_size", "is_explicit_global_axis_size"):
            params.pop(name, None)
        transform, inputs = jax.pmap, "in_axes"
    if params:
        raise ValueError(f"more parameters: {', '.join(params)}")
    program = _fitting(program, eqn.invars, None)
    return Mapped(program, lambda fun, **other: transform(fun, **options | other), options, inputs)
