"""Faults at random leave no trace."""

import pytest
import soak
from faults import VALUES
from tables import cases

pytestmark = pytest.mark.standard_promotion


def assert_no_trace(outcome, places):
    assert not outcome.wrong
    # Else it would say nothing: each kind of fault was put in.
    assert min(outcome.counts()[name] for name in (*VALUES, *places)) > 0
    assert outcome.seen["total_notfinite"][-1].max() == outcome.faults.bad.sum()


@cases("name", soak.SCALARS, fast=["dynamic, clipped adamw"])
def test_faults_leave_no_trace_in_scalars(name):
    for rate in (0.02, 0.1, 0.5):
        assert_no_trace(soak.run_scalars(name, 0, 1000, rate), soak.PLACES)


@pytest.mark.slow
@pytest.mark.parametrize("name", soak.MODELS)
def test_faults_leave_no_trace_in_a_network(name):
    outcome = soak.run_model(name, 0, 60, (0.1, 0.5))
    assert_no_trace(outcome, soak.IN_A_NETWORK)
