"""Laws of `autocast`, over tables of programs, and of parts of programs."""

import collections
import functools
import gc
import inspect
import itertools
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
from tables import assert_same_bits, avals, cases, warned
from training import x64

import jaxscale
from jaxscale._autocast import table
from jaxscale._autocast.api import _make_autocast

pytestmark = pytest.mark.standard_promotion

SUMS = {name for name in table.FLOAT32 if re.match("reduce_|cum|scatter|select_and|psum", name)}


def loss_of(fun):
    return lambda *args: fun(*args)[0]


def assert_near(a, b):
    # float16 has 11 bits: the error of a product is a few units of 2**-11 of its terms.
    a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
    np.testing.assert_allclose(a, b, rtol=0.02, atol=0.02 * np.abs(b).max() + 1e-6)


@cases("name", PROGRAMS, fast=["lstm", "remat_in_scan", "custom_vjp"])
def test_outputs_keep_their_types_and_come_close_and_twice_is_once(name):
    fun, args = PROGRAMS[name]
    once = jaxscale.autocast(loss_of(fun))
    twice = jaxscale.autocast(once)
    first, second = (
        sorted((op, *sorted(kinds)) for op, kinds in primitives(f, *args)) for f in (once, twice)
    )
    assert first == second
    assert once(*args) == twice(*args)
    expected, actual = fun(*args), jaxscale.autocast(fun)(*args)
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert type(a) is type(b)
        if isinstance(b, jax.Array):
            assert avals(a) == avals(b)
            assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
        if isinstance(b, jax.Array) and jnp.issubdtype(b.dtype, jnp.floating):
            assert_near(a, b)


@cases(
    "name, dtype",
    itertools.product(PROGRAMS, ["float16", "bfloat16"]),
    fast=[(name, "float16") for name in ("attention", "lstm", "remat_in_scan", "custom_vjp")],
)
def test_products_are_in_half_precision_and_nothing_that_needs_range_is(name, dtype):
    fun, args = PROGRAMS[name]
    half = jaxscale.autocast(fun, dtype=jnp.dtype(dtype))
    for differentiated in (loss_of, lambda fun: jax.grad(loss_of(fun))):
        # Forward all that is sensitive to range, and backward all sums.
        wide = table.FLOAT32 if differentiated is loss_of else SUMS
        cast = primitives(differentiated(half), *args)
        assert not [primitive for primitive, kinds in cast if primitive in wide and dtype in kinds]
        if name == "linear_algebra" and differentiated is not loss_of:
            continue  # the derivative of a Cholesky decomposition has products of its own
        kinds = products(differentiated(half), *args)
        assert len(kinds) >= len(products(differentiated(fun), *args)) > 0
        if name == "own_precision":
            assert {"bfloat16"} in kinds
            assert all(len(kind) == 1 for kind in kinds)
        else:
            assert [kind for kind in kinds if kind != {dtype}] == []


@cases("name", PROGRAMS, fast=["attention", "custom_vjp"])
def test_gradients_are_as_the_parameters_and_come_close_in_one_program(name):
    fun, args = PROGRAMS[name]
    step = jax.jit(jax.value_and_grad(loss_of(jaxscale.autocast(fun))))
    (loss, actual), (again, _) = step(*args), step(*args)
    assert loss == again
    assert step._cache_size() == 1
    expected = jax.jit(jax.grad(loss_of(fun)))(*args)
    assert avals(actual) == avals(expected)
    a, b = (np.concatenate([np.ravel(g) for g in jax.tree.leaves(t)]) for t in (actual, expected))
    assert np.dot(a, b) >= 0.999 * np.linalg.norm(a) * np.linalg.norm(b)
    np.testing.assert_allclose(np.linalg.norm(a), np.linalg.norm(b), rtol=0.02)


