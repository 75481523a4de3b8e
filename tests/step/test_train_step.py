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

import jaxscale

pytestmark = pytest.mark.standard_promotion


def three_lines(loss_fn, tx):
    def step(params, opt_state, *args):
        loss, grads = jaxscale.value_and_grad(loss_fn, opt_state)(params, *args)
        updates, opt_state = tx.update(grads, opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state, loss

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
    opt_state = expected[1]
    if name != "switched off":
        assert opt_state.total_notfinite_loss > 0
        # The batches overflow, but at a low scale, or one that the policy lowers before.
        first, last = tx.init(PARAMS).scaling.loss_scale, opt_state.scaling.loss_scale
        overflows = opt_state.total_notfinite - opt_state.total_notfinite_loss
        assert overflows > 0 or first < 2**10 or ("adaptive" in name and last < first)


BARE = r"`train_step`: `tx` is a bare optimizer.*loss_scaled\(tx\).*skip_nonfinite=False"


@cases("inner", INNERS, fast=["sgd", "masked"])
def test_a_bare_optimizer_applies_every_step_and_is_warned_of_once(inner):
    tx = INNERS[inner]
    bare = tx.gradient_transformation() if isinstance(tx, optax.MultiSteps) else tx

    def plain(params, opt_state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = bare.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        step = jaxscale.train_step(loss_fn, tx)
        # Some need the parameters to say that they hold no loss scale.
        assert len(found) == (inner not in ("masked", "multi_transform"))
        step(PARAMS, tx.init(PARAMS), GOOD)
        ours = run(step, tx.init(PARAMS))
    (only,) = found
    assert re.match(BARE, str(only.message))
    assert only.filename == __file__
    assert_same_bits(ours, run(plain, bare.init(PARAMS)))
    assert not jaxscale.all_finite(ours[0])
    # Whoever says that it is meant gets no warning.
    meant = jaxscale.loss_scaled(bare, None, skip_nonfinite=False)
    assert not jaxscale.all_finite(run(jaxscale.train_step(loss_fn, meant), meant.init(PARAMS))[0])


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


CHAINED = {
    "chain": optax.chain(jaxscale.loss_scaled(optax.sgd(0.1)), optax.identity()),
    "named chain": optax.named_chain(("scaled", jaxscale.skip_nonfinite(optax.adam(0.1)))),
}


@cases("name", CHAINED, fast=["chain"])
def test_a_loss_scale_is_found_wherever_it_is(name):
    tx = CHAINED[name]
    with_state = jaxscale.train_step(counting, tx, has_state=True)
    params, opt_state, seen = PARAMS, tx.init(PARAMS), jnp.zeros(())
    for batch in BATCHES:
        with pytest.warns(UserWarning, match=r"`train_step`.*inside of another.*outermost"):
            params, opt_state, seen, _ = with_state(params, opt_state, seen, batch)
    expected = run(three_lines(loss_fn, tx), tx.init(PARAMS))
    assert_same_bits((params, opt_state), expected[:2])
    skipped = jaxscale.metrics(opt_state)["total_notfinite"]
    assert skipped >= 1
    assert seen == len(BATCHES) - skipped


def counting(params, state, x):
    """A loss with state, which counts the forward passes and is NaN where the loss is."""
    loss = loss_fn(params, x)
    return loss, state + 1 + 0 * loss


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
    params, opt_state, state = PARAMS, tx.init(PARAMS), (jnp.zeros(()),) * has_state
    expected = run(jaxscale.train_step(loss_fn, tx, retries=retries), tx.init(PARAMS))
    for batch, loss in zip(BATCHES, expected[2], strict=True):
        params, opt_state, *state, output = step(params, opt_state, *state, batch)
        assert_same_bits(output[0] if has_aux else output, loss)
        if has_aux:
            assert_same_bits(output[1]["x"], batch)
    assert_same_bits((params, opt_state), expected[:2])
    if has_state:
        assert state == [opt_state.total_steps - opt_state.total_notfinite]


def test_keyword_arguments_and_trees_of_state():
    keys = jax.random.split(jax.random.key(0))
    state = {"key": keys[0], "n": jnp.array(0), "none": None, "text": "as it is"}

    def fun(params, state, *, x):
        return loss_fn(params, x), state | {"key": keys[1], "n": state["n"] + 1}

    tx = jaxscale.loss_scaled(optax.adam(0.1))
    step = jaxscale.train_step(fun, tx, has_state=True, retries=2)
    kept = step(PARAMS, tx.init(PARAMS), state, x=jnp.full(3, jnp.inf))[2]
    assert_same_bits(arrays(kept), arrays(state))
    new = step(PARAMS, tx.init(PARAMS), state, x=GOOD)[2]
    assert_same_bits(arrays(new), arrays(state | {"key": keys[1], "n": jnp.array(1)}))


def arrays(tree):
    return eqx.filter(tree, eqx.is_array)


# Hooks


class Watching(jaxscale.DynamicLossScale):
    """A policy that shows the largest gradient it was given."""

    needs_largest = True

    def adjust(self, state, grads_finite, largest=None):
        state = super().adjust(state, grads_finite)
        return state._replace(growth_tracker=jax.lax.bitcast_convert_type(largest, jnp.int32))


JUDGED = {name: optimizer(name) for name in [*WINDOWS, "norm", "checked", "tracked"]} | {
    name: jaxscale.loss_scaled(INNERS["adam"], policy, max_norm=1.0)
    for name, policy in {
        "largest": POLICIES["adaptive"],
        "watching": Watching(),
    }.items()
}


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
    loss = loss_fn(params, x)
    return loss, state | {"seen": state["seen"] + 1}


START = {"mean": wide(PARAMS), "count": jnp.array(0), "seen": jnp.array(0)}
AVERAGED = {
    "scaled": hot(2.0**15),
    "bare": INNERS["adam"],
    "bare window": INNERS["multi_steps"],
    "chained": optax.chain(jaxscale.skip_nonfinite(INNERS["adam"]), optax.identity()),
    **{name: optimizer(name) for name in [*WINDOWS, "checked", "switched off"]},
}


@pytest.mark.filterwarnings("ignore:.train_step.*inside of another")
@pytest.mark.filterwarnings("ignore:.train_step.*is a bare optimizer")
@cases(
    "name, mode",
    itertools.product(AVERAGED, ["eager", "scan"]),
    fast=[("scaled", "scan"), ("bare window", "eager")],
)
def test_after_counts_where_the_optimizer_made_a_step(name, mode):
    tx, never_skips = AVERAGED[name], "bare" in name or name == "switched off"
    step = jaxscale.train_step(with_average, tx, has_state=True, after=averages)
    batches = [GOOD, GOOD * 2] * 2 if never_skips else BATCHES

    def body(carry, batch):
        carry = step(*carry, batch)[:3]
        return carry, carry

    carry, made = (PARAMS, tx.init(PARAMS), START), []
    if mode == "scan":
        stacked = jax.jit(lambda *args: jax.lax.scan(body, *args))(carry, jnp.stack(batches))[1]
        made = [jax.tree.map(operator.itemgetter(i), stacked) for i in range(len(batches))]
    else:
        for batch in batches:
            carry, _ = body(carry, batch)
            made.append(carry)
    before, expected = PARAMS, START
    for params, _, state in made:
        # Adam moves the parameters in every step that it makes.
        if not np.array_equal(params["w"], before["w"]):
            expected = averages(params, expected)
        before = params
        assert_same_bits((state["mean"], state["count"]), (expected["mean"], expected["count"]))
    assert (expected["count"] == len(batches)) == (never_skips and "window" not in name)
    # What the loss function makes of the state goes by the micro-batch.
    skipped = 0 if never_skips else jaxscale.metrics(made[-1][1])["total_notfinite"]
    assert state["seen"] == len(batches) - skipped


# Equinox


class Net(eqx.Module):
    linear: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    activation: object = jax.nn.relu

    def __init__(self, key):
        self.linear = eqx.nn.Linear(3, 4, key=key)
        self.norm = eqx.nn.BatchNorm(4, "batch", mode="ema")

    def __call__(self, x, state):
        x, state = self.norm(self.linear(x), state)
        return self.activation(x), state


def equinox_loss(model, state, x):
    outputs, state = jax.vmap(model, (0, None), (0, None), axis_name="batch")(x, state)
    return jnp.mean(outputs**2) * 1e3, state


def test_equinox_with_state():
    model, state = eqx.nn.make_with_state(Net)(jax.random.key(0))
    tx = hot(2.0**10)
    opt_state = tx.init(eqx.filter(model, eqx.is_inexact_array))
    how = {"transform": eqx.filter_value_and_grad, "has_state": True, "retries": 3}
    step = eqx.filter_jit(jaxscale.train_step(equinox_loss, tx, **how))
    x = jax.random.normal(jax.random.key(1), (8, 3))
    for _ in range(3):
        model, opt_state, state, loss = step(model, opt_state, state, x)
    before = jax.tree.leaves(arrays((model, state)))
    model, opt_state, state, loss = step(model, opt_state, state, x.at[0, 0].set(jnp.inf))
    assert not jnp.isfinite(loss)
    assert_same_bits(jax.tree.leaves(arrays((model, state))), before)
    assert step(model, opt_state, state, x)[1].total_notfinite == opt_state.total_notfinite == 1
