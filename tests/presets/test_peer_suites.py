"""Asserts of this library what the test suites of other libraries assert of a loss scale.

First come sequences of good (G) and bad (B) steps, then single behaviours, then jmp, Flax,
optax and Keras themselves, run beside ours.

Covered by other files, which had these tests before we read theirs:

- test_tree: all_finite over None, {}, every leaf and dtype (jmp, MPX, PyTorch found_inf,
  optax skip_not_finite); select_tree (jmp, MPX); None trees.
- test_errors: predicates and verdicts that are not a scalar bool (jmp, there assertions); scales,
  factors and counts out of range (DeepSpeed, Keras); a minimum of 0 (jmp takes it); unknown
  arguments (Keras); an optimizer that is not one (tf_keras).
- test_policies: FixedLossScale always applies (TensorFlow, contrib); configurations round-trip
  (TensorFlow, Keras); [None] gradients and "dynamic" for the defaults (TensorFlow, where None
  is an error: here it is no scaling); integer scales become floats (jmp warns); a restored
  scale outside of the bounds stays until it moves inwards (MPX clips it).
- test_state: dtypes of scale and unscale (TensorFlow, tf_keras: there kept, here at least
  float32); leaves of a state (jmp).
- test_value_and_grad: aux, structures, argnums (MPX, TensorFlow's tape); Jacobians (an error
  there); float32 gradients (MPX gives float16); has_aux.
- test_loss_scaled: finite steps are the optimizer's own, bad ones leave no trace, for momentum
  (slots), MultiSteps and schedules, eager, in jit and in scan (Keras, TensorFlow, PyTorch,
  optax: apply_if_finite, MultiSteps, dtype stability); a loss of inf or NaN (MPX); an update
  without parameters (Keras); update and apply fused (PyTorch's fused optimizers).
- test_flax: `step` counts applied steps (Keras 3; tf_keras counts skipped ones); overwrites are
  replaced raw (Keras). test_devices: NaN born on one device (optax pmap, tf_keras).
- test_user_reports: checkpoints (TensorFlow, tf_keras, PyTorch); MultiSteps with a bad
  mini-step (optax); clipping sees unscaled gradients (PyTorch); gradient penalties (PyTorch);
  FP8 overwrites (Keras). test_readme: defaults of 2**15 and 2000 (tf_keras).

Not applicable:

- Sparse gradients (IndexedSlices, uncoalesced tensors): JAX differentiates to dense arrays.
  Strided and transposed gradients: its arrays have no strides.
- Scaled decorators, clipping by max_norm * scale, 1 / scale by hand (MPX, PyTorch): no scaled
  loss or gradient ever leaves `value_and_grad`.
- Recomputing a step with lower scales until it fits (TensorFlow's tape): a step is skipped,
  see test_tensorflow_tape_...; persistent tapes, targets, a tape used twice: no tapes.
- An optimizer as an object: wrapped twice, its attributes, learning_rate and iterations through
  the wrapper, warnings that a method was not called, the scaler handed to the optimizer, a
  second factor inside of it, configurations that hold it, strategies (TensorFlow, tf_keras,
  Keras, PyTorch): a transformation is two pure functions. Nor is a scale called for its value.
- Lazily initialised scalers, hyperparameters in a state_dict (PyTorch): `init` is explicit, and
  a policy is code. Lists over several GPUs: an array may be on many.
- conditionally_transform, skip_large_updates, numbers of bad elements (optax): no conditions but
  finiteness, and no norms, which overflow on finite gradients.
- Factors other than 2 rejected (tf_keras), dynamic=False (Keras): any factor, and a policy each.
- Asserting nothing: jmp's ..._adjust_requires_scalar_input. No tests of their scalers: Flax,
  OpenSeq2Seq (but of regularization, below), Megatron-LM, ColossalAI. Not read: MindSpore.
"""

import dataclasses
import pickle

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import pytest
from flax import serialization
from flax.training import dynamic_scale
from tables import assert_same_bits, crossed, rows

import jaxscale

pytestmark = [pytest.mark.standard_promotion, pytest.mark.sampled(2)]

DYNAMIC = jaxscale.DynamicLossScale
F32 = np.float32
MAX = float(np.finfo(F32).max)
W = jnp.array([1.0, -2.0])
G = jnp.array([0.5, 1.0])
SPOIL = [jnp.nan, jnp.inf, -jnp.inf]


def rule(init_scale=1.0, interval=2, factor=2.0, **kwargs):
    """The rule of TensorFlow and jmp: one factor, both ways."""
    kwargs = {"backoff_factor": 1 / factor, "max_scale": MAX} | kwargs
    return DYNAMIC(init_scale=init_scale, growth_interval=interval, growth_factor=factor, **kwargs)


def verdicts(steps):
    return jnp.array([step == "G" for step in steps.replace(" ", "")])


