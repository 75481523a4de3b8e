"""The trace of a backward pass: it names the line where numbers get lost, and only that."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import planted
import pytest
from flax import nnx
from planted import HALF, scaling, trace
from tables import cases

from jaxscale import diagnostics
from jaxscale.diagnostics._trace.backward import TracedBackward

pytestmark = pytest.mark.standard_promotion


def line(name):
    return planted.marked(name, __file__)


@functools.cache
def backward_of(model, plant):
    fun = functools.partial(getattr(planted, model), plant=plant)
    args = getattr(planted, f"{model}_case")(*[plant] * (model == "convnet"))
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


def masked(scores):
    mask = jnp.tri(2, dtype=bool) & (jnp.arange(2) > 0)
    scores = jnp.where(mask, scores, -jnp.inf)
    return jnp.sum(jax.nn.softmax(scores).astype(jnp.float32))  # plant: masked row


def test_a_row_that_is_masked_throughout_is_found_and_other_masks_are_not():
    report = trace(masked, jnp.ones(2, HALF), loss_scale=1)
    first = report.first_nonfinite
    assert (first.line, first.cause, first.primitive) == (line("masked row"), "infinities", "sub")
    assert {place.cause for place in report.nonfinite} == {"infinities", "given"}


def test_how_far_a_pass_is_is_told_while_it_runs():
    def fun(x):
        y, _ = jax.lax.scan(lambda y, _: (jnp.sin(y), None), x, None, length=3)
        y += jax.lax.stop_gradient(jax.lax.while_loop(lambda y: y[0] < 4, lambda y: y + 1, y))
        return jnp.mean(y.astype(jnp.float32))

    backward, said = TracedBackward(fun, (jnp.ones(2, HALF),), {}), []
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


def test_modules_can_be_parameters():
    def fun(model, x):
        return jnp.mean(model(x).astype(HALF) * 65000)  # plant: module

    model, x = nnx.Linear(3, 2, rngs=nnx.Rngs(0)), jnp.full((2, 3), 9.0)
    first = trace(fun, model, x, transform=nnx.value_and_grad).first_nonfinite
    assert (first.line, first.direction) == (line("module"), "forward")


X = jnp.ones(3)
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


def _twin(dtype):
    """A loss whose narrow parts are in `dtype`, with everything that holds equations."""

    @jax.custom_vjp
    def doubled(x):
        return x * 2

    doubled.defvjp(lambda x: (x * 2, None), lambda _, ct: (ct * 2 + 1e-9,))

    @jax.checkpoint
    def block(x, w):
        return x + jnp.tanh(x @ w)

    def fun(params, x):
        w, x = params.astype(dtype), x.astype(dtype)
        x, _ = jax.lax.scan(lambda x, _: (block(x, w), None), x, length=3)
        x = jax.lax.cond(x[0, 0] > -100, lambda x: jnp.exp(x - 5), lambda x: x, x)
        x = jax.lax.fori_loop(0, 2, lambda i, x: x * 0.75 + 3e-9, x)
        x = doubled(jax.jit(lambda x: x / (jnp.abs(x) + 1e-9))(x) + x)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    return fun


@pytest.mark.slow
def test_a_pass_with_everything_in_float32_has_the_gradients_of_float32():
    params, x = planted.normal(0, 4, 4), planted.normal(1, 3, 4)
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
    def fun(w):
        is_large = jax.lax.bitcast_convert_type(w * 2, jnp.uint16) > 0x4400  # 4, in float16
        return jnp.sum((w * is_large).astype(jnp.float32))

    backward = TracedBackward(fun, (jnp.array([1, 3], HALF),), {})
    assert backward.run(1.0, lambda key: True).grads["grads"].tolist() == [0, 1]


def test_what_is_only_rounding_changes_when_float32_is_shaken():
    def fun(params, x):
        weights = jax.nn.softmax(x @ params["w"] + params["shift"])  # the same for all: no effect
        return jnp.sum(weights**2)

    params, x = {"w": planted.normal(0, 4, 4), "shift": jnp.ones(())}, planted.normal(1, 3, 4)
    backward = TracedBackward(fun, (params, x), {})
    exact, shaken = (
        backward.run(1.0, lambda place: True, is_shaken=s).grads for s in (False, True)
    )
    change = {name: np.linalg.norm(shaken[name] - exact[name]) for name in exact}
    assert change["grads['w']"] < 1e-4 * np.linalg.norm(exact["grads['w']"])
    assert change["grads['shift']"] > 0.3 * np.linalg.norm(exact["grads['shift']"])
