"""One step of an optimizer under a loss scale: `update` and `apply` of a `WrappedOptimizer`.

1. *Verdict.* Are all gradients finite, and the loss, if it was passed? This takes one pass over the
   gradients, and all devices agree on the answer. It covers the gradients rather than the updates,
   as clipping by value and sign-based optimizers hide an inf; with `check_updates` it also covers
   the updates. A `SpikeRule` may reject a step that is finite.
2. *Window.* If gradients are accumulated, those of good micro-batches are added up. A step is due
   when the window is full; without a window, whenever the gradients are good.
3. *Skip.* If a step is due, the wrapped optimizer makes it. If not, its state and the parameters
   stay as they are: by a branch on a CPU, by a selection on other machines.
4. *Scale.* The policy gets the verdict, and the largest gradient if it needs that, and moves the
   loss scale, unless the loss is to blame.
5. *Counters.* The state counts what happened, and `on_skip` is called if the step was skipped.

With `skip_nonfinite=False` none of this happens: the step is that of the wrapped optimizer.
"""

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._gradients.reduction import nans_are_errors, reduce_gradients
from .._gradients.scaled import Scaled
from .._gradients.verdict import (
    Questions,
    Verdict,
    agree_on_size,
    all_finite,
    clip_by_global_norm,
    flags_by_leaf,
    global_norm,
    judge_gradients,
    last_flags,
    norm_bits,
)
from .._policies.base import CheckedLossScale, LossScale, adjust_scale
from .._policies.fixed import FixedLossScale, NoOpLossScale
from .._policies.spikes import SpikeRule
from .._state.optimizer import LossScaledState
from .._trees.tree import (
    apply_updates,
    cast_like,
    cast_updates,
    holds_overwrites,
    map_gradients,
    overwrite,
    overwriting_updates,
    tree_where,
    widen,
    without_overwrites,
)
from .checks import (
    check_devices_agree,
    check_loss,
    check_not_nested,
    check_outcome,
    check_state,
    check_state_kept,
)
from .counters import count_step, move_skip_rate, start_state
from .matching import StepTrees, TreeTypes, explaining_mismatch, types_of
from .report import report_skip
from .retry import BackwardResult
from .skip import no_updates, step_if
from .window import EachStep, Ready, Window

NO_ARGS: Mapping[str, Any] = MappingProxyType({})

# How Python and Optax say that a function needs an argument which it did not get. Neither has a
# type of error for it: optimizers raise the `TypeError` of a call, or a `ValueError` of their own.
_MISSING_ARGUMENT = re.compile(r"required keyword-only argument|must be provided")


class _InitTypes(NamedTuple):
    """The types of what an `init` was called with, and of the state that it made."""

    params: TreeTypes
    inner_state: TreeTypes


class _InnerUpdate(NamedTuple):
    """What the wrapped optimizer made of some gradients."""

    updates: optax.Updates
    opt_state: Any
    norm: jax.Array | None  # that of the gradients before they were clipped, if it is known


class _StepOrSkip(NamedTuple):
    """A step that was made if it was due, and otherwise skipped."""

    outcome: Any  # the new parameters, or only the updates
    opt_state: Any
    updates_finite: jax.Array | None  # bool[], `None` if the updates are not checked
    grad_norm: jax.Array | None  # f32[], what the state shows, `None` if it shows no norm


