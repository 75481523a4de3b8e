"""Laws of the optax wrapper: over policies, inner optimizers, dtypes and ways to run."""

import contextlib
import copy
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tables import (
    BAD,
    INNERS,
    PARAMS,
    POLICIES,
    assert_close,
    assert_same_bits,
    avals,
    cases,
    counters,
    fused_step,
    gradients,
    spoiled,
    step,
    wide,
)
from training import FACTORS, MLP, X, mlp_loss, trainer, x64

import jaxscale

pytestmark = pytest.mark.standard_promotion

GOOD = gradients(0, 5)
BADS = [spoiled(g, bad) for g, bad in zip(gradients(1, 3), BAD.values(), strict=True)]
MIXED = [GOOD[0], BADS[0], GOOD[1], GOOD[2], BADS[1], BADS[2], GOOD[3], GOOD[4]]

DYNAMIC = POLICIES["dynamic"]
OPTIONS = {"max_norm": 1e9, "track_leaves": True, "check_updates": True}
# The policy, and further arguments of `loss_scaled`.
WRAPPERS = {name: (policy, {}) for name, policy in POLICIES.items()}
WRAPPERS |= {name: (DYNAMIC, {name: value}) for name, value in OPTIONS.items()}
WRAPPERS["everything"] = POLICIES["adaptive"], OPTIONS
WAYS = ["update", "apply", "eager", "accelerator"]
ROWS = [
    row
    for row in itertools.product(WRAPPERS, INNERS, WAYS)
    if sum(a != b for a, b in zip(row, ("dynamic", "adam", "update"), strict=True)) < 3
]


@cases(
    "wrapper, inner, way",
    ROWS,
    fast=[
        ("dynamic", "adam", "eager"),
        ("dynamic", "noisy", "accelerator"),
        ("everything", "adam", "apply"),
    ],
)
def test_bad_steps_leave_no_trace(wrapper, inner, way, monkeypatch):
    """A run ends with the bits of one on its good steps, but for the scale and the counters."""
    (policy, options), inner = WRAPPERS[wrapper], INNERS[inner]
    tx = jaxscale.loss_scaled(inner, policy, **options)
    chosen, traces = [], []

    def platform_dependent(*, cpu, default):
        del cpu
        chosen.append(default)
        return default()

    if way == "accelerator":  # compiled here for the CPU, which otherwise takes the other form
        monkeypatch.setattr(jax.lax, "platform_dependent", platform_dependent)

    def one_step(params, state, grads):
        traces.append(None)
        return (fused_step if way == "apply" else step)(tx, params, state, grads)

    if way != "eager":
        one_step = jax.jit(one_step, donate_argnums=(0, 1))
    adjust = jax.jit(policy.adjust)
    outcomes = []
    for sequence in (MIXED, GOOD):
        params, state = PARAMS, tx.init(PARAMS)
        for i, grads in enumerate(sequence):
            new, new_state = one_step(*jax.tree.map(jnp.copy, (params, state)), grads)
            assert avals((new, new_state)) == avals((params, state))
            if any(grads is bad for bad in BADS):  # it changes the scale and counters alone
                scaling = adjust(state.scaling, jnp.array(False))
                assert_same_bits((new, new_state.inner_state), (params, state.inner_state))
                assert_same_bits(new_state.scaling, scaling)
                before, after = counters(state), counters(new_state)
                assert not after["step_applied"]
                assert after["notfinite_count"] == before["notfinite_count"] + 1
                assert after["total_notfinite"] == before["total_notfinite"] + 1
                assert "max_norm" not in options or after["grad_norm"] == jnp.inf
            params, state = new, new_state
            assert (state.total_steps, state.total_notfinite_loss) == (i + 1, 0)
            if i == 0:
                first = params, state.inner_state
        outcomes.append((params, state.inner_state))
    assert_same_bits(*outcomes)
    assert way == "eager" or len(traces) == 1
    assert len(chosen) == (way == "accelerator")

    # The inner optimizer is shown float32. In another program products and sums may be contracted
    # differently, so that is to rounding; by hand it is bit for bit.
    updates, expected = inner.update(wide(GOOD[0]), inner.init(wide(PARAMS)), wide(PARAMS))
    expected = optax.apply_updates(PARAMS, updates), expected
    same = assert_same_bits if way == "eager" else assert_close
    same(jax.tree.leaves(first), jax.tree.leaves(expected))


