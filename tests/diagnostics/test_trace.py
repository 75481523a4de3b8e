"""The trace of a backward pass: it names the line where numbers get lost, and only that."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import planted
import pytest
import traced_losses
from flax import nnx
from tables import cases
from traced_losses import (
    EIGHT,
    HALF,
    assert_fields,
    half,
    mean_square,
    scaling,
    summed,
    trace,
    with_backward,
)

import jaxscale
from jaxscale import diagnostics
from jaxscale.diagnostics._trace.backward import TracedBackward
from jaxscale.diagnostics._trace.damage import find_lost

pytestmark = pytest.mark.standard_promotion
line = functools.partial(traced_losses.marked, file=__file__)


# Two models, each with faults at marked lines.


@functools.cache
def backward_of(model, plant):
    fun = functools.partial(getattr(planted, model), plant=plant)
    args = getattr(planted, f"{model}_case")(plant)
    return TracedBackward(fun, args, {}, has_aux=model == "convnet")


@functools.cache
def trace_model(model, plant, loss_scale):
    # all scales share the programs
    return backward_of(model, plant).run(loss_scale).report()


class Fault(NamedTuple):
    """Where a fault is found: in which pass, layer and iteration of a scan.

    `visits` says how often its equation ran.
    """

    direction: str
    layer: str = ""
    iteration: tuple[int, ...] = ()
    visits: int = 1


PLANTED = {
    ("convnet", "overflow"): Fault("forward", "ConvNet"),
    ("convnet", "layer"): Fault("forward", "ConvNet/Dense_0"),
    ("convnet", "backward"): Fault("backward", "ConvNet"),
    ("convnet", "underflow"): Fault("forward", "ConvNet"),
    ("rnn", "overflow"): Fault("forward", iteration=(3,), visits=5),
    ("rnn", "backward"): Fault("backward", iteration=(2,), visits=5),
    ("rnn", "underflow"): Fault("forward", iteration=(1,), visits=5),
}
OVERFLOWS = [(model, plant) for model, plant in PLANTED if plant != "underflow"]


@pytest.mark.worlds
@cases(("model", "plant"), PLANTED, fast=[("rnn", "backward")])
def test_a_fault_is_found_at_its_line(model, plant):
    report = trace_model(model, plant, 2.0**15)
    assert bool(report.nonfinite) == (plant != "underflow")
    place = report.first_nonfinite or report.underflows[0]
    mark = f"{model}, {plant}"
    assert place.file == planted.__file__
    assert place.line == traced_losses.marked(mark, planted.__file__)
    assert place.source.endswith(f"# plant: {mark}")
    assert_fields(place, **PLANTED[model, plant]._asdict())
    assert place.scaled == (plant == "backward")
    assert place.times == 1


@pytest.mark.worlds
@cases(("model", "plant"), OVERFLOWS, fast=[("rnn", "backward")])
def test_the_elements_that_overflow_are_counted_and_followed(model, plant):
    place = trace_model(model, plant, 2.0**15).first_nonfinite
    num_elements = np.prod(place.shape)
    assert place.dtype == "float16"
    assert place.elements == place.share * num_elements
    # The hyperbolic tangent of inf is 1: in the RNN the inf becomes a finite, wrong number.
    reaches_loss = place.direction == "forward" and model != "rnn"
    assert ("loss" in place.reaches) == reaches_loss


@pytest.mark.slow
@cases("model", ["convnet", "rnn"])
def test_nothing_is_found_without_a_fault(model):
    assert str(trace_model(model, None, 1)).startswith("nothing found: ")
    assert not trace_model(model, None, 2.0**15).found


@pytest.mark.slow
@cases("model", ["convnet", "rnn"])
def test_a_lower_scale_cures_an_overflow_of_the_backward_pass(model):
    assert not trace_model(model, "backward", 1).found


@pytest.mark.slow
@cases("model", ["convnet", "rnn"])
def test_a_higher_scale_cures_underflows_of_the_backward_pass(model):
    low = trace_model(model, "underflow", 1)
    high = trace_model(model, "underflow", 2.0**15)
    assert count_scaled(high.underflows) < count_scaled(low.underflows)


def count_scaled(places):
    return sum(place.scaled for place in places)


@pytest.mark.slow
@cases("model", ["convnet", "rnn"])
def test_a_line_may_underflow_in_both_passes(model):
    places = trace_model(model, "underflow", 1).underflows
    passes = set()
    for place in places:
        if place.line == places[0].line:
            passes.add((place.direction, place.scaled))
    assert passes == {("forward", False), ("backward", True)}


# Small losses. Each function has the marked line at which its first inf or NaN is made.

MASK = np.eye(2) > [1, 0]
BATCH = {"x": np.float32([1, np.nan]), "mask": np.float32([0, -np.inf])}


def times_32(cotangent):
    return cotangent * HALF(32)


backward_times_32 = with_backward(lambda x: x, times_32)


@summed
def backward_rule(x):
    return backward_times_32(x)  # plant: backward rule


@summed
def masked_row(w):
    return jax.nn.softmax(jnp.where(MASK, w, -jnp.inf))  # plant: masked row


def module(model, x):
    return jnp.mean(model(x).astype(HALF) * 65000)  # plant: module


def trace_module():
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    return trace(module, model, jnp.full((2, 3), 9.0), transform=nnx.value_and_grad)


def log(w):
    return jnp.sum(jnp.where(w > 0, jnp.log(w), 0))  # plant: log


def collected(w):
    xs = jax.lax.map(lambda x: x * 60000, w)  # plant: collected
    return jnp.sum(xs.astype(jnp.float32)), xs


def argument(w, batch):
    return jnp.mean(w * batch["x"])  # plant: argument


def root(w):
    return jnp.sum(jnp.sqrt(w))  # plant: root


def trace_root():
    unscaled = jaxscale.NoOpLossScale().init()
    return diagnostics.trace(root, unscaled)(np.zeros(2, np.float32))


@summed
def given_then_made(w, xs):
    return jax.lax.map(lambda x: x * w, xs)  # plant: given, then made


@summed
def embedding(table):
    # The gradient adds three cotangents of 2**15 in one float16.
    return table[jnp.zeros(3, int)]  # plant: embedding


def seed(w):
    # The cotangent of the loss, 2**17, is cast to float16 here.
    return jnp.sum((w * 1).astype(jnp.float32))  # plant: seed


def options(w, b, *, offset):
    aux = {"aux": w * 300 * 300}  # plant: options
    return jnp.sum(w * b + offset).astype(jnp.float32), aux


def trace_options():
    traced = diagnostics.trace(options, scaling(1), has_aux=True, argnums=(0, 1))
    return traced(half(1, 1), half(np.inf, np.inf), offset=1.0)


def by_example(w, x):
    return jnp.sum(w * x)  # plant: by example


def trace_by_example():
    def transform(fun, **kwargs):
        return jax.vmap(jax.value_and_grad(fun, **kwargs), (None, 0))

    # Scaled, four of these six numbers are inf.
    examples = half([1, 2], [3, 4], [1, 300])
    # The loss is in float16, so it is scaled by 2**15, the largest power of two there.
    loss_scale = 2.0**24
    return trace(
        by_example, half(1, 2), examples, transform=transform, loss_scale=loss_scale
    )


def plain_overflow(w):
    return jnp.sum((w * 40000).astype(jnp.float32))  # plant: report


class First(NamedTuple):
    """A trace, and what is expected of its first inf or NaN and of the whole report."""

    run: Callable[[], diagnostics.TraceReport]
    first: dict[str, Any]
    report: dict[str, Any] | None = None
    causes: set[str] | None = None  # those of all places
    # primitive, direction and reached outputs of the other places
    others: list[Any] | None = None
    text: tuple[str, ...] | None = None


# A cause is "range" if float32 would hold the number, "value" if it would not, "infinities" if a
# NaN was made of infinities that are meant, and "given" if an argument or a constant held it.
FIRST = {
    "masked row": First(
        lambda: trace(masked_row, half(1, 1), loss_scale=1),
        first={"cause": "infinities", "primitive": "sub"},
        causes={"infinities", "given"},
    ),
    "backward rule": First(
        lambda: trace(backward_rule, EIGHT, loss_scale=2.0**11),
        first={"direction": "backward", "primitive": "mul", "share": 1},
    ),
    "module": First(trace_module, first={"direction": "forward"}),
    # What reaches the gradients comes before what reaches nothing.
    "log": First(
        lambda: trace(log, np.float32([0, 1, 2])),
        first={
            "direction": "backward",
            "cause": "value",
            "reaches": ("grads",),
            "elements": 1,
        },
        report={"nonfinite_outputs": ("grads",)},
        others=[("log", "forward", ())],
    ),
    "collected": First(
        lambda: trace(collected, half(2, 2, 2, 2), loss_scale=1, has_aux=True),
        first={"times": 4, "iteration": (0,), "reaches": ("aux", "loss")},
    ),
    "argument": First(
        lambda: trace(argument, np.ones(2, np.float32), BATCH),
        first={"cause": "given"},
        report={"nonfinite_arguments": ("args[1]['mask']", "args[1]['x']")},
        text=(
            "inf or NaN in the arguments: args[1]['mask'], args[1]['x']",
            "equations, loss NaN, loss scale 32768",
        ),
    ),
    # A scale of one, or none, has a backward pass as well.
    "root": First(
        trace_root,
        first={"direction": "backward"},
        report={"loss_scale": 1},
    ),
    "given, then made": First(
        lambda: trace(given_then_made, HALF(2), half(np.inf, 60000), loss_scale=1),
        first={"cause": "range", "iteration": (1,), "times": 2},
    ),
    # It is finite in float32, and nothing else is found.
    "embedding": First(
        lambda: trace(embedding, np.ones((2, 1), HALF)),
        first={"primitive": "scatter-add", "cause": "range", "elements": 1},
        others=[],
    ),
    "seed": First(
        lambda: trace(seed, half(1, 1), loss_scale=2.0**17),
        first={
            "primitive": "convert_element_type",
            "direction": "backward",
            "scaled": True,
        },
    ),
    # The inf in the argument `b` is not among the places, as another place explains an output.
    "options": First(
        trace_options,
        first={},
        report={"nonfinite_outputs": ("aux['aux']", "grads[0]", "loss")},
        causes={"range"},
    ),
    "by example": First(
        trace_by_example,
        first={"primitive": "mul", "direction": "backward", "share": 4 / 6},
        report={"loss": (5 + 11 + 601) / 3, "nonfinite_outputs": ("grads",)},
    ),
    "report": First(
        lambda: trace(plain_overflow, half(1, 1, 1, 2), loss_scale=1),
        first={"cause": "range", "scaled": False, "reaches": ("loss",)},
        text=(
            "equations, loss inf, loss scale 1\nfirst overflow: forward, mul, float16[4], 25.0% ",
            "`return jnp.sum((w * 40000).astype(jnp.float32))  # plant: report`\n",
            "float32 would hold it; a lower loss scale cannot help; reaches loss",
        ),
    ),
}


@functools.cache
def first_report(name):
    return FIRST[name].run()


def rows_with(field):
    """The names of the rows that expect something of a field."""
    return [name for name, row in FIRST.items() if getattr(row, field) is not None]


@pytest.mark.worlds
@cases(
    "name", FIRST, fast=["masked row", "backward rule", "log", "collected", "report"]
)
def test_the_first_inf_or_nan_is_named(name):
    first = first_report(name).first_nonfinite
    assert_fields(first, line=line(name), **FIRST[name].first)


@pytest.mark.worlds
@cases("name", rows_with("report"))
def test_the_report_has_the_loss_and_what_is_not_finite(name):
    assert_fields(first_report(name), **FIRST[name].report)


@pytest.mark.worlds
@cases("name", FIRST)
def test_the_text_has_the_line_of_the_first_inf_or_nan(name):
    report = first_report(name)
    first = report.first_nonfinite
    assert first.where.endswith(f"test_trace.py:{first.line}")
    assert f" of the elements, {first.where}: `{first.source}`\n" in str(report)


@cases("name", rows_with("text"))
def test_the_text_says_what_happened(name):
    text = str(first_report(name))
    for words in FIRST[name].text:
        assert words in text


@pytest.mark.worlds
def test_the_text_counts_many_gradients():
    @summed
    def loss_fn(params):
        return jnp.sum(jnp.stack(params) * half(1) * 60000) ** 2

    text = str(trace(loss_fn, [half(2)] * 4, loss_scale=1))
    assert text.endswith("reaches loss, 4 of the gradients")


@pytest.mark.worlds
@cases("name", rows_with("causes"))
def test_the_causes_of_all_places_are_told_apart(name):
    causes = {place.cause for place in first_report(name).nonfinite}
    assert causes == FIRST[name].causes


@cases("name", rows_with("others"))
def test_the_other_places_are_named(name):
    report = first_report(name)
    others = []
    for place in report.nonfinite:
        if place is not report.first_nonfinite:
            others.append((place.primitive, place.direction, place.reaches))
    assert others == FIRST[name].others


@summed
def eight_underflows(w):
    return sum((w * 1e-4).astype(jnp.float32) for _ in range(8))


@functools.cache
def report_of_underflows():
    return trace(eight_underflows, half(*[1e-4] * 4), loss_scale=2.0**12)


@pytest.mark.worlds
def test_equal_reports_have_equal_hashes():
    assert hash(FIRST["report"].run()) == hash(first_report("report"))
    # It fails if anything in a report is an array or a list.
    for name in FIRST:
        hash(first_report(name))
    assert hash(report_of_underflows.__wrapped__()) == hash(report_of_underflows())


def test_functions_of_the_library_have_the_lines_of_their_own_calls():
    # JAX caches the trace of `jnp.where`, with the line of its first call.
    # -1e9 is -inf in float16, and the call in `loss_fn` leaves every -inf out.
    def mask(x, keep):
        x = jnp.where(keep, x, -1e9)  # plant: first call
        return jnp.where(keep, jnp.exp(x), -1e9)  # plant: second call

    @summed
    def loss_fn(x, keep):
        return jnp.where(keep, mask(x, keep), 0)

    report = trace(loss_fn, half(1, 1, 1, 1), jnp.arange(4) > 1, loss_scale=1)
    first, second = report.nonfinite
    assert_fields(first, line=line("first call"), reaches=())
    assert_fields(second, line=line("second call"), reaches=())
    assert "became finite" in str(report)


def test_two_overflows_of_one_array_are_told_apart_from_what_follows():
    @summed
    def loss_fn(w):
        x = w * half(1, 1, 60000, 1)  # plant: one
        x = x * half(60000, 1, 1, 1)  # plant: two
        return x - x.sum() - 1

    report = trace(loss_fn, half(2, 2, 2, 2), loss_scale=1)
    one, two = [place for place in report.nonfinite if place.direction == "forward"]
    assert_fields(one, line=line("one"), elements=1)
    assert_fields(two, line=line("two"), elements=1)


X = np.ones(3, np.float32)
POPULATION = jax.vmap(lambda _: scaling())(X)
BAD_INPUT = {
    "must return a floating scalar": lambda: trace(lambda w: w, X),
    "pass has_aux=True": lambda: trace(lambda w: (w, w), X),
    r"got int32\[3\] at args\[0\]\['w'\]\.": lambda: trace(
        jnp.sum, {"w": jnp.arange(3)}
    ),
    r"floating parameters, got `.*` at args\[0\]\['odd'\]": lambda: trace(
        jnp.sum, {"odd": jnp.float16}
    ),
    r"got `ShapeDtypeStruct` at args\[0\]\['odd'\]": lambda: trace(
        jnp.sum, {"odd": jax.ShapeDtypeStruct((2,), jnp.float32)}
    ),
    r"got `function` at args\[0\]\['act'\].*transform=equinox.filter_value_and": lambda: (
        trace(jnp.sum, {"w": X, "act": summed})
    ),
    "` reads values": lambda: jax.jit(lambda w: trace(jnp.sum, w).loss)(X),
    "exactly one loss scale state": lambda: diagnostics.trace(jnp.sum, {"a": X}),
    r"got an array of shape \(3,\)": lambda: diagnostics.trace(jnp.sum, POPULATION),
}


@cases("message", BAD_INPUT)
def test_bad_input_gets_one_clear_sentence(message):
    with pytest.raises((TypeError, ValueError), match=f"(?s)^`trace.*{message}"):
        BAD_INPUT[message]()


# Small values that become zero or subnormal.

(PRODUCT,) = jax.make_jaxpr(jax.lax.mul)(EIGHT, EIGHT).eqns


def halves_of(pairs):
    mantissas, exponents = np.transpose(pairs)
    return half(*np.ldexp(mantissas, exponents))


# Float16 numbers around the lower end of its range, zeros included.
PAIRS = st.tuples(st.integers(-2047, 2047), st.integers(-23, -9))
HALVES = st.lists(PAIRS, min_size=8, max_size=8).map(halves_of)


def is_subnormal(x):
    return (x != 0) & (np.abs(x) < 2.0**-14)


@pytest.mark.worlds
@hypothesis.given(HALVES, HALVES)
def test_what_a_product_loses_is_what_numpy_counts(x, y):
    # The product of two float16 numbers is exact in float64.
    exact = x.astype(np.float64) * y.astype(np.float64)
    rounded = exact.astype(np.float16)
    is_zero = is_subnormal(exact) & (rounded == 0)
    becomes_subnormal = is_subnormal(exact) & is_subnormal(rounded)
    if is_subnormal(x).any() or is_subnormal(y).any():
        # If any input was subnormal, a subnormal result counts only if it was rounded.
        becomes_subnormal &= rounded != exact
    nonzero = np.count_nonzero(exact)
    zeros = np.count_nonzero(is_zero)
    subnormals = np.count_nonzero(becomes_subnormal)
    num_lost = zeros + subnormals

    lost = find_lost(PRODUCT, [x, y], [rounded], least=0.5)
    assert bool(lost) == (num_lost > nonzero / 2)
    if lost:
        assert_fields(lost, nonzero=nonzero, zeros=zeros, subnormals=subnormals)
        assert lost.share == num_lost / nonzero
        # sums, in some order
        lost_sum = np.abs(exact[is_zero]).sum() / np.abs(exact).sum()
        assert lost.lost_sum == pytest.approx(lost_sum, rel=1e-12)


def test_what_was_subnormal_before_is_not_lost_again():
    ones = np.ones(8, HALF)
    subnormal = ones * HALF(2.0**-20)
    assert find_lost(PRODUCT, [subnormal, ones], [subnormal], least=0.5) is None
    # The same numbers, made of others that were not.
    normal = ones * HALF(2.0**-10)
    assert find_lost(PRODUCT, [normal, normal], [subnormal], least=0.5).subnormals == 8


@pytest.mark.worlds
def test_a_value_is_lost_once_where_it_is_lost():
    @summed
    def loss_fn(w):
        tiny = w * 1e-4  # plant: lost
        both = jnp.concatenate([-tiny, tiny + 0])
        moved = both.reshape(2, -1).T[::-1]
        return jnp.where(moved > 1, moved, moved * 2 + moved)

    report = trace(loss_fn, half(*np.linspace(1e-4, 2e-4, 8)), loss_scale=2.0**12)
    (place,) = report.underflows
    assert_fields(place, line=line("lost"), direction="forward", zeros=8, nonzero=8)


def test_only_the_first_places_are_printed():
    report = report_of_underflows()
    assert len(report.underflows) == 8
    lines = str(report).splitlines()
    assert sum(line.startswith("underflow: ") for line in lines) == 5
    assert lines[-1] == "and 3 more places: underflow"


def test_formats_of_the_range_of_float32_do_not_underflow():
    loss_fn = summed(lambda w: w * 1e-30)
    for dtype in (jnp.bfloat16, jnp.float32):
        report = trace(loss_fn, jnp.ones(8, dtype))
        assert not report.found, dtype


def test_float8_underflows():
    def cast(w):
        narrow = w.astype(jnp.float8_e4m3fn)  # plant: float8
        return jnp.mean(narrow.astype(jnp.float32))

    place = trace(cast, half(*[2.0**-12] * 8)).underflows[0]
    assert_fields(place, line=line("float8"), dtype="float8_e4m3fn", zeros=8)


# What looks like a fault and is none.

# Subnormal, and exact: nothing is lost.
EXACT = half(2.0**-14 + 2.0**-24, 2.0**-14)
# A sum with a rounding error of 2**-25 in float32, where the truth is 0.
SMALL = 2.0**-13
CANCELLED = half([1, 3 * SMALL, 1, 3 * SMALL], [1, 2 * SMALL, -1, -2 * SMALL])


def dropout_in_a_scan(w):
    def drop(key):
        return jnp.where(jax.random.bernoulli(key, 0.1, w.shape), w, 0)

    return jax.lax.map(drop, jax.random.split(jax.random.key(0), 3))


def causal_mask(w):
    scores = jnp.where(jnp.tri(8, dtype=bool), w, -jnp.inf)
    return jax.nn.softmax(scores)


def argmax(w):
    large = jnp.where(w > 1.5, w, -jnp.inf)
    return w * jnp.argmax(large)


def dead_code(w):
    # The logarithms of 0 are -inf, and nothing uses them.
    @jax.jit
    def double_both(a, b):
        return a * 2, b * 2

    def body(x, _):
        return x * 2, jnp.log(x * 0)

    called, _ = double_both(w, jnp.log(w * 0))
    # The scan has no derivative, so it runs as it is written, with its unused output.
    carried, _ = jax.lax.scan(body, jax.lax.stop_gradient(w), length=2)
    return called * carried


def printed(w):
    jax.debug.callback(lambda _: None, jnp.log(w * 0))
    return w


HARMLESS = {
    "dropout in a scan": dropout_in_a_scan,
    "causal mask": causal_mask,
    "argmax": argmax,
    "dead code": dead_code,
    "difference": lambda w: w + (jnp.full(8, EXACT[0]) - jnp.full(8, EXACT[1])),
    "printed": printed,
    "cancelled": lambda w: w + jnp.dot(*jnp.asarray(CANCELLED)),
    "backward rule in range": backward_times_32,
}


@cases("name", HARMLESS, fast=["dead code", "cancelled", "backward rule in range"])
def test_nothing_is_found_where_zeros_and_infinities_are_meant(name):
    loss_fn = summed(HARMLESS[name])
    report = trace(loss_fn, half(*np.linspace(1, 2, 8)), loss_scale=2.0**10)
    assert str(report).startswith("nothing found")


def test_nothing_is_found_of_a_mask_among_the_arguments():
    def fun(w, mask):
        return mean_square(jax.nn.softmax(w + mask))

    assert not trace(fun, X[:2], BATCH["mask"]).found


def test_effects_of_a_program_happen():
    seen = []

    def fun(w):
        jax.debug.callback(seen.append, w[0])
        return w

    trace(summed(fun), half(3, 1))
    jax.effects_barrier()
    assert seen == [3]


# Numbers of the source that are rounded before anything runs.


@summed
def with_rounded_numbers(w):
    x = w / (jnp.abs(w) + 1e-9)  # plant: became zero
    x = x.sum() / 70000  # plant: became inf
    # A zero and an infinity that were written as such are not reported.
    return x * 0.0 + jnp.inf * 1e-3 + w[0]


def test_numbers_that_become_zero_or_inf_are_named_with_their_lines():
    report = trace(with_rounded_numbers, half(1, 1, 1, 1), loss_scale=1)
    zero, infinite = report.constants
    assert_fields(zero, value=1e-9, became=0.0, dtype="float16")
    assert_fields(zero, line=line("became zero"), primitive="add")
    assert_fields(infinite, value=70000.0, became=np.inf, dtype="float16")
    assert_fields(infinite, line=line("became inf"), primitive="div")
    assert "1e-09 is 0 in float16" in str(zero)


@summed
def with_bounds(w):
    x = jnp.minimum(w, 1 - 1e-5)  # plant: became 1
    x = jnp.maximum(x, -1 + 1e-5)  # plant: became -1
    # A line with a 1 of its own may mean that one.
    x = jnp.minimum(x, 1.0) * (1 - 1e-5)
    return jnp.where(x > 1.0, x, 0)


def test_numbers_that_become_one_are_named_with_their_lines():
    report = trace(with_bounds, half(1, 0.5, -0.5, -1), loss_scale=1)
    one, minus_one = report.constants
    assert_fields(one, value=1 - 1e-5, became=1.0, line=line("became 1"))
    assert_fields(minus_one, value=-1 + 1e-5, became=-1.0, line=line("became -1"))
    assert "0.99999 is 1 in float16" in str(one)


@pytest.mark.worlds
def test_numbers_in_bfloat16_are_what_they_say():
    ones = jnp.ones(4, jnp.bfloat16)
    assert trace(with_rounded_numbers, ones, loss_scale=1).constants == ()
