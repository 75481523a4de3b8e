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
   loss scale. After a bad loss or a spike the scale stays, as it is not to blame.
5. *Counters.* The state counts what happened, and `on_skip` is called if the step was skipped.

With `skip_nonfinite=False` none of this happens: the step is that of the wrapped optimizer.
"""

import dataclasses
from collections.abc import Callable, Mapping
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
    flags_by_leaf,
    judge_gradients,
    last_flags,
    norm_bits,
)
from .._policies.base import CheckedLossScale, LossScale, adjust_scale
from .._policies.fixed import FixedLossScale, NoOpLossScale
from .._policies.spikes import SpikeRule
from .._state.optimizer import LossScaledState
from .._trees.casts import cast_like, widen
from .._trees.gradient_leaves import map_gradients
from .._trees.overwrites import holds_overwrites, without_overwrites
from .._trees.selection import tree_where
from .call_update import NO_ARGS
from .checks import check_devices_agree, check_loss, check_not_nested, check_state
from .counters import count_step, move_skip_rate, start_state
from .inner_step import InnerStep, make_or_skip, show_norm
from .matching import StepTrees, TreeTypes, explaining_mismatch, types_of
from .report import report_skip
from .retry import BackwardResult
from .window import EachStep, Window


class _InitTypes(NamedTuple):
    """The types of what an `init` was called with, and of the state that it made."""

    params: TreeTypes
    inner_state: TreeTypes


@dataclasses.dataclass(frozen=True)
class WrappedOptimizer:
    """An optimizer whose bad steps are skipped: what `loss_scaled` makes of its arguments.

    Its methods `init` and `update` are those of the transformation that users get. The others are
    what a training step asks of an optimizer. A `BareOptimizer` has them as well. Some take a
    `call`, the name of the function that the user called: only a `BareOptimizer` uses it, in its
    errors.

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
      last_init: a cache for `expected_types`: the types of the last `init`, under the key `"types"`
        of a dict, as the class is frozen. To trace `init` again in each step would take a fifth as
        long as to trace plain Optax.
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
        # `update` passes the parameters in float32, so moments must be float32 from the start.
        wide_params = map_gradients(widen, params)
        # What is under a key `_overwrite_with_gradient` is replaced by a step, not optimized.
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
        call = "loss_scaled(...).update"
        order = "(grads, opt_state, params)"
        state = self.check_state(f"{call}(state=...)", state, order)
        loss = value
        if loss is None:  # some trainers pass it under this name
            loss = extra_args.get("loss")
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
        types = self.last_init.get("types")
        if types is not None and types.params == types_of(params):
            return types.inner_state
        state = jax.eval_shape(self.init, params)
        return types_of(state.inner_state)

    def check_state(self, argument: str, state: Any, order: str) -> LossScaledState:
        """Returns the state of a step, as arrays, or raises an error if it is not one.

        Its scale may come from another policy: then it is lowered to the highest of this one.
        `order` is that of the arguments of the call, for the error.
        """
        state = check_state(argument, state, self.policy, order)
        if not self.skips or not isinstance(self.policy, CheckedLossScale):
            return state
        return state._replace(scaling=_cap_scale(self.policy, state.scaling))

    def find_start_scale(self, call: str, state: LossScaledState) -> Any:
        """Returns the scale state that a backward pass starts with."""
        # A loop carries only JAX's arrays, and a restored state may hold NumPy's.
        return jax.tree.map(jnp.asarray, state.scaling)

    def find_verdict_state(
        self, call: str, state: LossScaledState
    ) -> LossScaledState | None:
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
        judges_spikes = self._find_spike_rule(state) is not None
        # The optimizer clips the mean of a window, so the norm of a micro-batch is of no use to it.
        clips_these = self.max_norm is not None and not self.window.averages
        needs_squares = judges_spikes or clips_these
        # The state decides what it shows, not `track_leaves` and `max_norm`: its structure must
        # not change.
        shows_leaves = state.nonfinite_leaves is not None
        shows_norm = state.grad_norm is not None
        questions = Questions(
            by_leaf=shows_leaves,
            largest=self.policy.needs_largest,
            # If JAX raises an error at each NaN, the squares have to wait for the verdict.
            squares=needs_squares and not nans_are_errors(),
            # The norm comes from the squares: without them this asks for nothing.
            agreed_norm=judges_spikes or shows_norm,
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
        returns_params: bool = True,
    ) -> tuple[Any, LossScaledState]:
        """Applies a backward pass: returns the new parameters, or only the updates, and the state.

        The state was checked, and each parameter has a gradient.
        """
        grads = result.grads
        if params is None and holds_overwrites(grads.grads):
            raise ValueError(
                "`loss_scaled(...).update(params=...)` must be the parameters if there is anything "
                "under a key `_overwrite_with_gradient`, which a step replaces, got None."
            )

        inner_step = InnerStep(
            tx=self.inner,
            params=params,
            extra_args=extra_args,
            returns_params=returns_params,
            max_norm=self.max_norm,
            may_be_skipped=self.skips,
        )

        # 1. Verdict.
        verdict = result.verdict
        if verdict is None:
            verdict = self.judge_pass(result, state)
        if verdict is None:
            return self._apply_unjudged(inner_step, result, state)
        is_good = verdict.grads_finite & verdict.loss_finite
        is_spike = None
        spikes = state.spikes
        spike_rule = self._find_spike_rule(state)
        if spike_rule is not None:
            is_spike, spikes = spike_rule.judge(
                spikes, verdict.loss, verdict.norm, is_good
            )
            is_good &= ~is_spike

        # 2. Window.
        window_state, ready = self.window.add(
            state.inner_state, grads, result.loss, is_good
        )

        # 3. Skip.
        step = make_or_skip(
            inner_step,
            ready,
            verdict,
            grads,
            state.grad_norm,
            averages=self.window.averages,
            check_updates=self.check_updates,
        )
        stepped = ready.due
        # From here on this covers the updates as well, if they are checked.
        grads_finite = verdict.grads_finite
        if step.updates_finite is not None:
            stepped &= step.updates_finite
            grads_finite &= step.updates_finite

        # 4. Scale.
        old_scaling = state.scaling
        if result.retries is not None:
            old_scaling = result.retries.scaling
        moved = adjust_scale(self.policy, old_scaling, grads_finite, verdict.largest)
        # Not after a bad loss. Within a window, `growth_unit` decides as well.
        may_move = self.window.lets_scale_move(verdict, grads_finite, stepped)
        if is_spike is not None:
            may_move &= ~is_spike  # a spike says nothing about the scale
        scaling = tree_where(may_move, moved, old_scaling)

        # 5. Counters.
        next_state = count_step(
            state, verdict, grads_finite, is_spike, scaling, result.retries
        )
        applied = next_state.step_applied
        # How often steps are lost, less what growths of the scale explain.
        skip_rate = move_skip_rate(
            state.skip_rate,
            self.policy,
            before=old_scaling,
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
        )
        if self.on_skip is not None:
            report_skip(self.on_skip, next_state)
        return step.outcome, next_state

    def _apply_unjudged(
        self, inner_step: InnerStep, result: BackwardResult, state: LossScaledState
    ) -> tuple[Any, LossScaledState]:
        """Makes a step of the optimizer inside, whatever the gradients are."""
        outcome, update = inner_step.make(
            result.grads.divided, state.inner_state, norm=None, value=result.loss
        )
        grad_norm = show_norm(state.grad_norm, update.norm, self.axis_name)
        next_state = state._replace(inner_state=update.opt_state, grad_norm=grad_norm)
        return outcome, next_state

    def _find_spike_rule(self, state: LossScaledState) -> SpikeRule | None:
        # A state without `spikes` comes from a run without the rule. Its structure must not
        # change, so no step of it is judged.
        if state.spikes is None:
            return None
        return self.spikes


