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

from ._gradients.verdict import flagged_paths
from ._policies.adaptive import UNSEEN
from ._policies.base import LossScale
from ._policies.fixed import FixedLossScale, NoOpLossScale
from ._policies.level import find_raised_level
from ._state.find import find_optimizer_state, find_scale_state, is_loss_scaled, restore_types
from ._state.optimizer import WINDOW_STATES, MultiStepsState
from ._state.scale import AdaptiveState, LossScaleState, UnitLossScaleState, unwrap
from ._step.report import counters_of
from ._step.wrapped_optimizer import find_wrapped_optimizer
from ._trees.checks import int32
from ._trees.grammar import and_more

# From which recent share of skipped steps `check` warns, and from which share of spikes.
_OFTEN = 0.05
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
        values |= counters_of(node)
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
      tree: a `jaxscale.LossScaledState`, or a tree that holds exactly one. In the state of a
        population each member is judged in its own right, and the worst one is reported.
      tx: the optimizer, which knows how far the scale can fall. With it the message tells a scale
        at its floor from one that is fixed or still falling. A `TrainState` has its own.
      max_consecutive: how many steps skipped in a row are still accepted, at least 0. Halving takes
        24 of them from 2**24 down to 1.

    Warns:
      UserWarning: if the `skip_rate` is 0.05 or more, so that one step in 20 is lost: at 6 % of
        skipped steps that takes about 1800 of them, at 10 % 700, at 50 % 105; if `tree` is a
        `TrainState` that has made more steps than its optimizer, which then was not restored from a
        checkpoint; if the loss scale decays, below 2**15 with a `backoff_count` of 6 or more, or if
        an `AdaptiveLossScale` has made more and more room for gradients of which it has seen none;
        if the scale may be of no use, as it has grown to 2**24 or more after 10,000 steps, none of
        which overflowed (from 2**15, the default policy gets there after 18,000); if retries do not
        help, with a `total_exhausted` of 6 or more; or if spikes are skipped again and again, 20 in
        a row, or more than one step in 20 of at least 1000. A policy that raises its scale in every
        finite step, such as `presets.chainer()`, never decays, and no scale that follows the
        gradients is of no use. Python shows each text once in a run.

    Raises:
      LossScaleStuckError: if more than `max_consecutive` steps in a row were skipped, or if an
        `AdaptiveLossScale` has seen nothing but zeros in more steps of the optimizer than that. The
        message has the numbers, the likely cause and, with `track_leaves=True`, the leaves of the
        last overflow. The cause is that of the steps in this row.
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
    inner_state = unwrap(state.inner_state)
    state = jax.tree.map(_on_host, unwrap(state._replace(inner_state=None)))
    _warn_if_lost(unwrap(getattr(tree, "step", None)), state, inner_state)
    axes = np.shape(state.notfinite_count)  # those of a population
    steps = np.broadcast_to(_count_optimizer_steps(state, inner_state), axes)
    members = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[len(axes) :]), state)
    optimizer = find_wrapped_optimizer(tx or getattr(tree, "tx", None))
    policy = None if optimizer is None else optimizer.policy

    worst = int(np.argmax(members.notfinite_count))
    if members.notfinite_count[worst] > most:
        text = _name_member(worst, axes) + _stuck(members, worst, policy)
        raise LossScaleStuckError(text + _mention_level(members, axes))
    _raise_if_blind(members, steps.reshape(-1), most, axes)
    told = _told(members, policy)
    if told:
        told[-1] += _mention_level(members, axes)
    for text in told:
        warnings.warn(text, stacklevel=2)


def _stuck(members: Any, worst: int, policy: LossScale | None) -> str:
    """Returns what happened to a member of a population in which too many steps were skipped."""
    state = jax.tree.map(lambda leaf: leaf[worst], members)
    return (
        f"{state.notfinite_count} steps in a row were skipped ({state.total_notfinite} of "
        f"{state.total_steps} in all, {state.total_notfinite_loss} of them with a non-finite "
        f"loss); the loss scale is {state.scaling.loss_scale}. {_likely_cause(state, policy)}"
        f"{_leaves(state.nonfinite_leaves)} {_DOCTOR}"
    )


def _name_member(index: int, axes: tuple[int, ...]) -> str:
    """Returns which member of a population is meant, nothing for a run that is alone."""
    if not axes:
        return ""
    place = ", ".join(str(int(i)) for i in np.unravel_index(index, axes))
    return f"Of a population of shape {axes}, the member at [{place}]: "


