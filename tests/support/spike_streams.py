"""Losses and norms that are made up, to see what a rule for spikes skips of them.

Each stream is an array, [run, step]. The runs differ by their noise alone.
"""

from typing import NamedTuple

import numpy as np

STEPS = 20_000


class Stream(NamedTuple):
    """Norms, and which of their steps one asks about.

    Attributes:
      norms: f64[runs, steps].
      counted: bool[runs, steps], the steps that a rule should not skip, or should; those whose
        share is told.
    """

    norms: np.ndarray
    counted: np.ndarray


def jumps(size, start=1.0, noise=0.1, runs=8, steps=1000, at=600):
    """A level that is `size` times as high from step `at` on, up to float32's largest."""
    level = start * _around_one(_normal(runs, steps, seed=1), noise)
    after = np.broadcast_to(np.arange(steps) >= at, level.shape)
    with np.errstate(over="ignore"):
        norms = np.where(after, level * size, level)
    return Stream(np.minimum(norms, 3e38), after)


def rare_gradients(share, otherwise=0.0, runs=8, steps=STEPS):
    """Norms of about 1 in a share of the steps, and next to nothing in the others."""
    rng = np.random.default_rng(2)
    has_gradient = rng.random((runs, steps)) < share
    sizes = np.exp(0.3 * rng.standard_normal((runs, steps)))
    nothing = otherwise * _around_one(_normal(runs, steps, seed=3))
    return Stream(np.where(has_gradient, sizes, nothing), has_gradient)


def rare_kind(share, size, noise=0.1, runs=8, steps=STEPS):
    """A kind of batch whose norm stands out, drawn for a share of the steps."""
    is_rare = np.random.default_rng(4).random((runs, steps)) < share
    sizes = np.where(is_rare, size, 1.0)
    return Stream(sizes * _around_one(_normal(runs, steps, seed=5), noise), is_rare)


def every_50th(size=10.0, noise=0.01, runs=1, steps=STEPS):
    """The same, in every 50th step."""
    is_rare = np.broadcast_to(np.arange(steps) % 50 == 0, (runs, steps))
    sizes = np.where(is_rare, size, 1.0)
    return Stream(sizes * _around_one(_normal(runs, steps, seed=6), noise), is_rare)


def single(at, later=30, runs=8, steps=1000):
    """One spike of 1000 among 1 +- 0.1, and one of 2 some steps later, which is asked about."""
    norms = _around_one(_normal(runs, steps, seed=7))
    norms[:, at] = 1000.0
    norms[:, at + later] = 2.0
    counted = np.zeros(norms.shape, bool)
    counted[:, at + later] = True
    return Stream(norms, counted)


# Distributions of norms, by a generator and a shape.
DRAWN = {
    "normal, 1 +- 0.1": lambda rng, shape: 1 + 0.1 * rng.standard_normal(shape),
    "lognormal, 0.3": lambda rng, shape: np.exp(0.3 * rng.standard_normal(shape)),
    "lognormal, 1": lambda rng, shape: np.exp(rng.standard_normal(shape)),
    "Student, 3 degrees": lambda rng, shape: np.abs(rng.standard_t(3, shape)),
    "Cauchy": lambda rng, shape: np.abs(rng.standard_cauchy(shape)),
    "Pareto, 1.5": lambda rng, shape: 1 + rng.pareto(1.5, shape),
}


def drawn(name, runs=8, steps=STEPS):
    """Norms of which each is drawn by itself, all of them good."""
    norms = DRAWN[name](np.random.default_rng(8), (runs, steps))
    return Stream(norms, np.ones(norms.shape, bool))


def _around_one(numbers, noise=0.1):
    return 1 + noise * numbers


def _normal(runs, steps, seed=9):
    return np.random.default_rng(seed).standard_normal((runs, steps))
