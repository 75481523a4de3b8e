"""What `autocast` leaves alone, what it makes of parts of programs, and what bad input says."""

import functools
import gc
import inspect
import re

import jax
import jax.custom_batching
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from half_programs import PROGRAMS, W, X, equations, primitives, products
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas
from tables import assert_same_bits, cases
from training import x64

import jaxscale
from jaxscale._autocast import table
from jaxscale._autocast.api import _autocast

pytestmark = pytest.mark.standard_promotion


UNTOUCHED = {
    "int32": lambda x: jax.lax.scan(lambda c, x: (c @ c + x, c), x, jnp.stack([x, x])),
    "float64": lambda x: jnp.sin(jnp.linalg.inv(x @ x + jnp.eye(3, dtype=x.dtype)) / 2.0),
    "complex64": lambda x: jnp.abs(x @ x.conj().T) + jnp.fft.fft(x).real.astype("float32"),
    "float16": lambda x: jax.nn.softmax(x @ x) @ x,
    "bfloat16": lambda x: jnp.einsum("ij,kj->ik", x, x, preferred_element_type=jnp.float32),
}


@cases("dtype", UNTOUCHED, fast=["complex64", "bfloat16"])
def test_other_dtypes_are_untouched(dtype):
    fun = UNTOUCHED[dtype]
    assert jaxscale.autocast(fun, dtype=jnp.float32) is fun
    with x64():
        x = jnp.asarray(np.arange(9).reshape(3, 3), dtype)
        assert str(jax.make_jaxpr(jaxscale.autocast(fun))(x)) == str(jax.make_jaxpr(fun)(x))
        assert_same_bits(jaxscale.autocast(fun)(x), fun(x))


def repeated(step, times):
    return functools.partial(functools.reduce, step, range(times))


def residual(x, _):
    y = jax.nn.softmax(x) @ W[0] + W[0, 0]
    return x + jax.nn.relu(y) @ W[1] + W[0, 1]


def many_readers(x):
    return sum(jnp.sum(jnp.sin(x) ** i) for i in range(100))


# Programs, and how many times as long they become, without a recursion.
GROWN = {
    "long": (repeated(lambda x, i: jnp.exp(-x) if i % 2 else jnp.negative(-x), 2000), 5),
    "long chain": (repeated(lambda x, _: jnp.exp(x) - jnp.sum(x), 200), 5),
    "many readers": (lambda x: many_readers(repeated(lambda x, _: jnp.exp(x), 20)(x)), 5),
    "residual layers": (repeated(residual, 6), 1.5),
}


@cases("name", GROWN)
def test_chains_do_not_make_the_program_grow(name):
    after, most = GROWN[name]
    cast = jaxscale.autocast(lambda x: after(x @ W[0]))
    assert len(primitives(cast, X)) <= most * len(primitives(lambda x: after(x @ W[0]), X))


def test_chains_have_a_barrier_where_the_backward_pass_is_part_of_the_same_program():
    def layer(x, w):
        return jax.nn.softmax(x @ w), None

    scanned = functools.partial(jax.lax.scan, layer)
    for fun, ws, has_barrier in ((scanned, W, False), (layer, W[0], True)):
        eqns = equations(jax.make_jaxpr(jaxscale.autocast(fun))(X, ws))
        assert {e.params.get("prevent_cse") for e in eqns} - {None} == {has_barrier}


def test_a_function_that_is_called_often_is_rewritten_once():
    layer = jax.jit(lambda x, w: jax.nn.relu(x @ w))

    def called():
        fun = jaxscale.autocast(lambda x: layer(layer(layer(x, W[0]), W[1]), W[2]))
        eqns = jax.make_jaxpr(fun)(X).eqns
        return [e.params["jaxpr"] for e in eqns if e.params.get("name") == "<lambda>"]

    first = called()
    # The first call takes an argument in float32, the others what the first returns.
    assert [program is first[1] for program in first] == [False, True, True]
    assert [program is other for program, other in zip(called(), first, strict=True)] == [True] * 3


def test_each_parameter_is_cast_once():
    cast = jaxscale.autocast(lambda w, x: sum((x + i) @ w for i in range(4)))
    eqns = jax.make_jaxpr(cast)(W[0], X).eqns
    casts = [e for e in eqns if e.primitive.name == "convert_element_type"]
    assert sum(e.invars[0].aval.shape == (8, 8) for e in casts) == 1


