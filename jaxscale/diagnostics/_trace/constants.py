"""Numbers of the source that a narrow format cannot hold, such as 1e-9 or 70000 in float16.

JAX rounds a Python number while it traces: in float16 `x + 1e-9` is `x + 0`, and no equation
shows that. NumPy does the rounding, and can call a function when it underflows or overflows. So
the number and its line are known if a function is traced inside of `Constants.notice`.
"""

import contextlib
from collections.abc import Iterator

import numpy as np

from ..._jax import JaxprEqn, Literal, numbers_being_converted
from .places import is_users_file, lines

_ARITHMETIC = {"add", "sub", "mul", "div", "max", "min", "pow", "rem"}


class Constants:
    """The numbers that were rounded to 0 or inf, by the lines that they stand in."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, int], list[float]] = {}

    @contextlib.contextmanager
    def notice(self) -> Iterator[None]:
        """Inside of this context, numbers that are rounded to 0 or inf are noted."""
        with np.errstate(over="call", under="call", call=self._note):
            yield

    def exact(self, eqn: JaxprEqn, around: tuple[JaxprEqn, ...], literal: Literal) -> float | None:
        """Returns the number that a 0 or inf in an equation was made of, if it is known."""
        value = np.asarray(literal.val)
        if value.shape or value.dtype.kind not in "fV" or not self._numbers:
            return None
        if eqn.primitive.name not in _ARITHMETIC:
            return None  # derivatives compare with 0 and choose it, as that of `abs` does
        if value != 0 and not np.isinf(value):
            return None
        line = next(iter(lines(eqn, around)), None)
        for number in self._numbers.get((line.file, line.number), ()) if line else ():
            with np.errstate(all="ignore"):
                if np.asarray(number).astype(value.dtype) == value:
                    return number
        return None

    def _note(self, kind: str, flag: int) -> None:
        del kind, flag
        numbers, frame = numbers_being_converted()
        while frame is not None and not is_users_file(frame.f_code.co_filename):
            frame = frame.f_back
        if frame is not None:
            place = frame.f_code.co_filename, frame.f_lineno
            self._numbers.setdefault(place, []).extend(n for n in numbers if 0 < abs(n) < np.inf)
