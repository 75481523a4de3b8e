"""What must never happen: the reports of other libraries' users, and the law that answers each.

`REPORTS` is the table: a report can be found by its number, and names its law.
"""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax.linen import fp8_ops
from tables import assert_same_bits, avals

import jaxscale
import jaxscale.flax

pytestmark = pytest.mark.standard_promotion

DYNAMIC = jaxscale.DynamicLossScale
W = jnp.array([1.0, -2.0])
INF = jnp.array([1.0, jnp.inf])
PARAMS = {"w": jnp.array([1.0, -2.0]), "b": jnp.float32(0.5)}
GRADS = {"w": jnp.array([0.25, 0.5]), "b": jnp.float32(-1.0)}
BAD = {"w": jnp.array([0.25, jnp.inf]), "b": jnp.float32(-1.0)}

REPORTS = {}


def answers(*reports):
    """Enters a test into the table, as the law that answers some reports."""

    def enter(law):
        for report in reports:
            assert report not in REPORTS, "one report, one law"
            REPORTS[report] = law.__name__
        return law

    return enter


def advance(tx, state, grads, params=W, **extra):
    updates, state = jax.jit(tx.update)(grads, state, params, **extra)
    return optax.apply_updates(params, updates), state


def train(tx, verdicts, params=PARAMS):
    state = tx.init(params)
    update = jax.jit(tx.update)
    for finite in verdicts:
        updates, state = update(GRADS if finite else BAD, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


@answers(
    "optax.apply_if_finite: applies the NaN after N failures", "levanter: multiplies the NaN by 0"
)
def test_no_update_is_nan_inf_or_scaled():
    tx = jaxscale.loss_scaled(optax.sgd(1.0))
    for grads in (GRADS, BAD, jax.tree.map(lambda g: g * jnp.nan, GRADS)):
        updates, _ = jax.jit(tx.update)(grads, tx.init(PARAMS), PARAMS)
        for update in jax.tree.leaves(updates):
            assert jnp.all(jnp.abs(update) <= 1.0)


@answers(
    "Keras: the scale grows to inf and stays there",
    "PyTorch, Keras: the scale falls to 0, and NaN is applied",
)
@pytest.mark.parametrize("finite", [True, False])
def test_no_scale_is_zero_inf_or_nan(finite):
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


@answers("google/flax#2547, pytorch/pytorch#98828: growth to infinity")
def test_scale_never_inf():
    policy = DYNAMIC(init_scale=2.0**120, max_scale=2.0**126, growth_interval=1)
    state, _ = jax.lax.scan(
        lambda s, _: (policy.adjust(s, jnp.array(True)), None), policy.init(), length=50
    )
    assert state.loss_scale == 2.0**126


@answers("NVIDIA/apex#715: 1e-304, then a division by zero")
def test_scale_never_below_min():
    policy = DYNAMIC()
    state, _ = jax.lax.scan(
        lambda s, _: (policy.adjust(s, jnp.array(False)), None), policy.init(), length=2000
    )
    assert state.loss_scale == 1


@answers(
    "microsoft/DeepSpeed#8588: gradients off by 2 on a growth step",
    "MPX `_grad_tools.py`: unscales with the scale after the update",
)
def test_gradients_are_unscaled_by_the_scale_that_seeded_them():
    tx = jaxscale.loss_scaled(optax.sgd(1.0), DYNAMIC(growth_interval=1, init_scale=4))

    @jax.jit
    def step(w, state):
        loss, grads = jaxscale.value_and_grad(lambda w: jnp.sum(w), state)(w)
        updates, state = tx.update(grads, state, w)
        return optax.apply_updates(w, updates), state, loss, grads

    w, state, loss, grads = step(W, tx.init(W))
    assert state.scaling.loss_scale == 8
    assert (loss, grads.tolist(), w.tolist()) == (-1, [1, 1], [0, -3])

    state = tx.init(PARAMS)
    for _ in range(5):
        grads = jaxscale.grad(lambda p: jnp.sum(p["w"] ** 2) + p["b"], state)(PARAMS)
        assert_same_bits(grads["w"], 2 * PARAMS["w"])
        _, state = tx.update(grads, state, PARAMS)
    assert state.scaling.loss_scale == 2.0**7


@answers("jmp: with a scale that is a Python float or float16, unscaling underflows again")
def test_no_gradient_is_unscaled_in_half_precision():
    state = jaxscale.FixedLossScale(2.0**15).init()
    for dtype in (jnp.float16, jnp.bfloat16):
        grads = jaxscale.unscale(state, jnp.array(2.0**-9, dtype))
        assert_same_bits(grads, jnp.float32(2.0**-24))


@answers("google-deepmind/jmp#44: the minimum is not a leaf, and becomes 1 in any jit")
def test_no_hyperparameter_is_lost_in_a_tree_map():
    policy = DYNAMIC(init_scale=64.0, min_scale=32.0, growth_interval=7)
    tx = jaxscale.loss_scaled(optax.sgd(0.1), policy)
    state = jax.jit(lambda s: jax.tree.map(lambda x: x, s))(tx.init(PARAMS))
    alone = policy.init()
    for _ in range(8):
        _, state = jax.jit(tx.update)(BAD, state, PARAMS)
        alone = jax.jit(policy.adjust)(alone, jnp.array(False))
    assert state.scaling.loss_scale == alone.loss_scale == 32


@answers(
    "google-deepmind/optax#1440, google/jaxopt#451: weak types compile the step twice",
    "Flax `DynamicScale`, jmp: start from Python numbers, and trace twice",
)
def test_no_step_compiles_twice():
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

    update, state = jax.jit(tx.update), tx.init(W)
    for grads in [W, W, INF, W]:
        _, state = update(grads, state, W)
    assert update._cache_size() == 1


@answers("Others move a moment, a step count, a schedule, an average or a batch statistic")
def test_nothing_moves_on_a_skipped_step():
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


@answers("allenai/OLMo-core#317: the skipped step moved the schedule")
def test_schedule_count_frozen():
    tx = jaxscale.loss_scaled(optax.adam(optax.linear_schedule(0.1, 0.0, 10)))
    _, state = advance(tx, tx.init(W), W)
    _, state = advance(tx, state, INF)
    counts = optax.tree_utils.tree_get_all_with_path(state.inner_state, "count")
    assert {int(count) for _, count in counts} == {1}


@answers("pytorch/pytorch#88474: the step is skipped, the running mean is NaN")
def test_batch_stats_guarded():

    class State(jaxscale.flax.TrainState):
        batch_stats: dict

    model = nn.BatchNorm(use_running_average=False, dtype=jnp.float16)
    variables = model.init(jax.random.key(0), jnp.ones((4, 3)))
    state = State.create(
        apply_fn=model.apply,
        params=variables["params"],
        tx=jaxscale.loss_scaled(optax.sgd(0.1)),
        batch_stats=variables["batch_stats"],
    )

    @jax.jit
    def step(state, x):
        def loss_fn(params):
            output, new = state.apply_fn(
                {"params": params, "batch_stats": state.batch_stats}, x, mutable="batch_stats"
            )
            return jnp.mean(output.astype(jnp.float32)), new["batch_stats"]

        (loss, stats), grads = jaxscale.value_and_grad(loss_fn, state, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads, value=loss, batch_stats=stats)

    moved = step(state, jnp.arange(12.0).reshape(4, 3))
    assert moved.batch_stats["mean"].tolist() != state.batch_stats["mean"].tolist()
    kept = step(moved, jnp.full((4, 3), jnp.inf))
    assert_same_bits(kept.batch_stats, moved.batch_stats)


@pytest.mark.slow
@answers("facebookresearch/fairseq2#1374: scales apart under tensor parallelism")
def test_devices_agree():
    # `test_devices.py` has the other ways to shard.
    spec = jax.sharding.PartitionSpec("d")
    tx = jaxscale.loss_scaled(optax.sgd(1.0), axis_name="d")

    def device(x):
        _, state = tx.update(x, tx.init(x), x)
        verdict = jaxscale.all_finite(x, axis_name="d") & (x == x)
        return verdict, state.scaling.loss_scale[None]

    mesh = jax.sharding.Mesh(jax.devices("cpu"), "d")
    run = jax.shard_map(device, mesh=mesh, in_specs=spec, out_specs=spec)
    for transform in (lambda f: f, jax.jit):
        verdicts, scales = transform(run)(jnp.ones(8).at[5].set(jnp.inf))
        assert verdicts.tolist() == [False] * 8
        assert scales.tolist() == [2.0**14] * 8


@answers(
    "optax: `MultiSteps` resets by multiplication, and 0 * inf is NaN for ever",
    "optax: `MultiSteps(loss_scaled(tx))` never recovers; the scaler goes outside",
)
def test_no_accumulator_is_poisoned():
    tx = jaxscale.loss_scaled(optax.MultiSteps(optax.sgd(1.0), 2))
    params, state = train(tx, [True, False, True])
    assert_same_bits(params, train(tx, [True, True])[0])
    assert state.inner_state.gradient_step == 1
    assert all(jnp.all(g == 0) for g in jax.tree.leaves(state.inner_state.acc_grads))

    params, state = W, tx.init(W)
    for grads in [jnp.ones(2), INF, jnp.ones(2), jnp.ones(2)]:
        params, state = advance(tx, state, grads, params)
    assert params.tolist() == [0, -3]
    assert state.scaling.loss_scale == 2.0**14


@answers("With MultiSteps' own skip outside, the scaler never sees the overflow")
def test_skip_not_finite_outside_documented_stall():
    outside = optax.MultiSteps(
        jaxscale.loss_scaled(optax.sgd(1.0)), 2, should_skip_update_fn=optax.skip_not_finite
    )
    _, state = outside.update(INF, outside.init(W), W)
    assert state.inner_opt_state.scaling.loss_scale == 2.0**15
    assert state.inner_opt_state.total_steps == 0
    assert "accumulation go" in " ".join(jaxscale.loss_scaled.__doc__.split())


@answers(
    "facebookresearch/fairseq#2384: an overflow of the norm is not one of the gradients",
    "Apex, DeepSpeed, DreamerV3: their sum or norm overflows",
)
def test_no_finite_gradient_is_declared_nonfinite():
    large = jnp.full(1000, 3e38)  # their sum and their norm are inf
    tx = jaxscale.loss_scaled(optax.scale(0.5))
    for update in (tx.update, jax.jit(tx.update)):
        updates, state = update(large, tx.init(large), large)
        assert state.grads_finite
        assert_same_bits(updates, large * 0.5)
    assert jaxscale.all_finite(jnp.full(2, 300.0, jnp.float16))


@answers("Flax clips to the largest float32, MPX to 65504: unscaling is not exact any more")
def test_every_scale_is_a_power_of_two_where_every_factor_is():
    policy = DYNAMIC(growth_interval=1, max_scale=2.0**20, min_scale=2.0**3)

    def body(state, finite):
        state = policy.adjust(state, finite)
        return state, state.loss_scale

    finite = jax.random.bernoulli(jax.random.key(0), 0.5, (1000,))
    _, scales = jax.lax.scan(body, policy.init(), finite)
    mantissas, exponents = jnp.frexp(scales)
    assert set(mantissas.tolist()) == {0.5}
    assert set((exponents - 1).tolist()) == set(range(3, 21))


@answers("PyTorch: the cotangent of a float16 loss is float16, and 2**16 is inf on every step")
def test_a_float16_loss_caps_the_scale_where_it_would_always_overflow():
    state = jaxscale.FixedLossScale(2.0**16).init()
    for slope in (1.0, 1.5):  # 1.5 times the largest float16 would be inf: the cap is 2**15
        loss, grad = jaxscale.value_and_grad(lambda w, slope=slope: w * slope, state)(
            jnp.array(2.0, jnp.float16)
        )
        assert_same_bits((loss, grad), (jnp.float16(2 * slope), jnp.float32(slope)))


@answers("Flax' own docstring example: 2**16 times a float16 loss is inf")
def test_first_step_f16_loss_finite_at_default():
    tx = jaxscale.loss_scaled(optax.sgd(0.1))
    w = jnp.array([1.0, 0.5], jnp.float16)
    loss, grads = jaxscale.value_and_grad(lambda w: jnp.sum(w), tx.init(w))(w)
    assert_same_bits((loss, grads), (jnp.float16(1.5), jnp.ones(2)))


@pytest.mark.slow
@answers("Equinox: a model has leaves that are not arrays")
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


@answers("Lightning-AI/pytorch-lightning#9599: clipping before unscaling, a flat learning curve")
def test_clip_inside_sees_unscaled():
    tx = jaxscale.loss_scaled(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0)))
    state = tx.init(W)
    grads = jaxscale.grad(lambda w: 0.3 * w[0] + 0.4 * w[1], state)(W)  # of norm 0.5
    updates, _ = tx.update(grads, state, W)
    np.testing.assert_allclose(updates, [-0.3, -0.4], rtol=1e-6)


