"""Warnings about products that stay in float32: none does in silence.

A call of `autocast` warns of each primitive once. It also warns of products that it casts if it is
not known whether they are the model's. If it has nothing else to warn of, it warns if it changed
nothing at all.
"""

import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax

from .._boundary import is_boundary
from .._jax import jaxprs
from .._jax.jaxprs import (
    ClosedJaxpr,
    Form,
    Jaxpr,
    JaxprEqn,
    form_of,
    holds_inexact,
    once_for_each_program,
    operation,
    programs,
    variables,
    walk_program,
)
from . import table
from .cast_products import (
    EXACT,
    NOT_OF_MATRICES,
    OF_LIBRARY,
    OF_OTHER_ARRAYS,
    OWN_PRECISION,
    casts_anything,
    has_products,
    is_cast,
    is_castable,
    is_never_entered,
    why_not_cast,
)
from .half_sums import adds_halves
from .narrow_values import HALVES, is_float32, is_full_precision, is_half, marker_of
from .product_owner import OF_MODEL, CallSite, Origin, origin_of, outermost
from .rules import SIMPLE_RULES

_NO_RULE = "`autocast` has no rule for it"
_CLOSED = "`autocast` cannot look into it"
_UNKNOWN_FORM = (
    f"JAX {jax.__version__} gives it other parameters than the versions that jaxscale was tested "
    f"with, {jaxprs.TESTED}"
)

_NO_PRODUCT = (
    "there is no product of float32 matrices in its forward pass, and no convolution"
)

# What is said of a product that stays in float32.
_SAID = {
    EXACT: "has numbers that must be exact, such as counts and indices",
    OWN_PRECISION: "asks for a precision of its own",
    OF_LIBRARY: "is a step of a library that is written for float32",
}

# The primitives that the call under way has warned of.
_warned_of: ContextVar[frozenset[str]] = ContextVar("warned_of", default=frozenset())

# Whether the next jaxpr is that of a call of the user. It holds all others of the call.
_is_first: ContextVar[bool] = ContextVar("is_first", default=False)


def forget_warnings() -> None:
    """Begins a call, which warns of each primitive once."""
    _warned_of.set(frozenset())
    _is_first.set(True)


def warn_of_uncast_primitives(program: ClosedJaxpr) -> None:
    """Warns of the primitives in a jaxpr whose products, if any, run as they are written.

    In the first jaxpr of a call, also warns of products that are cast but may be a library's.
    """
    if _is_first.get():
        _is_first.set(False)
        _warn_of_unknown_callers(program)
    for name, reason in _find_left(program).items():
        if name in _warned_of.get():
            continue
        _warned_of.set(_warned_of.get() | {name})
        _warn(
            f"`autocast`: the products inside of the JAX primitive `{name}` run as they are "
            f"written, because {reason}. If that is what you want, mark it with "
            "`jaxscale.full_precision`. If it is a kernel that takes half precision, mark it with "
            "`jaxscale.half_precision`."
        )


def _warn_of_unknown_callers(program: ClosedJaxpr) -> None:
    counts = _count_unknown(program, OF_MODEL, outermost(program))
    if not counts:
        return
    _warned_of.set(_warned_of.get() | counts.keys())
    products = "1 product"
    if counts.total() > 1:
        products = f"{counts.total()} products"
    _warn(
        f"`autocast` casts {products} of {', '.join(counts)}, which jaxscale does not know in JAX "
        f"{jax.__version__}. If that is an algorithm written for float32, mark the call with "
        "`jaxscale.full_precision`. If it only calls what is yours, all is well. Please report it "
        "in both cases."
    )


@once_for_each_program
def _count_unknown(program: Jaxpr, around: Origin, site: CallSite) -> Counter[str]:
    """Counts the products that are cast though their caller is unknown, by that caller."""
    counts: Counter[str] = Counter()
    for eqn in program.eqns:
        inner_programs = list(programs(eqn))
        is_product = eqn.primitive.name in table.PRODUCTS
        if not (is_product or inner_programs) or is_full_precision(eqn):
            continue
        if is_never_entered(eqn):
            continue
        origin = origin_of(eqn, around)
        if is_product and origin.unknown and is_cast(eqn, site):
            counts[origin.unknown] += 1
        for inner in inner_programs:
            counts += _count_unknown(inner, origin, site.inside(eqn, inner))
    return counts


