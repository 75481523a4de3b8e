"""Laws of the optax wrapper: over policies, inner optimizers, dtypes and ways to run."""

import contextlib
import copy
import functools
import logging
import math
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tables
from references import trajectory
from tables import INNERS, PARAMS, assert_same_bits, avals, cases, fused_step, step, wide
from training import amplified, x64

import jaxscale
from jaxscale import presets

pytestmark = pytest.mark.standard_promotion

GOOD = tables.gradients(0, 5)
BADS = [
    tables.spoiled(g, bad)
    for g, bad in zip(tables.gradients(1, 3), tables.BAD.values(), strict=True)
]
MIXED = [GOOD[0], BADS[0], GOOD[1], GOOD[2], BADS[1], BADS[2], GOOD[3], GOOD[4]]

DYNAMIC = tables.POLICIES["dynamic"]
OPTIONS = {"max_norm": 1e9, "track_leaves": True, "check_updates": True}
# The policy, and further arguments of `loss_scaled`.
WRAPPERS = {name: (policy, {}) for name, policy in tables.POLICIES.items()}
WRAPPERS |= {name: (DYNAMIC, {name: value}) for name, value in OPTIONS.items()}
WRAPPERS["everything"] = tables.POLICIES["adaptive"], OPTIONS
OTHERS = {  # with more arguments, or other types
    "adamw": optax.adamw(1e-2),
    "half_moments": optax.adam(1e-2, mu_dtype=jnp.bfloat16),
    "lbfgs": optax.lbfgs(),
    "schedule_free": optax.contrib.schedule_free_adamw(1e-2),
    "reduce_on_plateau": optax.chain(
        optax.adam(1e-2), optax.contrib.reduce_on_plateau(factor=0.5, patience=1, cooldown=1)
    ),
}
WAYS = ["update", "apply", "eager", "accelerator"]
USUAL = ("dynamic", "adam", "update")
ROWS = [
    (*row, None)
    for row in product(WRAPPERS, INNERS, WAYS)
    if sum(a != b for a, b in zip(row, USUAL, strict=True)) < 3
]
ROWS += [("dynamic", inner, "apply", "bfloat16") for inner in OTHERS]
ROWS += [("dynamic", inner, "update", "float16") for inner in list(OTHERS)[1:4]]
# On accelerators both sides of the selection are computed: a line search runs on a bad step.
ROWS += [("dynamic", inner, "accelerator", "float32") for inner in list(OTHERS)[2:]]
ROWS += [("dynamic", "adamw", way, dtype) for way in WAYS[:2] for dtype in ("complex64", "float64")]
ROWS += [("dynamic", "lbfgs", "update", "float64")]


def value_fn(params):
    squares = (jnp.sum(jnp.abs(leaf) ** 2) for leaf in jax.tree.leaves(params))
    return sum(leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32)) for leaf in squares)


