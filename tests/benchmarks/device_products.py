"""Laws of half precision: products, models and gradients beside float64 and float32."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
from device_law import check, distance, law, numbers

import jaxscale

HALF = {"float16": jnp.float16, "bfloat16": jnp.bfloat16}
ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
SHORT = {"float16": "f16", "bfloat16": "bf16"}

# --- products ---------------------------------------------------------------------------------

# In units of rounding, of a sum of magnitudes: both operands are rounded, and the result is.
BOUND = 3.0
# Rounding errors of two programs of the same products differ by chance alone.
BY_HAND = 1.25


def convolve(x, w):
    return jax.lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def _matrix(a, b, g):
    return a @ b, g @ b.T, a.T @ g


def _batched(a, b, g):
    y = np.einsum("bthd,bshd->bhts", a, b)
    return (
        y,
        np.einsum("bhts,bshd->bthd", g, b),
        np.einsum("bhts,bthd->bshd", g, a),
    )


def _convolution(x, w, g):
    height, width = x.shape[1:3]
    padded = np.pad(x, [(0, 0), (1, 1), (1, 1), (0, 0)])
    y = np.zeros(g.shape)
    dx = np.zeros(padded.shape)
    dw = np.zeros(w.shape)
    for i in range(3):
        for j in range(3):
            window = np.s_[:, i : i + height, j : j + width]
            y += padded[window] @ w[i, j]
            dx[window] += g @ w[i, j].T
            dw[i, j] = np.einsum("bhwc,bhwd->cd", padded[window], g)
    return y, dx[:, 1:-1, 1:-1], dw


# What is computed, the shapes of its operands and its result, and the same on the host.
PRODUCTS = {
    "matrix": (jnp.matmul, [(96, 256), (256, 128), (96, 128)], _matrix),
    "batched": (
        functools.partial(jnp.einsum, "bthd,bshd->bhts"),
        [(2, 64, 4, 64), (2, 64, 4, 64), (2, 4, 64, 64)],
        _batched,
    ),
    "convolution": (
        convolve,
        [(4, 16, 16, 64), (3, 3, 64, 64), (4, 16, 16, 64)],
        _convolution,
    ),
}
CASES = {f"{p}, {dtype}": (p, dtype) for p in PRODUCTS for dtype in HALF}


def forward_and_backward(fun):
    def run(a, b, g):
        y, vjp = jax.vjp(fun, a, b)
        return y, *vjp(g)

    return jax.jit(run)


def by_hand(fun, dtype):
    def cast(*arrays):
        return fun(*(array.astype(dtype) for array in arrays)).astype(jnp.float32)

    return cast


def largest_error(y, right, size):
    errors = np.abs(np.asarray(y, np.float64) - right)
    return float(np.max(errors / size))


@law("autocast's products are as exact as half precision allows", CASES)
def products_are_as_exact_as_they_can_be(product, dtype):
    fun, shapes, on_host = PRODUCTS[product]
    args = [numbers(seed, *shape) for seed, shape in enumerate(shapes)]
    wide = [np.asarray(arg, np.float64) for arg in args]
    expected = on_host(*wide)
    sums = on_host(*map(np.abs, wide))
    found = forward_and_backward(jaxscale.autocast(fun, HALF[dtype]))(*args)
    cast = forward_and_backward(by_hand(fun, HALF[dtype]))(*args)
    unit = ROUNDING[dtype]
    figures = {}
    names = ["forward", "gradient of the first", "gradient of the second"]
    for name, y, hand, right, size in zip(
        names, found, cast, expected, sums, strict=True
    ):
        check(y.dtype == jnp.float32, f"{name}: comes out as {y.dtype}")
        largest = largest_error(y, right, size) / unit
        own, other = distance(y, right), distance(hand, right)
        figures[name] = {
            "largest_error_in_units": largest,
            "error": own,
            "error_by_hand": other,
        }
        bound = BOUND
        if jax.default_backend() == "cpu":
            # XLA adds up some bfloat16 products in bfloat16 there.
            bound = max(bound, largest_error(hand, right, size) / unit)
        check(largest <= bound, f"{name}: {largest:.2f} units, not {bound}")
        check(own <= BY_HAND * other, f"{name}: {own:.3g}, by hand {other:.3g}")
        check(own > unit / 10, f"{name}: {own:.3g} is more exact than {dtype} can be")
    return figures


DEFINED = re.compile(r"%?([\w.\-]+) = (\(.*?\)|\S+) ([a-z][\w\-]*)\((.*)")
TARGET = re.compile(r'custom_call_target="([^"]*)"')
LIBRARY = re.compile(r"gemm|matmul|conv(?!ert)|dot", re.IGNORECASE)


def product_types(text):
    """Returns the types of the floating operands of each product of a compiled program."""
    lines = [
        DEFINED.match(line.strip().removeprefix("ROOT ")) for line in text.splitlines()
    ]
    lines = [line.groups() for line in lines if line]
    types = {name: type_ for name, type_, _, _ in lines}
    products = []
    for _, _, opcode, rest in lines:
        target = TARGET.search(rest)
        called = opcode == "custom-call" and target and LIBRARY.search(target.group(1))
        if opcode not in ("dot", "convolution") and not called:
            continue
        operands = re.findall(r"%([\w.\-]+)", rest.partition(")")[0])
        found = [types.get(operand, "").partition("[")[0] for operand in operands]
        products.append([type_ for type_ in found if type_ in ("f16", "bf16", "f32")])
    return [types for types in products if types]


@law("autocast's products are half precision in the compiled program", CASES)
def products_are_compiled_in_half_precision(product, dtype):
    fun, shapes, _ = PRODUCTS[product]
    args = [numbers(seed, *shape) for seed, shape in enumerate(shapes)]
    run = forward_and_backward(jaxscale.autocast(fun, HALF[dtype]))
    lowered = run.lower(*args)
    asked = re.findall(
        r"stablehlo\.(?:dot_general|convolution).*"
        r": \(tensor<(?:\d+x)*(\w+)>, tensor<(?:\d+x)*(\w+)>\)",
        lowered.as_text(),
    )
    check(len(asked) == 3, f"{len(asked)} products were lowered, not 3")
    wide = [types for types in asked if set(types) != {SHORT[dtype]}]
    check(not wide, f"products of {wide} were lowered")
    compiled = product_types(lowered.compile().as_text())
    figures = {"compiled": compiled}
    # XLA computes them in float32 on a CPU, where it has no others.
    if jax.default_backend() != "cpu":
        check(compiled, "no product was found in the compiled program")
        wide = [types for types in compiled if set(types) != {SHORT[dtype]}]
        check(not wide, f"products of {wide} were compiled")
    return figures


# --- models -----------------------------------------------------------------------------------

WIDTH, LENGTH, BATCH = 64, 16, 8


def weights(seed, *shape):
    fan_in = np.prod(shape[:-1])
    return numbers(seed, *shape) / np.sqrt(fan_in)


def normalize(x, axes):
    mean = jnp.mean(x, axes, keepdims=True)
    variance = jnp.var(x, axes, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-6)


def distance_to_target(x):
    """Returns a loss that a norm before it does not make constant."""
    target = jnp.sin(jnp.arange(x.shape[-1]))
    return jnp.mean((x - target) ** 2)


# Each is a loss `(params, x, product) -> float32`, where `product(fun, ...)` computes a product.
def mlp(params, x, product):
    for w in params["layers"]:
        x = jax.nn.gelu(product(jnp.matmul, x, w))
    return distance_to_target(x)


def attention(params, x, product):
    query, key, value = (product(jnp.matmul, x, w) for w in params["qkv"])
    scores = product(functools.partial(jnp.einsum, "btd,bsd->bts"), query, key)
    mask = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
    scores = jnp.where(mask, scores / np.sqrt(WIDTH), -1e9)
    shares = jax.nn.softmax(scores)
    mixed = product(functools.partial(jnp.einsum, "bts,bsd->btd"), shares, value)
    x = normalize(x + product(jnp.matmul, mixed, params["out"]), -1)
    return distance_to_target(x)


def convolution(params, x, product):
    image = x.reshape(BATCH, 8, 8, -1)
    for w in params["kernels"]:
        y = product(convolve, image, w)
        groups = y.reshape(*y.shape[:-1], 4, -1)
        image = jax.nn.silu(normalize(groups, (1, 2, 4)).reshape(y.shape))
    return distance_to_target(image)


def scanned(params, x, product):
    @jax.checkpoint
    def layer(x, w):
        return normalize(x + jnp.tanh(product(jnp.matmul, x, w)), -1), None

    x, _ = jax.lax.scan(layer, x, params["stacked"])
    return distance_to_target(x)


def lstm(params, x, product):
    def cell(carry, x):
        hidden, memory = carry
        gates = product(jnp.matmul, x, params["input"])
        gates = gates + product(jnp.matmul, hidden, params["hidden"])
        enter, forget, leave, new = jnp.split(gates, 4, -1)
        memory = jax.nn.sigmoid(forget + 1) * memory
        memory = memory + jax.nn.sigmoid(enter) * jnp.tanh(new)
        hidden = jax.nn.sigmoid(leave) * jnp.tanh(memory)
        return (hidden, memory), hidden

    zeros = jnp.zeros((BATCH, WIDTH))
    _, hidden = jax.lax.scan(cell, (zeros, zeros), x.swapaxes(0, 1))
    return distance_to_target(hidden)


MODELS = {
    "MLP": (mlp, {"layers": [weights(i, WIDTH, WIDTH) for i in range(4)]}),
    "attention": (
        attention,
        {
            "qkv": [weights(i, WIDTH, WIDTH) for i in range(3)],
            "out": weights(3, WIDTH, WIDTH),
        },
    ),
    "convolution with group norm": (
        convolution,
        {"kernels": [weights(0, 3, 3, 16, 64), weights(1, 3, 3, 64, 64)]},
    ),
    "scanned layers": (scanned, {"stacked": weights(0, 6, WIDTH, WIDTH) * np.sqrt(6)}),
    "LSTM": (
        lstm,
        {
            "input": weights(0, WIDTH, 4 * WIDTH),
            "hidden": weights(1, WIDTH, 4 * WIDTH),
        },
    ),
}


def as_written(fun, *args):
    return fun(*args)


def product_in(dtype):
    return lambda fun, *args: by_hand(fun, dtype)(*args)


def loss_of(name, dtype=None):
    """Returns a model's loss, `(params, x)`, with its products cast by hand or as written."""
    model, _ = MODELS[name]
    product = as_written if dtype is None else product_in(dtype)
    return lambda params, x: model(params, x, product)


