"""Small models, each for something that the doctor says, and some as it advises to write them.

A sentence that the doctor says of a model in another file as well stands there.
"""

# ruff: noqa: B008 (what a model is given are its defaults)

import functools
import os

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from zoo_entries import (
    array,
    cure_of,
    faulty,
    healthy,
    mean,
    ones,
    with_rule,
)

HALF = jnp.float16
FULL = jnp.float32
W = array([1, 2])
X = array([1, 3])
TRIED = "in float32: that was tried"


def scaled(by=1.0, after=1.0, x=X):
    """A loss of x * w in float16, whose product or gradient may be too large or too small."""

    def loss(half, x=x, *, w=W, unused=ones(2)):
        y = (x * w).astype(half)
        factor = jnp.asarray(by, half)
        y = y * factor * factor  # fault
        return mean(y) * after

    return loss


def compute(p, b):
    """A loss in float16 of any containers."""
    return mean((b["x"] * p["w"]).astype(HALF))


@healthy("a model that prints", says=["the largest that does not overflow"])
def fine(_):
    print("the model prints")
    return compute, {"w": W, "unused": ones(2), "count": np.arange(2)}, {"x": X}


@healthy("Python numbers")
def number(_):
    return (lambda params, batch: params * batch), 1.0, 2.0


overflow = faulty(
    "overflow",
    says=["y = y * factor * factor", "The loss is inf", "cannot hold these numbers"],
    never=["needs no", "lower"],
)(scaled(60000.0))
bad_batch = faulty(
    "input",
    says=["inf or NaN in batch[0], before anything is computed", "The loss is NaN"],
    never=["nan"],
    has_line=False,
)(scaled(x=array([1, np.nan])))

# Loss scales.

below = faulty(
    "overflow",
    says=[
        "! The largest loss scale that does not overflow on this batch is 2**-4: the default "
        "rule, which never goes below 1, will skip every step.",
        "Make the loss smaller, by a factor of 2**4 or more, or write",
        "jaxscale.DynamicLossScale(init_scale=2**-4, min_scale=2**-14)",
    ],
    has_line=False,
)(scaled(after=2.0**20))


@healthy("a loss in the unit that the environment says")
def in_units(_):
    loss = scaled(after=2.0 ** int(os.environ["UNIT"]))
    return lambda p, x: loss(HALF, x, w=p), W, X


@healthy("one of two leaves loses all without a loss scale, and the other nothing")
def uneven(half, x=X, *, w=W, b=ones(2)):
    return mean((x * w).astype(half)) * 2.0**-28 + jnp.sum(b)


def growing(by, after):
    """Gradients that are small where they enter float16, then larger by `by` squared."""

    def loss(half, x=X * 2.0**6 / by**2, factor=array([by, by]), *, w=W):
        y = (x * w).astype(half)
        factor = factor.astype(half)
        y = y * factor * factor  # line
        return mean(y) * after

    return loss


inward = healthy(
    "gradients that grow on their way",
    says=[
        "repeats the backward pass of this batch once.",
        "jaxscale.scale_backward(loss_fn, scale=2**6)",
        "# line",
    ],
    never=["not enough"],
)(growing(2.0**6, 2.0**-4))
far_inward = healthy(
    "gradients that grow more",
    says=["twice, which is not enough.", "scale_backward(loss_fn, scale=2**10)"],
)(growing(2.0**14, 2.0**-24))


@healthy(
    "a cotangent so large that the other flushes beside it",
    says=[
        "so much larger than the others that these flush beside them: `scale_backward` makes "
        "three backward passes of this batch.",
        "a division by almost 0",
    ],
    never=["repeats the backward pass", "NaN"],
)
def outlying(half, x=array([0, 1]), *, w=W):
    y = (x * w).astype(half).astype(FULL)
    return jnp.sum(y * jnp.array([2.0**12, 2.0**-16]))


@healthy(
    "a loop over micro-batches that divides, whose own cotangent is 1",
    says=[
        "Gradients shrink on their way through the loss, and `scale_backward` repeats the "
        "backward pass of this batch once.",
        "wrap the loss inside the loop",
    ],
    never=["Gradients grow"],
)
def shrinking(half, x=ones((4, 2)), *, w=W):
    def add(total, row):
        return total + mean((row * w).astype(half)) * 2.0**-19, None

    return jax.lax.scan(add, 0.0, x)[0]


