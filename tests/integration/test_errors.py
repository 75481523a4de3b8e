"""Wrong calls, and the words of their errors, in the chapters of `errors`.

An error names the call, the argument, the value and the way out.
"""

import collections
import doctest
import functools
import pathlib
import re
from typing import Any

import bad_input
import haiku
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from bad_input import (
    OPT_STATE,
    PAIR,
    SGD,
    TX,
    W,
    assert_says,
    flax_state,
    never_traced,
    product_sum,
)
from flax import linen, nnx
from following import Following
from forged import forged
from tables import cases

import jaxscale
from jaxscale import flax, presets
from jaxscale.nnx import train_step as nnx_train_step

pytestmark = pytest.mark.standard_promotion


def test_the_error_of_a_number_for_an_optimizer_names_the_way_out():
    with pytest.raises(TypeError, match=r"loss_scaled\(inner\).*got 0\.1.*optax\.adam"):
        jaxscale.loss_scaled(0.1)


# What the chapters use: optimizers, states, losses and hooks that are right or wrong.

ADAM = optax.adam(0.1)
SCALED_ADAM = jaxscale.loss_scaled(ADAM)
SKIPPING = jaxscale.skip_nonfinite(SGD)
SKIPPING_ADAM = jaxscale.skip_nonfinite(ADAM)
SPIKES = jaxscale.skip_nonfinite(SGD, spikes=jaxscale.SpikeRule())
HALF = {"w": W.astype(jnp.bfloat16)}
MASTERS = jaxscale.master_weights(SGD)
SAVED = jaxscale.to_state_dict(OPT_STATE)
FOLLOWING = Following().init()


def restore(**fields):
    """Reads a state that was saved with some fields of another kind."""
    jaxscale.from_state_dict(OPT_STATE, SAVED | fields)


def run_step(loss_fn, *more, tx=TX, **options):
    """Makes a step from right parameters and a right state."""
    return jaxscale.train_step(loss_fn, tx, **options)(W, tx.init(W), *more)


def step_from(params, opt_state, tx=TX):
    """Makes a step from wrong parameters or a wrong state: an error before anything is traced."""
    return jaxscale.train_step(never_traced, tx)(params, opt_state)


# Linen, NNX and Haiku.


def apply_fields(grads=None, **fields):
    """Applies gradients to a state whose fields `stats` and `ema` may be replaced."""
    return flax_state().apply_gradients(grads=grads or {"w": W}, **fields)


def run_linen(loss_fn, **options):
    """Makes a step from a right state."""
    return flax.train_step(loss_fn, **options)(flax_state())


def linen_from(state, **options):
    """Makes a step from a wrong state, which is an error before anything is traced."""
    return flax.train_step(never_traced, **options)(state, W)


def return_fields(fields, **options):
    """Makes a step with a loss that returns these fields of the state."""

    def loss_fn(params, state):
        return jnp.sum(params["w"]), fields

    return run_linen(loss_fn, has_state=True, **options)


def nnx_pair(tx=TX, size=2):
    """Returns a model and its optimizer."""
    model = nnx.Linear(2, size, rngs=nnx.Rngs(0))
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


MODEL, OPTIMIZER = nnx_pair()


def run_nnx(**options):
    """Makes a step of a right model and optimizer."""

    def loss_fn(model, x):
        return jnp.sum(model(x))

    return nnx_train_step(loss_fn, **options)(*nnx_pair(), W)


def nnx_from(model, optimizer):
    """Makes a step of a wrong pair, which is an error before anything is traced."""
    return nnx_train_step(never_traced)(model, optimizer, W)


class Wrapping(linen.Module):
    """A module that calls a layer of its own, wrapped."""

    layer: Any

    @linen.compact
    def __call__(self, x):
        return jaxscale.autocast(self.layer)(x)


class WrappingInside(linen.Module):
    """A module that calls a function of a new layer, wrapped."""

    @linen.compact
    def __call__(self, x):
        return jaxscale.autocast(lambda x: linen.Dense(2)(x))(x)


WRAPPING = Wrapping(linen.Dense(2))
NORMALIZING = Wrapping(linen.BatchNorm(use_running_average=False))
STATISTICS = {
    "params": {"layer": {"scale": W, "bias": W}},
    "batch_stats": {"layer": {"mean": W, "var": W}},
}


@haiku.transform_with_state
def wrapping_in_haiku(x):
    return jaxscale.autocast(haiku.Linear(2))(x)


