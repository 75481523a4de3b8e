"""Finiteness and selection, over every kind of leaf."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tables import BAD, assert_same_bits, avals, bads

import jaxscale

DTYPES = ["float16", "bfloat16", "float32", "complex64", "float8_e5m2", "float8_e4m3fn"]
PASSIVE = {
    "int": jnp.arange(3),
    "bool": jnp.array([True, False]),
    "key": jax.random.key(0),
    "none": None,
    "masked": optax.MaskedNode(),
    "float0": np.zeros((2,), jax.dtypes.float0),
    "text": "no array",
    "python_int": 3,
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (0,)])
@bads
def test_all_finite_sees_any_element_of_any_leaf(dtype, shape, bad):
    good = jnp.ones(shape, dtype)
    for all_finite in (jaxscale.all_finite, jax.jit(jaxscale.all_finite)):
        assert all_finite({"a": good, "b": jnp.ones(())})
        for place in range(good.size):
            spoiled = good.reshape(-1).at[place].set(jnp.asarray(bad, dtype)).reshape(shape)
            assert not all_finite({"a": spoiled, "b": jnp.ones(())})
            assert not all_finite([jnp.ones(2), spoiled])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_numbers_are_finite(dtype):
    most = jnp.full(4, jnp.finfo(dtype).max).astype(dtype)  # their sum and norm are inf
    assert jaxscale.all_finite([most, -most])


def test_one_bad_component_of_a_complex_number_is_seen():
    for bad in BAD.values():
        assert not jaxscale.all_finite(jax.lax.complex(jnp.array(1.0), jnp.array(bad)))
        assert not jaxscale.all_finite(jax.lax.complex(jnp.array(bad), jnp.array(1.0)))


def test_float64_leaves():
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        assert jaxscale.all_finite(jnp.array(1e300))
        assert not jaxscale.all_finite(jnp.array([1e300, jnp.inf]))


def test_only_gradients_are_looked_at():
    assert jaxscale.all_finite(PASSIVE)
    assert jaxscale.all_finite({"_overwrite_with_gradient": {"amax": jnp.array(jnp.nan)}})
    assert not jaxscale.all_finite(PASSIVE | {"w": jnp.array(jnp.nan)})
    assert not jaxscale.all_finite({"python": float("nan"), "numpy": np.float64(1)})


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
def test_tree_where_selects_bits(transform):
    new = {dtype: jnp.array([1.5, -0.0], dtype) for dtype in DTYPES}
    # Not for float8: XLA on CPU selects it by way of float16, and NaN has many forms.
    old = {dtype: jnp.array([2.0 if "float8" in dtype else np.nan, 0.0], dtype) for dtype in DTYPES}
    tree_where = transform(jaxscale.tree_where)
    assert_same_bits(tree_where(jnp.array(True), new, old), new)
    assert_same_bits(tree_where(jnp.array(False), new, old), old)
    assert avals(tree_where(jnp.array(False), new, old)) == avals(new)


def test_tree_where_takes_every_kind_of_leaf():
    other = PASSIVE | {"int": jnp.arange(3) + 5, "key": jax.random.key(7), "python_int": 4}
    for pred, expected in ((True, PASSIVE), (np.bool_(False), other)):
        chosen = jaxscale.tree_where(pred, PASSIVE, other)
        assert jax.tree.structure(chosen) == jax.tree.structure(PASSIVE)
        assert chosen["key"] == expected["key"]
        assert chosen["int"].tolist() == expected["int"].tolist()
        assert chosen["python_int"] == expected["python_int"]
        assert chosen["text"] == "no array"
        assert chosen["float0"].dtype == jax.dtypes.float0


def test_tree_where_lets_a_python_scalar_take_the_dtype_of_its_array():
    chosen = jaxscale.tree_where(
        True, {"step": 1, "x": 1.5}, {"step": jnp.int32(0), "x": jnp.bfloat16(0)}
    )
    assert avals(chosen) == {"step": "int32[]", "x": "bfloat16[]"}


def test_tree_where_under_vmap():
    chosen = jax.vmap(jaxscale.tree_where)(jnp.array([True, False]), jnp.ones(2), jnp.zeros(2))
    assert chosen.tolist() == [1, 0]


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("compiled", [False, True])
def test_all_finite_looks_at_every_leaf(dtype, compiled):
    all_finite = jax.jit(jaxscale.all_finite) if compiled else jaxscale.all_finite
    tree = {name: jnp.ones(3, dtype) for name in "abc"}
    assert all_finite(tree)
    for name in tree:
        assert not all_finite(tree | {name: tree[name].at[1].set(jnp.inf)})
