"""One step, however it is called: `advance` judges it, makes or skips it, and counts.

`update`, `apply_gradients` and each `train_step` differ in who made the backward pass, and in what
they return: the new parameters, or updates.

Four words say how far a step came:

- A backward pass is *good* if nothing refuses it: its gradients and its loss are finite, and
  neither is a spike.
- A step of the optimizer is *due* if the pass is good and the window of `multi_steps`, if there is
  one, is full.
- It is *stepped* if it was due, and what the optimizer made is finite, if that is checked.
- The user's step is *applied* if its pass was good, due or not, and what the optimizer made of it
  was not thrown away. This is `step_applied` of the state.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from .._gradients.facts import (
    Questions,
    clip_by_global_norm,
    find_facts,
    global_norm,
    last_flags,
    shown_norm,
)
from .._gradients.value_and_grad import BackwardPass
from .._gradients.verdict import agree_on_loss, all_finite
from .._policies.base import adjust_scale
from .._state.optimizer import LossScaledState
from .._trees.gradient_leaves import (
    holds_overwrites,
    map_gradients,
    overwrite,
    overwriting_updates,
    without_overwrites,
)
from .._trees.leaves import (
    cast_like,
    in_common_type,
    is_inexact_leaf,
    store_once,
    widen,
)
from .._trees.params import apply_updates
from .._trees.pytrees import OptState, PyTree
from .._trees.selection import where
from . import checks
from .counters import count_step
from .options import Options
from .skip import choose, make_or_keep, minus_zeros
from .unread_gradients import leave_out_unread
from .window import Ready


class _Made(NamedTuple):
    """The results of a step of the optimizer, or what a skipped one keeps in their place."""

    outcome: Any  # the new parameters, or only the updates
    opt_state: Any
    weights: Any  # what is kept beside half-precision parameters
    grad_norm: Any  # f32[], if it was not known before the step, otherwise `None`
    updates_finite: Any = None  # bool[], `None` if they are not checked


def advance(
    optimizer: Options,
    backward_pass: BackwardPass,
    state: LossScaledState,
    params: optax.Params | None,
    extra_args: Mapping[str, Any],
    *,
    returns_params: bool,
) -> tuple[Any, LossScaledState]:
    """Makes one step, or skips it: returns its outcome, and the state.

    The outcome is the new parameters, or only the updates. The caller has checked the state.
    """
    inner_step = _InnerStep(optimizer, state, params, extra_args, returns_params)
    if not optimizer.skips:
        return _apply_unjudged(inner_step, backward_pass)

    # The facts, on which all devices agree.
    if backward_pass.facts is None:
        backward_pass = find_pass_facts(
            optimizer, backward_pass, state, params, extra_args
        )
    facts: Any = backward_pass.facts

    # The verdict. An overflow of the gradients says that the scale is too high. A bad loss or a
    # spike says nothing of the scale.
    good = facts.grads_finite & facts.loss_finite
    overflow = ~facts.grads_finite
    concerns_scale = facts.loss_finite
    spikes = state.spikes
    if optimizer.spikes is not None:
        norm = shown_norm(facts.norm)
        is_spike, spikes = optimizer.spikes.judge(spikes, facts.loss, norm, good)
        good &= ~is_spike
        concerns_scale &= ~is_spike

    # Step or skip. With a window, the step is made from the mean of its micro-batches.
    grads = backward_pass.grads
    inner_state = state.inner_state
    ready = Ready(good, inner_state, grads.grads, grads.times_reciprocal, facts.loss)
    window: Any = None
    if optimizer.window is not None:
        window, ready = optimizer.window.add(inner_state, grads, facts.loss, good)
    made = inner_step.make_if_due(ready, facts.norm)
    updates_finite = jnp.array(True)
    if optimizer.check_updates:
        updates_finite = made.updates_finite
    stepped = ready.due & updates_finite
    inner_state = made.opt_state
    if optimizer.window is not None:
        inner_state = optimizer.window.close(window, inner_state, stepped)

    # The scale. It stays if nothing is stepped and nothing overflowed, as after updates that are
    # not finite. Retries may have lowered it since this step began.
    scaling = state.scaling
    if backward_pass.retries is not None:
        scaling = backward_pass.retries.scaling
    moved = adjust_scale(optimizer.policy, scaling, ~overflow, facts.largest)
    scaling = where(concerns_scale & (stepped | overflow), moved, scaling)

    # The counters, and what the state shows.
    applied = good & updates_finite
    next_state = count_step(
        state, facts, applied, updates_finite, scaling, backward_pass.retries
    )
    grad_norm = state.grad_norm
    if made.grad_norm is not None:
        grad_norm = made.grad_norm
    elif facts.norm is not None:
        grad_norm = shown_norm(facts.norm)
    flags = state.nonfinite_leaves
    if flags is not None:
        flags = last_flags(flags, facts.nonfinite_leaves, facts.grads_finite)
    return made.outcome, next_state._replace(
        scaling=scaling,
        inner_state=inner_state,
        weights=made.weights,
        grad_norm=grad_norm,
        spikes=spikes,
        nonfinite_leaves=flags,
    )


def find_pass_facts(
    optimizer: Options,
    backward_pass: BackwardPass,
    state: LossScaledState,
    params: optax.Params | None,
    extra_args: Mapping[str, Any],
) -> BackwardPass:
    """Finds the facts of a pass, and puts zeros in the place of gradients that are never read."""
    checks.check_loss(optimizer.call, backward_pass.loss)
    backward_pass = leave_out_unread(
        optimizer, backward_pass, state, params, extra_args
    )
    # The verdict reads the gradients, and then the step.
    grads = store_once(backward_pass.grads)
    backward_pass = backward_pass._replace(grads=grads)
    loss = backward_pass.loss
    axis_name = optimizer.axis_name
    checks.check_devices_agree(optimizer.call, grads.divided, loss, axis_name)
    # With a window, the optimizer clips the mean of several micro-batches, so the norm of one of
    # them is of no use to it.
    clips = optimizer.max_norm is not None and optimizer.window is None
    questions = Questions(
        norm=clips or optimizer.spikes is not None,
        largest=optimizer.policy.needs_largest,
        # The state decides this, and not `track_leaves`, as it keeps its structure.
        by_leaf=state.nonfinite_leaves is not None,
    )
    facts = find_facts(grads, loss, axis_name, backward_pass.before_hook, questions)
    return backward_pass._replace(facts=facts, before_hook=None)


@dataclasses.dataclass(frozen=True)
class _InnerStep:
    """A step of the optimizer inside: what is known of it before its gradients are."""

    optimizer: Options
    state: LossScaledState
    params: optax.Params | None
    extra_args: Mapping[str, Any]
    returns_params: bool

    def make_if_due(self, ready: Ready, norm: Any) -> _Made:
        """Makes the step if it is due, and otherwise keeps everything as it was.

        With `check_updates`, a step whose results are not finite is taken back.
        """
        optimizer = self.optimizer
        grad_norm = None
        if optimizer.max_norm is not None and optimizer.window is not None:
            norm = None  # that of the mean is known only in the step
            grad_norm = self.state.grad_norm
        kept = _Made(None, ready.opt_state, self.state.weights, grad_norm)
        if optimizer.check_updates:
            kept = kept._replace(updates_finite=jnp.array(True))

        def keep(like: list[Any]) -> list[Any]:
            rest = jax.tree.leaves(kept)
            if self.returns_params:
                return [*jax.tree.leaves(self.params), *rest]
            return [*minus_zeros(like[: len(like) - len(rest)]), *rest]

        def make(operand: PyTree) -> _Made:
            stored, norm = operand
            grads = ready.gradients_of(stored)
            made, updates = self.make(grads, ready.opt_state, ready.loss, norm)
            if not optimizer.check_updates:
                return made
            finite = self._is_finite(made, updates, ready.opt_state)
            made = choose(finite, made._replace(updates_finite=finite), keep)
            return made._replace(updates_finite=finite)

        return make_or_keep(ready.due, make, (ready.stored, norm), keep)

    def make(
        self,
        grads: optax.Updates,
        opt_state: OptState,
        loss: ArrayLike | None,
        norm: Any,
    ) -> tuple[_Made, optax.Updates]:
        """Makes the step: returns its results, and the updates as the optimizer made them.

        The optimizer gets gradients in float32 or wider, as the parameters are, and does not see
        leaves that their gradients replace. The `norm` of the gradients is passed if it is known.
        """
        optimizer = self.optimizer
        params = self.params
        weights = self.state.weights
        trained_grads = grads
        overwrites = holds_overwrites(grads)
        if overwrites:
            trained_grads = without_overwrites(grads)
            params = without_overwrites(params)
        wide_params = optimizer.weights.widen(params, weights)
        wide_grads = map_gradients(widen, trained_grads)
        grad_norm = None
        if optimizer.max_norm is not None:
            if norm is None:
                norm = global_norm(wide_grads, optimizer.axis_name)
                grad_norm = shown_norm(norm)
            wide_grads = clip_by_global_norm(wide_grads, norm, optimizer.max_norm)

        updates, new_state = optimizer.inner.update(
            wide_grads, opt_state, wide_params, value=loss, **self.extra_args
        )

        keeps_structure = jax.tree.structure(new_state) == jax.tree.structure(opt_state)
        if optimizer.skips and not keeps_structure:
            raise checks.lost_structure(optimizer.call, new_state, opt_state)
        if optimizer.axis_name is not None:
            like = trained_grads if params is None else params
            check = functools.partial(
                checks.check_copies_stay_equal, optimizer.call, optimizer.axis_name
            )
            check("the update", updates, like)
            check("its state", new_state, opt_state)
        # Where no step is skipped, the state may change its structure.
        if keeps_structure:
            new_state = cast_like(new_state, opt_state)
        outcome, new_weights = optimizer.weights.apply(
            params, wide_params, updates, weights, returns_params=self.returns_params
        )
        if overwrites:
            replace = overwrite if self.returns_params else overwriting_updates
            outcome = replace(outcome, grads, self.params)
        return _Made(outcome, new_state, new_weights, grad_norm), updates

    def _is_finite(
        self, made: _Made, updates: optax.Updates, opt_state: OptState
    ) -> jax.Array:
        """True if all that a step made is finite, but for what was not so before it."""
        new_state = _without_old_infs(made.opt_state, opt_state)
        new_params = None
        if self.params is not None:
            new_params = made.outcome
            if not self.returns_params:
                new_params = apply_updates(self.params, made.outcome)
            new_params = _without_old_infs(new_params, self.params)
        checked = (updates, new_state, new_params)
        return all_finite(checked, axis_name=self.optimizer.axis_name)


def _apply_unjudged(
    inner_step: _InnerStep, backward_pass: BackwardPass
) -> tuple[Any, LossScaledState]:
    """Makes a step of an optimizer that skips none: returns its outcome, and the state."""
    optimizer = inner_step.optimizer
    state = inner_step.state
    grads = backward_pass.grads.divided
    axis_name = optimizer.axis_name
    if optimizer.max_norm is not None:
        checks.check_devices_agree(optimizer.call, grads, None, axis_name)
    loss = agree_on_loss(backward_pass.loss, axis_name)
    # There is no window, as that needs a verdict: `inner_state` is the optimizer's own.
    made, _ = inner_step.make(grads, state.inner_state, loss, None)
    if made.grad_norm is not None:
        state = state._replace(grad_norm=made.grad_norm)
    return made.outcome, state._replace(
        inner_state=made.opt_state, weights=made.weights
    )


def _without_old_infs(new_tree: PyTree, old_tree: PyTree) -> Any:
    """Puts zeros in the place of new numbers where the old ones were not finite already.

    An optimizer may start from an inf, as `optax.contrib.reduce_on_plateau` does, and a parameter
    that is not trained may be a mask of -inf.
    """

    def without_old(new: PyTree, old: PyTree) -> Any:
        if not is_inexact_leaf(new):
            return new
        new = in_common_type(new, old, new)
        return jnp.where(jnp.isfinite(old), new, jnp.zeros_like(new))

    return jax.tree.map(without_old, new_tree, old_tree)
