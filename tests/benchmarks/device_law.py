"""The table of the laws that `device.py` checks on a device, and how one is checked.

A module of laws registers each of its functions by `@law(statement, cases)`. A law raises an
exception where it does not hold. Whoever adds laws adds a module, and its name in `device.py`.
"""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

LAWS = {}


class Law(NamedTuple):
    """A statement about one case."""

    check: Callable[..., Any]  # may return figures, of JSON types
    args: tuple[Any, ...]


def law(statement, cases=None):
    """Registers a function for each of the cases, which are its arguments by their names."""
    if cases is None:
        cases = {"": ()}

    def register(function):
        for label, args in cases.items():
            name = f"{statement}: {label}" if label else statement
            LAWS[name] = Law(function, args)
        return function

    return register


def check(holds, message):
    """Raises an `AssertionError` that says what was found, with `python -O`, too."""
    if not holds:
        raise AssertionError(message)


def examine(name):
    """Returns what became of a law, as JSON types."""
    start = time.perf_counter()
    checked = LAWS[name]
    report = {"law": name, "passed": True}
    try:
        figures = checked.check(*checked.args)
    except Exception as error:
        report["passed"] = False
        report["error"] = f"{type(error).__name__}: {error}"[:2000]
    else:
        if figures:
            report["figures"] = figures
    report["seconds"] = round(time.perf_counter() - start, 3)
    return report


def bits(tree):
    """Returns the bytes of all arrays of a tree."""
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def numbers(seed, *shape):
    """Returns normally distributed numbers, the same ones on every machine."""
    drawn = np.random.default_rng(seed).standard_normal(shape)
    return jnp.asarray(drawn, jnp.float32)


def distance(tree, expected):
    """Returns the norm of a difference of trees, relative to that of what is expected."""
    found = _flatten(tree)
    expected = _flatten(expected)
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def _flatten(tree):
    leaves = [np.ravel(np.asarray(leaf, np.float64)) for leaf in jax.tree.leaves(tree)]
    return np.concatenate(leaves)