def replay(policy, steps, state=None):
    """The scale after each step, and the last state."""

    def body(state, finite):
        state, should_apply = policy.update(state, [None, jnp.where(finite, 1.0, jnp.nan)])
        return state, (state.loss_scale, should_apply)

    state, (scales, applied) = jax.lax.scan(body, state or policy.init(), verdicts(steps))
    assert applied.tolist() == verdicts(steps).tolist()
    return scales.tolist(), state


def replay_on_two_replicas(policy, steps):
    """As `replay`, with a NaN on the second replica alone."""

    def body(state, finite):
        grads = jnp.where(finite | (jax.lax.axis_index("replica") == 0), 1.0, jnp.nan)
        state, should_apply = policy.update(state, grads, axis_name="replica")
        return state, (state.loss_scale, should_apply)

    def replica(_):
        return jax.lax.scan(body, policy.init(), verdicts(steps))[1]

    scales, applied = jax.vmap(replica, axis_name="replica")(jnp.arange(2))
    assert applied.tolist() == [verdicts(steps).tolist()] * 2
    return scales.tolist()


def apply(tx, grads, state, params, **extra):
    updates, state = tx.update(grads, state, params, **extra)
    return optax.apply_updates(params, updates), state


# A test of theirs: its rule, its steps, and the scale after each.
SEQUENCES = {
    "tensorflow_increase": (rule(), "GGGGGG", [1, 2, 2, 4, 4, 8]),
    "tensorflow_keep_increasing_until_capped": (
        rule(MAX / 4),
        "GGGGGG",
        [MAX / 4, MAX / 2, MAX / 2, MAX, MAX, MAX],
    ),
    "tensorflow_decrease_every_step": (rule(1024), "BBBBBB", [512, 256, 128, 64, 32, 16]),
    "tensorflow_keep_decreasing_until_one": (rule(16), "BBBBBB", [8, 4, 2, 1, 1, 1]),
    "tensorflow_nan_clear_good_step": (rule(), "GGGBG", [1, 2, 2, 1, 1]),
    "tensorflow_each_step": (rule(interval=1), "GGGBGG", [2, 4, 8, 4, 8, 16]),
    "tensorflow_alternating_each_step": (rule(interval=1), "GBGBGBG", [2, 1, 2, 1, 2, 1, 2]),
    "tensorflow_alternating_every_other_step": (
        rule(32),
        "GBGBGBG",
        [32, 16, 16, 8, 8, 4, 4],
    ),
    "tensorflow_nondefault_multiplier": (rule(4, factor=3), "GGBGG", [4, 12, 4, 4, 12]),
    "tensorflow_random_mix": (
        rule(4),
        "BGGGBGBGGGB",
        [2, 2, 4, 4, 2, 2, 1, 1, 2, 2, 1],
    ),
    "contrib_incr_bad_step_clear_good_step": (rule(hysteresis=2), "GGGBG", [1, 2, 2, 2, 2]),
    "contrib_incr_good_step_does_not_clear_bad_step": (
        rule(hysteresis=2),
        "GGGBGB",
        [1, 2, 2, 2, 2, 1],
    ),
    "contrib_random_mix": (
        rule(4, hysteresis=2),
        "BBGGGBGBGGGB",
        [4, 2, 2, 4, 4, 4, 4, 2, 2, 4, 4, 4],
    ),
    "keras_downscaling": (rule(400), "BBBB", [200, 100, 50, 25]),
    "keras_upscaling": (rule(2), "GGGGGGGG", [2, 4, 4, 8, 8, 16, 16, 32]),
    "torch_update_scale": (rule(4, backoff_factor=0.25), "GGB", [4, 8, 2]),
    "torch_autocast": (rule(128, 1), "GGBG", [256, 512, 256, 512]),  # 128 * 2**3 / 2
    "torch_will_not_overflow": (rule(1e38, 1, 16), "GG", [MAX, MAX]),
    "deepspeed_all_overflow": (rule(16), "BBBBBBBB", [8, 4, 2, 1, 1, 1, 1, 1]),
    "deepspeed_min_loss_scale": (
        rule(16, min_scale=2),
        "BBBBBBBB",
        [8, 4, 2, 2, 2, 2, 2, 2],
    ),
    "deepspeed_some_overflow": (rule(256), "BBGGGB", [128, 64, 64, 128, 128, 64]),
    "fairseq_run_iter": (rule(interval=1), "G", [2]),
    "mpx_growth_is_clipped": (
        rule(2.0**14, max_scale=65504),
        "GGGG",
        [2.0**14, 2.0**15, 2.0**15, 65504],
    ),
    "paddle_min_loss_scaling": (
        rule(2048, backoff_factor=0.8, min_scale=1639),
        "BB",
        [1639, 1639],
    ),
}


@pytest.mark.parametrize("case", SEQUENCES)
def test_sequence_of(case):
    """The scale after each step, as the test suite of that library has it."""
    policy, steps, scales = SEQUENCES[case]
    assert replay(policy, steps)[0] == [F32(scale) for scale in scales]


