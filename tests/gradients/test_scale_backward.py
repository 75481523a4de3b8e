"""`scale_backward`: the gradients of float32 out of a backward pass in float16, and no state."""

import functools
import inspect
import itertools

import half_programs
import hosts
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scaled_networks import (
    ACCURACY,
    HALF,
    HIGH,
    PARAMS,
    REFERENCE,
    SMALL,
    X,
    Y,
    equations_named,
    error,
    loss_of,
    member,
    net,
    net32,
    outside,
    second,
    unchanged,
)
from tables import assert_same_bits, cases
from training import x64

import jaxscale
from jaxscale import scale_backward
from jaxscale._gradients.cotangent_scale import choose_power

# Models that are differentiated, besides `net`.


def scanned(p, x, dtype=HALF):
    def layer(x, w):
        return jnp.tanh(x @ w.astype(dtype) + p["b"].astype(dtype)[None]), None

    return jax.lax.scan(layer, x.astype(dtype), p["w"])[0].astype(jnp.float32)


def mixed(p, x, dtype=HALF):
    return net32(p, net(p, x, dtype) + x)


def called_twice(p, x, dtype=HALF):
    layer = jax.jit(
        lambda w: jnp.tanh((x.astype(dtype) @ w.astype(dtype)).astype(jnp.float32))
    )
    return layer(p["w"][0]) + p["b"][None] * layer(p["w"][1])


# Where `scale_backward` is put: each makes the gradient of a loss times a factor.


def around_loss(f):
    return jax.grad(scale_backward(loss_of(net, f)))


def around_model(f):
    return jax.grad(loss_of(scale_backward(net), f))


def around_both(f):
    return jax.grad(scale_backward(loss_of(scale_backward(net), f)))


def around_remat(f):
    return jax.grad(scale_backward(jax.checkpoint(jax.jit(loss_of(net, f)))))


def inside_remat(f):
    return jax.grad(jax.checkpoint(scale_backward(loss_of(net, f))))


def around_closure(f):
    def loss(p):
        def model(_, x):
            return scale_backward(lambda x: net(p, x))(x)

        return loss_of(model, f)(p)

    return jax.grad(loss)


def over_micro_batches(f):
    one = jax.grad(
        scale_backward(lambda p, x, y: loss_of(net, f / 16)(p, x[None], y[None]))
    )

    def grad(p):
        grads = jax.lax.map(lambda xy: one(p, *xy), (X, Y))
        return jax.tree.map(lambda leaf: leaf.sum(0), grads)

    return grad


def over_layers(f):
    return jax.grad(scale_backward(loss_of(scanned, f)))


def one_call_twice(f):
    return jax.grad(scale_backward(loss_of(called_twice, f)))


def around_autocast(f):
    return jax.grad(scale_backward(jaxscale.autocast(loss_of(net32, f))))


def inside_autocast(f):
    return jax.grad(outside(loss_of(net32, f)))


def inside_autocast_mixed(f):
    return jax.grad(outside(loss_of(mixed, f)))


def sow(f):
    """Float16 outputs that no loss depends on, such as activations for plots, in a scan."""
    fun = scale_backward(lambda p, c: (c + loss_of(net, f / 2)(p), net(p, X, out=HALF)))
    return lambda p: jax.lax.scan(lambda c, _: fun(p, c), 0.0, length=2)[0]


def sowing(f):
    return jax.grad(sow(f))


def sowing_in_autocast(f):
    return jax.grad(jaxscale.autocast(sow(f)))


def beside_a_target(f):
    """The cotangents of what is not differentiated say nothing about the scale."""

    def loss(p):
        target = jax.lax.stop_gradient(net(p, -X, out=HALF)).astype(jnp.float32)
        return loss_of(net, f)(p) + 2.0**50 * f * jnp.sum(target)

    return jax.grad(scale_backward(loss))


def in_a_population(f):
    """Each member has its own scale."""

    def grad(p):
        factors = f * 2.0 ** jnp.array([-40.0, 0.0, 40.0])
        grads = jax.vmap(lambda f: around_model(f)(p))(factors)
        return member(grads, 1)

    return grad


