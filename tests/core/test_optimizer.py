"""Laws of the optax wrapper, over every policy, every inner optimizer and every way to run."""

import copy
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tables import (
    BAD,
    INNERS,
    MODES,
    PARAMS,
    POLICIES,
    assert_close,
    assert_same_bits,
    avals,
    counters,
    crossed,
    gradients,
    inners,
    jitted_step,
    optimizer,
    pairs,
    run,
    spoiled,
    step,
    wide,
)

import jaxscale

pytestmark = [pytest.mark.standard_promotion, pytest.mark.sampled(1)]

GOOD = gradients(0, 5)
BADS = [spoiled(g, bad) for g, bad in zip(gradients(1, 3), BAD.values(), strict=True)]
MIXED = [GOOD[0], BADS[0], GOOD[1], GOOD[2], BADS[1], BADS[2], GOOD[3], GOOD[4]]


def inner_update(inner, grads, state):
    """What `inner` itself does, shown what the wrapper shows it: float32 views."""
    inner = INNERS[inner]
    return inner.update(wide(grads), state, wide(PARAMS))


@pairs
def test_finite_step_is_inner_step_bit_for_bit_eagerly(policy, inner):
    tx = optimizer(policy, inner)
    state, inner_state = tx.init(PARAMS), INNERS[inner].init(wide(PARAMS))
    for grads in GOOD[:3]:
        updates, state = tx.update(grads, state, PARAMS)
        expected, inner_state = inner_update(inner, grads, inner_state)
        assert_same_bits(updates, expected)
        assert_same_bits(jax.tree.leaves(state.inner_state), jax.tree.leaves(inner_state))


@pairs
def test_finite_step_is_inner_step_to_rounding_when_compiled(policy, inner):
    tx = optimizer(policy, inner)
    state, inner_state = tx.init(PARAMS), INNERS[inner].init(wide(PARAMS))
    updates, state = jax.jit(tx.update)(GOOD[0], state, PARAMS)
    expected, inner_state = jax.jit(functools.partial(inner_update, inner))(GOOD[0], inner_state)
    assert_close(updates, expected)
    assert_close(jax.tree.leaves(state.inner_state), jax.tree.leaves(inner_state))


@crossed(("dynamic", "adam", "jit"), policy=POLICIES, inner=INNERS, mode=MODES)
def test_bad_steps_thrown_in_leave_no_trace(policy, inner, mode):
    tx = optimizer(policy, inner)
    params, state = run(tx, MIXED, mode)
    # For `scan`, the bad steps go to the end: only then is it the same compiled program.
    expected, expected_state = run(tx, GOOD + BADS if mode == "scan" else GOOD, mode)
    assert_same_bits(params, expected)
    assert_same_bits(state.inner_state, expected_state.inner_state)
    assert state.total_notfinite == len(BADS)
    assert state.total_steps == len(MIXED)


@crossed(("dynamic", "adam", "nan"), policy=POLICIES, inner=INNERS, bad=BAD)
def test_nonfinite_step_changes_only_scale_and_counters(policy, inner, bad):
    bad = BAD[bad]
    tx = optimizer(policy, inner)
    params, state = jitted_step(tx)(PARAMS, tx.init(PARAMS), GOOD[0])
    for one_step in (functools.partial(step, tx), jitted_step(tx)):
        new_params, new_state = one_step(params, state, spoiled(GOOD[1], bad))
        assert_same_bits(new_params, params)
        assert_same_bits(new_state.inner_state, state.inner_state)
        expected = POLICIES[policy].adjust(state.scaling, False)
        assert_same_bits(new_state.scaling, expected)
        counts = {"grads_finite": False, "notfinite_count": 1, "total_notfinite": 1}
        assert counters(new_state) == counters(state) | counts | {"total_steps": 2} | {
            name: value.item() for name, value in expected._asdict().items()
        }


@pairs
def test_init_and_update_agree_on_every_aval(policy, inner):
    tx = optimizer(policy, inner)
    state = tx.init(PARAMS)
    for update in (tx.update, jax.jit(tx.update)):
        after_init = state
        for grads in [GOOD[0], GOOD[1], BADS[0], BADS[2]]:  # growth and skip among them
            updates, after_init = update(grads, after_init, PARAMS)
            assert avals(after_init) == avals(state)
            assert avals(updates) == avals(wide(PARAMS))


