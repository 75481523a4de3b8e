"""Images: convolutions, normalization, pooling."""

import flax.linen as nn
import jax
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
