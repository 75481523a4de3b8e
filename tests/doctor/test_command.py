"""The command: its output, files and exit status, and bad use of it."""

import html
import json
import os
import pathlib
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from misused import look_up
from tables import cases
from traced_losses import faulty_lines

import jaxscale
from jaxscale import diagnostics
from jaxscale._doctor import cli, compiled, report, target
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


@pytest.mark.worlds
def test_a_loss_of_three_and_a_half_is_in_the_json(doctor, no_pictures):
    answer = doctor("small:fine", "--json")
    assert answer.status == 0
    results = json.loads(answer.out)
    assert list(results) == FIELDS.split()
    expected = {
        "version": 3,
        "found": False,
        "verdict": "Nothing is wrong.",
        "loss": 3.5,
        "dtypes": ["float16", "float32"],
        "wrong": [],
        "fault": None,
        "zero": ["unused"],
        "nonfinite_outputs": [],
    }
    assert {name: results[name] for name in expected} == expected
    assert results["start"]["code"] == "jaxscale.loss_scaled(optimizer)"
    assert results["calibration"]["init_scale"] == results["loss_scale"]
    sizes = {row["path"]: row["size"] for row in results["leaves"]["rows"]}
    assert sizes == {"w": 2, "unused": 2}
    histogram = results["histogram"]
    assert list(histogram) == ["counts", "zero", "inf", "nan"]
    assert sum(histogram["counts"].values()) == 2
    assert results["comparison"]["error"] == 0
    assert results["float32"]["error"] < 1e-3
    assert results["ceiling"]["where"]


@cases("kind", NESTED_FIELDS)
def test_the_json_keeps_the_names_of_its_fields(kind):
    assert kind._fields == tuple(NESTED_FIELDS[kind].split())


def test_the_json_goes_to_standard_output_alone_and_to_a_file(doctor):
    answer = doctor("small:fine", "--quick", "--json", "--json-file", "results.json")
    text = pathlib.Path("results.json").read_text()
    assert json.loads(answer.out) == json.loads(text)
    assert "the model prints" in answer.err
    assert "Nothing overflows." in answer.err


def test_the_json_names_what_is_infinite(doctor):
    exam = examine(load("small:fine"), None, is_quick=True)
    fault = exam.ceiling._replace(error=np.inf)
    exam = exam._replace(loss=np.nan, check=exam.check._replace(fault=fault))
    record = json.loads(json.dumps(make_record(exam, []), allow_nan=False))
    assert (record["loss"], record["fault"]["error"]) == ("NaN", "Infinity")


@cases("columns", [44, 60, 88, 1000], fast=[44])
def test_the_text_fits_the_terminal(columns, doctor, monkeypatch):
    """Only what one may want to copy, such as a path or a line of code, is not broken."""
    monkeypatch.setenv("COLUMNS", str(columns))
    model = pathlib.Path("small.py")
    text = model.read_text()
    model.write_text(text.replace("  # fault", "  # fault" + " and more" * 30))
    lines = doctor("small:overflow", "--quick").out.splitlines()
    width = min(columns, 100)
    too_long = [line for line in lines if len(line) > width]
    assert not [line for line in too_long if len(line.split()) > 1]
    assert max(map(len, lines)) > width - 25


