"""Agreement: whether gradients are finite and how large they are, the same on all devices.

Devices exchange integers, and take the least of each: a flag is set if it is on all of them.
"""

from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._jax import AxisNames, axes_to_agree_along, sum_over_devices
from .._trees.leaves import cast, widen
from .._trees.numbers import float_of_bits
from .._trees.pytrees import PyTree
from .reduction import reduce_gradients, reduce_sizes
from .scaled import Scaled


def all_finite(tree: PyTree, *, axis_name: AxisNames = None) -> jax.Array:
    """Checks that every gradient in a tree is finite.

    Args:
      tree: a pytree. Only its floating-point and complex leaves are read, except those under a
        key `_overwrite_with_gradient`. A tree without leaves to read is finite.
      axis_name: a mesh or `pmap` axis name, or a tuple of them, inside `shard_map`
        and `pmap`: all devices along it get one verdict. Leave it out under plain `jit`,
        where the answer already covers all shards.

    Returns:
      A `bool[]`: `False` if any element of any leaf is inf or NaN. Finite gradients of any
      size pass, because no sum or norm is taken that could overflow.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxscale
      >>> jaxscale.all_finite({"w": jnp.array([1.0, jnp.inf]), "b": None})
      Array(False, dtype=bool)
      >>> jaxscale.all_finite({"w": jnp.array([3e38, 3e38]), "b": None})
      Array(True, dtype=bool)
    """
    finite = reduce_gradients(tree).finite()
    if axis_name is None:
        return finite
    (finite_on_all,) = agree_on_least([finite], axis_name)
    return finite_on_all


def largest(grads: Scaled, axis_name: AxisNames = None) -> jax.Array | None:
    """Returns the largest absolute value among gradients, unscaled, an `f32[]`, or `None`.

    Of complex gradients, real and imaginary parts count. The result is inf or NaN exactly if a
    gradient is, or becomes so as it is unscaled. Otherwise it is at most float32's largest number.
    """
    reduction = reduce_sizes(grads)
    if not reduction.holds_sizes:
        return None  # there are no gradients
    return agree_on_size(reduction.largest_bits(), axis_name)


def agree_on_least(
    numbers: Sequence[jax.Array], axis_name: AxisNames
) -> Sequence[jax.Array]:
    """Returns the least of each flag or integer along `axis_name`, found in one message."""
    integers = [number.dtype for number in numbers if number.dtype != jnp.bool_]
    widest = max([jnp.dtype(jnp.int32), *integers], key=lambda dtype: dtype.itemsize)
    sent = jnp.stack([cast(number, widest) for number in numbers])
    try:
        least = jax.lax.pmin(sent, axis_name)
    except NameError as error:
        call = f"`axis_name={axis_name!r}` of `loss_scaled` or `all_finite`"
        raise no_such_axis(call, "verdict") from error
    return [cast(least[i], number.dtype) for i, number in enumerate(numbers)]


def no_such_axis(call: str, what: str) -> NameError:
    """Returns the error for an `axis_name` that was passed where there is no such axis.

    `what` is what the devices along it were to agree on.
    """
    return NameError(
        f"{call} names an axis of the `shard_map` or `pmap` around this call, and there is none "
        "of that name. Under `jit` alone leave it out: an array there is whole, on however many "
        f"devices, and so is the {what}."
    )


def axis_names(axis_name: AxisNames) -> tuple[Hashable, ...]:
    """Returns the names in an `axis_name`, which is one, a tuple of several, or `None`."""
    if axis_name is None:
        return ()
    if isinstance(axis_name, tuple | list):
        return tuple(axis_name)
    return (axis_name,)


def agree_on_size(bits: jax.Array, axis_name: AxisNames) -> jax.Array:
    """Returns the largest of a size, or of each in an array, on all devices along `axis_name`.

    A size of this device comes as the bits of a float, and is returned as that float.
    """
    if axis_name is None:
        return float_of_bits(bits)
    (least,) = agree_on_least([-bits], axis_name)
    return float_of_bits(-least)


def agree_on_loss(loss: Any, axis_name: Any) -> Any:
    """Returns the mean loss of all devices along `axis_name`, in the dtype of the loss.

    A loss whose type says that it is the same on all of them stays as it is. So does `None`.
    """
    if loss is None or axis_name is None:
        return loss
    axes = axes_to_agree_along(loss, axis_names(axis_name))
    if not axes:
        return loss
    wide = widen(loss)
    # Divide first, so that the sum cannot overflow.
    share = wide / cast(jax.lax.psum(1, tuple(axes)), wide.dtype)
    # How far a loss is rounded matters to whoever judges it.
    return cast(sum_over_devices(share, axes), jnp.result_type(loss))
