"""`half_precision`, which casts for kernels that take half precision alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from half_programs import (
    HOLDERS,
    W,
    X,
    products,
    results_of_products,
    with_jvp,
    with_vjp,
)
from jax.experimental import pallas
from tables import assert_same_bits, cases, pairs
from tables import half as both
from training import x64

import jaxscale

pytestmark = pytest.mark.standard_promotion


def test_a_marked_function_gets_half_precision_inside_of_autocast():
    seen = []

    def kernel(x):
        seen.append(str(x.dtype))
        return x * 2

    marked = jaxscale.half_precision(kernel)
    for call in (marked, jaxscale.autocast(marked)):
        y = call(jnp.array([1.0, 3.0]))
        assert y.dtype == jnp.float32
        np.testing.assert_array_equal(y, [2, 6])
    assert seen == ["float32", "float16"]


HALF = ("float16", "bfloat16")


def check(*arrays):
    """Raises what a kernel raises that takes half precision alone."""
    for x in arrays:
        if x.dtype not in HALF:
            raise NotImplementedError(f"must be float16 or bfloat16, got {x.dtype}")


def plain_kernel(x, w):
    check(x, w)
    return x @ w


def pallas_kernel(x, w):
    def multiply(x_ref, w_ref, out_ref):
        check(x_ref, w_ref)
        out_ref[...] = x_ref[...] @ w_ref[...]

    out = jax.ShapeDtypeStruct((len(x), w.shape[1]), x.dtype)
    return pallas.pallas_call(multiply, out_shape=out, interpret=True)(x, w)


def on_host(x, w):
    def multiply(x, w):
        return (x @ w).astype(x.dtype)

    check(x, w)
    out = jax.ShapeDtypeStruct((len(x), w.shape[1]), x.dtype)
    return jax.pure_callback(multiply, out, x, w, vmap_method="sequential")


KERNELS = {
    "jax": jaxscale.half_precision(plain_kernel),
    "pallas": jaxscale.half_precision(with_vjp(pallas_kernel)),
    "callback": jaxscale.half_precision(with_vjp(on_host)),
    "custom_jvp": jaxscale.half_precision(with_jvp(plain_kernel)),
    # Each call of a kernel is marked, those of the rules among them.
    "marked in a rule": with_vjp(jaxscale.half_precision(plain_kernel)),
    "marked in a jvp": with_jvp(jaxscale.half_precision(plain_kernel)),
    "by name": lambda x, w: jaxscale.half_precision(plain_kernel)(w=w, x=x),
    "in trees": lambda x, w: jaxscale.half_precision(
        lambda xs, *, options: {"y": plain_kernel(xs[0], options["w"])}
    )((x, None), options={"w": w, "axis": -1, "name": "y"})["y"],
}

meet = both(KERNELS, HOLDERS)


def loss_with(call):
    return lambda w: jnp.mean(jnp.square(call(jnp.tanh(X @ w[0]), w[1]) @ w[2]))


@pytest.mark.worlds
@cases(
    "name, holder, dtype",
    pairs(KERNELS, HOLDERS, HALF, among=lambda *row: meet(*row[:2])),
    fast=[(name, "as it is", "float16") for name in KERNELS],
)
def test_a_kernel_in_half_precision_is_a_product_in_half_precision(name, holder, dtype):
    call = HOLDERS[holder](KERNELS[name])
    cast = jaxscale.autocast(loss_with(call), dtype)
    plain = jaxscale.autocast(loss_with(HOLDERS[holder](jnp.matmul)), dtype)
    value, gradient = jax.jit(jax.value_and_grad(cast))(W)
    assert gradient.dtype == jnp.float32
    expected, expected_gradient = jax.jit(jax.value_and_grad(plain))(W)
    unit = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(value, expected, rtol=8 * unit)
    largest = jnp.abs(expected_gradient).max()
    np.testing.assert_allclose(gradient, expected_gradient, atol=8 * unit * largest)


def test_half_precision_is_the_function_itself_outside_of_autocast():
    def fun(x, *, y):
        return x, y, x + y["y"]

    x = jnp.float32(1.0001)
    marked = jaxscale.half_precision(fun)
    assert_same_bits(marked(x, y={"y": x}), fun(x, y={"y": x}))
    assert marked(x, y={"y": x})[0] is x
    assert marked.__name__ == "fun"
    assert jaxscale.autocast(marked, jnp.float32) is marked


# Arguments of a marked function, and what arrives.
ARRIVING = {
    **{name: jnp.ones(2, name) for name in ("bfloat16", "int32", "bool", "complex64")},
    "float32": jnp.ones(2),
    "NumPy": np.ones(2, "float32"),
    "key": jax.random.key(0),
    "number": 1.5,
    "none": None,
}


@cases("name", ARRIVING)
def test_arrays_in_float32_arrive_in_half_precision_and_all_else_as_it_is(name):
    arrived = []

    def fun(tree, **others):
        arrived.extend([tree["x"], others["x"]])
        return X * 2

    given = ARRIVING[name]
    marked = jaxscale.half_precision(fun)
    returned = jaxscale.autocast(lambda x: marked({"x": x}, x=x))(given)
    assert returned.dtype == jnp.float32
    expected = "float16" if name in ("float32", "NumPy") else None
    for value in arrived:
        if isinstance(given, jax.Array | np.ndarray):
            assert value.dtype == (expected or given.dtype)
        else:
            assert value is given


def test_float64_arrives_as_it_is():
    with x64():
        fun = jaxscale.half_precision(lambda x: x)
        assert jaxscale.autocast(fun)(jnp.ones(2)).dtype == "float64"


def test_a_function_that_was_traced_before_is_traced_again():
    seen = []

    def fun(x):
        seen.append(str(x.dtype))
        return x * 2

    jitted = jax.jit(jaxscale.half_precision(fun))
    for _ in range(2):
        jitted(X)
        jaxscale.autocast(jitted)(X)
        jaxscale.autocast(jitted, jnp.bfloat16)(X)
    assert seen == ["float32", "float16", "bfloat16"]


def test_an_argument_that_is_returned_is_not_rounded():
    def fun(x):
        return jaxscale.half_precision(lambda x, y: (y, x))(x, x + 1)

    x = jnp.float32(1.0001)
    assert_same_bits(jaxscale.autocast(fun)(x), (x + 1, x))


def dtypes_in(fun):
    seen = []

    def note(x):
        seen.append(str(x.dtype))
        return x * 2

    result = jaxscale.autocast(fun(note))(X)
    return seen, result.dtype


half, full = jaxscale.half_precision, jaxscale.full_precision
MARKED = {
    "half": (half, "float16"),
    "full": (full, "float32"),
    "half in full": (lambda f: full(half(f)), "float16"),
    "full in half": (lambda f: half(full(f)), "float32"),
    "half in full in half": (lambda f: half(full(half(f))), "float16"),
    "full in half in full": (lambda f: full(half(full(f))), "float32"),
    "half in a jit in full": (lambda f: full(jax.jit(half(f))), "float16"),
    "full in a jit in half": (lambda f: half(jax.jit(full(f))), "float32"),
    "full in a checkpoint": (lambda f: half(jax.checkpoint(full(f))), "float32"),
    "autocast in half": (lambda f: half(jaxscale.autocast(f)), "float16"),
    "half in autocast": (
        lambda f: full(jaxscale.autocast(half(f), jnp.bfloat16)),
        "bfloat16",
    ),
}


@pytest.mark.filterwarnings("ignore:`autocast` changes nothing")
@cases("name", MARKED)
def test_the_inner_of_two_markers_counts(name):
    mark, dtype = MARKED[name]
    seen, returned = dtypes_in(mark)
    assert seen == [dtype]
    assert returned == "float32"


def multiply_twice(mark):
    """Products of what a marked function gets, and of what it closes over in float32."""
    return lambda x: mark(lambda x: x @ x.T)(x) @ mark(lambda x: X @ X.T)(x)


CAST_INSIDE = {
    "half in full": (lambda f: full(half(f)), ["float16"] * 3),
    "full in half": (lambda f: half(full(f)), ["float32", "float32", "float16"]),
}


@cases("name", CAST_INSIDE)
def test_the_inner_marker_says_which_products_are_cast(name):
    mark, expected = CAST_INSIDE[name]
    assert products(jaxscale.autocast(multiply_twice(mark)), X) == expected


class Attention(nnx.Module):
    def __init__(self):
        self.dense = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
        self.calls = nnx.BatchStat(jnp.zeros(()))
        self.dtypes = []

    def __call__(self, x):
        self.calls[...] = self.calls[...] + 1
        check(x, self.dense.kernel[...])
        return self.dense(x)


CALLS = {
    "module": lambda module, x: half(module)(x),
    "method": lambda module, x: half(module.__call__)(x),
    "argument": lambda module, x: half(lambda m, x: m(x))(module, x=x),
    "in full": lambda module, x: full(half(module))(x),
}


@pytest.mark.worlds
@cases("name", CALLS)
def test_a_module_of_nnx_is_an_argument_and_keeps_its_parameters(name):
    module = Attention()
    before = nnx.state(module, nnx.Param)

    def loss(module):
        return jnp.mean(CALLS[name](module, X @ W[0]))

    value, gradient = nnx.value_and_grad(jaxscale.autocast(loss))(module)
    assert value.dtype == jnp.float32
    assert {x.dtype for x in jax.tree.leaves(gradient)} == {jnp.dtype("float32")}
    assert_same_bits(nnx.state(module, nnx.Param), before)
    assert module.calls[...] == 1


ATTENTIONS = ("cudnn", "xla", None)


def allow_cudnn(monkeypatch):
    """Lets JAX trace the attention of cuDNN where there is none."""
    from jax._src.cudnn import fused_attention_stablehlo as attention

    monkeypatch.setattr(attention, "check_cudnn_version", lambda: 91_000)
    monkeypatch.setattr(attention, "check_compute_capability", lambda _: True)
    monkeypatch.setattr(attention, "check_is_flash_attention", lambda *_, **__: None)


def attend(mark, implementation):
    attention = mark(jax.nn.dot_product_attention)

    def loss(x):
        heads = jnp.reshape(x @ W[0], (1, 4, 1, 8))
        return jnp.sum(
            attention(
                heads, heads, heads, is_causal=True, implementation=implementation
            )
        )

    return loss


@cases("dtype", HALF)
@cases("implementation", ATTENTIONS)
def test_attention_of_jax_is_traced_in_half_precision(
    implementation, dtype, monkeypatch
):
    allow_cudnn(monkeypatch)
    cast = jaxscale.autocast(attend(half, implementation), dtype)
    (gradient,) = jax.make_jaxpr(jax.grad(cast))(X).out_avals
    assert gradient.dtype == jnp.float32
    if implementation != "cudnn":
        # JAX's attention asks for its scores in float32
        assert set(products(cast, X)) == {dtype}
        assert set(results_of_products(cast, X)) == {dtype, "float32"}


# Notes in errors.


def unmarked(x):
    return plain_kernel(x, x)


def asserts_a_dtype(x):
    assert x.dtype == jnp.bfloat16
    return x


def looks_a_dtype_up(x):
    return {jnp.dtype("float16"): 1}[x.dtype]


def wants_float32(x):
    raise TypeError(f"must be float32, got {x.dtype}")


def refuses_a_shape(x):
    raise ValueError(f"the length of {jax.typeof(x)} is no multiple of 128")


def is_not_found(x):
    raise KeyError("bias")


def shapes_differ(x):
    return x @ x


def is_true(x):
    return 1 if x > 0 else 2


def carries_another_type(x):
    return jax.lax.scan(lambda c, _: (c[0], None), x, length=2)


NOTED = [unmarked, asserts_a_dtype, looks_a_dtype_up, jaxscale.autocast(unmarked)]
NOTED += [jax.jit(unmarked), lambda x: half(lambda x: x)(x) + unmarked(x)]
NOT_NOTED = [refuses_a_shape, is_not_found, shapes_differ, is_true, half(wants_float32)]
NOT_NOTED += [carries_another_type, lambda _: jaxscale.autocast(None)]


ERRORS = (AssertionError, LookupError, NotImplementedError, TypeError, ValueError)


def notes_of(fun):
    with pytest.raises(ERRORS) as info:
        jaxscale.autocast(fun)(X)
    notes = getattr(info.value, "__notes__", [])
    return [note for note in notes if "half_precision" in note]


@cases("fun", NOTED)
def test_an_error_that_names_a_precision_gets_one_note(fun):
    assert len(notes_of(fun)) == 1


@cases("fun", NOT_NOTED)
def test_an_error_of_another_kind_keeps_its_message(fun):
    assert notes_of(fun) == []


def test_the_error_of_attention_names_the_way_out(monkeypatch):
    allow_cudnn(monkeypatch)
    assert len(notes_of(attend(functools.partial, "cudnn"))) == 1
