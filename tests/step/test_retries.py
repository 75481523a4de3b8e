"""Backward passes that are repeated at lower scales: no batch is lost to a scale too high."""

import dataclasses
import functools
import itertools
import operator
from inspect import signature

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from overflowing import BAD_LOSS, FINITE, GOOD, OVERFLOW, WINDOWS, hot, loss_fn, run
from tables import INNERS, PARAMS, POLICIES, assert_same_bits, cases

import jaxscale

pytestmark = pytest.mark.standard_promotion


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

    def told(scaling, finite, largest):
        known = {"largest": largest} if "largest" in signature(policy.adjust).parameters else {}
        return policy.adjust(scaling, jnp.array(finite), **known)

    scaling, passes, exhausted, applied = policy.init(), 0, 0, True
    for x in batches:
        first, number = scaling, 0
        largest, loss = largest_and_loss(scaling, x)
        while not jnp.isfinite(largest) and number < retries:
            lower = scaling
            for _ in range(4):  # as often as it takes a policy with hysteresis
                if not lower.loss_scale < scaling.loss_scale:
                    lower = told(lower, False, largest)
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
            scaling = told(scaling, fits, largest)
        applied = fits
        yield scaling, passes, exhausted


MIXED = [OVERFLOW, POISON, GOOD, POISON, POISON, BAD_LOSS, OVERFLOW, GOOD, GOOD * 2, POISON]
MOVING = [name for name in POLICIES if name not in ("noop", "fixed")]


@cases(
    "policy, retries, mode",
    itertools.product(MOVING, [3, 1, 30], ["eager", "vmap"]),
    fast=[("dynamic", 30, "vmap"), ("hysteresis", 3, "eager"), ("adaptive", 1, "vmap")],
)
def test_a_batch_that_no_scale_helps_costs_one_overflow(policy, retries, mode):
    """In strict promotion, too, which Optax's Adam is not made for."""
    rule = dataclasses.replace(POLICIES[policy], init_scale=2.0**16)
    tx = jaxscale.loss_scaled(optax.sgd(0.0), rule)
    step, init = jaxscale.train_step(poisoned, tx, retries=retries), tx.init(PARAMS)
    runs = [MIXED, MIXED[::-1]] if mode == "vmap" else [MIXED]

    def advance(state, batch):
        state = step(PARAMS, state, batch)[1]
        return state, state

    with jax.numpy_dtype_promotion("strict"):
        if mode == "vmap":
            scanned = jax.vmap(functools.partial(jax.lax.scan, advance, init))
            states = jax.jit(scanned)(jnp.stack([jnp.stack(each) for each in runs]))[1]
            results = [jax.tree.map(operator.itemgetter(i), states) for i in range(len(runs))]
        else:
            states = list(itertools.accumulate([init, *MIXED], lambda *args: advance(*args)[0]))
            results = [jax.tree.map(lambda *leaves: jnp.stack(leaves), *states[1:])]
    for states, batches in zip(results, runs, strict=True):
        scalings, passes, exhausted = zip(*by_the_book(rule, retries, batches), strict=True)
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *scalings)
        assert_same_bits(states.scaling, stacked)
        assert states.total_retries.tolist() == list(passes)
        assert states.total_exhausted.tolist() == list(exhausted)
        assert states.total_exhausted[-1] > 0
        assert states.total_notfinite_loss[-1] == 1


# A policy, and how often a pass is repeated whose gradients are never finite.
ENDS = [
    (jaxscale.DynamicLossScale(init_scale=4.0), 2),
    (jaxscale.DynamicLossScale(init_scale=1.0), 0),  # at its floor
    # Hysteresis that is left does not spare the scale: the same scale would overflow again.
    (jaxscale.DynamicLossScale(init_scale=4.0, hysteresis=7), 2),
    # A policy that tolerates this and more is left alone.
    (jaxscale.DynamicLossScale(init_scale=4.0, hysteresis=1000), 0),
]


