"""Half-precision parameters that learn: copies, remainders and rounding at random in a step."""

import functools
import warnings
from itertools import product

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tables import (
    assert_same_bits,
    avals,
    cases,
    each,
    fused_step,
    pairs,
    unchanged,
    wide,
)
from tables import step as plain_step

import jaxscale
from jaxscale._storage.rounding import nearest

pytestmark = pytest.mark.standard_promotion


def test_updates_below_half_a_unit_add_up():
    params = jnp.ones(4, jnp.bfloat16)
    tx = jaxscale.master_weights(optax.sgd(2.0**-12))
    state = tx.init(params)
    for _ in range(16):
        updates, state = tx.update(jnp.ones(4), state, params)
        params = optax.apply_updates(params, updates)
    np.testing.assert_array_equal(params.astype(jnp.float32), 1 - 2.0**-8)


OPTIMIZERS = {
    "adamw": optax.adamw(1e-3),
    "adafactor": optax.adafactor(1e-3),
    "adabelief": optax.adabelief(1e-3),
    "amsgrad": optax.amsgrad(1e-3),
    "lamb": optax.lamb(1e-3),
    "lion": optax.lion(1e-4),
    "momentum": optax.sgd(1e-2, momentum=0.9, nesterov=True),
    "muon": optax.contrib.muon(1e-3),
    "nadam": optax.nadam(1e-3),
    "schedule_free": optax.contrib.schedule_free_adamw(1e-3, warmup_steps=2),
    "sm3": optax.sm3(1e-2),
    "yogi": optax.yogi(1e-3),
    "noisy": optax.chain(optax.add_noise(0.1, 0.5, 0), optax.sgd(1e-3)),
}

rng = np.random.default_rng(0)
PARAMS = {
    "w": jnp.asarray(rng.standard_normal((8, 4)), jnp.bfloat16),
    "h": jnp.asarray(rng.standard_normal(4), jnp.float16),
    "f": jnp.asarray(rng.standard_normal(3), jnp.float32),
}
# as large as the parameters, and others in each step
PULLS = [
    {
        name: rng.standard_normal(leaf.shape).astype(np.float32)
        for name, leaf in PARAMS.items()
    }
    for _ in range(8)
]


def gradients(params, pull):
    """Gradients that depend on what the model reads, exactly computed."""
    return jax.tree.map(lambda p, x: p.astype(jnp.float32) * 2.0**-4 + x, params, pull)


def whole_step(tx, params, state, grads):
    """A `train_step` whose loss has these gradients."""

    def loss_fn(params):
        products = jax.tree.map(
            lambda p, g: jnp.sum(p.astype(jnp.float32) * g), params, grads
        )
        return sum(jax.tree.leaves(products))

    params, state, _ = jaxscale.train_step(loss_fn, tx)(params, state)
    return params, state


FORMS = [plain_step, fused_step, whole_step]


def rounded(masters):
    """float32 parameters as the model reads them."""

    def narrow(exact, like):
        return exact if like.dtype == jnp.float32 else nearest(exact, like.dtype)

    return jax.tree.map(narrow, masters, PARAMS)


def run(tx, form=fused_step, params=PARAMS, pulls=PULLS):
    state = tx.init(params)
    for pull in pulls:
        params, state = form(tx, params, state, gradients(params, pull))
    return params, state


@functools.cache
def reference(name):
    """float32 parameters, in a run whose gradients are those of the rounded ones."""
    tx = jaxscale.skip_nonfinite(OPTIMIZERS[name])
    masters = wide(PARAMS)
    state = tx.init(masters)
    for pull in PULLS:
        grads = gradients(rounded(masters), pull)
        masters, state = plain_step(tx, masters, state, grads)
    return masters, state


STORAGES = ["remainder", "float32"]
ROWS = pairs(OPTIMIZERS, STORAGES, [plain_step, fused_step])


FAST = [
    ("adamw", "remainder", plain_step),
    ("adamw", "float32", fused_step),
    ("muon", "remainder", fused_step),
]


