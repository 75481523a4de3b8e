"""Signs of life for whoever waits: what the doctor does."""

import sys
import threading
import time
from collections.abc import Callable
from typing import Self

# seconds between two signs of life
_SHORTEST = 0.2
_LONGEST = 30.0


# Takes in words what is done next.
Announce = Callable[[str], None]


def announce_nothing(words: str) -> None:
    """Drops what is announced."""
    del words


class Announcer:
    """Says on standard error what is done, once the whole takes longer than `patience` seconds.

    What takes long by itself is said again, less and less often. A thread does that, because it
    also runs while XLA compiles.
    """

    def __init__(self, patience: float) -> None:
        self._patience = patience
        # seconds until the thread says again what is done
        self.pause_between = min(max(patience, _SHORTEST), _LONGEST)
        self._start = time.monotonic()
        self._words = "starting"
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._repeat, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def __call__(self, words: str) -> None:
        self._words = words
        self._say()

    def _repeat(self) -> None:
        while not self._over.wait(self.pause_between):
            self.pause_between = min(2 * self.pause_between, _LONGEST)
            self._say()

    def _say(self) -> None:
        seconds = time.monotonic() - self._start
        if seconds > self._patience:
            print(f"{seconds:3.0f} s: {self._words}", file=sys.stderr, flush=True)
