"""`scale_backward`: the gradients of float32 out of a backward pass in float16, and no state."""

import functools
import inspect
import itertools
import re

import equinox as eqx
import equinox.internal as eqxi
import flax.linen as nn
import half_programs
import hosts
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.custom_derivatives import SymbolicZero
from tables import assert_same_bits, cases
from training import x64

import jaxscale
from jaxscale import scale_backward
from jaxscale._gradients.cotangent_scale import choose_power

HALF = jnp.float16
rng = np.random.default_rng(0)
X, Y = (jnp.asarray(rng.standard_normal((16, 8)), jnp.float32) for _ in range(2))
PARAMS = {
    "w": jnp.asarray(rng.standard_normal((3, 8, 8)) * 0.3, jnp.float32),
    "b": jnp.linspace(-0.1, 0.1, 8),
}
ACCURACY = 2e-3  # of float16 in these small networks; rounding alone costs 6e-4
SMALL = 2.0**-30  # a loss that float16 flushes all gradients of
HIGH = 2.0**54  # a scale at which that loss overflows twice, and no more
# Of a factor of the loss and a scale: how many backward passes there are.
PASSES = [(jnp.inf, "auto", 1), (jnp.nan, "auto", 1), (1.0, "auto", 1), (1.0, HIGH, 3)]
FAST = ["inside summed", "inside own", "inside local, unchecked", "by_pmap normalized", "by_jit"]


def net(p, x, dtype=HALF, out=jnp.float32):
    for i in range(3):
        x = jnp.tanh(x.astype(dtype) @ p["w"][i].astype(dtype) + p["b"].astype(dtype)[None])
    return x.astype(out)


net32 = functools.partial(net, dtype=jnp.float32)


def loss_of(model, factor=SMALL):
    return lambda p, x=X, y=Y: factor * jnp.mean((model(p, x) - y) ** 2)


REFERENCE = jax.grad(loss_of(net32, 1.0))(PARAMS)


def error(got, expected, factor=1.0):
    """The norm of a difference, of gradients that are divided by a factor, beside the norm."""
    leaves = map(jax.tree.leaves, (got, expected))
    got, expected = (np.concatenate([np.ravel(np.complex128(x)) for x in each]) for each in leaves)
    return np.linalg.norm(got / factor - expected) / np.linalg.norm(expected)


def member(tree, i):
    return jax.tree.map(lambda leaf: leaf[i], tree)


def named(name, fun, *args):
    """The equations of a name in a function."""
    program = jax.make_jaxpr(fun)(*args)
    return [eqn for eqn in half_programs.equations(program) if eqn.primitive.name == name]


def over_micro_batches(f):
    one = jax.grad(scale_backward(lambda p, x, y: loss_of(net, f / 16)(p, x[None], y[None])))
    return lambda p: jax.tree.map(lambda g: g.sum(0), jax.lax.map(lambda xy: one(p, *xy), (X, Y)))


def scanned(p, x, dtype=HALF):
    def layer(x, w):
        return jnp.tanh(x @ w.astype(dtype) + p["b"].astype(dtype)[None]), None

    return jax.lax.scan(layer, x.astype(dtype), p["w"])[0].astype(jnp.float32)


def mixed(p, x, dtype=HALF):
    return net32(p, net(p, x, dtype) + x)


def called_twice(p, x, dtype=HALF):
    layer = jax.jit(lambda w: jnp.tanh((x.astype(dtype) @ w.astype(dtype)).astype(jnp.float32)))
    return layer(p["w"][0]) + p["b"][None] * layer(p["w"][1])


def sowing(f):
    """Float16 outputs that no loss depends on, such as activations for plots, in a scan."""
    fun = scale_backward(lambda p, c: (c + loss_of(net, f / 2)(p), net(p, X, out=HALF)))
    return lambda p: jax.lax.scan(lambda c, _: fun(p, c), 0.0, length=2)[0]


def beside_a_target(f):
    """The cotangents of what is not differentiated say nothing about the scale."""

    def loss(p):
        target = jax.lax.stop_gradient(net(p, -X, out=HALF)).astype(jnp.float32)
        return loss_of(net, f)(p) + 2.0**50 * f * jnp.sum(target)

    return scale_backward(loss)


