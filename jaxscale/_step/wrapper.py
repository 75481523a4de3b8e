"""One step of an optimizer under a loss scale.

`jaxscale.loss_scaled` and the other wrappers of an optimizer make a `Wrapper`, which holds their
arguments. Its `update` and `apply` make one step, in this order:

1. *Verdict.* It says whether all gradients are finite, and the loss, if it was passed. It takes
   one pass over the gradients, and all devices agree on it. It covers the gradients rather than
   the updates, as clipping by value and sign-based optimizers hide an inf; with `check_updates`
   it covers the updates, too.
2. *Window.* If gradients are accumulated over several micro-batches, those of good micro-batches
   are added up. A step is due when the window is full; without a window, whenever the verdict is
   good.
3. *Skip.* If a step is due, the wrapped optimizer makes it. If not, its state and the parameters
   stay as they are: by a branch on a CPU, by a selection on other machines.
4. *Scale.* The policy gets the verdict, and the largest gradient if it needs that, and moves the
   loss scale, unless the loss is to blame.
5. *Counters.* The state counts what happened, so that nothing has to wait for the host.

With `skip_nonfinite=False` none of this happens: the step is that of the wrapped optimizer.
"""

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._gradients.reduction import nans_are_errors
from .._gradients.scaled import Scaled
from .._gradients.verdict import (
    Verdict,
    agree_on_size,
    all_finite,
    flags_by_leaf,
    global_norm,
    judge,
    last_flags,
    norm_bits,
)
from .._policies.base import LossScale, adjust_scale
from .._policies.fixed import FixedLossScale, NoOpLossScale
from .._policies.spikes import SpikeRule
from .._state.optimizer import LossScaledState
from .._trees.overwrite import (
    holds_overwrites,
    overwrite,
    overwriting_updates,
    without_overwrites,
)
from .._trees.tree import (
    apply_updates,
    cast_like,
    cast_updates,
    map_gradients,
    tree_where,
    widen,
)
from .checks import (
    check_devices_agree,
    check_loss,
    check_not_nested,
    check_state,
)
from .counters import Retries, count_step, zero_counters
from .inner import update_inner
from .skip import no_updates, step_if
from .window import EachStep, Ready, Window

# Policies whose scale stays as it is.
NEVER_MOVE = (NoOpLossScale, FixedLossScale)


class _Made(NamedTuple):
    """What became of a step of the optimizer, made or skipped."""

    outcome: Any  # the updates, or the parameters
    opt_state: Any
    updates_finite: jax.Array | None  # bool[], with `check_updates`
    norm: Any  # f32[], what the state shows


