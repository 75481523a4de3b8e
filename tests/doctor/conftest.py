"""The doctor as a command, in a folder of its own with copies of the models."""

import pathlib
import re
import shutil
import sys
from typing import NamedTuple

import pytest

from jaxscale._doctor import cli

HERE = pathlib.Path(__file__).parent
MODELS = [HERE / "misused.py", *(HERE / "zoo").glob("*.py")]
sys.path.append(str(HERE / "zoo"))


class Answer(NamedTuple):
    """The text that the command wrote, and its exit status."""

    status: int
    out: str
    err: str

    @property
    def flowing(self):
        """The text without its line breaks."""
        return re.sub(r"\s+", " ", self.out)


@pytest.fixture
def doctor(tmp_path, monkeypatch, capsys):
    """Returns a function that runs the command in a temporary folder.

    Each model is imported anew: a function that was traced before would have lost the lines of its
    backward rule.
    """
    # no signs of life on a slow machine
    monkeypatch.setattr(cli, "_PATIENCE", float("inf"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    for path in MODELS:
        monkeypatch.delitem(sys.modules, path.stem, raising=False)
        shutil.copy(path, tmp_path)

    def run_command(target, *options):
        status = cli.main(["doctor", str(target), *options])
        out, err = capsys.readouterr()
        return Answer(status, out, err)

    return run_command


@pytest.fixture
def no_pictures(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # they take time
