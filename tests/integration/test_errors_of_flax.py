"""Wrong calls of `jaxscale.flax` (Linen) and `jaxscale.nnx`."""

import functools
from typing import Any

import haiku
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from bad_input import (
    SGD,
    TX,
    W,
    assert_says,
    flax_state,
    never_traced,
    without_return,
)
from flax import linen, nnx
from flax.training import train_state
from tables import cases

import jaxscale
from jaxscale import flax
from jaxscale.nnx import train_step as nnx_train_step

SKIPPING = jaxscale.skip_nonfinite(SGD)
SKIPPING_ADAM = jaxscale.skip_nonfinite(optax.adam(0.1))
ONES = {"w": W}
FLAX_OWN = train_state.TrainState.create(apply_fn=None, params=W, tx=TX)


def linen_loss(params):
    return jnp.sum(params["w"])


def apply_fields(grads=ONES, **fields):
    """Applies gradients to a state whose fields `stats` and `ema` may be replaced."""
    return flax_state().apply_gradients(grads=grads, **fields)


def run_linen(loss_fn, **options):
    """Makes a step from a right state."""
    return flax.train_step(loss_fn, **options)(flax_state())


def linen_from(state, **options):
    """Makes a step from a wrong state, which is an error before anything is traced."""
    return flax.train_step(never_traced, **options)(state, W)


def return_fields(fields, **options):
    """Makes a step with a loss that returns these fields of the state."""

    def loss_fn(params, state):
        return linen_loss(params), fields

    return run_linen(loss_fn, has_state=True, **options)


def nnx_pair(tx=TX, size=2):
    """Returns a model and its optimizer."""
    model = nnx.Linear(2, size, rngs=nnx.Rngs(0))
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


MODEL, OPTIMIZER = nnx_pair()


def nnx_loss(model, x):
    return jnp.sum(model(x))


def nnx_loss_and_output(model, x):
    return nnx_loss(model, x), x


def run_nnx(loss_fn, *more, tx=TX, **options):
    """Makes a step of a right model and optimizer."""
    return nnx_train_step(loss_fn, **options)(*nnx_pair(tx), *more)


def nnx_from(model, optimizer):
    """Makes a step of a wrong pair, which is an error before anything is traced."""
    return nnx_train_step(never_traced)(model, optimizer, W)


def add_a_variable(model):
    model.extra = nnx.BatchStat(W)


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
KERNEL = {"kernel": jnp.ones((2, 2)), "bias": W}
STATISTICS = {
    "params": {"layer": {"scale": W, "bias": W}},
    "batch_stats": {"layer": {"mean": W, "var": W}},
}


def normalize_inside():
    return NORMALIZING.apply(STATISTICS, jnp.ones((2, 2)), mutable=["batch_stats"])


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


def init(model):
    return model.init(jax.random.key(0), jnp.ones((2, 2)))


def init_compiled(model):
    return jax.jit(model.init)(jax.random.key(0), jnp.ones((2, 2)))


def wrapped_inside(library, variable):
    return (
        f"ValueError: `autocast(fun)` is called inside of a {library} module ... makes or changes "
        f"variables of that module ... {variable} ... `jaxscale.autocast(model.apply)`"
    )


