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
from jaxprs import equations as equations

import jaxscale
from jaxscale import _jax
from jaxscale._autocast import table


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


def activations(p, x):
    outs = {}
    for i, name in enumerate(
        ("relu", "silu", "gelu", "softplus", "elu", "tanh", "sigmoid")
    ):
        activate = getattr(jax.nn, name)
        outs[name] = activate(biased(x, p["w"][i % 5], p["b"]))
    return sum(jnp.mean(out) for out in outs.values()), outs


def attention(p, x):
    def normalized(x):
        mean = jnp.mean(x, -1, keepdims=True)
        var = jnp.mean((x - mean) ** 2, -1, keepdims=True)
        x = (x - mean) * jax.lax.rsqrt(var + 1e-6)
        return x * (1 + p["b"])[None]

    q, k, v = (normalized(x) @ p["w"][i] for i in range(3))
    mask = jnp.tril(jnp.ones((4, 4), bool))
    logits = q @ k.T / jnp.sqrt(8.0)
    weights = jax.nn.softmax(jnp.where(mask, logits, -1e9))
    x = x + (weights @ v) @ p["w"][3]
    hidden = normalized(x) @ p["w"][4]
    x = x + jax.nn.gelu(hidden)
    return jnp.mean(x**2), x


def convolutions(p, x):
    rows = p["w"][0, :3, :].repeat(3, 0)
    kernel = jnp.reshape(rows, (3, 3, 1, 8))
    kernel = kernel[:, :, :1].repeat(3, 2)
    dims = ("NHWC", "HWIO", "NHWC")
    x = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=dims)
    x = x + p["b"][None, None, None]
    mean = jnp.mean(x, (0, 1, 2))
    var = jnp.var(x, (0, 1, 2))
    centered = x - mean[None, None, None]
    deviation = jnp.sqrt(var + 1e-5)
    x = jax.nn.relu(centered / deviation[None, None, None])
    window = (1, 2, 2, 1)
    x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, window, window, "VALID")
    return jnp.mean(x[:, 0, 0] @ p["w"][1]), {"mean": mean, "var": var}


def lstm(p, h, xs):
    def cell(carry, x):
        h, c = carry
        gates = []
        for i in range(4):
            gates.append(biased(x, p["w"][i], p["b"]) + h @ p["w"][i].T)
        *sigmoid_gates, candidate = gates
        i, f, o = map(jax.nn.sigmoid, sigmoid_gates)
        c = f * c + i * jnp.tanh(candidate)
        return (o * jnp.tanh(c), c), h

    (h, c), hs = jax.lax.scan(cell, (h, jnp.zeros_like(h)), xs)
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
    def keep(x):
        return x

    x = jax.lax.cond(jnp.sum(x) > 0, lambda x: x @ p["w"][0], keep, x)
    choices = [keep, lambda x: x @ p["w"][1], jnp.negative]
    x = jax.lax.switch(1, choices, x @ p["w"][2])
    return jnp.mean(x**2), x


def custom_jvp(p, x):
    def jvp(primals, tangents):
        x, w = primals
        dx, dw = tangents
        return f(x, w), jnp.cos(x @ w) * (dx @ w + x @ dw)

    f = jax.custom_jvp(lambda x, w: jnp.sin(x @ w))
    f.defjvp(jvp)
    x = f(x @ p["w"][0], p["w"][1])
    return jnp.mean(x), x


def custom_vjp(p, x):
    def backward(residuals, g):
        x, w, _ = residuals
        # not the derivative, to see that it is this
        return g @ w.T, 2 * (x.T @ g), None

    f = jax.custom_vjp(lambda x, w, n: x @ w)
    f.defvjp(lambda x, w, n: (x @ w, (x, w, n)), backward)
    x = f(x @ p["w"][0], p["w"][1], 3)
    return jnp.mean(x), x


def second_derivatives(p, x):  # a physics-informed network
    def u(x):
        return jnp.sum(jnp.tanh(jnp.sin(x @ p["w"][0]) @ p["w"][1]))

    laplace = jax.vmap(lambda x: jnp.trace(jax.hessian(u)(x)))(x)
    return jnp.mean((laplace - 1.0) ** 2), laplace


def dropout_and_keys(p, x, key):
    x = biased(x, p["w"][0], p["b"])
    is_kept = jax.random.bernoulli(key, 0.5, x.shape)
    x = jnp.where(is_kept, x / 0.5, 0.0)
    x = x + jax.random.normal(key, x.shape)
    return jnp.mean(x @ p["w"][1]), jax.random.split(key)


def embedding(p, tokens):
    x = p["w"][0][tokens] @ p["w"][1]
    taken = jnp.take_along_axis(jax.nn.log_softmax(x), tokens[:, None], -1)
    return -jnp.mean(taken), {"argmax": jnp.argmax(x, -1), "none": None}