@pairs
def test_step_compiles_once_over_growth_and_skip(policy, inner):
    tx = optimizer(policy, inner)
    chex.clear_trace_counter()

    @jax.jit
    @chex.assert_max_traces(n=1)
    def counted_step(params, state, grads):
        return step(tx, params, state, grads)

    params, state = PARAMS, tx.init(PARAMS)
    for grads in MIXED:
        params, state = counted_step(params, state, grads)
    assert counted_step._cache_size() == 1


@pairs
def test_apply_gradients_is_update_then_apply(policy, inner):
    tx = optimizer(policy, inner)

    def fused(params, state, grads):
        return jaxscale.apply_gradients(tx, grads, state, params)

    expected, expected_state = run(tx, MIXED, "eager")
    params, state = PARAMS, tx.init(PARAMS)
    for grads in MIXED:
        params, state = fused(params, state, grads)
    assert_same_bits((params, state), (expected, expected_state))

    fused = jax.jit(fused, donate_argnums=(0, 1))
    donated = jax.tree.map(jnp.copy, (PARAMS, tx.init(PARAMS)))
    for grads in MIXED:
        donated = fused(*donated, grads)
    assert_close(donated[0], expected)
    assert counters(donated[1]) == counters(expected_state)
    # A skipped step of it keeps every bit, minus zeros included.
    params = jax.tree.map(lambda p: p.at[()].set(-0.0), donated[0])
    kept, _ = fused(jax.tree.map(jnp.copy, params), donated[1], BADS[1])
    assert_same_bits(kept, params)


def test_apply_gradients_works_with_any_transformation():
    tx = optax.chain(jaxscale.loss_scaled(optax.sgd(1.0)), optax.scale(0.5))
    params = jnp.array(1.0)
    params, state = jaxscale.apply_gradients(tx, jnp.array(1.0), tx.init(params), params)
    assert params == 0.5
    kept, state = jaxscale.apply_gradients(tx, jnp.array(jnp.nan), state, params)
    assert kept == params
    params, _ = jaxscale.apply_gradients(
        optax.sgd(1.0),
        jnp.array(1.0),
        optax.sgd(1.0).init(params),
        params,
        value=jnp.array(0.0),
    )
    assert params == -0.5


def test_updates_of_a_skipped_step_keep_the_bits_of_minus_zero():
    tx = jaxscale.loss_scaled(optax.sgd(1.0))
    params = jnp.array([-0.0, 0.0, 1.0])
    for update in (tx.update, jax.jit(tx.update)):
        updates, _ = update(jnp.full(3, jnp.inf), tx.init(params), params)
        assert_same_bits(optax.apply_updates(params, updates), params)


@pytest.mark.parametrize("value", [jnp.nan, jnp.inf, -jnp.inf])
@pytest.mark.parametrize("grad", [1.0, jnp.inf])
def test_nonfinite_loss_skips_and_leaves_the_scale_alone(value, grad):
    tx = jaxscale.loss_scaled(optax.adam(0.1), jaxscale.DynamicLossScale(growth_interval=5))
    params = jnp.array(1.0)
    for update in (tx.update, jax.jit(tx.update)):
        _, state = update(jnp.array(1.0), tx.init(params), params, value=jnp.array(2.0))
        assert state.total_notfinite_loss == 0
        updates, new_state = update(jnp.array(grad), state, params, value=jnp.array(value))
        assert updates == 0
        assert_same_bits(new_state.scaling, state.scaling)
        assert_same_bits(new_state.inner_state, state.inner_state)
        assert not new_state.grads_finite
        assert new_state.total_notfinite == new_state.total_notfinite_loss == 1


def test_finite_value_with_nonfinite_gradients_lowers_the_scale():
    tx = jaxscale.loss_scaled(optax.adam(0.1))
    params = jnp.array(1.0)
    _, state = tx.update(jnp.array(jnp.inf), tx.init(params), params, value=jnp.array(2.0))
    assert (state.scaling.loss_scale, state.total_notfinite_loss) == (2.0**14, 0)


def recording(seen):
    """A transformation that notes what reaches it."""

    def update(updates, state, params=None, **extra_args):
        seen.append((updates, params, extra_args))
        return updates, state

    return optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), update)


