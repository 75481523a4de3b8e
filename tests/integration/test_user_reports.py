"""Reports of users of other libraries, each as a test that can be found by its number."""

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


def advance(tx, state, grads, params=W, **extra):
    updates, state = jax.jit(tx.update)(grads, state, params, **extra)
    return optax.apply_updates(params, updates), state


def test_unscale_uses_forward_scale():
    """MPX `_grad_tools.py`; microsoft/DeepSpeed#8588: gradients off by 2 on a growth step."""
    tx = jaxscale.loss_scaled(optax.sgd(1.0), DYNAMIC(growth_interval=1, init_scale=4))

    @jax.jit
    def step(w, state):
        loss, grads = jaxscale.value_and_grad(lambda w: jnp.sum(w), state)(w)
        updates, state = tx.update(grads, state, w)
        return optax.apply_updates(w, updates), state, loss, grads

    w, state, loss, grads = step(W, tx.init(W))
    assert state.scaling.loss_scale == 8
    assert (loss, grads.tolist(), w.tolist()) == (-1, [1, 1], [0, -3])


def test_multisteps_inf_microbatch_recovers():
    """optax: `MultiSteps(loss_scaled(tx))` never recovers; the scaler goes outside."""
    tx = jaxscale.loss_scaled(optax.MultiSteps(optax.sgd(1.0), 2))
    params, state = W, tx.init(W)
    for grads in [jnp.ones(2), INF, jnp.ones(2), jnp.ones(2)]:
        params, state = advance(tx, state, grads, params)
    assert params.tolist() == [0, -3]
    assert state.scaling.loss_scale == 2.0**14


def test_skip_not_finite_outside_documented_stall():
    """With MultiSteps' own skip outside, the scaler never sees the overflow."""
    outside = optax.MultiSteps(
        jaxscale.loss_scaled(optax.sgd(1.0)), 2, should_skip_update_fn=optax.skip_not_finite
    )
    _, state = outside.update(INF, outside.init(W), W)
    assert state.inner_opt_state.scaling.loss_scale == 2.0**15
    assert state.inner_opt_state.total_steps == 0
    assert "accumulation go" in " ".join(jaxscale.loss_scaled.__doc__.split())


def test_clip_inside_sees_unscaled():
    """Lightning-AI/pytorch-lightning#9599: clipping before unscaling, a flat learning curve."""
    tx = jaxscale.loss_scaled(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0)))
    state = tx.init(W)
    grads = jaxscale.grad(lambda w: 0.3 * w[0] + 0.4 * w[1], state)(W)  # of norm 0.5
    updates, _ = tx.update(grads, state, W)
    np.testing.assert_allclose(updates, [-0.3, -0.4], rtol=1e-6)


@pytest.mark.parametrize("clip", [optax.clip(1.0), optax.clip_by_global_norm(1.0)])
def test_optax_clip_cannot_hide_inf(clip):
    """optax: `clip` turns inf into 1."""
    tx = jaxscale.loss_scaled(optax.chain(clip, optax.sgd(1.0)))
    params, state = advance(tx, tx.init(W), INF)
    assert_same_bits(params, W)
    assert state.total_notfinite == 1


def test_lion_overflow_detected():
    """optax: `lion` makes a finite update of an infinite gradient."""
    for inner in (optax.lion(0.1), optax.sign_sgd(0.1)):
        tx = jaxscale.loss_scaled(inner)
        params, state = advance(tx, tx.init(W), INF)
        assert_same_bits((params, state.grads_finite), (W, jnp.array(False)))


def test_single_trace():
    """google-deepmind/optax#1440, google/jaxopt#451: weak types compile the step twice."""
    tx = jaxscale.loss_scaled(optax.adam(0.1), DYNAMIC(growth_interval=2))
    update = jax.jit(tx.update)
    state = tx.init(W)
    for grads in [W, W, INF, W]:
        _, state = update(grads, state, W)
    assert update._cache_size() == 1


def test_f16_readme_recipe():
    """google-deepmind/jmp#47: the README's float16 scale raises on every adjust."""
    policy = DYNAMIC(init_scale=np.float16(2.0**15))
    state = policy.adjust(policy.init(), jaxscale.all_finite(jnp.ones(2, jnp.float16)))
    assert avals(state) == avals(policy.init())
    assert policy.adjust(state, False).loss_scale == 2.0**14


