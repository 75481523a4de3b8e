"""The command `doctor`: its arguments, what it writes where, and its exit status."""

import argparse
import contextlib
import pathlib
import sys
import traceback
from collections.abc import Sequence

from .. import __version__
from .._went import say_goes
from .announcer import Announcer
from .finding import has_problem
from .page import say_missing
from .report import Report, check_loss_scale, examine_target
from .target import TargetError, load

_PATIENCE = 3.0  # seconds without a sign of life
_INTERRUPTED = 130  # the exit status after Ctrl-C, by the rule of shells


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
            report = _make_report(options)
            record = _write_results(options, report)
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
    return int(has_problem(report.findings))


def _make_report(options: argparse.Namespace) -> Report:
    """Examines the target as the options ask for."""
    loss_scale = _read_loss_scale(options.loss_scale)
    _check_folders(options)  # before the exam, which takes a while
    if options.quick:
        print(f"jaxscale doctor: {say_goes('quick')}", file=sys.stderr)
    with Announcer(_PATIENCE) as announcer:
        announcer("loading the target")
        target = load(options.target)
        missing = "" if options.quick else say_missing()
        if missing:
            print(f"jaxscale doctor: {missing}", file=sys.stderr)
        return examine_target(
            target, loss_scale, options.autocast, announcer, is_quick=options.quick
        )


def _check_folders(options: argparse.Namespace) -> None:
    for path in (options.output, options.json_file):
        if not path:
            continue
        folder = pathlib.Path(path).parent
        if not folder.is_dir():
            raise TargetError(
                f"Cannot write {path}: the folder {folder} does not exist."
            )


def _write_results(options: argparse.Namespace, report: Report) -> str:
    """Prints the summary, writes the files, and returns the results as JSON."""
    print(report, end="\n\n")
    if not options.quick:
        with contextlib.suppress(ImportError):  # which `say_missing` has told
            report.save_html(options.output)
            print(f"The report is in {options.output}.")
    text = report.to_json() + "\n"
    if options.json_file:
        pathlib.Path(options.json_file).write_text(text, encoding="utf-8")
    return text


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
        help="goes in 0.7.0; only look for what is not finite, for the largest loss scale, and for "
        "what limits it: no comparison with float32, no remedies, no report",
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
        return check_loss_scale("doctor", "loss_scale", float(text))
    except ValueError:
        raise TargetError(
            f'--loss-scale must be a power of two, at least 1, or "auto", got {text!r}.'
        ) from None