@dataclasses.dataclass(frozen=True)
class WrappedOptimizer:
    """An optimizer whose bad steps are skipped: what `loss_scaled` makes of its arguments.

    Its methods `init` and `update` are those of the transformation that users get.

    Attributes:
      inner: the optimizer inside.
      policy: how the loss scale moves.
      axis_name: the axes whose devices agree on each verdict, or `None`.
      window: how micro-batches are accumulated; `EachStep` if they are not.
      max_norm: the global norm to clip gradients to, or `None`.
      skips: whether bad steps are skipped. If not, each step is that of `inner`.
      check_updates: whether the verdict also covers the updates.
      track_leaves: whether the state says which leaves the last overflow was in.
      spikes: the rule that skips finite steps, or `None`.
      on_skip: the function that is called on the host after each skipped step, or `None`.
      last_init: under the key `"types"`, the types of the last `init`. Tracing `init` again in each
        step would take a fifth as long as tracing plain Optax.
    """

    inner: optax.GradientTransformationExtraArgs
    policy: LossScale
    axis_name: Any = None
    window: Window | EachStep = dataclasses.field(default_factory=EachStep)
    max_norm: float | None = None
    skips: bool = True
    check_updates: bool = False
    track_leaves: bool = False
    spikes: SpikeRule | None = None
    on_skip: Callable[[dict[str, Any]], Any] | None = None
    last_init: dict[str, _InitTypes] = dataclasses.field(
        default_factory=dict, init=False, compare=False
    )

    def init(self, params: optax.Params) -> LossScaledState:
        # `update` also passes the parameters in float32, so moments keep their dtype.
        wide_params = map_gradients(widen, params)
        inner_state = self.inner.init(without_overwrites(wide_params))
        check_not_nested(inner_state)
        # Leaves that an optimizer makes from Python numbers are weakly typed, and after a step
        # they would not be: the second step would compile anew.
        inner_state = cast_like(inner_state, inner_state)
        inner_state = self.window.open(wide_params, inner_state)
        self.last_init["types"] = _InitTypes(types_of(params), types_of(inner_state))

        state = start_state(self.policy.init(), inner_state)
        if self.spikes is not None:
            state = state._replace(spikes=self.spikes.init())
        if self.track_leaves:
            state = state._replace(nonfinite_leaves=flags_by_leaf(wide_params))
        if self.max_norm is not None or self.spikes is not None:
            state = state._replace(grad_norm=jnp.array(0, jnp.float32))
        return state

    def update(
        self,
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None = None,
        *,
        value: Any = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, LossScaledState]:
        order = "(grads, opt_state, params)"
        state = self.check_state("loss_scaled(...).update(state=...)", state, order)
        if value is None:
            value = extra_args.get("loss")
        result = BackwardResult(loss=value, state=None, aux=None, grads=Scaled(updates))
        trees = StepTrees(
            "loss_scaled(...).update(updates=...)",
            updates,
            params,
            "loss_scaled(...).update(state=...)",
            state,
        )
        with explaining_mismatch(trees, self):
            return self.apply(result, state, params, extra_args, adds=False)

    @property
    def can_back_off(self) -> bool:
        """Whether the scale ever moves, so that a retry may help."""
        return not isinstance(self.policy, NoOpLossScale | FixedLossScale)

    def expected_types(self, params: optax.Params) -> TreeTypes:
        """Returns the types of the `inner_state` that `init` makes for these parameters."""
        types = self.last_init.get("types")
        if types is not None and types.params == types_of(params):
            return types.inner_state
        return types_of(jax.eval_shape(self.init, params).inner_state)

    def check_state(self, argument: str, state: Any, order: str) -> LossScaledState:
        """Returns the state of a step, as arrays, or raises an error if it is not one.

        Its scale may be that of another policy: then it is lowered to the highest of this one.
        """
        state = check_state(argument, state, self.policy, order)
        if not self.skips or not isinstance(self.policy, CheckedLossScale):
            return state
        return state._replace(scaling=_cap_scale(self.policy, state.scaling))

    def scale_state(self, call: str, state: LossScaledState) -> Any:
        """Returns the scale state that a backward pass starts with."""
        # A loop carries only JAX's arrays, and a restored state may hold NumPy's.
        return jax.tree.map(jnp.asarray, state.scaling)

    def find_verdict_state(self, call: str, state: LossScaledState) -> LossScaledState | None:
        """Returns the state that says whether a step was applied, `None` if every step is."""
        if not self.skips:
            return None
        return state

    def judge_pass(
        self, result: BackwardResult, state: LossScaledState, axis_name: Any = None
    ) -> Verdict | None:
        """Judges a backward pass: returns the verdict, or `None` if no step is ever skipped.

        The devices along `axis_name` agree on it, by default those along the wrapper's own.
        """
        check_loss(result.loss)
        if not self.skips:
            return None
        if axis_name is None:
            axis_name = self.axis_name
        check_devices_agree(result.grads.divided, result.loss, axis_name)
        judges_spikes = self._spike_rule(state) is not None
        # The optimizer clips the mean of a window, so the norm of a micro-batch is of no use to it.
        clips_these = self.max_norm is not None and not self.window.averages
        needs_squares = judges_spikes or clips_these
        questions = Questions(
            # The state decides, not `track_leaves`: its structure must not change.
            by_leaf=state.nonfinite_leaves is not None,
            largest=self.policy.needs_largest,
            squares=needs_squares and not nans_are_errors(),
            agreed_norm=judges_spikes or state.grad_norm is not None,
            agreed_loss=judges_spikes,
        )
        verdict = judge_gradients(
            result.grads,
            result.loss,
            axis_name,
            before_hook=result.grads_before_hook,
            questions=questions,
        )
        if needs_squares and verdict.squares is None:
            return _add_squares(verdict, result.grads)
        return verdict

    def apply(
        self,
        result: BackwardResult,
        state: LossScaledState,
        params: optax.Params | None,
        extra_args: Mapping[str, Any] = NO_ARGS,
        *,
        adds: bool = True,
    ) -> tuple[Any, LossScaledState]:
        """Applies a backward pass: returns the new parameters and the next state.

        The state was checked, and each parameter has a gradient. Without `adds`, updates are
        returned instead of parameters.
        """
        grads = result.grads
        if params is None and holds_overwrites(grads.grads):
            raise ValueError(
                "`loss_scaled(...).update(params=...)` must be the parameters if there is anything "
                "under a key `_overwrite_with_gradient`, which a step replaces, got None."
            )

        make_step = functools.partial(
            self._make_step, params=params, extra_args=extra_args, adds=adds
        )

        def keep_outcome(like: Any) -> Any:
            """Returns the outcome of a skipped step, given that of another or its types."""
            if adds:
                return params
            return no_updates(like, grads.divided)

        # 1. Verdict.
        verdict = result.verdict
        if verdict is None:
            verdict = self.judge_pass(result, state)
        if verdict is None:
            outcome, update = make_step(
                grads.divided, state.inner_state, norm=None, value=result.loss
            )
            grad_norm = _shown_norm(state, update.norm, self.axis_name)
            return outcome, state._replace(inner_state=update.opt_state, grad_norm=grad_norm)
        is_good = verdict.grads_finite & verdict.loss_finite
        is_spike = None
        spikes = state.spikes
        spike_rule = self._spike_rule(state)
        if spike_rule is not None:
            is_spike, spikes = spike_rule.judge(spikes, verdict.loss, verdict.norm, is_good)
            is_good &= ~is_spike

        # 2. Window.
        window, ready = self.window.add(state.inner_state, grads, result.loss, is_good)

        # 3. Skip.
        step = self._step_or_skip(ready, verdict, state, make_step, keep_outcome)
        stepped = ready.due
        grads_finite = verdict.grads_finite
        if step.updates_finite is not None:
            stepped &= step.updates_finite
            grads_finite &= step.updates_finite

        # 4. Scale.
        start = state.scaling
        if result.retries is not None:
            start = result.retries.scaling
        moved = adjust_scale(self.policy, start, grads_finite, verdict.largest)
        may_move = self.window.lets_scale_move(verdict, grads_finite, stepped)
        if is_spike is not None:
            may_move &= ~is_spike  # a spike says nothing about the scale
        scaling = tree_where(may_move, moved, start)

        # 5. Counters.
        next_state = count_step(state, verdict, grads_finite, is_spike, scaling, result.retries)
        skip_rate = move_skip_rate(
            state.skip_rate,
            self.policy,
            before=start,
            after=scaling,
            lost=self.window.count_lost(window, next_state.step_applied, stepped),
            part=self.window.find_part(window),
            retries=result.retries is not None,
        )
        nonfinite_leaves = state.nonfinite_leaves
        if nonfinite_leaves is not None:
            flags = flags_by_leaf(grads.divided, verdict.leaves_finite)
            nonfinite_leaves = last_flags(nonfinite_leaves, flags, grads_finite)
        next_state = next_state._replace(
            scaling=scaling,
            inner_state=self.window.close(window, step.opt_state, stepped),
            skip_rate=skip_rate,
            spikes=spikes,
            nonfinite_leaves=nonfinite_leaves,
            grad_norm=step.grad_norm,
        )
        if self.on_skip is not None:
            report_skip(self.on_skip, next_state)
        return step.outcome, next_state

    def _spike_rule(self, state: LossScaledState) -> SpikeRule | None:
        # A state without windows keeps its structure: it comes from a run without the rule.
        if state.spikes is None:
            return None
        return self.spikes

    def _make_step(
        self,
        grads: optax.Updates,
        opt_state: Any,
        *,
        norm: jax.Array | None,
        value: Any,
        params: optax.Params | None,
        extra_args: Mapping[str, Any],
        adds: bool,
    ) -> tuple[Any, _InnerUpdate]:
        """Makes a step: returns its outcome, and the update that it comes from."""
        trained_grads = grads
        trained_params = params
        overwrites = holds_overwrites(grads)
        if overwrites:
            trained_grads = without_overwrites(grads)
            trained_params = without_overwrites(params)
        update = self._update_inner(
            trained_grads, opt_state, trained_params, norm, value, extra_args
        )
        if trained_params is not None:
            check_outcome(update.updates, trained_params)
        if adds:
            outcome = apply_updates(trained_params, update.updates)
        else:
            outcome = cast_updates(trained_params, update.updates)
        if overwrites and adds:
            outcome = overwrite(outcome, grads, params)
        elif overwrites:
            outcome = overwriting_updates(outcome, grads, params)
        return outcome, update

    def _update_inner(
        self,
        grads: optax.Updates,
        opt_state: Any,
        params: optax.Params | None,
        norm: jax.Array | None,
        value: Any,
        extra_args: Mapping[str, Any],
    ) -> _InnerUpdate:
        """Calls the wrapped optimizer with gradients and parameters in float32 or wider."""
        grads = map_gradients(widen, grads)
        if self.max_norm is not None:
            if norm is None:
                norm = global_norm(grads)
            grads = clip_by_global_norm(grads, norm, self.max_norm)
        params = map_gradients(widen, params)
        updates, new_state = call_update(self.inner, grads, opt_state, params, value, extra_args)
        if self.skips:
            check_state_kept(new_state, opt_state)
        # Where no step is skipped, the state may change its structure.
        if jax.tree.structure(new_state) == jax.tree.structure(opt_state):
            new_state = cast_like(new_state, opt_state)
        return _InnerUpdate(updates, new_state, norm)

    def _step_or_skip(
        self,
        ready: Ready,
        verdict: Verdict,
        state: LossScaledState,
        make_step: Callable[..., tuple[Any, _InnerUpdate]],
        keep_outcome: Callable[[Any], Any],
    ) -> _StepOrSkip:
        """Makes a step if it is due, and otherwise keeps everything as it was."""
        clips = self.max_norm is not None
        # The norm of a mean of micro-batches is only known in the step that is made from them.
        clips_mean = clips and self.window.averages
        finds_norm = clips_mean and state.grad_norm is not None
        norm = None
        if clips and not clips_mean and verdict.squares is not None:
            norm = jnp.sqrt(verdict.squares)

        def step(operand: Any) -> _StepOrSkip:
            stored, norm = operand
            grads = ready.gradients_of(stored)
            outcome, update = make_step(grads, ready.opt_state, norm=norm, value=ready.value)
            opt_state = update.opt_state
            grad_norm = None
            if finds_norm:
                grad_norm = _shown_norm(state, update.norm, verdict.axis_name)
            updates_finite = None
            if self.check_updates:
                updates_finite = all_finite(update.updates, axis_name=verdict.axis_name)
                outcome = tree_where(updates_finite, outcome, keep_outcome(outcome))
                opt_state = tree_where(updates_finite, opt_state, ready.opt_state)
            return _StepOrSkip(outcome, opt_state, updates_finite, grad_norm)

        def skip(parts: Any) -> _StepOrSkip:
            like = _StepOrSkip(*parts)
            # These are constants, but made from values that vary along the axes of a mesh as those
            # of a step do: a branch needs equal types.
            grad_norm = None
            if finds_norm:
                grad_norm = jax.lax.select(ready.due, state.grad_norm, state.grad_norm)
            updates_finite = None
            if self.check_updates:
                updates_finite = ready.due | ~ready.due
            outcome = keep_outcome(like.outcome)
            return _StepOrSkip(outcome, ready.opt_state, updates_finite, grad_norm)

        result = step_if(ready.due, step, (ready.stored, norm), skip)
        if finds_norm:
            return result
        # Otherwise the pass of the verdict has found the norm, if any.
        grad_norm = state.grad_norm
        if grad_norm is not None and verdict.norm is not None and not clips_mean:
            grad_norm = verdict.norm
        return result._replace(grad_norm=grad_norm)


