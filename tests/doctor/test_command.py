"""The command: what it writes where, its exit status, and what it says about bad use."""

import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest
from misused import look_up
from tables import cases
from traced_losses import faulty_lines

import jaxscale
from jaxscale._doctor import cli, compiled, target
from jaxscale._doctor.exam import Relief
from jaxscale._doctor.faults import Fault
from jaxscale._doctor.finding import Finding
from jaxscale._doctor.gradients import Comparison, LeafError
from jaxscale._doctor.measure import examine
from jaxscale._doctor.record import make_record
from jaxscale._doctor.start import Start
from jaxscale._doctor.target import load

pytestmark = pytest.mark.standard_promotion

# What programs that read the JSON rely on. A field may be added; else the version changes.
FIELDS = """
version found verdict findings target autocast is_quick is_auto loss loss_as_written dtypes
dtypes_of_parameters sums_of_gradients backward_rules loss_scale shown_scale calibration start
repeats scale_backward_raised largest is_limited ceiling relief comparison
nonfinite_arguments nonfinite_outputs constants not_entered
is_finite_in_float32 float32 wrong unstable right_loss mean mean_at fault half_draws zero
leaves histogram shares layers
"""


@pytest.mark.worlds
def test_the_json_has_the_results(doctor, no_pictures):
    answer = doctor("doctored:fine", "--json")
    assert answer.status == 0
    results = json.loads(answer.out)
    assert list(results) == FIELDS.split()
    expected = {
        "version": 3,
        "found": False,
        "verdict": "Nothing is wrong.",
        "loss": 3.5,
        "dtypes": ["float16", "float32"],
        "start": {
            "skipped": 0,
            "retries": 0,
            "code": "jaxscale.loss_scaled(optimizer)",
        },
        "wrong": [],
        "fault": None,
        "zero": ["unused"],
    }
    assert {name: results[name] for name in expected} == expected
    assert results["calibration"]["init_scale"] == results["loss_scale"]
    sizes = {row["path"]: row["size"] for row in results["leaves"]["rows"]}
    assert sizes == {"w": 2, "unused": 2}
    histogram = results["histogram"]
    assert list(histogram) == ["counts", "zero", "inf", "nan"]
    assert sum(histogram["counts"].values()) == 2
    assert results["nonfinite_outputs"] == []
    assert results["comparison"]["error"] == 0
    assert results["float32"]["error"] < 1e-3
    assert results["ceiling"]["where"]


def test_the_json_goes_to_standard_output_alone_and_to_a_file(doctor):
    answer = doctor("doctored:fine", "--quick", "--json", "--json-file", "results.json")
    text = pathlib.Path("results.json").read_text()
    assert json.loads(answer.out) == json.loads(text)
    assert "the model prints" in answer.err
    assert "Nothing overflows." in answer.err


# The fields of what the doctor itself measures. The rest are results of `jaxscale.diagnostics`.
NESTED_FIELDS = {
    Finding: "is_problem title details where source line",
    Start: "skipped retries code",
    Relief: "loss_scale lines",
    Comparison: "flushed error worst worst_flushed leaves",
    LeafError: "path flushed error",
    Fault: "kind where operation direction layer dtype limit lines works error cure bfloat16 "
    "numbers",
}


@cases("kind", NESTED_FIELDS)
def test_the_json_keeps_the_names_of_its_fields(kind):
    assert kind._fields == tuple(NESTED_FIELDS[kind].split())


def test_the_json_names_what_is_infinite(doctor):
    exam = examine(load("doctored:fine"), None, is_quick=True)
    fault = exam.ceiling._replace(error=np.inf)
    exam = exam._replace(check=exam.check._replace(fault=fault))
    record = json.loads(json.dumps(make_record(exam, []), allow_nan=False))
    assert list(record["fault"]) == NESTED_FIELDS[Fault].split()
    assert record["fault"]["error"] == "Infinity"


