"""A traced program, run again with its matrix products in half precision.

`Autocast.run` goes through a jaxpr once, in one flat loop, and binds each equation in whatever
trace is current, so that `grad`, `vmap` and `jit` outside see ordinary operations. A value that
the program declares as float32 may be *narrow*: computed in half precision. A `Frame` holds the
values of one jaxpr, each in the precision it was computed in, and casts them on demand. It casts
each value once, in the equation that needs it first.

The rules for equations that hold no others are here; `structure` has those of loops, calls and
functions with derivative rules of their own.
"""

import contextvars
import warnings
import weakref
from collections.abc import Callable, Container, Sequence
from typing import Any

import jax
import numpy as np

from .._jax import (
    TESTED,
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    UnknownFormError,
    bind,
    cast,
    context,
    current_scopes,
    frames_of_jax,
    source,
)
from .arguments import Flat
from .atoms import (
    FLOAT32,
    Constant,
    Kind,
    Parameter,
    Product,
    elements,
    has_dtype,
    is_float32,
    is_floating,
    is_full_precision,
    literal_kind,
)
from .chains import LONGEST, Link, Narrow, compute
from .table import (
    CHAINED,
    CHOICES,
    ELEMENTWISE,
    LIBRARIES,
    LIBRARY_PRODUCTS,
    MOVES,
    PRODUCTS,
    SUMMED_BACKWARD,
)
from .table import FLOAT32 as FLOAT32_OPERATIONS
from .uses import last_uses, only_float32

# The primitives that the call under way has warned of.
_named: contextvars.ContextVar[frozenset[str]]
_named = contextvars.ContextVar("named", default=frozenset())

# Why a primitive with a rule runs as it is written.
_OTHER_FORM = (
    f"JAX {jax.__version__} gives it other parameters than the versions that jaxscale was tested "
    f"with, {TESTED}"
)

# Evaluates an equation: it returns the outputs, and which of these are narrow.
Outputs = tuple[Sequence[Any], Sequence[bool]]
Rule = Callable[["Frame", JaxprEqn], Outputs]


class Frame:
    """The values of one jaxpr while it runs."""

    __slots__ = (
        *("autocast", "dtype", "halves", "in_loop", "kinds", "links", "narrow", "only_float32"),
        *("repeats", "scopes", "values", "wides"),
    )

    def __init__(self, autocast: "Autocast", jaxpr: Jaxpr, in_loop: bool) -> None:
        self.autocast, self.dtype = autocast, autocast.dtype
        self.in_loop = in_loop  # part of a body: XLA compiles its backward pass apart
        self.scopes = current_scopes()
        self.only_float32 = only_float32(jaxpr)
        self.links: dict[Any, Link] = {}  # float32 values that are not computed yet
        self.repeats = 2 * len(jaxpr.eqns) + LONGEST  # how often their equations may be computed
        self.values: dict[Any, Any] = {}
        self.narrow: set[Any] = set()  # declared as float32, and computed in half precision
        self.kinds: dict[Any, Kind] = {}
        self.halves: dict[Any, Any] = {}  # casts of values that are not narrow
        self.wides: dict[Any, Any] = {}  # casts of values that are

    def is_narrow(self, atom: Any) -> bool:
        """Returns whether a value is declared as float32 and computed in half precision."""
        return not isinstance(atom, Literal) and atom in self.narrow

    def kind(self, atom: Any) -> Kind:
        """Returns what else is known of a value."""
        if isinstance(atom, Literal):
            return literal_kind(atom, self.dtype) if is_float32(atom) else None
        return self.kinds.get(atom)

    def read(self, atom: Any) -> Any:
        """Returns a value in the precision it was computed in."""
        if isinstance(atom, Literal):
            return atom.val
        return self.wide(atom) if atom in self.links else self.values[atom]

    def wide(self, atom: Any) -> Any:
        """Returns a value in the dtype that the program declares."""
        if isinstance(atom, Literal):
            return atom.val
        if atom not in self.narrow and atom not in self.links:
            return self.values[atom]
        if atom not in self.wides:
            if atom in self.links:
                self.wides[atom] = self._compute(atom, FLOAT32)
            else:
                self.wides[atom] = cast(self.values[atom], FLOAT32, atom.aval.weak_type)
        return self.wides[atom]

    def half(self, atom: Any) -> Any:
        """Returns a value in half precision if it is declared as float32."""
        if isinstance(atom, Literal):
            scalar = is_float32(atom) and np.ndim(atom.val) == 0
            if scalar:
                return self.dtype.type(atom.val)
            return cast(atom.val, self.dtype) if is_float32(atom) else atom.val
        if atom in self.narrow or not is_float32(atom):
            return self.values[atom]
        if atom not in self.halves:
            if atom in self.links:
                self.halves[atom] = self._compute(atom, self.dtype)
            else:
                self.halves[atom] = cast(self.values[atom], self.dtype, atom.aval.weak_type)
        return self.halves[atom]

    def defer(self, eqn: JaxprEqn) -> None:
        """Leaves an equation to be computed when its output is read."""
        self.links[eqn.outvars[0]] = Link(eqn, [*map(self._held, eqn.invars)])

    def settle(self, atom: Any) -> None:
        """Computes a value that was left to be computed, once for all that read it."""
        self.values[atom] = self.wide(atom)
        del self.links[atom]

    def _held(self, atom: Any) -> Any:
        if isinstance(atom, Literal):
            return None
        if atom in self.narrow:
            return Narrow(self.values[atom], self.wide(atom))
        return self.links[atom] if atom in self.links else self.values[atom]

    def _compute(self, atom: Any, dtype: Any) -> Any:
        value, count = compute(self.links[atom], dtype, self.scopes, self.in_loop)
        self.repeats -= count
        return value

    def write(self, var: Any, value: Any, narrow: bool, kind: Kind = None) -> None:
        """Stores the value of a variable."""
        self.values[var] = value
        if narrow:
            self.narrow.add(var)
        if kind is not None:
            self.kinds[var] = kind

    def forget(self, var: Any) -> None:
        """Lets go of the arrays of a variable that is not read again."""
        for held in (self.values, self.halves, self.wides, self.links):
            held.pop(var, None)


