"""Where training ends with half-precision parameters, beside float32: on three small tasks."""

import functools

import half_params
import pytest
from tables import cases

pytestmark = pytest.mark.standard_promotion

STEPS = 1000
SEEDS = 2
# How far a final loss may be from that of float32, as a share.
CLOSE = {
    "remainder": 0.002,
    "copy": 0.002,
    "stochastic": 0.03,
    "remainder + compact": 0.03,
    "stochastic + compact": 0.03,
}


@functools.cache
def final_loss(task, method):
    make = half_params.TASKS[task]
    losses = half_params.final_losses(make(), half_params.METHODS[method], SEEDS, STEPS)
    return losses.mean()


@pytest.mark.slow
@cases("task", half_params.TASKS)
def test_it_ends_where_float32_ends_and_bfloat16_alone_does_not(task):
    expected = final_loss(task, "optax, float32")
    for method, limit in CLOSE.items():
        loss = final_loss(task, method)
        assert abs(loss / expected - 1) < limit, method
    assert final_loss(task, "optax, bfloat16") > 1.03 * expected
