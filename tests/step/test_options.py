"""What a wrapper is asked for beside the verdict: laws of each such option."""

import functools
import itertools

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
NESTINGS = {
    "scaled": functools.partial(jaxscale.loss_scaled, INNER),
    "safe": functools.partial(jaxscale.skip_nonfinite, INNER),
    "given inside": lambda **how: jaxscale.loss_scaled(jaxscale.skip_nonfinite(INNER, **how)),
    "window inside": lambda **how: jaxscale.loss_scaled(jaxscale.multi_steps(INNER, 2), **how),
    "window outside": lambda **how: jaxscale.multi_steps(jaxscale.loss_scaled(INNER, **how), 2),
}


@cases("option, nesting", itertools.product(OPTIONS, NESTINGS))
def test_every_nesting_keeps_it(option, nesting):
    options, field, metric = OPTIONS[option]
    state, plain = (NESTINGS[nesting](**each).init(PARAMS) for each in (options, {}))
    assert jax.tree.leaves(getattr(state, field))
    assert metric in jaxscale.metrics(state)
    assert getattr(plain, field) is None
    assert metric not in jaxscale.metrics(plain)


@cases("option", OPTIONS)
def test_a_state_keeps_its_structure_under_an_optimizer_without_it(option):
    options, field, _ = OPTIONS[option]
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


WRONG = [
    ({"max_norm": 0}, "max_norm=.*above 0, got 0"),
    ({"max_norm": float("nan")}, "max_norm=.*finite number, got nan"),
    ({"max_norm": True}, "max_norm=.*finite number, got True"),
    ({"track_leaves": 1}, "track_leaves=.*one of False, True, got 1"),
    ({"spikes": 128}, r"\(spikes=\.\.\.\)` must be a `SpikeRule` or None"),
]


@pytest.mark.parametrize(("options", "message"), WRONG)
def test_wrong_values_are_refused(options, message):
    for call in (jaxscale.loss_scaled, jaxscale.skip_nonfinite):
        with pytest.raises((TypeError, ValueError), match=message):
            call(INNER, **options)


OFF = functools.partial(jaxscale.loss_scaled, skip_nonfinite=False)
WINDOW = jaxscale.multi_steps(INNER, 2)
NEED_A_VERDICT = {  # what is not to be had without one: a call, and what it says
    "scale": (lambda: OFF(INNER), "a DynamicLossScale"),
    "leaves": (lambda: OFF(INNER, 8, track_leaves=True), "track_leaves=True"),
    "spikes": (lambda: OFF(INNER, None, spikes=RULE), "SpikeRule"),
    "window inside": (lambda: OFF(WINDOW, None), "a window of `multi_steps`"),
    "window outside": (lambda: jaxscale.multi_steps(OFF(INNER, None), 2), "`multi_steps.*=False"),
    "number": (lambda: jaxscale.loss_scaled(INNER, skip_nonfinite=0), "skip_nonfinite=.*got 0"),
}


@cases("name", NEED_A_VERDICT)
def test_what_needs_a_verdict_does_not_do_without(name):
    call, message = NEED_A_VERDICT[name]
    with pytest.raises(ValueError, match=message):
        call()


# With everything switched off, what is left is the program of the bare optimizer, and the state.

NET = {"w": jnp.linspace(-1.0, 1.0, 12).reshape(3, 4), "b": jnp.zeros(4)}
ADAMW = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
SILENT, LOUD = OFF(ADAMW, None), jaxscale.loss_scaled(ADAMW, None)


def loss_fn(params, x):
    return jnp.mean(jnp.tanh(x @ params["w"] + params["b"]) ** 2)


def operations(tx, way):
    """The operations of a step: each with the types of what it takes and gives."""

    def one_step(params, state, x):
        if tx is ADAMW:
            loss, grads = jax.value_and_grad(loss_fn)(params, x)
            return *step(tx, params, state, grads), loss
        loss, grads = jaxscale.value_and_grad(loss_fn, state)(params, x)
        return *way(tx, params, state, grads, value=loss), loss

    jaxpr = jax.make_jaxpr(one_step)(NET, tx.init(NET), jnp.ones((2, 3)))
    return [
        (eqn.primitive.name, [str(var.aval) for var in [*eqn.invars, *eqn.outvars]])
        for eqn in equations(jaxpr)
    ]


@cases("way", [step, fused_step])
def test_the_program_is_that_of_the_bare_optimizer(way):
    expected = operations(ADAMW, way)
    assert len(expected) > 40
    assert operations(SILENT, way) == expected
    assert operations(LOUD, way) != expected  # what is compared does tell programs apart


