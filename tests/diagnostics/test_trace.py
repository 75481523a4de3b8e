"""The trace of a backward pass: it names the line where numbers get lost, and only that."""

import dataclasses
import functools
import itertools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import planted
import pytest
from flax import nnx
from jax.experimental import pallas
from planted import DIFFERENTIATED, HALF, at, new_ref, normal, scaling, trace
from tables import assert_same_bits, cases

import jaxscale
from jaxscale import diagnostics
from jaxscale.diagnostics._trace.backward import TracedBackward
from jaxscale.diagnostics._trace.damage import find_lost

pytestmark = pytest.mark.standard_promotion
line = functools.partial(planted.marked, file=__file__)


def half(*values):
    return np.array(values, HALF)


def summed(fun):
    """A loss: the sum, in float32, of what a function returns."""
    return lambda *args: jnp.sum(fun(*args).astype(jnp.float32))


def mean_square(x):
    return jnp.mean(x.astype(jnp.float32) ** 2)


EIGHT = half(*np.linspace(1, 3, 8))


@functools.cache
def backward_of(model, plant):
    fun = functools.partial(getattr(planted, model), plant=plant)
    args = getattr(planted, f"{model}_case")(plant)
    return TracedBackward(fun, args, {}, has_aux=model == "convnet")


@functools.cache
def trace_model(model, plant, loss_scale):
    return backward_of(model, plant).run(loss_scale).report()  # all scales share the programs


# Where, and in which layer and which iteration of a scan.
PLANTED = {
    ("convnet", "overflow"): ("forward", "ConvNet", ()),
    ("convnet", "layer"): ("forward", "ConvNet/Dense_0", ()),
    ("convnet", "backward"): ("backward", "ConvNet", ()),
    ("convnet", "underflow"): ("forward", "ConvNet", ()),
    ("rnn", "overflow"): ("forward", "", (3,)),
    ("rnn", "backward"): ("backward", "", (2,)),
    ("rnn", "underflow"): ("forward", "", (1,)),
}


@cases(("model", "plant"), PLANTED, fast=[("rnn", "backward")])
def test_a_fault_is_found_at_its_line(model, plant):
    report = trace_model(model, plant, 2.0**15)
    place = report.first_nonfinite or report.underflows[0]
    assert (place.file, place.line) == (planted.__file__, planted.marked(f"{model}, {plant}"))
    assert place.source.endswith(f"# plant: {model}, {plant}")
    assert (place.direction, place.layer, place.iteration) == PLANTED[model, plant]
    assert place.scaled == (plant == "backward")
    assert (place.times, place.visits) == (1, 5 if place.iteration else 1)
    assert bool(report.nonfinite) == (plant != "underflow")
    if report.nonfinite:
        assert (place.dtype, place.elements) == ("float16", place.share * np.prod(place.shape))
        # The hyperbolic tangent of inf is 1: in the RNN the inf becomes a finite, wrong number.
        assert ("loss" in place.reaches) == (place.direction == "forward" and model != "rnn")


@pytest.mark.slow
@cases("model", ["convnet", "rnn"])
def test_only_faults_of_the_backward_pass_go_with_the_scale(model):
    assert str(trace_model(model, None, 1)).startswith("nothing found: ")
    assert not trace_model(model, None, 2.0**15).found
    assert not trace_model(model, "backward", 1).found
    low, high = (trace_model(model, "underflow", scale).underflows for scale in (1, 2.0**15))
    here = {(u.direction, u.scaled) for u in low if u.line == low[0].line}
    assert here == {("forward", False), ("backward", True)}
    assert sum(u.scaled for u in high) < sum(u.scaled for u in low)


def with_backward(fun, rule, forward=None):
    """A function with a rule of its own for its cotangent, and maybe one for its forward pass."""
    holder = jax.custom_vjp(fun)
    holder.defvjp(lambda x: ((forward or fun)(x), None), lambda _, ct: (rule(ct),))
    return holder


def not_differentiated(fun):
    """The function with the derivative of the identity."""
    return lambda x, *more: with_backward(lambda x: fun(x, *more), lambda ct: ct)(x)


