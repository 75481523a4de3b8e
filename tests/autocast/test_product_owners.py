"""Owners of products: the model's run in half precision, those of libraries in float32."""

import functools

import equinox as eqx
import flax.linen as nn
import jax
import jax.image
import jax.numpy as jnp
import jax.scipy as jsp
import jax.scipy.optimize
import jax.scipy.spatial.transform
import numpy as np
import optax
import pytest
from half_programs import assert_near_by_norm, products, results_of_products
from jax.example_libraries import stax
from jax.experimental import jet, ode, rnn, sparse
from tables import assert_same_bits, cases, warned

import jaxscale
from jaxscale._autocast import product_owner, table

pytestmark = pytest.mark.standard_promotion


def test_a_product_of_the_model_is_rounded_and_one_of_a_library_is_not():
    x = jnp.array([[1 + 2.0**-12, 0.0], [0.0, 1.0]])
    product = jaxscale.autocast(lambda x: x @ x)(x)
    np.testing.assert_array_equal(product, [[1, 0], [0, 1]])
    with pytest.warns(UserWarning, match="a step of a library"):
        power = jaxscale.autocast(lambda x: jnp.linalg.matrix_power(x, 2))(x)
    assert power[0, 0] > 1


SMALL = 0.1 * np.sin(np.arange(64))
A = jnp.asarray(np.eye(8) + SMALL.reshape(8, 8), jnp.float32)
X = jnp.asarray(np.cos(np.arange(32)).reshape(4, 8), jnp.float32)
SIGNAL = np.linspace(-1, 1, 16, dtype=np.float32)
TIMES = np.arange(3, dtype=np.float32)
KEY = jax.random.key(0)
_, apply_stax = stax.serial(stax.Dense(8), stax.Relu)


def map_rows(x, a):
    return jax.lax.map(functools.partial(jnp.matmul, a), x)


def scan_matrices(x, a):
    return jax.lax.associative_scan(jnp.matmul, jnp.stack([a, a]))


def apply_along_rows(x, a):
    return jnp.apply_along_axis(functools.partial(jnp.matmul, a), 1, x)


def differentiate_product(x, a):
    return jax.grad(lambda x: jnp.dot(x, a).sum())(x)


def linen_layer(x, a):
    layer = nn.Dense(8, use_bias=False)
    return layer.apply({"params": {"kernel": a}}, x)


def equinox_layer(x, a):
    return jax.vmap(eqx.nn.Linear(8, 4, key=KEY))(x)


# What a user's program asks for, beside what `PASSING_ON` has: a function of `X` and `A`. Some give
# JAX a function of its own.
MODEL = {
    "dot": jnp.dot,
    "lax.dot": jax.lax.dot,
    "vmap": jax.vmap(jnp.dot, (0, None)),
    "tree.map": lambda x, a: jax.tree.map(jnp.dot, [x], [a]),
    "associative_scan": scan_matrices,
    "Flax": linen_layer,
    "Equinox": equinox_layer,
}


def ctc_loss(logits):
    logit_paddings = jnp.zeros((1, 4))
    labels = jnp.array([[1, 2]])
    label_paddings = jnp.zeros((1, 2))
    return optax.ctc_loss(logits[None], logit_paddings, labels, label_paddings)


def draw_normal(x, a):
    covariance = jnp.eye(8) + jnp.abs(a)
    return jax.random.multivariate_normal(KEY, x[0], covariance, (3,), method="eigh")


def cut_patches(image):
    return jax.lax.conv_general_dilated_patches(
        image[None, None], (3, 3), (1, 1), "SAME"
    )


def precise_linen_layer(x, a):
    layer = nn.Dense(8, precision="highest")
    return layer.apply({"params": {"kernel": a, "bias": a[0]}}, x)


# What was asked to be computed precisely. `ALGORITHMS` has what a library computes for itself.
OWN = {
    "cg": lambda x, a: jsp.sparse.linalg.cg(a, x[0], maxiter=2)[0],
    "precision": functools.partial(jnp.dot, precision="highest"),
    "algorithm": functools.partial(jnp.dot, precision="F32_F32_F32"),
    "precision inside": jax.default_matmul_precision("highest")(lambda x, a: x @ a),
    "precision of Flax": precise_linen_layer,
}


def cast_products(fun, *args):
    """The dtypes that the products of a function have in `autocast`."""
    return products(jaxscale.autocast(fun), *args)


