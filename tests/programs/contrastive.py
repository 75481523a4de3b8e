"""Two views of the same: CLIP, SigLIP, SimCLR, BYOL, triplets, distillation."""

import haiku as hk
import jax
import jax.numpy as jnp
import optax
from corpus import (
    Program,
    accuracy,
    apply_dense,
    dense,
    normal,
    program,
)
from flax import nnx


def unit(x):
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


@program("jax")
def clip_by_diagonal():
    """CLIP, its loss as `logsumexp(logits) - diag(logits)`, with a learned temperature."""
    params = {
        "image": dense(24, 16, seed=1),
        "text": dense(24, 16, seed=2),
        "temperature": jnp.log(12.0),
    }
    images = normal(8, 24, seed=3)
    # Texts whose embeddings are close to those of their images, as after training.
    wanted = apply_dense(params["image"], images) + 0.1 * normal(8, 16, seed=4)
    texts = (wanted - params["text"]["b"]) @ jnp.linalg.pinv(params["text"]["w"])

    def loss(params, batch):
        images, texts = batch
        images = unit(apply_dense(params["image"], images))
        texts = unit(apply_dense(params["text"], texts))
        scale = jnp.exp(params["temperature"])
        logits = scale * images @ texts.T
        by_row = jax.nn.logsumexp(logits, axis=1) - jnp.diag(logits)
        by_column = jax.nn.logsumexp(logits, axis=0) - jnp.diag(logits)
        value = jnp.mean(by_row + by_column) / 2
        return value, {"right": accuracy(logits, jnp.arange(8))}

    return Program(loss, params, (images, texts))


@program("haiku")
def byol():
    """BYOL: a predictor follows a target network, which is no parameter but state."""

    def network(x):
        return hk.nets.MLP([24, 16], name="encoder")(x)

    def predictor(x):
        return hk.nets.MLP([16, 16], name="predictor")(x)

    encode = hk.without_apply_rng(hk.transform(network))
    predict = hk.without_apply_rng(hk.transform(predictor))
    one = normal(8, 12, seed=1)
    other = one + 0.2 * normal(8, 12, seed=2)
    params = {
        "encoder": encode.init(jax.random.key(0), one),
        "predictor": predict.init(jax.random.key(1), normal(8, 16)),
    }
    target = encode.init(jax.random.key(2), one)

    def loss(params, target, batch):
        one, other = batch
        encoded = encode.apply(params["encoder"], one)
        predicted = predict.apply(params["predictor"], encoded)
        predicted = unit(predicted)
        wanted = encode.apply(target, other)
        wanted = jax.lax.stop_gradient(unit(wanted))
        similarities = jnp.sum(predicted * wanted, axis=-1)
        value = jnp.mean(2 - 2 * similarities)
        new = optax.incremental_update(params["encoder"], target, 0.01)
        squares = sum(jnp.sum(x**2) for x in jax.tree.leaves(target))
        norm = jnp.sqrt(squares)
        return value, (jax.lax.stop_gradient(new), {"norm": norm})

    return Program(loss, params, (one, other), state=target)


@program("nnx")
def triplets():
    """A metric learned from triplets, with `optax.triplet_margin_loss`."""

    class Embedder(nnx.Module):
        def __init__(self, rngs):
            self.hidden = nnx.Linear(12, 24, rngs=rngs)
            self.out = nnx.Linear(24, 8, rngs=rngs)

        def __call__(self, x):
            return unit(self.out(nnx.silu(self.hidden(x))))

    def loss(model, batch):
        anchors, positives, negatives = [model(x) for x in batch]
        losses = optax.losses.triplet_margin_loss(
            anchors, positives, negatives, margin=1.0
        )
        return losses.mean(), {"active": jnp.sum(losses > 0)}

    batch = tuple(normal(8, 12, seed=seed) for seed in range(3))
    return Program(loss, Embedder(nnx.Rngs(0)), batch)