@once_for_each_program
def _find_left(program: Jaxpr) -> dict[str, str]:
    """Returns the primitives with products that run as they are written, each with the reason."""
    left: dict[str, str] = {}
    # what callbacks return that nothing in float32 went into
    from_host: set[Any] = set()
    for eqn in program.eqns:
        if is_full_precision(eqn):
            continue
        name = operation(eqn)
        if name in table.OPAQUE and _reads_nothing_but(from_host, eqn):
            # Such as the errors of Equinox: the second of two callbacks gets what the first
            # returns, to run after it.
            from_host.update(eqn.outvars)
            continue
        if name in SIMPLE_RULES:
            continue
        reason = _reason_left(eqn)
        if reason:
            left[eqn.primitive.name] = reason
        elif form_of(eqn) is not Form.NONE:
            for inner in programs(eqn):
                left |= _find_left(inner)
    return left


def _reads_nothing_but(known: set[Any], eqn: JaxprEqn) -> bool:
    """Returns whether an equation reads no float32 values besides those that are known."""
    return known.issuperset(filter(is_float32, variables(eqn.invars)))


def _reason_left(eqn: JaxprEqn) -> str | None:
    """Returns the reason to run the inside of an equation as it is written, or `None`."""
    form = form_of(eqn)
    if form is Form.NONE:
        if not _may_have_products(eqn):
            return None
        if eqn.primitive.name in table.OPAQUE:
            return _CLOSED
        return _NO_RULE
    try:
        jaxprs.open_equation(eqn)
    except jaxprs.UnknownFormError:
        return _reason_unread(eqn)
    has_refs = any(map(jaxprs.is_ref, eqn.invars))
    if form in jaxprs.LOOPS_AND_BRANCHES and has_refs and has_products(eqn):
        return _NO_RULE
    return None


def _reason_unread(eqn: JaxprEqn) -> str | None:
    """Returns the reason why an equation was not read, or `None` if no product is in it."""
    if any(programs(eqn)) and not has_products(eqn):
        return None
    class_name = jaxprs.class_of_object(eqn)
    if class_name is None:
        return _UNKNOWN_FORM
    return (
        f"it is a `{class_name}`, which is no program of arrays in a form that jaxscale knows; it "
        f"was tested with JAX {jaxprs.TESTED}"
    )


def _may_have_products(eqn: JaxprEqn) -> bool:
    """Returns whether there may be products in an equation that no rule looks into.

    There are if it holds jaxprs with products. There may be if jaxprs are reached from it in
    another way, or if its primitive is one that nobody can look into and returns float32.
    """
    if eqn.primitive.name in table.OPAQUE:
        return any(map(is_float32, eqn.outvars))
    if any(programs(eqn)):
        return has_products(eqn)
    return jaxprs.reaches_program(eqn)


def warn_if_unchanged(program: ClosedJaxpr, name: str) -> None:
    """Warns if `autocast` casts nothing in a jaxpr.

    It does not if something in the jaxpr was warned of, is marked, or is in half precision.
    """
    if _warned_of.get():
        return
    if casts_anything(program):
        return
    reason = _reason_unchanged(program)
    if reason:
        _warn(
            f"`autocast` changes nothing in `{name}`: {reason}. Wrap the function that has the "
            "products, such as the loss or the model, or leave `autocast` out."
        )


def warn_of_halves_left(program: ClosedJaxpr, dtype: str) -> None:
    """Warns of products that are written in another half precision than `autocast` casts to."""
    said = describe_halves_left(program, dtype)
    if not said:
        return
    _warned_of.set(_warned_of.get() | table.PRODUCTS)
    _warn(" ".join(said))


def describe_halves_left(program: ClosedJaxpr, dtype: str) -> tuple[str, ...]:
    """Says which products are written in another half precision, and what to do about it.

    It says nothing without any, nor if the program is given nothing in that precision: then all of
    it was cast by hand.
    """
    (other,) = HALVES - {dtype}
    given = _name_inexact([*program.jaxpr.constvars, *program.jaxpr.invars])
    if other not in given:
        return ()
    lines = []
    for product in _find_products(program, outermost(program), "", ""):
        is_in_other = jaxprs.formats_of_product(product.eqn) == {other}
        if is_in_other and product.reason == OF_OTHER_ARRAYS:
            lines.append(product.line)
    if not lines:
        return ()
    return (
        f"`autocast` to {dtype} leaves products of {other} arrays alone as they are written: "
        f"{len(lines)}, the first at {lines[0] or 'no line of yours'}.",
        f"For products in {dtype}, keep the weights in float32 or {dtype}. If {other} is what you "
        "want, mark the function with `jaxscale.full_precision`.",
    )


