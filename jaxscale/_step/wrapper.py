"""One step of an optimizer under a loss scale: `update` and `apply` of a `Wrapper`.

1. *Verdict.* Are all gradients finite, and the loss, if it was passed? It takes one pass, and all
   devices agree on it. It covers the gradients rather than the updates, as clipping by value and
   sign-based optimizers hide an inf; with `check_updates` it covers the updates, too.
2. *Window.* If gradients are accumulated, those of good micro-batches are added up. A step is due
   when the window is full; without a window, whenever the verdict is good.
3. *Skip.* If a step is due, the wrapped optimizer makes it. If not, its state and the parameters
   stay as they are: by a branch on a CPU, by a selection on other machines.
4. *Scale.* The policy gets the verdict, and the largest gradient if it needs that, and moves the
   loss scale, unless the loss is to blame.
5. *Counters.* The state counts what happened.

With `skip_nonfinite=False` none of this happens: the step is that of the wrapped optimizer.
"""

import dataclasses
import inspect
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import optax

from .._gradients.reduction import nans_are_errors, read
from .._gradients.scaled import Scaled
from .._gradients.verdict import (
    Verdict,
    agree_on_size,
    all_finite,
    clip_by_global_norm,
    flags_by_leaf,
    global_norm,
    judge,
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
    check_grads,
    check_loss,
    check_not_nested,
    check_outcome,
    check_state,
    check_state_kept,
    explaining_trees,
    types_of,
)
from .counters import count_step, move_skip_rate, zero_counters
from .report import report_skip
from .retry import BackwardResult
from .skip import no_updates, step_if
from .window import EachStep, Ready, Window

NO_ARGS: Mapping[str, Any] = MappingProxyType({})