def test_a_scale_of_none_has_one_state_on_and_off():
    state = SILENT.init(NET)
    assert avals(state) == avals(LOUD.init(NET))
    assert jax.tree.structure(state) == jax.tree.structure(LOUD.init(NET))
    bad = jax.tree.map(lambda p: jnp.full_like(p, jnp.nan), NET)
    updates, after = SILENT.update(bad, state, NET, value=jnp.float32(jnp.inf))
    assert jnp.isnan(updates["w"]).all()  # off is off
    assert_same_bits(after._replace(inner_state=None), state._replace(inner_state=None))
    jaxscale.check(after)


def test_the_state_of_a_scale_has_the_same_fields_and_another_type():
    off, on = SILENT.init(NET), jaxscale.loss_scaled(ADAMW).init(NET)
    assert jax.tree.structure(off) != jax.tree.structure(on)
    assert avals(off._replace(scaling=on.scaling)) == avals(on)
    # A dictionary of one is read into the other.
    moved = on._replace(total_steps=jnp.int32(7))
    there = jaxscale.from_state_dict(off, jaxscale.to_state_dict(moved))
    assert_same_bits(there, moved._replace(scaling=off.scaling))


def test_a_scale_that_never_moves_still_scales():
    tx = jaxscale.loss_scaled(optax.sgd(1.0), 2.0**20, skip_nonfinite=False)
    w = jnp.ones((), jnp.float16)
    state = tx.init(w)
    grads = jaxscale.grad(lambda w: (w * 2.0**-15).astype(jnp.float32) ** 2, state)(w)
    updates, after = tx.update(grads, state, w)
    assert updates == -(2.0**-29)
    assert_same_bits(after, state)


# Which leaves the last overflow was in: from the pass of the verdict.

NAMES = ["dense/bias", "dense/kernel", "phase"]
TRACKING = jaxscale.loss_scaled(INNER, track_leaves=True)
PLAIN = jaxscale.loss_scaled(INNER)


def flagged(state):
    """The names of the leaves that the last overflow was in."""
    found = jaxscale.metrics(state)
    prefix = "nonfinite_leaves/"
    return sorted(name.removeprefix(prefix) for name in found if prefix in name and found[name])


def gradients(**bad):
    """Gradients of PARAMS with one bad element in each leaf that is named."""
    return {
        "dense": {
            "kernel": jnp.ones((2, 3)).at[1, 1].set(bad.get("kernel", 1.0)),
            "bias": jnp.ones(3).at[0].set(bad.get("bias", 1.0)),
        },
        "phase": jnp.ones(2, jnp.complex64).at[1].set(bad.get("phase", 1.0)),
        "none": None,
        "_overwrite_with_gradient": {"amax": jnp.array(jnp.nan)},  # no gradient, so no overflow
    }


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


# An optimizer that tracks and one that does not, and how a step is made.
WAYS = {
    "eager": (TRACKING, PLAIN, step),
    "apply_gradients": (TRACKING, PLAIN, jax.jit(fused_step, static_argnums=0)),
    "multi_steps": (
        *(jaxscale.multi_steps(tx, 2) for tx in (TRACKING, PLAIN)),
        jax.jit(step, static_argnums=0),
    ),
}


@cases("name", WAYS, fast=["apply_gradients"])
def test_the_last_overflow_is_kept_and_nothing_else_is_different(name):
    tracking, plain, one_step = WAYS[name]
    params, state = plain_params, plain_state = PARAMS, tracking.init(PARAMS)
    first, plain_state = avals(state), plain.init(PARAMS)
    for bad, loss, names in STEPS:
        grads, value = gradients(**bad), jnp.float32(loss)
        params, state = one_step(tracking, params, state, grads, value=value)
        plain_params, plain_state = one_step(plain, plain_params, plain_state, grads, value=value)
        assert flagged(state) == names
        assert_same_bits(state._replace(nonfinite_leaves=None), plain_state)
        assert_same_bits(params, plain_params)
        assert avals(state) == first


def test_check_names_them():
    def stuck(bad, steps=3, params=PARAMS):
        state, update = TRACKING.init(params), jax.jit(TRACKING.update)
        for _ in range(steps):
            _, state = update(bad, state, params)
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
    ({}, {}, []),
    ({"n": jnp.arange(3)}, {"n": np.zeros(3, jax.dtypes.float0)}, []),
    (jnp.ones(2), jnp.array([1.0, jnp.inf]), ["the root"]),
    (dict.fromkeys("ab", jnp.ones(1)), {"a": jnp.array([jnp.nan]), "b": None}, ["a"]),
]


@pytest.mark.parametrize(("params", "grads", "names"), TREES)
def test_trees_of_all_kinds(params, grads, names):
    tx = jaxscale.skip_nonfinite(optax.identity(), track_leaves=True)
    state = tx.init(params)
    _, new = tx.update(grads, state, params)
    assert flagged(new) == names
    assert avals(new) == avals(state)
