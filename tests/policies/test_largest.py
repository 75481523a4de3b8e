"""The largest gradient: its value, that it is the verdict too, and where it goes.

What it costs is counted in `tests/step/test_compiled.py` and `tests/integration/test_sharding.py`;
what it does to a step with retries is in `tests/step/test_retry.py`.
"""

import itertools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tables import assert_same_bits, cases
from training import trainer, x64

import jaxscale
from jaxscale._gradients import verdict as _verdict
from jaxscale._gradients.scaled import Scaled


def largest(tree, axis_name=None, divisor=None):
    return _verdict.largest(Scaled(tree, divisor), axis_name)


def numbers(shape, dtype, seed):
    values = np.random.default_rng(seed).standard_normal(shape)
    return jnp.asarray(values.astype(np.float32)).astype(dtype)


# Its value.

DTYPES = ["float16", "bfloat16", "float32", "float8_e5m2", "float8_e4m3fn"]


@cases("dtype", DTYPES, fast=["float16"])
def test_it_is_the_largest_absolute_value(dtype):
    shapes = [(), (1,), (3, 5), (2**16,), (7, 2**14), (0,), (4, 0)]
    leaves = [numbers(shape, dtype, seed) for seed, shape in enumerate(shapes)]
    for tree in (leaves, leaves[3:4], leaves[-2:]):
        size = jax.jit(largest)(tree)
        assert (size.dtype, size.shape) == (jnp.float32, ())
        assert size == max(np.abs(np.float32(leaf)).max(initial=0) for leaf in tree)


def test_signs_and_parts_of_complex_numbers_count_and_overwrites_do_not():
    assert largest({"w": jnp.array([3 - 4j, 1 + 1j], jnp.complex64)}) == 4
    assert largest({"w": jnp.array([-6 + 1j], jnp.complex64), "b": jnp.float16(5)}) == 6
    # Overwrites of Flax' FP8 statistics do not count.
    assert largest({"w": -jnp.ones(2), "_overwrite_with_gradient": jnp.full(2, 9.0)}) == 1
    for nothing in ({"n": jnp.arange(9), "none": None, "text": "no"}, {}, None):
        assert largest(nothing) is None
    # Of symbolic shapes, too.
    aval = jax.ShapeDtypeStruct(jax.export.symbolic_shape("n"), jnp.float32)
    exported = jax.export.export(jax.jit(lambda x: largest([x])))(aval)
    assert exported.call(jnp.array([1.0, -7.0, 2.0])) == 7


def test_divided_once_it_is_the_largest_of_all_quotients():
    # Division and rounding keep the order of numbers.
    grads = [numbers((40,), dtype, seed) for seed, dtype in enumerate(("float32", "float16"))]
    for divisor in (2.0**15, 2.0**-3, 2.0**127, 1000.0):
        scaled = Scaled(grads, jnp.float32(divisor))
        quotients = [float(np.abs(leaf).max()) for leaf in scaled.divided]
        assert largest(grads, divisor=scaled.divisor) == max(quotients)
    # What overflows only as it is unscaled is not finite, as a quotient is not.
    assert largest([jnp.float32(1e30)], divisor=jnp.float32(2.0**-126)) == np.inf


# It is the verdict, too. `tests/gradients/test_verdict.py` has all places and dtypes.


@cases("dtype", ["float32", "float16", "bfloat16", "float64", "float8_e4m3fn"], fast=["float64"])
def test_of_numbers_that_are_not_finite_it_says_the_worst(dtype):
    with x64():
        for number in (np.inf, -np.inf, np.nan, -np.nan):
            leaf = jnp.asarray(np.array([1, number, -2]).astype(jnp.dtype(dtype)))
            size = jax.jit(largest)([leaf, jnp.float32(5)])
            # A number that is larger than all others does not hide a NaN, nor does an inf.
            is_nan = np.isnan(number) or dtype == "float8_e4m3fn"  # which has no inf
            assert np.isnan(size) if is_nan else size == np.inf
            assert np.isnan(largest([leaf, jnp.array([np.inf, np.nan])]))
        if dtype == "float64":
            assert largest([jnp.array([1e300, -2.0])]) == jnp.finfo(jnp.float32).max


# It reaches the policy in every kind of step, unscaled, of all devices.

FOLLOWS = jaxscale.AdaptiveLossScale(init_scale=2.0**10, memory=4)
PARAMS = {"w": jnp.array([1.0, -2.0, 0.5]), "b": jnp.array(0.25, jnp.bfloat16)}
BATCHES = [jnp.full(3, x, jnp.float32) for x in (0.5, 2, 2**9, 0.25, np.nan, 4, 1)]


