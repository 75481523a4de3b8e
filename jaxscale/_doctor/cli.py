"""The command `doctor`: its arguments, what it writes where, and its exit status."""

import argparse
import contextlib
import json
import pathlib
import shutil
import sys
import textwrap
import traceback
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .. import __version__
from .._trees.arguments import power_of_two
from .announcer import Announce, Announcer
from .diagnosis import diagnose, say_setting, say_verdict
from .exam import Exam
from .finding import Finding, has_problem
from .measure import examine
from .page import draw_page, say_missing
from .record import make_record
from .target import Target, TargetError, error_line, load

_PATIENCE = 3.0  # seconds without a sign of life
_WIDTH = 88  # of the text, where standard output is not a terminal
_WIDEST = 100  # and at most: longer lines are hard to read
_INTERRUPTED = 130  # the exit status after Ctrl-C, by the rule of shells


class _Results(NamedTuple):
    """The results to print and to write."""

    exam: Exam
    findings: Sequence[Finding]
    page: str | None  # the report as HTML, or `None` with `--quick` and without Jinja2


def main(argv: Sequence[str]) -> int:
    """Runs the command: returns 0 if nothing is wrong, 1 if something is, 2 for bad use."""
    options = _make_parser().parse_args(argv)
    stdout = sys.stdout
    quiet = contextlib.nullcontext()
    if options.json:
        # Nothing else may go to standard output then, not even what the model prints.
        quiet = contextlib.redirect_stdout(sys.stderr)
    try:
        with quiet:
            results = _find_results(options)
            record = _write_results(options, results)
    # also a full disk, or a name that is a folder
    except (TargetError, OSError) as error:
        if options.traceback:
            traceback.print_exception(error)
        print(f"jaxscale doctor: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("jaxscale doctor: interrupted.", file=sys.stderr)
        return _INTERRUPTED
    if options.json:
        stdout.write(record)
    return int(has_problem(results.findings))


def _find_results(options: argparse.Namespace) -> _Results:
    """Makes the exam that the options ask for."""
    loss_scale = _read_loss_scale(options.loss_scale)
    _check_folders(options)  # before the exam, which takes a while
    with Announcer(_PATIENCE) as announcer:
        announcer("loading the target")
        target = load(options.target)
        missing = "" if options.quick else say_missing()
        if missing:
            print(f"jaxscale doctor: {missing}", file=sys.stderr)
        exam = _examine(target, loss_scale, options.autocast, announcer, options.quick)
        findings = diagnose(exam)
        if options.quick:
            return _Results(exam, findings, page=None)
        announcer("drawing the report")
        return _Results(exam, findings, draw_page(exam, findings))


def _check_folders(options: argparse.Namespace) -> None:
    for path in (options.output, options.json_file):
        if not path:
            continue
        folder = pathlib.Path(path).parent
        if not folder.is_dir():
            raise TargetError(
                f"Cannot write {path}: the folder {folder} does not exist."
            )


def _write_results(options: argparse.Namespace, results: _Results) -> str:
    """Prints the summary, writes the files, and returns the results as JSON."""
    print(summarize(results.exam, results.findings), end="\n\n")
    if results.page is not None:
        _write_file(options.output, results.page)
        print(f"The report is in {options.output}.")
    record = make_record(results.exam, results.findings)
    text = json.dumps(record, indent=1, allow_nan=False) + "\n"
    if options.json_file:
        _write_file(options.json_file, text)
    return text


def _write_file(path: str, text: str) -> None:
    pathlib.Path(path).write_text(text, encoding="utf-8")


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jaxscale", description="Loss scaling for JAX and Optax."
    )
    parser.add_argument(
        "--version", action="version", version=f"jaxscale {__version__}"
    )
    commands = parser.add_subparsers(required=True, metavar="command")
    doctor = commands.add_parser(
        "doctor",
        help="find out where a model overflows or underflows",
        description="Runs one backward pass of a model in many ways, and writes a report of where "
        "it overflows, what underflows, and which loss scale would work.",
        epilog="Exit status: 0 if nothing is wrong, 1 if something is, 2 for bad use, 130 after "
        "Ctrl-C. The doctor looks at the results of all operations, which is slow: use a small "
        "model and a small batch.",
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
    option(
        "--json",
        action="store_true",
        help="print all results as JSON, and the text on stderr",
    )
    option("--json-file", metavar="FILE", help="also write the JSON to this file")
    option(
        "--traceback",
        action="store_true",
        help="for bad use, print the Python traceback too",
    )
    return parser


def _read_loss_scale(text: str) -> float | None:
    if text == "auto":
        return None
    try:
        exponent = power_of_two("doctor", "loss_scale", float(text))
    except ValueError:
        exponent = -1
    if exponent < 0:
        raise TargetError(
            f'--loss-scale must be a power of two, at least 1, or "auto", got {text!r}.'
        )
    return 2.0**exponent


def _examine(
    target: Target,
    loss_scale: float | None,
    dtype: str | None,
    announce: Announce,
    is_quick: bool,
) -> Exam:
    try:
        # What NumPy and `autocast` warn of while JAX traces is in the report.
        with np.errstate(over="ignore", under="ignore"), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`autocast` (changes nothing|to)")
            return examine(target, loss_scale, dtype, announce, is_quick=is_quick)
    except TargetError:
        raise
    except Exception as error:
        raise TargetError(
            f"{target.name} failed when it was run on its batch: {error_line(error)}"
        ) from error


def summarize(exam: Exam, findings: Sequence[Finding]) -> str:
    """Returns the findings as text that fits the terminal."""
    # `COLUMNS` counts before the terminal itself does.
    width = min(shutil.get_terminal_size((_WIDTH, 24)).columns, _WIDEST)
    lines = _wrap(say_verdict(exam, findings), "", width)
    lines += _wrap(say_setting(exam), "", width)
    for finding in findings:
        lines.append("")
        lines += _summarize_finding(finding, width)
    return "\n".join(lines)


def _summarize_finding(finding: Finding, width: int) -> list[str]:
    mark = "! " if finding.is_problem else "- "
    lines = _wrap(finding.title, mark, width)
    for number, text in finding.source:
        if number == finding.line:
            lines.append(_shorten(f"      {text.strip()}", width))
    for detail in finding.details:
        lines += _wrap(detail, "  ", width)
    return lines


def _wrap(text: str, indent: str, width: int) -> list[str]:
    return textwrap.wrap(
        text,
        width,
        initial_indent=indent,
        subsequent_indent=" " * len(indent),
        break_long_words=False,  # paths, which one may want to copy
        break_on_hyphens=False,
    )


def _shorten(line: str, width: int) -> str:
    if len(line) <= width:
        return line
    return f"{line[: width - 4]} ..."