backward_times_32 = with_backward(lambda x: x, lambda ct: ct * HALF(32))  # plant: backward rule
MASK = np.eye(2) > [1, 0]
BATCH = {"x": np.float32([1, np.nan]), "mask": np.float32([0, -np.inf])}
# A trace, what is true of its first inf or NaN or of all of it, and what it says.
FIRST = {
    "masked row": (lambda: trace(
        summed(lambda w: jax.nn.softmax(jnp.where(MASK, w, -jnp.inf))),  # plant: masked row
        half(1, 1), loss_scale=1,
    ), {"cause": "infinities", "primitive": "sub", "causes": {"infinities", "given"}}),
    "backward rule": (lambda: trace(
        summed(lambda x: backward_times_32(x)),
        EIGHT, loss_scale=2.0**11,
    ), {"direction": "backward", "primitive": "mul", "share": 1}),
    "module": (lambda: trace(
        lambda model, x: jnp.mean(model(x).astype(HALF) * 65000),  # plant: module
        nnx.Linear(3, 2, rngs=nnx.Rngs(0)), jnp.full((2, 3), 9.0), transform=nnx.value_and_grad,
    ), {"direction": "forward"}),
    "log": (lambda: trace(  # what reaches the gradients comes before what reaches nothing
        lambda w: jnp.sum(jnp.where(w > 0, jnp.log(w), 0)),  # plant: log
        np.float32([0, 1, 2]),
    ), {"direction": "backward", "cause": "value", "reaches": ("grads",), "elements": 1,
        "rest": [("log", "forward", ())], "nonfinite_outputs": ("grads",)}),
    "collected": (lambda: trace(
        lambda w: (lambda xs: (jnp.sum(xs.astype(jnp.float32)), xs))(
            jax.lax.map(lambda x: x * 60000, w)  # plant: collected
        ), half(2, 2, 2, 2), loss_scale=1, has_aux=True,
    ), {"times": 4, "iteration": (0,), "reaches": ("aux", "loss")}),
    "argument": (lambda: trace(
        lambda w, batch: jnp.mean(w * batch["x"]),  # plant: argument
        np.ones(2, np.float32), BATCH,
    ), {"cause": "given", "nonfinite_arguments": ("args[1]['mask']", "args[1]['x']")},
        "inf or NaN in the arguments: args[1]['mask'], args[1]['x']",
        "equations, loss NaN, loss scale 32768"),
    "root": (lambda: diagnostics.trace(  # a scale of one and none has a backward pass, too
        lambda w: jnp.sum(jnp.sqrt(w)), jaxscale.NoOpLossScale().init()  # plant: root
    )(np.zeros(2, np.float32)), {"loss_scale": 1, "direction": "backward"}),
    "given, then made": (lambda: trace(
        summed(lambda w, xs: jax.lax.map(lambda x: x * w, xs)),  # plant: given, then made
        HALF(2), half(np.inf, 60000), loss_scale=1,
    ), {"cause": "range", "iteration": (1,), "times": 2}),
    "embedding": (lambda: trace(  # in float16 only
        summed(lambda embedding: embedding[jnp.zeros(3, int)]),  # plant: embedding
        np.ones((2, 1), HALF),
    ), {"primitive": "scatter-add", "cause": "range", "elements": 1, "rest": []}),
    "seed": (lambda: trace(
        lambda w: jnp.sum((w * 1).astype(jnp.float32)),  # plant: seed
        half(1, 1), loss_scale=2.0**17,
    ), {"primitive": "convert_element_type", "direction": "backward", "scaled": True}),
    # What is given is left out where another place explains an output.
    "options": (lambda: diagnostics.trace(
        lambda w, b, *, offset: (
            jnp.sum(w * b + offset).astype(jnp.float32), {"aux": w * 300 * 300}  # plant: options
        ), scaling(1), has_aux=True, argnums=(0, 1),
    )(half(1, 1), half(np.inf, np.inf), offset=1.0),
        {"nonfinite_outputs": ("aux['aux']", "grads[0]", "loss"), "causes": {"range"}}),
    "by example": (lambda: trace(
        lambda w, x: jnp.sum(w * x),  # plant: by example
        half(1, 2), half([1, 2], [3, 4], [1, 300]),
        transform=lambda fun, **options: jax.vmap(jax.value_and_grad(fun, **options), (None, 0)),
        loss_scale=2.0**24,  # float16 caps it
    ), {"primitive": "mul", "direction": "backward", "share": 4 / 6, "loss": (5 + 11 + 601) / 3,
        "nonfinite_outputs": ("grads",)}),
    "report": (lambda: trace(
        lambda w: jnp.sum((w * 40000).astype(jnp.float32)),  # plant: report
        half(1, 1, 1, 2), loss_scale=1,
    ), {"cause": "range", "scaled": False, "reaches": ("loss",)},
        "equations, loss inf, loss scale 1\nfirst overflow: forward, mul, float16[4], 25.0% of ",
        "`lambda w: jnp.sum((w * 40000).astype(jnp.float32)),  # plant: report`\n",
        "float32 would hold it; a lower loss scale cannot help; reaches loss"),
}  # fmt: skip


