"""Checks of the factors that policies take.

Those of arguments that others have as well are in `_trees/arguments.py`.
"""

from .._trees.arguments import finite_number, limited

check_growth_factor = limited(
    finite_number,
    lambda factor: factor > 1,
    "be above 1",
    " It multiplies the scale: pass 2.0 to double it, or use `FixedLossScale` for a scale that "
    "does not grow.",
)
check_backoff_factor = limited(
    finite_number,
    lambda factor: 0 < factor < 1,
    "lie between 0 and 1",
    " It multiplies the scale: pass 0.5 to halve it.",
)
