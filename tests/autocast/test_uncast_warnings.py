"""Warnings about what `autocast` leaves in float32: nothing stays there in silence."""

import functools
import types

import equinox as eqx
import jax
import jax.custom_batching
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from departing import uses_what_goes
from forged import forged
from half_programs import W, X
from jax.experimental import pallas
from tables import cases

import jaxscale
from jaxscale import diagnostics
from jaxscale._jax import jaxprs

pytestmark = [pytest.mark.standard_promotion, uses_what_goes]


def test_autocast_says_that_it_changes_nothing():
    with pytest.warns(UserWarning, match="changes nothing in `exp`"):
        jaxscale.autocast(jnp.exp)(jnp.array([0.0, 1.0]))


PROGRAM = jax.make_jaxpr(lambda x: x @ W[0])(X)
SCALING = jaxscale.NoOpLossScale().init()


class Slotted:
    __slots__ = ("__program", "never_set")

    def __init__(self, program):
        self.__program = program


class FirstOfSlotted(Slotted):
    pass


class Held:
    def __init__(self, program):
        self.program = program

    def method(self):
        return self.program

    def __len__(self):
        raise AssertionError("the search runs no code of what it looks at")

    __iter__ = __bool__ = __len__


def nested(value, times):
    return functools.reduce(lambda inner, _: (inner,), range(times), value)


# Ways from a parameter to a program.
WAYS = {
    "attribute": Held,
    "slot of a base class": FirstOfSlotted,
    "attribute of a slot": lambda program: Held(Slotted(program)),
    "list of tuples": lambda program: [(1, program)],
    "dictionary": lambda program: {"a": {"b": program}},
    "key": lambda program: {program: 1},
    "set": lambda program: frozenset([program]),
    "closure of a closure": lambda program: lambda: lambda: program,
    "default": lambda program: lambda x, program=program: program,
    "partial": lambda program: functools.partial(max, key=Held(program)),
    "method": lambda program: Held(program).method,
    "namespace": lambda program: types.SimpleNamespace(program=program),
    "mapping": lambda program: types.MappingProxyType({"a": program}),
    "six steps": lambda program: nested(program, 5),  # in an object
}


def multiply_in_full(x):
    return jnp.tanh(x @ W[0])


def reads_and_multiplies(name, hidden, wrap=lambda fun: fun):
    held = Held(hidden)  # as parameters are hashed
    call = wrap(forged(name, {"what": held, "_prim": held}, multiply_in_full))
    return lambda x: jnp.sum(call(x * 3.0) @ W[1])


def assert_named_once(name, call):
    """A call warns once, of a primitive, and its result is returned."""
    message = f"`{name}` run as they are written"
    with pytest.warns(UserWarning, match=message) as warnings:
        result = call()
    assert len(warnings) == 1
    return result


def names_in_trace(fun):
    """Returns what the trace of a loss did not enter, if it multiplies by a function of `X`."""

    def loss(w):
        return w * jax.lax.stop_gradient(fun(X))

    return diagnostics.trace(loss, SCALING)(jnp.float32(2)).not_entered


@cases("way", WAYS, fast=["slot of a base class", "method", "six steps"])
@pytest.mark.parametrize("name", ["future_call", jaxprs.OBJECT])
def test_a_program_that_is_hidden_in_a_parameter_is_named(way, name):
    fun = reads_and_multiplies(name, WAYS[way](PROGRAM))
    result = assert_named_once(name, lambda: jaxscale.autocast(fun)(X))
    np.testing.assert_allclose(result, fun(X), rtol=0.01)
    jaxscale.autocast(jaxscale.full_precision(fun))(X)  # without a warning
    assert names_in_trace(fun) == (name,)


def with_own_vjp(fun):
    ruled = jax.custom_vjp(fun)
    ruled.defvjp(lambda x: (fun(x), None), lambda _, cotangent: (cotangent,))
    return ruled


INSIDE = {
    "checkpoint": jax.checkpoint,
    "scan": lambda fun: lambda x: jax.lax.map(fun, x[None])[0],
    "custom_vjp": with_own_vjp,
    "jit of jit": lambda fun: jax.jit(lambda x: jax.jit(fun)(x)),
}