@haiku.transform_with_state
def counting_in_haiku(x):
    def count_and_multiply(x):
        count = haiku.get_state("count", (), init=jnp.zeros)
        haiku.set_state("count", count + 1.0)
        return x @ x

    return jaxscale.autocast(count_and_multiply)(x)


def init_module(model):
    return model.init(jax.random.key(0), jnp.ones((2, 2)))


# The chapters.


def read_rows(chapter):
    """The wrong calls of a chapter: for each its title, its lines of code, and its error.

    Lines before the last one prepare the call.
    """
    rows = []
    title = ""
    lines = []
    for part in doctest.DocTestParser().parse(chapter.read_text()):
        if isinstance(part, str):
            title = part.strip() or title
            continue
        lines.append(part.source)
        if part.exc_msg:
            name = f"{chapter.stem}: {title}"
            marks = [pytest.mark.worlds] if chapter.stem == "flax" else []
            rows.append(pytest.param(lines, part.exc_msg, id=name, marks=marks))
            lines = []
    return rows


CHAPTERS = sorted((pathlib.Path(__file__).parent / "errors").glob("*.txt"))


@pytest.mark.filterwarnings("ignore:.*bare optimizer:UserWarning")
@pytest.mark.filterwarnings("ignore:`autocast` changes nothing:UserWarning")
@pytest.mark.parametrize(
    ("lines", "error"), [row for chapter in CHAPTERS for row in read_rows(chapter)]
)
def test_a_wrong_call_says_what_is_wrong(lines, error):
    modules = {"collections": collections, "presets": presets}
    public = {name: getattr(jaxscale, name) for name in jaxscale.__all__}
    names = public | vars(bad_input) | globals() | modules
    *before, call = lines
    for line in before:
        exec(line, names)
    message = error.strip().replace("\\n", "\n")
    assert_says(functools.partial(eval, call, names), message)


# Operations that cannot be transformed. Transformations of a function, and patterns for the way out
# that their errors name.
TRANSFORMS = {
    "autocast": (jaxscale.autocast, r"`jaxscale\.full_precision`"),
    "scale_backward": (jaxscale.scale_backward, "outside of the function"),
}
PROGRAM = jax.make_jaxpr(lambda x: jnp.tanh(x @ x))(jnp.ones((2, 2)))


# Operations in a form that JAX has not given them yet: the name, the parameters, and a pattern for
# what the error says about them.
WITHOUT_DIMENSIONS = ("dot_general", {}, "KeyError: 'dimension_numbers'")
STRANGE = {
    "autocast: a product without dimensions": WITHOUT_DIMENSIONS,
    "autocast: a product of no dimensions": (
        "dot_general",
        {"dimension_numbers": None},
        "TypeError: .*",
    ),
    "scale_backward: a product without dimensions": WITHOUT_DIMENSIONS,
    "scale_backward: a call that is placed nowhere": (
        "jit",
        {"jaxpr": PROGRAM, "in_shardings": None},
        "TypeError: .*",
    ),
    "scale_backward: a checkpoint without options": (
        "remat2",
        {"jaxpr": PROGRAM.jaxpr},
        "UnknownFormError: remat2",
    ),
}


@pytest.mark.filterwarnings("ignore:`autocast`:UserWarning")
@cases("name", STRANGE)
def test_an_operation_that_cannot_be_transformed_is_named_with_its_line(name):
    operation, params, reason = STRANGE[name]
    transform, _, _ = name.partition(":")
    wrap, way_out = TRANSFORMS[transform]
    strange = forged(operation, params, jnp.tanh)

    @wrap
    def loss(w):
        return jnp.sum(jax.jit(lambda w: strange(w @ w))(w))

    code = strange.__code__
    line = re.escape(f"{code.co_filename}:{code.co_firstlineno} (in `<lambda>`)")
    expected = (
        rf"^`{transform}\(fun\)` cannot transform the operation `{operation}` at {line}, .*"
        rf"\({reason}\)\. .*{way_out}.*JAX {jax.__version__}\.(\n|$)"
    )
    with pytest.raises(TypeError, match=expected):
        jax.make_jaxpr(jax.grad(loss))(jnp.ones((2, 2)))


# Errors of the user's own functions.


