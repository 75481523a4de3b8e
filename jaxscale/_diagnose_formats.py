"""What a number becomes in a smaller format: 0, a subnormal number, a normal one, inf.

Rounding is to nearest, ties to even. Each boundary between two outcomes has a mantissa of
few bits, so a histogram need tell apart only the mantissas between them, and what it
says is exact at every scale that is a power of two.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp

FORMATS = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")


class Boundary(NamedTuple):
    """The least number beyond a boundary, ``2**exponent * (1 + mantissa / 2**23)``."""

    exponent: int
    mantissa: int


class Format(NamedTuple):
    """Where outcomes begin, and the exponents of the numbers that a format holds."""

    nonzero: Boundary
    normal: Boundary
    overflow: Boundary
    least_exponent: int
    least_normal_exponent: int
    largest_exponent: int


def _boundary(value: float, inclusive: bool) -> Boundary:
    mantissa, exponent = math.frexp(value)
    return Boundary(exponent - 1, int((2 * mantissa - 1) * 2**23) + (not inclusive))


def _format(name: str) -> Format:
    info = jnp.finfo(name)
    largest, normal = float(info.max), float(info.smallest_normal)
    subnormal = float(info.smallest_subnormal)
    exponents = [math.frexp(value)[1] - 1 for value in (subnormal, normal, largest)]
    spacing = 2.0 ** (exponents[2] - info.nmant)  # of the largest numbers
    # A tie goes to the even neighbour: halfway to the smallest subnormal, that is 0; below
    # the smallest normal, the normal; above the largest number, what would come next if
    # its last bit is 1, and itself in e4m3fn, where all ones mean NaN.
    return Format(
        _boundary(subnormal / 2, inclusive=False),
        _boundary(normal - subnormal / 2, inclusive=True),
        _boundary(largest + spacing / 2, inclusive=largest / spacing % 2 == 1),
        *exponents,
    )


FORMAT = {name: _format(name) for name in FORMATS}

# Classes of mantissas: class `i` holds those that are at least `i` of these.
CUTS = sorted(
    {
        boundary.mantissa
        for each in FORMAT.values()
        for boundary in (each.nonzero, each.normal, each.overflow)
        if boundary.mantissa
    }
)
