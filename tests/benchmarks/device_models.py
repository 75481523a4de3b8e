"""The models that `device.py` times, and the forms in which each is trained.

They are Linen models as people write them in float32: a transformer like GPT-2 small, of 124
million parameters, and ResNet-50. `dtype` is what a user of Flax gives to each layer by hand.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxscale


class Block(nn.Module):
    heads: int
    dtype: Any = None

    @nn.compact
    def __call__(self, x, mask):
        width = x.shape[-1]
        y = nn.LayerNorm(dtype=self.dtype)(x)
        y = nn.MultiHeadDotProductAttention(self.heads, dtype=self.dtype)(y, mask=mask)
        x = x + y
        y = nn.LayerNorm(dtype=self.dtype)(x)
        y = nn.gelu(nn.Dense(4 * width, dtype=self.dtype)(y))
        return x + nn.Dense(width, dtype=self.dtype)(y)


class Transformer(nn.Module):
    """A language model with unrolled layers, whose last layer shares the embedding."""

    vocabulary: int
    width: int
    layers: int
    heads: int
    dtype: Any = None

    @nn.compact
    def __call__(self, tokens):
        embed = functools.partial(nn.Embed, features=self.width, dtype=self.dtype)
        length = tokens.shape[-1]
        words = embed(self.vocabulary)
        x = words(tokens) + embed(length)(jnp.arange(length))
        mask = nn.make_causal_mask(tokens)
        for _ in range(self.layers):
            x = Block(self.heads, self.dtype)(x, mask)
        return words.attend(nn.LayerNorm(dtype=self.dtype)(x))


class ResNet(nn.Module):
    """A residual network of bottlenecks with batch norm, for images."""

    stages: tuple[int, ...]
    channels: int
    classes: int
    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        conv = functools.partial(nn.Conv, use_bias=False, dtype=self.dtype)
        norm = functools.partial(
            nn.BatchNorm, use_running_average=False, momentum=0.9, dtype=self.dtype
        )
        x = nn.relu(norm()(conv(self.channels, (7, 7), 2)(x)))
        x = nn.max_pool(x, (3, 3), (2, 2), "SAME")
        for stage, blocks in enumerate(self.stages):
            channels = self.channels * 2**stage
            for block in range(blocks):
                # Each stage but the first begins by halving the image.
                stride = 2 if stage and not block else 1
                y = nn.relu(norm()(conv(channels, (1, 1))(x)))
                y = nn.relu(norm()(conv(channels, (3, 3), stride)(y)))
                y = norm(scale_init=nn.initializers.zeros)(
                    conv(4 * channels, (1, 1))(y)
                )
                if x.shape != y.shape:
                    x = norm()(conv(4 * channels, (1, 1), stride)(x))
                x = nn.relu(x + y)
        return nn.Dense(self.classes, dtype=self.dtype)(jnp.mean(x, (1, 2)))


class Task(NamedTuple):
    """A model, its data and its optimizer."""

    settings: dict[str, Any]
    init: Callable[[], Any]  # () -> (params, state), in float32
    batch: tuple[Any, ...]
    # dtype -> loss, `(params, state, *batch) -> (loss, state)`
    loss: Callable[[Any], Callable[..., Any]]
    optimizer: optax.GradientTransformation


def cross_entropy(logits, targets):
    losses = optax.softmax_cross_entropy_with_integer_labels(
        logits.astype(jnp.float32), targets
    )
    return jnp.mean(losses)


TRANSFORMERS = {
    "tiny": {"vocabulary": 256, "width": 64, "layers": 1, "heads": 2},
    "full": {"vocabulary": 50257, "width": 768, "layers": 12, "heads": 12},
}
TOKENS = {"tiny": (2, 16), "full": (8, 1024)}


def draw_variables(model, inputs):
    """Returns variables like those of a model's own `init`, which takes a GPU most of a minute."""
    shapes = jax.eval_shape(model.init, jax.random.key(0), inputs)
    rng = np.random.default_rng(0)

    def draw(path, shape):
        name = path[-1].key
        if name in ("scale", "var"):
            return np.ones(shape.shape, np.float32)
        if name in ("bias", "mean"):
            return np.zeros(shape.shape, np.float32)
        deviation = 0.02 if name == "embedding" else math.prod(shape.shape[:-1]) ** -0.5
        return rng.standard_normal(shape.shape, np.float32) * np.float32(deviation)

    return jax.tree_util.tree_map_with_path(draw, shapes)