@answers("optax: `clip` turns inf into 1")
@pytest.mark.parametrize("clip", [optax.clip(1.0), optax.clip_by_global_norm(1.0)])
def test_optax_clip_cannot_hide_inf(clip):
    tx = jaxscale.loss_scaled(optax.chain(clip, optax.sgd(1.0)))
    params, state = advance(tx, tx.init(W), INF)
    assert_same_bits(params, W)
    assert state.total_notfinite == 1


@answers("optax: `lion` makes a finite update of an infinite gradient")
def test_lion_overflow_detected():
    for inner in (optax.lion(0.1), optax.sign_sgd(0.1)):
        tx = jaxscale.loss_scaled(inner)
        params, state = advance(tx, tx.init(W), INF)
        assert_same_bits((params, state.grads_finite), (W, jnp.array(False)))


@answers("google-deepmind/jmp#47: the README's float16 scale raises on every adjust")
def test_f16_readme_recipe():
    policy = DYNAMIC(init_scale=np.float16(2.0**15))
    state = policy.adjust(policy.init(), jaxscale.all_finite(jnp.ones(2, jnp.float16)))
    assert avals(state) == avals(policy.init())
    assert policy.adjust(state, False).loss_scale == 2.0**14


@pytest.mark.slow
@answers("google/flax#4114: a scale with an axis is an unrelated TypeError")
def test_vmap_state():
    tx = jaxscale.loss_scaled(optax.sgd(1.0))
    states = jax.vmap(tx.init)(jnp.stack([W, W]))

    def step(w, state, x):
        grads = jaxscale.grad(lambda w: jnp.sum(w * x), state)(w)
        updates, state = tx.update(grads, state, w)
        return optax.apply_updates(w, updates), state

    w, states = jax.vmap(step)(jnp.stack([W, W]), states, jnp.array([1.0, jnp.inf]))
    assert w.tolist() == [[0, -3], [1, -2]]
    assert states.scaling.loss_scale.tolist() == [2.0**15, 2.0**14]