# Where it is put: each row makes the gradient of a loss times a factor.
PLACES = {
    "loss": lambda f: jax.grad(scale_backward(loss_of(net, f))),
    "model": lambda f: jax.grad(loss_of(scale_backward(net), f)),
    "both": lambda f: jax.grad(scale_backward(loss_of(scale_backward(net), f))),
    "remat of jit inside": lambda f: jax.grad(scale_backward(jax.checkpoint(jax.jit(loss_of(net, f))))),
    "remat outside": lambda f: jax.grad(jax.checkpoint(scale_backward(loss_of(net, f)))),
    "closure": lambda f: jax.grad(lambda p: loss_of(lambda _, x: scale_backward(lambda x: net(p, x))(x), f)(p)),
    "micro-batches": over_micro_batches,
    "scan over layers": lambda f: jax.grad(scale_backward(loss_of(scanned, f))),
    "one call twice": lambda f: jax.grad(scale_backward(loss_of(called_twice, f))),
    "autocast inside": lambda f: jax.grad(scale_backward(jaxscale.autocast(loss_of(net32, f)))),
    "autocast outside": lambda f: jax.grad(jaxscale.autocast(scale_backward(loss_of(net32, f)))),
    "autocast of mixed": lambda f: jax.grad(jaxscale.autocast(scale_backward(loss_of(mixed, f)))),
    "sowing": lambda f: jax.grad(sowing(f)),
    "sowing in autocast": lambda f: jax.grad(jaxscale.autocast(sowing(f))),
    "target": lambda f: jax.grad(beside_a_target(f)),
    # Each member has its own scale.
    "population": lambda f: lambda p: member(jax.vmap(lambda f: jax.grad(loss_of(scale_backward(net), f))(p))(f * 2.0 ** jnp.array([-40.0, 0.0, 40.0])), 1),
    # Where nothing differs, an axis that devices can be told apart by is left alone.
    "told apart": lambda f: jax.shard_map(jax.grad(scale_backward(loss_of(net, f), HIGH * SMALL / f, axis_name="d")), mesh=hosts.mesh_of(""), in_specs=hosts.P(), out_specs=hosts.P()),
    "autocast of grad": lambda f: jaxscale.autocast(jax.grad(scale_backward(loss_of(net32, f)))),
}  # fmt: skip
MODELS = {"one call twice": called_twice, "autocast of mixed": mixed}  # else `net`
FAST_60 = ["loss", "one call twice", "autocast outside", "population", "told apart"]


@cases(
    "place, exponent",
    [(place, e) for place in PLACES for e in (-60, 40)],
    fast=[("sowing in autocast", -60), ("target", 40), ("model", 40), *((p, -60) for p in FAST_60)],
)
def test_gradients_are_right_whatever_the_size_of_the_loss(place, exponent):
    grads = jax.jit(PLACES[place](2.0**exponent))(PARAMS)
    model = functools.partial(MODELS.get(place, net), dtype=jnp.float32)
    assert error(grads, jax.grad(loss_of(model, 1.0))(PARAMS), 2.0**exponent) < ACCURACY
    assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype(jnp.float32)}
    assert error(jax.grad(loss_of(net))(PARAMS), REFERENCE, SMALL) > 0.99  # without it


def test_a_small_loss_beside_a_large_one():
    """Even where both go through one boundary, and so have one scale."""

    def both(net, small, large):
        return loss_of(net, 1e-6)(small) + jnp.mean(jnp.sin(net(large, X)))

    params = PARAMS, {"w": PARAMS["w"][::-1], "b": PARAMS["b"]}
    got, expected = (
        jax.jit(jax.grad(fun, (0, 1)))(*params)
        for fun in (scale_backward(functools.partial(both, net)), functools.partial(both, net32))
    )
    assert all(error(*pair) < ACCURACY for pair in zip(got, expected, strict=True))


@cases("axis_name", [None, "d"])
def test_along_an_axis_that_is_named_there_is_one_scale(axis_name):
    """It is that of the large loss, at which the small one has no gradients left."""
    scaled = scale_backward(net, axis_name=axis_name)
    grads = jax.vmap(lambda f: jax.grad(loss_of(scaled, f))(PARAMS), axis_name="d")
    small = member(grads(jnp.array([1.0, SMALL])), 1)
    assert jnp.any(small["w"]) == jnp.any(small["b"]) == (axis_name is None)


