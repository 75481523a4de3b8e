"""The public function `trace`: one pass of a `TracedBackward`, and its report."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.core import Tracer

from ..._state.find import find_scale_state
from ..._trees.leaf import is_inexact
from .._formats import kind
from .backward import TracedBackward
from .report import TraceReport


def trace(
    fun: Callable[..., Any],
    scaling: Any,
    *,
    transform: Callable[..., Any] = jax.value_and_grad,
    has_aux: bool = False,
    **kwargs: Any,
) -> Callable[..., TraceReport]:
    """Returns a function that finds where a backward pass overflows or underflows.

    The function runs the operations of `jaxscale.value_and_grad` one equation at a time,
    also those in `jit`, loops, `cond`, `remat` and custom derivatives. It looks at every
    number, computes again in float32 where numbers may have been lost, and gives the lines
    of the model where that happened. For the host, outside of `jit`, and for one small
    batch: the results of all equations are checked one by one, which is slow.

    Only float16 and narrower formats are checked for underflow: bfloat16 has the range of
    float32. A `shard_map`, a `pmap` or a kernel counts as one equation. A ref from outside
    `fun` keeps what it holds, because `fun` runs on a copy. A Python number is rounded
    before anything runs, and no equation shows that: in float16 `x * 1e-9` is `x * 0`. Such
    numbers are listed as `constants`, unless they stand in a function that was traced before.

    Args:
      fun: a function that returns a floating scalar, as for `jaxscale.value_and_grad`. It
        may be jitted or not: the trace sees inside either way.
      scaling: a `jaxscale.LossScaleState`, or a tree that holds exactly one. The
        scale in it is the one to trace with.
      transform: what differentiates, as for `jaxscale.value_and_grad`. Under a `vmap`, which
        gives several losses, the report has their mean.
      has_aux: whether `fun` returns a pair.
      **kwargs: passed to `transform`: `argnums`, `allow_int` and so on.

    Returns:
      A function with the arguments of `fun` that returns a `TraceReport`: print it.

    Raises:
      ValueError: if `scaling` holds no loss scale, or several, or that of a population.
      TypeError: when called, if the loss is not a floating scalar, if parameters are not
        floating, or inside `jit`.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxscale
      >>> from jaxscale import diagnostics
      >>> scaling = jaxscale.DynamicLossScale().init()
      >>> def loss_fn(w, x):
      ...     scores = x * w
      ...     return jnp.mean((scores * scores).astype(jnp.float32))
      >>> x = jnp.array([1.0, 2.0, 3.0, 400.0], jnp.float16)
      >>> report = diagnostics.trace(loss_fn, scaling)(jnp.float16(1.0), x)
      >>> first = report.first_nonfinite
      >>> first.direction, first.primitive, first.dtype, first.share
      ('forward', 'mul', 'float16', 0.25)
      >>> first.source
      'return jnp.mean((scores * scores).astype(jnp.float32))'
    """
    loss_scale = find_scale_state("trace", scaling).loss_scale
    if loss_scale.shape:
        raise ValueError(
            f"`trace(scaling)` needs one loss scale, got an array of shape {loss_scale.shape}. "
            "Pass the state of one member of the population."
        )

    def trace_fun(*args: Any, **fun_kwargs: Any) -> TraceReport:
        leaves = jax.tree.leaves((args, fun_kwargs, loss_scale))
        if any(isinstance(leaf, Tracer) for leaf in leaves):
            raise TypeError(
                "`trace` reads values, so it cannot run inside `jit` or another transformation. "
                "Call it where the training step is called, with the same arguments."
            )
        if transform is jax.value_and_grad and not kwargs.get("allow_int"):
            _check_floating(args, kwargs.get("argnums", 0))
        backward = TracedBackward(
            fun, args, fun_kwargs, transform=transform, has_aux=has_aux, **kwargs
        )
        return backward.run(loss_scale).report()

    return trace_fun


def _check_floating(args: tuple[Any, ...], argnums: Any) -> None:
    for i in argnums if isinstance(argnums, Sequence) else [argnums]:
        for path, leaf in jax.tree_util.tree_leaves_with_path(args[i : i + 1 or None]):
            if not is_inexact(leaf):
                raise TypeError(
                    f"`trace(fun)` differentiates floating parameters, got {kind(leaf)} at "
                    f"args[{i}]{jax.tree_util.keystr(path[1:])}. Take it out of the parameters, "
                    "or pass allow_int=True or another argnums=...."
                )