def test_extra_arguments_reach_inner_untouched():
    seen = []
    tx = jaxscale.loss_scaled(recording(seen))
    value, value_fn, other = jnp.array(3.0), jnp.sum, {"a": "text"}
    tx.update(PARAMS, tx.init(PARAMS), PARAMS, value=value, value_fn=value_fn, other=other)
    assert seen[0][2]["value"] is value
    assert seen[0][2]["value_fn"] is value_fn
    assert seen[0][2]["other"] is other
    tx.update(PARAMS, tx.init(PARAMS))
    assert seen[1][1:] == (None, {})


def test_inner_sees_float32_views():
    seen = []
    tx = jaxscale.loss_scaled(recording(seen))
    tx.update(PARAMS, tx.init(PARAMS), params=PARAMS)  # by keyword, as MultiSteps does
    updates, params, _ = seen[0]
    assert avals(updates) == avals(params) == avals(wide(PARAMS))
    assert_same_bits(params, wide(PARAMS))


def test_inner_without_extra_arguments_and_multi_steps_are_accepted():
    plain = optax.GradientTransformation(lambda _: (), lambda u, s, p=None: (u, s))
    for inner in (plain, optax.MultiSteps(optax.sgd(0.1), 2)):
        tx = jaxscale.loss_scaled(inner)
        tx.update(PARAMS, tx.init(PARAMS), PARAMS, value=jnp.array(1.0))


def test_lbfgs_line_search_gets_its_arguments():
    def loss_fn(w):
        return jnp.sum((w - 3.0) ** 2)

    tx = jaxscale.loss_scaled(optax.lbfgs())
    w = jnp.zeros(2)
    state = tx.init(w)

    @jax.jit
    def lbfgs_step(w, state, spoil):
        value, grad = jaxscale.value_and_grad(loss_fn, state)(w)
        grad = jnp.where(spoil, jnp.nan, grad)
        updates, state = tx.update(grad, state, w, value=value, grad=grad, value_fn=loss_fn)
        return optax.apply_updates(w, updates), state

    for spoil in [False, True, False, False]:
        w, state = lbfgs_step(w, state, spoil)
    np.testing.assert_allclose(w, 3.0, rtol=1e-5)
    assert state.total_notfinite == 1


def test_counters_saturate():
    tx = jaxscale.loss_scaled(optax.sgd(0.1))
    top = jnp.array(jnp.iinfo(jnp.int32).max, jnp.int32)
    names = ["notfinite_count", "total_notfinite", "total_notfinite_loss", "total_steps"]
    state = tx.init(PARAMS)._replace(**dict.fromkeys(names, top))
    _, state = tx.update(BADS[0], state, PARAMS, value=jnp.array(jnp.nan))
    assert all(getattr(state, name) == top for name in names)


def test_counters_add_up():
    _, state = run(optimizer("dynamic", "sgd"), [*MIXED, BADS[0], BADS[1]], "jit")
    assert counters(state) | {"loss_scale": 0} == {
        "loss_scale": 0,
        "growth_tracker": 0,
        "hysteresis_tracker": 0,
        "grads_finite": False,
        "notfinite_count": 2,
        "total_notfinite": 5,
        "total_notfinite_loss": 0,
        "total_steps": 10,
        "total_retries": 0,
        "total_exhausted": 0,
        "backoff_count": 0,
    }


def test_never_gives_up():
    tx = optimizer("dynamic", "adam")
    params, state = run(tx, [BADS[0]] * 300, "scan")
    assert_same_bits(params, PARAMS)
    assert (state.scaling.loss_scale, state.notfinite_count) == (1.0, 300)


def test_weakly_typed_inner_state_does_not_compile_twice():
    # As `optax.contrib.reduce_on_plateau` once had it: Python numbers in the first state.
    inner = optax.GradientTransformation(
        lambda _: (0, 1.0, jnp.asarray(1.0)),
        lambda u, s, p=None: (u, jax.tree.map(jnp.asarray, s)),
    )
    tx = jaxscale.loss_scaled(inner)
    update = jax.jit(tx.update)
    _, state = update(PARAMS, tx.init(PARAMS))
    update(PARAMS, state)
    assert update._cache_size() == 1


