"""Signs of life: that there are some if it takes long, and where they go."""

import io
import re
import sys
import threading

import pytest

from jaxscale._doctor import cli
from jaxscale._doctor.announcer import Announcer

SIGN = r" *\d+ s: "


@pytest.mark.worlds
@pytest.mark.standard_promotion
def test_signs_of_life_go_to_standard_error(doctor, monkeypatch):
    monkeypatch.setattr(cli, "_PATIENCE", -1.0)
    answer = doctor("small:fine", "--quick")
    lines = answer.err.splitlines()
    assert all(re.fullmatch(rf"{SIGN}[a-z].*", line) for line in lines)
    words = [line.split(": ")[1] for line in lines]
    assert words[0] == "loading the target"
    assert "looking for what limits the loss scale" in words
    assert "loading" not in answer.out


def test_what_takes_long_is_said_again_with_how_far_it_is(capsys):
    is_asked = threading.Event()

    def how_far():
        is_asked.set()
        return "half way"

    patience = 0.05
    with Announcer(patience) as announcer:
        announcer("dreaming", how_far)
        assert is_asked.wait(60)
    signs = capsys.readouterr().err.splitlines()
    assert signs
    assert all(re.fullmatch(rf"{SIGN}dreaming(, half way)?", sign) for sign in signs)
    assert announcer.pause_between >= 2 * patience  # less and less often


def test_what_is_quick_is_not_said(capsys):
    is_asked = threading.Event()
    with Announcer(60.0) as announcer:
        announcer("dreaming", lambda: is_asked.set() or "half way")
        assert not is_asked.wait(0.3)
    assert capsys.readouterr().err == ""


class Terminal(io.StringIO):
    """What a terminal would be sent, and the lines that then stand on it."""

    def isatty(self):
        return True

    def lines(self):
        return [
            re.split(r"\r\x1b\[K", line)[-1] for line in self.getvalue().split("\n")
        ]


def test_a_terminal_shows_one_line_of_progress_and_none_at_the_end(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "30")
    with Announcer(-1.0) as announcer:
        for words in ("one", "a line that is far longer than the terminal is wide"):
            announcer(words)
            (shown,) = terminal.lines()
            assert re.fullmatch(f"{SIGN}.*", shown)
            assert len(shown) < 30
        announcer.clear()
        print("a warning", file=terminal)
        announcer("more")
    assert terminal.lines() == ["a warning", ""]
