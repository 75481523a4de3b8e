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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ._accumulate import MultiStepsState, Window
from ._checks import explained, with_article
from ._leaf import is_array
from ._policies.base import LossScale, adjust_scale
from ._skip import step_if
from ._state import LossScaleState, Scaled, check_alone, is_wrapped, unwrapped
from ._tree import (
    addable,
    apply_updates,
    cast,
    cast_like,
    map_gradients,
    tree_where,
    varying_axes,
    widen,
)
from ._verdict import (
    agree_on_size,
    agree_on_sizes,
    all_finite,
    axis_names,
    clip_by_global_norm,
    flags_by_leaf,
    global_norm,
    last_flags,
    nans_are_errors,
    norm_bits,
    read,
    sizes,
)

# In so many steps a scale may come down from its start, in falls with a few finite steps between
# them, before `backoff_count` counts.
_DESCENT = 25


class LossScaledState(NamedTuple):
    """The state that `loss_scaled` carries from one step to the next.

    Attributes:
      scaling: the state of the loss scale.
      inner_state: the state of the wrapped transformation; inside a `MultiStepsState`
        if gradients are accumulated by `multi_steps`.
      grads_finite: `bool[]`, whether the last step was applied; with accumulation, whether
        the last micro-batch counted. `False` if the gradients or the loss were not finite.
      notfinite_count: `i32[]`, steps skipped in a row, up to now.
      total_notfinite: `i32[]`, steps skipped since `init`.
      total_notfinite_loss: `i32[]`, those of them whose loss itself was not finite.
      total_steps: `i32[]`, steps since `init`, skipped or not.
      total_retries: `i32[]`, backward passes that `jaxscale.train_step` repeated inside of a
        step, at a lower scale.
      total_exhausted: `i32[]`, steps skipped although their backward pass was repeated: their
        gradients were not finite in the last pass either. The scale was not to blame, and moved
        as by one overflow. Of the first 25 steps a row of them counts as one, as the scale may
        come down from a high start.
      backoff_count: `i32[]`, how often an overflow lowered the scale since it last grew. Several
        falls in a row of skipped steps count as one, and those of the first 25 steps do not
        count: a scale that comes down from a high start does not decay.
      nonfinite_leaves: with `track_leaves=True` the leaves that the last overflow was in: a
        tree with the structure of the parameters and a `bool[]` for each gradient, which
        `jaxscale.metrics` and `jaxscale.check` name. Otherwise `None`.
      grad_norm: with `max_norm` an `f32[]`, the global norm of the last gradients before they were
        clipped, also of those that were skipped; inf if they were not finite, or their squares
        overflow. With accumulation it is that of the last step of the optimizer. Where devices
        hold parts of the parameters, it is the largest of theirs. Otherwise `None`.

    Counters stay at their largest value instead of wrapping around.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> import jaxscale
      >>> jaxscale.loss_scaled(optax.sgd(0.1)).init(jnp.zeros(2)).total_steps
      Array(0, dtype=int32)
    """

    scaling: LossScaleState
    inner_state: Any
    grads_finite: jax.Array  # bool[]
    notfinite_count: jax.Array  # i32[]
    total_notfinite: jax.Array  # i32[]
    total_notfinite_loss: jax.Array  # i32[]
    total_steps: jax.Array  # i32[]
    total_retries: jax.Array  # i32[]
    total_exhausted: jax.Array  # i32[]
    backoff_count: jax.Array  # i32[]
    nonfinite_leaves: Any = None
    grad_norm: Any = None  # f32[] or None


class Verdict(NamedTuple):
    """What one pass over the gradients of a step says. All devices along `axis_name` agree."""

    axis_name: Any
    grads_finite: jax.Array  # bool[]
    loss_finite: jax.Array  # bool[], true if no loss was passed
    leaves_finite: list[jax.Array]  # a bool[] for each gradient, if leaves are tracked
    squares: jax.Array | None  # the sum of all squares, if the norm comes from the same pass
    norm: jax.Array | None  # what the state shows of it, an f32[]
    largest: jax.Array | None  # the largest gradient, an f32[], if the policy needs it
    lowered: jax.Array | None = None  # bool[], whether retries lowered the scale, if there are any


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
        _check_not_nested(inner_state)
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
        state = checked_state("loss_scaled(...).update(state=...)", state, self.policy)
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
        _check_loss(value)
        if not self.skips:
            return None
        axis_name = self.axis_name if axis_name is None else axis_name
        unscaled, first = grads.unscaled, seen or grads
        # The state decides, not `track_leaves`: its structure must not change.
        tracks = state.nonfinite_leaves is not None
        is_sized = self.policy.needs_largest
        if is_sized:
            evidence = sizes(first, by_leaf=tracks)
        else:
            squares = self._shares_norm and seen is None
            evidence = read(first.unscaled, by_leaf=tracks, squares=squares)
        passes, norm = [evidence], evidence
        if seen is not None:
            norm = read(unscaled, by_leaf=tracks, squares=self._shares_norm)
            passes.append(norm)
        elif is_sized and self._shares_norm:
            norm = read(unscaled, squares=True)
        _check_devices_agree(unscaled, value, axis_name)
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
        grads = scaled.unscaled
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
            stored, gradients_of = scaled.grads, scaled.unscale
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
            return (params if applies else _no_updates(like, grads)), opt_state

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
            total_notfinite=_count(~applied, state.total_notfinite),
            total_notfinite_loss=_count(~loss_finite, state.total_notfinite_loss),
            total_steps=jnp.asarray(optax.safe_increment(state.total_steps)),
            total_retries=state.total_retries,
            total_exhausted=state.total_exhausted,
            backoff_count=backoffs(state, scaling, overflow),
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
        with explained():
            updates, new_state = self.inner.update(
                grads, opt_state, map_gradients(widen, params), **extra_args
            )
        if self.skips:
            _check_state_kept(new_state, opt_state)
        elif jax.tree.structure(new_state) != jax.tree.structure(opt_state):
            return updates, new_state, norm
        return updates, cast_like(new_state, opt_state), norm


