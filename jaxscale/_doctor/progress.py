"""Signs of life: what is done, and how far it is, for whoever waits."""

import shutil
import sys
import threading
import time
from collections.abc import Callable
from typing import Self

_LONGEST = 30.0  # seconds between two signs of life
_OFTEN = 0.2  # and between two looks at whether one is due
_CLEARED = "\r\x1b[K"  # to the start of the line of a terminal, and nothing on it

# Is told in words what is done next, and, if that takes long, whom to ask how far it is.
Progress = Callable[..., None]


class Spoken:
    """Says on standard error what is done, once the whole takes longer than `patience` seconds.

    What takes long by itself is said again from time to time, with how far it is. A thread does
    that, as it also runs while XLA compiles. A terminal shows one line, which is written anew and
    is gone at the end.
    """

    def __init__(self, patience: float) -> None:
        self._patience = self._pause = patience
        self._start = self._said = time.monotonic()
        self._doing: tuple[str, Callable[[], str]] = "starting", str
        self._is_terminal = sys.stderr.isatty()
        self._is_shown = False  # whether a line stands on the terminal
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._repeat, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()
        self.pause()

    def __call__(self, words: str, how_far: Callable[[], str] = str) -> None:
        self._doing, self._pause = (words, how_far), self._patience
        if time.monotonic() - self._start > self._patience:
            self._say(words)

    def pause(self) -> None:
        """Clears the line of a terminal, for what others write there."""
        if self._is_shown:
            print(_CLEARED, end="", file=sys.stderr, flush=True)
            self._is_shown = False

    def _repeat(self) -> None:
        while not self._over.wait(_OFTEN):
            # Nobody scrolls past a line that is written anew, so that may be often.
            pause = min(self._pause, self._patience) if self._is_terminal else self._pause
            if time.monotonic() - self._said > pause:
                words, how_far = self._doing
                self._pause = min(2 * self._pause, _LONGEST)
                self._say(", ".join(filter(None, [words, how_far()])))

    def _say(self, words: str) -> None:
        self._said = time.monotonic()
        line = f"{self._said - self._start:3.0f} s: {words}"
        if not self._is_terminal:
            print(line, file=sys.stderr, flush=True)
            return
        # A line that wraps could not be cleared.
        width = shutil.get_terminal_size().columns
        print(_CLEARED + line[: width - 1], end="", file=sys.stderr, flush=True)
        self._is_shown = True
