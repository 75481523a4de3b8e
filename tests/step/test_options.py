"""Options of a wrapper beside the verdict: laws of each."""

import itertools
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest
from jaxpr_equations import equations, numbers_reduced
from tables import NESTED as PARAMS
from tables import assert_same_bits, avals, cases, fused_step, step

import jaxscale

pytestmark = pytest.mark.standard_promotion


def test_a_wrapper_that_skips_nothing_passes_a_nan_on_and_counts_nothing():
    tx = jaxscale.loss_scaled(optax.sgd(1.0), None, skip_nonfinite=False)
    start = tx.init(jnp.array(1.0))
    updates, state = tx.update(jnp.array(jnp.nan), start, value=jnp.float32(jnp.inf))
    assert jnp.isnan(updates)
    assert_same_bits(state, start)
    jaxscale.check(state)


GRADIENTS = 11  # numbers in the gradients of `PARAMS`
INNER = optax.sgd(0.1)
RULE = jaxscale.SpikeRule(window=8)


class Option(NamedTuple):
    arguments: dict[str, Any]
    field: str  # of the state, that it fills
    metric: str  # that it adds


OPTIONS = {
    "max_norm": Option({"max_norm": 1.0}, "grad_norm", "grad_norm"),
    "track_leaves": Option(
        {"track_leaves": True}, "nonfinite_leaves", "nonfinite_leaves/phase"
    ),
    "spikes": Option({"spikes": RULE}, "spikes", "total_spikes"),
}


def skip_inside(**options):
    return jaxscale.loss_scaled(jaxscale.skip_nonfinite(INNER, **options))


def window_inside(**options):
    return jaxscale.loss_scaled(jaxscale.multi_steps(INNER, 2), **options)


def window_outside(**options):
    return jaxscale.multi_steps(jaxscale.loss_scaled(INNER, **options), 2)


WRAPPERS = [jaxscale.loss_scaled, jaxscale.skip_nonfinite]
NESTINGS = [*(partial(wrap, INNER) for wrap in WRAPPERS)]
NESTINGS += [skip_inside, window_inside, window_outside]


@cases("option", OPTIONS)
def test_every_nesting_keeps_it(option):
    arguments, field, metric = OPTIONS[option]
    for nest in NESTINGS:
        state = nest(**arguments).init(PARAMS)
        assert jax.tree.leaves(getattr(state, field)), nest
        assert metric in jaxscale.metrics(state), nest

        plain_state = nest().init(PARAMS)
        assert getattr(plain_state, field) is None, nest
        assert metric not in jaxscale.metrics(plain_state), nest


def overflow(tx):
    """The state after one step that overflows."""
    grads = jax.tree.map(lambda leaf: leaf * jnp.inf, PARAMS)
    _, state = tx.update(grads, tx.init(PARAMS), PARAMS)
    return state


@cases("option", OPTIONS)
def test_a_state_goes_on_with_the_option_and_without_it(option):
    arguments, field, _ = OPTIONS[option]
    plain = jaxscale.loss_scaled(INNER)
    tx = jaxscale.loss_scaled(INNER, **arguments)
    state = overflow(tx)
    plain_state = overflow(plain)
    _, after = plain.update(PARAMS, state, PARAMS)
    assert avals(after) == avals(state)

    way_out = (
        r"from_state_dict\(tx.init\(params\), jaxscale.to_state_dict\(opt_state\)\)"
    )
    with pytest.raises(ValueError, match=f"an optimizer without `{option}`.*{way_out}"):
        tx.update(PARAMS, plain_state, PARAMS)
    saved = jaxscale.to_state_dict(plain_state)
    _, after = tx.update(
        PARAMS, jaxscale.from_state_dict(tx.init(PARAMS), saved), PARAMS
    )
    assert after.total_notfinite == 1
    assert jax.tree.leaves(getattr(after, field))

    saved = jaxscale.to_state_dict(state)
    assert_same_bits(jaxscale.from_state_dict(tx.init(PARAMS), saved), state)
    plain_restored = jaxscale.from_state_dict(plain.init(PARAMS), saved)
    assert getattr(plain_restored, field) is None


