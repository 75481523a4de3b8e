"""Models that look suspicious and are not."""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from trial_entry import cast, filled, healthy, mean_square, normal, split


@healthy(looks="a causal mask of -inf, of which each row keeps one key", tuned=True)
def causal_mask(half=jnp.float16):
    params = {name: normal(i, 4, 4) for i, name in enumerate("qkv")}

    def loss_fn(params, x):
        q, k, v = (x.astype(half) @ cast(params, half)[name] for name in "qkv")
        bias = jnp.where(jnp.tril(jnp.ones((5, 5), bool)), 0.0, -jnp.inf).astype(half)
        return mean_square(jax.nn.softmax(q @ k.T / 2 + bias) @ v)

    return loss_fn, params, normal(3, 5, 4)


@healthy(
    looks="a mask of -1e4, a row that is masked wholly, and a bias of the keys, which cancels",
    tuned=True,
    noise="['k']['bias']",
)
def finite_mask(half=jnp.float16):
    class Attention(nn.Module):
        @nn.compact
        def __call__(self, x, valid):
            q, k, v = (nn.Dense(4, dtype=half, name=name)(x) for name in "qkv")
            bias = jnp.where(valid[:, None, :] & valid[:, :, None], 0.0, -1e4).astype(half)
            weights = nn.softmax(jnp.einsum("bqd,bkd->bqk", q, k) / 2 + bias)
            return jnp.einsum("bqk,bkd->bqd", weights, v)

    model, x = Attention(), normal(1, 2, 4, 4)
    valid = jnp.array([[1, 1, 1, 1], [1, 1, 0, 0]], bool)

    def loss_fn(params, batch):
        y = model.apply(params, batch["x"], batch["valid"]).astype(jnp.float32)
        return jnp.mean(jnp.square(y) * batch["valid"][:, :, None])

    batch = {"x": x, "valid": valid}
    return loss_fn, filled(lambda: model.init(jax.random.key(0), **batch)), batch


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


@healthy(looks="dead ReLU units and dropout: most activations are 0")
def dropout(half=jnp.float16):
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.relu(nn.Dense(8, dtype=half, bias_init=nn.initializers.constant(-0.5))(x))
            x = nn.Dropout(0.5, deterministic=False)(x)
            return nn.Dense(2, dtype=half)(x)

    model, x = Net(), normal(9, 6, 3)
    params = filled(
        lambda: model.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, x)
    )

    def loss_fn(params, x):
        return mean_square(model.apply(params, x, rngs={"dropout": jax.random.key(2)}) - 1)

    return loss_fn, params, x


@healthy(looks="LoRA: B is 0, and so are the gradients of A", tuned=True)
def lora(half=jnp.float16):
    class LoRA(eqx.Module):
        a: jax.Array
        b: jax.Array

        def __call__(self, x, frozen):
            return x @ frozen + (x @ self.a) @ self.b * 2

    frozen = normal(13, 4, 3)

    def loss_fn(model, x):
        return mean_square(cast(model, half)(x.astype(half), frozen.astype(half)) - 1)

    return loss_fn, LoRA(normal(14, 4, 2), jnp.zeros((2, 3))), normal(15, 5, 4)


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


@healthy(looks="large activations, normalized in float32")
def layer_norm_in_float32(half=jnp.float16):
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Linear(3, 8, dtype=half, rngs=rngs)
            self.norm = nnx.LayerNorm(8, dtype=half, rngs=rngs)
            self.head = nnx.Linear(8, 1, dtype=half, rngs=rngs)

        def __call__(self, x):
            return self.head(self.norm(self.embed(x)))

    definition, params = split(lambda: Net(nnx.Rngs(0)))

    def loss_fn(params, x):
        return mean_square(nnx.merge(definition, params)(x) - 1)

    return loss_fn, params, normal(21, 4, 3, scale=900.0)


@healthy(looks="the cubes of small numbers in a GELU", tuned=True)
def gelu_of_small_numbers(half=jnp.float16):
    params = {"w": normal(22, 3, 6, scale=1e-3), "v": normal(23, 6)}

    def loss_fn(params, x):
        p = cast(params, half)
        return jnp.mean((jax.nn.gelu(x.astype(half) @ p["w"]) @ p["v"]).astype(jnp.float32))

    return loss_fn, params, normal(24, 4, 3)


@healthy(looks="a logarithm and a root at 0, guarded by two wheres")
def guarded_logarithm(half=jnp.float16):
    params = {"w": normal(25, 3, 4)}

    def loss_fn(params, x):
        y = jax.nn.relu(x.astype(half) @ params["w"].astype(half))
        positive = y > 0
        safe = jnp.where(positive, y, 1)
        return mean_square(jnp.where(positive, jnp.log(safe) + jnp.sqrt(safe), 0))

    return loss_fn, params, normal(26, 5, 3)


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


@healthy(looks="the running statistics of batch norm, which have no gradients")
def batch_norm(half=jnp.float16):
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(4, dtype=half, use_bias=False)(x)
            x = nn.BatchNorm(use_running_average=False, dtype=half)(x)
            return nn.Dense(1, dtype=half)(nn.relu(x))

    model, x = Net(), normal(41, 8, 3, scale=10.0)
    variables = filled(lambda: model.init(jax.random.key(0), x))

    def loss_fn(params, x):
        given = {"params": params, "batch_stats": variables["batch_stats"]}
        y, _ = model.apply(given, x, mutable=["batch_stats"])
        return mean_square(y - 1)

    return loss_fn, variables["params"], x


@healthy(looks="integers in the batch, among them large ones")
def integers(half=jnp.float16):
    def loss_fn(params, batch):
        table = params["table"].astype(half)
        x = table[batch["user"] % 7] + table[batch["item"] % 7]
        return mean_square(jnp.sum(x, axis=-1) - batch["stars"].astype(half))

    batch = {
        "user": jnp.array([1_000_003, 70_001, 5]),
        "item": jnp.array([2**30, 12, 99_999]),
        "stars": jnp.array([5, 1, 3]),
    }
    return loss_fn, {"table": normal(46, 7, 3)}, batch


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


@healthy(looks="routing by the largest score, with -inf for the experts that are full")
def full_experts(half=jnp.float16):
    params = {"gate": normal(63, 3, 4), "experts": normal(64, 4, 3)}
    full = jnp.array([False, True, False, False])

    def loss_fn(params, x):
        p, x = cast(params, half), x.astype(half)
        logits = jnp.where(full, -jnp.inf, x @ p["gate"])
        weights, chosen = jax.lax.top_k(jax.nn.softmax(logits), 2)
        y = jnp.einsum("bd,bkd->bk", x, p["experts"][chosen])
        return mean_square(jnp.sum(y * weights, axis=-1) - 1)

    return loss_fn, params, normal(65, 6, 3)
