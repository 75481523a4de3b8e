"""The whole step in one function is the loop of three lines."""

import itertools
import operator
import re
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jaxprs import numbers_reduced
from overflowing import (
    BAD_LOSS,
    BATCHES,
    GOOD,
    OPTIONS,
    OVERFLOW,
    WINDOWS,
    hot,
    loss_fn,
    optimizer,
    run,
)
from tables import INNERS, PARAMS, POLICIES, assert_same_bits, cases, wide
from tables import step as one_step

import jaxscale

pytestmark = pytest.mark.standard_promotion


def three_lines(loss_fn, tx):
    def step(params, opt_state, *args):
        loss, grads = jaxscale.value_and_grad(loss_fn, opt_state)(params, *args)
        return *one_step(tx, params, opt_state, grads, value=loss), loss

    return step


# Hooks that change no number: none, one that only looks, one that makes other arrays of them.
UNCHANGING = [None, lambda grads: dict(grads), lambda grads: jax.tree.map(lambda g: g * 1, grads)]
OPTIMIZERS = {
    f"{policy}, {inner}": jaxscale.loss_scaled(INNERS[inner], POLICIES[policy])
    for policy, inner in itertools.product(POLICIES, INNERS)
} | {name: optimizer(name) for name in [*WINDOWS, *OPTIONS]}


@cases("name", OPTIMIZERS, fast=["dynamic, adam", "tracked"])
def test_it_is_the_loop_of_three_lines(name):
    tx = OPTIMIZERS[name]
    batches = BATCHES[:2] if name == "switched off" else BATCHES

    def trained(step):
        if name != "axis":
            return run(step, tx.init(PARAMS), batches)
        mapped = jax.vmap(step, (None, None, 0), axis_name="devices", axis_size=2)

        def first(*args):
            return jax.tree.map(operator.itemgetter(0), mapped(*args))

        return run(first, tx.init(PARAMS), [jnp.stack([batch, GOOD]) for batch in batches])

    # Bit for bit where each operation runs by itself.
    expected = trained(three_lines(loss_fn, tx))
    for hook in UNCHANGING if name in WINDOWS | OPTIONS else UNCHANGING[:1]:
        assert_same_bits(trained(jaxscale.train_step(loss_fn, tx, on_grads=hook)), expected)
    if name != "switched off":
        assert expected[1].total_notfinite >= expected[1].total_notfinite_loss > 0


BARE = r"`train_step`: `tx` is a bare optimizer.*loss_scaled\(tx\).*skip_nonfinite=False"


