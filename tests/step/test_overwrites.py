"""State that travels as a gradient: leaves under `_overwrite_with_gradient`, in every entry."""

from itertools import product
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.core import FrozenDict
from flax.linen.fp8_ops import Fp8DirectDotGeneralOp
from tables import assert_same_bits, cases, fused_step, step

import jaxscale
import jaxscale.flax
import jaxscale.nnx


def test_a_statistic_becomes_its_gradient():
    tx = jaxscale.loss_scaled(optax.sgd(0.5))
    params = {"w": jnp.array(1.0), "_overwrite_with_gradient": jnp.array(7.0)}
    grads = {"w": jnp.array(1.0), "_overwrite_with_gradient": jnp.array(3.0)}
    params, _ = jaxscale.apply_gradients(tx, grads, tx.init(params), params)
    assert params == {"w": 0.5, "_overwrite_with_gradient": 3}


OWG = "_overwrite_with_gradient"
PARAMS = {"params": {"w": jnp.array([1.0, -2.0])}, OWG: {"amax": jnp.array([5.0, 0.0])}}


def gradients(w, *amax):
    return {"params": {"w": jnp.full(2, w)}, OWG: {"amax": jnp.array(amax)}}


def clipped(tx):
    return jaxscale.loss_scaled(tx, max_norm=1e9)


def checked(tx):
    return jaxscale.skip_nonfinite(tx, check_updates=True, track_leaves=True)


def inside_of_a_chain(tx):
    return optax.chain(jaxscale.loss_scaled(tx), optax.scale(1.0))


WHOLE_OPTIMIZERS = [clipped, jaxscale.skip_nonfinite, checked]


class Step(NamedTuple):
    """The gradients of a step, and the parameters after it, by hand."""

    w: float
    amax: list[float]
    expected_w: list[float]
    expected_amax: list[float]


STEPS = [
    Step(0.5, [7.0, 3.0], [0.95, -2.05], [7.0, 3.0]),
    # A bad one.
    Step(jnp.inf, [9.0, 9.0], [0.95, -2.05], [7.0, 3.0]),
    # The inf is not written, and the step that holds it is not skipped.
    Step(0.25, [jnp.inf, 0.0], [0.88, -2.12], [7.0, 0.0]),
]


@pytest.mark.filterwarnings("ignore:.apply_gradients.*inside of another")
@cases(
    "one_step, wrap",
    # No chain with `tx.update`: what comes after would see a difference for a gradient.
    [*product([step, fused_step], WHOLE_OPTIMIZERS), (fused_step, inside_of_a_chain)],
    fast=[(step, clipped), (fused_step, inside_of_a_chain)],
)
def test_a_good_step_writes_and_a_bad_one_keeps(one_step, wrap):
    inner = optax.sgd(0.1, momentum=0.9)
    tx = wrap(inner)
    compiled_step = jax.jit(one_step, static_argnums=0)
    params = PARAMS
    state = tx.init(PARAMS)
    for w, amax, expected_w, expected_amax in STEPS:
        grads = gradients(w, *amax)
        params, state = compiled_step(tx, params, state, grads)
        actual_w = params["params"]["w"]
        np.testing.assert_allclose(actual_w, expected_w, rtol=1e-6)
        actual_amax = params[OWG]["amax"]
        assert actual_amax.tolist() == expected_amax


@pytest.mark.parametrize("wrap", WHOLE_OPTIMIZERS)
def test_the_optimizer_does_not_see_what_is_overwritten(wrap):
    state = wrap(optax.sgd(0.1, momentum=0.9)).init(PARAMS)
    (momentum,) = jax.tree.leaves(state.inner_state)
    assert_same_bits(momentum, jnp.zeros(2))


def test_a_bare_optimizer_writes_what_it_does_not_see():
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
    grads = gradients(0.5, 7.0, 3.0)
    params, _ = fused_step(tx, PARAMS, tx.init(PARAMS), grads)
    assert params[OWG]["amax"].tolist() == [7, 3]
    assert params["params"]["w"].tolist() == [0.5, -2.5]