@cases(
    "wrapper, inner, way, dtype",
    ROWS,
    fast=[
        ("dynamic", "adam", "eager", None),
        ("dynamic", "noisy", "accelerator", None),
        ("everything", "adam", "apply", None),
        ("dynamic", "adamw", "update", "complex64"),
    ],
)
def test_bad_steps_leave_no_trace(wrapper, inner, way, dtype, monkeypatch):
    """A run ends with the bits of one on its good steps, but for the scale and the counters."""
    (policy, options), name, inner = WRAPPERS[wrapper], inner, (INNERS | OTHERS)[inner]
    tx = jaxscale.loss_scaled(inner, policy, **options)
    chosen, traces = [], []

    if way == "accelerator":  # compiled here for the CPU, which otherwise takes the other form
        monkeypatch.setattr(
            jax.lax, "platform_dependent", lambda *, cpu, default: chosen.append(0) or default()
        )

    def one_step(params, state, grads):
        traces.append(None)
        extra = {} if dtype is None else {"value": value_fn(params)}
        extra |= {"grad": grads, "value_fn": value_fn} if name == "lbfgs" else {}
        return (fused_step if way == "apply" else step)(tx, params, state, grads, **extra)

    def in_dtype(tree, dtype):
        factor = 1 + 0.5j if dtype == "complex64" else 1
        return jax.tree.map(lambda leaf: (leaf * factor).astype(dtype), tree)

    if way != "eager":
        one_step = jax.jit(one_step, donate_argnums=(0, 1))
    with x64() if dtype == "float64" else contextlib.nullcontext():
        adjust, outcomes = jax.jit(policy.adjust), []
        start = PARAMS if dtype is None else in_dtype(PARAMS, dtype)
        start = start, tx.init(start)
        for sequence in (MIXED, GOOD):
            params, state = start
            bad = 0
            for i, grads in enumerate(sequence):
                is_bad = not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))
                bad += is_bad
                if dtype is not None:
                    grads = in_dtype(grads, jnp.promote_types(dtype, jnp.float32))
                new, new_state = one_step(*jax.tree.map(jnp.copy, (params, state)), grads)
                assert avals((new, new_state)) == avals((params, state))
                if is_bad:  # it changes the scale and counters alone
                    scaling = adjust(state.scaling, jnp.array(False))
                    assert_same_bits((new, new_state.inner_state), (params, state.inner_state))
                    assert_same_bits(new_state.scaling, scaling)
                    before, after = tables.counters(state), tables.counters(new_state)
                    assert not after["step_applied"]
                    for counter in ("notfinite_count", "total_notfinite"):
                        assert after[counter] == before[counter] + 1
                    assert "max_norm" not in options or after["grad_norm"] == jnp.inf
                params, state = new, new_state
                assert (state.total_steps, state.total_notfinite_loss) == (i + 1, 0)
                assert state.total_notfinite == bad
                if i == 0:
                    first = params, state.inner_state
            outcomes.append((params, state.inner_state))
        assert_same_bits(*outcomes)
        assert jaxscale.all_finite(outcomes)
        assert way == "eager" or len(traces) == 1
        assert len(chosen) == (way == "accelerator")
        if dtype is not None:
            assert not any(jnp.array_equal(params[key], start[0][key]) for key in PARAMS)
            for leaf in jax.tree.leaves(state.inner_state if name != "half_moments" else ()):
                floating = jnp.issubdtype(leaf.dtype, jnp.inexact)
                assert not floating or jnp.finfo(leaf.dtype).bits >= max(32, jnp.finfo(dtype).bits)
            return

    # The inner optimizer is shown float32. In another program products and sums may be contracted
    # differently, so that is to rounding; by hand it is bit for bit.
    updates, expected = inner.update(wide(GOOD[0]), inner.init(wide(PARAMS)), wide(PARAMS))
    expected = optax.apply_updates(PARAMS, updates), expected
    same = assert_same_bits if way == "eager" else tables.assert_close
    same(jax.tree.leaves(first), jax.tree.leaves(expected))


def test_the_inner_optimizer_sees_float32_and_extra_arguments_untouched():
    seen = []

    def update(updates, state, params=None, **extra_args):
        seen.append((updates, params, extra_args))
        return updates, state

    def takes_loss(updates, state, params=None, *, loss=None, **extra_args):
        return update(updates, state, params, loss=loss, **extra_args)

    def refuses(updates, state, params=None, *, value_fn=None, other=None):
        return updates, state

    extra = {"value": jnp.array(3.0), "value_fn": jnp.sum, "other": {"a": "text"}}
    for takes in (takes_loss, refuses, update):
        tx = jaxscale.loss_scaled(optax.GradientTransformationExtraArgs(lambda _: (), takes))
        for name in ("value", "loss") if takes is takes_loss else ():
            _, state = tx.update(PARAMS, tx.init(PARAMS), PARAMS, **{name: jnp.array(jnp.nan)})
            assert (state.total_notfinite_loss, state.scaling.loss_scale) == (1, 2.0**15)
            tx.update(PARAMS, state, PARAMS, **{name: jnp.array(3.0)}, other=1)
            assert seen[-1][2] == {"loss": 3.0, "value": 3.0, "other": 1}
        tx.update(PARAMS, tx.init(PARAMS), params=PARAMS, **extra)  # by keyword, as MultiSteps does
    updates, params, received = seen[-1]
    assert avals(updates) == avals(wide(PARAMS))
    assert_same_bits(params, wide(PARAMS))
    assert received.keys() == extra.keys()
    assert all(received[name] is extra[name] for name in extra)
    tx = jaxscale.loss_scaled(optax.identity())  # which takes none
    tx.update(PARAMS, tx.init(PARAMS), PARAMS, value=jnp.array(1.0))
    tx.update(PARAMS, tx.init(PARAMS))


