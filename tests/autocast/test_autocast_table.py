"""Products by their shapes and types, and those of functions of JAX and Optax."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.image
import jax.numpy as jnp
import jax.scipy.linalg
import jax.scipy.signal
import numpy as np
import optax
import pytest
from half_programs import assert_near_by_norm, products
from tables import avals, cases, pairs

import jaxscale

pytestmark = pytest.mark.standard_promotion


def test_a_dot_of_vectors_may_be_larger_than_float16_holds():
    large = jnp.full(300, 20.0)
    with pytest.warns(UserWarning, match="no product of float32 matrices"):
        assert jaxscale.autocast(jnp.vdot)(large, large) == 120_000


ROWS = jnp.asarray(np.full((4, 300), 20, np.float32))
COLUMN = np.full((300, 1), 20, np.float32)
QUERY = np.ones((2, 1, 2, 4), np.float32)
KEYS = np.ones((2, 3, 2, 4), np.float32)
POSITIONS = np.arange(4096, dtype=np.float32)
FREQUENCIES = np.float32(1.5) ** -np.arange(4, dtype=np.float32)
PIXEL = np.ones((1, 1, 1, 1), np.float32)
# They have no axis to sum over, or none that is left. Their results overflow float16, or need more
# digits than it has.
DOTS_AND_OUTER_PRODUCTS = {
    "vdot": (jnp.vdot, ROWS, ROWS),
    "ij,ij->i": (lambda x, y: jnp.einsum("ij,ij->i", x, y), ROWS, ROWS),
    "mapped": (jax.vmap(jnp.dot), ROWS, ROWS),
    "row @ column": (lambda x, y: x @ y, ROWS[:1], COLUMN),
    "rows @ columns": (lambda x, y: x[:, None] @ y, ROWS, np.stack([COLUMN] * 4)),
    "i,j->ij": (lambda x, y: jnp.einsum("i,j->ij", x, y), POSITIONS, FREQUENCIES),
    "column @ row": (lambda x, y: x[:, None] @ y[None], POSITIONS, FREQUENCIES),
}
OF_MATRICES = {
    "matrix @ vector": (lambda x, y: x @ y, ROWS, ROWS[0]),
    "vector @ matrix": (lambda x, y: x @ y, ROWS[0], ROWS.T),
    "one query": (lambda q, k: jnp.einsum("bthd,bshd->bhts", q, k), QUERY, KEYS),
    "mapped": (jax.vmap(jnp.dot, (0, None)), ROWS, ROWS[0]),
    "1x1": (lambda x, k: jax.lax.conv(x, k, (1, 1), "SAME"), PIXEL, PIXEL),
}


every_dot = cases("name", DOTS_AND_OUTER_PRODUCTS, fast=["vdot", "i,j->ij", "mapped"])


@pytest.mark.filterwarnings("ignore:`autocast` changes nothing")
@every_dot
def test_dots_and_outer_products_are_in_float32(name):
    fun, *args = DOTS_AND_OUTER_PRODUCTS[name]
    value, pull = jax.vjp(jaxscale.autocast(fun), *args)
    expected, pull_expected = jax.vjp(fun, *args)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    # The cotangent of a loss is the loss scale: here one that float16 does not hold.
    cotangent = jnp.full_like(value, 2.0**17)
    gradients = pull(cotangent)
    for a, b in zip(gradients, pull_expected(cotangent), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


@every_dot
def test_dots_and_outer_products_of_products_are_in_float32(name):
    fun, *args = DOTS_AND_OUTER_PRODUCTS[name]

    def average_of_copies(x):
        return jnp.stack([x, x], -1) @ jnp.full(2, 0.5)

    def after_products(*args):
        return fun(*map(average_of_copies, args))

    dtypes = products(jaxscale.autocast(after_products), *args)
    assert dtypes == ["float16", "float16", "float32"]


@cases("name", OF_MATRICES)
def test_products_of_a_matrix_are_in_half_precision(name):
    fun, *args = OF_MATRICES[name]
    assert products(jaxscale.autocast(fun), *args) == ["float16"]


BYTES = np.full((4, 300), 127, np.int8)
BYTE_IMAGES = np.full((1, 300, 2, 2), 127, np.int8)
INTO_FLOAT32 = {"preferred_element_type": jnp.float32}
# Their results are integers that half precision does not hold.
OF_INTEGERS = {
    "lax.dot": lambda x: jax.lax.dot(x, x.T, **INTO_FLOAT32),
    "matmul": lambda x: jnp.matmul(x, x.T, **INTO_FLOAT32),
    "einsum": lambda x: jnp.einsum("ik,jk->ij", x, x, **INTO_FLOAT32),
    "convolution": lambda x: jax.lax.conv_general_dilated(
        BYTE_IMAGES, BYTE_IMAGES, (1, 1), "SAME", **INTO_FLOAT32
    ),
    "ragged": lambda x: jax.lax.ragged_dot(
        x, x.T[None], jnp.array([4]), **INTO_FLOAT32
    ),
}


@cases("name", OF_INTEGERS)
def test_products_of_integers_are_exact(name):
    product = OF_INTEGERS[name]

    def integers_and_floats(x):
        return product(x), ROWS @ ROWS.T

    cast = jaxscale.autocast(integers_and_floats)
    exact, _ = cast(BYTES)
    np.testing.assert_array_equal(exact, product(BYTES))
    assert jnp.max(exact) > 65504
    assert "float16" in products(cast, BYTES)


def test_a_product_of_integers_and_float32_is_in_half_precision():
    def mixed(x, y):
        return jax.lax.dot(x, y, preferred_element_type=jnp.float32)

    ones = jnp.ones((4, 300), jnp.int8)
    assert products(jaxscale.autocast(mixed), ones, ROWS.T) == ["float16"]
    np.testing.assert_array_equal(jaxscale.autocast(mixed)(ones, ROWS.T), 6000)


# Products of a weight and an array in another format, which declare float32, or bfloat16.
DIMENSIONS = (((1,), (0,)), ((), ()))
OF_TWO_FORMATS = {
    "x @ w": lambda x, w: x @ w,
    "w.T @ x.T": lambda x, w: w.T @ x.T,
    "einsum": lambda x, w: jnp.einsum("ij,jk->ki", x, w),
    "batches": lambda x, w: jnp.einsum(
        "bij,bjk->bik", jnp.stack([x, x]), jnp.stack([w, w])
    ),
    "dot_general": lambda x, w: jax.lax.dot_general(x, w, DIMENSIONS),
    "ragged": lambda x, w: jax.lax.ragged_dot(x, w[None], jnp.array([len(x)])),
    "mapped": jax.vmap(lambda x, w: w.T @ x, (0, None)),
    "into bfloat16": lambda x, w: jnp.matmul(x, w, preferred_element_type="bfloat16"),
}
FORMATS = [("float32", "bfloat16"), ("float32", "float16"), ("bfloat16", "float16")]
FORMATS += [(w, x) for x, w in FORMATS]


@cases(
    "name, formats, dtype",
    pairs(OF_TWO_FORMATS, FORMATS, ["float16", "bfloat16"]),
    fast=[
        ("x @ w", ("float32", "bfloat16"), "float16"),
        ("ragged", ("float32", "bfloat16"), "float16"),
        ("into bfloat16", ("float32", "float16"), "float16"),
    ],
)
def test_a_product_of_two_formats_is_in_the_one_asked_for(name, formats, dtype):
    """Its result and its gradients keep the formats that the program declares."""
    fun = OF_TWO_FORMATS[name]
    x, w = (normal(4, 4).astype(format) for format in formats)
    cast = jaxscale.autocast(fun, jnp.dtype(dtype))
    assert products(cast, x, w) == [dtype]

    def value_and_gradients(fun, *args):
        value, pull = jax.vjp(fun, *args)
        return value, pull(jnp.ones_like(value))

    actual = value_and_gradients(cast, x, w)
    assert avals(actual) == avals(value_and_gradients(fun, x, w))
    exact = value_and_gradients(fun, x.astype("float32"), w.astype("float32"))
    assert_near_by_norm(as_float32(actual), as_float32(exact), share=0.01)


def as_float32(tree):
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


def test_what_is_declared_in_bfloat16_may_be_larger_than_float16_holds():
    x, w = jnp.full((4, 8), 256.0), jnp.full((8, 4), 256, "bfloat16")
    for way in (
        OF_TWO_FORMATS["into bfloat16"],
        lambda x, w: jnp.full((4, 8), 256.0) @ w,
    ):
        product = jaxscale.autocast(way)(x, w)
        assert product.dtype == "bfloat16"
        np.testing.assert_array_equal(product, 2**19)


@cases("name", ["x @ w", "ragged"])
def test_a_weight_in_another_format_is_kept_as_it_is(name):
    """A frozen weight is cast one layer at a time, and the backward pass keeps no copy."""
    weights = jnp.ones((3, 4, 4), "bfloat16")

    def loss_fn(x):
        def layer(x, w):
            return jnp.tanh(OF_TWO_FORMATS[name](x, w)), None

        return jnp.sum(jax.lax.scan(layer, x, weights)[0])

    program = jax.make_jaxpr(jax.grad(jaxscale.autocast(loss_fn)))(jnp.ones((2, 4)))
    made = [var.aval.shape for eqn in program.eqns for var in eqn.outvars]
    assert (3, 2, 4) in made
    assert weights.shape not in made


# Functions of libraries, with the arguments that they take.
MODULES = (
    jnp.linalg,
    jax.scipy.linalg,
    jax.scipy.signal,
    jax.image,
    jax.nn,
    optax.losses,
)
# The first returns a configuration. Products of 8-bit or 4-bit numbers need a GPU.
NOT_CALLED = {"get_scaled_dot_general_config", "scaled_dot_general", "scaled_matmul"}


def is_public_function(name, value):
    is_function = callable(value) and not inspect.isclass(value)
    return is_function and not name.startswith("_")


FUNCTIONS = {
    f"{module.__name__}.{name}": value
    for module in MODULES
    for name, value in vars(module).items()
    if is_public_function(name, value) and name not in NOT_CALLED
}
NUMBERS = np.random.default_rng(0).standard_normal(4096).astype(np.float16)


def normal(*shape):
    """Numbers that float16 holds, in float32."""
    return NUMBERS[: np.prod(shape)].reshape(shape).astype(np.float32)


A = normal(4, 4)
B = normal(8, 4)[4:]
V = normal(4)
SIGNAL = normal(64)
POSITIVE = (A @ A.T + np.eye(4)).astype(np.float16).astype(np.float32)
CHANCES = np.exp(B) / np.sum(np.exp(B), -1, keepdims=True)
LABELS = np.array([0, 2, 1, 0])
HOT = np.eye(4, dtype=np.float32)[LABELS]
BITS = np.array([0, 1, 0, 1], np.float32)
WORDS = np.array([[1, 2], [3, 0]])
ENDS = np.array([[0, 0], [0, 1]], np.float32)
# Tried in this order, where `ARGUMENTS` says nothing else.
USUAL = [(A,), (A, B), (A, V), (V,), (V, V), (4,), (A, 2), (LABELS, 4)]
ARGUMENTS = {
    "cholesky cho_factor log1mexp": (POSITIVE,),
    "convolve correlate fftconvolve": (SIGNAL, V),
    "kl_divergence generalized_kl_divergence convex_kl_divergence": (A, CHANCES),
    "dice_loss multiclass_generalized_dice_loss": (A[None], HOT[None]),
    "sparsemax_loss hinge_loss perceptron_loss": (V, BITS),
    "sigmoid_binary_cross_entropy sigmoid_focal_loss": (V, BITS),
    "softmax_cross_entropy safe_softmax_cross_entropy binary_dice_loss": (A, HOT),
    "poly_loss_cross_entropy ranking_softmax_loss": (A, HOT),
    "multiclass_hinge_loss multiclass_perceptron_loss ntxent": (A, LABELS),
    "multiclass_sparsemax_loss softmax_cross_entropy_with_integer_labels": (A, LABELS),
    "ctc_loss ctc_loss_with_forward_probs": (
        normal(2, 6, 4),
        np.zeros((2, 6), np.float32),
        WORDS,
        ENDS,
    ),
    "convolution_matrix": (V, 5),
    "cross": (normal(4, 3), normal(8, 3)[4:]),
    "dot_product_attention": (normal(1, 4, 2, 4),) * 3,
    "leslie": (V, V[:3]),
    "solve_sylvester": (POSITIVE, POSITIVE, A),
    "triplet_margin_loss": (A, B, CHANCES),
}
ARGUMENTS = {name: args for names, args in ARGUMENTS.items() for name in names.split()}
LINALG = jax.scipy.linalg
SIGNALS = jax.scipy.signal
STFT = {"nperseg": 16}


def solve_by_cholesky(a, b):
    factor, _ = LINALG.cho_factor(a)
    return LINALG.cho_solve((factor, False), b)


def invert_stft(x):
    _, _, transformed = SIGNALS.stft(x, **STFT)
    return SIGNALS.istft(transformed, **STFT)


def fenchel_young_loss(scores, targets):
    return optax.losses.make_fenchel_young_loss(jax.nn.logsumexp)(scores, targets)


def scale_and_translate(x):
    scale = V[:2] ** 2
    return jax.image.scale_and_translate(x, (9, 7), (0, 1), scale, V[2:], "linear")


# Functions that take something else than arrays, or the result of another function.
CALLS = {
    "cho_solve": (solve_by_cholesky, POSITIVE, A),
    "csd": (lambda x, y: SIGNALS.csd(x, y, **STFT), SIGNAL, SIGNAL[::-1]),
    "eigh_tridiagonal": (
        lambda d: LINALG.eigh_tridiagonal(d, d[1:], eigvals_only=True),
        V,
    ),
    "funm": (lambda a: LINALG.funm(a, jnp.sin), A),
    "istft": (invert_stft, SIGNAL),
    "lu_solve": (lambda a, b: LINALG.lu_solve(LINALG.lu_factor(a), b), POSITIVE, A),
    "make_fenchel_young_loss": (fenchel_young_loss, V, CHANCES[0]),
    "multi_dot": (lambda a, b: jnp.linalg.multi_dot([a, b, a]), A, B),
    "resize": (lambda x: jax.image.resize(x, (9, 7), "cubic"), A),
    "rsf2csf": (lambda a: LINALG.rsf2csf(*LINALG.schur(a)), A),
    "scale_and_translate": (scale_and_translate, A),
    "stft": (lambda x: SIGNALS.stft(x, **STFT), SIGNAL),
    "tensorinv": (lambda a: jnp.linalg.tensorinv(a.reshape(2, 2, 4)), A),
    "welch": (lambda x: SIGNALS.welch(x, **STFT), SIGNAL),
}
IN_HALF = {"matmul", "multi_dot", "convolve", "convolve2d", "correlate", "correlate2d"}
IN_HALF |= {"dot_product_attention"}


class LibraryCall(NamedTuple):
    """A library function with its other arguments bound, and the arrays to call it with."""

    fun: Callable[..., Any]
    arrays: tuple[jax.Array, ...]


def accepts(fun, args):
    try:
        fun(*args)
    except Exception:  # whatever it says of arguments that are not for it
        return False
    return True


def short_name_of(name):
    return name.rpartition(".")[2]


def find_arguments(name):
    fun = FUNCTIONS[name]
    short_name = short_name_of(name)
    if short_name in CALLS:
        call, *arrays = CALLS[short_name]
        return LibraryCall(call, tuple(arrays))
    candidates = USUAL
    if short_name in ARGUMENTS:
        candidates = [ARGUMENTS[short_name]]
    for args in candidates:
        if accepts(fun, args):
            # Arrays come first.
            arrays = tuple(arg for arg in args if isinstance(arg, jax.Array))
            return LibraryCall(
                lambda *xs, args=args: fun(*xs, *args[len(xs) :]), arrays
            )
    pytest.fail(
        "no arguments are known for it: it needs a row in `ARGUMENTS` or `CALLS`"
    )


def is_floating(x):
    return jnp.issubdtype(getattr(x, "dtype", np.bool_), np.inexact)


def sum_of_outputs(fun):
    """A loss of all floating-point outputs."""

    def loss(*args):
        outputs = filter(is_floating, jax.tree.leaves(fun(*args)))
        return sum(jnp.sum(jnp.abs(output)) for output in outputs)

    return loss


# Some call what is deprecated, and some have no product.
@pytest.mark.worlds
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:`autocast` changes nothing")
@cases("name", FUNCTIONS, fast=["jax.numpy.linalg.matmul", "jax.numpy.linalg.pinv"])
def test_products_of_library_functions_are_in_float32_forward_and_backward(name):
    """But for functions that are products, or are made of products and nothing narrower."""
    fun, args = find_arguments(name)
    is_in_half = short_name_of(name) in IN_HALF
    assert is_in_half == ("float16" in products(jaxscale.autocast(fun), *args))
    loss = sum_of_outputs(fun)
    gradients = [jax.grad(jaxscale.autocast(loss)), jaxscale.autocast(jax.grad(loss))]
    try:
        jax.eval_shape(jax.grad(loss), *args)
    except (NotImplementedError, TypeError, ValueError) as error:
        # It has no derivative, and we say so, too.
        for gradient in gradients:
            with pytest.raises(type(error)):
                gradient(*args)
    else:
        for gradient in gradients:
            assert is_in_half == ("float16" in products(gradient, *args))
