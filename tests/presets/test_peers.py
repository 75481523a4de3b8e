"""The libraries that are installed, run beside their presets on random steps.

What their own test suites assert of a loss scale is in `test_traces.py`, as recorded, and in the
laws of `tests/policies/test_policies.py` and `tests/step`.
"""

import itertools

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import pytest
from flax.training import dynamic_scale
from tables import assert_same_bits, cases

import jaxscale
from jaxscale import presets

pytestmark = pytest.mark.standard_promotion

W = jnp.array([1.0, -2.0])
G = jnp.array([0.5, 1.0])
SPOIL = [jnp.nan, jnp.inf, -jnp.inf]
SEEDS = range(4)


def apply(tx, grads, state, params, **extra):
    updates, state = tx.update(grads, state, params, **extra)
    return optax.apply_updates(params, updates), state


def random_steps(seed, number=300):
    """A row of verdicts: stretches of 20, of mostly good or bad steps or of both."""
    rng = np.random.default_rng(seed)
    probabilities = rng.permutation(np.resize([0.05, 0.9, 0.5, 1.0], number // 20))
    return jnp.asarray(rng.random(number) < np.repeat(probabilities, 20))


@cases(
    ("seed", "period", "factor"),
    [(seed, *rule) for seed, rule in itertools.product(SEEDS, [(1, 2), (3, 2), (2, 4), (5, 16)])],
    fast=[(0, 3, 2)],
)
def test_jmp_itself(seed, period, factor):
    """Scale and counter after each step, from the floor of 1 to where it would be inf."""
    steps = random_steps(seed)
    init = float(factor) ** int(seed * 42 // np.log2(factor))  # 1 to nearly inf
    theirs = jmp.DynamicLossScale(jnp.float32(init), period=period, factor=factor)

    def body(scaler, finite):
        scaler = scaler.adjust(finite)
        return scaler, (scaler.loss_scale, scaler.counter)

    def ours(state, finite):
        state = policy.adjust(state, finite)
        return state, state[:2]

    policy = presets.jmp(init, period=period, factor=factor)
    theirs = jax.jit(lambda: jax.lax.scan(body, theirs, steps)[1])()
    assert_same_bits(jax.jit(lambda: jax.lax.scan(ours, policy.init(), steps)[1])(), theirs)


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
    ("seed", "interval", "growth", "backoff"),
    [(seed, *rule) for seed, rule in itertools.product(SEEDS, [(1, 2.0, 0.5), (4, 8.0, 0.25)])],
    fast=[(0, 4, 8.0, 0.25)],
)
def test_flax_itself(seed, interval, growth, backoff):
    """Scale, counter, verdict and gradients of `DynamicScale`."""
    init = 2.0 ** (82 * seed - 120)  # from floor to cap
    theirs = dynamic_scale.DynamicScale(
        growth_factor=growth,
        backoff_factor=backoff,
        growth_interval=interval,
        fin_steps=jnp.int32(0),
        scale=jnp.float32(init),
    )
    ours = presets.flax(
        growth_factor=growth, backoff_factor=backoff, growth_interval=interval, scale=init
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


@cases(("seed", "most"), itertools.product(SEEDS, [2, 1000]), fast=[(0, 2)])
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
                our_state.step_applied,
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


@pytest.mark.slow
@cases("interval", [1, 3])
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
    policy = presets.keras(initial_scale=1024.0, dynamic_growth_steps=interval)
    ours = jaxscale.loss_scaled(optax.sgd(0.25), policy)

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
