"""Wrong policies, and wrong states, verdicts and gradients for them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bad_input import OPT_STATE, SCALING, W, assert_says, flax_state, raises
from tables import POLICIES, cases

import jaxscale
from jaxscale import presets

pytestmark = pytest.mark.standard_promotion

CASES = {
    "growth is 1": (
        lambda: jaxscale.DynamicLossScale(growth_factor=1),
        "ValueError: growth_factor= ... above 1 ... 1.0 ... 2.0",
    ),
    "growth is text": (
        lambda: jaxscale.DynamicLossScale(growth_factor="2"),
        "TypeError: growth_factor ... finite number, got '2'",
    ),
    "backoff is 1": (
        lambda: jaxscale.DynamicLossScale(backoff_factor=1),
        "ValueError: backoff_factor ... 1.0 ... 0.5",
    ),
    "backoff is 0": (
        lambda: jaxscale.DynamicLossScale(backoff_factor=0),
        "ValueError: backoff_factor ... 0.0",
    ),
    "backoff is NaN": (
        lambda: jaxscale.DynamicLossScale(backoff_factor=np.nan),
        "ValueError: backoff_factor ... nan",
    ),
    "interval is 0": (
        lambda: jaxscale.DynamicLossScale(growth_interval=0),
        "ValueError: growth_interval ... at least 1 ... 0",
    ),
    "interval is a float": (
        lambda: jaxscale.DynamicLossScale(growth_interval=1e6),
        "TypeError: growth_interval ... integer ... 1000000.0",
    ),
    "interval is a bool": (
        lambda: jaxscale.DynamicLossScale(growth_interval=True),
        "ValueError: growth_interval ... True",
    ),
    "interval is too large": (
        lambda: jaxscale.DynamicLossScale(growth_interval=2**31),
        "ValueError: growth_interval ... integer below 2**31",
    ),
    "hysteresis is 0": (
        lambda: jaxscale.DynamicLossScale(hysteresis=0),
        "ValueError: hysteresis ... 0",
    ),
    "bounds unordered": (
        lambda: jaxscale.DynamicLossScale(min_scale=8, max_scale=4),
        "ValueError: min_scale <= init_scale <= max_scale ... 8.0 ... 4.0",
    ),
    "init below min": (
        lambda: jaxscale.DynamicLossScale(init_scale=0.5),
        "ValueError: min_scale <= init_scale ... 0.5",
    ),
    "max beyond float32": (
        lambda: jaxscale.DynamicLossScale(max_scale=1e39),
        "ValueError: max_scale ... normal range ... 1e+39",
    ),
    "min is 0": (
        lambda: jaxscale.DynamicLossScale(min_scale=0),
        "ValueError: min_scale ... normal range ... 0.0",
    ),
    "init is an array": (
        lambda: jaxscale.DynamicLossScale(init_scale=jnp.ones(())),
        "TypeError: init_scale ... Array",
    ),
    "fixed below 1": (
        lambda: jaxscale.FixedLossScale(0.5),
        "ValueError: loss_scale= ... at least 1 ... 0.5",
    ),
    "fixed bool": (
        lambda: jaxscale.FixedLossScale(True),
        "ValueError: loss_scale= ... True",
    ),
    "spec bool": (
        lambda: jaxscale.as_loss_scale(True),
        'TypeError: True ... None ... number ... "dynamic" ... LossScale',
    ),
    "spec numpy bool": (
        lambda: jaxscale.as_loss_scale(np.bool_(True)),
        "TypeError: True",
    ),
    "spec text": (
        lambda: jaxscale.as_loss_scale("static"),
        "ValueError: 'static' ... \"dynamic\"",
    ),
    "spec array": (
        lambda: jaxscale.as_loss_scale(jnp.ones(())),
        "TypeError: Array ... number",
    ),
    "spec class": (
        lambda: jaxscale.as_loss_scale(jaxscale.DynamicLossScale),
        "TypeError: mean `DynamicLossScale()`",
    ),
    "unknown key": (
        lambda: jaxscale.DynamicLossScale.from_config({"init": 8}),
        "TypeError: DynamicLossScale ... 'init'",
    ),
    "base class": (
        lambda: jaxscale.LossScale.from_config({}),
        "TypeError: abstract class LossScale",
    ),
    "gradients for the largest": (
        lambda: jaxscale.DynamicLossScale().adjust(SCALING, True, {"w": W}),
        (
            "TypeError: `DynamicLossScale.adjust(largest= ... scalar,  ... got dict ... "
            "`update"
        ),
    ),
    "verdict is no bool": (
        lambda: jaxscale.DynamicLossScale().adjust(SCALING, 1.0),
        "TypeError: adjust(grads_finite ... float ... all_finite",
    ),
    "verdict is no scalar": (
        lambda: jaxscale.DynamicLossScale().adjust(SCALING, jnp.array([True])),
        "TypeError: bool[1]",
    ),
}


@cases("name", CASES)
def test_bad_input(name):
    assert_says(*CASES[name])


OWN = POLICIES | {"preset": presets.torch()}
GRADS = {"w": W}
FINITE = jnp.array(True)
each_policy = cases("name", OWN, fast=["dynamic", "adaptive"])


def state_of(policy, method):
    """Returns how an error names the state that a method of a policy got."""
    return f"`{type(policy).__name__}.{method}(state="


@each_policy
def test_a_policy_finds_its_state_in_that_of_the_optimizer(name):
    policy = OWN[name]
    way_out = "got LossScaledState. Pass `opt_state.scaling`, or call `tx.update`"
    with raises(TypeError, state_of(policy, "update"), way_out):
        policy.update(OPT_STATE, GRADS)


@each_policy
def test_a_policy_finds_its_state_in_a_train_state(name):
    policy = OWN[name]
    way_out = "got OwnTrainState. Pass `opt_state.scaling`, or call `tx.update`"
    with raises(TypeError, state_of(policy, "adjust"), way_out):
        policy.adjust(flax_state(), FINITE)


@each_policy
@pytest.mark.parametrize("second", ["its state", "the state of the optimizer"])
def test_a_policy_says_in_which_order_its_arguments_come(second, name):
    policy = OWN[name]
    state = policy.init() if second == "its state" else OPT_STATE
    words = [", got dict. The order ", " is (state, grads)"]
    with raises(TypeError, state_of(policy, "update"), *words):
        policy.update(GRADS, state)


@each_policy
def test_a_policy_says_what_its_state_is(name):
    policy = OWN[name]
    state = policy.init()
    expected = "LossScaleState"
    other = OWN["adaptive"].init()
    if not isinstance(state, jaxscale.LossScaleState) and name != "noop":
        expected = type(state).__name__
        other = OWN["dynamic"].init()
    with raises(
        TypeError, "state=", f"must be a `{expected}`, got {type(other).__name__}"
    ):
        policy.update(other, GRADS)
    taken_over = "from_state_dict(policy.init(), jaxscale.to_state_dict(state))"
    with raises(
        TypeError,
        "state=",
        f"must be a `{expected}`, got NoneType",
        "`init`",
        taken_over,
    ):
        policy.adjust(None, FINITE)


@pytest.mark.worlds
@cases("name", OWN, fast=["dynamic"])
def test_the_states_of_a_population_are_updated_under_vmap_alone(name):
    policy = OWN[name]
    state = policy.init()
    members = jax.tree.map(lambda leaf: jnp.stack([leaf] * 4), state)
    way_out = "has shape (4,): call it under `jax.vmap`"
    with raises(ValueError, state_of(policy, "update"), way_out):
        policy.update(members, GRADS)
    with raises(ValueError, state_of(policy, "adjust"), way_out):
        jax.jit(policy.adjust)(members, FINITE)
    several, _ = jax.vmap(policy.update, (0, None))(members, GRADS)
    assert jax.tree.structure(several) == jax.tree.structure(state)
