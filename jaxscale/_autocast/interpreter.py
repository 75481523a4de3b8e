"""A traced program, run again with its matrix products in half precision.

`Autocast.run` goes through a jaxpr once, in one flat loop, and binds each equation in whatever
trace is current, so that `grad`, `vmap` and `jit` outside see ordinary operations. A value that
the program declares as float32 may be *narrow*: computed in half precision. A `Frame` holds the
values of one jaxpr, each in the precision it was computed in, and casts them on demand. It casts
each value once, in the equation that needs it first.

The rules for equations that hold no others are here; `higher_order` has those of loops and calls,
`custom_rules` those of functions with derivative rules of their own.
"""

import contextvars
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from .._jax import (
    TESTED,
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    UnknownFormError,
    bind,
    cast,
    context,
    programs,
    source,
    with_preferred_type,
)
from .._trees.call import Flat
from .frame import Frame, Outputs, Rule, as_written, atom_in, chained, in_float32
from .products import is_cast, joined, reads_half, under_autocast
from .readers import last_uses, rounded_reads
from .recompute import Link, map_inputs
from .table import CHOICES, ELEMENTWISE, MOVES, PRODUCTS, SUMMED_BACKWARD
from .table import FLOAT32 as FLOAT32_OPERATIONS
from .values import (
    FLOAT32,
    Constant,
    Kind,
    Parameter,
    Product,
    elements,
    has_dtype,
    is_float32,
    is_full_precision,
)

# The primitives that the call under way has warned of.
_named: contextvars.ContextVar[frozenset[str]]
_named = contextvars.ContextVar("named", default=frozenset())

# Why a primitive with a rule runs as it is written.
_OTHER_FORM = (
    f"JAX {jax.__version__} gives it other parameters than the versions that jaxscale was tested "
    f"with, {TESTED}"
)