def told_apart(f):
    """Where nothing differs, an axis that devices can be told apart by is left alone."""
    grad = jax.grad(scale_backward(loss_of(net, f), HIGH * SMALL / f, axis_name="d"))
    return jax.shard_map(
        grad, mesh=hosts.mesh_of(""), in_specs=hosts.P(), out_specs=hosts.P()
    )


def autocast_of_grad(f):
    return jaxscale.autocast(jax.grad(scale_backward(loss_of(net32, f))))


PLACES = {
    "loss": around_loss,
    "model": around_model,
    "both": around_both,
    "remat of jit inside": around_remat,
    "remat outside": inside_remat,
    "closure": around_closure,
    "micro-batches": over_micro_batches,
    "scan over layers": over_layers,
    "one call twice": one_call_twice,
    "autocast inside": around_autocast,
    "autocast outside": inside_autocast,
    "autocast of mixed": inside_autocast_mixed,
    "sowing": sowing,
    "sowing in autocast": sowing_in_autocast,
    "target": beside_a_target,
    "population": in_a_population,
    "told apart": told_apart,
    "autocast of grad": autocast_of_grad,
}
MODELS = {"one call twice": called_twice, "autocast of mixed": mixed}  # else `net`


@cases(
    "place, exponent",
    itertools.product(PLACES, [-60, 40]),
    fast=[
        ("sowing in autocast", -60),
        ("target", 40),
        ("model", 40),
        ("loss", -60),
        ("one call twice", -60),
        ("autocast outside", -60),
        ("population", -60),
        ("told apart", -60),
    ],
)
def test_gradients_are_right_whatever_the_size_of_the_loss(place, exponent):
    grads = jax.jit(PLACES[place](2.0**exponent))(PARAMS)
    model = functools.partial(MODELS.get(place, net), dtype=jnp.float32)
    assert error(grads, jax.grad(loss_of(model, 1.0))(PARAMS), 2.0**exponent) < ACCURACY
    assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype(jnp.float32)}


def test_without_it_a_small_loss_has_no_gradients():
    assert error(jax.grad(loss_of(net))(PARAMS), REFERENCE, SMALL) > 0.99


def test_a_small_loss_beside_a_large_one():
    """Even where both go through one boundary, and so have one scale."""

    def both(net, small, large):
        return loss_of(net, 1e-6)(small) + jnp.mean(jnp.sin(net(large, X)))

    params = PARAMS, {"w": PARAMS["w"][::-1], "b": PARAMS["b"]}
    got = jax.jit(jax.grad(scale_backward(functools.partial(both, net)), (0, 1)))(
        *params
    )
    expected = jax.jit(jax.grad(functools.partial(both, net32), (0, 1)))(*params)
    assert error(got[0], expected[0]) < ACCURACY
    assert error(got[1], expected[1]) < ACCURACY


@cases("axis_name", [None, "d"])
def test_along_an_axis_that_is_named_there_is_one_scale(axis_name):
    """It is that of the large loss, at which the small one has no gradients left."""
    scaled = scale_backward(net, axis_name=axis_name)
    grads = jax.vmap(lambda f: jax.grad(loss_of(scaled, f))(PARAMS), axis_name="d")
    small = member(grads(jnp.array([1.0, SMALL])), 1)
    assert jnp.any(small["w"]) == jnp.any(small["b"]) == (axis_name is None)


# Retries.


@cases("retries", [0, 1, 2], fast=[1, 2])
def test_an_overflow_is_repeated_at_a_lower_scale(retries):
    """In a population by each member alone. What stays bad comes out so, and is skipped later."""
    high = HIGH if retries == 2 else HIGH / 16

    def grad(f):
        return jax.grad(scale_backward(loss_of(net, f), high, retries=retries))(PARAMS)

    # the last needs one retry more
    factors = SMALL * 2.0 ** jnp.array([-16.0, 0.0, 4.0])
    for grads in jax.jit(lambda f: (jax.vmap(grad)(f), jax.lax.map(grad, f)))(factors):
        assert error(member(grads, 0), REFERENCE, SMALL / 2**16) < ACCURACY
        assert jaxscale.all_finite(member(grads, 1)) == (retries > 0)
        assert retries == 0 or error(member(grads, 1), REFERENCE, SMALL) < ACCURACY
        assert not jaxscale.all_finite(member(grads, 2))