BROKEN_FILES = {
    "syntax.py": "def f(:",
    "missing.py": "import nowhere",
    "exits.py": "raise SystemExit(3)",
}
(INNERMOST,) = faulty_lines(look_up)
# The target, what is said of it, and the options.
BAD_USE = {
    "no colon": ("small", "must be module:function or path/to/file.py:function, got"),
    "no file": ("nowhere.py:f", "The file nowhere.py does not exist."),
    "no module": ("nowhere:f", "There is no module nowhere in"),
    "no package": ("nowhere.at.all:f", "There is no module nowhere in"),
    "no function": (
        "small:typo",
        "no function `typo` in small; it has scaled, compute,",
    ),
    "a value": ("small:W", "`W` in small is not a function, but float32[2]"),
    "needs arguments": ("misused:needs_arguments", "callable without arguments"),
    "returns one value": (
        "misused.py:one_value",
        "`one_value()` returned `int`. It must return (loss",
    ),
    "returns a pair": (
        "misused.py:two_values",
        "`two_values()` returned 2 values. It must return",
    ),
    "no loss": ("misused.py:no_loss", "returned `NoneType` instead of a loss function"),
    "empty tree": (
        "misused.py:empty_tree",
        "without any floating array: an empty tree",
    ),
    "integers": ("misused.py:integers", "without any floating array: int64[3]."),
    "the loss fails": ("misused.py:loss_that_fails", "failed: KeyError: 'v'"),
    "its innermost line": ("misused.py:loss_that_fails", f"misused.py:{INNERMOST})"),
    "a loss for each example": (
        "misused.py:loss_for_each_example",
        "must return one floating number, or a pair that begins with one, got float32[3]",
    ),
    "a loss and two others": (
        "misused.py:loss_and_two_others",
        "got `tuple`. Reduce it, for example with `.mean()`.",
    ),
    "a pair without a loss": (
        "misused.py:pair_without_a_loss",
        "got `tuple`. Reduce it",
    ),
    "an integer loss": ("misused.py:integer_loss", "got int32[]"),
    "no derivative": (
        "misused.py:no_derivative",
        "cannot be differentiated: ValueError",
    ),
    "fails only when it is run": (
        "misused.py:fails_only_when_it_is_run",
        "misused.py:fails_only_when_it_is_run failed when it was run on its batch: ",
    ),
    "1000": ("small:fine", "power of two, at least 1", "--loss-scale", "1000"),
    "a scale below 1": ("small:fine", "got '0.5'", "--loss-scale", "0.5"),
    "a scale in words": (
        "small:fine",
        "1, or \"auto\", got 'dynamic'",
        "--loss-scale",
        "dynamic",
    ),
    "no folder": (
        "small:wide",
        "Cannot write no/where",
        "--output",
        "no/where.html",
    ),
    "syntax": ("syntax.py:f", "syntax.py does not import: SyntaxError"),
    "missing": ("missing.py:f", "missing.py does not import: ModuleNotFoundError"),
    "exits": ("exits.py:f", "exits.py does not import: SystemExit: 3"),
}


def assert_is_one_sentence(answer, says):
    assert (answer.status, answer.out) == (2, "")
    assert answer.err.startswith("jaxscale doctor: ")
    assert answer.err.count("\n") == 1
    assert says in answer.err


@cases("name", BAD_USE, fast=["no function", "a loss for each example", "syntax"])
def test_bad_use_is_told_in_a_sentence(name, doctor):
    target, says, *options = BAD_USE[name]
    for file, text in BROKEN_FILES.items():
        pathlib.Path(file).write_text(text)
    assert_is_one_sentence(doctor(target, *options), says)


def test_a_traceback_if_asked_for(doctor):
    answer = doctor("misused:divides_by_zero", "--traceback")
    assert (answer.status, answer.out) == (2, "")
    assert "Traceback" in answer.err
    sentence = "jaxscale doctor: `divides_by_zero()` failed: ZeroDivisionError"
    assert answer.err.splitlines()[-1].startswith(sentence)


