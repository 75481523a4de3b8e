"""What a wrapper is asked for beside the verdict: laws of each such option."""

import itertools
from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jaxprs import equations, numbers_reduced
from tables import assert_same_bits, avals, cases, fused_step, step

import jaxscale

pytestmark = pytest.mark.standard_promotion

PARAMS = {
    "dense": {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3, jnp.bfloat16)},
    "phase": jnp.ones(2, jnp.complex64),
    "none": None,
    "_overwrite_with_gradient": {"amax": jnp.array(1.0)},
}
INNER = optax.sgd(0.1)
RULE = jaxscale.SpikeRule(window=8)
OPTIONS = {
    # name: the option, the field of the state that it fills, and what is in the metrics
    "max_norm": ({"max_norm": 1.0}, "grad_norm", "grad_norm"),
    "track_leaves": ({"track_leaves": True}, "nonfinite_leaves", "nonfinite_leaves/phase"),
    "spikes": ({"spikes": RULE}, "spikes", "total_spikes"),
}
BOTH = jaxscale.loss_scaled, jaxscale.skip_nonfinite
NESTINGS = {
    **{wrap.__name__: partial(wrap, INNER) for wrap in BOTH},
    "given inside": lambda **how: jaxscale.loss_scaled(jaxscale.skip_nonfinite(INNER, **how)),
    "window inside": lambda **how: jaxscale.loss_scaled(jaxscale.multi_steps(INNER, 2), **how),
    "window outside": lambda **how: jaxscale.multi_steps(jaxscale.loss_scaled(INNER, **how), 2),
}


@cases("option", OPTIONS)
def test_every_nesting_keeps_it_and_a_state_its_structure_under_an_optimizer_without_it(option):
    options, field, metric = OPTIONS[option]
    for nest in NESTINGS.values():
        state, plain = (nest(**each).init(PARAMS) for each in (options, {}))
        assert jax.tree.leaves(getattr(state, field))
        assert metric in jaxscale.metrics(state)
        assert getattr(plain, field) is None
        assert metric not in jaxscale.metrics(plain)
    plain, asked = jaxscale.loss_scaled(INNER), jaxscale.loss_scaled(INNER, **options)
    fresh = asked.init(PARAMS)
    _, state = asked.update(jax.tree.map(lambda p: p * jnp.inf, PARAMS), fresh, PARAMS)
    for tx, given in ((asked, plain.init(PARAMS)), (plain, state)):
        assert avals(tx.update(PARAMS, given, PARAMS)[1]) == avals(given)
    saved = jaxscale.to_state_dict(state)
    assert_same_bits(jaxscale.from_state_dict(fresh, saved), state)
    assert getattr(jaxscale.from_state_dict(plain.init(PARAMS), saved), field) is None
    without = jaxscale.to_state_dict(plain.init(PARAMS))
    assert_same_bits(jaxscale.from_state_dict(fresh, without), fresh)


def test_gradients_are_read_no_more_often():
    def reduced(tx):
        return numbers_reduced(jax.make_jaxpr(tx.update)(PARAMS, tx.init(PARAMS), PARAMS))

    judged = jax.make_jaxpr(lambda *args: RULE.judge(RULE.init(), None, *args))(1.0, True)
    for number in range(4):
        for names in itertools.combinations(OPTIONS, number):
            options = {key: value for name in names for key, value in OPTIONS[name][0].items()}
            of_the_rule = numbers_reduced(judged) * ("spikes" in names)
            assert reduced(jaxscale.loss_scaled(INNER, **options)) - of_the_rule == 11, names
    chained = optax.chain(optax.clip_by_global_norm(1.0), INNER)
    assert reduced(jaxscale.loss_scaled(chained)) == 2 * 11  # the count counts


OFF = partial(jaxscale.loss_scaled, skip_nonfinite=False)
WINDOW = jaxscale.multi_steps(INNER, 2)
REFUSED = {  # by what it says: calls with values that are wrong, or that need a verdict
    "max_norm=.*above 0, got 0": [partial(wrap, INNER, max_norm=0) for wrap in BOTH],
    "max_norm=.*finite number, got nan": [
        partial(wrap, INNER, max_norm=float("nan")) for wrap in BOTH
    ],
    "max_norm=.*finite number, got True": [partial(wrap, INNER, max_norm=True) for wrap in BOTH],
    "track_leaves=.*one of False, True, got 1": [
        partial(wrap, INNER, track_leaves=1) for wrap in BOTH
    ],
    r"\(spikes=\.\.\.\)` must be a `SpikeRule` or None": [
        partial(wrap, INNER, spikes=128) for wrap in BOTH
    ],
    "skip_nonfinite=.*got 0": [partial(jaxscale.loss_scaled, INNER, skip_nonfinite=0)],
    "a DynamicLossScale": [partial(OFF, INNER)],
    "track_leaves=True": [partial(OFF, INNER, 8, track_leaves=True)],
    "with a `SpikeRule`": [partial(OFF, INNER, None, spikes=RULE)],
    "a window of `multi_steps`": [partial(OFF, WINDOW, None)],
    "`multi_steps.*=False": [partial(jaxscale.multi_steps, OFF(INNER, None), 2)],
}