def numbers_read(tx):
    """Returns how many numbers the reductions of one step read."""
    return numbers_reduced(jax.make_jaxpr(tx.update)(PARAMS, tx.init(PARAMS), PARAMS))


def test_gradients_are_read_no_more_often():
    judge = jax.make_jaxpr(partial(RULE.judge, RULE.init(), None))(1.0, True)
    for number in range(len(OPTIONS) + 1):
        for names in itertools.combinations(OPTIONS, number):
            arguments = {}
            for name in names:
                arguments |= OPTIONS[name].arguments
            tx = jaxscale.loss_scaled(INNER, **arguments)
            expected = GRADIENTS
            if "spikes" in names:
                expected += numbers_reduced(judge)
            assert numbers_read(tx) == expected, names
    # Another reading of the gradients would be counted.
    chained = optax.chain(optax.clip_by_global_norm(1.0), INNER)
    assert numbers_read(jaxscale.loss_scaled(chained)) == 2 * GRADIENTS


loss_scaled_off = partial(jaxscale.loss_scaled, skip_nonfinite=False)
# With everything switched off, what is left is the program of the bare optimizer, and the state.

NET = {"w": jnp.linspace(-1.0, 1.0, 12).reshape(3, 4), "b": jnp.zeros(4)}
X = jnp.ones((2, 3))
ADAMW = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
OFF = loss_scaled_off(ADAMW, None)
UNSCALED = jaxscale.loss_scaled(ADAMW, None)
DYNAMIC = jaxscale.loss_scaled(ADAMW)


def loss_fn(params, x):
    return jnp.mean(jnp.tanh(x @ params["w"] + params["b"]) ** 2)


def bare_step(params, state, x):
    loss, grads = jax.value_and_grad(loss_fn)(params, x)
    return *step(ADAMW, params, state, grads), loss


def wrapped_step(tx, one_step, params, state, x):
    loss, grads = jaxscale.value_and_grad(loss_fn, state)(params, x)
    return *one_step(tx, params, state, grads, value=loss), loss


def operations(train_step, state):
    """The operations of a step, with the types of what they take and return."""
    program = []
    for eqn in equations(jax.make_jaxpr(train_step)(NET, state, X)):
        types = [str(var.aval) for var in [*eqn.invars, *eqn.outvars]]
        program.append((eqn.primitive.name, types))
    return program


@cases("way", [step, fused_step])
def test_the_program_is_that_of_the_bare_optimizer(way):
    bare = operations(bare_step, ADAMW.init(NET))
    off = operations(partial(wrapped_step, OFF, way), OFF.init(NET))
    unscaled = operations(partial(wrapped_step, UNSCALED, way), UNSCALED.init(NET))
    assert len(bare) > 40
    assert off == bare
    assert unscaled != bare  # what is compared does tell programs apart


def test_a_scale_of_none_has_one_state_on_and_off_and_others_the_same_fields():
    off = OFF.init(NET)
    unscaled = UNSCALED.init(NET)
    dynamic = DYNAMIC.init(NET)
    assert jax.tree.structure(unscaled) == jax.tree.structure(off)
    assert jax.tree.structure(off) != jax.tree.structure(dynamic)
    assert avals(off) == avals(unscaled)
    assert avals(off._replace(scaling=dynamic.scaling)) == avals(dynamic)


def test_a_scale_that_never_moves_still_scales():
    def square(w):
        return (w * 2.0**-15).astype(jnp.float32) ** 2

    tx = loss_scaled_off(optax.sgd(1.0), 2.0**20)
    w = jnp.ones((), jnp.float16)
    state = tx.init(w)
    grads = jaxscale.grad(square, state)(w)
    update, after = tx.update(grads, state, w)
    assert_same_bits(update, jnp.float32(-(2.0**-29)))
    assert_same_bits(after, state)