@cases("transform", TRANSFORMS)
@pytest.mark.parametrize(
    "error", [KeyError("key"), IndexError(), ValueError("no"), TypeError()]
)
def test_an_error_of_a_rule_of_the_user_is_left_alone(error, transform):
    def fail(*_):
        raise error

    product = jax.custom_jvp(lambda w: w @ w)
    product.defjvp(fail)

    wrap, _ = TRANSFORMS[transform]

    @wrap
    def half_loss(w):
        return jnp.sum(jax.jit(product)(w.astype(jnp.float16))) * 1.0

    def loss(w):
        return half_loss(w).astype(jnp.float32)

    with pytest.raises(type(error)) as raised:
        jax.grad(loss)(jnp.ones((2, 2)))
    assert raised.value is error


def with_data(fun):
    """Returns a function with the signature of `fun` that passes it one more argument."""
    return functools.wraps(fun)(lambda *args, **kwargs: fun(*args, W, **kwargs))


def calls_wrongly(w):
    return product_sum(w)


def raises_type_error(w, x):
    return len(w, x)


LOSSES = {
    "alone": calls_wrongly,
    "in autocast": jaxscale.autocast(calls_wrongly),
    "compiled": jax.jit(calls_wrongly),
    "with data": with_data(raises_type_error),
}


@cases("name", LOSSES)
def test_a_type_error_of_the_loss_itself_is_left_alone(name):
    message = r"^product_sum\(\) missing 1|^len\(\) takes exactly one"
    with pytest.raises(TypeError, match=message):
        run_step(LOSSES[name])


# What looks wrong, and is right.


def test_a_loss_with_the_signature_of_another_is_called_as_it_is():
    _, opt_state, _ = run_step(with_data(product_sum))
    assert opt_state.step_applied


def test_a_version_as_a_file_of_arrays_holds_it_is_read():
    restored = jaxscale.from_state_dict(OPT_STATE, SAVED | {"version": np.array(1)})
    assert restored.total_steps == 0


@pytest.mark.worlds
def test_gradients_by_example_are_left_to_the_optimizer():
    """It takes them with an axis in front."""
    private = jaxscale.loss_scaled(
        optax.contrib.differentially_private_aggregate(1.0, 0.0, 0)
    )
    grads = {"w": jnp.ones((4, 2)), "b": jnp.ones((4, 2))}
    params, _ = jaxscale.apply_gradients(private, grads, private.init(PAIR), PAIR)
    assert params["w"].shape == (2,)


LOOKAHEAD = optax.LookaheadParams.init_synced(PAIR)


def test_gradients_of_the_fast_parameters_of_two_sets_are_left_to_the_optimizer():
    lookahead = jaxscale.loss_scaled(optax.lookahead(SGD, 2, slow_step_size=0.5))
    params, opt_state = jaxscale.apply_gradients(
        lookahead, PAIR, lookahead.init(LOOKAHEAD), LOOKAHEAD
    )
    assert opt_state.step_applied
    np.testing.assert_allclose(params.fast["w"], W - 0.1)


def test_what_fails_inside_of_an_optimizer_of_two_sets_is_not_said_to_be_the_structure():
    def fail(*args):
        raise ValueError("no step today")

    failing = jaxscale.loss_scaled(
        optax.GradientTransformation(lambda params: (), fail)
    )
    with pytest.raises(ValueError, match="no step today"):
        jaxscale.apply_gradients(failing, PAIR, failing.init(LOOKAHEAD), LOOKAHEAD)


class SowingInside(linen.Module):
    """A module in which a wrapped function stores what it did not compute."""

    @linen.compact
    def __call__(self, x):
        def sow_and_multiply(x):
            self.sow("intermediates", "outer", outer)
            return x @ x

        outer = x + 1.0
        return jaxscale.autocast(sow_and_multiply)(x)


def test_a_wrapped_function_may_store_what_it_did_not_compute():
    x = jnp.ones((2, 2))
    apply = functools.partial(SowingInside().apply, mutable=["intermediates"])
    for run in (apply, jax.jit(apply)):
        _, stored = run({}, x)
        np.testing.assert_array_equal(stored["intermediates"]["outer"][0], x + 1.0)


def test_a_wrapped_layer_that_only_reads_its_variables_is_right():
    x = jnp.array([[1.0, 2.0], [3.0, 4.0]])
    expected = [[4.0, 4.0], [8.0, 8.0]]
    kernel = jnp.ones((2, 2))
    layer = {"layer": {"kernel": kernel, "bias": W}}
    np.testing.assert_array_equal(WRAPPING.apply({"params": layer}, x), expected)
    weights = {"linear": {"w": kernel, "b": W}}
    outputs, _ = wrapping_in_haiku.apply(weights, {}, None, x)
    np.testing.assert_array_equal(outputs, expected)
