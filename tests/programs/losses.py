"""Each function of `optax.losses`, behind a layer with a bias that is trained."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from corpus import (
    Program,
    accuracy,
    apply_dense,
    confident_head,
    integers,
    normal,
    program,
    two_layers,
)
from optax import losses

ROWS = 12


def behind_layers(
    loss_of: Callable[[Any, Any], Any], targets: Any, outputs: int
) -> Program:
    """Returns a program with a loss of the outputs of two layers, and of targets."""
    params = two_layers(8, 24, outputs)

    def loss(params, batch):
        x, targets = batch
        hidden = jnp.tanh(apply_dense(params["hidden"], x))
        outputs = apply_dense(params["head"], hidden)
        return jnp.mean(loss_of(outputs, targets)), {}

    return Program(loss, params, (normal(ROWS, 8, seed=3), targets))


def confident(
    loss_of: Callable[[Any, Any], Any], margin: float, is_one_hot: bool
) -> Program:
    """Returns a classifier that is sure of its labels."""
    params = two_layers(8, 24, 6)
    x = normal(ROWS, 8, seed=3)
    labels = integers(6, ROWS, seed=4)

    def features(params, x):
        return jnp.tanh(apply_dense(params["hidden"], x))

    params["head"]["w"] = confident_head(features(params, x), labels, 6, margin)

    def loss(params, batch):
        x, labels = batch
        logits = apply_dense(params["head"], features(params, x))
        wanted = labels
        if is_one_hot:
            wanted = jax.nn.one_hot(labels, 6)
        return jnp.mean(loss_of(logits, wanted)), {"accuracy": accuracy(logits, labels)}

    return Program(loss, params, (x, labels))


def targets(columns: int) -> jax.Array:
    return normal(ROWS, columns, seed=5)


@program("jax")
def log_cosh():
    return behind_layers(losses.log_cosh, targets(3), 3)


# Classification.


@program("jax")
def softmax_cross_entropy_with_integer_labels():
    return confident(
        losses.softmax_cross_entropy_with_integer_labels, 10.0, is_one_hot=False
    )


# Pairs, sets, sequences and masks.


@program("jax")
def ntxent():
    def loss(outputs, labels):
        return losses.ntxent(outputs, labels, temperature=0.2)

    return behind_layers(loss, jnp.arange(ROWS) // 2, 6)


@program("jax")
def ctc_loss():
    def loss(outputs, labels):
        logits = outputs.reshape(2, ROWS // 2, 5)
        label_paddings = jnp.zeros(labels.shape)
        paddings = jnp.zeros(logits.shape[:2])
        return losses.ctc_loss(logits, paddings, labels, label_paddings)

    return behind_layers(loss, integers(4, 2, 3, seed=10) + 1, 5)
