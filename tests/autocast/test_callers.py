"""Whose a product is: the model's run in half precision, those of libraries in float32."""

import functools

import equinox as eqx
import flax.linen as nn
import jax
import jax.image
import jax.numpy as jnp
import jax.scipy as jsp
import numpy as np
import optax
import pytest
from half_programs import products
from jax.example_libraries import stax
from jax.experimental import ode, sparse
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from tables import cases

import jaxscale

pytestmark = pytest.mark.standard_promotion

A = jnp.eye(8) + 0.1 * jnp.sin(jnp.arange(64.0)).reshape(8, 8)
X = jnp.cos(jnp.arange(32.0)).reshape(4, 8)
SIGNAL, TIMES = jnp.linspace(-1.0, 1.0, 16), jnp.arange(3.0)
MESH = Mesh(np.array(jax.devices("cpu")[:1]), ("data",))
OVER_DEVICES = {"mesh": MESH, "in_specs": (P("data"), P()), "out_specs": P("data")}
_, apply_stax = stax.serial(stax.Dense(8), stax.Relu)

# What a user's program asks for: a function of `X` and `A`. Some give JAX a function of its own.
MODEL = {
    "dot": jnp.dot,
    "lax.dot": jax.lax.dot,
    "@": lambda x, a: x @ a,
    "einsum": functools.partial(jnp.einsum, "ij,jk->ik"),
    "multi_dot": lambda x, a: jnp.linalg.multi_dot([x, a]),
    "convolve": lambda x, a: jnp.convolve(x[0], a[0]),
    "convolve2d": lambda x, a: jsp.signal.convolve2d(x, a),
    "jit": jax.jit(jnp.dot),
    "checkpoint": jax.checkpoint(functools.partial(jnp.einsum, "ij,jk->ik")),
    "vmap": jax.vmap(jnp.dot, (0, None)),
    "vectorize": jnp.vectorize(jnp.matmul, signature="(k,n),(n,m)->(k,m)"),
    "tree.map": lambda x, a: jax.tree.map(jnp.dot, [x], [a]),
    "lax.map": lambda x, a: jax.lax.map(functools.partial(jnp.matmul, a), x),
    "scan": lambda x, a: jax.lax.scan(
        lambda c, _: (jnp.tanh(c @ a), None), x, length=2
    )[0],
    "cond": lambda x, a: jax.lax.cond(a[0, 0] > 0, jnp.matmul, jnp.matmul, x, a),
    "associative_scan": lambda x, a: jax.lax.associative_scan(
        jnp.matmul, jnp.stack([a, a])
    ),
    "shard_map": jax.shard_map(jnp.matmul, **OVER_DEVICES),
    "sparsify": sparse.sparsify(jnp.matmul),
    "apply_along_axis": lambda x, a: jnp.apply_along_axis(
        functools.partial(jnp.matmul, a), 1, x
    ),
    "grad": lambda x, a: jax.grad(lambda x: jnp.dot(x, a).sum())(x),
    "Flax": lambda x, a: nn.Dense(8, use_bias=False).apply(
        {"params": {"kernel": a}}, x
    ),
    "Equinox": lambda x, a: jax.vmap(eqx.nn.Linear(8, 4, key=jax.random.key(0)))(x),
    "stax": lambda x, a: apply_stax([(a, a[0]), ()], x),
}
# What a library computes for itself, or was asked to compute precisely.
OWN = {
    "polymul": lambda x, a: jnp.polymul(x[0], a[0]),
    "matrix_power": lambda x, a: jnp.linalg.matrix_power(a, 3),
    "cov": lambda x, a: jnp.cov(x),
    "expm": lambda x, a: jsp.linalg.expm(a),
    "resize": lambda x, a: jax.image.resize(x, (3, 5), "linear"),
    "gaussian_kde": lambda x, a: jsp.stats.gaussian_kde(a[:2])(x[:2, :3]),
    "cg": lambda x, a: jsp.sparse.linalg.cg(a, x[0], maxiter=2)[0],
    "odeint": lambda x, a: ode.odeint(lambda y, t: -y, x, TIMES),
    "ctc_loss": lambda x, a: optax.ctc_loss(
        x[None], jnp.zeros((1, 4)), jnp.array([[1, 2]]), jnp.zeros((1, 2))
    ),
    "multivariate_normal": lambda x, a: jax.random.multivariate_normal(
        jax.random.key(0), x[0], jnp.eye(8) + jnp.abs(a), (3,), method="eigh"
    ),
    "precision": functools.partial(jnp.dot, precision="highest"),
    "precision inside": jax.default_matmul_precision("highest")(lambda x, a: x @ a),
    "precision of Flax": lambda x, a: nn.Dense(8, precision="highest").apply(
        {"params": {"kernel": a, "bias": a[0]}}, x
    ),
}


def kinds_of(fun, *args):
    return set(map(frozenset, products(jaxscale.autocast(fun), *args)))


