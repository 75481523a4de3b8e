"""Small models for the doctor, healthy and faulty, each a function that it can be pointed at.

Some lines carry a comment that a test looks for. Copies of this file are examined, each imported
anew: a function that was traced before would have lost the lines of its backward rule.
"""

import functools
import os

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

HALF = jnp.float16
FULL = jnp.float32
W = {"w": jnp.array([1.0, 2.0]), "unused": jnp.ones(2), "count": jnp.arange(2)}
X = {"x": jnp.array([1.0, 3.0]), "name": "a batch"}


def model(params=W, batch=X, reduce=jnp.mean):
    """Makes a target of a function of the parameters and the batch: its loss is reduced."""

    def enter(compute):
        def loss_fn(p, b):
            return reduce(compute(p, b).astype(FULL))

        return lambda: (loss_fn, params, batch)

    return enter


def half(scale=1.0, after=1.0, **batch):
    """A loss of x * w in float16, whose product or gradient is too large or too small."""

    def loss_fn(p, b):
        y = (b["x"] * p["w"]).astype(HALF)
        by = b.get("by", HALF(scale))
        y = y * by * by  # the line
        return jnp.mean(y.astype(FULL)) * after

    return loss_fn, W, X | batch


def fine():
    print("the model prints")
    return half()


def number():
    return (lambda params, batch: params * batch), 1.0, 2.0


def overflow():
    return half(60000.0)


def underflow():
    return half(2.0**-20)


# Loss scales.


def tiny():
    """Gradients that float16 flushes without a loss scale, and keeps with one."""
    return half(after=2.0**-28)


def uneven():
    """One of two leaves loses all without a loss scale, and the other nothing."""
    loss_of_tiny, _, batch = tiny()

    def loss_fn(p, b):
        return loss_of_tiny(p, b) + jnp.sum(p["b"])

    return loss_fn, W | {"b": jnp.ones(2)}, batch


def summed():
    """As a loss over many examples: large gradients, and only a low scale fits."""
    return half(after=2.0**9)


def below():
    """So large a loss that no scale of at least 1 fits."""
    return half(after=2.0**20)


def in_units():
    """In which unit the loss is, the environment says."""
    return half(after=2.0 ** int(os.environ["UNIT"]))


def inward(by=2.0**9, after=2.0**-10):
    """Gradients that are small where they enter float16, then larger by `by` squared."""
    return half(after=after, x=X["x"] * 2.0**6 / by**2, by=jnp.full(2, by, HALF))


def far_inward():
    return inward(2.0**14, 2.0**-24)


@model(batch=jnp.array([0.0, 1.0]), reduce=jnp.sum)
def outlying(p, x):
    """Where the input is 0, the cotangent is so large that the other flushes beside it."""
    return (x * p["w"]).astype(HALF).astype(FULL) * jnp.array([2.0**12, 2.0**-16])


@model(batch=jnp.ones((4, 2)), reduce=jnp.sum)
def shrinking(p, x):
    """A loop over micro-batches that divides, whose own cotangent is 1."""

    def add(total, row):
        y = (row * p["w"]).astype(HALF).astype(FULL)
        return total + jnp.sum(y) * 2.0**-20, None

    return jax.lax.scan(add, 0.0, x)[0]


@model(params={"w": jnp.ones(2)}, batch=jnp.full((2**12, 2), 100, HALF), reduce=jnp.sum)
def on_the_way(p, x):
    """The gradient of each number is less than float16 holds, but their sum is not."""
    return (x @ p["w"].astype(HALF)).astype(FULL) * 2.0**-30


@model(batch=jnp.array([[5.0, 0.0]]))
def confident(p, x):
    """The derivative of the logarithm, up to 1e6, limits the loss scale."""
    probability = jax.nn.softmax((x * p["w"]).astype(HALF))
    return -jnp.log(probability + 1e-6)  # the ceiling