@cases("inside", INSIDE)
def test_what_is_hidden_is_found_where_there_is_nothing_else_to_cast(inside):
    fun = reads_and_multiplies("future_call", PROGRAM, INSIDE[inside])
    for _ in range(2):  # also in a program that is known already
        trace = jax.make_jaxpr(jaxscale.autocast(fun))
        assert_named_once("future_call", functools.partial(trace, X))


CIRCLE = types.SimpleNamespace()
CIRCLE.itself = CIRCLE
MESH = jax.make_mesh((2,), ("i",))
DTYPES = [np.float32, jnp.dtype("float16")]
HARMLESS = {
    "plain": [1, "text", 2.0, None, np.ones(3), jnp.ones(3), *DTYPES],
    "seven steps": nested(PROGRAM, 6),
    "circle": CIRCLE,
    "class": Held,
    "module": jax,
    "function": jnp.tanh,
    "data of a run": [[Held(number)] for number in range(50_000)],
    "mesh": jax.sharding.NamedSharding(MESH, jax.sharding.PartitionSpec()),
    "empty cell": lambda: unset,  # noqa: F821
}


@cases("what", HARMLESS, fast=["plain", "circle", "data of a run", "seven steps"])
def test_what_holds_no_program_is_not_named(what):
    fun = reads_and_multiplies("future_operation", HARMLESS[what])
    jaxscale.autocast(fun)(X)  # without a warning


exported = jax.export.export(jax.jit(lambda x: x @ W[0]))(X)


def copied(x_ref, out_ref):
    out_ref[...] = x_ref[...] * 2.0


def multiplied(x_ref, w_ref, out_ref):
    out_ref[...] = x_ref[...] @ w_ref[...]


def run_kernel(kernel, x, *args):
    call = pallas.pallas_call(kernel, out_shape=jax.typeof(x), interpret=True)
    return call(x, *args)


def on_host(fun, x, *args):
    return jax.pure_callback(fun, jax.typeof(x), *args)


def multiply(x):
    return x @ W[0]


def multiply_on_host(x):
    return on_host(lambda x: np.asarray(x) @ np.asarray(W[0]), x, x)


def load_from_host(x):
    return on_host(np.float32, x, x > 0)


def load_and_pass_to_host(x):
    return on_host(lambda x, _: np.asarray(x), x, x, load_from_host(x))


def do_io(x):
    return jax.experimental.io_callback(lambda x: x, jax.typeof(x), x)


def print_zero(x):
    jax.debug.print("{}", x[0, 0] * 0)
    return x


# JAX asks for a rule, and does not use it.
batched_by_hand = jax.custom_batching.custom_vmap(multiply)
batched_by_hand.def_vmap(lambda *_: None)
OPAQUE = {
    "custom_vmap_call": batched_by_hand,
    "call_exported": exported.call,
    "pure_callback": multiply_on_host,
    "io_callback": do_io,
    "noinline": eqx.internal.noinline(multiply),
    "pallas_call": lambda x: run_kernel(multiplied, x, W[0]),
}
TRANSPARENT = {
    "a kernel without products": lambda x: run_kernel(copied, x),
    "what only prints": print_zero,
    "data from the host": lambda x: x + load_from_host(x),
    # Two callbacks, the second of which runs after the first as it gets what that returned.
    "an error of Equinox": lambda x: eqx.error_if(x, x[0, 0] == 5, "five"),
}


def sum_of_product_after(part):
    return lambda x: jnp.sum(part(x) @ W[1])


@pytest.mark.worlds
@cases("name", OPAQUE)
def test_what_cannot_be_looked_into_is_named(name):
    fun = sum_of_product_after(OPAQUE[name])
    result = assert_named_once(name, lambda: jaxscale.autocast(fun)(X))
    np.testing.assert_allclose(result, fun(X), rtol=0.01)
    assert name in names_in_trace(fun)
    marked = sum_of_product_after(jaxscale.full_precision(OPAQUE[name]))
    jaxscale.autocast(marked)(X)  # without a warning


@cases("name", TRANSPARENT)
def test_what_holds_no_product_is_not_named(name, capsys):
    fun = sum_of_product_after(TRANSPARENT[name])
    jaxscale.autocast(fun)(X)  # without a warning


def test_a_callback_that_gets_more_than_another_returned_is_named():
    with pytest.warns(UserWarning, match="`pure_callback` run as they are written"):
        jaxscale.autocast(sum_of_product_after(load_and_pass_to_host))(X)


