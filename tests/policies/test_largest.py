"""The largest gradient: its value, that it is also the verdict, and where it goes.

What it costs is counted in `tests/step/test_compiled.py` and `tests/integration/test_sharding.py`;
what it does to a step with retries is in `tests/step/test_retry.py`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from following import Following
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tables import avals, cases
from training import x64

import jaxscale
from jaxscale._gradients import verdict as _verdict
from jaxscale._gradients.scaled import Scaled


def test_a_policy_is_told_the_largest_gradient():
    policy = Following()
    grads = {"w": jnp.array([0.25, -4.0]), "b": jnp.array(1.0)}
    state, should_apply = policy.update(policy.init(), grads)
    assert (state.peak, should_apply) == (4, True)


def find_largest(tree, axis_name=None, divisor=None):
    return _verdict.largest(Scaled(tree, divisor), axis_name)


def draw(shape, dtype, seed):
    values = np.random.default_rng(seed).standard_normal(shape)
    return jnp.asarray(values.astype(np.float32)).astype(dtype)


# Its value.

DTYPES = ["float16", "bfloat16", "float32", "float8_e5m2", "float8_e4m3fn"]


SHAPES = {
    "several": [(), (1,), (3, 5), (2**16,), (7, 2**14), (0,), (4, 0)],
    "a large one": [(2**16,)],
    "empty": [(0,), (4, 0)],
}


@cases("dtype", DTYPES, fast=["float16"])
@cases("name", SHAPES)
def test_it_is_the_largest_absolute_value(name, dtype):
    leaves = []
    expected = 0.0
    for seed, shape in enumerate(SHAPES[name]):
        leaf = draw(shape, dtype, seed)
        largest = np.abs(np.float32(leaf)).max(initial=0)
        expected = max(expected, largest)
        leaves.append(leaf)
    size = jax.jit(find_largest)(leaves)
    assert (size.dtype, size.shape) == (jnp.float32, ())
    assert size == expected


TREES = {
    "imaginary part": ({"w": np.array([3 - 4j, 1 + 1j], np.complex64)}, 4),
    "sign": ({"w": np.array([-6 + 1j], np.complex64), "b": np.float16(5)}, 6),
    # Of Flax' statistics of FP8, say.
    "overwrite": (
        {"w": -np.ones(2), "_overwrite_with_gradient": np.full(2, 9.0)},
        1,
    ),
    "no gradient": ({"n": np.arange(9), "none": None, "text": "no"}, None),
    "an empty tree": ({}, None),
    "nothing": (None, None),
}


@cases("name", TREES)
def test_signs_and_parts_of_complex_numbers_count_and_overwrites_do_not(name):
    tree, expected = TREES[name]
    assert find_largest(tree) == expected


@pytest.mark.parametrize("divisor", [2.0**15, 2.0**-3, 2.0**127, 1000.0])
def test_divided_once_it_is_the_largest_of_all_quotients(divisor):
    # Division and rounding keep the order of numbers.
    grads = [draw((40,), "float32", seed=0), draw((40,), "float16", seed=1)]
    scaled = Scaled(grads, jnp.float32(divisor))
    quotients = [float(np.abs(leaf).max()) for leaf in scaled.divided]
    assert find_largest(grads, divisor=scaled.divisor) == max(quotients)


def test_what_overflows_only_as_it_is_unscaled_is_not_finite():
    # As a quotient is not.
    assert find_largest([jnp.float32(1e30)], divisor=jnp.float32(2.0**-126)) == np.inf


# It is also the verdict. `tests/gradients/test_verdict.py` has all places and dtypes.


@pytest.mark.worlds
@cases(
    "dtype",
    ["float32", "float16", "bfloat16", "float64", "float8_e4m3fn"],
    fast=["float64"],
)
def test_of_numbers_that_are_not_finite_it_says_the_worst(dtype):
    compiled = jax.jit(find_largest)
    with x64():
        for number in (np.inf, -np.inf, np.nan, -np.nan):
            leaf = jnp.asarray(np.array([1, number, -2]).astype(jnp.dtype(dtype)))
            expected = np.abs(number)
            if dtype == "float8_e4m3fn":
                expected = np.nan  # it has no inf
            size = compiled([leaf, jnp.float32(5)])
            np.testing.assert_equal(float(size), expected)
            # Nor does an inf hide a NaN.
            with_nan = jnp.array([np.inf, np.nan])
            assert np.isnan(find_largest([leaf, with_nan])), number


def test_a_finite_number_beyond_float32_is_its_largest():
    with x64():
        assert find_largest([jnp.array([1e300, -2.0])]) == jnp.finfo(jnp.float32).max


# Where it goes. `tests/step/test_runs.py` has the steps of a policy that needs it.

PARAMS = {"w": jnp.ones(2)}


class Needing(jaxscale.DynamicLossScale):
    """A policy that must be given the largest gradient."""

    needs_largest = True

    def adjust(self, state, grads_finite, *, largest):
        assert avals(largest) == "float32[]"
        return super().adjust(state, grads_finite)


class NotNeeding(jaxscale.DynamicLossScale):
    """A policy that must not be given it."""

    def adjust(self, state, grads_finite):
        return super().adjust(state, grads_finite)


@pytest.mark.standard_promotion
@cases("cls", [Needing, NotNeeding])
@pytest.mark.parametrize("retries", [0, 1])
def test_a_step_gives_a_policy_the_largest_gradient_if_it_needs_it(cls, retries):
    tx = jaxscale.loss_scaled(optax.sgd(0.0), cls())
    step = jaxscale.train_step(lambda params: jnp.sum(params["w"]), tx, retries=retries)
    jax.eval_shape(step, PARAMS, tx.init(PARAMS))


@pytest.mark.worlds
@cases("axis", ["data", None], fast=["data"])
def test_of_all_devices_it_is_the_largest(axis):
    """By hand over devices, or by the compiler."""
    policy = Following(init_scale=2.0**10)
    tx = jaxscale.loss_scaled(optax.sgd(0.0), policy, axis_name=axis)
    grads = {"w": 2.0 ** -jnp.arange(8.0), "b": jnp.full(16, 2**-9, jnp.float16)}
    state = tx.init(grads)
    mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")), ("data",))

    def find_scaling(grads):
        _, next_state = tx.update(grads, state, grads, value=jnp.float32(1))
        return next_state.scaling

    if axis:
        find_scaling = jax.shard_map(
            find_scaling, mesh=mesh, in_specs=P("data"), out_specs=P()
        )
    run = jax.jit(find_scaling, in_shardings=NamedSharding(mesh, P("data")))
    assert run(grads).peak == 1
    with_nan = grads["w"].at[6].set(jnp.nan)
    assert run(grads | {"w": with_nan}).overflows == 1
