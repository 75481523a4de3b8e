"""Losses in float16, what traces them, and how their marked lines are found."""

import inspect

import jax.numpy as jnp
import numpy as np

import jaxscale
from jaxscale import diagnostics

HALF = jnp.float16


def faulty_lines(function):
    """The numbers of the lines of a function that end in `# fault`."""
    lines, first = inspect.getsourcelines(function)
    return [i for i, line in enumerate(lines, first) if line.endswith("# fault\n")]


def scaling(loss_scale=2.0**15):
    return jaxscale.FixedLossScale(loss_scale).init()


def trace(fun, *args, loss_scale=2.0**15, **kwargs):
    return diagnostics.trace(fun, scaling(loss_scale), **kwargs)(*args)


def normal(seed, *shape):
    # NumPy's: JAX would compile a program for each shape
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.standard_normal(shape), jnp.float32)