@cases(
    "name",
    MODEL,
    fast=["dot", "tree.map", "Flax"],
)
def test_products_of_the_model_are_in_half_precision(name):
    assert set(cast_products(MODEL[name], X, A)) == {"float16"}


@pytest.mark.filterwarnings("ignore:`autocast` changes nothing:UserWarning")
@cases("name", OWN, fast=["precision"])
def test_products_that_are_to_be_precise_are_in_float32(name):
    fun = OWN[name]
    assert set(cast_products(fun, X, A)) == {"float32"}
    np.testing.assert_array_equal(jaxscale.autocast(fun)(X, A), fun(X, A))


SHARING = {"convolve": (jnp.convolve, "float16"), "polymul": (jnp.polymul, "float32")}


@cases("first", SHARING)
def test_functions_that_share_a_program_are_told_apart_in_one_function(first):
    funs, dtypes = zip(*(SHARING[name] for name in (first, *SHARING)), strict=True)

    def all_of_them(x):
        return [fun(x, x) for fun in funs]

    assert sorted(cast_products(all_of_them, SIGNAL)) == sorted(dtypes)


# What a product is called through, and a program whose product is. Without that entry of its list,
# nothing says whose the product is.
def differentiate(fun):
    return lambda x, a: jax.grad(lambda a: jnp.sum(fun(a)))(a)


def rotate(x, a):
    rotation = jsp.spatial.transform.Rotation.from_quat(x[:, :4])
    return rotation.apply(x[:, :3])


def minimize(x, a):
    def loss(y):
        return jnp.sum((y - 1) ** 2)

    return jsp.optimize.minimize(loss, x[0], method="BFGS").x


def find_eigenvector(x, a):
    matrix = jnp.diag(a[0] ** 2)
    _, vectors, _ = sparse.linalg.lobpcg_standard(matrix, x[:1].T, m=2)
    return vectors


def recurrent_layer(x, a):
    weights = {0: jnp.ones((32, 8))}
    biases = {0: a[0, 0] * jnp.ones(32)}
    state = jnp.ones((1, 1, 8))
    lengths = jnp.array([4])
    output, _, _ = rnn.lstm_ref(
        x[None],
        state,
        state,
        weights,
        weights,
        biases,
        biases,
        lengths,
        input_size=8,
        hidden_size=8,
        num_layers=1,
        dropout=0.0,
        bidirectional=False,
    )
    return output


def sample_product(x, a):
    numbers = (((1,), (0,)), ((), ()))
    indices = jnp.array([[0, 1], [1, 2]])
    return sparse.bcoo_dot_general_sampled(x, a, indices, dimension_numbers=numbers)


def differentiate_sampled(x, a):
    return jax.grad(lambda x: jnp.sum(sample_product(x, a)))(x)


def local_layer(x, a):
    weights = jnp.tile(a[:, :5], (2, 3, 1))  # places, the inputs of each, outputs
    of_one_dimension = ("NWC", "WIO", "NWC")
    return jax.lax.conv_general_dilated_local(
        x[None], weights, (1,), "VALID", (3,), dimension_numbers=of_one_dimension
    )


def differentiate_traced(x, a):
    traced = jax.jit(jnp.matmul).trace(X, A)
    return jax.grad(lambda x: jnp.sum(traced(x, a)))(x)


def expand_series(x, a):
    return jet.jet(jnp.matmul, (x, a), ((x,), (a,)))


# Most algorithms ask for the highest precision. Asked for by all, it says nothing of one.
def own_precision_aside(fun):
    def run(*args):
        with jax.default_matmul_precision("highest"):
            return fun(*args)

    return run


