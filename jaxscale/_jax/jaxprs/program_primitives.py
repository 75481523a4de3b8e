"""Primitives of our own that run a jaxpr: that of their parameter `call_jaxpr`."""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import mlir

from ..pruned_jaxprs import ClosedJaxpr


def program_primitive(name: str, expand: Callable[..., Any] | None = None) -> Any:
    """Returns a primitive that runs a jaxpr, without rules to transform it.

    Args:
      name: its name.
      expand: what it is compiled to, if that is more than the program: a function of its inputs and
        parameters.
    """
    expand = expand or _evaluate
    primitive: Any = Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(_evaluate)
    primitive.def_effectful_abstract_eval(_types_and_effects)
    # For operations in the jaxpr that are objects, which JAX replaces before it compiles.
    primitive.is_high = _is_high
    primitive.to_lojax = expand
    mlir.register_lowering(primitive, mlir.lower_fun(expand, multiple_results=True))
    return primitive


def _evaluate(*args: jax.Array, call_jaxpr: ClosedJaxpr, **_: object) -> list[Any]:
    return list(jaxpr_as_fun(call_jaxpr)(*args))


def _types_and_effects(
    *_: object, call_jaxpr: ClosedJaxpr, **__: object
) -> tuple[list[Any], Any]:
    return list(call_jaxpr.out_avals), call_jaxpr.effects


def _is_high(*_: object, call_jaxpr: ClosedJaxpr, **__: object) -> bool:
    return bool(call_jaxpr.is_high)