@healthy(
    "each number is less than float16 holds, but their sum is not",
    says=["it needs one", "without one 100% of the nonzero gradients become 0"],
)
def on_the_way(x=100 * ones((2**12, 2)), *, w=ones(2)):
    return jnp.sum((x @ w).astype(FULL)) * 2.0**-30


@healthy(
    "the derivative of the logarithm, up to 1e6, limits the loss scale",
    says=[
        "Nothing is wrong.",
        "What limits it is {line}",
        "overflows there. With that line",
        "fits, as was tried.",
        "That is low: gradients shrink",
    ],
    never=["costs next to nothing"],
)
def confident(half, x=array([[5, 0]]), *, w=W):
    probability = jax.nn.softmax((x * w).astype(half))
    return -mean(jnp.log(probability + 1e-6))  # line


# Models in float32, as autocast gets them.


@healthy(
    "float32",
    says=[
        "computes in float32. It was examined on one batch without a loss scale.",
        "float32, and needs no loss scale",
        "`--autocast float16`",
    ],
)
def wide(half, x=X, *, w=W):
    return mean((x * w) ** 2)


@healthy("a product in float32")
def dense(half, x=array([[1, 3]] * 2), *, w=W):
    return mean((x @ w) ** 2 * 2.0**-30)


@healthy("scores in float32 that float16 cannot hold")
def scores(half, x=array([[4e4, 4e4]] * 2), *, w=W):
    product = x @ w  # line
    return mean(jnp.log(product))


@healthy("numbers of which float16 holds every fourth")
def rounded(half, x=array([[4096, 2.5]] * 2), *, w=ones(2)):
    product = x @ w  # line
    return mean((product - 4096) ** 2)


# Gradients that are long sums in half precision, and noise in half precision.


@healthy(
    "tokens whose gradients are added up",
    says=[
        "The gradient of table is a sum of up to 300 numbers in bfloat16, at {line}."
    ],
)
def embedded(half, tokens=np.arange(300) % 4, *, table=jnp.ones((4, 8), jnp.bfloat16)):
    return mean(table[tokens])  # line


@healthy("weights and activations in bfloat16")
def kept(half, x=jnp.ones((3, 8), jnp.bfloat16), *, w=jnp.ones((8, 4), jnp.bfloat16)):
    return mean(x @ w)


def loop(length):
    def loss(half, x=ones((length, 8)), *, w=jnp.ones(8, jnp.bfloat16)):
        def step(carry, x):
            return carry + x * w, None  # fault

        carry, _ = jax.lax.scan(step, jnp.zeros(8), x)
        return jnp.mean(carry)

    return loss


in_a_loop = faulty(
    "accumulation",
    says=["The gradient of w is a sum of up to 300 numbers in bfloat16, at {line}."],
)(loop(300))
in_a_short_loop = healthy("few turns", never=["is a sum of"])(loop(200))


@healthy(
    "noise in half precision, whose tails are missing",
    says=["Random numbers are drawn in bfloat16, at {line}.", "only 128 values"],
    never=["drawn in float32"],
)
def noisy(half, x=X, *, w=W):
    key = jax.random.key(0)
    noise = jax.random.normal(key, (2,), jnp.bfloat16)  # line
    return mean(w * x + noise.astype(FULL) + jax.random.normal(key, (2,)))


# Zeros, inf and NaN that do no harm.


LOGITS = array([[0.3, -1.1, 0.9], [1.7, 0.4, -0.6]])


@healthy(
    "what is added to all logits has no gradient but rounding",
    says=[
        "Nothing overflows, and nothing could be compared with float32.",
        "No gradient could be compared with float32.",
    ],
    never=["Nothing is wrong"],
)
def noise(half, x=LOGITS, *, b=array(0.3)):
    return jnp.sum(jax.nn.softmax((x + b).astype(half)) * x)


@healthy(
    "a constant that is 0",
    says=["1e-09 is 0 in float16, at {line}", "It does no harm on this batch."],
)
def harmless(x=X, *, w=W):
    return mean(x * w + 1e-9)  # line


