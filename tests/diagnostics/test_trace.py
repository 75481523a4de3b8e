"""The trace of a backward pass: it names the line where numbers get lost, and only that."""

import dataclasses
import functools
import itertools

import jax
import jax.experimental
import jax.export
import jax.numpy as jnp
import numpy as np
import planted
import pytest
from jax.experimental import pallas
from tables import assert_same_bits, cases

import jaxscale
from jaxscale import diagnostics
from jaxscale.diagnostics._trace.backward import TracedBackward
from jaxscale.diagnostics._trace.interpreter import Interpreter, Value
from jaxscale.diagnostics._trace.jaxpr import FORWARD
from jaxscale.diagnostics._trace.plan import Planner

pytestmark = pytest.mark.standard_promotion

HALF = jnp.float16
DIFFERENTIATED = hasattr(jax, "new_ref")  # newer versions of JAX differentiate refs
new_ref = jax.new_ref if DIFFERENTIATED else jax.experimental.mutable_array


def scaling(loss_scale=2.0**15):
    return jaxscale.FixedLossScale(loss_scale).init()


def trace(fun, *args, loss_scale=2.0**15, **kwargs):
    return diagnostics.trace(fun, scaling(loss_scale), **kwargs)(*args)


def line(name):
    return planted.marked(name, __file__)


def trace_model(model, plant, loss_scale):
    fun = functools.partial(getattr(planted, model), plant=plant)
    args = getattr(planted, f"{model}_case")(*[plant] * (model == "convnet"))
    return trace(fun, *args, loss_scale=loss_scale, has_aux=model == "convnet")


MODELS = ["transformer", "convnet", "rnn"]


@pytest.mark.slow
@cases(("model", "loss_scale"), itertools.product(MODELS, [1, 2.0**15]))
def test_nothing_is_found_in_a_healthy_model(model, loss_scale):
    report = trace_model(model, None, loss_scale)
    assert not report.found
    assert report.first_nonfinite is None
    assert str(report).startswith("nothing found: ")


@cases("model", MODELS, fast=["rnn"])
def test_an_overflow_of_the_forward_pass_is_found_at_its_line(model):
    report = trace_model(model, "overflow", 1)
    first = report.first_nonfinite
    assert (first.file, first.line) == (planted.__file__, planted.marked(f"{model}, overflow"))
    assert first.source.endswith(f"# plant: {model}, overflow")
    assert (first.direction, first.scaled, first.cause) == ("forward", False, "range")
    assert (first.dtype, first.elements) == ("float16", first.share * np.prod(first.shape))
    # The hyperbolic tangent of inf is 1: in the RNN the inf becomes a finite, wrong number.
    assert ("loss" in first.reaches) == (model != "rnn")
    # The causal mask, of -inf on purpose, is in the loss too, and not to blame.
    assert "given" not in {place.cause for place in report.nonfinite}


@cases("model", MODELS, fast=["rnn"])
def test_an_overflow_of_the_backward_pass_is_found_at_its_line_and_goes_with_the_scale(model):
    first = trace_model(model, "backward", 2.0**15).first_nonfinite
    assert (first.file, first.line) == (planted.__file__, planted.marked(f"{model}, backward"))
    assert (first.direction, first.scaled, first.cause) == ("backward", True, "range")
    assert first.reaches
    assert "loss" not in first.reaches
    assert not trace_model(model, "backward", 1).found


@cases("model", MODELS, fast=["rnn"])
def test_an_underflow_is_found_at_its_line_in_both_passes(model):
    report = trace_model(model, "underflow", 1)
    here = [u for u in report.underflows if u.line == planted.marked(f"{model}, underflow")]
    assert report.underflows[0] == here[0]
    assert {(u.direction, u.scaled) for u in here} == {("forward", False), ("backward", True)}
    assert all(u.share > 0.5 and u.file == planted.__file__ for u in here)
    assert not report.nonfinite
    # A higher scale helps the backward pass, and nothing else.
    scaled = trace_model(model, "underflow", 2.0**15)
    here = [u for u in scaled.underflows if u.line == planted.marked(f"{model}, underflow")]
    assert "forward" in {u.direction for u in here}
    assert sum(u.scaled for u in scaled.underflows) < sum(u.scaled for u in report.underflows)


@pytest.mark.slow
def test_a_place_in_a_layer_of_flax_has_its_line_in_the_model_and_its_name():
    first = trace_model("convnet", "layer", 1).first_nonfinite
    assert (first.file, first.line) == (planted.__file__, planted.marked("convnet, layer"))
    assert (first.layer, first.primitive) == ("ConvNet/Dense_0", "dot_general")


