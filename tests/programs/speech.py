"""Speech and sound: CTC and spectra."""

import jax.numpy as jnp
import optax
from corpus import (
    Program,
    apply_dense,
    normal,
    program,
    two_layers,
)


@program("jax")
def masked_ctc():
    """CTC whose logits of letters that a language lacks are masked with -1e9."""
    params = two_layers(8, 24, 6)
    allowed = jnp.array([True, True, True, False, True, True])
    labels = jnp.array([[1, 2, 4], [5, 5, 1]])

    def loss(params, batch):
        frames, labels = batch
        hidden = jnp.tanh(apply_dense(params["hidden"], frames))
        logits = apply_dense(params["head"], hidden)
        logits = jnp.where(allowed, logits, -1e9)
        nothing = jnp.zeros(logits.shape[:2])
        losses = optax.ctc_loss(logits, nothing, labels, jnp.zeros(labels.shape))
        return losses.mean(), {}

    return Program(loss, params, (normal(2, 9, 8, seed=3), labels))
