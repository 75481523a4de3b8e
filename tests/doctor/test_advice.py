"""What the doctor advises: following it helps, and training does what it says."""

import json
import pathlib
import re

import jax
import optax
import pytest
from advised import ADVICE
from tables import cases
from traced_losses import faulty_lines

import jaxscale
from jaxscale._doctor.target import load

pytestmark = pytest.mark.standard_promotion

EXAMPLE = pathlib.Path(__file__).parent.parent.parent / "examples" / "doctor.py"
NUM_STEPS = 20
SGD = optax.sgd(0.0)
DEFAULT = jaxscale.loss_scaled(SGD)


def blamed_lines(name):
    """How the doctor may name the faulty lines of a pair, as a pattern."""
    lines = faulty_lines(ADVICE[name].faulty)
    assert lines, f"no line of {name} is marked as faulty"
    numbers = "|".join(map(str, lines))
    place = rf"at advised\.py:({numbers})"
    return rf"begins {place}|{place}\. Take a mean instead"


@pytest.mark.worlds
@cases("name", ADVICE, fast=["log_of_probability_that_is_cast", "log_of_density"])
def test_the_fault_is_named_with_its_cure(name, doctor, no_pictures):
    answer = doctor(f"advised.py:{name}__faulty")
    assert answer.status == 1
    assert re.search(blamed_lines(name), answer.flowing), answer.out
    assert ADVICE[name].said in answer.flowing
    assert "1e-3" not in answer.out  # most probabilities are far below it


@pytest.mark.worlds
@cases("name", ADVICE, fast=["index"])
def test_the_cure_helps(name, doctor, no_pictures):
    answer = doctor(f"advised.py:{name}__cured")
    assert answer.status == 0, answer.out
    assert answer.out.startswith("Nothing is wrong")


def count_skipped(tx, retries=0):
    """Returns how many of the first steps of a training are skipped."""
    target = load("doctored:in_units")

    def loss_fn(params):
        return target.loss_fn(params, target.batch)

    step = jax.jit(jaxscale.train_step(loss_fn, tx, retries=retries))
    opt_state = tx.init(target.params)
    for _ in range(NUM_STEPS):
        _, opt_state, _ = step(target.params, opt_state)
    return opt_state.total_notfinite


def ask_for_start(unit, doctor, monkeypatch):
    """Examines a loss in some unit: it has gradients of another size, and the same digits.

    The largest loss scale that fits is `2**(16 - unit)`.
    """
    monkeypatch.setenv("UNIT", str(unit))
    answer = doctor("doctored:in_units", "--json", "--quick")
    results = json.loads(answer.out)
    assert results["calibration"]["init_scale"] == 2.0 ** (16 - unit)
    assert "That is low" not in answer.out
    return answer.status, results["start"]


@pytest.mark.worlds
@cases("unit", range(-4, 17), fast=[9])
def test_training_skips_what_is_said(unit, doctor, monkeypatch):
    status, start = ask_for_start(unit, doctor, monkeypatch)
    assert status == 0
    assert start["skipped"] == max(unit - 1, 0)
    assert count_skipped(DEFAULT) == start["skipped"]
    assert count_skipped(DEFAULT, start["retries"]) == 0
    assert count_skipped(run_code(start)) == 0


@pytest.mark.worlds
@cases("unit", range(17, 25), fast=[17])
def test_where_no_scale_of_at_least_1_fits_all_steps_are_skipped(
    unit, doctor, monkeypatch
):
    status, start = ask_for_start(unit, doctor, monkeypatch)
    assert status == 1
    assert start["skipped"] is None
    assert start["retries"] is None
    assert count_skipped(DEFAULT) == NUM_STEPS
    assert count_skipped(run_code(start)) == 0


def run_code(start):
    """The optimizer that the doctor writes down."""
    return eval(start["code"], {"jaxscale": jaxscale, "optimizer": SGD})


@pytest.mark.slow
def test_the_broken_example(doctor):
    answer = doctor(f"{EXAMPLE}:broken")
    assert answer.status == 1
    lines = EXAMPLE.read_text().splitlines()
    (number,) = [i for i, text in enumerate(lines, 1) if "mask_value)." in text]
    text = answer.flowing
    assert f"doctor.py:{number}." in text
    assert "inf or NaN is in 6 of 7 gradients, even without a loss scale" in text
    assert "worst first: down, embed" in text
    assert "float16 cannot hold these numbers, but float32 could" in text
    assert "-1e4 instead of -1e9" in text


@pytest.mark.slow
def test_the_fixed_example(doctor):
    answer = doctor(f"{EXAMPLE}:fixed")
    assert answer.status == 0, answer.out
    assert "Nothing is wrong." in answer.out
