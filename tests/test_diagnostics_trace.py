"""The trace of a backward pass: it names the line where numbers get lost, and only that."""

import dataclasses
import functools
import json

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import planted
import pytest
from tables import assert_same_bits

import jaxscale
from jaxscale import diagnostics
from jaxscale._diagnose_interpret import Interpreter, Value
from jaxscale._diagnose_jaxpr import FORWARD

pytestmark = pytest.mark.standard_promotion

HALF = jnp.float16
SUBNORMAL = 2.0**-14  # numbers of float16 below this are


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


@pytest.mark.parametrize("loss_scale", [1, 2.0**15])
@pytest.mark.parametrize("model", MODELS)
def test_nothing_is_found_in_a_healthy_model(model, loss_scale):
    report = trace_model(model, None, loss_scale)
    assert not report.found
    assert report.first_nonfinite is None
    assert str(report).startswith("nothing found: ")


@pytest.mark.parametrize("model", MODELS)
def test_an_overflow_of_the_forward_pass_is_found_at_its_line(model):
    first = trace_model(model, "overflow", 1).first_nonfinite
    assert (first.file, first.line) == (planted.__file__, planted.marked(f"{model}, overflow"))
    assert first.source.endswith(f"# plant: {model}, overflow")
    assert (first.direction, first.scaled, first.cause) == ("forward", False, "range")
    assert (first.dtype, first.elements) == ("float16", first.share * np.prod(first.shape))
    # The hyperbolic tangent of inf is 1: what went wrong in the RNN is in finite numbers.
    assert ("loss" in first.reaches) == (model != "rnn")


@pytest.mark.parametrize("model", MODELS)
def test_an_overflow_of_the_backward_pass_is_found_at_its_line_and_goes_with_the_scale(model):
    first = trace_model(model, "backward", 2.0**15).first_nonfinite
    assert (first.file, first.line) == (planted.__file__, planted.marked(f"{model}, backward"))
    assert (first.direction, first.scaled, first.cause) == ("backward", True, "range")
    assert first.reaches
    assert "loss" not in first.reaches
    assert not trace_model(model, "backward", 1).found


@pytest.mark.parametrize("model", MODELS)
def test_an_underflow_is_found_at_its_line_in_both_passes(model):
    report = trace_model(model, "underflow", 1)
    here = [u for u in report.underflows if u.line == planted.marked(f"{model}, underflow")]
    assert report.underflows[0] == here[0]
    assert {(u.direction, u.scaled) for u in here} == {("forward", False), ("backward", True)}
    assert all(u.share > 0.5 and u.file == planted.__file__ for u in here)
    assert not report.nonfinite
    # A higher scale helps what flows backward, and nothing else.
    scaled = trace_model(model, "underflow", 2.0**15)
    here = [u for u in scaled.underflows if u.line == planted.marked(f"{model}, underflow")]
    assert "forward" in {u.direction for u in here}
    assert sum(u.scaled for u in scaled.underflows) < sum(u.scaled for u in report.underflows)


def test_a_place_in_a_layer_of_flax_has_its_line_in_the_model_and_its_name():
    first = trace_model("convnet", "layer", 1).first_nonfinite
    assert (first.file, first.line) == (planted.__file__, planted.marked("convnet, layer"))
    assert (first.layer, first.primitive) == ("ConvNet/Dense_0", "dot_general")


@pytest.mark.parametrize(("plant", "step"), [("overflow", 3), ("backward", 2), ("underflow", 1)])
def test_a_place_in_a_scan_has_its_iteration(plant, step):
    report = trace_model("rnn", plant, 2.0**15)
    place = report.first_nonfinite or report.underflows[0]
    assert (place.iteration, place.times, place.visits) == ((step,), 1, 5)


def test_a_row_that_is_masked_throughout_is_found_and_other_masks_are_not():
    report = trace_model("transformer", "masked row", 1)
    first = report.first_nonfinite
    assert first.line == planted.marked("transformer, masked row")
    assert (first.cause, first.primitive) == ("infinities", "sub")
    assert {place.cause for place in report.nonfinite} == {"infinities", "given"}


# One way of each to hold an equation: all of them multiply by a number at a marked line.


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


