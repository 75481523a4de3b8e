"""`scale_backward`: a function whose backward pass is scaled, while nothing outside of it is.

The function is traced, and split in two (see `head_and_tail`). It becomes one function with a rule
of its own, which runs both parts forward and back (see `backward_plan`).
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any, Literal, ParamSpec, TypeVar

import jax
from jax.tree_util import Partial

from .._boundary import NO_FORWARD, check_cotangent, mark_boundary, traced_for
from .._jax import jaxprs
from .._jax.jaxprs import ArrayLike, AxisNames, Flags, SymbolicTangents
from .._trees.arguments import int32, normal_float32
from .._trees.flat_functions import Flat, array_names
from .._trees.nnx_objects import wrap_call
from .backward_plan import plan_for
from .passes import Options

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")

_HALF_INPUT = (
    "`scale_backward(fun)` was differentiated with respect to its input {}, which is {}: a "
    "gradient of that dtype flushes to 0 as it is unscaled. Keep parameters in float32 and "
    "cast them inside `fun`; or let `fun` include what made the input, such as the whole "
    "model or the loss."
)

_WAY_OUT = (
    "Call what is at that line outside of the function that `scale_backward` wraps, such as on "
    "what goes into it."
)
_naming_the_line = functools.partial(
    jaxprs.naming_the_line, "scale_backward(fun)", _WAY_OUT
)


def scale_backward(
    fun: Callable[_Args, _Result],
    scale: ArrayLike | Literal["auto"] = "auto",
    *,
    retries: int = 2,
    axis_name: AxisNames = None,
) -> Callable[_Args, _Result]:
    """Returns the function with a scaled backward pass: loss scaling without a state.

    Use it for trainers that call `jax.value_and_grad` and the optimizer themselves: wrap the loss
    or the model in it. Values are unchanged, and the gradients that come out are unscaled. Wrap the
    optimizer in `jaxscale.skip_nonfinite`, because a bad batch still gives bad gradients. In a step
    of your own, `jaxscale.train_step` does all of this.

    The function is traced, as by `jax.jit`. The part after its last half-precision value, such as
    the loss, runs backward unscaled in float32. The cotangents that reach half precision are
    multiplied by one power of two, however large the loss is. It brings the sum of their magnitudes
    to about 2**15, as a loss scale of 2**15 does for a mean, but the largest to no more than about
    2**10, and to no less than 1. The gradients for all inputs are divided by that number, in
    float32 or wider. Matrix products in float32 count as half precision if a `jaxscale.autocast` is
    around the function, or if there is nothing else in half precision.

    A few cotangents may be so large that the others flush beside them, such as those of a row of
    padding under a norm. If a gradient is almost 0 for that reason, small and large cotangents are
    pulled back apart, each at a power of its own, in two more backward passes. If there still is
    nothing but zeros, because most cotangents flushed, the gradients are NaN, and not 0.

    The function is not cut inside a loop or a branch, so wrap the loss inside a `jax.lax.scan` over
    micro-batches. Around the `scan`, the first pass sees cotangents of 1. If a gradient is almost 0
    then, the pass is repeated at a larger scale, and each number comes from there unless it
    overflows: the gradients are right, at twice the price. Losses in one `scan` that are further
    apart than about 2**-50 still lose the smaller one in silence, and those further apart than
    about 2**-32 if the same parameters have a gradient of both. `jit`, `shard_map` and
    `jax.checkpoint` can be cut. A `jax.checkpoint` outside the wrapped function is cheaper than one
    inside, which is computed again with each retry.

    A backward rule that is not linear, such as `clip_gradient` in JAX's documentation, sees scaled
    cotangents inside the function. Apply it outside, to the inputs, or clip in the optimizer.

    Args:
      fun: a function, such as a loss, Linen's `model.apply`, a module or a method of NNX, or a
        module of Equinox. Its inputs and outputs may be any trees. Arrays that it closes over
        also get gradients.
      scale: `"auto"`, or a number to scale by. Then small and large cotangents are not pulled back
        apart.
      retries: how often the backward pass may be repeated: at a 256th of the scale if the
        gradients are not finite although the cotangents were, and once at a larger one if all
        gradients are small although the cotangents are not. Numbers that were finite are not given
        up for others that are not, and true zeros stay zeros. The forward pass is not repeated. If
        gradients become 2**5 times larger than the cotangents on their way, as may happen in the
        discriminator of a GAN, the pass is repeated in every step; `jaxscale doctor` then says
        which number to pass as `scale`. The loop keeps all gradients of `fun` in memory at once,
        where an optimizer might use each as it comes; in float16 twice, in half precision, unless
        `scale` is a number. On a CPU XLA takes many times as long for a convolution in a loop. With
        0 there is no loop and just one pass, from the same scale: what overflows stays so, and
        where a few cotangents are far larger than the others, gradients may be 0, and nothing says
        so. The backward pass can then be differentiated in reverse mode. That derivative is not
        scaled: wrap what you compute from the gradients, such as a penalty, in `scale_backward` as
        well.
      axis_name: more axes of `shard_map` or `pmap` along which devices are to use one scale.
        Devices already agree along the axes that need it: where gradients are summed, and
        where `fun` itself communicates.

    Returns:
      A function with the arguments, the outputs and the signature of `fun`.

    Raises:
      TypeError: if `fun` is not callable, or `scale` or `retries` is not a number. Also if the
        function is differentiated in forward mode; with respect to an input in float16, or through
        an output in float16, whose cotangent has already lost the small values (in bfloat16 it has
        not); or twice in reverse mode with retries.
      ValueError: if `scale` is not positive, or not normal in float32, or if `retries` is below 0.

    Warns:
      UserWarning: if its backward pass is differentiated in reverse mode outside another
        `scale_backward`.

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
    retries = int32("scale_backward", "retries", retries, least=0)
    return wrap_call(functools.partial(_call, Options(number, retries, axis_name)), fun)