@cases("policy, passes", ENDS)
def test_a_scale_that_cannot_be_lowered_is_not_tried_again(policy, passes):
    tx = jaxscale.loss_scaled(optax.sgd(0.1), policy)
    step = jaxscale.train_step(poisoned, tx, retries=20)
    for each in (step, jax.jit(step)):
        params, opt_state, _ = each(PARAMS, tx.init(PARAMS), POISON)
        assert (opt_state.total_retries, opt_state.total_notfinite) == (passes, 1)
        assert_same_bits(params, PARAMS)
        # The policy is told of the overflow once, as without retries.
        assert_same_bits(opt_state.scaling, policy.adjust(policy.init(), jnp.array(False)))


def test_it_counts_the_passes_and_compiles_the_model_once():
    traces, passes = [], []

    def counted(params, x):
        traces.append(x)
        jax.debug.callback(lambda: passes.append(1))
        return loss_fn(params, x)

    step = jax.jit(jaxscale.train_step(counted, hot(), retries=30))
    _, opt_state, _ = run(step, hot().init(PARAMS), FINITE)
    jax.effects_barrier()
    assert len(traces) == step._cache_size() == 1
    assert len(passes) == len(FINITE) + opt_state.total_retries > len(FINITE)


def test_the_model_is_in_the_program_once():
    def product(params, x):
        return jnp.sum(jnp.tanh(params["w"] @ x.astype(params["w"].dtype)) ** 2)

    def program(**retries):
        tx, params = hot(), {"w": jnp.ones((4, 3))}
        step = jax.jit(jaxscale.train_step(product, tx, **retries))
        return step.lower(params, tx.init(params), jnp.ones((3, 2))).as_text()

    without, with_them = program(retries=0), program(retries=5)
    assert without == program()
    assert "stablehlo.while" not in without
    assert "stablehlo.while" in with_them
    for operation in ("dot_general", "tanh"):
        assert with_them.count(f"stablehlo.{operation}") == without.count(f"stablehlo.{operation}")


@cases("window", ["inside", "outside"], fast=["outside"])
def test_no_micro_batch_is_lost(window):
    tx = WINDOWS[window](INNERS["adam"], jaxscale.DynamicLossScale(init_scale=2.0**24))
    step = jax.jit(jaxscale.train_step(loss_fn, tx, retries=30))
    _, opt_state, _ = run(step, tx.init(PARAMS), FINITE)
    assert opt_state.total_notfinite == 0
    assert opt_state.inner_state.gradient_step == len(FINITE) // 2
    assert opt_state.total_retries > 0


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
    assert repeated.pop("text") == "t"
    assert repeated.pop("function") is jnp.sin
    assert int(repeated.pop("number")) == 3
    once = run(2.0**4, 0)[2][1]
    assert_same_bits(repeated, {name: once[name] for name in repeated})


def test_the_count_of_passes_stays_at_its_largest_value():
    most = np.iinfo(np.int32).max
    opt_state = hot().init(PARAMS)._replace(total_retries=jnp.array(most - 1, jnp.int32))
    step = jax.jit(jaxscale.train_step(loss_fn, hot(), retries=30))
    assert step(PARAMS, opt_state, OVERFLOW)[1].total_retries == most


def test_a_hook_gets_true_gradients_in_every_pass():
    seen = []
    step = jaxscale.train_step(loss_fn, hot(), on_grads=lambda g: (seen.append(g), g)[1], retries=9)
    opt_state = run(step, hot(2.0**15).init(PARAMS), [OVERFLOW])[1]
    assert len(seen) == 1 + opt_state.total_retries > 1
    assert not jaxscale.all_finite(seen[0])
    assert_same_bits(seen[-1], jaxscale.grad(loss_fn, opt_state)(PARAMS, OVERFLOW))
    assert {leaf.dtype for leaf in jax.tree.leaves(seen)} == {jnp.dtype("float32")}
