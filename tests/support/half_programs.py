"""Programs written in float32, for the laws of `autocast`: each a function and its arguments.

The first argument is a tree of float32 parameters, and each function returns a scalar loss and a
tree of other outputs.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxpr_equations import equations as equations
from tables import unchanged

import jaxscale
from jaxscale._autocast import table
from jaxscale._jax import jaxprs


def normal(shape, seed):
    """Draws normal numbers in float32."""
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.standard_normal(shape).astype(np.float32))


X = normal((4, 8), seed=0)
W = normal((5, 8, 8), seed=1) * np.float32(0.3)
PARAMS = {"w": W, "b": jnp.linspace(-0.1, 0.1, 8)}


def biased(x, w, b):
    return x @ w + b[None]


def mlp(p, x):
    for i in range(3):
        x = jax.nn.gelu(biased(x, p["w"][i], p["b"]))
    return jnp.mean(x**2), {"x": x}


def attention(p, x):
    def normalized(x):
        mean = jnp.mean(x, -1, keepdims=True)
        squares = (x - mean) ** 2
        var = jnp.mean(squares, -1, keepdims=True)
        centered = x - mean
        x = centered * jax.lax.rsqrt(var + 1e-6)
        gain = 1 + p["b"]
        return x * gain[None]

    w = p["w"]
    queries = normalized(x) @ w[0]
    keys = normalized(x) @ w[1]
    values = normalized(x) @ w[2]
    ones = jnp.ones((4, 4), bool)
    mask = jnp.tril(ones)
    similarities = queries @ keys.T
    logits = similarities / jnp.sqrt(8.0)
    masked = jnp.where(mask, logits, -1e9)
    weights = jax.nn.softmax(masked)
    attended = weights @ values
    x = x + attended @ w[3]
    hidden = normalized(x) @ w[4]
    x = x + jax.nn.gelu(hidden)
    return jnp.mean(x**2), x


def on_channels(x):
    """An array of channels, to combine with images."""
    return x[None, None, None]


def convolutions(p, x):
    w = p["w"]
    rows = w[0, :3, :].repeat(3, 0)
    kernel = jnp.reshape(rows, (3, 3, 1, 8))
    kernel = kernel[:, :, :1].repeat(3, 2)
    dims = ("NHWC", "HWIO", "NHWC")
    x = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=dims)
    x = x + on_channels(p["b"])
    mean = jnp.mean(x, (0, 1, 2))
    var = jnp.var(x, (0, 1, 2))
    centered = x - on_channels(mean)
    deviation = jnp.sqrt(var + 1e-5)
    normalized = centered / on_channels(deviation)
    x = jax.nn.relu(normalized)
    window = (1, 2, 2, 1)
    x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, window, window, "VALID")
    corners = x[:, 0, 0]
    outputs = corners @ w[1]
    return jnp.mean(outputs), {"mean": mean, "var": var}


def lstm(p, h, xs):
    w = p["w"]

    def cell(carry, x):
        h, c = carry
        gates = []
        for i in range(4):
            of_input = biased(x, w[i], p["b"])
            of_state = h @ w[i].T
            gates.append(of_input + of_state)
        *sigmoid_gates, candidate = gates
        i, f, o = map(jax.nn.sigmoid, sigmoid_gates)
        kept = f * c
        added = i * jnp.tanh(candidate)
        c = kept + added
        next_h = o * jnp.tanh(c)
        return (next_h, c), h

    start = (h, jnp.zeros_like(h))
    (h, c), hs = jax.lax.scan(cell, start, xs)
    return jnp.mean(h**2), {"c": c, "hs": hs}


def remat_in_scan(p, x):
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable

    @functools.partial(jax.checkpoint, policy=policy, prevent_cse=False)
    def layer(x, w):
        return jax.nn.relu(biased(x, w, p["b"])), None

    x, _ = jax.lax.scan(layer, x, p["w"])
    return jnp.mean(x**2), x


def loops(p, x):
    x = jax.lax.fori_loop(0, 3, lambda i, x: jnp.tanh(x @ p["w"][i]), x)
    return jnp.mean(x), x


def branches(p, x):
    w = p["w"]

    def keep(x):
        return x

    def multiply(x):
        return x @ w[1]

    x = jax.lax.cond(jnp.sum(x) > 0, lambda x: x @ w[0], keep, x)
    x = jax.lax.switch(1, [keep, multiply, jnp.negative], x @ w[2])
    return jnp.mean(x**2), x


def custom_jvp(p, x):
    @jax.custom_jvp
    def f(x, w):
        return jnp.sin(x @ w)

    @f.defjvp
    def jvp(primals, tangents):
        x, w = primals
        dx, dw = tangents
        return f(x, w), jnp.cos(x @ w) * (dx @ w + x @ dw)

    x = f(x @ p["w"][0], p["w"][1])
    return jnp.mean(x), x


def custom_vjp(p, x):
    @jax.custom_vjp
    def f(x, w, n):
        return x @ w

    def forward(x, w, n):
        return x @ w, (x, w, n)

    def backward(residuals, g):
        x, w, _ = residuals
        # not the derivative, to see that it is this
        return g @ w.T, 2 * (x.T @ g), None

    f.defvjp(forward, backward)
    x = f(x @ p["w"][0], p["w"][1], 3)
    return jnp.mean(x), x


def second_derivatives(p, x):  # a physics-informed network
    def u(x):
        hidden = jnp.sin(x @ p["w"][0])
        return jnp.sum(jnp.tanh(hidden @ p["w"][1]))

    def laplacian(x):
        return jnp.trace(jax.hessian(u)(x))

    laplace = jax.vmap(laplacian)(x)
    return jnp.mean((laplace - 1.0) ** 2), laplace


def dropout_and_keys(p, x, key):
    x = biased(x, p["w"][0], p["b"])
    is_kept = jax.random.bernoulli(key, 0.5, x.shape)
    x = jnp.where(is_kept, x / 0.5, 0.0)
    x = x + jax.random.normal(key, x.shape)
    return jnp.mean(x @ p["w"][1]), jax.random.split(key)


def embedding(p, tokens):
    vectors = p["w"][0][tokens]
    logits = vectors @ p["w"][1]
    chances = jax.nn.log_softmax(logits)
    taken = jnp.take_along_axis(chances, tokens[:, None], -1)
    return -jnp.mean(taken), {"argmax": jnp.argmax(logits, -1), "none": None}


def moves(p, x):
    w = p["w"]
    x = x @ w[0]
    padded = jnp.pad(x, ((0, 1), (0, 0)))
    flipped = jnp.flip(x, 0)
    x = jnp.concatenate([padded, flipped])
    zeros = jnp.zeros((12, 8))
    x = jax.lax.dynamic_update_slice(zeros, x, (1, 0))
    rows = jnp.array([0, 2])
    updated = x.at[rows].set(x[:2])
    same_row = jnp.array([1, 1])
    x = updated.at[same_row].add(x[:2])
    ascending = jnp.sort(x)
    top, _ = jax.lax.top_k(ascending, 2)
    largest = top[:, :1]
    raised = jnp.maximum(x, -2.0)
    clipped = jnp.clip(raised, -1.0, jnp.max(x))
    x = clipped + jnp.cumsum(x, 0)
    x = x + jnp.abs(largest)
    outputs = x @ w[1]
    return jnp.mean(outputs), jnp.max(x, 0)


def orders(p, x):
    w = p["w"]
    x = x @ w[0]
    window = ((2, 1), (1, 1), "SAME")
    ascending = jnp.sort(x, 0)
    largest, _ = jax.lax.top_k(x, 8)
    highest = jax.lax.cummax(x)
    x = jnp.concatenate([ascending, largest, highest])
    of_pairs = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, *window)
    x = of_pairs + jax.lax.cummin(x)
    x = jax.lax.reduce_window(x, jnp.inf, jax.lax.min, *window)
    corner = x[0, 0]
    padded = jax.lax.pad(x, corner, ((1, 0, 0), (0, 0, 0)))
    rows = jnp.array([0, 3])
    x = padded.at[rows].set(x[:2])
    outputs = x @ w[1]
    return jnp.mean(outputs), jnp.max(x, 0)


def linear_algebra(p, x):
    a = p["w"][0] @ p["w"][0].T + jnp.eye(8)
    factor = jax.scipy.linalg.cho_factor(a)
    solved = jax.scipy.linalg.cho_solve(factor, x.T @ x)
    outputs = solved @ p["w"][1]
    spectrum = jnp.abs(jnp.fft.fft(a))
    return jnp.mean(outputs), spectrum, jnp.linalg.norm(a)


def effects(p, x):
    x = x @ p["w"][0]
    jax.debug.callback(lambda x: None, x)
    shape = jax.ShapeDtypeStruct(x.shape, jnp.float32)
    on_host = jaxscale.full_precision(jax.pure_callback)  # or there is a warning
    y = on_host(lambda x: np.asarray(x), shape, jax.lax.stop_gradient(x))
    return jnp.mean((x + y) @ p["w"][1]), y


def over_devices(p, x):
    def f(x, w):
        x = jax.nn.relu(x @ w[0]) @ w[1]
        return jax.lax.pmean(jnp.mean(x), "data"), x

    mapped = jax.shard_map(
        f,
        mesh=Mesh(np.array(jax.devices("cpu")[:4]), ("data",)),
        in_specs=(P("data"), P()),
        out_specs=(P(), P("data")),
    )
    return mapped(x, p["w"])


def numbers_and_text(p, x):
    others = [3, "text", None, np.ones(2), jnp.arange(3), jnp.tanh]
    return jnp.mean(x @ p["w"][0]), others


# parts that are written in half precision by hand, and stay as they are
def own_precision(p, x):
    w = p["w"][0].astype(jnp.bfloat16)
    product = x.astype(jnp.bfloat16) @ w
    rounded = product.astype(jnp.float32)
    outputs = rounded @ p["w"][1]
    return jnp.mean(outputs), rounded.astype(jnp.float16)


OF_X = [
    mlp,
    attention,
    remat_in_scan,
    loops,
    branches,
    custom_jvp,
    custom_vjp,
    second_derivatives,
    moves,
    orders,
    linear_algebra,
    effects,
    over_devices,
    numbers_and_text,
    own_precision,
]
PROGRAMS = {fun.__name__: (fun, (PARAMS, X)) for fun in OF_X} | {
    "convolutions": (convolutions, (PARAMS, jnp.ones((2, 8, 8, 3)))),
    "lstm": (lstm, (PARAMS, X, jnp.ones((6, 4, 8)))),
    "dropout_and_keys": (dropout_and_keys, (PARAMS, X, jax.random.key(0))),
    "embedding": (embedding, (PARAMS, jnp.array([1, 3, 0]))),
}


def scaled_autocast(fun, dtype=jnp.float16):
    return jaxscale.scale_backward(jaxscale.autocast(fun, dtype))


def autocast_scaled(fun, dtype=jnp.float16):
    return jaxscale.autocast(jaxscale.scale_backward(fun), dtype)


WRAPPERS = {
    "autocast": jaxscale.autocast,
    "scale_backward": jaxscale.scale_backward,
    "scale_backward of autocast": scaled_autocast,
    "autocast of scale_backward": autocast_scaled,
}


def of_row(fun, w):
    """A function of rows, of one of them."""
    return lambda row: fun(row[None], w)[0]


# What may hold a function of rows and a weight in a program.
HOLDERS = {
    "as it is": unchanged,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "vmap": lambda fun: lambda x, w: jax.vmap(of_row(fun, w))(x),
    "map": lambda fun: lambda x, w: jax.lax.map(of_row(fun, w), x),
    "cond": lambda fun: (
        lambda x, w: jax.lax.cond(x[0, 0] > -9, fun, lambda x, w: 0 * fun(x, w), x, w)
    ),
}


def with_vjp(multiply):
    """A product with a backward rule, as kernels come in libraries."""
    product = jax.custom_vjp(lambda x, w: multiply(x, w))

    def backward(operands, cotangent):
        x, w = operands
        return multiply(cotangent, w.T), multiply(x.T, cotangent)

    product.defvjp(lambda x, w: (multiply(x, w), (x, w)), backward)
    return product


def with_jvp(multiply):
    """A product with a rule for its derivative."""
    product = jax.custom_jvp(lambda x, w: multiply(x, w))

    @product.defjvp
    def derive(operands, tangents):
        x, w = operands
        dx, dw = tangents
        return product(x, w), multiply(dx, w) + multiply(x, dw)

    return product


def primitives(fun, *args):
    """The primitives of a function, by their old names, each with its floating-point dtypes."""
    names_and_dtypes = []
    for eqn in equations(jax.make_jaxpr(fun)(*args)):
        dtypes = set()
        for atom in (*eqn.invars, *eqn.outvars):
            dtype = getattr(atom.aval, "dtype", np.bool_)
            if jnp.issubdtype(dtype, jnp.inexact):
                dtypes.add(str(dtype))
        names_and_dtypes.append((jaxprs.operation(eqn), dtypes))
    return names_and_dtypes


def products(fun, *args):
    """The dtype that each matrix product and convolution of a function multiplies in.

    "<one> <other>" if its operands differ.
    """
    found = []
    for eqn in product_equations(fun, *args):
        dtypes = [atom.aval.dtype for atom in eqn.invars[:2]]
        if "have_source" in eqn.params:  # ours, which casts what it reads
            dtypes = [eqn.params["dtype"]]
        names = {str(dtype) for dtype in dtypes if jnp.issubdtype(dtype, jnp.inexact)}
        found.append(" ".join(sorted(names)))
    return found


# What may be in half precision: products, moves, and casts. What is computed again holds programs.
NARROW = table.PRODUCTS | table.MOVES | {"convert_element_type", "jaxscale_stand_in"}
NARROW |= {jaxprs.RECOMPUTED, "jaxscale_barrier", *table.CHEAP_CALLS, *jaxprs.CALLS}
# Loops and branches pass what products read and make. Backward, products share cotangents.
NARROW |= {"scan", "cond", "shard_map", "add_any"}
# These round nothing.
NARROW |= {"neg", "select_n", "reduce_precision", "empty2", "optimization_barrier"}


def computed_in_half(fun, *args):
    """The equations of a function that compute in half precision, and are no products."""

    def arrays(*args):  # some also return text
        return [leaf for leaf in jax.tree.leaves(fun(*args)) if hasattr(leaf, "dtype")]

    found = []
    for eqn in equations(jax.make_jaxpr(arrays)(*args)):
        dtypes = {str(getattr(atom.aval, "dtype", "")) for atom in eqn.outvars}
        if dtypes & {"float16", "bfloat16"} and jaxprs.operation(eqn) not in NARROW:
            found.append(eqn)
    return found


def results_of_products(fun, *args):
    """The dtype that each matrix product and convolution of a function returns."""
    return [str(eqn.outvars[0].aval.dtype) for eqn in product_equations(fun, *args)]


def product_equations(fun, *args):
    """The matrix products and convolutions of a function."""
    eqns = equations(jax.make_jaxpr(fun)(*args))
    return [eqn for eqn in eqns if jaxprs.operation(eqn) in table.PRODUCTS]


def loss_of(fun):
    """The first output of a program."""
    return lambda *args: fun(*args)[0]


def assert_near_by_norm(actual, expected, share):
    """Each leaf differs by a small share of its norm: single elements are sums that cancel."""
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert np.linalg.norm(a - b) <= share * np.linalg.norm(b)
