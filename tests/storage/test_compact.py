"""An optimizer's state in bfloat16: which arrays are compact, and what becomes of them."""

import functools
import warnings
from itertools import product
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tables import assert_same_bits, cases, each

import jaxscale

pytestmark = pytest.mark.standard_promotion


@pytest.mark.worlds
@cases("wrapper", [jaxscale.master_weights, jaxscale.stochastic_rounding])
def test_a_weight_and_its_state_take_the_bytes_that_are_promised(wrapper):
    params = {"w": jnp.ones((256, 256), jnp.bfloat16)}
    tx = wrapper(jaxscale.compact_state(optax.adamw(1e-3)))
    state = tx.init(params)
    state = jax.jit(tx.update)(params, state, params)[1]
    per_parameter = sum(x.nbytes for x in jax.tree.leaves((params, state))) / 256**2
    promised = 8 if wrapper is jaxscale.master_weights else 6
    assert promised <= per_parameter < promised + 0.01


PARAMS = {"w": jnp.ones((64, 64)), "b": jnp.ones(64)}
GRADS = jax.tree.map(lambda p: jnp.full(p.shape, 1e-3), PARAMS)


def dtypes(tree):
    return [str(leaf.dtype) for leaf in jax.tree.leaves(tree)]


# Moments, and what is not known to be one, in optimizers and in what may stand around them.
def shampoo():
    """An optimizer of a user: factors whose inverse roots are taken, and a moment of Optax."""
    adam = optax.adam(1e-3)

    def init(params):
        factors = {name: jnp.zeros((64, 64)) for name in ("left", "right")}
        return factors, adam.init(params)

    def update(grads, state, params=None):
        factors, adam_state = state
        updates, adam_state = adam.update(grads, adam_state, params)
        return updates, (factors, adam_state)

    return optax.GradientTransformation(init, update)


class ScaleByAdamState(NamedTuple):
    """A type of a user, which has the name of one of Optax."""

    mu: jax.Array


def look_alike():
    return optax.GradientTransformation(
        lambda params: ScaleByAdamState(jnp.zeros((64, 64))),
        lambda grads, state, params=None: (grads, state),
    )


ADAM = optax.adam(1e-3)
LABELS = {"w": "trained", "b": "frozen"}
# How many arrays are compact, and the first name in the warning of those that are not.
KINDS = {
    "adamw": (optax.adamw(1e-3), 2, None),
    "lion": (optax.lion(1e-3), 1, None),
    "momentum": (optax.sgd(1e-3, 0.9), 1, None),
    "muon": (optax.contrib.muon(1e-3), 1, None),
    "adafactor": (optax.adafactor(1e-3, momentum=0.9), 2, None),
    "sm3": (optax.sm3(1e-3), 1, None),
    "yogi": (optax.yogi(1e-3), 2, None),
    "amsgrad": (optax.amsgrad(1e-3), 3, None),
    "adadelta": (optax.adadelta(1e-3), 2, None),
    "adabelief": (optax.adabelief(1e-3), 2, None),
    "adan": (optax.adan(1e-3), 4, None),
    "rmsprop": (optax.rmsprop(1e-3), 1, None),
    "adagrad": (optax.adagrad(1e-3), 1, None),
    "ademamix": (optax.contrib.ademamix(1e-3), 3, None),
    "ema": (optax.ema(0.9), 1, None),
    "schedule_free": (optax.contrib.schedule_free_adamw(1e-3), 1, None),
    "dog": (optax.contrib.dog(1.0), 0, None),  # beside counters it holds weights
    "chain": (optax.chain(optax.clip(1.0), ADAM, optax.trace(0.9)), 3, None),
    "masked": (optax.masked(ADAM, {"w": True, "b": False}), 2, None),
    "partition": (
        optax.partition({"trained": ADAM, "frozen": optax.set_to_zero()}, LABELS),
        2,
        None,
    ),
    "inject_hyperparams": (
        optax.inject_hyperparams(optax.adam)(learning_rate=1e-3),
        2,
        None,
    ),
    "MultiSteps": (optax.MultiSteps(ADAM, 4), 3, None),
    "rmsprop, centered": (optax.rmsprop(1e-3, centered=True), 0, "0/mu/w, 0/nu/w"),
    "rmsprop, centered and corrected": (
        optax.rmsprop(1e-3, centered=True, bias_correction=True),
        0,
        "0/mu/w, 0/nu/w",
    ),
    "prodigy": (optax.contrib.prodigy(), 0, "exp_avg/w, exp_avg_sq/w, grad_sum/w."),
    "dadapt_adamw": (optax.contrib.dadapt_adamw(), 0, "exp_avg/w"),
    "momo": (optax.contrib.momo(), 0, "exp_avg/w."),
    "momo_adam": (optax.contrib.momo_adam(), 0, "exp_avg/w, exp_avg_sq/w."),
    "lbfgs": (optax.lbfgs(), 0, "0/params/w, 0/updates/w, 0/diff_params_memory/w and"),
    "beside known ones": (optax.chain(optax.trace(0.9), optax.rprop(1e-3)), 1, "1/"),
    "of a user": (shampoo(), 2, "0/left, 0/right."),
    "of the same name": (look_alike(), 0, "mu."),
}


