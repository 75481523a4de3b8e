"""The whole step in one function: its outputs, state and hooks.

`tests/step/test_runs.py` has what it does to parameters and counters.
"""

import re
import warnings
from itertools import product

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import overflowing
import pytest
from jaxpr_equations import numbers_reduced
from methods import pass_gradients
from overflowing import BAD_LOSS, BATCHES, GOOD, OVERFLOW, WINDOWS, hot, loss_fn, run
from tables import (
    INNERS,
    PARAMS,
    POLICIES,
    assert_same_bits,
    avals,
    cases,
    each,
    wide,
)
from tables import step as one_step

import jaxscale

pytestmark = pytest.mark.standard_promotion


def test_a_step_goes_down_the_slope_of_its_loss():
    def loss_fn(w, x):
        return (w * x - 1) ** 2

    tx = jaxscale.loss_scaled(optax.sgd(0.25))
    step = jax.jit(jaxscale.train_step(loss_fn, tx))
    w, state, loss = step(jnp.array(0.0), tx.init(jnp.array(0.0)), 2.0)
    assert (w, loss, state.total_steps) == (1, 1, 1)


def look(grads):
    return dict(grads)


def copy(grads):
    return jax.tree.map(lambda grad: grad * 1, grads)


# Hooks that change no number.
UNCHANGING = {"no hook": None, "looks": look, "copies": copy}
OPTIMIZERS = dict(overflowing.OPTIMIZERS)
OPTIMIZERS["largest"] = jaxscale.loss_scaled(
    INNERS["adam"], POLICIES["following"], max_norm=1.0
)


BARE = (
    r"`train_step`: `tx` is a bare optimizer.*loss_scaled\(tx\).*skip_nonfinite=False"
)


@pytest.mark.worlds
@cases("inner", INNERS, fast=["adam"])
def test_it_is_the_loop_of_three_lines(inner):
    tx = jaxscale.loss_scaled(INNERS[inner])

    def three_lines(params, opt_state, x):
        loss, grads = jaxscale.value_and_grad(loss_fn, opt_state)(params, x)
        params, opt_state = one_step(tx, params, opt_state, grads, value=loss)
        return params, opt_state, loss

    # Bit for bit, as each operation runs by itself.
    expected = run(three_lines, tx.init(PARAMS))
    assert_same_bits(run(jaxscale.train_step(loss_fn, tx), tx.init(PARAMS)), expected)


@cases("inner", INNERS, fast=["sgd", "masked"])
def test_a_bare_optimizer_applies_every_step_and_is_warned_of_once(inner):
    tx = bare = INNERS[inner]
    if isinstance(tx, optax.MultiSteps):
        bare = tx.gradient_transformation()

    def plain(params, opt_state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        params, opt_state = one_step(bare, params, opt_state, grads)
        return params, opt_state, loss

    expected = run(plain, bare.init(PARAMS))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step = jaxscale.train_step(loss_fn, tx)
        # Some need the parameters to say that they hold no loss scale.
        assert len(caught) == (inner not in ("masked", "multi_transform"))
        trained = run(step, tx.init(PARAMS))
    assert_same_bits(trained, expected)
    assert not jaxscale.all_finite(trained[0])
    (warning,) = caught
    assert re.match(BARE, str(warning.message))
    if inner in ("masked", "multi_transform"):
        # the line of `run`, which calls the step
        assert warning.filename == overflowing.__file__
    else:
        assert warning.filename == __file__

    # Whoever says that it is meant gets no warning.
    meant = jaxscale.loss_scaled(tx, None, skip_nonfinite=False)
    params, _, _ = run(jaxscale.train_step(loss_fn, meant), meant.init(PARAMS))
    assert not jaxscale.all_finite(params)


def sharper(grads, state, params=None, *, hessian, **extra):
    return jax.tree.map(jnp.divide, grads, hessian), state


def sharper_by_name(grads, state, params=None, **extra):
    return jax.tree.map(jnp.divide, grads, extra["hessian"]), state


def needing(update):
    return optax.GradientTransformationExtraArgs(lambda params: (), update)


SGD = optax.sgd(0.1)
SLOPE = jax.grad(lambda w: jnp.sum((w - 1) ** 2))
# Optimizers that need more than a step gives, and what they need.
NEED_MORE = {
    "lbfgs": (optax.lbfgs(), ("value", "grad", "value_fn")),
    "line search": (
        optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(4)),
        ("value", "grad", "value_fn"),
    ),
    "sam": (optax.contrib.sam(SGD, SGD, opaque_mode=True), ("grad_fn",)),
    "a keyword": (optax.chain(needing(sharper), SGD), ("hessian",)),
    "any keyword": (optax.chain(needing(sharper_by_name), SGD), ("hessian",)),
}


