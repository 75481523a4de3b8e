"""A small model laid out over devices: what is divided along which axes, and the step's arguments.

Two residual blocks of two layers, whose products `jaxscale.autocast` takes to half precision, with
every method. With `pipeline` each device has one block, and the others' outputs arrive one after
another.
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


PIPELINE = "pipeline"
LAYOUTS = {
    "one device": Layout(("data",)),
    "FSDP": Layout(("data",), P("data"), P("data"), P("data"), P("data")),
    "tensor parallel": Layout(("model",), P(None, "model"), P("model"), P("model")),
    "FSDP and tensor parallel": Layout(
        ("data", "model"), P("data", "model"), P("model"), P("model", "data"), P("data")
    ),
    PIPELINE: Layout(("stage",), P("stage"), P("stage"), P("stage")),
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

    stages = (number,) if name == PIPELINE else ()
    params = {
        "up": aval((*stages, width, 4 * width), dtype, layout.up),
        "bias": aval((*stages, 4 * width), dtype, layout.bias),
        "down": aval((*stages, 4 * width, width), dtype, layout.down),
    }
    if name == PIPELINE:
        loss_fn, spread = _pipelined(mesh), 2 * number
    else:
        loss_fn, params = _loss, {f"block {i}": params for i in range(BLOCKS)}
        divided = (mesh.shape[axis] for axis in layout.axes if axis != "model")
        spread = math.prod(divided) if layout.batch else 1
    batch = aval((2, spread * ROWS, width), jnp.float32, P(None, *layout.batch))
    return jaxscale.autocast(loss_fn, half), params, batch


def place(tree, params):
    """Lays out a carry as the parameters are, of which it has the shapes; the rest everywhere."""
    known = {leaf.shape: leaf.sharding for leaf in jax.tree.leaves(params)}
    everywhere = NamedSharding(next(iter(known.values())).mesh, P())
    return jax.tree.map(lambda leaf: leaf.update(sharding=known.get(leaf.shape, everywhere)), tree)


def _block(block, x):
    return x + jax.nn.gelu(x @ block["up"] + block["bias"]) @ block["down"]


def _loss(params, batch):
    x, y = batch
    for block in params.values():
        x = _block(block, x)
    return jnp.mean((x - y).astype(jnp.float32) ** 2)


def _pipelined(mesh):
    """The loss of blocks that lie on one device each; two micro-batches for each of them."""
    stages = mesh.size

    def run(block, batch):
        block = jax.tree.map(lambda leaf: leaf[0], block)
        stage = jax.lax.axis_index("stage")
        inputs, targets = batch.reshape(2, 2 * stages, ROWS, -1)

        def turn(x, time):
            x = _block(block, jnp.where(stage == 0, inputs[time % len(inputs)], x))
            # What the last one has after all have seen it; from the others comes nothing yet.
            target = targets[(time - stages + 1) % len(targets)]
            counts = (stage == stages - 1) & (time >= stages - 1)
            loss = jnp.where(counts, jnp.mean((x - target).astype(jnp.float32) ** 2), 0.0)
            onwards = [(i, (i + 1) % stages) for i in range(stages)]
            return jax.lax.ppermute(x, "stage", onwards), loss

        start = jnp.where(stage < 0, inputs[0], 0.0)  # zeros, which may differ between devices
        turns = jnp.arange(len(inputs) + stages - 1)
        _, losses = jax.lax.scan(turn, start, turns)
        return jax.lax.psum(jnp.sum(losses), "stage") / len(inputs)

    return jax.shard_map(run, mesh=mesh, in_specs=(P("stage"), P()), out_specs=P())
