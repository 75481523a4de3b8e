"""Wrong arguments of `loss_scaled` and `multi_steps`, which make optimizers."""

import optax
import pytest
from bad_input import SGD, TX, BadInput, W, assert_raises
from tables import cases

import jaxscale
from jaxscale import loss_scaled, multi_steps, presets

pytestmark = pytest.mark.standard_promotion

CASES = {
    "inner is a number": BadInput(
        lambda: loss_scaled(0.1), TypeError, ["inner", "0.1", "optax.adam"]
    ),
    "wrapped twice": BadInput(
        lambda: loss_scaled(TX),
        TypeError,
        ["loss_scaled(inner)", "DynamicLossScale", "wrap once"],
    ),
    "wrapped deeper": BadInput(
        lambda: loss_scaled(optax.chain(jaxscale.skip_nonfinite(SGD))).init(W),
        ValueError,
        ["LossScaledState", "at [0]", "wrap once"],
    ),
    "an argument of the policy": BadInput(
        lambda: loss_scaled(SGD, init_scale=2.0**10),
        TypeError,
        [
            "`loss_scaled(init_scale=",
            "(tx, jaxscale.DynamicLossScale(init_scale=1024.0))",
        ],
    ),
    "an argument of the other policy": BadInput(
        lambda: jaxscale.skip_nonfinite(SGD, max_level=12.0),
        TypeError,
        ["`skip_nonfinite(max_level=", "jaxscale.AdaptiveLossScale(max_level=12.0)"],
    ),
    "an argument of a rule for spikes": BadInput(
        lambda: loss_scaled(SGD, sigmas=4.0),
        TypeError,
        ["`loss_scaled(sigmas=", "`spikes=jaxscale.SpikeRule(sigmas=4.0)`"],
    ),
    "an argument of nothing": BadInput(
        lambda: loss_scaled(SGD, initial=4.0), TypeError, ["loss_scaled()", "'initial'"]
    ),
    "no window": BadInput(
        lambda: multi_steps(SGD, 0),
        ValueError,
        ["multi_steps(every_k_schedule=", "at least 1", "0"],
    ),
    "half a window": BadInput(
        lambda: multi_steps(SGD, 2.5), TypeError, ["every_k_schedule=", "2.5"]
    ),
    "drop what": BadInput(
        lambda: multi_steps(SGD, 2, drop="batch"),
        ValueError,
        ["drop=", "'micro_batch', 'window'", "'batch'"],
    ),
    "count what": BadInput(
        lambda: multi_steps(SGD, 2, growth_unit="step"),
        ValueError,
        ["growth_unit=", "'optimizer_step', 'micro_batch'", "'step'"],
    ),
    "accumulate a number": BadInput(
        lambda: multi_steps(0.1, 2),
        TypeError,
        ["multi_steps(inner)", "0.1", "optax.adam"],
    ),
    "two windows": BadInput(
        lambda: multi_steps(multi_steps(SGD, 2), 2),
        TypeError,
        ["multi_steps(inner)", "window already"],
    ),
    "a rule for spikes as the loss scale": BadInput(
        lambda: loss_scaled(SGD, jaxscale.SpikeRule()),
        TypeError,
        ["`loss_scaled(loss_scale=...)` got SpikeRule(", "pass it as `spikes=`"],
    ),
    "a preset for spikes as the loss scale": BadInput(
        lambda: loss_scaled(SGD, presets.olmo()),
        TypeError,
        ["`loss_scaled(loss_scale=", "pass it as `spikes=`"],
    ),
    "a preset that was not called": BadInput(
        lambda: loss_scaled(SGD, presets.torch),
        TypeError,
        [
            "`loss_scaled(loss_scale=...)` got <function torch",
            "call it, as in `torch()`",
        ],
    ),
    "a class of policies": BadInput(
        lambda: loss_scaled(SGD, jaxscale.DynamicLossScale),
        TypeError,
        ["`loss_scaled(loss_scale=", "mean `DynamicLossScale()`"],
    ),
    "a flag as a norm": BadInput(
        lambda: loss_scaled(SGD, max_norm=True),
        ValueError,
        [
            "`loss_scaled(max_norm=...)` must be a finite number, got True. ",
            "such as 1.0, or None",
        ],
    ),
    "on_skip is no function": BadInput(
        lambda: loss_scaled(SGD, on_skip=True),
        TypeError,
        [
            "`loss_scaled(on_skip=...)` must be a function",
            "got True",
            "`on_skip=print`",
        ],
    ),
    "on_skip where nothing is skipped": BadInput(
        lambda: loss_scaled(SGD, None, skip_nonfinite=False, on_skip=print),
        ValueError,
        ["skip_nonfinite=False)` with `on_skip`"],
    ),
}


@cases("name", CASES)
def test_bad_input(name):
    assert_raises(CASES[name])
