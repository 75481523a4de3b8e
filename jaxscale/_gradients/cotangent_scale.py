"""The scale of `scale_backward`: which power of two it is, and how it falls after an overflow."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .. import _jax
from .._trees.casts import blank
from .reduction import reduce_gradients
from .verdict import agree

# By what the scale is divided after an overflow. Two retries reach a 256th.
_BACKOFF = 16.0

# A scale below it would not be a normal number, and might be flushed to 0.
_SMALLEST_SCALE = 2.0**-126

# The cotangents of one loss may be smaller than those of another by 2 to this power, and keep
# their accuracy in float16. If they are smaller, the scale rises.
_HARMLESS_EXPONENTS = 12

# It rises by 2 to this power at most: one retry takes that back.
MOST_RAISED = 4


def choose_power(largest: jax.Array, most_raised: int) -> jax.Array:
    """Returns the power of two to scale cotangents by: it brings the largest to 1 or more, below 2.

    Given is the largest magnitude of each entry, an `f32[n]`. If those of some are so small that
    they would flush, it is raised, by 2**`most_raised` at most. Without finite cotangents it is 1,
    and otherwise 2**-126 to 2**126, so that it and its reciprocal are normal numbers. Exponents are
    taken from the bits: a rounded logarithm gives other numbers.
    """
    exponents = jax.lax.bitcast_convert_type(largest, jnp.int32) >> 23
    most = jnp.max(exponents)
    least = jnp.min(jnp.where(largest > 0, exponents, most))
    raised = jnp.clip(most - least - _HARMLESS_EXPONENTS, 0, most_raised)
    exponent = jnp.clip(254 - most + raised, 1, 253)
    power = jax.lax.bitcast_convert_type(exponent << 23, jnp.float32)
    return jnp.where(jnp.all(jnp.isfinite(largest)), power, jnp.ones_like(power))


def pull_with_retries(
    pull: Callable[[jax.Array], list[Any]],
    scale: jax.Array,
    may_repeat: jax.Array,
    retries: int,
    axes: Any,
) -> tuple[list[Any], jax.Array]:
    """Runs a backward pass, and again at a lower scale as long as its gradients overflow.

    Args:
      pull: the backward pass: a function of the scale, which returns the scaled gradients.
      scale: the scale of the first pass, an `f32[]`.
      may_repeat: whether a pass may be repeated at all, a `bool[]`.
      retries: how often it may be.
      axes: the named axes along which devices must repeat it together.

    Returns:
      The gradients of the last pass, and the scale that they were made at.
    """

    @jax.jit  # traced once, for its types and for the loop
    def run_pass(scale: jax.Array, number: jax.Array) -> tuple[list[Any], jax.Array]:
        gradients = pull(scale)
        is_finite = agree(reduce_gradients(gradients).finite(), axes)
        again = ~is_finite & may_repeat & (number < retries)
        return gradients, again

    def is_unfinished(carry: Any) -> jax.Array:
        _, _, again, _ = carry
        return again

    def run_next(carry: Any) -> Any:
        scale, number, _, _ = carry
        gradients, again = run_pass(scale, number)
        lower = jnp.maximum(scale / _BACKOFF, _SMALLEST_SCALE)
        next_scale = jnp.where(again, lower, scale)
        return next_scale, number + again.astype(jnp.int32), again, gradients

    number = jnp.zeros((), jnp.int32)
    *gradient_types, again_type = jax.make_jaxpr(run_pass)(scale, number).out_avals
    # Every value that the loop carries must vary along the axes that its result varies along.
    axes_of_carry = _jax.varying(again_type) | _jax.varying(jax.typeof(scale))
    counters = [
        _jax.vary(each, axes_of_carry) for each in (scale, number, jnp.array(True))
    ]
    no_gradients = [blank(aval) for aval in gradient_types]
    carry = (*counters, no_gradients)
    scale, _, _, gradients = jax.lax.while_loop(is_unfinished, run_next, carry)
    return gradients, scale
