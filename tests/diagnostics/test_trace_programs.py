"""Traces of what holds equations: loops, calls, custom derivatives and refs."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import planted
import pytest
from planted import DIFFERENTIATED, HALF, new_ref, scaling, trace
from tables import assert_same_bits, cases

import jaxscale
from jaxscale.diagnostics._trace.backward import TracedBackward
from jaxscale.diagnostics._trace.interpreter import Interpreter, Value
from jaxscale.diagnostics._trace.jaxpr import FORWARD
from jaxscale.diagnostics._trace.places import Constants
from jaxscale.diagnostics._trace.plan import Planner

pytestmark = pytest.mark.standard_promotion


def line(name):
    return planted.marked(name, __file__)


# One function for each way to hold an equation. Each multiplies by a number at a marked line.


def _while(x, factor):
    def body(carry):
        i, x = carry
        return i + 1, x * jnp.where(i == 2, factor, 1).astype(HALF)  # plant: while

    return x + jax.lax.stop_gradient(jax.lax.while_loop(lambda c: c[0] < 4, body, (0, x))[1])


def _cond(x, factor):
    return jax.lax.cond(x[0] > -100, lambda x: x * factor, lambda x: x, x)  # plant: cond


def _remat(x, factor):
    return jax.checkpoint(lambda x: jnp.sin(x * factor))(x)  # plant: remat


def _nested_jit(x, factor):
    return jax.jit(jax.jit(lambda x: x * factor))(x)  # plant: nested_jit


def _nested_scan(x, factor):
    def inner(x, t):
        return x * jnp.where(t == 5, factor, 1).astype(HALF), None  # plant: nested_scan

    times = jnp.arange(6).reshape(2, 3)
    return jax.lax.scan(lambda x, ts: jax.lax.scan(inner, x, ts), x, times)[0]


def _custom_jvp(x, factor):
    @jax.custom_jvp
    def inner(x):
        return x * factor

    @inner.defjvp
    def _(primals, tangents):
        return primals[0] * factor, tangents[0]  # plant: custom_jvp

    return inner(x)


def _custom_vjp(x, factor):
    @jax.custom_vjp
    def inner(x):
        return x * factor

    inner.defvjp(lambda x: (x * factor, None), lambda _, ct: (ct,))  # plant: custom_vjp
    return inner(x)


def _undifferentiated(x, factor):
    @jax.custom_vjp
    def inner(x):
        return x * factor  # plant: undifferentiated

    inner.defvjp(lambda x: (x, None), lambda _, ct: (ct,))
    return x + inner(jax.lax.stop_gradient(x))


def not_differentiated(fun):
    """The function with the derivative of the identity."""

    @functools.wraps(fun)
    def holder(x, factor):
        inner = jax.custom_vjp(lambda x: fun(x, factor))
        inner.defvjp(lambda x: (fun(x, factor), None), lambda _, ct: (ct,))
        return inner(x)

    return holder


@not_differentiated
def _ref(x, factor):
    ref = new_ref(x)
    ref[...] = ref[...] * factor  # plant: ref
    return ref[...]


@not_differentiated
def _ref_in_a_call(x, factor):
    ref = new_ref(x)

    @jax.jit
    def inner(x):
        ref[...] = x * factor  # plant: ref_in_a_call

    inner(x)
    return ref[...]


@not_differentiated
def _ref_in_a_scan(x, factor):
    ref = new_ref(x)

    def body(carry, i):
        before = ref[...]  # nothing else reads what is written
        ref[...] = before * jnp.where(i == 1, factor, 1).astype(HALF)  # plant: ref_in_a_scan
        return carry, before

    return jax.lax.scan(body, 0, jnp.arange(3))[1][2]


@not_differentiated
def _ref_in_a_loop(x, factor):
    ref, rounds = new_ref(x), new_ref(jnp.int32(0))

    def body(i):
        ref[:] *= jnp.where(i == 2, factor, 1).astype(HALF)  # plant: ref_in_a_loop
        rounds[...] += 1
        return i + 1

    jax.lax.while_loop(lambda i: i < 4, body, jnp.int32(0))
    return ref[...] * (rounds[...] == 4).astype(HALF)


HOLDERS = {
    f.__name__.removeprefix("_"): f
    for f in (
        *(_while, _cond, _remat, _nested_jit, _nested_scan),
        *(_custom_jvp, _custom_vjp, _undifferentiated),
        *(_ref, _ref_in_a_call, _ref_in_a_scan, _ref_in_a_loop),
    )
}
ITERATIONS = {"while": (2,), "nested_scan": (1, 2), "ref_in_a_scan": (1,), "ref_in_a_loop": (2,)}


@cases("holder", HOLDERS, fast=["nested_scan"])
def test_an_equation_is_found_inside_of(holder):
    def fun(x, factor):
        return jnp.mean(HOLDERS[holder](x, factor).astype(jnp.float32) ** 2)

    x = jnp.linspace(1, 3, 8, dtype=HALF)
    assert not trace(fun, x, HALF(1)).found
    first = trace(fun, x, HALF(30000)).first_nonfinite
    assert (first.primitive, "loss" in first.reaches) == ("mul", True)
    for place in (first, trace(fun, x, HALF(2.0**-17)).underflows[0]):
        assert (place.line, place.direction) == (line(holder), "forward")
        assert place.iteration == ITERATIONS.get(holder, ())


@cases("holder", HOLDERS, fast=["while"])
def test_a_pass_in_a_hurry_stops_at_the_first_overflow_of_a_full_one(holder):
    def fun(x):
        # Neither is what is looked for: an inf on purpose, and one that no loss scale changes.
        made = jnp.log(jax.lax.stop_gradient(x) * 0)
        masked = jnp.where(x > 2, x, jnp.where(x > 1.5, -jnp.inf, made))
        y = HOLDERS[holder](x, HALF(256)) + jnp.exp(masked)
        return jnp.mean(y.astype(jnp.float32) ** 2)

    backward = TracedBackward(fun, (jnp.linspace(1, 3, 8, dtype=HALF),), {})
    for loss_scale in (2.0**-10, 2.0**3, 2.0**20):
        places = backward.run(loss_scale, is_brief=True).report().nonfinite
        full = [place for place in places if place.scaled and place.cause != "given"]
        found, said = backward.first_overflow(loss_scale), backward.how_far()
        assert bool(found) == bool(full)
        assert said.startswith("operation ")
        if found:
            blank = {"reaches": (), "visits": 0, "times": 0}  # what is behind it is not known
            assert dataclasses.replace(full[0], **blank) == dataclasses.replace(found, **blank)
    assert found


def interpreted(fun, *args):
    """The leaves of what a function returns, run equation by equation."""
    closed = jax.make_jaxpr(fun)(*args)
    needs = (FORWARD,) * len(closed.jaxpr.outvars)
    values = map(Value, jax.tree.leaves(args))
    found = Interpreter(Planner(Constants())).run(closed, list(values), needs)
    return [value.array for value in found]


def _held(x):
    for name, holder in HOLDERS.items():
        x = holder(x, HALF(1.25 if len(name) % 2 else 0.75))
    return jnp.mean(x.astype(jnp.float32) ** 2)


def _small(w):
    return jnp.mean(jnp.tanh(jax.jit(lambda w: w @ w)(w)).astype(jnp.float32))


def _rewritten(w):
    return jnp.sum(jnp.abs(1 / (1 / w) - w)) + jnp.sum((w / 3) * 3 - w)  # XLA may give 0


COMPUTED = {
    _held: lambda: (jnp.linspace(1, 3, 8, dtype=HALF),),
    planted.rnn: planted.rnn_case,
    _small: lambda: (jnp.ones((2, 2), HALF),),
    _rewritten: lambda: (jnp.linspace(1, 3, 64),),
}


@cases("fun", COMPUTED, fast=[_small, _rewritten])
def test_what_it_computes_is_what_eager_evaluation_computes(fun):
    args, graded = COMPUTED[fun](), jaxscale.value_and_grad(fun, scaling(8))
    with jax.disable_jit():
        expected = graded(*args)
    assert_same_bits(interpreted(graded, *args), jax.tree.leaves(expected))
    assert trace(fun, *args, loss_scale=8).loss == float(expected[0])


@pytest.mark.slow
@pytest.mark.skipif(not DIFFERENTIATED, reason="this version of JAX differentiates no refs")
def test_a_ref_has_a_backward_pass():
    def fun(x):
        ref = new_ref(x)

        def body(i, carry):
            ref[i] = ref[i] * jnp.where(i == 2, 4, 1).astype(HALF)  # plant: backward of a ref
            return carry

        jax.lax.fori_loop(0, 8, body, 0)
        jax.ref.addupdate(ref, ..., ref[...])  # plant: sum in a ref
        return jnp.sum(ref[...].astype(jnp.float32))

    x = jnp.arange(1, 9, dtype=HALF)
    assert not trace(fun, x, loss_scale=2.0**12).found
    first = trace(fun, x, loss_scale=2.0**13).first_nonfinite
    assert (first.line, first.direction) == (line("backward of a ref"), "backward")
    assert (first.iteration, first.times, first.visits) == ((2,), 1, 8)
    assert (first.scaled, first.reaches, first.primitive) == (True, ("grads",), "mul")
    # A sum in a ref overflows like any other.
    first = trace(fun, x * 5000, loss_scale=1).first_nonfinite
    assert (first.line, first.primitive) == (line("sum in a ref"), "addupdate")
    assert (first.direction, first.cause) == ("forward", "range")
    assert first.inputs == ("Ref{float16[8]}", "float16[8]")
    graded = jaxscale.value_and_grad(fun, scaling(8))
    assert_same_bits(interpreted(graded, x), list(jax.jit(graded)(x)))
