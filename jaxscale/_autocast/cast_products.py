"""The products that are cast: matrix products and convolutions that the user's model asks for.

All of this is known before the jaxpr runs.
"""

from typing import Any

from .._jax import jaxprs
from .._jax.jaxprs import (
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Search,
    form_of,
    once_for_each_program,
    programs,
)
from . import table
from .narrow_values import HALVES, is_full_precision, marker_of
from .product_owner import CallSite, Owner, outermost, owner_of

# Why a product is not cast.
NOT_OF_MATRICES = "of vectors or elements, not of matrices"
OWN_PRECISION = "it asks for a precision of its own"
EXACT = "of numbers that must be exact, such as counts and indices"
OF_LIBRARY = "a step of a library that is written for float32"
OF_OTHER_ARRAYS = "not of float32 arrays"

# The formats that are cast, from and to.
_FORMATS = HALVES | {"float32"}


def is_cast(eqn: JaxprEqn, site: CallSite) -> bool:
    """Returns whether `autocast` casts the inputs of an equation to half precision.

    `site` is that of the jaxpr which the equation is part of.
    """
    if site.owner is Owner.UNCAST or eqn.primitive.name not in table.PRODUCTS:
        return False
    return not why_not_cast(eqn, site)


def why_not_cast(eqn: JaxprEqn, site: CallSite) -> str:
    """Returns the reason to run an equation as it is written, `""` if its inputs are cast."""
    if is_full_precision(eqn):
        return "marked by `jaxscale.full_precision`"
    if not _is_of_matrices(eqn):
        return NOT_OF_MATRICES
    if id(eqn) in site.exact.products:
        return EXACT
    if owner_of(eqn, site.owner) is Owner.LIBRARY:
        return OF_LIBRARY
    if jaxprs.demands_precision(eqn):
        return OWN_PRECISION
    if not is_castable(eqn):
        return OF_OTHER_ARRAYS
    return ""


def is_castable(eqn: JaxprEqn) -> bool:
    """Checks that a product is of float32 arrays, or of arrays in two formats up to float32.

    One of half-precision arrays in a single format is as its author wants it, or an `autocast`
    inside of this one. One operand may be of integers. A product of integers alone is exact in
    float32, even if its sum is beyond the range of half precision.
    """
    result: Any = eqn.outvars[0]
    formats = jaxprs.formats_of_product(eqn)
    if not formats | {result.aval.dtype.name} <= _FORMATS:
        return False
    return "float32" in formats or len(formats) > 1


def _is_of_matrices(eqn: JaxprEqn) -> bool:
    """Returns whether a product has something to sum over, and a row or a column left over.

    Otherwise it is a product of elements, or a sum of such products. Half precision makes these no
    faster, and a sum that is a loss gets the loss scale itself as its cotangent.
    """
    dimensions = jaxprs.dot_dimensions(eqn)
    if not dimensions:
        return True
    has_sum = False
    has_free = False
    operands: list[Any] = eqn.invars[: len(dimensions)]  # ours have more inputs
    for atom, (summed, batch) in zip(operands, dimensions, strict=True):
        for i, size in enumerate(atom.aval.shape):
            # it is not a number if it is not known yet
            is_one = type(size) is int and size == 1
            if i in batch or is_one:
                continue
            if i in summed:
                has_sum = True
            else:
                has_free = True
    return has_sum and has_free


def is_attention_scores(eqn: JaxprEqn, around: Owner) -> bool:
    """Returns whether a product is that of queries and keys in JAX's attention."""
    dimensions = jaxprs.dot_dimensions(eqn)
    if not dimensions:
        return False
    operands: list[Any] = eqn.invars
    for atom, (summed, _) in zip(operands, dimensions, strict=True):
        # Of the weights and the values, one is summed over another dimension than its last.
        if tuple(summed) != (atom.aval.ndim - 1,):
            return False
    return owner_of(eqn, around) is Owner.ATTENTION


_ANYWHERE = CallSite()


def has_products(eqn: JaxprEqn, site: CallSite = _ANYWHERE) -> bool:
    """Returns whether an equation holds jaxprs with anything that `autocast` casts by itself."""
    return _has_marked_rule(eqn) or any(
        holds_products(program, site.inside(eqn, program)) for program in programs(eqn)
    )


def casts_anything(program: ClosedJaxpr) -> bool:
    """Returns whether a jaxpr has anything that `autocast` casts by itself."""
    return holds_products(program, outermost(program))


@once_for_each_program
def holds_products(program: Jaxpr, site: CallSite) -> bool:
    """Returns whether a jaxpr has anything that `autocast` casts by itself."""
    return any(_is_cast_or_holds_cast(eqn, site) for eqn in program.eqns)


def _is_cast_or_holds_cast(eqn: JaxprEqn, site: CallSite) -> bool:
    if is_full_precision(eqn):
        return False
    if is_cast(eqn, site):
        return True
    return not is_never_entered(eqn) and has_products(eqn, site)


def _has_marked_rule(eqn: JaxprEqn) -> bool:
    """Returns whether an equation has derivative rules of its own, and `half_precision` in it.

    JAX traces such a rule when it differentiates: the mark in it must still be seen then.
    """
    return form_of(eqn) in table.WITH_RULES and _holds_mark.inside(eqn)


def _is_marked(eqn: JaxprEqn) -> bool:
    return marker_of(eqn) == table.HALF_PRECISION


_holds_mark = Search(_is_marked)


def is_never_entered(eqn: JaxprEqn) -> bool:
    """Returns whether the jaxprs in an equation run as they are written, whatever they are."""
    return eqn.primitive.name in table.KERNELS | table.AS_WRITTEN
