"""Wrong arguments of `loss_scaled` and `multi_steps`, which make optimizers."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import optax
import pytest
from bad_input import SGD, TX, W, assert_says
from tables import cases

import jaxscale
from jaxscale import loss_scaled, multi_steps, presets

pytestmark = pytest.mark.standard_promotion


def applying_all(inner, loss_scale=None, **options):
    """An optimizer that skips nothing."""
    return loss_scaled(inner, loss_scale, skip_nonfinite=False, **options)


HALF = {"w": W.astype(jnp.bfloat16)}
HALVES = HALF | {"v": HALF["w"]}
MASTERS = jaxscale.master_weights(SGD)
RANDOM = jaxscale.stochastic_rounding(SGD)
PLAIN = jaxscale.skip_nonfinite(SGD)
# What does not bear a state in bfloat16, and how that is named.
REFUSED = {
    "prodigy": optax.contrib.prodigy(),
    "dadapt_adamw": optax.contrib.dadapt_adamw(),
    "mechanize": optax.contrib.mechanize(SGD),
    "dog": optax.contrib.dog(),
    "dowg": optax.contrib.dowg(),
    "momo": optax.contrib.momo(),
    "momo_adam": optax.contrib.momo_adam(),
    "rmsprop(centered=True)": optax.rmsprop(0.1, centered=True),
    "lbfgs": optax.lbfgs(),
}
# What both wrappers refuse, by what the error says.
WRONG_OPTIONS = {
    "ValueError: max_norm= ... above 0, got 0": {"max_norm": 0},
    "ValueError: max_norm= ... finite number, got nan": {"max_norm": math.nan},
    "ValueError: max_norm= ... finite number, got True": {"max_norm": True},
    "TypeError: (spikes=...)` must be a `SpikeRule` or None": {"spikes": 128},
}
CASES = {
    "inner is a number": (
        lambda: loss_scaled(0.1),
        "TypeError: inner ... 0.1 ... optax.adam",
    ),
    "wrapped twice": (
        lambda: loss_scaled(TX),
        "TypeError: loss_scaled(inner) ... DynamicLossScale ... wrap once",
    ),
    "a clip of each micro-batch": (
        lambda: loss_scaled(optax.MultiSteps(SGD, 4), max_norm=1.0).init(W),
        (
            "ValueError: `loss_scaled(inner, max_norm=...)` ... MultiStepsState ... "
            "jaxscale.multi_steps(jaxscale.loss_scaled("
        ),
    ),
    "a clip of each micro-batch, deeper": (
        lambda: jaxscale.skip_nonfinite(
            optax.chain(SGD, optax.apply_every(4)), max_norm=1.0
        ).init(W),
        "ValueError: ApplyEvery ... and not their mean ... Accumulate by",
    ),
    "wrapped deeper": (
        lambda: loss_scaled(optax.chain(jaxscale.skip_nonfinite(SGD))).init(W),
        "ValueError: LossScaledState ... at [0] ... wrap once",
    ),
    "an argument of nothing": (
        lambda: loss_scaled(SGD, initial=4.0),
        "TypeError: loss_scaled() ... 'initial'",
    ),
    "no window": (
        lambda: multi_steps(SGD, 0),
        "ValueError: multi_steps(every_k_schedule= ... at least 1 ... 0",
    ),
    "half a window": (
        lambda: multi_steps(SGD, 2.5),
        "TypeError: every_k_schedule= ... 2.5",
    ),
    "accumulate a number": (
        lambda: multi_steps(0.1, 2),
        "TypeError: multi_steps(inner) ... 0.1 ... optax.adam",
    ),
    "two windows": (
        lambda: multi_steps(multi_steps(SGD, 2), 2),
        "TypeError: multi_steps(inner) ... window already",
    ),
    "a rule for spikes as the loss scale": (
        lambda: loss_scaled(SGD, jaxscale.SpikeRule()),
        (
            "TypeError: `loss_scaled(loss_scale=...)` got SpikeRule( ... pass it "
            "as `spikes=`"
        ),
    ),
    "a preset that was not called": (
        lambda: loss_scaled(SGD, presets.torch),
        (
            "TypeError: `loss_scaled(loss_scale=...)` got <function torch ... call "
            "it, as in `torch()`"
        ),
    ),
    "a class of policies": (
        lambda: loss_scaled(SGD, jaxscale.DynamicLossScale),
        "TypeError: `loss_scaled(loss_scale= ... mean `DynamicLossScale()`",
    ),
    "a scale that moves without a verdict": (
        lambda: loss_scaled(SGD, skip_nonfinite=False),
        "ValueError: a DynamicLossScale",
    ),
    "leaves without a verdict": (
        lambda: applying_all(SGD, 8, track_leaves=True),
        "ValueError: track_leaves=True",
    ),
    "spikes without a verdict": (
        lambda: applying_all(SGD, spikes=jaxscale.SpikeRule()),
        "ValueError: with a `SpikeRule`",
    ),
    "a window without a verdict": (
        lambda: applying_all(multi_steps(SGD, 2)),
        "ValueError: a window of `multi_steps`",
    ),
    "a window around no verdict": (
        lambda: multi_steps(applying_all(SGD), 2),
        "ValueError: `multi_steps ... =False",
    ),
    "on_skip where nothing is skipped": (
        lambda: loss_scaled(SGD, None, skip_nonfinite=False, on_skip=print),
        "ValueError: skip_nonfinite=False)` with `on_skip`",
    ),
    "kept in two ways": (
        lambda: jaxscale.master_weights(jaxscale.stochastic_rounding(SGD)),
        (
            "TypeError: `master_weights(inner)`: `inner` is wrapped in "
            "`stochastic_rounding` already ... Leave one of both out"
        ),
    ),
    "kept in two ways, with a scale between": (
        lambda: jaxscale.stochastic_rounding(loss_scaled(MASTERS)),
        "TypeError: `stochastic_rounding(inner)` ... `master_weights` already",
    ),
    "no such storage": (
        lambda: jaxscale.master_weights(SGD, "bf16"),
        (
            "ValueError: `master_weights(storage=...)` ... 'remainder', 'float32' "
            "... 'bf16'"
        ),
    ),
    "master weights of a number": (
        lambda: jaxscale.master_weights(0.1),
        "TypeError: `master_weights(inner)` ... 0.1 ... optax.adam",
    ),
    "a mask of another structure": (
        lambda: jaxscale.master_weights(SGD, mask={"v": True}).init(HALF),
        (
            "ValueError: `master_weights(mask=...)` ... structure of the "
            "parameters ... `mask=lambda"
        ),
    ),
    "a mask of numbers": (
        lambda: jaxscale.stochastic_rounding(SGD, mask={"w": 1}).init(HALF),
        (
            "TypeError: `stochastic_rounding(mask=...)` ... bools, got int at w "
            "... True or False"
        ),
    ),
    "a mask of another state": (
        lambda: jaxscale.compact_state(SGD, mask={"v": True}).init(HALF),
        ("ValueError: `compact_state(mask=...)` ... structure of the state of `inner`"),
    ),
    "a negative seed": (
        lambda: jaxscale.stochastic_rounding(SGD, seed=-1),
        "ValueError: `stochastic_rounding(seed=...)` ... below 2**31, at least 0, got -1",
    ),
    "a key as seed": (
        lambda: jaxscale.compact_state(SGD, seed=jax.random.key(0)),
        ("TypeError: `compact_state(seed=...)` ... integer ... key<fry>"),
    ),
    "parameters missing": (
        lambda: MASTERS.update(HALF, MASTERS.init(HALF)),
        (
            "ValueError: `master_weights(...).update(params=...)` ... got None ... "
            "`tx.update(grads, opt_state, params)`"
        ),
    ),
    "a state without float32 parameters": (
        lambda: MASTERS.update(HALF, PLAIN.init(HALF), HALF),
        (
            "ValueError: (state=...)` is the state of an optimizer without "
            "`master_weights` ... "
            "`opt_state._replace(weights=tx.init(params).weights)` ... "
            "`jaxscale.from_state_dict("
        ),
    ),
    "a state without a key": (
        lambda: RANDOM.update(HALF, MASTERS.init(HALF), HALF),
        (
            "ValueError: without `stochastic_rounding`, and has no key ... "
            "tx.init(params).weights"
        ),
    ),
    "a state whose float32 parameters would be dropped": (
        lambda: jaxscale.apply_gradients(PLAIN, HALF, MASTERS.init(HALF), HALF),
        (
            "ValueError: `apply_gradients(opt_state=...)` ... drop ... "
            "_replace(weights=None)"
        ),
    ),
    "a state of another storage": (
        lambda: jaxscale.master_weights(SGD, "float32").update(
            HALF, MASTERS.init(HALF), HALF
        ),
        (
            "ValueError: `master_weights`: the state has int16[2] beside the "
            "parameter at w ... bfloat16[2] ... with_master_params"
        ),
    ),
    "parameters in float32 after all": (
        lambda: MASTERS.update({"w": W}, MASTERS.init(HALF), {"w": W}),
        "ValueError: the state has int16[2] ... float32[2] ... with_master_params",
    ),
    "parameters of another structure": (
        lambda: jaxscale.master_params(MASTERS.init(HALF), {"v": HALF["w"]}),
        "ValueError: `master_params` ... another structure ... 'w' ... 'v'",
    ),
    "all parameters for the state of a part": (
        lambda: jaxscale.master_params(
            optax.masked(MASTERS, {"v": False, "w": True}).init(HALVES), HALVES
        ),
        (
            "ValueError: `master_params`: the state is that of a part ... at v: ... "
            "`jaxscale.master_weights(optax.partition(...), mask=...)`"
        ),
    ),
    "parameters that are float32 already": (
        lambda: jaxscale.master_params(MASTERS.init(HALF), {"w": W}),
        "ValueError: `master_params(params=...)` ... w is float32[2] ... bfloat16",
    ),
    "float32 parameters without a place": (
        lambda: jaxscale.with_master_params(PLAIN.init(HALF), {"w": W}),
        (
            "ValueError: `with_master_params(opt_state=...)` ... keeps none ... "
            "master_weights"
        ),
    ),
    "float32 parameters of another shape": (
        lambda: jaxscale.with_master_params(MASTERS.init(HALF), {"w": jnp.ones(3)}),
        "ValueError: (float32_params=...)` ... w is float32[3] ... bfloat16[2]",
    ),
    "another storage than was saved": (
        lambda: jaxscale.from_state_dict(
            MASTERS.init(HALF),
            jaxscale.to_state_dict(jaxscale.master_weights(SGD, "float32").init(HALF)),
        ),
        (
            "ValueError: `from_state_dict(state_dict)` at /weights ... target: remainders/w; ... "
            "dictionary: copies/bfloat16/w ... with_master_params(old._replace("
        ),
    ),
    "a compact state in another": (
        lambda: jaxscale.compact_state(jaxscale.compact_state(SGD)).init(W),
        "TypeError: `compact_state(inner)` ... wrapped in `compact_state` already",
    ),
    "a compact state around a scale": (
        lambda: jaxscale.compact_state(TX),
        ("TypeError: `compact_state(inner)` ... loss_scaled(jaxscale.compact_state("),
    ),
    "a compact state around a scale that is further inside": (
        lambda: jaxscale.compact_state(optax.chain(TX)).init(W),
        ("TypeError: `compact_state(inner)` ... loss_scaled(jaxscale.compact_state("),
    ),
    "a compact state of a float32 one": (
        lambda: jaxscale.compact_state(SGD).update(W, SGD.init(W), W),
        (
            "TypeError: `compact_state(...).update(state=...)` ... tuple ... "
            "from_state_dict"
        ),
    ),
    "a compact state of another optimizer": (
        lambda: jaxscale.compact_state(optax.adam(0.1)).update(
            W, jaxscale.compact_state(SGD).init(W), W
        ),
        "ValueError: `compact_state(...).update(state=...)` ... another optimizer",
    ),
}


@cases("name", CASES)
def test_bad_input(name):
    assert_says(*CASES[name])


@cases("message", WRONG_OPTIONS)
def test_both_wrappers_refuse_wrong_options(message):
    for wrap in (loss_scaled, jaxscale.skip_nonfinite):
        error, words = message.split(": ")
        named = f"{error}: `{wrap.__name__} ... {words}"
        assert_says(functools.partial(wrap, SGD, **WRONG_OPTIONS[message]), named)


# Wrappers by their names, and what a user does wrong with an optimizer that one made, by the error.
WRAPPERS = {
    "loss_scaled": loss_scaled,
    "skip_nonfinite": jaxscale.skip_nonfinite,
    "multi_steps": functools.partial(multi_steps, every_k_schedule=2),
    "master_weights": jaxscale.master_weights,
    "stochastic_rounding": jaxscale.stochastic_rounding,
}
MISUSED = {
    "TypeError": lambda tx: tx.update(W, tx.init(W), W, value=1j),
    "ValueError": lambda tx: tx.update(jnp.ones(3), tx.init(W), W),
}


@cases("name, error", itertools.product(WRAPPERS, MISUSED))
def test_an_error_names_the_wrapper_that_was_called(name, error):
    for inner in (SGD, jaxscale.skip_nonfinite(SGD)):
        tx = WRAPPERS[name](inner)
        misuse = functools.partial(MISUSED[error], tx)
        assert_says(misuse, f"{error}: `{name}(...).update(")


@cases("name", REFUSED)
def test_an_optimizer_that_does_not_bear_a_compact_state_is_refused(name):
    tx = jaxscale.compact_state(optax.chain(optax.clip(1.0), REFUSED[name]))
    words = f"`compact_state(inner)`: `{name}` needs its state in float32 ... Leave"
    assert_says(lambda: tx.init(W), f"ValueError: {words}")