@cases("retries", [0, 1, 2], fast=[1, 2])
def test_an_overflow_is_repeated_at_a_lower_scale(retries):
    """In a population by each member alone. What stays bad comes out so, for the optimizer to skip."""
    high = HIGH if retries == 2 else HIGH / 16

    def grad(f):
        return jax.grad(scale_backward(loss_of(net, f), high, retries=retries))(PARAMS)

    factors = SMALL * 2.0 ** jnp.array([-16.0, 0.0, 4.0])  # the last needs one retry more
    for grads in jax.jit(lambda f: (jax.vmap(grad)(f), jax.lax.map(grad, f)))(factors):
        assert error(member(grads, 0), REFERENCE, SMALL / 2**16) < ACCURACY
        assert jaxscale.all_finite(member(grads, 1)) == (retries > 0)
        assert retries == 0 or error(member(grads, 1), REFERENCE, SMALL) < ACCURACY
        assert not jaxscale.all_finite(member(grads, 2))


@cases("factor, scale, passes", PASSES)
def test_values_are_computed_once_and_only_what_may_be_finite_is_repeated(factor, scale, passes):
    """Bad cotangents stay bad. A debugger of NaNs sees none in a pass that is repeated."""
    runs = []

    def noted(name, value):
        jax.debug.callback(lambda: runs.append(name))
        return value

    watched = jax.custom_vjp(functools.partial(noted, "forward"))
    watched.defvjp(lambda p: (noted("forward", p), None), lambda _, ct: (noted("backward", ct),))
    fun = scale_backward(lambda p: loss_of(net)(watched(p)), scale)
    with jax.debug_nans(scale == HIGH):
        value, grads = jax.jit(jax.value_and_grad(lambda p: factor * fun(p)))(PARAMS)
    jax.effects_barrier()
    assert sorted(runs) == ["backward"] * passes + ["forward"]  # callbacks have no order
    assert jaxscale.all_finite(grads) == (factor == 1)
    if factor == 1:
        assert error(grads, REFERENCE, SMALL) < ACCURACY
        assert_same_bits(value, jax.jit(jax.value_and_grad(loss_of(net)))(PARAMS)[0])
        assert_same_bits(jax.jit(fun)(PARAMS), jax.jit(loss_of(net))(PARAMS))


def test_what_is_no_array_of_numbers_passes():
    def fun(p, n, *, batch, key, **others):
        y = net(p, X)
        out = {"n": n + 1, "key": jax.random.split(key)[0], "batch": batch * 2, "list": [y]}
        return loss_of(net)(p), others | out | {"sown": y.astype(HALF), "sign": n > 2}

    others = {"nothing": None, "text": "text", "function": jnp.tanh}
    # The batch is not differentiated, so it may be float16.
    given = others | {"key": jax.random.key(0), "batch": jnp.ones(2, HALF)}
    wrapped, n = scale_backward(fun), jnp.int32(3)
    leaves = [jax.tree.leaves(f(PARAMS, n, **given)) for f in (wrapped, fun)]
    assert_same_bits(*([x for x in each if isinstance(x, jax.Array)] for each in leaves))
    grad = jax.value_and_grad(wrapped, (0, 1), has_aux=True, allow_int=True)
    (_, out), (grads, none) = grad(PARAMS, n, **given)
    assert error(grads, REFERENCE, SMALL) < ACCURACY
    assert none.dtype == jax.dtypes.float0
    assert others.items() <= out.items()
    assert inspect.signature(wrapped) == inspect.signature(fun)
    assert wrapped.__name__ == "fun"


def test_only_what_is_differentiated_has_a_backward_pass():
    """Frozen weights and batches cost nothing, as in the fine-tuning of a few."""
    for fun in (loss_of(net), scale_backward(loss_of(net))):
        of_biases = jax.grad(lambda b, fun=fun: fun(PARAMS | {"b": b}))
        assert len(named("dot_general", of_biases, PARAMS["b"])) == 5
        assert len(named("dot_general", jax.grad(fun), PARAMS)) == 8
    stopped = scale_backward(lambda p, q: loss_of(net)(jax.lax.stop_gradient(p)))
    grads = jax.grad(stopped, (0, 1))(PARAMS, PARAMS)
    unused = jax.grad(scale_backward(lambda p, q: loss_of(net)(p)), 1)(PARAMS, PARAMS)
    assert all((g == 0).all() for g in jax.tree.leaves((grads, unused)))


