"""Types: pyright finds nothing in a right program of a user, and each typo in another."""

import inspect
import json
import pathlib
import re
import subprocess
import sys

import pytest

import jaxscale

SUPPORT = pathlib.Path(__file__).parent.parent / "support"
# JAX and optax are judged by their own types, which strict mode finds fault with.
CONFIG = {
    "typeCheckingMode": "strict",
    "pythonVersion": "3.11",
    "reportMissingTypeStubs": "none",
    "extraPaths": [str(SUPPORT.parent.parent)],
}


def found(folder, program):
    """The errors that pyright finds in a program: pairs of a line and a message."""
    (folder / "pyrightconfig.json").write_text(json.dumps(CONFIG))
    (folder / "program.py").write_text((SUPPORT / program).read_text())
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--outputjson"]
    result = subprocess.run([*command, "-p", str(folder)], capture_output=True, text=True)
    report = json.loads(result.stdout)
    assert report["summary"]["filesAnalyzed"] == 1
    return [(e["range"]["start"]["line"], e["message"]) for e in report["generalDiagnostics"]]


@pytest.mark.slow
def test_a_right_program_has_no_errors(tmp_path):
    assert found(tmp_path, "typed_program.py") == []


@pytest.mark.slow
def test_each_typo_is_an_error(tmp_path):
    lines = (SUPPORT / "typed_typos.py").read_text().splitlines()
    marks = [(i, re.search(r'# error: "(\w+)"', line)) for i, line in enumerate(lines)]
    expected = [(i, mark.group(1)) for i, mark in marks if mark]
    errors = found(tmp_path, "typed_typos.py")
    assert [line for line, _ in errors] == [line for line, _ in expected]
    for (_, message), (_, word) in zip(errors, expected, strict=True):
        assert word in message


def test_signatures_fit_on_a_screen():
    for name, value in vars(jaxscale).items():
        if inspect.isfunction(value):
            assert len(str(inspect.signature(value))) < 450, name
