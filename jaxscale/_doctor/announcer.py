"""Signs of life for whoever waits: what the doctor does, and how far it is."""

import shutil
import sys
import threading
import time
from collections.abc import Callable
from typing import Protocol, Self

_LONGEST = 30.0  # seconds between two signs of life
_OFTEN = 0.2  # seconds between two looks at whether one is due
_CLEAR_LINE = "\r\x1b[K"  # goes to the start of a terminal's line, and clears it


def say_nothing_more() -> str:
    """Returns `""`, for work that cannot say how far it is."""
    return ""


class Announce(Protocol):
    """Takes in words what is done next, and, if that takes long, whom to ask how far it is."""

    def __call__(
        self, words: str, how_far: Callable[[], str] = say_nothing_more
    ) -> None: ...


def announce_nothing(words: str, how_far: Callable[[], str] = say_nothing_more) -> None:
    """Drops what is announced."""
    del words, how_far


class Announcer:
    """Says on standard error what is done, once the whole takes longer than `patience` seconds.

    What takes long by itself is said again from time to time, with how far it is. A thread does
    that, because it also runs while XLA compiles. A terminal shows one line, which is written anew
    each time and is gone at the end.
    """

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self.pause_between = patience  # seconds until the same words are said again
        self._start = time.monotonic()
        self._last_sign = self._start
        # One object, because the thread may read it at any time.
        self._work = ("starting", say_nothing_more)
        self._is_terminal = sys.stderr.isatty()
        self._is_line_shown = False  # on the terminal
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._repeat, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()
        self.clear()

    def __call__(
        self, words: str, how_far: Callable[[], str] = say_nothing_more
    ) -> None:
        self._work = (words, how_far)
        self.pause_between = self._patience
        if time.monotonic() - self._start > self._patience:
            self._say(words)

    def clear(self) -> None:
        """Clears the line of a terminal, for what others write there."""
        if self._is_line_shown:
            print(_CLEAR_LINE, end="", file=sys.stderr, flush=True)
            self._is_line_shown = False

    def _repeat(self) -> None:
        while not self._over.wait(_OFTEN):
            pause = self.pause_between
            if self._is_terminal:
                # Nobody scrolls past a line that is written anew, so that may be often.
                pause = min(pause, self._patience)
            if time.monotonic() - self._last_sign > pause:
                self.pause_between = min(2 * self.pause_between, _LONGEST)
                self._say_again()

    def _say_again(self) -> None:
        words, how_far = self._work
        self._say(", ".join(filter(None, [words, how_far()])))

    def _say(self, words: str) -> None:
        self._last_sign = time.monotonic()
        line = f"{self._last_sign - self._start:3.0f} s: {words}"
        if not self._is_terminal:
            print(line, file=sys.stderr, flush=True)
            return
        # A line that wraps could not be cleared.
        width = shutil.get_terminal_size().columns
        print(_CLEAR_LINE + line[: width - 1], end="", file=sys.stderr, flush=True)
        self._is_line_shown = True
