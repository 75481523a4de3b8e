"""Nothing stays in float32 in silence: what `autocast` cannot change, it names."""

import functools
import types

import equinox as eqx
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from forged import forged
from half_programs import PROGRAMS, W, X
from jax.experimental import pallas
from tables import cases, warned

import jaxscale
from jaxscale import _jax, diagnostics

pytestmark = pytest.mark.standard_promotion

PROGRAM = jax.make_jaxpr(lambda x: x @ W[0])(X)
SCALING = jaxscale.NoOpLossScale().init()


class Slotted:
    __slots__ = ("__program", "never_set")

    def __init__(self, program):
        self.__program = program


class Held:
    def __init__(self, program):
        self.program = program

    def method(self):
        return self.program

    def __len__(self):
        raise AssertionError("the search runs no code of what it looks at")

    __iter__ = __bool__ = __len__


class FirstOfSlotted(Slotted):
    pass


def default(x, program=PROGRAM):
    return program


def nested(value, times):
    return functools.reduce(lambda inner, _: (inner,), range(times), value)


# Ways from a parameter to a program, each of one step or of two.
WAYS = {
    "attribute": Held,
    "slot": Slotted,
    "slot of a base class": FirstOfSlotted,
    "tuple": lambda program: (1, program),
    "list": lambda program: [[program]],
    "dictionary": lambda program: {"a": {"b": program}},
    "key": lambda program: {program: 1},
    "set": lambda program: frozenset([program]),
    "closure": lambda program: lambda: program,
    "default": lambda program: default,
    "partial": lambda program: functools.partial(max, program),
    "partial of a partial": lambda program: functools.partial(max, key=Held(program)),
    "method": lambda program: Held(program).method,
    "namespace": lambda program: types.SimpleNamespace(program=program),
    "mapping": lambda program: types.MappingProxyType({"a": program}),
    "six steps": lambda program: nested(program, 5),  # in an object
}
TWICE = {
    f"{outer} of {inner}": (lambda a, b: lambda program: a(b(program)))(
        WAYS[outer], WAYS[inner]
    )
    for outer in ("attribute", "slot", "closure")
    for inner in WAYS
    if inner not in ("six steps", "list", "dictionary", "partial of a partial")
}


def reads_and_multiplies(name, hidden, wrap=lambda fun: fun):
    held = Held(hidden)  # as parameters are hashed
    call = wrap(
        forged(name, {"what": held, "_prim": held}, lambda x: jnp.tanh(x @ W[0]))
    )
    return lambda x: jnp.sum(call(x * 3.0) @ W[1])


@cases(
    "way", WAYS | TWICE, fast=["slot of a base class", "closure", "method", "six steps"]
)
@pytest.mark.parametrize("name", ["future_call", _jax.OBJECT])
def test_a_program_that_is_hidden_in_a_parameter_is_named(way, name):
    hidden = (WAYS | TWICE)[way](PROGRAM)
    fun = reads_and_multiplies(name, hidden)
    with pytest.warns(UserWarning, match=f"`{name}` run as they are written") as found:
        result = jaxscale.autocast(fun)(X)
    assert len(found) == 1
    np.testing.assert_allclose(result, fun(X), rtol=0.01)
    jaxscale.autocast(jaxscale.full_precision(fun))(X)  # without a warning

    def loss(w):
        return w * jax.lax.stop_gradient(fun(X))

    assert diagnostics.trace(loss, SCALING)(jnp.float32(2)).not_entered == (name,)


def with_own_jvp(fun):
    ruled = jax.custom_jvp(fun)
    ruled.defjvp(lambda primals, tangents: (fun(*primals), tangents[0]))
    return ruled


def with_own_vjp(fun):
    ruled = jax.custom_vjp(fun)
    ruled.defvjp(lambda x: (fun(x), None), lambda _, cotangent: (cotangent,))
    return ruled


INSIDE = {
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "scan": lambda fun: lambda x: jax.lax.map(fun, x[None])[0],
    "while": lambda fun: (
        lambda x: jax.lax.fori_loop(0, jnp.int32(2), lambda _, x: fun(x), x)
    ),
    "cond": lambda fun: lambda x: jax.lax.cond(x[0, 0] > 0, fun, lambda x: x, x),
    "custom_jvp": with_own_jvp,
    "custom_vjp": with_own_vjp,
    "jit of jit": lambda fun: jax.jit(lambda x: jax.jit(fun)(x)),
}