class Autocast:
    """Runs traced programs with their products in one half-precision dtype.

    It remembers the bodies of loops and calls that it has rewritten, for as long as the program
    lives that they are from: a function that is called many times is rewritten once.
    """

    def __init__(self, dtype: Any, rules: dict[str, Rule], other: Callable[..., Outputs]) -> None:
        self.dtype = np.dtype(dtype)
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
    ) -> tuple[list[Any], list[Kind]]:
        """Returns the outputs of a program, some of them narrow, and their kinds.

        Args:
          closed: the program.
          args: its arguments. Those declared as float32 may be in half precision.
          kinds: what is known of them.
          in_loop: whether it is part of the body of a loop.
        """
        jaxpr = closed.jaxpr
        frame = Frame(self, jaxpr, in_loop)
        for var, const in zip(jaxpr.constvars, closed.consts, strict=True):
            frame.write(var, const, False, parameter(var))
        for var, arg, kind in zip(jaxpr.invars, args, kinds, strict=True):
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
        program = jax.make_jaxpr(flat)(*flat.arrays)
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


def as_written(frame: Frame, eqn: JaxprEqn) -> Outputs:
    """Evaluates an equation in the dtypes that the program declares."""
    return bind(eqn, [frame.wide(atom) for atom in eqn.invars]), (False,) * len(eqn.outvars)


def in_float32(frame: Frame, eqn: JaxprEqn) -> Outputs:
    """Evaluates an equation in float32, or leaves it to be computed with what follows it."""
    if not _is_chained(frame, eqn):
        return as_written(frame, eqn)
    inner = [frame.links[atom] for atom in eqn.invars if atom_in(atom, frame.links)]
    if 1 + sum(link.size for link in inner) > LONGEST or frame.repeats < 0:
        for atom in eqn.invars:
            if atom_in(atom, frame.links):
                frame.settle(atom)
        if not any(map(frame.is_narrow, eqn.invars)):
            return as_written(frame, eqn)
    frame.defer(eqn)
    return (), ()


def atom_in(atom: Any, held: Container[Any]) -> bool:
    """Returns whether an atom is a variable that something holds. Literals have no hash."""
    return not isinstance(atom, Literal) and atom in held


def _is_chained(frame: Frame, eqn: JaxprEqn) -> bool:
    name = eqn.primitive.name
    if name not in CHAINED or len(eqn.outvars) != 1 or not is_float32(eqn.outvars[0]):
        return False
    linked = [atom_in(atom, frame.links) for atom in eqn.invars]
    if name != "add":
        return any(linked) or any(map(frame.is_narrow, eqn.invars))
    # Where `add` is a residual connection, its sum is what the next layer starts from.
    return any(linked) and all(
        is_link or frame.is_narrow(atom) or isinstance(frame.kind(atom), Constant | Parameter)
        for is_link, atom in zip(linked, eqn.invars, strict=True)
    )