def watch(runs):
    """A function that returns what it takes, and adds each run of its two passes to a list."""

    def note(name, value):
        jax.debug.callback(lambda: runs.append(name))
        return value

    watched = jax.custom_vjp(functools.partial(note, "forward"))
    watched.defvjp(
        lambda p: (note("forward", p), None), lambda _, ct: (note("backward", ct),)
    )
    return watched


@cases(
    "factor, scale, passes",
    [(jnp.inf, "auto", 1), (jnp.nan, "auto", 1), (1.0, "auto", 1), (1.0, HIGH, 3)],
)
def test_values_are_computed_once_and_only_what_may_be_finite_is_repeated(
    factor, scale, passes
):
    """Bad cotangents stay bad. A debugger of NaNs sees none in a pass that is repeated."""
    runs = []
    watched = watch(runs)
    fun = scale_backward(lambda p: loss_of(net)(watched(p)), scale)
    with jax.debug_nans(scale == HIGH):
        value, grads = jax.jit(jax.value_and_grad(lambda p: factor * fun(p)))(PARAMS)
    jax.effects_barrier()
    # callbacks have no order
    assert sorted(runs) == ["backward"] * passes + ["forward"]
    assert jaxscale.all_finite(grads) == (factor == 1)
    if factor == 1:
        assert error(grads, REFERENCE, SMALL) < ACCURACY
        assert_same_bits(value, jax.jit(jax.value_and_grad(loss_of(net)))(PARAMS)[0])
        assert_same_bits(jax.jit(fun)(PARAMS), jax.jit(loss_of(net))(PARAMS))


def test_the_loop_holds_gradients_of_cast_parameters_in_half_precision():
    params = [PARAMS["w"][0], PARAMS["b"]]

    @scale_backward
    def fun(p):
        return loss_of(lambda _, x: net({"w": p[:1] * 3, "b": p[1]}, x))(p)

    (loop,) = equations_named("while", jax.grad(fun), params)
    carried = [var.aval for var in loop.outvars if var.aval.shape]
    assert {aval.shape for aval in carried} == {(8, 8), (8,)}
    assert {aval.dtype for aval in carried} == {jnp.dtype(HALF)}


# What passes as it is.


def test_what_is_no_array_of_numbers_passes():
    def fun(p, n, *, batch, key, **others):
        y = net(p, X)
        out = {
            "n": n + 1,
            "key": jax.random.split(key)[0],
            "batch": batch * 2,
            "list": [y],
        }
        return loss_of(net)(p), others | out | {"sown": y.astype(HALF), "sign": n > 2}

    others = {"nothing": None, "text": "text", "function": jnp.tanh}
    # The batch is not differentiated, so it may be float16.
    kwargs = others | {"key": jax.random.key(0), "batch": jnp.ones(2, HALF)}
    wrapped = scale_backward(fun)
    n = jnp.int32(3)
    assert_same_bits(
        arrays_of(wrapped(PARAMS, n, **kwargs)), arrays_of(fun(PARAMS, n, **kwargs))
    )
    grad = jax.value_and_grad(wrapped, (0, 1), has_aux=True, allow_int=True)
    (_, out), (grads, none) = grad(PARAMS, n, **kwargs)
    assert error(grads, REFERENCE, SMALL) < ACCURACY
    assert none.dtype == jax.dtypes.float0
    assert others.items() <= out.items()


def arrays_of(tree):
    return [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]


def test_the_signature_is_that_of_the_function():
    def fun(p, n, *, batch, **others):
        return loss_of(net)(p)

    wrapped = scale_backward(fun)
    assert inspect.signature(wrapped) == inspect.signature(fun)
    assert wrapped.__name__ == "fun"


def test_only_what_is_differentiated_has_a_backward_pass():
    """Frozen weights and batches cost nothing, as in the fine-tuning of a few."""
    for fun in (loss_of(net), scale_backward(loss_of(net))):
        of_biases = jax.grad(lambda b, fun=fun: fun(PARAMS | {"b": b}))
        assert len(equations_named("dot_general", of_biases, PARAMS["b"])) == 5
        assert len(equations_named("dot_general", jax.grad(fun), PARAMS)) == 8


