"""One step, however it is called: `advance` votes, makes or skips it, moves the scale and counts.

`update`, `apply_gradients` and each `train_step` differ in who made the pass, and in what they
return: the new parameters, or updates.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from .._gradients.facts import (
    Facts,
    Questions,
    clip_by_global_norm,
    find_facts,
    global_norm,
    shown_norm,
)
from .._gradients.verdict import agree_on_loss, all_finite
from .._policies.base import adjust_scale
from .._state.optimizer import LossScaledState
from .._trees.casts import cast_like, common_sharding, placed, widen
from .._trees.gradient_leaves import map_gradients
from .._trees.leaves import is_inexact_leaf
from .._trees.overwrites import (
    holds_overwrites,
    overwrite,
    overwriting_updates,
    without_overwrites,
)
from .._trees.params import apply_updates
from .._trees.pytrees import OptState, PyTree
from .._trees.selection import tree_where
from . import checks
from .backward_pass import Pass
from .call_update import call_update
from .counters import count_step
from .judges import Judge, Vote
from .options import Options
from .skip import choose, make_or_keep, minus_zeros
from .unread_gradients import leave_out_unread


class Finish(NamedTuple):
    """The results of a step beside its state."""

    returns_params: bool  # the new parameters, or only the updates
    # From that, the gradients and the parameters to that with the leaves that gradients replace.
    overwrite: Callable[[Any, Any, Any], Any]
    # From the parameters and the leaves of that to what a skipped step returns in their place.
    keep: Callable[[Any, list[Any]], list[Any]]


NEW_PARAMS = Finish(
    returns_params=True,
    overwrite=overwrite,
    keep=lambda params, like: jax.tree.leaves(params),
)
UPDATES = Finish(
    returns_params=False,
    overwrite=overwriting_updates,
    keep=lambda params, like: minus_zeros(like),
)


class _Kept(NamedTuple):
    """The values that a skipped step keeps, beside its outcome."""

    opt_state: Any
    weights: Any  # what is kept beside half-precision parameters
    grad_norm: Any  # f32[], that of the mean of a window, otherwise `None`
    updates_finite: Any  # bool[], also of the new state, `None` if they are not checked


@dataclasses.dataclass(frozen=True)
class _InnerStep:
    """A step of the optimizer inside, but for its gradients, its state and the loss."""

    own: Options
    params: optax.Params | None
    extra_args: Mapping[str, Any]
    finish: Finish
    weights: Any

    def make(
        self,
        grads: optax.Updates,
        opt_state: OptState,
        loss: ArrayLike | None,
        norm: Any,
    ) -> tuple[Any, optax.Updates, _Kept]:
        """Makes the step: returns its outcome, the updates, and what to go on with.

        The optimizer gets gradients in float32 or wider, as the parameters are, and does not see
        leaves that their gradients replace. The `norm` of the gradients is passed if it is known.
        """
        own = self.own
        params = self.params
        trained_grads = grads
        overwrites = holds_overwrites(grads)
        if overwrites:
            trained_grads = without_overwrites(grads)
            params = without_overwrites(params)
        wide_params = own.weights.widen(params, self.weights)
        wide_grads = map_gradients(widen, trained_grads)
        if own.max_norm is not None:
            if norm is None:
                norm = global_norm(wide_grads, own.axis_name)
            wide_grads = clip_by_global_norm(wide_grads, norm, own.max_norm)
        updates, new_state = call_update(
            own.inner, wide_grads, opt_state, wide_params, loss, self.extra_args
        )
        if own.judges:
            checks.check_state_kept(own.call, new_state, opt_state)
        like = trained_grads if params is None else params
        self._check_copies("the update", updates, like)
        self._check_copies("its state", new_state, opt_state)
        # Where no step is skipped, the state may change its structure.
        if jax.tree.structure(new_state) == jax.tree.structure(opt_state):
            new_state = cast_like(new_state, opt_state)
        outcome, weights = own.weights.apply(
            params,
            wide_params,
            updates,
            self.weights,
            returns_params=self.finish.returns_params,
        )
        if overwrites:
            outcome = self.finish.overwrite(outcome, grads, self.params)
        if norm is not None:
            norm = shown_norm(norm)
        return outcome, updates, _Kept(new_state, weights, norm, None)

    def _check_copies(self, what: str, new: PyTree, old: PyTree) -> None:
        own = self.own
        checks.check_copies_stay_equal(own.call, what, new, old, own.axis_name)


def advance(
    own: Options,
    run: Pass,
    state: LossScaledState,
    params: optax.Params | None,
    extra_args: Mapping[str, Any],
    finish: Finish,
) -> tuple[Any, LossScaledState]:
    """Makes one step, or skips it: returns its outcome, which `finish` describes, and the state.

    The caller has checked the state.
    """
    inner_step = _InnerStep(own, params, extra_args, finish, state.weights)
    if not own.judges:
        # There is no window, as that needs a vote: `inner_state` is the optimizer's own.
        if own.max_norm is not None:
            checks.check_devices_agree(own.call, run.grads.divided, None, own.axis_name)
        loss = agree_on_loss(run.loss, own.axis_name)
        outcome, _, made = inner_step.make(
            run.grads.divided, state.inner_state, loss, None
        )
        grad_norm = state.grad_norm if made.grad_norm is None else made.grad_norm
        return outcome, state._replace(
            inner_state=made.opt_state, weights=made.weights, grad_norm=grad_norm
        )

    if run.facts is None:
        run = judge_pass(own, run, state, params, extra_args)
    facts: Any = run.facts

    vote = _vote(own.judges, facts, state)

    # Step or skip. A step of a window is made from the mean of its micro-batches, whose norm is
    # known only then.
    window_state, ready = own.window.add(
        state.inner_state, run.grads, facts.loss, vote.good
    )
    clips_mean = own.max_norm is not None and own.window.averages
    known_norm = None if clips_mean else facts.norm
    shows_mean = clips_mean and state.grad_norm is not None
    kept = _Kept(
        opt_state=ready.opt_state,
        weights=state.weights,
        grad_norm=state.grad_norm if shows_mean else None,
        updates_finite=jnp.array(True) if own.check_updates else None,
    )

    def keep(like: list[Any]) -> list[Any]:
        rest = jax.tree.leaves(kept)
        return [*finish.keep(params, like[: len(like) - len(rest)]), *rest]

    def make(operand: PyTree) -> tuple[Any, _Kept]:
        stored, norm = operand
        outcome, updates, made = inner_step.make(
            ready.gradients_of(stored), ready.opt_state, ready.loss, norm
        )
        if not shows_mean:
            made = made._replace(grad_norm=None)
        if not own.check_updates:
            return outcome, made
        new_state = _without_old_infs(made.opt_state, ready.opt_state)
        new_params = None
        if params is not None:
            new_params = outcome
            if not finish.returns_params:
                new_params = apply_updates(params, outcome)
            new_params = _without_old_infs(new_params, params)
        checked = (updates, new_state, new_params)
        finite = all_finite(checked, axis_name=own.axis_name)
        made = made._replace(updates_finite=finite)
        outcome, made = choose(finite, (outcome, made), keep)
        return outcome, made._replace(updates_finite=finite)

    outcome, made = make_or_keep(ready.due, make, (ready.stored, known_norm), keep)
    updates_finite = jnp.array(True)
    if own.check_updates:
        updates_finite = made.updates_finite
    stepped = ready.due & updates_finite

    # Scale. It stays where nothing is stepped or blamed, as where checked updates were not finite.
    scaling_before = state.scaling
    if run.retries is not None:
        # Retries may have lowered the scale since this step began.
        scaling_before = run.retries.scaling
    moved = adjust_scale(own.policy, scaling_before, ~vote.blames_scale, facts.largest)
    may_move = vote.frees_scale & (stepped | vote.blames_scale)
    scaling = tree_where(may_move, moved, scaling_before)

    # Counters.
    next_state = count_step(
        state, facts, vote.good & updates_finite, updates_finite, scaling, run.retries
    )
    grad_norm = state.grad_norm
    if shows_mean:
        grad_norm = made.grad_norm
    elif grad_norm is not None and facts.norm is not None:
        grad_norm = shown_norm(facts.norm)
    next_state = next_state._replace(
        scaling=scaling,
        inner_state=own.window.close(window_state, made.opt_state, stepped),
        weights=made.weights,
        grad_norm=grad_norm,
        **vote.own,
    )
    return outcome, next_state


def _vote(judges: Sequence[Judge], facts: Facts, state: LossScaledState) -> Vote:
    """Returns the vote of all judges together, with the next values of all of their fields."""
    good = jnp.array(True)
    blames_scale = jnp.array(False)
    frees_scale = jnp.array(True)
    fields: dict[str, Any] = {}
    for judge in judges:
        own = {name: getattr(state, name) for name in judge.fields}
        vote = judge.judge(facts, own, good)
        good &= vote.good
        blames_scale |= vote.blames_scale
        frees_scale &= vote.frees_scale
        fields |= vote.own
    return Vote(good, blames_scale, frees_scale, fields)


def judge_pass(
    own: Options,
    run: Pass,
    state: LossScaledState,
    params: optax.Params | None,
    extra_args: Mapping[str, Any],
) -> Pass:
    """Returns a pass with zeros for gradients that are never read, and with what judges ask."""
    checks.check_loss(own.call, run.loss)
    run = leave_out_unread(own, run, state, params, extra_args)
    checks.check_devices_agree(own.call, run.grads.divided, run.loss, own.axis_name)
    # With a window, the optimizer clips the mean of several micro-batches, so the norm of one of
    # them is of no use to it.
    clips = own.max_norm is not None and not own.window.averages
    questions = Questions(
        norm=clips or any(judge.needs_norm for judge in own.judges),
        largest=own.policy.needs_largest,
        # The state decides this, and not `track_leaves`, as it keeps its structure.
        by_leaf=state.nonfinite_leaves is not None,
    )
    facts = find_facts(run.grads, run.loss, own.axis_name, run.before_hook, questions)
    return run._replace(facts=facts, before_hook=None)


def _without_old_infs(new_tree: PyTree, old_tree: PyTree) -> Any:
    """Returns new arrays with zeros where the old ones were not finite already.

    An optimizer may start from an inf, as `optax.contrib.reduce_on_plateau` does, and a parameter
    that is not trained may be a mask of -inf.
    """

    def without_old(new: PyTree, old: PyTree) -> Any:
        if not is_inexact_leaf(new):
            return new
        new = placed(new, common_sharding(old, new))
        return jnp.where(jnp.isfinite(old), new, jnp.zeros_like(new))

    return jax.tree.map(without_old, new_tree, old_tree)