def gaussian_process(x):
    """Its kernel has no product, and its linear algebra none to cast."""
    distances = jnp.sum((x[:, None] - x[None]) ** 2, -1)
    factor = jnp.linalg.cholesky(jnp.exp(-distances) + jnp.eye(len(x)))
    whitened = jax.scipy.linalg.solve_triangular(factor, x, lower=True)
    return jnp.sum(whitened**2)


def run_twice(fun):
    return lambda x: jax.lax.fori_loop(0, 2, lambda _, x: fun(x), x)


def multiply_by_itself(x):
    return x @ x.T


def multiply_precisely(x):
    return jnp.matmul(x, W[0], precision="highest")


def multiply_twice_precisely(x):
    return multiply_precisely(x) - multiply_with_algorithm(x)


def multiply_with_algorithm(x):
    return jnp.matmul(x, W[0], precision="F32_F32_F32")


def solve_by_itself(x):
    def solve(multiply, y):
        return y

    return jax.lax.custom_linear_solve(lambda y: y @ W[0], x, solve)


def raise_to_power(x):
    return jnp.linalg.matrix_power(x, 3)


def raise_and_multiply(x):
    return raise_to_power(x) + multiply_precisely(x)


def line_in(function):
    """The file, the line and the name of a function whose body has one line, as pattern."""
    code = function.__code__
    name = function.__name__
    return rf"test_uncast_warnings\.py:{code.co_firstlineno + 1} \(in `{name}`\)"


NO_PRODUCT = "no product of float32 matrices"
OF_ITS_OWN = "asks for a precision of its own, at .*"
OF_A_LIBRARY = "is a step of a library that is written for float32, at .*"
NOTHING_TO_CAST = {
    "no product": (lambda x: jnp.mean(jnp.exp(x)), X, NO_PRODUCT),
    "gaussian process": (gaussian_process, X, NO_PRODUCT),
    "dot": (lambda x: jnp.vdot(x, x), X, NO_PRODUCT),
    "linear algebra": (jnp.linalg.inv, W[0], f"each of 2 products {OF_A_LIBRARY}"),
    "a precision": (
        multiply_precisely,
        X,
        f"its product {OF_ITS_OWN}{line_in(multiply_precisely)}",
    ),
    "two precisions": (
        multiply_twice_precisely,
        X,
        f"each of 2 products {OF_ITS_OWN}{line_in(multiply_precisely)} and 1 more",
    ),
    "a library": (
        raise_to_power,
        W[0],
        f"each of 2 products {OF_A_LIBRARY}{line_in(raise_to_power)}",
    ),
    "several reasons": (
        raise_and_multiply,
        W[0],
        f"each of 2 products {OF_A_LIBRARY}; its product {OF_ITS_OWN}",
    ),
    "inside": (
        solve_by_itself,
        X,
        "is inside of `custom_linear_solve`, which `autocast` leaves in float32",
    ),
    "complex": (
        lambda x: jnp.sum(jnp.abs(x @ W[0])),
        X + 1j * X,
        "are in complex64, and only",
    ),
    "in a loop": (run_twice(jnp.sin), X, "no product"),
    "a count": (
        lambda x: (
            (jnp.arange(4)[None] < 3).astype(jnp.float32) @ jnp.ones((4, 2)) + x[0, 0]
        ),
        X,
        "its product has numbers that must be exact",
    ),
    "a prediction": (
        lambda x: jax.jit(lambda x: x @ W[0])(x).argmax(-1),
        X,
        "its product has numbers that must be exact",
    ),
}
AS_IT_SHOULD = {
    1: (multiply, X),
    "in a loop": (run_twice(multiply), X),
    "backward": (jax.grad(lambda x: jnp.sum(multiply(x) ** 2)), X),
    "in half precision": (multiply_by_itself, X.astype("float16")),
    "twice": (jaxscale.autocast(multiply), X),
    "marked": (jaxscale.full_precision(multiply), X),
    "kernel": (jaxscale.half_precision(lambda x: x * 2), X),
    "integers": (multiply_by_itself, jnp.ones((2, 2), "int32")),
    # float16 cannot hold the mask, which stays in float32
    "a mask": (
        lambda x: jax.nn.softmax(x @ x.T + jnp.triu(jnp.full((4, 4), -1e9), 1)) @ x,
        X,
    ),
}


