"""Wrong calls and what their errors say, for `tests/integration/test_errors.py`.

An error names the call, the argument, the value and the way out.
"""

import builtins
import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import jaxscale

# What is right in most of the calls.
W = jnp.ones(2)
PAIR = {"w": W, "b": W}
SGD = optax.sgd(0.1)
TX = jaxscale.loss_scaled(SGD)
OPT_STATE = TX.init(W)
SCALING = jaxscale.DynamicLossScale().init()


@contextlib.contextmanager
def raises(error, *words):
    """A context in which there must be an error whose message has these words, in this order."""
    with pytest.raises(error) as raised:
        yield
    rest = f"{raised.value}\n"
    for part in words:
        before, found, rest_after = rest.partition(part)
        assert found, f"the message does not go on with {part!r}: {before}"
        rest = rest_after


def assert_says(call, message):
    """Asserts that a wrong call raises an error.

    "TypeError: one ... two" has these words, in this order. Words that end in a space have two
    before the dots. A "\\n" is the end of a line, or of the message.
    """
    error, _, words = message.partition(": ")
    with raises(getattr(builtins, error), *words.split(" ... ")):
        call()


def never_traced(*args):
    """A loss that must not be called: the call is wrong before."""
    raise AssertionError(args)


def product_sum(w, x):
    return jnp.sum(w * x)


def without_return(params):
    """A loss, of a tree or of a module, whose last line lacks its `return`."""
    if isinstance(params, nnx.Module):
        params = nnx.state(params)
    jax.tree.map(jnp.sum, params)


class OwnTrainState(jaxscale.flax.TrainState):
    """A `TrainState` with two fields of its own."""

    stats: Any
    ema: Any


def flax_state(tx=TX):
    stats = {"mean": W, "count": jnp.array(3)}
    return OwnTrainState.create(
        apply_fn=None, params={"w": W}, tx=tx, stats=stats, ema=W
    )