def test_what_is_stopped_or_unused_has_gradients_of_zero():
    stopped = scale_backward(lambda p, q: loss_of(net)(jax.lax.stop_gradient(p)))
    grads = jax.grad(stopped, (0, 1))(PARAMS, PARAMS)
    unused = jax.grad(scale_backward(lambda p, q: loss_of(net)(p)), 1)(PARAMS, PARAMS)
    assert all((g == 0).all() for g in jax.tree.leaves((grads, unused)))


def test_what_is_not_in_half_precision_keeps_its_precision():
    """A penalty, and a parameter that only the float32 part reads."""

    def grad(wrap, net):
        def fun(p):
            x = jnp.real(np.complex64((1 + 0.5j) * np.asarray(X)) @ p["complex"])
            penalty = 2.0**-40 * jnp.sum(p["w"] ** 2) + jnp.sum(p["only"] ** 3)
            return loss_of(lambda p, _: net(p, x))(p) + penalty

        return jax.grad(wrap(fun))(params)

    params = PARAMS | {
        "only": jnp.linspace(0.3, 0.7, 3),
        "complex": jnp.asarray(np.eye(8) * 1j),
    }
    grads = grad(scale_backward, net)
    expected = grad(unchanged, net32)
    assert_same_bits(grads.pop("only"), expected.pop("only"))
    for name in grads:
        assert error(grads[name], expected[name]) < ACCURACY


def test_a_complex_parameter_is_scaled_by_a_power_of_two():
    def model(p, x):
        return jnp.real(x.astype(HALF).astype(p.dtype) @ p)

    def grad(fun):
        return jax.grad(lambda p: 2.0**-20 * jnp.mean(fun(p, X) ** 2))(
            jnp.full((8, 8), 1 + 1j)
        )

    assert_same_bits(grad(scale_backward(model)), grad(model))


@pytest.mark.standard_promotion
@cases(
    "dtype, exponent, accuracy", [("bfloat16", -30, 2e-2), ("float64", -130, ACCURACY)]
)
def test_gradients_have_the_dtype_of_the_parameters(dtype, exponent, accuracy):
    """Those of float64 are below the range of float32 here; bfloat16 rounds to 2**-9."""
    around_model, around_loss = unchanged, scale_backward
    if dtype == "bfloat16":
        around_model, around_loss = scale_backward, unchanged
    with x64():
        params = jax.tree.map(lambda p: p.astype(dtype), PARAMS)
        model = around_model(functools.partial(net, out=dtype))
        loss = loss_of(
            lambda p, x: model(p, x).astype(jnp.float64), np.float64(2.0**exponent)
        )
        grads = jax.jit(jax.grad(around_loss(loss)))(params)
    assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype(dtype)}
    assert error(grads, REFERENCE, 2.0**exponent) < accuracy


# With `autocast`, a loss scale, and derivatives of derivatives.


@pytest.mark.standard_promotion  # of the programs themselves
@cases("name", half_programs.PROGRAMS, fast=["mlp", "own_precision"])
def test_autocast_is_the_same_inside_and_outside(name):
    fun, args = half_programs.PROGRAMS[name]

    def grad_of(wrapped):
        return jax.grad(lambda p, *args: jax.tree.leaves(wrapped(p, *args))[0] * SMALL)

    cast = jaxscale.autocast(fun)
    cast_outside = grad_of(outside(fun))
    assert error(jax.jit(cast_outside)(*args), jax.jit(grad_of(fun))(*args)) < ACCURACY
    # Where a backward pass is rewritten, outer products and sums of products run in float32.
    if name in ("over_devices", "second_derivatives"):
        return
    counts = set()
    for grad in (grad_of(cast), grad_of(scale_backward(cast)), cast_outside):
        products = equations_named("dot_general", grad, *args)
        counts.add(sum(eqn.outvars[0].aval.dtype == HALF for eqn in products))
    assert len(counts) == 1