@cases("name, storage, form", ROWS, fast=FAST)
def test_it_is_the_float32_run_bit_for_bit(name, storage, form):
    tx = jaxscale.master_weights(OPTIMIZERS[name], storage)
    params, state = run(tx, form)
    masters, expected = reference(name)
    assert_same_bits(jaxscale.master_params(state, params), masters)
    assert_same_bits(params, rounded(masters))
    assert_same_bits(state.inner_state, expected.inner_state)
    assert jax.tree.map(lambda p: p.dtype, params) == jax.tree.map(
        lambda p: p.dtype, PARAMS
    )


WRAPPERS = {
    "remainder": jaxscale.master_weights,
    "float32": functools.partial(jaxscale.master_weights, storage="float32"),
    "random": jaxscale.stochastic_rounding,
}


@pytest.mark.worlds
@cases(
    "wrapper, compiled",
    product(WRAPPERS, [jax.jit, unchanged]),
    fast=each(WRAPPERS, [jax.jit, unchanged]),
)
def test_all_three_forms_lead_to_the_same_parameters(wrapper, compiled):
    tx = WRAPPERS[wrapper](optax.lion(2.0**-9))
    outcomes = []
    for form in FORMS:
        step = compiled(functools.partial(form, tx))
        params, state = PARAMS, tx.init(PARAMS)
        for pull in PULLS:
            params, state = step(params, state, pull)
        outcomes.append((params, state.weights))
    for other in outcomes[1:]:
        assert_same_bits(other, outcomes[0])


ORDERS = {
    "inside": lambda tx, wrap: jaxscale.loss_scaled(wrap(tx)),
    "outside": lambda tx, wrap: wrap(jaxscale.loss_scaled(tx)),
    "inside of a window": lambda tx, wrap: jaxscale.multi_steps(
        jaxscale.loss_scaled(wrap(tx)), 1
    ),
    "around a window": lambda tx, wrap: wrap(
        jaxscale.multi_steps(jaxscale.loss_scaled(tx), 1)
    ),
}


@pytest.mark.worlds
@cases(
    "wrapper, order",
    product(WRAPPERS, ORDERS),
    fast=each(WRAPPERS, ORDERS),
)
def test_the_order_of_wrappers_does_not_matter(wrapper, order):
    expected = run(WRAPPERS[wrapper](OPTIMIZERS["adamw"]))
    tx = ORDERS[order](OPTIMIZERS["adamw"], WRAPPERS[wrapper])
    params, state = run(tx)
    assert_same_bits(params, expected[0])
    assert_same_bits(state.weights, expected[1].weights)


@pytest.mark.worlds
def test_a_pass_that_is_repeated_makes_one_step():
    def loss_fn(params):
        halves = jax.tree.map(lambda p: jnp.sum(p.astype(jnp.float16)), params)
        return sum(jax.tree.leaves(halves)).astype(jnp.float32)

    tx = jaxscale.master_weights(jaxscale.loss_scaled(optax.sgd(2.0**-12), 2.0**14))
    expected, _, _ = jaxscale.train_step(loss_fn, tx)(PARAMS, tx.init(PARAMS))
    policy = jaxscale.DynamicLossScale(init_scale=2.0**24)
    tx = jaxscale.master_weights(jaxscale.loss_scaled(optax.sgd(2.0**-12), policy))
    step = jax.jit(jaxscale.train_step(loss_fn, tx, retries=12))
    params, state, _ = step(PARAMS, tx.init(PARAMS))
    assert state.step_applied
    assert state.total_retries > 0
    assert_same_bits(params, expected)


# Weights that somebody changed.


