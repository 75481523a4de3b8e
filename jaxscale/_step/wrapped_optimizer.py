"""`WrappedOptimizer`: what `loss_scaled` makes of its arguments, and its state before a step."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from .._gradients.scaled import Scaled
from .._policies.base import CheckedLossScale, LossScale
from .._policies.fixed import FixedLossScale, NoOpLossScale
from .._policies.spikes import SpikeRule
from .._state.optimizer import LossScaledState
from .._storage.weights import Rounded, Weights
from .._trees.casts import cast_like, widen
from .._trees.gradient_leaves import map_gradients
from .._trees.overwrites import holds_overwrites, without_overwrites
from . import checks
from .advance import NEW_PARAMS, UPDATES, advance
from .backward_pass import Pass
from .counters import start_state
from .judges import FiniteJudge, Judge, SpikeJudge
from .matching import (
    TreeTypes,
    are_half,
    check_gradients,
    check_has_parts,
    check_not_narrower,
    hashable_types,
    types_of,
)
from .window import EachStep, Window


@dataclasses.dataclass(frozen=True)
class WrappedOptimizer:
    """An optimizer whose bad steps are skipped: what `loss_scaled` makes of its arguments.

    Its methods `init` and `update` are those of the transformation that users get. The others are
    what a training step asks of an optimizer. A `BareOptimizer` is one without judges.

    Attributes:
      inner: the optimizer inside.
      policy: how the loss scale moves.
      axis_name: the axes whose devices decide together, or `None`.
      window: how micro-batches are accumulated; `EachStep` if they are not.
      max_norm: the global norm to clip gradients to, or `None`.
      skips: whether bad steps are skipped. If not, there are no judges.
      check_updates: whether a step is taken back if its updates or its state are not finite.
      track_leaves: whether the state says which leaves the last overflow was in.
      spikes: the rule that skips finite steps, or `None`.
      on_skip: the function that is called on the host after each skipped step, or `None`.
      weights: how half-precision parameters are kept.
      known_types: the types of the inner states for parameters that were seen, to trace less.
      known_unread: which gradients are never read, by the kind of call, to trace less.
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
    known_types: dict[Any, TreeTypes] = dataclasses.field(
        default_factory=dict, compare=False
    )
    known_unread: dict[Any, list[bool]] = dataclasses.field(
        default_factory=dict, compare=False
    )

    @property
    def judges(self) -> tuple[Judge, ...]:
        """What may refuse a step, in the order in which it is asked."""
        if not self.skips:
            return ()
        judges: list[Judge] = [FiniteJudge(self.track_leaves)]
        if self.spikes is not None:
            judges.append(SpikeJudge(self.spikes))
        return tuple(judges)

    @property
    def shows_norm(self) -> bool:
        """Whether the state shows the norm of the gradients."""
        return self.max_norm is not None or self.spikes is not None

    @property
    def can_back_off(self) -> bool:
        """Whether the scale ever moves, so that a retry may help."""
        return not isinstance(self.policy, NoOpLossScale | FixedLossScale)

    def transformation(self) -> optax.GradientTransformationExtraArgs:
        """Returns the optimizer as users get it."""
        return optax.GradientTransformationExtraArgs(self.init, self.update)

    def init(self, params: optax.Params) -> LossScaledState:
        # `update` passes the parameters to the inner optimizer in float32 or wider, so its moments
        # must be as wide from the start.
        wide_params = map_gradients(widen, params)
        # What is under a key `_overwrite_with_gradient` is replaced by a step, not optimized.
        inner_state = self.inner.init(without_overwrites(wide_params))
        checks.check_not_nested(inner_state)
        # Leaves that an optimizer makes from Python numbers are weakly typed. After a step they
        # would not be, so the second step would compile anew. A cast to its own dtype makes a leaf
        # strongly typed.
        inner_state = cast_like(inner_state, inner_state)
        window_state = self.window.open(wide_params, inner_state)
        if not self.known_types:  # once, however often states are made
            self.weights.warn_of_losses(params, inner_state)
        self.known_types[hashable_types(params)] = types_of(window_state)

        state = start_state(self.policy.init(), window_state)
        for judge in self.judges:
            state = state._replace(**judge.init(wide_params))
        if self.shows_norm:
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
        state = self.enter(f"{call}(state=...)", state, order)
        if params is None and holds_overwrites(updates):
            raise ValueError(
                f"`{call}(params=...)` must be the parameters, got None: a step replaces those "
                "whose gradients are under a key `_overwrite_with_gradient`."
            )
        check_gradients(f"{call}(updates=...)", updates, params)
        self.check_moments(state, params)
        if value is None:
            value = extra_args.get("loss")  # some trainers pass it under this name
        # A `Scaled` without a divisor: these gradients are unscaled already.
        run = Pass(Scaled(updates), loss=value)
        return advance(self, run, state, params, extra_args, UPDATES)

    def apply(
        self, run: Pass, state: LossScaledState, params: Any, extra_args: Any
    ) -> tuple[Any, LossScaledState]:
        """Applies a backward pass: returns the new parameters and the state."""
        self.check_moments(state, params)
        return advance(self, run, state, params, extra_args, NEW_PARAMS)

    def enter(self, argument: str, state: Any, order: str) -> LossScaledState:
        """Checks that an argument is the state of a step, and returns it as arrays.

        A scale that this policy never has, as another may leave it, is replaced: that of a fixed
        policy by its number, and one above the maximum by the maximum. `order` is the order of the
        call's arguments, for the error message.
        """
        state = checks.check_state(argument, state, self.policy, order)
        self.weights.check(argument, state.weights)
        check_has_parts(argument, state, self)
        if isinstance(self.policy, FixedLossScale):
            return state._replace(scaling=self.policy.hold(state.scaling))
        # Without skips the scale never moves, and a policy of the user's own may have no maximum.
        if not self.skips or not isinstance(self.policy, CheckedLossScale):
            return state
        return state._replace(scaling=checks.cap_scale(self.policy, state.scaling))

    def leave(self, state: LossScaledState) -> Any:
        """Returns the state that users get back after a step."""
        return state

    def find_start_scale(self, state: LossScaledState) -> Any:
        """Returns the scale state that a backward pass starts with."""
        # A loop carries only JAX's arrays, and a restored state may hold NumPy's.
        return jax.tree.map(jnp.asarray, state.scaling)

    def find_applied(self, state: LossScaledState) -> jax.Array | None:
        """Returns whether the last step was applied; `None` if each one is."""
        if not self.skips:
            return None
        return state.step_applied

    def find_window(self, state: LossScaledState) -> Any:
        """Returns the state of the window of micro-batches, if there is one."""
        return state.inner_state

    def expected_types(self, params: optax.Params) -> TreeTypes:
        """Returns the types of the `inner_state` that `init` makes for these parameters.

        To trace `init` in each step would take a fifth as long as tracing plain Optax.
        """
        key = hashable_types(params)
        if key not in self.known_types:
            jax.eval_shape(self.init, params)  # keeps them
        return self.known_types[key]

    def check_moments(
        self, state: LossScaledState, params: optax.Params | None
    ) -> None:
        """Raises a `ValueError` if moments are narrower than this optimizer makes them."""
        if params is not None and are_half(params):
            check_not_narrower(state.inner_state, self.expected_types(params))


def find_wrapped_optimizer(tx: Any) -> WrappedOptimizer | None:
    """Returns the `WrappedOptimizer` behind a transformation, or `None` if there is none."""
    # A transformation is a named tuple. That of `loss_scaled` holds the bound method
    # `WrappedOptimizer.update`, and so does each copy of it.
    update = getattr(tx, "update", None)
    optimizer = getattr(update, "__self__", None)
    if not isinstance(optimizer, WrappedOptimizer):
        return None
    return optimizer