@model(reduce=jnp.sum)
def no_scale_fits(p, _):
    """The loss is finite, but its gradient at 0 is not."""
    return jnp.sqrt(p["w"] * 0).astype(HALF) * 1.0


# Models in float32, as autocast gets them.


@model()
def wide(p, b):
    return (b["x"] * p["w"]) ** 2


@model(batch=jnp.array([[1.0, 3.0]] * 2))
def dense(p, x):
    return (x @ p["w"]) ** 2 * 2.0**-30


@model(batch=jnp.array([[4e4, 4e4]] * 2))
def scores(p, x):
    product = x @ p["w"]  # more than float16 holds
    return jnp.log(product)


@model(params={"w": jnp.ones(2)}, batch=jnp.array([[4096, 2.5]] * 2))
def rounded(p, x):
    product = x @ p["w"]  # float16 holds every fourth number near it
    return (product - 4096) ** 2


# Gradients that are long sums in half precision.


@model(params={"table": jnp.ones((4, 8), jnp.bfloat16)}, batch=jnp.arange(300) % 4)
def embedded(p, tokens):
    rows = p["table"][tokens]  # each token adds to the gradient
    return rows.astype(FULL)


@model(params={"w": jnp.ones(8, jnp.bfloat16)}, batch=jnp.ones((300, 8)))
def in_a_loop(p, x):
    def step(carry, x):
        return carry + x * p["w"], None  # each turn adds to the gradient

    carry, _ = jax.lax.scan(step, jnp.zeros(8), x)
    return carry


@model(params={"w": jnp.ones(8, jnp.bfloat16)}, batch=jnp.ones((200, 8)))
def in_a_short_loop(p, x):
    return in_a_loop()[0](p, x)


# Zeros, inf and NaN that do no harm.


@model(
    params={"logits": jnp.zeros(1000).at[0].set(18.0), "values": jnp.ones(1000)},
    batch=None,
    reduce=jnp.sum,
)
def sure(p, _):
    """A softmax that flushes nearly all of its numbers to zero, as it should."""
    weights = jax.nn.softmax(p["logits"].astype(HALF))  # the softmax
    return p["values"].astype(HALF) * weights


@model(
    params={"w": jnp.array([1.0, 2.0, 0.7]), "b": jnp.float32(0.3)},
    batch=jnp.array([[0.3, -1.1, 0.9], [1.7, 0.4, -0.6]]),
    reduce=jnp.sum,
)
def cancels(p, x):
    """What is added to all logits has no gradient but rounding, in float32 as well."""
    return jax.nn.softmax((x * p["w"] + p["b"]).astype(HALF)) * x.astype(HALF)


def noise(is_finite=True):
    """What is added to all logits has no other gradient, so that nothing can be compared."""
    x = jnp.array([[0.3, -1.1, 0.9], [1.7, 0.4, -0.6]])

    def loss_fn(p, x):
        y = (x + p["b"]).astype(HALF)
        loss = jnp.sum(jax.nn.softmax(y) * x)
        if is_finite:
            return loss
        too_large = y * HALF(60000) * HALF(9)  # overflows
        return loss + 1e-30 * jnp.sum(too_large.astype(FULL))

    return loss_fn, {"b": jnp.float32(0.3)}, x


def noise_after_overflow():
    return noise(is_finite=False)


@model(params={"w": jnp.ones(3)}, batch=jnp.array([0.0, 0.0, -jnp.inf], HALF))
def masked(p, mask):
    """An additive mask in the batch, with infinities on purpose."""
    return jax.nn.softmax(p["w"].astype(HALF) + mask)[:1]


@model()
def harmless(p, b):
    return (b["x"] * p["w"]).astype(HALF) + 1e-9


# Zeros, inf and NaN that do harm.


def bad_batch():
    return half(x=jnp.array([1.0, jnp.nan]))


@model()
def disconnected(p, b):
    return jnp.sum(b["x"]) + 0 * p["w"][0]