def model_batch(name):
    if name == "convolution with group norm":
        return numbers(99, BATCH, 64 * 16)
    return numbers(99, BATCH, LENGTH, WIDTH)


def in_float32(name):
    """Returns loss and gradients of a model in float32, without TF32."""
    with jax.default_matmul_precision("highest"):
        return jax.jit(jax.value_and_grad(loss_of(name)))(
            MODELS[name][1], model_batch(name)
        )


# In units of rounding, of the norm of all gradients. Half of it is seen at most on a CPU.
GRADIENTS = 8.0
GRADIENTS_BY_HAND = 1.5


@law(
    "a model under autocast learns what it learns in float32",
    {f"{name}, {dtype}": (name, dtype) for name in MODELS for dtype in HALF},
)
def models_learn_the_same(name, dtype):
    params, x = MODELS[name][1], model_batch(name)
    loss, grads = in_float32(name)
    scale = jaxscale.FixedLossScale(2.0**12).init()
    half_loss = jaxscale.autocast(loss_of(name), HALF[dtype])
    cast = jax.jit(jaxscale.value_and_grad(half_loss, scale))(params, x)
    hand_loss = loss_of(name, HALF[dtype])
    hand = jax.jit(jaxscale.value_and_grad(hand_loss, scale))(params, x)
    unit = ROUNDING[dtype]
    figures = {
        "loss": distance(cast[0], loss) / unit,
        "gradients": distance(cast[1], grads) / unit,
        "gradients_by_hand": distance(hand[1], grads) / unit,
    }
    check(figures["loss"] < 1, f"the loss is off by {figures['loss']:.2f} units")
    found, other = figures["gradients"], figures["gradients_by_hand"]
    check(found < GRADIENTS, f"gradients are off by {found:.2f} units")
    check(found < GRADIENTS_BY_HAND * other, f"{found:.2f} units, by hand {other:.2f}")
    check(found > 0.01, "nothing was computed in half precision")
    return figures


