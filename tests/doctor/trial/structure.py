"""Faults inside of scans, branches, remat and experts, and gradients that are flushed."""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
from trial_entry import cast, faulty, filled, mean_square, normal


@faulty(source="https://github.com/huggingface/transformers/pull/43543", kind="flushed", tuned=True)
def auxiliary_head(half=jnp.float16):
    """One head has large gradients, so that no scale fits that would rescue the other's."""
    params = {"trunk": normal(0, 3, 4), "value": normal(1, 4), "aux": normal(2, 4, scale=3e-3)}

    def loss_fn(params, batch):
        p = cast(params, half)
        h = jnp.tanh(batch["x"].astype(half) @ p["trunk"])
        value = jnp.square(h @ p["value"] * 100 - batch["return"].astype(half))
        aux = jnp.square(h @ p["aux"]) * 1e-6  # fault
        return jnp.sum((value + aux).astype(jnp.float32))

    return loss_fn, params, {"x": normal(3, 4, 3), "return": 150 + normal(4, 4, scale=20.0)}


@faulty(source="https://github.com/huggingface/transformers/pull/36832", kind="overflow")
def residual_stream(half=jnp.float16):
    """The residual stream of Gemma grows from layer to layer, here in a scan over the layers."""
    params = {"embed": normal(5, 5, 4), "layers": normal(6, 6, 4, 4, scale=0.3)}

    def loss_fn(params, tokens):
        p = cast(params, half)
        x = p["embed"][tokens] * 3000

        def layer(x, w):
            return x + x @ w * 2, None  # fault

        x, _ = jax.lax.scan(layer, x, p["layers"])
        x = x.astype(jnp.float32)
        return mean_square(x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1) - 1)

    return loss_fn, params, jnp.array([0, 3, 1, 4])


@faulty(source="https://github.com/huggingface/transformers/issues/5651", kind="overflow")
def dense_relu_dense(half=jnp.float16):
    """The second layer of T5's feed-forward block overflows, under `nn.remat`."""

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            h = nn.relu(nn.Dense(8, use_bias=False, dtype=half, name="wi")(x))
            return nn.Dense(4, use_bias=False, dtype=half, name="wo")(h)  # fault

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            y = nn.remat(Block)()(x).astype(jnp.float32)
            return y / (1 + jnp.max(jnp.abs(y), axis=-1, keepdims=True))

    model, x = Net(), normal(7, 3, 4)
    params = jax.tree.map(lambda w: w * 500, filled(lambda: model.init(jax.random.key(1), x)))

    def loss_fn(params, x):
        return mean_square(model.apply(params, x) - 1)

    return loss_fn, params, x * 3


@faulty(source="https://github.com/tenstorrent/tt-metal/issues/56550", kind="overflow")
def decay_in_two_factors(half=jnp.float16):
    """Gated attention in chunks: exp(a - b) as exp(a) * exp(-b), one inf and the other 0."""
    params = {"gate": normal(9, 3, scale=0.3), "w": normal(10, 3, 2)}

    def loss_fn(params, x):
        p, x = cast(params, half), x.astype(half)
        log_decay = jnp.cumsum(-jax.nn.softplus(x @ p["gate"] + 1))
        inverse = jnp.exp(-log_decay)  # fault
        weights = jnp.tril(jnp.exp(log_decay)[:, None] * inverse)  # fault
        return mean_square(weights @ (x @ p["w"]) - 1)

    return loss_fn, params, normal(11, 16, 3)


@faulty(source="https://github.com/VincentStimper/normalizing-flows/issues/47", kind="overflow")
def affine_coupling(half=jnp.float16):
    """The exponential of an unbounded scale, twice in a row."""

    class Coupling(eqx.Module):
        net: eqx.nn.Linear

        def __call__(self, z):
            shift, log_scale = jnp.split(self.net(z[:2]), 2)
            moved = z[2:] * jnp.exp(log_scale) + shift  # fault
            return jnp.concatenate([moved, z[:2]]), jnp.sum(log_scale)

    keys = jax.random.split(jax.random.key(3), 2)
    first, last = (Coupling(eqx.nn.Linear(2, 4, key=key)) for key in keys)
    layers = [first, jax.tree.map(lambda w: w * 1e-6, last)]

    def loss_fn(layers, x):
        def likelihood(z):
            total = jnp.zeros((), half)
            for layer in cast(layers, half):
                z, log_det = layer(z)
                total = total + log_det
            return jnp.log1p(jnp.max(jnp.abs(z.astype(jnp.float32)))) - total.astype(jnp.float32)

        return jnp.mean(jax.vmap(likelihood)(x.astype(half)))

    row = first.net.weight[3]
    return loss_fn, layers, normal(14, 4, 4).at[1, :2].set(row * 12 / jnp.sum(jnp.square(row)))