def _cap_scale(policy: CheckedLossScale, scaling: Any) -> Any:
    """Lowers the scale in a scale state to the highest that a policy ever has."""
    highest = getattr(policy, "max_scale", float(jnp.finfo(jnp.float32).max))
    highest = jnp.float32(max(highest, policy.init_scale))
    scale = jnp.asarray(scaling.loss_scale)
    # A scale of NaN stays, for the policy to replace.
    return scaling._replace(loss_scale=jnp.where(scale > highest, highest, scale))


def _add_squares(verdict: Verdict, grads: Scaled) -> Verdict:
    """Adds the sum of all squares to a verdict, inf if the gradients are not finite."""
    # If JAX raises an error at a NaN, the pass that finds one cannot also take its square.
    zeros = map_gradients(jnp.zeros_like, grads.divided)
    finite = tree_where(verdict.grads_finite, grads.divided, zeros)
    squares = reduce_gradients(finite, squares=True).squares()
    squares = jnp.where(verdict.grads_finite, squares, jnp.inf)
    norm = agree_on_size(norm_bits(jnp.sqrt(squares)), verdict.axis_name)
    return verdict._replace(squares=squares, norm=norm)


def _shown_norm(state: LossScaledState, norm: jax.Array | None, axis_name: Any) -> jax.Array | None:
    """Returns the norm that a state shows after a step that may have found a new one."""
    if norm is None or state.grad_norm is None:
        return state.grad_norm
    return agree_on_size(norm_bits(norm), axis_name)