HOLDERS = {
    f.__name__.removeprefix("_"): f
    for f in (
        *(_while, _cond, _remat, _nested_jit, _vmap, _nested_scan),
        *(_custom_jvp, _custom_vjp, _undifferentiated),
    )
}
ITERATIONS = {"while": (2,), "nested_scan": (1, 2)}


@pytest.mark.parametrize("holder", HOLDERS)
def test_an_equation_is_found_inside_of(holder):
    def fun(x, factor):
        return jnp.mean(HOLDERS[holder](x, factor).astype(jnp.float32) ** 2)

    x = jnp.linspace(1, 3, 8, dtype=HALF)
    assert not trace(fun, x, HALF(1)).found
    first = trace(fun, x, HALF(30000)).first_nonfinite
    assert (first.line, first.direction, first.primitive) == (line(holder), "forward", "mul")
    assert first.iteration == ITERATIONS.get(holder, ())
    underflow = trace(fun, x, HALF(2.0**-17)).underflows[0]
    assert (underflow.line, underflow.direction) == (line(holder), "forward")
    assert underflow.iteration == ITERATIONS.get(holder, ())


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
    # What `jnp.where` is traced to is kept, with the line of its first call.
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


@pytest.mark.parametrize("model", ["convnet", "rnn", "held"])
def test_what_it_computes_is_what_eager_evaluation_computes(model):
    has_aux = model == "convnet"
    fun, args = _held, (jnp.linspace(1, 3, 8, dtype=HALF),)
    if model != "held":
        fun, args = getattr(planted, model), getattr(planted, f"{model}_case")()
    graded = jaxscale.value_and_grad(fun, scaling(8), has_aux=has_aux)
    closed, shapes = jax.make_jaxpr(graded, return_shape=True)(*args)
    interpreter = Interpreter(lambda visit: [frozenset()] * len(visit.outputs))
    needs = (FORWARD,) * len(closed.jaxpr.outvars)
    values = interpreter.run(closed, [Value(leaf) for leaf in jax.tree.leaves(args)], needs)
    actual = jax.tree.unflatten(jax.tree.structure(shapes), [value.array for value in values])
    with jax.disable_jit():
        expected = graded(*args)
    assert_same_bits(actual, expected)
    loss = expected[0][0] if has_aux else expected[0]
    assert trace(fun, *args, loss_scale=8, has_aux=has_aux).loss == float(loss)


@st.composite
def half_floats(draw):
    """Numbers of float16 around the lower end of its range, zeros included."""
    exponents = draw(st.lists(st.integers(-12, 2), min_size=8, max_size=8))
    digits = draw(st.lists(st.integers(-2047, 2047), min_size=8, max_size=8))
    return (np.ldexp(np.array(digits) / 2048, exponents)).astype(np.float16)


@hypothesis.given(half_floats(), half_floats())
def test_an_underflow_counts_what_numpy_counts(x, y):
    # The product of two numbers of float16 is exact in float64.
    exact = x.astype(np.float64) * y.astype(np.float64)
    rounded = exact.astype(np.float16)
    tiny = (exact != 0) & (np.abs(exact) < SUBNORMAL)
    zeros = tiny & (rounded == 0)
    subnormals = tiny & (rounded != 0) & (np.abs(rounded.astype(np.float64)) < SUBNORMAL)
    if ((x != 0) & (np.abs(x) < SUBNORMAL)).any() or ((y != 0) & (np.abs(y) < SUBNORMAL)).any():
        subnormals &= rounded != exact  # what was subnormal before did not become so here
    counts = [int(mask.sum()) for mask in (exact != 0, zeros, subnormals)]

    def fun(w):
        return jnp.sum((w * y).astype(jnp.float32))

    found = [u for u in trace(fun, jnp.asarray(x)).underflows if u.direction == "forward"]
    if counts[1] + counts[2] > counts[0] / 2:
        assert [(u.nonzero, u.zeros, u.subnormals) for u in found] == [tuple(counts)]
        assert found[0].share == (counts[1] + counts[2]) / counts[0]
    else:
        assert not found


def test_a_value_is_lost_once_where_it_is_lost():
    def fun(w):
        tiny = w * 1e-4  # plant: lost
        again = jnp.concatenate([-tiny, tiny + 0]).reshape(2, -1).T[::-1]
        return jnp.sum(jnp.where(again > 1, again, again * 2 + again).astype(jnp.float32))

    report = trace(fun, jnp.linspace(1e-4, 2e-4, 8, dtype=HALF), loss_scale=2.0**12)
    assert [(u.line, u.direction) for u in report.underflows] == [(line("lost"), "forward")]
    assert (report.underflows[0].zeros, report.underflows[0].nonzero) == (8, 8)