@dataclasses.dataclass(frozen=True)
class Wrapper:
    """The arguments of a wrapper, and the functions of the optimizer that it returned."""

    inner: optax.GradientTransformationExtraArgs
    policy: LossScale
    axis_name: Any = None
    window: Window | EachStep = dataclasses.field(default_factory=EachStep)
    max_norm: float | None = None
    skips: bool = True
    check_updates: bool = False
    track_leaves: bool = False
    spikes: SpikeRule | None = None
    # The types that the last `init` was given and made. A step compares its own state with them, so
    # that `init` is not traced again: that took a fifth as long as tracing plain Optax.
    last_init: dict[str, Any] = dataclasses.field(default_factory=dict, init=False, compare=False)

    def init(self, params: Any) -> LossScaledState:
        # `update` passes the parameters in float32, so `init` does too, and moments keep their
        # dtype.
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
        self,
        updates: Any,
        state: Any,
        params: Any = None,
        *,
        value: Any = None,
        **extra_args: Any,
    ) -> tuple[Any, LossScaledState]:
        state = check_state("loss_scaled(...).update(state=...)", state, self.policy)
        value = extra_args.get("loss") if value is None else value
        grads = Scaled(updates)
        verdict = self.judge(grads, state, value)
        return self._step(grads, verdict, state, params, value, extra_args, applies=False)

    def apply(
        self,
        grads: Scaled,
        state: LossScaledState,
        params: Any,
        value: Any = None,
        extra_args: Mapping[str, Any] = MappingProxyType({}),
        verdict: Verdict | None = None,
        retries: Retries | None = None,
    ) -> tuple[Any, LossScaledState]:
        """Returns the parameters after one step, and the next state.

        Args:
          grads: the gradients, scaled or not.
          state: the state of this optimizer, checked.
          params: the parameters, each with its gradient.
          value: the loss, if it is known.
          extra_args: further arguments of the wrapped optimizer.
          verdict: what `judge` returned, if it was called already.
          retries: what came of repeating the backward pass, if it may be repeated.
        """
        verdict = self.judge(grads, state, value) if verdict is None else verdict
        return self._step(grads, verdict, state, params, value, extra_args, retries, applies=True)

    @property
    def can_back_off(self) -> bool:
        """Whether the scale ever moves, so that a retry may help."""
        return not isinstance(self.policy, NEVER_MOVE)

    def inner_state(self, state: LossScaledState) -> Any:
        """Returns the part of a state that belongs to the optimizer itself."""
        return state.inner_state

    def expected_types(self, params: Any) -> Any:
        """Returns the structure and the types of that part for some parameters."""
        given, expected = self.last_init.get("types", (None, None))
        if given == types_of(params):
            return expected
        return types_of(self.inner_state(jax.eval_shape(self.init, params)))

    def check_state(self, given: str, state: Any, order: str) -> LossScaledState:
        """Returns the state that a step was given, as arrays, or raises an error.

        Args:
          given: the step and its argument, for the message.
          state: what was passed.
          order: the order of the step's arguments, if they could be confused.
        """
        return check_state(given, state, self.policy, order)

    def scale_state(self, call: str, state: LossScaledState) -> Any:
        """Returns the scale state that a backward pass starts with."""
        del call
        return state.scaling

    def find_verdict(self, call: str, state: LossScaledState) -> LossScaledState | None:
        """Returns the state that tells whether a step was applied, `None` if all are."""
        del call
        return state if self.skips else None

    def judge(
        self,
        grads: Scaled,
        state: LossScaledState,
        value: Any,
        seen: Scaled | None = None,
        axis_name: Any = None,
    ) -> Verdict | None:
        """Returns the verdict on the gradients and the loss of one step, if it may be skipped.

        Args:
          grads: the gradients.
          state: the state of this optimizer, checked.
          value: the loss, if it is known.
          seen: the gradients before a hook changed them, if one did.
          axis_name: the axes along which devices agree, if not those of the optimizer alone.
        """
        check_loss(value)
        if not self.skips:
            return None
        axis_name = self.axis_name if axis_name is None else axis_name
        check_devices_agree(grads.divided, value, axis_name)
        spikes = self._judges_spikes(state)
        return judge(
            grads,
            value,
            axis_name,
            seen=seen,
            # The state decides, not `track_leaves`: its structure must not change.
            by_leaf=state.nonfinite_leaves is not None,
            wants_largest=self.policy.needs_largest,
            wants_squares=self._shares_norm or (spikes and not nans_are_errors()),
            agrees_on_norm=state.grad_norm is not None,
            agrees_on_loss=spikes,
        )

    def _step(
        self,
        grads: Scaled,
        verdict: Verdict | None,
        state: LossScaledState,
        params: Any,
        value: Any,
        extra_args: Mapping[str, Any],
        retries: Retries | None = None,
        *,
        applies: bool,
    ) -> tuple[Any, LossScaledState]:
        """Returns the updates, or with `applies` the parameters, and the next state."""
        overwrites = holds_overwrites(grads.grads)
        if overwrites and params is None:
            raise ValueError(
                "`loss_scaled(...).update(params=...)` must be the parameters if there is anything "
                "under a key `_overwrite_with_gradient`, which a step replaces, got None."
            )

        def make(grads: Any, norm: Any, value: Any, opt_state: Any) -> tuple[Any, Any, Any, Any]:
            seen = grads, params
            if overwrites:
                seen = tuple(map(without_overwrites, seen))
            updates, opt_state, norm = update_inner(
                self.inner,
                *(seen[0], norm, value, opt_state, seen[1], extra_args),
                max_norm=self.max_norm,
                keeps_state=self.skips,
            )
            finish = apply_updates if applies else cast_updates
            outcome = finish(seen[1], updates)
            if overwrites:
                finish = overwrite if applies else overwriting_updates
                outcome = finish(outcome, grads, params)
            return outcome, opt_state, updates, norm

        if verdict is None:
            outcome, opt_state, _, norm = make(grads.divided, None, value, state.inner_state)
            norm = self._shown(state, norm, self.axis_name)
            return outcome, state._replace(inner_state=opt_state, grad_norm=norm)

        # A step may be finite and bad.
        good, is_spike, spikes = verdict.grads_finite & verdict.loss_finite, None, state.spikes
        if self.spikes is not None and spikes is not None:
            verdict = verdict._replace(norm=self._known_norm(grads, verdict))
            is_spike, spikes = self.spikes.judge(spikes, verdict.loss, verdict.norm, good)
            good &= ~is_spike

        window, ready = self.window.add(state.inner_state, grads, value, good)

        def unchanged(like: Any) -> Any:
            return params if applies else no_updates(like, grads.divided)

        made = self._make_or_skip(ready, verdict, state, make, unchanged)
        stepped, grads_finite = ready.due, verdict.grads_finite
        if made.updates_finite is not None:
            stepped, grads_finite = (each & made.updates_finite for each in (stepped, grads_finite))

        start = state.scaling if retries is None else retries.scaling
        moved = adjust_scale(self.policy, start, grads_finite, verdict.largest)
        moves = self.window.lets_scale_move(verdict, grads_finite, stepped)
        if is_spike is not None:
            moves &= ~is_spike
        scaling = tree_where(moves, moved, start)

        counted = count_step(state, verdict, grads_finite, is_spike, scaling, retries)
        flags = state.nonfinite_leaves
        if flags is not None:
            new = flags_by_leaf(grads.divided, verdict.leaves_finite)
            flags = last_flags(flags, new, grads_finite)
        return made.outcome, counted._replace(
            scaling=scaling,
            inner_state=self.window.close(window, made.opt_state, stepped),
            spikes=spikes,
            nonfinite_leaves=flags,
            grad_norm=made.norm,
        )

    def _make_or_skip(
        self,
        ready: Ready,
        verdict: Verdict,
        state: LossScaledState,
        make: Callable[[Any, Any, Any, Any], tuple[Any, Any, Any, Any]],
        unchanged: Callable[[Any], Any],
    ) -> _Made:
        """Returns what a step of the optimizer comes to if it is due, and otherwise what was.

        Args:
          ready: what it is made from.
          verdict: the verdict on the gradients.
          state: the state before the step.
          make: a step: gradients, their norm if known, loss and state to the outcome, the next
            state, the updates and the norm.
          unchanged: the outcome of a skipped step, given one of a step, or its shapes.
        """
        # That of a micro-batch is of no use to a step that is made from a mean.
        squares = verdict.squares if self._shares_norm else None
        norm = None if squares is None else jnp.sqrt(squares)
        is_of_mean = self.window.averages and self.max_norm is not None
        shown = state.grad_norm if verdict.norm is None or is_of_mean else verdict.norm
        # Whether only the step finds the norm, if it is made.
        finds = norm is None and self.max_norm is not None and state.grad_norm is not None
        if finds and not self.window.averages:
            shown = jnp.full_like(shown, jnp.inf)

        def step(operand: Any) -> tuple[Any, ...]:
            stored, norm = operand
            grads = ready.gradients_of(stored)
            outcome, opt_state, updates, norm = make(grads, norm, ready.value, ready.opt_state)
            norm = self._shown(state, norm, verdict.axis_name) if finds else None
            if not self.check_updates:
                return outcome, opt_state, None, norm
            finite = all_finite(updates, axis_name=verdict.axis_name)
            kept = unchanged(outcome), ready.opt_state
            return *tree_where(finite, (outcome, opt_state), kept), finite, norm

        def skipped(like: Any) -> tuple[Any, ...]:
            # Constants, with the type that the others have on a mesh, which a constant has not.
            norm = jax.lax.select(ready.due, shown, shown) if finds else None
            finite = ready.due | ~ready.due if self.check_updates else None
            return unchanged(like[0]), ready.opt_state, finite, norm

        outcome, opt_state, finite, found = step_if(ready.due, step, (ready.stored, norm), skipped)
        return _Made(outcome, opt_state, finite, shown if found is None else found)

    @property
    def _shares_norm(self) -> bool:
        """Whether the norm comes from the pass that gives the verdict.

        It does not if it is the norm of a mean of several gradients, or if JAX raises an error
        at a NaN, which the sums of squares of a bad step are.
        """
        return self.max_norm is not None and not self.window.averages and not nans_are_errors()

    def _judges_spikes(self, state: LossScaledState) -> bool:
        return self.spikes is not None and state.spikes is not None

    def _known_norm(self, grads: Scaled, verdict: Verdict) -> jax.Array:
        """Returns the norm of the gradients, of any number if they are not finite."""
        if verdict.norm is not None:
            return verdict.norm
        # JAX raises an error at a NaN, so that the pass which found them could not square them.
        zeros = map_gradients(jnp.zeros_like, grads.divided)
        norm = global_norm(tree_where(verdict.grads_finite, grads.divided, zeros))
        return agree_on_size(norm_bits(norm), verdict.axis_name)

    def _shown(self, state: LossScaledState, norm: Any, axis_name: Any) -> Any:
        """Returns a norm that the step found as the state shows it, if it does."""
        if self.max_norm is None or state.grad_norm is None:
            return state.grad_norm
        return agree_on_size(norm_bits(norm), axis_name)


def types_of(tree: Any) -> tuple[Any, list[tuple[Any, Any]]]:
    """Returns the structure of a tree, and the shape and the dtype of each leaf."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(getattr(x, "shape", None), getattr(x, "dtype", None)) for x in leaves]


def wrapper_of(tx: Any) -> Wrapper | None:
    """Returns the `Wrapper` that made a transformation, or `None` for any other."""
    # Its method is the `update` of the transformation, and of each copy of that named tuple.
    made_by = getattr(getattr(tx, "update", None), "__self__", None)
    return made_by if isinstance(made_by, Wrapper) else None
