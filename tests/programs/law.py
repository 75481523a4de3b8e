"""The law: how far gradients may be from those in float32, and how that is measured."""

import contextlib
import functools
from typing import Any, NamedTuple

import entries
import jax
import jax.numpy as jnp
import numpy as np
from additions import find_foreign_additions
from cases import Case
from entries import Entry
from reference import half_products

# No worse than the reference by this factor, or than this.
FACTOR, ROUNDING = 1.25, 2e-4

# One gradient of one element may be right by chance. So all are made of the parameters and of
# others close by, and the error is the root of the mean square.
DRAWS, APART = 6, 0.02


class Found(NamedTuple):
    """What an entry did with a program: what is wrong, in words, and the largest ratio."""

    wrong: list[str]
    ratio: float  # of the worst leaf to what the law allows it
    program: Any = None  # as it was traced


def nearby(params: Any, draw: int) -> Any:
    """Returns the parameters, and with another number than 0 some that are close to them."""
    rng = np.random.default_rng(draw)

    def move(leaf: Any) -> Any:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        factors = 1 + APART * rng.standard_normal(leaf.shape)
        return leaf * jnp.asarray(factors, leaf.dtype)

    return params if draw == 0 else jax.tree.map(move, params)


def run(fun: Any, case: Case) -> tuple[list[Any], Any]:
    """Returns what a function makes of all draws, and its program."""
    traced = jax.jit(fun).trace(case.params, case.batch)
    compiled = traced.lower().compile()
    made = [compiled(nearby(case.params, draw), case.batch) for draw in range(DRAWS)]
    return jax.device_get(made), traced.jaxpr


def leaf_names(case: Case) -> list[str]:
    return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(case.params)]


def errors(found: Any, exact: Any) -> list[float]:
    """Returns the error of each leaf: the norm of the difference, over that of the leaf.

    A leaf that is 0 must be 0. The root of the mean square over all draws.
    """
    squares = [
        [_relative_square(a, b) for a, b in zip(one.grads, other.grads, strict=True)]
        for one, other in zip(found, exact, strict=True)
    ]
    return [float(root) for root in np.sqrt(np.mean(squares, axis=0))]


def _relative_square(found: Any, exact: Any) -> float:
    found, exact = np.asarray(found, np.float64), np.asarray(exact, np.float64)
    if found.shape != exact.shape:
        return np.inf
    square = np.sum(np.abs(found - exact) ** 2)
    if square == 0:
        return 0.0
    norm = np.sum(np.abs(exact) ** 2)
    return square / norm if norm and np.isfinite(square) else np.inf


@functools.lru_cache(maxsize=2)  # entries of one program follow each other
def exact_gradients(case: "Keyed") -> list[Any]:
    return run(entries.in_float32(case.case), case.case)[0]


@functools.lru_cache(maxsize=8)
def reference_errors(case: "Keyed", dtype: str, half_carries: bool) -> list[float]:
    with half_products(dtype, half_carries):
        made, _ = run(entries.with_loss_scale(case.case), case.case)
    return errors(made, exact_gradients(case))


class Keyed:
    """A case that can be remembered by."""

    def __init__(self, case: Case) -> None:
        self.case = case


def judge(keyed: Keyed, entry: Entry) -> Found:
    """Returns what is wrong with the gradients that an entry makes of a program."""
    case = keyed.case
    made, program = run(entry.make(case), case)
    wrong = [
        f"not so: {text}" for text, is_so in made[0].checks.items() if not np.all(is_so)
    ]
    found = errors(made, exact_gradients(keyed))
    allowed = reference_errors(keyed, entry.dtype, entry.half_carries)
    ratio = 0.0
    for name, ours, theirs in zip(leaf_names(case), found, allowed, strict=True):
        bound = max(FACTOR * theirs, ROUNDING)
        ratio = max(ratio, ours / bound * FACTOR if np.isfinite(ours) else np.inf)
        if not ours <= bound:
            wrong.append(f"{name}: error {ours:.2g}, reference {theirs:.2g}")
    if not entry.half_carries:  # a carry in half precision is no product, and is meant to be
        wrong += find_foreign_additions(program)
    return Found(wrong, ratio, program)