@cases("name", FIRST)
def test_the_first_inf_or_nan_is_named(name):
    run, expected, *says = FIRST[name]
    report = run()
    first, text = report.first_nonfinite, str(report)
    rest = [(p.primitive, p.direction, p.reaches) for p in report.nonfinite if p is not first]
    seen = {"rest": rest, "causes": {place.cause for place in report.nonfinite}}
    seen |= vars(report) | vars(first)
    assert first.line == line(name)
    assert {field: seen[field] for field in expected} == expected
    assert f" of the elements, {first.where}: `{first.source}`\n" in text
    assert first.where.endswith(f"test_trace.py:{first.line}")
    assert all(words in text for words in says)
    assert hash(report) == hash(run() if name == "report" else report)  # of plain values


def test_how_far_a_pass_is_is_told_while_it_runs():
    def fun(x):
        y, _ = jax.lax.scan(lambda y, _: (jnp.sin(y), None), x, None, length=3)
        y += jax.lax.stop_gradient(jax.lax.while_loop(lambda y: y[0] < 4, lambda y: y + 1, y))
        return mean_square(y)

    backward, said = TracedBackward(fun, (half(1, 1),), {}), []
    for _ in range(2):
        backward.run(1.0, look=lambda visit: said.append(backward.how_far()))
    inside = [words for words in said if "iteration" in words]
    assert all("test_trace.py:" in words for words in inside)
    scanned = [words.split("iteration ")[1][:6] for words in inside if " of 3 at " in words]
    steps = [step for step, _ in itertools.groupby(scanned)]
    assert steps == ["1 of 3", "2 of 3", "3 of 3"] * 4  # also if it runs in reverse
    assert len(scanned) < len(inside)  # a loop without a known end
    count = len(said) // 2
    assert "of about" not in said[0]
    assert said[-1] == f"operation {count} of about {count}"


def test_functions_of_the_library_have_the_lines_of_their_own_calls():
    # JAX caches the trace of `jnp.where`, with the line of its first call.
    def mask(x, keep):
        x = jnp.where(keep, x, -1e9)  # plant: first call
        return jnp.where(keep, jnp.exp(x), -1e9)  # plant: second call

    fun = summed(lambda x, keep: jnp.where(keep, mask(x, keep), 0))
    report = trace(fun, half(1, 1, 1, 1), jnp.arange(4) > 1, loss_scale=1)
    assert [p.line for p in report.nonfinite] == [line("first call"), line("second call")]
    assert all(place.reaches == () for place in report.nonfinite)
    assert "became finite" in str(report)


def test_two_overflows_of_one_array_are_told_apart_from_what_follows():
    def fun(w):
        x = w * half(1, 1, 60000, 1)  # plant: one
        x = x * half(60000, 1, 1, 1)  # plant: two
        return x - x.sum() - 1

    report = trace(summed(fun), half(2, 2, 2, 2), loss_scale=1)
    forward = [(p.line, p.elements) for p in report.nonfinite if p.direction == "forward"]
    assert forward == [(line("one"), 1), (line("two"), 1)]


X = np.ones(3, np.float32)
POPULATION = jax.vmap(lambda _: scaling())(X)
BAD_INPUT = {
    "must return a floating scalar": lambda: trace(lambda w: w, X),
    "pass has_aux=True": lambda: trace(lambda w: (w, w), X),
    r"got int32\[3\] at args\[0\]\['w'\]\.": lambda: trace(jnp.sum, {"w": jnp.arange(3)}),
    "` reads values": lambda: jax.jit(lambda w: trace(jnp.sum, w).loss)(X),
    "exactly one loss scale state": lambda: diagnostics.trace(jnp.sum, {"a": X}),
    r"got an array of shape \(3,\)": lambda: diagnostics.trace(jnp.sum, POPULATION),
}


