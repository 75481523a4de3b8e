"""Signs of life: that there are some if it takes long."""

import re
import sys
import time

import pytest

from jaxscale.__main__ import main
from jaxscale._doctor import cli
from jaxscale._doctor.announcer import Announcer


@pytest.mark.slow
def test_a_model_that_loads_for_five_seconds_is_said_to_load(
    tmp_path, monkeypatch, capsys
):
    model = tmp_path / "sleeper.py"
    model.write_text("import time\ntime.sleep(5)\n")
    monkeypatch.setattr(sys, "argv", ["jaxscale", "doctor", f"{model}:absent"])
    assert main() == 2
    sign, problem = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"  [345] s: loading the target", sign)
    assert "no function `absent`" in problem


SIGN = r" *\d+ s: "


@pytest.mark.worlds
@pytest.mark.standard_promotion
def test_signs_of_life_go_to_standard_error(doctor, monkeypatch):
    monkeypatch.setattr(cli, "_PATIENCE", -1.0)
    answer = doctor("small:fine", "--quick")
    goes, *lines = answer.err.splitlines()
    assert "`jaxscale doctor --quick` goes in jaxscale 0.7.0." in goes
    assert all(re.fullmatch(rf"{SIGN}[a-z].*", line) for line in lines)
    words = [line.split(": ")[1] for line in lines]
    assert words[0] == "loading the target"
    assert "looking for what limits the loss scale" in words
    assert "loading" not in answer.out


def test_what_takes_long_is_said_again(capsys):
    patience = 0.05
    with Announcer(patience) as announcer:
        announcer("dreaming")
        first_pause = announcer.pause_between
        end = time.monotonic() + 60
        while announcer.pause_between < 4 * first_pause:  # less and less often
            assert time.monotonic() < end
            time.sleep(0.01)
    signs = capsys.readouterr().err.splitlines()
    assert signs
    assert all(re.fullmatch(rf"{SIGN}dreaming", sign) for sign in signs)


def test_what_is_quick_is_not_said(capsys):
    with Announcer(60.0) as announcer:
        announcer("dreaming")
        time.sleep(0.3)
    assert capsys.readouterr().err == ""