@cases(
    "name, wrap",
    list(product(NEED_MORE, [jaxscale.loss_scaled, optax.with_extra_args_support])),
    fast=[("lbfgs", jaxscale.loss_scaled), ("any keyword", jaxscale.loss_scaled)],
)
@pytest.mark.filterwarnings("ignore:.*bare optimizer")
def test_an_optimizer_that_needs_more_is_told_of_in_a_note_that_is_true(name, wrap):
    inner, needs = NEED_MORE[name]
    tx = wrap(inner)

    def loss_fn(w):
        return jnp.sum((w - 1) ** 2)

    w = jnp.zeros(3)
    opt_state = tx.init(w)
    with pytest.raises((KeyError, TypeError, ValueError)) as caught:
        jax.jit(jaxscale.train_step(loss_fn, tx))(w, opt_state)
    (note,) = [note for note in caught.value.__notes__ if "train_step" in note]
    assert "value_and_grad(loss_fn, opt_state)(params, ...)" in note
    assert "tx.update(grads, opt_state, params, ...)" in note
    with pytest.raises((KeyError, TypeError, ValueError)) as caught:
        tx.update(w, opt_state, w)
    assert not hasattr(caught.value, "__notes__")
    # What the note says.
    loss, grads = jax.value_and_grad(loss_fn)(w)
    if wrap is not optax.with_extra_args_support:
        loss, grads = jaxscale.value_and_grad(loss_fn, opt_state)(w)
    known = {"value": loss, "grad": grads, "value_fn": loss_fn, "hessian": 2.0}
    known["grad_fn"] = lambda w, _: SLOPE(w)
    rest = {need: known[need] for need in needs}
    updates, _ = tx.update(grads, opt_state, w, **rest)
    assert loss_fn(optax.apply_updates(w, updates)) < loss


def test_a_step_asks_init_only_for_parameters_of_other_types():
    asked = []
    adam = INNERS["adam"]

    def init(params):
        asked.append(params)
        return adam.init(params)

    tx = jaxscale.loss_scaled(adam._replace(init=init))
    opt_state = tx.init(PARAMS)
    step = jaxscale.train_step(loss_fn, tx)
    step(PARAMS, opt_state, GOOD)
    assert len(asked) == 1
    others = jax.tree.map(lambda leaf: leaf[None], PARAMS)
    with pytest.raises(ValueError, match="of another optimizer or of other parameters"):
        step(others, opt_state, GOOD)
    assert len(asked) == 2


KEYS = jax.random.split(jax.random.key(0))
STATE = {
    "key": KEYS[0],
    "n": jnp.array(0),
    "bad": jnp.zeros(()),
    "none": None,
    "text": "as it is",
}


def counting(params, state, x):
    """A loss with state, which counts the forward passes and is NaN where the loss is."""
    loss = loss_fn(params, x)
    return loss, state | {"key": KEYS[1], "n": state["n"] + 1, "bad": 0 * loss}


def with_aux(params, x):
    return loss_fn(params, x), {"x": x, "text": "aux", "none": None}