def transformer(size):
    settings = TRANSFORMERS[size]
    batch, length = TOKENS[size]
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, settings["vocabulary"], (batch, length + 1), np.int32)

    def init():
        model = Transformer(**settings)
        return draw_variables(model, tokens[:1, :-1])["params"], {}

    def loss(dtype):
        model = Transformer(**settings, dtype=dtype)

        def loss_fn(params, state, tokens):
            logits = model.apply({"params": params}, tokens[:, :-1])
            return cross_entropy(logits, tokens[:, 1:]), state

        return loss_fn

    described = settings | {"batch": batch, "length": length, "optimizer": "adamw"}
    return Task(described, init, (jnp.asarray(tokens),), loss, optax.adamw(3e-4))


RESNETS = {
    "tiny": {"stages": (1,), "channels": 4, "classes": 10},
    "full": {"stages": (3, 4, 6, 3), "channels": 64, "classes": 1000},
}
IMAGES = {"tiny": (2, 32), "full": (64, 224)}


def resnet(size):
    settings = RESNETS[size]
    batch, side = IMAGES[size]
    rng = np.random.default_rng(0)
    images = rng.standard_normal((batch, side, side, 3), np.float32)
    labels = rng.integers(0, settings["classes"], batch, np.int32)

    def init():
        variables = draw_variables(ResNet(**settings), images[:1])
        return variables["params"], {"batch_stats": variables["batch_stats"]}

    def loss(dtype):
        model = ResNet(**settings, dtype=dtype)

        def loss_fn(params, state, images, labels):
            variables = {"params": params, **state}
            logits, state = model.apply(variables, images, mutable=["batch_stats"])
            return cross_entropy(logits, labels), state

        return loss_fn

    described = settings | {"batch": batch, "side": side, "optimizer": "momentum"}
    data = jnp.asarray(images), jnp.asarray(labels)
    return Task(described, init, data, loss, optax.sgd(0.01, momentum=0.9))


TASKS = {"transformer": transformer, "ResNet": resnet}

# --- the ways to make a step: `(loss_fn, tx) -> (init_state, step)`, where
# `step((params, opt_state, state), *batch) -> (carry, loss)` ---


def plain(loss_fn, tx):
    """Optax alone."""

    def step(carry, *batch):
        params, opt_state, state = carry
        (loss, state), grads = jax.value_and_grad(loss_fn, has_aux=True)(
            params, state, *batch
        )
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state, state), loss

    return tx.init, step


def _train_step(loss_fn, tx):
    train_step = jaxscale.train_step(loss_fn, tx, has_state=True)

    def step(carry, *batch):
        *carry, loss = train_step(*carry, *batch)
        return tuple(carry), loss

    return tx.init, step


def skipping(loss_fn, tx):
    """`jaxscale.train_step` with `skip_nonfinite`."""
    return _train_step(loss_fn, jaxscale.skip_nonfinite(tx))


def scaled(loss_fn, tx):
    """`jaxscale.train_step` with `loss_scaled`."""
    return _train_step(loss_fn, jaxscale.loss_scaled(tx))


def _select(finite, new, old):
    return jax.tree.map(functools.partial(jnp.where, finite), new, old)