ALGORITHMS = {
    "": lambda x, a: ctc_loss(x),
    "scipy/linalg.py": lambda x, a: jsp.linalg.expm(a),
    "scipy/optimize/": minimize,
    "scipy/spatial/": rotate,
    "scipy/special.py": lambda x, a: jsp.special.owens_t(x, a[:4]),
    "scipy/stats/": lambda x, a: jsp.stats.gaussian_kde(a[:2])(x[:2, :3]),
    "tpu/linalg/": lambda x, a: jax.lax.linalg.qdwh(a)[0],
    "lax/linalg.py": differentiate(jnp.linalg.cholesky),
    "numpy/polynomial.py": lambda x, a: jnp.polymul(x[0], a[0]),
    "random": draw_normal,
    "image/": lambda x, a: jax.image.resize(x, (3, 5), "linear"),
    "experimental/ode.py": lambda x, a: ode.odeint(lambda y, t: -y, x, TIMES),
    "experimental/sparse/linalg.py": find_eigenvector,
}
ALGORITHMS_BY_NAME = {
    "matrix_power": lambda x, a: jnp.linalg.matrix_power(a, 3),
    "_pinv": lambda x, a: jnp.linalg.pinv(x),
    "_pinv_jvp": differentiate(jnp.linalg.pinv),
    "_lstsq": lambda x, a: jnp.linalg.lstsq(a, x[0])[0],
    "cov": lambda x, a: jnp.cov(x),
    "detrend": lambda x, a: jsp.signal.detrend(x),
    "conv_general_dilated_patches": lambda x, a: cut_patches(a),
}
PASSING_ON = {
    "lax/lax.py": jax.lax.dot,
    "lax/convolution.py": lambda x, a: jsp.signal.convolve2d(x, a),
    "numpy/tensor_contractions.py": lambda x, a: jnp.matvec(a, x[0]),
    "numpy/einsum.py": functools.partial(jnp.einsum, "ij,jk->ik"),
    "numpy/array_methods.py": lambda x, a: x @ a,
    "experimental/sparse/bcoo.py": differentiate_sampled,
    "experimental/sparse/transform.py": sparse.sparsify(jnp.matmul),
    "interpreters/": differentiate_product,
    "lax/control_flow/": map_rows,
    "lax/eval_jaxpr.py": differentiate_traced,
    "numpy/vectorize.py": jnp.vectorize(jnp.matmul, signature="(k,n),(n,m)->(k,m)"),
    "experimental/jet.py": expand_series,
    "experimental/rnn.py": recurrent_layer,
    "example_libraries/": lambda x, a: apply_stax([(a, a[0]), ()], x),
}
PASSING_ON_BY_NAME = {
    "matmul": jnp.linalg.matmul,
    "multi_dot": lambda x, a: jnp.linalg.multi_dot([x, a]),
    "tensordot": lambda x, a: jnp.linalg.tensordot(x, a, axes=1),
    "vecdot": lambda x, a: jnp.linalg.vecdot(x[:, None], a[None]),
    "convolve": lambda x, a: jnp.convolve(x[0], a[0]),
    "correlate": lambda x, a: jnp.correlate(x[0], a[0]),
    "_conv": lambda x, a: jnp.convolve(x[0], a[0]),
    "convolve2d": lambda x, a: jsp.signal.convolve2d(x, a),
    "correlate2d": lambda x, a: jsp.signal.correlate2d(x, a),
    "_convolve_nd": lambda x, a: jsp.signal.convolve2d(x, a),
    "apply_along_axis": apply_along_rows,
    "conv_general_dilated_local": local_layer,
}
LISTS = {
    "ALGORITHMS": ALGORITHMS,
    "ALGORITHMS_BY_NAME": ALGORITHMS_BY_NAME,
    "PASSING_ON": PASSING_ON,
    "PASSING_ON_BY_NAME": PASSING_ON_BY_NAME,
}
FAST_ENTRIES = [
    ("ALGORITHMS", "experimental/ode.py"),
    ("ALGORITHMS", ""),
    ("ALGORITHMS_BY_NAME", "matrix_power"),
    ("PASSING_ON", "numpy/einsum.py"),
    ("PASSING_ON_BY_NAME", "_conv"),
]
ENTRIES = [(name, entry) for name, entries in LISTS.items() for entry in entries]


def without(entries, entry):
    """A list of `table`, which may be by package or by file, without one entry."""
    if isinstance(entries, dict):
        return {name: without(inner, entry) for name, inner in entries.items()}
    return type(entries)(other for other in entries if other != entry)


def entries_of(entries):
    if isinstance(entries, dict):
        return set().union(*entries.values())
    return set(entries)


def test_each_list_of_callers_has_a_program_for_each_entry():
    for name, programs in LISTS.items():
        assert programs.keys() == entries_of(getattr(table, name)), name


@pytest.fixture
def unlist(monkeypatch):
    """Takes an entry from a list, and forgets what is known of callers, before and after."""

    def forget():
        jax.clear_caches()
        product_owner._find_origin.cache_clear()

    def take(name, entry):
        monkeypatch.setattr(table, name, without(getattr(table, name), entry))
        forget()

    yield take
    monkeypatch.undo()
    forget()