def counting_with_aux(params, state, x):
    loss, state = counting(params, state, x)
    return loss, (state, {"x": x})


# (has_state, has_aux): a loss function
OUTPUTS = {
    (False, True): with_aux,
    (True, False): counting,
    (True, True): counting_with_aux,
}


@pytest.mark.device
@cases(
    "has_state, has_aux, retries",
    [(*has, retries) for has in OUTPUTS for retries in (0, 3)],
    fast=[(True, True, 3), (False, True, 0)],
)
def test_state_is_kept_and_outputs_are_returned(has_state, has_aux, retries):
    tx = jaxscale.loss_scaled(optax.adam(0.1))
    without = jaxscale.train_step(loss_fn, tx, retries=retries)
    expected_params, expected_opt_state, losses = run(without, tx.init(PARAMS))
    step = jaxscale.train_step(
        OUTPUTS[has_state, has_aux],
        tx,
        has_state=has_state,
        has_aux=has_aux,
        retries=retries,
    )
    params = PARAMS
    opt_state = tx.init(PARAMS)
    carried = [STATE] if has_state else []
    for batch, expected_loss in zip(BATCHES, losses, strict=True):
        params, opt_state, *carried, output = step(params, opt_state, *carried, x=batch)
        loss = output
        if has_aux:
            loss, aux = output
            assert_same_bits(aux["x"], batch)
        assert_same_bits(loss, expected_loss)
    assert_same_bits((params, opt_state), (expected_params, expected_opt_state))
    if has_state:
        n = opt_state.total_steps - opt_state.total_notfinite
        expected = STATE | {"key": KEYS[1], "n": n}
        (state,) = carried
        assert_same_bits(
            eqx.filter(state, eqx.is_array), eqx.filter(expected, eqx.is_array)
        )


# Hooks

JUDGED = [*WINDOWS, "norm", "checked", "tracked", "largest"]


def sanitize(grads):
    """Hides every overflow."""
    return jax.tree.map(lambda grad: jnp.clip(jnp.nan_to_num(grad), -1, 1), grads)


def spoil(grads):
    return grads | {"b": grads["b"] / 0}


each_judged = cases("name, retries", each(JUDGED, [0, 2]), fast=[("tracked", 2)])


@pytest.mark.worlds
@each_judged
def test_a_hook_hides_nothing_and_nothing_of_it_is_hidden(name, retries):
    tx = OPTIMIZERS[name]
    ends = {}
    for hook in (sanitize, None, spoil):
        step = jaxscale.train_step(loss_fn, tx, on_grads=hook, retries=retries)
        compiled_step = jax.jit(step)
        ends[hook] = []
        for batch in (GOOD, OVERFLOW, BAD_LOSS):
            params, opt_state, _ = run(compiled_step, tx.init(PARAMS), [batch])
            metrics = jaxscale.metrics(opt_state) | {"grad_norm": None}
            ends[hook].append(metrics)
            if hook is spoil:
                assert_same_bits(params, PARAMS)
                assert metrics["total_notfinite"] == 1
                assert metrics.get("nonfinite_leaves/b", True)
    assert_same_bits(ends[sanitize], ends[None])


@cases("name", ["tracked", "norm", "largest"])
def test_a_hook_costs_one_more_look_at_what_it_changed(name):
    tx = OPTIMIZERS[name]

    def numbers_read(hook):
        step = jaxscale.train_step(
            lambda *_: jnp.float32(0),
            tx,
            on_grads=UNCHANGING[hook],
            transform=pass_gradients,
        )
        return numbers_reduced(
            jax.make_jaxpr(step)(PARAMS, tx.init(PARAMS), wide(PARAMS))
        )

    numbers = sum(leaf.size for leaf in jax.tree.leaves(PARAMS))
    looks = 2 if name == "largest" else 1
    assert numbers_read("no hook") == 1 + looks * numbers  # 1: the loss
    assert numbers_read("looks") == numbers_read("no hook")
    assert numbers_read("copies") == 1 + 2 * numbers


