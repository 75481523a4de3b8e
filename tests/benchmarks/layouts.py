"""A small model laid out over devices: what is divided along which axes, and the step's arguments.

Two residual blocks of two layers, whose products `jaxscale.autocast` takes to half precision, with
every method.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxscale

BLOCKS, ROWS = 2, 64  # ROWS: of a batch, for each device that has rows of its own


class Layout(NamedTuple):
    """Along which axes of the devices what is divided."""

    axes: tuple[str, ...]
    up: P = P()  # the matrix of a layer that widens, and its bias
    bias: P = P()
    down: P = P()  # the one that narrows
    batch: P = P()


LAYOUTS = {
    "one device": Layout(("data",)),
    "FSDP": Layout(("data",), P("data"), P("data"), P("data"), P("data")),
    "FSDP and tensor parallel": Layout(
        ("data", "model"), P("data", "model"), P("model"), P("model", "data"), P("data")
    ),
}


class LaidOut(NamedTuple):
    """A loss, and the types of its arguments."""

    loss_fn: Callable[..., jax.Array]
    params: Any
    batch: Any


def make(name, devices, width, dtype, half, slices=1):
    """Lays out the model and its batch."""
    layout = LAYOUTS[name]
    mesh = Mesh(_arrange(devices, layout, slices), layout.axes)

    def aval(shape, dtype, spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    block = {
        "up": aval((width, 4 * width), dtype, layout.up),
        "bias": aval((4 * width,), dtype, layout.bias),
        "down": aval((4 * width, width), dtype, layout.down),
    }
    params = {f"block {i}": block for i in range(BLOCKS)}
    rows = ROWS
    if layout.batch:
        for axis in layout.axes:
            if axis != "model":
                rows *= mesh.shape[axis]
    batch = aval((2, rows, width), jnp.float32, P(None, *layout.batch))
    return LaidOut(jaxscale.autocast(_loss, half), params, batch)


def _arrange(devices, layout, slices):
    """Returns the devices as an array with the axes of a layout."""
    number = len(devices)
    if len(layout.axes) == 1:
        return np.array(devices)
    first = slices if "slice" in layout.axes else math.isqrt(number)
    return np.array(devices).reshape(first, number // first)


def place(tree, params):
    """Lays out a carry like the parameters, by their shapes, and everything else everywhere."""
    known = {leaf.shape: leaf.sharding for leaf in jax.tree.leaves(params)}
    everywhere = NamedSharding(next(iter(known.values())).mesh, P())

    def place_leaf(leaf):
        return leaf.update(sharding=known.get(leaf.shape, everywhere))

    return jax.tree.map(place_leaf, tree)


def _loss(params, batch):
    x, y = batch
    for block in params.values():
        hidden = jax.nn.gelu(x @ block["up"] + block["bias"])
        x += hidden @ block["down"]
    return jnp.mean((x - y).astype(jnp.float32) ** 2)
