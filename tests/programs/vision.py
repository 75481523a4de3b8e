"""Images: convolutions, normalization, pooling."""

import flax.linen as nn
import jax
import optax
from corpus import (
    Program,
    accuracy,
    confident_head,
    integers,
    normal,
    program,
)


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