def test_one_program_serves_all_platforms_and_a_cpu_alone_branches(monkeypatch):
    # Traced once; of branch and selection, which one it is are constants when it is lowered.
    inner, traces = INNERS["adam"], []
    counted = optax.GradientTransformation(
        inner.init, lambda *args: (traces.append(None), inner.update(*args))[1]
    )
    tx = jaxscale.loss_scaled(counted, DYNAMIC)
    traced = jax.jit(tx.update).trace(GOOD[0], tx.init(PARAMS), PARAMS)
    cpu, *others = (
        traced.lower(lowering_platforms=(platform,)).as_text().splitlines()
        for platform in ("cpu", "cuda", "tpu")
    )
    for other in others:
        differing = [pair for pair in zip(cpu, other, strict=True) if pair[0] != pair[1]]
        assert 0 < len(differing) <= 2
        assert all("stablehlo.constant" in line for pair in differing for line in pair)
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


HALVES = ["bfloat16", "float16"]


@cases("dtype, way", product(HALVES, [step, fused_step]), fast=[("float16", fused_step)])
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


NARROW = ["float8_e4m3fn", "float4_e2m1fn"]


@cases("dtype", [*HALVES, "float32", "complex64", *NARROW], fast=["complex64", NARROW[0]])
def test_a_skipped_step_keeps_every_bit(dtype):
    if not hasattr(jnp, dtype):
        pytest.skip(f"this JAX has no {dtype}")
    # Signs of zeros, of both parts of a complex number.
    signs = np.array([complex(a, b) for a in (0.0, -0.0, 1.0) for b in (0.0, -0.0, 1.0)])
    signs = signs if "complex" in dtype else signs.real
    tx = jaxscale.loss_scaled(optax.sgd(1.0))
    params = {"w": jnp.asarray(signs, dtype), "b": jnp.array(0.5)}
    ones = jax.tree.map(jnp.ones_like, params)
    bad = ones | ({"b": jnp.array(jnp.inf)} if dtype in NARROW else {"w": ones["w"] * jnp.inf})
    for one_step in (step, jax.jit(step, static_argnums=0))[dtype in NARROW :]:
        assert_same_bits(one_step(tx, params, tx.init(params), bad)[0], params)
        moved, _ = one_step(tx, params, tx.init(params), ones)
        assert moved["w"].dtype == params["w"].dtype
        assert np.array_equal(np.asarray(moved["w"]).astype(signs.dtype), signs - 1)


# What the wrapped transformation may be: it returns what it likes, and knows what it knows.

TWO = {"w": jnp.array([1.0, -2.0, 0.5]), "b": jnp.array(0.5)}
GRADS = {"w": jnp.array([0.3, -0.1, 0.2]), "b": jnp.array(1.0)}


SLOW_AND_FAST = optax.LookaheadParams(TWO, jax.tree.map(jnp.ones_like, TWO))
BY_EXAMPLE = jax.tree.map(lambda g: jnp.stack([g, 2 * g]), GRADS)
PRIVATE = optax.contrib.differentially_private_aggregate(1.0, 0.1, 0)
# An optimizer, its parameters and its gradients, unlike which its updates are.
OTHER_UPDATES = {
    "lookahead": (optax.lookahead(optax.sgd(0.1), 2, 0.5), SLOW_AND_FAST, GRADS),
    "a gradient per example": (PRIVATE, TWO, BY_EXAMPLE),
    "no update for a leaf": (optax.stateless(lambda g, _: g | {"b": None}), TWO, GRADS),
    "another structure": (optax.stateless(lambda g, _: (g["w"], {"2": g["b"][None]})), TWO, GRADS),
}


@cases(
    "name, mode",
    product(OTHER_UPDATES, ["eager", "jit", "accelerator", "shard_map"]),
    fast=[("another structure", "jit"), ("no update for a leaf", "accelerator")],
)
def test_a_skipped_step_is_no_update_of_what_the_inner_returns(name, mode, monkeypatch):
    inner, params, grads = OTHER_UPDATES[name]
    tx = jaxscale.loss_scaled(inner)
    if mode == "accelerator":
        monkeypatch.setattr(jax.lax, "platform_dependent", lambda *, cpu, default: default())
    update = tx.update
    if mode == "shard_map":
        mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
        specs = dict.fromkeys(("in_specs", "out_specs"), jax.sharding.PartitionSpec())
        update = jax.shard_map(lambda g, s, p: tx.update(g, s, p), mesh=mesh, **specs)
    if mode != "eager":
        update = jax.jit(update)
    state = tx.init(params)
    expected, _ = inner.update(grads, inner.init(params), params)
    updates, new = update(grads, state, params)
    assert jax.tree.structure(updates) == jax.tree.structure(expected)
    tables.assert_close(updates, expected)
    assert new.step_applied
    if name == "no update for a leaf":
        moved, _ = jaxscale.apply_gradients(tx, grads, state, params)
        assert_same_bits(moved["b"], params["b"])
    none, after = update(grads | {"w": grads["w"] * jnp.nan}, new, params)
    minus_zeros = jax.tree.map(lambda u: jnp.full_like(u, -0.0), expected)
    assert_same_bits((none, after.inner_state), (minus_zeros, new.inner_state))
    assert not after.step_applied