@answers("google/flax#4114: per-sample gradients under one scale")
def test_shared_state_over_a_batch_of_gradients():
    state = DYNAMIC().init()
    grads = jax.vmap(jaxscale.grad(lambda w, x: jnp.sum(w * x), state), (None, 0))(W, jnp.ones(3))
    assert grads.tolist() == [[1, 1]] * 3


@answers("huggingface/accelerate#4289: a restored scaler that is not the saved one")
def test_orbax_roundtrip_no_retrace(tmp_path):
    tx = jaxscale.loss_scaled(optax.adam(0.1))
    traces = []

    @jax.jit
    def update(grads, state, params):
        traces.append(None)
        return tx.update(grads, state, params)

    _, state = update(INF, tx.init(W), W)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", jax.eval_shape(tx.init, W))
    assert_same_bits(restored, state)
    assert avals(restored) == avals(state)
    update(W, restored, W)
    assert len(traces) == 1


@pytest.mark.slow
@answers("AI-Hypercomputer/maxtext#5021, Flax `DynamicScale`: FP8 statistics divided by the scale")
def test_owg_untouched():
    model = nn.Dense(4, dot_general_cls=fp8_ops.Fp8DirectDotGeneralOp)
    x = jnp.linspace(0.1, 1.0, 8).reshape(2, 4)
    variables = model.init(jax.random.key(0), x)

    def loss_fn(variables):
        return jnp.mean(model.apply(variables, x) ** 2)

    expected = jax.grad(loss_fn)(variables)["_overwrite_with_gradient"]
    scaled = jaxscale.grad(loss_fn, jaxscale.FixedLossScale(2.0**10).init())(variables)
    for name, value in jax.tree_util.tree_leaves_with_path(scaled["_overwrite_with_gradient"]):
        if "output_grad" not in jax.tree_util.keystr(
            name
        ):  # that one sees the scaled backward pass
            flat = dict(jax.tree_util.tree_leaves_with_path(expected))
            assert_same_bits(value, flat[name])