@cases("message", BAD_INPUT)
def test_bad_input_gets_one_clear_sentence(message):
    with pytest.raises((TypeError, ValueError), match=f"(?s)^`trace.*{message}"):
        BAD_INPUT[message]()


(PRODUCT,) = jax.make_jaxpr(jax.lax.mul)(EIGHT, EIGHT).eqns
# Float16 numbers around the lower end of its range, zeros included.
PAIRS = st.tuples(st.integers(-2047, 2047), st.integers(-23, -9))
HALVES = st.lists(PAIRS, min_size=8, max_size=8).map(lambda p: half(*np.ldexp(*np.transpose(p))))


def is_subnormal(x):
    return (x != 0) & (np.abs(x) < 2.0**-14)


@hypothesis.given(HALVES, HALVES)
def test_what_a_product_loses_is_what_numpy_counts(x, y):
    # The product of two float16 numbers is exact in float64.
    exact = x.astype(np.float64) * y.astype(np.float64)
    rounded = exact.astype(np.float16)
    zeros = is_subnormal(exact) & (rounded == 0)
    subnormals = is_subnormal(exact) & is_subnormal(rounded)
    if is_subnormal(x).any() or is_subnormal(y).any():
        subnormals &= rounded != exact  # what was subnormal before did not become so here
    counts = [int(mask.sum()) for mask in (exact != 0, zeros, subnormals)]

    found = find_lost(PRODUCT, [x, y], [rounded], least=0.5)
    assert bool(found) == (counts[1] + counts[2] > counts[0] / 2)
    if found:
        assert [found.nonzero, found.zeros, found.subnormals] == counts
        share = np.abs(exact[zeros]).sum() / np.abs(exact).sum()
        assert found.lost_sum == pytest.approx(share, rel=1e-12)  # sums, in some order
        assert found.share == (counts[1] + counts[2]) / counts[0]


def test_a_value_is_lost_once_where_it_is_lost():
    def fun(w):
        tiny = w * 1e-4  # plant: lost
        again = jnp.concatenate([-tiny, tiny + 0]).reshape(2, -1).T[::-1]
        return jnp.where(again > 1, again, again * 2 + again)

    report = trace(summed(fun), half(*np.linspace(1e-4, 2e-4, 8)), loss_scale=2.0**12)
    assert [(u.line, u.direction) for u in report.underflows] == [(line("lost"), "forward")]
    assert (report.underflows[0].zeros, report.underflows[0].nonzero) == (8, 8)


def test_only_the_first_places_are_printed():
    fun = summed(lambda w: sum((w * 1e-4).astype(jnp.float32) for _ in range(8)))
    report, again = (trace(fun, half(*[1e-4] * 4), loss_scale=2.0**12) for _ in range(2))
    assert hash(report) == hash(again)
    assert len(report.underflows) == 8
    lines = str(report).splitlines()
    assert sum(line.startswith("underflow: ") for line in lines) == 5
    assert lines[-1] == "and 3 more places: underflow"


# Subnormal, and exact: nothing is lost. And a sum with a rounding error of 2**-25 in float32,
# where the truth is 0.
EXACT = half(2.0**-14 + 2.0**-24, 2.0**-14)
CANCELLED = half([1, 3 * 2.0**-13, 1, 3 * 2.0**-13], [1, 2.0**-12, -1, -(2.0**-12)])
HARMLESS = {
    "dropout in a scan": lambda w: jax.lax.map(
        lambda key: jnp.where(jax.random.bernoulli(key, 0.1, w.shape), w, 0),
        jax.random.split(jax.random.key(0), 3),
    ),
    "causal mask": lambda w: jax.nn.softmax(jnp.where(jnp.tri(8, dtype=bool), w, -jnp.inf)),
    "argmax": lambda w: w * jnp.argmax(jnp.where(w > 1.5, w, -jnp.inf)),
    "dead code": lambda w: (
        jax.jit(lambda a, b: (a * 2, b * 2))(w, jnp.log(w * 0))[0]
        * jax.lax.scan(lambda x, _: (x * 2, jnp.log(x * 0)), jax.lax.stop_gradient(w), length=2)[0]
    ),
    "difference": lambda w: w + (jnp.full(8, EXACT[0]) - jnp.full(8, EXACT[1])),
    "printed": lambda w: (w, jax.debug.callback(lambda _: None, jnp.log(w * 0)))[0],
    "cancelled": lambda w: w + jnp.dot(*jnp.asarray(CANCELLED)),
    "backward rule in range": lambda w: backward_times_32(w),
}