@cases("columns", [44, 60, 88, 1000], fast=[44])
def test_the_text_fits_the_terminal(columns, doctor, monkeypatch):
    """Only what one may want to copy, such as a path or a line of code, is not broken."""
    monkeypatch.setenv("COLUMNS", str(columns))
    model = pathlib.Path("doctored.py")
    long_line = "  # the line" + " and more" * 30
    model.write_text(model.read_text().replace("  # the line", long_line))
    answer = doctor("doctored:overflow", "--quick")
    width = min(columns, 100)
    lines = answer.out.splitlines()
    too_long = [line for line in lines if len(line) > width]
    assert not [line for line in too_long if len(line.split()) > 1]
    longest = max(len(line) for line in lines)
    assert longest > width - 25


class Misuse(NamedTuple):
    """Bad use of the command, and what it says."""

    target: str
    says: str
    options: Sequence[str] = ()


BAD_USE = {
    "no colon": Misuse(
        "doctored",
        "The target must be module:function or path/to/file.py:function, got",
    ),
    "no file": Misuse("nowhere.py:f", "The file nowhere.py does not exist."),
    "no module": Misuse("nowhere:f", "There is no module nowhere in"),
    "no package": Misuse("nowhere.at.all:f", "There is no module nowhere in"),
    "no function": Misuse(
        "doctored:typo", "no function `typo` in doctored; it has model, half, fine"
    ),
    "no function of its own": Misuse(
        "advised:typo", "no function `typo` in advised; it has advice, log_of_softmax,"
    ),
    "a value": Misuse("doctored:W", "`W` in doctored is not a function, but `dict`"),
    "needs arguments": Misuse("misused:needs_arguments", "callable without arguments"),
    "returns one value": Misuse(
        "misused.py:one_value", "`one_value()` returned `int`. It must return (loss"
    ),
    "returns a pair": Misuse(
        "misused.py:two_values", "`two_values()` returned 2 values. It must return"
    ),
    "no loss": Misuse(
        "misused.py:no_loss", "returned `NoneType` instead of a loss function"
    ),
    "empty tree": Misuse(
        "misused.py:empty_tree", "without any floating array: an empty tree"
    ),
    "integers": Misuse("misused.py:integers", "without any floating array: int64[3]."),
    "the loss fails": Misuse("misused.py:loss_that_fails", "failed: KeyError: 'v'"),
    "a loss for each example": Misuse(
        "misused.py:loss_for_each_example",
        "must return one floating number, or a pair that begins with one, got float32[3]",
    ),
    "a loss and two others": Misuse(
        "misused.py:loss_and_two_others",
        "got `tuple`. Reduce it, for example with `.mean()`.",
    ),
    "a pair without a loss": Misuse(
        "misused.py:pair_without_a_loss", "got `tuple`. Reduce it"
    ),
    "an integer loss": Misuse("misused.py:integer_loss", "got int32[]"),
    "no derivative": Misuse(
        "misused.py:no_derivative", "cannot be differentiated: ValueError"
    ),
    "fails only when it is run": Misuse(
        "misused.py:fails_only_when_it_is_run",
        "misused.py:fails_only_when_it_is_run failed when it was run on its batch: ",
    ),
    "a scale that is not a power of two": Misuse(
        "doctored:fine", "power of two, at least 1", ["--loss-scale", "1000"]
    ),
    "a scale below 1": Misuse("doctored:fine", "got '0.5'", ["--loss-scale", "0.5"]),
    "a scale in words": Misuse(
        "doctored:fine", "1, or \"auto\", got 'dynamic'", ["--loss-scale", "dynamic"]
    ),
    "a folder that is not there": Misuse(
        "doctored:wide", "Cannot write no/where", ["--output", "no/where.html"]
    ),
}


def assert_is_one_sentence(answer, says):
    assert answer.status == 2
    assert answer.out == ""
    assert answer.err.startswith("jaxscale doctor: ")
    assert answer.err.count("\n") == 1
    assert says in answer.err


BAD_USE_FAST = ["no function", "no function of its own", "a loss for each example"]


@cases("name", BAD_USE, fast=BAD_USE_FAST)
def test_bad_use_is_told_in_a_sentence(name, doctor):
    misuse = BAD_USE[name]
    assert_is_one_sentence(doctor(misuse.target, *misuse.options), misuse.says)