# What the next value of a carry is computed from, and its dtype with `half_carries`.
CARRIED = {
    "layer": (lambda x, w: x + jnp.tanh(x @ w), "float16"),
    "remat": (jax.checkpoint(jax.jit(lambda x, w: x + jnp.tanh(x @ w))), "float16"),
    "inner loop": (lambda x, w: jax.lax.scan(lambda x, _: (x @ w, 0), x, W[:2])[0], "float16"),
    "sum of products": (lambda x, w: x + X @ w, "float32"),
    "time": (jax.checkpoint(lambda x, w: jnp.where(jnp.sum(X @ w) > jnp.inf, 0, x)), "float32"),
    "full_precision": (lambda x, w: jaxscale.full_precision(jnp.add)(x, x @ w), "float32"),
}


@cases("name", CARRIED, fast=["remat", "full_precision"])
def test_half_carries_are_those_that_are_computed_from_a_product_of_themselves(name):
    after, dtype = CARRIED[name]

    def fun(x, ws):
        # It carries a token and a sum, too. What it stacks is in half precision in any case.
        def body(carry, w):
            x, token, total = carry
            token = jnp.argmax(token * X[0] @ w).astype("int32")
            return (after(x, w), token, total + jnp.sum(x @ w)), jnp.abs(x @ w)

        return jax.lax.scan(body, (x, 1, 0.0), ws)

    for half_carries, expected in ((False, "float32"), (True, dtype)):
        cast = jaxscale.autocast(fun, half_carries=half_carries)
        changes_nothing = half_carries and dtype == "float32"
        with warned("carries nothing in half precision in `fun`", is_due=changes_nothing):
            (scan,) = [e for e in jax.make_jaxpr(cast)(X, W).eqns if e.primitive.name == "scan"]
            types = [expected, "int32", "float32", "float16"]
            assert [var.aval.dtype for var in scan.outvars] == types
            for d in (lambda f: f, lambda f: jax.grad(lambda *args: jnp.sum(f(*args)[0][0]))):
                actual, plain = d(cast)(X, W), d(fun)(X, W)
                assert avals(actual) == avals(plain)
                jax.tree.map(assert_near, actual, plain)


BIG = jnp.full((4, 4), 100.0)  # their product is 40000, of which float16 holds no square
LARGE = {
    "x * x": lambda x: (lambda y: jnp.sum(y * y))(x @ x),
    "through a call": lambda x: jnp.sum(jax.jit(jnp.exp)((x @ x) / 1000.0)),
    "through a scan": lambda x: jax.lax.scan(lambda c, y: (c + y, y**2), x[0], x @ x)[1].sum(),
    # What a loop carries grows by less than 2**-12, of which float16 has none beside 1.
    "last read by a product": lambda x: (
        jax.lax.scan(lambda c, _: (c * jnp.exp(x @ x * 2.0**-28), None), x / 100.0, length=1024)[0]
        @ jnp.eye(4)
    ),
    "variance": lambda x: jnp.var((x @ x) * jnp.arange(4.0)[None] / 4.0),
    # Programs that an equation holds are typed in float32.
    "apply": lambda x: (x @ x).at[0].apply(jnp.square),
    "reduce": lambda x: jax.lax.reduce(x @ x, 0.0, lambda a, b: a * 1e-9 * b + a + b, (0,)),
}


@cases("name", LARGE, fast=["x * x", "last read by a product", "apply", "reduce"])
def test_what_float16_does_not_hold_stays_in_float32(name):
    np.testing.assert_allclose(jaxscale.autocast(LARGE[name])(BIG), LARGE[name](BIG), rtol=1e-3)


CONSTANTS = {
    # The first two do not fit into float16; the others do.
    "mask": (lambda x: jax.nn.softmax(jnp.where(jnp.eye(8, dtype=bool), x @ x, -1e9)), "float32"),
    "epsilon": (lambda x: 1 / ((x - x) @ x + 1e-8), "float32"),
    "half": (lambda x: jnp.abs(x @ x) * 0.5, "float16"),
    "infinity": (lambda x: jnp.where(jnp.eye(8, dtype=bool), x @ x, -jnp.inf), "float16"),
    "array": (lambda x: jnp.maximum(x @ x, jnp.full((8, 8), 2.0)), "float16"),
}


