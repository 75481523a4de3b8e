"""Models with the fault of a public report, which each names. Its line is marked."""

# ruff: noqa: B008 (what a model is given are its defaults)

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import gammaln
from zoo_entries import (
    array,
    cast,
    eye,
    faulty,
    mean,
    mean_square,
    normal,
    ones,
    project,
    projections,
    with_rule,
    zeros,
)

ANGLE = normal(0, 3) / np.linalg.norm(normal(0, 3))
ROTATIONS = np.stack([ANGLE * 1.001, np.roll(ANGLE, 1), -ANGLE[::-1]])
ATOMS = array([[0, 0, 0], [1e-4, 0, -1e-4], [0.5, 0.4, 0.1], [1, -0.5, 0.3]])
POINTS = array([[0.5, 1.0], [2e-3, 2e-3], [-1.0, 0.4]])
SAMPLES = array([[1.0, 0.5], [-1.0, 0.2], [3.0, 3.5]])
PIXELS = (512, 512)
COUNTS = array([[1.0, 0.0], [3.0, 1.0]])
# Mostly one token, each hundredth another, and each ninetieth a third.
OFTEN = np.zeros(6000, int)
OFTEN[::100] = 1
OFTEN[::90] = 2
LARGE_KEYS = [0.02 * eye(4), 40 * eye(4), normal(2, 4, 4, scale=0.01)]
WIDE = [normal(seed, 4, 16, scale=0.3) for seed in range(3)]
AS_THEY_ARE = [eye(4), eye(4), normal(2, 4, 4)]
POSITIONS = np.array([1, 1030, 2051, 2555, 3001, 3997])
STEPS = np.array([0, 3, 1, 2])
PRODUCT = array([0.99, 0.6, 0.1, 2.9e-8])

# Attention: masks, scores and normalizers.


@faulty("overflow", "google/flax/issues/982", cure="mask")
def minus_1e9(x=normal(3, 5, 4), *, qkv=projections(0)):
    """A causal mask of 0 and 1 times -1e9, which is -inf: 0 times that is NaN."""
    q, k, v = project(x, qkv)
    mask = jnp.tril(jnp.ones((5, 5), x.dtype))
    bias = (1 - mask) * -1e9  # fault
    weights = jax.nn.softmax(q @ k.T / 2 + bias)
    return mean_square(weights @ v)


@faulty("input", "pytorch/pytorch/issues/41508", cure="masked row")
def packed_padding(
    x=normal(3, 5, 4), segment=np.array([1, 1, 2, 2, 0]), *, qkv=projections(0)
):
    """Packed sequences: the padding belongs to none, so that its row of the mask is empty."""
    q, k, v = project(x, qkv)
    is_token = segment > 0
    is_seen = (segment[:, None] == segment) & is_token
    scores = jnp.where(is_seen, q @ k.T / 2, -jnp.inf)  # fault
    y = jax.nn.softmax(scores) @ v  # fault
    return mean_square(y * is_token[:, None])


@faulty("overflow", "huggingface/diffusers/pull/1590")
def scores_before_scaling(x=normal(5, 6, 4, scale=250.0), *, qkv=WIDE):
    """The product of queries and keys overflows before it is divided by the root of the width."""
    q, k, v = project(x, qkv)
    scores = q @ k.T  # fault
    weights = jax.nn.softmax(scores * 16**-0.5)
    return mean_square(weights @ v)


@faulty("overflow", "uTensor/uTensor/issues/175", cure="exponential of a row")
def softmax_without_its_maximum(x=normal(6, 5, 4, scale=2.0), *, qkv=projections(0)):
    q, k, v = project(x, qkv)
    weights = jnp.exp(q @ k.T)  # fault
    weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return mean_square(weights @ v)