# What a file may hold, and what the doctor says of it.
BROKEN_FILES = {
    "def f(:": "f.py does not import: SyntaxError",
    "import nowhere": "f.py does not import: ModuleNotFoundError",
    "raise SystemExit(3)": "f.py does not import: SystemExit: 3",
}


@cases("source", BROKEN_FILES)
def test_a_file_that_does_not_import_is_told_in_a_sentence(source, doctor):
    pathlib.Path("f.py").write_text(source)
    assert_is_one_sentence(doctor("f.py:f"), BROKEN_FILES[source])


def test_an_error_of_the_loss_names_its_innermost_line(doctor):
    (number,) = faulty_lines(look_up)
    answer = doctor("misused.py:loss_that_fails")
    assert_is_one_sentence(answer, f"misused.py:{number})")


def test_a_traceback_if_asked_for(doctor):
    answer = doctor("misused:divides_by_zero", "--traceback")
    assert answer.status == 2
    assert answer.out == ""
    assert "Traceback" in answer.err
    last = answer.err.splitlines()[-1]
    sentence = "jaxscale doctor: `divides_by_zero()` failed: ZeroDivisionError"
    assert last.startswith(sentence)


def test_ctrl_c_ends_it_with_one_line(doctor, monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "examine", interrupt)
    answer = doctor("doctored:wide", "--quick")
    assert answer == (130, "", "jaxscale doctor: interrupted.\n")


def test_the_version_is_told(capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main(["--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out == f"jaxscale {jaxscale.__version__}\n"


def test_what_cannot_be_written_does_not_hide_the_results(doctor):
    answer = doctor("doctored:wide", "--quick", "--json-file", ".")
    assert answer.status == 2
    assert answer.out.startswith("Nothing ")
    assert "'.'" in answer.err


# What `scale_backward` raises, and the line that is told of it.
RAISED = {
    "two lines": (IndexError("first line\nsecond"), "IndexError: first line"),
    "one line": (TypeError("no"), "TypeError: no"),
    "no message": (NotImplementedError(), "NotImplementedError"),
}


@cases("name", RAISED, fast=["two lines"])
def test_what_scale_backward_raises_is_told_beside_all_else(
    name, doctor, no_pictures, monkeypatch
):
    error, words = RAISED[name]

    def scale_backward(fun):
        def fail(*args):
            raise error

        return fail

    monkeypatch.setattr(compiled, "scale_backward", scale_backward)
    answer = doctor("doctored:tiny", "--json-file", "results.json")
    assert answer.status == 0
    said = f"- `jaxscale.scale_backward` was tried on this loss, and raised {words}"
    assert said in answer.flowing
    assert "Nothing is wrong, with a loss scale: it needs one." in answer.flowing
    results = json.loads(pathlib.Path("results.json").read_text())
    assert results["scale_backward_raised"].startswith(words)
    assert results["repeats"] is None


def test_what_autocast_raises_is_told_in_a_sentence(doctor, monkeypatch):
    def autocast(fun, dtype):
        def fail(*args):
            raise ValueError("it cannot")

        return fail

    monkeypatch.setattr(target, "autocast", autocast)
    answer = doctor("doctored:wide", "--autocast", "float16", "--quick")
    assert_is_one_sentence(
        answer, "`jaxscale.autocast` raised on the loss of doctored:wide"
    )
    assert "ValueError: it cannot" in answer.err


@pytest.mark.slow
def test_from_a_shell(tmp_path):
    def run_in_shell(*words, **env):
        command = [sys.executable, "-m", "jaxscale", "doctor", *words]
        return subprocess.run(
            command, cwd=tmp_path, env=os.environ | env, capture_output=True, text=True
        )

    program = pathlib.Path(__file__).parent / "doctored.py"
    absent = run_in_shell(f"{program}:fine", JAX_PLATFORMS="cuda")
    assert "JAX has no device to run on: cuda is not there." in absent.stderr
    for bad in (absent, run_in_shell("nowhere:f")):
        assert (bad.returncode, bad.stdout) == (2, "")
        assert "Traceback" not in bad.stderr
    helped = run_in_shell("--help")
    assert helped.returncode == 0
    assert "Exit status: 0 if" in helped.stdout