@dataclasses.dataclass(frozen=True)
class Wrapper:
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
    # The types that the last `init` was given and made: to trace it in each step again would take a
    # fifth as long as tracing plain Optax.
    last_init: dict[str, Any] = dataclasses.field(default_factory=dict, init=False, compare=False)

    def init(self, params: Any) -> LossScaledState:
        # `update` passes the parameters in float32, too, so moments keep their dtype.
        given, params = params, map_gradients(widen, params)
        inner_state = self.inner.init(without_overwrites(params))
        check_not_nested(inner_state)
        # Leaves that an optimizer makes from Python numbers are weakly typed, and after a step
        # they would not be: the second step would compile anew.
        inner_state = cast_like(inner_state, inner_state)
        inner_state = self.window.open(params, inner_state)
        self.last_init["types"] = types_of(given), types_of(inner_state)
        return LossScaledState(
            scaling=self.policy.init(),
            inner_state=inner_state,
            **zero_counters(),
            spikes=None if self.spikes is None else self.spikes.init(),
            nonfinite_leaves=flags_by_leaf(params) if self.track_leaves else None,
            grad_norm=jnp.array(0, jnp.float32) if self.max_norm or self.spikes else None,
        )

    def update(
        self, updates: Any, state: Any, params: Any = None, *, value: Any = None, **extra_args: Any
    ) -> tuple[Any, LossScaledState]:
        order = "(grads, opt_state, params)"
        state = self.check_state("loss_scaled(...).update(state=...)", state, order)
        given = "loss_scaled(...).update(updates=...)"
        if params is not None:
            check_grads(given, updates, params)
        value = extra_args.get("loss") if value is None else value
        made = BackwardResult(value, None, None, Scaled(updates))
        state_given = "loss_scaled(...).update(state=...)"
        with explaining_trees(given, state_given, self, updates, state, params):
            return self.apply(made, state, params, extra_args, adds=False)

    @property
    def can_back_off(self) -> bool:
        """Whether the scale ever moves, so that a retry may help."""
        return not isinstance(self.policy, NoOpLossScale | FixedLossScale)

    def expected_types(self, params: Any) -> Any:
        """Returns `types_of` what `init` makes of some parameters, but for counters and scale."""
        given, expected = self.last_init.get("types", (None, None))
        if given == types_of(params):
            return expected
        return types_of(jax.eval_shape(self.init, params).inner_state)

    def check_state(self, given: str, state: Any, order: str) -> LossScaledState:
        """Returns the state that a step was given, as arrays, or raises an error.

        Its scale may be that of another policy, and is then at most what this one ever has.
        """
        state = check_state(given, state, self.policy, order)
        if not (self.skips and isinstance(self.policy, CheckedLossScale)):
            return state
        highest = getattr(self.policy, "max_scale", float(jnp.finfo(jnp.float32).max))
        highest = jnp.float32(max(highest, self.policy.init_scale))
        scale = jnp.asarray(state.scaling.loss_scale)
        # A scale of NaN stays, for the policy to replace.
        scaling = state.scaling._replace(loss_scale=jnp.where(scale > highest, highest, scale))
        return state._replace(scaling=scaling)

    def scale_state(self, call: str, state: LossScaledState) -> Any:
        """Returns the scale state that a backward pass starts with."""
        return jax.tree.map(jnp.asarray, state.scaling)  # NumPy's, too, may go round a loop

    def find_verdict(self, call: str, state: LossScaledState) -> LossScaledState | None:
        """Returns the state that tells whether a step was applied, `None` if every step is."""
        return state if self.skips else None

    def judge(
        self, made: BackwardResult, state: LossScaledState, axis_name: Any = None
    ) -> Verdict | None:
        """Returns the verdict on a pass, if its step may be skipped, agreed on along the axes."""
        check_loss(made.loss)
        if not self.skips:
            return None
        axis_name = self.axis_name if axis_name is None else axis_name
        check_devices_agree(made.grads.divided, made.loss, axis_name)
        spikes = self.spikes is not None and state.spikes is not None
        # The norm of a micro-batch is of no use to a step that is made from a mean.
        wants_squares = spikes or (self.max_norm is not None and not self.window.averages)
        verdict = judge(
            made.grads,
            made.loss,
            axis_name,
            seen=made.seen,
            # The state decides, not `track_leaves`: its structure must not change.
            by_leaf=state.nonfinite_leaves is not None,
            wants_largest=self.policy.needs_largest,
            wants_squares=wants_squares and not nans_are_errors(),
            agrees_on_norm=spikes or state.grad_norm is not None,
            agrees_on_loss=spikes,
        )
        return _with_squares(verdict, made.grads) if wants_squares else verdict

    def apply(
        self,
        made: BackwardResult,
        state: LossScaledState,
        params: Any,
        extra_args: Mapping[str, Any] = NO_ARGS,
        *,
        adds: bool = True,
    ) -> tuple[Any, LossScaledState]:
        """Returns the parameters after one step, or only the updates, and the next state.

        The state was checked, and each parameter has a gradient. The updates are added if `adds`.
        """
        grads, retries = made.grads, made.retries
        overwrites = holds_overwrites(grads.grads)
        if overwrites and params is None:
            raise ValueError(
                "`loss_scaled(...).update(params=...)` must be the parameters if there is anything "
                "under a key `_overwrite_with_gradient`, which a step replaces, got None."
            )

        def make(grads: Any, norm: Any, value: Any, opt_state: Any) -> tuple[Any, Any, Any, Any]:
            """Returns the outcome of a step, the next state, the updates, and the norm if known."""
            seen, trained = grads, params
            if overwrites:
                seen, trained = map(without_overwrites, (grads, params))
            updates, opt_state, norm = self._update_inner(
                seen, trained, norm, value, opt_state, extra_args
            )
            if trained is not None:
                check_outcome(updates, trained)
            outcome = (apply_updates if adds else cast_updates)(trained, updates)
            if overwrites:
                outcome = (overwrite if adds else overwriting_updates)(outcome, grads, params)
            return outcome, opt_state, updates, norm

        def unchanged(like: Any) -> Any:
            return params if adds else no_updates(like, grads.divided)

        verdict = made.verdict or self.judge(made, state)
        if verdict is None:
            outcome, opt_state, _, norm = make(grads.divided, None, made.loss, state.inner_state)
            norm = _shown(state, norm, self.axis_name)
            return outcome, state._replace(inner_state=opt_state, grad_norm=norm)

        # A step may be finite and bad.
        good, is_spike, spikes = verdict.grads_finite & verdict.loss_finite, None, state.spikes
        if self.spikes is not None and spikes is not None:
            is_spike, spikes = self.spikes.judge(spikes, verdict.loss, verdict.norm, good)
            good &= ~is_spike

        window, ready = self.window.add(state.inner_state, grads, made.loss, good)
        outcome, opt_state, updates_finite, norm = self._make_or_skip(
            ready, verdict, state, make, unchanged
        )
        stepped, grads_finite = ready.due, verdict.grads_finite
        if updates_finite is not None:
            stepped, grads_finite = (each & updates_finite for each in (stepped, grads_finite))

        start = state.scaling if retries is None else retries.scaling
        moved = adjust_scale(self.policy, start, grads_finite, verdict.largest)
        moves = self.window.lets_scale_move(verdict, grads_finite, stepped)
        if is_spike is not None:
            moves &= ~is_spike
        scaling = tree_where(moves, moved, start)

        counted = count_step(state, verdict, grads_finite, is_spike, scaling, retries)
        skip_rate = move_skip_rate(
            state.skip_rate,
            self.policy,
            before=start,
            after=scaling,
            lost=self.window.count_lost(window, counted.step_applied, stepped),
            part=self.window.find_part(window),
            retries=retries is not None,
        )
        flags = state.nonfinite_leaves
        if flags is not None:
            new = flags_by_leaf(grads.divided, verdict.leaves_finite)
            flags = last_flags(flags, new, grads_finite)
        next_state = counted._replace(
            scaling=scaling,
            inner_state=self.window.close(window, opt_state, stepped),
            skip_rate=skip_rate,
            spikes=spikes,
            nonfinite_leaves=flags,
            grad_norm=norm,
        )
        if self.on_skip is not None:
            report_skip(self.on_skip, next_state)
        return outcome, next_state

    def _update_inner(
        self,
        grads: Any,
        params: Any,
        norm: Any,
        value: Any,
        opt_state: Any,
        extra_args: Mapping[str, Any],
    ) -> tuple[Any, Any, Any]:
        """Returns the updates of the wrapped optimizer, its next state, and the norm if known."""
        grads = map_gradients(widen, grads)
        if self.max_norm is not None:
            norm = global_norm(grads) if norm is None else norm
            grads = clip_by_global_norm(grads, norm, self.max_norm)
        params = map_gradients(widen, params)
        updates, new_state = call_update(self.inner, grads, opt_state, params, value, extra_args)
        if self.skips:
            check_state_kept(new_state, opt_state)
        elif jax.tree.structure(new_state) != jax.tree.structure(opt_state):
            return updates, new_state, norm
        return updates, cast_like(new_state, opt_state), norm

    def _make_or_skip(
        self,
        ready: Ready,
        verdict: Verdict,
        state: LossScaledState,
        make: Callable[[Any, Any, Any, Any], tuple[Any, Any, Any, Any]],
        unchanged: Callable[[Any], Any],
    ) -> tuple[Any, Any, Any, Any]:
        """Returns what `make` does if a step is due, and otherwise what was.

        That is the outcome, the state of the optimizer, whether the updates are finite if they are
        checked, and the norm that the state shows. `unchanged` gives the outcome of a skipped step,
        from one that was made, or from its shapes.
        """
        norm, shown, squares = None, state.grad_norm, verdict.squares
        of_mean = self.max_norm is not None and self.window.averages
        if self.max_norm is not None and squares is not None and not of_mean:
            norm = jnp.sqrt(squares)
        if shown is not None and verdict.norm is not None and not of_mean:
            shown = verdict.norm
        finds = of_mean and shown is not None  # only a step finds the norm of a mean

        def step(operand: Any) -> tuple[Any, ...]:
            stored, norm = operand
            grads = ready.gradients_of(stored)
            outcome, opt_state, updates, norm = make(grads, norm, ready.value, ready.opt_state)
            norm = _shown(state, norm, verdict.axis_name) if finds else None
            if not self.check_updates:
                return outcome, opt_state, None, norm
            finite = all_finite(updates, axis_name=verdict.axis_name)
            kept = unchanged(outcome), ready.opt_state
            return *tree_where(finite, (outcome, opt_state), kept), finite, norm

        def skipped(like: Any) -> tuple[Any, ...]:
            # Constants, with the type that the others have on a mesh, which a constant has not.
            norm = None if shown is None or not finds else jax.lax.select(ready.due, shown, shown)
            finite = ready.due | ~ready.due if self.check_updates else None
            return unchanged(like[0]), ready.opt_state, finite, norm

        *made, found = step_if(ready.due, step, (ready.stored, norm), skipped)
        return *made, found if finds else shown