TINY = 2.0**-26


def tiny_loss(loss_fn):
    """Returns a loss so small that float16 flushes its gradients."""
    return lambda params, x: jnp.float32(TINY) * loss_fn(params, x)


BOUNDARIES = {
    "by hand": lambda name, dtype: jaxscale.scale_backward(
        tiny_loss(loss_of(name, dtype))
    ),
    "around autocast": lambda name, dtype: jaxscale.scale_backward(
        jaxscale.autocast(tiny_loss(loss_of(name)), dtype)
    ),
    "inside of autocast": lambda name, dtype: jaxscale.autocast(
        jaxscale.scale_backward(tiny_loss(loss_of(name))), dtype
    ),
}


@law(
    "scale_backward returns gradients that would flush to zero",
    {
        f"{name}, {boundary}": (name, boundary)
        for name in ("MLP", "attention")
        for boundary in list(BOUNDARIES)[:2]
    },
)
def nothing_flushes(name, boundary):
    params, x = MODELS[name][1], model_batch(name)
    _, grads = in_float32(name)
    expected = jax.tree.map(lambda g: TINY * np.asarray(g, np.float64), grads)
    plain = jax.jit(jax.grad(tiny_loss(loss_of(name, jnp.float16))))(params, x)
    scaled = jax.jit(jax.grad(BOUNDARIES[boundary](name, jnp.float16)))(params, x)
    unit = ROUNDING["float16"]
    figures = {
        "error": distance(scaled, expected) / unit,
        "error_without": distance(plain, expected) / unit,
    }
    found = figures["error"]
    check(found < GRADIENTS, f"gradients are off by {found:.2f} units")
    flushed = figures["error_without"]
    check(flushed > 10 * found, f"nothing flushed without: {flushed:.2f} units")
    return figures


