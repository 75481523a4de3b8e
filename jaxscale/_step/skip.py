"""How a step is skipped: by a branch on a CPU, by a selection elsewhere and without `jit`.

On a GPU or TPU a selection fuses into the step's own kernels and reads nothing twice. On a CPU it
would keep XLA from updating buffers in place and take minutes to compile over hundreds of leaves;
a branch does neither. The program holds both, as one program may be lowered for any platform.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import AxisType

from .._gradients.scaled import Scaled
from .._jax import varying
from .._trees.casts import cast
from .._trees.flat import Flat, Leaves
from .._trees.gradient_leaves import map_gradients
from .._trees.leaf import is_array_like
from .._trees.selection import tree_where


def step_if(
    pred: jax.Array,
    step: Callable[[Any], Any],
    operand: Any,
    skip: Callable[[Any], Any],
) -> Any:
    """Returns `step(operand)` if `pred` holds, and otherwise what `skip` returns.

    The operand may be non-finite if `pred` does not hold. `step` returns a tuple, and is traced
    once. `skip` gets the parts of such a tuple, each of them a tree, or `Leaves` with the types of
    one, and returns a tuple of the same type.
    """

    def select(branches: jax.Array, step: Callable[[Any], Any]) -> Any:
        # A selection evaluates both sides, so `step` runs in any case. It gets zeros if its
        # result does not count, so that no inf or NaN reaches its arithmetic. If `step` branches
        # itself, nothing is left to select: XLA removes both calls of `tree_where`.
        choose = pred | branches
        finite = tree_where(choose, operand, _zeros(operand))
        result = step(finite)
        return tree_where(choose, result, skip(result))

    # A constant that is known once the platform is: XLA folds the other form away. JAX's idiom,
    # `platform_dependent(pred, operand, cpu=branch, default=select)`, compiles to the same, but
    # writes the step down twice: for AdamW on 30 leaves in 1840 equations instead of 1260.
    branches = jax.lax.platform_dependent(
        cpu=lambda: jnp.array(True), default=lambda: jnp.array(False)
    )
    if not isinstance(branches, Tracer):
        # Nothing is traced: each operation runs by itself, even under `vmap`. So `step` rounds as
        # it does when called alone, and nothing is compiled for a single call.
        return select(jnp.array(False), step)

    def branch(operand: Any) -> Any:
        flat = Flat(step, (operand,), {}, "step")
        compiled = jax.jit(flat)  # traced once, for its types and for the branch
        types = jax.make_jaxpr(compiled)(*flat.arrays).out_avals
        skipped = skip(flat.parts(types))

        def take_step() -> Any:
            return flat.restored(compiled(*flat.arrays))

        return jax.lax.cond(pred | ~branches, take_step, lambda: skipped)

    return select(branches, branch)


def store_once(grads: Scaled) -> Scaled:
    """Makes a CPU compute gradients once: for the verdict, and for the step.

    XLA takes casts for cheap, and would fuse those at the end of a half-precision backward pass
    into each reader. On a CPU they cost more than to read float32. On other machines the products
    may reduce what they write.
    """
    leaves, structure = jax.tree.flatten(grads.grads)
    # JAX 0.10 gives all arrays that share a barrier the mesh axes of all of them. So one barrier
    # serves those that vary along the same axes, which usually are all.
    groups: dict[frozenset[Any], list[int]] = {}
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, Tracer):
            groups.setdefault(varying(jax.typeof(leaf)), []).append(index)
    for indices in groups.values():
        arrays = [leaves[index] for index in indices]
        stored = jax.lax.platform_dependent(
            arrays, cpu=_store_by_rows, default=lambda arrays: arrays
        )
        for index, array in zip(indices, stored, strict=True):
            leaves[index] = array
    return Scaled(structure.unflatten(leaves), grads.divisor)


def _store_by_rows(arrays: list[jax.Array]) -> list[jax.Array]:
    """Returns arrays that XLA stores, each in the order of its elements.

    JAX transposes the product that is the gradient of a matrix. XLA puts that into the product, but
    not if a cast stands between: it would store the matrix by columns, and the step reads by rows.
    A flat view can only be had of rows. (`with_layout_constraint` asks for the same, but
    `jax.export` cannot serialize it, and JAX 0.6 cannot batch it.)
    """
    flat = []
    for array in arrays:
        if _is_whole(array):
            array = jax.lax.reshape(array, (array.size,))
        flat.append(array)
    # The arrays are stored, too. With their views alone XLA would fuse a view into the division
    # before it, which could then no longer be done in place.
    _, stored = jax.lax.optimization_barrier((arrays, flat))
    restored = []
    for array, view in zip(arrays, stored, strict=True):
        restored.append(jax.lax.reshape(view, array.shape))
    return restored


def _is_whole(array: jax.Array) -> bool:
    """Returns whether an array is known to lie on one device, or is its part in `shard_map`."""
    mesh = jax.typeof(array).sharding.mesh
    if mesh.empty:
        return jax.device_count() == 1
    return all(kind == AxisType.Manual for kind in mesh.axis_types)


def _zeros(tree: Any) -> Any:
    """Returns a tree with zeros in place of the gradients, one array for each type."""
    zeros: dict[Any, jax.Array] = {}

    def zeros_like(leaf: Any) -> jax.Array:
        aval = jax.typeof(leaf)
        if aval not in zeros:
            zeros[aval] = jnp.zeros_like(leaf)
        return zeros[aval]

    return map_gradients(zeros_like, tree)


def no_updates(like: Any, grads: Any) -> Any:
    """Returns updates that change nothing, of the types of `like`, on the mesh axes of `grads`."""
    sources = jax.tree.leaves(grads)
    if isinstance(like, Leaves):
        leaves, structure = like
    else:
        leaves, structure = jax.tree.flatten(like)
    own_sources = [None] * len(leaves)
    if structure == jax.tree.structure(grads):
        own_sources = sources

    updates = []
    by_types: dict[Any, jax.Array] = {}  # one array serves all leaves of one type
    for leaf, own_source in zip(leaves, own_sources, strict=True):
        types = (_type_of(leaf), _type_of(own_source))
        if types not in by_types:
            by_types[types] = _no_update(leaf, own_source, sources)
        updates.append(by_types[types])
    return structure.unflatten(updates)


def _type_of(leaf: Any) -> Any:
    """Returns the type of an array; in `Leaves`, a leaf is a type itself."""
    if is_array_like(leaf):
        return jax.typeof(leaf)
    return leaf


def _no_update(leaf: Any, own_source: Any, sources: list[Any]) -> jax.Array:
    # Minus zero, in both parts of a complex number: adding it keeps the bits of every number,
    # whereas -0.0 + 0.0 is 0.0.
    is_complex = jnp.issubdtype(leaf.dtype, jnp.complexfloating)
    minus_zero = -0.0
    if is_complex:
        minus_zero = complex(-0.0, -0.0)
    if isinstance(leaf, jax.Array):
        return jax.lax.full_like(leaf, minus_zero)
    # On a mesh the type of an update also says along which axes it varies, and a bare constant
    # varies along none. A selection from a gradient varies as that does, and folds to the
    # constant.
    source = _find_source(leaf.shape, own_source, sources)
    if jnp.iscomplexobj(source) and not is_complex:
        source = source.real
    source = cast(source, leaf.dtype)
    never = jnp.zeros((), jnp.bool_)
    update = jax.lax.select(never, source, jax.lax.full_like(source, minus_zero))
    return jnp.broadcast_to(update, leaf.shape)


def _find_source(
    shape: tuple[int, ...], own_source: Any, sources: list[Any]
) -> jax.Array:
    """Returns the gradient of the same leaf, or any of its shape, or a scalar made from one."""
    if own_source is not None:
        sources = [own_source, *sources]
    for source in sources:
        if jnp.shape(source) == shape:
            return source
    return jnp.sum(sources[0])
