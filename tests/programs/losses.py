"""Each function of `optax.losses`, behind a layer with a bias that is trained."""

import warnings
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

# No losses, or used inside of others.
LEFT_OUT = {
    "cosine_similarity": "no loss: `cosine_distance` is 1 less it",
    "ctc_loss_with_forward_probs": "what `ctc_loss` is made of",
}


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


def binary_labels(columns: int) -> jax.Array:
    return jnp.asarray(integers(2, ROWS, columns, seed=6), jnp.float32)


def shares(columns: int) -> jax.Array:
    return jax.nn.softmax(targets(columns))


# Regression.


@program("jax")
def squared_error():
    return behind_layers(losses.squared_error, targets(3), 3)


@program("jax")
def l2_loss():
    return behind_layers(losses.l2_loss, targets(3), 3)


@program("jax")
def huber_loss():
    def loss(outputs, targets):
        return losses.huber_loss(outputs, targets, delta=0.5)

    return behind_layers(loss, targets(3), 3)


@program("jax")
def log_cosh():
    return behind_layers(losses.log_cosh, targets(3), 3)


@program("jax")
def cosine_distance():
    return behind_layers(losses.cosine_distance, targets(6), 6)


# Classification.


@program("jax")
def softmax_cross_entropy_with_integer_labels():
    return confident(
        losses.softmax_cross_entropy_with_integer_labels, 10.0, is_one_hot=False
    )


@program("jax")
def softmax_cross_entropy():
    return confident(losses.softmax_cross_entropy, 11.0, is_one_hot=True)


@program("jax")
def safe_softmax_cross_entropy():
    return confident(losses.safe_softmax_cross_entropy, 8.0, is_one_hot=True)


@program("jax")
def poly_loss_cross_entropy():
    return confident(losses.poly_loss_cross_entropy, 9.0, is_one_hot=True)


@program("jax")
def smooth_labels():
    def loss(logits, labels):
        smooth = losses.smooth_labels(labels, 0.1)
        return losses.softmax_cross_entropy(logits, smooth)

    return confident(loss, 7.0, is_one_hot=True)


@program("jax")
def multiclass_hinge_loss():
    return behind_layers(losses.multiclass_hinge_loss, integers(5, ROWS, seed=7), 5)


@program("jax")
def multiclass_perceptron_loss():
    return behind_layers(
        losses.multiclass_perceptron_loss, integers(5, ROWS, seed=8), 5
    )


@program("jax")
def multiclass_sparsemax_loss():
    return behind_layers(losses.multiclass_sparsemax_loss, integers(5, ROWS, seed=9), 5)


@program("jax")
def sigmoid_binary_cross_entropy():
    return behind_layers(losses.sigmoid_binary_cross_entropy, binary_labels(4), 4)


@program("jax")
def sigmoid_focal_loss():
    def loss(logits, labels):
        return losses.sigmoid_focal_loss(logits, labels, alpha=0.25, gamma=2.0)

    return behind_layers(loss, binary_labels(4), 4)


@program("jax")
def sparsemax_loss():
    return behind_layers(losses.sparsemax_loss, binary_labels(4), 4)


@program("jax")
def hinge_loss():
    return behind_layers(losses.hinge_loss, 2 * binary_labels(4) - 1, 4)


@program("jax")
def perceptron_loss():
    return behind_layers(losses.perceptron_loss, 2 * binary_labels(4) - 1, 4)


@program("jax")
def make_fenchel_young_loss():
    loss = losses.make_fenchel_young_loss(jax.nn.logsumexp)
    return behind_layers(loss, shares(4), 4)


# Distributions.


@program("jax")
def kl_divergence():
    def loss(logits, targets):
        return losses.kl_divergence(jax.nn.log_softmax(logits), targets)

    return behind_layers(loss, shares(5), 5)


@program("jax")
def kl_divergence_with_log_targets():
    def loss(logits, targets):
        return losses.kl_divergence_with_log_targets(
            jax.nn.log_softmax(logits), jnp.log(targets)
        )

    return behind_layers(loss, shares(5), 5)


@program("jax")
def convex_kl_divergence():
    def loss(logits, targets):
        with warnings.catch_warnings():  # newer versions have another name for it
            warnings.simplefilter("ignore", DeprecationWarning)
            return losses.convex_kl_divergence(jax.nn.log_softmax(logits), targets)

    return behind_layers(loss, shares(5), 5)


if hasattr(losses, "generalized_kl_divergence"):

    @program("jax")
    def generalized_kl_divergence():
        def loss(outputs, targets):
            return losses.generalized_kl_divergence(outputs, targets)

        return behind_layers(loss, jnp.exp(targets(5)), 5)


# Pairs, sets, sequences and masks.


@program("jax")
def triplet_margin_loss():
    def loss(outputs, _):
        anchors, positives, negatives = jnp.split(outputs, 3)
        return losses.triplet_margin_loss(anchors, positives, negatives)

    return behind_layers(loss, targets(1), 4)


@program("jax")
def ntxent():
    def loss(outputs, labels):
        return losses.ntxent(outputs, labels, temperature=0.2)

    return behind_layers(loss, jnp.arange(ROWS) // 2, 6)


@program("jax")
def ranking_softmax_loss():
    def loss(outputs, relevance):
        return losses.ranking_softmax_loss(outputs, relevance, where=relevance > -1.0)

    return behind_layers(loss, targets(5), 5)


@program("jax")
def ctc_loss():
    def loss(outputs, labels):
        logits = outputs.reshape(2, ROWS // 2, 5)
        label_paddings = jnp.zeros(labels.shape)
        paddings = jnp.zeros(logits.shape[:2])
        return losses.ctc_loss(logits, paddings, labels, label_paddings)

    return behind_layers(loss, integers(4, 2, 3, seed=10) + 1, 5)


if hasattr(losses, "dice_loss"):

    @program("jax")
    def dice_loss():
        def loss(logits, labels):
            logits = logits.reshape(2, -1, 4)
            labels = labels.reshape(2, -1, 4)
            return losses.dice_loss(logits, labels)

        return behind_layers(loss, binary_labels(4), 4)

    @program("jax")
    def binary_dice_loss():
        def loss(logits, labels):
            logits = logits.reshape(2, -1)
            labels = labels.reshape(2, -1)
            return losses.binary_dice_loss(logits, labels)

        return behind_layers(loss, binary_labels(4), 4)

    @program("jax")
    def multiclass_generalized_dice_loss():
        def loss(logits, labels):
            probabilities = jax.nn.softmax(logits).reshape(2, -1, 4)
            one_hot = jax.nn.one_hot(labels, 4).reshape(2, -1, 4)
            return losses.multiclass_generalized_dice_loss(probabilities, one_hot)

        return behind_layers(loss, integers(4, ROWS, seed=11), 4)
