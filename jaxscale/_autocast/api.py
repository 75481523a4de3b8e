"""`autocast` and `full_precision`: what users call."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Never, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from .._boundary import TracedFor, traced_for
from .._jax.jaxprs import DTypeLike
from .._trees.nnx_objects import wrap_call
from .._trees.outer_modules import keeping_outer_variables
from .._trees.pytrees import Leaf
from .._went import refuse
from .table import FULL_PRECISION, HALF_PRECISION

if TYPE_CHECKING:
    from .interpreter import Autocast

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


@functools.cache
def _make_autocast(dtype: str) -> "Autocast":
    # Not imported before it is used: most programs do without.
    from .interpreter import Autocast

    return Autocast(np.dtype(dtype))


def autocast(
    fun: Callable[_Args, _Result],
    dtype: DTypeLike = jnp.float16,
    **went: Never,
) -> Callable[_Args, _Result]:
    """Returns the function, with its matrix products and convolutions in half precision.

    Parameters, gradients and outputs keep their dtypes, and no line of the model changes. The
    function is traced, as by `jax.jit`, and runs by one rule: products in half precision, all else
    in float32, and only what products read or return is kept for the backward pass.

    *Products* are matrix products and convolutions that read float32, or arrays in two formats,
    such as bfloat16 weights and float32 activations (JAX's primitives dot_general,
    conv_general_dilated, ragged_dot and ragged_dot_general), forward and backward, products of a
    matrix with a vector included. One of half-precision arrays in a single format stays in that.
    Dots of vectors, even in batches, outer products and other sums over a dimension of 1 stay as
    they are. So do products that must be exact: of numbers that come from integers, booleans and
    indices alone, such as a count, and those of which nothing but integers is made, such as a flat
    index. Of a model that returns its prediction, that is the last product. So do products that JAX
    and Optax call for their own algorithms, such as a matrix exponential, a step of
    `jax.experimental.ode` or `optax.ctc_loss`, and those with an `algorithm` of their own or with
    the `precision` "highest". What `default_matmul_precision` sets for all products is no such
    demand. JAX gives `preferred_element_type=float32` to any product in a float32 program, so this
    does not keep a product in float32: `full_precision` does. But `jax.nn.dot_product_attention`
    asks for its logits in float32, and these are not rounded.

    *All else* runs in float32: biases, activations, norms, softmax, losses, comparisons, and
    constants, which are not rounded either. What only moves the results of products to other
    products, such as a transpose, stays in half precision. Gradients of several readers,
    as those of a weight that many layers share, are added in float32.

    *What is kept* are the half-precision arrays that products read and return. What lies between
    two products is computed again in the backward pass, as if under `jax.checkpoint`, because its
    inputs take half the memory.

    The inside of control flow and calls is transformed. `jax.custom_jvp` and `jax.custom_vjp`
    functions keep their rules, and values that loops carry keep their dtype by default. Integers,
    float64, complex numbers, kernels, callbacks and what is written in half precision by hand are
    left alone; `half_precision` casts for a kernel. Source lines and named scopes stay those of the
    model. The gradient of a float32 weight comes from its matrix products in float32, and devices
    add it in float32; that of a convolution is rounded first.

    A `scan` carries what the program declares: over layers mostly float32, which `jax.checkpoint`
    then keeps for each layer. If you cast the first carry to half precision, and the next ones
    likewise in the body, that is halved. The price: if a layer adds less than 2**-12 of the sum
    (2**-9 in bfloat16), that is lost, and in float16 the sum ends at 65504. So do it for layers,
    and not for loops that add small numbers to a large one many times, such as the steps of an ODE.

    A loop that ends when little changes, such as a fixed point to 1e-5, may never end: its products
    are rounded at 1e-3 in float16, and at 4e-3 in bfloat16. Nor is a small distance right that is
    computed of squares, as `x2 + y2 - 2 * x @ y.T`: it is a difference of large products. Mark both
    with `full_precision`.

    Modules of Flax NNX may be arguments, and may be changed in place. NumPy arrays, numbers and
    everything else that is not an array of JAX reach the function as they are.

    Args:
      fun: a function, such as a loss, Linen's `model.apply`, or a module of NNX.
      dtype: float16, bfloat16, or float32, which returns `fun` itself.
      **went: none. Arguments of earlier releases are an error that says what to write.

    Returns:
      A function with the arguments of `fun` and outputs of the same shapes and dtypes. Call it
      inside `jax.jit`: outside, it traces `fun` in each call.

    Raises:
      TypeError: if `fun` is not callable.
      ValueError: if `dtype` is another dtype. The call raises it if it makes or changes variables
        of a Linen or Haiku module around it: wrap `model.apply` instead.

    Warns:
      UserWarning: for each primitive whose products run as they are written, once in a call. The
        reason is that the primitive has no rule here, that this version of JAX gives it unknown
        parameters, or that it takes values of a type that is not an array. Callbacks, exported
        functions and foreign kernels that get float32 values of the program also give a warning,
        because nothing can look into them. There is one warning of products that are cast although
        it is not known whether an algorithm of JAX calls them, as with a later JAX. There is one if
        the program is given arrays in the other half precision than `dtype`, and has products of
        nothing but such arrays: with their number, the first line, and what to write. If there is
        no such warning, there is one if nothing in `fun` is cast, with the reason and the line.
        What `full_precision` marks gives no warning, and an `autocast` inside another one does not
        warn that it changes nothing.

    Source: the autocast op reference of PyTorch and the lists of TensorFlow's auto mixed precision.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jaxscale
      >>> loss_fn = lambda w, x: jnp.sum((x @ w) ** 2)
      >>> w, x = jnp.ones((2, 2)), jnp.full((1, 2), 200.0)
      >>> jax.make_jaxpr(jaxscale.autocast(loss_fn))(w, x).eqns[2].outvars[0].aval
      ShapedArray(float16[1,2])
      >>> jax.value_and_grad(jaxscale.autocast(loss_fn))(w, x)[0]  # float16 ends at 65504
      Array(320000., dtype=float32)
    """
    refuse("autocast", went)
    is_dtype = _is_dtype(fun)
    if is_dtype or not callable(fun):
        got = type(fun).__name__
        if is_dtype:
            got = repr(fun)
        raise TypeError(
            f"`autocast(fun)` must be a function, got {got}. Pass the function first, such as the "
            "loss or `model.apply`, and not what it returns. As a decorator with another dtype, "
            "write `@functools.partial(jaxscale.autocast, dtype=...)`."
        )
    try:
        name = jnp.dtype(dtype).name
    except TypeError:
        name = None
    if name not in ("float16", "bfloat16", "float32"):
        raise ValueError(
            "`autocast(dtype)` must be float16 or bfloat16, or float32 to switch it off, got "
            f"{dtype!r}."
        )
    if name == "float32":
        return fun
    return wrap_call(functools.partial(_call, _make_autocast(name)), fun)


def _call(
    transform: "Autocast",
    fun: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    with keeping_outer_variables("autocast(fun)", fun, (args, kwargs)):
        return transform.call(fun, args, kwargs)


def _is_dtype(fun: object) -> bool:
    """Returns whether a function is a dtype: `jnp.float16` can be called, as a function can."""
    if isinstance(fun, str | jnp.dtype):
        return True
    return isinstance(fun, type) and hasattr(fun, "dtype")


def full_precision(fun: Callable[_Args, _Result]) -> Callable[_Args, _Result]:
    """Marks a function, so that `autocast` leaves it as it is written.

    Mark a part of a model that needs more precision or range than half precision has, such as
    a product of large numbers. Values that `autocast` computes in half precision outside the part
    come in as float32; values that are written in half precision by hand stay so. Without
    `autocast`, the marked function is `fun` itself, in a named scope.

    Args:
      fun: a function, a method or a layer, of any arguments.

    Raises:
      TypeError: if `fun` is not callable.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxscale
      >>> product = lambda x: x @ x
      >>> x = jnp.full((2, 2), 256, jnp.float32)
      >>> jaxscale.autocast(product)(x)[0, 0]
      Array(inf, dtype=float32)
      >>> jaxscale.autocast(jaxscale.full_precision(product))(x)[0, 0]
      Array(131072., dtype=float32)
    """
    _check_marked(fun, "full_precision")

    @functools.wraps(fun, updated=())
    def full_precision_fun(*args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
        with jax.named_scope(FULL_PRECISION):
            if not traced_for.value.is_half:
                return fun(*args, **kwargs)
            return wrap_call(_call_in_float32, fun)(*args, **kwargs)

    return full_precision_fun


def half_precision(fun: Callable[_Args, _Result]) -> Callable[_Args, _Result]:
    """Returns the function with its float32 arguments in half precision, inside of `autocast`.

    Mark a kernel that takes half precision alone, or is fast in it alone: the fused attention of
    cuDNN, a kernel of Pallas, a foreign function. `autocast` cannot cast what goes into these, as
    it does not see them before they are traced. Inside of `autocast`, arrays in float32 among the
    arguments arrive in its dtype, and arrays of that dtype among the results leave in float32.
    Integers, float64 and all other dtypes pass as they are. So do arrays that the function closes
    over. Elsewhere the marked function is `fun` itself.

    Of two markers, one in the other, the inner one counts: `full_precision` in the function gets
    its half-precision arguments in float32, rounded as they are.

    Args:
      fun: a function, a method or a layer, of any arguments. A module of Flax NNX is an argument
        of its own methods, so its float32 parameters arrive in half precision, too.

    Raises:
      TypeError: if `fun` is not callable.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxscale
      >>> kernel = jaxscale.half_precision(lambda x: print(x.dtype) or x)
      >>> kernel(jnp.ones(2)).dtype
      float32
      dtype('float32')
      >>> jaxscale.autocast(kernel)(jnp.ones(2)).dtype
      float16
      dtype('float32')
    """
    _check_marked(fun, "half_precision")

    @functools.wraps(fun, updated=())
    def half_precision_fun(*args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
        if not traced_for.value.dtype:
            return fun(*args, **kwargs)
        with jax.named_scope(HALF_PRECISION):
            return wrap_call(_call_in_half, fun)(*args, **kwargs)

    return half_precision_fun


def _check_marked(fun: object, name: str) -> None:
    if not callable(fun):
        raise TypeError(
            f"`{name}(fun)` must be a function, got {type(fun).__name__}. Pass the function "
            "itself, not what it returns."
        )


def _call_in_half(
    fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Calls a function with float32 arrays in half precision, and returns float32 for that."""
    dtype = traced_for.value.dtype
    with traced_for(TracedFor(dtype, is_half=True)):
        results = _call_cast(fun, args, kwargs, "float32", dtype)
    return jax.tree.map(functools.partial(_cast_if, dtype, "float32"), results)


def _call_in_float32(
    fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Calls a function in a part in half precision, with arrays of that dtype in float32."""
    dtype = traced_for.value.dtype
    with traced_for(TracedFor(dtype)):
        return _call_cast(fun, args, kwargs, dtype, "float32")


def _call_cast(
    fun: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    old: str,
    new: str,
) -> Any:
    """Calls a function with arrays of one dtype in another one.

    An argument that it returns is returned as it was given. So the parameters of a module of NNX,
    which come back with what the module changes, are not rounded.
    """
    given = {}

    def cast_argument(leaf: object) -> Any:
        array = _cast_if(old, new, leaf)
        if array is not leaf:
            given[id(array)] = (array, leaf)
        return array

    def give_back(leaf: object) -> Any:
        return given.get(id(leaf), (leaf, leaf))[1]

    args, kwargs = jax.tree.map(cast_argument, (args, kwargs))
    return jax.tree.map(give_back, fun(*args, **kwargs))


def _cast_if(old: str, new: str, leaf: Leaf) -> Any:
    if getattr(leaf, "dtype", None) == old and hasattr(leaf, "astype"):
        return leaf.astype(new)
    return leaf
