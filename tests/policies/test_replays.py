"""Policies over recorded and made-up runs, and in live ones: skips, and how low the scale is."""

import numpy as np
import pytest
import simulator

from jaxscale import presets


def test_a_fall_from_2_to_the_16_to_a_ceiling_of_2_to_the_14_loses_two_steps():
    trace = simulator.Trace(np.full(5, 14), np.full(5, 1.0))
    replay = simulator.replay(presets.torch(), {"low": trace})["low"]
    assert replay.skipped.tolist() == [True, True, False, False, False]
    assert replay.scale.tolist() == [65536, 32768, 16384, 16384, 16384]


TORCH = presets.torch()
RECORDED = simulator.recorded()


def totals(policy, retries=0):
    replays = simulator.replay(policy, RECORDED, retries)
    rows = [replays[name].summary(trace) for name, trace in RECORDED.items()]
    return {key: sum(row[key] for row in rows) for key in rows[0]}


@pytest.mark.worlds
def test_pytorchs_rule_skips_38_steps_of_which_a_retry_loses_none():
    assert totals(TORCH)["skips"] == 38
    repeated = totals(TORCH, retries=1)
    assert (repeated["skips"], repeated["extra"]) == (0, 38)
