"""The trace of a backward pass: it names the line where numbers get lost, and only that."""

import functools
import itertools

import equinox as eqx
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


MODELS = ["convnet", "rnn"]


@pytest.mark.slow
@cases(("model", "loss_scale"), itertools.product(MODELS, [1, 2.0**15]))
def test_nothing_is_found_in_a_healthy_model(model, loss_scale):
    report = trace_model(model, None, loss_scale)
    assert not report.found
    assert report.first_nonfinite is None
    assert str(report).startswith("nothing found: ")


@pytest.mark.slow
@cases("model", MODELS)
def test_an_overflow_of_the_forward_pass_is_found_at_its_line(model):
    report = trace_model(model, "overflow", 1)
    first = report.first_nonfinite
    assert (first.file, first.line) == (planted.__file__, planted.marked(f"{model}, overflow"))
    assert first.source.endswith(f"# plant: {model}, overflow")
    assert (first.direction, first.scaled, first.cause) == ("forward", False, "range")
    assert (first.dtype, first.elements) == ("float16", first.share * np.prod(first.shape))
    # The hyperbolic tangent of inf is 1: in the RNN the inf becomes a finite, wrong number.
    assert ("loss" in first.reaches) == (model != "rnn")


@cases("model", MODELS, fast=["rnn"])
def test_an_overflow_of_the_backward_pass_is_found_at_its_line_and_goes_with_the_scale(model):
    first = trace_model(model, "backward", 2.0**15).first_nonfinite
    assert (first.file, first.line) == (planted.__file__, planted.marked(f"{model}, backward"))
    assert (first.direction, first.scaled, first.cause) == ("backward", True, "range")
    assert first.reaches
    assert "loss" not in first.reaches
    assert not trace_model(model, "backward", 1).found


@pytest.mark.slow
@cases("model", MODELS)
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


MODULES = {
    "equinox": lambda: (eqx.nn.Linear(3, 2, key=jax.random.key(0)), eqx.filter_value_and_grad),
    "nnx": lambda: (nnx.Linear(3, 2, rngs=nnx.Rngs(0)), nnx.value_and_grad),
}


@cases("name", MODULES, fast=["equinox"])
def test_modules_can_be_parameters(name):
    def fun(model, x):
        return jnp.mean(jax.vmap(model)(x).astype(HALF) * 65000)  # plant: module

    model, transform = MODULES[name]()
    first = trace(fun, model, jnp.full((2, 3), 9.0), transform=transform).first_nonfinite
    assert (first.line, first.direction) == (line("module"), "forward")


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


@cases("case", BAD_INPUT)
def test_bad_input_gets_one_clear_sentence(case):
    fun, state, args, error, message = BAD_INPUT[case]
    with pytest.raises(error, match=f"(?s)^`trace.*{message}"):
        diagnostics.trace(fun, state)(*args)


def test_it_says_that_it_cannot_run_inside_jit():
    with pytest.raises(TypeError, match=r"^`trace` reads values"):
        jax.jit(lambda w: diagnostics.trace(jnp.sum, scaling())(w).loss)(X)


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