def test_what_is_not_in_half_precision_keeps_its_precision():
    """A penalty, a parameter that only the float32 part reads, and a complex one."""

    def grad(wrap, net):
        def fun(p):
            x = jnp.real(np.complex64((1 + 0.5j) * np.asarray(X)) @ p["complex"])
            penalty = 2.0**-40 * jnp.sum(p["w"] ** 2) + jnp.sum(p["only"] ** 3)
            return loss_of(lambda p, _: net(p, x))(p) + penalty

        return jax.grad(wrap(fun))(params)

    params = PARAMS | {"only": jnp.linspace(0.3, 0.7, 3), "complex": jnp.asarray(np.eye(8) * 1j)}
    grads, expected = grad(scale_backward, net), grad(lambda fun: fun, net32)
    assert_same_bits(grads.pop("only"), expected.pop("only"))
    assert all(error(grads[name], expected[name]) < ACCURACY for name in grads)

    def real(p, x):
        return jnp.real(x.astype(HALF).astype(p.dtype) @ p)

    c, both = jnp.full((8, 8), 1 + 1j), (scale_backward(real), real)
    # All that is scaled is scaled by a power of two.
    assert_same_bits(*(jax.grad(lambda p, f=f: 2.0**-20 * jnp.mean(f(p, X) ** 2))(c) for f in both))


@pytest.mark.standard_promotion
@cases("dtype, exponent, accuracy", [("bfloat16", -30, 2e-2), ("float64", -130, ACCURACY)])
def test_gradients_have_the_dtype_of_the_parameters(dtype, exponent, accuracy):
    """Those of float64 are below the range of float32 here; bfloat16 rounds to 2**-9."""
    wraps = [scale_backward, lambda fun: fun]
    of_model, of_loss = wraps if dtype == "bfloat16" else reversed(wraps)
    with x64():
        params = jax.tree.map(lambda p: p.astype(dtype), PARAMS)
        model = of_model(functools.partial(net, out=dtype))
        loss = loss_of(lambda p, x: model(p, x).astype(jnp.float64), np.float64(2.0**exponent))
        grads = jax.jit(jax.grad(of_loss(loss)))(params)
    assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype(dtype)}
    assert error(grads, REFERENCE, 2.0**exponent) < accuracy


@pytest.mark.standard_promotion  # of the programs themselves
@cases("name", half_programs.PROGRAMS, fast=["mlp", "own_precision"])
def test_autocast_is_the_same_inside_and_outside(name):
    (fun, args), cast = half_programs.PROGRAMS[name], jaxscale.autocast
    plain, *casts = (
        jax.grad(lambda p, *args, fun=fun: jax.tree.leaves(fun(p, *args))[0] * SMALL)
        for fun in (fun, cast(fun), scale_backward(cast(fun)), cast(scale_backward(fun)))
    )
    assert error(jax.jit(casts[-1])(*args), jax.jit(plain)(*args)) < ACCURACY
    # Where a backward pass is rewritten, outer products and sums of products run in float32.
    if name not in ("over_devices", "second_derivatives"):
        products = [named("dot_general", grad, *args) for grad in casts]
        assert len({sum(e.outvars[0].aval.dtype == HALF for e in each) for each in products}) == 1


def test_in_a_step_with_a_loss_scale_both_divide_out():
    tx = jaxscale.loss_scaled(optax.sgd(1.0), 2.0**20)
    step = jax.jit(jaxscale.train_step(scale_backward(loss_of(net, 1.0)), tx))
    params, state, _ = step(PARAMS, tx.init(PARAMS))
    assert error(jax.tree.map(jnp.subtract, PARAMS, params), REFERENCE) < ACCURACY
    assert state.total_notfinite == 0


def second(loss):
    return lambda p: sum(jnp.sum(g**2) for g in jax.tree.leaves(jax.grad(loss)(p)))


def test_second_derivatives():
    wrapped, no_loop = (scale_backward(loss_of(net, 1.0), retries=retries) for retries in (2, 0))
    for order, fun, factor in (
        (lambda loss: lambda p: jax.jvp(jax.grad(loss), (p,), (p,))[1], wrapped, 1),
        # Rounded in two backward passes, of which the boundary around both scales the second.
        (lambda loss: jax.grad(scale_backward(second(loss))), no_loop, 2),
    ):
        got, expected = (jax.jit(order(loss))(PARAMS) for loss in (fun, loss_of(net32, 1.0)))
        assert error(got, expected) < factor * ACCURACY
    assert not named("while", jax.grad(no_loop), PARAMS)