def _cap_scale(policy: CheckedLossScale, scaling: Any) -> Any:
    """Lowers the scale in a scale state to the highest that a policy ever has."""
    max_scale = getattr(policy, "max_scale", float(jnp.finfo(jnp.float32).max))
    # Some presets may start above their maximum, as their libraries do.
    highest = jnp.float32(max(max_scale, policy.init_scale))
    scale = jnp.asarray(scaling.loss_scale)
    # A scale of NaN stays, for the policy to replace.
    capped = jnp.where(scale > highest, highest, scale)
    return scaling._replace(loss_scale=capped)


def _add_squares(verdict: Verdict, grads: Scaled) -> Verdict:
    """Adds the sum of all squares to a verdict, inf if the gradients are not finite."""
    # If JAX raises an error at each NaN, the first pass must not square one. So squares are taken
    # now, of zeros if the gradients are bad.
    zeros = map_gradients(jnp.zeros_like, grads.divided)
    finite = tree_where(verdict.grads_finite, grads.divided, zeros)
    squares = reduce_gradients(finite, squares=True).squares()
    squares = jnp.where(verdict.grads_finite, squares, jnp.inf)
    # As bits: what a maximum of floats over devices makes of a NaN is not defined.
    norm = agree_on_size(norm_bits(jnp.sqrt(squares)), verdict.axis_name)
    return verdict._replace(squares=squares, norm=norm)


def find_wrapped_optimizer(tx: Any) -> WrappedOptimizer | None:
    """Returns the `WrappedOptimizer` behind a transformation, or `None` for any other."""
    # Its method is the `update` of the transformation, and of each copy of that named tuple.
    update = getattr(tx, "update", None)
    optimizer = getattr(update, "__self__", None)
    if not isinstance(optimizer, WrappedOptimizer):
        return None
    return optimizer
