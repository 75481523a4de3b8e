"""What must never happen: one test for each way in which another library corrupts a run."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from tables import assert_same_bits, avals

import jaxscale
import jaxscale.flax

pytestmark = pytest.mark.standard_promotion

DYNAMIC = jaxscale.DynamicLossScale
PARAMS = {"w": jnp.array([1.0, -2.0]), "b": jnp.float32(0.5)}
GRADS = {"w": jnp.array([0.25, 0.5]), "b": jnp.float32(-1.0)}
BAD = {"w": jnp.array([0.25, jnp.inf]), "b": jnp.float32(-1.0)}


def train(tx, verdicts, params=PARAMS):
    state = tx.init(params)
    update = jax.jit(tx.update)
    for finite in verdicts:
        updates, state = update(GRADS if finite else BAD, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def test_no_update_is_nan_inf_or_scaled():
    # optax.apply_if_finite applies the NaN after N failures; levanter multiplies it by 0.
    tx = jaxscale.loss_scaled(optax.sgd(1.0))
    for grads in (GRADS, BAD, jax.tree.map(lambda g: g * jnp.nan, GRADS)):
        updates, _ = jax.jit(tx.update)(grads, tx.init(PARAMS), PARAMS)
        for update in jax.tree.leaves(updates):
            assert jnp.all(jnp.abs(update) <= 1.0)


@pytest.mark.parametrize("finite", [True, False])
def test_no_scale_is_zero_inf_or_nan(finite):
    # Keras grows to inf and stays there; PyTorch and Keras fall to 0, and apply NaN.
    policy = DYNAMIC(
        init_scale=1.0,
        growth_interval=1,
        min_scale=2.0**-126,
        max_scale=float(jnp.finfo(jnp.float32).max),
        growth_factor=2.0**50,
        backoff_factor=2.0**-50,
    )

    def body(state, _):
        state = policy.adjust(state, finite)
        return state, state.loss_scale

    _, scales = jax.lax.scan(body, policy.init(), length=300)
    assert jnp.all(jnp.isfinite(scales))
    assert jnp.all(scales >= 2.0**-126)


def test_no_gradient_is_unscaled_by_another_scale_than_seeded_it():
    # MPX and DeepSpeed unscale with the scale after the update: off by 2 on growth.
    tx = jaxscale.loss_scaled(optax.sgd(1.0), DYNAMIC(growth_interval=1))
    state = tx.init(PARAMS)
    for _ in range(5):
        grads = jaxscale.grad(lambda p: jnp.sum(p["w"] ** 2) + p["b"], state)(PARAMS)
        assert_same_bits(grads["w"], 2 * PARAMS["w"])
        _, state = tx.update(grads, state, PARAMS)
    assert state.scaling.loss_scale == 2.0**20


def test_no_gradient_is_unscaled_in_half_precision():
    # jmp does with a scale that is a Python float or float16: it underflows again.
    state = jaxscale.FixedLossScale(2.0**15).init()
    for dtype in (jnp.float16, jnp.bfloat16):
        grads = jaxscale.unscale(state, jnp.array(2.0**-9, dtype))
        assert_same_bits(grads, jnp.float32(2.0**-24))


def test_no_hyperparameter_is_lost_in_a_tree_map():
    # jmp's minimum becomes 1 in any jit.
    policy = DYNAMIC(init_scale=64, min_scale=32, growth_interval=7)
    tx = jaxscale.loss_scaled(optax.sgd(0.1), policy)
    state = jax.jit(lambda s: jax.tree.map(lambda x: x, s))(tx.init(PARAMS))
    for _ in range(5):
        _, state = jax.jit(tx.update)(BAD, state, PARAMS)
    assert state.scaling.loss_scale == 32


def test_no_second_compilation():
    # Flax' DynamicScale and jmp start from Python numbers: two traces.
    tx = jaxscale.loss_scaled(optax.adam(0.1), DYNAMIC(growth_interval=1))

    @jax.jit
    def step(params, state, spoil):
        grads = jaxscale.grad(lambda p: jnp.sum(p["w"] ** 2) * spoil + p["b"], state)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params, state = PARAMS, tx.init(PARAMS)
    for spoil in [1.0, 1.0, jnp.inf, 1.0]:
        params, state = step(params, state, jnp.float32(spoil))
    assert step._cache_size() == 1


def test_nothing_moves_on_a_skipped_step():
    # A moment, a step count, a schedule, an average or a batch statistic.
    tx = jaxscale.loss_scaled(
        optax.chain(
            optax.scale_by_adam(),
            optax.ema(0.9),
            optax.scale_by_schedule(optax.linear_schedule(1.0, 0.0, 10)),
        )
    )
    _, state = train(tx, [True, True])
    _, kept = train(tx, [True, True, False, False])
    assert_same_bits(kept.inner_state, state.inner_state)

    class State(jaxscale.flax.TrainState):
        batch_stats: jax.Array

    flax_state = State.create(apply_fn=None, params=PARAMS, tx=tx, batch_stats=jnp.zeros(2))
    kept = flax_state.apply_gradients(grads=BAD, batch_stats=jnp.full(2, jnp.nan))
    assert_same_bits((kept.batch_stats, kept.step), (flax_state.batch_stats, flax_state.step))


def test_no_two_devices_disagree():
    # fairseq2#1374. `tests/integration/test_devices.py` has the other ways to shard.
    devices = jax.devices("cpu")
    mesh = jax.sharding.Mesh(devices, "d")
    spec = jax.sharding.PartitionSpec("d")
    verdicts = jax.shard_map(
        lambda x: jaxscale.all_finite(x, axis_name="d") & (x == x),
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
    )(jnp.ones(8).at[3].set(jnp.inf))
    assert verdicts.tolist() == [False] * 8


def test_no_accumulator_is_poisoned():
    # MultiSteps resets by multiplication: 0 * inf is NaN, for ever.
    tx = jaxscale.loss_scaled(optax.MultiSteps(optax.sgd(1.0), 2))
    params, state = train(tx, [True, False, True])
    assert_same_bits(params, train(tx, [True, True])[0])
    assert state.inner_state.gradient_step == 1
    assert all(jnp.all(g == 0) for g in jax.tree.leaves(state.inner_state.acc_grads))


def test_no_finite_gradient_is_declared_non_finite():
    # A sum or a norm overflows: Apex, DeepSpeed, DreamerV3, fairseq#2384.
    large = jnp.full(1000, 3e38)
    tx = jaxscale.loss_scaled(optax.scale(0.5))
    for update in (tx.update, jax.jit(tx.update)):
        updates, state = update(large, tx.init(large), large)
        assert state.grads_finite
        assert_same_bits(updates, large * 0.5)


def test_every_scale_is_a_power_of_two_where_every_factor_is():
    # Flax clips to the largest float32, MPX to 65504: unscaling is exact no more.
    policy = DYNAMIC(growth_interval=1, max_scale=2.0**20, min_scale=2.0**3)

    def body(state, finite):
        state = policy.adjust(state, finite)
        return state, state.loss_scale

    finite = jax.random.bernoulli(jax.random.key(0), 0.5, (1000,))
    _, scales = jax.lax.scan(body, policy.init(), finite)
    mantissas, exponents = jnp.frexp(scales)
    assert set(mantissas.tolist()) == {0.5}
    assert set((exponents - 1).tolist()) == set(range(3, 21))


def test_a_float16_loss_caps_the_scale_where_it_would_always_overflow():
    # The cotangent of a float16 loss is float16: 2**16 is inf on every step.
    state = jaxscale.FixedLossScale(2.0**16).init()
    for slope in (1.0, 1.5):  # 1.5 times the largest float16 would be inf: the cap is 2**15
        loss, grad = jaxscale.value_and_grad(lambda w, slope=slope: w * slope, state)(
            jnp.array(2.0, jnp.float16)
        )
        assert_same_bits((loss, grad), (jnp.float16(2 * slope), jnp.float32(slope)))


def test_equinox_models_with_static_leaves_are_skipped_whole():
    model = eqx.nn.MLP(2, 1, 4, 1, key=jax.random.key(0))
    tx = jaxscale.loss_scaled(optax.adam(0.1))
    state = tx.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def step(model, state, x):
        def loss_fn(model):
            return jnp.mean(jax.vmap(model)(x))

        grads = jaxscale.grad(loss_fn, state, transform=eqx.filter_grad)(model)
        params = eqx.filter(model, eqx.is_inexact_array)
        updates, state = tx.update(grads, state, params)
        return eqx.apply_updates(model, updates), state

    kept, new_state = step(model, state, jnp.full((3, 2), jnp.inf))
    assert_same_bits(*(jax.tree.leaves(eqx.filter(m, eqx.is_array)) for m in (kept, model)))
    assert avals(new_state) == avals(state)
    moved, _ = step(model, state, jnp.ones((3, 2)))
    assert not jnp.array_equal(moved.layers[0].weight, model.layers[0].weight)
