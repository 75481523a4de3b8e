"""Trains one network in three ways: in float32, in float16, and in float16 with a loss scale.

The network is written in float32; `jaxscale.autocast` computes it in float16. It is a small
convolutional network that learns to double the size of a photograph, scikit-learn's flower. It is
trained on the left half and tested on the right half. The loss is the mean squared error of a batch
of crops, over 3.1 million numbers, so the gradient of each is 2 * error / 3.1 million. For an error
of 0.02 that is 1.3e-8, and the smallest number of float16 is 6e-8. So without loss scaling the
network only learns from its largest errors. The program prints a table and writes a picture.
"""

import argparse
import functools
import os
import pathlib
from typing import NamedTuple

# Set before JAX starts. Otherwise XLA on CPU may keep float32 between float16 operations.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_allow_excess_precision=false"
)

import jax
import jax.numpy as jnp
import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import optax
from jax.flatten_util import ravel_pytree
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from sklearn.datasets import load_sample_images

import jaxscale

BATCH_SIZE = 64
CROP = 128
WIDTH = 16
LEARNING_RATE = 1e-3
# The scale grows every 3 steps instead of every 2000, and beyond 2**24, so that sixty steps
# show what thousands would: it climbs until something overflows, and backs off.
LOSS_SCALE = jaxscale.DynamicLossScale(growth_interval=3, max_scale=2.0**40)
RUNS = {  # the dtype to compute in, and the rule
    "float32": (jnp.float32, None),
    "float16": (jnp.float16, None),
    "float16, scaled": (jnp.float16, LOSS_SCALE),
}


def load_photo():
    """Returns the left and the right half of a photograph, float32 in [0, 1]."""
    flower = load_sample_images().images[1][None, :426].astype(np.float32) / 255
    return jnp.asarray(flower[:, :, :320]), jnp.asarray(flower[:, :, 320:])


def random_crops(key, photo):
    """Returns a batch of square crops."""
    _, height, width, channels = photo.shape
    limits = jnp.array([height - CROP + 1, width - CROP + 1])
    corners = jax.random.randint(key, (BATCH_SIZE, 2), 0, limits)
    size = (CROP, CROP, channels)

    def crop(corner):
        y, x = corner
        return jax.lax.dynamic_slice(photo[0], (y, x, 0), size)

    return jax.vmap(crop)(corners)


