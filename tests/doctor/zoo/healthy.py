"""Models that look suspicious and are not."""

# ruff: noqa: B008 (what a model is given are its defaults)

import functools

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from zoo_entries import (
    array,
    cast,
    filled,
    healthy,
    mean,
    mean_square,
    normal,
    ones,
    project,
    projections,
    zeros,
)

IDS = np.array([[1_000_003, 70_001, 5], [2**30, 12, 99_999]])
TOKENS = np.array([[5, 17, 0, 0], [299, 8, 8, 0]])
VALID = np.array([[True, True, True, True], [True, True, False, False]])
MASKED = (
    "a mask of -1e4, a row that is masked wholly, and a bias of the keys, which cancels"
)


@healthy(
    "a causal mask of -inf, of which each row keeps one key",
    says=["without one the gradients are the same to the last bit"],
)
def causal_mask(x=normal(3, 5, 4), *, qkv=projections(0)):
    q, k, v = project(x, qkv)
    is_seen = jnp.tril(jnp.ones((5, 5), bool))
    bias = jnp.where(is_seen, 0.0, -jnp.inf).astype(x.dtype)
    weights = jax.nn.softmax(q @ k.T / 2 + bias)
    return mean_square(weights @ v)


@healthy(
    MASKED,
    noise="['k']['bias']",
    linen=True,
    says=["Could not be compared with float32: k/bias."],
)
def finite_mask(half, x=normal(1, 2, 4, 4), valid=VALID):
    dense = functools.partial(nn.Dense, 4, dtype=half)
    q = dense(name="q")(x)
    k = dense(name="k")(x)
    v = dense(name="v")(x)
    is_valid_key = valid[:, None, :]
    is_valid_query = valid[:, :, None]
    is_seen = is_valid_key & is_valid_query
    bias = jnp.where(is_seen, 0.0, -1e4).astype(half)
    scores = jnp.einsum("bqd,bkd->bqk", q, k) / 2
    weights = nn.softmax(scores + bias)
    y = jnp.einsum("bqk,bkd->bqd", weights, v)
    return jnp.mean(jnp.square(y.astype(jnp.float32)) * is_valid_query)


@healthy(
    "a mask in the batch whose -inf never reaches the loss",
    says=["inf or NaN in batch[2], but none in the loss or the gradients"],
)
def infinities_in_the_batch(
    x=normal(4, 3, 2),
    y=np.array([0, 2, 1]),
    mask=array([0, 0, 0, -jnp.inf]),
    *,
    w=normal(5, 2, 4),
):
    logits = (x @ w + mask).astype(jnp.float32)
    log_p = jax.nn.log_softmax(logits)
    return -jnp.mean(jnp.take_along_axis(log_p, y[:, None], axis=1))


@healthy("dead ReLU units and dropout: most activations are 0", linen=True)
def dropout(half, x=normal(9, 6, 3)):
    low = nn.initializers.constant(-0.5)
    x = nn.Dense(8, dtype=half, bias_init=low)(x)
    x = nn.relu(x)
    x = nn.Dropout(0.5, deterministic=False)(x)
    y = nn.Dense(2, dtype=half)(x)
    return mean_square(y - 1)


@healthy("numbers of a module that its layers ask the type of")
def numbers_of_a_module(half):
    class Layer(eqx.Module):
        linear: eqx.nn.Linear
        rate: float
        power: float = 2.0

        def __call__(self, x):
            if self.rate == 0.0 and isinstance(self.power, float):
                return jnp.tanh(cast(self.linear, half)(x)) ** self.power
            return x * jnp.nan

    def loss_fn(layer, x):
        return mean_square(jax.vmap(layer)(x.astype(half)) - 1)

    linear = eqx.nn.Linear(3, 4, key=jax.random.key(0))
    return loss_fn, Layer(linear, 0.0), normal(66, 5, 3)


@healthy("LoRA: B is 0, and so are the gradients of A")
def lora(
    x=normal(15, 5, 4), frozen=normal(13, 4, 3), *, a=normal(14, 4, 2), b=zeros((2, 3))
):
    y = x @ frozen
    y = y + (x @ a) @ b * 2
    return mean_square(y - 1)