def test_ctrl_c_ends_it_with_one_line(doctor, monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(report, "examine", interrupt)
    answer = doctor("small:wide")
    assert answer == (130, "", "jaxscale doctor: interrupted.\n")


def test_the_version_is_told(capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main(["--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out == f"jaxscale {jaxscale.__version__}\n"


def test_what_cannot_be_written_does_not_hide_the_results(doctor):
    answer = doctor("small:wide", "--quick", "--json-file", ".")
    assert answer.status == 2
    assert answer.out.startswith("Nothing ")
    assert "'.'" in answer.err


def failing(error):
    """In the place of what makes another function of a loss: that raises an error."""

    def fail(*args):
        raise error

    return lambda fun, **options: fail


# What `scale_backward` raises, by the line that is told of it.
RAISED = {
    "IndexError: first line": IndexError("first line\nsecond"),
    "NotImplementedError": NotImplementedError(),
}


@cases("words", RAISED, fast=["IndexError: first line"])
def test_what_scale_backward_raises_is_told_beside_all_else(
    words, doctor, no_pictures, monkeypatch
):
    monkeypatch.setattr(compiled, "scale_backward", failing(RAISED[words]))
    answer = doctor("healthy:tiny_gradients", "--json-file", "results.json")
    assert answer.status == 0
    said = f"- `jaxscale.scale_backward` was tried on this loss, and raised {words}"
    assert said in answer.flowing
    assert "Nothing is wrong, with a loss scale: it needs one." in answer.flowing
    results = json.loads(pathlib.Path("results.json").read_text())
    assert results["scale_backward_raised"].startswith(words)
    assert results["repeats"] is None


def test_what_autocast_raises_is_told_in_a_sentence(doctor, monkeypatch):
    monkeypatch.setattr(target, "autocast", failing(ValueError("it cannot")))
    answer = doctor("small:wide", "--autocast", "float16")
    says = "`jaxscale.autocast` raised on the loss of small:wide: ValueError: it cannot"
    assert_is_one_sentence(answer, says)


@pytest.mark.worlds
def test_the_function_finds_what_the_command_does(doctor, no_pictures):
    answer = doctor("small:overflow", "--loss-scale", "8", "--json")
    model = sys.modules["small"].overflow()  # of the copy that the command imported
    found = diagnostics.doctor(*model, loss_scale=8)
    record = json.loads(found.to_json())
    assert record | {"target": "small:overflow"} == json.loads(answer.out)
    assert str(found) in answer.err
    assert found.findings[0].is_problem
    found.save_html("report.html")
    command_page = pathlib.Path("jaxscale-doctor.html").read_text()
    page = pathlib.Path("report.html").read_text()
    target = html.escape(record["target"])
    assert page.replace(target, "small:overflow") == command_page


def float32_loss(params, batch):
    return jnp.mean((batch @ params["w"]) ** 2)


FLOAT32 = {"w": jnp.ones(3)}, jnp.ones((2, 3))


def test_the_function_examines_a_loss_under_autocast():
    found = diagnostics.doctor(float32_loss, *FLOAT32, autocast=jnp.float16)
    record = json.loads(found.to_json())
    assert (record["autocast"], record["target"]) == ("float16", "float32_loss")
    assert "Nothing is wrong in float16." in str(found)


PARAMS, BATCH = FLOAT32
# What the function raises, by its message.
WRONG_CALLS = {
    r"`doctor\(loss_scale=\.\.\.\)` must be a power of two, at least 1, got 0\.5": (
        lambda: diagnostics.doctor(float32_loss, PARAMS, BATCH, loss_scale=0.5)
    ),
    r"parameters of `doctor\(loss_fn, params, batch\)` are a tree without any floating": (
        lambda: diagnostics.doctor(float32_loss, {"w": 3}, BATCH)
    ),
    r"`doctor\(loss_fn, params, batch\)` must return one floating number.*float32\[3\]": (
        lambda: diagnostics.doctor(lambda params, _: params["w"], PARAMS, BATCH)
    ),
    r"`doctor\(loss_fn, params, batch\)` failed: TypeError": (
        lambda: diagnostics.doctor(float32_loss, PARAMS, None)
    ),
}


@cases("message", WRONG_CALLS)
def test_bad_use_of_the_function_is_an_error(message):
    with pytest.raises(ValueError, match=message):
        WRONG_CALLS[message]()


@pytest.mark.slow
def test_from_a_shell(doctor):
    def run_in_shell(*words, **env):
        command = [sys.executable, "-m", "jaxscale", "doctor", *words]
        return subprocess.run(
            command, env=os.environ | env, capture_output=True, text=True
        )

    absent = run_in_shell("small.py:fine", JAX_PLATFORMS="cuda")
    assert "JAX has no device to run on: cuda is not there." in absent.stderr
    for bad in (absent, run_in_shell("nowhere:f")):
        assert (bad.returncode, bad.stdout) == (2, "")
        assert "Traceback" not in bad.stderr
    helped = run_in_shell("--help")
    assert helped.returncode == 0
    assert "Exit status: 0 if" in helped.stdout