@faulty("overflow", "idiap/fast-transformers/issues/32")
def linear_attention(x=5 + normal(7, 400, 4, scale=0.5), *, qkv=LARGE_KEYS):
    """The keys are added up over a long sequence, and the outputs are divided by inf: all are 0."""
    q, k, v = project(x, qkv)
    q = jax.nn.relu(q)
    k = jax.nn.relu(k)
    normalizer = jnp.sum(k, axis=0)  # fault
    y = q @ (k.T @ v)
    return mean_square(y / (q @ normalizer)[:, None])


@faulty(
    "underflow",
    "facebookresearch/xformers/issues/96",
    cure="exponential of a row",
    says=["`exp`, in the forward pass, gives other numbers than in float32."],
)
def random_features(
    x=3.2 + normal(9, 6, 4, scale=0.1),
    directions=normal(8, 4, 8, scale=0.3),
    *,
    qkv=AS_THEY_ARE,
):
    """FAVOR: exp(w x - |x|**2 / 2) is 0 for all features, and so is their sum."""

    def features(x):
        size = jnp.sum(jnp.square(x), axis=-1, keepdims=True) / 2
        return jnp.exp(x @ directions - size)  # fault

    q, k, v = project(x, qkv)
    q = features(q)
    k = features(k)
    normalizer = q @ jnp.sum(k, axis=0)
    y = q @ (k.T @ v) / normalizer[:, None]  # fault
    return mean_square(y)


# The backward pass: infinite derivatives, and rules that were written by hand.


@faulty(
    "backward",
    "pytorch/pytorch/issues/8069",
    says=[
        "rounds 100% of its numbers to 1 or -1",
        "the gradients then differ from those of float32 by",
    ],
    never=["become 0", "to the last bit"],
)
def angle_between_rotations(target=ROTATIONS, *, r=normal(0, 3)):
    """The arccos of a cosine clipped at 1 - 1e-7, which is 1."""
    norm = jnp.linalg.norm(r.astype(jnp.float32))
    r = r / norm.astype(r.dtype)
    cosine = jnp.clip(target @ r, -1 + 1e-7, 1 - 1e-7)  # fault
    angle = jnp.arccos(cosine)  # fault
    return mean(angle)


@faulty("backward", "kornia/kornia/pull/4613")
def branch_not_taken(
    x=normal(1, 2, 3), *, axis=array([[1e-4, 2e-4, 0.0], [0.3, -0.2, 0.5]])
):
    """A small rotation takes the other branch of a `where`, but the derivative takes both."""
    square = jnp.sum(axis * axis, axis=-1, keepdims=True)
    angle = jnp.sqrt(jnp.maximum(square, 1e-12))  # fault
    ratio = jnp.sin(angle) / angle  # fault
    ratio_of_small_angles = 1 - square / 6
    turned = jnp.where(square > 1e-6, ratio, ratio_of_small_angles) * axis
    y = jnp.cross(turned, x) + x
    return mean_square(y - 1)


@faulty("underflow", "pytorch/pytorch/issues/37154")
def distances(position=ATOMS, *, w=eye(3), v=array([0.5, -0.2])):
    """Two atoms so close that the square of their distance is 0."""
    difference = jnp.diff(position @ w, axis=0)
    d = jnp.sqrt(jnp.sum(jnp.square(difference), axis=1))  # fault
    y = jnp.stack([d, d * d], axis=-1) @ v
    return mean_square(y - 1)


@faulty("cancellation", "lucidrains/vector-quantize-pytorch/issues/106")
def codebook_distances(
    x=12 + normal(3, 5, 4, scale=0.05), *, codes=12 + normal(2, 6, 4, scale=0.05)
):
    """x**2 - 2 x y + y**2 of vectors close together is less than 0."""
    square = jnp.sum(x * x, axis=1)[:, None] - 2 * x @ codes.T  # fault
    square = square + jnp.sum(codes * codes, axis=1)  # fault
    d = jnp.sqrt(square)  # fault
    return mean(jax.nn.softmax(-d) * d)