@cases("mode", ["eager", "jit", "accelerator"], fast=["jit"])
def test_a_gradient_that_the_inner_takes_itself_is_checked_where_asked_for(mode, monkeypatch):
    if mode == "accelerator":
        monkeypatch.setattr(jax.lax, "platform_dependent", lambda *, cpu, default: default())

    def gradient(params, _):
        return jax.tree.map(lambda g: jnp.where(params["w"][0] > 1.001, jnp.nan, g), GRADS)

    def run(grads, **options):
        sam = optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.05), opaque_mode=True)
        tx = jaxscale.loss_scaled(sam, **options)
        step = functools.partial(fused_step, tx, value=jnp.float32(1), grad_fn=gradient)
        return (step if mode == "eager" else jax.jit(step))(TWO, tx.init(TWO), grads)

    params, state = run(GRADS)
    assert state.step_applied  # the verdict cannot see it
    assert jnp.isnan(params["b"])
    params, state = run(GRADS, check_updates=True)
    assert_same_bits(params, TWO)
    assert jaxscale.all_finite(state.inner_state)
    assert (state.step_applied, state.total_notfinite, state.total_notfinite_loss) == (False, 1, 0)
    assert state.scaling.loss_scale == 2.0**14  # as by any overflow that the loss is not part of
    # Uphill is the other way.
    params, state = run(jax.tree.map(jnp.negative, GRADS), check_updates=True)
    assert state.step_applied
    assert not jnp.array_equal(params["w"], TWO["w"])


def test_no_loss_in_is_no_loss_out():
    """What `multi_steps` must not make up: with a loss of 0 the optimizer stands still."""
    inner = optax.polyak_sgd()
    for wrap in (jaxscale.loss_scaled, lambda tx: jaxscale.multi_steps(tx, 1)):
        tx = wrap(inner)
        with pytest.raises((TypeError, ValueError), match="value"):  # optax has both
            tx.update(GRADS, tx.init(TWO), TWO)
        updates, _ = tx.update(GRADS, tx.init(TWO), TWO, value=jnp.float32(2))
        expected, _ = inner.update(GRADS, inner.init(TWO), TWO, value=jnp.float32(2))
        tables.assert_close(updates, expected)
    transparent = optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.1))  # whose update takes none
    tx = jaxscale.multi_steps(transparent, 1)
    _, state = tx.update(GRADS, tx.init(TWO), TWO, value=jnp.float32(2))
    assert state.step_applied


@cases(
    "max_norm, window, size",
    product([1e39, math.inf, 3.4e38, 1e-300], [False, True], [1.0, 1e30, 0.0]),
    fast=[(math.inf, False, 1e30), (1e-300, False, 1.0)],
)
def test_any_largest_norm_is_a_number_to_clip_to(max_norm, window, size):
    tx = jaxscale.loss_scaled(optax.sgd(1.0), max_norm=max_norm)
    tx = jaxscale.multi_steps(tx, 1) if window else tx
    grads = jax.tree.map(lambda g: g * size, GRADS)
    updates, state = jax.jit(tx.update)(grads, tx.init(TWO), TWO)
    assert state.step_applied
    assert jaxscale.all_finite(updates)
    if max_norm > 3.5e38:
        assert jax.tree.all(jax.tree.map(lambda u, g: jnp.array_equal(u, -g), updates, grads))
    norm = np.sqrt(sum(np.sum(np.float64(u) ** 2) for u in jax.tree.leaves(updates)))
    assert norm <= max(max_norm * (1 + 1e-6), 2e-38)  # float32's smallest normal number at least


