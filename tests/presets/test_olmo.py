"""OLMo's rule for spikes beside OLMo-core's, MaxText's and levanter's: alike, without holes."""

import math

import numpy as np
from spike_rules import FINITE, STREAMS, Levanter, MaxText, Olmo, judge_all, recorded
from tables import cases

from jaxscale import SpikeRule, presets


@cases("name", FINITE, fast=["spikes", "up", "constant"])
@cases(("window", "sigmas"), [(128, 6), (16, 4), (7, 3)], fast=[(128, 6)])
def test_the_preset_decides_as_olmo_and_maxtext_do(name, window, sigmas):
    # They in float64, as 1e30 squared is inf in float32, where a library sees no spike at all.
    losses, norms = np.float64(STREAMS[name])
    rule = presets.olmo(rolling_interval_length=window, sigma_factor=sigmas)
    expected = Olmo(window, sigmas).spikes(losses, norms)
    assert judge_all(rule, *STREAMS[name])[0].tolist() == expected
    if name not in ("1e30", "-1e30", "huge"):
        assert MaxText(window, sigmas).spikes(*STREAMS[name]) == expected


def test_recorded_runs_are_judged_as_olmo_and_maxtext_do():
    for name, (losses, norms) in recorded():
        expected = Olmo().spikes(np.float64(losses), np.float64(norms))
        assert MaxText().spikes(losses, norms) == expected, name
        assert judge_all(presets.olmo(), losses, norms)[0].tolist() == expected, name


# Steps skipped of 400, and whether the parameter is NaN in the end, after one NaN batch.
HOLES = [
    (Olmo, 5, 71, True),
    (Olmo, 100, 129, True),
    (MaxText, 5, 71, True),
    (MaxText, 100, 129, False),
    (Levanter, 5, 70, True),
    (Levanter, 100, 129, True),
]


@cases(("peer", "at", "skips", "is_ruined"), HOLES)
def test_one_bad_batch_costs_one_step_here_and_more_elsewhere(peer, at, skips, is_ruined):
    losses, norms = np.array(STREAMS["steady"])
    losses[at] = norms[at] = np.nan
    with np.errstate(all="ignore"):
        assert sum(peer().spikes(losses, norms)) == skips
        assert math.isnan(peer().parameter(losses, norms)) == is_ruined
    for rule in (SpikeRule(), presets.olmo()):
        assert not judge_all(rule, losses, norms)[0].any()


# Its first judged step is one later: it takes the loss of 10 at step 63, which OLMo skips.
LEVANTERS = {"spikes": [], "too early": [63], "up": [], "linear": [], "heavy tails": []}


@cases("name", LEVANTERS, fast=["too early"])
def test_levanter_decides_alike_where_its_other_deviation_does_not_matter(name):
    ours = judge_all(presets.olmo(), *STREAMS[name])[0].tolist()
    levanters = Levanter().spikes(*STREAMS[name])
    assert np.flatnonzero(np.not_equal(ours, levanters)).tolist() == LEVANTERS[name]
