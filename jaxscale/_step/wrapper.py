"""One step of an optimizer under a loss scale.

`jaxscale.loss_scaled` and the other wrappers of an optimizer make a `Wrapper`, which holds their
arguments. Its `update` and `apply` make one step, in this order:

1. *Verdict.* It says whether all gradients are finite, and the loss, if it was passed. It takes
   one pass over the gradients, and all devices agree on it. It covers the gradients rather than
   the updates, as clipping by value and sign-based optimizers hide an inf; with `check_updates`
   it covers the updates, too. For a policy that follows the largest gradient, the same pass finds
   that. If a hook changed the gradients, it covers them as they were and as they are, as a clip
   hides an inf, too; the largest is that of those before, and the norm that of those after.
2. *Window.* If gradients are accumulated over several micro-batches, those of finite
   micro-batches are added up. A step is due when the window is full; without a window, whenever
   the verdict is good.
3. *Skip.* If a step is due, the wrapped optimizer makes it. If not, its state and the parameters
   stay as they are: by a branch on a CPU, by a selection on other machines.
4. *Scale.* The policy gets the verdict, and the largest gradient if it takes that, and moves the
   loss scale, unless the loss is to blame.
   Good micro-batches count towards growth as `growth_unit` says.
5. *Counters.* The state counts what happened, so that nothing has to wait for the host.

With `skip_nonfinite=False` none of this happens: the step is that of the wrapped optimizer.
"""

import dataclasses
import functools
import inspect
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import optax

from .._gradients.scaled import Scaled
from .._gradients.verdict import (
    Verdict,
    agree_on_size,
    agree_on_sizes,
    all_finite,
    clip_by_global_norm,
    flags_by_leaf,
    global_norm,
    last_flags,
    nans_are_errors,
    norm_bits,
    read,
    sizes,
)
from .._policies.base import LossScale, adjust_scale
from .._policies.fixed import FixedLossScale, NoOpLossScale
from .._state.optimizer import LossScaledState
from .._trees.checks import explain_errors
from .._trees.tree import addable, apply_updates, cast_like, map_gradients, tree_where, widen
from .checks import (
    check_devices_agree,
    check_loss,
    check_not_nested,
    check_state,
    check_state_kept,
)
from .counters import count_backoffs, increment_if
from .skip import no_updates, step_if
from .window import Window


