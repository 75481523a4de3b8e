"""Why float16 needs loss scaling, in one picture: the gradients of a mean over many pixels.

A network doubles the size of photographs, and its loss is the mean squared error of a batch. The
gradient that the loss sends back into the network is 2 * error / 3.1 million for each number of
its output. This program computes these gradients for the error of cubic interpolation. It prints
what float16 keeps of them at several loss scales, and writes a picture of how large they are, for
which it needs matplotlib.
"""

import argparse

import jax
import jax.numpy as jnp
from sklearn.datasets import load_sample_images

from jaxscale import diagnostics

CROP = 128


def mean_squared_error(prediction, truth):
    """Returns the loss: one number for the whole batch."""
    return jnp.mean((prediction - truth) ** 2)


def gradients(batch_size):
    """Returns the gradients of the loss at the prediction, in float32, where none is lost."""
    flower = jnp.asarray(load_sample_images().images[1], jnp.float32) / 255
    corners = jax.random.randint(jax.random.key(0), (batch_size, 2), 0, 427 - CROP)
    crops = []
    for y, x in corners.tolist():
        crops.append(flower[y : y + CROP, x : x + CROP])
    crops = jnp.stack(crops)
    small = crops.reshape(batch_size, CROP // 2, 2, CROP // 2, 2, 3).mean((2, 4))
    prediction = jax.image.resize(small, crops.shape, "cubic")
    return jax.grad(mean_squared_error)(prediction, crops)


def main(batch_size=64, picture=None):
    """Prints what float16 keeps at each loss scale; returns the share that it flushes to zero."""
    grads = gradients(batch_size)
    for exponent in range(0, 40, 4):
        (row,) = diagnostics.sizes(grads, loss_scale=2.0**exponent).rows
        flushed = f"{100 * row.flushed / row.nonzero:.1f}% flushed"
        overflow = f"{100 * row.overflowed / row.nonzero:.1f}% overflow"
        print(f"2**{exponent}: {flushed}, {overflow}")
    if picture:
        diagnostics.plot(grads).savefig(picture, dpi=80)
    (row,) = diagnostics.sizes(grads).rows
    return row.flushed / row.nonzero


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--picture", default="gradients.png", help="where to write the picture"
    )
    main(picture=parser.parse_args().picture)