@cases("exponent", [-20, -60], fast=[-20])
def test_a_second_reverse_pass_is_scaled_by_a_boundary_of_its_own(exponent):
    """Without one it flushes, and says so."""
    factor = 2.0**exponent
    penalty = second(scale_backward(loss_of(net, factor), retries=0))
    expected = jax.grad(second(loss_of(net32, 1.0)))(PARAMS)
    got = jax.jit(jax.grad(lambda p: scale_backward(penalty)(p) / factor))(PARAMS)
    assert error(got, expected, factor) < 2 * ACCURACY
    with pytest.warns(UserWarning, match=r"retries=0.*second pass is not scaled.*by `scale_backw"):
        alone = jax.jit(jax.grad(lambda p: penalty(p) / factor))(PARAMS)
    assert error(alone, expected, factor) > 0.9


@jax.custom_jvp
def without_outputs(x):
    return ()


without_outputs.defjvp(lambda primals, tangents: ((), ()))
LABELS = jnp.arange(16) % 8


def classified(p, x):
    """A biased layer, and what is computed beside its loss."""
    return net32(p, x) @ p["w"][0] + p["b"][None]


def cast(x):
    return x.astype(HALF).astype(jnp.float32)


# Equations without outputs, or with integers alone: each row uses what a biased layer returns.
BESIDE = {
    "integer labels": lambda y: jnp.take_along_axis(y, LABELS[:, None], -1).mean(),
    "cross-entropy": lambda y: optax.softmax_cross_entropy_with_integer_labels(y, LABELS).mean(),
    "accuracy": lambda y: jnp.sum(y**2) + 0.0 * jnp.mean(jnp.argmax(y, -1) == LABELS),
    "signs": lambda y: jnp.sum(jnp.where(jnp.signbit(y), 0.0, y)),
    "print": lambda y: (jax.debug.print("{}", y.astype(HALF)[0, 0]), jnp.sum(y**2))[1],
    "callback": lambda y: (jax.debug.callback(lambda _: None, y.astype(HALF)), jnp.sum(y))[1],
    "custom_jvp": lambda y: (without_outputs(y.astype(HALF)), jnp.sum(y**2))[1],
    "jit of nothing": lambda y: (jax.jit(lambda y: None)(y.astype(HALF)), jnp.sum(y))[1],
    "jit of integers": lambda y: jnp.sum(y * jax.jit(lambda y: (y > 0) * 1)(y.astype(HALF))),
    "print in checkpoint": lambda y: jnp.sum(jax.checkpoint(lambda y: (jax.debug.print("{}", y[0, 0]), y)[1])(cast(y))),
    "print in a branch": lambda y: (jax.lax.cond(y[0, 0] > 0, lambda y: jax.debug.print("{}", y[0]), lambda y: None, y.astype(HALF)), jnp.sum(y))[1],
}  # fmt: skip
AROUND_BOTH = {
    "scale_backward": scale_backward,
    "autocast": jaxscale.autocast,
    "scale_backward of autocast": lambda fun: scale_backward(jaxscale.autocast(fun)),
    "autocast of scale_backward": lambda fun: jaxscale.autocast(scale_backward(fun)),
}


@pytest.mark.standard_promotion
@cases(
    "beside, around",
    itertools.product(BESIDE, AROUND_BOTH),
    fast=[
        ("cross-entropy", "scale_backward of autocast"),
        ("custom_jvp", "autocast of scale_backward"),
        ("print", "scale_backward"),
        ("jit of integers", "scale_backward of autocast"),
    ],
)
def test_an_equation_without_outputs_is_one_like_others(beside, around, capfd):
    def loss(p):
        return BESIDE[beside](classified(p, X))

    got, expected = (jax.jit(jax.grad(fun))(PARAMS) for fun in (AROUND_BOTH[around](loss), loss))
    assert error(got, expected) < 2 * ACCURACY


def test_effects_happen_as_often_as_in_the_program_itself():
    seen = []

    def loss(p):
        y = classified(p, X)
        jax.debug.callback(lambda y: seen.append("half"), y.astype(HALF))
        jax.debug.callback(lambda y: seen.append("float32"), jnp.sum(y**2))
        return jnp.sum(y**2)

    for fun in (loss, scale_backward(loss), scale_backward(jaxscale.autocast(loss))):
        seen.clear()
        jax.block_until_ready(jax.jit(jax.value_and_grad(fun))(PARAMS))
        jax.effects_barrier()
        assert sorted(seen) == ["float32", "half"]


