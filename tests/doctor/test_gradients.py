"""Gradients on the host: counted as `jaxscale.diagnostics` counts them."""

import json
import pathlib

import jax
import numpy as np
import pytest
from departing import uses_what_goes
from tables import assert_same_bits

from jaxscale import diagnostics
from jaxscale._doctor.gradients import (
    add_histograms,
    compare_gradients,
    count_leaves,
    find_largest,
)

pytestmark = [pytest.mark.standard_promotion, uses_what_goes]


MODEL = """
import jax.numpy as jnp

def two_gradients():
    def loss_fn(w, x):
        y = w.astype(jnp.float16).astype(jnp.float32)
        return jnp.sum(y * x)
    return loss_fn, jnp.ones(2), jnp.array([1.0, 1e-9])
"""


def test_one_of_two_gradients_becomes_zero_without_a_loss_scale(doctor, no_pictures):
    pathlib.Path("twice.py").write_text(MODEL)
    doctor("twice.py:two_gradients", "--loss-scale", "1", "--json-file", "found.json")
    found = json.loads(pathlib.Path("found.json").read_text())
    assert found["comparison"]["flushed"] == 0.5
    (leaf,) = found["leaves"]["rows"]
    assert (leaf["size"], leaf["zero"]) == (2, 1)


def test_of_five_numbers_one_is_flushed_and_one_is_halved():
    exact = {
        "a": np.float32([3, 4]),
        "b": np.float32([2, 0, 1e-30, 2]),
        "c": np.zeros(2),
    }
    grads = exact | {"b": np.float32([2, 0, 0, 1])}
    b, *others = compare_gradients(grads, exact).leaves
    assert b == ("b", 1 / 3, pytest.approx(8**-0.5))
    assert others == [("a", 0, 0), ("c", 0, 0)]
    *whole, _ = compare_gradients(grads, exact)
    assert whole == [1 / 5, pytest.approx(33**-0.5), "b", 1 / 3]


@pytest.mark.slow
def test_numbers_are_counted_as_on_the_device():
    numbers = np.float32([0, 1e-9, 3e-6, -2, 70000, np.inf, np.nan])
    parts = np.stack([numbers, numbers[::-1]], axis=1)
    grads = {
        "full": numbers,
        "complex": parts.view(np.complex64),
        "two rows": np.resize(numbers, 2**15 + 3),
        "empty": np.zeros(0, np.float32),
        "none": None,
    }
    counted = count_leaves(grads)
    expected = jax.device_get(diagnostics.histogram(grads, by_leaf=True))
    assert_same_bits(counted, expected)
    whole = jax.device_get(diagnostics.histogram(grads))
    assert_same_bits(add_histograms(counted), whole)


def test_the_largest_gradient_may_be_complex_or_negative():
    grads = {"a": np.array([1.0, -2.0]), "b": np.array([3 + 4j]), "c": np.zeros(0)}
    assert find_largest(grads) == 5
