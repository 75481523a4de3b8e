"""`scale_backward`: a function whose backward pass is scaled, while nothing outside of it is.

The function is traced, and split in two (see `head_and_tail`). It becomes one `jax.custom_vjp`,
whose rule runs both parts forward and back (see `backward_plan`).
"""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax

from .. import _jax
from .._boundary import check_cotangent, mark_boundary, under_autocast
from .._trees.checks import int32, normal_float32
from .._trees.flat import Flat, array_names
from .._trees.nnx_objects import wrap_call
from .backward_plan import BackwardPlan, Options

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")

_NO_FORWARD = (
    "`scale_backward(fun)` was differentiated in forward mode (`jax.jvp`, `jax.jacfwd`, "
    "`jax.linearize`). There is no cotangent to scale. Differentiate `fun` itself, or use reverse "
    "mode: `jax.grad`, `jax.vjp`."
)
_HALF_INPUT = (
    "`scale_backward(fun)` was differentiated by its input {}, which is {}: a gradient of that "
    "dtype flushes to 0 as it is unscaled. Keep parameters in float32 and cast them inside of "
    "`fun`; or let `fun` include what made the input, such as the whole model or the loss."
)

_WAY_OUT = (
    "Call what is at that line outside of the function that `scale_backward` wraps, such as on "
    "what goes into it."
)
_naming_the_line = functools.partial(
    _jax.naming_the_line, "scale_backward(fun)", _WAY_OUT
)


def scale_backward(
    fun: Callable[_Args, _Result],
    scale: Any = "auto",
    *,
    retries: int = 2,
    axis_name: Any = None,
) -> Callable[_Args, _Result]:
    """Returns the function with a scaled backward pass: loss scaling without a state.

    It is for trainers that call `jax.value_and_grad` and the optimizer themselves: give them the
    loss, or the model, wrapped by this. Values are unchanged, and the gradients that come out are
    unscaled. Wrap the optimizer by `jaxscale.skip_nonfinite`, as a bad batch still gives bad
    gradients. In a step of your own, `jaxscale.train_step` does it all.

    The function is traced, as by `jax.jit`. What follows its last half-precision value, such as
    the loss, runs backward unscaled in float32. The cotangents that reach half precision are
    multiplied by one power of two, which brings the largest to about 1, however large the loss is.
    The gradients for all inputs are divided by that number, in float32 or wider. Matrix products
    in float32 count as half precision if a `jaxscale.autocast` is around the function, or if there
    is nothing else in half precision.

    Loops and branches belong to one side as a whole: wrap the loss inside of a `jax.lax.scan`
    over micro-batches. Around it the scale would be about 1, however small the gradients are.
    `jit`, `shard_map` and `jax.checkpoint` are entered. A `jax.checkpoint` outside of the wrapped
    function is cheaper than one inside, which is computed again with each retry.

    A backward rule that is not linear, such as `clip_gradient` in JAX's documentation, sees scaled
    cotangents inside of the function. Apply it outside, to what goes in, or clip in the optimizer.

    Args:
      fun: a function, such as a loss, Linen's `model.apply`, a module or a method of NNX, or a
        module of Equinox. Its inputs and outputs may be any trees. Arrays that it closes over
        get gradients, too.
      scale: `"auto"`, or a number to scale by.
      retries: how often the backward pass may be repeated, each time at a 16th of the scale, if
        the gradients are not finite and the cotangents were. The forward pass is not repeated.
        Gradients that become 2**15 times larger on their way repeat it in every step; for these
        `jaxscale doctor` says which number to pass as `scale`. The loop keeps all gradients of
        `fun` in memory at once, where an optimizer might use each as it comes. On a CPU XLA takes
        many times as long for a convolution in a loop. 0 compiles to no loop, and the backward
        pass can be differentiated in reverse mode. That second pass is not scaled: wrap what is
        made of the gradients, such as a penalty, by `scale_backward`, too.
      axis_name: further axes of `shard_map` or `pmap` along which devices are to use one scale.
        They agree by themselves along those that need it: where gradients are summed, and
        where `fun` itself communicates.

    Returns:
      A function with the arguments, the outputs and the signature of `fun`.

    Raises:
      TypeError: if `fun` is not callable, or `scale` or `retries` is not a number. When
        differentiated: in forward mode (inside of `jax.jit` the words are JAX's); by an input in
        float16, or through an output in it, as such a cotangent has lost the small values already
        (bfloat16 has not); or twice in reverse mode with retries.
      ValueError: if `scale` is not positive, or not normal in float32, or if `retries` is below 0.

    Warns:
      UserWarning: if its backward pass is differentiated in reverse mode, outside of another one.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jaxscale
      >>> def loss_fn(w, x):
      ...     y = w.astype(jnp.float16) * x
      ...     return 2.0**-30 * jnp.sum(y.astype(jnp.float32))
      >>> w, x = jnp.float32(1), jnp.float16(3)
      >>> jax.grad(loss_fn)(w, x)
      Array(0., dtype=float32)
      >>> jax.grad(jaxscale.scale_backward(loss_fn))(w, x) * 2.0**30
      Array(3., dtype=float32)
    """
    if not callable(fun):
        raise TypeError(
            f"`scale_backward(fun)` must be a function, got {type(fun).__name__}. Pass the loss "
            "or the model itself, such as `model.apply`, and not what it returns."
        )
    is_auto = isinstance(scale, str)
    if is_auto and scale != "auto":
        raise ValueError(
            f'`scale_backward(scale=...)` must be "auto" or a positive number, got {scale!r}.'
        )
    number = None if is_auto else normal_float32("scale_backward", "scale", scale)
    retries = int32("scale_backward", "retries", retries, 0, "retries")
    return wrap_call(functools.partial(_call, Options(number, retries, axis_name)), fun)