def test_the_inner_optimizer_sees_float32_and_extra_arguments_untouched():
    seen = []

    def update(updates, state, params=None, **extra_args):
        seen.append((updates, params, extra_args))
        return updates, state

    def refuses(updates, state, params=None, *, value_fn=None, other=None):
        return updates, state

    extra = {"value": jnp.array(3.0), "value_fn": jnp.sum, "other": {"a": "text"}}
    for takes in (update, refuses):
        tx = jaxscale.loss_scaled(optax.GradientTransformationExtraArgs(lambda _: (), takes))
        tx.update(PARAMS, tx.init(PARAMS), params=PARAMS, **extra)  # by keyword, as MultiSteps does
    ((updates, params, received),) = seen
    assert avals(updates) == avals(wide(PARAMS))
    assert_same_bits(params, wide(PARAMS))
    assert received.keys() == extra.keys()
    assert all(received[name] is extra[name] for name in extra)
    # One that takes no extra arguments.
    tx = jaxscale.loss_scaled(optax.identity())
    tx.update(PARAMS, tx.init(PARAMS), PARAMS, value=jnp.array(1.0))
    tx.update(PARAMS, tx.init(PARAMS))


def test_one_program_serves_all_platforms_and_a_cpu_alone_branches(monkeypatch):
    # Traced once; of branch and selection, which one it is are constants when it is lowered.
    inner, traces = INNERS["adam"], []

    def counted(updates, state, params=None):
        traces.append(None)
        return inner.update(updates, state, params)

    tx = jaxscale.loss_scaled(optax.GradientTransformation(inner.init, counted), DYNAMIC)
    traced = jax.jit(tx.update).trace(GOOD[0], tx.init(PARAMS), PARAMS)
    cpu, *others = (
        traced.lower(lowering_platforms=(platform,)).as_text().splitlines()
        for platform in ("cpu", "cuda", "tpu")
    )
    for other in others:
        differing = [pair for pair in zip(cpu, other, strict=True) if pair[0] != pair[1]]
        assert 0 < len(differing) <= 2
        for line in (line for pair in differing for line in pair):
            assert "stablehlo.constant" in line
    assert traced.lower().compile().as_text().count(" conditional(") == 1
    assert len(traces) == 1
    # As for accelerators, but compiled here: XLA takes the branch out, as it is a constant's.
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *, cpu, default: default())
    selecting = jax.jit(lambda *args: tx.update(*args)).lower(GOOD[0], tx.init(PARAMS), PARAMS)
    assert " conditional(" not in selecting.compile().as_text()


def test_weakly_typed_states_and_parameters_do_not_compile_twice():
    # As `optax.contrib.reduce_on_plateau` once had it: Python numbers in the first state.
    inner = optax.GradientTransformation(
        lambda _: (0, 1.0, jnp.asarray(1.0)),
        lambda u, s, p=None: (jax.tree.map(lambda leaf: -0.5 * leaf, u), s),
    )
    tx = jaxscale.loss_scaled(inner)
    params = jnp.asarray(1.0)
    apply = jax.jit(lambda g, s, p: jaxscale.apply_gradients(tx, g, s, p))
    moved, state = apply(jnp.asarray(1.0), tx.init(params), params)
    assert moved == 0.5
    assert avals(state) == avals(tx.init(params))
    kept, state = apply(jnp.asarray(jnp.nan), state, params)
    assert kept == 1
    assert apply._cache_size() == 1


def test_the_optimizer_is_an_ordinary_value():
    # A GradientTransformation is a NamedTuple, so a tree: Flax NNX takes it apart, too.
    tx = jaxscale.loss_scaled(optax.sgd(0.5))
    for same in (jax.tree.map(lambda leaf: leaf, tx), copy.deepcopy(tx), tx._replace()):
        params, _ = jaxscale.apply_gradients(same, jnp.ones(2), same.init(jnp.ones(2)), jnp.ones(2))
        assert params.tolist() == [0.5, 0.5]
        assert type(same) is optax.GradientTransformationExtraArgs


# Optimizers with more arguments or other types, and parameters of every dtype.

HALVES = ["bfloat16", "float16"]

OTHERS = {
    "adamw": optax.adamw(1e-2),
    "half_moments": optax.adam(1e-2, mu_dtype=jnp.bfloat16),
    "lbfgs": optax.lbfgs(),
    "schedule_free": optax.contrib.schedule_free_adamw(1e-2),
    "reduce_on_plateau": optax.chain(
        optax.adam(1e-2), optax.contrib.reduce_on_plateau(factor=0.5, patience=1, cooldown=1)
    ),
}


