"""Images: convolutions, patches, normalization, pooling, augmentation, segmentation, detection."""

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import optax
from corpus import (
    Program,
    accuracy,
    confident_head,
    cross_entropy,
    integers,
    normal,
    program,
)
from flax import nnx


class Encoder(nn.Module):
    """A block of a vision transformer."""

    @nn.compact
    def __call__(self, x):
        y = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=2)(y, y)
        y = nn.LayerNorm()(x)
        out = nn.Dense(x.shape[-1])
        hidden = nn.gelu(nn.Dense(32)(y))
        return x + out(hidden)


class VisionTransformer(nn.Module):
    classes: int = 8

    @nn.compact
    def __call__(self, images):
        x = nn.Conv(16, (4, 4), strides=(4, 4))(images)
        x = x.reshape(len(x), -1, 16)
        x = x + self.param("positions", nn.initializers.normal(0.3), x.shape[1:])
        x = Encoder()(x)
        features = nn.LayerNorm()(x.mean(1))
        self.sow("intermediates", "features", features)
        return nn.Dense(self.classes, name="head")(features)


@program("linen")
def vit():
    """A vision transformer with a biased head before a cross-entropy with integer labels."""
    model = VisionTransformer()
    images, labels = normal(8, 8, 8, 3), integers(8, 8)
    params = model.init(jax.random.key(0), images)["params"]
    _, seen = model.apply({"params": params}, images, mutable=["intermediates"])
    (features,) = seen["intermediates"]["features"]
    params["head"]["kernel"] = confident_head(features, labels, 8, margin=9.0)

    def loss(params, batch):
        images, labels = batch
        logits = model.apply({"params": params}, images)
        return cross_entropy(logits, labels)

    return Program(loss, params, (images, labels))


class ResidualBlock(nn.Module):
    features: int

    @nn.compact
    def __call__(self, x, train):
        y = nn.Conv(self.features, (3, 3))(x)
        y = nn.relu(nn.BatchNorm(not train, momentum=0.9)(y))
        y = nn.Conv(self.features, (3, 3))(y)
        y = nn.BatchNorm(not train, momentum=0.9)(y)
        if x.shape != y.shape:
            x = nn.Conv(self.features, (1, 1))(x)
        return nn.relu(x + y)


class ResNet(nn.Module):
    @nn.compact
    def __call__(self, x, train=True):
        x = nn.relu(nn.Conv(8, (3, 3))(x))
        x = ResidualBlock(8)(x, train)
        x = nn.max_pool(x, (2, 2), (2, 2))
        x = ResidualBlock(16)(x, train)
        features = x.mean((1, 2))
        self.sow("intermediates", "features", features)
        return nn.Dense(6, name="head")(features)