def _call(
    options: Options,
    fun: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Calls `fun` with a scaled backward pass."""
    output_names: list[str] = []  # of the arrays alone

    def call_and_name(*args: object, **kwargs: object) -> Any:
        output = fun(*args, **kwargs)
        output_names[:] = array_names(output, jax.Array)
        return output

    flat = Flat(call_and_name, args, kwargs, getattr(fun, "__name__", "scale_backward"))
    # A function with a rule must not close over what it is differentiated by. So whatever it closes
    # over, such as tracers, becomes an input.
    jaxpr, consts = jaxprs.without_constants(jax.make_jaxpr(flat)(*flat.arrays))
    program = jaxprs.closed(jaxpr)
    input_names = ["that it closes over"] * len(consts)
    input_names += [f"args{name}" for name in array_names(args)]
    input_names += [f"kwargs{name}" for name in array_names(kwargs)]
    # Read now, as JAX may trace the backward pass after the `autocast` has ended.
    is_under_autocast = bool(traced_for.value.dtype)
    if is_under_autocast:
        # It sees the backward pass when it is a jaxpr, and the sums in it are those of the user.
        from .._autocast.interpreter import add_in_float32

        program = add_in_float32(program)

    def run_forward(perturbed: Flags, *inputs: jax.Array) -> Any:
        for value, name in itertools.compress(
            zip(inputs, input_names, strict=True), perturbed
        ):
            if jaxprs.has_narrow_range(value.dtype):
                raise TypeError(_HALF_INPUT.format(name, value.dtype))
        with _naming_the_line():
            plan = plan_for(program, is_under_autocast, perturbed)
            outputs, pull = plan.run_forward(inputs)
        return outputs, Partial(run_backward, pull)

    def run_backward(pull: Callable[..., Any], cotangents: SymbolicTangents) -> Any:
        for cotangent, name in zip(cotangents, output_names, strict=True):
            check_cotangent(cotangent, name)
        with _naming_the_line():
            return pull(cotangents, options)

    with mark_boundary():
        outputs = jaxprs.keep_rule(
            program, run_forward, NO_FORWARD, *consts, *flat.arrays
        )
    return flat.restored(outputs)
