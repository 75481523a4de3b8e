"""What `autocast` leaves alone, what stays in float32, and what bad input says."""

import functools
import gc
import inspect
import re
import warnings

import jax
import jax.custom_batching
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from half_programs import PROGRAMS, W, X, dtypes, equations
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas
from tables import rows

import jaxscale
from jaxscale._autocast import table
from jaxscale._autocast.api import _autocast

pytestmark = pytest.mark.standard_promotion


def names(fun, *args):
    """The primitives of a function with the dtypes that each takes and returns."""
    return [(e.primitive.name, dtypes(e)) for e in equations(jax.make_jaxpr(fun)(*args))]


def products(fun, *args):
    return [kinds for name, kinds in names(fun, *args) if name in table.PRODUCTS]


@pytest.mark.parametrize("name", rows(PROGRAMS, []))
def test_with_float32_it_is_the_function_itself(name):
    fun, _ = PROGRAMS[name]
    assert jaxscale.autocast(fun, dtype=jnp.float32) is fun


UNTOUCHED = {
    "int32": lambda x: jax.lax.scan(lambda c, x: (c @ c + x, c), x, jnp.stack([x, x])),
    "float64": lambda x: jnp.sin(jnp.linalg.inv(x @ x + jnp.eye(3, dtype=x.dtype)) / 2.0),
    "complex64": lambda x: jnp.abs(x @ x.conj().T) + jnp.fft.fft(x).real.astype("float32"),
    "float16": lambda x: jax.nn.softmax(x @ x) @ x,
    "bfloat16": lambda x: jnp.einsum("ij,kj->ik", x, x, preferred_element_type=jnp.float32),
}


@pytest.mark.parametrize("dtype", UNTOUCHED)
def test_other_dtypes_are_untouched(dtype):
    fun = UNTOUCHED[dtype]
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        x = jnp.asarray(np.arange(9).reshape(3, 3), dtype)
        plain = jax.make_jaxpr(fun)(x)
        assert str(jax.make_jaxpr(jaxscale.autocast(fun))(x)) == str(plain)
        for a, b in zip(
            jax.tree.leaves(jaxscale.autocast(fun)(x)), jax.tree.leaves(fun(x)), strict=True
        ):
            assert a.dtype == b.dtype
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


BIG = jnp.full((4, 4), 100.0)  # their product is 40000, of which float16 holds no square
LARGE = {
    "square": lambda x: jnp.sum(jnp.square(x @ x)),
    "x * x": lambda x: (lambda y: jnp.sum(y * y))(x @ x),
    "power": lambda x: jnp.sum((x @ x) ** 3),
    "sum": lambda x: jnp.sum(x @ x),
    "norm": lambda x: jnp.linalg.norm(x @ x),
    "exp": lambda x: jnp.sum(jnp.exp((x @ x) / 1000.0)),
    "quotient": lambda x: jnp.sum((x @ x) / 1e-3),
    "cumulative sum": lambda x: jnp.cumsum(x @ x)[-1],
    "through a call": lambda x: jnp.sum(jax.jit(jnp.exp)((x @ x) / 1000.0)),
    "through a scan": lambda x: jax.lax.scan(lambda c, y: (c + y, y**2), x[0], x @ x)[1].sum(),
    "variance": lambda x: jnp.var((x @ x) * jnp.arange(4.0)[None] / 4.0),
    "scatter": lambda x: jnp.zeros(2).at[jnp.zeros(16, int)].add((x @ x).ravel())[0],
    "convolution": lambda x: jnp.sum(jnp.convolve(x[0], x[1], "same") ** 2),
}


@pytest.mark.parametrize("name", rows(LARGE, ["x * x", "norm"]))
def test_what_float16_does_not_hold_stays_in_float32(name):
    np.testing.assert_allclose(jaxscale.autocast(LARGE[name])(BIG), LARGE[name](BIG), rtol=2e-3)