@program("linen")
def resnet():
    """A residual network with batch statistics, a biased head and accuracy beside the loss."""
    model = ResNet()
    images, labels = normal(8, 8, 8, 3), integers(6, 8)
    variables = model.init(jax.random.key(0), images)
    _, seen = model.apply(variables, images, mutable=["intermediates", "batch_stats"])
    (features,) = seen["intermediates"]["features"]
    params = variables["params"]
    params["head"]["kernel"] = confident_head(features, labels, 6, margin=8.0)

    def loss(params, batch_stats, batch):
        images, labels = batch
        variables = {"params": params, "batch_stats": batch_stats}
        logits, new = model.apply(variables, images, mutable=["batch_stats"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        aux = {"accuracy": accuracy(logits, labels)}
        return losses.mean(), (new["batch_stats"], aux)

    return Program(loss, params, (images, labels), state=variables["batch_stats"])


class SmallConvNet(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(3, 8, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.hidden = nnx.Linear(8 * 16, 32, rngs=rngs)
        self.head = nnx.Linear(32, 10, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.norm(self.conv(x)))
        x = nnx.avg_pool(x, (2, 2), (2, 2))
        x = nnx.relu(self.hidden(x.reshape(len(x), -1)))
        return self.head(self.dropout(x))


@program("nnx")
def mnist():
    """The convolutional network of Flax's tutorial, with batch statistics and dropout."""
    model = SmallConvNet(nnx.Rngs(0))
    images, labels = normal(8, 8, 8, 3), integers(10, 8)

    def loss(model, batch):
        images, labels = batch
        logits = model(images)
        return cross_entropy(logits, labels)

    return Program(loss, model, (images, labels))


class LeNet(eqx.Module):
    layers: list
    head: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        self.layers = [
            eqx.nn.Conv2d(1, 6, kernel_size=3, key=keys[0]),
            jax.nn.relu,
            eqx.nn.MaxPool2d(kernel_size=2, stride=2),
            jnp.ravel,
            eqx.nn.Linear(54, 24, key=keys[1]),
            jax.nn.tanh,
        ]
        self.head = eqx.nn.Linear(24, 10, key=keys[2])

    def features(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

    def __call__(self, x):
        logits = self.head(self.features(x))
        return jax.nn.log_softmax(logits)


@program("equinox")
def lenet():
    """The convolutional network of Equinox's tutorial: vmapped, its labels taken along an axis."""
    model = LeNet(jax.random.key(0))
    images, labels = normal(8, 1, 8, 8), integers(10, 8)
    features = jax.vmap(model.features)(images)
    matrix = confident_head(features, labels, 10, margin=11.0)
    model = eqx.tree_at(lambda m: m.head.weight, model, matrix.T)

    def loss(model, batch):
        images, labels = batch
        log_probs = jax.vmap(model)(images)
        taken = jnp.take_along_axis(log_probs, labels[:, None], axis=1)
        return -taken.mean(), {"accuracy": accuracy(log_probs, labels)}

    return Program(loss, model, (images, labels))


@program("haiku")
def convnet_with_debug_print():
    """A network whose author looks at its activations with `jax.debug.print`."""

    def network(images):
        x = hk.Conv2D(8, 3, stride=2)(images)
        x = hk.LayerNorm(-1, create_scale=True, create_offset=True)(x)
        x = jax.nn.relu(x)
        jax.debug.print("largest activation {}", jnp.max(x))
        x = hk.Flatten()(x)
        x = hk.Linear(24)(x)
        jax.debug.callback(lambda x: None, x.astype(jnp.bfloat16))
        return hk.Linear(5)(jax.nn.relu(x))

    images, labels = normal(8, 8, 8, 3), integers(5, 8)
    model = hk.without_apply_rng(hk.transform(network))
    params = model.init(jax.random.key(0), images)

    def loss(params, batch):
        images, labels = batch
        logits = model.apply(params, images)
        return cross_entropy(logits, labels)

    return Program(loss, params, (images, labels))


@program("jax")
def unet():
    """A small U-Net for segmentation: strided convolutions down, resized features up, a skip."""
    dims = ("NHWC", "HWIO", "NHWC")

    def conv(x, layer, stride=1):
        y = jax.lax.conv_general_dilated(
            x, layer["w"], (stride, stride), "SAME", dimension_numbers=dims
        )
        return y + layer["b"]

    def init_layer(width, inputs, outputs, seed):
        size = (width * width * inputs) ** -0.5
        w = normal(width, width, inputs, outputs, seed=seed, size=size)
        b = normal(outputs, seed=seed + 1, size=0.1)
        return {"w": w, "b": b}

    params = {
        "down": init_layer(3, 2, 8, 1),
        "middle": init_layer(3, 8, 8, 3),
        "up": init_layer(3, 16, 8, 5),
        "out": init_layer(1, 8, 1, 7),
    }
    images = normal(4, 8, 8, 2)
    masks = jnp.asarray(integers(2, 4, 8, 8, 1), jnp.float32)

    def loss(params, batch):
        images, masks = batch
        high = jax.nn.relu(conv(images, params["down"]))
        low = jax.nn.relu(conv(high, params["middle"], stride=2))
        shape = (*high.shape[:3], 8)
        low = jax.image.resize(low, shape, "bilinear")
        x = jnp.concatenate([high, low], axis=-1)
        x = jax.nn.relu(conv(x, params["up"]))
        logits = conv(x, params["out"])
        losses = optax.sigmoid_binary_cross_entropy(logits, masks)
        is_right = (logits > 0) == (masks > 0.5)
        overlap = jnp.mean(is_right)
        return losses.mean(), {"overlap": overlap}

    return Program(loss, params, (images, masks))
