"""What `autocast` says of that which it leaves as it is. Nothing stays in float32 in silence.

A call of `autocast` warns of each primitive once. If it has nothing else to warn of, it says where
it changed nothing at all.
"""

import itertools
import warnings
from contextvars import ContextVar
from typing import Any

import jax.numpy as jnp

from .. import _jax
from .._jax import ClosedJaxpr, JaxprEqn, programs
from . import table
from .readers import casts_anything, equations, half_carries, has_products
from .values import is_float32, is_full_precision

# The primitives that the call under way has warned of.
_named: ContextVar[frozenset[str]] = ContextVar("named", default=frozenset())


def hides_products(eqn: JaxprEqn) -> bool:
    """Returns whether there may be products in an equation that no rule looks into.

    There are if it holds programs with products; maybe, if programs can be reached from it in
    another way, or if its primitive is known to run what nobody can look into.
    """
    if eqn.primitive.name in table.OPAQUE:
        return any(map(is_float32, eqn.invars)) and any(map(is_float32, eqn.outvars))
    return has_products(eqn) if any(programs(eqn)) else _jax.reaches_program(eqn)


def warn_of_primitive(name: str, reason: str) -> None:
    """Warns that the products inside of a primitive run as they are written, once a call."""
    if name not in _named.get():
        _named.set(_named.get() | {name})
        _warn(
            f"`autocast`: the products inside of the JAX primitive `{name}` run as they are "
            f"written, because {reason}. If that is what you want, mark it with "
            "`jaxscale.full_precision`."
        )


def warn_if_unchanged(program: ClosedJaxpr, name: str, carries_may_be_half: bool) -> None:
    """Warns if there is nothing in a program that `autocast` casts, or no carry of a loop.

    Not if something in it was warned of, is marked, or is in half precision already.
    """
    if _named.get():
        return
    if not casts_anything(program):
        reason = _why_nothing_is_cast(program)
        if reason:
            _warn(
                f"`autocast` changes nothing in `{name}`: {reason}. Wrap the function that has the "
                "products, such as the loss or the model, or leave `autocast` out."
            )
    elif carries_may_be_half and not any(map(_has_half_carries, _equations(program))):
        _warn(
            f"`autocast(half_carries=True)` carries nothing in half precision in `{name}`: it has "
            "no `jax.lax.scan` with a carry that is computed from a product of itself. Leave "
            "`half_carries` out."
        )


def _why_nothing_is_cast(program: ClosedJaxpr) -> str:
    """Returns why a program without products to cast has none, or `""` if that is as it should."""
    eqns = list(_equations(program))
    if any(map(is_full_precision, eqns)):
        return ""
    products = [eqn for eqn in eqns if eqn.primitive.name in table.PRODUCTS]
    dtypes = {dtype.name for eqn in products for dtype in _floating(*eqn.invars, *eqn.outvars)}
    if not dtypes.isdisjoint(("float16", "bfloat16")):
        return ""
    others = sorted(dtypes - {"float32"})
    if others:
        return f"its products are in {', '.join(others)}, and only those in float32 are cast"
    if not any(_floating(*eqn.outvars) for eqn in eqns):
        return ""
    return "there is no product of float32 matrices in it, and no convolution"


def _floating(*atoms: Any) -> list[Any]:
    """Returns the dtypes of those of some variables that are floating-point or complex."""
    dtypes = (getattr(atom.aval, "dtype", None) for atom in atoms)
    return [each for each in dtypes if each is not None and jnp.issubdtype(each, jnp.inexact)]


def _has_half_carries(eqn: JaxprEqn) -> bool:
    try:
        return eqn.primitive.name == "scan" and any(half_carries(_jax.scan(eqn)))
    except _jax.UnknownFormError:
        return False


def _equations(program: ClosedJaxpr) -> Any:
    return itertools.chain.from_iterable(map(equations, program.jaxpr.eqns))


def _warn(message: str) -> None:
    warnings.warn(message, UserWarning, stacklevel=3)
