"""What the models of `parity.py` share: the ways to train them, their form, and their data.

A model is a function `make(way, steps, batch)` that returns a `Program`. It is written in float32,
and asks the way for three things only: `way.model` around its network, `way.cast` around its loss,
and `way.optimizer` around its optimizer. So the lines of a model are the same in all ways.
"""

import functools
import importlib.resources
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from endings import NAMES, SCALINGS
from sklearn.datasets import load_digits, load_sample_images

import jaxscale


class Way(NamedTuple):
    """How to train: in float32 or by `jaxscale.autocast`, and what scales the backward pass.

    That is a loss scale, or `scale_backward` around the loss or around the network.
    """

    name: str
    half: bool
    loss_scale: Any = None
    boundary: str | None = None

    def model(self, network):
        """Returns a network as this way computes it: `cast` reaches into it."""
        if self.boundary == "network":
            return jaxscale.scale_backward(network)
        return network

    def cast(self, loss_fn):
        """Returns the loss as this way computes it."""
        if not self.half:
            return loss_fn
        half_fn = jaxscale.autocast(loss_fn)
        if self.boundary == "loss":
            return jaxscale.scale_backward(half_fn)
        return half_fn

    def optimizer(self, tx):
        """Returns the optimizer of this way. That of float32 compiles to `tx` alone."""
        return jaxscale.loss_scaled(tx, self.loss_scale, skip_nonfinite=self.half)


WAYS = [
    Way(NAMES[0], False),
    Way(NAMES[1], True),
    Way(NAMES[2], True, "dynamic"),
    Way(SCALINGS[1], True, "adaptive"),
    Way(SCALINGS[2], True, boundary="loss"),
    Way(SCALINGS[3], True, boundary="network"),
]


class Loss(NamedTuple):
    """A loss to look at, a function of the parameters alone, and the state of their optimizer."""

    loss_fn: Callable[[Any], jax.Array]
    params: Any
    opt_state: Any


class Program(NamedTuple):
    """A model in training.

    Attributes:
      init: `init(key) -> carry`, a tree of arrays: parameters and everything that goes along.
      step: `step(carry, key) -> (carry, loss)`.
      evaluate: `evaluate(carry) -> value`, in float32: `Model.measured` says what.
      losses: `losses(carry, key) -> [Loss, ...]`, those that `step(carry, key)` begins with.
    """

    init: Callable[[jax.Array], Any]
    step: Callable[[Any, jax.Array], tuple[Any, jax.Array]]
    evaluate: Callable[[Any], jax.Array]
    losses: Callable[[Any, jax.Array], list[Loss]]


def make_program(way, tx, init_params, loss_fn, draw, held_out, unit=1.0):
    """Makes the program of parameters and nothing else.

    It trains with `loss_fn(params, *draw(key))`, and is evaluated by the loss of `held_out`, in a
    unit.
    """
    tx = way.optimizer(tx)
    train_step = jaxscale.train_step(way.cast(loss_fn), tx)

    def init(key):
        params = init_params(key)
        return params, tx.init(params)

    def step(carry, key):
        *carry, loss = train_step(*carry, *draw(key))
        return tuple(carry), loss

    def evaluate(carry):
        return loss_fn(carry[0], *held_out) / unit

    def losses(carry, key):
        batch = draw(key)
        return [Loss(lambda params: loss_fn(params, *batch), *carry)]

    return Program(init, step, evaluate, losses)


class Model(NamedTuple):
    """An entry of the table of models.

    Attributes:
      make: `make(way, steps, batch) -> Program`.
      like: the public program whose structure it has, or what it is.
      measured: what `Program.evaluate` returns.
      steps: how many steps it trains by default.
      batch: the size of a batch by default.
      vmapped: whether the seeds train side by side, under `jax.vmap`. (Convolutions do not: with
        kernels of each seed they are grouped, which takes long on a CPU.)
      differentiated: whether its loss differentiates the network. `scale_backward` around that
        would be differentiated twice, and in forward mode.
    """

    make: Callable[[Way, int, int], Program]
    like: str
    measured: str
    steps: int
    batch: int
    vmapped: bool = True
    differentiated: bool = False


class Digits(NamedTuple):
    images: np.ndarray  # f32[n, 8, 8, 1] in [0, 1]
    labels: np.ndarray  # i32[n]


@functools.cache
def read_digits():
    """Reads scikit-learn's digits: those for training, and those that are held out."""
    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8, 1) / 16
    order = np.random.default_rng(0).permutation(len(images))
    images = images[order].astype(np.float32)
    labels = labels[order].astype(np.int32)
    return Digits(images[360:], labels[360:]), Digits(images[:360], labels[:360])


def draw_rows(key, batch, *arrays):
    """Draws `batch` rows, the same ones from each of the arrays."""
    rows = jax.random.randint(key, (batch,), 0, len(arrays[0]))
    return tuple(jnp.asarray(array)[rows] for array in arrays)


# How many characters the text is written in.
CHARACTERS = 64


@functools.cache
def read_text():
    """Reads scikit-learn's descriptions of its data sets, as `int32` numbers of characters.

    Characters are numbered by frequency, and the rare ones share a number. Returns the text for
    training, and the last eighth, which is held out.
    """
    folder = importlib.resources.files("sklearn.datasets.descr")
    paths = [path for path in folder.iterdir() if path.name.endswith(".rst")]
    content = b"".join(path.read_bytes() for path in sorted(paths, key=str))
    raw = np.frombuffer(content, np.uint8)
    counts = np.bincount(raw, minlength=256)
    by_frequency = np.argsort(-counts, kind="stable")
    ranks = np.minimum(np.argsort(by_frequency), CHARACTERS - 1)
    text = ranks.astype(np.int32)[raw]
    cut = len(text) * 7 // 8
    return text[:cut], text[cut:]


def draw_text(key, batch, length):
    """Draws pieces of the text, `int32[batch, length + 1]`: the one argument of a loss."""
    text = jnp.asarray(read_text()[0])
    starts = jax.random.randint(key, (batch,), 0, len(text) - length)
    return (text[starts[:, None] + jnp.arange(length + 1)],)


def held_out_text(length):
    """Returns all of the held-out text, `int32[pieces, length + 1]`: the one argument of a loss."""
    text = read_text()[1]
    starts = np.arange(0, len(text) - length, length)
    return (text[starts[:, None] + np.arange(length + 1)],)


@functools.cache
def read_photo():
    """Reads the left and the right half of a photograph, float32 in [0, 1]."""
    photo = load_sample_images().images[1][None, :426].astype(np.float32) / 255
    return photo[:, :, :320], photo[:, :, 320:]


def distance(images, held_out):
    """Returns the sliced Wasserstein distance between digits, each with an axis of 64 pixels."""
    directions = jax.random.normal(jax.random.key(4), (64, 256))
    directions /= jnp.linalg.norm(directions, axis=0)
    shadows = jnp.sort(images @ directions, 0)
    held_out_shadows = jnp.sort(held_out @ directions, 0)
    return jnp.sqrt(jnp.mean((shadows - held_out_shadows) ** 2))
