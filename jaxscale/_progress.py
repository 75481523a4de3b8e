"""What happened in training: as numbers for a log, and as an error if nothing moves.

`metrics` collects the scale and the counters of a state. `check` reads them on the host, and if
training is stuck, derives the likely cause from them, the policy and the leaves that were tracked.
"""

import math
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from ._gradients.verdict import flagged_paths, named_flags
from ._policies.adaptive import UNSEEN
from ._policies.base import LossScale
from ._policies.fixed import FixedLossScale
from ._state.find import find_optimizer_state, find_scale_state, is_loss_scaled, restore_types
from ._state.optimizer import WINDOW_STATES
from ._state.scale import AdaptiveState, LossScaleState, unwrap
from ._step.wrapper import wrapper_of
from ._trees.checks import and_more

# The fields of a `LossScaledState` that are not counters.
_PARTS = {"scaling", "inner_state", "spikes", "nonfinite_leaves", "grad_norm"}
# What is not shown of a `SpikeState`.
_WINDOWS = {"losses", "grad_norms", "loss_count", "norm_count", "cooldown"}
_WINDOWS |= {"recent_losses", "past_levels", "level_steps", "past_count"}

# From how many falls without a growth between them, and below which scale, `check` warns. On the
# runs in `tests/policies/traces`, which are healthy, the counter reaches 3 at most. Where the
# scale keeps falling it reaches 6 and more (`tests/step/test_decay.py`). Most policies start from
# 2**15, so that is not low.
_FALLS, _LOW = 6, 2.0**15
# An `AdaptiveLossScale` falls in larger and larger steps. It is too low this many binades below
# what usual gradients allow, if no larger ones were seen and the usual ones are scaled to below 1.
_ROOM = 6.0
# From which scale, and after how many steps, it is told that nothing has ever overflowed. It is
# where the default rule stops growing; half precision rarely bears it.
_HIGH, _LONG = 2.0**24, 10_000


def metrics(tree: Any) -> dict[str, jax.Array]:
    """Returns the loss scale and the counters of a training state, for logging.

    Works inside `jit` and never waits for the device.

    Args:
      tree: a `jaxscale.LossScaledState` or `jaxscale.LossScaleState`, or a tree that holds exactly
        one, such as `opt_state`, a `TrainState`, or the `nnx.state` of an optimizer of Flax NNX.

    Returns:
      A dictionary of scalar arrays: `loss_scale` and the trackers of the policy, which its state
      explains (`jaxscale.LossScaleState`, `jaxscale.AdaptiveState`), and, if there is an optimizer
      state, `step_applied` and the counters that `jaxscale.LossScaledState` explains
      (`grads_finite` is `step_applied` under its old name, until 1.0). With
      `jaxscale.multi_steps` these count micro-batches, and `mini_step` and `gradient_step` are
      added, as they are for an `optax.MultiSteps` inside of `loss_scaled`.
      With `max_norm` or `spikes` there is `grad_norm`, the norm of the last gradients before they
      were clipped. With `spikes` there are the counters, thresholds and deviations that
      `jaxscale.SpikeState` explains.
      With `track_leaves=True` there is also a `bool[]` for each gradient, whether the last overflow
      was in it, under a name such as `nonfinite_leaves/params/Dense_0/kernel`.

    Raises:
      ValueError: if `tree` holds no such state, or several.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> import jaxscale
      >>> opt_state = jaxscale.loss_scaled(optax.adam(0.1)).init(jnp.zeros(3))
      >>> jaxscale.metrics(opt_state)["loss_scale"]
      Array(32768., dtype=float32)
    """
    tree = restore_types(tree)
    values = find_scale_state("metrics", tree)._asdict()
    for node in filter(is_loss_scaled, jax.tree.leaves(tree, is_leaf=is_loss_scaled)):
        values |= {name: leaf for name, leaf in node._asdict().items() if name not in _PARTS}
        values["grads_finite"] = values["step_applied"]  # its name in 0.1, until 1.0
        if node.spikes is not None:
            spikes = node.spikes._asdict().items()
            values |= {name: leaf for name, leaf in spikes if name not in _WINDOWS}
        if node.grad_norm is not None:
            values["grad_norm"] = node.grad_norm
        if isinstance(node.inner_state, WINDOW_STATES):
            window = node.inner_state  # has the same names here and in Optax
            values |= {name: getattr(window, name) for name in ("mini_step", "gradient_step")}
        flags = named_flags(unwrap(node.nonfinite_leaves))
        values |= {f"nonfinite_leaves/{name}": flag for name, flag in flags.items()}
    return {name: jax.tree.map(jnp.asarray, unwrap(value)) for name, value in values.items()}