@cases("message", REFUSED)
def test_wrong_values_are_refused(message):
    for call in REFUSED[message]:
        with pytest.raises(TypeError if "or None" in message else ValueError, match=message):
            call()


# With everything switched off, what is left is the program of the bare optimizer, and the state.

NET, X = {"w": jnp.linspace(-1.0, 1.0, 12).reshape(3, 4), "b": jnp.zeros(4)}, jnp.ones((2, 3))
ADAMW = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
SILENT, LOUD = OFF(ADAMW, None), jaxscale.loss_scaled(ADAMW, None)


def loss_fn(params, x):
    return jnp.mean(jnp.tanh(x @ params["w"] + params["b"]) ** 2)


@cases("way", [step, fused_step])
def test_the_program_is_that_of_the_bare_optimizer(way):
    def one_step(tx, params, state, x):
        if tx is ADAMW:
            loss, grads = jax.value_and_grad(loss_fn)(params, x)
            return *step(tx, params, state, grads), loss
        loss, grads = jaxscale.value_and_grad(loss_fn, state)(params, x)
        return *way(tx, params, state, grads, value=loss), loss

    # The operations of each step, with the types of what they take and give.
    bare, silent, loud = (
        [
            (eqn.primitive.name, [str(var.aval) for var in [*eqn.invars, *eqn.outvars]])
            for eqn in equations(jax.make_jaxpr(partial(one_step, tx))(NET, tx.init(NET), X))
        ]
        for tx in (ADAMW, SILENT, LOUD)
    )
    assert len(bare) > 40
    assert silent == bare != loud  # what is compared does tell programs apart


def test_a_scale_of_none_has_one_state_on_and_off_and_others_the_same_fields():
    off, loud, on = (tx.init(NET) for tx in (SILENT, LOUD, jaxscale.loss_scaled(ADAMW)))
    assert jax.tree.structure(loud) == jax.tree.structure(off) != jax.tree.structure(on)
    assert avals(off) == avals(loud)
    assert avals(off._replace(scaling=on.scaling)) == avals(on)
    # A dictionary of one is read into the other.
    moved = on._replace(total_steps=jnp.int32(7))
    there = jaxscale.from_state_dict(off, jaxscale.to_state_dict(moved))
    assert_same_bits(there, moved._replace(scaling=off.scaling))
    bad = jax.tree.map(lambda p: jnp.full_like(p, jnp.nan), NET)
    updates, after = SILENT.update(bad, off, NET, value=jnp.float32(jnp.inf))
    assert jnp.isnan(updates["w"]).all()  # off is off
    assert_same_bits(after._replace(inner_state=None), off._replace(inner_state=None))
    jaxscale.check(after)


def test_a_scale_that_never_moves_still_scales():
    tx, w = OFF(optax.sgd(1.0), 2.0**20), jnp.ones((), jnp.float16)
    state = tx.init(w)
    grads = jaxscale.grad(lambda w: (w * 2.0**-15).astype(jnp.float32) ** 2, state)(w)
    assert_same_bits(tx.update(grads, state, w), (jnp.float32(-(2.0**-29)), state))


# Which leaves the last overflow was in: from the pass of the verdict.

NAMES = ["dense/bias", "dense/kernel", "phase"]
TRACKING = jaxscale.loss_scaled(INNER, track_leaves=True)
PLAIN = jaxscale.loss_scaled(INNER)


def flagged(state):
    """The names of the leaves that the last overflow was in."""
    found, prefix = jaxscale.metrics(state), "nonfinite_leaves/"
    return sorted(name.removeprefix(prefix) for name in found if prefix in name and found[name])


def gradients(kernel=1.0, bias=1.0, phase=1.0):
    """Gradients of PARAMS with one element of each leaf that is given."""
    dense = {"kernel": jnp.ones((2, 3)).at[1, 1].set(kernel), "bias": jnp.ones(3).at[0].set(bias)}
    grads = {"dense": dense, "phase": jnp.ones(2, jnp.complex64).at[1].set(phase), "none": None}
    return grads | {"_overwrite_with_gradient": {"amax": jnp.array(jnp.nan)}}  # no overflow