@cases("harmless", HARMLESS, fast=["dead code", "cancelled", "backward rule in range"])
def test_nothing_is_found_where_zeros_and_infinities_are_meant(harmless):
    report = trace(summed(HARMLESS[harmless]), half(*np.linspace(1, 2, 8)), loss_scale=2.0**10)
    assert str(report).startswith("nothing found")


def test_nothing_is_found_of_what_is_meant_or_is_not_the_models_doing():
    # A mask among the arguments, and a float32 divisor, whose bounds are 0 and inf in float16.
    assert not trace(lambda w, m: mean_square(jax.nn.softmax(w + m)), X[:2], BATCH["mask"]).found
    assert not trace(jnp.sum, half(1, 1, 1)).found


def test_formats_of_the_range_of_float32_do_not_underflow_and_float8_does():
    for dtype in (jnp.bfloat16, jnp.float32):
        assert not trace(summed(lambda w: w * 1e-30), jnp.ones(8, dtype)).found

    def cast(w):
        return jnp.mean(w.astype(jnp.float8_e4m3fn).astype(jnp.float32))  # plant: float8

    place = trace(cast, half(*[2.0**-12] * 8)).underflows[0]
    assert (place.line, place.dtype, place.zeros) == (line("float8"), "float8_e4m3fn", 8)


def test_numbers_that_become_zero_or_inf_are_named_with_their_lines():
    def fun(w):
        x = w / (jnp.abs(w) + 1e-9)  # plant: became zero
        x = x.sum() / 70000  # plant: became inf
        return x * 0.0 + jnp.inf * 1e-3 + w[0]

    constants = trace(summed(fun), half(1, 1, 1, 1), loss_scale=1).constants
    assert [(c.value, c.became, c.line, c.primitive, c.dtype) for c in constants] == [
        (1e-9, 0.0, line("became zero"), "add", "float16"),
        (70000.0, np.inf, line("became inf"), "div", "float16"),
    ]
    assert "1e-09 is 0 in float16" in str(constants[0])
    # In bfloat16 they are what they say.
    assert trace(summed(fun), jnp.ones(4, jnp.bfloat16), loss_scale=1).constants == ()


# What holds equations: loops, calls, custom derivatives and refs. Each multiplies by a number at
# a marked line.


def _custom_jvp(x, factor):
    inner = jax.custom_jvp(lambda x: x * factor)
    inner.defjvp(lambda primals, tangents: (primals[0] * factor, tangents[0]))  # plant: custom_jvp
    return inner(x)


def _ref(x, factor):
    ref = new_ref(x)
    ref[...] = ref[...] * factor  # plant: ref
    return ref[...]


def _ref_in_a_call(x, factor):
    ref = new_ref(x)
    jax.jit(lambda x: ref.__setitem__(..., x * factor))(x)  # plant: ref_in_a_call
    return ref[...]


def _ref_in_a_scan(x, factor):
    ref = new_ref(x)

    def body(carry, i):
        before = ref[...]  # nothing else reads what is written
        ref[...] = before * at(i, 1, factor)  # plant: ref_in_a_scan
        return carry, before

    return jax.lax.scan(body, 0, jnp.arange(3))[1][2]


def _ref_in_a_loop(x, factor):
    ref, rounds = new_ref(x), new_ref(jnp.int32(0))

    def body(i):
        ref[:] *= at(i, 2, factor)  # plant: ref_in_a_loop
        rounds[...] += 1
        return i + 1

    jax.lax.while_loop(lambda i: i < 4, body, jnp.int32(0))
    return ref[...] * (rounds[...] == 4).astype(HALF)


