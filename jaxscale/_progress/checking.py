"""`check`: an error if training is stuck, and warnings of what may soon ruin it."""

import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import optax
from jax.core import Tracer

from .._policies.fixed import NoOpLossScale
from .._state.find import find_optimizer_state, restore_types
from .._state.optimizer import LossScaledState
from .._state.scale import UnitLossScaleState, unwrap
from .._step.bare_optimizer import as_optimizer, say_inside
from .._step.wrapped_optimizer import find_wrapped_optimizer
from .._trees.arguments import int32
from .._trees.leaves import check_in_reach
from .._trees.pytrees import Leaf, PyTree
from . import texts
from .causes import explain_row
from .numbers import list_numbers
from .optimizers import is_inside_of_another, is_lost
from .symptoms import find_symptoms

# What `metrics` does not show of a run whose options do not need it. Nothing compares with NaN.
_NOT_SHOWN = {
    "backoff_count": 0,
    "total_retries": 0,
    "total_exhausted": 0,
    "growth_tracker": 0,
    "hysteresis_tracker": 0,
    "grad_norm": np.nan,
    "norm_count": 1,
    "total_spikes": 0,
    "spike_count": 0,
    "total_norm_overflows": 0,
    "gradient_step": np.iinfo(np.int32).max,
}


class LossScaleStuckError(RuntimeError):
    """Training makes no progress: too many steps in a row were skipped.

    Example:
      >>> import jaxscale
      >>> issubclass(jaxscale.LossScaleStuckError, RuntimeError)
      True
    """


def check(
    tree: PyTree,
    *,
    tx: optax.GradientTransformation | None = None,
    max_consecutive: int = 50,
) -> None:
    """Raises an error if training is stuck, and warns of signs that something is wrong.

    Call it on the host, outside `jit`, and only as often as you log, because it waits for the
    device. A dynamic loss scale skips a step now and then, and falls after it has grown; that is
    normal.

    Args:
      tree: a `jaxscale.LossScaledState`, or a tree that holds exactly one. In the state of a
        population each member is judged separately, and the worst one is reported.
      tx: the optimizer, which knows how far the scale can fall, and how many steps are lost to its
        growth alone. With it the message can tell a scale at its floor from one that is fixed or
        still falling. A `TrainState` holds its
        optimizer, so it needs no `tx`.
      max_consecutive: how many steps skipped in a row are still accepted, at least 0. Halving takes
        24 of them from 2**24 down to 1.

    Warns:
      UserWarning: in each of these cases. Python shows each text once in a run.

        - One step in 20 is lost: the `skip_rate` is 0.05 or more, over enough steps. 6 % of skipped
          steps are enough after about 1800 steps, 10 % after 700, 50 % after 105.
        - The loss itself was not finite in 10 steps in a row. (More than `max_consecutive` of them
          are an error.)
        - The optimizer has moments, and they are all 0 after 50 steps, so all gradients were 0.
          Something else may clean them before the optimizer gets them, and hide every overflow. Of
          an optimizer without moments, such as plain SGD, this is known with `spikes` alone.
        - A moment of the optimizer is inf or NaN, made of finite gradients that were too large.
        - The `loss_scaled` optimizer is inside of another one, which a skipped step still changes.
          With `tx`, or in a `TrainState`, this is always seen.
        - `tree` is a `TrainState` that has made more steps than its optimizer. Then the optimizer
          was not restored from a checkpoint.
        - The loss scale decays: it is below 2**15 with a `backoff_count` of 6 or more. With
          `max_norm` or `spikes` the text says whether the gradients themselves have grown. A policy
          that raises its scale in every finite step, such as
          `DynamicLossScale(growth_interval=1)`, never decays.
        - The scale may be useless: it has grown to 2**24 or more after 10,000 steps, none of which
          overflowed. (From 2**15, the default policy gets there after 18,000.) A scale that follows
          the gradients gives no such warning.
        - Retries do not help: `total_exhausted` is 6 or more.
        - Spikes are skipped again and again: 20 in a row, or more than one step in 20 of at least
          1000.

    Raises:
      LossScaleStuckError: if more than `max_consecutive` steps in a row were skipped. The message
        has the numbers, the likely cause and, with `track_leaves=True`, the leaves of the last
        overflow. The cause is that of the steps in this row. If the state of the optimizer itself
        holds a NaN, which it made of finite gradients, that is the cause.
      ValueError: if `tree` holds no such state, or several, or if `max_consecutive` is below 0.
      TypeError: if called inside `jit`.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> import jaxscale
      >>> tx = jaxscale.loss_scaled(optax.adam(0.1))
      >>> state = tx.init(jnp.zeros(3))
      >>> jaxscale.check(state)
      >>> for _ in range(3):
      ...     _, state = tx.update(jnp.full(3, jnp.nan), state)
      >>> jaxscale.check(state, max_consecutive=2)  # doctest: +IGNORE_EXCEPTION_DETAIL
      Traceback (most recent call last):
      jaxscale.LossScaleStuckError: 3 steps in a row were skipped (3 of 3 in all, ...)
    """
    most = int32("check", "max_consecutive", max_consecutive, least=0)
    state = find_optimizer_state("check", restore_types(tree))
    if tx is not None:
        as_optimizer("check", tx)
    tx = tx or getattr(tree, "tx", None)
    run = _read_run(state, tx)

    stuck = run.notfinite_count * (run.notfinite_count > most)
    if np.any(stuck):
        member = _find_worst(stuck, run)
        raise _make_error(explain_row(member), member)

    step = unwrap(getattr(tree, "step", None))
    symptoms = {
        say_inside("check"): is_inside_of_another(tree, tx),
        texts.LOST.format(step=step, steps=run.total_steps): is_lost(step, run),
        **find_symptoms(run),
    }
    for text, holds in symptoms.items():
        if np.any(holds):
            warnings.warn(text, stacklevel=2)


