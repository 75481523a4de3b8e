"""The first lines of training at the largest loss scale that fits."""

import math
from typing import NamedTuple

from .._policies.dynamic import DynamicLossScale
from ..diagnostics._text import power

_RETRIES = 10  # in one step, as in the help
_ROOM = 2.0**-10  # how far a scale that must be below 1 may still fall


class Start(NamedTuple):
    """Settings to start training with.

    Attributes:
      skipped: how many first steps on batches like this the default rule skips; `None` if all.
      retries: how many retries let the first step find the scale; `None` if no number does.
      code: the line to write.
    """

    skipped: int | None
    retries: int | None
    code: str


def find_start(largest: float | None) -> Start | None:
    """Returns how to start at the largest scale that fits, or `None` if none is known."""
    if largest is None:
        return None
    default = DynamicLossScale()
    num_backoffs = math.log(largest / default.init_scale, default.backoff_factor)
    skipped = math.ceil(num_backoffs)
    if skipped <= 0:
        return Start(skipped=0, retries=0, code="jaxscale.loss_scaled(optimizer)")
    if largest >= default.min_scale:
        code = _write_code(f"init_scale={power(largest)}")
        return Start(skipped=skipped, retries=max(skipped, _RETRIES), code=code)
    code = _write_code(
        f"init_scale={power(largest)}, min_scale={power(largest * _ROOM)}"
    )
    return Start(skipped=None, retries=None, code=code)


def _write_code(arguments: str) -> str:
    return f"jaxscale.loss_scaled(optimizer, jaxscale.DynamicLossScale({arguments}))"
