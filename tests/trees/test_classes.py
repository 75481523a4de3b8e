"""Classes that look at their children stand wherever trees do, as those of gpjax and brax do.

Their constructors refuse what is not an array of the shape that they know: `None`, numbers, flags.
"""

import contextlib
import io
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from departing import uses_what_goes
from following import Following
from half_programs import autocast_scaled, scaled_autocast
from tables import assert_same_bits, cases

import jaxscale
from jaxscale import diagnostics, scale_backward
from jaxscale._doctor import cli

pytestmark = uses_what_goes

HALF = jnp.float16


class Checked:
    """Two arrays of known shapes."""

    def __init__(self, w, b):
        for leaf, shape in ((w, (3, 4)), (b, (4,))):
            if not isinstance(leaf, jax.Array | np.ndarray) or leaf.shape != shape:
                raise TypeError(f"not an array of shape {shape}: {leaf}")
            if not jnp.issubdtype(leaf.dtype, jnp.floating):
                raise TypeError(f"not floating: {leaf.dtype}")
        self.w = w
        self.b = b


def flatten(node):
    return (node.w, node.b), None


def flatten_with_keys(node):
    key = jax.tree_util.GetAttrKey
    return ((key("w"), node.w), (key("b"), node.b)), None


def register(cls, with_keys=flatten_with_keys):
    jax.tree_util.register_pytree_with_keys(
        cls, with_keys, lambda _, children: cls(*children), flatten
    )
    return cls


register(Checked)


def test_a_step_takes_a_class_that_takes_arrays_alone():
    tx = jaxscale.loss_scaled(optax.sgd(0.5))
    params = Checked(jnp.ones((3, 4)), jnp.zeros(4))
    params, _ = jaxscale.apply_gradients(tx, params, tx.init(params), params)
    assert params.w[0, 0] == 0.5


@register
class Batch(Checked):
    pass


def without_names(node):
    raise RuntimeError("this class does not name its children")


class Unnamed(Checked):
    pass


register(Unnamed, without_names)

PARAMS = Checked(jnp.full((3, 4), 0.5), jnp.zeros(4))
BATCH = Batch(jnp.ones((3, 4)), jnp.ones(4))
SCALING = jaxscale.DynamicLossScale().init()


def model(p, x):
    product = (x.w.astype(HALF) @ p.w.T.astype(HALF)).astype(jnp.float32)
    return Batch(product @ x.w, p.b * x.b)


def loss(p, x):
    y = model(p, x)
    return jnp.mean(y.w) + jnp.mean(y.b)


# Gradients and selections.


def take_through_a_model(wrap):
    wrapped = wrap(model)
    return jax.grad(lambda p: jnp.mean(wrapped(p, BATCH).w))(PARAMS)


# What takes the parameters, and returns something of their class.
TAKERS = {
    "value_and_grad": lambda: jaxscale.value_and_grad(loss, SCALING)(PARAMS, BATCH)[1],
    "scale_backward": lambda: jax.grad(scale_backward(loss))(PARAMS, BATCH),
    "autocast around": lambda: jax.grad(autocast_scaled(loss))(PARAMS, BATCH),
    "autocast inside": lambda: jax.grad(scaled_autocast(loss))(PARAMS, BATCH),
    "a scaled model": lambda: take_through_a_model(scale_backward),
    "a cast model": lambda: take_through_a_model(jaxscale.autocast),
    "scale": lambda: jaxscale.scale(SCALING, PARAMS),
    "unscale": lambda: jaxscale.unscale(SCALING, PARAMS),
    "tree_where": lambda: jaxscale.tree_where(
        jaxscale.all_finite(PARAMS), PARAMS, PARAMS
    ),
}


@cases("name", TAKERS, fast=["value_and_grad", "autocast inside", "a scaled model"])
def test_they_are_taken_and_returned(name):
    assert isinstance(TAKERS[name](), Checked)


# Steps.


def adam(**options):
    return jaxscale.loss_scaled(optax.adam(0.1), **options)


def loss_with_state(p, state, x):
    return loss(p, x), (Checked(state.w + 1, state.b), model(p, x))


def double_weights(grads):
    return Checked(2 * grads.w, grads.b)