def _call(options: Options, fun: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Calls `fun` with a scaled backward pass."""
    output_names: list[str] = []  # of the arrays alone

    def call_and_name(*args: Any, **kwargs: Any) -> Any:
        output = fun(*args, **kwargs)
        output_names[:] = array_names(output, jax.Array)
        return output

    flat = Flat(call_and_name, args, kwargs, getattr(fun, "__name__", "scale_backward"))
    # A `custom_vjp` function must not close over what it is differentiated by. So whatever the
    # function closes over, such as tracers, becomes an input.
    jaxpr, consts = _jax.without_constants(jax.make_jaxpr(flat)(*flat.arrays))
    program = _jax.closed(jaxpr)
    input_names = ["that it closes over"] * len(consts)
    input_names += [f"args{name}" for name in array_names(args)]
    input_names += [f"kwargs{name}" for name in array_names(kwargs)]
    # Read now, as JAX may trace the backward pass after the `autocast` has ended.
    is_under_autocast = under_autocast.get()

    @functools.cache
    def plan_for(perturbed: tuple[bool, ...]) -> BackwardPlan:
        return BackwardPlan(program, is_under_autocast, perturbed)

    @jax.custom_vjp
    def scaled(*inputs: Any) -> Any:
        return tuple(_jax.jaxpr_as_fun(program)(*inputs))

    def run_forward(*primals: Any) -> Any:
        values = []
        perturbed = []
        for primal, name in zip(primals, input_names, strict=True):
            value = primal.value
            is_perturbed = primal.perturbed and _jax.holds_inexact(value)
            if is_perturbed and _jax.has_narrow_range(value.dtype):
                raise TypeError(_HALF_INPUT.format(name, value.dtype))
            values.append(value)
            perturbed.append(is_perturbed)
        with _naming_the_line():
            return plan_for(tuple(perturbed)).run_forward(values)

    def run_backward(pull: Any, cotangents: Any) -> Any:
        for cotangent, name in zip(cotangents, output_names, strict=True):
            check_cotangent(cotangent, name)
        with _naming_the_line():
            return pull(cotangents, options)

    scaled.defvjp(run_forward, run_backward, symbolic_zeros=True)
    try:
        with mark_boundary():
            outputs = scaled(*consts, *flat.arrays)
    except TypeError as error:
        if not _jax.is_of_forward_mode(error):
            raise
        raise TypeError(_NO_FORWARD) from error
    return flat.restored(outputs)
