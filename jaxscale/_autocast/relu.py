"""JAX's own ReLU. Its derivative rule is known, so the rule need not be traced."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import _jax
from .._jax import ClosedJaxpr, JaxprEqn, cast, programs
from .frame import Frame
from .rules import Outputs
from .values import ToRound


def is_relu(program: ClosedJaxpr) -> bool:
    """Returns whether a program is that of `jax.nn.relu`."""
    inner = []
    for eqn in program.jaxpr.eqns:
        for called in programs(eqn):
            inner += called.eqns
    if len(program.jaxpr.eqns) != 1 or len(inner) != 1:
        return False
    return ("nn/functions.py", "relu") in _jax.frames_of_jax(inner[0])


def run_narrow_relu(frame: Frame, eqn: JaxprEqn) -> Outputs:
    """Evaluates a ReLU of a narrow value by JAX's own, which takes any dtype."""
    atom = eqn.invars[0]
    if frame.meets(atom) and not frame.is_only_rounded(eqn.outvars[0]):
        return [ToRound(jax.nn.relu(frame.read_wide(atom)))]
    return [jax.nn.relu(frame.read_own_half(atom))]


def run_rounded_relu(frame: Frame, eqn: JaxprEqn) -> Outputs:
    """Evaluates a ReLU of a float32 value that something rounds, such as a product."""
    return [_relu(frame.read_wide(eqn.invars[0]), frame.precision.narrow)]


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _relu(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """Computes a ReLU in float32 that a product in half precision reads.

    Its derivative is 0 where the product reads 0. XLA keeps the rounded output for the product
    anyway. To compare the input with 0 instead, such as the sum of a residual connection, it would
    keep all of that float32 array.
    """
    return jax.nn.relu(x)


@_relu.defjvp
def _relu_jvp(dtype: np.dtype, primals: Any, tangents: Any) -> Any:
    output = _relu(*primals, dtype)
    (tangent,) = tangents
    return output, jnp.where(cast(output, dtype) > 0, tangent, 0)