@pytest.mark.parametrize("case", [case for case in SEQUENCES if "tensorflow" in case])
def test_tensorflow_mirrored_sequence_of(case):
    """A NaN on one replica moves the scale, and skips the step, on all."""
    policy, steps, scales = SEQUENCES[case]
    assert replay_on_two_replicas(policy, steps) == [[F32(scale) for scale in scales]] * 2


@pytest.mark.parametrize(
    ("start", "steps", "theirs", "ours"),
    [
        (1024, "BBBBBB", [1024, 512, 512, 256, 256, 128], [1024, 512, 256, 128, 64, 32]),
        (16, "BBBBBBB", [16, 8, 8, 4, 4, 2, 2], [16, 8, 4, 2, 1, 1, 1]),
    ],
)
def test_contrib_decrease_every_n_steps_differs(start, steps, theirs, ours):
    """Every second bad step halves. Here, as in Apex, each one after the second does too."""
    scales, _ = replay(rule(start, hysteresis=2), steps)
    assert scales == ours
    assert scales[:2] == theirs[:2]
    assert all(a <= b for a, b in zip(scales, theirs, strict=True))


def test_deepspeed_no_overflow_differs():
    """A window of 2 grows on steps 3, 5, 7: one later than here, where it is 2, 4, 6."""
    theirs = [256, 256, 512, 512, 1024, 1024, 2048]
    scales, _ = replay(rule(256), "GGGGGG")
    assert scales == theirs[1:]


def test_torch_growth_tracker():
    """The tracker is 1, 0 and 0 after good, good and bad."""
    policy, state = rule(4, backoff_factor=0.25), None
    for step, tracker in zip("GGB", [1, 0, 0], strict=True):
        _, state = replay(policy, step, state)
        assert state.growth_tracker == tracker