@cases(
    "name",
    MODEL,
    fast=["@", "convolve", "vectorize", "tree.map", "lax.map", "sparsify"],
)
def test_products_of_the_model_are_in_half_precision(name):
    assert kinds_of(MODEL[name], X, A) == {frozenset({"float16"})}


@pytest.mark.filterwarnings("ignore:`autocast` changes nothing:UserWarning")
@cases("name", OWN, fast=["polymul", "odeint", "ctc_loss", "precision"])
def test_products_of_libraries_are_in_float32(name):
    fun = OWN[name]
    assert kinds_of(fun, X, A) == {frozenset({"float32"})}
    np.testing.assert_array_equal(jaxscale.autocast(fun)(X, A), fun(X, A))

    def of_products(x, a):
        return fun(x @ jnp.eye(8), a @ jnp.eye(8))

    kinds = products(jaxscale.autocast(of_products), X, A)
    assert kinds.count({"float16"}) == 2
    assert all(kind == {"float32"} for kind in kinds[2:])


@cases("first", ["convolve", "polymul"])
def test_functions_that_share_a_cached_program_are_told_apart(first):
    functions = {"convolve": jnp.convolve, "polymul": jnp.polymul}
    of_model, of_library = frozenset({"float16"}), frozenset({"float32"})
    for name in (first, *functions):
        if name == "polymul":
            with pytest.warns(UserWarning, match="changes nothing in `polymul`"):
                assert kinds_of(functions[name], SIGNAL, SIGNAL) == {of_library}
        else:
            assert kinds_of(functions[name], SIGNAL, SIGNAL) == {of_model}

    def both(x):
        return [functions[name](x, x) for name in (first, *functions)]

    kinds = products(jaxscale.autocast(both), SIGNAL)
    expected = [
        "float32" if name == "polymul" else "float16" for name in (first, *functions)
    ]
    assert sorted(map(str, kinds)) == sorted(str({dtype}) for dtype in expected)


def test_a_solver_of_a_library_calls_the_field_of_the_model():
    def solve(a, y):
        return ode.odeint(lambda y, t: a @ y - y, y, TIMES)

    kinds = products(jaxscale.autocast(solve), A, X[0])
    assert {"float16"} in kinds
    assert {"float32"} in kinds
    actual, expected = jaxscale.autocast(solve)(A, X[0]), solve(A, X[0])
    np.testing.assert_allclose(actual, expected, rtol=0.02, atol=0.02)


def test_what_all_products_are_set_to_is_no_demand_of_one():
    with jax.default_matmul_precision("highest"):
        assert kinds_of(lambda x, a: x @ a, X, A) == {frozenset({"float16"})}


def test_a_loss_of_impossible_symbols_is_finite():
    def loss(a):
        logits = jnp.where(jnp.arange(8) < 4, (X @ a)[None], -1e9)
        return optax.ctc_loss(
            logits, jnp.zeros((1, 4)), jnp.array([[1, 2]]), jnp.zeros((1, 2))
        ).sum()

    value, gradient = jax.jit(jax.value_and_grad(jaxscale.autocast(loss)))(A)
    np.testing.assert_allclose(value, loss(A), rtol=1e-2)
    assert jnp.isfinite(gradient).all()


QUERY, KEY, VALUE = (
    jnp.asarray(np.sin(np.arange(64.0) + i).reshape(1, 4, 2, 8), np.float32)
    for i in range(3)
)


def attend(query, key, value):
    return jax.nn.dot_product_attention(query, key, value)


def gradients_of_squares(fun):
    return jax.grad(lambda *args: jnp.sum(fun(*args) ** 2), argnums=(0, 1, 2))


@cases("dtype", ["float16", "bfloat16"])
def test_the_logits_of_attention_leave_half_precision(dtype):
    cast = jaxscale.autocast(attend, jnp.dtype(dtype))
    kinds = products(cast, QUERY, KEY, VALUE)
    assert kinds.count({dtype, "float32"}) == kinds.count({dtype}) == 1
    large_query, large_key = 200 * QUERY, 200 * KEY
    logits = jnp.einsum("btnh,bsnh->bnts", large_query, large_key)
    assert jnp.max(jnp.abs(logits)) > 65504
    large = large_query, large_key, VALUE
    np.testing.assert_allclose(cast(*large), attend(*large), atol=0.02, rtol=0.02)


@cases("dtype", ["float16", "bfloat16"])
def test_the_derivative_of_attention_multiplies_in_half_precision(dtype):
    """For which hardware is made."""
    gradients = gradients_of_squares(jaxscale.autocast(attend, jnp.dtype(dtype)))
    kinds = products(gradients, QUERY, KEY, VALUE)
    assert kinds.count({dtype, "float32"}) == 1
    assert kinds.count({dtype}) == len(kinds) - 1 == 5
    expected = gradients_of_squares(attend)(QUERY, KEY, VALUE)
    for a, b in zip(gradients(QUERY, KEY, VALUE), expected, strict=True):
        assert np.linalg.norm(a - b) <= 0.02 * np.linalg.norm(b)
