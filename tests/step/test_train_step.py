"""The whole step in one function is the loop of three lines, and may repeat its backward pass."""

import dataclasses
import functools
import itertools
import operator
import re
import warnings
from itertools import product

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import overflowing
import pytest
from jaxprs import numbers_reduced
from methods import given
from overflowing import BAD_LOSS, BATCHES, FINITE, GOOD, OVERFLOW, WINDOWS, hot, loss_fn, run
from tables import INNERS, PARAMS, POLICIES, assert_same_bits, avals, cases, wide
from tables import step as one_step

import jaxscale

pytestmark = pytest.mark.standard_promotion


def of_run(i, trees):
    return jax.tree.map(operator.itemgetter(i), trees)


# Hooks that change no number: none, one that only looks, one that makes other arrays of them.
UNCHANGING = [None, lambda grads: dict(grads), lambda grads: jax.tree.map(lambda g: g * 1, grads)]
OPTIMIZERS = {
    f"{policy}, {inner}": jaxscale.loss_scaled(INNERS[inner], POLICIES[policy])
    for policy, inner in product(POLICIES, INNERS)
} | overflowing.OPTIMIZERS
OPTIMIZERS["largest"] = jaxscale.loss_scaled(INNERS["adam"], POLICIES["adaptive"], max_norm=1.0)
OPTIMIZERS["inside of another"] = optax.named_chain(
    ("scaled", jaxscale.loss_scaled(INNERS["adam"]))
)


BARE = r"`train_step`: `tx` is a bare optimizer.*loss_scaled\(tx\).*skip_nonfinite=False"
INSIDE = r"`train_step`.*inside of another.*outermost"


@cases("name", OPTIMIZERS, fast=["dynamic, adam", "tracked", "inside of another"])
def test_it_is_the_loop_of_three_lines(name):
    tx, batches = OPTIMIZERS[name], BATCHES[:2] if name == "switched off" else BATCHES

    def three_lines(params, opt_state, x):
        loss, grads = jaxscale.value_and_grad(loss_fn, opt_state)(params, x)
        return *one_step(tx, params, opt_state, grads, value=loss), loss

    def trained(step):
        if name != "axis":
            return run(step, tx.init(PARAMS), batches)
        mapped = jax.vmap(step, (None, None, 0), axis_name="devices", axis_size=2)
        pairs = [jnp.stack([batch, GOOD]) for batch in batches]
        return run(lambda *args: of_run(0, mapped(*args)), tx.init(PARAMS), pairs)

    # Bit for bit where each operation runs by itself.
    expected = trained(three_lines)
    for hook in UNCHANGING if name in overflowing.OPTIMIZERS else UNCHANGING[:1]:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            assert_same_bits(trained(jaxscale.train_step(loss_fn, tx, on_grads=hook)), expected)
        told = [each for each in found if re.match(INSIDE, str(each.message))]
        assert len(told) == len(found) == len(batches) * (name == "inside of another")
    if name != "switched off":
        seen = jaxscale.metrics(expected[1])
        assert seen["total_notfinite"] >= seen["total_notfinite_loss"] > 0