def test_a_window_writes_the_largest():
    tx = jaxscale.multi_steps(jaxscale.loss_scaled(optax.sgd(1.0)), 3)
    for one_step in (step, fused_step):
        params = PARAMS
        state = tx.init(PARAMS)
        for amax in ((7.0, 1.0), (3.0, jnp.inf), (4.0, 2.0)):
            assert_same_bits(params, PARAMS)
            params, state = one_step(tx, params, state, gradients(0.5, *amax))
        assert params[OWG]["amax"].tolist() == [7, 2]


def test_sums_are_right_to_the_rounding_of_the_larger_value_and_never_0():
    """p + u cannot always be exact. Statistics of 0 would stop FP8 training for good."""
    rng = np.random.default_rng(0)
    exponents = rng.uniform(-6, 6, (2, 4000))
    old, new = np.float32(10.0**exponents)
    tx = jaxscale.loss_scaled(optax.sgd(1.0))
    params = {"w": jnp.ones(()), OWG: jnp.asarray(old)}
    grads = {"w": jnp.ones(()), OWG: jnp.asarray(new)}
    compiled_step = jax.jit(step, static_argnums=0)
    start = tx.init(params)
    params, _ = compiled_step(tx, params, start, grads)
    result = np.asarray(params[OWG])
    error = np.abs(np.float64(result) - new)
    larger = np.maximum(old, new)
    assert np.all(error <= np.spacing(larger))
    assert np.all(result != 0)
    plain_sum = old + (new - old)
    assert np.any(plain_sum == 0)  # where it would have been


X = jax.random.normal(jax.random.key(0), (16, 16))
LARGEST = jnp.max(jnp.abs(X))


@pytest.mark.worlds
def test_flaxs_fp8_statistics():
    model = nn.Dense(4, dot_general_cls=Fp8DirectDotGeneralOp, dtype=jnp.float32)
    variables = FrozenDict(jax.jit(model.init)(jax.random.key(1), X))
    tx = jaxscale.multi_steps(jaxscale.loss_scaled(optax.sgd(0.1), 2.0**4), 2)

    def loss_fn(variables, x):
        return jnp.mean(model.apply(variables, x) ** 2)

    state = jaxscale.flax.TrainState.create(apply_fn=None, params=variables, tx=tx)
    train_step = jax.jit(jaxscale.flax.train_step(loss_fn))
    for i, size in enumerate((1.0, 3.0, jnp.inf, 2.0, jnp.nan)):
        before = state
        state, loss = train_step(state, X * size)
        if not jnp.isfinite(loss) or i == 0:  # in the window
            assert_same_bits(state.params, before.params)
    history = state.params[OWG]["Fp8DirectDotGeneralOp_0"]["input_amax_history"]
    # The largest input of the first window, and of the second; an inf saturates, and is not
    # written.
    largest = LARGEST * jnp.array([3.0, 2.0])
    assert set(history[history > 0].tolist()) == set(largest.tolist())
    assert state.opt_state.total_notfinite == 1


MATRIX_PRODUCT = (((1,), (0,)), ((), ()))  # dimensions that are contracted, and batches


class Product(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.eye(16))
        self.product = nnx.bridge.ToNNX(Fp8DirectDotGeneralOp(), nnx.Rngs(0))
        self.product.lazy_init(X, self.w[...], MATRIX_PRODUCT)

    def __call__(self, x):
        return self.product(x, self.w[...], MATRIX_PRODUCT)


@pytest.mark.worlds
def test_flaxs_fp8_statistics_in_nnx():
    """The optimizer trains `nnx.Param` alone, and the statistics are replaced all the same."""
    model = Product()
    tx = jaxscale.loss_scaled(optax.sgd(0.1))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    def loss_fn(model, x):
        return jnp.mean(model(x) ** 2)

    train_step = nnx.jit(jaxscale.nnx.train_step(loss_fn))
    for size in (1.0, 3.0, jnp.inf, 2.0):
        train_step(model, optimizer, X * size)
    history = np.asarray(model.product.input_amax_history[...])
    largest = LARGEST * jnp.array([1.0, 3.0, 2.0])
    assert set(largest.tolist()) <= set(history.tolist())
    assert np.isfinite(history).all()  # FP8 saturates: only the statistics see the inf