HOLDERS = {
    "while": lambda x, factor: x + jax.lax.stop_gradient(jax.lax.while_loop(
        lambda c: c[0] < 4,
        lambda c: (c[0] + 1, c[1] * at(c[0], 2, factor)),  # plant: while
        (0, x),
    )[1]),
    "cond": lambda x, factor: jax.lax.cond(
        x[0] > -100, lambda x: x * factor, lambda x: x, x  # plant: cond
    ),
    "remat": lambda x, factor: jax.checkpoint(lambda x: jnp.sin(x * factor))(x),  # plant: remat
    "nested_jit": lambda x, factor: jax.jit(jax.jit(lambda x: x * factor))(x),  # plant: nested_jit
    "nested_scan": lambda x, factor: jax.lax.scan(lambda x, times: jax.lax.scan(
        lambda x, t: (x * at(t, 5, factor), None), x, times  # plant: nested_scan
    ), x, jnp.arange(6).reshape(2, 3))[0],
    "custom_jvp": _custom_jvp,
    "custom_vjp": lambda x, factor: with_backward(  # the forward rule is what runs,
        lambda x: x * factor, lambda ct: ct,
        lambda x: x * factor,  # plant: custom_vjp
    )(x),
    "undifferentiated": lambda x, factor: x + with_backward(  # and here the function
        lambda x: x * factor,  # plant: undifferentiated
        lambda ct: ct, lambda x: x,
    )(jax.lax.stop_gradient(x)),
    "ref": not_differentiated(_ref),
    "ref_in_a_call": not_differentiated(_ref_in_a_call),
    "ref_in_a_scan": not_differentiated(_ref_in_a_scan),
    "ref_in_a_loop": not_differentiated(_ref_in_a_loop),
}  # fmt: skip
ITERATIONS = {"while": (2,), "nested_scan": (1, 2), "ref_in_a_scan": (1,), "ref_in_a_loop": (2,)}


@cases("holder", HOLDERS, fast=["nested_scan"])
def test_an_equation_is_found_inside_of(holder):
    def fun(x, factor):
        return mean_square(HOLDERS[holder](x, factor))

    assert not trace(fun, EIGHT, HALF(1)).found
    first = trace(fun, EIGHT, HALF(30000)).first_nonfinite
    assert (first.primitive, "loss" in first.reaches) == ("mul", True)
    for place in (first, trace(fun, EIGHT, HALF(2.0**-17)).underflows[0]):
        assert (place.line, place.direction) == (line(holder), "forward")
        assert place.iteration == ITERATIONS.get(holder, ())


@cases("holder", HOLDERS, fast=["while"])
def test_a_pass_in_a_hurry_stops_at_the_first_overflow_of_a_full_one(holder):
    def fun(x):
        # Neither is what is looked for: an inf on purpose, and one that no loss scale changes.
        made = jnp.log(jax.lax.stop_gradient(x) * 0)
        masked = jnp.where(x > 2, x, jnp.where(x > 1.5, -jnp.inf, made))
        return mean_square(HOLDERS[holder](x, HALF(256)) + jnp.exp(masked))

    backward = TracedBackward(fun, (EIGHT,), {})
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


def _held(x):
    for name, holder in HOLDERS.items():
        x = holder(x, HALF(1.25 if len(name) % 2 else 0.75))
    return mean_square(x)


COMPUTED = {
    "held": (_held, EIGHT),
    "rnn": (planted.rnn, *planted.rnn_case()),
    "small": (summed(lambda w: jnp.tanh(jax.jit(lambda w: w @ w)(w))), np.ones((2, 2), HALF)),
    "rewritten": (  # XLA may give 0
        lambda w: jnp.sum(jnp.abs(1 / (1 / w) - w)) + jnp.sum((w / 3) * 3 - w),
        np.linspace(1, 3, 64, dtype=np.float32),
    ),
}


@cases("name", COMPUTED, fast=["small", "rewritten"])
def test_what_it_computes_is_what_eager_evaluation_computes(name):
    fun, *args = COMPUTED[name]
    args, graded = jax.tree.map(jnp.asarray, args), jaxscale.value_and_grad(fun, scaling(8))
    with jax.disable_jit():
        expected = graded(*args)
    run = TracedBackward(fun, args, {}).run(8.0)
    assert_same_bits([run.values["loss"].array, *run.grads.values()], jax.tree.leaves(expected))
    assert run.report().loss == float(expected[0])


@pytest.mark.slow
@pytest.mark.skipif(not DIFFERENTIATED, reason="this version of JAX differentiates no refs")
def test_a_ref_has_a_backward_pass():
    def fun(x):
        ref = new_ref(x)

        def body(i, carry):
            ref[i] = ref[i] * at(i, 2, 4)  # plant: backward of a ref
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
    run = TracedBackward(fun, (x,), {}).run(8.0)
    expected = jax.jit(jaxscale.value_and_grad(fun, scaling(8)))(x)
    assert_same_bits([run.values["loss"].array, run.grads["grads"]], list(expected))