def test_full_precision_leaves_a_part_as_it_is_written():
    part = jaxscale.full_precision(lambda x, w, *, times: (x @ w) * times)
    assert (part(X, W[0], times=2) == X @ W[0] * 2).all()

    def fun(w, x):
        return jnp.mean(part(x @ w[0], w[1], times=3) @ w[2])

    cast = jaxscale.autocast(fun)
    assert products(cast, W, X) == [{"float16"}, {"float32"}, {"float16"}]
    assert products(jaxscale.autocast(cast), W, X) == products(cast, W, X)
    batched = functools.partial(jax.vmap, in_axes=(None, 0))
    for around, x, number in ((jax.grad, X, 3), (batched, X[None], 1), (jax.jit, X, 1)):
        kinds = products(jaxscale.autocast(around(fun)), W, x)
        assert kinds.count({"float32"}) == number
        assert len(kinds) == len(products(around(fun), W, x))


def test_what_is_not_an_array_reaches_the_function_as_it_is():
    def fun(x, *, number, text, array, function, none=None):
        assert type(number) is int
        assert (text, none) == ("text", None)
        assert isinstance(array, np.ndarray)
        return function(x @ x) * number if number > 2 else x

    cast = jaxscale.autocast(fun)
    arguments = {"number": 3, "text": "text", "array": np.ones(2), "function": jnp.tanh}
    np.testing.assert_allclose(cast(W[0], **arguments), fun(W[0], **arguments), atol=5e-3)
    assert inspect.signature(cast) == inspect.signature(fun)
    assert cast.__name__ == "fun"


@pytest.mark.slow
def test_it_composes_with_transformations():
    def plain(x):
        return PROGRAMS["mlp"][0]({"w": W, "b": jnp.zeros(8)}, x)[0]

    cast, xs = jaxscale.autocast(plain), jnp.stack([X, X + 1])
    gradient, batch = jax.grad(plain)(X), jax.vmap(plain)(xs)
    for actual, expected in {
        "vmap": (jax.vmap(cast)(xs), batch),
        "of a vmap": (jaxscale.autocast(jax.vmap(plain))(xs), batch),
        "map": (jax.lax.map(cast, xs), batch),
        "jvp": (jax.jvp(cast, (X,), (X,)), jax.jvp(plain, (X,), (X,))),
        "hessian": (jax.hessian(cast)(X), jax.hessian(plain)(X)),
        "of a gradient": (jaxscale.autocast(jax.grad(plain))(X), gradient),
        "remat": (jax.grad(jax.checkpoint(cast))(X), gradient),
        "closed over": (jax.grad(lambda x: jaxscale.autocast(lambda: plain(x))())(X), gradient),
        "value_and_grad": (jaxscale.grad(cast, jaxscale.DynamicLossScale().init())(X), gradient),
    }.values():
        np.testing.assert_allclose(actual, expected, rtol=0.02, atol=2e-3)


def kernel(w, x):
    def multiply(x_ref, y_ref, out_ref):
        out_ref[...] = x_ref[...] @ y_ref[...]

    return pallas.pallas_call(multiply, out_shape=jax.typeof(w), interpret=True)(w @ x, x) @ x


def solver(w, x):
    return jax.lax.custom_linear_solve(
        lambda v: w @ v + 3 * v, x.T @ x @ jnp.ones(8), lambda _, b: b / 3
    )


@cases("fun", [kernel, solver])
def test_kernels_run_as_they_are_written_and_linear_solvers_in_float32(fun):
    kinds = products(jaxscale.autocast(fun), W[0], W[1])  # without a warning
    assert sorted(map(str, kinds)) == ["{'float16'}", "{'float16'}", "{'float32'}"]
    result, expected = jaxscale.autocast(fun)(W[0], W[1]), fun(W[0], W[1])
    np.testing.assert_allclose(result, expected, rtol=0.02, atol=0.01)


def test_a_primitive_without_a_rule_is_named_once_and_runs_as_written():
    batched_by_hand = jax.custom_batching.custom_vmap(lambda w, x: x @ w)
    batched_by_hand.def_vmap(lambda *_: None)  # which it needs, and is not used

    def fun(w, x):
        return batched_by_hand(w, x) + batched_by_hand(w, 2 * x)

    with pytest.warns(UserWarning, match="`custom_vmap_call` run as they are written") as found:
        result = jaxscale.autocast(fun)(W[0], X)
    assert len(found) == 1
    np.testing.assert_allclose(result, fun(W[0], X), rtol=0.01, atol=0.01)
    with pytest.raises(UserWarning, match="full_precision"):  # as an error, and once more
        jaxscale.autocast(fun)(W[0], X)
    jaxscale.autocast(jaxscale.full_precision(batched_by_hand))(W[0], X)


@pytest.mark.skipif(not hasattr(jax, "new_ref"), reason="this version of JAX has no refs")
def test_refs_are_read_and_written():
    def fun(ref, w, x):
        ref[...] = ref[...] + x @ w
        return ref[...] @ w

    refs = [jax.new_ref(jnp.zeros((4, 8))) for _ in range(2)]
    result = jaxscale.autocast(fun)(refs[0], W[0], X)
    np.testing.assert_allclose(result, fun(refs[1], W[0], X), atol=0.01)
    np.testing.assert_allclose(refs[0][...], refs[1][...], atol=0.01)
    assert refs[0][...].dtype == jnp.float32


