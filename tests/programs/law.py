"""The law: how far gradients may be from those in float32, and how that is measured.

The error of a leaf is the norm of its difference from float32, over the norm of the leaf in
float32. It may be `FACTOR` times that of the reference, or `ROUNDING`. No addition in half
precision may have a summand that comes from no product (`additions`).
"""

import contextlib
import io
import pathlib
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import corpus
import entries
import jax
import jax.numpy as jnp
import numpy as np
from additions import find_foreign_additions
from cases import Case, make_case
from doctor_targets import target_of
from entries import DOCTOR, ENTRIES, Made
from reference import half_products

from jaxscale._doctor.cli import main as command

# No worse than the reference by this factor, or than this.
FACTOR, ROUNDING = 1.25, 2e-4

# One number may be right by chance. So all gradients are made of the parameters and of others that
# are close to them, and the error of a leaf is the root of the mean square of its errors.
DRAWS, APART = 4, 0.02

# A leaf that is smaller than this part of the whole gradient counts as this large. One that is 0
# but for rounding, such as that of a bias before a normalization, has no digits to be right.
SMALLEST = 1e-3


# Float32's gradients and the reference's errors for the fast rows: `run.py --record`.
FILE = pathlib.Path(__file__).with_name("recorded.npz")


class Verdict(NamedTuple):
    """What is wrong with an entry's gradients of a program, in words, and how far it went."""

    wrong: list[str]
    # the largest error beside that of the reference, or beside `ROUNDING`
    ratio: float = 0.0


class Trial:
    """A program with its gradients in float32 and the errors of the reference, made when needed."""

    def __init__(self, row: corpus.Row) -> None:
        self.row = row
        self.case = make_case(row)
        self._exact: list[Made] | None = None
        self._reference: dict[tuple[str, bool], list[float]] = {}

    @classmethod
    def recorded(cls, row: corpus.Row, entry: str) -> "Trial":
        """Returns a trial for one entry, with gradients and errors of the file if it has them."""
        trial = cls(row)
        if entry == DOCTOR or not FILE.exists():
            return trial
        with np.load(FILE) as file:
            count = len(jax.tree.leaves(trial.case.params))
            stacked = [file[f"{row.name} exact {i}"] for i in range(count)]
            kind = ENTRIES[entry]
            reference = file[f"{row.name} reference"].tolist()
        trial._exact = [
            Made(None, [leaf[draw] for leaf in stacked], {}) for draw in range(DRAWS)
        ]
        trial._reference[kind.dtype, kind.half_carries] = reference
        return trial

    def record(self, entry: str) -> dict[str, np.ndarray]:
        """Returns what `recorded` reads."""
        kind = ENTRIES[entry]
        leaves = zip(*(made.grads for made in self.exact()), strict=True)
        found = {
            f"{self.row.name} exact {i}": np.stack(each)
            for i, each in enumerate(leaves)
        }
        reference = self.reference_errors(kind.dtype, kind.half_carries)
        return found | {f"{self.row.name} reference": np.array(reference)}

    def exact(self) -> list[Made]:
        if self._exact is None:
            self._exact, _ = run(entries.in_float32(self.case), self.case)
        return self._exact

    def reference_errors(self, dtype: str, half_carries: bool = False) -> list[float]:
        key = dtype, half_carries
        if key not in self._reference:
            with half_products(dtype, half_carries):
                made, _ = run(entries.with_loss_scale(self.case), self.case)
            self._reference[key] = errors(made, self.exact())
        return self._reference[key]

    def judge(self, name: str) -> Verdict:
        """Returns what is wrong with the gradients that an entry makes of the program."""
        if name == DOCTOR:
            return _ask_doctor(self.row)
        entry = ENTRIES[name]
        with warnings.catch_warnings():
            if entry.half_carries:  # which is right of programs without a loop
                warnings.filterwarnings("ignore", ".*carries nothing in half precision")
            made, program = run(entry.make(self.case), self.case)
        wrong = [
            f"not so: {text}"
            for text, is_so in made[0].checks.items()
            if not np.all(is_so)
        ]
        if not np.all(np.isfinite([each.loss for each in made])):
            wrong.append("the loss is not finite")
        # which its documentation advises against
        if entry.half_carries and self.case.integrates:
            finite = all(
                np.all(np.isfinite(leaf)) for each in made for leaf in each.grads
            )
            return Verdict(
                wrong if finite else [*wrong, "gradients that are not finite"]
            )
        found = errors(made, self.exact())
        reference = self.reference_errors(entry.dtype, entry.half_carries)
        verdict = _compare(leaf_names(self.case), found, reference)
        # What a loop carries in half precision by request is no product, and is added.
        foreign = [] if entry.half_carries else find_foreign_additions(program)
        return Verdict([*wrong, *verdict.wrong, *foreign], verdict.ratio)