def wrapper_of(tx: Any) -> Wrapper | None:
    """Returns the `Wrapper` that made a transformation, or `None` for any other."""
    # Its method is the `update` of the transformation, and of each copy of that named tuple.
    made_by = getattr(getattr(tx, "update", None), "__self__", None)
    return made_by if isinstance(made_by, Wrapper) else None


def stepped(before: LossScaledState, after: LossScaledState) -> jax.Array:
    """Returns whether the optimizer made a step, which not every micro-batch leads to."""
    windows: Any = before.inner_state, after.inner_state
    if isinstance(windows[0], MultiStepsState):
        return windows[0].gradient_step != windows[1].gradient_step
    return after.grads_finite


def retried(
    state: LossScaledState, verdict: Verdict, scaling: Any, number: jax.Array
) -> tuple[LossScaledState, Verdict]:
    """Returns the state and the verdict to go on with after passes were repeated.

    Args:
      state: the state before the step.
      verdict: that of the last pass.
      scaling: the scale state to go on with.
      number: an `i32[]`, how many passes came before the last.
    """
    again, total = number > 0, state.total_retries
    room = jnp.iinfo(total.dtype).max - total
    exhausted = again & ~verdict.grads_finite
    exhausted &= state.grads_finite | (state.total_steps >= _DESCENT)
    state = state._replace(
        scaling=scaling,
        total_retries=total + jnp.minimum(number, room),
        total_exhausted=_count(exhausted, state.total_exhausted),
        backoff_count=backoffs(state, scaling, again),
    )
    return state, verdict._replace(lowered=again & verdict.grads_finite)


def backoffs(state: LossScaledState, scaling: Any, overflow: Any) -> jax.Array:
    """Returns `backoff_count` after the scale moved.

    Args:
      state: the state before the move.
      scaling: the scale state after it.
      overflow: a `bool[]`, whether an overflow moved it. A policy that follows the gradients also
        lowers the scale before anything overflows.
    """
    old, new = state.scaling.loss_scale, scaling.loss_scale
    counts = overflow & (new < old) & state.grads_finite & (state.total_steps >= _DESCENT)
    return jnp.where(new > old, 0, _count(counts, state.backoff_count))


def takes_value(update: Any) -> bool:
    """Returns whether the signature of an inner update takes the loss.

    Most updates accept arguments that they do not know. A few take only those that they name, and
    would raise an error at `value`, which was meant for the wrapper.
    """
    parameters = inspect.signature(update).parameters.values()
    return any(p.name == "value" or p.kind is p.VAR_KEYWORD for p in parameters)


def checked_state(
    call: str, state: Any, policy: LossScale, order: str = "(grads, opt_state, params)"
) -> LossScaledState:
    """Returns the state that a step was given, as arrays, or raises an error.

    Args:
      call: the step and its argument, for the message.
      state: what was passed.
      policy: that of the optimizer.
      order: the order of the step's arguments, if they could be confused.
    """
    if not isinstance(state, LossScaledState):
        hint = f"The order of arguments is {order}. " * bool(order) + (
            "To go on with the state of an optimizer that was not wrapped, pass "
            "`tx.init(params)._replace(inner_state=state)`."
        )
        if hasattr(state, "opt_state"):
            hint = "Pass its `opt_state`, or use the step of `jaxscale.flax` or `jaxscale.nnx`."
        raise TypeError(
            f"`{call}` must be the `LossScaledState` that `init` or the last step returned, got "
            f"{type(state).__name__}. {hint}"
        )
    # An `nnx.Optimizer` wraps every array in a variable, so it is enough to look at one field. In
    # any other state, the only variables are those of the parameters: they stay wrapped.
    state = unwrapped(state) if is_wrapped(state.grads_finite) else state
    check_alone(call, state.scaling)
    expected = type(jax.eval_shape(policy.init))
    if type(state.scaling) is not expected:
        raise TypeError(
            f"`{call}` got the state of another optimizer: its scaling "
            f"is {with_article(type(state.scaling).__name__)}, and that of "
            f"{with_article(type(policy).__name__)} is {with_article(expected.__name__)}. Pass the "
            "state that `init` of this optimizer returned. To go on from another one, pass "
            "`tx.init(params)._replace(inner_state=state.inner_state)`."
        )
    return state