@faulty(
    "backward",
    "pytorch/pytorch/issues/193040",
    says=[
        "`div`, in the backward pass, gives inf or NaN in 33.3% of its numbers",
        "a backward rule of its own",
    ],
)
def reciprocal_in_a_rule(x=POINTS, *, w=array([[1.0, 0.3], [-0.2, 1.0]])):
    """A rule for atan2 that forms 1 / (a**2 + b**2) before it multiplies by a or b."""

    def backward(args, g):
        a, b = args
        r = 1 / (a * a + b * b)
        return g * b * r, -g * a * r

    angle = with_rule(jnp.arctan2, backward)
    a, b = (x @ w).T
    return mean_square(angle(a, b))  # fault


@faulty(
    "backward",
    "tinygrad/tinygrad/pull/15363",
    says=[
        "2 of 2 gradients are wrong",
        ": b is flushed to 0.",
        "are those of float32 to the last bit",
    ],
)
def count_in_a_rule(x=ones(70000), *, w=array(1.5), b=zeros(70000)):
    """A rule for the maximum that shares the gradient among 70000 equal elements."""

    def backward(args, g):
        (x,) = args
        mask = (x == jnp.max(x)).astype(x.dtype)
        return (g * mask / jnp.sum(mask),)

    largest = with_rule(lambda x: jnp.max(x), backward)
    y = largest(x * w + b).astype(jnp.float32)  # fault
    return jnp.square(y - 3)


@faulty("epsilon", "google-deepmind/optax/issues/1754")
def adam_inside_of_a_loss(
    x=normal(6, 4, 3, zero=np.s_[:, 2]),
    y=normal(7, 4),
    *,
    w=array([0.5, -1, 0.3]),
    rate=array(0.1),
):
    """Meta-learning: a step of Adam in half precision, for a weight without a gradient."""

    def inner(w):
        return jnp.mean(jnp.square(x @ w - y))

    g = jax.lax.stop_gradient(jax.grad(inner)(w))
    moment = 0.1 * g
    square = 0.001 * g * g
    root = jnp.sqrt(square / 0.001)
    update = (moment / 0.1) / (root + 1e-8)  # fault
    return inner(w - rate * update).astype(jnp.float32)


@faulty("backward", "pytorch/pytorch/pull/33596")
def epsilon_squared(x=normal(10, 4, 3, zero=2), *, w=normal(8, 3, 4), v=normal(9, 4)):
    """1e-3 protects a division, but not its derivative, which divides by the square of 1e-3."""
    z = x @ w
    largest = jnp.max(jnp.abs(z), axis=-1, keepdims=True)
    z = z / (largest + 1e-3)  # fault
    return mean_square(z @ v - 1)


# Losses: logarithms, exponentials and constants that float16 cannot hold.


@faulty(
    "epsilon",
    "rwightman/efficientdet-pytorch/issues/291",
    says=[
        "1e-08 is 0 in float16.",
        "Compute this line in float32: that was tried",
        "In bfloat16, with its sums, the gradients are right",
    ],
)
def log_of_epsilon(x=normal(1, 6, 3), *, w=normal(0, 3, 2), b=zeros(2)):
    """The logarithm of a width of 0 plus 1e-8, which is 0."""
    width = jax.nn.relu(x @ w + b)
    y = jnp.log(width + 1e-8)  # fault
    return mean_square(y * 0.01)


@faulty("epsilon", "keras-team/keras-core/issues/196")
def clipped_probability(
    x=array([[2, 1], [-6, 12]]),
    y=array([1, 0]),
    *,
    w=array([[0.5], [1]]),
):
    """Clipping at 1 - 1e-7 does nothing: that is 1, and log(1 - 1) is -inf."""
    logits = (x @ w)[:, 0]
    p = jax.nn.sigmoid(logits)
    p = jnp.clip(p, 1e-7, 1 - 1e-7)  # fault
    losses = y * jnp.log(p) + (1 - y) * jnp.log(1 - p)  # fault
    return -mean(losses)