NAMED = r"`autocast\(dtype\)` must be float16 or bfloat16, or"
FIRST = r"Pass the function first.*functools\.partial"
BAD_INPUT = {
    f"dtype={dtype}": (lambda dtype=dtype: jaxscale.autocast(jnp.tanh, dtype=dtype), NAMED)
    for dtype in ["float64", "float8_e4m3fn", "half a dozen", None]
} | {
    "a type first": (lambda: jaxscale.autocast(jnp.bfloat16), FIRST),
    "text first": (lambda: jaxscale.autocast("float16"), FIRST),
    "autocast": (lambda: jaxscale.autocast(X), r"`autocast\(fun\)` must .*, got ArrayImpl"),
    "full": (lambda: jaxscale.full_precision(X), r"`full_precision\(fun\)` must .*, got ArrayImpl"),
}


@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_input_is_named(name):
    call, message = BAD_INPUT[name]
    with pytest.raises(ValueError if "=" in name else TypeError, match=message):
        call()


def test_help_shows_the_table():
    shown = re.findall(r"[\w-]+", inspect.getdoc(jaxscale.autocast))
    assert set(shown) >= table.PRODUCTS | table.FLOAT32
    tables = [table.PRODUCTS, table.FLOAT32, table.ELEMENTWISE, table.MOVES, table.CHOICES]
    assert len(frozenset().union(*tables)) == sum(map(len, tables))  # none is in two of them


def test_gradients_of_a_product_of_activations_are_read_together():
    x, y = jnp.ones((2, 3, 4)), jnp.ones((2, 4, 8))
    cast = jaxscale.autocast(lambda x, y: jnp.sum(jnp.einsum("bij,bjk->bik", x, y) @ W[0]))
    # Not those of a parameter. The gradient of a constant is computed for nobody.
    for argnums, shapes, dots in (((0, 1), [[x.shape, y.shape]], 5), (0, [], 4), (1, [], 4)):
        eqns = list(equations(jax.make_jaxpr(jax.grad(cast, argnums))(x, y)))
        barriers = [e for e in eqns if e.primitive.name == "optimization_barrier"]
        assert [[v.aval.shape for v in e.invars] for e in barriers] == shapes
        assert sum(e.primitive.name in table.PRODUCTS for e in eqns) == dots


@cases("policy", ["save_only_these_names", "save_any_names_but_these"])
def test_a_remat_keeps_what_its_policy_says_in_half_precision(policy):
    def residuals(fun):
        kept = jax.eval_shape(lambda w: jax.vjp(fun, w)[1], W[0])
        return sorted(str(leaf.dtype) for leaf in jax.tree.leaves(kept) if leaf.shape == (3, 8))

    kept, other = (functools.partial(checkpoint_name, name=name) for name in ("kept", "other"))
    for layer in (
        lambda w: jnp.abs(other(jnp.abs(kept(X[:3] @ w)))),
        lambda w: jnp.sin(kept(jnp.exp(X[:3] @ w))),
    ):
        layer = jax.checkpoint(layer, policy=getattr(jax.checkpoint_policies, policy)("kept"))
        assert residuals(jaxscale.autocast(layer)) == ["float16"] * len(residuals(layer))


@cases("name", ["attention", "activations", "custom_jvp", "custom_vjp"], fast=["custom_vjp"])
def test_nothing_leaks(name):
    fun, args = PROGRAMS[name]
    with jax.checking_leaks():
        jax.jit(jax.grad(lambda *args: jaxscale.autocast(fun)(*args)[0]))(*args)


@pytest.mark.slow  # what clears the caches makes all others compile anew
def test_what_is_rewritten_is_forgotten_with_its_program():
    def once(n):
        layer = jax.jit(lambda x, w: jax.nn.relu(x @ w) + n)
        jaxscale.autocast(lambda x: jax.lax.scan(lambda c, w: (layer(c, w), None), x, W)[0])(X)

    def remembered_after(numbers):
        for n in numbers:
            once(n)
        jax.clear_caches()
        gc.collect()
        return len(_autocast("float16", False).rewritten)

    assert remembered_after([0]) >= remembered_after(range(5))


def test_symbolic_shapes():
    def fun(x):
        return jax.nn.softmax(x @ W[0] + W[0, 0][None])

    shape = jax.ShapeDtypeStruct(jax.export.symbolic_shape("n, 8"), jnp.float32)
    exported = jax.export.export(jax.jit(jaxscale.autocast(fun)))(shape)
    np.testing.assert_allclose(exported.call(X), fun(X), atol=2e-3)