@cases(
    "length, dtype", product([10, 22], ["float32", "bfloat16", "complex64"]), fast=[(10, "float32")]
)
def test_a_mean_of_the_largest_numbers_is_finite(dtype, length):
    largest = float(jnp.finfo(dtype).max)
    number = complex(largest, -largest) if dtype == "complex64" else -largest
    for bad in (0, 1):  # of the window so many do not count
        tx, params = jaxscale.multi_steps(optax.identity(), length), jnp.zeros(2, dtype)
        state, update = tx.init(params), jax.jit(tx.update)
        for i in range(length):
            grads = jnp.full(2, jnp.nan if i < bad else number, dtype)
            updates, state = update(grads, state, params, value=jnp.float32(3e38))
        assert state.inner_state.gradient_step == 1
        wide = np.asarray(updates, np.complex128)  # XLA cannot divide by so large a number
        np.testing.assert_allclose(wide / largest, np.full(2, number) / largest, rtol=1e-5)


@pytest.mark.slow
def test_a_step_that_is_not_compiled_compiles_nothing_under_vmap(caplog):
    tx = jaxscale.loss_scaled(optax.adam(0.1), track_leaves=True, max_norm=1.0)
    params, grads = (jax.tree.map(lambda x: jnp.stack([x] * 3), tree) for tree in (TWO, GRADS))
    grads["w"] = grads["w"].at[1, 1].set(jnp.inf)
    inputs = params, jax.vmap(tx.init)(params), grads

    def both(params, state, grads):
        return step(tx, *fused_step(tx, params, state, grads), grads)

    eager = jax.vmap(both)(*inputs)
    with jax.log_compiles(True), caplog.at_level(logging.WARNING):
        jax.vmap(both)(*inputs)
    assert not [record for record in caplog.records if "Compiling" in record.message]
    assert eager[1].total_notfinite.tolist() == [0, 2, 0]
    assert_same_bits(eager[0]["w"][1], params["w"][1])
    tables.assert_close(eager, jax.jit(jax.vmap(both))(*inputs))


def test_optax_can_tell_parameters_from_flags_and_what_fills_its_state_later_is_told_where_to_go():
    later = optax.GradientTransformation(lambda _: None, lambda updates, *_: (updates, updates))
    later = jaxscale.loss_scaled(later)
    with pytest.raises(ValueError, match=r"optax.chain\(loss_scaled\(...\), optax.monitor"):
        later.update(GRADS, later.init(TWO), TWO)
    tx = jaxscale.loss_scaled(optax.adam(0.1), track_leaves=True)
    state = tx.init(TWO)
    mapped = optax.tree_map_params(tx, lambda leaf: "a parameter", state)
    assert mapped.inner_state[0].mu == {"w": "a parameter", "b": "a parameter"}
    assert_same_bits(mapped.nonfinite_leaves, state.nonfinite_leaves)
    assert_same_bits(mapped.scaling, state.scaling)


def test_subnormal_parameters_are_kept_by_apply_gradients_alone():
    # The sum that `optax.apply_updates` takes is outside of any skip, and XLA on a CPU flushes
    # what is below the normal numbers as it adds, even -0.0.
    params = {"w": jnp.array([1e-40, -1e-45, 1.0], jnp.float32)}
    tx, bad = jaxscale.loss_scaled(optax.sgd(0.1)), {"w": jnp.array([jnp.nan, 1.0, 1.0])}
    kept, _ = jax.jit(fused_step, static_argnums=0)(tx, params, tx.init(params), bad)
    assert_same_bits(kept, params)
    flushed, _ = step(tx, params, tx.init(params), bad)
    assert np.all(np.abs(np.asarray(flushed["w"] - kept["w"])) <= 1e-40)


# Faults at random: after each batch a run has the bits of one on its good batches alone.