@faulty(source="https://github.com/jax-ml/jax/issues/9839", kind="input", tuned=True)
def token_out_of_range(half=jnp.float16):
    """A token beyond the vocabulary: its embedding is NaN."""

    class Net(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            x = nn.Embed(6, 4, dtype=half)(tokens)  # fault
            return nn.Dense(6, dtype=half)(x)

    model, tokens = Net(), jnp.array([[0, 1, 5], [2, 6, 3]])
    params = filled(lambda: model.init(jax.random.key(0), tokens))

    def loss_fn(params, tokens):
        log_p = jax.nn.log_softmax(model.apply(params, tokens).astype(jnp.float32))
        return -jnp.mean(log_p[..., 0])

    return loss_fn, params, tokens


@faulty(source="https://github.com/nerfstudio-project/nerfstudio/pull/104", kind="overflow")
def density(half=jnp.float16):
    """A density network whose hidden numbers overflow before the softplus, in one branch."""
    params = {"features": normal(15, 4, 3, scale=9e3), "w": normal(16, 3, 4), "v": normal(17, 4)}

    def loss_fn(params, batch):
        p = cast(params, half)
        x = p["features"][batch["cell"]]

        def fine(x):
            return jax.nn.relu(x @ p["w"] * 4)  # fault

        def coarse(x):
            return jax.nn.relu(x @ p["w"] * 1e-4)

        h = jax.lax.cond(batch["is_fine"], fine, coarse, x)
        sigma = jax.nn.softplus((h * 1e-5).astype(half) @ p["v"])
        return mean_square(jnp.exp(-sigma) - 0.5)

    return loss_fn, params, {"cell": jnp.array([0, 2, 3]), "is_fine": jnp.array(True)}


@faulty(
    source="https://github.com/AUTOMATIC1111/stable-diffusion-webui/issues/14071", kind="epsilon"
)
def noise_schedule(half=jnp.float16):
    """The last cumulative product of a schedule of zero terminal SNR, 4.9e-8 or less, is 0."""
    params = {"w": normal(18, 2, 2), "b": jnp.zeros(2)}
    product = jnp.array([0.99, 0.6, 0.1, 2.9e-8])

    def loss_fn(params, batch):
        p = cast(params, half)
        alpha = product.astype(half)[batch["step"]][:, None]  # fault
        sigma = jnp.sqrt((1 - alpha) / alpha)  # fault
        x = batch["x"].astype(half) + 1e-3 * sigma * batch["noise"].astype(half)
        y = (x @ p["w"] + p["b"]) / jnp.sqrt(1 + sigma * 1e-3)
        return mean_square(y - batch["noise"].astype(half))

    batch = {"x": normal(19, 4, 2), "noise": normal(20, 4, 2), "step": jnp.array([0, 3, 1, 2])}
    return loss_fn, params, batch


@faulty(source="https://github.com/tenstorrent/tt-metal/issues/55724", kind="flushed")
def saturated_gate(half=jnp.float16):
    """The sigmoid of 9 is 1, and its derivative s (1 - s) 0, whatever the loss scale."""
    params = {"gate": normal(21, 3, 4, scale=0.1), "w": normal(22, 3, 4)}

    def loss_fn(params, x):
        p, x = cast(params, half), x.astype(half)
        gate = jax.nn.sigmoid(x @ p["gate"] + 9)  # fault
        return mean_square(gate * jnp.tanh(x @ p["w"]) - 1)

    return loss_fn, params, normal(23, 5, 3)
