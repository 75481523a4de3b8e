"""What the doctor advises: following it helps, and training does what it says."""

import inspect
import json
import pathlib

import jax
import optax
import pytest
from advised import ADVICE, scaled_backward
from tables import cases

import jaxscale
from jaxscale._doctor.target import load

pytestmark = pytest.mark.standard_promotion

EXAMPLE = pathlib.Path(__file__).parent.parent.parent / "examples" / "doctor.py"
NUM_STEPS = 20


def find_faults(function):
    """Returns the numbers of the lines of a function that are marked as faulty."""
    lines, first = inspect.getsourcelines(function)
    return [first + i for i, line in enumerate(lines) if line.endswith("# fault\n")]


def blamed_lines(name):
    """Returns how the doctor may name the faulty lines of a pair."""
    function = scaled_backward if name == "rule_of_ones_own" else ADVICE[name].faulty
    for number in find_faults(function):
        yield f"begins at advised.py:{number}"
        yield f"at advised.py:{number}. Take a mean instead"


@cases("name", ADVICE, fast=["log_of_probability_that_is_cast"])
def test_the_fault_is_named_with_its_cure(name, doctor, no_pictures):
    answer = doctor(f"advised.py:{name}__faulty")
    assert answer.status == 1
    assert any(words in answer.flowing for words in blamed_lines(name)), answer.out
    assert ADVICE[name].said in answer.flowing
    assert "1e-3" not in answer.out  # most probabilities are far below it


@cases("name", ADVICE, fast=["index"])
def test_the_cure_helps(name, doctor, no_pictures):
    answer = doctor(f"advised.py:{name}__cured")
    assert answer.status == 0, answer.out
    assert answer.out.startswith("Nothing is wrong")


def count_skipped(tx, retries=0):
    """Returns how many of the first steps of a training are skipped."""
    target = load("doctored:in_units")
    step = jax.jit(
        jaxscale.train_step(
            lambda p: target.loss_fn(p, target.batch), tx, retries=retries
        )
    )
    params = target.params
    opt_state = tx.init(params)
    for _ in range(NUM_STEPS):
        _, opt_state, _ = step(params, opt_state)
    return opt_state.total_notfinite


@cases("unit", range(-4, 25), fast=[9])
def test_training_skips_what_is_said(unit, doctor, monkeypatch):
    """In whatever unit a loss is: it has gradients of another size, and the same digits."""
    monkeypatch.setenv("UNIT", str(unit))
    answer = doctor("doctored:in_units", "--json", "--quick")
    results = json.loads(answer.out)
    largest = 16 - unit
    assert results["calibration"]["init_scale"] == 2.0**largest
    assert "That is low" not in answer.out
    start = results["start"]
    sgd = optax.sgd(0.0)
    default = jaxscale.loss_scaled(sgd)
    if largest >= 0:
        assert answer.status == 0
        assert start["skipped"] == max(15 - largest, 0)
        assert count_skipped(default) == start["skipped"]
        assert count_skipped(default, start["retries"]) == 0
    else:
        assert answer.status == 1
        assert (start["skipped"], start["retries"]) == (None, None)
        assert count_skipped(default) == NUM_STEPS
    advised = eval(start["code"], {"jaxscale": jaxscale, "optimizer": sgd})
    assert count_skipped(advised) == 0


@pytest.mark.slow
def test_the_broken_example(doctor):
    answer = doctor(f"{EXAMPLE}:broken")
    assert answer.status == 1
    lines = EXAMPLE.read_text().splitlines()
    (number,) = [i for i, text in enumerate(lines, 1) if "mask_value)." in text]
    assert f"doctor.py:{number}." in answer.flowing
    assert (
        "inf or NaN is in 6 of 7 gradients, even without a loss scale" in answer.flowing
    )
    assert "worst first: down, embed" in answer.flowing
    assert "float16 cannot hold these numbers, but float32 could" in answer.flowing
    assert "-1e4 instead of -1e9" in answer.flowing


@pytest.mark.slow
def test_the_fixed_example(doctor):
    answer = doctor(f"{EXAMPLE}:fixed")
    assert answer.status == 0, answer.out
    assert "Nothing is wrong." in answer.out
