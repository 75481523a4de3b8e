"""Small programs as people write them, by family: what everything in jaxscale must work with.

Each is a function that makes its own model and data. It stands in the file of its family and is
entered by `program`, with the framework that it is written in. `load` returns them all.
"""

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

FAMILIES = (
    "vision",
    "sequence",
    "generative",
    "contrastive",
    "graphs",
    "physics",
    "reinforcement",
    "quantization",
    "losses",
    "activations",
    "scipy_functions",
    "speech",
)

FRAMEWORKS = ("jax", "linen", "nnx", "equinox", "haiku")


class Program(NamedTuple):
    """A loss, its model and a batch.

    The loss is `loss(model, batch) -> (loss, aux)`, or, with a state,
    `loss(model, state, batch) -> (loss, (state, aux))`.
    """

    loss: Callable[..., Any]
    model: Any  # a tree of parameters, or a module of NNX or Equinox
    batch: Any
    state: Any = None
    scale: float = 2.0**10  # what the loss is scaled by, where that is fixed


class Row(NamedTuple):
    """A program that is not made yet."""

    name: str  # begins with the family: `vision.vit`
    family: str
    framework: str
    make: Callable[[], Program]


_ROWS: dict[str, Row] = {}


def program(framework: str, name: str = "") -> Callable[[Any], Any]:
    """Enters a function that makes a program, under `name` or its own name."""

    def enter(make: Callable[[], Program]) -> Callable[[], Program]:
        # A partial function has no module of its own.
        family = getattr(make, "func", make).__module__
        full_name = f"{family}.{name or make.__name__}"
        if full_name in _ROWS:
            raise ValueError(f"there are two programs {full_name}")
        _ROWS[full_name] = Row(full_name, family, framework, make)
        return make

    return enter


def load() -> dict[str, Row]:
    """Returns all programs, by name, in the order of the families."""
    for family in FAMILIES:
        importlib.import_module(family)
    return dict(_ROWS)


def normal(*shape: int, seed: int = 0, size: float = 1.0) -> jax.Array:
    """Returns normal random numbers, which are the same with every version of JAX and NumPy."""
    numbers = np.random.default_rng(seed).standard_normal(shape)
    return jnp.asarray(numbers * size, jnp.float32)


def integers(below: int, *shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).integers(0, below, shape), jnp.int32)


def weight(rows: int, columns: int, seed: int = 0) -> jax.Array:
    """Returns a matrix that keeps the size of what it multiplies."""
    return normal(rows, columns, seed=seed, size=rows**-0.5)


def dense(rows: int, columns: int, seed: int = 0) -> dict[str, jax.Array]:
    """Returns the parameters of a layer with a bias."""
    bias = normal(columns, seed=seed + 1000, size=0.1)
    return {"w": weight(rows, columns, seed), "b": bias}


def two_layers(
    inputs: int, width: int, outputs: int
) -> dict[str, dict[str, jax.Array]]:
    return {
        "hidden": dense(inputs, width, seed=1),
        "head": dense(width, outputs, seed=2),
    }


def apply_dense(layer: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return x @ layer["w"] + layer["b"]


def confident_head(
    features: jax.Array, labels: jax.Array, classes: int, margin: float
) -> Any:
    """Returns the matrix of a last layer that is sure of its labels, as a trained one is.

    The logit of the label is above the others by `margin`, more for some and less for others, if
    there are no more rows than features.
    """
    numbers = np.asarray(features, np.float64)
    rows = numbers.reshape(-1, features.shape[-1])
    labels = np.asarray(labels).reshape(-1)
    margins = np.linspace(margin - 0.5, margin + 0.5, len(labels))
    one_hot = np.eye(classes)[labels]
    logits = one_hot * margins[:, None]
    matrix, *_ = np.linalg.lstsq(rows, logits, rcond=1e-3)
    return jnp.asarray(matrix, jnp.float32)


def accuracy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return jnp.mean(jnp.argmax(logits, -1) == labels)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, Any]:
    """Returns the mean over integer labels, and how many of them are right."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean(), {"accuracy": accuracy(logits, labels)}


def mean_squared_error(outputs: jax.Array, wanted: jax.Array) -> jax.Array:
    return jnp.mean((outputs - wanted) ** 2)
