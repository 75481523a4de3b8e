"""The law: how far gradients may be from those in float32, and how that is measured.

The error of a leaf is the norm of its difference from float32, over the norm of the leaf in
float32. It may be `FACTOR` times that of the reference, or `ROUNDING`. Nothing is added in half
precision (`additions`).
"""

import contextlib
import functools
import io

import entries
import jax
import jax.numpy as jnp
import numpy as np
from additions import find_additions, find_roundings
from cases import make_case
from doctor_targets import target_of
from entries import DOCTOR, ENTRIES
from reference import half_products

from jaxscale._doctor.cli import main as command

# No worse than the reference by this factor, or than this.
FACTOR, ROUNDING = 1.25, 2e-4

# One number may be right by chance. So all gradients are computed at the parameters and at others
# close to them, and the error of a leaf is the root of the mean square of its errors.
DRAWS, APART = 4, 0.02

# A leaf that is smaller than this part of the whole gradient counts as this large. One that is 0
# but for rounding, such as that of a bias before a normalization, has no digits to be right.
SMALLEST = 1e-3


class Trial:
    """A program. Its float32 gradients and the reference's errors are computed when needed."""

    def __init__(self, row):
        self.row = row
        self.case = make_case(row)
        self._reference: dict[str, list[float]] = {}

    @functools.cached_property
    def exact(self):
        """The results in float32, one for each draw."""
        results, _ = run(entries.in_float32(self.case), self.case)
        return results

    def reference_errors(self, dtype):
        """Returns the error of each leaf with products in half precision alone."""
        if dtype not in self._reference:
            with half_products(dtype):
                results, _ = run(entries.with_loss_scale(self.case), self.case)
            self._reference[dtype] = find_errors(results, self.exact)
        return self._reference[dtype]

    def judge(self, name):
        """Returns what is wrong with the gradients that an entry makes of the program."""
        if name == DOCTOR:
            return _ask_doctor(self.row)
        entry = ENTRIES[name]
        results, program = run(entry.make(self.case), self.case)
        wrong = _broken_promises(results)
        errors = find_errors(results, self.exact)
        reference = self.reference_errors(entry.dtype)
        wrong += _compare(leaf_names(self.case), errors, reference)
        return [*wrong, *find_additions(program), *find_roundings(program)]


def run(fun, case):
    """Returns the results of a function for all draws, and its program."""
    leaves, treedef = jax.tree.flatten(case.params)
    others, other_treedef = jax.tree.flatten(case.batch)

    # Takes leaves, as `trace` puts objects that are no arrays into trees of its arguments.
    def of_leaves(leaves, others):
        return fun(treedef.unflatten(leaves), other_treedef.unflatten(others))

    traced = jax.jit(of_leaves).trace(leaves, others)
    compiled = traced.lower().compile()
    results = []
    for draw in range(DRAWS):
        results.append(jax.device_get(compiled(_move(leaves, draw), others)))
    return results, traced.jaxpr


def _move(leaves, draw):
    """Returns the parameters for draw 0, and others that are close to them for later draws."""
    rng = np.random.default_rng(draw)
    moved = []
    for leaf in leaves:
        factor = 1 + APART * rng.standard_normal(leaf.shape) * (draw > 0)
        moved.append(leaf * jnp.asarray(factor, leaf.dtype))
    return moved


def leaf_names(case):
    paths = jax.tree_util.tree_leaves_with_path(case.params)
    return [jax.tree_util.keystr(path) for path, _ in paths]


def find_errors(results, exact):
    """Returns the error of each leaf, as the law has it, over all draws."""
    squares = []
    for result, exact_result in zip(results, exact, strict=True):
        norms = [_square(leaf) for leaf in exact_result.grads]
        least = SMALLEST**2 * sum(norms)
        of_leaves = []
        leaves = zip(result.grads, exact_result.grads, norms, strict=True)
        for leaf, exact_leaf, norm in leaves:
            difference = np.asarray(leaf, np.float64) - np.asarray(
                exact_leaf, np.float64
            )
            square = _square(difference)
            of_leaves.append(square / max(norm, least) if square else 0.0)
        squares.append(of_leaves)
    return np.sqrt(np.mean(squares, axis=0)).tolist()


def _square(array):
    return float(np.sum(np.abs(np.asarray(array)).astype(np.float64) ** 2))


def _all_finite(tree):
    return all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(tree))


def _broken_promises(results):
    """Returns in words which checks of an entry fail, and whether a loss is not finite."""
    wrong = []
    for text, is_so in results[0].checks.items():
        if not np.all(is_so):
            wrong.append(f"not so: {text}")
    if not _all_finite([result.loss for result in results]):
        wrong.append("the loss is not finite")
    return wrong


def _compare(names, errors, reference):
    """Compares the errors of an entry with those of the reference, leaf by leaf."""
    if not np.all(np.isfinite(reference)):
        raise ValueError("the reference overflows: give the program a lower scale")
    wrong = []
    for name, error, expected in zip(names, errors, reference, strict=True):
        if not error <= max(FACTOR * expected, ROUNDING):  # also where it is NaN
            wrong.append(
                f"{name}: error {error:.2g}, that of the reference is {expected:.2g}"
            )
    return wrong


def _ask_doctor(row):
    """Returns what the command says about a program in float16, if it finds anything."""
    arguments = ["doctor", "--quick", "--autocast", "float16", target_of(row.name)]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        status = command(arguments)
    if status == 0:
        return []
    lines = [line for line in printed.getvalue().splitlines() if line.strip()]
    return [f"status {status}: {' '.join(lines)[-600:]}"]