@cases("storage, form", product(STORAGES, [plain_step, fused_step]))
def test_weights_that_were_replaced_are_not_set_back(storage, form):
    tx = jaxscale.master_weights(optax.sgd(2.0**-20), storage)
    params, state = run(tx)
    replaced = jax.tree.map(lambda p: (p * 1.5).astype(p.dtype), params)
    masters = jaxscale.master_params(state, replaced)
    new, _ = form(tx, replaced, state, PULLS[0])
    for name in PARAMS:
        given = wide(replaced)[name]
        half = np.abs(given) * (2.0**-8 if name == "w" else 2.0**-11)
        assert (np.abs(masters[name] - given) <= half).all()
        # the update itself is smaller than half a unit
        assert (np.abs(wide(new)[name] - given) <= 2 * half + 1e-5).all()


@pytest.mark.worlds
@pytest.mark.device
def test_bfloat16_alone_learns_nothing_where_these_learn():
    """One minus a thousand steps of 1e-4: what every one is for."""
    w = jnp.ones(256, jnp.bfloat16)
    grads = jnp.ones(256, jnp.float32)
    ends = {}
    for name, wrapper in {"plain": jaxscale.skip_nonfinite, **WRAPPERS}.items():
        tx = wrapper(optax.adam(1e-4))
        step = functools.partial(fused_step, tx)

        def body(carry, _, step=step):
            return step(*carry, grads), None

        (end, _), _ = jax.lax.scan(body, (w, tx.init(w)), length=1000)
        ends[name] = np.asarray(end, np.float64).mean()
    assert ends["plain"] == 1.0
    assert ends["remainder"] == ends["float32"]
    assert abs(ends["remainder"] - 0.9) < 2.0**-9
    # 0.015 for one weight
    assert abs(ends["random"] - 0.9) < 4 * 0.016 / 16


# Which leaves are meant.

TREE = {
    "frozen": jnp.ones(3, jnp.bfloat16),
    "trained": jnp.ones(3, jnp.bfloat16),
    "int": jnp.arange(3),
    "none": None,
    "masked": optax.MaskedNode(),
    "complex": jnp.ones(2, jnp.complex64),
    "narrow": jnp.ones(2, jnp.float8_e4m3fn),
}
MASKS = {
    "a tree": {"frozen": False, "trained": True, "int": True, "none": None}
    | {"masked": optax.MaskedNode(), "complex": True, "narrow": True},
    "a function": lambda params: jax.tree_util.tree_map_with_path(
        lambda path, _: "frozen" not in jax.tree_util.keystr(path), params
    ),
}


@pytest.mark.worlds
@cases("wrapper, mask", product(WRAPPERS, MASKS))
def test_a_mask_says_which_leaves_are_meant_and_others_pass(wrapper, mask):
    tx = WRAPPERS[wrapper](optax.sgd(2.0**-10), mask=MASKS[mask])
    state = tx.init(TREE)
    if wrapper != "random":
        beside = jax.tree.leaves((state.weights.remainders, state.weights.copies))
        assert [leaf.shape for leaf in beside] == [(3,)]
    grads = jax.tree.map(lambda p: jnp.ones(p.shape, p.dtype), TREE) | {"int": None}
    step = jax.jit(functools.partial(fused_step, tx))
    params = TREE
    for _ in range(16):
        params, state = step(params, state, grads)
    assert (params["frozen"] == 1).all()
    masters = jaxscale.master_params(state, params)
    if wrapper != "random":
        np.testing.assert_array_equal(masters["trained"], 1 - 16 * 2.0**-10)
    np.testing.assert_array_equal(params["int"], TREE["int"])
    assert params["complex"].dtype == jnp.complex64
    assert params["narrow"].dtype == jnp.float8_e4m3fn
    assert (params["complex"] != 1).all()