def flax_dynamic_scale(loss_fn, tx):
    """Flax's `DynamicScale`, and the selection of Flax's ImageNet example."""
    from flax.training.dynamic_scale import DynamicScale

    def init(params):
        # Strongly typed, or the second step would compile anew.
        scaler = DynamicScale(fin_steps=jnp.int32(0), scale=jnp.float32(2.0**15))
        return tx.init(params), scaler

    def step(carry, *batch):
        params, (opt_state, scaler), state = carry
        scaler, finite, (loss, state), grads = scaler.value_and_grad(
            loss_fn, has_aux=True
        )(params, state, *batch)
        updates, new_opt_state = tx.update(grads, opt_state, params)
        new_params = optax.apply_updates(params, updates)
        params = _select(finite, new_params, params)
        opt_state = _select(finite, new_opt_state, opt_state)
        return (params, (opt_state, scaler), state), loss

    return init, step


class Form(NamedTuple):
    """A way to train a model."""

    way: Callable[..., Any]
    dtype: Any = None  # given to each layer
    autocast: Any = None
    # Of parameters in bfloat16: what is put around the optimizer. None leaves them in float32.
    storage: Callable[..., Any] | None = None

    def make(self, task, params, state):
        """Returns the carry that training begins with, and its step."""
        loss_fn = task.loss(self.dtype)
        if self.autocast is not None:
            loss_fn = jaxscale.autocast(loss_fn, self.autocast)
        tx = task.optimizer
        if self.storage is not None:
            params = jax.tree.map(lambda leaf: leaf.astype(BF16), params)
            tx = self.storage(tx)
        init, step = self.way(loss_fn, tx)
        return (params, init(params), state), step


def at_random(tx):
    return jaxscale.stochastic_rounding(jaxscale.compact_state(tx))


F16, BF16 = jnp.float16, jnp.bfloat16
FLOAT32 = "float32, optax"
# The most telling ones first, since time may run out.
FORMS = {
    FLOAT32: Form(plain),
    "bfloat16 by autocast, jaxscale": Form(skipping, autocast=BF16),
    "float16 by autocast, jaxscale": Form(scaled, autocast=F16),
    "bfloat16 by dtype=, optax": Form(plain, dtype=BF16),
    "float16 by dtype=, Flax DynamicScale": Form(flax_dynamic_scale, dtype=F16),
    "float16 by dtype=, jaxscale": Form(scaled, dtype=F16),
    "float32, jaxscale": Form(skipping),
    "bfloat16 parameters, optax": Form(plain, dtype=BF16, storage=lambda tx: tx),
    "bfloat16 parameters, master_weights": Form(
        skipping, dtype=BF16, storage=jaxscale.master_weights
    ),
    "bfloat16 parameters, stochastic_rounding, compact_state": Form(
        skipping, dtype=BF16, storage=at_random
    ),
    "bfloat16 by dtype=, jaxscale": Form(skipping, dtype=BF16),
    "float16 by dtype=, optax": Form(plain, dtype=F16),
}
# What is compared with which form by hand, by a package other than this one.
BY_HAND = {
    "bfloat16 by autocast, jaxscale": "bfloat16 by dtype=, optax",
    "float16 by autocast, jaxscale": "float16 by dtype=, Flax DynamicScale",
    "float16 by dtype=, jaxscale": "float16 by dtype=, Flax DynamicScale",
    "bfloat16 by dtype=, jaxscale": "bfloat16 by dtype=, optax",
}
# Of the tiny size: each way once, and less of what takes longer to compile.
TINY_FORMS = {
    "transformer": [
        FLOAT32,
        "float16 by dtype=, Flax DynamicScale",
        "bfloat16 parameters, stochastic_rounding, compact_state",
    ],
    "ResNet": [FLOAT32, "float16 by autocast, jaxscale"],
}


def forms_of(task, size):
    """Returns the names of the forms that a task is timed in."""
    if size == "tiny":
        return TINY_FORMS[task]
    # Where parameters are a small part of the memory, their dtype says little.
    with_storage = task == "transformer"
    return [
        name for name, form in FORMS.items() if with_storage or form.storage is None
    ]