@cases("name", CONSTANTS, fast=["mask", "half"])
def test_a_constant_that_float16_does_not_hold_makes_it_float32(name):
    fun, dtype = CONSTANTS[name]
    x = X[:1].T @ X[:1]
    result = jaxscale.autocast(fun)(x)
    np.testing.assert_allclose(result, fun(x), rtol=5e-3, atol=5e-3)
    found = primitives(jaxscale.autocast(fun), x)
    assert {dtype} in [kinds for op, kinds in found if op in ("add", "mul", "select_n", "max")]


def test_a_difference_before_an_exponential_or_a_power_is_not_rounded():
    fun = jaxscale.autocast(lambda x: jnp.exp(x @ x - x @ x.T) + (x @ x.T - x @ x) ** 2)
    assert [kinds for op, kinds in primitives(fun, W[0]) if op == "sub"] == [{"float32"}] * 2


def test_derivative_rules_decide_at_their_edge():
    cast = jaxscale.autocast(lambda w: jnp.sum(jax.nn.relu(X @ w)))
    # That of a maximum would be a half.
    assert not jax.jit(jax.grad(cast))(jnp.zeros((8, 8))).any()
    large = jaxscale.autocast(lambda w: jax.nn.logsumexp(X @ w) + jax.nn.softmax(X @ w)[0, 0])
    assert jaxscale.all_finite(jax.jit(jax.value_and_grad(large))(jnp.eye(8) * 1000))


TINY = jnp.array([2.0**-30, 2.0**-20, 0.0, -1.0, jnp.inf])
straight_through = jax.custom_jvp(lambda x: jax.nn.relu(x))
straight_through.defjvp(lambda x, dx: (straight_through(*x), dx[0]))
DECIDED = {
    "a product reads it": (jax.nn.relu, 1.0, [0, 1, 0, 0, 1]),
    "no product reads it": (jax.nn.relu, None, [1, 1, 0, 0, 1]),
    "a rule of its own": (straight_through, 1.0, [1, 1, 1, 1, 1]),
}


@pytest.mark.filterwarnings("ignore:`autocast` changes nothing")
@cases("name", DECIDED)
def test_a_relu_is_decided_by_what_a_product_reads_of_it(name):
    fun, weight, expected = DECIDED[name]

    def loss(x):
        y = fun(x)
        return jnp.sum(y), y if weight is None else y @ jnp.full((5, 2), weight)

    cast = jaxscale.autocast(loss)
    np.testing.assert_array_equal(jax.grad(cast, has_aux=True)(TINY)[0], expected)
    assert cast(TINY[:4].repeat(2)[:5])[0] == 2.0**-29 + 2.0**-19


LARGE_BIAS = jnp.linspace(1e5, 2e5, 8)  # more than float16 holds
FIRST_MASKED = jnp.where(jnp.arange(4) < 1, -1e9, 0.0)
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
    "residual": lambda b: (lambda y: y + jnp.tanh(y) @ W[1])(X @ W[0] + b),
    "jit": lambda b: jax.jit(lambda b: X @ W[0] + b)(b),
    "jit of a sum": lambda b: jax.jit(lambda y: jnp.max(y, 0) + 1)(X @ W[0] + b),
    "remat": lambda b: jax.checkpoint(lambda y: jnp.sin(y * 1e-5))(X @ W[0] + b),
    "scan": lambda b: jax.lax.scan(lambda c, x: (c, x @ W[0] + b), 0.0, X)[1],
    "apply": lambda b: (X @ W[0] + jax.lax.stop_gradient(b)).at[0].set(0.0),
}
MASKS = {
    "square": jnp.broadcast_to(FIRST_MASKED[:, None], (4, 4)),
    "keys": FIRST_MASKED[None, None, None],
    "queries": FIRST_MASKED[:, None],
    "all": jnp.full((4, 4), -1e9),
}