@law(
    "a model trains as in float32",
    {
        "float16, loss_scaled": (jnp.float16, "dynamic"),
        "float16, adaptive": (jnp.float16, "adaptive"),
        "bfloat16, skip_nonfinite": (jnp.bfloat16, None),
    },
)
def models_train_as_in_float32(dtype, policy):
    params, x = MODELS["MLP"][1], model_batch("MLP")
    plain = optax.adam(1e-3)
    tx = jaxscale.loss_scaled(plain, policy)
    half_step = jaxscale.train_step(jaxscale.autocast(loss_of("MLP"), dtype), tx)

    def float32_step(params, state, x):
        loss, grads = jax.value_and_grad(loss_of("MLP"))(params, x)
        updates, state = plain.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    def run(step, state):
        def body(carry, _):
            *carry, loss = step(*carry, x)
            return tuple(carry), loss

        start = params, state
        return jax.jit(lambda start: jax.lax.scan(body, start, length=100))(start)

    _, expected = run(float32_step, plain.init(params))
    (_, state), found = run(half_step, tx.init(params))
    first, last = (float(expected[i]) for i in (0, -1))
    end = float(found[-1])
    check(last < 0.5 * first, f"float32 learned nothing: {first:.3g}, {last:.3g}")
    off = abs(end - last) / first
    check(off < 0.01, f"the loss ends at {end:.4g}, not {last:.4g}")
    skipped = int(state.total_notfinite)
    check(skipped <= 2, f"{skipped} steps were skipped")
    return {"float32": last, "half": end, "first": first}


@law("what is left out of autocast stays float32", {name: (name,) for name in HALF})
def full_precision_stays_float32(dtype):
    w, x = weights(0, 64, 64), numbers(1, 32, 64)
    exact = jaxscale.full_precision(jnp.matmul)

    def network(w, x):
        return exact(x, w) + 0 * jnp.sum(x @ w)

    with jax.default_matmul_precision("highest"):
        y = jax.jit(jaxscale.autocast(network, HALF[dtype]))(w, x)
    right = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    found = distance(y, right)
    check(found < 1e-5, f"it is off by {found:.2g}")