def _read_run(state: LossScaledState, tx: Any) -> SimpleNamespace:
    """Returns what `check` judges, as attributes of one object.

    These are the numbers that `metrics` shows, on the host, with the axes of a population. Nothing
    else of the state is read, as processes may have only parts of what is larger.
    """
    shown = list_numbers(state.scaling, state)
    if state.spikes is not None:
        shown["norm_count"] = state.spikes.norm_count
    numbers = {name: _on_host(unwrap(value)) for name, value in shown.items()}
    axes = numbers["total_steps"].shape
    for name, number in _NOT_SHOWN.items():
        numbers.setdefault(name, np.full(axes, number))
    applied = numbers["total_steps"] - numbers["total_notfinite"]
    numbers["applied"] = applied
    # A window of another run has also counted the steps of that.
    numbers["optimizer_steps"] = np.minimum(applied, numbers["gradient_step"])
    run = SimpleNamespace(axes=axes, numbers=numbers, **numbers)
    run.inner_state = unwrap(state.inner_state)

    optimizer = find_wrapped_optimizer(tx)
    run.policy = getattr(optimizer, "policy", None)
    run.checks_updates = getattr(optimizer, "check_updates", False)
    run.words = texts.SCALED
    is_of_one = isinstance(state.scaling, UnitLossScaleState)
    if is_of_one or isinstance(run.policy, NoOpLossScale):
        run.words = texts.UNSCALED
    return run


def _on_host(leaf: Leaf) -> np.ndarray:
    if isinstance(leaf, Tracer):
        raise TypeError(
            "`check` reads values, so it cannot run inside `jit`. Call it on the state that "
            "the step returns; inside, use `jaxscale.metrics`."
        )
    check_in_reach("`check(tree)`: a counter of a population", leaf)
    return np.asarray(leaf)


def _find_worst(badness: np.ndarray, run: SimpleNamespace) -> SimpleNamespace:
    """Returns the run of the worst member of a population."""
    indices = np.unravel_index(np.argmax(badness), run.axes)
    place = tuple(map(int, indices))
    numbers = {name: number[place] for name, number in run.numbers.items()}
    return SimpleNamespace(**vars(run) | numbers | {"place": place})


def _make_error(text: str, member: SimpleNamespace) -> LossScaleStuckError:
    """Returns an error with a text in which names stand for the numbers of a run."""
    text = text.format_map(vars(member))
    if member.axes:
        place = list(member.place)
        text = f"Of a population of shape {member.axes}, the member at {place}: {text}"
    return LossScaleStuckError(text)