@faulty(
    "epsilon",
    "fastino-ai/GLiNER2/pull/155",
    says=["0.999999 is 1 in float16"],
    never=["In bfloat16"],
)
def surviving_pairs(x=SAMPLES, *, w=array([1.0, 2.0]), b=zeros(())):
    """A bound of 1 - 1e-6 is 1, and log1p(-1) is -inf: the forward pass hides it, and no more."""
    probability = jax.nn.sigmoid(x @ w + b)
    probability = jnp.minimum(probability, 1.0 - 1e-6)  # fault
    log_survival = jnp.log1p(-probability)  # fault
    pair = 1 - jnp.exp(log_survival)
    return mean_square(pair - 0.5)


@faulty(
    "backward",
    "kornia/kornia/issues/918",
    cure="sigmoid",
    says=["even without a loss scale"],
)
def focal_loss(x=SAMPLES, *, w=array([1.0, 2.0]), b=zeros(())):
    """The derivative of a root of 1 - p, where p is 1."""
    probability = jax.nn.sigmoid(x @ w + b)
    weight = jnp.power(1 - probability, 0.5)  # fault
    losses = weight * jnp.log(probability)
    return -mean(losses)


@faulty("backward", "OpenRLHF/OpenRLHF/pull/1335")
def clipped_divergence(
    x=normal(3, 4, 3), reference=array([-0.5, -0.3, -1.0, 12.0]), *, w=normal(2, 3)
):
    """The k3 estimate of the KL divergence is clipped after the exponential: inf in the forward
    pass becomes 10, and in the backward pass 0 times inf."""
    log_ratio = reference - jax.nn.log_sigmoid(x @ w)
    kl = jnp.exp(log_ratio) - 1 - log_ratio  # fault
    kl = jnp.clip(kl, -10, 10)
    return mean(kl)


@faulty("overflow", "qubvel-org/segmentation_models.pytorch/issues/463")
def dice(
    image=1 + normal(4, *PIXELS, scale=0.1),
    mask=ones(PIXELS),
    *,
    w=array(3.0),
    b=array(0.5),
):
    """The sum over a mask of 512 by 512 pixels."""
    output = jax.nn.sigmoid(w * image + b)
    intersection = jnp.sum(output * mask)  # fault
    total = jnp.sum(output + mask)  # fault
    overlap = 2 * intersection / total  # fault
    return 1.0 - overlap.astype(jnp.float32)


@faulty("overflow", "pytorch/pytorch/issues/91597", says=["70000 is inf in float16."])
def number_of_elements(x=normal(5, 70000), *, w=array(0.01)):
    """A sum divided by 70000, which is inf in float16: the loss is 0, and so are its gradients."""
    total = jnp.sum(jnp.abs(w * x))
    return (total / x.size).astype(jnp.float32)  # fault


@faulty("overflow", "huggingface/trl/issues/7221")
def entropy_bonus(
    x=array([[0.1, 0.2], [1500.0, -1000.0]]), *, w=normal(100, 2, 3, scale=0.7)
):
    """The logarithm of a probability is -inf, and the probability 0."""
    log_p = jax.nn.log_softmax(x @ w * 40)  # fault
    entropy = -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)  # fault
    return -mean(entropy)


@faulty("underflow", "kscalelabs/minppo/pull/19")
def gaussian_entropy(
    x=normal(15, 4, 3), *, log_std=array([-9.2, -1.0]), w=normal(14, 3, 2)
):
    """The entropy of a Gaussian policy whose deviation is 1e-4: its square is 0."""
    deviation = jnp.exp(log_std)
    variance = jnp.square(deviation + 1e-8)  # fault
    entropy = 0.5 * jnp.log(2 * jnp.pi * variance)  # fault
    return mean_square(x @ w) - mean(entropy)


@faulty("overflow", "scverse/scvi-tools/issues/2965")
def negative_binomial(
    y=COUNTS, *, log_mu=array([1.0, 0.5]), log_theta=array([9.4, 2.0])
):
    """The logarithm of the gamma function of a large inverse dispersion."""
    mu = jnp.exp(log_mu)
    theta = jnp.exp(log_theta)
    choose = gammaln(y + theta) - gammaln(theta)  # fault
    losses = y * jnp.log(mu + theta) - y * log_mu - choose
    return mean(losses) * 1e-2