ALL_OPTIONS = adam(
    spikes=jaxscale.SpikeRule(), track_leaves=True, check_updates=True, max_norm=1.0
)
EAGER = {"compiled": False}
STATE = {"fun": loss_with_state, "has_aux": True, "state": (PARAMS,)}
# An optimizer, and options of `train`.
STEPS = {
    "eager": (adam(), EAGER),
    "state and aux": (adam(), STATE),
    "retries, eager": (adam(), STATE | {"retries": 1} | EAGER),
    "on_grads": (adam(), {"on_grads": double_weights}),
    "all options": (ALL_OPTIONS, {}),
    "following": (adam(loss_scale=Following()), {}),
    "multi_steps": (jaxscale.multi_steps(optax.adam(0.1), 2), {}),
}


def train(tx, compiled=True, fun=loss, state=(), **options):
    """Parameters and optimizer state after two steps."""
    step = jaxscale.train_step(fun, tx, has_state=bool(state), **options)
    if compiled:
        step = jax.jit(step)
    params = PARAMS
    opt_state = tx.init(PARAMS)
    for _ in range(2):
        params, opt_state, *rest = step(params, opt_state, *state, BATCH)
        if state:
            state = rest[:1]
    return params, opt_state


@pytest.mark.worlds
@pytest.mark.standard_promotion  # of Optax's Adam
@cases("name", STEPS, fast=["state and aux", "retries, eager"])
def test_they_are_trained_watched_and_saved(name):
    tx, options = STEPS[name]
    params, opt_state = train(tx, **options)
    assert isinstance(params, Checked)
    assert not jnp.array_equal(params.w, PARAMS.w)
    assert not jnp.array_equal(params.b, PARAMS.b)
    jaxscale.check((params, opt_state))
    jaxscale.metrics(opt_state)
    saved = jaxscale.to_state_dict(opt_state)
    restored = jaxscale.from_state_dict(tx.init(PARAMS), saved)
    assert_same_bits(jax.tree.leaves(restored), jax.tree.leaves(opt_state))


@pytest.mark.standard_promotion
@pytest.mark.parametrize("wrap", [lambda update: update, jax.jit])
def test_they_are_updated(wrap):
    tx = adam(track_leaves=True)
    grads = jax.grad(loss)(PARAMS, BATCH)

    @wrap
    def update(opt_state):
        updates, opt_state = tx.update(grads, opt_state, PARAMS)
        params = optax.apply_updates(PARAMS, updates)
        return jaxscale.apply_gradients(tx, grads, opt_state, params)

    params, _ = update(tx.init(PARAMS))
    assert isinstance(params, Checked)


# What is said of them.


def test_their_gradients_are_counted_by_name():
    grads = {"layer": jax.grad(loss)(PARAMS, BATCH)}
    rows = diagnostics.table(diagnostics.histogram(grads, by_leaf=True)).rows
    assert {row.path for row in rows} == {"layer/w", "layer/b"}


@pytest.mark.slow
def test_a_loss_of_them_is_traced():
    diagnostics.trace(loss, SCALING)(PARAMS, BATCH)


@register
class Counting(Checked):
    """Has a counter, which has no gradient, in the place of a bias."""

    def __init__(self, w, b):
        if not (hasattr(b, "dtype") and b.dtype == jnp.int32):
            raise TypeError(f"not a counter: {b}")
        super().__init__(w, np.zeros(4, np.float32))
        self.b = b


def loss_beside_a_counter(p, x):
    return loss(Checked(p.w, x.b), x)


def checked():
    return loss, PARAMS, BATCH


def counting():
    return loss_beside_a_counter, Counting(PARAMS.w, jnp.int32(3)), BATCH


@pytest.mark.slow
@cases("name, paths", [("checked", "wb"), ("counting", "w")])
def test_the_doctor_names_their_leaves_and_tries_scale_backward(name, paths):
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(io.StringIO()):
        status = cli.main(["doctor", f"{__name__}:{name}", "--json"])
    assert status == 0
    results = json.loads(said.getvalue())
    compared = {leaf["path"] for leaf in results["comparison"]["leaves"]}
    assert compared == set(paths)
    assert results["scale_backward_raised"] == ""


def test_names_for_messages_stop_no_run():
    def grad(cls, w):
        return jax.grad(lambda w: scale_backward(loss)(cls(w, PARAMS.b), BATCH))(w)

    assert_same_bits([grad(Unnamed, PARAMS.w)], [grad(Checked, PARAMS.w)])
    with pytest.raises(TypeError, match=r"input args, leaf 0, which is float16"):
        grad(Unnamed, PARAMS.w.astype(HALF))
