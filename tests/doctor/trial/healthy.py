"""Models that look suspicious and are not."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from trial_entry import cast, filled, healthy, mean_square, normal


@healthy(looks="a mask in the batch whose -inf never reaches the loss", tuned=True)
def infinities_in_the_batch(half=jnp.float16):
    def loss_fn(params, batch):
        logits = batch["x"].astype(half) @ params["w"].astype(half) + batch["mask"].astype(half)
        log_p = jax.nn.log_softmax(logits.astype(jnp.float32))
        return -jnp.mean(jnp.take_along_axis(log_p, batch["y"][:, None], axis=1))

    batch = {
        "x": normal(4, 3, 2),
        "y": jnp.array([0, 2, 1]),
        "mask": jnp.array([0.0, 0.0, 0.0, -jnp.inf]),
    }
    return loss_fn, {"w": normal(5, 2, 4)}, batch


@healthy(looks="a head behind stop_gradient, and a parameter that nothing uses")
def stopped_head(half=jnp.float16):
    params = {"trunk": normal(16, 3, 4), "head": normal(17, 4), "probe": normal(18, 4)}
    params["unused"] = normal(19, 5)

    def loss_fn(params, x):
        p = cast(params, half)
        h = jnp.tanh(x.astype(half) @ p["trunk"])
        probe = jax.lax.stop_gradient(h) @ p["probe"]
        frozen = h @ jax.lax.stop_gradient(p["head"])
        return mean_square(frozen - 1) + mean_square(probe - 1)

    return loss_fn, params, normal(20, 5, 3)


@healthy(looks="padding, whose embeddings get no gradients, and rows that are all 0")
def padded_tokens(half=jnp.float16):
    class Net(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            x = nn.Embed(300, 4, dtype=half)(tokens) * (tokens > 0)[..., None].astype(half)
            return nn.Dense(2, dtype=half)(nn.LayerNorm(dtype=half)(x))

    model, tokens = Net(), jnp.array([[5, 17, 0, 0], [299, 8, 8, 0]])
    params = filled(lambda: model.init(jax.random.key(0), tokens))

    def loss_fn(params, tokens):
        return mean_square((model.apply(params, tokens) - 1) * (tokens > 0)[..., None])

    return loss_fn, params, tokens


@healthy(looks="the cubes of small numbers in a GELU", tuned=True)
def gelu_of_small_numbers(half=jnp.float16):
    params = {"w": normal(22, 3, 6, scale=1e-3), "v": normal(23, 6)}

    def loss_fn(params, x):
        p = cast(params, half)
        return jnp.mean((jax.nn.gelu(x.astype(half) @ p["w"]) @ p["v"]).astype(jnp.float32))

    return loss_fn, params, normal(24, 4, 3)


@healthy(looks="gradients of 1e-9, which a loss scale rescues", tuned=True)
def tiny_gradients(half=jnp.float16):
    params = {"w": normal(27, 3, 4), "v": normal(28, 4)}

    def loss_fn(params, x):
        p = cast(params, half)
        return mean_square(jnp.tanh(x.astype(half) @ p["w"]) @ p["v"]) * 1e-9

    return loss_fn, params, normal(29, 5, 3)


@healthy(looks="a recurrent net under scan and remat")
def scanned_and_rematerialized(half=jnp.float16):
    params = {"w": normal(31, 4, 4, scale=0.5), "u": normal(32, 3, 4)}

    def loss_fn(params, x):
        p = cast(params, half)

        @jax.checkpoint
        def step(h, x):
            return jnp.tanh(h @ p["w"] + x @ p["u"]), None

        h, _ = jax.lax.scan(step, jnp.zeros((2, 4), half), x.astype(half))
        return mean_square(h - 1)

    return loss_fn, params, normal(33, 7, 2, 3)


@healthy(looks="a branch that would overflow, and is not taken")
def branch_not_taken(half=jnp.float16):
    params = {"w": normal(34, 3, 2)}

    def loss_fn(params, batch):
        y = batch["x"].astype(half) @ params["w"].astype(half)
        y = jax.lax.cond(batch["large"], lambda y: jnp.exp(y * 1000), jnp.tanh, y)
        return mean_square(y - 1)

    return loss_fn, params, {"x": normal(35, 4, 3), "large": jnp.array(False)}


@healthy(looks="a model in bfloat16, with scores of 1e6")
def bfloat16(half=jnp.float16):
    half = jnp.bfloat16 if half == jnp.float16 else half
    params = {"w": jnp.array([[1.0, -2.0], [0.5, 4.0]]), "v": jnp.array([1.0, 0.25])}

    def loss_fn(params, x):
        p = cast(params, half)
        y = jnp.square(x.astype(half) @ p["w"])
        return mean_square((y @ p["v"]) * 1e-6 - 1)

    return loss_fn, params, jnp.array([[1024.0, 512.0], [256.0, -512.0]])


@healthy(looks="a model in float32, with numbers that float16 could not hold")
def float32(half=jnp.float16):
    params = {"w": normal(36, 3, 4, scale=1e3), "b": jnp.full(4, 1e-9)}

    def loss_fn(params, x):
        return jnp.mean(jnp.square(x @ params["w"] + params["b"])) * 1e-12

    return loss_fn, params, normal(37, 5, 3, scale=1e3)


@healthy(looks="a Fourier transform, complex, in float32")
def spectrum(half=jnp.float16):
    params = {"kernel": normal(47, 8), "w": normal(48, 8, 2)}

    def loss_fn(params, x):
        both = jnp.fft.rfft(x) * jnp.fft.rfft(params["kernel"])
        y = jnp.fft.irfft(both, 8).astype(half)
        return mean_square(y @ params["w"].astype(half) - 1)

    return loss_fn, params, normal(49, 3, 8)


@healthy(looks="epsilons that float16 can hold")
def large_epsilons(half=jnp.float16):
    params = {"w": normal(50, 3, 4)}

    def loss_fn(params, x):
        y = x.astype(half) @ params["w"].astype(half)
        y = y / (jnp.max(jnp.abs(y), axis=-1, keepdims=True) + 2e-2)
        return -jnp.mean(jnp.log(jnp.square(y) + 1e-3).astype(jnp.float32))

    return loss_fn, params, normal(51, 5, 3).at[0].set(0.0)


@healthy(
    looks="per-example gradients under vmap, and a large loss that leaves little room for a scale",
    tuned=True,
)
def large_loss(half=jnp.float16):
    params = {"w": normal(52, 3), "b": jnp.zeros(())}

    def loss_fn(params, batch):
        def loss(x, y):
            return jnp.square((x.astype(half) @ params["w"].astype(half)) - y.astype(half))

        losses = jax.vmap(loss)(batch["x"], batch["y"])
        return jnp.sum(losses.astype(jnp.float32)) * 10 + jnp.square(params["b"])

    return loss_fn, params, {"x": normal(53, 4, 3), "y": 100 + normal(54, 4)}


@healthy(looks="a running maximum that begins at -inf, in attention over blocks of keys")
def online_softmax(half=jnp.float16):
    params = {name: normal(55 + i, 4, 4) for i, name in enumerate("qkv")}

    def loss_fn(params, x):
        q, k, v = (x.astype(half) @ cast(params, half)[name] for name in "qkv")

        def block(carry, keys_and_values):
            largest, total, y = carry
            k, v = keys_and_values
            scores = q @ k.T / 2
            new = jax.lax.stop_gradient(jnp.maximum(largest, jnp.max(scores, axis=-1)))
            weights, decay = jnp.exp(scores - new[:, None]), jnp.exp(largest - new)
            total = total * decay + jnp.sum(weights, axis=-1)
            return (new, total, y * decay[:, None] + weights @ v), None

        start = jnp.full(6, -jnp.inf, half), jnp.zeros(6, half), jnp.zeros((6, 4), half)
        blocks = k.reshape(3, 2, 4), v.reshape(3, 2, 4)
        (_, total, y), _ = jax.lax.scan(block, start, blocks)
        return mean_square(y / total[:, None])

    return loss_fn, params, normal(58, 6, 4)