def test_a_cast_loses_values_as_other_equations_do():
    def fun(w):
        return jnp.mean(w.astype(HALF).astype(jnp.float32) ** 2)  # plant: cast

    small = trace(fun, jnp.full(4, 1e-8)).underflows[0]
    assert (small.line, small.primitive) == (line("cast"), "convert_element_type")
    assert (small.inputs, small.dtype, small.zeros) == (("float32[4]",), "float16", 4)
    large = trace(fun, jnp.full(4, 1e5)).first_nonfinite
    assert (large.line, large.primitive, large.cause) == (
        line("cast"),
        "convert_element_type",
        "range",
    )


def _relu(w):
    return jax.nn.relu(w - 100)


def _dropout(w):
    return jnp.where(jax.random.bernoulli(jax.random.key(0), 0.1, w.shape), w / 0.1, 0)


def _dropout_in_a_scan(w):
    def body(carry, key):
        return carry, jnp.where(jax.random.bernoulli(key, 0.1, w.shape), w, 0)

    return jax.lax.scan(body, 0, jax.random.split(jax.random.key(0), 3))[1]


def _padding(w):
    return jnp.pad(w, (0, 100)) * jnp.ones(108, HALF)


def _causal_mask(w):
    return jax.nn.softmax(jnp.where(jnp.tri(8, dtype=bool), w, -jnp.inf))


def _large_mask(w):
    return jax.nn.softmax(jnp.where(jnp.tri(8, dtype=bool), w, -1e4))


def _argmax(w):
    return w * jnp.argmax(jnp.where(w > 1.5, w, -jnp.inf))


def _dead_code(w):
    jnp.log(w * 0)
    return w


def _printed(w):
    jax.debug.callback(lambda _: None, jnp.log(w * 0))
    return w


def _cancelled(w):
    # In float32 the sum has a rounding error of 2**-25; the truth is 0.
    a, b = jnp.array([[1, 3 * 2.0**-13, 1, 3 * 2.0**-13], [1, 2.0**-12, -1, -(2.0**-12)]], HALF)
    return w + a @ b


def _empty_scan(w):
    return jax.lax.scan(lambda c, x: (c, x), w, jnp.zeros((0, 3)))[0]


HARMLESS = [
    *(_relu, _dropout, _dropout_in_a_scan, _padding, _causal_mask, _large_mask),
    *(_argmax, _dead_code, _printed, _cancelled, _empty_scan),
]


@pytest.mark.parametrize("harmless", HARMLESS, ids=lambda f: f.__name__.removeprefix("_"))
def test_nothing_is_found_where_zeros_and_infinities_are_meant(harmless):
    def fun(w):
        return jnp.sum(harmless(w).astype(jnp.float32))

    report = trace(fun, jnp.linspace(1, 2, 8, dtype=HALF), loss_scale=2.0**10)
    assert str(report).startswith("nothing found")


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_formats_of_the_range_of_float32_do_not_underflow(dtype):
    assert not trace(lambda w: jnp.sum(w * 1e-30).astype(jnp.float32), jnp.ones(8, dtype)).found


def test_float8_is_looked_at():
    def fun(w):
        return jnp.mean(w.astype(jnp.float8_e4m3fn).astype(jnp.float32))  # plant: float8

    report = trace(fun, jnp.full(8, 2.0**-12, HALF))
    place = report.underflows[0]
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


def test_two_overflows_of_one_array_are_told_apart_from_what_follows():
    def fun(w):
        x = w * jnp.array([1, 1, 60000, 1], HALF)  # plant: one
        x = x * jnp.array([60000, 1, 1, 1], HALF)  # plant: two
        x = x + x.sum() - 1
        return jnp.sum(x.astype(jnp.float32))

    report = trace(fun, jnp.full(4, 2, HALF), loss_scale=1)
    assert [p.line for p in report.nonfinite if p.direction == "forward"] == [
        line("one"),
        line("two"),
    ]
    assert [p.elements for p in report.nonfinite if p.direction == "forward"] == [1, 1]