@faulty("overflow", "NVIDIA/physicsnemo-sym/pull/160")
def second_derivative(
    points=array([0.005, 0.0052, 0.0044]), *, w=array([330, 40]), a=array([1, 0.5])
):
    """The residual of a differential equation: the second derivative is beyond 65504."""

    def u(x):
        return jnp.sum(a * jnp.sin(w * x))  # fault

    u_xx = jax.vmap(jax.grad(jax.grad(u)))(points)
    residual = u_xx.astype(jnp.float32) * 1e-5 + 1
    return mean_square(residual)


# Normalization: variances, norms and their epsilons.


@faulty("overflow", "pytorch/pytorch/issues/66707")
def layer_norm(
    x=normal(1, 3, 4, scale=400.0),
    y=normal(2, 3, 8),
    *,
    w=normal(0, 4, 8),
    g=ones(8),
    b=zeros(8),
):
    """Squares beyond 65504: the variance is inf, its inverse root 0, and no gradient is left."""
    x = x @ w
    x = x - jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(x), axis=-1, keepdims=True)  # fault
    x = x * jax.lax.rsqrt(variance + 1e-5)
    return mean_square(x * g + b - y)


@faulty("epsilon", "deepspeedai/DeepSpeed/issues/581")
def constant_row(x=normal(1, 3, 4, zero=2), *, w=normal(0, 4, 8), scale=ones(8)):
    """1e-12 is 0, and a row of padding has no variance."""
    x = x @ w
    x = x - jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
    y = x * jax.lax.rsqrt(variance + 1e-12) * scale  # fault
    return mean_square(y - 1)


@faulty("cancellation", "google/flax/issues/1491")
def negative_variance(
    x=25.3 + normal(2, 16, 3, scale=0.03), *, scale=ones(3), bias=zeros(3)
):
    """The mean of the squares minus the square of the mean is less than 0."""
    x = x + bias
    mean = jnp.mean(x, axis=0)
    variance = jnp.mean(jnp.square(x), axis=0) - jnp.square(mean)  # fault
    y = (x - mean) * jax.lax.rsqrt(variance + 1e-5) * scale  # fault
    return mean_square(y - 1)


@faulty("overflow", "numpy/numpy/issues/8775")
def norm_is_inf(x=normal(8, 4, 6), *, w=normal(7, 6, scale=300.0), g=ones(())):
    """The norm of a long vector is inf, and the normalized vector 0."""
    norm = jnp.sqrt(jnp.sum(w * w))  # fault
    y = x @ (g * w / norm)
    return mean_square(y - 1)


# Silent faults in positions, times and counts: float16 has no odd numbers beyond 2048.


@faulty("rounding", "EleutherAI/gpt-neox/issues/1003")
def rotary(
    x=normal(2, 6, 4),
    y=normal(3, 6, 6),
    position=POSITIONS,
    *,
    q=normal(0, 4, 8),
    k=normal(1, 4, 8),
):
    """Rotary angles in half precision, for positions beyond 2048."""
    frequency = (100.0 ** (-jnp.arange(4) / 4)).astype(x.dtype)
    angle = position.astype(x.dtype)[:, None] * frequency  # fault
    sin = jnp.sin(angle)
    cos = jnp.cos(angle)

    def rotate(x):
        a = x[:, :4]
        b = x[:, 4:]
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    scores = rotate(x @ q) @ rotate(x @ k).T
    return mean(scores * y)


@faulty("rounding", "numpy/numpy/issues/24443")
def positions_from_a_mask(
    half, x=normal(10, 3000, 2), mask=ones(3000), *, table=normal(9, 3000, 2)
):
    """Positions as the cumulative sum of a mask: beyond 2048 neighbours share one."""
    mask = mask.astype(half)
    position = jnp.cumsum(mask).astype(jnp.int32) - 1  # fault
    y = table.astype(half)[position] + x.astype(half)
    return mean_square(y * mask[:, None] - 1)


