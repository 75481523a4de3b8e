"""The front end for Flax Linen: a `TrainState` and a training step. Needs `flax`.

Flax's own `TrainState` would replace batch statistics and other fields even on a step that the
optimizer skipped. This one selects the old or the new value of each field, by the verdict in the
state of the optimizer. `train_step` makes the whole step for it.

Declare what the model carries as fields of a subclass, such as `batch_stats: Any`. Name a key for
dropout in `always_replace`; otherwise the step after a skipped one would draw the same noise again.
In a step of your own, use `jaxscale.value_and_grad(loss_fn, state)` and
`TrainState.apply_gradients`.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Self

import jax.numpy as jnp

from ._trees.pytrees import Grads, OptState

try:
    from flax.training import train_state
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "flax":
        raise
    message = "`jaxscale.flax` needs Flax, which is not installed: pip install flax"
    raise ImportError(message) from error

from ._state.find import find_optimizer_state
from ._state.optimizer import WINDOW_STATES
from ._step.apply import apply_once
from ._step.loss_calls import explain_mistakes
from ._step.train_step import StepNames, build_step, name_step
from ._trees.arguments import int32
from ._trees.gradient_leaves import OVERWRITE_WITH_GRADIENT
from ._trees.leaves import cast_like
from ._trees.pytrees import Params
from ._trees.selection import select_new
from ._went import refuse_gone

__all__ = ["TrainState", "train_step"]

_OWN_FIELDS = {"step", "apply_fn", "params", "tx", "opt_state"}


class TrainState(train_state.TrainState):
    """A Flax `TrainState` in which a skipped step changes only the scale and the counters.

    The same as `flax.training.train_state.TrainState`, except that

    - `tx` is a `jaxscale.loss_scaled` optimizer, and its verdict holds for all
      fields: on a skipped step batch statistics, moving averages and every other field
      given to `apply_gradients` keep their old values;
    - `step` counts the steps that were applied, as optax's schedules and moments do. With
      `jaxscale.multi_steps`, or an `optax.MultiSteps` inside `loss_scaled`, it counts the
      optimizer's steps and not the micro-batches.
      `jaxscale.metrics(state)["total_steps"]` counts all steps, including skipped ones.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> import jaxscale, jaxscale.flax
      >>> class State(jaxscale.flax.TrainState):
      ...     mean: jax.Array
      >>> tx = jaxscale.loss_scaled(optax.sgd(0.5))
      >>> w, mean = jnp.array(1.0), jnp.array(0.0)
      >>> state = State.create(apply_fn=None, params={"w": w}, tx=tx, mean=mean)
      >>> for grad in [1.0, jnp.inf]:
      ...     grads = {"w": jnp.array(grad)}
      ...     state = state.apply_gradients(grads=grads, mean=state.mean + 7)
      ...     print(state.params["w"], state.mean, state.step)
      0.5 7.0 1
      0.5 7.0 1
    """

    @classmethod
    def create(
        cls,
        *,
        apply_fn: Callable[..., Any] | None,
        params: Params,
        tx: Any,
        **kwargs: Any,
    ) -> Self:
        """Returns the initial state.

        Args:
          apply_fn: the model's function, kept for convenience.
          params: a pytree of parameters. Beside `params` it may have a key
            `_overwrite_with_gradient`, for values that are replaced by their gradients.
          tx: a `jaxscale.loss_scaled` or `jaxscale.skip_nonfinite` optimizer.
          **kwargs: the other fields of a subclass.

        Returns:
          A state with `step` 0, an `i32[]`.

        Raises:
          ValueError: if the state of `tx` holds no `LossScaledState`, or several.
        """
        state = super().create(apply_fn=apply_fn, params=params, tx=tx, **kwargs)
        if isinstance(params, Mapping) and OVERWRITE_WITH_GRADIENT in params:
            # Flax gives the optimizer `params["params"]` alone. Here it knows what is overwritten,
            # as windows also add that up.
            state = state.replace(opt_state=tx.init(params))
        find_optimizer_state("TrainState.create(tx=...)", state.opt_state)
        # Strongly typed, unlike the Python 0 of Flax, or the second step would compile anew.
        state = state.replace(step=jnp.zeros((), jnp.int32))
        return cast_like(state, state)

    def apply_gradients(
        self,
        *,
        grads: Grads,
        value: object = None,
        always_replace: Collection[str] = (),
        extra_args: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Self:
        """Makes one step: returns the next state. A skipped step changes only scale and counters.

        Args:
          grads: unscaled gradients with the structure of `params`.
          value: the loss; if it is not finite, the step is skipped and the scale stays.
          always_replace: names of fields among `kwargs` that even a skipped step replaces,
            such as a PRNG key.
          extra_args: other arguments for `tx.update`.
          **kwargs: fields to replace: `batch_stats=...` and so on. Each new value has
            the structure, shapes and dtypes of the old one.

        Returns:
          The new state, with the shapes and dtypes of this one.

        Raises:
          ValueError: if a field is unknown, or changes its structure or shapes.
          TypeError: if a field changes its dtypes.
        """
        call = "TrainState.apply_gradients"
        always_replace = tuple(always_replace)
        known = {"apply_fn", *self._other_fields()}
        hint = "Arguments for the optimizer go into `extra_args`."
        _check_fields(f"{call}(**kwargs)", kwargs, known, hint)
        _check_fields(f"{call}(always_replace=...)", always_replace, kwargs)
        params, opt_state = apply_once(
            call,
            self.tx,
            grads,
            self.opt_state,
            self.params,
            value,
            extra_args or {},
        )
        return self._after_step(call, params, opt_state, always_replace, kwargs)

    def _after_step(
        self,
        call: str,
        params: Params,
        opt_state: OptState,
        always_replace: Collection[str],
        replaced: Mapping[str, Any],
    ) -> Self:
        """Returns the state after a step, with new values of some fields."""
        verdict = find_optimizer_state(call, opt_state)
        applied = verdict.step_applied
        stepped = applied
        window = verdict.inner_state
        if isinstance(window, WINDOW_STATES):  # ours, or that of Optax
            # One that is not full makes no step, though its micro-batch is not skipped either.
            before = find_optimizer_state(call, self.opt_state).inner_state
            stepped = window.gradient_step != before.gradient_step
        fields = dict(replaced)
        # In the order of the call, which is the same on all hosts: they must trace one program.
        for name, new in replaced.items():
            if name not in always_replace:
                old = getattr(self, name)
                fields[name] = select_new(f"{call}({name}=...)", applied, new, old)
        step = select_new(f"{call}(step=...)", stepped, self.step + 1, self.step)
        return self.replace(step=step, params=params, opt_state=opt_state, **fields)

    def _other_fields(self) -> dict[str, Any]:
        """The fields that a subclass adds, in the order of their names."""
        names = sorted(set(self.__dataclass_fields__) - _OWN_FIELDS)
        return {name: getattr(self, name) for name in names}


def train_step(
    loss_fn: Callable[..., Any],
    *,
    transform: Callable[..., Any] | None = None,
    has_state: bool = False,
    has_aux: bool = False,
    retries: int = 0,
    always_replace: Collection[str] = (),
    on_grads: Callable[[Any], Any] | None = None,
    **kwargs: Any,
) -> Callable[..., tuple[Any, Any]]:
    """Makes a training step for a `TrainState`.

    The step is not compiled: write `jax.jit(jaxscale.flax.train_step(loss_fn), donate_argnums=0)`.

    Args:
      loss_fn: the loss, `loss_fn(params, *args)`, as in `jaxscale.train_step`.
      transform: as there.
      has_state: whether `loss_fn` reads and replaces other fields of the `TrainState`, such as
        batch statistics. It is then `loss_fn(params, fields, *args)`, where `fields` is a dict of
        all fields that the subclass adds, and returns `(loss, fields)` with those that it
        replaces. If each of them is a collection, `model.apply({"params": params, **fields}, ...,
        mutable=list(fields))` returns just that. A skipped step keeps the old fields.
        `jaxscale.train_step` says what to return as the loss if the fields may become NaN.
      has_aux: whether `loss_fn` returns `(loss, aux)`; with `has_state`, `(loss, (fields, aux))`.
      retries: as in `jaxscale.train_step`.
      always_replace: names of fields that even a skipped step replaces, such as a PRNG key.
      on_grads: as in `jaxscale.train_step`.
      **kwargs: passed to `transform`.

    Returns:
      `step(state, *args) -> (state, loss)`; with `has_aux` it returns `(state, (loss, aux))`.
      Keyword arguments go to `loss_fn`.

    Warns:
      UserWarning: as `jaxscale.train_step`, when called.

    Raises:
      TypeError: as `jaxscale.train_step`.
      ValueError: as `jaxscale.train_step`, or if `always_replace` comes without `has_state`; when
        called, also if `loss_fn` returns an unknown field, or does not return a field of
        `always_replace`.

    Example:
      >>> import flax.linen as nn, jax, jax.numpy as jnp, optax
      >>> import jaxscale, jaxscale.flax
      >>> class State(jaxscale.flax.TrainState):
      ...     batch_stats: dict
      >>> model = nn.BatchNorm(use_running_average=False, momentum=0.5)
      >>> def loss_fn(params, fields, x):
      ...     y, fields = model.apply({"params": params, **fields}, x, mutable=list(fields))
      ...     return jnp.mean(y**2), fields
      >>> state = State.create(
      ...     apply_fn=model.apply,
      ...     tx=jaxscale.loss_scaled(optax.sgd(0.1)),
      ...     **model.init(jax.random.key(0), jnp.ones((4, 2))),
      ... )
      >>> step = jax.jit(jaxscale.flax.train_step(loss_fn, has_state=True))
      >>> for size in [1.0, jnp.inf]:
      ...     state, loss = step(state, jnp.full((4, 2), size))
      ...     print(state.batch_stats["mean"], state.step)
      [0.5 0.5] 1
      [0.5 0.5] 1
    """
    call = "flax.train_step"
    refuse_gone(call, kwargs)
    int32(call, "retries", retries, least=0)
    names = StepNames(call=call, opt_state=f"{call}(...)(state.opt_state=...)")
    explained_loss = explain_mistakes(call, loss_fn, has_state, has_aux)
    always_replace = tuple(always_replace)
    if always_replace and not has_state:
        raise ValueError(
            f"`{call}(always_replace={always_replace!r})` needs has_state=True, so that `loss_fn` "
            "returns these fields."
        )

    # The fields are outputs of the loss, as each of them is selected in its own name.
    def loss_of_fields(params: Params, fields: Any, *args: Any, **kwargs: Any) -> Any:
        # A copy, as the loss function may change it.
        return explained_loss(params, dict(fields), *args, **kwargs)

    def step(state: TrainState, *args: Any, **loss_kwargs: Any) -> tuple[Any, Any]:
        plain_step = build_step(
            names,
            loss_of_fields if has_state else explained_loss,
            state.tx,
            transform=transform,
            has_aux=has_state or has_aux,
            retries=retries,
            on_grads=on_grads,
            kwargs=kwargs,
        )
        fields = state._other_fields()
        if has_state:
            args = (fields, *args)
        params, opt_state, output = plain_step(
            state.params, state.opt_state, *args, **loss_kwargs
        )
        replaced: Any = {}
        if has_state:
            output, replaced = output
            if has_aux:
                replaced, aux = replaced
                output = output, aux
            _check_fields(f"{call}(loss_fn, has_state=True)", replaced, fields)
        hint = "What is always replaced, `loss_fn` must return."
        _check_fields(f"{call}(always_replace=...)", always_replace, replaced, hint)
        state = state._after_step(call, params, opt_state, always_replace, replaced)
        return state, output

    return name_step(step)


def _check_fields(
    argument: str, names: Iterable[str], known: Collection[str], hint: str = ""
) -> None:
    """Raises a `ValueError` if a name is not among those of the fields that may be replaced."""
    unknown = sorted(set(map(str, names)) - set(known))
    if unknown:
        raise ValueError(
            f"`{argument}` got {', '.join(unknown)} among the fields, but those that can be "
            f"replaced are: {', '.join(sorted(known)) or 'none'}. {hint}"
        )
