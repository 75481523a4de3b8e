"""Wrong policies, and wrong states, verdicts and gradients for them."""

import jax
import jax.numpy as jnp
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
    "backoff is 1": (
        lambda: jaxscale.DynamicLossScale(backoff_factor=1),
        "ValueError: backoff_factor ... 1.0 ... 0.5",
    ),
    "interval is 0": (
        lambda: jaxscale.DynamicLossScale(growth_interval=0),
        "ValueError: growth_interval ... at least 1 ... 0",
    ),
    "interval is a float": (
        lambda: jaxscale.DynamicLossScale(growth_interval=1e6),
        "TypeError: growth_interval ... integer ... 1000000.0",
    ),
    "interval is too large": (
        lambda: jaxscale.DynamicLossScale(growth_interval=2**31),
        "ValueError: growth_interval ... integer below 2**31",
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
    "init is an array": (
        lambda: jaxscale.DynamicLossScale(init_scale=jnp.ones(())),
        "TypeError: init_scale ... Array",
    ),
    "fixed below 1": (
        lambda: jaxscale.FixedLossScale(0.5),
        "ValueError: loss_scale= ... at least 1 ... 0.5",
    ),
    "spec bool": (
        lambda: jaxscale.as_loss_scale(True),
        'TypeError: True ... None ... number ... "dynamic" ... LossScale',
    ),
    "spec text": (
        lambda: jaxscale.as_loss_scale("static"),
        "ValueError: 'static' ... \"dynamic\"",
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
def test_a_policy_says_where_its_state_is_and_in_which_order_arguments_come(name):
    policy = OWN[name]
    state = policy.init()
    way_out = "Pass `opt_state.scaling`, or call `tx.update`"
    taken_over = "from_state_dict(policy.init(), jaxscale.to_state_dict(state))"
    wrong = [
        ("update", (OPT_STATE, GRADS), [f"got LossScaledState. {way_out}"]),
        ("adjust", (flax_state(), FINITE), [f"got OwnTrainState. {way_out}"]),
        ("update", (GRADS, state), [", got dict. The order ", " is (state, grads)"]),
        ("update", (GRADS, OPT_STATE), [", got dict. The order "]),
        ("adjust", (None, FINITE), ["got NoneType", "`init`", taken_over]),
    ]
    for method, args, words in wrong:
        with raises(TypeError, state_of(policy, method), *words):
            getattr(policy, method)(*args)


def test_a_policy_says_which_state_it_got():
    dynamic, adaptive = OWN["dynamic"].init(), OWN["adaptive"].init()
    with raises(TypeError, "must be a `LossScaleState`, got AdaptiveState"):
        OWN["dynamic"].update(adaptive, GRADS)
    with raises(TypeError, "must be a `AdaptiveState`, got LossScaleState"):
        OWN["adaptive"].update(dynamic, GRADS)


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