def call_update(
    tx: optax.GradientTransformationExtraArgs,
    grads: optax.Updates,
    opt_state: Any,
    params: optax.Params | None,
    value: Any,
    extra_args: Mapping[str, Any],
) -> tuple[optax.Updates, Any]:
    """Calls `tx.update`, with the loss under each name that it takes: `value` or `loss`."""
    if value is not None:
        extra_args = _with_loss(tx, value, extra_args)
    try:
        return tx.update(grads, opt_state, params, **extra_args)
    except (TypeError, ValueError) as error:
        if not _MISSING_ARGUMENT.search(str(error)):
            raise
        message = (
            f"`tx.update` needs arguments that it was not given, and says: {error} A `train_step` "
            "gives it the loss, as `value`, and no more. If it needs more, write the loop: `loss, "
            "grads = jaxscale.value_and_grad(loss_fn, opt_state)(params, ...)`, and then "
            "`jaxscale.apply_gradients(tx, grads, opt_state, params, value=loss, ...)` with what "
            "is missing."
        )
        if isinstance(error, TypeError):
            raise TypeError(message) from error
        raise ValueError(message) from error


def _with_loss(
    tx: optax.GradientTransformationExtraArgs, value: Any, extra_args: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Adds the loss to arguments, but only where `tx.update` takes it: others would raise."""
    parameters = inspect.signature(tx.update).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    arguments = dict(extra_args)
    arguments.pop("loss", None)
    if "value" in parameters or takes_any:
        arguments["value"] = value
    if "loss" in parameters or ("loss" in extra_args and takes_any):
        arguments["loss"] = value
    return arguments


def wrapped_optimizer(tx: Any) -> WrappedOptimizer | None:
    """Returns the `WrappedOptimizer` behind a transformation, or `None` for any other."""
    # Its method is the `update` of the transformation, and of each copy of that named tuple.
    update = getattr(tx, "update", None)
    optimizer = getattr(update, "__self__", None)
    if not isinstance(optimizer, WrappedOptimizer):
        return None
    return optimizer