@cases(
    ("plant", "step"),
    [("overflow", 3), ("backward", 2), ("underflow", 1)],
    fast=[("backward", 2)],
)
def test_a_place_in_a_scan_has_its_iteration(plant, step):
    report = trace_model("rnn", plant, 2.0**15)
    place = report.first_nonfinite or report.underflows[0]
    assert (place.iteration, place.times, place.visits) == ((step,), 1, 5)


def masked(scores):
    causal = jnp.tri(4, dtype=bool)
    weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf))
    scores = jnp.where(causal & (jnp.arange(4) > 0), weights, -jnp.inf)
    return jnp.sum(jax.nn.softmax(scores).astype(jnp.float32))  # plant: masked row


@cases("is_model", [True, False], fast=[False])
def test_a_row_that_is_masked_throughout_is_found_and_other_masks_are_not(is_model):
    report = (
        trace_model("transformer", "masked row", 1)
        if is_model
        else trace(masked, jnp.ones(4, HALF), loss_scale=1)
    )
    first = report.first_nonfinite
    marked = planted.marked("transformer, masked row") if is_model else line("masked row")
    assert (first.line, first.cause, first.primitive) == (marked, "infinities", "sub")
    assert {place.cause for place in report.nonfinite} == {"infinities", "given"}


# One function for each way to hold an equation. Each multiplies by a number at a marked line.


def _while(x, factor):
    def body(carry):
        i, x = carry
        return i + 1, x * jnp.where(i == 2, factor, 1).astype(HALF)  # plant: while

    return x + jax.lax.stop_gradient(jax.lax.while_loop(lambda c: c[0] < 4, body, (0, x))[1])


def _cond(x, factor):
    def yes(x):
        return x * factor  # plant: cond

    return jax.lax.cond(x[0] > -100, yes, lambda x: x, x)


def _remat(x, factor):
    @jax.checkpoint
    def inner(x):
        return jnp.sin(x * factor)  # plant: remat

    return inner(x)


def _nested_jit(x, factor):
    @jax.jit
    def inner(x):
        return jax.jit(lambda x: x * factor)(x)  # plant: nested_jit

    return jax.jit(inner)(x)


def _vmap(x, factor):
    return jax.vmap(lambda x: x * factor)(x)  # plant: vmap


def _nested_scan(x, factor):
    def inner(x, t):
        return x * jnp.where(t == 5, factor, 1).astype(HALF), None  # plant: nested_scan

    def outer(x, ts):
        return jax.lax.scan(inner, x, ts)

    return jax.lax.scan(outer, x, jnp.arange(6).reshape(2, 3))[0]


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

    def forward(x):
        return x * factor, None  # plant: custom_vjp

    inner.defvjp(forward, lambda _, ct: (ct,))
    return inner(x)


def _undifferentiated(x, factor):
    @jax.custom_vjp
    def inner(x):
        return x * factor  # plant: undifferentiated

    inner.defvjp(lambda x: (x, None), lambda _, ct: (ct,))
    return x + inner(jax.lax.stop_gradient(x))


def _not_differentiated(fun):
    """The function with the derivative of the identity."""

    @functools.wraps(fun)
    def holder(x, factor):
        inner = jax.custom_vjp(lambda x: fun(x, factor))
        inner.defvjp(lambda x: (fun(x, factor), None), lambda _, ct: (ct,))
        return inner(x)

    return holder


@_not_differentiated
def _ref(x, factor):
    ref = new_ref(x)
    ref[...] = ref[...] * factor  # plant: ref
    return ref[...]


@_not_differentiated
def _ref_in_a_call(x, factor):
    ref = new_ref(x)

    @jax.jit
    def inner(x):
        ref[...] = x * factor  # plant: ref_in_a_call

    inner(x)
    return ref[...]


@_not_differentiated
def _ref_in_a_scan(x, factor):
    ref = new_ref(x)

    def body(carry, i):
        before = ref[...]  # nothing else reads what is written
        ref[...] = before * jnp.where(i == 1, factor, 1).astype(HALF)  # plant: ref_in_a_scan
        return carry, before

    return jax.lax.scan(body, 0, jnp.arange(3))[1][2]


@_not_differentiated
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
        *(_while, _cond, _remat, _nested_jit, _vmap, _nested_scan),
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
    assert (first.line, first.direction, first.primitive) == (line(holder), "forward", "mul")
    assert first.iteration == ITERATIONS.get(holder, ())
    assert "loss" in first.reaches
    underflow = trace(fun, x, HALF(2.0**-17)).underflows[0]
    assert (underflow.line, underflow.direction) == (line(holder), "forward")
    assert underflow.iteration == ITERATIONS.get(holder, ())


@cases("holder", HOLDERS, fast=["while"])
def test_a_pass_in_a_hurry_stops_at_the_first_overflow_of_a_full_one(holder):
    def fun(x):
        masked = jnp.where(x > 2, x, -jnp.inf)  # on purpose, and not the first
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