class Autocast:
    """Runs traced programs with their products in one half-precision dtype.

    It remembers the bodies of loops and calls that it has rewritten, for as long as the program
    lives that they are from: a function that is called many times is rewritten once.
    """

    def __init__(
        self, dtype: Any, rules: dict[str, Rule], other: Callable[..., Outputs], half_carries: bool
    ) -> None:
        self.dtype, self.half_carries = np.dtype(dtype), half_carries
        self.rules, self.other = rules, other
        # For each jaxpr, by its signature: what it was rewritten to.
        self.rewritten: weakref.WeakKeyDictionary[Any, dict[Any, Any]]
        self.rewritten = weakref.WeakKeyDictionary()
        self.with_products: weakref.WeakKeyDictionary[Jaxpr, bool] = weakref.WeakKeyDictionary()

    def run(
        self,
        closed: ClosedJaxpr,
        args: Sequence[Any],
        kinds: Sequence[Kind],
        in_loop: bool = False,
        wanted: Sequence[bool] = (),
    ) -> tuple[list[Any], list[Kind]]:
        """Returns the outputs of a program, some of them narrow, and their kinds.

        Args:
          closed: the program.
          args: its arguments, some of which may be links. Those declared as float32 may be in
            half precision.
          kinds: what is known of them.
          in_loop: whether it is part of the body of a loop.
          wanted: for each output whether nothing is lost if it is rounded to half precision. Those
            without one are not.
        """
        jaxpr = closed.jaxpr
        frame = Frame(self, jaxpr, in_loop, *rounded_reads(jaxpr, reads_half, wanted))
        for var, const in zip(jaxpr.constvars, closed.consts, strict=True):
            frame.write(var, const, False, parameter(var))
        for var, arg, kind in zip(jaxpr.invars, args, kinds, strict=True):
            if isinstance(arg, Link):
                frame.kinds[var] = kind
                frame.defer(var, arg)
            else:
                frame.write(var, arg, is_float32(var) and has_dtype(arg, self.dtype), kind)
        done, rules, other = last_uses(jaxpr), self.rules, self.other
        for index, eqn in enumerate(jaxpr.eqns):
            rule = as_written if is_full_precision(eqn) else rules.get(eqn.primitive.name, other)
            with context(eqn), source(eqn, frame.scopes):
                try:
                    values, narrow = rule(frame, eqn)
                except UnknownFormError:
                    values, narrow = other(frame, eqn, _OTHER_FORM)
            if values:  # otherwise they are left to be computed
                for var, value, is_narrow in zip(eqn.outvars, values, narrow, strict=True):
                    frame.write(var, value, is_narrow)
            for var in done.get(index, ()):
                frame.forget(var)
        outvars = jaxpr.outvars
        return [frame.read(atom) for atom in outvars], [frame.kind(atom) for atom in outvars]

    def call(self, fun: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Returns what a function returns, computed with its products in half precision."""
        flat = Flat(fun, args, kwargs, getattr(fun, "__name__", "autocast"))
        token = under_autocast.set(True)
        try:
            program = jax.make_jaxpr(flat)(*flat.arrays)
        finally:
            under_autocast.reset(token)
        kinds = [parameter(var) for var in program.jaxpr.invars]
        token = _named.set(_named.get())
        try:
            outputs, _ = self.run(program, flat.arrays, kinds)
        finally:
            _named.reset(token)
        return flat.restored(map(as_declared, outputs, program.jaxpr.outvars))

    def warn(self, name: str, reason: str) -> None:
        """Warns that the products inside of a primitive run as they are written, once a call."""
        if name in _named.get():
            return
        _named.set(_named.get() | {name})
        warnings.warn(
            f"`autocast`: the products inside of the JAX primitive `{name}` run as they are "
            f"written, because {reason}. If that is what you want, mark it with "
            "`jaxscale.full_precision`.",
            UserWarning,
            stacklevel=2,
        )


def as_declared(value: Any, atom: Any) -> Any:
    """Returns a value in the dtype that a program declares."""
    if not is_float32(atom):
        return value
    weak_type = atom.aval.weak_type
    if has_dtype(value, FLOAT32) and getattr(value, "weak_type", False) == weak_type:
        return value
    return cast(value, FLOAT32, weak_type)


def parameter(var: Any) -> Kind:
    """Returns the kind of an array that a program is given."""
    return Parameter(elements(var)) if is_float32(var) else None


def product(frame: Frame, eqn: JaxprEqn) -> Outputs:
    """Evaluates a matrix product or a convolution in half precision, and others as written."""
    if not is_cast(eqn):
        return as_written(frame, eqn)
    # JAX writes float32 in a float32 program by itself. Hardware accumulates in float32 anyway.
    params = with_preferred_type(eqn, FLOAT32, frame.dtype)
    (var,) = eqn.outvars
    frame.kinds[var] = Product()
    return bind(eqn, joined(eqn, [frame.half(atom) for atom in eqn.invars]), params), (True,)


def follow(frame: Frame, eqn: JaxprEqn) -> Outputs:
    """Evaluates an equation in half precision if all its floating-point arrays are in it."""
    var: Any = eqn.outvars[0]
    invars: list[Any] = eqn.invars
    if is_float32(var) and any(
        frame.is_narrow(atom) and atom.aval.shape != var.aval.shape for atom in invars
    ):  # it broadcasts by itself, so that the derivative is a sum
        return chained(frame, eqn)
    return _follow(frame, eqn, exact_in_float32=False)


def _follow(frame: Frame, eqn: JaxprEqn, exact_in_float32: bool) -> Outputs:
    narrow = False
    for atom in eqn.invars:
        if frame.is_narrow(atom):
            narrow = True
        elif is_float32(atom) and not isinstance(frame.kind(atom), Constant):
            return in_float32(frame, eqn)
    if not narrow or any(programs(eqn)):  # a program in it is typed in float32
        return as_written(frame, eqn)
    outputs = [is_float32(var) for var in eqn.outvars]
    if not exact_in_float32:
        return bind(eqn, [frame.half(atom) for atom in eqn.invars]), outputs
    values, _ = as_written(frame, eqn)
    pairs = zip(values, outputs, strict=True)
    return [cast(value, frame.dtype) if is_half else value for value, is_half in pairs], outputs


def move(frame: Frame, eqn: JaxprEqn) -> Outputs:
    """Evaluates an equation that moves the elements of its first input."""
    moved, *_ = eqn.invars
    kind = frame.kind(moved)
    if kind is not None:
        for var in eqn.outvars:
            smaller = isinstance(kind, Parameter) and elements(var) < kind.size
            frame.kinds[var] = Parameter(elements(var)) if smaller else kind
    if eqn.primitive.name == "broadcast_in_dim" and is_float32(moved):
        frame.grown[eqn.outvars[0]] = frame.linked(eqn)
    if eqn.primitive.name == "name" and atom_in(moved, frame.links):
        frame.defer(
            eqn.outvars[0], map_inputs(frame.links[moved], lambda half: bind(eqn, [half])[0])
        )
        return (), ()
    return _follow(frame, eqn, exact_in_float32=_is_summed_backward(eqn))


def choose(frame: Frame, eqn: JaxprEqn) -> Outputs:
    """Evaluates an equation that moves or chooses elements of its inputs."""
    return _follow(frame, eqn, exact_in_float32=_is_summed_backward(eqn))


def _is_summed_backward(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name in SUMMED_BACKWARD


def add(frame: Frame, eqn: JaxprEqn) -> Outputs:
    """Evaluates a sum. What is added to a product, such as a bias, is added in float32.

    The sum is rounded for what reads it in half precision, and for nothing else.
    """
    kinds = [frame.kind(atom) for atom in eqn.invars]
    var: Any = eqn.outvars[0]
    for (one, other), atom in zip((kinds, kinds[::-1]), eqn.invars, strict=True):
        smaller = isinstance(other, Parameter) and (
            var.aval.ndim <= 1 or other.size < elements(var)
        )
        if isinstance(one, Product) and (smaller or isinstance(other, Product)):
            frame.kinds[var] = Product()
            if smaller and (frame.is_narrow(atom) or atom_in(atom, frame.links)):
                return chained(frame, eqn)
    return follow(frame, eqn)


def multiply(frame: Frame, eqn: JaxprEqn) -> Outputs:
    """Evaluates a product of elements. That of a value with itself is a power."""
    one, other = eqn.invars
    return in_float32(frame, eqn) if one is other else follow(frame, eqn)


def subtract(frame: Frame, eqn: JaxprEqn) -> Outputs:
    """Evaluates a difference. It cancels digits, so it is rounded only if something needs that.

    Before an exponential or a power, as in softmax, a variance or a loss, nothing does.
    """
    if eqn.outvars[0] in frame.only_float32:
        return in_float32(frame, eqn)
    return follow(frame, eqn)


def convert(frame: Frame, eqn: JaxprEqn) -> Outputs:
    """Evaluates a cast of the program's own."""
    atom: Any = eqn.invars[0]
    var: Any = eqn.outvars[0]
    dtype = np.dtype(var.aval.dtype)
    if is_float32(atom) and dtype == FLOAT32:
        return move(frame, eqn) if not frame.is_narrow(atom) else _same(frame, eqn)
    if is_float32(atom) and dtype == frame.dtype:
        return [frame.half(atom)], (False,)
    if frame.is_narrow(atom):  # to another type: what half precision holds is what there is
        return bind(eqn, [frame.read(atom)]), (False,)
    outputs = as_written(frame, eqn)
    if dtype == FLOAT32 and atom.aval.dtype == frame.dtype:
        frame.halves[var] = frame.read(atom)  # to cast it back would be exact
    return outputs


def _same(frame: Frame, eqn: JaxprEqn) -> Outputs:
    (atom,), (var,) = eqn.invars, eqn.outvars
    kind = frame.kind(atom)
    if kind is not None:
        frame.kinds[var] = kind
    return [frame.read(atom)], (True,)


def each(frame: Frame, eqn: JaxprEqn) -> Outputs:
    """Evaluates an equation whose outputs are its inputs, one by one."""
    narrow = [frame.is_narrow(atom) for atom in eqn.invars]
    return bind(eqn, [frame.read(atom) for atom in eqn.invars]), narrow


SIMPLE_RULES: dict[str, Rule] = (
    dict.fromkeys(FLOAT32_OPERATIONS, in_float32)
    | dict.fromkeys(PRODUCTS, product)
    | dict.fromkeys(ELEMENTWISE, follow)
    | dict.fromkeys(MOVES, move)
    | dict.fromkeys(CHOICES, choose)
    | {
        "add": add,
        "mul": multiply,
        "sub": subtract,
        "convert_element_type": convert,
        "optimization_barrier": each,
    }
)