def _check_loss(value: Any) -> None:
    if value is None:
        return
    given = "`loss_scaled(...).update(value=...)` must be the loss, one number, got "
    if callable(value):
        name = getattr(value, "__name__", type(value).__name__)
        raise TypeError(f"{given}the function {name}. Pass what it returned.")
    if not all(map(is_array, jax.tree.leaves(value))):
        raise TypeError(f"{given}{value!r}.")
    shapes = jax.tree.map(jnp.shape, value)
    if shapes != ():
        raise TypeError(f"{given}{shapes}. With has_aux=True, pass only the loss.")


def _check_devices_agree(grads: Any, value: Any, axis_name: Any) -> None:
    """Raises an error if the loss differs among devices whose gradients are the same."""
    apart = varying_axes(value) - set(axis_names(axis_name))
    if apart and (apart := apart - varying_axes(grads)):
        axes = ", ".join(map(repr, sorted(apart)))
        raise ValueError(
            f"`loss_scaled(...).update(value=...)` varies along {axes}, where the gradients do "
            "not. A loss that is bad on one device alone would make the loss scales of the "
            f"devices differ: pass `axis_name={axes}` to `loss_scaled`, or the mean loss."
        )


def _check_state_kept(new_state: Any, opt_state: Any) -> None:
    structures = jax.tree.structure(new_state), jax.tree.structure(opt_state)
    if structures[0] != structures[1]:
        raise ValueError(
            "`loss_scaled(inner)`: `inner.update` must keep the structure of its state, or a "
            "skipped step could not keep the state. If a part fills its state at the first update, "
            "as `optax.monitor` does, put it outside: `optax.chain(loss_scaled(...), "
            f"optax.monitor(...))`. The structures are {structures[1]} and then {structures[0]}."
        )


def _check_not_nested(inner_state: Any) -> None:
    nodes = jax.tree_util.tree_leaves_with_path(
        inner_state, is_leaf=lambda node: isinstance(node, LossScaledState)
    )
    for path, node in nodes:
        if isinstance(node, LossScaledState):
            raise ValueError(
                "`loss_scaled(inner).init`: `inner` already holds a `LossScaledState`, at "
                f"{jax.tree_util.keystr(path)} of its state. Two skips of one step cannot agree: "
                "wrap once, outermost, with `inner` as it was before."
            )


def _shown(norm: Any, axis_name: Any) -> jax.Array:
    """Returns a norm as the state shows it."""
    return agree_on_size(norm_bits(norm), axis_name)


def _count(event: jax.Array, counter: jax.Array) -> jax.Array:
    return jnp.where(event, optax.safe_increment(counter), counter)


def _no_updates(like: Any, grads: Any) -> Any:
    """Returns updates that change nothing, with the types of `like`.

    Args:
      like: updates, or their shapes and dtypes.
      grads: gradients, which vary along the same mesh axes as the updates.
    """
    sources = jax.tree.leaves(grads)
    if jax.tree.structure(like) == jax.tree.structure(grads):
        pairs = zip(jax.tree.leaves(like), sources, strict=True)
    else:
        pairs = ((leaf, None) for leaf in jax.tree.leaves(like))
    return jax.tree.unflatten(
        jax.tree.structure(like), [_no_update(leaf, grad, sources) for leaf, grad in pairs]
    )


def _no_update(leaf: Any, grad: Any, grads: list[Any]) -> jax.Array:
    # Minus zero, in both parts of a complex number: adding it keeps the bits of every number,
    # whereas -0.0 + 0.0 is 0.0.
    is_complex = jnp.issubdtype(leaf.dtype, jnp.complexfloating)
    zero = complex(-0.0, -0.0) if is_complex else -0.0
    if isinstance(leaf, jax.Array):
        return jax.lax.full_like(leaf, zero)
    # On a mesh the type of an update also says along which axes it varies, and a bare constant
    # varies along none. A selection from a gradient varies as that does, and folds to the
    # constant. Best is the gradient of the same leaf, then one of its shape, then any.
    known = [each for each in (grad, *grads) if each is not None]
    alike = [each for each in known if jnp.shape(each) == leaf.shape]
    source = alike[0] if alike else jnp.sum(known[0])
    source = source.real if jnp.iscomplexobj(source) and not is_complex else source
    return jnp.broadcast_to(_constant_like(cast(source, leaf.dtype), zero), leaf.shape)


def _constant_like(leaf: jax.Array, value: complex) -> jax.Array:
    return jax.lax.select(jnp.zeros((), jnp.bool_), leaf, jax.lax.full_like(leaf, value))