@healthy(
    "a head behind stop_gradient, and a parameter that nothing uses",
    says=["in 2 of 4 leaves, as in float32: head, unused"],
)
def stopped_head(
    x=normal(20, 5, 3),
    *,
    trunk=normal(16, 3, 4),
    head=normal(17, 4),
    probe=normal(18, 4),
    unused=ones(5),
):
    h = jnp.tanh(x @ trunk)
    frozen = h @ jax.lax.stop_gradient(head)
    probed = jax.lax.stop_gradient(h) @ probe
    return mean_square(frozen - 1) + mean_square(probed - 1)


@healthy(
    "padding, whose embeddings get no gradients, and rows that are all 0", linen=True
)
def padded_tokens(half, tokens=TOKENS):
    is_token = (tokens > 0)[..., None]
    x = nn.Embed(300, 4, dtype=half)(tokens)
    x = x * is_token.astype(half)
    x = nn.LayerNorm(dtype=half)(x)
    y = nn.Dense(2, dtype=half)(x)
    return mean_square((y - 1) * is_token)


@healthy("large activations, normalized in float32")
def layer_norm_in_float32(half):
    def make_net():
        rngs = nnx.Rngs(0)
        return nnx.Sequential(
            nnx.Linear(3, 8, dtype=half, rngs=rngs),
            nnx.LayerNorm(8, dtype=half, rngs=rngs),
            nnx.Linear(8, 1, dtype=half, rngs=rngs),
        )

    definition, shapes = nnx.split(nnx.eval_shape(make_net))

    def loss_fn(params, x):
        net = nnx.merge(definition, params)
        return mean_square(net(x) - 1)

    return loss_fn, filled(shapes), normal(21, 4, 3, scale=900.0)


@healthy("the cubes of small numbers in a GELU")
def gelu_of_small_numbers(
    x=normal(24, 4, 3), *, w=normal(22, 3, 6, scale=1e-3), v=normal(23, 6)
):
    y = jax.nn.gelu(x @ w) @ v
    return mean(y)


@healthy("a logarithm and a root at 0, guarded by two wheres")
def guarded_logarithm(x=normal(26, 5, 3), *, w=normal(25, 3, 4)):
    y = jax.nn.relu(x @ w)
    is_safe = y > 0
    safe = jnp.where(is_safe, y, 1)
    y = jnp.log(safe) + jnp.sqrt(safe)
    return mean_square(jnp.where(is_safe, y, 0))


@healthy(
    "gradients of 1e-9, which a loss scale rescues",
    says=[
        "Nothing is wrong, with a loss scale: it needs one.",
        "without one 100% of the nonzero",
    ],
)
def tiny_gradients(x=normal(29, 5, 3), *, w=normal(27, 3, 4), v=normal(28, 4)):
    y = jnp.tanh(x @ w) @ v
    return mean_square(y) * 1e-9


@healthy("a recurrent net under scan and remat")
def scanned_and_rematerialized(
    xs=normal(33, 7, 2, 3), *, w=normal(31, 4, 4, scale=0.5), u=normal(32, 3, 4)
):
    @jax.checkpoint
    def step(h, x):
        return jnp.tanh(h @ w + x @ u), None

    start = jnp.zeros((2, 4), xs.dtype)
    h, _ = jax.lax.scan(step, start, xs)
    return mean_square(h - 1)


@healthy("a branch that would overflow, and is not taken")
def branch_not_taken(
    x=normal(35, 4, 3), is_large=np.array(False), *, w=normal(34, 3, 2)
):
    def overflow(y):
        return jnp.exp(y * 1000)

    y = jax.lax.cond(is_large, overflow, jnp.tanh, x @ w)
    return mean_square(y - 1)


@healthy("a model in bfloat16, with scores of 1e6")
def bfloat16(
    half,
    x=array([[1024, 512], [256, -512]]),
    *,
    w=array([[1, -2], [0.5, 4]]),
    v=array([1, 0.25]),
):
    if half == jnp.float16:
        half = jnp.bfloat16
    x, w, v = cast((x, w, v), half)
    y = jnp.square(x @ w) @ v
    return mean_square(y * 1e-6 - 1)