IN_BFLOAT16 = W.astype("bfloat16")


def multiply_in_bfloat16(x):
    return x.astype(jnp.bfloat16) @ IN_BFLOAT16[0]


@jaxscale.full_precision
def multiply_in_marked(x):
    return multiply_in_bfloat16(x)


def multiply_in_loops(x):
    def layer(x, w):
        return jax.jit(jnp.matmul)(x, w), None

    x, _ = jax.lax.scan(layer, x.astype(jnp.bfloat16), IN_BFLOAT16)
    return multiply_in_bfloat16(x)


def multiply_by_hand(x):
    return x.astype(jnp.bfloat16) @ W[0].astype(jnp.bfloat16)


def multiply_two_formats(x):
    return x @ IN_BFLOAT16[0]


def multiply_in_kernel(x):
    return run_kernel(multiplied, x.astype(jnp.bfloat16), IN_BFLOAT16[0])


def multiply_inside(fun, around=lambda fun: fun):
    return around(jaxscale.autocast(fun, jnp.bfloat16))


def scan_layers(x):
    return jnp.sum(
        jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, IN_BFLOAT16)[0]
    )


# What is left in bfloat16, where float16 is asked for: how many, and the function with the first.
LEFT_IN_BFLOAT16 = {
    "one": (multiply_in_bfloat16, 1, multiply_in_bfloat16),
    "in loops and calls": (multiply_in_loops, 2, None),
    "backward": (
        jax.grad(lambda x: jnp.sum(multiply_in_bfloat16(x).astype(jnp.float32))),
        2,
        multiply_in_bfloat16,
    ),
    "beside others": (
        lambda x: multiply_in_bfloat16(x) + multiply(x),
        1,
        multiply_in_bfloat16,
    ),
}
NOT_LEFT = {
    "two formats": multiply_two_formats,
    "cast by hand": multiply_by_hand,
    "marked": multiply_in_marked,
    "a kernel": multiply_in_kernel,
    "an autocast inside": multiply_inside(multiply_two_formats),
    "its gradient": multiply_inside(scan_layers, jax.grad),
    "vectors": lambda x: jnp.vdot(IN_BFLOAT16[0], IN_BFLOAT16[1]) + jnp.sum(x @ W[0]),
    "a count": lambda x: (
        (jnp.eye(4, dtype="bfloat16") @ jnp.ones((4, 8), "bfloat16")) + x
    ),
    "a precision": lambda x: jnp.matmul(
        x.astype("bfloat16"), IN_BFLOAT16[0], precision="highest"
    ),
}


@cases("name", LEFT_IN_BFLOAT16)
def test_products_that_stay_in_the_other_half_precision_are_counted(name):
    fun, number, first = LEFT_IN_BFLOAT16[name]
    line = line_in(first) if first else ""
    message = (
        f"products of bfloat16 arrays .*: {number}, .*{line}.*in float32 or float16"
    )
    with pytest.warns(UserWarning, match=message) as warnings:
        counts = diagnostics.products(jaxscale.autocast(fun), X).counts
    assert len(warnings) == 1
    assert counts["bfloat16"] == number
    jaxscale.autocast(fun, jnp.bfloat16)(X)  # without a warning


@pytest.mark.filterwarnings("ignore:`autocast` changes nothing")
@cases("name", NOT_LEFT)
def test_what_is_cast_or_meant_to_be_in_its_precision_gives_no_warning(name):
    jaxscale.autocast(NOT_LEFT[name])(X)


@pytest.mark.worlds
@cases("name", NOTHING_TO_CAST)
def test_a_function_in_which_nothing_is_cast_is_named(name):
    fun, x, why = NOTHING_TO_CAST[name]

    def loss_fn(x):
        return fun(x)

    message = f"changes nothing in `loss_fn`: .*{why}"
    with pytest.warns(UserWarning, match=message) as warnings:
        jaxscale.autocast(loss_fn)(x)
    assert len(warnings) == 1


@cases("name", AS_IT_SHOULD)
def test_a_function_in_which_something_is_cast_or_should_not_be_is_not_named(name):
    fun, x = AS_IT_SHOULD[name]
    jaxscale.autocast(fun)(x)  # without a warning
