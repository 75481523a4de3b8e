"""Trainers whose step is not ours to edit train in float16: the real ones.

Each program's `train` runs one trainer; `README.md` has what they print, and what others printed.
"""

import importlib

import pytest
from runs import RUNS
from tables import cases

# Each has a loss in float16 that is worse by more than a half of that in float32.
PROGRAMS = ["keras_fit", "numpyro_svi"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.standard_promotion,
    # The trainers call what JAX and Optax deprecate, and that is theirs to change.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.fixture
def train(name, monkeypatch, tmp_path):
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    return importlib.import_module(name).train


@cases("name", PROGRAMS)
def test_float16_ends_where_float32_does_if_its_backward_pass_is_scaled(name, train):
    float32, _ = train(*RUNS["float32"])
    float16, _ = train(*RUNS["float16"])
    scaled, skipped = train(*RUNS["float16, scaled"])
    lost = float16 - float32
    assert lost > 0.5 * abs(float32), "the loss is too large to show anything"
    assert abs(scaled - float32) < 0.01 * lost
    assert skipped == 0


@cases("name", PROGRAMS)
def test_a_bad_batch_ends_the_run_unless_skipped_and_then_is_as_if_left_out(
    name, train
):
    spoiled, _ = train(*RUNS["bad batch"])
    loss, skipped = train(*RUNS["bad batch, skipped"])
    left_out, _ = train(*RUNS["batch left out"])
    assert spoiled != spoiled
    assert skipped == 1
    assert loss == left_out, "the same programs ran on the same batches"