@healthy("a model in float32, with numbers that float16 could not hold")
def float32(
    half,
    x=normal(37, 5, 3, scale=1e3),
    *,
    w=normal(36, 3, 4, scale=1e3),
    b=1e-9 * ones(4),
):
    y = x @ w + b
    return mean_square(y) * 1e-12


@healthy("the running statistics of batch norm, which have no gradients", linen=True)
def batch_norm(half, x=normal(41, 8, 3, scale=10.0)):
    x = nn.Dense(4, dtype=half, use_bias=False)(x)
    x = nn.BatchNorm(use_running_average=False, dtype=half)(x)
    x = nn.relu(x)
    y = nn.Dense(1, dtype=half)(x)
    return mean_square(y - 1)


@healthy("integers in the batch, among them large ones")
def integers(ids=IDS, stars=np.array([5, 1, 3]), *, table=normal(46, 7, 3)):
    rows = ids % 7
    x = table[rows[0]] + table[rows[1]]
    y = jnp.sum(x, axis=-1)
    return mean_square(y - stars.astype(table.dtype))


@healthy("a Fourier transform, complex, in float32")
def spectrum(half, x=normal(49, 3, 8), *, kernel=normal(47, 8), w=normal(48, 8, 2)):
    spectrum = jnp.fft.rfft(x) * jnp.fft.rfft(kernel)
    y = jnp.fft.irfft(spectrum, 8).astype(half)
    y = y @ w.astype(half)
    return mean_square(y - 1)


@healthy("epsilons that float16 can hold")
def large_epsilons(x=normal(51, 5, 3, zero=0), *, w=normal(50, 3, 4)):
    y = x @ w
    largest = jnp.max(jnp.abs(y), axis=-1, keepdims=True)
    y = y / (largest + 2e-2)
    losses = jnp.log(jnp.square(y) + 1e-3)
    return -mean(losses)


@healthy(
    "per-example gradients under vmap, and a large loss that leaves little room for a scale",
    says=[
        "This batch needs no loss scale",
        "is not low for gradients as large as these, up to 6.74e+03",
        "From 2**15, the default rule skips the first steps, 12 in all: write",
        "(init_scale=2**3))`, or use `retries=12`.",
    ],
    never=["low:", "shrink", "costs next to nothing"],
)
def large_loss(
    half, x=normal(53, 4, 3), y=100 + normal(54, 4), *, w=normal(52, 3), b=zeros(())
):
    x, y, w = cast((x, y, w), half)

    def loss_of_example(x, y):
        return jnp.square(x @ w - y)

    losses = jax.vmap(loss_of_example)(x, y)
    return jnp.sum(losses.astype(jnp.float32)) * 10 + jnp.square(b)


@healthy("a running maximum that begins at -inf, in attention over blocks of keys")
def online_softmax(x=normal(58, 6, 4), *, qkv=projections(55)):
    q, k, v = project(x, qkv)

    def attend(carry, block):
        largest, sums = carry
        k, v = block
        scores = q @ k.T / 2
        new_largest = jnp.maximum(largest, jnp.max(scores, axis=-1, keepdims=True))
        new_largest = jax.lax.stop_gradient(new_largest)
        weights = jnp.exp(scores - new_largest)
        sums = sums * jnp.exp(largest - new_largest) + weights @ v
        return (new_largest, sums), None

    # The last column adds up the weights.
    v = jnp.pad(v, ((0, 0), (0, 1)), constant_values=1)
    start = jnp.full((6, 1), -jnp.inf, x.dtype), jnp.zeros((6, 5), x.dtype)
    blocks = k.reshape(3, 2, 4), v.reshape(3, 2, 5)
    (_, sums), _ = jax.lax.scan(attend, start, blocks)
    return mean_square(sums[:, :4] / sums[:, 4:])


@healthy("routing by the largest score, with -inf for the experts that are full")
def full_experts(
    x=normal(65, 6, 3), *, gate=normal(63, 3, 4), experts=normal(64, 4, 3)
):
    is_full = jnp.arange(4) == 1
    logits = jnp.where(is_full, -jnp.inf, x @ gate)
    weights, chosen = jax.lax.top_k(jax.nn.softmax(logits), 2)
    y = jnp.einsum("bd,bkd->bk", x, experts[chosen])
    y = jnp.sum(y * weights, axis=-1)
    return mean_square(y - 1)