@cases("inside", INSIDE)
def test_what_is_hidden_is_found_where_there_is_nothing_else_to_cast(inside):
    fun = reads_and_multiplies("future_call", PROGRAM, INSIDE[inside])
    for _ in range(2):  # also in a program that is known already
        with pytest.warns(
            UserWarning, match="`future_call` run as they are written"
        ) as found:
            jax.make_jaxpr(jaxscale.autocast(fun))(X)
        assert len(found) == 1


HARMLESS = {
    "plain": [
        1,
        "text",
        2.0,
        None,
        np.float32,
        np.ones(3),
        jnp.ones(3),
        jnp.dtype("float16"),
    ],
    "seven steps": nested(PROGRAM, 6),
    "circle": types.SimpleNamespace(),
    "class": Held,
    "module": jax,
    "function": jnp.tanh,
    "data of a run": [[Held(number)] for number in range(50_000)],
    "mesh": jax.sharding.NamedSharding(
        jax.make_mesh((2,), ("i",)), jax.sharding.PartitionSpec()
    ),
    "empty cell": lambda: unset,  # noqa: F821
}
HARMLESS["circle"].itself = HARMLESS["circle"]


@cases("what", HARMLESS, fast=["plain", "circle", "data of a run", "seven steps"])
def test_what_holds_no_program_is_not_named(what):
    fun = reads_and_multiplies("future_operation", HARMLESS[what])
    jaxscale.autocast(fun)(X)  # without a warning


exported = jax.export.export(jax.jit(lambda x: x @ W[0]))(X)


def copied(x_ref, out_ref):
    out_ref[...] = x_ref[...] * 2.0


def multiplied(x_ref, w_ref, out_ref):
    out_ref[...] = x_ref[...] @ w_ref[...]


def on_host(x):
    return jax.pure_callback(
        lambda x: np.asarray(x) @ np.asarray(W[0]), jax.typeof(x), x
    )


def on_host_twice(x):
    made = jax.pure_callback(lambda x: np.float32(x), jax.typeof(x), x > 0)
    return jax.pure_callback(lambda x, made: np.asarray(x), jax.typeof(x), x, made)


OPAQUE = {
    "call_exported": exported.call,
    "pure_callback": on_host,
    "io_callback": lambda x: jax.experimental.io_callback(
        lambda x: x, jax.typeof(x), x
    ),
    "pallas_call": lambda x: pallas.pallas_call(
        multiplied, out_shape=jax.typeof(x), interpret=True
    )(x, W[0]),
}
TRANSPARENT = {
    "a kernel without products": lambda x: pallas.pallas_call(
        copied, out_shape=jax.typeof(x), interpret=True
    )(x),
    "what only prints": lambda x: jax.debug.print("{}", x[0, 0] * 0) or x,
    "data from the host": lambda x: (
        x + jax.pure_callback(lambda x: np.float32(x), jax.typeof(x), x > 0)
    ),
    # Two callbacks, the second of which runs after the first as it gets what that returned.
    "an error of Equinox": lambda x: eqx.error_if(x, x[0, 0] == 5, "five"),
}


def sum_of_product_after(part):
    return lambda x: jnp.sum(part(x) @ W[1])


@cases("name", OPAQUE | TRANSPARENT)
def test_what_cannot_be_looked_into_is_named(name, capsys):
    part = (OPAQUE | TRANSPARENT)[name]
    with warned(f"`{name}` run as they are written", is_due=name in OPAQUE):
        jaxscale.autocast(sum_of_product_after(part))(X)
    jaxscale.autocast(sum_of_product_after(jaxscale.full_precision(part)))(X)


@cases("name", OPAQUE)
def test_what_cannot_be_looked_into_is_named_in_a_trace(name, capsys):
    fun = sum_of_product_after(OPAQUE[name])

    def loss(w):
        return w * jax.lax.stop_gradient(fun(X))

    assert name in diagnostics.trace(loss, SCALING)(jnp.float32(2)).not_entered


def test_a_callback_that_gets_more_than_another_returned_is_named():
    with pytest.warns(UserWarning, match="`pure_callback` run as they are written"):
        jaxscale.autocast(sum_of_product_after(on_host_twice))(X)


def test_what_must_fuse_runs_as_it_is_written_and_is_named():
    fused = pytest.importorskip(
        "jax.experimental.fused", reason="this JAX cannot fuse by hand"
    )
    # which runs on a GPU alone
    part = fused.fused(out_spaces=(jax.memory.Space.Device,))

    def loss(x):
        (y,) = part(lambda x, w: [jnp.tanh(x @ w)])(x, W[0])
        return jnp.sum(y @ W[1])

    grad = jax.grad(jaxscale.scale_backward(jaxscale.autocast(loss)))
    with pytest.warns(UserWarning, match="`fused_call` run as they are written"):
        program = jax.make_jaxpr(grad)(X)
    assert "fused_call" in str(program)