def block(x, w, b):
    return x + jnp.tanh(x.astype(HALF) @ w.astype(HALF)).astype(jnp.float32) + b[None]


def chain(layer, p, number):
    x = X
    for i in range(number):
        x = layer(x, p["w"][i % 3], p["b"])
    return jnp.mean(x**2)


def side_by_side(layer, p, number):
    return sum(jnp.mean(layer(X, p["w"][i % 3], p["b"]) ** 2) for i in range(number))


OFTEN = {
    "chain": (scale_backward, chain, jax.jit),
    "side by side": (scale_backward, side_by_side, jax.jit),
    "checkpoints": (scale_backward, chain, jax.checkpoint),
    "checkpoints side by side": (scale_backward, side_by_side, jax.checkpoint),
    "autocast inside": (AROUND_BOTH["scale_backward of autocast"], chain, jax.jit),
    "autocast outside": (AROUND_BOTH["autocast of scale_backward"], chain, jax.jit),
}


@pytest.mark.standard_promotion
@cases("name", OFTEN, fast=["chain", "side by side", "checkpoints side by side"])
def test_a_block_that_is_called_often_stays_one_function(name):
    """So the program grows with the number of calls as it does without the boundary."""
    wrap, model, called = OFTEN[name]

    def sizes(number, wrap):
        grad = jax.grad(wrap(lambda p: model(called(block), p, number)))
        lowered = jax.jit(grad).lower(PARAMS).as_text()
        lines = str(jax.make_jaxpr(grad)(PARAMS)).count("\n"), lowered.count("\n")
        return np.array([*lines, lowered.count("func.func")])

    few, many = (sizes(number, wrap) for number in (4, 24))
    plain_few, plain_many = (sizes(number, lambda fun: fun) for number in (4, 24))
    assert few[2] == many[2]
    assert all((many - few)[:2] < 3 * (plain_many - plain_few)[:2])


def looped(kind):
    """A loop of Equinox, a `custom_vjp` function that asks what has a derivative, over a batch.

    Its time is one number for the whole batch.
    """

    def fun(p, x):
        def body(carry):
            time, y = carry
            return time + 1, jnp.tanh(cast(y @ p["w"][0]) + p["b"])

        carry = jnp.float32(0), x
        return eqxi.while_loop(lambda c: c[0] < 3, body, carry, max_steps=4, kind=kind)

    def loss(p):
        time, y = jax.vmap(fun, (None, 0), (None, 0))(p, X)
        return jnp.mean(y**2) + 0 * jax.lax.stop_gradient(time)

    return loss


@functools.partial(jax.custom_jvp)
def shifted(y, shift):
    return y + shift


@functools.partial(shifted.defjvp, symbolic_zeros=True)
def _(primals, tangents):
    assert isinstance(tangents[1], SymbolicZero), "a shift has no derivative"
    return shifted(*primals), tangents[0]


def test_a_rule_after_the_boundary_sees_what_has_no_tangent():
    """Though the call that returns it returns something that has one, too."""
    layer = jax.jit(lambda p, x: (net(p, x), net(PARAMS, x)))

    def loss(p):
        return jnp.mean(shifted(*layer(p, X)) ** 2)

    assert error(jax.grad(scale_backward(loss))(PARAMS), jax.grad(loss)(PARAMS)) < ACCURACY


@pytest.mark.skipif(
    getattr(jax.config, "jax_custom_vjp3", False),
    reason="the loop of Equinox fails without jaxscale, too, under JAX_CUSTOM_VJP3",
)
@pytest.mark.standard_promotion
@cases("around", AROUND_BOTH, fast=["scale_backward", "autocast"])
def test_what_has_no_derivative_has_none_at_the_boundary_either(around):
    """JAX refuses a cotangent for what a batch shares, even one of zeros."""
    loss = looped("checkpointed")
    got, expected = (jax.jit(jax.grad(fun))(PARAMS) for fun in (AROUND_BOTH[around](loss), loss))
    assert error(got["w"], expected["w"]) < ACCURACY


