"""`WrappedOptimizer`: what `loss_scaled` returns, and what a training step asks of it."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from .._gradients.facts import flags_by_leaf
from .._gradients.scaled import Scaled
from .._gradients.value_and_grad import BackwardPass
from .._policies.fixed import FixedLossScale
from .._state.optimizer import LossScaledState, MultiStepsState
from .._trees.gradient_leaves import (
    holds_overwrites,
    map_gradients,
    only_gradients,
    without_overwrites,
)
from .._trees.leaves import cast_like, is_array_like, widen
from .._trees.pytrees import OptState, Params
from . import checks
from .advance import advance
from .checks import TreeTypes, check_gradients, explain_difference, types_of
from .counters import start_state
from .options import Options

MADE_BY_INIT = (
    "Pass the state that `init` of this optimizer returned for these parameters."
)


class WrappedOptimizer(Options):
    """An optimizer whose bad steps are skipped, unless `skips` is false.

    Its methods `init` and `update` are those of the transformation that users get. The others are
    what a training step asks of an optimizer.
    """

    widens = True  # the optimizer sees float32 in the place of half precision

    @property
    def shows_norm(self) -> bool:
        """The state shows the norm of the gradients."""
        return self.max_norm is not None or self.spikes is not None

    @functools.cached_property
    def state_type(self) -> type:
        """The type of the state of the policy."""
        return type(jax.eval_shape(self.policy.init))

    @property
    def can_back_off(self) -> bool:
        """The scale moves, so that a retry may help."""
        # A subclass may have an `adjust` of its own.
        return type(self.policy).adjust is not FixedLossScale.adjust

    def init(self, params: optax.Params) -> LossScaledState:
        # `update` passes the parameters to the inner optimizer in float32 or wider, so its moments
        # must be as wide from the start.
        wide_params = map_gradients(widen, params)
        # What is under a key `_overwrite_with_gradient` is replaced by a step, not optimized.
        inner_state = self.inner.init(without_overwrites(wide_params))
        checks.check_not_nested(self.call, inner_state)
        if self.max_norm is not None:
            checks.check_clips_the_mean(self.call, inner_state)
        # Leaves that an optimizer makes from Python numbers are weakly typed. After a step they
        # would not be, so the second step would compile anew. A cast to its own dtype makes a leaf
        # strongly typed.
        inner_state = cast_like(inner_state, inner_state)
        window_state = inner_state
        if self.window is not None:
            window_state = self.window.open(wide_params, inner_state)
        if not self.known_types:  # once, however often states are made
            self.weights.warn_of_losses(self.call, params, inner_state)
        self.known_types[types_of(params)] = types_of(window_state)

        state = start_state(self.policy.init(), window_state)
        if self.spikes is not None:
            state = state._replace(spikes=self.spikes.init())
        if self.track_leaves:
            # One flag for the gradient of each parameter. None is set, as nothing overflowed yet.
            state = state._replace(nonfinite_leaves=flags_by_leaf(wide_params))
        if self.shows_norm:
            state = state._replace(grad_norm=jnp.array(0, jnp.float32))
        return state._replace(weights=self.weights.init(without_overwrites(params)))

    def update(
        self,
        updates: optax.Updates,
        state: OptState,
        params: optax.Params | None = None,
        *,
        value: object = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, LossScaledState]:
        call = f"{self.call}(...).update"
        order = "(grads, opt_state, params)"
        state = self.enter(f"{call}(state=...)", state, order)
        if params is None and holds_overwrites(updates):
            raise ValueError(
                f"`{call}(params=...)` must be the parameters, got None: a step replaces those "
                "whose gradients are under a key `_overwrite_with_gradient`."
            )
        if params is not None:
            check_gradients(f"{call}(updates=...)", updates, params)
            self.check_same(f"{call}(state=...)", state, params)
        if value is None:
            value = extra_args.get("loss")  # some trainers pass it under this name
        # A `Scaled` without a divisor: these gradients are unscaled already.
        backward_pass = BackwardPass(Scaled(updates), loss=value)
        return advance(
            self, backward_pass, state, params, extra_args, returns_params=False
        )

    def apply(
        self,
        backward_pass: BackwardPass,
        state: LossScaledState,
        params: Params,
        extra_args: Any,
    ) -> tuple[Any, LossScaledState]:
        """Applies a backward pass: returns the new parameters and the state."""
        return advance(
            self, backward_pass, state, params, extra_args, returns_params=True
        )

    def enter(self, argument: str, state: OptState, order: str) -> LossScaledState:
        """Checks that an argument is the state of a step, and returns it as arrays.

        A scale that this policy never has, as another may leave it, is replaced: that of a fixed
        policy by its number, and others by the nearest in range. `order` is the order of the call's
        arguments, for the error message.
        """
        state = checks.check_state(argument, state, self.policy, self.state_type, order)
        self.weights.check(argument, state.weights)
        self._check_has_parts(argument, state)
        return state._replace(scaling=self.policy.clip_to_bounds(state.scaling))

    def leave(self, state: LossScaledState) -> Any:
        """Returns the state that users get back after a step."""
        return state

    def find_start_scale(self, state: LossScaledState) -> Any:
        """Returns the scale state that a backward pass starts with."""
        # A loop carries only JAX's arrays, and a restored state may hold NumPy's.
        return jax.tree.map(jnp.asarray, state.scaling)

    def find_verdict(self, state: LossScaledState) -> LossScaledState | None:
        """Returns the state with the verdict on a step, `None` if each one is applied."""
        if not self.skips:
            return None
        return state

    def expected_types(self, params: optax.Params) -> TreeTypes:
        """Returns the types of the `inner_state` that `init` makes for these parameters.

        To trace `init` in each step would take a fifth as long as tracing plain Optax.
        """
        key = types_of(params)
        if key not in self.known_types:
            state = jax.eval_shape(self.init, params)
            self.known_types[key] = types_of(state.inner_state)
        return self.known_types[key]

    def check_same(
        self,
        argument: str,
        state: LossScaledState,
        params: Params,
        way_out: str = MADE_BY_INIT,
    ) -> None:
        """Raises a `ValueError` if a state is not like the one that `tx.init(params)` makes."""
        types = types_of(state.inner_state)
        if types == self.known_types.get(types_of(params)):
            return  # the usual case
        are_arrays = all(map(is_array_like, jax.tree.leaves(params)))
        try:
            if not are_arrays:
                params = only_gradients(params)
            expected = self.expected_types(params)
        except Exception:  # an `init` that needs values cannot be asked here
            return
        # If not all are arrays, `init` saw only a part of them, and which is not known.
        difference = are_arrays and explain_difference(state.inner_state, expected)
        if difference:
            raise ValueError(
                f"`{argument}` is the state of another optimizer or of other parameters. "
                f"`tx.init(params)` {difference}. {way_out}"
            )
        if self.widens:
            checks.check_not_narrower(state.inner_state, expected)

    def _check_has_parts(self, argument: str, state: LossScaledState) -> None:
        """Raises an error if a state lacks what the optimizer around it was built with.

        It comes from a run with other options. What it lacks would be off, and nobody would notice.
        """
        has_window = isinstance(state.inner_state, MultiStepsState)
        if self.window is not None and not has_window:
            raise TypeError(
                "`multi_steps(...).update(state=...)` must be a state that its `init` or the last "
                f"step returned, got one with a {type(state.inner_state).__name__} for its window. "
                "Call `init` of the optimizer that `multi_steps` returned."
            )
        lacks = ""
        if self.spikes is not None and state.spikes is None:
            lacks = "without `spikes`"
        elif self.track_leaves and state.nonfinite_leaves is None:
            lacks = "without `track_leaves`"
        elif self.shows_norm and state.grad_norm is None:
            lacks = "without `max_norm`"
        elif self.spikes is not None:
            window = jnp.shape(state.spikes.losses)[-1]
            if window != self.spikes.window:
                lacks = f"with `SpikeRule(window={window})`"
                lacks += f", where this one has window={self.spikes.window}"
        if lacks:
            raise ValueError(
                f"`{argument}` is the state of an optimizer {lacks}. Take it over once, before the "
                "first step: `opt_state = jaxscale.from_state_dict(tx.init(params), "
                "jaxscale.to_state_dict(opt_state))`. What is new then starts as `init` makes it."
            )


def find_wrapped_optimizer(tx: object) -> WrappedOptimizer | None:
    """Returns the `WrappedOptimizer` behind a transformation, or `None` if there is none."""
    # A transformation is a named tuple. That of `loss_scaled` holds the bound method
    # `WrappedOptimizer.update`, and so does each copy of it.
    update = getattr(tx, "update", None)
    optimizer = getattr(update, "__self__", None)
    if not isinstance(optimizer, WrappedOptimizer):
        return None
    return optimizer