def _count_optimizer_steps(state: Any, inner_state: Any) -> Any:
    """Returns how many steps the optimizer has made under this state, as far as that is known."""
    applied = state.total_steps - state.total_notfinite
    if isinstance(inner_state, WINDOW_STATES):
        # A window that was adopted has counted the steps of its former life, too.
        return np.minimum(applied, np.asarray(inner_state.gradient_step))
    return applied


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
    "20. A new level of the loss is accepted before that, within 15 steps. If it is one kind of "
    "batch that stands out, such as those with a reward among many without, these are good steps, "
    "and nothing is learned from them: raise `sigmas` of the `SpikeRule`, or do without it. If the "
    "run diverges, skipping does not help: lower the learning rate, or go back to a checkpoint."
)
_NORMS = (
    " Some of the spikes had finite gradients whose norm is inf in float32, with elements of about "
    "1e19 or more: their squares would make the second moment of Adam inf for good. No such level "
    "is ever accepted: look for what makes them so large, or make the loss smaller."
)

# What may make a NaN without any half precision, most likely things first.
_WITHOUT_HALF = (
    "The batch comes first: look for NaN and inf in it. Then for 0/0, for the square root of 0 or "
    "the norm of zeros, whose derivative is inf, for the logarithm of 0, and for a mask of -inf "
    "that covers a whole row of a softmax."
)
_AT_ANY_SCALE = (
    "a division by zero, the square root of 0, a mask of -inf (run one step under `with "
    "jax.disable_jit(), jax.debug_infs(True)`)"
)
_ON_CPU = "On a CPU, XLA may lose a NaN of the loss on the way, so a finite loss proves little."

_RATE = "`check`: one step in 20 or more was skipped lately (`skip_rate` of `metrics`). "
_RATE_LOSS = (
    _RATE + "Mostly the loss itself was not finite, so no loss scale can help: look for NaN and "
    "inf in the batches, and for an operation in the forward pass that leaves the range of its "
    "dtype. " + _DOCTOR
)
_RATE_GRADS = (
    _RATE + "Mostly the gradients were not finite. If the loss was passed as `value`, it was "
    "finite; if not, pass it, so that a bad forward pass is told apart. If the scale is at its "
    "floor or fixed, it may be too high. Otherwise some batches overflow at any scale: look into "
    f"them, and for {_AT_ANY_SCALE}. " + _DOCTOR
)
_RATE_UNSCALED_LOSS = f"{_RATE}Mostly the loss itself was not finite. {_WITHOUT_HALF} {_DOCTOR}"
_RATE_UNSCALED_GRADS = (
    f"{_RATE}Mostly the gradients were not finite. {_WITHOUT_HALF} If the loss was not passed as "
    f"`value`, pass it, so that a bad forward pass is told apart. {_ON_CPU} {_DOCTOR}"
)