@faulty("accumulation", "jax-ml/jax/issues/18440")
def degrees(
    x=normal(12, 4, 2), to=np.where(np.arange(6000) % 50, 0, 1), *, w=normal(11, 2, 3)
):
    """The degree of a node counted in half precision stops at 2048."""
    degree = jax.ops.segment_sum(jnp.ones(6000, x.dtype), to, 2)  # fault
    message = (x @ w)[to + 2]
    message = message / degree[to, None]
    y = jax.ops.segment_sum(message.astype(jnp.float32), to, 2)
    return mean_square(y - 1)


@faulty("accumulation", "apache/mxnet/issues/17703", linen=True)
def frequent_token(half, tokens=OFTEN):
    """The gradients of a token that occurs 6000 times are added up in half precision."""
    x = nn.Embed(4, 2, dtype=half)(tokens)  # fault
    return jnp.mean(jnp.sin(x.astype(jnp.float32)) * 8)


@faulty("rounding", "konpatp/diffae/issues/16")
def moving_average(xs=normal(17, 8, 3), *, w=normal(15, 3, 2), v=normal(16, 2)):
    """A decay of 0.9999 is 1, and the moving average never moves."""

    def step(average, x):
        decay = jnp.asarray(0.9999, x.dtype)  # fault
        y = jnp.tanh(x @ w)
        return decay * average + (1 - decay) * y, None  # fault

    start = jnp.ones(2, xs.dtype)
    average, _ = jax.lax.scan(step, start, xs)
    return mean_square(average @ v - 1)


# Scans, branches, remat and experts, and gradients that are flushed.


@faulty("flushed", "huggingface/transformers/pull/43543")
def auxiliary_head(
    x=normal(3, 4, 3),
    target=150 + normal(4, 4, scale=20.0),
    *,
    trunk=normal(0, 3, 4),
    value=normal(1, 4),
    aux=normal(2, 4, scale=3e-3),
):
    """One head has large gradients, so that no scale fits that would rescue the other's."""
    h = jnp.tanh(x @ trunk)
    value = jnp.square(h @ value * 100 - target)
    aux = jnp.square(h @ aux) * 1e-6  # fault
    return jnp.sum((value + aux).astype(jnp.float32))


@faulty("overflow", "huggingface/transformers/pull/36832")
def residual_stream(
    tokens=np.array([0, 3, 1, 4]),
    *,
    embed=normal(5, 5, 4),
    layers=normal(6, 6, 4, 4, scale=0.3),
):
    """The residual stream of Gemma grows from layer to layer, here in a scan over the layers."""

    def layer(x, w):
        return x + x @ w * 2, None  # fault

    x, _ = jax.lax.scan(layer, embed[tokens] * 3000, layers)
    x = x.astype(jnp.float32)
    variance = jnp.mean(x * x, axis=-1, keepdims=True)
    y = x * jax.lax.rsqrt(variance + 1)
    return mean_square(y - 1)


@faulty("overflow", "huggingface/transformers/issues/5651")
def dense_relu_dense(
    x=3 * normal(7, 3, 4),
    *,
    wi=normal(100, 4, 8, scale=250.0),
    wo=normal(101, 8, 4, scale=180.0),
):
    """The second layer of T5's feed-forward block overflows, under remat."""

    @jax.checkpoint
    def block(x):
        h = jax.nn.relu(x @ wi)
        return h @ wo  # fault

    y = block(x).astype(jnp.float32)
    largest = jnp.max(jnp.abs(y), axis=-1, keepdims=True)
    return mean_square(y / (1 + largest) - 1)


