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
        return (
            jaxscale.scale_backward(network) if self.boundary == "network" else network
        )

    def cast(self, loss_fn):
        """Returns the loss as this way computes it."""
        if not self.half:
            return loss_fn
        half_fn = jaxscale.autocast(loss_fn)
        return jaxscale.scale_backward(half_fn) if self.boundary == "loss" else half_fn

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


def program(way, tx, init_params, loss_fn, draw, evaluate):
    """Returns the program of parameters and nothing else: `loss_fn(params, *draw(key))`."""
    tx = way.optimizer(tx)
    train_step = jaxscale.train_step(way.cast(loss_fn), tx)

    def init(key):
        params = init_params(key)
        return params, tx.init(params)

    def step(carry, key):
        *carry, loss = train_step(*carry, *draw(key))
        return tuple(carry), loss

    def losses(carry, key):
        drawn = draw(key)
        return [Loss(lambda params: loss_fn(params, *drawn), *carry)]

    return Program(init, step, lambda carry: evaluate(carry[0]), losses)


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


@functools.cache
def digits():
    """Returns scikit-learn's digits and labels for training, and those that are held out."""
    images, labels = load_digits(return_X_y=True)
    images = (images.reshape(-1, 8, 8, 1) / 16).astype(np.float32)
    order = np.random.default_rng(0).permutation(len(images))
    images, labels = images[order], labels[order].astype(np.int32)
    return (images[360:], labels[360:]), (images[:360], labels[:360])


def some(key, batch, *arrays):
    """Returns `batch` elements of each of the arrays, drawn alike."""
    chosen = jax.random.randint(key, (batch,), 0, len(arrays[0]))
    return tuple(jnp.asarray(array)[chosen] for array in arrays)


@functools.cache
def text():
    """Returns scikit-learn's descriptions of its data sets, and the number of characters.

    The letters are numbered by frequency, and the rare ones share a number. The last eighth is
    held out.
    """
    folder = importlib.resources.files("sklearn.datasets.descr")
    files = sorted(
        (path for path in folder.iterdir() if path.name.endswith(".rst")), key=str
    )
    raw = np.frombuffer(b"".join(path.read_bytes() for path in files), np.uint8)
    by_frequency = np.argsort(-np.bincount(raw, minlength=256), kind="stable")
    rank = np.minimum(np.argsort(by_frequency), 63).astype(np.int32)[raw]
    cut = len(rank) * 7 // 8
    return rank[:cut], rank[cut:], 64


def some_text(key, batch, length):
    """Returns `int32[batch, length + 1]`, pieces of the text."""
    letters = jnp.asarray(text()[0])
    starts = jax.random.randint(key, (batch,), 0, len(letters) - length)
    return letters[starts[:, None] + jnp.arange(length + 1)]


def held_out_text(length):
    """Returns `int32[pieces, length + 1]`, all of the held-out text."""
    letters = text()[1]
    pieces = (len(letters) - 1) // length
    return letters[np.arange(pieces)[:, None] * length + np.arange(length + 1)]


@functools.cache
def photo():
    """Returns the left and the right half of a photograph, float32 in [0, 1]."""
    flower = load_sample_images().images[1][None, :426].astype(np.float32) / 255
    return flower[:, :, :320], flower[:, :, 320:]


def distance(images, held_out):
    """Returns the sliced Wasserstein distance between digits, each with an axis of 64 pixels."""
    directions = jax.random.normal(jax.random.key(4), (64, 256))
    directions /= jnp.linalg.norm(directions, axis=0)
    shadows = [jnp.sort(x @ directions, 0) for x in (images, held_out)]
    return jnp.sqrt(jnp.mean((shadows[0] - shadows[1]) ** 2))
