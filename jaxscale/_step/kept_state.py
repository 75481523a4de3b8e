"""Other state that a step keeps: it follows the verdict, or the steps of the optimizer."""

from typing import Any, TypeVar

import jax

from .._state.optimizer import WINDOW_STATES
from .._trees.selection import select_like

_Tree = TypeVar("_Tree")


def made_step(before: Any, after: Any, applied: jax.Array | None) -> jax.Array | None:
    """Returns whether an optimizer made a step between two of its states, `None` if it always does.

    A micro-batch of a window that is not full makes none, though it is not skipped either. The
    window may be ours or that of Optax.
    """
    if isinstance(before, WINDOW_STATES):
        window: Any = after
        return before.gradient_step != window.gradient_step
    return applied


def select_new(argument: str, pred: jax.Array | None, new: _Tree, old: _Tree) -> _Tree:
    """Returns `new` if `pred` holds or is `None`, otherwise `old`, in the types of `old`."""
    if pred is None:
        return new
    return select_like(argument, pred, new, old)
