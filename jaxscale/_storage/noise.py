"""Random bits for rounding: a key that is carried, and a hash of it with the place in an array.

Threefry, the generator of `jax.random`, would take 154 operations for each number on a TPU, where
the step of AdamW takes 15. It makes two words for each array here, and a hash makes the bits from
these and the index of each element. Rounding only needs bits that are independent from step to
step, and from place to place.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from .._jax import varying

_IMPLEMENTATION = "threefry2x32"
# The multipliers of the 32-bit hash "lowbias32" of Christopher Wellons' hash prospector.
_MULTIPLIERS = (np.uint32(0x7FEB352D), np.uint32(0x846CA68B))


def make_key(
    seed: int | jax.Array, arrays: Sequence[Any], *, stream: int = 0
) -> jax.Array:
    """Returns the data of a first key, `u32[2]`, for a tree of arrays.

    Data, as some file formats refuse typed keys. Members of a population, whose arrays `vmap` has
    stacked, get keys of their own. Two users of one seed draw different bits if their streams
    differ.
    """
    first = jax.random.key(seed, impl=_IMPLEMENTATION)
    if stream:
        first = jax.random.fold_in(first, stream)
    key = jax.random.key_data(first)
    traced = [array for array in arrays if isinstance(array, Tracer)]
    if not traced:
        return key
    # The rule below has no derivative, and this needs none.
    return _key_of_member(key, jax.lax.stop_gradient(traced))


def split_key(key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the next key to carry, and one to draw from."""
    wrapped = jax.random.wrap_key_data(key, impl=_IMPLEMENTATION)
    following, drawn = jax.random.split(wrapped)
    return jax.random.key_data(following), jax.random.key_data(drawn)


@jax.custom_batching.custom_vmap
def _key_of_member(key: jax.Array, arrays: list[jax.Array]) -> jax.Array:
    return key


@_key_of_member.def_vmap
def _keys_of_population(
    size: int, batched: tuple[bool, list[bool]], key: jax.Array, arrays: list[jax.Array]
) -> tuple[jax.Array, bool]:
    key_batched, arrays_batched = batched
    if key_batched:
        return key, True
    firsts = []
    for array, is_batched in zip(arrays, arrays_batched, strict=True):
        firsts.append(array[0] if is_batched else array)
    # There may be a population around this one.
    key = _key_of_member(key, firsts)
    keys = jax.random.split(jax.random.wrap_key_data(key, impl=_IMPLEMENTATION), size)
    return jax.random.key_data(keys), True


def draw_words(key: jax.Array, number: int) -> jax.Array:
    """Returns two random words for each of so many arrays, `u32[number, 2]`."""
    wrapped = jax.random.wrap_key_data(key, impl=_IMPLEMENTATION)
    return jax.random.bits(wrapped, (number, 2), jnp.uint32)


# Traced once for each type of array, and not once for each leaf.
@functools.partial(jax.jit, inline=True)
def make_noise(words: jax.Array, like: jax.Array) -> jax.Array:
    """Returns 32 random bits for each element of an array, `u32` of its shape.

    Devices inside of a `shard_map` draw differently along the mesh axes along which the array
    varies, and alike along the others, so that copies stay equal. Where types do not say what
    varies, all devices draw alike.
    """
    first, second = words[0], words[1]
    for axis in sorted(varying(jax.typeof(like)), key=repr):
        index = jax.lax.axis_index(axis).astype(jnp.uint32)
        first = _mix(first + index)
        second = _mix(second ^ first)
    # Two rounds, each with a word of the key: one alone would give two arrays, or two steps, the
    # same bits at different places.
    return _mix(_mix(_flat_indices(like) + first) ^ second)


def _flat_indices(like: jax.Array) -> jax.Array:
    """Returns the index of each element of an array, counted through all its dimensions."""
    indices = jnp.zeros((), jnp.uint32)
    stride = 1
    for dimension in reversed(range(like.ndim)):
        places = jax.lax.broadcasted_iota(jnp.uint32, like.shape, dimension)
        indices = indices + places * np.uint32(stride % 2**32)
        stride *= like.shape[dimension]
    return indices


def _mix(words: jax.Array) -> jax.Array:
    """Returns words of 32 bits, each of which depends on all bits of the given one."""
    first, second = _MULTIPLIERS
    words = (words ^ (words >> 16)) * first
    words = (words ^ (words >> 15)) * second
    return words ^ (words >> 16)