@model(batch=jnp.array([[1.0, 2.0], [0.0, 0.0]]))
def epsilon(p, x):
    y = x.astype(HALF) * p["w"].astype(HALF)
    return y / jnp.sqrt(jnp.mean(y * y, axis=1, keepdims=True) + 1e-9)  # divides


@model(batch=jnp.full((128, 2), 300.0, HALF), reduce=jnp.sum)
def summand(p, x):
    """Not the sum is too large but one of its numbers, on the same line: so is the mean."""
    return jnp.sum(jnp.square(x * p["w"].astype(HALF)), axis=0)  # both


def bounded(bound):
    """The logarithm of 1 minus a probability that is bounded by a number that becomes 1."""
    scores = jnp.array([[9.0, -3.0, 0.0], [0.0, 1.0, -9.0], [1.0, 1.0, 12.0]])

    @model(params={"w": jnp.ones(3)}, batch=scores)
    def target(p, x):
        probability = jax.nn.softmax((x * p["w"]).astype(HALF))
        probability = bound(probability)
        return -jnp.log(1 - probability) * jnp.array([0.3, 1.0, 0.2])

    return target()


def minimum():
    return bounded(lambda p: jnp.minimum(p, 1 - 1e-4))  # the minimum


def clip():
    return bounded(lambda p: jnp.clip(p, 1e-4, 1 - 1e-4))  # the clip


NAN = jnp.array(jnp.nan)


@model(reduce=lambda y: jnp.mean(y) * NAN)
def given(p, b):
    return (b["x"] * p["w"]).astype(HALF) / 70000


# Wrong gradients.


@model()
def repeated(p, b):
    """Five equal operations are at fault, all on one line."""
    equal, _, _ = half(2.0**-22)
    return sum(equal(p, b) for _ in range(5))


def spread(first=0.0):
    """Five lines are at fault, and before them one as bad as `first` of them."""

    def loss_fn(p, b):
        y = b["x"] * p["w"]
        tiny = HALF(2.0**-22)
        terms = [first * (y.astype(HALF) * tiny * tiny).astype(FULL)]  # the worst
        terms += [(y.astype(HALF) * tiny * tiny).astype(FULL)]
        terms += [(y.astype(HALF) * tiny * tiny).astype(FULL)]
        terms += [(y.astype(HALF) * tiny * tiny).astype(FULL)]
        terms += [(y.astype(HALF) * tiny * tiny).astype(FULL)]
        terms += [(y.astype(HALF) * tiny * tiny).astype(FULL)]
        return jnp.mean(sum(terms))

    return loss_fn, W, X


def mostly_one():
    return spread(10.0)


@model()
def offset(p, b):
    """The gradients are right, and the loss is not: 4097.2 is 4096."""
    y = (b["x"] * p["w"] * 0 + 4097.2).astype(HALF)
    return b["x"] * p["w"] + jax.lax.stop_gradient(y).astype(FULL) - 4090


def ratio(b):
    """XLA divides by multiplying with the inverse, which is inf."""
    divisor = jnp.ones(2, HALF) * HALF(2.0**-18)
    return b["x"].astype(HALF) * HALF(2.0**-17) / divisor  # the division


@model()
def rewritten(p, b):
    return p["w"] * ratio(b).astype(FULL)


@model()
def inverted(p, b):
    """What was inf is finite again, but 0."""
    return p["w"] * (1 / (1 + ratio(b))).astype(FULL)


@model(params={"b": jnp.float32(1)}, batch=jnp.ones(2**17, HALF))
def equal_numbers(p, x):
    """The gradient is a sum of equal numbers: XLA multiplies one by 2**17, which is inf."""
    return x + p["b"].astype(HALF)  # the sum of its gradient


