"""Progress of training: numbers for a log, and an error if nothing moves.

`metrics` collects the scale and the counters of a state. `check` reads them on the host, and if
training is stuck, derives the likely cause from them, the policy and the leaves that were tracked.
"""

from .checking import LossScaleStuckError, check
from .counters import metrics

__all__ = ["LossScaleStuckError", "check", "metrics"]
