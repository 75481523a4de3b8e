"""A small model laid out over devices: what is divided along which axes, and the step's arguments.

Two residual blocks of two layers, whose products `jaxscale.autocast` takes to half precision, with
every method.
"""

import math
from typing import NamedTuple

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
    "tensor parallel": Layout(("model",), P(None, "model"), P("model"), P("model")),
    "FSDP and tensor parallel": Layout(
        ("data", "model"), P("data", "model"), P("model"), P("model", "data"), P("data")
    ),
    "FSDP in each slice": Layout(
        ("slice", "data"), P("data"), P("data"), P("data"), P(("slice", "data"))
    ),
}


def make(name, devices, width, dtype, half, slices=1):
    """Returns the loss of a model, and the types of its parameters and its batch, as laid out."""
    layout, number = LAYOUTS[name], len(devices)
    first = slices if "slice" in layout.axes else math.isqrt(number)
    shape = (number,) if len(layout.axes) == 1 else (first, number // first)
    mesh = Mesh(np.array(devices).reshape(shape), layout.axes)

    def aval(shape, dtype, spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    block = {
        "up": aval((width, 4 * width), dtype, layout.up),
        "bias": aval((4 * width,), dtype, layout.bias),
        "down": aval((4 * width, width), dtype, layout.down),
    }
    divided = (mesh.shape[axis] for axis in layout.axes if axis != "model")
    rows = ROWS * math.prod(divided) if layout.batch else ROWS
    batch = aval((2, rows, width), jnp.float32, P(None, *layout.batch))
    return (
        jaxscale.autocast(_loss, half),
        {f"block {i}": block for i in range(BLOCKS)},
        batch,
    )


def place(tree, params):
    """Lays out a carry as the parameters are, of which it has the shapes; the rest everywhere."""
    known = {leaf.shape: leaf.sharding for leaf in jax.tree.leaves(params)}
    everywhere = NamedSharding(next(iter(known.values())).mesh, P())
    return jax.tree.map(
        lambda leaf: leaf.update(sharding=known.get(leaf.shape, everywhere)), tree
    )


def _loss(params, batch):
    x, y = batch
    for block in params.values():
        x += jax.nn.gelu(x @ block["up"] + block["bias"]) @ block["down"]
    return jnp.mean((x - y).astype(jnp.float32) ** 2)