# Gradients and loss of some steps, and the leaves that the last overflow was in after each.
STEPS = [
    ({}, 1.0, []),
    ({"kernel": jnp.nan}, 1.0, ["dense/kernel"]),
    ({}, 1.0, ["dense/kernel"]),
    ({"bias": -jnp.inf, "phase": complex(0, jnp.inf)}, 1.0, ["dense/bias", "phase"]),
    ({}, jnp.nan, ["dense/bias", "phase"]),  # a bad loss is no overflow
    ({"kernel": 3e38, "bias": -3e38}, 1.0, ["dense/bias", "phase"]),  # large, and finite
    ({"kernel": jnp.inf, "bias": jnp.nan, "phase": jnp.nan}, 1.0, NAMES),
]


@cases("way", ["eager", "apply_gradients", "multi_steps"], fast=["apply_gradients"])
def test_the_last_overflow_is_kept_and_nothing_else_is_different(way):
    wrap = partial(jaxscale.multi_steps, every_k_schedule=2) if "multi" in way else lambda tx: tx
    tracking, plain = wrap(TRACKING), wrap(PLAIN)
    one_step = fused_step if "apply" in way else step
    one_step = one_step if way == "eager" else jax.jit(one_step, static_argnums=0)
    run, of_plain = (PARAMS, tracking.init(PARAMS)), (PARAMS, plain.init(PARAMS))
    types = avals(run[1])
    for bad, loss, names in STEPS:
        grads, value = gradients(**bad), jnp.float32(loss)
        run = params, state = one_step(tracking, *run, grads, value=value)
        of_plain = one_step(plain, *of_plain, grads, value=value)
        assert flagged(state) == names
        assert_same_bits((params, state._replace(nonfinite_leaves=None)), of_plain)
        assert avals(state) == types


def test_check_names_them():
    def stuck(bad, steps=3, params=PARAMS):
        state = TRACKING.init(params)
        for _ in range(steps):
            _, state = jax.jit(TRACKING.update)(bad, state, params)
        return state

    # Of a population, the leaves of its worst member.
    states = [stuck(gradients(kernel=jnp.nan), 1), stuck(gradients(bias=jnp.nan), 4)]
    many = {f"w{i}": jnp.full(1, jnp.inf) for i in range(9)}
    for state, message in (
        (states[1], r"not finite: dense/bias \(1 of 3 leaves\)\. `jaxscale doctor`"),
        (stuck(many, params=many), r"w0, w1, w2, w3, w4 and 4 more \(9 of"),
        (jax.tree.map(lambda *leaves: jnp.stack(leaves), *states), r"dense/bias \(1 of 3"),
        (states[1]._replace(nonfinite_leaves=None), "^((?!leaves).)*$"),
    ):
        with pytest.raises(jaxscale.LossScaleStuckError, match=message):
            jaxscale.check(state, max_consecutive=2)


TREES = [
    # PyTorch raises "No inf checks were recorded for this optimizer".
    *((tree, tree, []) for tree in ({}, None, [], {"w": None})),
    ({"n": jnp.arange(3)}, {"n": np.zeros(3, jax.dtypes.float0)}, []),
    (jnp.ones(2), jnp.array([1.0, jnp.inf]), ["the root"]),
    (dict.fromkeys("ab", jnp.ones(1)), {"a": jnp.array([jnp.nan]), "b": None}, ["a"]),
]


@pytest.mark.parametrize(("params", "grads", "names"), TREES)
def test_trees_of_all_kinds(params, grads, names):
    has_state = optax.inject_hyperparams(optax.sgd)(0.5, momentum=0.9)
    for wrap, inner in product(
        BOTH, [optax.identity()] + [has_state] * (not jax.tree.leaves(params))
    ):
        tx = wrap(inner, track_leaves=True)
        state = tx.init(params)
        updates, new = tx.update(grads, state, params)
        assert jax.tree.structure(updates) == jax.tree.structure(grads)
        assert (new.step_applied, new.total_steps) == (not names, 1)
        assert flagged(new) == names
        assert avals(new) == avals(state)


# Clipping by the global norm: optax's rule, from the pass that gives the verdict.

NORMED = {
    "w": jnp.linspace(-1.0, 1.0, 12).reshape(3, 4),
    "half": jnp.ones(5, jnp.bfloat16),
    "phase": jnp.ones(2, jnp.complex64),
    "none": None,
}
ONE = optax.sgd(1.0)
MAX_NORM = 0.5


def norm_of(tree):
    return np.sqrt(sum(np.sum(np.abs(np.complex128(leaf)) ** 2) for leaf in jax.tree.leaves(tree)))


def of_norm(seed, norm):
    """Gradients of a norm, with the shapes of NORMED, in float32."""
    rng = np.random.default_rng(seed)
    grads = jax.tree.map(lambda p: np.asarray(rng.standard_normal(p.shape), np.float32), NORMED)
    grads["phase"] = grads["phase"] * np.complex64(1 + 0.5j)
    return jax.tree.map(lambda g: jnp.asarray(g * np.float32(norm / norm_of(grads))), grads)