def halve(images):
    """Returns images of half the size: the mean of each block of 2 x 2 pixels."""
    number, height, width, channels = images.shape
    blocks = images.reshape(number, height // 2, 2, width // 2, 2, channels)
    return blocks.mean((2, 4))


def interpolate(images):
    """Returns images of twice the size by cubic interpolation, the baseline to improve on."""
    number, height, width, channels = images.shape
    return jax.image.resize(images, (number, 2 * height, 2 * width, channels), "cubic")


def init_params(key):
    """Returns float32 parameters of three layers.

    The last layer is zero, so training starts from cubic interpolation.
    """
    params = []
    for inputs, outputs in [(3, WIDTH), (WIDTH, WIDTH), (WIDTH, 12)]:
        key, subkey = jax.random.split(key)
        weights = jax.random.normal(subkey, (3, 3, inputs, outputs))
        weights = weights * np.sqrt(2 / (9 * inputs))
        params.append({"weights": weights, "bias": jnp.zeros(outputs)})
    params[-1]["weights"] = jnp.zeros_like(params[-1]["weights"])
    return params


def apply_convolution(layer, images):
    """Returns the convolution of images with the weights of a layer, plus its bias."""
    layout = ("NHWC", "HWIO", "NHWC")
    convolved = jax.lax.conv_general_dilated(
        images, layer["weights"], (1, 1), "SAME", dimension_numbers=layout
    )
    return convolved + layer["bias"]


def upscale(params, images):
    """Returns images of twice the size: cubic interpolation plus learned detail."""
    first, *others = params
    hidden = apply_convolution(first, images - 0.5)
    for layer in others:
        hidden = apply_convolution(layer, jax.nn.relu(hidden))
    number, height, width, _ = hidden.shape
    # The 12 channels are 2 x 2 pixels of 3 colors.
    detail = hidden.reshape(number, height, width, 2, 2, 3).transpose(0, 1, 3, 2, 4, 5)
    return interpolate(images) + detail.reshape(number, 2 * height, 2 * width, 3)


def loss_fn(params, crops):
    """Returns the mean squared error of images that were halved and doubled again."""
    return jnp.mean((upscale(params, halve(crops)) - crops) ** 2)


def flushed_share(params, opt_state, crops, dtype):
    """Returns the share of the gradients that are zero, among those nonzero in float32."""
    half_loss = jaxscale.autocast(loss_fn, dtype=dtype)
    grads, _ = ravel_pytree(jaxscale.grad(half_loss, opt_state)(params, crops))
    exact, _ = ravel_pytree(jax.grad(loss_fn)(params, crops))
    is_flushed = (grads == 0) & (exact != 0)
    return jnp.sum(is_flushed) / jnp.sum(exact != 0)


class Result(NamedTuple):
    """A run: what was trained, and what happened in each step."""

    params: list
    losses: np.ndarray
    scales: np.ndarray  # what the loss of each step was scaled by
    applied: np.ndarray  # whether each step was applied
    flushed: float  # the mean share of the gradients that were flushed
    metrics: dict  # after the last step


def train(dtype, loss_scale, photo, num_steps, show):
    """Trains for a number of steps. Calls `show` with the loss of each."""
    tx = jaxscale.loss_scaled(optax.adam(LEARNING_RATE), loss_scale)  # 1
    params = init_params(jax.random.key(0))
    opt_state = tx.init(params)
    half_loss = jaxscale.autocast(loss_fn, dtype=dtype)
    step_on_crops = jaxscale.train_step(half_loss, tx)  # 2

    @jax.jit
    def train_step(params, opt_state, key):
        return step_on_crops(params, opt_state, random_crops(key, photo))

    measure = jax.jit(functools.partial(flushed_share, dtype=dtype))
    measured_steps = set(np.linspace(0, num_steps - 1, 6).astype(int))
    losses, scales, applied, flushed = [], [], [], []
    for step in range(num_steps):
        key = jax.random.fold_in(jax.random.key(1), step)
        if step in measured_steps:
            flushed.append(measure(params, opt_state, random_crops(key, photo)))
        scales.append(jaxscale.metrics(opt_state)["loss_scale"])
        params, opt_state, loss = train_step(params, opt_state, key)
        losses.append(loss)
        applied.append(jaxscale.metrics(opt_state)["step_applied"])
        show(loss=float(loss))  # waits for the device: a real loop would do so rarely
    return Result(
        params=params,
        losses=np.array(losses),
        scales=np.array(scales),
        applied=np.array(applied),
        flushed=float(np.mean(flushed)),
        metrics=jax.device_get(jaxscale.metrics(opt_state)),
    )


def psnr(image, truth):
    """Returns the peak signal-to-noise ratio in dB: higher is better."""
    return float(-10 * jnp.log10(jnp.mean((image - truth) ** 2)))


def draw_losses(axis, results):
    """Draws the losses of each run, smoothed."""
    num_steps = len(results["float32"].losses)
    window = max(1, num_steps // 10)
    steps = np.arange(window, num_steps + 1)
    # They differ in grey too.
    styles = [("black", "-", 4), ("#d55e00", "--", 2), ("#56b4e9", "-", 1.6)]
    for (name, result), style in zip(results.items(), styles, strict=True):
        color, line, width = style
        smooth = np.convolve(result.losses, np.ones(window) / window, "valid")
        axis.plot(steps, smooth, line, color=color, linewidth=width, label=name)
    axis.set(xlabel="step", ylabel=f"loss, mean of {window} steps")
    axis.set_title("Training loss")
    axis.legend()


def draw_scales(axis, result):
    """Draws the loss scale of a run, and which steps it skipped."""
    steps = np.arange(1, len(result.scales) + 1)
    axis.step(steps, result.scales, where="mid", color="black", label="loss scale")
    skipped = ~result.applied
    label = f"skipped step ({skipped.sum()})"
    axis.plot(steps[skipped], result.scales[skipped], "X", color="#d55e00", label=label)
    axis.set_yscale("log", base=2)
    axis.set(xlabel="step", ylabel="loss scale", title="Loss scale of the last run")
    axis.legend(loc="lower right")


def draw_errors(axes, images, truth):
    """Draws the truth, and how far each image is from it."""
    axes[0].imshow(truth[0])
    axes[0].set_title("truth", fontsize=9)
    for axis, (name, image) in zip(axes[1:], images.items(), strict=True):
        error = jnp.abs(image - truth)[0].mean(-1)
        axis.imshow(error, cmap="gray", vmin=0, vmax=0.06)
        axis.set_title(f"{name}: {psnr(image, truth):.2f} dB", fontsize=9)
    for axis in axes:
        axis.set_axis_off()


def draw(results, images, truth, path):
    """Draws the losses, the loss scale and the errors of each image into a file."""
    figure = plt.figure(figsize=(12, 7.6), layout="constrained")
    rows = figure.add_gridspec(2, 1, height_ratios=[1, 1.05])
    upper = rows[0].subgridspec(1, 2)
    lower = rows[1].subgridspec(1, len(images) + 1)
    draw_losses(figure.add_subplot(upper[0]), results)
    draw_scales(figure.add_subplot(upper[1]), list(results.values())[-1])
    figure.supxlabel("The test half, and the errors: black is 0, white is 0.06 or more")
    axes = [figure.add_subplot(lower[column]) for column in range(len(images) + 1)]
    draw_errors(axes, images, truth)
    figure.savefig(path, dpi=100)


def train_all(photo, num_steps, console):
    """Returns the result of each run by its name. Shows a bar of progress for each."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.6f}"),
        TimeElapsedColumn(),
    )
    results = {}
    with Progress(*columns, console=console) as progress:
        for name, (dtype, loss_scale) in RUNS.items():
            task = progress.add_task(f"{name:18}", total=num_steps, loss=float("nan"))
            show = functools.partial(progress.update, task, advance=1)
            results[name] = train(dtype, loss_scale, photo, num_steps, show)
    return results


def main(num_steps=60, picture="quickstart.png"):
    """Trains three times, prints a table, writes a picture; returns the PSNR of the last run."""
    console = Console()
    matplotlib.use("agg")  # draws into a file, even on machines without a screen
    photo, held_out = load_photo()
    small = halve(held_out)
    console.print(f"Training on {jax.devices()[0].platform}, {num_steps} steps each")
    results = train_all(photo, num_steps, console)

    cubic = interpolate(small)
    images = {"cubic interpolation": cubic}
    table = Table("run", "final loss", "test PSNR", "flushed to 0", "skipped", "scale")
    table.caption = "flushed to 0: gradient elements that are 0, but not in float32"
    table.add_row("(cubic alone)", "", f"{psnr(cubic, held_out):.2f} dB")
    decibels = float("nan")
    for name, result in results.items():
        images[name] = upscale(result.params, small)  # in float32, for all three
        loss = np.mean(result.losses[-max(1, num_steps // 10) :])
        decibels = psnr(images[name], held_out)
        table.add_row(
            name,
            f"{loss:.6f}",
            f"{decibels:.2f} dB",
            f"{result.flushed:.1%}",
            f"{result.metrics['total_notfinite']} steps",
            f"2**{np.log2(result.metrics['loss_scale']):.0f}",
        )
    console.print(table)
    draw(results, images, held_out, picture)
    path = pathlib.Path(picture).resolve()
    console.print(f"The picture is in {path}", soft_wrap=True)
    return decibels


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--steps", type=int, default=60, help="training steps of each run"
    )
    parser.add_argument(
        "--picture", default="quickstart.png", help="where to write the picture"
    )
    arguments = parser.parse_args()
    main(arguments.steps, arguments.picture)