@healthy(
    "the gradients are right, and the loss is not: 4097.2 is 4096",
    says=[
        "Nothing is wrong with the gradients, but the loss is far from that in float32.",
        "The loss is off by 11.2%: ",
    ],
    never=["Nothing is wrong."],
)
def offset(half, x=X, *, w=W):
    y = jax.lax.stop_gradient((x * w * 0 + 4097.2).astype(half))
    return mean(x * w + y.astype(FULL) - 4090)


# Zeros, inf and NaN that do harm.


@faulty("input", says=["exactly 0 everywhere in 1 of 1 leaves"])
def disconnected(x=X, *, w=W):
    return mean(x) + 0 * w[0].astype(FULL)


@faulty("overflow", says=[TRIED], never=["Take a mean"])
def summand(x=300 * ones((128, 2)), *, w=W):
    """Not the sum is too large but one of its numbers, on the same line: so is the mean."""
    return jnp.sum(jnp.sum(jnp.square(x * w), axis=0).astype(FULL))  # fault


@faulty(
    "input",
    says=[
        "The loss is NaN",
        "it was there before, in a constant or an input",
        "Find out where this number comes from.",
        "70000 is inf in float16",
        "Whether it does harm is not known",
    ],
)
def given(x=X, *, w=W):
    return mean(x * w / 70000) * jnp.array(jnp.nan)


# Wrong gradients.


@faulty(
    "underflow",
    says=["Compute this line, small.py:", f" {TRIED}"],
    never=["No single"],
)
def mostly_one(half, x=X, *, w=W):
    """Five lines are at fault, and before them one as bad as ten of them."""
    y = (x * w).astype(half)
    tiny = HALF(2.0**-22)
    total = 10 * mean(y * tiny * tiny)  # fault
    total += mean(y * tiny * tiny)
    total += mean(y * tiny * tiny)
    total += mean(y * tiny * tiny)
    total += mean(y * tiny * tiny)
    return total + mean(y * tiny * tiny)


def divided(finish):
    """XLA divides by multiplying with the inverse, which is inf."""

    def loss(half, x=X, *, w=W):
        divisor = jnp.ones(2, half) * HALF(2.0**-18)
        ratio = x.astype(half) * HALF(2.0**-17) / divisor  # fault
        return mean(w * finish(ratio).astype(FULL))

    return loss


rewritten = faulty(
    "compiled",
    says=["Compiled as one program, the model gives gradients with inf or NaN.", TRIED],
)(divided(jnp.positive))
# What was inf is finite again, but 0.
inverted = faulty(
    "compiled",
    says=["w is flushed to 0.", "and only in the compiled program.", TRIED],
    never=["No single"],
)(divided(lambda ratio: 1 / (1 + ratio)))


ROWS = array([[1, 2, 3], [0.5, -1, 2]])
THREE = array([1, 0.5, 2])


@faulty("rounding", says=[TRIED], never=["Subtract the maximum"])
def shifted(x=6 * ROWS, *, w=THREE):
    """The gradient of a sure softmax, from whose rows the maximum is subtracted already."""
    z = x * w
    e = jnp.exp(z - jnp.max(z, 1, keepdims=True))  # fault
    return mean(e / jnp.sum(e, 1, keepdims=True) * x)


@faulty("overflow", says=[TRIED], never=["logsumexp", "the logarithm of `exp(x)`"])
def coupled(x=ROWS, *, w=ones(3)):
    """The logarithm of a sum, of which only a part is an exponential."""
    z = 6 * x * w
    moved = z * jnp.exp(z) + jnp.tanh(z)  # fault
    return jnp.log1p(jnp.max(jnp.abs(moved.astype(FULL))))


# Auxiliary outputs, odd parameters, and operations that hold others.


@healthy("a pair")
def pair(x=X, *, w=W):
    return mean(x * w), {"name": "x", "ratio": 1 / x}


@faulty(
    "input",
    cure="operand of any size",
    says=["The loss and the gradients are finite, but aux['ratio'] is not"],
)
def bad_pair(x=X, *, w=W):
    return mean(x * w), {"name": "x", "ratio": 1 / (1 - x)}  # fault


@faulty("input", says=["aux['best'] is not, and no line explains why."])
def best(x=X, *, w=W):
    return mean(x * w), {"best": jnp.array(jnp.inf)}


@healthy(
    "parameters whose containers look like anything else",
    says=["exactly 0 everywhere in 1 of 3 leaves, as in float32: 1/0"],
)
def in_a_pair(_):
    def loss_fn(p, x):
        return mean(x * p[0].astype(HALF)) + p[1][1]

    return loss_fn, (ones(2), (ones(3), FULL(1))), ones(2)