def test_the_loop_holds_gradients_of_cast_parameters_in_half_precision():
    params = [PARAMS["w"][0], PARAMS["b"]]
    fun = scale_backward(lambda p: loss_of(lambda _, x: net({"w": p[:1] * 3, "b": p[1]}, x))(p))
    (loop,) = named("while", jax.grad(fun), params)
    carried = [var.aval for var in loop.outvars if var.aval.shape]
    assert {aval.shape for aval in carried} == {(8, 8), (8,)}
    assert {aval.dtype for aval in carried} == {jnp.dtype(HALF)}


ERRORS = {
    "not a function": (lambda: scale_backward(PARAMS), TypeError, "fun.*must be a function"),
    "scale text": (lambda: scale_backward(net, "dynamic"), ValueError, 'must be "auto"'),
    "scale 0": (lambda: scale_backward(net, 0), ValueError, "scale=.*normal range"),
    "scale array": (lambda: scale_backward(net, jnp.ones(())), TypeError, "scale="),
    "retries": (lambda: scale_backward(net, retries=-1), ValueError, "retries=.*-1"),
    "forward mode": (lambda: jax.jvp(scale_backward(loss_of(net)), (PARAMS,), (PARAMS,)), TypeError, "forward mode.*jax.grad"),
    "second derivative": (lambda: jax.jit(jax.grad(second(scale_backward(loss_of(net)))))(PARAMS), TypeError, "retries=2.*retries=0"),
    "float16 parameter": (lambda: jax.grad(loss_of(scale_backward(net)))(PARAMS | {"b": PARAMS["b"].astype(HALF)}), TypeError, r"args\[0\]\['b'\], which is float16.*cast them inside"),
    "float16 closure": (lambda: jax.grad(lambda p: jnp.sum(scale_backward(lambda x: x @ p)(X.astype(HALF)).astype(jnp.float32)))(jnp.ones((8, 8), HALF)), TypeError, "closes over, which is float16"),
    "float16 output": (lambda: jax.grad(lambda p: jnp.sum(scale_backward(lambda p: {"y": net(p, X).astype(HALF)})(p)["y"]))(PARAMS), TypeError, r"output \['y'\] is float16.*astype\(jnp.float32\)"),
    "float16 output under autocast": (lambda: jax.grad(jaxscale.autocast(lambda p: jnp.sum(scale_backward(lambda p: net(p, X).astype(HALF))(p))))(PARAMS), TypeError, "output is float16"),
}  # fmt: skip


@cases("name", ERRORS)
def test_errors_say_what_to_do(name):
    call, kind, message = ERRORS[name]
    with pytest.raises(kind, match=re.compile(f"scale_backward.*{message}", re.DOTALL)):
        call()


def test_the_power_is_exact():
    for size in (2.0**-149, 2.0**-126, 3e-20, 0.999, 1.0, 1.5, 65504.0, 3e38):
        power = float(choose_power(jnp.array([size, 0.0, size / 4], jnp.float32), 4))
        exponent = np.clip(-np.floor(np.log2(np.float64(np.float32(size)))), -126, 126)
        assert power == 2.0**exponent, size
    for others, power in ((jnp.inf, 1), (2.0**-14, 4), (2.0**-40, 16)):
        assert choose_power(jnp.array([1.0, others], jnp.float32), 4) == power


# Models of libraries: each row makes what comes out besides the gradients, and these, of a model
# in which `scale_backward`, or nothing, is in its place.
class Linen(nn.Module):
    dtype: object

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(16, dtype=self.dtype)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=False, dtype=self.dtype)(x))
        self.sow("intermediates", "hidden", x)
        x = nn.Dropout(0.5, deterministic=False)(x)
        return nn.Dense(8, dtype=self.dtype)(x).astype(jnp.float32)


def linen(of_apply, of_loss, dtype, factor):
    apply, keys = of_apply(Linen(dtype).apply), [jax.random.key(i) for i in range(3)]
    variables = jax.jit(Linen(dtype).init)({"params": keys[0], "dropout": keys[1]}, X)
    how = {"rngs": {"dropout": keys[2]}, "mutable": ["batch_stats", "intermediates"]}

    def loss_fn(params):
        out, updates = apply(variables | {"params": params}, X, **how)
        return factor * jnp.mean((out - Y) ** 2), updates

    return jax.jit(jax.value_and_grad(of_loss(loss_fn), has_aux=True))(variables["params"])