@cases("inner", INNERS, fast=["sgd", "masked"])
def test_a_bare_optimizer_applies_every_step_and_is_warned_of_once(inner):
    tx = INNERS[inner]
    bare = tx.gradient_transformation() if isinstance(tx, optax.MultiSteps) else tx

    def plain(params, opt_state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        return *one_step(bare, params, opt_state, grads), loss

    # Whoever says that it is meant gets no warning.
    meant = jaxscale.loss_scaled(bare, None, skip_nonfinite=False)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        step = jaxscale.train_step(loss_fn, tx)
        # Some need the parameters to say that they hold no loss scale.
        assert len(found) == (inner not in ("masked", "multi_transform"))
        step(PARAMS, tx.init(PARAMS), GOOD)
        ours = run(step, tx.init(PARAMS))
        as_meant = run(jaxscale.train_step(loss_fn, meant), meant.init(PARAMS))
    (only,) = found
    assert re.match(BARE, str(only.message))
    assert only.filename == __file__
    assert_same_bits(ours, run(plain, bare.init(PARAMS)))
    assert not any(map(jaxscale.all_finite, (ours[0], as_meant[0])))


def test_a_step_asks_init_only_for_parameters_of_other_types():
    asked, adam = [], INNERS["adam"]
    adam = adam._replace(init=lambda params: (asked.append(params), INNERS["adam"].init(params))[1])
    tx = jaxscale.loss_scaled(adam)
    opt_state, step = tx.init(PARAMS), jaxscale.train_step(loss_fn, tx)
    step(PARAMS, opt_state, GOOD)
    assert len(asked) == 1
    with pytest.raises(ValueError, match="of another optimizer or of other parameters"):
        step(jax.tree.map(lambda leaf: leaf[None], PARAMS), opt_state, GOOD)
    assert len(asked) == 2


KEYS = jax.random.split(jax.random.key(0))
STATE = {"key": KEYS[0], "n": jnp.array(0), "bad": jnp.zeros(()), "none": None, "text": "as it is"}


def counting(params, state, x):
    """A loss with state, which counts the forward passes and is NaN where the loss is."""
    loss = loss_fn(params, x)
    return loss, state | {"key": KEYS[1], "n": state["n"] + 1, "bad": 0 * loss}


OUTPUTS = {
    # (has_state, has_aux): a loss function
    (False, True): lambda p, x: (loss_fn(p, x), {"x": x, "text": "aux", "none": None}),
    (True, False): counting,
    (True, True): lambda p, s, x: (loss_fn(p, x), (counting(p, s, x)[1], {"x": x})),
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
        n = opt_state.total_steps - opt_state.total_notfinite
        counted = [STATE | {"key": KEYS[1], "n": n}]
        assert_same_bits(*(eqx.filter(each, eqx.is_array) for each in (state, counted)))


# Hooks

JUDGED = [*WINDOWS, "norm", "checked", "tracked", "largest"]


@cases("name, retries", product(JUDGED, [0, 2]), fast=[("tracked", 2)])
def test_a_hook_hides_nothing_and_nothing_of_it_is_hidden(name, retries):
    tx, sanitized = OPTIMIZERS[name], lambda grad: jnp.clip(jnp.nan_to_num(grad), -1, 1)
    hooks = functools.partial(jax.tree.map, sanitized), lambda grads: grads | {"b": grads["b"] / 0}
    plain, hiding, spoiling = (
        jax.jit(jaxscale.train_step(loss_fn, tx, on_grads=hook, retries=retries))
        for hook in (None, *hooks)
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
    tx, numbers = OPTIMIZERS[name], sum(leaf.size for leaf in jax.tree.leaves(PARAMS))
    steps = (
        jaxscale.train_step(lambda *_: jnp.float32(0), tx, on_grads=hook, transform=given)
        for hook in UNCHANGING
    )
    none, looks, changes = (
        numbers_reduced(jax.make_jaxpr(step)(PARAMS, tx.init(PARAMS), wide(PARAMS)))
        for step in steps
    )
    assert none == looks == 1 + numbers * (2 if name == "largest" else 1)  # 1: the loss
    assert changes == 1 + 2 * numbers


def averages(params, state):
    """A moving average of the parameters, and a count, both exact."""
    mean = jax.tree.map(lambda m, p: m / 2 + p.astype(m.dtype) / 2, state["mean"], params)
    return state | {"mean": mean, "count": state["count"] + 1}


AVERAGED = {
    "scaled": hot(2.0**15),
    "bare": INNERS["adam"],
    "bare window": INNERS["multi_steps"],
    "chained": optax.chain(jaxscale.skip_nonfinite(INNERS["adam"]), optax.identity()),
    **{name: OPTIMIZERS[name] for name in [*WINDOWS, "checked", "switched off"]},
}


@pytest.mark.filterwarnings("ignore:.train_step.*(inside of another|is a bare optimizer)")
@cases("name", AVERAGED, fast=["scaled", "bare window", "chained"])
def test_after_counts_where_the_optimizer_made_a_step(name):
    tx, never_skips = AVERAGED[name], "bare" in name or name == "switched off"
    step = jaxscale.train_step(counting, tx, has_state=True, after=averages)
    batches = [GOOD, GOOD * 2] * 2 if never_skips else BATCHES
    expected = state = STATE | {"mean": wide(PARAMS), "count": jnp.array(0)}
    params, opt_state = PARAMS, tx.init(PARAMS)
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
    assert state["n"] == len(batches) - skipped


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


# Retries: no batch is lost to a scale too high.

POISON = jnp.full(3, jnp.inf)


def poisoned(params, x):
    """A loss that is finite with this batch, and whose gradients are NaN at every scale."""
    gates = jnp.tanh(params["w"] * x)
    return loss_fn(params, jnp.where(jnp.isinf(x), 1.0, x)) + jnp.sum(gates)


@jax.jit
def largest_and_loss(scaling, x):
    grads = jax.tree.leaves(jaxscale.grad(poisoned, scaling)(PARAMS, x))
    largest = jnp.max(jnp.stack([jnp.max(jnp.abs(g.astype(jnp.float32))) for g in grads]))
    return largest, poisoned(PARAMS, x)


def by_the_book(policy, retries, batches):
    """The states of a policy and the counts after each step with retries, in plain Python."""
    scaling, passes, exhausted, applied = policy.init(), 0, 0, True
    for x in batches:
        first, number = scaling, 0
        largest, loss = largest_and_loss(scaling, x)
        while not jnp.isfinite(largest) and number < retries:
            lower = scaling
            for _ in range(100):  # as often as it takes a policy with hysteresis, up to a limit
                if not lower.loss_scale < scaling.loss_scale:
                    lower = policy.adjust(lower, jnp.array(False), largest)
            if not jnp.isfinite(loss) or lower.loss_scale >= scaling.loss_scale:
                break
            scaling, number = lower, number + 1
            largest, loss = largest_and_loss(scaling, x)
        passes += number
        fits = bool(jnp.isfinite(largest))
        # A row of the first 25 steps counts once.
        exhausted += number > 0 and not fits and applied
        if not fits:
            scaling = first
        if jnp.isfinite(loss):
            scaling = policy.adjust(scaling, jnp.array(fits), largest)
        applied = fits
        yield scaling, jnp.int32(passes), jnp.int32(exhausted)


MIXED = [OVERFLOW, POISON, GOOD, POISON, POISON, BAD_LOSS, OVERFLOW, GOOD, GOOD * 2, POISON]
RULES = {
    **{
        name: dataclasses.replace(POLICIES[name], init_scale=2.0**16) for name in list(POLICIES)[2:]
    },
    "low": jaxscale.DynamicLossScale(init_scale=4.0),
    "at its floor": jaxscale.DynamicLossScale(init_scale=1.0),
    # Hysteresis that is left does not spare the scale: the same scale would overflow again.
    "patient": jaxscale.DynamicLossScale(init_scale=4.0, hysteresis=7),
    # A policy that tolerates this and more is left alone.
    "left alone": jaxscale.DynamicLossScale(init_scale=4.0, hysteresis=1000),
}


@cases(
    "policy, retries, mode",
    product(RULES, [3, 1, 30], ["eager", "vmap"]),
    fast=[("hysteresis", 3, "eager"), ("adaptive", 1, "vmap")]
    + [(name, 30, "vmap") for name in RULES if name not in ("hysteresis", "adaptive")],
)
def test_a_batch_that_no_scale_helps_costs_one_overflow(policy, retries, mode):
    """In strict promotion, too, which Optax's Adam is not made for."""
    rule = RULES[policy]
    tx = jaxscale.loss_scaled(optax.sgd(0.0), rule)
    step, init = jaxscale.train_step(poisoned, tx, retries=retries), tx.init(PARAMS)
    runs = [MIXED, MIXED[::-1]] if mode == "vmap" else [MIXED]

    def advance(state, batch):
        state = step(PARAMS, state, batch)[1]
        return state, state

    with jax.numpy_dtype_promotion("strict"):
        if mode == "vmap":
            scanned = jax.jit(jax.vmap(functools.partial(jax.lax.scan, advance, init)))
            states = scanned(jnp.stack(list(map(jnp.stack, runs))))[1]
        else:
            states = itertools.accumulate([init, *MIXED], lambda *args: advance(*args)[0])
            states = jax.tree.map(lambda *leaves: jnp.stack(leaves)[None, 1:], *states)
    for i, batches in enumerate(runs):
        got, expected = of_run(i, states), by_the_book(rule, retries, batches)
        assert_same_bits(
            (got.scaling, got.total_retries, got.total_exhausted),
            jax.tree.map(lambda *leaves: jnp.stack(leaves), *expected),
        )
        assert (got.total_exhausted[-1] == 0) == (policy in ("at its floor", "left alone"))
        assert got.total_notfinite_loss[-1] == 1


@cases("window", [None, "inside", "outside"], fast=[None, "outside"])
def test_it_counts_the_passes_compiles_the_model_once_and_loses_no_batch(window):
    policy, traces, passes = jaxscale.DynamicLossScale(init_scale=2.0**24), [], []
    tx = WINDOWS[window](INNERS["adam"], policy) if window else hot()

    def counted(params, x):
        traces.append(jax.debug.callback(lambda: passes.append(1)))
        return loss_fn(params, x)

    step = jax.jit(jaxscale.train_step(counted, tx, retries=30))
    _, opt_state, _ = run(step, tx.init(PARAMS), FINITE)
    jax.effects_barrier()
    assert len(traces) == step._cache_size() == 1
    assert len(passes) == len(FINITE) + opt_state.total_retries > len(FINITE)
    assert opt_state.total_notfinite == 0
    assert window is None or opt_state.inner_state.gradient_step == len(FINITE) // 2


def test_the_model_is_in_the_program_once():
    def program(**retries):
        step = jaxscale.train_step(lambda w, x: jnp.sum(jnp.tanh(w @ x) ** 2), hot(), **retries)
        w = jnp.ones((4, 3))
        return jax.jit(step).lower(w, hot().init(w), jnp.ones((3, 2))).as_text()

    without, with_them = program(retries=0), program(retries=5)
    assert without == program()
    assert "stablehlo.while" not in without
    assert "stablehlo.while" in with_them
    for operation in ("dot_general", "tanh"):
        assert with_them.count(f"stablehlo.{operation}") == without.count(f"stablehlo.{operation}")


@cases("mode", ["jit", "eager"], fast=["jit"])
def test_parameters_and_outputs_of_any_type_go_round(mode):
    rest = {"n": jnp.arange(3), "flag": jnp.array(True), "key": jax.random.key(7), "none": None}
    params = PARAMS | rest
    inner = optax.masked(optax.sgd(0.1), {name: name in PARAMS for name in params})

    def fun(params, x):
        aux = {"key": jax.random.key(1), "int": x.astype(jnp.int8), "text": "t", "complex": x * 1j}
        aux |= {"number": 3, "none": None, "function": jnp.sin, "empty": jnp.zeros((0, 2))}
        noise = jax.random.normal(params["key"]) * params["n"][0] * params["flag"]
        return loss_fn({name: params[name] for name in PARAMS}, x + noise), aux

    def run(scale, retries, batch=GOOD):
        tx = jaxscale.loss_scaled(inner, jaxscale.DynamicLossScale(init_scale=scale))
        step = jaxscale.train_step(fun, tx, has_aux=True, retries=retries, allow_int=True)
        step = eqx.filter_jit(step) if mode == "jit" and retries else step
        return step(params, tx.init(params), batch)

    new, opt_state, (_, repeated) = run(2.0**24, 30)
    assert opt_state.total_retries > opt_state.total_notfinite == 0
    assert_same_bits({name: new[name] for name in rest}, rest)
    assert not np.array_equal(new["w"], params["w"])
    assert_same_bits(run(2.0**24, 30, BAD_LOSS)[0], params)
    assert [repeated.pop(name) for name in ("text", "function", "number")] == ["t", jnp.sin, 3]
    once = run(2.0**4, 0)[2][1]
    assert_same_bits(repeated, {name: once[name] for name in repeated})


def test_counters_stay_at_their_largest_value():
    most, state = jnp.array(np.iinfo(np.int32).max), hot().init(PARAMS)
    names = {name: most for name, leaf in state._asdict().items() if avals(leaf) == "int32[]"}
    state = state._replace(**names | {"total_retries": most - 1})
    step = jax.jit(jaxscale.train_step(poisoned, hot(), retries=3))
    for batch in (POISON, BAD_LOSS):
        state = step(PARAMS, state, batch)[1]
        assert_same_bits({name: getattr(state, name) for name in names}, names)


def test_a_hook_gets_true_gradients_in_every_pass():
    seen = []
    step = jaxscale.train_step(loss_fn, hot(), on_grads=lambda g: (seen.append(g), g)[1], retries=9)
    opt_state = run(step, hot(2.0**15).init(PARAMS), [OVERFLOW])[1]
    assert len(seen) == 1 + opt_state.total_retries > 1
    assert not jaxscale.all_finite(seen[0])
    assert_same_bits(seen[-1], jaxscale.grad(loss_fn, opt_state)(PARAMS, OVERFLOW))
    assert {leaf.dtype for leaf in jax.tree.leaves(seen)} == {jnp.dtype("float32")}


WEAK = {
    "zeros": jnp.asarray(0.0),
    "an integer": jnp.asarray(1),
    "a tree": {"mean": jnp.asarray(0.5), "count": jnp.asarray(0), "w": jnp.ones(2)},
}


@pytest.mark.standard_promotion
@cases("name", WEAK)
def test_a_weakly_typed_state_compiles_once(name):
    strong = jax.tree.map(lambda leaf: jnp.array(leaf, jnp.asarray(leaf).dtype), WEAK[name])

    def loss_fn(w, state, x):
        new = jax.tree.map(
            lambda old: jax.lax.convert_element_type(old + jnp.sum(x), old.dtype), state
        )
        return jnp.sum(w * x), new

    def moved(params, state):
        return jax.tree.map(lambda old: old + jnp.ones((), old.dtype), state)

    tx = jaxscale.loss_scaled(optax.sgd(0.1))
    for after in (None, moved):
        step = jax.jit(jaxscale.train_step(loss_fn, tx, has_state=True, after=after))
        runs = []
        for state in (WEAK[name], strong):
            w, opt_state = jnp.ones(2), tx.init(jnp.ones(2))
            for x in (jnp.ones(2), jnp.array([1, jnp.inf]), jnp.ones(2)):
                types = avals(state)
                w, opt_state, state, _ = step(w, opt_state, state, x)
                assert avals(state) == types
            runs.append(state)
        assert step._cache_size() == 2  # once for each of the two
        jax.tree.map(np.testing.assert_array_equal, *runs)