@cases(
    "inner, dtype",
    [(inner, "bfloat16") for inner in OTHERS]
    + [(inner, "float16") for inner in ("half_moments", "lbfgs", "schedule_free")]
    + [("adamw", "complex64"), ("adamw", "float64"), ("lbfgs", "float64")]
    # On accelerators both sides of the selection are computed: a line search runs on a bad step.
    + [(inner, "selected") for inner in ("lbfgs", "schedule_free", "reduce_on_plateau")],
    fast=[("adamw", "complex64")],
)
def test_bad_steps_leave_no_trace_in_any_dtype_or_optimizer(inner, dtype, monkeypatch):
    if dtype == "selected":
        dtype = "float32"
        monkeypatch.setattr(jax.lax, "platform_dependent", lambda *, cpu, default: default())

    def extra(batch, grads):
        return {"grad": grads, "value_fn": lambda params: mlp_loss(params, batch)}

    with x64() if dtype == "float64" else contextlib.nullcontext():
        # What float16 rounds to 0, or to few bits, depends on the scale; nothing else does.
        tx = jaxscale.loss_scaled(OTHERS[inner], 2.0**8 if dtype == "float16" else DYNAMIC)
        imaginary = 0.5j if dtype == "complex64" else 0
        first = jax.tree.map(lambda leaf: (leaf * (1 + imaginary)).astype(dtype), MLP)
        fused = inner in list(OTHERS)[::2]
        train_step = trainer(tx, mlp_loss, fused, extra=extra if inner == "lbfgs" else None)
        one_step, start, good = jax.jit(train_step), (first, tx.init(first)), np.isfinite(FACTORS)
        outcomes = []
        for chosen, bad in ((good, 0), (np.ones_like(good), 3)):
            params, state = start
            for batch in zip(X[chosen], FACTORS[chosen], strict=True):
                params, state = one_step((params, state), batch)
                assert avals((params, state)) == avals(start)
            outcomes.append((params, state.inner_state))
            assert state.total_notfinite == bad
        assert_same_bits(*outcomes)
        assert one_step._cache_size() == 1
        assert jaxscale.all_finite(outcomes)
        assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(dtype)}
        assert not any(jnp.array_equal(params[name], first[name]) for name in ("w", "v"))
        if inner != "half_moments":  # narrow at the user's own wish
            for leaf in jax.tree.leaves(state.inner_state):
                floating = jnp.issubdtype(leaf.dtype, jnp.inexact)
                assert not floating or jnp.finfo(leaf.dtype).bits >= max(32, jnp.finfo(dtype).bits)


@cases("dtype, way", itertools.product(HALVES, [step, fused_step]), fast=[("float16", fused_step)])
def test_the_sum_of_parameter_and_update_is_rounded_once(dtype, way):
    rng = np.random.default_rng(0)
    params = jnp.asarray(rng.standard_normal(4096).astype(dtype))
    grads = jnp.asarray((rng.standard_normal(4096) * 2.0**-9).astype(np.float32))
    tx = jaxscale.loss_scaled(optax.scale(-1.0))
    moved, _ = way(tx, params, tx.init(params), grads)
    # NumPy's, in float32, of which no product is taken.
    p, u = np.asarray(params), -np.asarray(grads)
    once = (p.astype(np.float32) + u).astype(p.dtype)
    twice = (p.astype(np.float32) + u.astype(p.dtype).astype(np.float32)).astype(p.dtype)
    assert np.any(once != twice)
    assert_same_bits(moved, once)


@cases("dtype", [*HALVES, "float32", "complex64"], fast=["complex64"])
def test_a_skipped_step_keeps_the_signs_of_zeros(dtype):
    # Of both parts of a complex number.
    signs = np.array([complex(a, b) for a in (0.0, -0.0, 1.0) for b in (0.0, -0.0, 1.0)])
    params = jnp.asarray(signs if "complex" in dtype else signs.real, dtype)
    tx = jaxscale.loss_scaled(optax.sgd(1.0))
    for transform in (lambda f: f, jax.jit):
        grads = jnp.full_like(params, jnp.inf)
        updates, _ = transform(tx.update)(grads, tx.init(params), params)
        assert_same_bits(optax.apply_updates(params, updates), params)
