"""The command `doctor`: its arguments, what it writes where, and its exit status."""

import argparse
import contextlib
import json
import pathlib
import sys
import textwrap
import traceback
from collections.abc import Sequence
from typing import Any

import numpy as np

from .._trees.checks import power_of_two
from ..diagnostics._histogram import EXPONENTS
from ..diagnostics._text import to_json
from .exam import Exam, examine
from .finding import Finding
from .findings import findings, verdict
from .html import page, setting
from .progress import Progress, Spoken
from .scales import find_start
from .target import Target, TargetError, error_line, load

_VERSION = 2  # of the JSON
_PATIENCE = 3.0  # seconds without a sign of life


def main(argv: Sequence[str]) -> int:
    """Returns the exit status: 0 if nothing is wrong, 1 if something is, 2 for bad use."""
    options = _parser().parse_args(argv)
    stdout = sys.stdout
    # With --json nothing else may go to standard output, not even what the model prints.
    quiet = contextlib.redirect_stdout(sys.stderr) if options.json else contextlib.nullcontext()
    try:
        with quiet:
            loss_scale = _loss_scale(options.loss_scale)
            for path in filter(None, (options.output, options.json_file)):  # before the exam
                if not (folder := pathlib.Path(path).parent).is_dir():
                    raise TargetError(f"Cannot write {path}: the folder {folder} does not exist.")
            with Spoken(_PATIENCE) as progress:
                progress("loading the target")
                target = load(options.target)
                exam = _examine(target, loss_scale, options.autocast, progress, options.quick)
                found = findings(exam)
                report, missing = None, ""
                if not options.quick:
                    progress("drawing the report")
                    report, missing = page(exam, found)
            print(_summary(exam, found), end="\n\n")
            if report is not None:
                pathlib.Path(options.output).write_text(report, encoding="utf-8")
                print(f"The report is in {options.output}.")
            if missing:
                print(missing)
            record = json.dumps(_record(exam, found), indent=1, allow_nan=False) + "\n"
            if options.json_file:
                pathlib.Path(options.json_file).write_text(record, encoding="utf-8")
    except (TargetError, OSError) as error:  # also a full disk, or a name that is a folder
        if options.traceback:
            traceback.print_exception(error)
        print(f"jaxscale doctor: {error}", file=sys.stderr)
        return 2
    if options.json:
        stdout.write(record)
    return int(any(finding.is_problem for finding in found))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="jaxscale", description="Loss scaling for JAX and Optax.")
    commands = parser.add_subparsers(required=True, metavar="command")
    doctor = commands.add_parser(
        "doctor",
        help="find out where a model overflows or underflows",
        description="Runs one backward pass of a model in many ways, and writes a report of where "
        "it overflows, what underflows, and which loss scale would work.",
        epilog="Exit status: 0 if nothing is wrong, 1 if something is, 2 for bad use. The results "
        "of all operations are looked at, which is slow: use a small model and a small batch.",
    )
    option = doctor.add_argument
    option(
        "target",
        metavar="module:function",
        help="or path/to/file.py:function; called without arguments, it returns (loss_fn, params, "
        "batch), where loss_fn(params, batch) is the loss",
    )
    option(
        "--loss-scale",
        default="auto",
        metavar="SCALE",
        help='a power of two, 1 for none, or "auto", the largest that does not overflow on the '
        "batch (default: auto)",
    )
    option(
        "--autocast",
        choices=("float16", "bfloat16"),
        help="compute the loss under `jaxscale.autocast` in this format, and "
        "compare it with the loss as it is written: would a float32 model survive?",
    )
    option(
        "--quick",
        action="store_true",
        help="only look for what is not finite, for the largest loss scale, and for what limits "
        "it: no comparison with float32, no remedies, no report; in about three fifths of the time",
    )
    option(
        "--output",
        default="jaxscale-doctor.html",
        metavar="FILE",
        help="the report, one HTML file (default: jaxscale-doctor.html)",
    )
    option("--json", action="store_true", help="print all results as JSON, and the text on stderr")
    option("--json-file", metavar="FILE", help="also write the JSON to this file")
    option("--traceback", action="store_true", help="for bad use, print the Python traceback too")
    return parser


def _loss_scale(given: str) -> float | None:
    if given == "auto":
        return None
    try:
        exponent = power_of_two("doctor", "loss_scale", float(given))
    except ValueError:
        exponent = -1
    if exponent < 0:
        raise TargetError(
            f'--loss-scale must be a power of two, at least 1, or "auto", got {given!r}.'
        )
    return 2.0**exponent


def _examine(
    target: Target, loss_scale: float | None, dtype: str | None, progress: Progress, is_quick: bool
) -> Exam:
    try:
        # The numbers that NumPy warns of while JAX traces are in the report.
        with np.errstate(over="ignore", under="ignore"):
            return examine(target, loss_scale, dtype, progress, is_quick=is_quick)
    except Exception as error:
        raise TargetError(
            f"{target.name} failed when it was run on its batch: {error_line(error)}"
        ) from error


def _summary(exam: Exam, found: Sequence[Finding]) -> str:
    lines = [verdict(exam, found), *_wrap(setting(exam), "")]
    for finding in found:
        lines += ["", *_wrap(finding.title, "! " if finding.is_problem else "- ")]
        lines += [f"      {text.strip()}" for i, text in finding.source if i == finding.line]
        for detail in finding.details:
            lines += _wrap(detail, "  ")
    return "\n".join(lines)


def _wrap(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        text,
        88,
        initial_indent=indent,
        subsequent_indent=" " * len(indent),
        break_long_words=False,  # paths
        break_on_hyphens=False,
    )


def _record(exam: Exam, found: Sequence[Finding]) -> dict[str, Any]:
    counts = np.asarray(exam.histogram.counts, np.float64).sum(axis=1)
    histogram = exam.histogram._asdict() | {
        "counts": {str(k): n for k, n in zip(EXPONENTS, counts, strict=True) if n}
    }
    measured = exam._asdict() | exam.against._asdict() | {"histogram": histogram}
    measured["float32"] = measured.pop("comparison")
    measured["comparison"] = exam.comparison
    measured["is_finite_in_float32"] = measured.pop("is_finite")
    del measured["against"], measured["grads"]
    return to_json(
        {
            "version": _VERSION,
            "found": any(finding.is_problem for finding in found),
            "verdict": verdict(exam, found),
            "findings": list(found),
            "start": find_start(exam),
        }
        | measured
    )
