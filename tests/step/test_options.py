"""What a wrapper is asked for beside the verdict: laws of each such option."""

import functools
import itertools

import jax
import jax.numpy as jnp
import optax
import pytest
from jaxprs import numbers_reduced
from tables import assert_same_bits, avals, cases

import jaxscale

pytestmark = pytest.mark.standard_promotion

PARAMS = {"w": jnp.ones((2, 3)), "half": jnp.ones(3, jnp.bfloat16), "none": None}
INNER = optax.sgd(0.1)
RULE = jaxscale.SpikeRule(window=8)
OPTIONS = {
    # name: the option, the field of the state that it fills, and what is in the metrics
    "max_norm": ({"max_norm": 1.0}, "grad_norm", "grad_norm"),
    "track_leaves": ({"track_leaves": True}, "nonfinite_leaves", "nonfinite_leaves/half"),
    "spikes": ({"spikes": RULE}, "spikes", "total_spikes"),
}
NESTINGS = {
    "scaled": lambda **options: jaxscale.loss_scaled(INNER, **options),
    "safe": lambda **options: jaxscale.skip_nonfinite(INNER, **options),
    "given inside": lambda **options: jaxscale.loss_scaled(
        jaxscale.skip_nonfinite(INNER, **options)
    ),
    "window inside": lambda **options: jaxscale.loss_scaled(
        jaxscale.multi_steps(INNER, 2), **options
    ),
    "window outside": lambda **options: jaxscale.multi_steps(
        jaxscale.loss_scaled(INNER, **options), 2
    ),
}


@cases("option, nesting", itertools.product(OPTIONS, NESTINGS))
def test_every_nesting_keeps_it(option, nesting):
    options, field, metric = OPTIONS[option]
    state, plain = (NESTINGS[nesting](**each).init(PARAMS) for each in (options, {}))
    assert jax.tree.leaves(getattr(state, field))
    assert metric in jaxscale.metrics(state)
    assert getattr(plain, field) is None
    assert metric not in jaxscale.metrics(plain)


@cases("option", OPTIONS)
def test_a_state_keeps_its_structure_under_an_optimizer_without_it(option):
    options, field, _ = OPTIONS[option]
    plain, asked = jaxscale.loss_scaled(INNER), jaxscale.loss_scaled(INNER, **options)
    fresh = asked.init(PARAMS)
    _, state = asked.update(jax.tree.map(lambda p: p * jnp.inf, PARAMS), fresh, PARAMS)
    for tx, given in ((asked, plain.init(PARAMS)), (plain, state)):
        assert avals(tx.update(PARAMS, given, PARAMS)[1]) == avals(given)
    saved = jaxscale.to_state_dict(state)
    assert_same_bits(jaxscale.from_state_dict(fresh, saved), state)
    assert getattr(jaxscale.from_state_dict(plain.init(PARAMS), saved), field) is None
    without = jaxscale.to_state_dict(plain.init(PARAMS))
    assert_same_bits(jaxscale.from_state_dict(fresh, without), fresh)


def test_gradients_are_read_no_more_often():
    def reduced(tx):
        return numbers_reduced(jax.make_jaxpr(tx.update)(PARAMS, tx.init(PARAMS), PARAMS))

    judged = jax.make_jaxpr(lambda *args: RULE.judge(RULE.init(), None, *args))(1.0, True)
    for number in range(4):
        for names in itertools.combinations(OPTIONS, number):
            options = {key: value for name in names for key, value in OPTIONS[name][0].items()}
            of_the_rule = numbers_reduced(judged) * ("spikes" in names)
            assert reduced(jaxscale.loss_scaled(INNER, **options)) - of_the_rule == 9, names
    chained = optax.chain(optax.clip_by_global_norm(1.0), INNER)
    assert reduced(jaxscale.loss_scaled(chained)) == 2 * 9  # the count counts


WRONG = [
    ({"max_norm": 0}, "max_norm=.*above 0, got 0"),
    ({"max_norm": -1.0}, "max_norm=.*above 0, got -1"),
    ({"max_norm": "1"}, "max_norm=.*finite number, got '1'"),
    ({"max_norm": float("nan")}, "max_norm=.*finite number, got nan"),
    ({"max_norm": True}, "max_norm=.*finite number, got True"),
    ({"track_leaves": 1}, "track_leaves=.*one of False, True, got 1"),
    *(
        ({"spikes": wrong}, r"\(spikes=\.\.\.\)` must be a `SpikeRule` or None")
        for wrong in (True, 128, jaxscale.SpikeRule, "default")
    ),
]


@pytest.mark.parametrize(("options", "message"), WRONG)
def test_wrong_values_are_refused(options, message):
    for call in (jaxscale.loss_scaled, jaxscale.skip_nonfinite):
        with pytest.raises((TypeError, ValueError), match=message):
            call(INNER, **options)


OFF = functools.partial(jaxscale.loss_scaled, skip_nonfinite=False)
WINDOW = jaxscale.multi_steps(INNER, 2)
NEED_A_VERDICT = {  # what is not to be had without one: a call, and what it says
    "scale": (lambda: OFF(INNER), "a DynamicLossScale"),
    "leaves": (lambda: OFF(INNER, 8, track_leaves=True), "track_leaves=True"),
    "spikes": (lambda: OFF(INNER, None, spikes=RULE), "SpikeRule"),
    "window inside": (lambda: OFF(WINDOW, None), "a window of `multi_steps`"),
    "window outside": (
        lambda: jaxscale.multi_steps(OFF(INNER, None), 2),
        "`multi_steps.*skip_nonfinite=F",
    ),
    "number": (
        lambda: jaxscale.loss_scaled(INNER, skip_nonfinite=0),
        "skip_nonfinite=.*got 0",
    ),
}


@cases("name", NEED_A_VERDICT)
def test_what_needs_a_verdict_does_not_do_without(name):
    call, message = NEED_A_VERDICT[name]
    with pytest.raises(ValueError, match=message):
        call()