@cases("name", ADDED, fast=["whole row", "residual", "jit of a sum", "scan"])
def test_what_is_added_to_a_product_is_added_in_float32(name):
    fun, half = ADDED[name], jaxscale.autocast(ADDED[name])
    np.testing.assert_allclose(half(LARGE_BIAS), fun(LARGE_BIAS), rtol=1e-3, atol=1e-3)
    actual, expected = (jax.grad(lambda b, f=f: jnp.sum(f(b)))(LARGE_BIAS) for f in (half, fun))
    np.testing.assert_allclose(actual, expected, rtol=0.01, atol=1e-3)
    assert set(map(frozenset, products(half, LARGE_BIAS))) == {frozenset({"float16"})}


@cases("name", MASKS, fast=["keys"])
def test_a_mask_that_is_added_is_no_bias(name):
    def fun(q, mask):
        return jax.nn.log_softmax(jnp.einsum("bqhd,bkhd->bhqk", q, q) + mask)

    q, given = jnp.reshape(W[:2], (2, 4, 2, 8)), MASKS[name]
    for half in (
        jaxscale.autocast(fun),
        jaxscale.autocast(jax.checkpoint(fun)),
        lambda q, mask: jaxscale.autocast(lambda q: fun(q, np.asarray(mask)))(q),
    ):
        np.testing.assert_allclose(half(q, given), fun(q, given), rtol=0.01, atol=0.01)
        gradient = jax.jit(jax.grad(lambda q, half=half: jnp.sum(half(q, given))))(q)
        assert jnp.isfinite(gradient).all()


def test_what_follows_a_sum_is_half_where_only_products_read_it():
    def fun(w, b, x):
        x = jax.nn.relu(x @ w + b)
        x = checkpoint_name(jnp.concatenate([x, -x]), "name")
        return jax.checkpoint(lambda x: jnp.max(x @ w + b, 0))(x[1:].T.T) @ w + b

    found = collections.defaultdict(set)
    for name, kinds in primitives(jaxscale.autocast(fun), W[0], W[0, 0], X):
        found[name] |= kinds
    # The largest is found in float32, for its derivative, and comes back.
    assert found["add"] == found["reduce_max"] == {"float32"}
    for name in ("max", "concatenate", "name", "slice", "transpose"):
        assert found[name] == {"float16"}


def test_gradients_from_several_chains_are_added_in_float32():
    def fun(x):
        y = x @ jnp.eye(2)
        return jnp.sum(1000 * jnp.exp(y)) - jnp.sum(1000.5 * jnp.exp(y))

    gradient = jax.jit(jax.grad(jaxscale.autocast(fun)))(jnp.ones((2, 2)))
    np.testing.assert_allclose(gradient, -0.5 * np.e, rtol=2e-3)  # the spacing of halves: 2


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
        # Half precision is what one wants, and integers have none.
        with warned(f"its products are in .*{dtype}", is_due=dtype in ("float64", "complex64")):
            assert str(jax.make_jaxpr(jaxscale.autocast(fun))(x)) == str(jax.make_jaxpr(fun)(x))
        with warned("changes nothing", is_due=dtype in ("float64", "complex64")):
            assert_same_bits(jaxscale.autocast(fun)(x), fun(x))


def repeated(step, times):
    return functools.partial(functools.reduce, step, range(times))


def many_readers(x):
    x = repeated(lambda x, _: jnp.exp(x), 20)(x)
    return sum(jnp.sum(jnp.sin(x) ** i) for i in range(100))


def residual_layer(x, _):
    return x + jax.nn.relu(jax.nn.softmax(x) @ W[0] + W[0, 0]) @ W[1] + W[0, 1]