CONSTANTS = {
    # The first two do not fit into float16; the others do.
    "mask": (lambda x: jax.nn.softmax(jnp.where(jnp.eye(8, dtype=bool), x @ x, -1e9)), "float32"),
    "epsilon": (lambda x: 1 / ((x - x) @ x + 1e-8), "float32"),
    "half": (lambda x: jnp.abs(x @ x) * 0.5, "float16"),
    "infinity": (lambda x: jnp.where(jnp.eye(8, dtype=bool), x @ x, -jnp.inf), "float16"),
    "array": (lambda x: jnp.maximum(x @ x, jnp.full((8, 8), 2.0)), "float16"),
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_a_constant_that_float16_does_not_hold_makes_it_float32(name):
    fun, dtype = CONSTANTS[name]
    x = X[:1].T @ X[:1]
    result = jaxscale.autocast(fun)(x)
    np.testing.assert_allclose(result, fun(x), rtol=5e-3, atol=5e-3)
    eqns = list(equations(jax.make_jaxpr(jaxscale.autocast(fun))(x)))
    last = [e for e in eqns if e.primitive.name in ("add", "mul", "select_n", "max")]
    assert {dtype} in [dtypes(eqn) for eqn in last]


def test_a_difference_before_an_exponential_is_not_rounded():
    found = names(jaxscale.autocast(lambda x: jax.nn.softmax(x @ x)), W[0])
    differences = [kinds for name, kinds in found if name == "sub"]
    assert differences
    assert all(kinds == {"float32"} for kinds in differences)


@pytest.mark.parametrize("size", [1000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_long_programs_do_not_recurse(size):
    def long(x):
        y = x @ x
        for i in range(size // 2):
            y = jax.lax.exp(jax.lax.neg(y)) if i % 2 else jax.lax.neg(jax.lax.neg(y))
        return y

    jaxpr = jax.make_jaxpr(jaxscale.autocast(long))(jnp.ones((2, 2)))
    assert len(list(equations(jaxpr))) >= size


def test_reductions_between_chains_do_not_make_the_program_grow():
    def deep(x, size):
        y = x @ x
        for _ in range(size):
            y = jnp.exp(y) - jnp.sum(y)
        return y

    plain, cast = (
        len(list(equations(jax.make_jaxpr(lambda x, f=f: f(x, 200))(jnp.ones((2, 2))))))
        for f in (deep, jaxscale.autocast(deep))
    )
    assert cast <= 5 * plain


def test_chains_have_a_barrier_where_the_backward_pass_is_part_of_the_same_program():
    def layer(x, w):
        return jax.nn.softmax(x @ w), None

    def scanned(x, ws):
        return jax.lax.scan(layer, x, ws)[0]

    def unrolled(x, ws):
        return layer(layer(x, ws[0])[0], ws[1])[0]

    for fun, has_barrier in ((scanned, False), (unrolled, True)):
        jaxpr = jax.make_jaxpr(jaxscale.autocast(fun))(X, W[:2])
        found = {e.params.get("prevent_cse") for e in equations(jaxpr)} - {None}
        assert found == {has_barrier}


def test_a_function_that_is_called_often_is_rewritten_once():
    layer = jax.jit(lambda x, w: jax.nn.relu(x @ w))

    def fun(x):
        for w in W[:3]:
            x = layer(x, w)
        return x

    jaxpr = jax.make_jaxpr(jaxscale.autocast(fun))(X)
    calls = [e for e in jaxpr.eqns if e.primitive.name in ("jit", "pjit")]
    inner = [e.params["jaxpr"] for e in calls if e.params["name"] == "<lambda>"]
    # The first call takes an argument in float32, the others what the first returns.
    assert len(inner) == 3
    assert len(set(map(id, inner))) == 2
    again = jax.make_jaxpr(jaxscale.autocast(fun))(X)
    assert id(inner[0]) in [id(e.params.get("jaxpr")) for e in again.eqns]


def test_each_parameter_is_cast_once():
    def fun(w, x):
        return sum((x + i) @ w for i in range(4))

    eqns = jax.make_jaxpr(jaxscale.autocast(fun))(W[0], X).eqns
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
    def fun(x, *, number, text, array, flag, function, none=None):
        assert type(number) is int
        assert (text, flag, none) == ("text", True, None)
        assert isinstance(array, np.ndarray)
        return function(x @ x) * number if number > 2 else x

    cast = jaxscale.autocast(fun)
    arguments = {"number": 3, "text": "text", "array": np.ones(2), "flag": True}
    arguments["function"] = jnp.tanh
    np.testing.assert_allclose(cast(W[0], **arguments), fun(W[0], **arguments), atol=5e-3)
    jitted = jax.jit(cast, static_argnames=["text", "array", "flag", "function", "number", "none"])
    arguments["array"] = None
    with pytest.raises(AssertionError):
        jitted(W[0], **arguments)  # the one thing that differs
    assert inspect.signature(cast) == inspect.signature(fun)
    assert cast.__name__ == "fun"


def test_arguments_that_the_function_closes_over_are_differentiated():
    def loss(w):
        return jaxscale.autocast(lambda x: jnp.mean((x @ w) ** 2))(X)

    gradient = jax.grad(loss)(W[0])
    expected = jax.grad(lambda w: jnp.mean((X @ w) ** 2))(W[0])
    assert gradient.dtype == jnp.float32
    np.testing.assert_allclose(gradient, expected, atol=2e-3)


@pytest.mark.slow
def test_it_composes_with_transformations():
    fun = PROGRAMS["mlp"][0]
    loss = lambda f: lambda x: f({"w": W, "b": jnp.zeros(8)}, x)[0]  # noqa: E731
    plain, cast = loss(fun), loss(jaxscale.autocast(fun))
    stacked = jnp.stack([X, X + 1])
    close = functools.partial(np.testing.assert_allclose, rtol=0.02, atol=2e-3)
    close(jax.vmap(cast)(stacked), jax.vmap(plain)(stacked))
    close(jaxscale.autocast(jax.vmap(plain))(stacked), jax.vmap(plain)(stacked))
    close(jax.jvp(cast, (X,), (X,)), jax.jvp(plain, (X,), (X,)))
    close(jax.hessian(cast)(X), jax.hessian(plain)(X))
    close(jaxscale.autocast(jax.grad(plain))(X), jax.grad(plain)(X))
    close(jax.lax.map(cast, stacked), jax.vmap(plain)(stacked))
    close(jax.grad(jax.checkpoint(cast))(X), jax.grad(plain)(X))
    scaling = jaxscale.DynamicLossScale().init()
    value, gradient = jaxscale.value_and_grad(cast, scaling)(X)
    close(value, plain(X))
    close(gradient, jax.grad(plain)(X))


def test_kernels_run_as_they_are_written():
    def kernel(x_ref, y_ref, out_ref):
        out_ref[...] = x_ref[...] @ y_ref[...]

    def fun(w, x):
        shape = jax.ShapeDtypeStruct((8, 8), jnp.float32)
        call = pallas.pallas_call(kernel, out_shape=shape, interpret=True)
        return call(w @ x, x) @ x

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kinds = products(jaxscale.autocast(fun), W[0], W[1])
    assert sorted(map(str, kinds)) == ["{'float16'}", "{'float16'}", "{'float32'}"]
    np.testing.assert_allclose(
        jaxscale.autocast(fun)(W[0], W[1]), fun(W[0], W[1]), rtol=0.02, atol=0.01
    )


def solved(w, x):
    return jax.lax.custom_linear_solve(
        lambda v: w @ v + 3 * v, x.T @ x @ jnp.ones(8), lambda _, b: b / 3
    )


def test_linear_solvers_are_in_float32():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kinds = products(jaxscale.autocast(solved), W[0], X)
    assert sorted(map(str, kinds)) == ["{'float16'}", "{'float16'}", "{'float32'}"]


@jax.custom_batching.custom_vmap
def batched_by_hand(w, x):
    return x @ w


@batched_by_hand.def_vmap
def _(size, is_batched, w, x):
    return x @ w, True


def test_a_primitive_without_a_rule_is_named_once_and_runs_as_written():
    def fun(w, x):
        return batched_by_hand(w, x) + batched_by_hand(w, 2 * x)

    with pytest.warns(UserWarning, match="`custom_vmap_call` run as they are written") as found:
        result = jaxscale.autocast(fun)(W[0], X)
    assert len(found) == 1
    np.testing.assert_allclose(result, fun(W[0], X), rtol=0.01, atol=0.01)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="full_precision"):
            jaxscale.autocast(fun)(W[0], X)
        jaxscale.autocast(lambda w, x: jaxscale.full_precision(batched_by_hand)(w, x))(W[0], X)


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


BAD_DTYPES = ["float64", "int8", "float8_e4m3fn", "half a dozen", None, "complex64", 16]


@pytest.mark.parametrize("dtype", rows(BAD_DTYPES, ["float64", None]))
def test_bad_dtypes_are_named(dtype):
    with pytest.raises(ValueError, match=r"`autocast\(dtype\)` must be float16 or bfloat16, or"):
        jaxscale.autocast(jnp.tanh, dtype=dtype)


@pytest.mark.parametrize("fun", [jnp.bfloat16, jnp.dtype("float16"), "float16"])
def test_a_dtype_in_the_place_of_the_function_is_named(fun):
    with pytest.raises(TypeError, match=r"Pass the function first.*functools\.partial"):
        jaxscale.autocast(fun)


@pytest.mark.parametrize("name", ["autocast", "full_precision"])
def test_what_is_not_a_function_is_named(name):
    with pytest.raises(TypeError, match=rf"`{name}\(fun\)` must be a function, got ArrayImpl"):
        getattr(jaxscale, name)(X)


def test_help_shows_the_table():
    shown = re.findall(r"[\w-]+", inspect.getdoc(jaxscale.autocast))
    assert set(shown) >= table.PRODUCTS | table.FLOAT32
    tables = [table.PRODUCTS, table.FLOAT32, table.ELEMENTWISE, table.MOVES, table.CHOICES]
    assert len(frozenset().union(*tables)) == sum(map(len, tables))  # none is in two of them


def test_what_a_loop_carries_keeps_its_dtype_and_what_it_stacks_is_half():
    def fun(x, ws):
        return jax.lax.scan(lambda c, w: (c @ w, jnp.abs(c @ w)), x, ws)

    jaxpr = jax.make_jaxpr(jaxscale.autocast(fun))(X, W)
    (scan,) = [e for e in jaxpr.eqns if e.primitive.name == "scan"]
    assert [var.aval.dtype for var in scan.outvars] == [jnp.float32, jnp.float16]
    assert jaxpr.out_avals[1].dtype == jnp.float32


@pytest.mark.parametrize("policy", ["save_only_these_names", "save_any_names_but_these"])
def test_a_remat_keeps_what_its_policy_says_in_half_precision(policy):
    policy = getattr(jax.checkpoint_policies, policy)("kept")

    @functools.partial(jax.checkpoint, policy=policy)
    def layer(w, x):
        kept = checkpoint_name(x @ w, "kept")
        return jnp.abs(checkpoint_name(jnp.abs(kept), "other"))

    def residuals(fun):
        kept = jax.eval_shape(lambda w: jax.vjp(lambda w: fun(w, X[:3]), w)[1], W[0])
        return sorted(str(leaf.dtype) for leaf in jax.tree.leaves(kept) if leaf.shape == (3, 8))

    plain, cast = residuals(layer), residuals(jaxscale.autocast(layer))
    assert len(cast) == len(plain)
    # The input itself is kept as it came.
    assert set(cast) == {"float16", "float32"}
    assert cast.count("float32") == 1


def test_derivative_rules_decide_at_their_edge():
    cast = jaxscale.autocast(lambda w, x: jnp.sum(jax.nn.relu(x @ w)))
    assert (jax.grad(cast)(jnp.zeros((8, 8)), X) == 0).all()  # that of a maximum would be a half
    large = jaxscale.autocast(lambda w, x: jax.nn.logsumexp(x @ w) + jax.nn.softmax(x @ w)[0, 0])
    assert jnp.isfinite(large(jnp.eye(8) * 1000, X))
    assert jnp.isfinite(jax.grad(large)(jnp.eye(8) * 1000, X)).all()


@pytest.mark.parametrize("name", ["attention", "activations", "custom_jvp", "custom_vjp"])
def test_nothing_leaks(name):
    fun, args = PROGRAMS[name]
    with jax.checking_leaks():
        jax.jit(jax.grad(lambda *args: jaxscale.autocast(fun)(*args)[0]))(*args)


def test_what_is_rewritten_is_forgotten_with_its_program():
    def once(n):
        layer = jax.jit(lambda x, w: jax.nn.relu(x @ w) + n)
        jaxscale.autocast(lambda x: jax.lax.scan(lambda c, w: (layer(c, w), None), x, W)[0])(X)

    def remembered():
        gc.collect()
        return len(_autocast(jnp.dtype("float16")).rewritten)

    once(0)
    jax.clear_caches()
    before = remembered()
    for n in range(5):
        once(n)
    jax.clear_caches()
    assert remembered() <= before


LARGE_BIAS = jnp.linspace(1e5, 2e5, 8)  # more than float16 holds
FIRST_MASKED = jnp.where(jnp.arange(4) < 1, -1e9, 0.0)
WHOLLY_MASKED = jnp.broadcast_to(FIRST_MASKED[:, None], (4, 4))
ADDED = {
    "row": lambda b: X @ W[0] + b,
    "whole row": lambda b: X @ W[0] + jnp.broadcast_to(b, X.shape),
    "column": lambda b: b[:4, None] + X @ W[0],
    "vector": lambda b: b + W[0] @ X[0],
    "NumPy array": lambda b: X @ W[0] + np.asarray(LARGE_BIAS) + 0 * b,
    "two products": lambda b: X @ W[0] + b + X @ W[1],
    "slice": lambda b: jnp.split(X @ W[0] + b, 2, -1)[1][:, 0].T,
    "checkpoint name": lambda b: checkpoint_name(X @ W[0] + b, "name"),
    "concatenate": lambda b: jnp.concatenate([X @ W[0] + b, X]),
    "relu": lambda b: jax.nn.relu(X @ W[0] + b),
    "softplus": lambda b: jax.nn.softplus(X @ W[0] + b),
    "silu": lambda b: jax.nn.silu(X @ W[0] + b),
    "where": lambda b: jnp.where(X > 0, X @ W[0] + b, 0.0),
    "residual": lambda b: (lambda y: y + jnp.tanh(y) @ W[1])(X @ W[0] + b),
    "loss": lambda b: jnp.sqrt(jnp.mean((X @ W[0] + b) ** 2)),
    "jit": lambda b: jax.jit(lambda b: X @ W[0] + b)(b),
    "jit of a sum": lambda b: jax.jit(lambda y: jnp.max(y, 0) + 1)(X @ W[0] + b),
    "remat": lambda b: jax.checkpoint(lambda y: jnp.sin(y * 1e-5))(X @ W[0] + b),
    "scan": lambda b: jax.lax.scan(lambda c, x: (c, x @ W[0] + b), 0.0, X)[1],
    "apply": lambda b: (X @ W[0] + jax.lax.stop_gradient(b)).at[0].set(0.0),
}
MASKS = {
    "square": WHOLLY_MASKED,
    "keys": FIRST_MASKED[None, None, None],
    "queries": FIRST_MASKED[:, None],
    "all": jnp.full((4, 4), -1e9),
}


@pytest.mark.parametrize("name", ADDED)
def test_what_is_added_to_a_product_is_added_in_float32(name):
    fun, half = ADDED[name], jaxscale.autocast(ADDED[name])
    np.testing.assert_allclose(half(LARGE_BIAS), fun(LARGE_BIAS), rtol=1e-3, atol=1e-3)
    actual, expected = (jax.grad(lambda b, f=f: jnp.sum(f(b)))(LARGE_BIAS) for f in (half, fun))
    np.testing.assert_allclose(actual, expected, rtol=0.01, atol=1e-3)
    found = products(half, LARGE_BIAS)
    assert found
    assert all(kinds == {"float16"} for kinds in found)


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("normalize", [jax.nn.softmax, jax.nn.log_softmax])
def test_a_mask_that_is_added_is_no_bias(name, normalize):
    q = jnp.reshape(W[:2], (2, 4, 2, 8))

    def fun(q, mask):
        return normalize(jnp.einsum("bqhd,bkhd->bhqk", q, q) + mask)

    given = MASKS[name]
    for half in (
        jaxscale.autocast(fun),
        jaxscale.autocast(jax.checkpoint(fun)),
        lambda q, mask: jaxscale.autocast(lambda q: fun(q, np.asarray(mask)))(q),
    ):
        np.testing.assert_allclose(half(q, given), fun(q, given), rtol=0.01, atol=0.01)
        assert jnp.isfinite(jax.grad(lambda q, half=half: jnp.sum(half(q, given)))(q)).all()


def test_what_follows_a_sum_is_half_where_only_products_read_it():
    def fun(w, b, x):
        x = jax.nn.relu(x @ w + b)
        x = checkpoint_name(jnp.concatenate([x, -x]), "name")
        return jax.checkpoint(lambda x: jnp.max(x @ w + b, 0))(x[1:].T.T) @ w + b

    eqns = list(equations(jax.make_jaxpr(jaxscale.autocast(fun))(W[0], W[0, 0], X)))
    for name in ("max", "concatenate", "name", "slice", "transpose", "reduce_max"):
        found = [dtypes(e) for e in eqns if e.primitive.name == name]
        assert found, name
        # The largest is found in float32, for its derivative, and comes back.
        assert all(kinds == {"float32" if name == "reduce_max" else "float16"} for kinds in found)
    assert {"float32"} == set().union(*(dtypes(e) for e in eqns if e.primitive.name == "add"))


def test_programs_that_an_equation_holds_are_typed_in_float32():
    for fun in (
        lambda x: (x @ x).at[0].apply(jnp.tanh),
        lambda x: jax.lax.reduce(x @ x, 0.0, lambda a, b: a * b + a, (0,)),
        lambda x: jax.lax.reduce_window(x @ x, 1.0, lambda a, b: a - b, (2, 1), (1, 1), "SAME"),
    ):
        np.testing.assert_allclose(jaxscale.autocast(fun)(W[0]), fun(W[0]), atol=5e-3)


def test_the_gradient_of_a_bias_is_added_in_float32():
    # 4096 ones: float16 counts to 2048.
    fun = jaxscale.autocast(lambda b, x: jnp.sum(x @ jnp.ones((2, 1)) + b[None]))
    gradient = jax.grad(fun)(jnp.zeros(1), jnp.ones((4096, 2)))
    assert gradient == 4096
    moved = jaxscale.autocast(lambda w: jnp.sum(jnp.tile(w @ w, (4096, 1)) * 0.5))
    assert (jax.grad(moved)(jnp.eye(2)) == 4096).all()
    sums = [kinds for name, kinds in names(jax.grad(moved), jnp.eye(2)) if name == "reduce_sum"]
    assert sums
    assert all(kinds == {"float32"} for kinds in sums)


def test_symbolic_shapes():
    (size,) = jax.export.symbolic_shape("n")
    shape = jax.ShapeDtypeStruct((size, 8), jnp.float32)

    def fun(x):
        return jax.nn.softmax(x @ W[0] + W[0, 0][None])

    exported = jax.export.export(jax.jit(jaxscale.autocast(fun)))(shape)
    np.testing.assert_allclose(exported.call(X), fun(X), atol=2e-3)
