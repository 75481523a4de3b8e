"""Every program through the entries of jaxscale: no worse than with its products in half alone."""

import additions
import corpus
import jax
import jax.numpy as jnp
import numpy as np
import plan
import pytest
import reference
from entries import DOCTOR, ENTRIES
from law import Trial
from tables import cases

pytestmark = pytest.mark.standard_promotion

ROWS = corpus.load()
SELECTED = plan.two_entries(ROWS)
PAIRS = [(name, entry) for name, both in SELECTED.items() for entry in both]


def judge(trial, entries):
    wrong = {entry: trial.judge(entry).wrong for entry in entries}
    return {entry: lines for entry, lines in wrong.items() if lines}


@pytest.mark.parametrize(("name", "entry"), plan.FAST.items())
def test_a_program_is_no_worse_than_with_its_products_in_half(name, entry):
    assert judge(Trial(ROWS[name]), [entry]) == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_each_program_through_two_entries(name):
    assert judge(Trial(ROWS[name]), SELECTED[name]) == {}


def test_there_are_enough_programs_and_every_family_meets_every_entry():
    assert len(ROWS) >= 100
    met = {(ROWS[name].family, entry) for name, entry in PAIRS}
    entries = {*ENTRIES, DOCTOR}
    assert met == {(family, entry) for family in corpus.FAMILIES for entry in entries}
    assert {row.framework for row in ROWS.values()} == set(corpus.MODULES)