@answers("Flax `DynamicScale` drops imaginary parts; PyTorch and TensorFlow raise")
def test_complex_grads():
    state = jaxscale.FixedLossScale(2.0**10).init()
    grad = jaxscale.grad(lambda z: jnp.real(z) * 2 + jnp.imag(z) * 4, state)(jnp.array(0j))
    assert grad == 2 - 4j
    tx = jaxscale.loss_scaled(optax.sgd(1.0))
    params, new_state = advance(tx, tx.init(jnp.array(0j)), jnp.array(jnp.inf * 1j), jnp.array(0j))
    assert (params, new_state.total_notfinite) == (0j, 1)


@answers('"No inf checks were recorded for this optimizer": huggingface/transformers#24003')
def test_empty_grads():
    tx = jaxscale.loss_scaled(optax.adam(0.1))
    for tree in ({}, None, [], {"w": None}):
        updates, state = tx.update(tree, tx.init(tree), tree)
        assert jax.tree.structure(updates) == jax.tree.structure(tree)
        assert state.grads_finite
        assert state.total_steps == 1


@answers("tensorflow/tensorflow#48662: inner gradients that stay scaled collapse the scale")
def test_gradient_penalty():
    state = jaxscale.FixedLossScale(2.0**12).init()

    def penalized(w, gradient):
        return jnp.sum(w**3) + jnp.sum(gradient(lambda v: jnp.sum(v**3))(w) ** 2)

    ours = jaxscale.grad(lambda w: penalized(w, lambda f: jaxscale.grad(f, state)), state)(W)
    assert_same_bits(ours, jax.grad(lambda w: penalized(w, jax.grad))(W))


