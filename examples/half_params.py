"""A bfloat16 transformer in Flax NNX that ends where a float32 one ends, at 8 bytes a parameter.

The model reads a made-up language, whose next letter depends on the last two. Its weights are in
bfloat16, as people write it. Plain AdamW loses the updates that are smaller than half a unit of a
weight, so the loss ends too high. One more line around the optimizer mends that:

    tx = jaxscale.master_weights(jaxscale.compact_state(optax.adamw(1e-3)))

The program trains four times, and prints how many bytes a weight and its state take, and where the
loss ends. With `--picture` it draws the losses over the steps; that needs matplotlib.
"""

import argparse
import pathlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxscale
import jaxscale.nnx

NUM_LETTERS = 12
LENGTH = 32
WIDTH = 64
BATCH_SIZE = 32


class Block(nnx.Module):
    """Attention and a perceptron."""

    def __init__(self, dtype, rngs):
        half = {"param_dtype": dtype, "rngs": rngs}
        self.norm1 = nnx.LayerNorm(WIDTH, **half)
        self.attention = nnx.MultiHeadAttention(4, WIDTH, decode=False, **half)
        self.norm2 = nnx.LayerNorm(WIDTH, **half)
        self.expand = nnx.Linear(WIDTH, 4 * WIDTH, **half)
        self.contract = nnx.Linear(4 * WIDTH, WIDTH, **half)

    def __call__(self, x):
        """Returns what the next block reads."""
        mask = nnx.make_causal_mask(x[..., 0])
        x = x + self.attention(self.norm1(x), mask=mask)
        return x + self.contract(nnx.gelu(self.expand(self.norm2(x))))


class Transformer(nnx.Module):
    """A decoder of letters."""

    def __init__(self, dtype, rngs):
        half = {"param_dtype": dtype, "rngs": rngs}
        self.letters = nnx.Embed(NUM_LETTERS, WIDTH, **half)
        self.places = nnx.Embed(LENGTH, WIDTH, **half)
        self.blocks = nnx.List([Block(dtype, rngs) for _ in range(2)])
        self.norm = nnx.LayerNorm(WIDTH, **half)
        self.out = nnx.Linear(WIDTH, NUM_LETTERS, **half)

    def __call__(self, letters):
        """Returns logits of the next letter at each place."""
        x = self.letters(letters) + self.places(jnp.arange(letters.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.out(self.norm(x)).astype(jnp.float32)


def loss_fn(model, text):
    """Returns the mean cross-entropy of the next letters."""
    logits = model(text[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:])
    return losses.mean()


def draw_text(rng, num_steps):
    """Returns the texts of some steps, as numbers of letters."""
    odds = rng.dirichlet(np.full(NUM_LETTERS, 0.3), (NUM_LETTERS, NUM_LETTERS))
    limits = odds.cumsum(axis=-1)
    num_texts = num_steps * BATCH_SIZE
    letters = list(rng.integers(0, NUM_LETTERS, (2, num_texts)))
    for _ in range(LENGTH - 2):
        above = limits[letters[-2], letters[-1]] > rng.random((num_texts, 1))
        letters.append(above.argmax(axis=-1))
    return np.stack(letters, axis=-1).reshape(num_steps, BATCH_SIZE, LENGTH)


class Way(NamedTuple):
    """A way to keep weights: their dtype, and what is around the optimizer."""

    dtype: str
    wrap: object


WAYS = {
    "float32": Way("float32", jaxscale.skip_nonfinite),
    "bfloat16": Way("bfloat16", optax.with_extra_args_support),
    "bfloat16, remainder + compact": Way(
        "bfloat16", lambda tx: jaxscale.master_weights(jaxscale.compact_state(tx))
    ),
    "bfloat16, stochastic + compact": Way(
        "bfloat16", lambda tx: jaxscale.stochastic_rounding(jaxscale.compact_state(tx))
    ),
}


def train(way, num_steps):
    """Trains a model: returns its losses, and the bytes of a weight and its state."""
    model = Transformer(way.dtype, nnx.Rngs(0))
    # All begin with the same weights.
    start = nnx.state(Transformer("bfloat16", nnx.Rngs(0)), nnx.Param)
    nnx.update(model, jax.tree.map(lambda w: w.astype(way.dtype), start))
    rates = optax.warmup_cosine_decay_schedule(0, 1e-3, 100, max(num_steps, 101))
    optimizer = nnx.Optimizer(model, way.wrap(optax.adamw(rates)), wrt=nnx.Param)

    @nnx.jit
    def train_step(model, optimizer, text):
        loss, grads = nnx.value_and_grad(loss_fn)(model, text)
        optimizer.update(model, grads)
        return loss

    losses = []
    for text in draw_text(np.random.default_rng(0), num_steps):
        losses.append(train_step(model, optimizer, text))
    params = jax.tree.leaves(nnx.state(model, nnx.Param))
    arrays = [*params, *jax.tree.leaves(optimizer.opt_state)]
    num_bytes = sum(array.nbytes for array in arrays)
    return np.array(losses), num_bytes / sum(array.size for array in params)


def draw(curves, path):
    """Draws the losses over the steps, each as a mean of 20."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for name, losses in curves.items():
        window = min(20, len(losses))
        smooth = np.convolve(losses, np.ones(window) / window, "valid")
        axes.plot(np.arange(window, len(losses) + 1), smooth, label=name)
    axes.set(xlabel="step", ylabel="loss")
    axes.legend(title="weights")
    figure.savefig(path, dpi=120, bbox_inches="tight")


def main(num_steps: int = 600, picture: pathlib.Path | None = None) -> float:
    """Trains in four ways and returns the last loss with remainders and a compact state."""
    curves = {}
    for name, way in WAYS.items():
        losses, num_bytes = train(way, num_steps)
        curves[name] = losses
        last = losses[-100:].mean()
        print(f"{name:31} {num_bytes:5.2f} bytes a parameter, loss {last:.4f}")
    if picture is not None:
        draw(curves, picture)
    return float(curves["bfloat16, remainder + compact"][-1])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=600, help="training steps")
    parser.add_argument("--picture", type=pathlib.Path, help="where to draw the losses")
    options = parser.parse_args()
    main(options.steps, options.picture)