# Two roundings more or less: one product by max_norm / norm here, there two operations.
assert_near = partial(jax.tree.map, partial(np.testing.assert_allclose, rtol=3e-7))
CLIPPED = {
    "dynamic": jaxscale.loss_scaled(ONE, max_norm=MAX_NORM),
    "adaptive": jaxscale.loss_scaled(ONE, "adaptive", max_norm=MAX_NORM),  # needs the largest, too
    "safe": jaxscale.skip_nonfinite(ONE, max_norm=MAX_NORM),
    "over": jaxscale.loss_scaled(jaxscale.skip_nonfinite(ONE, max_norm=7.0), max_norm=MAX_NORM),
    "off": OFF(ONE, None, max_norm=MAX_NORM),
}


@cases(
    "norm, debug_nans, way, name",
    product([0.0, 0.1, 3.0, 1e10], [False, True], ["eager", "jit", "accelerator"], CLIPPED),
    fast=[(3.0, False, "jit" if name != "dynamic" else "accelerator", name) for name in CLIPPED],
)
def test_it_is_what_optax_does(norm, debug_nans, way, name, monkeypatch):
    if way == "accelerator":
        monkeypatch.setattr(jax.lax, "platform_dependent", lambda *, cpu, default: default())
    if name == "adaptive":  # on one device nothing is squared that was not asked for
        monkeypatch.setattr(jax, "device_count", lambda: 1)
    grads, tx = of_norm(0, norm), CLIPPED[name]
    update = tx.update if way == "eager" else jax.jit(tx.update)
    with jax.debug_nans(debug_nans):
        updates, state = update(grads, tx.init(NORMED), NORMED)
    bare = optax.chain(optax.clip_by_global_norm(MAX_NORM), ONE)
    expected, _ = bare.update(grads, bare.init(NORMED), NORMED)
    assert_near(updates, expected)
    assert state.step_applied
    np.testing.assert_allclose(jaxscale.metrics(state)["grad_norm"], norm, rtol=1e-6)
    assert avals(state) == avals(tx.init(NORMED))
    if norm < MAX_NORM:  # by a factor that is 1
        assert_same_bits(updates, ONE.update(grads, ONE.init(NORMED), NORMED)[0])


def test_an_infinite_gradient_makes_no_nan():
    tx, good = CLIPPED["safe"], of_norm(1, 2.0)
    state = tx.init(NORMED)
    for name in ("w", "half", "phase"):
        spoiled = good | {name: good[name].at[-1].set(jnp.inf)}
        with jax.debug_nans(True):  # which looks into each operation
            params, state = jaxscale.apply_gradients(tx, spoiled, state, NORMED)
        assert_same_bits(params, NORMED)
        assert jaxscale.metrics(state)["grad_norm"] == jnp.inf


def test_the_norm_is_that_of_a_window():
    # Two micro-batches that cancel but for a part: what is clipped is their mean.
    first, second, clipped = of_norm(2, 40.0), of_norm(3, 30.0), CLIPPED["dynamic"]
    mean = jax.tree.map(lambda a, b: (a + b) / 2, first, second)
    inside = jaxscale.loss_scaled(jaxscale.multi_steps(ONE, 2), max_norm=MAX_NORM)
    for tx in (jaxscale.multi_steps(clipped, 2), inside):
        state, update = tx.init(NORMED), jax.jit(tx.update)
        _, state = update(first, state, NORMED)
        assert state.grad_norm == 0  # no step yet
        updates, state = update(second, state, NORMED)
        np.testing.assert_allclose(state.grad_norm, norm_of(mean), rtol=1e-6)
        assert update(first, state, NORMED)[1].grad_norm == state.grad_norm
        expected, _ = jax.jit(clipped.update)(mean, clipped.init(NORMED), NORMED)
        assert_near(updates, expected)


def test_it_is_that_of_what_a_hook_made_and_of_a_loss_that_is_bad():
    tx, grads = CLIPPED["dynamic"], of_norm(6, 2.0)
    params = NORMED | {"half": NORMED["half"].astype(jnp.float32)}

    def loss_fn(params, extra):
        parts = jax.tree.map(lambda g, p: jnp.sum(jnp.real(jnp.conj(g) * p)), grads, params)
        return sum(jax.tree.leaves(parts)) + extra

    step = jaxscale.train_step(loss_fn, tx, on_grads=lambda g: jax.tree.map(lambda x: 3 * x, g))
    for extra in (0.0, jnp.inf):
        state = jax.jit(step)(params, tx.init(params), extra)[1]
        np.testing.assert_allclose(state.grad_norm, 6.0, rtol=1e-6)
        assert state.step_applied == (extra == 0)
