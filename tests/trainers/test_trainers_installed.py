"""Trainers whose step is not ours to edit train in float16: the real ones, where installed.

Each program's `train` runs one trainer; `README.md` has what they print.
"""

import importlib
import math

import pytest
from runs import RUNS

PROGRAMS = {"keras_fit": "keras", "flax_example": "flax", "numpyro_svi": "numpyro"}
PROGRAMS |= {"tunix_peft": "tunix", "tunix_grpo": "tunix"}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.standard_promotion,
    # The trainers call what JAX and Optax deprecate, and that is theirs to change.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    # Tunix's GRPO takes statistics of an inf reward.
    pytest.mark.filterwarnings("ignore:(Mean of empty slice|invalid value):RuntimeWarning"),
]


@pytest.fixture(params=PROGRAMS)
def train(request, monkeypatch, tmp_path):
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    pytest.importorskip(PROGRAMS[request.param])
    program = importlib.import_module(request.param)
    return lambda name: program.train(*RUNS[name])


def test_float16_ends_where_float32_does_if_its_backward_pass_is_scaled(train):
    float32, float16, scaled = (train(name) for name in ("float32", "float16", "float16, scaled"))
    lost = float16[0] - float32[0]
    assert lost > 0.5 * float32[0], "the loss is too large to show anything"
    assert abs(scaled[0] - float32[0]) < 0.01 * lost
    assert scaled[1] == 0


def test_a_bad_batch_ends_the_run_unless_skipped_and_then_is_as_if_left_out(train):
    assert math.isnan(train("bad batch")[0])
    loss, skipped = train("bad batch, skipped")
    assert skipped == 1
    assert loss == train("batch left out")[0], "the same programs ran on the same batches"


def test_accumulate_in_the_optimizer_not_by_tunix():
    """Tunix's accumulation is Optax's: what has once been inf stays in its sum, as 0 * inf."""
    pytest.importorskip("tunix")
    program = importlib.import_module("tunix_peft")
    skipped = [program.train(*run)[1] for run in program.MORE_RUNS.values()]
    assert skipped == [program.STEPS // program.WINDOW, 1]
