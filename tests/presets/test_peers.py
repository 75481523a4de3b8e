"""What the installed libraries do at once and not over steps, beside this one.

Their scales and counters, step by step, are in `test_traces.py`, as recorded.
"""

import itertools

import jax.numpy as jnp
import jmp
import optax
import pytest
from tables import assert_same_bits, cases

import jaxscale

pytestmark = pytest.mark.standard_promotion

W = jnp.array([1.0, -2.0])
G = jnp.array([0.5, 1.0])


def test_jmp_itself_scales_and_unscales():
    """`scale`, `unscale`, `all_finite` and `select_tree` on float32 trees, to the bit."""
    special = jnp.array([jnp.inf, -jnp.inf, jnp.nan, 0.0, -0.0])
    tree, other = {"w": W, "b": special, "n": None}, {"w": G, "b": jnp.ones(5), "n": None}
    theirs, ours = jmp.StaticLossScale(jnp.float32(8)), jaxscale.FixedLossScale(8).init()
    assert_same_bits(jaxscale.scale(ours, tree), theirs.scale(tree))
    assert_same_bits(jaxscale.unscale(ours, tree), theirs.unscale(tree))
    for each in (tree, other, {}, None):
        assert_same_bits(jaxscale.all_finite(each), jmp.all_finite(each))
        pred = jaxscale.all_finite(each)
        assert_same_bits(jaxscale.tree_where(pred, tree, other), jmp.select_tree(pred, tree, other))


@cases(
    ("params_dtype", "grads_dtype"),
    itertools.product(["float32", "float16", "bfloat16"], repeat=2),
    fast=[("float32", "float16"), ("bfloat16", "float32")],
)
def test_gradients_of_any_dtype_step_parameters_of_any_dtype(params_dtype, grads_dtype):
    """Updates are float32, and parameters keep their dtype (optax' MultiSteps tests the pairs)."""
    params, grads = W.astype(params_dtype), G.astype(grads_dtype)
    tx = jaxscale.loss_scaled(optax.MultiSteps(optax.sgd(1.0), 1))
    updates, _ = tx.update(grads, tx.init(params), params)
    assert updates.dtype == jnp.float32
    stepped, _ = jaxscale.apply_gradients(tx, grads, tx.init(params), params)
    assert_same_bits(stepped, (W - G).astype(params_dtype))
