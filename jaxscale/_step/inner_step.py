"""A step of the optimizer inside of `loss_scaled`: made if it is due, and otherwise skipped."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._gradients.reduction import reduce_gradients
from .._gradients.scaled import Scaled
from .._gradients.verdict import (
    Verdict,
    agree_on_norm,
    all_finite,
    axis_names,
    clip_by_global_norm,
    global_norm,
    shown_norm,
)
from .._storage.weights import Weights
from .._trees.casts import cast_like, widen
from .._trees.gradient_leaves import map_gradients
from .._trees.leaf import is_inexact_leaf
from .._trees.overwrites import (
    holds_overwrites,
    overwrite,
    overwriting_updates,
    without_overwrites,
)
from .._trees.selection import tree_where
from .call_update import call_update
from .checks import check_copies_stay_equal, check_outcome, check_state_kept
from .skip import no_updates, step_if
from .window import Ready


class InnerUpdate(NamedTuple):
    """What the optimizer returned for some gradients."""

    updates: optax.Updates
    opt_state: Any
    # that of the gradients before they were clipped, if it is known
    norm: jax.Array | None


class InnerOutcome(NamedTuple):
    """What a step of the optimizer leads to."""

    outcome: Any  # the new parameters, or only the updates
    update: InnerUpdate  # what it comes from
    weights: Any  # what is kept beside the parameters


class StepOrSkip(NamedTuple):
    """A step that was made if it was due, and otherwise skipped."""

    outcome: Any  # the new parameters, or only the updates
    opt_state: Any
    # bool[], also of the new state, `None` if neither is checked
    updates_finite: jax.Array | None
    # f32[], what the state shows, `None` if it shows no norm
    grad_norm: jax.Array | None
    weights: Any  # what is kept beside the parameters


@dataclasses.dataclass(frozen=True)
class InnerStep:
    """A step of an optimizer, except for the gradients and the state that it is made from.

    Attributes:
      tx: the optimizer.
      params: the parameters, `None` if the call came without them.
      extra_args: further arguments of `tx.update`.
      returns_params: whether the outcome is the new parameters. If not, it is the updates.
      max_norm: the global norm to clip gradients to, or `None`.
      axis_name: the axes whose devices make this step together, or `None`.
      may_be_skipped: whether steps may be skipped, so that the state has to keep its structure.
      weights: how half-precision parameters are kept.
      weights_state: what is kept beside the parameters.
    """

    tx: optax.GradientTransformationExtraArgs
    params: optax.Params | None
    extra_args: Mapping[str, Any]
    returns_params: bool
    max_norm: float | None
    axis_name: Any
    may_be_skipped: bool
    weights: Weights
    weights_state: Any

    def make(
        self,
        grads: optax.Updates,
        opt_state: Any,
        *,
        norm: jax.Array | None,
        value: Any,
    ) -> InnerOutcome:
        """Makes the step. The optimizer does not see leaves that their gradients replace.

        The norm of the gradients is passed if it is known, and `value` is the loss.
        """
        params = self.params
        trained_grads = grads
        trained_params = params
        overwrites = holds_overwrites(grads)
        if overwrites:
            trained_grads = without_overwrites(grads)
            trained_params = without_overwrites(params)
        wide_params = self.weights.widen(trained_params, self.weights_state)
        update = self._update(trained_grads, opt_state, wide_params, norm, value)
        like = trained_grads
        if trained_params is not None:
            check_outcome(update.updates, trained_params)
            like = trained_params
        check_copies_stay_equal("the update", update.updates, like, self.axis_name)
        outcome, weights_state = self.weights.apply(
            trained_params,
            wide_params,
            update.updates,
            self.weights_state,
            returns_params=self.returns_params,
        )
        if overwrites and self.returns_params:
            outcome = overwrite(outcome, grads, params)
        elif overwrites:
            outcome = overwriting_updates(outcome, grads, params)
        return InnerOutcome(outcome, update, weights_state)

    def keep_outcome(self, like: Any, grads: Scaled) -> Any:
        """Returns the outcome of a skipped step, given that of another or its types."""
        if self.returns_params:
            return self.params
        return no_updates(like, grads.divided)

    def _update(
        self,
        grads: optax.Updates,
        opt_state: Any,
        params: optax.Params | None,
        norm: jax.Array | None,
        value: Any,
    ) -> InnerUpdate:
        """Calls the optimizer with gradients in float32 or wider, as the parameters are."""
        grads = map_gradients(widen, grads)
        if self.max_norm is not None:
            if norm is None:
                norm = global_norm(grads, self.axis_name)
            grads = clip_by_global_norm(grads, norm, self.max_norm)
        updates, new_state = call_update(
            self.tx, grads, opt_state, params, value, self.extra_args
        )
        if self.may_be_skipped:
            check_state_kept(new_state, opt_state)
        check_copies_stay_equal("its state", new_state, opt_state, self.axis_name)
        # Where no step is skipped, the state may change its structure.
        if jax.tree.structure(new_state) == jax.tree.structure(opt_state):
            new_state = cast_like(new_state, opt_state)
        return InnerUpdate(updates, new_state, norm)


def make_or_skip(
    inner_step: InnerStep,
    ready: Ready,
    verdict: Verdict,
    grads: Scaled,
    last_norm: jax.Array | None,
    *,
    averages: bool,
    check_updates: bool,
) -> StepOrSkip:
    """Makes a step if it is due, and otherwise keeps everything as it was.

    Args:
      inner_step: the step.
      ready: what it is made from, and whether it is due.
      verdict: that of the backward pass.
      grads: the gradients of that pass. Updates that change nothing vary along their mesh axes.
      last_norm: the norm that the state showed before, `None` if it shows none.
      averages: whether the step is made from the mean of several passes.
      check_updates: whether a step is taken back that makes an inf or a NaN, in the updates or in
        the state of the optimizer.
    """
    clips = inner_step.max_norm is not None
    # The norm of a mean of micro-batches is only known in the step that is made from them.
    clips_mean = clips and averages
    finds_norm = clips_mean and last_norm is not None
    norm = None
    if clips and not clips_mean:
        norm = verdict.norm

    def step(operand: Any) -> StepOrSkip:
        stored, norm = operand
        step_grads = ready.gradients_of(stored)
        outcome, update, weights_state = inner_step.make(
            step_grads, ready.opt_state, norm=norm, value=ready.value
        )
        opt_state = update.opt_state
        grad_norm = None
        if finds_norm:
            grad_norm = show_norm(last_norm, update.norm)
        updates_finite = None
        if check_updates:
            made = (update.updates, _without_old_infs(opt_state, ready.opt_state))
            updates_finite = all_finite(made, axis_name=verdict.axis_name)
            kept = inner_step.keep_outcome(outcome, grads)
            outcome = tree_where(updates_finite, outcome, kept)
            opt_state = tree_where(updates_finite, opt_state, ready.opt_state)
            weights_state = tree_where(
                updates_finite, weights_state, inner_step.weights_state
            )
        return StepOrSkip(outcome, opt_state, updates_finite, grad_norm, weights_state)

    def skip(parts: Any) -> StepOrSkip:
        like = StepOrSkip(*parts)
        grad_norm = last_norm if finds_norm else None
        updates_finite = jnp.array(True) if check_updates else None
        outcome = inner_step.keep_outcome(like.outcome, grads)
        return StepOrSkip(
            outcome,
            ready.opt_state,
            updates_finite,
            grad_norm,
            inner_step.weights_state,
        )

    result = step_if(ready.due, step, (ready.stored, norm), skip)
    if finds_norm:
        return result
    # Otherwise the pass of the verdict has found the norm, if any.
    return result._replace(grad_norm=show_norm(last_norm, verdict.norm))


def _without_old_infs(new_state: Any, old_state: Any) -> Any:
    """Returns a new state with zeros where the old one was not finite already.

    An optimizer may start from an inf, as `optax.contrib.reduce_on_plateau` does.
    """

    def without_old(new: Any, old: Any) -> Any:
        if not is_inexact_leaf(new):
            return new
        return jnp.where(jnp.isfinite(old), new, jnp.zeros_like(new))

    return jax.tree.map(without_old, new_state, old_state)


def show_norm(last_norm: jax.Array | None, norm: jax.Array | None) -> jax.Array | None:
    """Returns the norm that a state shows after a step which may have found a new one."""
    if norm is None or last_norm is None:
        return last_norm
    return shown_norm(norm)


def add_norm(verdict: Verdict, grads: Scaled) -> Verdict:
    """Takes the norm in a second pass, for `jax_debug_nans`.

    There squaring a NaN raises an error. So bad gradients are replaced by zeros, and it is inf.
    """
    zeros = map_gradients(jnp.zeros_like, grads.divided)
    finite_grads = tree_where(verdict.grads_finite, grads.divided, zeros)
    reduction = reduce_gradients(finite_grads, squares=True)
    squares = reduction.squares(axis_names(verdict.axis_name))
    squares = jnp.where(verdict.grads_finite, squares, jnp.inf)
    return verdict._replace(norm=agree_on_norm(squares, verdict.axis_name))