@pytest.mark.slow
def test_avals_never_change_with_64_bit_numbers_on():
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        params = PARAMS | {"b": jnp.array(0.5, jnp.float64)}
        for policy in POLICIES.values():
            tx = jaxscale.loss_scaled(optax.adam(0.1), policy)
            state = tx.init(params)
            for grads in (params, spoiled(params, jnp.nan), params):
                _, new_state = jax.jit(tx.update)(grads, state, params, value=grads["b"])
                assert avals(new_state) == avals(state)
                state = new_state


def test_chained_link_after_it_is_kept_still():
    tx = optax.chain(jaxscale.loss_scaled(optax.adam(0.1)), optax.scale(0.5))
    state = tx.init(PARAMS)
    updates, state = jax.jit(tx.update)(BADS[0], state, PARAMS)
    assert all(jnp.all(u == 0) for u in jax.tree.leaves(updates))


def test_skip_nonfinite_skips_and_does_not_scale():
    tx = jaxscale.skip_nonfinite(INNERS["adam"])
    params, state = run(tx, MIXED, "jit")
    expected, _ = run(tx, GOOD, "jit")
    assert_same_bits(params, expected)
    assert (state.scaling.loss_scale, state.total_notfinite) == (1.0, 3)


def test_vmap_over_a_population_skips_each_alone():
    tx = optimizer("dynamic", "adam")
    population = jax.tree.map(lambda *xs: jnp.stack(xs), *[PARAMS] * 3)
    state = jax.vmap(tx.init)(population)
    grads = jax.tree.map(lambda *xs: jnp.stack(xs), GOOD[0], BADS[0], GOOD[1])
    for transform in (lambda f: f, jax.jit):
        _, new_state = transform(jax.vmap(tx.update))(grads, state, population)
        assert new_state.grads_finite.tolist() == [True, False, True]
        assert new_state.scaling.loss_scale.tolist() == [2.0**15, 2.0**14, 2.0**15]


@pytest.mark.slow
def test_disable_jit_and_debug_nans_find_nothing_to_complain_of():
    tx = jaxscale.loss_scaled(optax.adam(0.1))
    state = tx.init(PARAMS)
    with jax.disable_jit():
        _, new_state = tx.update(BADS[0], state, PARAMS)
    assert new_state.scaling.loss_scale == 2.0**14
    inf = spoiled(GOOD[0], jnp.inf)  # inf / inf, were it to reach Adam's arithmetic
    with jax.debug_nans(True):
        tx.update(inf, state, PARAMS)
        jax.block_until_ready(jax.jit(tx.update)(inf, state, PARAMS))


def test_the_optimizer_is_an_ordinary_value():
    # A GradientTransformation is a NamedTuple, so a tree: Flax NNX takes it apart, too.
    tx = jaxscale.loss_scaled(optax.sgd(0.5))
    for same in (jax.tree.map(lambda leaf: leaf, tx), copy.deepcopy(tx), tx._replace()):
        params, _ = jaxscale.apply_gradients(same, jnp.ones(2), same.init(jnp.ones(2)), jnp.ones(2))
        assert params.tolist() == [0.5, 0.5]
        assert type(same) is optax.GradientTransformationExtraArgs


def test_weakly_typed_parameters_are_stepped_and_kept():
    tx = jaxscale.loss_scaled(optax.sgd(0.5))
    params = jnp.asarray(1.0)
    for transform in (lambda f: f, jax.jit):
        apply = transform(lambda g, s, p: jaxscale.apply_gradients(tx, g, s, p))
        assert apply(jnp.asarray(1.0), tx.init(params), params)[0] == 0.5
        assert apply(jnp.asarray(jnp.nan), tx.init(params), params)[0] == 1


@inners
def test_the_form_for_accelerators_leaves_no_trace_either(inner, monkeypatch):
    # Compiled here for the CPU, which otherwise takes the other form.
    chosen = []

    def platform_dependent(*, cpu, default):
        del cpu
        chosen.append(default)
        return default()

    monkeypatch.setattr(jax.lax, "platform_dependent", platform_dependent)
    tx = jaxscale.loss_scaled(INNERS[inner], POLICIES["dynamic"])
    one_step = jax.jit(functools.partial(step, tx))
    outcomes = []
    for sequence in (MIXED, GOOD):
        params, state = PARAMS, tx.init(PARAMS)
        for grads in sequence:
            params, state = one_step(params, state, grads)
        outcomes.append((params, state.inner_state))
    assert_same_bits(*outcomes)
    assert avals(state) == avals(tx.init(PARAMS))
    assert len(chosen) == 1
