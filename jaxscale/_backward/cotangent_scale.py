"""The scale of `scale_backward`: which power of two it is, and how it falls after an overflow."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .. import _jax
from .._gradients.reduction import reduce_gradients
from .._gradients.verdict import agree
from .._trees.casts import blank
from .._trees.numbers import EXPONENT_BIAS, MANTISSA_BITS, float_bits, float_of_bits

# The scale is divided by this after an overflow. Two retries reach a 256th.
_BACKOFF = 16.0

# A scale below this would not be a normal number, and might be flushed to 0.
_SMALLEST_SCALE = 2.0**-126

# The cotangents of one loss may be smaller than those of another by 2 to this power, and keep
# their accuracy in float16. If they are smaller, the scale rises.
_HARMLESS_EXPONENTS = 12

# The scale rises by 2 to this power at most: one retry takes that back.
MOST_RAISED = 4


def choose_power(largest: jax.Array, most_raised: int) -> jax.Array:
    """Returns the power of two to scale cotangents by: it brings the largest to 1 or more, below 2.

    `largest` is an `f32[n]`: for each entry, the largest magnitude of its cotangent. If some are
    so small that they would flush, the power is raised, by 2**`most_raised` at most. It lies
    between 2**-126 and 2**126, so that it and its reciprocal are normal numbers. If a cotangent is
    not finite, it is 1. Exponents are taken from the bits: a rounded logarithm gives other numbers.
    """
    exponents = float_bits(largest) >> MANTISSA_BITS
    highest = jnp.max(exponents)
    # An entry of zeros says nothing.
    lowest = jnp.min(jnp.where(largest > 0, exponents, highest))
    spread = highest - lowest
    raised = jnp.clip(spread - _HARMLESS_EXPONENTS, 0, most_raised)
    # The bias is in both exponents.
    exponent = 2 * EXPONENT_BIAS - highest + raised
    exponent = jnp.clip(exponent, 1, 2 * EXPONENT_BIAS - 1)
    power = float_of_bits(exponent << MANTISSA_BITS)
    is_finite = jnp.all(jnp.isfinite(largest))
    return jnp.where(is_finite, power, jnp.ones_like(power))


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
    def run_pass(
        scale: jax.Array, num_repeats: jax.Array
    ) -> tuple[list[Any], jax.Array]:
        gradients = pull(scale)
        is_finite = agree(reduce_gradients(gradients).finite(), axes)
        repeats = ~is_finite & may_repeat & (num_repeats < retries)
        return gradients, repeats

    def is_unfinished(carry: _Carry) -> jax.Array:
        return carry.repeats

    def run_next(carry: _Carry) -> _Carry:
        gradients, repeats = run_pass(carry.scale, carry.num_repeats)
        lower = jnp.maximum(carry.scale / _BACKOFF, _SMALLEST_SCALE)
        return _Carry(
            scale=jnp.where(repeats, lower, carry.scale),
            num_repeats=carry.num_repeats + repeats.astype(jnp.int32),
            repeats=repeats,
            gradients=gradients,
        )

    num_repeats = jnp.zeros((), jnp.int32)
    types = jax.make_jaxpr(run_pass)(scale, num_repeats).out_avals
    *gradient_types, repeats_type = types
    # Every value that the loop carries must vary along the axes that its result varies along.
    axes_of_carry = _jax.varying(repeats_type) | _jax.varying(jax.typeof(scale))
    start = _Carry(
        scale=_jax.vary(scale, axes_of_carry),
        num_repeats=_jax.vary(num_repeats, axes_of_carry),
        repeats=_jax.vary(jnp.array(True), axes_of_carry),
        gradients=list(map(blank, gradient_types)),
    )
    last = jax.lax.while_loop(is_unfinished, run_next, start)
    return last.gradients, last.scale


class _Carry(NamedTuple):
    """What the loop of retries carries from one pass to the next."""

    scale: jax.Array  # f32[], of the next pass; after the last, that of the last
    num_repeats: jax.Array  # i32[]
    repeats: jax.Array  # bool[], whether there is a next pass
    gradients: list[Any]  # of the last pass