@dataclasses.dataclass(frozen=True)
class Wrapper:
    """The arguments of a wrapper, and the functions of the optimizer that it returned."""

    inner: optax.GradientTransformationExtraArgs
    policy: LossScale
    axis_name: Any = None
    window: Window | None = None
    max_norm: float | None = None
    skips: bool = True
    check_updates: bool = False
    track_leaves: bool = False

    def init(self, params: Any) -> LossScaledState:
        # `update` passes the parameters in float32, so `init` does too, and moments keep their
        # dtype.
        params = map_gradients(widen, params)
        inner_state = self.inner.init(params)
        check_not_nested(inner_state)
        # Leaves that an optimizer makes from Python numbers are weakly typed, and after a step
        # they would not be: the second step would compile anew.
        inner_state = cast_like(inner_state, inner_state)
        if self.window is not None:
            inner_state = self.window.open(params, inner_state)
        return LossScaledState(
            scaling=self.policy.init(),
            inner_state=inner_state,
            grads_finite=jnp.array(True),
            notfinite_count=jnp.array(0, jnp.int32),
            total_notfinite=jnp.array(0, jnp.int32),
            total_notfinite_loss=jnp.array(0, jnp.int32),
            total_steps=jnp.array(0, jnp.int32),
            total_retries=jnp.array(0, jnp.int32),
            total_exhausted=jnp.array(0, jnp.int32),
            backoff_count=jnp.array(0, jnp.int32),
            nonfinite_leaves=flags_by_leaf(params) if self.track_leaves else None,
            grad_norm=None if self.max_norm is None else jnp.array(0, jnp.float32),
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
        grads = Scaled(updates)
        verdict = self.judge(grads, state, value)
        return self._advance(grads, verdict, state, params, value, extra_args, applies=False)

    def apply(
        self,
        grads: Scaled,
        state: LossScaledState,
        params: Any,
        value: Any = None,
        extra_args: Mapping[str, Any] = MappingProxyType({}),
        verdict: Verdict | None = None,
    ) -> tuple[Any, LossScaledState]:
        """Returns the parameters after one step, and the next state.

        Args:
          grads: the gradients, scaled or not.
          state: the state of this optimizer, checked.
          params: the parameters, each with its gradient.
          value: the loss, if it is known.
          extra_args: further arguments of the wrapped optimizer.
          verdict: what `judge` returned, if it was called already.
        """
        verdict = self.judge(grads, state, value) if verdict is None else verdict
        return self._advance(grads, verdict, state, params, value, extra_args, applies=True)

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
        unscaled, first = grads.divided, seen or grads
        # The state decides, not `track_leaves`: its structure must not change.
        tracks = state.nonfinite_leaves is not None
        is_sized = self.policy.needs_largest
        if is_sized:
            evidence = sizes(first, by_leaf=tracks)
        else:
            squares = self._shares_norm and seen is None
            evidence = read(first.divided, by_leaf=tracks, squares=squares)
        passes, norm = [evidence], evidence
        if seen is not None:
            norm = read(unscaled, by_leaf=tracks, squares=self._shares_norm)
            passes.append(norm)
        elif is_sized and self._shares_norm:
            norm = read(unscaled, squares=True)
        check_devices_agree(unscaled, value, axis_name)
        by_leaf = zip(*(each.finite_groups() for each in passes), strict=True) if tracks else ()
        held = [[each.finite() for each in passes], [all_finite(value)], *by_leaf]
        local = jnp.stack([functools.reduce(jnp.bitwise_and, each) for each in held])
        squares = norm.squares() if self._shares_norm else None
        bits = {"largest": evidence.bits()} if evidence.holds_sizes else {}
        if squares is not None and state.grad_norm is not None:
            bits["norm"] = norm_bits(jnp.sqrt(squares))
        (grads_finite, loss_finite, *leaves_finite), known = agree_on_sizes(local, bits, axis_name)
        return Verdict(
            axis_name,
            grads_finite,
            loss_finite,
            leaves_finite,
            squares,
            known.get("norm"),
            known.get("largest"),
        )

    def _advance(
        self,
        scaled: Scaled,
        verdict: Verdict | None,
        state: LossScaledState,
        params: Any,
        value: Any,
        extra_args: Mapping[str, Any],
        *,
        applies: bool,
    ) -> tuple[Any, LossScaledState]:
        """Returns the updates, or with `applies` the parameters, and the next state."""
        grads = scaled.divided
        shows = self.max_norm is not None and state.grad_norm is not None
        if verdict is None:
            updates, inner_state, norm = self._inner_update(
                grads, None, value, state.inner_state, params, extra_args
            )
            outcome = apply_updates(params, updates) if applies else addable(updates, params)
            shown = _shown(norm, self.axis_name) if shows else state.grad_norm
            return outcome, state._replace(inner_state=inner_state, grad_norm=shown)

        grads_finite, loss_finite = verdict.grads_finite, verdict.loss_finite
        axis_name = verdict.axis_name
        counts = grads_finite & loss_finite
        if self.window is None:
            window, due, opt_state = None, counts, state.inner_state
            stored, gradients_of = scaled.grads, scaled.times_reciprocal
        else:
            window, due = self.window.add(state.inner_state, grads, value, counts)
            opt_state = window.inner_opt_state
            stored, gradients_of = self.window.mean(window, grads)
            value = None if value is None else self.window.mean_value(window)
        norm = None if verdict.squares is None else jnp.sqrt(verdict.squares)
        shown: Any = state.grad_norm if verdict.norm is None else verdict.norm
        finds = shows and norm is None  # only the step then knows the norm, if it is made
        if finds and self.window is None:
            shown = jnp.full_like(shown, jnp.inf)

        def unchanged(like: Any) -> tuple[Any, Any]:
            return (params if applies else no_updates(like, grads)), opt_state

        def step(operand: Any) -> tuple[Any, Any, Any, Any]:
            stored, norm = operand
            updates, new_state, found = self._inner_update(
                gradients_of(stored), norm, value, opt_state, params, extra_args
            )
            found = _shown(found, axis_name) if finds else None
            outcome = apply_updates(params, updates) if applies else addable(updates, params)
            if not self.check_updates:
                return outcome, new_state, None, found
            finite = all_finite(updates, axis_name=axis_name)
            return *tree_where(finite, (outcome, new_state), unchanged(updates)), finite, found

        def skipped(like: Any) -> tuple[Any, Any, Any, Any]:
            # Constants, with the type that the others have on a mesh, which a constant has not.
            found = jax.lax.select(due, shown, shown) if finds else None
            return *unchanged(like[0]), due | ~due if self.check_updates else None, found

        outcome, new_state, updates_finite, found = step_if(due, step, (stored, norm), skipped)
        if updates_finite is not None:
            due, grads_finite = due & updates_finite, grads_finite & updates_finite
        applied = grads_finite & loss_finite
        scaling = adjust_scale(self.policy, state.scaling, grads_finite, verdict.largest)
        overflow = ~grads_finite
        if verdict.lowered is not None:  # a second fall in the same step does not count
            overflow &= ~verdict.lowered
        # A bad loss says nothing about the scale, which then stays.
        observed = loss_finite
        if self.window is not None and window is not None:  # both, or neither
            new_state = self.window.close(window, new_state, due)
            if self.window.growth_unit == "optimizer_step":
                observed &= due | ~grads_finite
        scaling = tree_where(observed, scaling, state.scaling)
        flags = state.nonfinite_leaves
        if flags is not None:
            flags = last_flags(flags, flags_by_leaf(grads, verdict.leaves_finite), grads_finite)
        return outcome, LossScaledState(
            scaling=scaling,
            inner_state=new_state,
            grads_finite=applied,
            notfinite_count=jnp.where(applied, 0, optax.safe_increment(state.notfinite_count)),
            total_notfinite=increment_if(~applied, state.total_notfinite),
            total_notfinite_loss=increment_if(~loss_finite, state.total_notfinite_loss),
            total_steps=jnp.asarray(optax.safe_increment(state.total_steps)),
            total_retries=state.total_retries,
            total_exhausted=state.total_exhausted,
            backoff_count=count_backoffs(state, scaling, overflow),
            nonfinite_leaves=flags,
            grad_norm=shown if found is None else found,
        )

    @property
    def _shares_norm(self) -> bool:
        """Whether the norm comes from the pass that gives the verdict.

        It does not if it is the norm of a mean of several gradients, or if JAX raises an error
        at a NaN, which the sums of squares of a bad step are.
        """
        return self.max_norm is not None and self.window is None and not nans_are_errors()

    def _inner_update(
        self,
        grads: Any,
        norm: jax.Array | None,
        value: Any,
        opt_state: Any,
        params: Any,
        extra_args: Mapping[str, Any],
    ) -> tuple[Any, Any, jax.Array | None]:
        """Returns the updates of the wrapped optimizer, its next state, and the norm if known."""
        grads = map_gradients(widen, grads)
        if self.max_norm is not None:
            norm = global_norm(grads) if norm is None else norm
            grads = clip_by_global_norm(grads, norm, self.max_norm)
        if value is not None and takes_value(self.inner.update):
            extra_args = {**extra_args, "value": value}
        with explain_errors():
            updates, new_state = self.inner.update(
                grads, opt_state, map_gradients(widen, params), **extra_args
            )
        if self.skips:
            check_state_kept(new_state, opt_state)
        elif jax.tree.structure(new_state) != jax.tree.structure(opt_state):
            return updates, new_state, norm
        return updates, cast_like(new_state, opt_state), norm


def wrapper_of(tx: Any) -> Wrapper | None:
    """Returns the `Wrapper` that made a transformation, or `None` for any other."""
    # Its method is the `update` of the transformation, and of each copy of that named tuple.
    made_by = getattr(getattr(tx, "update", None), "__self__", None)
    return made_by if isinstance(made_by, Wrapper) else None


def takes_value(update: Any) -> bool:
    """Returns whether the signature of an inner update takes the loss.

    Most updates accept arguments that they do not know. A few take only those that they name, and
    would raise an error at `value`, which was meant for the wrapper.
    """
    parameters = inspect.signature(update).parameters.values()
    return any(p.name == "value" or p.kind is p.VAR_KEYWORD for p in parameters)


def _shown(norm: Any, axis_name: Any) -> jax.Array:
    """Returns a norm as the state shows it."""
    return agree_on_size(norm_bits(norm), axis_name)


# Policies whose scale stays as it is.
NEVER_MOVE = (NoOpLossScale, FixedLossScale)