def test_what_was_in_the_arguments_is_named():
    def fun(w, batch):
        return jnp.mean(w * batch["x"])  # plant: argument

    batch = {"x": jnp.array([1.0, jnp.nan]), "mask": jnp.array([0.0, -jnp.inf])}
    report = trace(fun, jnp.ones(2), batch)
    assert set(report.nonfinite_arguments) == {"args[1]['mask']", "args[1]['x']"}
    first = report.first_nonfinite
    assert (first.line, first.cause) == (line("argument"), "given")
    assert "inf or NaN in the arguments: args[1]['mask'], args[1]['x']" in str(report)


def test_a_mask_of_infinities_in_the_arguments_is_nothing():
    def fun(w, mask):
        return jnp.sum(jax.nn.softmax(w + mask) ** 2)

    assert not trace(fun, jnp.ones(2), jnp.array([0.0, -jnp.inf])).found


def test_a_scale_of_one_and_none_has_a_backward_pass_too():
    def fun(w):
        return jnp.sum(jnp.sqrt(w))  # plant: root

    report = diagnostics.trace(fun, jaxscale.NoOpLossScale().init())(jnp.zeros(2))
    assert report.loss_scale == 1
    assert report.first_nonfinite.direction == "backward"
    assert report.first_nonfinite.line == line("root")


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


def test_modules_of_equinox_and_flax_nnx_can_be_parameters():
    eqx = pytest.importorskip("equinox")
    from flax import nnx

    def fun(model, x):
        return jnp.mean(jax.vmap(model)(x).astype(HALF) * 65000)  # plant: module

    x = jnp.full((2, 3), 9.0)
    linear = eqx.nn.Linear(3, 2, key=jax.random.key(0))
    dense = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    for model, transform in ((linear, eqx.filter_value_and_grad), (dense, nnx.value_and_grad)):
        first = trace(fun, model, x, transform=transform).first_nonfinite
        assert (first.line, first.direction) == (line("module"), "forward")


def test_the_report_is_plain_values_that_read_well():
    def fun(w):
        return jnp.sum((w * 40000).astype(jnp.float32))  # plant: report

    report = trace(fun, jnp.array([1, 1, 1, 2], HALF), loss_scale=1)
    again = json.loads(json.dumps(dataclasses.asdict(report)))
    assert again["nonfinite"][0]["line"] == line("report")
    assert again["loss_scale"] == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.loss = 0.0
    assert hash(report) == hash(trace(fun, jnp.array([1, 1, 1, 2], HALF), loss_scale=1))
    text = str(report).splitlines()
    assert text[0].endswith("equations, loss inf, loss scale 1")
    assert text[1].startswith("first overflow: forward, mul, float16[4], 25 % of the elements, ")
    assert text[1].endswith(
        f"test_diagnostics_trace.py:{line('report')}: "
        "`return jnp.sum((w * 40000).astype(jnp.float32))  # plant: report`"
    )
    assert "float32 would hold it; a lower loss scale cannot help; reaches loss" in text[2]


X = jnp.ones(3)
BAD_INPUT = {
    "not a scalar": (lambda w: w, scaling(), (X,), TypeError, "must return a floating scalar"),
    "not a float": (lambda w: 1, scaling(), (X,), TypeError, "must return a floating scalar"),
    "a pair": (lambda w: (w, w), scaling(), (X,), TypeError, "pass has_aux=True"),
    "integers": (
        lambda p: jnp.sum(p["w"]),
        scaling(),
        ({"w": jnp.arange(3)},),
        TypeError,
        r"floating parameters, got int32\[3\] at args\[0\]\['w'\]\.",
    ),
    "no scaling": (jnp.sum, {"a": X}, (X,), ValueError, "exactly one loss scale state"),
    "a population": (
        jnp.sum,
        jax.vmap(lambda _: scaling())(X),
        (X,),
        ValueError,
        r"needs one loss scale, got an array of shape \(3,\)",
    ),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_gets_one_clear_sentence(case):
    fun, state, args, error, message = BAD_INPUT[case]
    with pytest.raises(error, match=f"(?s)^`trace.*{message}"):
        diagnostics.trace(fun, state)(*args)


def test_it_says_that_it_cannot_run_inside_jit():
    with pytest.raises(TypeError, match=r"^`trace` reads values"):
        jax.jit(lambda w: diagnostics.trace(jnp.sum, scaling())(w).loss)(X)