# Programs, and how many times as long they become, without a recursion.
GROWN = {
    "long": (repeated(lambda x, i: jnp.exp(-x) if i % 2 else jnp.negative(-x), 2000), 5),
    "long chain": (repeated(lambda x, _: jnp.exp(x) - jnp.sum(x), 200), 5),
    "many readers": (many_readers, 5),
    "residual layers": (repeated(residual_layer, 6), 1.5),
}


@cases("name", GROWN)
def test_chains_do_not_make_the_program_grow(name):
    after, most = GROWN[name]
    cast = jaxscale.autocast(lambda x: after(x @ W[0]))
    assert len(primitives(cast, X)) <= most * len(primitives(lambda x: after(x @ W[0]), X))


def test_chains_have_a_barrier_where_the_backward_pass_is_part_of_the_same_program():
    def layer(x, w):
        return jax.nn.softmax(x @ w), None

    for fun, ws in ((functools.partial(jax.lax.scan, layer), W), (layer, W[0])):
        eqns = equations(jax.make_jaxpr(jaxscale.autocast(fun))(X, ws))
        params = [getattr(e.params.get("_prim"), "params", e.params) for e in eqns]
        assert {each.get("prevent_cse") for each in params} - {None} == {fun is layer}


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
    b = x.T @ x @ jnp.ones(8)
    return jax.lax.custom_linear_solve(lambda v: w @ v + 3 * v, b, lambda _, b: b / 3)


@cases("fun", [kernel, solver])
def test_kernels_run_as_they_are_written_and_linear_solvers_in_float32(fun):
    with warned("`pallas_call` run as they are written", is_due=fun is kernel):
        kinds = products(jaxscale.autocast(fun), W[0], W[1])
    marked = jaxscale.full_precision(fun)
    assert products(jaxscale.autocast(marked), W[0], W[1]) == products(fun, W[0], W[1])
    assert sorted(map(str, kinds)) == ["{'float16'}", "{'float16'}", "{'float32'}"]
    with warned("`pallas_call`", is_due=fun is kernel):
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
    def fun(ref):
        ref[...] = ref[...] + X @ W[0]
        return ref[...] @ W[0]

    ref, expected = (jax.new_ref(jnp.zeros((4, 8))) for _ in range(2))
    np.testing.assert_allclose(jaxscale.autocast(fun)(ref), fun(expected), atol=0.01)
    np.testing.assert_allclose(ref[...], expected[...], atol=0.01)
    assert ref[...].dtype == jnp.float32


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
        kept = jax.eval_shape(lambda w: jax.vjp(lambda w: fun(w, X[:3]), w)[1], W[0])
        return sorted(str(leaf.dtype) for leaf in jax.tree.leaves(kept) if leaf.shape == (3, 8))

    kept, other = (functools.partial(checkpoint_name, name=name) for name in ("kept", "other"))
    for layer in (
        lambda w, x: jnp.abs(other(jnp.abs(kept(x @ w)))),
        lambda w, x: jnp.sin(kept(jnp.exp(x @ w))),
    ):
        layer = jax.checkpoint(layer, policy=getattr(jax.checkpoint_policies, policy)("kept"))
        plain, cast = residuals(layer), residuals(jaxscale.autocast(layer))
        assert cast == ["float16"] * (len(plain) - 1) + ["float32"]  # the input, as it came


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
        return len(_make_autocast("float16", False).rewritten)

    assert remembered_after([0]) >= remembered_after(range(5))


def test_symbolic_shapes():
    def fun(x):
        return jax.nn.softmax(x @ W[0] + W[0, 0][None])

    shape = jax.ShapeDtypeStruct(jax.export.symbolic_shape("n, 8"), jnp.float32)
    exported = jax.export.export(jax.jit(jaxscale.autocast(fun)))(shape)
    np.testing.assert_allclose(exported.call(X), fun(X), atol=2e-3)
