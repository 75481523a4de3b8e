"""Gradients that are scaled on their way back, and unscaled where they come out."""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar, overload

import jax
import jax.numpy as jnp

from ._scaling import find_one
from ._state import UnitLossScaleState, divide, representable
from ._tree import map_gradients, widen

_Args = ParamSpec("_Args")
_Aux = TypeVar("_Aux")


class Seeded(NamedTuple):
    """What comes out of a seeded function besides its loss."""

    aux: Any
    seed: Any  # what its cotangent was scaled by, `None` at a scale of 1


@overload
def value_and_grad(
    fun: Callable[_Args, Any],
    scaling: Any,
    *,
    transform: Callable[..., Any] = jax.value_and_grad,
    has_aux: Literal[False] = False,
    **kwargs: Any,
) -> Callable[_Args, tuple[jax.Array, Any]]: ...
@overload
def value_and_grad(
    fun: Callable[_Args, tuple[Any, _Aux]],
    scaling: Any,
    *,
    transform: Callable[..., Any] = jax.value_and_grad,
    has_aux: Literal[True],
    **kwargs: Any,
) -> Callable[_Args, tuple[tuple[jax.Array, _Aux], Any]]: ...
@overload
def value_and_grad(
    fun: Callable[_Args, Any],
    scaling: Any,
    *,
    transform: Callable[..., Any] = jax.value_and_grad,
    has_aux: bool,
    **kwargs: Any,
) -> Callable[_Args, tuple[Any, Any]]: ...
def value_and_grad(
    fun: Callable[..., Any],
    scaling: Any,
    *,
    transform: Callable[..., Any] = jax.value_and_grad,
    has_aux: bool = False,
    **kwargs: Any,
) -> Callable[..., Any]:
    """Returns a function that evaluates a loss and its gradients, scaling on the way.

    What flows backward is scaled, not the loss: the cotangent starts at the loss scale
    instead of 1. So the loss comes back exact and cannot overflow, and the gradients are
    divided by the very number that scaled them. Call this inside the training step, with
    the state of that step.

    Args:
      fun: a function that returns a floating scalar, in float32 preferably; with
        `has_aux` a pair of it and anything.
      scaling: a `jaxscale.LossScaleState`, or a tree that holds exactly one, such
        as the state of a `jaxscale.loss_scaled` optimizer or a `TrainState`.
      transform: what differentiates: `jax.value_and_grad`,
        `equinox.filter_value_and_grad`, `flax.nnx.value_and_grad` or the like, also
        under a `vmap`, for gradients by example.
      has_aux: whether `fun` returns a pair.
      **kwargs: passed to `transform`: `argnums`, `allow_int` and so on.

    Returns:
      A function with the arguments of `fun`. It returns what `transform` would:
      `(loss, grads)`, or `((loss, aux), grads)`. The gradients are unscaled, float32
      where they would be float16 or bfloat16, and may hold inf or NaN, for the optimizer
      to skip. A float16 loss cannot carry a scale above 2**15, the largest power of two
      of its dtype: then the cotangent is capped there, and unscaled by that.

    Raises:
      ValueError: if `scaling` holds no loss scale, or several, or those of a population.
      TypeError: when called, if the loss is not a floating scalar, or if `transform`
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
    seeded, one_seed = seeding("value_and_grad", fun, scaling, has_aux)
    differentiated = transform(seeded, has_aux=True, **kwargs)

    @functools.wraps(fun)
    def value_and_grad_fun(*args: Any, **kwargs: Any) -> Any:
        loss, (aux, seed), grads = with_loss("value_and_grad", differentiated(*args, **kwargs))
        seed = one_seed(seed)
        if seed is not None:  # the loss may be differentiated once more, and by its own rule
            loss = _with_tangent(jnp.divide, loss, seed)
        return ((loss, aux) if has_aux else loss), unseed(grads, seed)

    return value_and_grad_fun


@overload
def grad(
    fun: Callable[_Args, Any],
    scaling: Any,
    *,
    transform: Callable[..., Any] = jax.grad,
    has_aux: Literal[False] = False,
    **kwargs: Any,
) -> Callable[_Args, Any]: ...
@overload
def grad(
    fun: Callable[_Args, tuple[Any, _Aux]],
    scaling: Any,
    *,
    transform: Callable[..., Any] = jax.grad,
    has_aux: Literal[True],
    **kwargs: Any,
) -> Callable[_Args, tuple[Any, _Aux]]: ...
@overload
def grad(
    fun: Callable[_Args, Any],
    scaling: Any,
    *,
    transform: Callable[..., Any] = jax.grad,
    has_aux: bool,
    **kwargs: Any,
) -> Callable[_Args, Any]: ...
def grad(
    fun: Callable[..., Any],
    scaling: Any,
    *,
    transform: Callable[..., Any] = jax.grad,
    has_aux: bool = False,
    **kwargs: Any,
) -> Callable[..., Any]:
    """Returns a function that evaluates the gradients of a loss, scaling on the way.

    Args:
      fun: as in `value_and_grad`.
      scaling: as there.
      transform: what differentiates: `jax.grad`, `equinox.filter_grad`,
        `flax.nnx.grad` or the like.
      has_aux: whether `fun` returns a pair.
      **kwargs: passed to `transform`.

    Returns:
      A function with the arguments of `fun`, which returns the gradients, unscaled and
      in float32 or wider, or `(grads, aux)`.

    Raises:
      ValueError: if `scaling` holds no loss scale, or several, or those of a population.
      TypeError: when called, if the loss is not a floating scalar, or if `transform`
        does not return the gradients alone.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxscale
      >>> scaling = jaxscale.FixedLossScale(2.0**10).init()
      >>> jaxscale.grad(lambda w: jnp.sum(w**2), scaling)(jnp.array(3.0))
      Array(6., dtype=float32)
    """
    seeded, one_seed = seeding("grad", fun, scaling, has_aux)
    differentiated = transform(seeded, has_aux=True, **kwargs)

    @functools.wraps(fun)
    def grad_fun(*args: Any, **kwargs: Any) -> Any:
        grads, (aux, seed) = without_loss("grad", differentiated(*args, **kwargs))
        grads = unseed(grads, one_seed(seed))
        return (grads, aux) if has_aux else grads

    return grad_fun


def seeding(
    call: str, fun: Callable[..., Any], scaling: Any, has_aux: bool
) -> tuple[Callable[..., Any], Callable[[Any], Any]]:
    """Returns `fun` with a scaled cotangent, and what makes one number of the seed of it."""
    state = find_one(call, "scaling", scaling)
    is_unit = isinstance(state, UnitLossScaleState)

    @functools.wraps(fun)
    def seeded(*args: Any, **kwargs: Any) -> Any:
        loss, aux = _split(call, fun(*args, **kwargs), has_aux)
        if is_unit:
            return loss, Seeded(aux, None)
        # Only here is the dtype of the loss known, and with it what number a cotangent of
        # that dtype can be. It leaves as an auxiliary output, so that the gradients are
        # divided by just that number, whatever `transform` does in between.
        seed = seed_of(loss.dtype)
        return _with_tangent(jnp.multiply, loss, seed), Seeded(aux, seed)

    def seed_of(dtype: Any) -> jax.Array:
        return representable(jax.lax.stop_gradient(state.loss_scale), dtype)

    def one_seed(seed: Any) -> Any:
        # A `vmap` in `transform` gives the seed axes, in an order of its own, or of no length.
        return seed if seed is None or not seed.ndim else seed_of(seed.dtype)

    return seeded, one_seed


def unseed(grads: Any, seed: Any) -> Any:
    """Returns gradients without what their cotangent was scaled by."""
    return map_gradients(widen, grads) if seed is None else divide(grads, seed)


def with_loss(call: str, output: Any) -> tuple[Any, Seeded, Any]:
    """Returns loss, what came with it, and gradients, if a transform returned just these."""
    match output:
        case ((loss, Seeded() as seeded), grads):
            return loss, seeded, grads
        case (_, Seeded()):
            got = "gradients alone. Pass `jax.value_and_grad`, or call `jaxscale.grad`."
        case _:
            got = f"{type(output).__name__}."
    raise TypeError(
        f"`{call}(transform=...)` must differentiate as `jax.value_and_grad` does, which returns "
        f"(loss, grads), and with has_aux=True ((loss, aux), grads), got {got}"
    )


def without_loss(call: str, output: Any) -> tuple[Any, Seeded]:
    """Returns gradients and what came with them, if a transform returned just these."""
    match output:
        case (grads, Seeded() as seeded):
            return grads, seeded
        case ((_, Seeded()), _):
            got = "the loss as well. Pass `jax.grad`, or call `jaxscale.value_and_grad`."
        case _:
            got = f"{type(output).__name__}."
    raise TypeError(
        f"`{call}(transform=...)` must differentiate as `jax.grad` does, which returns the "
        f"gradients, and with has_aux=True (grads, aux), got {got}"
    )


def _split(call: str, output: Any, has_aux: bool) -> tuple[jax.Array, Any]:
    aux = None
    if has_aux:
        if not (isinstance(output, tuple) and len(output) == 2):
            raise TypeError(
                f"`{call}(fun, has_aux=True)`: `fun` must return a pair (loss, aux), got "
                f"{type(output).__name__}."
            )
        output, aux = output
    shape, dtype = getattr(output, "shape", ()), getattr(output, "dtype", type(output))
    if shape != () or not (dtype is float or jnp.issubdtype(dtype, jnp.floating)):
        hint = " With an auxiliary output, pass has_aux=True." * isinstance(output, tuple)
        raise TypeError(
            f"`{call}(fun)`: `fun` must return a floating scalar, got "
            f"{getattr(dtype, '__name__', dtype)}{list(shape)}. Reduce the loss to one "
            f"number, for example with `.mean()`.{hint}"
        )
    return jnp.asarray(output), aux


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _with_tangent(op: Callable[[Any, Any], Any], loss: jax.Array, seed: jax.Array) -> jax.Array:
    """Returns `loss`, whose tangents are `op(tangent, seed)`: so are its cotangents."""
    del op, seed
    return loss


@_with_tangent.defjvp
def _with_tangent_jvp(op: Callable[[Any, Any], Any], primals: Any, tangents: Any) -> Any:
    # A JVP rule, as JAX derives the reverse from it: both modes, and their nestings, work.
    (loss, seed), (tangent, _) = primals, tangents
    return _with_tangent(op, loss, seed), op(tangent, seed)