def test_min_scale_survives_jit():
    """google-deepmind/jmp#44: the minimum is no leaf, and lost in any jit."""
    policy = DYNAMIC(init_scale=64.0, min_scale=32.0)
    state = policy.init()
    for _ in range(8):
        state = jax.jit(policy.adjust)(state, jnp.array(False))
    assert state.loss_scale == 32


def test_scale_never_inf():
    """google/flax#2547, pytorch/pytorch#98828: growth to infinity."""
    policy = DYNAMIC(init_scale=2.0**120, max_scale=2.0**126, growth_interval=1)
    state, _ = jax.lax.scan(
        lambda s, _: (policy.adjust(s, jnp.array(True)), None), policy.init(), length=50
    )
    assert state.loss_scale == 2.0**126


def test_scale_never_below_min():
    """NVIDIA/apex#715: 1e-304, then a division by zero."""
    policy = DYNAMIC()
    state, _ = jax.lax.scan(
        lambda s, _: (policy.adjust(s, jnp.array(False)), None), policy.init(), length=2000
    )
    assert state.loss_scale == 1


def test_first_step_f16_loss_finite_at_default():
    """Flax' own docstring example: 2**16 times a float16 loss is inf."""
    tx = jaxscale.loss_scaled(optax.sgd(0.1))
    w = jnp.array([1.0, 0.5], jnp.float16)
    loss, grads = jaxscale.value_and_grad(lambda w: jnp.sum(w), tx.init(w))(w)
    assert_same_bits((loss, grads), (jnp.float16(1.5), jnp.ones(2)))


def test_batch_stats_guarded():
    """pytorch/pytorch#88474: the step is skipped, the running mean is NaN."""

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


def test_schedule_count_frozen():
    """allenai/OLMo-core#317: the skipped step moved the schedule."""
    tx = jaxscale.loss_scaled(optax.adam(optax.linear_schedule(0.1, 0.0, 10)))
    _, state = advance(tx, tx.init(W), W)
    _, state = advance(tx, state, INF)
    counts = optax.tree_utils.tree_get_all_with_path(state.inner_state, "count")
    assert {int(count) for _, count in counts} == {1}


def test_vmap_state():
    """google/flax#4114: a scale with an axis is an unrelated TypeError."""
    tx = jaxscale.loss_scaled(optax.sgd(1.0))
    states = jax.vmap(tx.init)(jnp.stack([W, W]))

    def step(w, state, x):
        grads = jaxscale.grad(lambda w: jnp.sum(w * x), state)(w)
        updates, state = tx.update(grads, state, w)
        return optax.apply_updates(w, updates), state

    w, states = jax.vmap(step)(jnp.stack([W, W]), states, jnp.array([1.0, jnp.inf]))
    assert w.tolist() == [[0, -3], [1, -2]]
    assert states.scaling.loss_scale.tolist() == [2.0**15, 2.0**14]


def test_shared_state_over_a_batch_of_gradients():
    """google/flax#4114: per-sample gradients under one scale."""
    state = DYNAMIC().init()
    grads = jax.vmap(jaxscale.grad(lambda w, x: jnp.sum(w * x), state), (None, 0))(W, jnp.ones(3))
    assert grads.tolist() == [[1, 1]] * 3


def test_shard_map_agree():
    """facebookresearch/fairseq2#1374: scales apart under tensor parallelism."""
    spec = jax.sharding.PartitionSpec
    tx = jaxscale.loss_scaled(optax.sgd(1.0), axis_name="d")

    def scales(x):
        _, state = tx.update(x, tx.init(x), x)
        return state.scaling.loss_scale[None]

    mesh = jax.sharding.Mesh(jax.devices("cpu"), "d")
    run = jax.shard_map(scales, mesh=mesh, in_specs=spec("d"), out_specs=spec("d"))
    assert jax.jit(run)(jnp.ones(8).at[5].set(jnp.inf)).tolist() == [2.0**14] * 8


def test_orbax_roundtrip_no_retrace(tmp_path):
    """huggingface/accelerate#4289: a restored scaler that is not the saved one."""
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