# Programs with parts that never run, or with refs. Each returns x.


def _scan_of_no_keys(x):
    keys = jax.random.split(jax.random.key(0), 3)[:0]
    x, (keys, stacked) = jax.lax.scan(lambda c, key: (c * 2, (key, c)), x, keys)
    return x + stacked.sum() + jax.random.key_data(keys).sum().astype(HALF)


def _scans_of_nothing_in_a_scan(x):
    def body(x, t):
        x, stacked = jax.lax.scan(lambda c, _: (c * 2, c), x, length=0)
        return x * t, stacked

    x, stacked = jax.lax.scan(body, x, half(2, 0.25))
    return 2 * x + stacked.sum()


def _scan_of_no_rows_of_a_ref(x):
    ref = new_ref(x)
    rows = new_ref(jnp.zeros((0, 8), HALF))
    jax.lax.scan(lambda c, row: (c, ref.__setitem__(..., row[...])), None, rows)
    return ref[...]


def _rows_of_a_ref(x):
    ref = new_ref(x.reshape(4, 2))

    def body(factor, row):
        row[0] = row[0] * factor
        return factor * 2, None

    jax.lax.scan(body, HALF(0.5), ref, reverse=True)
    return ref[...].reshape(8) * half(0.25, 1, 0.5, 1, 1, 1, 2, 1)


def _keys_in_a_ref(x):
    ref = new_ref(jax.random.split(jax.random.key(0), 2))
    ref[0] = ref[1]
    return x * (jax.random.bits(ref[0]) == jax.random.bits(ref[1])).astype(HALF)


def _ref_that_held_nan(x):
    ref = new_ref(jnp.full(8, jnp.nan, HALF))
    ref[:4], ref[4:] = x[:4], x[4:]
    return ref[...]


def _ref_from_outside(x):
    OUTSIDE[0] += 1
    jax.jit(lambda: OUTSIDE.__setitem__(1, OUTSIDE[0] / 4))()
    return x * OUTSIDE[1] * 2


def _ref_that_held_nothing(x):
    ref = jax.empty_ref(jax.typeof(x))
    ref[...] = x
    return ref[...]


def _run_state(x):
    def double(refs):
        refs[1][...] = refs[0][...] * 2
        refs[0][0] = refs[0][1]

    x, doubled = pallas.run_state(double)((x, jnp.zeros(8, HALF)))
    return doubled - x.at[0].add(-1)


def _shape_of_symbols(x):
    (size,) = jax.export.symbolic_shape("size")
    doubled = jax.export.export(jax.jit(lambda x: x * 2))
    return doubled(jax.ShapeDtypeStruct((size,), HALF)).call(x) - x


OUTSIDE = new_ref(jnp.ones(2, HALF))
WITH_REFS = [_scan_of_no_rows_of_a_ref, _rows_of_a_ref, _keys_in_a_ref, _ref_that_held_nan]
WITH_REFS += [_ref_from_outside, _run_state, _shape_of_symbols]
WITH_REFS += [_ref_that_held_nothing] * hasattr(jax, "empty_ref")
IDENTITIES = {fun.__name__: not_differentiated(fun) for fun in WITH_REFS} | {
    "_scan_of_no_keys": _scan_of_no_keys,
    "_scans_of_nothing_in_a_scan": _scans_of_nothing_in_a_scan,
    "_while_of_no_rounds": lambda x: 2 * x - jax.lax.while_loop(
        lambda c: c[0] < 0, lambda c: (c[0] - 1, c[1] * 2), (jnp.int32(0), jax.lax.stop_gradient(x))
    )[1],
    "_empty_arrays": lambda x: (
        jnp.concatenate([x, x[:0] / x[:0]]) + x[:0].sum() + jnp.zeros((8, 0), HALF) @ x[:0]
    ),
    "_branch_outside": lambda x: jax.lax.switch(
        -7, [lambda x: x, lambda x: x * 2], jax.lax.switch(7, [lambda x: x * 2, lambda x: x], x)
    ),
}  # fmt: skip