def _is_boundary_of_halves(eqn: JaxprEqn) -> bool:
    """Returns whether an equation is a `scale_backward` of half-precision arrays.

    It has seen to their sums when it was traced.
    """
    return is_boundary(eqn) and any(map(is_half, eqn.invars))


def _reason_unchanged(program: ClosedJaxpr) -> str:
    """Returns the reason why a jaxpr has no products to cast, `""` if that is as it should be."""
    if adds_halves(program) or any(map(_is_boundary_of_halves, walk_program(program))):
        return ""  # sums of cotangents change
    has_floats = False
    dtypes: set[str] = set()  # of products
    for eqn in walk_program(program):
        if marker_of(eqn):
            return ""
        if any(holds_inexact(var.aval) for var in eqn.outvars):
            has_floats = True
        if eqn.primitive.name in table.PRODUCTS:
            dtypes.update(_name_inexact([*eqn.invars, *eqn.outvars]))
    if not dtypes.isdisjoint(("float16", "bfloat16")):
        return ""
    others = sorted(dtypes - {"float32"})
    if others:
        return f"its products are in {', '.join(others)}, and only those in float32 are cast"
    if not has_floats:
        return ""
    return _reasons_of_products(program) or _NO_PRODUCT


class _Product(NamedTuple):
    """A product of a jaxpr, or of one inside.

    Attributes:
      eqn: the equation.
      reason: why it runs as it is written, or `""` if it is cast.
      line: the user's, or `""`.
    """

    eqn: JaxprEqn
    reason: str
    line: str


def _reasons_of_products(program: ClosedJaxpr) -> str:
    """Lists the products of float32 matrices that are left, with reasons; `""` without any."""
    lines_by_reason: dict[str, list[str]] = defaultdict(list)
    for product in _find_products(program, outermost(program), "", ""):
        reason = product.reason
        if is_castable(product.eqn) and reason and reason != NOT_OF_MATRICES:
            lines_by_reason[_SAID.get(reason, reason)].append(product.line)
    parts: list[str] = []
    for reason, lines in lines_by_reason.items():
        what = "its product"
        if len(lines) > 1:
            what = f"each of {len(lines)} products"
        part = f"{what} {reason}"
        known = list(filter(None, dict.fromkeys(lines)))
        if known:
            part += f", at {known[0]}"
        if len(known) > 1:
            part += f" and {len(known) - 1} more"
        parts.append(part)
    return "; ".join(parts)


def _find_products(
    program: Jaxpr | ClosedJaxpr, site: CallSite, around: str, line: str
) -> Iterator[_Product]:
    """Yields the products in a jaxpr, but for those that are marked, or of an `autocast` inside.

    Args:
      program: the jaxpr.
      site: what is known of it from where it is called.
      around: why they run as they are written if each for itself would not, or `""`.
      line: the user's line that calls the jaxpr, or `""`.
    """
    for eqn in jaxprs.closed(program).jaxpr.eqns:
        if marker_of(eqn) or table.INNER_AUTOCAST in jaxprs.scope_names(eqn):
            continue
        own_line = jaxprs.users_line(eqn) or line
        if eqn.primitive.name in table.PRODUCTS:
            reason = why_not_cast(eqn, site)
            if around and reason in ("", OF_OTHER_ARRAYS):
                reason = around
            yield _Product(eqn, reason, own_line)
        inside = around
        if is_never_entered(eqn):
            inside = (
                f"is inside of `{operation(eqn)}`, which `autocast` leaves in float32"
            )
        for inner in programs(eqn):
            inner_site = site.inside(eqn, inner)
            yield from _find_products(inner, inner_site, inside, own_line)


def _name_inexact(atoms: Iterable[Any]) -> set[str]:
    """Returns the names of the floating-point and complex dtypes of some variables."""
    return {atom.aval.dtype.name for atom in atoms if holds_inexact(atom.aval)}


def _warn(message: str) -> None:
    warnings.warn(message, UserWarning, stacklevel=3)