def loss_fn(params, x):
    """With x = 2**9 the gradients overflow at a scale of 2**10 and more."""
    half = (params["w"].astype(jnp.float16) * x.astype(jnp.float16)).astype(jnp.float32)
    return jnp.mean(half * x) + params["b"].astype(jnp.float32)


@jax.jit
def by_hand(params, scaling, x):
    """A step that reads the unscaled gradients once more, after the verdict."""
    loss, grads = jaxscale.value_and_grad(loss_fn, scaling)(params, x)
    finite, known = jaxscale.all_finite(grads), jnp.isfinite(loss)
    moved = FOLLOWS.adjust(scaling, finite, largest(grads))
    return jaxscale.tree_where(known, moved, scaling), finite & known


def whole(tx, **kwargs):
    step = jaxscale.train_step(loss_fn, tx, **kwargs)
    return lambda carry, x: step(*carry, x)[:2]


STEPS = {
    "train_step": whole,
    "apply_gradients": lambda tx: trainer(tx, loss_fn),
    "update": lambda tx: trainer(tx, loss_fn, fused=False),
}
OPTIONS = {"": {}, "norm": {"max_norm": 0.1}, "tracked": {"track_leaves": True}}
OPTIONS["checked"] = {"check_updates": True}


@pytest.mark.standard_promotion
@cases(
    "name, option",
    itertools.product(STEPS, OPTIONS),
    fast=[("train_step", ""), ("update", "norm"), ("apply_gradients", "tracked")],
)
def test_every_step_moves_the_scale_as_by_hand(name, option):
    tx = jaxscale.loss_scaled(optax.sgd(0.0), FOLLOWS, **OPTIONS[option])
    step, params, opt_state = jax.jit(STEPS[name](tx)), PARAMS, tx.init(PARAMS)
    verdicts = []
    for x in BATCHES:
        expected, finite = by_hand(params, opt_state.scaling, x)
        params, opt_state = step((params, opt_state), x)
        assert_same_bits(opt_state.scaling, expected)
        assert opt_state.step_applied == finite
        verdicts.append(bool(finite))
    assert verdicts == [True, True, False, True, False, True, True]


@cases("unit", ["micro_batch", "optimizer_step"], fast=["micro_batch"])
def test_of_micro_batches_each_is_looked_at(unit):
    inner = jaxscale.loss_scaled(optax.sgd(0.0), FOLLOWS)
    tx = jaxscale.multi_steps(inner, 2, growth_unit=unit)
    step, state = jax.jit(whole(tx)), tx.init(PARAMS)
    for x in BATCHES:
        expected, _ = by_hand(PARAMS, state.scaling, x)
        _, state = step((PARAMS, state), x)
        if unit == "micro_batch":
            assert_same_bits(state.scaling, expected)
    assert (state.scaling.peak > -256, state.total_notfinite) == (True, 2)


@pytest.mark.standard_promotion
@cases("needs", [True, False])
def test_a_policy_of_ones_own_gets_the_largest_gradient_if_it_needs_it(needs):
    seen = []

    class Own(jaxscale.DynamicLossScale):
        needs_largest = needs

        def adjust(self, state, grads_finite, largest=None):
            seen.append(largest)
            return super().adjust(state, grads_finite)

    policy = Own()
    for grads in ({"w": jnp.full(3, -0.5)}, {}):
        policy.update(policy.init(), grads)
    assert seen == ([0.5, None] if needs else [None, None])
    tx = jaxscale.loss_scaled(optax.sgd(0.0), policy)
    for retries in (0, 1):
        jax.eval_shape(whole(tx, retries=retries), (PARAMS, tx.init(PARAMS)), BATCHES[0])
    assert len(seen) > 3
    assert {str(getattr(size, "aval", size)) for size in seen[2:]} == {
        "float32[]" if needs else "None"
    }


@cases("axis", ["data", None], fast=["data"])
def test_of_all_devices_it_is_the_largest(axis):
    """By hand over devices, or by the compiler."""
    tx = jaxscale.loss_scaled(optax.sgd(0.0), FOLLOWS, axis_name=axis)
    grads = {"w": 2.0 ** -jnp.arange(8.0), "b": jnp.full(16, 2**-9, jnp.float16)}
    mesh, state = jax.sharding.Mesh(np.array(jax.devices("cpu")), ("data",)), tx.init(grads)

    def scaling(grads):
        return tx.update(grads, state, grads, value=jnp.float32(1))[1].scaling

    if axis:
        scaling = jax.shard_map(scaling, mesh=mesh, in_specs=P("data"), out_specs=P())
    run = jax.jit(scaling, in_shardings=NamedSharding(mesh, P("data")))
    assert run(grads).peak == 0
    assert run(grads | {"w": grads["w"].at[6].set(jnp.nan)}).overflows == 1