@answers("Flax `DynamicScale.value_and_grad` takes no keyword arguments")
def test_kwargs_loss_fn():
    loss, grad = jaxscale.value_and_grad(lambda w, *, x: jnp.sum(w * x), DYNAMIC().init())(W, x=2.0)
    assert (loss, grad.tolist()) == (-2, [2, 2])


@answers("optax's `tree.get` finds the fields of NamedTuples only")
def test_tree_get_loss_scale():
    tx = optax.chain(jaxscale.loss_scaled(optax.adam(0.1)), optax.identity())
    state = tx.init(W)
    assert optax.tree_utils.tree_get(state, "loss_scale") == 2.0**15
    state = optax.tree_utils.tree_set(state, loss_scale=jnp.float32(4.0))
    assert jaxscale.metrics(state)["loss_scale"] == 4
    shapes = optax.tree_utils.tree_map_params(tx, lambda leaf: leaf * 0, state)
    assert jax.tree.structure(shapes) == jax.tree.structure(state)


@pytest.mark.slow
@answers("patrick-kidger/equinox#221: gradients hold None where nothing is differentiated")
def test_equinox_gradients_with_none():
    model = eqx.nn.MLP(2, 1, 4, 1, key=jax.random.key(0))
    state = DYNAMIC().init()
    grads = jaxscale.grad(lambda m: jnp.sum(m(W)), state, transform=eqx.filter_grad)(model)
    assert grads.activation is None
    assert jaxscale.all_finite(grads)


def test_every_law_answers_a_report():
    laws = {name for name in globals() if name.startswith("test_")}
    assert laws - set(REPORTS.values()) == {"test_every_law_answers_a_report"}