class Network(nnx.Module):
    def __init__(self, dtype):
        self.rngs = nnx.Rngs(0)  # of which any attribute is a stream
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))
        how = {"dtype": dtype, "rngs": self.rngs}
        lora = nnx.LoRA(8, 2, 16, base_module=nnx.Linear(8, 16, **how), **how)
        lora.lora_b[...] = jnp.full((2, 16), 0.1)
        norm, dropout = nnx.BatchNorm(16, **how), nnx.Dropout(0.5, rngs=self.rngs)
        self.layers = nnx.Sequential(lora, norm, nnx.relu, dropout, nnx.Linear(16, 8, **how))

    def __call__(self, x):
        self.calls[...] += 1
        return self.layers(x).astype(jnp.float32)


def objects(place, argnums, wrap, dtype, factor):
    model = Network(dtype)
    loss_fn = functools.partial(AROUND[place], wrap, factor)
    loss, grads = nnx.jit(nnx.value_and_grad(loss_fn, argnums=argnums))(model)
    return (loss, nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.RngKey)))), grads


class Equinox(eqx.Module):
    mlp: eqx.nn.MLP
    dtype: object

    def __call__(self, x):
        params, rest = eqx.partition(self.mlp, eqx.is_array)
        half = eqx.combine(jax.tree.map(lambda p: p.astype(self.dtype), params), rest)
        return jax.vmap(half)(x.astype(self.dtype)).astype(jnp.float32)


def equinox(place, wrap, dtype, factor):
    model = Equinox(eqx.nn.MLP(8, 8, 8, 1, jnp.tanh, key=jax.random.key(0)), dtype)
    loss_fn = functools.partial(AROUND[place], wrap, factor)
    return eqx.filter_jit(eqx.filter_value_and_grad(loss_fn))(model)


def mean_of(factor, model):
    return factor * jnp.mean((model(X) - Y) ** 2)


AROUND = {
    "loss": lambda wrap, factor, model: wrap(mean_of)(factor, model),
    "module": lambda wrap, factor, model: mean_of(factor, wrap(model)),
    "method": lambda wrap, factor, model: mean_of(factor, wrap(model.__call__)),
    "keyword": lambda wrap, factor, m: wrap(lambda *, model: mean_of(factor, model))(model=m),
}
BUILT = {
    "Linen, apply": lambda wrap, *how: linen(wrap, lambda fun: fun, *how),
    "Linen, loss": functools.partial(linen, lambda fun: fun),
}
LORA = nnx.DiffState(0, nnx.LoRAParam)
for place in AROUND:
    BUILT[f"NNX, {place}"] = functools.partial(objects, place, 0)
    BUILT[f"NNX, {place}, LoRA"] = functools.partial(objects, place, LORA)
    BUILT[f"Equinox, {place}"] = functools.partial(equinox, place)
FAST_BUILT = ["Linen, apply", "NNX, loss, LoRA", "NNX, module, LoRA", "Equinox, module"]


@pytest.mark.standard_promotion
@cases("name", BUILT, fast=FAST_BUILT)
def test_models_of_libraries_have_their_gradients_and_change_as_they_do(name):
    others, grads = BUILT[name](scale_backward, HALF, SMALL)
    assert_same_bits(others, BUILT[name](lambda fun: fun, HALF, SMALL)[0])
    _, expected = BUILT[name](lambda fun: fun, jnp.float32, 1.0)
    assert error(grads, expected, SMALL) < 5e-3  # normalization doubles what float16 loses


@cases(
    "form, scale",
    itertools.product(hosts.FORMS, ["auto", hosts.HIGH]),
    fast=[*((form, hosts.HIGH) for form in FAST), ("around called_in_calls", "auto")],
)
def test_devices_agree_by_themselves(form, scale):
    """Otherwise one would wait for the other for ever, or sum what was scaled differently."""
    axis_name = "d" if form == "by_pmap local" else None
    assert hosts.compared(form, hosts.mesh_of(form), scale, axis_name=axis_name)[0] < ACCURACY


def test_a_healthy_run_under_jaxs_check_for_inf_is_the_same():
    grad = jax.grad(scale_backward(jaxscale.autocast(loss_of(net32))))
    expected = jax.jit(grad)(PARAMS)
    with jax.debug_infs(True):
        jax.make_jaxpr(grad)(PARAMS)
        got = jax.jit(grad)(PARAMS)
    assert_same_bits(*map(jax.tree.leaves, (got, expected)))