def _told(members: Any, policy: LossScale | None) -> list[str]:
    """Returns the texts of what `check` warns of, in any member of a population."""
    scaling, spikes, steps = members.scaling, members.spikes, members.total_steps
    falls = members.backoff_count >= _FALLS
    if isinstance(scaling, AdaptiveState):
        is_guess = scaling.held_steps == scaling.finite_steps
        is_small = scaling.loss_scale * np.exp2(scaling.peak) < 1
        falls |= is_guess & is_small & (scaling.crest - scaling.peak >= _ROOM)
    is_idle = np.array(False)
    if isinstance(scaling, LossScaleState):  # others may start there, as they see gradients
        overflows = members.total_notfinite - members.total_notfinite_loss + members.total_retries
        # One that is fixed tracks nothing. One that grows has 0 finite steps just after it grew,
        # but as nothing overflowed, all of its hysteresis is left.
        moves = (scaling.growth_tracker > 0) | (scaling.hysteresis_tracker > 0)
        is_idle = moves & (scaling.loss_scale >= _HIGH) & (overflows == 0) & (steps >= _LONG)
    is_often = members.skip_rate >= _OFTEN
    spikes_are_often, of_spikes = np.array(False), _SPIKES
    if spikes is not None:
        spikes_are_often = (spikes.total_spikes > steps // 20) & (steps >= 1000)
        spikes_are_often |= spikes.spike_count >= 20
        are_mostly_spikes = spikes.total_spikes > members.total_notfinite
        spikes_are_often |= is_often & are_mostly_spikes
        is_often &= ~are_mostly_spikes
        of_spikes = _SPIKES
        if np.any(spikes_are_often & (spikes.total_norm_overflows > 0)):
            of_spikes += _NORMS

    blames_loss = _blames_loss(members)
    if _is_unscaled(members, policy):
        rate_loss, rate_grads = _RATE_UNSCALED_LOSS, _RATE_UNSCALED_GRADS
    else:
        rate_loss, rate_grads = _RATE_LOSS, _RATE_GRADS
    told = {
        rate_loss: is_often & blames_loss,
        rate_grads: is_often & ~blames_loss,
        _EXHAUSTED: members.total_exhausted >= _FALLS,
        _DECAY: falls & (scaling.loss_scale < _LOW),
        _IDLE: is_idle,
        of_spikes: spikes_are_often,
    }
    return [text for text, holds in told.items() if np.any(holds)]


def _mention_level(members: Any, axes: tuple[int, ...]) -> str:
    """Returns a word on a level of the loss that stands above its past, nothing without one.

    It alone is no reason to speak, as a loss may rise for good reasons.
    """
    level = find_raised_level(members)
    if level is None or not np.any(level.is_raised):
        return ""
    index = int(np.argmax(np.where(level.is_raised, level.num_steps, 0)))
    # Without the number of steps, so that the text stays the same as they pass.
    return (
        f" {_name_member(index, axes)}The level of the loss stands above that of its past. Most "
        "often that is a new mix of data. If the data are the same, the run may be ruined, as by a "
        "learning rate that was too high for a while: then go back to a checkpoint from step "
        f"{int(level.good_until[index])} or before, when the loss was at its old level."
    )


def _blames_loss(members: Any) -> Any:
    """Returns whether most steps that were skipped had a bad loss.

    Those of the present row decide, as what was long ago may have had another cause. Between two
    rows all do. There the overflows of a policy that grows every few steps are many, so it is also
    the loss if that alone explains half of the recent rate.
    """
    of_row = 2 * members.row_notfinite_loss >= members.notfinite_count
    bad_losses, steps = members.total_notfinite_loss, np.maximum(members.total_steps, 1)
    of_all = 2 * bad_losses >= members.total_notfinite
    of_all |= 2 * bad_losses / steps >= np.maximum(members.skip_rate, _OFTEN)
    return np.where(members.notfinite_count > 0, of_row, of_all)


def _is_unscaled(state: Any, policy: LossScale | None) -> bool:
    """Returns whether the state is that of `skip_nonfinite`, without a loss scale."""
    return isinstance(state.scaling, UnitLossScaleState) or isinstance(policy, NoOpLossScale)


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
    applied = state.total_steps - state.total_notfinite
    counts = [np.max(count) for _, count in optax.tree.get_all_with_path(inner_state, "count")]
    leaves = jax.tree.leaves(inner_state)
    if isinstance(inner_state, optax.MultiStepsState):
        # Its optimizer steps once in a few micro-batches, and how many is not known here. Only a
        # fresh one shows: an adopted one has made a step, or is further in its window.
        lost = inner_state.gradient_step == 0 and inner_state.mini_step <= applied
    elif isinstance(inner_state, MultiStepsState):
        # Here `step` counts the steps of the optimizer, as its window does.
        made = inner_state.gradient_step
        lost = step > made and (max(counts) <= made if counts else made == 0)
    elif counts:
        lost = max(counts) <= applied
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


def _raise_if_blind(members: Any, steps: Any, most: int, axes: tuple[int, ...]) -> None:
    """Raises an error if a policy that follows the largest gradient has only ever seen zeros.

    The steps are those of the optimizer: a window of micro-batches shows the policy only its mean.
    """
    if not isinstance(members.scaling, AdaptiveState):
        return
    is_blind = (members.scaling.peak <= UNSEEN) & (steps > most)
    if not is_blind.any():
        return
    worst = int(np.argmax(np.where(is_blind, steps, 0)))
    raise LossScaleStuckError(
        f"{_name_member(worst, axes)}All gradients were 0 in {steps[worst]} steps at loss scale "
        f"{members.scaling.loss_scale[worst]:g}, "
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
    """Returns why the steps of the present row were skipped."""
    unscaled = _is_unscaled(state, policy)
    if not _blames_loss(state):
        told_apart = (
            "If the loss was passed as `value`, it is finite, and the backward pass overflows; if "
            "not, pass it, so that a bad forward pass is told apart."
        )
        if unscaled:
            return (
                f"{told_apart} A scale of 1 scales nothing, so it is not to blame. {_WITHOUT_HALF} "
                "To find the line, run one step under `with jax.disable_jit(), "
                f"jax.debug_infs(True)`. {_ON_CPU}"
            )
        return f"{told_apart} {_backward(state, policy)}"
    bad = "The loss itself is not finite"
    if state.row_notfinite_loss < state.notfinite_count:
        bad += f" in {state.row_notfinite_loss} of these {state.notfinite_count} steps"
    applied = state.total_steps - state.total_notfinite
    if applied:
        since = (
            f"{applied} steps were fine: look for a stretch of bad data, or for parameters that "
            "have diverged."
        )
    elif unscaled:
        since = f"It never was. {_WITHOUT_HALF}"
    else:
        since = (
            "It never was: look for NaN in the data, and for an operation in the forward pass "
            "that leaves the range of its dtype; compute norms, softmax and the loss in float32."
        )
    helps_not = "" if unscaled else ", so no loss scale can help"
    return f"{bad}{helps_not}. {since}"


def _backward(state: Any, policy: LossScale | None) -> str:
    """Returns the likely cause if the backward pass overflows."""
    unscaled = f"at any scale: {_AT_ANY_SCALE}"
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