@crossed((65536.0, 2.0, 0.5), start=[1.0, 1024.0, 65536.0], growth=[2.0, 4.0], backoff=[0.5, 0.25])
def test_apex_update_scale_hysteresis(start, growth, backoff):
    """10 of hysteresis: 9 infs do nothing, 10 + n back off 1 + n times; growth is by interval."""
    policy = DYNAMIC(
        init_scale=start,
        growth_factor=growth,
        backoff_factor=backoff,
        growth_interval=10,
        hysteresis=10,
        min_scale=2.0**-126,
        max_scale=2.0**126,
    )
    steps = "B" * 80 + "G" * 55
    scales, _ = replay(policy, steps)
    assert scales[:9] == [start] * 9
    low = [max(start * backoff**k, 2.0**-126) for k in range(1, 72)]
    assert scales[9:80] == low
    grown = [min(low[-1] * growth ** (k // 10), 2.0**126) for k in range(1, 56)]
    assert scales[80:] == grown


def test_paddle_update_loss_scaling():
    """After 999 good steps of 1000 one more doubles; bad step 2 of 2 gives 0.8 of the scale."""
    policy = rule(2048, 1000, backoff_factor=0.8, hysteresis=2)
    state = policy.init()._replace(
        growth_tracker=jnp.array(999, jnp.int32), hysteresis_tracker=jnp.array(1, jnp.int32)
    )
    grown = policy.adjust(state, True)
    assert (grown.loss_scale, grown.growth_tracker) == (4096, 0)
    lower = policy.adjust(state, False)
    assert (lower.loss_scale, lower.growth_tracker) == (F32(2048) * F32(0.8), 0)
    assert lower.hysteresis_tracker == 0


@pytest.mark.parametrize("factor", [2.0, 3.0, 4.0])
def test_jmp_scale_then_unscale(factor):
    """Scaling multiplies every leaf; unscaling that gives the original back."""
    tree = {"a": jnp.ones(3), "b": {"c": 2 * jnp.ones(())}, "d": None}
    for policy in (jaxscale.FixedLossScale(factor), DYNAMIC(init_scale=factor)):
        scaled = jaxscale.scale(policy.init(), tree)
        assert_same_bits(scaled, jax.tree.map(lambda x: x * F32(factor), tree))
        assert_same_bits(jaxscale.unscale(policy.init(), scaled), tree)


def test_jmp_no_op_loss_scale():
    """Scaling by nothing returns the very same arrays."""
    state = jaxscale.NoOpLossScale().init()
    assert jaxscale.scale(state, W) is W
    assert jaxscale.unscale(state, W) is W


@pytest.mark.parametrize(("period", "factor"), [(20, 2.0), (30, 3.0)])
def test_jmp_adjust_increases_on_finite(period, factor):
    """The scale stays and the counter counts, until the period is full; then both start anew."""
    policy = rule(10, period, factor)
    state = policy.init()
    for count in range(1, period):
        state = policy.adjust(state, True)
        assert (state.loss_scale, state.growth_tracker) == (10, count)
    state = policy.adjust(state, True)
    assert (state.loss_scale, state.growth_tracker) == (10 * factor, 0)


@pytest.mark.parametrize("minimum", [1.0, 0.3125, 0.37, 2.0**-126])
def test_jmp_adjust_reduces_to_an_explicit_minimum(minimum):
    """100 bad steps give max(minimum, 10 / factor**k); here under jit too."""
    scales, state = replay(rule(10, min_scale=minimum), "B" * 130)
    assert scales == [max(F32(minimum), F32(10 / 2**k)) for k in range(1, 131)]
    assert state.growth_tracker == 0


def test_mpx_no_mixed_precision():
    """Switched off, gradients count as finite even if the loss is not; skipping is extra here."""
    policy = jaxscale.NoOpLossScale()
    loss, grads = jaxscale.value_and_grad(lambda w: jnp.sum(w) / 0.0, policy.init())(W)
    assert jnp.isneginf(loss)
    assert policy.update(policy.init(), grads)[1]
    tx = jaxscale.loss_scaled(optax.sgd(1.0), None)
    assert_same_bits(apply(tx, grads, tx.init(W), W, value=loss)[0], W)


def test_mpx_filter_grad_of_an_infinite_loss():
    """Gradients of an infinite loss are float32 all the same, and not finite."""
    w = jnp.ones(2, jnp.float16)
    grads = jaxscale.grad(lambda w: jnp.sum(w).astype(jnp.float32) * jnp.inf, DYNAMIC().init())(w)
    assert grads.dtype == jnp.float32
    assert not jaxscale.all_finite(grads)


@pytest.mark.parametrize("condition_holds", [True, False])
def test_optax_conditionally_mask_inside(condition_holds):
    """A condition on step and loss zeroes the updates; a bad step is no step to it."""
    loss = jnp.array(1.0 if condition_holds else 5.0)
    inner = optax.conditionally_mask(
        optax.sgd(1.0),
        lambda step, loss, **_: (step < 1) & (loss < 2),
        forward_extra_args=True,
    )
    tx = jaxscale.loss_scaled(inner)
    w, state = apply(tx, G * jnp.nan, tx.init(W), W, loss=loss)
    w, state = apply(tx, G, state, w, loss=loss)
    w, state = apply(tx, G, state, w, loss=loss)
    assert_same_bits(w, W - G if condition_holds else W)
    assert state.inner_state.step == 2


def test_optax_multi_steps_every_k_schedule():
    """Every k-th mini-step applies the mean of k gradients, and k varies; bad ones do not count."""
    multi = optax.MultiSteps(optax.sgd(1.0), lambda step: jnp.where(step == 0, 1, 2))
    tx = jaxscale.loss_scaled(multi)
    w, state, seen = W, tx.init(W), []
    for grads in [G, G * jnp.nan, G, G * jnp.inf, 3 * G, G]:
        w, state = apply(tx, grads, state, w)
        seen.append(bool(state.grads_finite & multi.has_updated(state.inner_state)))
    assert seen == [True, False, False, False, True, False]
    assert_same_bits(w, W - G - 2 * G)


def test_optax_zero_nans_inside():
    """Composes with zero_nans: which cannot hide a NaN, as the verdict comes first."""
    tx = jaxscale.loss_scaled(optax.chain(optax.zero_nans(), optax.sgd(1.0)))
    w, state = apply(tx, G.at[0].set(jnp.nan), tx.init(W), W)
    assert_same_bits(w, W)
    assert state.total_notfinite == 1


@crossed(
    ("float32", "float16"),
    params_dtype=["float32", "float16", "bfloat16"],
    grads_dtype=["float32", "float16", "bfloat16"],
)
def test_optax_multi_steps_mixed_precision(params_dtype, grads_dtype):
    """Parameters keep their dtype for every pair of dtypes; updates are float32 here."""
    params, grads = W.astype(params_dtype), G.astype(grads_dtype)
    tx = jaxscale.loss_scaled(optax.MultiSteps(optax.sgd(1.0), 1))
    updates, _ = tx.update(grads, tx.init(params), params)
    assert updates.dtype == jnp.float32
    stepped, _ = jaxscale.apply_gradients(tx, grads, tx.init(params), params)
    assert_same_bits(stepped, (W - G).astype(params_dtype))


def test_keras_serialization():
    """A configuration has the arguments and no more."""
    assert " ".join(DYNAMIC().get_config()) == (
        "init_scale growth_factor backoff_factor growth_interval hysteresis min_scale max_scale"
    )


def test_keras_deserialization_of_an_older_configuration():
    """A configuration that lacks arguments of later versions loads with their defaults."""
    assert DYNAMIC.from_config({"init_scale": 4.0}) == DYNAMIC(init_scale=4)


@jax.custom_vjp
def spied(x, seen):
    """The identity; what flows back through it comes out as the gradient of `seen`."""
    return x


spied.defvjp(lambda x, seen: (x, None), lambda _, cotangent: (cotangent, cotangent))


def test_tensorflow_loss_scale_in_backprop():
    """What flows back is scaled, and doubles as the scale does; the applied gradient is not."""
    tx = jaxscale.loss_scaled(optax.sgd(0.25), rule(8, interval=1))
    raw = "_overwrite_with_gradient"  # comes out as it came
    w, state = jnp.array(1.0), tx.init(jnp.array(1.0))
    for step in range(3):
        grads = jaxscale.grad(lambda p: 3 * spied(p["w"], p[raw]), state)(
            {"w": w, raw: jnp.array(0.0)}
        )
        assert (grads["w"], grads[raw]) == (3, 3 * 8 * 2**step)
        w, state = apply(tx, grads["w"], state, w)
    assert w == 1 - 3 * 0.75


def test_tensorflow_dynamic_update():
    """A finite step is applied and 2 becomes 4; a NaN is not and 4 becomes 2."""
    tx = jaxscale.loss_scaled(optax.sgd(1.0), rule(2, interval=1))
    w, state = apply(tx, G, tx.init(W), W)
    assert (w.tolist(), state.scaling.loss_scale) == ((W - G).tolist(), 4)
    kept, state = apply(tx, G * jnp.nan, state, w)
    assert (kept.tolist(), state.scaling.loss_scale) == (w.tolist(), 2)


def test_tensorflow_dynamic_loss_scale_with_slots():
    """Momentum adds up right while the scale is multiplied by 4 on every step."""
    tx = jaxscale.loss_scaled(optax.sgd(1.0, momentum=1.0), rule(1, 1, 4))
    w, state = jnp.array(2.0), tx.init(jnp.array(2.0))
    for expected, scale in [(1, 4), (-1, 16), (-4, 64)]:  # velocities of 1, 2 and 3
        grads = jaxscale.grad(lambda w: w, state)(w)
        w, state = apply(tx, grads, state, w)
        assert (w, state.scaling.loss_scale) == (expected, scale)


def test_tensorflow_tape_down_loop_takes_a_step_each():
    """A gradient of 3e37 fits with a scale of 8, not 32: one call there, two skipped steps here."""
    tx = jaxscale.loss_scaled(optax.identity(), rule(32, 100))
    state, skipped = tx.init(W[0]), []
    for _ in range(4):
        grad = jaxscale.grad(lambda w: w * 3e37, state)(W[0])
        _, state = tx.update(grad, state, W[0])
        skipped.append(not state.grads_finite)
    assert (skipped, state.scaling.loss_scale) == ([True, True, False, False], 8)
    assert grad == F32(3e37)


def test_tensorflow_tape_inf_target_post_scale():
    """A loss that would overflow when scaled does not lower the scale if its gradient fits."""
    tx = jaxscale.loss_scaled(optax.sgd(1.0), rule(32, 100))
    loss, grad = jaxscale.value_and_grad(lambda w: w + 3e38, tx.init(W[0]))(W[0])
    _, state = tx.update(grad, tx.init(W[0]), W[0], value=loss)
    assert (loss, grad, state.scaling.loss_scale) == (F32(3e38), 1, 32)


def test_tensorflow_tape_special_gradients():
    """Unscaled, inf stays inf, NaN stays NaN, zero stays zero and None stays None."""
    grads = [jnp.array([jnp.inf, -jnp.inf, jnp.nan, 0.0, -0.0]), None]
    for transform in (lambda f: f, jax.jit):
        unscaled = transform(jaxscale.unscale)(jaxscale.FixedLossScale(32).init(), grads)
        assert_same_bits(unscaled, grads)


@pytest.mark.parametrize(("scale", "expected"), [(None, 0.0), (2.0**13, 2.0**-13)])
def test_contrib_float16_underflow(scale, expected):
    """x * 1e4 * 1e-4 * 1e-4 in float16 has gradient 0, but not with a scale of 1e4."""
    state = jaxscale.as_loss_scale(scale).init()
    big, small = jnp.float16(2.0**13), jnp.float16(2.0**-13)
    grad = jaxscale.grad(lambda x: ((x * big) * small) * small, state)(jnp.float16(1.0))
    assert grad == expected


def test_contrib_apply_gradients_with_a_fixed_scale():
    """NaN and inf are skipped, 0.1 is applied, and the scale never moves."""
    tx = jaxscale.loss_scaled(optax.sgd(1.0), 8)
    w, state = jnp.array(1.0), tx.init(jnp.array(1.0))
    for grad, expected in [(jnp.nan, 1.0), (jnp.inf, 1.0), (0.1, F32(1) - F32(0.1))]:
        w, state = apply(tx, jnp.array(grad), state, w)
        assert (w, state.scaling.loss_scale) == (expected, 8)


def test_contrib_apply_gradients_tells_a_policy_of_ones_own():
    """A manager of one's own is told of every step whether it was finite."""
    told = []

    @dataclasses.dataclass(frozen=True)
    class Told(jaxscale.LossScale):
        def init(self):
            return jaxscale.FixedLossScale(2).init()

        def adjust(self, state, grads_finite):
            told.append(bool(grads_finite))
            return state

    tx = jaxscale.loss_scaled(optax.sgd(1.0), Told())
    w, state = W, tx.init(W)
    for grads in [G, G * jnp.nan, G]:
        w, state = apply(tx, grads, state, w)
    assert told == [True, False, True]


@pytest.mark.parametrize(
    ("clip", "grads", "clipped"),
    [
        (optax.clip(0.5), [3.0, 0.25], [0.5, 0.25]),
        (optax.clip_by_global_norm(2.5), [3.0, 4.0], [1.5, 2.0]),
    ],
    ids=["clipvalue", "global_clipnorm"],
)
def test_tf_keras_clipping(clip, grads, clipped):
    """Clipping acts on unscaled gradients; inf is skipped, not clipped; the scale: 4, 8, 4."""
    tx = jaxscale.loss_scaled(optax.chain(clip, optax.sgd(1.0)), rule(4, interval=1))
    state = tx.init(W)
    grads = jaxscale.grad(lambda w: jnp.sum(w * jnp.array(grads)), state)(W)
    w, state = apply(tx, grads, state, W)
    assert (w.tolist(), state.scaling.loss_scale) == ((W - jnp.array(clipped)).tolist(), 8)
    kept, state = apply(tx, grads.at[0].set(jnp.inf), state, w)
    assert (kept.tolist(), state.scaling.loss_scale) == (w.tolist(), 4)


def test_tf_keras_custom_aggregator():
    """What is not finite only after the sum over replicas is skipped on all."""
    tx = jaxscale.loss_scaled(optax.sgd(1.0), axis_name="replica")

    def replica(grads):
        finite = jaxscale.all_finite(grads)
        w, state = apply(tx, jax.lax.psum(grads, "replica"), tx.init(W), W)
        return finite, w, state.scaling.loss_scale

    finite, w, scale = jax.vmap(replica, axis_name="replica")(jnp.full((2, 2), 3e38))
    assert finite.tolist() == [True, True]
    assert (w.tolist(), scale.tolist()) == ([W.tolist()] * 2, [2.0**14] * 2)


def test_tf_keras_checkpoint_without_loss_scaling():
    """The inner state of a checkpoint made without loss scaling is restored into one with it."""
    inner = optax.adam(0.1)
    _, saved = apply(inner, G, inner.init(W), W)
    tx = jaxscale.loss_scaled(inner)
    state = tx.init(W)
    restored = serialization.from_bytes(state.inner_state, serialization.to_bytes(saved))
    ours, state = apply(tx, G, state._replace(inner_state=restored), W)
    theirs, saved = apply(inner, G, saved, W)
    assert_same_bits((ours, state.inner_state), (theirs, saved))


def test_tf_keras_error_when_nesting():
    """A scaler in a scaler is rejected: at once, or by `init` where it lies deeper."""
    inner = jaxscale.loss_scaled(optax.sgd(0.1))
    with pytest.raises(TypeError, match="wrap once"):
        jaxscale.loss_scaled(inner)
    with pytest.raises(ValueError, match="wrap once"):
        jaxscale.loss_scaled(optax.chain(inner)).init(W)


def test_torch_pickling():
    """A scaler survives pickling in the middle of a run."""
    policy, state = rule(128, 3), None
    _, state = replay(policy, "GGBGG", state)
    policy, restored = pickle.loads(pickle.dumps((policy, state)))
    assert replay(policy, "GGG", restored)[0] == [128, 128, 128]
    assert_same_bits(restored, state)


@pytest.mark.parametrize("spoil", SPOIL)
def test_torch_grads_invalidated_between_unscale_and_step(spoil):
    """Gradients spoiled after they were unscaled go unnoticed there; here the step is skipped."""
    tx = jaxscale.loss_scaled(optax.sgd(1.0))
    grads = jaxscale.grad(lambda w: jnp.sum(w), tx.init(W))(W)
    w, state = apply(tx, grads * spoil, tx.init(W), W)
    assert_same_bits(w, W)
    assert state.scaling.loss_scale == 2.0**14


def test_torch_accumulation():
    """Accumulated by hand, 4 batches are 2 steps; inside MultiSteps each one is looked at."""
    policy = rule(4, interval=1)
    by_hand = jaxscale.loss_scaled(optax.sgd(1.0), policy)
    inside = jaxscale.loss_scaled(optax.MultiSteps(optax.sgd(1.0), 2), policy)
    w, state = W, by_hand.init(W)
    v, other = W, inside.init(W)
    for _ in range(2):
        total = jnp.zeros(2)
        for _ in range(2):
            total += jaxscale.grad(lambda w: jnp.sum(w * G), state)(w) / 2
            v, other = apply(inside, G, other, v)
        w, state = apply(by_hand, total, state, w)
    assert_same_bits((w, v), (W - 2 * G,) * 2)
    assert (state.scaling.loss_scale, other.scaling.loss_scale) == (4 * 2**2, 4 * 2**4)


def test_torch_multiple_optimizers():
    """An inf in the gradients of one optimizer skips that one alone; here, so is its backoff."""
    tx = jaxscale.loss_scaled(optax.sgd(1.0), rule(128, 100))
    (a, one), (b, two) = (apply(tx, grads, tx.init(W), W) for grads in (G * jnp.inf, G))
    assert_same_bits((a, b), (W, W - G))
    assert (one.scaling.loss_scale, two.scaling.loss_scale) == (64, 128)


def test_fairseq_load_state_dict():
    """The optimizer's state stays float32 with float16 parameters after a reload."""
    tx, params = jaxscale.loss_scaled(optax.adam(0.1)), W.astype(jnp.float16)
    _, state = jaxscale.apply_gradients(tx, G, tx.init(params), params)
    restored = serialization.from_bytes(tx.init(params), serialization.to_bytes(state))
    moments = restored.inner_state[0]
    assert (moments.mu.dtype, moments.nu.dtype) == (jnp.float32, jnp.float32)
    assert_same_bits(moments, jax.tree.map(np.asarray, state.inner_state[0]))


def test_openseq2seq_regularization():
    """Weight decay underflows in float16; taken on a float32 copy it does not."""
    tx = jaxscale.loss_scaled(optax.add_decayed_weights(2.0**-14))
    params = jnp.array(2.0**-13, jnp.float16)
    assert params * jnp.float16(2.0**-14) == 0
    updates, _ = tx.update(jnp.float16(0.0), tx.init(params), params)
    assert_same_bits(updates, jnp.float32(2.0**-27))


# The libraries themselves, side by side with ours, on random steps.

SEEDS = rows(range(4), fast=[0])


def random_steps(seed, number=300):
    """A row of verdicts: stretches of 20, of mostly good or bad steps or of both."""
    rng = np.random.default_rng(seed)
    probabilities = rng.permutation(np.resize([0.05, 0.9, 0.5, 1.0], number // 20))
    return jnp.asarray(rng.random(number) < np.repeat(probabilities, 20))


def scan_ours(policy, steps):
    def body(state, finite):
        state = policy.adjust(state, finite)
        return state, state[:2]

    return jax.jit(lambda: jax.lax.scan(body, policy.init(), steps)[1])()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("period", "factor"), [(1, 2), (3, 2), (2, 4), (5, 16)])
def test_jmp_itself(seed, period, factor):
    """jmp 0.0.4: scale and counter after each step, from the floor of 1 to where it would be inf.

    The bound, for jmp has none but inf, is the largest power of the factor below it.
    """
    steps = random_steps(seed)
    init = float(factor) ** int(seed * 42 // np.log2(factor))  # 1 to nearly inf
    theirs = jmp.DynamicLossScale(jnp.float32(init), period=period, factor=factor)

    def body(scaler, finite):
        scaler = scaler.adjust(finite)
        return scaler, (scaler.loss_scale, scaler.counter)

    theirs = jax.jit(lambda: jax.lax.scan(body, theirs, steps)[1])()
    top = float(factor) ** int(127 // np.log2(factor))
    assert_same_bits(scan_ours(rule(init, period, factor, max_scale=top), steps), theirs)


@pytest.mark.parametrize("seed", SEEDS)
def test_jmp_itself_with_a_minimum(seed):
    """An explicit minimum, outside of jit, where jmp would lose it."""
    steps = random_steps(seed, 100)
    scaler = jmp.DynamicLossScale(jnp.float32(64), period=3, min_loss_scale=jnp.float32(0.3125))
    theirs = []
    for finite in steps:
        scaler = scaler.adjust(finite)
        theirs.append(float(scaler.loss_scale))
    assert scan_ours(rule(64, 3, min_scale=0.3125), steps)[0].tolist() == theirs


def test_jmp_itself_scales_and_unscales():
    """`scale`, `unscale`, `all_finite` and `select_tree` on float32 trees."""
    tree, other = {"w": W, "b": jnp.array(jnp.inf)}, {"w": G, "b": jnp.array(2.0)}
    theirs, ours = jmp.StaticLossScale(jnp.float32(8)), jaxscale.FixedLossScale(8).init()
    assert_same_bits(jaxscale.scale(ours, tree), theirs.scale(tree))
    assert_same_bits(jaxscale.unscale(ours, tree), theirs.unscale(tree))
    for each in (tree, other, {}, None):
        assert_same_bits(jaxscale.all_finite(each), jmp.all_finite(each))
        pred = jaxscale.all_finite(each)
        assert_same_bits(jaxscale.tree_where(pred, tree, other), jmp.select_tree(pred, tree, other))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("interval", "growth", "backoff"), [(1, 2.0, 0.5), (4, 8.0, 0.25)])
def test_flax_itself(seed, interval, growth, backoff):
    """DynamicScale: scale, counter, verdict and gradients; its interval of n takes n + 1 steps."""
    tiny = float(np.finfo(F32).tiny)
    init = 2.0 ** (82 * seed - 120)  # from floor to cap
    theirs = dynamic_scale.DynamicScale(
        growth_factor=growth,
        backoff_factor=backoff,
        growth_interval=interval,
        fin_steps=jnp.int32(0),
        scale=jnp.float32(init),
    )
    ours = DYNAMIC(
        init_scale=init,
        growth_factor=growth,
        backoff_factor=backoff,
        growth_interval=interval + 1,
        min_scale=tiny,
        max_scale=MAX,
    )

    def loss_fn(w, slope):
        return w * slope

    def body(carry, slope):
        scaler, state = carry
        scaler, finite, _, grad = scaler.value_and_grad(loss_fn)(jnp.float32(0), slope)
        our_grad = jaxscale.grad(loss_fn, state)(jnp.float32(0), slope)
        state, should_apply = ours.update(state, our_grad)
        return (scaler, state), (
            (scaler.scale, scaler.fin_steps, finite, grad),
            (*state[:2], should_apply, our_grad),
        )

    slopes = jnp.where(random_steps(seed), 1.0, jnp.inf)
    flax, mine = jax.jit(lambda: jax.lax.scan(body, (theirs, ours.init()), slopes)[1])()
    assert_same_bits(mine, flax)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("most", [2, 1000])
def test_optax_apply_if_finite_itself(seed, most):
    """The same steps skipped, until it gives up and lets a NaN through; ours never does."""
    inner = optax.sgd(0.25, momentum=0.5)
    theirs, ours = optax.apply_if_finite(inner, most), jaxscale.skip_nonfinite(inner)
    steps = np.asarray(random_steps(seed, 60))
    grads = jnp.where(steps, 1.0, np.resize(SPOIL, 60))[:, None] * G

    def body(carry, grads):
        (v, their_state), (w, our_state) = carry
        v, their_state = apply(theirs, grads, their_state, v)
        w, our_state = apply(ours, grads, our_state, w)
        carry = ((v, their_state), (w, our_state))
        return carry, (
            (v, *their_state),
            (
                w,
                our_state.notfinite_count,
                our_state.grads_finite,
                our_state.total_notfinite,
                our_state.inner_state,
            ),
        )

    start = (W, theirs.init(W)), (W, ours.init(W))
    optaxs, mine = jax.jit(lambda: jax.lax.scan(body, start, grads)[1])()
    given_up = np.flatnonzero(np.asarray(optaxs[1]) > most)
    end = given_up[0] if given_up.size else len(steps)
    assert_same_bits(*(jax.tree.map(lambda leaf: leaf[:end], tree) for tree in (mine, optaxs)))
    assert jnp.all(jnp.isfinite(mine[0]))
    assert bool(given_up.size) == (most == 2)
    assert not jnp.any(jnp.isfinite(optaxs[0][end:]))


@pytest.mark.parametrize("interval", [1, 3])
def test_keras_itself(monkeypatch, tmp_path, interval):
    """LossScaleOptimizer on JAX: weights, scale and counters, from an ordinary range.

    It has no bounds: beyond them it would reach 0 or inf, and stay there.
    """
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    import keras

    weights = keras.Variable(np.asarray(W))
    theirs = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.25), initial_scale=1024.0, dynamic_growth_steps=interval
    )
    theirs.build([weights])
    names = [variable.name for variable in theirs.variables]
    ours = jaxscale.loss_scaled(
        optax.sgd(0.25), rule(1024, interval, min_scale=2.0**-126, max_scale=2.0**126)
    )

    def body(carry, grads):
        (v, variables), (w, state) = carry
        scale = variables[names.index("dynamic_scale")]
        v, variables = theirs.stateless_apply(variables, [grads * scale], v)
        w, state = apply(ours, grads, state, w)
        found = dict(zip(names, variables, strict=True))
        steps = state.total_steps - state.total_notfinite
        return ((v, variables), (w, state)), (
            (v[0], found["dynamic_scale"], found["step_counter"], found["iteration"]),
            (w, *state.scaling[:2], steps),
        )

    steps = random_steps(0, 80)
    grads = jnp.where(steps, 1.0, jnp.nan)[:, None] * G
    start = ([W], [variable.value for variable in theirs.variables]), (W, ours.init(W))
    kerass, mine = jax.jit(lambda: jax.lax.scan(body, start, grads)[1])()
    assert_same_bits(mine, kerass)