@cases("inner", INNERS, fast=["sgd", "masked"])
def test_a_bare_optimizer_applies_every_step_and_is_warned_of_once(inner):
    tx = INNERS[inner]
    bare = tx.gradient_transformation() if isinstance(tx, optax.MultiSteps) else tx

    def plain(params, opt_state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        return *one_step(bare, params, opt_state, grads), loss

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        step = jaxscale.train_step(loss_fn, tx)
        # Some need the parameters to say that they hold no loss scale.
        assert len(found) == (inner not in ("masked", "multi_transform"))
        step(PARAMS, tx.init(PARAMS), GOOD)
        ours = run(step, tx.init(PARAMS))
        # Whoever says that it is meant gets no warning.
        meant = jaxscale.loss_scaled(bare, None, skip_nonfinite=False)
        as_meant = run(jaxscale.train_step(loss_fn, meant), meant.init(PARAMS))
    (only,) = found
    assert re.match(BARE, str(only.message))
    assert only.filename == __file__
    assert_same_bits(ours, run(plain, bare.init(PARAMS)))
    assert not jaxscale.all_finite(ours[0])
    assert not jaxscale.all_finite(as_meant[0])


def test_a_step_asks_init_only_for_parameters_of_other_types():
    asked, adam = [], INNERS["adam"]

    def init(params):
        asked.append(params)
        return adam.init(params)

    tx = jaxscale.loss_scaled(optax.GradientTransformation(init, adam.update))
    opt_state, step = tx.init(PARAMS), jaxscale.train_step(loss_fn, tx)
    step(PARAMS, opt_state, GOOD)
    assert len(asked) == 1
    with pytest.raises(ValueError, match="of another optimizer or of other parameters"):
        step(jax.tree.map(lambda leaf: leaf[None], PARAMS), opt_state, GOOD)
    assert len(asked) == 2


def test_a_loss_scale_is_found_wherever_it_is():
    tx = optax.named_chain(("scaled", jaxscale.loss_scaled(optax.adam(0.1))))
    with_state = jaxscale.train_step(counting, tx, has_state=True)
    params, opt_state, state = PARAMS, tx.init(PARAMS), STATE
    for batch in BATCHES:
        with pytest.warns(UserWarning, match=r"`train_step`.*inside of another.*outermost"):
            params, opt_state, state, _ = with_state(params, opt_state, state, batch)
    expected = run(three_lines(loss_fn, tx), tx.init(PARAMS))
    assert_same_bits((params, opt_state), expected[:2])
    skipped = jaxscale.metrics(opt_state)["total_notfinite"]
    assert skipped >= 1
    assert state["n"] == len(BATCHES) - skipped


KEYS = jax.random.split(jax.random.key(0))
STATE = {"key": KEYS[0], "n": jnp.array(0), "bad": jnp.zeros(()), "none": None, "text": "as it is"}


def counting(params, state, x):
    """A loss with state, which counts the forward passes and is NaN where the loss is."""
    loss = loss_fn(params, x)
    return loss, state | {"key": KEYS[1], "n": state["n"] + 1, "bad": 0 * loss}


def counting_with_aux(params, state, x):
    loss, state = counting(params, state, x)
    return loss, (state, {"x": x})


OUTPUTS = {
    # (has_state, has_aux): a loss function
    (False, True): lambda p, x: (loss_fn(p, x), {"x": x, "text": "aux", "none": None}),
    (True, False): counting,
    (True, True): counting_with_aux,
}


@cases(
    "has_state, has_aux, retries",
    [(*has, retries) for has in OUTPUTS for retries in (0, 3)],
    fast=[(True, True, 3), (False, True, 0)],
)
def test_state_is_kept_and_outputs_are_returned(has_state, has_aux, retries):
    fun = OUTPUTS[has_state, has_aux]
    tx = jaxscale.loss_scaled(optax.adam(0.1))
    step = jaxscale.train_step(fun, tx, has_state=has_state, has_aux=has_aux, retries=retries)
    params, opt_state, state = PARAMS, tx.init(PARAMS), (STATE,) * has_state
    expected = run(jaxscale.train_step(loss_fn, tx, retries=retries), tx.init(PARAMS))
    for batch, loss in zip(BATCHES, expected[2], strict=True):
        params, opt_state, *state, output = step(params, opt_state, *state, x=batch)
        assert_same_bits(output[0] if has_aux else output, loss)
        if has_aux:
            assert_same_bits(output[1]["x"], batch)
    assert_same_bits((params, opt_state), expected[:2])
    if has_state:
        counted = {"key": KEYS[1], "n": opt_state.total_steps - opt_state.total_notfinite}
        assert_same_bits(arrays(state), arrays([STATE | counted]))


def arrays(tree):
    return eqx.filter(tree, eqx.is_array)


# Hooks


JUDGED = {name: optimizer(name) for name in [*WINDOWS, "norm", "checked", "tracked"]}
JUDGED["largest"] = jaxscale.loss_scaled(INNERS["adam"], POLICIES["adaptive"], max_norm=1.0)


def sanitized(grads):
    return jax.tree.map(lambda grad: jnp.clip(jnp.nan_to_num(grad), -1, 1), grads)


@cases("name, retries", itertools.product(JUDGED, [0, 2]), fast=[("tracked", 2)])
def test_a_hook_hides_nothing_and_nothing_of_it_is_hidden(name, retries):
    tx = JUDGED[name]
    plain, hiding, spoiling = (
        jax.jit(jaxscale.train_step(loss_fn, tx, on_grads=hook, retries=retries))
        for hook in (None, sanitized, lambda grads: grads | {"b": grads["b"] / 0})
    )
    for batch in (GOOD, OVERFLOW, BAD_LOSS):
        kept = [run(step, tx.init(PARAMS), [batch])[1] for step in (plain, hiding)]
        assert_same_bits(*(jaxscale.metrics(each) | {"grad_norm": None} for each in kept))
        params, opt_state, _ = run(spoiling, tx.init(PARAMS), [batch])
        assert_same_bits(params, PARAMS)
        assert opt_state.total_notfinite == 1
        if name == "tracked":
            assert jaxscale.metrics(opt_state)["nonfinite_leaves/b"]


@cases("name", ["tracked", "norm", "largest"])
def test_a_hook_costs_one_more_look_at_what_it_changed(name):
    tx, numbers = JUDGED[name], sum(leaf.size for leaf in jax.tree.leaves(PARAMS))

    def given(fun, has_aux):
        return lambda params, grads: (fun(params, grads), grads)

    def no_loss(params, grads):
        return jnp.float32(0)

    def read(hook):
        step = jaxscale.train_step(no_loss, tx, transform=given, on_grads=hook)
        return numbers_reduced(jax.make_jaxpr(step)(PARAMS, tx.init(PARAMS), wide(PARAMS)))

    none, looks, changes = map(read, UNCHANGING)
    assert none == looks == 1 + numbers * (2 if name == "largest" else 1)  # 1: the loss
    assert changes == 1 + 2 * numbers


def averages(params, state):
    """A moving average of the parameters, and a count, both exact."""
    mean = jax.tree.map(lambda m, p: m / 2 + p.astype(m.dtype) / 2, state["mean"], params)
    return state | {"mean": mean, "count": state["count"] + 1}


def with_average(params, state, x):
    return loss_fn(params, x), state | {"seen": state["seen"] + 1}


AVERAGED = {
    "scaled": hot(2.0**15),
    "bare": INNERS["adam"],
    "bare window": INNERS["multi_steps"],
    "chained": optax.chain(jaxscale.skip_nonfinite(INNERS["adam"]), optax.identity()),
    **{name: optimizer(name) for name in [*WINDOWS, "checked", "switched off"]},
}


@pytest.mark.filterwarnings("ignore:.train_step.*(inside of another|is a bare optimizer)")
@cases("name", AVERAGED, fast=["scaled", "bare window"])
def test_after_counts_where_the_optimizer_made_a_step(name):
    tx, never_skips = AVERAGED[name], "bare" in name or name == "switched off"
    step = jaxscale.train_step(with_average, tx, has_state=True, after=averages)
    batches = [GOOD, GOOD * 2] * 2 if never_skips else BATCHES
    start = {"mean": wide(PARAMS), "count": jnp.array(0), "seen": jnp.array(0)}
    params, opt_state, state, expected = PARAMS, tx.init(PARAMS), start, start
    for batch in batches:
        before = params
        params, opt_state, state, _ = step(params, opt_state, state, batch)
        # Adam moves the parameters in every step that it makes.
        if not np.array_equal(params["w"], before["w"]):
            expected = averages(params, expected)
        assert_same_bits((state["mean"], state["count"]), (expected["mean"], expected["count"]))
    assert (expected["count"] == len(batches)) == (never_skips and "window" not in name)
    # What the loss function makes of the state goes by the micro-batch.
    skipped = 0 if never_skips else jaxscale.metrics(opt_state)["total_notfinite"]
    assert state["seen"] == len(batches) - skipped


class Counting(eqx.Module):
    w: jax.Array
    calls: eqx.nn.StateIndex

    def __init__(self):
        self.w, self.calls = jnp.ones(3), eqx.nn.StateIndex(jnp.array(0))


def test_a_state_of_equinox_may_be_read_once():
    def loss_fn(model, state, x):
        state = state.set(model.calls, state.get(model.calls) + 1)
        return jnp.mean((model.w * x) ** 2), state

    (model, state), tx = eqx.nn.make_with_state(Counting)(), hot()
    opt_state = tx.init(eqx.filter(model, eqx.is_inexact_array))
    how = {"transform": eqx.filter_value_and_grad, "has_state": True, "retries": 3}
    step = eqx.filter_jit(jaxscale.train_step(loss_fn, tx, after=lambda _, state: state, **how))
    for x, calls in ((1.0, 1), (jnp.inf, 1), (2.0, 2)):
        before = model.w
        model, opt_state, state, loss = step(model, opt_state, state, jnp.full(3, x))
        assert state.get(model.calls) == calls
        assert jnp.isfinite(loss) == (x < jnp.inf) == (model.w != before).all()