def _with_squares(verdict: Verdict, grads: Scaled) -> Verdict:
    """Returns a verdict with the sum of all squares, inf if the gradients are not finite."""
    if verdict.squares is not None:
        return verdict
    # JAX raises an error at a NaN, so that the pass which found them could not square them.
    zeros = map_gradients(jnp.zeros_like, grads.divided)
    finite = tree_where(verdict.grads_finite, grads.divided, zeros)
    squares = jnp.where(verdict.grads_finite, read(finite, squares=True).squares(), jnp.inf)
    norm = agree_on_size(norm_bits(jnp.sqrt(squares)), verdict.axis_name)
    return verdict._replace(squares=squares, norm=norm)


def _shown(state: LossScaledState, norm: Any, axis_name: Any) -> Any:
    """Returns a norm that the step found, if any, as the state shows it, if it does."""
    if norm is None or state.grad_norm is None:
        return state.grad_norm
    return agree_on_size(norm_bits(norm), axis_name)


def call_update(
    tx: optax.GradientTransformationExtraArgs,
    grads: Any,
    opt_state: Any,
    params: Any,
    value: Any,
    extra_args: Mapping[str, Any],
) -> tuple[Any, Any]:
    """Returns what `tx.update` does, given the loss by the names that it takes.

    A few take only arguments that they name, and would raise an error at `value`.
    """
    others = dict(extra_args)
    if value is not None:
        parameters = inspect.signature(tx.update).parameters
        takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
        others.pop("loss", None)
        if "value" in parameters or takes_any:
            others["value"] = value
        if "loss" in parameters or ("loss" in extra_args and takes_any):
            others["loss"] = value
    try:
        return tx.update(grads, opt_state, params, **others)
    except (TypeError, ValueError) as error:
        if not re.search(r"required keyword-only argument|must be provided", str(error)):
            raise
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(
            f"`tx.update` needs arguments that it was not given, and says: {error} A `train_step` "
            "gives it the loss, as `value`, and no more. If it needs more, write the loop: `loss, "
            "grads = jaxscale.value_and_grad(loss_fn, opt_state)(params, ...)`, and then "
            "`jaxscale.apply_gradients(tx, grads, opt_state, params, value=loss, ...)` with what "
            "is missing."
        ) from error


def wrapper_of(tx: Any) -> Wrapper | None:
    """Returns the `Wrapper` that made a transformation, or `None` for any other."""
    # Its method is the `update` of the transformation, and of each copy of that named tuple.
    made_by = getattr(getattr(tx, "update", None), "__self__", None)
    return made_by if isinstance(made_by, Wrapper) else None