@cases(
    "name, wrap",
    product(KINDS, WRAPS := [None, jaxscale.loss_scaled, jaxscale.master_weights]),
    fast=[*product(["adamw", "prodigy", "of a user"], WRAPS), ("MultiSteps", None)],
)
def test_moments_alone_are_compact_and_one_warning_names_the_rest(name, wrap):
    inner, number, named = KINDS[name]
    tx = jaxscale.compact_state(inner)
    if wrap is not None:
        tx = wrap(tx)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for init in (tx.init, jax.jit(tx.init)):
            state = init(PARAMS)
    assert dtypes(state).count("bfloat16") == number
    messages = [str(warning.message) for warning in caught]
    if named is None:
        assert messages == []
        return
    (message,) = messages
    assert f"not known to bear rounding: {named}" in message
    assert caught[0].filename == __file__
    everything = jaxscale.compact_state(inner, mask=True).init(PARAMS)
    assert dtypes(everything).count("bfloat16") > number


MOMENTS = {
    "adam": (
        optax.adam(1e-3),
        ["int32", *["float32", "bfloat16"] * 2],
    ),
    "moments of its own": (
        optax.adam(1e-3, mu_dtype=jnp.bfloat16),
        ["int32", "bfloat16", "bfloat16", "float32", "bfloat16"],
    ),
    "none": (optax.sgd(1e-3), []),
}


@pytest.mark.worlds
@cases(
    "name, compiled", product(MOMENTS, [False, True]), fast=each(MOMENTS, [False, True])
)
def test_large_float32_arrays_are_kept_in_bfloat16(name, compiled):
    inner, expected = MOMENTS[name]
    tx = jaxscale.compact_state(inner)
    state = tx.init(PARAMS)
    update = jax.jit(tx.update) if compiled else tx.update
    for _ in range(3):
        assert dtypes(state.inner_state) == expected
        updates, state = update(GRADS, state, PARAMS)
    assert dtypes(updates) == ["float32", "float32"]


def test_moments_that_an_optimizer_rounds_itself_are_left_to_it():
    inner = optax.adam(1e-3, mu_dtype=jnp.bfloat16)
    tx = jaxscale.compact_state(inner)
    state, own_state = tx.init(PARAMS), inner.init(PARAMS)
    for _ in range(3):
        _, state = tx.update(GRADS, state, PARAMS)
        _, own_state = inner.update(GRADS, own_state, PARAMS)
    assert_same_bits(state.inner_state[0].mu, own_state[0].mu)


def test_a_mask_goes_over_the_state():
    def only_squares(state):
        return jax.tree_util.tree_map_with_path(
            lambda path, _: ".nu" in jax.tree_util.keystr(path), state
        )

    tx = jaxscale.compact_state(optax.adam(1e-3), mask=only_squares)
    state = jax.jit(tx.update)(GRADS, tx.init(PARAMS), PARAMS)[1]
    assert dtypes(state.inner_state[0].mu) == ["float32", "float32"]
    assert dtypes(state.inner_state[0].nu) == ["float32", "bfloat16"]


@pytest.mark.worlds
@pytest.mark.device
def test_a_skipped_step_keeps_the_state_and_its_key():
    tx = jaxscale.loss_scaled(jaxscale.compact_state(optax.adam(1e-3)))
    step = jax.jit(functools.partial(jaxscale.apply_gradients, tx))
    params, state = step(GRADS, tx.init(PARAMS), PARAMS)
    bad = GRADS | {"b": jnp.full(64, jnp.nan)}
    _, after = step(bad, state, params)
    assert not after.step_applied
    assert_same_bits(after.inner_state, state.inner_state)


