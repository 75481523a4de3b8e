"""The whole training step in one function: loss, gradients, retries, skip.

`make_step` makes the backward passes, with the hook and the retries; all that follows is in
`advance`. The steps of `jaxscale.flax` and `jaxscale.nnx` are this one, under their own names:
`build_step`.
"""

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, Literal, NamedTuple, ParamSpec, TypeVar, overload

import jax
import optax

from .._gradients.value_and_grad import BackwardPass, scale_transform
from .._gradients.verdict import axis_names
from .._jax import (
    AxisNames,
    collective_axes,
    is_visible_in_types,
    users_stacklevel,
)
from .._state.optimizer import LossScaledState
from .._trees.arguments import int32
from .._trees.flat_functions import Traced
from .._trees.grammar import with_article
from .._trees.params import combine, trained_params
from .._trees.pytrees import OptState, Params, ScaleState
from .._trees.selection import select_new
from .._went import refuse_gone
from .advance import find_pass_facts
from .bare_optimizer import (
    BareOptimizer,
    as_optimizer,
    holds_loss_scaled,
    possible_states,
    say_inside,
)
from .loss_calls import call_hook, explain_mistakes
from .retry import is_traced, repeat_backward
from .wrapped_optimizer import MADE_BY_INIT, WrappedOptimizer

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
      ValueError: if `retries` is below 0, or above 0 without a loss scale that moves; when
        called, if `opt_state` belongs to other parameters, or if `loss_fn` or the hook changes the
        structure or the shapes of the state or of the gradients.

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
    refuse_gone("train_step", kwargs)
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
        explain_mistakes(names.call, loss_fn, has_state, has_aux),
        tx,
        transform=transform,
        has_state=has_state,
        has_aux=has_aux,
        retries=retries,
        on_grads=on_grads,
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
    kwargs: Mapping[str, Any],
) -> Callable[..., tuple[Any, ...]]:
    """Makes a `train_step` under the names that it has in a front end."""
    call = names.call
    transform = transform or jax.value_and_grad
    optimizer = as_optimizer(call, tx)
    _check_retries(call, optimizer, retries)
    if isinstance(optimizer, BareOptimizer):
        # No `loss_scaled` is visible from outside, but there may be one inside, such as in an
        # `optax.chain`. It shows only in a state. So states are made, without a model, to warn of a
        # bare optimizer before the first step.
        for state in possible_states(tx):
            _warn_if_bare(names, state)

    def step(
        params: Params, opt_state: OptState, *args: Any, **loss_kwargs: Any
    ) -> tuple[Any, ...]:
        before = optimizer.enter(names.opt_state, opt_state, names.order)
        optimizer.check_same(names.opt_state, before, params, names.way_out)
        if isinstance(optimizer, BareOptimizer):
            _warn_if_bare(names, before.inner_state)
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

        def backward(scaling: ScaleState) -> BackwardPass:
            copy = treedef.unflatten(leaves)
            make_pass = scale_transform(
                call,
                loss_fn,
                scaling,
                has_state or has_aux,
                transform,
                kwargs,
                "loss_fn",
            )
            return make_pass(params, *copy, *args, **loss_kwargs)

        inputs = (params, before, leaves, args, loss_kwargs)
        made = make_step(
            call, optimizer, before, params, backward, inputs, retries, on_grads
        )
        loss = made.backward_pass.loss
        aux = made.backward_pass.aux
        if not has_state:
            output = (loss, aux) if has_aux else loss
            return made.params, made.opt_state, output

        state = aux
        output = loss
        if has_aux:
            state, aux = aux
            output = (loss, aux)
        (old,) = treedef.unflatten(leaves)
        state = select_new(names.state, made.applied, state, old)
        return made.params, made.opt_state, state, output

    return name_step(step)


