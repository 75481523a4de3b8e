"""Gradients of a loss that are scaled in the backward pass and unscaled after it.

The cotangent of the loss is multiplied by the loss scale, the *seed*. The seed leaves the function
as an auxiliary output, so that the gradients are divided by the very number that scaled them.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar, overload

import jax
import jax.numpy as jnp

from .._state.find import find_scale
from .._state.scale import UnitLossScaleState
from .._trees.gradient_leaves import map_gradients
from .._trees.leaves import is_array_like, widen
from .._trees.pytrees import PyTree, ScaleState
from .facts import Facts
from .scaled import Scaled, representable

_Args = ParamSpec("_Args")
_Aux = TypeVar("_Aux")


class Seeded(NamedTuple):
    """The auxiliary output of a seeded function."""

    aux: Any
    seed: Any  # the factor of the cotangent, `None` at a scale of 1


class Retries(NamedTuple):
    """The outcome of repeating the backward pass of a step."""

    number: jax.Array  # i32[], how many passes came before the last one
    scaling: Any  # the scale state to go on with


class BackwardPass(NamedTuple):
    """The results of one forward and backward pass, and the facts about them."""

    grads: Scaled
    loss: Any = None  # f32[], `None` if it is not known
    aux: Any = None  # what else the loss function returned, if it does
    before_hook: Scaled | None = None  # what `on_grads` got, if it changed that
    facts: Facts | None = None
    retries: Retries | None = None  # if the pass may be repeated


@overload
def value_and_grad(
    fun: Callable[_Args, Any],
    scaling: PyTree,
    *,
    transform: Callable[..., Any] | None = None,
    has_aux: Literal[False] = False,
    **kwargs: Any,
) -> Callable[_Args, tuple[jax.Array, Any]]: ...
@overload
def value_and_grad(
    fun: Callable[_Args, tuple[Any, _Aux]],
    scaling: PyTree,
    *,
    transform: Callable[..., Any] | None = None,
    has_aux: Literal[True],
    **kwargs: Any,
) -> Callable[_Args, tuple[tuple[jax.Array, _Aux], Any]]: ...
@overload
def value_and_grad(
    fun: Callable[_Args, Any],
    scaling: PyTree,
    *,
    transform: Callable[..., Any] | None = None,
    has_aux: bool,
    **kwargs: Any,
) -> Callable[_Args, tuple[Any, Any]]: ...
def value_and_grad(
    fun: Callable[..., Any],
    scaling: PyTree,
    *,
    transform: Callable[..., Any] | None = None,
    has_aux: bool = False,
    **kwargs: Any,
) -> Callable[..., Any]:
    """Returns a function that evaluates a loss and its gradients, with a scaled backward pass.

    The backward pass is scaled, not the loss: the cotangent starts at the loss scale instead
    of 1. So the loss is exact, and scaling cannot make it overflow. Call this inside the training
    step, with the state of that step.

    A backward rule that is not linear sees scaled cotangents. So a `jax.custom_vjp` that clips
    them, as `clip_gradient` in JAX's documentation does, clips at the wrong number. Clip the
    gradients that come back instead, or clip in `on_grads` of `jaxscale.train_step`.

    Args:
      fun: a function that returns a floating-point scalar, preferably in float32; with
        `has_aux`, a pair of that and anything else.
      scaling: a `jaxscale.LossScaleState`, or a tree that holds exactly one, such
        as the state of a `jaxscale.loss_scaled` optimizer or a `TrainState`.
      transform: the function that differentiates: `None` for `jax.value_and_grad`, or
        `equinox.filter_value_and_grad`, `flax.nnx.value_and_grad` or the like. It may also
        be one of these inside a `vmap`, for gradients by example.
      has_aux: whether `fun` returns a pair.
      **kwargs: passed to `transform`: `argnums`, `allow_int` and so on.

    Returns:
      A function with the arguments of `fun`. It returns what `transform` would:
      `(loss, grads)`, or `((loss, aux), grads)`. The gradients are unscaled. Those that would
      be float16 or bfloat16 are float32. They may hold inf or NaN: the optimizer skips such a
      step. The cotangent of a float16 loss is capped at 2**15, the largest power of two of
      its dtype, and the gradients are then divided by that.

    Raises:
      ValueError: if `scaling` holds no loss scale, or several, or those of a population.
      TypeError: when called, if the loss is not a floating-point scalar, or if `transform`
        does not return the loss and the gradients.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jaxscale
      >>> scaling = jaxscale.DynamicLossScale().init()
      >>> loss_fn = lambda w: ((w * 2.0**-13) ** 2).astype(jnp.float32)
      >>> w = jnp.ones((), jnp.float16)
      >>> jax.value_and_grad(loss_fn)(w)  # the true gradient is 2**-25
      (Array(0., dtype=float32), Array(0., dtype=float16))
      >>> jaxscale.value_and_grad(loss_fn, scaling)(w)
      (Array(0., dtype=float32), Array(2.9802322e-08, dtype=float32))
    """
    transform = transform or jax.value_and_grad
    state = find_scale("value_and_grad", "scaling", scaling)
    make_pass = scale_transform(
        "value_and_grad", fun, state, has_aux, transform, kwargs
    )

    @functools.wraps(fun)
    def value_and_grad_fun(*args: Any, **kwargs: Any) -> Any:
        result = make_pass(*args, **kwargs)
        grads = map_gradients(widen, result.grads.divided)
        if has_aux:
            return (result.loss, result.aux), grads
        return result.loss, grads

    return value_and_grad_fun


@overload
def grad(
    fun: Callable[_Args, tuple[Any, _Aux]],
    scaling: PyTree,
    *,
    transform: Callable[..., Any] | None = None,
    has_aux: Literal[True],
    **kwargs: Any,
) -> Callable[_Args, tuple[Any, _Aux]]: ...
@overload
def grad(
    fun: Callable[_Args, Any],
    scaling: PyTree,
    *,
    transform: Callable[..., Any] | None = None,
    has_aux: bool = False,
    **kwargs: Any,
) -> Callable[_Args, Any]: ...
def grad(
    fun: Callable[..., Any],
    scaling: PyTree,
    *,
    transform: Callable[..., Any] | None = None,
    has_aux: bool = False,
    **kwargs: Any,
) -> Callable[..., Any]:
    """Returns a function that evaluates the gradients of a loss, with a scaled backward pass.

    Args:
      fun: as in `value_and_grad`.
      scaling: as in `value_and_grad`.
      transform: the function that differentiates: `None` for `jax.grad`, or
        `equinox.filter_grad`, `flax.nnx.grad` or the like, as in `value_and_grad`.
      has_aux: whether `fun` returns a pair.
      **kwargs: passed to `transform`.

    Returns:
      A function with the arguments of `fun`, which returns the gradients as `value_and_grad`
      does, or `(grads, aux)`.

    Raises:
      ValueError: as in `value_and_grad`.
      TypeError: as in `value_and_grad`, or if `transform` returns more than the gradients.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxscale
      >>> scaling = jaxscale.FixedLossScale(2.0**10).init()
      >>> jaxscale.grad(lambda w: jnp.sum(w**2), scaling)(jnp.array(3.0))
      Array(6., dtype=float32)
    """
    transform = transform or jax.grad
    state = find_scale("grad", "scaling", scaling)
    make_pass = scale_transform("grad", fun, state, has_aux, transform, kwargs)

    @functools.wraps(fun)
    def grad_fun(*args: Any, **kwargs: Any) -> Any:
        result = make_pass(*args, **kwargs)
        grads = map_gradients(widen, result.grads.divided)
        if has_aux:
            return grads, result.aux
        return grads

    return grad_fun


def scale_transform(
    call: str,
    fun: Callable[..., Any],
    state: ScaleState,
    has_aux: bool,
    transform: Callable[..., Any],
    kwargs: Mapping[str, Any],
    name: str = "fun",
) -> Callable[..., BackwardPass]:
    """Returns a function that makes a pass: a loss, its auxiliary output, its `Scaled` gradients.

    A `state` of `None` is a scale of 1. Messages call `fun` by the `name` that it has in the public
    function, `call`.
    """
    scale: Any = None
    if state is not None and not isinstance(state, UnitLossScaleState):
        scale = jax.lax.stop_gradient(state.loss_scale)

    @functools.wraps(fun)
    def seeded(*args: Any, **kwargs: Any) -> Any:
        loss, aux = _split(call, name, fun(*args, **kwargs), has_aux)
        if scale is None:
            return loss, Seeded(aux, None)
        # How large it may be depends on the dtype of the loss, which is known only here.
        seed = representable(scale, loss.dtype)
        return _with_tangent(jnp.multiply, loss, seed), Seeded(aux, seed)

    differentiated = transform(seeded, has_aux=True, **kwargs)

    def make_pass(*args: Any, **kwargs: Any) -> BackwardPass:
        loss, aux, seed, grads = _unpack_output(call, differentiated(*args, **kwargs))
        if seed is not None and seed.ndim > 0:
            # A `vmap` in `transform` gave it axes, in any order, and maybe of length 0.
            seed = representable(scale, seed.dtype)
        # A derivative of this loss must not be scaled again.
        if seed is not None and loss is not None:
            loss = _with_tangent(jnp.divide, loss, seed)
        return BackwardPass(Scaled(grads, seed), loss, aux)

    return make_pass


def _unpack_output(call: str, output: object) -> tuple[Any, Any, Any, Any]:
    """Returns loss, auxiliary output, seed and gradients of what a transform returned.

    Raises a `TypeError` for another form.
    """
    like = "value_and_grad"
    form = "(loss, grads), and with has_aux=True ((loss, aux), grads)"
    if call == "grad":
        like = "grad"
        form = "the gradients, and with has_aux=True (grads, aux)"
    match output:
        case ((loss, Seeded() as seeded), grads) if like == "value_and_grad":
            return loss, seeded.aux, seeded.seed, grads
        case (grads, Seeded() as seeded) if like == "grad":
            return None, seeded.aux, seeded.seed, grads
        case (_, Seeded()):
            got = "gradients alone. Pass `jax.value_and_grad`, or call `jaxscale.grad`."
        case ((_, Seeded()), _):
            got = (
                "the loss as well. Pass `jax.grad`, or call `jaxscale.value_and_grad`."
            )
        case _:
            got = f"{type(output).__name__}."
    raise TypeError(
        f"`{call}(transform=...)` must differentiate as `jax.{like}` does, which returns {form}, "
        f"got {got}"
    )


def _split(
    call: str, name: str, output: object, has_aux: bool
) -> tuple[jax.Array, Any]:
    """Returns the loss as an array, and the auxiliary output, or raises a `TypeError`."""
    aux = None
    if has_aux:
        if not (isinstance(output, tuple) and len(output) == 2):
            raise TypeError(
                f"`{call}({name}, has_aux=True)`: `{name}` must return a pair (loss, aux), got "
                f"{type(output).__name__}."
            )
        output, aux = output
    shape = getattr(output, "shape", ())
    dtype = getattr(output, "dtype", type(output))
    is_floating = dtype is float or jnp.issubdtype(dtype, jnp.floating)
    if not is_array_like(output) or shape != () or not is_floating:
        got = f"{getattr(dtype, '__name__', dtype)}{list(shape)}"
        hint = "Reduce the loss to one number, for example with `.mean()`."
        if output is None:
            got = "NoneType"
            hint = f"Does `{name}` end without `return loss`?"
        elif isinstance(output, tuple):
            hint += " With an auxiliary output, pass has_aux=True."
        elif shape == () and not is_floating:
            hint = (
                "A number of that kind has no gradient. Return a loss that is computed in floating "
                "point, not a count or a comparison; of a complex one, the real part."
            )
        raise TypeError(
            f"`{call}({name})`: `{name}` must return a floating scalar, got {got}. {hint}"
        )
    return jnp.asarray(output), aux


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _with_tangent(
    op: Callable[[Any, Any], Any], loss: jax.Array, seed: jax.Array
) -> jax.Array:
    """Returns `loss`, whose tangents become `op(tangent, seed)`, and hence its cotangents."""
    return loss


@_with_tangent.defjvp
def _with_tangent_jvp(
    op: Callable[[Any, Any], Any], primals: Any, tangents: Any
) -> Any:
    # From a JVP rule JAX derives the reverse mode, so that both modes and their nestings work.
    loss, seed = primals
    tangent, _ = tangents
    return _with_tangent(op, loss, seed), op(tangent, seed)