def test_a_float32_state_is_read_into_a_compact_one_and_back():
    inner = optax.adamw(1e-3)
    state = inner.init(PARAMS)
    grads = jax.tree.map(lambda p: jnp.linspace(0, 1, p.size).reshape(p.shape), PARAMS)
    _, state = inner.update(grads, state, PARAMS)
    for wrap in (optax.with_extra_args_support, jaxscale.loss_scaled):
        plain, tx = wrap(inner), wrap(jaxscale.compact_state(inner))
        saved = state
        if wrap is jaxscale.loss_scaled:
            saved = plain.init(PARAMS)._replace(inner_state=state)
        target = tx.init(PARAMS)
        compact = jaxscale.from_state_dict(target, jaxscale.to_state_dict(saved))
        assert jax.tree.structure(compact) == jax.tree.structure(target)
        nearest = state[0].nu["w"].astype(jnp.bfloat16)
        assert_same_bits(optax.tree.get(compact, "nu")["w"], nearest)
        assert_same_bits(optax.tree.get(compact, "nu")["b"], state[0].nu["b"])
        back = jaxscale.from_state_dict(
            plain.init(PARAMS), jaxscale.to_state_dict(compact)
        )
        wide = nearest.astype(jnp.float32)
        assert_same_bits(optax.tree.get(back, "nu")["w"], wide)


@pytest.mark.worlds
@cases("is_given", [True, False])
def test_gradients_of_a_half_precision_copy_have_a_mean_of_squares_that_moves(is_given):
    """Of weights in float32, which a loop casts by hand; adam needs no parameters."""
    given = PARAMS if is_given else None
    tx = jaxscale.compact_state(optax.adam(1e-3))
    grads = jax.tree.map(lambda p: jnp.ones(p.shape, jnp.bfloat16), PARAMS)
    state = tx.init(PARAMS)
    step = jax.jit(tx.update)
    for _ in range(1500):
        _, state = step(grads, state, given)
    nu = np.asarray(optax.tree.get(state, "nu")["w"], np.float64)
    expected = 1 - 0.999**1500
    assert abs(nu.mean() - expected) < 4 * nu.std() / 64


def first_weights(learning_rate):
    """An optimizer of a user, which pulls parameters back to the first ones."""

    def init(params):
        moments = jax.jit(lambda tree: jax.tree.map(jnp.zeros_like, tree))(params)
        return {"first": jax.tree.map(lambda p: p * 1, params), "moments": moments}

    def update(grads, state, params):
        pull = jax.tree.map(
            lambda f, p: learning_rate * (f - p), state["first"], params
        )
        moments = jax.tree.map(lambda m, g: (m + g) / 2, state["moments"], grads)
        steps = jax.tree.map(lambda p, m: p - learning_rate * m, pull, moments)
        return steps, state | {"moments": moments}

    return optax.GradientTransformation(init, update)


# Optimizers whose state holds weights, at a learning rate, and how many arrays of moments it has
# for each parameter. The parameters are made for the row: zeros would tell weights and moments
# apart by their values alone.
HOLD_WEIGHTS = {
    "sam": (lambda rate: optax.contrib.sam(optax.adam(rate), optax.sgd(rate)), 2),
    "cocob": (optax.contrib.cocob, 4),
    "schedule_free": (optax.contrib.schedule_free_adamw, 1),
    "of a user": (first_weights, 1),
}
if hasattr(optax.contrib, "madgrad"):  # not in the oldest Optax
    HOLD_WEIGHTS["madgrad"] = (optax.contrib.madgrad, 2)


@pytest.mark.worlds
@cases("name, compiled", product(HOLD_WEIGHTS, [False, True]), fast=[("sam", True)])
def test_a_state_that_holds_weights_moves_no_parameter_by_rounding_them(name, compiled):
    """Without a learning rate each ends where its float32 state ends.

    Not bit for bit, as madgrad adds 1e-6 to its learning rate. A weight that is rounded moves by up
    to 2**-8 of itself.
    """
    make, moments = HOLD_WEIGHTS[name]
    inner = make(0.0)
    random = np.random.default_rng(0)
    first = {
        "w": jnp.asarray(random.standard_normal((64, 64)), jnp.float32),
        "zeros": jnp.zeros((64, 64)),
    }
    wrap = jax.jit if compiled else (lambda fun: fun)
    ends = []
    asked = jaxscale.compact_state(inner, mask=True)
    for tx in (asked, optax.with_extra_args_support(inner)):
        params = first
        state = wrap(tx.init)(params)
        for seed in range(4):
            pulls = np.random.default_rng(seed).standard_normal((64, 64))
            grads = {key: jnp.asarray(pulls, jnp.float32) for key in params}
            updates, state = wrap(tx.update)(grads, state, params)
            params = optax.apply_updates(params, updates)
        ends.append(params)
    for name in first:
        np.testing.assert_allclose(ends[0][name], ends[1][name], rtol=0, atol=2e-6)
    compact = asked.init(first)
    assert dtypes(compact).count("bfloat16") == 2 * moments