def test_in_a_step_with_a_loss_scale_both_divide_out():
    tx = jaxscale.loss_scaled(optax.sgd(1.0), 2.0**20)
    step = jax.jit(jaxscale.train_step(scale_backward(loss_of(net, 1.0)), tx))
    params, state, _ = step(PARAMS, tx.init(PARAMS))
    assert error(jax.tree.map(jnp.subtract, PARAMS, params), REFERENCE) < ACCURACY
    assert state.total_notfinite == 0


def test_a_tangent_of_the_gradients():
    def tangent_of_grad(loss):
        return jax.jit(lambda p: jax.jvp(jax.grad(loss), (p,), (p,))[1])(PARAMS)

    got = tangent_of_grad(scale_backward(loss_of(net, 1.0)))
    assert error(got, tangent_of_grad(loss_of(net32, 1.0))) < ACCURACY


def test_second_derivatives_need_a_boundary_of_their_own_and_no_loop():
    def grad_of_penalty(loss):
        return jax.jit(jax.grad(scale_backward(second(loss))))(PARAMS)

    no_loop = scale_backward(loss_of(net, 1.0), retries=0)
    # Rounded in two backward passes, of which the boundary around both scales the second.
    assert (
        error(grad_of_penalty(no_loop), grad_of_penalty(loss_of(net32, 1.0)))
        < 2 * ACCURACY
    )
    assert not equations_named("while", jax.grad(no_loop), PARAMS)


@cases("exponent", [-20, -60], fast=[-20])
def test_a_second_reverse_pass_is_scaled_by_a_boundary_of_its_own(exponent):
    """Without one it flushes, and says so."""
    factor = 2.0**exponent
    penalty = second(scale_backward(loss_of(net, factor), retries=0))
    expected = jax.grad(second(loss_of(net32, 1.0)))(PARAMS)
    got = jax.jit(jax.grad(lambda p: scale_backward(penalty)(p) / factor))(PARAMS)
    assert error(got, expected, factor) < 2 * ACCURACY
    with pytest.warns(
        UserWarning, match=r"retries=0.*second pass is not scaled.*by `scale_backw"
    ):
        alone = jax.jit(jax.grad(lambda p: penalty(p) / factor))(PARAMS)
    assert error(alone, expected, factor) > 0.9


# The scale itself.


@cases("size", [2.0**-149, 2.0**-126, 3e-20, 0.999, 1.0, 1.5, 65504.0, 3e38])
def test_the_power_is_exact(size):
    power = float(choose_power(jnp.array([size, 0.0, size / 4], jnp.float32), 4))
    exponent = np.clip(-np.floor(np.log2(np.float64(np.float32(size)))), -126, 126)
    assert power == 2.0**exponent


@cases("other, power", [(jnp.inf, 1), (2.0**-14, 4), (2.0**-40, 16)])
def test_a_far_smaller_cotangent_raises_the_power_and_one_that_is_not_finite_makes_it_1(
    other, power
):
    assert choose_power(jnp.array([1.0, other], jnp.float32), 4) == power


@cases(
    "form, scale",
    itertools.product(hosts.FORMS, ["auto", hosts.HIGH]),
    fast=[
        ("inside summed", hosts.HIGH),
        ("inside own", hosts.HIGH),
        ("inside local, unchecked", hosts.HIGH),
        ("by_pmap normalized", hosts.HIGH),
        ("by_jit", hosts.HIGH),
        ("around called_in_calls", "auto"),
    ],
)
def test_devices_agree_by_themselves(form, scale):
    """Otherwise one would wait for the other for ever, or sum what was scaled differently."""
    axis_name = "d" if form == "by_pmap local" else None
    assert (
        hosts.compared(form, hosts.mesh_of(form), scale, axis_name=axis_name)[0]
        < ACCURACY
    )


def test_a_healthy_run_under_jaxs_check_for_inf_is_the_same():
    grad = jax.grad(scale_backward(jaxscale.autocast(loss_of(net32))))
    expected = jax.jit(grad)(PARAMS)
    with jax.debug_infs(True):
        jax.make_jaxpr(grad)(PARAMS)
        got = jax.jit(grad)(PARAMS)
    assert_same_bits(jax.tree.leaves(got), jax.tree.leaves(expected))