@faulty("input", cure="negative operand", says=["inf or NaN is in 2 of 2 gradients"])
def module(_):
    """A module of NNX, two of whose variables are not trained."""
    layer = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
    layer.average = nnx.Variable(jnp.ones(2))
    batch = jnp.array([[1.0, 2.0], [3.0, 5.0]])

    def loss_fn(layer, x):
        return jnp.mean(jnp.sqrt(layer(x, use_running_average=False)))  # fault

    return loss_fn, layer, batch


@healthy(
    "leaves that are functions, or have a dtype but are not arrays",
    says=["1 of 2 leaves, as in float32: unused"],
)
def odd(_):
    leaves = {
        "type": HALF,
        "numpy": np.float32,
        "aval": jax.ShapeDtypeStruct((2,), HALF),
        "module": nn.Dense(2, dtype=HALF),
        "act": jnp.tanh,
    }

    def activated(p, b):
        return p["act"](compute(p, b).astype(b["layers"]["aval"].dtype))

    return activated, {"w": W, "unused": W} | leaves, {"x": X, "layers": leaves}


@healthy("a mesh", never=["did not look inside"])
def mapped(half, x=X, *, w=W):
    mesh = jax.sharding.Mesh(jax.devices()[:1], ("d",))
    spec = jax.sharding.PartitionSpec()

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=spec)
    def double(w):
        return w.astype(half) * 2

    return mean(double(w).astype(FULL) * x)


# Logarithms of probabilities and exponentials, and how to compute them.


@faulty("underflow", cure="softmax")
def log_of_softmax(x=5 * ROWS, *, w=THREE):
    return mean(jnp.log(jax.nn.softmax(x * w)))  # fault


@cure_of(log_of_softmax)
def log_softmax(x, *, w):
    return mean(jax.nn.log_softmax(x * w))


@faulty("underflow", cure="softmax")
def log_of_softmax_by_rows(x=5 * ROWS, *, w=THREE):
    rows = []
    for z in x * w:
        e = jnp.exp(z - jnp.max(z))  # fault
        rows.append(e / jnp.sum(e))  # fault
    return mean(jnp.log(jnp.tile(jnp.stack(rows), 2)))


@faulty("underflow", cure="softmax", never=["1e-3"])
def log_of_probability_that_is_cast(half, x=5 * ROWS, *, w=THREE):
    return mean(jnp.log(jax.nn.softmax(x * w).astype(half)))  # fault


@faulty("underflow", cure="sigmoid")
def log_of_sigmoid(x=-5 * abs(ROWS), *, w=THREE):
    return mean(jnp.log(jax.nn.sigmoid(x * w)))  # fault


@cure_of(log_of_sigmoid)
def log_sigmoid(x, *, w):
    return mean(jax.nn.log_sigmoid(x * w))


MANY_ROWS = array(np.linspace(-1, 1, 150).reshape(50, 3))


@faulty("underflow", cure="product")
def product_of_probabilities(x=MANY_ROWS, *, w=THREE):
    return mean(jnp.log(jnp.prod(jax.nn.sigmoid(x * w), 0)))  # fault


@cure_of(product_of_probabilities)
def sum_of_logarithms(x, *, w):
    return mean(jnp.sum(jnp.log(jax.nn.sigmoid(x * w)), 0))


@faulty("underflow", cure="product")
def product_in_a_loop(x=MANY_ROWS, *, w=THREE):
    def step(product, q):
        return product * q, None  # fault

    p = jax.nn.sigmoid(x * w)
    product, _ = jax.lax.scan(step, jnp.ones(3, p.dtype), p)
    return mean(jnp.log(product))


@faulty("underflow", says=[TRIED])
def root_of_a_product(x=MANY_ROWS, *, w=THREE):
    product = jnp.prod(jax.nn.sigmoid(x * w), 0)  # fault
    return mean(product.astype(FULL) ** (1 / 50))


@faulty("underflow", cure="exponential")
def log_of_density(x=ROWS, *, w=THREE):
    z = x * w
    return mean(jnp.log(jnp.exp(-z * z / 2) / 2.5))  # fault