@cases("name, entry", ENTRIES, fast=FAST_ENTRIES)
def test_products_whose_callers_are_in_no_list_are_cast_and_named(name, entry, unlist):
    fun = own_precision_aside(LISTS[name][entry])
    is_model = name.startswith("PASSING_ON")
    cast = own_precision_aside(lambda: cast_products(fun, X, A))
    with warned("changes nothing in `", is_due=not is_model):
        assert ("float16" in " ".join(cast())) == is_model
    unlist(name, entry)
    with pytest.warns(
        UserWarning, match=r"casts \d+ products? of `.*` in (jax|optax)/"
    ):
        assert "float16" in " ".join(cast())


@cases("first", SHARING)
def test_of_functions_that_share_a_program_the_unknown_one_is_named(first, unlist):
    unlist("ALGORITHMS", "numpy/polynomial.py")
    funs = [SHARING[name][0] for name in (first, *SHARING)]
    cast = jaxscale.autocast(lambda x: [fun(x, x) for fun in funs])
    count = funs.count(jnp.polymul)
    message = f"casts {count} products? of `polymul` in jax/numpy/polynomial.py, which"
    with pytest.warns(UserWarning, match=message):
        jax.make_jaxpr(cast)(SIGNAL)


def test_attention_of_another_name_is_named(monkeypatch, unlist):
    monkeypatch.setattr(table, "ATTENTION", "of_another_name")
    product_owner._find_origin.cache_clear()
    with pytest.warns(
        UserWarning, match="casts 2 products of `.*` in jax/nn/functions"
    ):
        jax.make_jaxpr(jaxscale.autocast(attend))(*ATTENDED)


@pytest.mark.worlds
def test_a_solver_of_a_library_calls_the_field_of_the_model():
    def solve(a, y):
        return ode.odeint(lambda y, t: a @ y - y, y, TIMES)

    assert set(cast_products(solve, A, X[0])) == {"float16", "float32"}
    actual = jaxscale.autocast(solve)(A, X[0])
    np.testing.assert_allclose(actual, solve(A, X[0]), rtol=0.02, atol=0.02)


# Set for all products, they say nothing of one. Some are algorithms with dtypes of their own.
FOR_ALL = [
    *("default", "high", "highest", "bfloat16", "tensorfloat32", "float32"),
    *("BF16_BF16_F32", "TF32_TF32_F32", "F32_F32_F32"),
]


def gradients_of_product(fun):
    return jax.grad(lambda x, a: jnp.sum(jnp.sin(fun(x, a))), argnums=(0, 1))


@cases("setting", FOR_ALL, fast=["highest", "BF16_BF16_F32", "F32_F32_F32"])
def test_a_precision_that_is_set_for_all_products_is_not_a_demand_of_one(setting):
    gradients = gradients_of_product(jaxscale.autocast(jnp.matmul))
    expected = jax.jit(gradients)(X, A)
    with jax.default_matmul_precision(setting):
        assert products(gradients, X, A) == ["float16"] * 3
        assert_same_bits(jax.jit(gradients)(X, A), expected)


def test_the_default_algorithm_is_not_a_demand():
    product = functools.partial(jnp.matmul, precision="DEFAULT")
    assert cast_products(product, X, A) == ["float16"]


# Queries, keys and values.
WAVES = np.sin(np.arange(64.0) + np.arange(3)[:, None])
ATTENDED = tuple(jnp.asarray(WAVES.reshape(3, 1, 4, 2, 8), jnp.float32))
HALVES = ["float16", "bfloat16"]


def attend(query, key, value):
    return jax.nn.dot_product_attention(query, key, value)


def gradients_of_squares(fun):
    return jax.grad(lambda *args: jnp.sum(fun(*args) ** 2), argnums=(0, 1, 2))


@cases("dtype", HALVES, fast=["float16"])
def test_the_logits_of_attention_are_multiplied_into_float32(dtype):
    cast = jaxscale.autocast(attend, jnp.dtype(dtype))
    assert products(cast, *ATTENDED) == [dtype] * 2
    assert sorted(results_of_products(cast, *ATTENDED)) == [dtype, "float32"]


@pytest.mark.worlds
@cases("dtype", HALVES, fast=["float16"])
def test_the_derivative_of_attention_multiplies_in_half_precision(dtype):
    """For which hardware is made."""
    gradients = gradients_of_squares(jaxscale.autocast(attend, jnp.dtype(dtype)))
    assert products(gradients, *ATTENDED) == [dtype] * 6
    expected = gradients_of_squares(attend)(*ATTENDED)
    assert_near_by_norm(gradients(*ATTENDED), expected, share=0.02)
