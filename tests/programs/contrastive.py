"""Two views of the same: CLIP, SigLIP, SimCLR, BYOL, triplets, distillation."""

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import optax
from corpus import (
    Program,
    accuracy,
    apply_dense,
    dense,
    integers,
    normal,
    program,
    two_layers,
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


@program("linen")
def clip_by_labels():
    """CLIP in Linen, its loss a cross-entropy with the labels 0, 1, 2 and so on."""

    class Towers(nn.Module):
        @nn.compact
        def __call__(self, images, texts):
            image_head = nn.Dense(16)
            hidden = nn.gelu(nn.Dense(32)(images))
            images = image_head(hidden)
            texts = nn.Embed(20, 16)(texts).mean(1)
            texts = nn.Dense(16)(texts)
            scale = self.param("scale", nn.initializers.constant(2.0), ())
            scaled_images = jnp.exp(scale) * unit(images)
            return scaled_images @ unit(texts).T

    model = Towers()
    batch = normal(8, 24, seed=1), integers(20, 8, 5, seed=2)
    params = model.init(jax.random.key(0), *batch)

    def loss(params, batch):
        logits = model.apply(params, *batch)
        labels = jnp.arange(8)
        one = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
        other = optax.softmax_cross_entropy_with_integer_labels(logits.T, labels).mean()
        return (one + other) / 2, {"right": accuracy(logits, labels)}

    return Program(loss, params, batch)


class Tower(eqx.Module):
    mlp: eqx.nn.MLP

    def __init__(self, key):
        self.mlp = eqx.nn.MLP(12, 16, 24, 1, key=key)

    def __call__(self, x):
        return unit(self.mlp(x))


@program("equinox")
def siglip():
    """SigLIP: a sigmoid for each pair, with a learned scale and bias."""
    keys = jax.random.split(jax.random.key(0))
    model = {
        "towers": [Tower(key) for key in keys],
        "scale": jnp.array(2.3),
        "bias": jnp.array(-8.0),
    }
    batch = normal(8, 12, seed=1), normal(8, 12, seed=2)

    def loss(model, batch):
        one, other = batch
        one_tower, other_tower = model["towers"]
        one = jax.vmap(one_tower)(one)
        other = jax.vmap(other_tower)(other)
        logits = jnp.exp(model["scale"]) * one @ other.T + model["bias"]
        signs = 2 * jnp.eye(8) - 1
        log_probs = jax.nn.log_sigmoid(signs * logits)
        return -jnp.mean(jnp.sum(log_probs, axis=1)), {}

    return Program(loss, model, batch)


@program("jax")
def simclr():
    """SimCLR: both views in one matrix, each without itself by a mask of -1e9."""
    params = {"hidden": dense(16, 32, seed=1), "out": dense(32, 16, seed=2)}
    clean = normal(8, 16, seed=3)
    noisy = [clean + 0.1 * normal(8, 16, seed=seed) for seed in (4, 5)]
    views = jnp.concatenate(noisy)

    def loss(params, views):
        x = jax.nn.relu(apply_dense(params["hidden"], views))
        x = unit(apply_dense(params["out"], x))
        logits = x @ x.T / 0.1
        same = jnp.eye(16, dtype=bool)
        logits = jnp.where(same, -1e9, logits)
        labels = jnp.roll(jnp.arange(16), 8)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean(), {"right": accuracy(logits, labels)}

    return Program(loss, params, views)


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


@program("jax")
def distillation():
    """A student learns the soft labels of a teacher, at a temperature, and the hard ones."""
    params = two_layers(16, 32, 6)
    teacher = dense(16, 6, seed=3)
    batch = normal(16, 16, seed=4), integers(6, 16, seed=5)

    def loss(params, batch):
        x, labels = batch
        hidden = jnp.tanh(apply_dense(params["hidden"], x))
        logits = apply_dense(params["head"], hidden)
        taught = jax.lax.stop_gradient(apply_dense(teacher, x))
        log_probs = jax.nn.log_softmax(logits / 3)
        wanted = jax.nn.softmax(taught / 3)
        soft = optax.losses.kl_divergence(log_probs, wanted)
        hard = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return jnp.mean(9 * soft + 0.5 * hard), {"accuracy": accuracy(logits, labels)}

    return Program(loss, params, batch)


@program("jax")
def barlow_twins():
    """Barlow twins: the correlation of two views, normalized over the batch, is the identity."""
    params = {"hidden": dense(12, 24, seed=1), "out": dense(24, 8, seed=2)}
    one = normal(16, 12, seed=3)
    batch = one, one + 0.3 * normal(16, 12, seed=4)

    def embed(params, x):
        hidden = jax.nn.relu(apply_dense(params["hidden"], x))
        z = apply_dense(params["out"], hidden)
        centered = z - z.mean(0)
        return centered / (z.std(0) + 1e-4)

    def loss(params, batch):
        one, other = batch
        one = embed(params, one)
        other = embed(params, other)
        correlation = one.T @ other / len(one)
        diagonal = jnp.sum((jnp.diag(correlation) - 1) ** 2)
        whole = jnp.sum(correlation**2)
        rest = whole - jnp.sum(jnp.diag(correlation) ** 2)
        return diagonal + 0.005 * rest, {}

    return Program(loss, params, batch, scale=2.0**8)
