"""Faults at random, in short: `python tests/support/soak.py` is the same for many more steps."""

import pytest
import soak
from faults import VALUES
from tables import cases

pytestmark = pytest.mark.standard_promotion

# What the others have is in these, too: a loss scale that moves, one device, a batch in shards.
MODELS = [
    "network, MultiSteps",
    "network, micro-batches in the step",
    "8 devices, jit, sharded parameters",
    "8 devices, shard_map",
]


def assert_no_trace(outcome, places):
    assert not outcome.wrong, str(outcome)
    # Else it would say nothing: each kind of fault was put in.
    assert min(outcome.counts()[name] for name in (*VALUES, *places)) > 0
    assert outcome.seen["total_notfinite"][-1].max() == outcome.faults.bad.sum()


@cases("name", soak.SCALARS, fast=["dynamic, clipped adamw"])
def test_faults_leave_no_trace_in_scalars(name):
    for rate in (0.02, 0.1, 0.5):
        assert_no_trace(soak.run_scalars(name, 0, 1000, rate), soak.PLACES)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_faults_leave_no_trace_in_a_network(name):
    outcome = soak.run_model(name, 0, 60, (0.1, 0.5))
    assert_no_trace(outcome, soak.MODELS[name].faults)