CARRIED = {
    "scaled": hot(2.0**15),
    "bare": INNERS["adam"],
    "bare window": INNERS["multi_steps"],
    "chained": optax.chain(jaxscale.skip_nonfinite(INNERS["adam"]), optax.identity()),
    **{name: OPTIMIZERS[name] for name in [*WINDOWS, "checked", "switched off"]},
}


# Those that apply every step.
NEVER_SKIPS = {"bare", "bare window", "switched off"}


@pytest.mark.worlds
@pytest.mark.filterwarnings(
    "ignore:.train_step.*(inside of another|is a bare optimizer)"
)
@cases("name", CARRIED, fast=["scaled", "bare window", "chained"])
def test_what_the_loss_makes_of_a_state_goes_by_the_micro_batch(name):
    tx = CARRIED[name]
    step = jaxscale.train_step(counting, tx, has_state=True)
    batches = BATCHES
    if name in NEVER_SKIPS:
        batches = [GOOD, GOOD * 2] * 2
    params, opt_state, state = PARAMS, tx.init(PARAMS), STATE
    for batch in batches:
        params, opt_state, state, _ = step(params, opt_state, state, batch)
    skipped = 0
    if name not in NEVER_SKIPS:
        skipped = jaxscale.metrics(opt_state)["total_notfinite"]
    assert state["n"] == len(batches) - skipped


class Counting(eqx.Module):
    """Holds numbers among its leaves, as a dropout does, in whose places the state has None."""

    w: jax.Array
    calls: eqx.nn.StateIndex
    rate: float = 0.5
    is_off: bool = True

    def __init__(self):
        self.w = jnp.ones(3)
        self.calls = eqx.nn.StateIndex(jnp.array(0))


def test_a_state_of_equinox_is_read_once_and_numbers_in_a_module_stay():
    def loss_fn(model, state, x):
        state = state.set(model.calls, state.get(model.calls) + 1)
        return jnp.mean((model.w * x) ** 2), state

    model, state = eqx.nn.make_with_state(Counting)()
    tx = hot()
    opt_state = tx.init(eqx.filter(model, eqx.is_inexact_array))
    step = jaxscale.train_step(
        loss_fn,
        tx,
        transform=eqx.filter_value_and_grad,
        has_state=True,
        retries=3,
    )
    step = eqx.filter_jit(step)
    for x, calls in ((1.0, 1), (jnp.inf, 1), (2.0, 2)):
        before = model.w
        model, opt_state, state, loss = step(model, opt_state, state, jnp.full(3, x))
        assert state.get(model.calls) == calls
        is_good = x < jnp.inf
        assert jnp.isfinite(loss) == is_good
        assert (model.w != before).all() == is_good
        assert (model.rate, model.is_off) == (0.5, True)


WEAK = {"mean": jnp.asarray(0.5), "count": jnp.asarray(0), "w": jnp.ones(2)}


def test_a_weakly_typed_state_compiles_once():
    def advance(state, number=1):
        """Adds a number to each of the state, in its dtype."""
        return jax.tree.map(lambda old: old + jnp.asarray(number, old.dtype), state)

    def loss_fn(w, state, x):
        return jnp.sum(w * x), advance(state, x[0])

    tx = jaxscale.loss_scaled(optax.sgd(0.1))
    step = jax.jit(jaxscale.train_step(loss_fn, tx, has_state=True))
    state = WEAK
    w = jnp.ones(2)
    opt_state = tx.init(w)
    for x in (jnp.ones(2), jnp.array([1, jnp.inf]), jnp.ones(2)):
        w, opt_state, state, _ = step(w, opt_state, state, x)
        assert avals(state) == avals(WEAK)
    assert step._cache_size() == 1
    assert state["count"] == 2
