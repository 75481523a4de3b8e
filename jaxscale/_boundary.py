"""The boundary of a scaled backward pass, shared by `autocast` and `scale_backward`.

`scale_backward` marks its equation with a named scope. An `autocast` around it finds the scope, and
passes float32 through the boundary: a cotangent in float16 would have flushed before it is scaled.
"""

from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
from jax.custom_derivatives import SymbolicZero

from ._jax.jaxprs import JaxprEqn, has_narrow_range, scope_names

# It stays through `grad` and `vmap`, as all named scopes do.
_SCOPE = "jaxscale_scale_backward"

NO_FORWARD = (
    "`scale_backward(fun)` was differentiated in forward mode (`jax.jvp`, `jax.jacfwd`, "
    "`jax.linearize`). There is no cotangent to scale. Differentiate `fun` itself, or use reverse "
    "mode: `jax.grad`, `jax.vjp`."
)


class TracedFor(NamedTuple):
    """The purpose of a trace.

    Attributes:
      dtype: the half precision of the `autocast` around it, or `""` without one.
      is_half: whether it is in a part that `half_precision` marks, and in no part of that which
        `full_precision` marks.
    """

    dtype: str = ""
    is_half: bool = False


# What is traced now is traced for this. JAX traces a jitted function anew if it is another.
traced_for = jax.make_user_context(TracedFor())


def mark_boundary() -> AbstractContextManager[Any]:
    """Marks what is traced in this context as the boundary of a `scale_backward`."""
    return jax.named_scope(_SCOPE)


def is_boundary(eqn: JaxprEqn) -> bool:
    """Returns whether an equation is a function that `scale_backward` wrapped."""
    return _SCOPE in scope_names(eqn)


def check_cotangent(cotangent: Any, name: str = "") -> None:
    """Raises a `TypeError` if a cotangent flushed before it reached the boundary.

    `name` is the path of the output that it belongs to, if the output is known.
    """
    if isinstance(cotangent, SymbolicZero) or not has_narrow_range(cotangent.dtype):
        return
    output = "the output"
    if name:
        output += f" {name}"
    way_out = "Return it `.astype(jnp.float32)`"
    if cotangent.shape:
        # What is one number may be the loss itself.
        way_out += ", or let `fun` include the loss"
    raise TypeError(
        f"`scale_backward(fun)`: {output} is {cotangent.dtype} and a loss depends on it, so that "
        f"its cotangent has flushed to 0 before it could be scaled. {way_out}."
    )
