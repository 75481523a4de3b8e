"""A Flax `TrainState` that keeps all its fields on a skipped step. Needs `flax`.

Flax's own would replace batch statistics and other fields on a step that the optimizer skipped.
This one selects each field by the verdict that the state of the optimizer holds.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Self

import jax.numpy as jnp
from flax.training import train_state

from ._optimizer import apply_gradients
from ._state import find
from ._step import LossScaledState, stepped
from ._tree import OVERWRITE_WITH_GRADIENT, cast_like, select


class TrainState(train_state.TrainState):
    """A Flax `TrainState` in which a skipped step changes only the scale and the counters.

    The same as `flax.training.train_state.TrainState`, except that

    - `tx` is a `jaxscale.loss_scaled` optimizer, and its verdict holds for all
      fields: on a skipped step batch statistics, moving averages and every other field
      given to `apply_gradients` keep their old values;
    - `step` counts the steps that were applied, as optax's schedules and moments do. With
      `jaxscale.multi_steps` it counts the optimizer's steps rather than the micro-batches.
      `jaxscale.metrics(state)["total_steps"]` has the number of steps that were tried.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> import jaxscale, jaxscale.flax
      >>> state = jaxscale.flax.TrainState.create(
      ...     apply_fn=None,
      ...     params={"w": jnp.array(1.0)},
      ...     tx=jaxscale.loss_scaled(optax.sgd(0.5)),
      ... )
      >>> for grad in [1.0, jnp.inf]:
      ...     state = state.apply_gradients(grads={"w": jnp.array(grad)})
      ...     print(state.params["w"], state.step)
      0.5 1
      0.5 1
    """

    @classmethod
    def create(
        cls, *, apply_fn: Callable[..., Any] | None, params: Any, tx: Any, **kwargs: Any
    ) -> Self:
        """Returns the initial state.

        Args:
          apply_fn: the model's function, kept for convenience.
          params: a pytree of parameters. It may have a key `_overwrite_with_gradient` beside
            `params`, for values that their gradients replace.
          tx: a `jaxscale.loss_scaled` or `jaxscale.skip_nonfinite` optimizer.
          **kwargs: the further fields of a subclass.

        Returns:
          A state with `step` 0, an `i32[]`.

        Raises:
          ValueError: if the state of `tx` holds no `LossScaledState`, or several.
        """
        state = super().create(apply_fn=apply_fn, params=params, tx=tx, **kwargs)
        _find_verdict("TrainState.create(tx=...)", state.opt_state)
        # Strongly typed, unlike the Python 0 of Flax, or the second step would compile anew.
        state = state.replace(step=jnp.zeros((), jnp.int32))
        return cast_like(state, state)

    def apply_gradients(
        self,
        *,
        grads: Any,
        value: Any = None,
        always_replace: Collection[str] = (),
        extra_args: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Self:
        """Returns the state after one step; a skipped one changes only scale and counters.

        Args:
          grads: unscaled gradients with the structure of `params`.
          value: the loss; if it is not finite, the step is skipped and the scale stays.
          always_replace: names of fields among `kwargs` that a skipped step replaces, too,
            such as a PRNG key.
          extra_args: further arguments for `tx.update`.
          **kwargs: fields to replace: `batch_stats=...` and so on. Each new value has
            the structure, shapes and dtypes of the old one.

        Returns:
          The new state, with the shapes and dtypes of this one.

        Raises:
          ValueError: if a field is unknown, or changes its structure or shapes.
          TypeError: if a field changes its dtypes, or if `always_replace` is a single string:
            pass `("key",)`.

        Example:
          >>> import jax.numpy as jnp, optax
          >>> import jaxscale, jaxscale.flax
          >>> class State(jaxscale.flax.TrainState):
          ...     batch_stats: dict
          >>> state = State.create(
          ...     apply_fn=None,
          ...     params={"w": jnp.array(1.0)},
          ...     tx=jaxscale.loss_scaled(optax.sgd(0.5)),
          ...     batch_stats={"mean": jnp.array(0.0)},
          ... )
          >>> state = state.apply_gradients(
          ...     grads={"w": jnp.array(jnp.inf)}, batch_stats={"mean": jnp.array(7.0)}
          ... )
          >>> print(state.batch_stats["mean"])
          0.0
        """
        call = "TrainState.apply_gradients"
        always_replace = _names(call, always_replace)
        self._check_names(call, kwargs, always_replace)
        overwrites = isinstance(grads, Mapping) and OVERWRITE_WITH_GRADIENT in grads
        params, opt_state = apply_gradients(
            self.tx,
            grads["params"] if overwrites else grads,
            self.opt_state,
            self.params["params"] if overwrites else self.params,
            value=value,
            **(extra_args or {}),
        )
        before, after = (_find_verdict(call, tree) for tree in (self.opt_state, opt_state))
        verdict = after.grads_finite

        def keep(name: str, new: Any, old: Any) -> Any:
            return select(f"{call}({name}=...)", verdict, new, old)

        if overwrites:
            new, old = (tree[OVERWRITE_WITH_GRADIENT] for tree in (grads, self.params))
            new = keep(f"grads[{OVERWRITE_WITH_GRADIENT!r}]", new, old)
            params = type(self.params)({"params": params, OVERWRITE_WITH_GRADIENT: new})
        # In the order of the call, which is the same on all hosts: they must trace one program.
        replaced = {
            name: new if name in always_replace else keep(name, new, getattr(self, name))
            for name, new in kwargs.items()
        }
        step = select(call, stepped(before, after), self.step + 1, self.step)
        return self.replace(step=step, params=params, opt_state=opt_state, **replaced)

    def _check_names(
        self, call: str, kwargs: Mapping[str, Any], always_replace: Collection[str]
    ) -> None:
        fields = set(self.__dataclass_fields__) - {"step", "params", "tx", "opt_state"}
        for given, names in (("**kwargs", kwargs), ("always_replace=...", always_replace)):
            known = fields if given == "**kwargs" else set(kwargs)
            unknown = sorted(set(names) - known)
            if unknown:
                raise ValueError(
                    f"`{call}({given})` got {', '.join(unknown)}, but the fields that can be "
                    f"replaced are: {', '.join(sorted(known)) or 'none'}. Arguments for the "
                    "optimizer go into `extra_args`."
                )


def _names(call: str, always_replace: Any) -> tuple[str, ...]:
    """Returns the names as a tuple, which can be read more than once."""
    # A string is refused: it is a collection of strings, too, of its letters.
    if not isinstance(always_replace, str) and isinstance(always_replace, Iterable):
        names = tuple(always_replace)
        if all(isinstance(name, str) for name in names):
            return names
    name = always_replace if isinstance(always_replace, str) else "key"
    raise TypeError(
        f"`{call}(always_replace=...)` must be a collection of names of fields, got "
        f"{always_replace!r}. Pass a tuple, also for one: ({name!r},)."
    )


def _find_verdict(call: str, opt_state: Any) -> LossScaledState:
    return find(
        call, opt_state, lambda node: isinstance(node, LossScaledState), "`LossScaledState`"
    )
