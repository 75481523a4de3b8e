"""Graphs: attention over neighbours."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from corpus import (
    Program,
    cross_entropy,
    integers,
    normal,
    program,
)

NODES, EDGES = 12, 30


def random_graph(seed):
    """Returns nodes with features, and edges as two lists of integers."""
    return normal(NODES, 8, seed=seed), integers(NODES, 2, EDGES, seed=seed)


@program("linen")
def graph_attention():
    """A GAT: softmax over the edges of a node by segment maximum and sum, two heads."""

    class Attention(nn.Module):
        @nn.compact
        def __call__(self, x, senders, receivers):
            h = nn.Dense(2 * 8)(x)
            h = h.reshape(NODES, 2, 8)
            ours = self.param("ours", nn.initializers.normal(0.3), (2, 8))
            theirs = self.param("theirs", nn.initializers.normal(0.3), (2, 8))
            at_receivers = jnp.sum(h * ours, -1)[receivers]
            at_senders = jnp.sum(h * theirs, -1)[senders]
            scores = at_receivers + at_senders
            scores = nn.leaky_relu(scores, 0.2)
            peak = jax.ops.segment_max(scores, receivers, num_segments=NODES)
            weights = jnp.exp(scores - peak[receivers])
            total = jax.ops.segment_sum(weights, receivers, num_segments=NODES)
            weights = weights / (total[receivers] + 1e-9)
            messages = weights[..., None] * h[senders]
            received = jax.ops.segment_sum(messages, receivers, NODES)
            received = received.reshape(NODES, 16)
            return nn.elu(received)

    class Network(nn.Module):
        @nn.compact
        def __call__(self, x, edges):
            x = Attention()(x, *edges)
            x = Attention()(x, *edges)
            return nn.Dense(3)(x)

    model = Network()
    x, edges = random_graph(4)
    params = model.init(jax.random.key(0), x, edges)

    def loss(params, batch):
        x, edges, labels = batch
        return cross_entropy(model.apply(params, x, edges), labels)

    return Program(loss, params, (x, edges, integers(3, NODES, seed=5)))
