"""Wrong gradients, states and losses for `update` and `apply_gradients`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from bad_input import OPT_STATE, PAIR, SGD, TX, W, assert_says
from tables import cases

import jaxscale
from jaxscale import apply_gradients, loss_scaled, multi_steps

BARE_ADAM = optax.adam(0.1)
SCALED_ADAM = loss_scaled(BARE_ADAM)
WINDOW_OF_ADAM = multi_steps(SCALED_ADAM, 2)
SKIPPING = jaxscale.skip_nonfinite(SGD)
SKIPPING_ADAM = jaxscale.skip_nonfinite(BARE_ADAM)
WINDOW = multi_steps(SGD, 2)
MEMBERS = jax.vmap(lambda _: OPT_STATE)(jnp.arange(4))


def changing_state():
    """Returns an optimizer whose state has another structure after an update."""

    def update(updates, state, params):
        return updates, (1,)

    return loss_scaled(optax.GradientTransformation(lambda params: (), update))


CHANGING = changing_state()


SPIKES = jaxscale.skip_nonfinite(SGD, spikes=jaxscale.SpikeRule())
SHORTER = jaxscale.skip_nonfinite(SGD, spikes=jaxscale.SpikeRule(window=32))
NORM_AND_LEAVES = jaxscale.skip_nonfinite(SGD, max_norm=1.0, track_leaves=True)


def update_under_jit(**options):
    """Updates under `jit`, where there is no axis, with the options of `loss_scaled`."""
    tx = loss_scaled(SGD, **options)
    jax.jit(tx.update)(W, tx.init(W), W)


CASES = {
    "a state without a scale under a fixed one": (
        lambda: loss_scaled(SGD, 8).update(W, SKIPPING.init(W), W),
        (
            "TypeError: another optimizer: its scaling is a UnitLossScaleState ... "
            "FixedLossScale"
        ),
    ),
    "update: spikes over a state without them": (
        lambda: SPIKES.update(W, SKIPPING.init(W), W),
        (
            "ValueError: update(state=...)` is the state of an optimizer without `spikes`.  "
            "... `opt_state = jaxscale.from_state_dict(tx.init(params), "
        ),
    ),
    "a norm and leaves over a state without them": (
        lambda: apply_gradients(NORM_AND_LEAVES, W, SKIPPING.init(W), W),
        (
            "ValueError: `apply_gradients(opt_state=...)` is the state of an optimizer "
            "without  ... jaxscale.from_state_dict(tx.init(params), "
        ),
    ),
    "another window of spikes": (
        lambda: SPIKES.update(W, SHORTER.init(W), W),
        (
            "ValueError: update(state=...)` is the state of an optimizer with "
            "`SpikeRule(window=32)` ... where this one has window=128.  ... "
            "jaxscale.from_state_dict(tx.init(params), "
        ),
    ),
    "a population without vmap": (
        lambda: TX.update({"w": jnp.ones((4, 2))}, MEMBERS, {"w": W}),
        "ValueError: update(state= ... shape (4,): call it under `jax.vmap`",
    ),
    "a text as the loss": (
        lambda: TX.update({"w": W}, OPT_STATE, value="1.0"),
        "TypeError: value= ... one number, got str",
    ),
    "arguments swapped": (
        lambda: apply_gradients(TX, W, {"w": W}, OPT_STATE),
        (
            "TypeError: apply_gradients(opt_state= ... got dict ... order of "
            "arguments is (tx, grads, opt_state, par"
        ),
    ),
    "arguments of update swapped": (
        lambda: TX.update(W, {"w": W}, OPT_STATE),
        (
            "TypeError: state= ... LossScaledState ... dict ... (grads, opt_state, "
            "params)"
        ),
    ),
    "keep is a tree": (
        lambda: apply_gradients(TX, W, OPT_STATE, W, keep={"new": W}),
        "TypeError: apply_gradients(keep= ... a pair (new, old), got dict",
    ),
    "keep of two shapes": (
        lambda: apply_gradients(TX, W, OPT_STATE, W, keep=(W, W[0])),
        "ValueError: apply_gradients(keep=...)` needs leaves of equal shapes",
    ),
    "value with aux": (
        lambda: TX.update(W, OPT_STATE, W, value=(W[0], W)),
        "TypeError: value= ... one number, got tuple ... has_aux",
    ),
    "a step that changes the structure of its state": (
        lambda: CHANGING.update(W, CHANGING.init(W), W),
        "ValueError: inner.update",
    ),
    "a compiled step that changes the structure": (
        lambda: jax.jit(CHANGING.update)(W, CHANGING.init(W), W),
        "ValueError: inner.update",
    ),
    "state of another scale, with a window": (
        lambda: multi_steps(TX, 2).update(W, WINDOW.init(W), W),
        (
            "TypeError: update(state= ... UnitLossScaleState ... DynamicLossScale "
            "is a LossScaleState"
        ),
    ),
    "state of optax": (
        lambda: SCALED_ADAM.update(W, BARE_ADAM.init(W), W),
        (
            "TypeError: update(state= ... got tuple ... "
            "`tx.init(params)._replace(inner_state=state)`"
        ),
    ),
    "wrapped state of a bare optimizer": (
        lambda: apply_gradients(SGD, W, OPT_STATE, W),
        (
            "TypeError: apply_gradients(opt_state= ... is a `LossScaledState` ... "
            "bare ... Pass ... loss_scaled ... inner_state"
        ),
    ),
    "optimizer is not called": (
        lambda: apply_gradients(optax.adamw, W, BARE_ADAM.init(W), W),
        (
            "TypeError: apply_gradients(tx ... got <function adamw ... as in "
            "`optax.adamw(1e-3)`"
        ),
    ),
    "value is a function": (
        lambda: TX.update(W, OPT_STATE, W, value=jnp.mean),
        "TypeError: value= ... got function",
    ),
    "a gradient is None": (
        lambda: WINDOW.update({"a": W, "b": None}, WINDOW.init({"a": W, "b": W})),
        (
            "ValueError: multi_steps ... updates= ... got None at b. Call `init` "
            "... or pass zeros"
        ),
    ),
    "a state without a window": (
        lambda: multi_steps(TX, 2).update(W, OPT_STATE, W),
        "TypeError: multi_steps ... state= ... init",
    ),
    "an axis under jit": (
        lambda: update_under_jit(axis_name="d"),
        (
            "NameError: `axis_name='d'` ... `shard_map` or `pmap` ... none of that "
            "name. Under `jit` alone leave it out"
        ),
    ),
    "two axes under jit": (
        lambda: update_under_jit(axis_name=("d", "e"), max_norm=1.0),
        "NameError: `axis_name=('d', 'e')` ... Under `jit` alone leave it out",
    ),
    "an axis of a largest gradient under jit": (
        lambda: update_under_jit(loss_scale="adaptive", axis_name="d"),
        "NameError: `axis_name='d'` ... leave it out",
    ),
    "gradients under other keys": (
        lambda: apply_gradients(TX, {"w": W, "c": W}, TX.init(PAIR), PAIR),
        (
            "ValueError: `apply_gradients(grads=...)` must have the structure ... "
            "gradients: c;  ... parameters: b. Pass"
        ),
    ),
    "gradients of a part": (
        lambda: apply_gradients(TX, {"w": W}, TX.init(PAIR), PAIR),
        (
            "ValueError: `apply_gradients(grads= ... gradients: none;  ... parameters: b.  "
            "... None or zeros"
        ),
    ),
    "gradients of a part of a bare optimizer": (
        lambda: apply_gradients(SGD, {"w": W}, SGD.init(PAIR), PAIR),
        "ValueError: `apply_gradients(grads= ... only among the parameters: b.",
    ),
    "a gradient of another shape": (
        lambda: apply_gradients(TX, {"w": jnp.ones(3), "b": W}, TX.init(PAIR), PAIR),
        (
            "ValueError: `apply_gradients(grads=...)`: the gradient at w has the "
            "shape (3,), and its parameter (2,). Pass"
        ),
    ),
    "a scalar gradient": (
        lambda: apply_gradients(TX, jnp.ones(()), OPT_STATE, W),
        (
            "ValueError: `apply_gradients(grads= ... at the root has the shape (), "
            "and its parameter (2,) ... nothing is broadcast"
        ),
    ),
    "a scalar gradient, with moments": (
        lambda: apply_gradients(SKIPPING_ADAM, jnp.ones(()), SKIPPING_ADAM.init(W), W),
        "ValueError: has the shape (), and its parameter (2,)",
    ),
    "a scalar gradient of a bare optimizer": (
        lambda: apply_gradients(SGD, jnp.ones(()), SGD.init(W), W),
        (
            "ValueError: `apply_gradients(grads= ... has the shape (), and its "
            "parameter (2,)"
        ),
    ),
    "a scalar gradient for update": (
        lambda: TX.update(jnp.ones(()), OPT_STATE, W),
        (
            "ValueError: `loss_scaled(...).update(updates=...)` ... has the shape "
            "(), and its parameter (2,)"
        ),
    ),
    "a complex loss": (
        lambda: TX.update(W, OPT_STATE, W, value=1 + 1j),
        "TypeError: value= ... one number, got complex ... loss.real",
    ),
    "a complex array as the loss": (
        lambda: jax.jit(TX.update)(W, OPT_STATE, W, value=jnp.array(1j)),
        "TypeError: value= ... got complex64[] ... loss.real",
    ),
    "update: other keys": (
        lambda: SCALED_ADAM.update({"w": W, "c": W}, SCALED_ADAM.init(PAIR), PAIR),
        (
            "ValueError: `loss_scaled(...).update(updates=...)` must have the structure ... "
            "gradients: c;  ... parameters: b. Pass"
        ),
    ),
    "update: a part": (
        lambda: SCALED_ADAM.update({"w": W}, SCALED_ADAM.init(PAIR), PAIR),
        (
            "ValueError: update(updates= ... gradients: none;  ... parameters: b.  ... None "
            "or zeros"
        ),
    ),
    "update: another shape": (
        lambda: SCALED_ADAM.update(
            {"w": jnp.ones(3), "b": W}, SCALED_ADAM.init(PAIR), PAIR
        ),
        (
            "ValueError: update(updates=...)`: the gradient at w has the shape "
            "(3,), and its parameter (2,). Pass"
        ),
    ),
    "update: other keys in a window": (
        lambda: WINDOW_OF_ADAM.update(
            {"w": W, "c": W}, WINDOW_OF_ADAM.init(PAIR), PAIR
        ),
        "ValueError: update(updates= ... gradients: c;  ... parameters: b.",
    ),
    "update: a list for a tuple": (
        lambda: SCALED_ADAM.update([W, W], SCALED_ADAM.init((W, W)), (W, W)),
        (
            "ValueError: update(updates= ... structure of the parameters ... ([*, *]) ... "
            "((*, *)). Pass"
        ),
    ),
    "update: a list in place of a tuple further in": (
        lambda: SCALED_ADAM.update(
            {"w": [W]}, SCALED_ADAM.init({"w": (W,)}), {"w": (W,)}
        ),
        (
            "ValueError: update(updates= ... That of the gradients is  ... , and that of "
            "the parameters  ... Pass"
        ),
    ),
    "update: the state of other parameters": (
        lambda: SCALED_ADAM.update(PAIR, SCALED_ADAM.init({"w": W}), PAIR),
        (
            "ValueError: update(state=...)` is the state of another optimizer or "
            "of other parameters ... 'b' ... Pass the state that `init`"
        ),
    ),
    "the state of other parameters": (
        lambda: apply_gradients(SCALED_ADAM, PAIR, SCALED_ADAM.init({"w": W}), PAIR),
        (
            "ValueError: `apply_gradients(opt_state=...)` is the state of another "
            "optimizer or of other parameters"
        ),
    ),
    "the state of other shapes, bare": (
        lambda: apply_gradients(BARE_ADAM, jnp.ones(3), BARE_ADAM.init(W), jnp.ones(3)),
        (
            "ValueError: `apply_gradients(opt_state=...)` ... shape (3,) at  ... mu, got "
            "one of shape (2,)"
        ),
    ),
    "no gradients": (
        lambda: apply_gradients(SCALED_ADAM, None, SCALED_ADAM.init(W), W),
        (
            "ValueError: `apply_gradients(grads=...)` must have the structure of "
            "the parameters ... only among the parameters: the root"
        ),
    ),
}


@pytest.mark.standard_promotion
@pytest.mark.filterwarnings("ignore:.*bare optimizer:UserWarning")
@cases("name", CASES)
def test_bad_input(name):
    assert_says(*CASES[name])


@pytest.mark.worlds
@pytest.mark.standard_promotion
def test_gradients_by_example_are_left_to_the_optimizer():
    """It takes them with an axis in front."""
    private = loss_scaled(optax.contrib.differentially_private_aggregate(1.0, 0.0, 0))
    grads = {"w": jnp.ones((4, 2)), "b": jnp.ones((4, 2))}
    params, _ = apply_gradients(private, grads, private.init(PAIR), PAIR)
    assert params["w"].shape == (2,)


LOOKAHEAD = optax.LookaheadParams.init_synced(PAIR)


@pytest.mark.standard_promotion
def test_gradients_of_the_fast_parameters_of_two_sets_are_left_to_the_optimizer():
    lookahead = loss_scaled(optax.lookahead(SGD, sync_period=2, slow_step_size=0.5))
    params, opt_state = apply_gradients(
        lookahead, PAIR, lookahead.init(LOOKAHEAD), LOOKAHEAD
    )
    assert opt_state.step_applied
    np.testing.assert_allclose(params.fast["w"], W - 0.1)


@pytest.mark.standard_promotion
def test_what_fails_inside_of_an_optimizer_of_two_sets_is_not_said_to_be_the_structure():
    def fail(*args):
        raise ValueError("no step today")

    failing = loss_scaled(optax.GradientTransformation(lambda params: (), fail))
    with pytest.raises(ValueError, match="no step today"):
        apply_gradients(failing, PAIR, failing.init(LOOKAHEAD), LOOKAHEAD)