def product(frame: Frame, eqn: JaxprEqn) -> Outputs:
    """Evaluates a matrix product or a convolution in half precision, and others as written."""
    if not is_cast(eqn):
        return as_written(frame, eqn)
    params = eqn.params
    if params.get("preferred_element_type") == FLOAT32:
        # JAX writes it in a float32 program by itself. Hardware accumulates in float32 anyway.
        params = params | {"preferred_element_type": frame.dtype}
    (var,) = eqn.outvars
    frame.kinds[var] = Product()
    return bind(eqn, [frame.half(atom) for atom in eqn.invars], params), (True,)


def is_cast(eqn: JaxprEqn) -> bool:
    """Returns whether an equation is a product of float32 arrays, without a demand of its own."""
    if eqn.primitive.name not in PRODUCTS:
        return False
    floating = filter(is_floating, (*eqn.invars, *eqn.outvars))
    precision = eqn.params.get("precision")
    # An algorithm such as `F32_F32_F32` names the precision of each step.
    named = not isinstance(precision, tuple | jax.lax.Precision | None)
    is_typed = is_float32(eqn.outvars[0]) and all(map(is_float32, floating)) and not named
    return is_typed and _is_of_matrices(eqn) and not _is_of_library(eqn)


def _is_of_matrices(eqn: JaxprEqn) -> bool:
    """Returns whether a product has something to sum over, and a row or a column left over.

    Otherwise it is a product of elements, or a sum of such products. Half precision makes these no
    faster, and a sum that is a loss gets the loss scale itself as its cotangent.
    """
    if eqn.primitive.name != "dot_general":
        return True
    summed, free = [], []
    for atom, contracted, batch in zip(eqn.invars, *eqn.params["dimension_numbers"], strict=True):
        for i, size in enumerate(atom.aval.shape):
            is_one = type(size) is int and size == 1  # it is not a number if it is not known yet
            if i not in batch and not is_one:
                (summed if i in contracted else free).append(size)
    return bool(summed and free)


def _is_of_library(eqn: JaxprEqn) -> bool:
    """Returns whether a product is a step of an algorithm of JAX that is written for float32."""
    for file, function in frames_of_jax(eqn):
        if file in LIBRARIES:
            return function not in LIBRARY_PRODUCTS
    return False


def follow(frame: Frame, eqn: JaxprEqn) -> Outputs:
    """Evaluates an equation in half precision if all its floating-point arrays are in it."""
    return _follow(frame, eqn, exact_in_float32=False)


def _follow(frame: Frame, eqn: JaxprEqn, exact_in_float32: bool) -> Outputs:
    narrow = False
    for atom in eqn.invars:
        if frame.is_narrow(atom):
            narrow = True
        elif is_float32(atom) and not isinstance(frame.kind(atom), Constant):
            return in_float32(frame, eqn)
    if not narrow:
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
    return _follow(frame, eqn, exact_in_float32=_is_summed_backward(eqn))


def choose(frame: Frame, eqn: JaxprEqn) -> Outputs:
    """Evaluates an equation that moves or chooses elements of its inputs."""
    return _follow(frame, eqn, exact_in_float32=_is_summed_backward(eqn))


def _is_summed_backward(eqn: JaxprEqn) -> bool:
    grows = elements(eqn.outvars[0]) > elements(eqn.invars[0])
    name = eqn.primitive.name
    return name in SUMMED_BACKWARD and (grows or name != "broadcast_in_dim")


def add(frame: Frame, eqn: JaxprEqn) -> Outputs:
    """Evaluates a sum. To a product, a bias is added in half precision."""
    kinds = [frame.kind(atom) for atom in eqn.invars]
    (var,) = eqn.outvars
    for one, other in (kinds, kinds[::-1]):
        if isinstance(one, Product) and isinstance(other, Product):
            frame.kinds[var] = Product()
        elif isinstance(one, Product) and isinstance(other, Parameter):
            aval: Any = var.aval
            if aval.ndim <= 1 or other.size < elements(var):
                frame.kinds[var] = Product()
                return bind(eqn, [frame.half(atom) for atom in eqn.invars]), (True,)
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
    (var,) = eqn.outvars
    dtype = np.dtype(eqn.params["new_dtype"])
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
