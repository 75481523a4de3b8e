"""Graphs: messages along edges, attention over neighbours, sets, molecules, embeddings."""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
from corpus import (
    Program,
    apply_dense,
    confident_head,
    cross_entropy,
    dense,
    integers,
    mean_squared_error,
    normal,
    program,
)

NODES, EDGES = 12, 30


def random_graph(seed):
    """Returns nodes with features, and edges as two lists of integers."""
    return normal(NODES, 8, seed=seed), integers(NODES, 2, EDGES, seed=seed)


@program("jax")
def graph_convolution():
    """GraphSAGE: a node beside the mean of its neighbours, a biased head and integer labels."""
    x, (senders, receivers) = random_graph(1)
    adjacency = jnp.eye(NODES)
    adjacency = adjacency.at[senders, receivers].set(1.0)
    adjacency = adjacency.at[receivers, senders].set(1.0)
    adjacency = adjacency / adjacency.sum(1, keepdims=True)
    labels = integers(4, NODES, seed=2)
    params = {"first": dense(16, 32, seed=3), "head": dense(32, 4, seed=4)}

    def features(params, x, adjacency):
        neighbours = adjacency @ x
        both = jnp.concatenate([x, neighbours], axis=-1)
        return jax.nn.relu(apply_dense(params["first"], both))

    params["head"]["w"] = confident_head(
        features(params, x, adjacency), labels, 4, margin=8.0
    )

    def loss(params, batch):
        x, adjacency, labels = batch
        logits = apply_dense(params["head"], features(params, x, adjacency))
        return cross_entropy(logits, labels)

    return Program(loss, params, (x, adjacency, labels))


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


@program("equinox")
def molecule_with_forces():
    """An energy of distances between atoms, whose gradient must be the forces (SchNet's loss)."""

    class Potential(eqx.Module):
        filters: eqx.nn.MLP
        atoms: eqx.nn.Embedding
        out: eqx.nn.MLP

        def __init__(self, key):
            keys = jax.random.split(key, 3)
            self.filters = eqx.nn.MLP(
                in_size=8,
                out_size=8,
                width_size=16,
                depth=1,
                activation=jax.nn.softplus,
                key=keys[0],
            )
            self.atoms = eqx.nn.Embedding(4, 8, key=keys[1])
            self.out = eqx.nn.MLP(
                in_size=8,
                out_size="scalar",
                width_size=16,
                depth=1,
                activation=jax.nn.softplus,
                key=keys[2],
            )

        def __call__(self, positions, kinds):
            apart = positions[:, None] - positions[None]
            same_atom = jnp.eye(len(kinds))[..., None]
            apart = apart + 10 * same_atom
            squares = jnp.sum(apart**2, axis=-1)
            distances = jnp.sqrt(squares)[..., None]
            centers = jnp.linspace(0.5, 4.0, 8)
            offsets = distances - centers
            basis = jnp.exp(-(offsets**2))
            filters_of_pairs = jax.vmap(jax.vmap(self.filters))
            filters = filters_of_pairs(basis)
            x = jax.vmap(self.atoms)(kinds)
            messages = filters * x[None]
            x = x + jnp.sum(messages, axis=1)
            energies = jax.vmap(self.out)(x)
            return jnp.sum(energies)

    def loss(model, batch):
        positions, kinds, energies, forces = batch

        def differentiate(positions, kinds):
            energy, slope = jax.value_and_grad(model)(positions, kinds)
            return energy, -slope

        energy, force = jax.vmap(differentiate)(positions, kinds)
        error = mean_squared_error(energy, energies)
        return error + mean_squared_error(force, forces), {}

    batch = (
        normal(4, 5, 3, seed=1, size=1.5),
        integers(4, 4, 5, seed=2),
        normal(4, seed=3),
        normal(4, 5, 3, seed=4),
    )
    return Program(loss, Potential(jax.random.key(0)), batch, scale=2.0**6)
