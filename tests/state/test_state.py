"""Multiplying and dividing by a scale, and finding it in a tree."""

import collections
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tables import PASSIVE, assert_same_bits, cases
from training import x64

import jaxscale
import jaxscale.flax
from jaxscale import presets

STATE = jaxscale.FixedLossScale(2.0**10).init()
WIDE = {name: name for name in ("float32", "complex64", "float64", "complex128")}
WIDE |= dict.fromkeys(("float16", "bfloat16", "float8_e5m2"), "float32")


def test_results_are_float32_or_wider_and_exact():
    for function, factor in ((jaxscale.scale, 2.0**10), (jaxscale.unscale, 2.0**-10)):
        for state, times in ((STATE, factor), (jaxscale.NoOpLossScale().init(), 1)):
            with x64():
                leaves = {dtype: jnp.array([1.5, -2.0, 0.25], dtype) for dtype in WIDE}
                results = jax.jit(function)(state, leaves)
            for dtype, leaf in leaves.items():
                expected = np.asarray(leaf, WIDE[dtype]) * times
                assert_same_bits(results[dtype], expected.astype(WIDE[dtype]))
    # Other factors to rounding, twice: XLA divides by multiplying with the reciprocal.
    leaf = jnp.linspace(-1, 1, 999)
    result = jaxscale.unscale(jaxscale.FixedLossScale(3).init(), leaf)
    np.testing.assert_allclose(result, np.asarray(leaf) / np.float32(3), rtol=2**-23)
    # An overflow in one part of a complex number stays there.
    result = jaxscale.unscale(STATE, jax.lax.complex(jnp.array(jnp.inf), jnp.array(2.0**10)))
    assert (result.real, result.imag) == (jnp.inf, 1.0)


def test_no_scale_is_so_extreme_that_gradients_vanish():
    # The reciprocal of 2**127 is subnormal: XLA makes it 0, and 0 is finite (jmp's fate).
    @jax.jit
    def there_and_back(state, leaf):
        gradient = jaxscale.grad(lambda x: x * 3.0, state)(leaf)
        return jaxscale.unscale(state, jaxscale.scale(state, leaf)), gradient

    for exponent in (-126, 126, 127):
        state = STATE._replace(loss_scale=jnp.array(2.0**exponent, jnp.float32))
        leaf = jnp.array(1.5 * 2.0 ** (-exponent // 2), jnp.float32)
        assert there_and_back(state, leaf) == (leaf, 3.0)


@cases("function", [jaxscale.scale, jaxscale.unscale])
def test_other_leaves_and_overwrites_pass_through(function):
    tree = PASSIVE | {"_overwrite_with_gradient": {"amax": jnp.array(0.5)}}
    result = function(STATE, tree)
    assert jax.tree.structure(result) == jax.tree.structure(tree)
    assert all(a is b for a, b in zip(jax.tree.leaves(result), jax.tree.leaves(tree), strict=True))


# What a loss scale is looked for in: by type, as a name says nothing. Parameters have that name, a
# training loop with a log, and states of policies of one's own, of which one says what it is.

Model = collections.namedtuple("Model", "loss_scale")
Carry = collections.namedtuple("Carry", "opt_state loss_scale growth_tracker hysteresis_tracker")
UnmarkedState = collections.namedtuple("UnmarkedState", "loss_scale")


class OwnState(NamedTuple):
    is_loss_scale_state = True

    loss_scale: jax.Array
    steps: tuple[jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True)
class Own(jaxscale.LossScale):
    start: Any

    def init(self):
        return self.start

    adjust = update = None  # only its state is looked at


FOUR = jnp.array(4.0)
PARAMS = [Model(jnp.array(2.0)), {"head": (jnp.ones(3), Model(jnp.ones(1)))}]
SCALINGS = {
    "dynamic": jaxscale.DynamicLossScale(init_scale=4.0),
    "logmax": presets.LogMaxLossScale(init_scale=4.0),
    "marked": Own(OwnState(FOUR, (FOUR, FOUR))),
    "unmarked": Own(UnmarkedState(FOUR)),
}
CALLS = {
    "scale": lambda tree: jaxscale.scale(tree, jnp.ones(2)),
    "unscale": lambda tree: jaxscale.unscale(tree, jnp.ones(2)),
    "value_and_grad": lambda tree: jaxscale.value_and_grad(jnp.sum, tree)(jnp.ones(2)),
    "grad": lambda tree: jaxscale.grad(jnp.sum, tree)(jnp.ones(2)),
    "metrics": jaxscale.metrics,
}


@pytest.mark.standard_promotion
@cases("scaling", SCALINGS, fast=["dynamic", "unmarked"])
def test_a_state_is_found_by_its_type_wherever_it_is(scaling):
    params = PARAMS
    tx = jaxscale.loss_scaled(optax.adam(0.1), SCALINGS[scaling])
    opt_state = tx.init(params)
    trees = [
        (params, opt_state, {"log": Model(jnp.ones(9))}),
        {"model": params, "opt": [optax.chain(optax.identity(), tx).init(params)]},
        optax.MultiSteps(tx, 2).init(params),
        Carry(opt_state, jnp.array(99.0), jnp.array(1), jnp.array(2)),
        jaxscale.flax.TrainState.create(apply_fn=None, params=params, tx=tx),
    ]
    # One that is not marked is known by its place alone.
    bare = [opt_state.scaling, Carry(params, opt_state.scaling, FOUR, FOUR)]
    for call, function in CALLS.items():
        expected = function(opt_state)
        for tree in trees:
            assert_same_bits(function(tree), expected)
        for tree in [opt_state] + bare * (scaling != "unmarked"):
            if call == "metrics":
                assert function(tree)["loss_scale"] == 4
            else:
                assert_same_bits(function(tree), function(STATE._replace(loss_scale=FOUR)))
    for tree in trees:
        jaxscale.check(tree)


OPT_STATE = jaxscale.loss_scaled(optax.sgd(0.1)).init(jnp.ones(2))
NOT_FOUND = [
    (PARAMS, "none in"),
    (optax.adam(0.1).init(PARAMS), "none in"),
    (Carry(PARAMS, FOUR, FOUR, FOUR), "none in"),
    (UnmarkedState(FOUR), r"none in .*`class UnmarkedState`, write `is_loss_scale_state = True`"),
    ([OPT_STATE, {"d": OPT_STATE}], r"2, at \[0\], \[1\]\['d'\]\. Pass"),
    (Carry((OPT_STATE, STATE), STATE, FOUR, FOUR), r"3, at .*\[0\], .*\[1\], \.loss_scale\. Pass"),
    ({"a": SCALINGS["marked"].init(), "b": STATE}, r"2, at \['a'\], \['b'\]\. Pass"),
]


@cases("call", CALLS)
def test_a_name_is_not_a_state_and_one_of_several_is_not_chosen(call):
    for tree, found in NOT_FOUND:
        with pytest.raises(ValueError, match=rf"`{call}` needs .* exactly one .*, got {found}"):
            CALLS[call](tree)


@cases("call", list(CALLS)[:4], fast=["grad"])
def test_a_population_is_scaled_under_vmap_alone(call):
    members = jax.tree.map(lambda leaf: jnp.stack([leaf] * 4), OPT_STATE)
    with pytest.raises(ValueError, match=rf"`{call}\(.*shape \(4,\): call it under `jax\.vmap`"):
        CALLS[call](members)
    alone = CALLS[call](OPT_STATE)
    expected = jax.tree.map(lambda leaf: jnp.stack([leaf] * 4), alone)
    assert_same_bits(jax.vmap(CALLS[call])(members), expected)