@cases("name", IDENTITIES, fast=["_scans_of_nothing_in_a_scan", "_rows_of_a_ref"])
def test_the_rest_of_a_program_is_reported(name):
    def fun(x):
        y = IDENTITIES[name](x).astype(jnp.float32) * 2.0**-23
        return jnp.sum(y.astype(HALF).astype(jnp.float32))  # plant: rest

    report = trace(fun, half(*range(1, 9)), loss_scale=2.0**10)
    assert report.loss == 36 * 2.0**-23
    assert not report.nonfinite
    (place,) = (u for u in report.underflows if u.direction == "forward")
    assert (place.line, place.primitive) == (line("rest"), "convert_element_type")
    assert (place.inputs, place.subnormals) == (("float32[8]",), 8)
    np.testing.assert_array_equal(OUTSIDE[...], np.ones(2))  # as it was


def test_a_kernel_is_an_equation_that_float32_cannot_run():
    def square(x, out):
        out[...] = x[...] * x[...]

    kernel = pallas.pallas_call(square, jax.ShapeDtypeStruct((8,), HALF), interpret=True)
    loss_fn = summed(not_differentiated(kernel))
    backward = TracedBackward(loss_fn, (half(*[1e-4] * 7, 6e4),), {})
    report = backward.run(1.0).report()
    (place,) = report.nonfinite
    assert (place.primitive, place.elements) == ("pallas_call", 1)
    assert np.isnan(place.float32_result)
    assert (report.underflows, report.not_compared) == ((), ("pallas_call",))
    assert str(report).endswith("not compared with float32: pallas_call")
    assert backward.run(1.0, lambda key: True).report().loss == np.inf  # as it is written


def _twin(dtype):
    """A loss whose narrow parts are in `dtype`, with everything that holds equations."""
    doubled = with_backward(lambda x: x * 2, lambda ct: ct * 2 + 1e-9)
    block = jax.checkpoint(lambda x, w: x + jnp.tanh(x @ w))

    def fun(params, x):
        w, x = params.astype(dtype), x.astype(dtype)
        x, _ = jax.lax.scan(lambda x, _: (block(x, w), None), x, length=3)
        x = jax.lax.cond(x[0, 0] > -100, lambda x: jnp.exp(x - 5), lambda x: x, x)
        x = jax.lax.fori_loop(0, 2, lambda i, x: x * 0.75 + 3e-9, x)
        return mean_square(doubled(jax.jit(lambda x: x / (jnp.abs(x) + 1e-9))(x) + x))

    return fun


@pytest.mark.slow
def test_a_pass_with_everything_in_float32_has_the_gradients_of_float32():
    params, x = normal(0, 4, 4), normal(1, 3, 4)
    exact = jax.jit(jax.grad(_twin(jnp.float32)))(params, x)
    written = TracedBackward(_twin(HALF), (params, x), {}).run(1.0).grads["grads"]
    backward = TracedBackward(_twin(HALF), (params, x), {})
    for loss_scale in (1.0, 2.0**24):
        wide = backward.run(loss_scale, lambda key: True).grads["grads"]
        # Two compiled programs may round differently.
        np.testing.assert_allclose(wide, exact, rtol=1e-4, atol=1e-6)
        shaken = backward.run(loss_scale, lambda key: True, is_shaken=True).grads["grads"]
        assert 0 < np.linalg.norm(shaken - wide) / np.linalg.norm(exact) < 1e-4
    # What is as written is so whichever passes ran before.
    np.testing.assert_array_equal(backward.run(1.0).grads["grads"], written)


def test_bits_are_those_of_the_narrow_dtype_in_float32_too():
    # 0x4400 is 4 in float16.
    fun = summed(lambda w: w * (jax.lax.bitcast_convert_type(w * 2, jnp.uint16) > 0x4400))
    backward = TracedBackward(fun, (half(1, 3),), {})
    assert backward.run(1.0, lambda key: True).grads["grads"].tolist() == [0, 1]


def test_what_is_only_rounding_changes_when_float32_is_shaken():
    def fun(params, x):
        weights = jax.nn.softmax(x @ params["w"] + params["shift"])  # the same for all: no effect
        return jnp.sum(weights**2)

    args = {"w": normal(0, 4, 4), "shift": np.ones((), np.float32)}, normal(1, 3, 4)
    backward = TracedBackward(fun, args, {})
    exact, shaken = (backward.run(1.0, lambda key: True, is_shaken=s).grads for s in (False, True))
    norm = np.linalg.norm
    change = {name: norm(shaken[name] - exact[name]) / norm(exact[name]) for name in exact}
    assert change["grads['w']"] < 1e-4
    assert change["grads['shift']"] > 0.3
