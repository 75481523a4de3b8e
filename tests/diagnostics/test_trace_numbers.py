"""What a trace counts as lost or not finite, what it leaves alone, and how it prints."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import planted
import pytest
from planted import HALF, scaling, trace
from tables import cases

import jaxscale
from jaxscale import diagnostics
from jaxscale.diagnostics._trace.numbers import lost_values

pytestmark = pytest.mark.standard_promotion

SUBNORMAL = 2.0**-14  # float16 numbers below this are subnormal


def line(name):
    return planted.marked(name, __file__)


EIGHT = jax.ShapeDtypeStruct((8,), HALF)
(PRODUCT,) = jax.make_jaxpr(jax.lax.mul)(EIGHT, EIGHT).eqns


@st.composite
def half_floats(draw):
    """Float16 numbers around the lower end of its range, zeros included."""
    exponents = draw(st.lists(st.integers(-12, 2), min_size=8, max_size=8))
    digits = draw(st.lists(st.integers(-2047, 2047), min_size=8, max_size=8))
    return (np.ldexp(np.array(digits) / 2048, exponents)).astype(np.float16)


@hypothesis.given(half_floats(), half_floats())
def test_what_a_product_loses_is_what_numpy_counts(x, y):
    # The product of two float16 numbers is exact in float64.
    exact = x.astype(np.float64) * y.astype(np.float64)
    rounded = exact.astype(np.float16)
    tiny = (exact != 0) & (np.abs(exact) < SUBNORMAL)
    zeros = tiny & (rounded == 0)
    subnormals = tiny & (rounded != 0) & (np.abs(rounded.astype(np.float64)) < SUBNORMAL)
    if ((x != 0) & (np.abs(x) < SUBNORMAL)).any() or ((y != 0) & (np.abs(y) < SUBNORMAL)).any():
        subnormals &= rounded != exact  # what was subnormal before did not become so here
    counts = [int(mask.sum()) for mask in (exact != 0, zeros, subnormals)]

    found = lost_values(PRODUCT, [x, y], [rounded], least=0.5)
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
        return jnp.sum(jnp.where(again > 1, again, again * 2 + again).astype(jnp.float32))

    report = trace(fun, jnp.linspace(1e-4, 2e-4, 8, dtype=HALF), loss_scale=2.0**12)
    assert [(u.line, u.direction) for u in report.underflows] == [(line("lost"), "forward")]
    assert (report.underflows[0].zeros, report.underflows[0].nonzero) == (8, 8)


def test_only_the_first_places_are_printed():
    def fun(w):
        return sum(jnp.sum((w * 1e-4).astype(jnp.float32)) for _ in range(8))

    report = trace(fun, jnp.full(4, 1e-4, HALF), loss_scale=2.0**12)
    assert len(report.underflows) == 8
    lines = str(report).splitlines()
    assert sum(line.startswith("underflow: ") for line in lines) == 5
    assert lines[-1] == "and 3 more places: underflow"


def _dropout_in_a_scan(w):
    def body(carry, key):
        return carry, jnp.where(jax.random.bernoulli(key, 0.1, w.shape), w, 0)

    return jax.lax.scan(body, 0, jax.random.split(jax.random.key(0), 3))[1]


def _causal_mask(w):
    return jax.nn.softmax(jnp.where(jnp.tri(8, dtype=bool), w, -jnp.inf))


def _argmax(w):
    return w * jnp.argmax(jnp.where(w > 1.5, w, -jnp.inf))


def _dead_code(w):
    w = jax.jit(lambda a, b: (a * 2, b * 2))(w, jnp.log(w * 0))[0]
    start = jax.lax.stop_gradient(w)
    return w * jax.lax.scan(lambda x, _: (x * 2, jnp.log(x * 0)), start, length=2)[0]


def _difference(w):
    # 2**-24 is subnormal, and exact: nothing is lost.
    return w + (jnp.full(8, 2.0**-14 + 2.0**-24, HALF) - jnp.full(8, 2.0**-14, HALF))


def _printed(w):
    jax.debug.callback(lambda _: None, jnp.log(w * 0))
    return w


def _cancelled(w):
    # In float32 the sum has a rounding error of 2**-25; the truth is 0.
    a, b = jnp.array([[1, 3 * 2.0**-13, 1, 3 * 2.0**-13], [1, 2.0**-12, -1, -(2.0**-12)]], HALF)
    return w + a @ b


HARMLESS = [
    *(_dropout_in_a_scan, _causal_mask, _argmax, _dead_code),
    *(_difference, _printed, _cancelled),
]


@cases("harmless", HARMLESS, fast=[_dead_code, _cancelled])
def test_nothing_is_found_where_zeros_and_infinities_are_meant(harmless):
    def fun(w):
        return jnp.sum(harmless(w).astype(jnp.float32))

    report = trace(fun, jnp.linspace(1, 2, 8, dtype=HALF), loss_scale=2.0**10)
    assert str(report).startswith("nothing found")


def test_formats_of_the_range_of_float32_do_not_underflow_and_float8_does():
    def fun(w):
        return jnp.sum(w * 1e-30).astype(jnp.float32)

    assert not trace(fun, jnp.ones(8, jnp.bfloat16)).found
    assert not trace(fun, jnp.ones(8, jnp.float32)).found

    def cast(w):
        return jnp.mean(w.astype(jnp.float8_e4m3fn).astype(jnp.float32))  # plant: float8

    place = trace(cast, jnp.full(8, 2.0**-12, HALF)).underflows[0]
    assert (place.line, place.dtype, place.zeros) == (line("float8"), "float8_e4m3fn", 8)


def test_what_reaches_the_gradients_comes_before_what_reaches_nothing():
    def fun(w):
        safe = jnp.where(w > 0, jnp.log(w), 0)  # plant: log
        return jnp.sum(safe)

    report = trace(fun, jnp.array([0.0, 1.0, 2.0]))
    first = report.first_nonfinite
    assert (first.line, first.direction, first.cause) == (line("log"), "backward", "value")
    assert (first.reaches, first.elements) == (("grads",), 1)
    (hidden,) = [place for place in report.nonfinite if place is not first]
    assert (hidden.primitive, hidden.direction, hidden.reaches) == ("log", "forward", ())
    assert report.nonfinite_outputs == ("grads",)


def test_an_overflow_is_followed_through_what_a_scan_collects():
    def fun(w):
        _, xs = jax.lax.scan(lambda carry, x: (carry, x * 60000), 0, w)  # plant: collected
        return jnp.sum(xs.astype(jnp.float32)), xs

    first = trace(fun, jnp.full(4, 2, HALF), loss_scale=1, has_aux=True).first_nonfinite
    assert (first.line, first.times, first.iteration) == (line("collected"), 4, (0,))
    assert first.reaches == ("aux", "loss")


def test_two_overflows_of_one_array_are_told_apart_from_what_follows():
    def fun(w):
        x = w * jnp.array([1, 1, 60000, 1], HALF)  # plant: one
        x = x * jnp.array([60000, 1, 1, 1], HALF)  # plant: two
        x = x + x.sum() - 1
        return jnp.sum(x.astype(jnp.float32))

    report = trace(fun, jnp.full(4, 2, HALF), loss_scale=1)
    forward = [(p.line, p.elements) for p in report.nonfinite if p.direction == "forward"]
    assert forward == [(line("one"), 1), (line("two"), 1)]


def test_what_was_in_the_arguments_is_named():
    def fun(w, batch):
        return jnp.mean(w * batch["x"])  # plant: argument

    batch = {"x": jnp.array([1.0, jnp.nan]), "mask": jnp.array([0.0, -jnp.inf])}
    report = trace(fun, jnp.ones(2), batch)
    assert set(report.nonfinite_arguments) == {"args[1]['mask']", "args[1]['x']"}
    first = report.first_nonfinite
    assert (first.line, first.cause) == (line("argument"), "given")
    assert "inf or NaN in the arguments: args[1]['mask'], args[1]['x']" in str(report)
    assert "equations, loss NaN, loss scale 32768" in str(report)

    def masked(w, mask):
        return jnp.sum(jax.nn.softmax(w + mask) ** 2)

    assert not trace(masked, jnp.ones(2), batch["mask"]).found  # infinities for a purpose


def test_a_scale_of_one_and_none_has_a_backward_pass_too():
    def fun(w):
        return jnp.sum(jnp.sqrt(w))  # plant: root

    report = diagnostics.trace(fun, jaxscale.NoOpLossScale().init())(jnp.zeros(2))
    first = report.first_nonfinite
    assert (report.loss_scale, first.direction, first.line) == (1, "backward", line("root"))
    # In float16 the bounds of a float32 divisor are 0 and inf. That is not the model's doing.
    assert not trace(jnp.sum, jnp.ones(3, HALF)).found


def test_the_gradient_of_an_embedding_overflows_in_float16_only():
    def fun(embedding):
        return jnp.sum(embedding[jnp.zeros(3, int)].astype(jnp.float32))

    (place,) = trace(fun, jnp.ones((2, 1), HALF)).nonfinite
    assert (place.primitive, place.cause, place.elements) == ("scatter-add", "range", 1)


def test_the_seed_itself_can_be_too_large():
    def fun(w):
        return jnp.sum((w * 1).astype(jnp.float32))  # plant: seed

    first = trace(fun, jnp.ones(4, HALF), loss_scale=2.0**17).first_nonfinite
    assert (first.line, first.primitive) == (line("seed"), "convert_element_type")
    assert (first.direction, first.scaled) == ("backward", True)


def test_other_transforms_and_their_arguments_pass():
    def fun(w, b, *, offset):
        return jnp.sum(w * b + offset).astype(jnp.float32), {"aux": w * 300 * 300}

    trace_fun = diagnostics.trace(fun, scaling(1), has_aux=True, argnums=(0, 1))
    report = trace_fun(jnp.ones(2, HALF), jnp.full(2, jnp.inf, HALF), offset=1.0)
    assert set(report.nonfinite_outputs) == {"loss", "grads[0]", "aux['aux']"}
    # What is given is left out where another place explains an output.
    assert {place.cause for place in report.nonfinite} == {"range"}


def test_gradients_by_example_are_followed_as_well():
    def by_example(fun, **kwargs):
        return jax.vmap(jax.value_and_grad(fun, **kwargs), (None, 0))

    def fun(w, x):
        return jnp.sum(w * x)

    x = jnp.array([[1, 2], [3, 4], [1, 300]], HALF)
    w = jnp.array([1, 2], HALF)
    report = trace(fun, w, x, transform=by_example, loss_scale=2.0**24)  # float16 caps it
    assert report.loss == (5 + 11 + 601) / 3
    first = report.first_nonfinite
    assert (first.primitive, first.direction, first.share) == ("mul", "backward", 4 / 6)
    assert report.nonfinite_outputs == ("grads",)


def test_the_report_is_plain_values_that_read_well():
    def fun(w):
        return jnp.sum((w * 40000).astype(jnp.float32))  # plant: report

    report = trace(fun, jnp.array([1, 1, 1, 2], HALF), loss_scale=1)
    assert hash(report) == hash(trace(fun, jnp.array([1, 1, 1, 2], HALF), loss_scale=1))
    text = str(report).splitlines()
    assert text[0].endswith("equations, loss inf, loss scale 1")
    assert text[1].startswith("first overflow: forward, mul, float16[4], 25.0% of the elements, ")
    assert text[1].endswith(
        f"test_trace_numbers.py:{line('report')}: "
        "`return jnp.sum((w * 40000).astype(jnp.float32))  # plant: report`"
    )
    assert "float32 would hold it; a lower loss scale cannot help; reaches loss" in text[2]


def test_numbers_that_become_zero_or_inf_are_named_with_their_lines():
    def fun(w):
        x = w / (jnp.abs(w) + 1e-9)  # plant: became zero
        x = x.sum() / 70000  # plant: became inf
        return (x * 0.0 + jnp.inf * 1e-3 + w[0]).astype(jnp.float32)

    constants = trace(fun, jnp.ones(4, HALF), loss_scale=1).constants
    assert [(c.value, c.became, c.line, c.primitive) for c in constants] == [
        (1e-9, 0.0, line("became zero"), "add"),
        (70000.0, np.inf, line("became inf"), "div"),
    ]
    assert {c.dtype for c in constants} == {"float16"}
    assert "1e-09 is 0 in float16" in str(constants[0])
    # In bfloat16 they are what they say.
    assert trace(fun, jnp.ones(4, jnp.bfloat16), loss_scale=1).constants == ()