def test_how_far_a_pass_is_is_told_while_it_runs():
    def fun(x):
        y, _ = jax.lax.scan(lambda y, _: (jnp.sin(y), None), x, None, length=3)
        y += jax.lax.stop_gradient(jax.lax.while_loop(lambda y: y[0] < 4, lambda y: y + 1, y))
        return jnp.mean(y.astype(jnp.float32))

    backward, said = TracedBackward(fun, (jnp.ones(2, HALF),), {}), []
    for _ in range(2):
        backward.run(1.0, look=lambda visit: said.append(backward.how_far()))
    inside = [words for words in said if "iteration" in words]
    scanned = [words.split("iteration ")[1][:6] for words in inside if " of 3 at " in words]
    steps = ["1 of 3", "2 of 3", "3 of 3"]
    assert [
        step for step, _ in itertools.groupby(scanned)
    ] == steps * 4  # also if it runs in reverse
    assert any(" of 3 at " not in words for words in inside)  # a loop without a known end
    assert all("test_trace.py:" in words for words in inside)
    assert ["of about" in said[0], said[-1]] == [
        False,
        f"operation {(n := len(said) // 2)} of about {n}",
    ]


def test_a_custom_backward_rule_is_found_at_the_line_of_the_call():
    @jax.custom_vjp
    def inner(x):
        return x

    inner.defvjp(lambda x: (x, None), lambda _, ct: (ct * HALF(2),))

    def fun(x):
        return jnp.sum(inner(x).astype(jnp.float32))  # plant: backward rule

    assert not trace(fun, jnp.ones(8, HALF), loss_scale=2.0**14).found
    first = trace(fun, jnp.ones(8, HALF), loss_scale=2.0**15).first_nonfinite
    assert (first.line, first.direction) == (line("backward rule"), "backward")
    assert (first.primitive, first.share) == ("mul", 1)


def test_functions_of_the_library_have_the_lines_of_their_own_calls():
    # JAX caches the trace of `jnp.where`, with the line of its first call.
    def mask(x, keep):
        x = jnp.where(keep, x, -1e9)  # plant: first call
        return jnp.where(keep, jnp.exp(x), -1e9)  # plant: second call

    def fun(x, keep):
        return jnp.sum(jnp.where(keep, mask(x, keep), 0).astype(jnp.float32))

    report = trace(fun, jnp.ones(4, HALF), jnp.arange(4) > 1, loss_scale=1)
    assert [p.line for p in report.nonfinite] == [line("first call"), line("second call")]
    assert all(place.reaches == () for place in report.nonfinite)
    assert "became finite" in str(report)


def _held(x):
    for name, holder in HOLDERS.items():
        x = holder(x, HALF(1.25 if len(name) % 2 else 0.75))
    return jnp.mean(x.astype(jnp.float32) ** 2)


COMPUTED = {
    "held": lambda: (_held, (jnp.linspace(1, 3, 8, dtype=HALF),)),
    "rnn": lambda: (planted.rnn, planted.rnn_case()),
}


@cases("name", COMPUTED, fast=["rnn"])
def test_what_it_computes_is_what_eager_evaluation_computes(name):
    fun, args = COMPUTED[name]()
    graded = jaxscale.value_and_grad(fun, scaling(8))
    closed, shapes = jax.make_jaxpr(graded, return_shape=True)(*args)
    interpreter = Interpreter(Planner())
    needs = (FORWARD,) * len(closed.jaxpr.outvars)
    values = interpreter.run(closed, [Value(leaf) for leaf in jax.tree.leaves(args)], needs)
    actual = jax.tree.unflatten(jax.tree.structure(shapes), [value.array for value in values])
    with jax.disable_jit():
        expected = graded(*args)
    assert_same_bits(actual, expected)
    assert trace(fun, *args, loss_scale=8).loss == float(expected[0])


# Programs with parts that never run, or with refs. Each returns x.


def _identity_derivative(fun):
    return lambda x: _not_differentiated(lambda x, _: fun(x))(x, None)


def _scan_of_nothing(x):
    # Nothing needs what it stacks or scans.
    return jax.lax.scan(lambda c, t: (c * 2, t + c.sum()), x, jnp.zeros((0, 3), HALF))[0]


def _scan_of_no_keys(x):
    keys = jax.random.split(jax.random.key(0), 3)[:0]
    x, (keys, stacked) = jax.lax.scan(lambda c, key: (c * 2, (key, c)), x, keys)
    return x + stacked.sum() + jax.random.key_data(keys).sum().astype(HALF)


def _scans_of_nothing_in_a_scan(x):
    def body(x, t):
        x, stacked = jax.lax.scan(lambda c, _: (c * 2, c), x, length=0)
        return x * t, stacked

    x, stacked = jax.lax.scan(body, x, jnp.array([2, 0.25], HALF))
    return 2 * x + stacked.sum()


