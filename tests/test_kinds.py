"""Every kind of parameter, and of optimizer, through whole training steps."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tables import assert_same_bits

import jaxscale

pytestmark = pytest.mark.standard_promotion
DTYPES = ["float16", "bfloat16", "float32", "complex64"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_skipped_step_keeps_the_signs_of_zeros(dtype):
    # Of both parts of a complex number.
    signs = np.array([complex(a, b) for a in (0.0, -0.0, 1.0) for b in (0.0, -0.0, 1.0)])
    params = jnp.asarray(signs if "complex" in dtype else signs.real, dtype)
    tx = jaxscale.loss_scaled(optax.sgd(1.0))
    for transform in (lambda f: f, jax.jit):
        grads = jnp.full_like(params, jnp.inf)
        updates, _ = transform(tx.update)(grads, tx.init(params), params)
        assert_same_bits(optax.apply_updates(params, updates), params)