class LossScaleStuckError(RuntimeError):
    """Training makes no progress: too many steps in a row were skipped.

    Example:
      >>> import jaxscale
      >>> issubclass(jaxscale.LossScaleStuckError, RuntimeError)
      True
    """


def check(
    tree: Any, *, tx: optax.GradientTransformation | None = None, max_consecutive: int = 50
) -> None:
    """Returns `None` if training makes progress, and raises an error if it is stuck.

    Call it on the host, outside of `jit`, and as often as you log, as it waits for the device.
    A dynamic loss scale skips a step now and then, and falls after it has grown; that is normal.

    Args:
      tree: a `jaxscale.LossScaledState`, or a tree that holds exactly one.
      tx: the optimizer, which knows how far the scale can fall. With it the message tells a scale
        at its floor from one that is fixed or still falling. A `TrainState` has its own.
      max_consecutive: how many steps skipped in a row are still accepted. Halving takes 24
        of them from 2**24 down to 1.

    Warns:
      UserWarning: if `tree` is a `TrainState` that has made more steps than its optimizer, which
        then was not restored from a checkpoint; if the loss scale decays, below 2**15 with a
        `backoff_count` of 6 or more, or if an `AdaptiveLossScale` has made more and more room for
        gradients of which it has seen none; if the scale may be of no use, as it is 2**24 or more
        after 10,000 steps, none of which overflowed; if retries do not help, with a
        `total_exhausted` of 6 or more; or if spikes are skipped again and again, 20 in a row, or
        more than one step in 20 of at least 1000. A policy that raises its scale in every finite
        step, such as `presets.chainer()`, never decays, and no scale that follows the gradients is
        of no use. Python shows each text once in a run.

    Raises:
      LossScaleStuckError: if more than `max_consecutive` steps in a row were skipped, or if an
        `AdaptiveLossScale` has seen nothing but zeros in more steps than that. The message has the
        numbers, the likely cause and, with `track_leaves=True`, the leaves of the last overflow.
      ValueError: if `tree` holds no such state, or several.
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
    state = find_optimizer_state("check", restore_types(tree))
    inner_state = unwrap(state.inner_state)
    state = jax.tree.map(_on_host, unwrap(state._replace(inner_state=None)))
    _warn_if_lost(unwrap(getattr(tree, "step", None)), state, inner_state)
    told = _told(state)
    # The state of a population has leading axes: report the worst member.
    axes, worst = np.ndim(state.notfinite_count), np.argmax(state.notfinite_count)
    state = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[axes:])[worst], state)
    if state.notfinite_count <= max_consecutive:
        _raise_if_blind(state, max_consecutive)
        for text in told:
            warnings.warn(text, stacklevel=2)
        return
    wrapper = wrapper_of(tx or getattr(tree, "tx", None))
    policy = None if wrapper is None else wrapper.policy
    raise LossScaleStuckError(
        f"{state.notfinite_count} steps in a row were skipped ({state.total_notfinite} of "
        f"{state.total_steps} in all, {state.total_notfinite_loss} of them with a non-finite "
        f"loss); the loss scale is {state.scaling.loss_scale}. {_likely_cause(state, policy)}"
        f"{_leaves(state.nonfinite_leaves)} {_DOCTOR}"
    )


_DOCTOR = (
    "`jaxscale doctor` names the line of the model (with `--autocast float16` if it is under "
    "`autocast`)."
)

_EXHAUSTED = (
    f"`check`: in {_FALLS} steps or more no retry helped: the loss was finite, and the gradients "
    "were not, at any of the scales that were tried, so these batches were lost. If the scale is "
    "not to blame, look at the data, as an inf gives a finite loss behind a tanh or a sigmoid, and "
    "for a division by 0 or the square root of 0. "
    + _DOCTOR
    + " If the scale is, start lower, lower its floor, or allow more `retries`."
)

# Without numbers: Python's filter of warnings shows a text once for each line that calls `check`.
_DECAY = (
    "`check`: the loss scale fell again and again without growing in between, so something in the "
    "model leaves float16's range at lower and lower scales, and small gradients are lost. "
    + _DOCTOR
    + " If it is only in rare batches, "
    "`jaxscale.train_step(..., retries=10)` loses none of them. If bad data is to blame instead, "
    "pass the loss as `value`: then a bad loss does not lower the scale."
)
_IDLE = (
    "`check`: the loss scale has grown to 2**24 or more, and no step has ever overflowed. Maybe "
    "nothing scales the backward pass, as in a trainer that calls `jax.value_and_grad` itself: "
    "give it `jaxscale.scale_backward(loss_fn)`, or in a step of your own make the gradients by "
    "`jaxscale.value_and_grad(loss_fn, opt_state)`, or the whole step by "
    "`jaxscale.train_step(loss_fn, tx)`. Or the model computes in float32 or bfloat16, which need "
    "no loss scale: wrap its optimizer by `jaxscale.skip_nonfinite(tx)`. Or all gradients are very "
    'small: `jaxscale.loss_scaled(tx, "adaptive")` finds a scale for them, however high.'
)

_SPIKES = (
    "`check`: spikes are skipped again and again: 20 or more in a row, or more than one step in "
    "20. If the loss has reached a new level, for example with new data, these are good steps: "
    "raise `sigmas` of the `SpikeRule`, or shorten its `window`. If the run diverges, to skip does "
    "not help: lower the learning rate, or go back to a checkpoint."
)


def _told(state: Any) -> list[str]:
    """Returns the texts of what `check` warns of in a state, or in any of a population."""
    scaling, spikes, steps = state.scaling, state.spikes, state.total_steps
    falls, is_idle, are_often = state.backoff_count >= _FALLS, False, False
    if isinstance(scaling, AdaptiveState):
        is_guess = scaling.held_steps == scaling.finite_steps
        is_small = scaling.loss_scale * np.exp2(scaling.peak) < 1
        falls |= is_guess & is_small & (scaling.crest - scaling.peak >= _ROOM)
    if isinstance(scaling, LossScaleState):  # others may start there, as they see gradients
        overflows = state.total_notfinite - state.total_notfinite_loss + state.total_retries
        # A growth tracker of 0: maybe the scale is fixed.
        has_grown = (scaling.loss_scale >= _HIGH) & (scaling.growth_tracker > 0)
        is_idle = has_grown & (overflows == 0) & (steps >= _LONG)
    if spikes is not None:
        are_often = (spikes.total_spikes > steps // 20) & (steps >= 1000)
        are_often |= spikes.spike_count >= 20
    told = {
        _EXHAUSTED: state.total_exhausted >= _FALLS,
        _DECAY: falls & (scaling.loss_scale < _LOW),
        _IDLE: is_idle,
        _SPIKES: are_often,
    }
    return [text for text, holds in told.items() if np.any(holds)]


def _on_host(leaf: Any) -> np.ndarray:
    if isinstance(leaf, Tracer):
        raise TypeError(
            "`check` reads values, so it cannot run inside `jit`. Call it on the state that "
            "the step returns; inside, use `jaxscale.metrics`."
        )
    return np.asarray(leaf)


def _warn_if_lost(step: Any, state: Any, inner_state: Any) -> None:
    """Warns if a restored `TrainState` has made more steps than the optimizer that it holds."""
    if step is None or np.ndim(state.total_steps) or not np.all(step > state.total_steps):
        return
    counts = [np.max(count) for _, count in optax.tree.get_all_with_path(inner_state, "count")]
    leaves = jax.tree.leaves(inner_state)
    if counts:
        lost = max(counts) <= state.total_steps - state.total_notfinite
    else:  # such as momentum, which is 0 at first
        lost = bool(leaves) and state.total_steps == 0 and not any(map(np.any, leaves))
    if lost:
        warnings.warn(
            f"`check`: the training state has made {int(step)} steps, but its optimizer only "
            f"{int(state.total_steps)}, so the optimizer was not restored. Flax's "
            "`restore_checkpoint` leaves it out silently if it was saved before it was wrapped. "
            "Restore with the bare optimizer, and then pass "
            "`tx.init(params)._replace(inner_state=restored.opt_state)`.",
            stacklevel=3,
        )


def _raise_if_blind(state: Any, most: int) -> None:
    """Raises an error if a policy that follows the largest gradient has only ever seen zeros."""
    steps = state.total_steps - state.total_notfinite
    if isinstance(state.scaling, AdaptiveState) and state.scaling.peak <= UNSEEN and steps > most:
        raise LossScaleStuckError(
            f"All gradients were 0 in {steps} steps at loss scale {state.scaling.loss_scale:g}, "
            "where `AdaptiveLossScale` learns nothing. If they are flushed to 0, start higher, as "
            "with `AdaptiveLossScale(init_scale=2.0**15)`, or where "
            "`jaxscale.diagnostics.calibrate` says. If `jax.value_and_grad` makes them, nothing "
            "scales them: use `jaxscale.value_and_grad(loss_fn, opt_state)`. If neither, the loss "
            "does not depend on the parameters."
        )


def _leaves(flags: Any) -> str:
    """Returns which gradients overflowed last, if that was tracked."""
    bad = flagged_paths(flags)
    shown = " ".join([", ".join(bad[:5]), *and_more(bad, 5)])
    number = f"({len(bad)} of {len(jax.tree.leaves(flags))} leaves)"
    return f" The last gradients that were not finite: {shown} {number}." if bad else ""


def _likely_cause(state: Any, policy: LossScale | None) -> str:
    if state.total_notfinite_loss < state.notfinite_count:
        return (
            "If the loss was passed as `value`, it is finite, and the backward pass overflows; if "
            f"not, pass it, so that a bad forward pass is told apart. {_backward(state, policy)}"
        )
    applied = state.total_steps - state.total_notfinite
    since = (
        f"{applied} steps were fine: look for a stretch of bad data, or for parameters that have "
        "diverged."
        if applied
        else "It never was: look for NaN in the data, and for an operation in the forward pass "
        "that leaves the range of its dtype; compute norms, softmax and the loss in float32."
    )
    return f"The loss itself is not finite, so no loss scale can help. {since}"


def _backward(state: Any, policy: LossScale | None) -> str:
    """Returns the likely cause if the backward pass overflows."""
    unscaled = (
        "at any scale: a division by zero, the square root of 0, a mask of -inf (run one step "
        "under `with jax.disable_jit(), jax.debug_infs(True)`)"
    )
    stale = "`jaxscale.value_and_grad` was called outside of the step and uses an older scale"
    scale = float(state.scaling.loss_scale)
    name = "AdaptiveLossScale" if isinstance(state.scaling, AdaptiveState) else "DynamicLossScale"
    large = (
        "Most often the loss is too large for float16: take a mean instead of a sum, or lower "
        f"`min_scale`: `jaxscale.loss_scaled(tx, jaxscale.{name}("
        f"min_scale=2.0**{max(math.frexp(scale)[1] - 15, -126)}))`. Or it overflows {unscaled}, or "
        f"{stale}."
    )
    lowest = scale if policy is None else _lowest(state.scaling, policy)
    if lowest < scale:
        return (
            f"The scale is still on its way down, to {lowest:g}: start lower, or accept more "
            f"skipped steps in a row. Or {stale}."
        )
    if scale == 1:
        return f"A scale of 1 scales nothing. {large}"
    if policy is None:
        return (
            f"It does so {unscaled}, or because the scale is fixed and too high, or still on its "
            f"way down, or {stale}. Pass `tx` to `check` to have these told apart."
        )
    if isinstance(policy, FixedLossScale):
        return f"The scale is fixed, and too high. Or it overflows {unscaled}."
    return f"The scale is at its floor, and too high. {large}"


def _lowest(scaling: Any, policy: LossScale) -> float:
    """Returns where a scale ends if all further steps are bad."""
    scaling = jax.tree.map(jnp.asarray, policy.init()._replace(**scaling._asdict()))
    bad = jnp.array(False)
    return float(
        jax.lax.fori_loop(0, 10_000, lambda _, s: policy.adjust(s, bad), scaling).loss_scale
    )