@_identity_derivative
def _scan_of_no_rows_of_a_ref(x):
    ref, rows = new_ref(x), new_ref(jnp.zeros((0, 8), HALF))

    def body(carry, row):
        ref[...] = row[...]
        return carry, None

    jax.lax.scan(body, 0, rows)
    return ref[...]


def _while_of_no_rounds(x):
    start = (jnp.int32(0), jax.lax.stop_gradient(x))
    same = jax.lax.while_loop(lambda c: c[0] < 0, lambda c: (c[0] - 1, c[1] * 2), start)[1]
    return 2 * x - same


def _fori_of_no_rounds(x):
    return jax.lax.fori_loop(3, 3, lambda _, x: x * 2, x)


def _empty_arrays(x):
    empty = x[:0]
    products = jnp.zeros((8, 0), HALF) @ empty
    return jnp.concatenate([x, empty / empty]) + empty.sum() + products


def _branch_past_the_last(x):
    return jax.lax.switch(jnp.int32(7), [lambda x: x * 2, lambda x: x], x)


def _branch_before_the_first(x):
    return jax.lax.switch(jnp.int32(-7), [lambda x: x, lambda x: x * 2], x)


@_identity_derivative
def _rows_of_a_ref(x):
    ref = new_ref(x.reshape(4, 2))

    def body(factor, row):
        row[0] = row[0] * factor
        return factor * 2, None

    jax.lax.scan(body, HALF(0.5), ref, reverse=True)
    return ref[...].reshape(8) * jnp.array([0.25, 1, 0.5, 1, 1, 1, 2, 1], HALF)


@_identity_derivative
def _keys_in_a_ref(x):
    ref = new_ref(jax.random.split(jax.random.key(0), 2))
    ref[0] = ref[1]
    return x * (jax.random.bits(ref[0]) == jax.random.bits(ref[1])).astype(HALF)


@_identity_derivative
def _ref_that_held_nan(x):
    ref = new_ref(jnp.full(8, jnp.nan, HALF))
    ref[:4], ref[4:] = x[:4], x[4:]
    return ref[...]


@_identity_derivative
def _ref_from_outside(x):
    OUTSIDE[0] += 1

    @jax.jit
    def inner():
        OUTSIDE[1] = OUTSIDE[0] / 4

    inner()
    return x * OUTSIDE[1] * 2


@_identity_derivative
def _ref_that_held_nothing(x):
    ref = jax.empty_ref(jax.typeof(x))
    ref[...] = x
    return ref[...]


@_identity_derivative
def _run_state(x):
    def double(refs):
        refs[1][...] = refs[0][...] * 2
        refs[0][0] = refs[0][1]

    x, doubled = pallas.run_state(double)((x, jnp.zeros(8, HALF)))
    return doubled - x.at[0].add(-1)


@_identity_derivative
def _shape_of_symbols(x):
    (size,) = jax.export.symbolic_shape("size")
    doubled = jax.export.export(jax.jit(lambda x: x * 2))
    return doubled(jax.ShapeDtypeStruct((size,), HALF)).call(x) - x


OUTSIDE = new_ref(jnp.ones(2, HALF))
REFS = "rows_of_a_ref keys_in_a_ref ref_that_held_nan ref_from_outside run_state shape_of_symbols"
REFS += " ref_that_held_nothing" * hasattr(jax, "empty_ref")
IDENTITIES = {
    name: globals()[f"_{name}"]
    for name in (
        "scan_of_nothing scan_of_no_keys scans_of_nothing_in_a_scan scan_of_no_rows_of_a_ref "
        "while_of_no_rounds fori_of_no_rounds empty_arrays branch_past_the_last "
        f"branch_before_the_first {REFS}"
    ).split()
}


@cases("name", IDENTITIES, fast=["scans_of_nothing_in_a_scan", "rows_of_a_ref"])
def test_the_rest_of_a_program_is_reported(name):
    def fun(x):
        y = IDENTITIES[name](x).astype(jnp.float32) * 2.0**-23
        return jnp.sum(y.astype(HALF).astype(jnp.float32))  # plant: rest

    x = jnp.arange(1, 9, dtype=HALF)
    report = trace(fun, x, loss_scale=2.0**10)
    assert report.loss == 36 * 2.0**-23
    assert not report.nonfinite
    forward = [u for u in report.underflows if u.direction == "forward"]
    assert [(u.line, u.primitive, u.subnormals) for u in forward] == [
        (line("rest"), "convert_element_type", 8)
    ]
    np.testing.assert_array_equal(OUTSIDE[...], np.ones(2))  # as it was


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
    closed = jax.make_jaxpr(graded)(x)
    interpreter = Interpreter(Planner())
    values = interpreter.run(closed, [Value(x)], (FORWARD, FORWARD))
    assert_same_bits([value.array for value in values], list(jax.jit(graded)(x)))
