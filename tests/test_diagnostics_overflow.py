"""The flags of the leaves that an overflow was in: one pass, one verdict, one set of avals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tables import avals

import jaxscale
from jaxscale._nonfinite_leaves import finite_by_leaf, flagged_paths, flags_by_leaf

PARAMS = {
    "dense": {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3, jnp.bfloat16)},
    "table": jnp.arange(4),
    "none": None,
    "_overwrite_with_gradient": {"amax": jnp.array(jnp.nan)},
}


def grads(**bad):
    return {
        "dense": {
            "kernel": jnp.ones((2, 3)).at[1, 1].set(bad.get("kernel", 1.0)),
            "bias": jnp.ones(3).at[0].set(bad.get("bias", 1.0)),
        },
        "table": np.zeros(4, jax.dtypes.float0),  # as JAX gives for integers
        "none": None,
        "_overwrite_with_gradient": {"amax": jnp.array(jnp.nan)},
    }


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
@pytest.mark.parametrize(
    ("bad", "paths"),
    [
        ({}, []),
        ({"kernel": jnp.nan}, ["['dense']['kernel']"]),
        ({"bias": -jnp.inf}, ["['dense']['bias']"]),
        ({"kernel": jnp.inf, "bias": jnp.nan}, ["['dense']['bias']", "['dense']['kernel']"]),
    ],
)
def test_it_names_the_leaves_and_agrees_with_the_verdict(transform, bad, paths):
    def last_overflow(old, grads):
        finite = finite_by_leaf(grads)
        flags = flags_by_leaf(grads, ~finite)
        return jnp.all(finite), jax.tree.map(lambda a, b: jnp.where(finite.all(), a, b), old, flags)

    old = flags_by_leaf(PARAMS, jnp.zeros(2, jnp.bool_))
    verdict, new = transform(last_overflow)(old, grads(**bad))
    assert verdict == jaxscale.all_finite(grads(**bad)) == (not bad)
    assert flagged_paths(new) == paths
    assert avals(new) == avals(old)
    # A finite step after it leaves what the last overflow was in.
    _, later = transform(last_overflow)(new, grads())
    assert flagged_paths(later) == paths


def test_trees_without_gradients_and_populations():
    assert finite_by_leaf({"a": jnp.arange(2)}).shape == (0,)
    assert flagged_paths(flags_by_leaf({"a": jnp.arange(2)}, jnp.zeros(0, jnp.bool_))) == []
    x = {"a": jnp.array([[1.0], [jnp.nan]]), "b": jnp.ones((2, 2))}
    flags = jax.vmap(lambda x: flags_by_leaf(x, ~finite_by_leaf(x)))(x)
    assert flagged_paths(flags) == ["['a']"]
    assert flagged_paths(flags_by_leaf(jnp.ones(2), jnp.array([True]))) == ["the root"]