# whose kernel has no product, and whose linear algebra none to cast
def gaussian_process(x):
    gram = jnp.exp(-jnp.sum((x[:, None] - x[None]) ** 2, -1)) + jnp.eye(len(x))
    factor = jnp.linalg.cholesky(gram)
    return jnp.sum(jax.scipy.linalg.solve_triangular(factor, x, lower=True) ** 2)


NOTHING_TO_CAST = {
    "no product": (lambda x: jnp.mean(jnp.exp(x)), X, "no product of float32 matrices"),
    "gaussian process": (gaussian_process, X, "no product of float32 matrices"),
    "dot": (lambda x: jnp.vdot(x, x), X, "no product of float32 matrices"),
    "linear algebra": (lambda x: jnp.sum(jnp.linalg.inv(x)), W[0], "no product"),
    "complex": (
        lambda x: jnp.sum(jnp.abs(x @ W[0])),
        X + 1j * X,
        "are in complex64, and only",
    ),
    "in a loop": (
        lambda x: jax.lax.fori_loop(0, 2, lambda _, x: jnp.sin(x), x),
        X,
        "no product",
    ),
}
AS_IT_SHOULD = {
    "a product": (lambda x: x @ W[0], X),
    "in a loop": (lambda x: jax.lax.fori_loop(0, 2, lambda _, x: x @ W[0], x), X),
    "backward": (jax.grad(lambda x: jnp.sum((x @ W[0]) ** 2)), X),
    "in half precision": (lambda x: x @ x.T, X.astype("float16")),
    "twice": (jaxscale.autocast(lambda x: x @ W[0]), X),
    "twice, in a part": (lambda x: jaxscale.autocast(jnp.exp)(x) @ W[0], X),
    "marked": (jaxscale.full_precision(lambda x: x @ W[0]), X),
    "marked activation": (jaxscale.full_precision(jnp.exp), X),
    "integers": (lambda x: x @ x.T, jnp.ones((2, 2), "int32")),
    "nothing": (lambda x: x, X),
}


@cases("name", NOTHING_TO_CAST)
def test_a_function_in_which_nothing_is_cast_is_named(name):
    fun, x, why = NOTHING_TO_CAST[name]
    named = functools.wraps(fun)(lambda x: fun(x))
    named.__name__ = "loss_fn"
    with pytest.warns(
        UserWarning, match=f"changes nothing in `loss_fn`: .*{why}"
    ) as found:
        jaxscale.autocast(named)(x)
    assert len(found) == 1


@cases("name", AS_IT_SHOULD)
def test_a_function_in_which_something_is_cast_or_should_not_be_is_not_named(name):
    fun, x = AS_IT_SHOULD[name]
    jaxscale.autocast(fun)(x)  # without a warning


@cases("name", PROGRAMS, fast=["effects", "linear_algebra"])
def test_no_program_of_the_laws_is_warned_of(name):
    fun, args = PROGRAMS[name]
    jax.make_jaxpr(jaxscale.autocast(lambda *args: fun(*args)[0]))(*args)
    jax.make_jaxpr(jax.grad(jaxscale.autocast(lambda *args: fun(*args)[0])))(*args)


HALF_CARRIES = {
    "layers": (lambda x: jax.lax.scan(lambda x, w: (x + x @ w, None), x, W)[0], False),
    "nested": (
        lambda x: jax.lax.map(
            lambda x: jax.lax.scan(lambda x, w: (x @ w, 0), x, W)[0], x[None]
        ),
        False,
    ),
    "no scan": (lambda x: x @ W[0], True),
    "a counter": (lambda x: jax.lax.scan(lambda n, w: (n + 1, x @ w), 0, W)[1], True),
    "a while": (
        lambda x: jax.lax.fori_loop(0, jnp.int32(3), lambda _, x: x @ W[0], x),
        True,
    ),
}


@cases("name", HALF_CARRIES)
def test_half_carries_that_change_nothing_are_named(name):
    fun, changes_nothing = HALF_CARRIES[name]
    with warned(
        "`autocast.half_carries=True.` carries nothing", is_due=changes_nothing
    ):
        jaxscale.autocast(fun, half_carries=True)(X)
    jaxscale.autocast(fun)(X)  # without a warning