STEPS = 500
# Where a fault is born. The first two make the loss itself non-finite.
PLACES = ["input", "loss", "cotangent", "gradient"]
VALUES = np.float32([np.inf, -np.inf, np.nan])
# Policies with bounds within which float32 gradients neither overflow nor underflow.
APEX = presets.apex(scale_window=50, min_loss_scale=2.0**-10)
COLOSSAL = presets.colossalai(growth_interval=20, min_scale=1.0, max_scale=2.0**20)
TOLERANT = presets.ToleranceLossScale(growth_interval=5, tolerance=0.25, max_scale=2.0**20)
RUNS = {
    "no scale, masked": (tables.POLICIES["noop"], INNERS["masked"]),
    "fixed, momentum": (tables.POLICIES["fixed"], INNERS["momentum"]),
    "dynamic, clipped adamw": (tables.POLICIES["dynamic"], INNERS["adamw_clipped"]),
    "dynamic, MultiSteps": (tables.POLICIES["dynamic"], INNERS["multi_steps"]),
    "hysteresis, inject_hyperparams": (tables.POLICIES["hysteresis"], INNERS["inject_hyperparams"]),
    "apex, adam with a schedule": (APEX, optax.adam(optax.cosine_decay_schedule(0.1, 10**6))),
    "colossalai, noise": (COLOSSAL, INNERS["noisy"]),
    "tolerance, clipped lion": (TOLERANT, INNERS["lion_clipped"]),
}


def drawn(rng, rate):
    """The place of each step's fault, "" for none; by place what is added to each leaf there."""
    added = {
        place: {name: np.zeros((STEPS, *leaf.shape), np.float32) for name, leaf in PARAMS.items()}
        for place in PLACES
    }
    places = np.where(rng.random(STEPS) < rate, rng.choice(PLACES, STEPS), "")
    for i in np.flatnonzero(places):
        leaf = added[places[i]][rng.choice(list(PARAMS))].reshape(STEPS, -1)
        leaf[i, rng.integers(leaf.shape[1])] = rng.choice(VALUES)
    return places, added


def spoiled(tree, added):
    return jax.tree.map(lambda x, bad: (x + bad).astype(x.dtype), tree, added)


def total(tree):
    return sum(map(jnp.sum, jax.tree.leaves(tree)))


@functools.cache
def run(name):
    """What a run holds before each step, and what the metrics say after it."""
    policy, inner = RUNS[name]
    tx = jaxscale.loss_scaled(inner, policy)

    def distance(params, target, factor):
        squares = jax.tree.map(lambda p, t: jnp.mean((jnp.float32(p) - t) ** 2), params, target)
        return amplified(total(squares), factor)

    def advance(carry, batch):
        target, added = batch
        target, factor = spoiled(target, added["input"]), 1 + total(added["cotangent"])
        loss, grads = jaxscale.value_and_grad(distance, carry[1])(carry[0], target, factor)
        grads, loss = spoiled(grads, added["gradient"]), loss + total(added["loss"])
        after = step(tx, *carry, grads, value=loss)
        return after, ((carry[0], carry[1].inner_state), jaxscale.metrics(after[1]))

    start = PARAMS, tx.init(PARAMS)
    return jax.jit(lambda batches: jax.lax.scan(advance, start, batches)[1])


@cases("name", RUNS, fast=["dynamic, clipped adamw"])
def test_faults_leave_no_trace(name):
    policy, _ = RUNS[name]
    rng = np.random.default_rng(0)
    for rate in (0.02, 0.1, 0.5):
        places, added = drawn(rng, rate)
        assert set(places) == {"", *PLACES}
        bad, bad_loss = places != "", np.isin(places, PLACES[:2])
        targets = {
            key: np.float32(rng.normal(size=bad.shape + p.shape)) for key, p in PARAMS.items()
        }
        # The good batches, then some of them again: as many steps, so one program for both.
        chosen, number = np.resize(np.flatnonzero(~bad), STEPS), np.cumsum(~bad)
        kept, seen = run(name)((targets, added))
        alone, _ = run(name)(jax.tree.map(lambda x, chosen=chosen: x[chosen], (targets, added)))
        assert_same_bits(
            jax.tree.map(lambda x: x[1:], kept),
            jax.tree.map(lambda x, number=number: x[number[:-1]], alone),
        )
        assert jaxscale.all_finite(alone)

        steps, start = np.arange(1, STEPS + 1), policy.init()
        # If the loss is to blame, the scale is not.
        verdicts = np.where(bad_loss, None, ~bad)
        states = trajectory(policy, tuple(leaf.item() for leaf in start), verdicts)
        expected = {
            "step_applied": ~bad,
            "notfinite_count": steps - np.maximum.accumulate(np.where(bad, 0, steps)),
            "total_notfinite": np.cumsum(bad),
            "total_notfinite_loss": np.cumsum(bad_loss),
            "total_steps": steps,
            **dict(zip(start._fields, np.array(states).T, strict=True)),
        }
        for key, wanted in expected.items():
            np.testing.assert_array_equal(seen[key], wanted, key)