@cure_of(log_of_density)
def exponent_of_density(x, *, w):
    z = x * w
    return mean(-z * z / 2 - 0.92)


@faulty("underflow", cure="logarithm of a sum")
def log_of_sum_of_exponentials(x=-10 * abs(ROWS), *, w=THREE):
    return mean(jnp.log(jnp.sum(jnp.exp(x * w - 20), 1)))  # fault


@cure_of(log_of_sum_of_exponentials)
def log_sum_exp(x, *, w):
    return mean(jax.nn.logsumexp(x * w - 20, 1))


# Sums, and what is not finite in float32 either.


@faulty("overflow", says=["The loss is a sum over 12,000 numbers. Take a mean"])
def sum_over_many_numbers(x=9 * ones((4000, 3)), *, w=THREE):
    return jnp.sum((x * w) ** 2).astype(FULL)  # fault


@cure_of(sum_over_many_numbers)
def mean_over_many_numbers(x, *, w):
    return jnp.mean((x * w) ** 2).astype(FULL)


@faulty("input", says=["The loss is a sum over 90,000 numbers, at small.py:"])
def sum_whose_gradients_are_too_large(x=60 * ones((30000, 3)), *, w=THREE):
    return jnp.sum(jnp.square((x * w).astype(FULL)))  # fault


@faulty("input", cure="exponential of a large number")
def exponential(x=array([[90, 2, 3], [1, 2, -1]]), *, w=THREE):
    return jnp.mean(jnp.exp((x * w).astype(FULL)))  # fault


@faulty("input", cure="operand from 0 to 1")
def arc(x=ones((2, 3)), *, w=THREE):
    return mean(jnp.arccos(jnp.clip(x * w, -1, 1)))  # fault


def not_below_0(z):
    return jnp.maximum(z, 0)


def untaken(fun, before, is_guarded=False):
    """A function of positive numbers, and 0 elsewhere, maybe with an inner `where`."""

    def loss(x=MANY_ROWS, *, w=THREE):
        z = before(x * w)
        is_taken = z > 0.1
        operand = jnp.where(is_taken, z, 1) if is_guarded else z
        y = 2 * fun(operand)  # fault
        return mean(jnp.where(is_taken, y, 0))

    return loss


branch = faulty("input", cure="inner where")
root_that_is_not_taken = branch(untaken(jnp.sqrt, jnp.positive))
root_of_0_that_is_not_taken = branch(untaken(jnp.sqrt, not_below_0))
quotient_that_is_not_taken = branch(untaken(jnp.reciprocal, not_below_0))
guarded_root = healthy("an inner where")(untaken(jnp.sqrt, not_below_0, True))
POSITIONS = np.arange(5000)[::7, None]


@faulty("rounding", says=[TRIED])
def positions_in_a_jitted_table(half, x=POSITIONS, *, w=THREE):
    @jax.jit
    def table():
        t = jnp.arange(5000, dtype=half)  # fault
        return jnp.outer(t, jnp.array([1, 0.3, 0.1], half))  # fault

    return mean(jnp.sin(table()[x[:, 0]]) * w)


# Backward rules of one's own.


@faulty("backward", says=["`mul`, in the backward pass, flushes"])
def rule_that_flushes(x=ROWS, *, w=THREE):
    def backward(_, g):
        down = HALF(2.0**-14)
        up = HALF(2.0**14)
        return (g * down * down * down * up * up * up,)

    return mean(with_rule(jnp.positive, backward)(x * w))  # fault


@faulty("backward", says=["`mul`, in the backward pass, gives inf or NaN"])
def rule_in_a_scan(x=ROWS, *, w=THREE):
    rule = with_rule(jnp.positive, lambda _, g: (g * HALF(60000) * HALF(60000),))
    last, _ = jax.lax.scan(lambda z, _: (rule(z), None), x * w, None, 3)  # fault
    return mean(last)


@faulty("overflow", says=[TRIED])
def rule_whose_forward_pass_overflows(x=ROWS, *, w=THREE):
    def forward(z):
        square = (z * 300) * (z * 300)  # fault
        return z, (z, square)

    def backward(saved, g):
        z, square = saved
        return (g * jnp.abs(z * 300) / jnp.sqrt(square),)

    function = jax.custom_vjp(lambda z: z)
    function.defvjp(forward, backward)
    return mean(function(x * w))