def run(fun: Any, case: Case) -> tuple[list[Made], Any]:
    """Returns what a function makes of all draws, and its program."""
    leaves, treedef = jax.tree.flatten(case.params)
    others, other_treedef = jax.tree.flatten(case.batch)

    # Of leaves, as `trace` puts what is no array into trees of its arguments.
    def of_leaves(leaves: Any, others: Any) -> Made:
        return fun(treedef.unflatten(leaves), other_treedef.unflatten(others))

    traced = jax.jit(of_leaves).trace(leaves, others)
    compiled = traced.lower().compile()
    draws = [_move(leaves, draw) for draw in range(DRAWS)]
    return [jax.device_get(compiled(moved, others)) for moved in draws], traced.jaxpr


def _move(leaves: Sequence[Any], draw: int) -> list[Any]:
    """Returns the parameters, and for another number than 0 some that are close to them."""
    rng = np.random.default_rng(draw)
    factors = [
        1 + APART * rng.standard_normal(leaf.shape) * (draw > 0) for leaf in leaves
    ]
    pairs = zip(leaves, factors, strict=True)
    return [leaf * jnp.asarray(factor, leaf.dtype) for leaf, factor in pairs]


def leaf_names(case: Case) -> list[str]:
    paths = jax.tree_util.tree_leaves_with_path(case.params)
    return [jax.tree_util.keystr(path) for path, _ in paths]


def errors(found: Sequence[Made], exact: Sequence[Made]) -> list[float]:
    """Returns the error of each leaf, as the law has it, over all draws."""
    squares = []
    for one, other in zip(found, exact, strict=True):
        norms = [_square(leaf) for leaf in other.grads]
        least = SMALLEST**2 * sum(norms)
        differences = [
            _square(np.asarray(a, np.float64) - np.asarray(b, np.float64))
            for a, b in zip(one.grads, other.grads, strict=True)
        ]
        pairs = zip(differences, norms, strict=True)
        squares.append(
            [square / max(norm, least) if square else 0.0 for square, norm in pairs]
        )
    return [float(root) for root in np.sqrt(np.mean(squares, axis=0))]


def _square(array: Any) -> float:
    return float(np.sum(np.abs(np.asarray(array)).astype(np.float64) ** 2))


def _compare(
    names: Sequence[str], found: Sequence[float], reference: Sequence[float]
) -> Verdict:
    wrong, ratio = [], 0.0
    if not np.all(np.isfinite(reference)):
        raise ValueError("the reference overflows: give the program a lower scale")
    for name, error, beside in zip(names, found, reference, strict=True):
        bound = max(FACTOR * beside, ROUNDING)
        ratio = max(ratio, FACTOR * error / bound if np.isfinite(error) else np.inf)
        if not error <= bound:  # also where it is NaN
            wrong.append(
                f"{name}: error {error:.2g}, that of the reference is {beside:.2g}"
            )
    return Verdict(wrong, ratio)


def _ask_doctor(row: corpus.Row) -> Verdict:
    """Returns what the command says of a program in float16, if it finds anything."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        status = command(
            ["doctor", "--quick", "--autocast", "float16", target_of(row.name)]
        )
    if status == 0:
        return Verdict([])
    lines = [line for line in said.getvalue().splitlines() if line.strip()]
    return Verdict([f"status {status}: {' '.join(lines)[-600:]}"])