@faulty("overflow", "tenstorrent/tt-metal/issues/56550")
def decay_in_two_factors(
    x=normal(11, 16, 3), *, gate=normal(9, 3, scale=0.3), w=normal(10, 3, 2)
):
    """Gated attention in chunks: exp(a - b) as exp(a) * exp(-b), one inf and the other 0."""
    log_decay = jnp.cumsum(-jax.nn.softplus(x @ gate + 1))
    decay = jnp.exp(log_decay)
    inverse = jnp.exp(-log_decay)  # fault
    weights = jnp.tril(decay[:, None] * inverse)  # fault
    y = weights @ (x @ w)
    return mean_square(y - 1)


@faulty(
    "overflow",
    "VincentStimper/normalizing-flows/issues/47",
    cure="logarithm of a sum",
)
def affine_coupling(
    x=normal(14, 4, 4),
    *,
    first=array([[0.4, -0.2, 0.3, 8.0], [0.1, 0.5, -0.4, 5.0]]),
    last=1e-6 * normal(13, 2, 4),
):
    """The exponential of an unbounded scale, twice in a row."""
    total = 0
    z = x
    for layer in (first, last):
        shift, log_scale = jnp.split(z[:, :2] @ layer, 2, axis=1)
        moved = z[:, 2:] * jnp.exp(log_scale) + shift  # fault
        z = jnp.concatenate([moved, z[:, :2]], axis=1)
        total = total + jnp.sum(log_scale)
    largest = jnp.max(jnp.abs(z.astype(jnp.float32)), axis=1)
    return jnp.mean(jnp.log1p(largest)) - total.astype(jnp.float32)


@faulty("input", "jax-ml/jax/issues/9839", linen=True, cure="index")
def token_out_of_range(half, tokens=np.array([[0, 1, 5], [2, 6, 3]])):
    """A token beyond the vocabulary: its embedding is NaN."""
    x = nn.Embed(6, 4, dtype=half)(tokens)  # fault
    logits = nn.Dense(6, dtype=half)(x)
    log_p = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.mean(log_p[..., 0])


@faulty("overflow", "nerfstudio-project/nerfstudio/pull/104")
def density(
    cell=np.array([0, 2, 3]),
    is_fine=np.array(True),
    *,
    features=normal(15, 4, 3, scale=9e3),
    w=normal(16, 3, 4),
    v=normal(17, 4),
):
    """A density network whose hidden numbers overflow before the softplus, in one branch."""

    def fine(x):
        return jax.nn.relu(x @ w * 4)  # fault

    def coarse(x):
        return jax.nn.relu(x @ w * 1e-4)

    h = jax.lax.cond(is_fine, fine, coarse, features[cell])
    h = (h * 1e-5).astype(v.dtype)
    sigma = jax.nn.softplus(h @ v)
    return mean_square(jnp.exp(-sigma) - 0.5)


@faulty("epsilon", "AUTOMATIC1111/stable-diffusion-webui/issues/14071")
def noise_schedule(
    half,
    x=normal(19, 4, 2),
    noise=normal(20, 4, 2),
    step=STEPS,
    *,
    w=normal(18, 2, 2),
    b=zeros(2),
):
    """The last cumulative product of a schedule of zero terminal SNR, 4.9e-8 or less, is 0."""
    x, noise, w, b = cast((x, noise, w, b), half)
    schedule = jnp.asarray(PRODUCT).astype(half)  # fault
    alpha = schedule[step][:, None]
    sigma = jnp.sqrt((1 - alpha) / alpha)  # fault
    x = x + 1e-3 * sigma * noise
    y = (x @ w + b) / jnp.sqrt(1 + sigma * 1e-3)
    return mean_square(y - noise)


@faulty("flushed", "tenstorrent/tt-metal/issues/55724")
def saturated_gate(
    x=normal(23, 5, 3), *, gate=normal(21, 3, 4, scale=0.1), w=normal(22, 3, 4)
):
    """The sigmoid of 9 is 1, and its derivative s (1 - s) 0, whatever the loss scale."""
    gate = jax.nn.sigmoid(x @ gate + 9)  # fault
    y = gate * jnp.tanh(x @ w)
    return mean_square(y - 1)
