"""The state of `AdaptiveLossScale` in integers, and the units that it counts in.

Binary logarithms are counted in units of 2**-16, levels in units of 2**-20. float32 holds both
exactly, so the state can store them as floats. The logarithm of a float comes from its bits, and a
scale is built from its exponent: `jnp.log2` and `jnp.exp2` may be off by an ulp, and a scale that
is not a power of two rounds every gradient.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from .._state.scale import AdaptiveState
from .._trees.numbers import EXPONENT_BIAS, MANTISSA_BITS, float_bits, float_of_bits

# How many units a binade has: of a logarithm, and of a level, which rises in smaller steps.
BINADE = 2**16
LEVEL_BINADE = 2**20
# Level units per logarithm unit.
LEVEL_UNITS = LEVEL_BINADE // BINADE
# The peak or the crest while nothing is known of it: lower than any logarithm.
UNSEEN = -256
# No largest gradient has a higher logarithm.
HIGHEST = 128 * BINADE


class IntegerState(NamedTuple):
    """An `AdaptiveState` in integers: the exponent of the scale, and units."""

    exponent: jax.Array
    peak: jax.Array  # in units of 2**-16
    level: jax.Array  # in units of 2**-20
    crest: jax.Array  # in units of 2**-16
    finite_steps: jax.Array
    held_steps: jax.Array
    overflows: jax.Array


def is_untried(state: IntegerState) -> jax.Array:
    """Returns whether the last overflow raised the crest, and no finite step has reached it since.

    Both counters restart at 0 when an overflow raises the crest, and only `held_steps` restarts
    when a step reaches it. An overflow may also restart `finite_steps` alone, and leave the crest.
    Then the counters differ, even if no step has reached the crest. (One exception: if the step
    just before that overflow reached the crest, both are 0.)
    """
    return state.held_steps == state.finite_steps


def to_floats(state: IntegerState) -> AdaptiveState:
    """Returns a state as it is carried from step to step."""
    # 2 to the power of the exponent, which is that of a normal number of float32.
    bits = (state.exponent + EXPONENT_BIAS) << MANTISSA_BITS
    return AdaptiveState(
        loss_scale=float_of_bits(bits),
        peak=state.peak.astype(jnp.float32) / BINADE,
        level=state.level.astype(jnp.float32) / LEVEL_BINADE,
        crest=state.crest.astype(jnp.float32) / BINADE,
        finite_steps=state.finite_steps,
        held_steps=state.held_steps,
        overflows=state.overflows,
    )


def heal_logarithm(logarithm: jax.Array) -> jax.Array:
    """Returns a logarithm, or `UNSEEN` for one that no step writes. `UNSEEN` itself stays."""
    return jnp.where(jnp.abs(logarithm) <= HIGHEST // BINADE, logarithm, UNSEEN)


def heal_count(count: jax.Array) -> jax.Array:
    """Returns a counter, or 0 for one below that."""
    return jnp.maximum(jnp.asarray(count, jnp.int32), 0)


def to_units(level: float) -> int:
    """Returns a level in units."""
    return int(level * LEVEL_BINADE)


def to_logarithm(level: jax.Array) -> jax.Array:
    """Returns a level in units of a logarithm, rounded down."""
    return level // LEVEL_UNITS


def to_logarithm_above(level: jax.Array) -> jax.Array:
    """Returns a level in units of a logarithm, rounded up."""
    return (level + LEVEL_UNITS - 1) // LEVEL_UNITS


def log2(number: jax.Array) -> jax.Array:
    """Returns the binary logarithm of a positive normal number in units, rounded down.

    It consists of the exponent and, behind the point, the first bits of the mantissa. So it is
    exact at powers of two and linear between them, at most 0.09 below the logarithm.
    """
    # 16 of the 23 bits of the mantissa stay, as a binade has 2**16 units.
    return (float_bits(number) >> (MANTISSA_BITS - 16)) - EXPONENT_BIAS * BINADE