@model(batch={"x": jnp.array([2048, 1, -2048, -1], HALF)})
def cancelled(p, b):
    """float32 adds these numbers to 0, and float16 does not."""
    total = jax.lax.reduce_sum(b["x"] * 1, axes=(0,))  # the sum
    return (total * 1).astype(FULL) * jnp.sum(p["w"]) + jnp.sum(p["w"])


# The branch of a `where` that is not taken, and integers that are made of floats.


@model(params={"t": jnp.arange(3000.0)}, batch=jnp.array([2501.0, 2049.0, 7.0]))
def index_of_floats(p, x):
    index = x.astype(HALF).astype(int)  # the index
    return jnp.square(p["t"][index])


# What looks as if another function were better, and is not.

ROWS = jnp.array([[6.0, 12.0, 18.0], [3.0, -6.0, 12.0]])


@model(params={"w": jnp.array([1.0, 0.5, 2.0])}, batch=ROWS)
def shifted(p, x):
    """The gradient of a sure softmax, from whose rows the maximum is subtracted already."""
    z = (x * p["w"]).astype(HALF)
    e = jnp.exp(z - jnp.max(z, 1, keepdims=True))  # the exponential
    return e / jnp.sum(e, 1, keepdims=True) * x.astype(HALF)


@model(params={"w": jnp.ones(3)}, batch=ROWS)
def coupled(p, x):
    """The logarithm of a sum, of which only a part is an exponential."""
    z = (x * p["w"]).astype(HALF)
    moved = z * jnp.exp(z) + jnp.tanh(z)  # the scale
    return jnp.log1p(jnp.max(jnp.abs(moved.astype(FULL))))


# Auxiliary outputs.


def pair(bad=0.0):
    loss_fn, params, batch = half()

    def loss_and_ratio(p, b):
        return loss_fn(p, b), {"name": "x", "ratio": 1 / (1 - bad * b["x"])}

    return loss_and_ratio, params, batch


def bad_pair():
    return pair(1.0)


def best():
    loss_fn, params, batch = half()

    def loss_and_best(p, b):
        return loss_fn(p, b), {"best": jnp.array(jnp.inf)}

    return loss_and_best, params, batch


# Odd parameters, and operations that hold others.


@model(params=(jnp.ones(2), (jnp.ones(3), FULL(1))), batch=jnp.ones(2, HALF))
def in_a_pair(p, x):
    """Parameters whose containers look like anything else."""
    return (x * p[0].astype(HALF)).astype(FULL) + p[1][1]


@model()
def noisy(p, x):
    """Noise in half precision, whose tails are missing."""
    key = jax.random.key(0)
    noise = jax.random.normal(key, (2,), jnp.bfloat16)  # the noise
    return p["w"] * x["x"] + noise.astype(FULL) + jax.random.normal(key, (2,))


def module():
    """A module of NNX, two of whose variables are not trained."""
    layer = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
    layer.average = nnx.Variable(jnp.ones(2))
    batch = jnp.array([[1.0, 2.0], [3.0, 5.0]])

    def loss_fn(layer, x):
        return jnp.mean(jnp.sqrt(layer(x, use_running_average=False)))  # the root

    return loss_fn, layer, batch


def odd():
    """Leaves that are functions, or have a dtype but are not arrays."""
    loss_fn, _, _ = half()
    leaves = {
        "type": HALF,
        "numpy": np.float32,
        "aval": jax.ShapeDtypeStruct((2,), HALF),
        "module": nn.Dense(2, dtype=HALF),
        "act": jnp.tanh,
    }

    def activated(p, b):
        return p["act"](loss_fn(p, b).astype(b["layers"]["aval"].dtype))

    return activated, W | leaves, X | {"layers": leaves}


def mapped():
    mesh = jax.sharding.Mesh(jax.devices()[:1], ("d",))
    spec = jax.sharding.PartitionSpec()

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=spec)
    def double(w):
        return w.astype(HALF) * 2

    @model()
    def target(p, b):
        return double(p["w"]).astype(FULL) * b["x"]

    return target()
