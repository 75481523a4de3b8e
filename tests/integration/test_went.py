"""The page of what went in 0.5.0: what it says went is gone, and what it says instead runs."""

import pathlib
import re

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tables import cases

import jaxscale
from jaxscale import presets

PAGE = pathlib.Path(__file__).parents[2] / ".github" / "site" / "pages" / "went.md"
# What the code in the tables may name.
NAMES = {
    "jaxscale": jaxscale,
    "presets": presets,
    "optax": optax,
    "jnp": jnp,
    "np": np,
}
GONE = (AttributeError, ImportError, TypeError, ValueError)


def find_rows():
    """Returns what went, and what to write instead, of each row of the tables."""
    rows = {}
    for line in PAGE.read_text().splitlines():
        cells = re.split(r"(?<!\\)\|", line)[1:-1]
        if len(cells) < 2 or not (codes := re.findall("`([^`]+)`", cells[0])):
            continue
        for code in codes:
            rows[code] = re.findall("`([^`]+)`", cells[1])
    return rows


ROWS = find_rows()


@cases("code", ROWS)
def test_what_went_is_gone(code):
    with pytest.raises(GONE):
        eval(code, dict(NAMES))


@cases("code", ROWS)
def test_what_to_write_instead_runs(code):
    for instead in ROWS[code]:
        eval(instead, dict(NAMES))