def moves(p, x):
    x = x @ p["w"][0]
    padded = jnp.pad(x, ((0, 1), (0, 0)))
    flipped = jnp.flip(x, 0)
    x = jnp.concatenate([padded, flipped])
    x = jax.lax.dynamic_update_slice(jnp.zeros((12, 8)), x, (1, 0))
    updated = x.at[jnp.array([0, 2])].set(x[:2])
    x = updated.at[jnp.array([1, 1])].add(x[:2])
    top, _ = jax.lax.top_k(jnp.sort(x), 2)
    clipped = jnp.clip(jnp.maximum(x, -2.0), -1.0, jnp.max(x))
    x = clipped + jnp.cumsum(x, 0) + jnp.abs(top[:, :1])
    return jnp.mean(x @ p["w"][1]), jnp.max(x, 0)


def broadcasts(p, x):
    inputs = x
    x = inputs @ p["w"][0]
    y = inputs @ p["w"][1]
    total = x * y[:1] + x[:1] - y[:, :1]
    total = total + jnp.maximum(x, y[:1])
    x = total + jnp.clip(x, y[:1], y[:1] + 0.5)
    is_positive = y > 0
    rows = jnp.broadcast_to(y[0], x.shape)
    x = jnp.where(is_positive, x, rows) + x * y[0, 0]
    differences = x[:, None] - x[None]
    weights = y[:, None] * y[None]
    pairs = differences * weights + jnp.tile(y[:1], (4, 1))
    return jnp.mean(pairs @ p["w"][2]), jax.vmap(lambda a: a * y[0])(x)


def orders(p, x):
    x = x @ p["w"][0]
    window = {"window_dimensions": (2, 1), "window_strides": (1, 1), "padding": "SAME"}
    ascending = jnp.sort(x, 0)
    largest, _ = jax.lax.top_k(x, 8)
    x = jnp.concatenate([ascending, largest, jax.lax.cummax(x)])
    x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, **window) + jax.lax.cummin(x)
    x = jax.lax.reduce_window(x, jnp.inf, jax.lax.min, **window)
    padded = jax.lax.pad(x, x[0, 0], ((1, 0, 0), (0, 0, 0)))
    x = padded.at[jnp.array([0, 3])].set(x[:2])
    return jnp.mean(x @ p["w"][1]), jnp.max(x, 0)


def linear_algebra(p, x):
    a = p["w"][0] @ p["w"][0].T + jnp.eye(8)
    factor = jax.scipy.linalg.cho_factor(a)
    solved = jax.scipy.linalg.cho_solve(factor, x.T @ x)
    return jnp.mean(solved @ p["w"][1]), jnp.abs(jnp.fft.fft(a)), jnp.linalg.norm(a)


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

    mesh = Mesh(np.array(jax.devices("cpu")[:4]), ("data",))
    specs = {"in_specs": (P("data"), P()), "out_specs": (P(), P("data"))}
    return jax.shard_map(f, mesh=mesh, **specs)(x, p["w"])


def numbers_and_text(p, x):
    return jnp.mean(x @ p["w"][0]), [
        3,
        "text",
        None,
        np.ones(2),
        jnp.arange(3),
        jnp.tanh,
    ]


# parts that are written in half precision by hand, and stay as they are
def own_precision(p, x):
    product = x.astype(jnp.bfloat16) @ p["w"][0].astype(jnp.bfloat16)
    rounded = product.astype(jnp.float32)
    return jnp.mean(rounded @ p["w"][1]), rounded.astype(jnp.float16)


OF_X = [
    mlp,
    activations,
    attention,
    remat_in_scan,
    loops,
    branches,
    custom_jvp,
    custom_vjp,
]
OF_X += [
    second_derivatives,
    moves,
    broadcasts,
    orders,
    linear_algebra,
    effects,
    over_devices,
]
OF_X += [numbers_and_text, own_precision]
PROGRAMS = {fun.__name__: (fun, (PARAMS, X)) for fun in OF_X} | {
    "convolutions": (convolutions, (PARAMS, jnp.ones((2, 8, 8, 3)))),
    "lstm": (lstm, (PARAMS, X, jnp.ones((6, 4, 8)))),
    "dropout_and_keys": (dropout_and_keys, (PARAMS, X, jax.random.key(0))),
    "embedding": (embedding, (PARAMS, jnp.array([1, 3, 0]))),
}


def primitives(fun, *args):
    """The primitives of a function, by their old names, each with its floating-point dtypes."""
    names_and_dtypes = []
    for eqn in equations(jax.make_jaxpr(fun)(*args)):
        dtypes = set()
        for atom in (*eqn.invars, *eqn.outvars):
            dtype = getattr(atom.aval, "dtype", np.bool_)
            if jnp.issubdtype(dtype, jnp.inexact):
                dtypes.add(str(dtype))
        names_and_dtypes.append((_jax.operation(eqn), dtypes))
    return names_and_dtypes


def products(fun, *args):
    """The dtype of each matrix product and convolution of a function, "<one> <other>" if mixed."""
    return [
        " ".join(sorted(dtypes))
        for name, dtypes in primitives(fun, *args)
        if name in table.PRODUCTS
    ]


def loss_of(fun):
    """The first output of a program."""
    return lambda *args: fun(*args)[0]


def assert_near_by_norm(actual, expected, share):
    """Each leaf differs by a small share of its norm: single elements are sums that cancel."""
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert np.linalg.norm(a - b) <= share * np.linalg.norm(b)