@cases("wrapper", WRAPPERS)
def test_a_leaf_without_a_gradient_keeps_what_is_beside_it(wrapper):
    tx = WRAPPERS[wrapper](optax.sgd(2.0**-10, momentum=0.9))
    params, state = run(tx)
    grads = PULLS[0] | {"w": None}
    # the optimizer sees None there, too
    trace = {**state.inner_state[0].trace, "w": None}
    with_none = state._replace(
        inner_state=(state.inner_state[0]._replace(trace=trace), state.inner_state[1])
    )
    new, new_state = fused_step(tx, params, with_none, grads)
    assert_same_bits(new["w"], params["w"])
    if wrapper == "remainder":
        before = state.weights.remainders["w"]
        assert_same_bits(new_state.weights.remainders["w"], before)
    if wrapper == "float32":
        before = state.weights.copies["bfloat16"]["w"]
        assert_same_bits(new_state.weights.copies["bfloat16"]["w"], before)


def test_float32_parameters_cost_nothing():
    params = wide(PARAMS)
    expected = jax.jit(jaxscale.skip_nonfinite(optax.adamw(1e-3)).update)
    tx = jaxscale.master_weights(optax.adamw(1e-3))
    state = tx.init(params)
    assert state.weights == (None, None, None)
    plain_state = jaxscale.skip_nonfinite(optax.adamw(1e-3)).init(params)
    texts = []
    for update, own_state in ((jax.jit(tx.update), state), (expected, plain_state)):
        texts.append(str(update.lower(params, own_state, params).as_text()))
    assert texts[0].replace("update", "") == texts[1].replace("update", "")


def test_what_stands_beside_a_parameter_has_its_bytes():
    params = {"w": jnp.ones((64, 64), jnp.bfloat16), "h": jnp.ones(64, jnp.float16)}
    sizes = {}
    for storage in STORAGES:
        state = jaxscale.master_weights(optax.sgd(0.1), storage).init(params)
        sizes[storage] = sum(x.nbytes for x in jax.tree.leaves(state.weights))
    assert sizes == {"remainder": 64 * 64 * 2 + 64 * 4, "float32": 64 * 64 * 4 + 64 * 4}
    random = jaxscale.stochastic_rounding(optax.sgd(0.1)).init(params)
    assert [x.nbytes for x in jax.tree.leaves(random.weights)] == [8]


# The warning.


def warnings_of(tx, params):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tx.init(params)
        tx.init(params)
    return [str(warning.message) for warning in caught]


HALF = {"w": jnp.ones((4, 4), jnp.bfloat16), "b": jnp.ones(4, jnp.bfloat16)}
FROZEN = optax.masked(optax.adam(1e-3), {"w": False, "b": False})
OF_F = optax.masked(optax.adam(1e-3), {"w": False, "f": True})
OF_W = jaxscale.master_weights(optax.adam(1e-3), mask={"w": True, "b": False})
# An optimizer, its parameters, and what is told of them.
TOLD = {
    "adam": (optax.adam(1e-3), HALF, "2 bfloat16 leaves are"),
    "one leaf": (
        optax.masked(optax.adam(1e-3), {"w": True, "b": False}),
        HALF,
        "1 bfloat16 leaf is",
    ),
    "a leaf alone": (optax.adam(1e-3), HALF["w"], "1 bfloat16 leaf is"),
    "float16": (optax.adam(1e-3), HALF["w"].astype(jnp.float16), "1 float16 leaf is"),
    "float32": (optax.adam(1e-3), wide(HALF), None),
    "no moments": (optax.sgd(1e-3), HALF, None),
    "frozen": (FROZEN, HALF, None),
    "frozen, of the shape of one that is trained": (
        OF_F,
        {"w": HALF["w"], "f": jnp.ones((4, 4))},
        None,
    ),
    "left out by a mask": (OF_W, HALF, None),
    **{name: (wrap(optax.adam(1e-3)), HALF, None) for name, wrap in WRAPPERS.items()},
}


@cases("name", TOLD)
def test_training_without_copies_is_told_once_where_something_is_lost(name):
    tx, params, words = TOLD[name]
    messages = warnings_of(jaxscale.skip_nonfinite(tx), params)
    assert len(messages) == (words is not None)
    for message in messages:
        assert words in message
        assert "jaxscale.master_weights(tx)" in message


