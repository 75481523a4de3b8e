"""The whole training step in one function: loss, gradients, retries, skip.

The steps of `jaxscale.flax` and `jaxscale.nnx` are this one, under their own names: `build_step`.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, overload

import jax
import optax

from .._trees.pytrees import OptState, Params, ScaleState
from .._trees.selection import select_new
from .backward_pass import Pass
from .bare_optimizer import as_optimizer, possible_states
from .retry import is_traced
from .step_plan import StepPlan
from .wrapped_optimizer import MADE_BY_INIT, find_wrapped_optimizer

_Args = ParamSpec("_Args")
_Params = TypeVar("_Params")
_Carried = TypeVar("_Carried")
_Aux = TypeVar("_Aux")


@overload
def train_step(
    loss_fn: Callable[Concatenate[_Params, _Args], Any],
    tx: optax.GradientTransformation,
    *,
    transform: Callable[..., Any] | None = None,
    has_state: Literal[False] = False,
    has_aux: Literal[False] = False,
    retries: int = 0,
    on_grads: Callable[[Any], Any] | None = None,
    after: None = None,
    **kwargs: Any,
) -> Callable[Concatenate[_Params, Any, _Args], tuple[_Params, Any, jax.Array]]: ...
@overload
def train_step(
    loss_fn: Callable[Concatenate[_Params, _Args], tuple[Any, _Aux]],
    tx: optax.GradientTransformation,
    *,
    transform: Callable[..., Any] | None = None,
    has_state: Literal[False] = False,
    has_aux: Literal[True],
    retries: int = 0,
    on_grads: Callable[[Any], Any] | None = None,
    after: None = None,
    **kwargs: Any,
) -> Callable[
    Concatenate[_Params, Any, _Args], tuple[_Params, Any, tuple[jax.Array, _Aux]]
]: ...
@overload
def train_step(
    loss_fn: Callable[Concatenate[_Params, _Carried, _Args], tuple[Any, _Carried]],
    tx: optax.GradientTransformation,
    *,
    transform: Callable[..., Any] | None = None,
    has_state: Literal[True],
    has_aux: Literal[False] = False,
    retries: int = 0,
    on_grads: Callable[[Any], Any] | None = None,
    after: Callable[[_Params, _Carried], _Carried] | None = None,
    **kwargs: Any,
) -> Callable[
    Concatenate[_Params, Any, _Carried, _Args], tuple[_Params, Any, _Carried, jax.Array]
]: ...
@overload
def train_step(
    loss_fn: Callable[
        Concatenate[_Params, _Carried, _Args], tuple[Any, tuple[_Carried, _Aux]]
    ],
    tx: optax.GradientTransformation,
    *,
    transform: Callable[..., Any] | None = None,
    has_state: Literal[True],
    has_aux: Literal[True],
    retries: int = 0,
    on_grads: Callable[[Any], Any] | None = None,
    after: Callable[[_Params, _Carried], _Carried] | None = None,
    **kwargs: Any,
) -> Callable[
    Concatenate[_Params, Any, _Carried, _Args],
    tuple[_Params, Any, _Carried, tuple[jax.Array, _Aux]],
]: ...
@overload
def train_step(
    loss_fn: Callable[..., Any],
    tx: optax.GradientTransformation,
    *,
    transform: Callable[..., Any] | None = None,
    has_state: bool = False,
    has_aux: bool = False,
    retries: int = 0,
    on_grads: Callable[[Any], Any] | None = None,
    after: Callable[[Any, Any], Any] | None = None,
    **kwargs: Any,
) -> Callable[..., tuple[Any, ...]]: ...
def train_step(
    loss_fn: Callable[..., Any],
    tx: Any,
    *,
    transform: Callable[..., Any] | None = None,
    has_state: bool = False,
    has_aux: bool = False,
    retries: int = 0,
    on_grads: Any = None,
    after: Any = None,
    **kwargs: Any,
) -> Callable[..., tuple[Any, ...]]:
    """Makes a training step: `value_and_grad` and `apply_gradients` in one function.

    The step is not compiled: use it in `jax.jit`, with `donate_argnums=(0, 1)` to update in place,
    or in `jax.lax.scan`, `jax.vmap`, `jax.shard_map`.

    Args:
      loss_fn: the loss, `loss_fn(params, *args)`, a floating-point scalar, preferably in float32.
      tx: the optimizer: a `jaxscale.loss_scaled` one, or any other, which applies every step, even
        bad ones. It gets the loss as `value`. If its `update` needs further arguments, write the
        step yourself.
      transform: the function that differentiates: `None` for `jax.value_and_grad`, or
        `equinox.filter_value_and_grad` or the like.
      has_state: whether `loss_fn` carries state besides the parameters, such as batch statistics
        or an `equinox.nn.State`. It is then `loss_fn(params, state, *args)` and returns
        `(loss, state)`. A skipped step keeps the old state. If the state may become NaN while loss
        and gradients are finite, let `loss_fn` return
        `jnp.where(jaxscale.all_finite(state), loss, jnp.nan)`: then such a step is also skipped.
      has_aux: whether `loss_fn` returns `(loss, aux)`; with `has_state`, `(loss, (state, aux))`.
      retries: how many times a step may repeat the backward pass at a lower scale if its loss is
        finite and its gradients are not, so that no batch is lost to the search for a scale.
        `total_retries` in the state counts them. If even the last pass fails, the cause lies
        elsewhere: the scale then moves as after a single overflow, not as after one for each pass.
        The passes are a loop, so the model is compiled once. The loop carries all gradients, which
        takes temporary memory even if nothing overflows, and it has no reverse-mode derivative.
        With 0 there is no loop.
      on_grads: a function that gets the gradients and returns those to use: `jax.lax.pmean` in
        `pmap`, clipping by example, masks. In every pass it gets the gradients, unscaled and in
        float32 or wider. It returns gradients of the same structure and dtypes, and of the same
        shapes or, if they came by example, of the shapes of the parameters. If it gets or returns
        an inf or a NaN, the step is skipped, so clipping cannot hide an overflow. All devices along
        the axes that it or `loss_fn` averages over skip and repeat together, even without the
        `axis_name` of `tx`.
      after: a function `after(params, state)` of the new parameters and the state that returns
        the next state, for moving averages of the parameters and target networks. Its result is
        used if the optimizer made a step: with `jaxscale.multi_steps`, once for each group of
        micro-batches. If an average starts as the parameters and both are donated, start it from a
        copy, `jax.tree.map(jnp.copy, params)`. It needs `has_state`. It should have no side
        effects: it may run even if the optimizer made no step, and its result is then dropped.
      **kwargs: passed to `transform`.

    Warns:
      UserWarning: once, if `tx` is a bare optimizer. To say that this is intentional, pass
        `loss_scaled(tx, None, skip_nonfinite=False)`. And if `tx` has a `loss_scaled` optimizer
        inside of another one, such as an `optax.chain`: then nothing else is skipped.

    Returns:
      `step(params, opt_state, *args) -> (params, opt_state, loss)`; with `has_state`
      `step(params, opt_state, state, *args) -> (params, opt_state, state, loss)`. With `has_aux`
      the last output is `(loss, aux)`. Keyword arguments go to `loss_fn`. The loss is not scaled.
      Parameters and states keep their shapes and dtypes, so that the step compiles once.

    Raises:
      TypeError: if `tx` is not an optimizer; when called, if `opt_state` is not the state of `tx`,
        or if `loss_fn` takes other arguments or returns something else.
      ValueError: if `retries` is below 0, or above 0 without a loss scale that moves, or if `after`
        comes without `has_state`; when called, if `opt_state` belongs to other parameters, or if
        `loss_fn` or a hook changes the structure or the shapes of the state or of the gradients.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> import jaxscale
      >>> def loss_fn(w, x):
      ...     return jnp.mean((w.astype(jnp.float16) * x - 1).astype(jnp.float32) ** 2)
      >>> tx = jaxscale.loss_scaled(optax.sgd(0.1))
      >>> step = jax.jit(jaxscale.train_step(loss_fn, tx, retries=10))
      >>> w = jnp.zeros(())
      >>> w, opt_state, loss = step(w, tx.init(w), jnp.ones(4, jnp.float16))
      >>> print(w, loss, opt_state.total_retries)
      0.2 1.0 1
    """
    if after is not None and not has_state:
        raise ValueError(
            "`train_step(after=...)` needs has_state=True, so that the step has a state to give it."
        )
    order = "(params, opt_state, ...)"
    if has_state:
        order = "(params, opt_state, state, ...)"
    names = StepNames(
        call="train_step",
        opt_state="train_step(...)(opt_state=...)",
        order=order,
        state="train_step(has_state=True)",
    )
    return build_step(
        names,
        loss_fn,
        tx,
        transform=transform,
        has_state=has_state,
        has_aux=has_aux,
        retries=retries,
        on_grads=on_grads,
        after=after,
        kwargs=kwargs,
    )


@dataclasses.dataclass(frozen=True)
class StepNames:
    """What messages call a step and the parts of its call.

    Attributes:
      call: the function that makes the step.
      opt_state: where the step is given the state of the optimizer.
      order: the arguments of the step.
      state: where what is carried besides the parameters comes from.
      way_out: what to do about the state of another optimizer, if not to call `init`.
      warnings_given: filled by the first warning of a bare optimizer, so that it is the only one.
    """

    call: str
    opt_state: str
    order: str = ""
    state: str = ""
    way_out: str = MADE_BY_INIT
    warnings_given: list[str] = dataclasses.field(default_factory=list)


def build_step(
    names: StepNames,
    loss_fn: Callable[..., Any],
    tx: Any,
    *,
    transform: Callable[..., Any] | None = None,
    has_state: bool = False,
    has_aux: bool = False,
    retries: int = 0,
    on_grads: Any = None,
    after: Any = None,
    kwargs: Mapping[str, Any],
) -> Callable[..., tuple[Any, ...]]:
    """Makes a `train_step` under the names that it has in a front end."""
    call = names.call
    plan = StepPlan(
        call=call,
        loss_fn=loss_fn,
        transform=transform or jax.value_and_grad,
        has_state=has_state,
        has_aux=has_aux,
        retries=retries,
        kwargs=kwargs,
        on_grads=on_grads,
        warnings_given=names.warnings_given,
    )
    own = as_optimizer(call, tx)
    plan.check_retries(own)
    if find_wrapped_optimizer(tx) is None:
        # No `loss_scaled` is visible from outside, but there may be one inside, such as in an
        # `optax.chain`. It shows only in a state. So states are made, without a model, to warn of a
        # bare optimizer before the first step.
        for state in possible_states(tx):
            plan.warn_if_bare(own, state)

    def step(
        params: Params, opt_state: OptState, *args: Any, **loss_kwargs: Any
    ) -> tuple[Any, ...]:
        before = own.enter(names.opt_state, opt_state, names.order)
        own.check_same(names.opt_state, before, params, names.way_out)
        carried: tuple[Any, ...] = ()  # () or (state,)
        if has_state:
            if not args:
                raise TypeError(
                    f"`train_step(has_state=True)` returns a step that takes {names.order}."
                )
            carried = args[:1]
            args = args[1:]
        # Equinox invalidates a state that was replaced, so each reader gets a copy.
        leaves, treedef = jax.tree.flatten(carried)

        def backward(scaling: ScaleState) -> Pass:
            copy = treedef.unflatten(leaves)
            return plan.differentiate(scaling, params, *copy, *args, **loss_kwargs)

        traced = is_traced(params, before, leaves, args, loss_kwargs)
        made = plan.make_step(own, before, params, backward, traced=traced)
        output = made.run.loss
        if has_aux:
            output = (made.run.loss, made.run.aux)
        if not has_state:
            return made.params, made.opt_state, output

        (old,) = treedef.unflatten(leaves)
        state = select_new(names.state, made.applied, made.run.state, old)
        if after is not None:
            leaves, treedef = jax.tree.flatten(state)  # a copy for each reader
            hooked = after(made.params, treedef.unflatten(leaves))
            unhooked = treedef.unflatten(leaves)
            state = select_new("train_step(after=...)", made.stepped, hooked, unhooked)
        return made.params, made.opt_state, state, output

    return name_step(step)


def name_step(step: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a step the name by which profiles and logs show it."""
    step.__name__ = "train_step"
    step.__qualname__ = "train_step"
    return step
