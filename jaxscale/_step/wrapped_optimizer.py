"""One step of an optimizer under a loss scale: `update` and `apply` of a `WrappedOptimizer`.

1. *Verdict.* Are all gradients finite, and the loss too, if one was passed? This takes one pass
   over the gradients, or two with some options, and all devices agree on the answer. It covers the
   gradients rather than the updates, as clipping by value and sign-based optimizers hide an inf;
   with `check_updates` it also covers the updates and the new state of the optimizer. Gradients
   that the optimizer never reads do not count. A `SpikeRule` may reject a step that is finite.
2. *Window.* If gradients are accumulated, those of good micro-batches are added up. A step is due
   when the window is full; without a window, whenever the gradients are good.
3. *Skip.* If a step is due, the wrapped optimizer makes it. If not, its state and the parameters
   stay as they are: by a branch on a CPU, by a selection elsewhere and without `jit`.
4. *Scale.* The policy gets the verdict, and the largest gradient if it needs that, and moves the
   loss scale. After a bad loss or a spike the scale stays as it is, since it is not to blame.
5. *Counters.* The state counts what happened, and `on_skip` is called if the step was skipped.

With `skip_nonfinite=False` there is no verdict, no window and nothing to count: each step is that
of the wrapped optimizer, after clipping to `max_norm`.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from .._gradients.reduction import nans_are_errors
from .._gradients.scaled import Scaled
from .._gradients.verdict import (
    Questions,
    Verdict,
    agree_on_loss,
    flags_by_leaf,
    judge_gradients,
    last_flags,
    shown_norm,
)
from .._policies.base import CheckedLossScale, LossScale, adjust_scale
from .._policies.fixed import FixedLossScale, NoOpLossScale
from .._policies.spikes import SpikeRule
from .._state.optimizer import LossScaledState
from .._storage.weights import Rounded, Weights
from .._trees.casts import cast_like, widen
from .._trees.gradient_leaves import map_gradients
from .._trees.overwrites import holds_overwrites, without_overwrites
from .._trees.selection import tree_where
from .._trees.store_once import store_once
from . import checks, matching
from .call_update import NO_ARGS
from .counters import count_step, move_skip_rate, start_state
from .inner_step import InnerStep, add_norm, make_or_skip, show_norm
from .matching import StepTrees, TreeTypes, explaining_mismatch
from .memory import Memory
from .report import report_skip
from .retry import BackwardResult
from .window import EachStep, Window


@dataclasses.dataclass(frozen=True)
class WrappedOptimizer:
    """An optimizer whose bad steps are skipped: what `loss_scaled` makes of its arguments.

    Its methods `init` and `update` are those of the transformation that users get. The others are
    what a training step asks of an optimizer. A `BareOptimizer` (in `optimizer.py`), which stands
    for an optimizer that `loss_scaled` has not wrapped, has them as well. Some take a `call`, the
    name of the function that the user called: only a `BareOptimizer` uses it, in its messages.

    Attributes:
      inner: the optimizer inside.
      policy: how the loss scale moves.
      axis_name: the axes whose devices agree on each verdict, or `None`.
      window: how micro-batches are accumulated; `EachStep` if they are not.
      max_norm: the global norm to clip gradients to, or `None`.
      skips: whether bad steps are skipped. If not, each step is that of `inner`, after clipping.
      check_updates: whether the verdict also covers the updates and the optimizer's new state.
      track_leaves: whether the state says which leaves the last overflow was in.
      spikes: the rule that skips finite steps, or `None`.
      on_skip: the function that is called on the host after each skipped step, or `None`.
      weights: how half-precision parameters are kept.
      memory: what is known from earlier calls.
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
    weights: Weights = dataclasses.field(default_factory=Rounded)
    memory: Memory = dataclasses.field(
        default_factory=Memory, init=False, compare=False
    )

    def init(self, params: optax.Params) -> LossScaledState:
        # `update` passes the parameters to the inner optimizer in float32 or wider, so its moments
        # must be as wide from the start.
        wide_params = map_gradients(widen, params)
        # What is under a key `_overwrite_with_gradient` is replaced by a step, not optimized.
        with checks.explaining_functions(params):
            inner_state = self.inner.init(without_overwrites(wide_params))
        checks.check_not_nested(inner_state)
        # Leaves that an optimizer makes from Python numbers are weakly typed. After a step they
        # would not be, so the second step would compile anew. A cast to its own dtype makes a leaf
        # strongly typed.
        inner_state = cast_like(inner_state, inner_state)
        window_state = self.window.open(wide_params, inner_state)
        if self.memory.is_new:  # once, however often states are made
            self.weights.warn_of_losses(params, inner_state)
        self.memory.keep_types(params, window_state)

        state = start_state(self.policy.init(), window_state)
        if self.spikes is not None:
            state = state._replace(spikes=self.spikes.init())
        if self.track_leaves:
            # One flag for the gradient of each parameter. None is set, as nothing overflowed yet.
            state = state._replace(nonfinite_leaves=flags_by_leaf(wide_params))
        if self.max_norm is not None or self.spikes is not None:
            state = state._replace(grad_norm=jnp.array(0, jnp.float32))
        return state._replace(weights=self.weights.init(without_overwrites(params)))

    def update(
        self,
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None = None,
        *,
        value: Any = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, LossScaledState]:
        call = "loss_scaled(...).update"
        order = "(grads, opt_state, params)"
        state = self.check_state(f"{call}(state=...)", state, order)
        loss = value
        if loss is None:  # some trainers pass it under this name
            loss = extra_args.get("loss")
        # A `Scaled` without a divisor: these gradients are unscaled already.
        result = BackwardResult(loss=loss, state=None, aux=None, grads=Scaled(updates))
        trees = StepTrees(
            grads_argument=f"{call}(updates=...)",
            grads=updates,
            params=params,
            state_argument=f"{call}(state=...)",
            opt_state=state,
        )
        with explaining_mismatch(trees, self):
            return self.apply(result, state, params, extra_args, returns_params=False)

    @property
    def can_back_off(self) -> bool:
        """Whether the scale ever moves, so that a retry may help."""
        return not isinstance(self.policy, NoOpLossScale | FixedLossScale)

    def expected_types(self, params: optax.Params) -> TreeTypes:
        """Returns the types of the `inner_state` that `init` makes for these parameters."""
        return self.memory.expected_types(params, self.init)

    def check_state(self, argument: str, state: Any, order: str) -> LossScaledState:
        """Checks that an argument is the state of a step, and returns it as arrays.

        A scale that this policy never has, as another may leave it, is replaced: that of a fixed
        policy by its number, and one above the maximum by the maximum. `order` is the order of the
        call's arguments, for the error message.
        """
        state = checks.check_state(argument, state, self.policy, order)
        self.weights.check(argument, state.weights)
        matching.check_has_parts(argument, state, self)
        if isinstance(self.policy, FixedLossScale):
            return state._replace(scaling=self.policy.hold(state.scaling))
        # Without skips the scale never moves, and a policy of the user's own may have no maximum.
        if not self.skips or not isinstance(self.policy, CheckedLossScale):
            return state
        return state._replace(scaling=checks.cap_scale(self.policy, state.scaling))

    def find_start_scale(self, call: str, state: LossScaledState) -> Any:
        """Returns the scale state that a backward pass starts with."""
        # A loop carries only JAX's arrays, and a restored state may hold NumPy's.
        return jax.tree.map(jnp.asarray, state.scaling)

    def find_verdict_state(
        self, call: str, state: LossScaledState
    ) -> LossScaledState | None:
        """Returns the state that says whether the step was applied; `None` if each one is."""
        if not self.skips:
            return None
        return state

    def leave_out_unread(
        self,
        result: BackwardResult,
        state: LossScaledState,
        params: optax.Params | None,
        extra_args: Mapping[str, Any] = NO_ARGS,
    ) -> BackwardResult:
        """Returns a backward pass with zeros for the gradients that the optimizer never reads."""
        opt_state = self.window.find_opt_state(state.inner_state)
        return self.memory.leave_out_unread(
            self.inner, opt_state, result, params, extra_args
        )

    def judge_pass(
        self, result: BackwardResult, state: LossScaledState, axis_name: Any = None
    ) -> Verdict | None:
        """Judges a backward pass: returns the verdict, or `None` if no step is ever skipped.

        The devices along `axis_name` agree on it, by default those along the wrapper's own.
        """
        checks.check_loss(result.loss)
        if not self.skips:
            return None
        if axis_name is None:
            axis_name = self.axis_name
        checks.check_devices_agree(result.grads.divided, result.loss, axis_name)
        verdict = judge_gradients(
            result.grads,
            result.loss,
            axis_name,
            before_hook=result.grads_before_hook,
            questions=self._find_questions(state),
        )
        if self._needs_norm and verdict.norm is None:
            return add_norm(verdict, result.grads)
        return verdict

    def apply(
        self,
        result: BackwardResult,
        state: LossScaledState,
        params: optax.Params | None,
        extra_args: Mapping[str, Any] = NO_ARGS,
        *,
        returns_params: bool = True,
    ) -> tuple[Any, LossScaledState]:
        """Applies a backward pass: returns the new parameters, or only the updates, and the state.

        The caller has checked the state.
        """
        if params is None and holds_overwrites(result.grads.grads):
            raise ValueError(
                "`loss_scaled(...).update(params=...)` must be the parameters, got None: a step "
                "replaces those whose gradients are under a key `_overwrite_with_gradient`."
            )

        if params is not None and matching.are_half(params):
            expected = self.expected_types(params)
            matching.check_not_narrower(state.inner_state, expected)
        inner_step = InnerStep(
            tx=self.inner,
            params=params,
            extra_args=extra_args,
            returns_params=returns_params,
            max_norm=self.max_norm,
            axis_name=self.axis_name,
            may_be_skipped=self.skips,
            weights=self.weights,
            weights_state=state.weights,
        )

        # 1. Verdict.
        verdict = result.verdict
        if verdict is None:
            result = self.leave_out_unread(result, state, params, extra_args)
            if self.skips:
                stored = store_once(result.grads.grads)
                result = result._replace(grads=Scaled(stored, result.grads.divisor))
            verdict = self.judge_pass(result, state)
        if verdict is None:
            return self._apply_unjudged(inner_step, result, state)
        # A training step may have added axes along which its passes exchange numbers.
        inner_step = dataclasses.replace(inner_step, axis_name=verdict.axis_name)
        grads = result.grads
        is_good = verdict.grads_finite & verdict.loss_finite
        is_spike = None
        spikes = state.spikes
        if self.spikes is not None:
            norm: Any = verdict.norm  # known, as the rule needs it
            is_spike, spikes = self.spikes.judge(
                spikes, verdict.loss, shown_norm(norm), is_good
            )
            is_good &= ~is_spike

        # 2. Window. `inner_state` is its state, with the optimizer's inside; `EachStep` adds none.
        window_state, ready = self.window.add(
            state.inner_state, grads, verdict.loss, is_good
        )

        # 3. Skip.
        step = make_or_skip(
            inner_step,
            ready,
            verdict,
            grads,
            last_norm=state.grad_norm,
            averages=self.window.averages,
            check_updates=self.check_updates,
        )
        grads_finite = verdict.grads_finite
        stepped = ready.due
        if step.updates_finite is not None:
            stepped &= step.updates_finite

        # 4. Scale.
        scaling_before = state.scaling
        if result.retries is not None:
            # Retries may have lowered the scale since this step began.
            scaling_before = result.retries.scaling
        moved = adjust_scale(self.policy, scaling_before, grads_finite, verdict.largest)
        # The scale does not move after a bad loss. With a window, `growth_unit` also has a say.
        may_move = self.window.lets_scale_move(verdict, grads_finite, stepped)
        # Nor does it say anything of the scale what an optimizer makes of finite gradients.
        if step.updates_finite is not None:
            may_move &= step.updates_finite
        if is_spike is not None:
            may_move &= ~is_spike  # a spike says nothing about the scale
        scaling = tree_where(may_move, moved, scaling_before)

        # 5. Counters. From here on, `grads_finite` covers the updates as well, if they are checked.
        if step.updates_finite is not None:
            grads_finite &= step.updates_finite
        next_state = count_step(
            state, verdict, grads_finite, is_spike, scaling, result.retries
        )
        applied = next_state.step_applied
        # The share of lost steps, without those that were lost to take a growth of the scale back.
        skip_rate = move_skip_rate(
            state,
            self.policy,
            before=scaling_before,
            after=scaling,
            num_lost=self.window.count_lost(window_state, applied, stepped),
            step_share=self.window.find_step_share(window_state),
            has_retries=result.retries is not None,
        )
        nonfinite_leaves = state.nonfinite_leaves
        if nonfinite_leaves is not None:
            flags = flags_by_leaf(grads.divided, verdict.leaves_finite)
            nonfinite_leaves = last_flags(nonfinite_leaves, flags, grads_finite)
        next_state = next_state._replace(
            scaling=scaling,
            inner_state=self.window.close(window_state, step.opt_state, stepped),
            skip_rate=skip_rate,
            spikes=spikes,
            nonfinite_leaves=nonfinite_leaves,
            grad_norm=step.grad_norm,
            weights=step.weights,
        )
        if self.on_skip is not None:
            report_skip(self.on_skip, next_state)
        return step.outcome, next_state

    def _apply_unjudged(
        self, inner_step: InnerStep, result: BackwardResult, state: LossScaledState
    ) -> tuple[Any, LossScaledState]:
        """Makes a step of the optimizer inside, whatever the gradients are."""
        if self.max_norm is not None:
            checks.check_devices_agree(result.grads.divided, None, self.axis_name)
        # There is no window, as that needs a verdict: `inner_state` is the optimizer's own.
        loss = agree_on_loss(result.loss, self.axis_name)
        outcome, update, weights_state = inner_step.make(
            result.grads.divided, state.inner_state, norm=None, value=loss
        )
        grad_norm = show_norm(state.grad_norm, update.norm)
        next_state = state._replace(
            inner_state=update.opt_state, grad_norm=grad_norm, weights=weights_state
        )
        return outcome, next_state

    def _find_questions(self, state: LossScaledState) -> Questions:
        """Returns what the verdict on a backward pass has to answer."""
        return Questions(
            # The state decides this, and not `track_leaves`, as it keeps its structure.
            by_leaf=state.nonfinite_leaves is not None,
            largest=self.policy.needs_largest,
            # If JAX raises an error at each NaN, the norm waits for the verdict: see `add_norm`.
            norm=self._needs_norm and not nans_are_errors(),
        )

    @property
    def _needs_norm(self) -> bool:
        """Returns whether a step needs the norm of its own gradients."""
        if self.spikes is not None:
            return True
        # With a window, the optimizer clips the mean of several micro-batches, so the norm of one
        # of them is of no use to it.
        return self.max_norm is not None and not self.window.averages


def find_wrapped_optimizer(tx: Any) -> WrappedOptimizer | None:
    """Returns the `WrappedOptimizer` behind a transformation, or `None` if there is none."""
    # A transformation is a named tuple. That of `loss_scaled` holds the bound method
    # `WrappedOptimizer.update`, and so does each copy of it.
    update = getattr(tx, "update", None)
    optimizer = getattr(update, "__self__", None)
    if not isinstance(optimizer, WrappedOptimizer):
        return None
    return optimizer