# Read and written as float32.


@pytest.mark.device
@cases("storage", STORAGES)
def test_float32_parameters_go_in_and_come_out_bit_for_bit(storage):
    tx = jaxscale.master_weights(optax.adamw(1e-3), storage)
    masters = jax.tree.map(
        lambda p: jnp.asarray(rng.standard_normal(p.shape), jnp.float32), PARAMS
    )
    params, state = jaxscale.with_master_params(tx.init(PARAMS), masters)
    assert_same_bits(params, rounded(masters))
    assert_same_bits(jaxscale.master_params(state, params), masters)
    again = jaxscale.with_master_params(state, jaxscale.master_params(state, params))
    assert_same_bits(again, (params, state))
    # and the run goes on from there
    params, state = jax.jit(functools.partial(fused_step, tx))(params, state, PULLS[0])
    assert state.step_applied


def test_master_params_keep_what_is_no_half_precision_array():
    """A layer of Equinox asks whether its rate is Python's 0.0."""
    params = {"w": PARAMS["w"], "rate": 0.0, "count": 3, "f": PARAMS["f"]}
    state = jaxscale.master_weights(optax.sgd(0.1)).init(params)
    for opt_state in (state, state._replace(weights=None)):
        masters = jaxscale.master_params(opt_state, params)
        # A step may donate the parameters, and an average is kept.
        assert masters["f"] is not params["f"]
        assert type(masters["rate"]) is float
        assert type(masters["count"]) is int
        assert masters["w"].dtype == jnp.float32


@cases("wrapper", WRAPPERS)
def test_moments_of_plain_optax_are_refused_and_taken_over(wrapper):
    tx = WRAPPERS[wrapper](optax.adam(1e-3))
    old = optax.adam(1e-3).init(PARAMS)
    state = tx.init(PARAMS)
    mixed = state._replace(inner_state=old)
    grads = wide(PARAMS)
    for form in (plain_step, fused_step):
        with pytest.raises(ValueError, match=r"has float16 where .*from_state_dict"):
            form(tx, PARAMS, mixed, grads)
    taken = jaxscale.from_state_dict(state, jaxscale.to_state_dict(mixed))
    assert avals(taken) == avals(state)
    fused_step(tx, PARAMS, taken, grads)


def test_master_params_are_the_parameters_where_nothing_is_beside_them():
    for wrapper in (jaxscale.stochastic_rounding, jaxscale.skip_nonfinite):
        state = wrapper(optax.sgd(0.1)).init(PARAMS)
        assert_same_bits(jaxscale.master_params(state, PARAMS), wide(PARAMS))


# Derivatives.


@pytest.mark.worlds
@cases(
    "wrapper, form",
    product(WRAPPERS, [plain_step, fused_step]),
    fast=each(WRAPPERS, [plain_step, fused_step]),
)
def test_an_update_has_the_derivative_of_the_float32_one(wrapper, form):
    def end(rate, start):
        tx = WRAPPERS[wrapper](optax.sgd(rate))
        params = start.astype(jnp.bfloat16)
        state = tx.init(params)
        for _ in range(2):
            params, state = form(tx, params, state, jnp.full(2, 2.0))
        return jnp.sum(params.astype(jnp.float32))

    by_rate, by_start = jax.grad(end, argnums=(0, 1))(0.25, jnp.ones(2))
    assert by_rate == -8
    np.testing.assert_array_equal(by_start, [1, 1])


@pytest.mark.worlds
@cases("wrapper", WRAPPERS, fast=["random"])
def test_a_step_can_be_exported(wrapper):
    tx = WRAPPERS[wrapper](optax.adamw(1e-3))
    state = tx.init(PARAMS)
    step = jax.jit(functools.partial(fused_step, tx))
    grads = gradients(PARAMS, PULLS[0])
    exported = jax.export.export(step)(PARAMS, state, grads)
    assert_same_bits(exported.call(PARAMS, state, grads), step(PARAMS, state, grads))