def name_step(step: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a step the name by which profiles and logs show it."""
    step.__name__ = "train_step"
    step.__qualname__ = "train_step"
    return step


class MadeStep(NamedTuple):
    """A step that was made or skipped."""

    backward_pass: BackwardPass  # the last one
    params: Any
    opt_state: Any  # as users get it
    # bool[], whether it was not skipped; `None` if no step ever is
    applied: jax.Array | None


def make_step(
    call: str,
    optimizer: WrappedOptimizer,
    state: LossScaledState,
    params: optax.Params,
    backward: Callable[[Any], BackwardPass],
    inputs: Any,
    retries: int,
    on_grads: Callable[[Any], Any] | None,
) -> MadeStep:
    """Makes the backward passes of a step, and the step. `backward` makes one pass.

    The `inputs` are all that the step was given: they tell whether it is traced.
    """
    start = optimizer.find_start_scale(state)
    if not retries and on_grads is None:
        return apply_pass(optimizer, backward(start), state, params, {})

    def hooked_pass(scaling: ScaleState) -> BackwardPass:
        backward_pass = backward(scaling)
        if on_grads is None:
            return backward_pass
        return call_hook(call, on_grads, backward_pass, params)

    # A pass that is repeated, or exchanges numbers in a hook, is traced once, before it is needed:
    # its program says along which axes the devices have to agree.
    traced = is_traced(inputs)
    one_pass = hooked_pass
    if optimizer.skips and traced:
        one_pass = Traced(hooked_pass, start)
        axes = collective_axes(one_pass.jaxpr)
        axis_name = _add_axes(optimizer.axis_name, axes, on_grads is not None)
        optimizer = dataclasses.replace(optimizer, axis_name=axis_name)
    if not retries:
        return apply_pass(optimizer, one_pass(start), state, params, {})

    def pass_with_facts(scaling: ScaleState) -> BackwardPass:
        backward_pass = one_pass(scaling)
        trained = trained_params(params, backward_pass.grads.grads)
        return find_pass_facts(optimizer, backward_pass, state, trained, {})

    backward_pass = repeat_backward(
        call, optimizer.policy, pass_with_facts, start, retries, traced=traced
    )
    return apply_pass(optimizer, backward_pass, state, params, {})


def apply_pass(
    optimizer: WrappedOptimizer,
    backward_pass: BackwardPass,
    state: LossScaledState,
    params: Params,
    extra_args: Mapping[str, Any],
) -> MadeStep:
    """Makes a step of a backward pass. The caller has checked the state."""
    # Leaves without a gradient go around the step, as only arrays can be selected and compiled.
    trained = trained_params(params, backward_pass.grads.grads)
    trained, new_state = optimizer.apply(backward_pass, state, trained, extra_args)
    verdict = optimizer.find_verdict(new_state)
    applied = None
    if verdict is not None:
        applied = verdict.step_applied
    return MadeStep(
        backward_pass=backward_pass,
        params=combine(trained, params),
        opt_state=optimizer.leave(new_state),
        applied=applied,
    )


def _add_axes(axis_name: AxisNames, axes: Sequence[Any], hooked: bool) -> Any:
    """Adds axes along which a pass exchanges numbers to those whose devices agree."""
    # Devices that part would wait for each other for ever, or go on with other parameters.
    # Without a hook they cannot part unnoticed where types say what differs.
    names = list(axis_names(axis_name))
    for axis in axes:
        may_part = hooked or not is_visible_in_types(axis)
        if may_part and axis not in names:
            names.append(axis)
    if not names:
        return None
    return tuple(names)


def _check_retries(call: str, optimizer: WrappedOptimizer, retries: int) -> None:
    """Raises a `ValueError` if retries cannot help, as the scale of the optimizer is fixed."""
    int32(call, "retries", retries, least=0)
    if not retries or optimizer.can_back_off:
        return
    got = f"one with {with_article(type(optimizer.policy).__name__)}"
    if isinstance(optimizer, BareOptimizer):
        if optimizer.hides_loss_scaled():
            raise ValueError(say_inside(f"{call}(retries={retries})"))
        got = "a bare optimizer"
    raise ValueError(
        f"`{call}(retries={retries})` needs a loss scale that can be lowered, got "
        f"{got}. Write `tx = jaxscale.loss_scaled(tx)`, whose policy lowers it, or leave "
        "`retries` out."
    )


def _warn_if_bare(names: StepNames, opt_state: OptState) -> None:
    """Warns, once in the life of a step, if nothing in a bare optimizer skips bad steps."""
    if names.warnings_given or holds_loss_scaled(opt_state):
        return
    message = (
        f"`{names.call}`: `tx` is a bare optimizer, so the loss is not scaled, and a step with "
        "an inf or a NaN is applied. Wrap it: `tx = jaxscale.loss_scaled(tx)`, or, for "
        "bfloat16 and float32, `jaxscale.skip_nonfinite(tx)`. If this is intentional, write "
        "`jaxscale.loss_scaled(tx, None, skip_nonfinite=False)`."
    )
    names.warnings_given.append(message)
    warnings.warn(message, stacklevel=users_stacklevel())