CASES = {
    "linen: a wrapped layer": (
        lambda: init(WRAPPING),
        wrapped_inside("Linen", "['params']['layer']['kernel']"),
    ),
    "linen: a wrapped layer, compiled": (
        lambda: init_compiled(WRAPPING),
        wrapped_inside("Linen", "kernel"),
    ),
    "linen: a wrapped function of a layer": (
        lambda: init(WrappingInside()),
        wrapped_inside("Linen", "kernel"),
    ),
    "linen: wrapped statistics": (
        normalize_inside,
        wrapped_inside("Linen", "['batch_stats']['layer']['mean']"),
    ),
    "haiku: a wrapped layer": (
        lambda: init(wrapping_in_haiku),
        wrapped_inside("Haiku", "['linear']['w']"),
    ),
    "haiku: a wrapped state": (
        lambda: init(counting_in_haiku),
        wrapped_inside("Haiku", "['count']"),
    ),
    "unknown field": (
        lambda: apply_fields(batch_stat=1),
        "ValueError: batch_stat ... extra_args",
    ),
    "unknown always": (
        lambda: apply_fields(always_replace=["rng"]),
        "ValueError: always_replace ... rng",
    ),
    "no verdict": (
        lambda: flax.TrainState.create(apply_fn=None, params=W, tx=SGD),
        "ValueError: TrainState.create(tx= ... LossScaledState ... loss_scaled",
    ),
    "a field of another structure": (
        lambda: apply_fields(stats={"mean": W}),
        "ValueError: TrainState.apply_gradients(stats=...)",
    ),
    "a field of another shape": (
        lambda: apply_fields(stats={"mean": jnp.ones(3), "count": jnp.array(0)}),
        "ValueError: TrainState.apply_gradients(stats=...)",
    ),
    "a field of another dtype": (
        lambda: apply_fields(
            stats={"mean": W.astype("float16"), "count": jnp.array(0)}
        ),
        "TypeError: TrainState.apply_gradients(stats=...)",
    ),
    "linen: an optimizer of other parameters": (
        lambda: linen_from(
            flax_state(SKIPPING_ADAM).replace(params={"w": jnp.ones(5)})
        ),
        (
            "ValueError: flax.train_step(...)(state.opt_state= ... other parameters ... "
            "(5,) at  ... got  ... (2"
        ),
    ),
    "linen: a hook that returns a field": (
        lambda: run_linen(linen_loss, after=lambda state: state.stats),
        (
            "TypeError: flax.train_step(after=...)` ... `TrainState` that it got "
            "... got dict ... state.replace"
        ),
    ),
    "linen: a hook that changes a shape": (
        lambda: run_linen(linen_loss, after=lambda state: state.replace(stats=W)),
        "ValueError: flax.train_step(after=...)` needs two trees ... 'stats'",
    ),
    "linen: an unknown field": (
        lambda: return_fields({"batch_stats": 1}),
        (
            "ValueError: flax.train_step(loss_fn, has_state=True) ... got "
            "batch_stats among ... : ema, stats."
        ),
    ),
    "linen: a field of another dtype": (
        lambda: return_fields({"stats": {"mean": W, "count": jnp.array(4.0)}}),
        "TypeError: flax.train_step(stats= ... equal dtypes ... count",
    ),
    "linen: a field that is always replaced and not returned": (
        lambda: return_fields({}, always_replace=("ema",)),
        (
            "ValueError: flax.train_step(always_replace=...)` got ema among ... "
            "`loss_fn` must return"
        ),
    ),
    "linen: fields to replace, and no state": (
        lambda: flax.train_step(never_traced, always_replace=("key",)),
        ("ValueError: flax.train_step(always_replace=('key',))` needs has_state=True"),
    ),
    "linen: no fields": (
        lambda: run_linen(lambda params, state: linen_loss(params), has_state=True),
        (
            "TypeError: flax.train_step(loss_fn, has_state=True) ... (loss, "
            "state), got an array"
        ),
    ),
    "linen: retries without a scale": (
        lambda: linen_from(flax_state(SKIPPING), retries=1),
        (
            "ValueError: flax.train_step(retries=1) ... loss scale that can be "
            "lowered ... NoOpLossScale"
        ),
    ),
    "nnx: a hook that returns the model": (
        lambda: run_nnx(nnx_loss, W, after=lambda model: model),
        (
            "TypeError: nnx.train_step(after=...)` changes the model in place ... "
            "return None, got Linear"
        ),
    ),
    "nnx: a hook that adds a variable": (
        lambda: run_nnx(nnx_loss, W, after=add_a_variable),
        (
            "ValueError: nnx.train_step(after=...)` must keep the variables ... "
            "added or removed extra. Make"
        ),
    ),
    "nnx: the transformation": (
        lambda: nnx_from(MODEL, TX),
        ("TypeError: must be an `nnx.Optimizer` ... GradientTransformation ... wrt="),
    ),
    "nnx: swapped": (
        lambda: nnx_from(OPTIMIZER, MODEL),
        "TypeError: nnx.train_step(...)(model, optimizer ... got Linear",
    ),
    "nnx: an auxiliary output": (
        lambda: run_nnx(nnx_loss_and_output, W),
        (
            "TypeError: nnx.train_step(loss_fn) ... got (an array, an array). Pass "
            "has_aux=True ...  the loss."
        ),
    ),
    "nnx: compiled by JAX": (
        lambda: jax.jit(nnx_train_step(never_traced))(MODEL, OPTIMIZER, W),
        "TypeError: nnx.train_step ... `nnx.jit(step)` for `jax.jit",
    ),
    "nnx: an optimizer of another model": (
        lambda: nnx_from(nnx_pair(SKIPPING_ADAM)[0], nnx_pair(SKIPPING_ADAM, 5)[1]),
        (
            "ValueError: `nnx.train_step(...)(optimizer= ... of another optimizer "
            "or of other parameters"
        ),
    ),
    "nnx: what is not trained": (
        lambda: run_nnx(never_traced, W, argnums=1),
        (
            "ValueError: nnx.train_step(argnums=1) ... wrt=<class 'flax ... "
            "Param'> ... tx, wrt=nnx.LoRAParam"
        ),
    ),
    "nnx: no batch": (
        lambda: run_nnx(nnx_loss),
        (
            "TypeError: nnx.train_step(loss_fn)`: `loss_fn` takes (model, x): "
            "missing ... with (Linear)"
        ),
    ),
    "nnx: a loss without return": (
        lambda: run_nnx(without_return),
        (
            "TypeError: `nnx.train_step(loss_fn)` ... got NoneType. Does `loss_fn` "
            "end without `return loss`"
        ),
    ),
    "linen: a loss without return": (
        lambda: run_linen(without_return),
        (
            "TypeError: `flax.train_step(loss_fn)` ... got NoneType. Does "
            "`loss_fn` end without `return loss`"
        ),
    ),
    "a scalar gradient in a TrainState": (
        lambda: apply_fields(grads={"w": jnp.ones(())}),
        (
            "ValueError: `TrainState.apply_gradients(grads=...)`: the gradient at "
            "w has the shape ()"
        ),
    ),
    "other keys in a TrainState": (
        lambda: apply_fields(grads={"v": W}),
        (
            "ValueError: `TrainState.apply_gradients(grads=...)` must have the structure "
            "... gradients: v;  ... parameters: w."
        ),
    ),
    "nnx: retries without a scale": (
        lambda: run_nnx(never_traced, W, tx=SGD, retries=2),
        (
            "ValueError: nnx.train_step(retries=2) ... got a bare optimizer. Write ... "
            "loss_scaled(tx)"
        ),
    ),
}


@pytest.mark.worlds
@pytest.mark.standard_promotion
@pytest.mark.filterwarnings("ignore:.*bare optimizer:UserWarning")
@pytest.mark.filterwarnings("ignore:`autocast` changes nothing:UserWarning")
@cases("name", CASES)
def test_bad_input(name):
    assert_says(*CASES[name])


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
    outputs = WRAPPING.apply({"params": {"layer": KERNEL}}, x)
    np.testing.assert_array_equal(outputs, expected)
    weights = {"linear": {"w": KERNEL["kernel"], "b": W}}
    outputs, _ = wrapping_in_haiku.apply(weights, {}, None, x)
    np.testing.assert_array_equal(outputs, expected)