def test_owg_untouched():
    """AI-Hypercomputer/maxtext#5021, Flax `DynamicScale`: FP8 statistics divided by the scale."""
    model = nn.Dense(4, dot_general_cls=fp8_ops.Fp8DirectDotGeneralOp)
    x = jnp.linspace(0.1, 1.0, 8).reshape(2, 4)
    variables = model.init(jax.random.key(0), x)

    def loss_fn(variables):
        return jnp.mean(model.apply(variables, x) ** 2)

    expected = jax.grad(loss_fn)(variables)["_overwrite_with_gradient"]
    scaled = jaxscale.grad(loss_fn, jaxscale.FixedLossScale(2.0**10).init())(variables)
    for name, value in jax.tree_util.tree_leaves_with_path(scaled["_overwrite_with_gradient"]):
        if "output_grad" not in jax.tree_util.keystr(name):  # that one sees what flows back
            flat = dict(jax.tree_util.tree_leaves_with_path(expected))
            assert_same_bits(value, flat[name])


def test_complex_grads():
    """Flax `DynamicScale` drops imaginary parts; PyTorch and TensorFlow raise."""
    state = jaxscale.FixedLossScale(2.0**10).init()
    grad = jaxscale.grad(lambda z: jnp.real(z) * 2 + jnp.imag(z) * 4, state)(jnp.array(0j))
    assert grad == 2 - 4j
    tx = jaxscale.loss_scaled(optax.sgd(1.0))
    params, new_state = advance(tx, tx.init(jnp.array(0j)), jnp.array(jnp.inf * 1j), jnp.array(0j))
    assert (params, new_state.total_notfinite) == (0j, 1)


def test_norm_overflow_not_overflow():
    """facebookresearch/fairseq#2384: an overflow of the norm is none of the gradients."""
    tx = jaxscale.loss_scaled(optax.scale(1.0))
    large = jnp.full(2, 3e38)
    assert tx.update(large, tx.init(large))[1].grads_finite
    assert jaxscale.all_finite(jnp.full(2, 300.0, jnp.float16))


def test_empty_grads():
    """ "No inf checks were recorded for this optimizer": huggingface/transformers#24003."""
    tx = jaxscale.loss_scaled(optax.adam(0.1))
    for tree in ({}, None, [], {"w": None}):
        updates, state = tx.update(tree, tx.init(tree), tree)
        assert jax.tree.structure(updates) == jax.tree.structure(tree)
        assert state.grads_finite
        assert state.total_steps == 1


def test_gradient_penalty():
    """tensorflow/tensorflow#48662: inner gradients that stay scaled collapse the scale."""
    state = jaxscale.FixedLossScale(2.0**12).init()

    def penalized(w, gradient):
        return jnp.sum(w**3) + jnp.sum(gradient(lambda v: jnp.sum(v**3))(w) ** 2)

    ours = jaxscale.grad(lambda w: penalized(w, lambda f: jaxscale.grad(f, state)), state)(W)
    assert_same_bits(ours, jax.grad(lambda w: penalized(w, jax.grad))(W))


def test_kwargs_loss_fn():
    """Flax `DynamicScale.value_and_grad` takes no keyword arguments."""
    loss, grad = jaxscale.value_and_grad(lambda w, *, x: jnp.sum(w * x), DYNAMIC().init())(W, x=2.0)
    assert (loss, grad.tolist()) == (-2, [2, 2])


def test_tree_get_loss_scale():
    """optax's `tree.get` finds the fields of NamedTuples only."""
    tx = optax.chain(jaxscale.loss_scaled(optax.adam(0.1)), optax.identity())
    state = tx.init(W)
    assert optax.tree_utils.tree_get(state, "loss_scale") == 2.0**15
    state = optax.tree_utils.tree_set(state, loss_scale=jnp.float32(4.0))
    assert jaxscale.metrics(state)["loss_scale"] == 4
    shapes = optax.tree_utils.tree_map_params(tx, lambda leaf: leaf * 0, state)
    assert jax.tree.structure(shapes) == jax.tree.structure(state)


def test_equinox_gradients_with_none():
    """patrick-kidger/equinox#221: gradients hold None where nothing is differentiated."""
    model = eqx.nn.MLP(2, 1, 4, 1, key=jax.random.key(0))
    state = DYNAMIC().init()
    grads = jaxscale.grad(lambda m: jnp.sum(m(W)), state, transform=eqx.filter_grad)(model)
    assert grads.activation is None
    assert jaxscale.all_finite(grads)
