"""`scale_backward`: the gradients of float32 out of a backward pass in float16, and no state."""

import functools
import inspect
import itertools
import re

import half_programs
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec
from tables import assert_same_bits, cases
from training import x64

import jaxscale
from jaxscale import scale_backward
from jaxscale._gradients.boundary import _power

HALF = jnp.float16
rng = np.random.default_rng(0)
X, Y = (jnp.asarray(rng.standard_normal((4, 8)), jnp.float32) for _ in range(2))
PARAMS = {
    "w": jnp.asarray(rng.standard_normal((3, 8, 8)) * 0.3, jnp.float32),
    "b": jnp.linspace(-0.1, 0.1, 8),
}
ACCURACY = 2e-3  # of float16 in these small networks; rounding alone costs 6e-4
SMALL = 2.0**-30  # a loss that float16 flushes all gradients of
HIGH = 2.0**52  # a scale at which that loss overflows twice, and no more


def net(p, x, dtype=HALF):
    for i in range(3):
        x = jnp.tanh(x.astype(dtype) @ p["w"][i].astype(dtype) + p["b"].astype(dtype)[None])
    return x.astype(jnp.float32)


net32 = functools.partial(net, dtype=jnp.float32)


def loss_of(model, factor=SMALL):
    return lambda p, x=X, y=Y: factor * jnp.mean((model(p, x) - y) ** 2)


REFERENCE = jax.grad(loss_of(net32, 1.0))(PARAMS)


def error(got, expected, factor=1.0):
    """The norm of a difference, of gradients that are divided by a factor, beside the norm."""
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True)
    pairs = [(np.asarray(a, np.float64) / factor, np.asarray(b, np.float64)) for a, b in pairs]
    difference = sum(np.sum((a - b) ** 2) for a, b in pairs)
    return np.sqrt(difference / sum(np.sum(b**2) for _, b in pairs))


def named(name, fun, *args):
    """The equations of a name in a function."""
    program = jax.make_jaxpr(fun)(*args)
    return [eqn for eqn in half_programs.equations(program) if eqn.primitive.name == name]


def over_micro_batches(factor):
    def grad(p):
        one = scale_backward(lambda p, x, y: loss_of(net, factor / 4)(p, x[None], y[None]))
        add = functools.partial(jax.tree.map, jnp.add)
        zeros = jax.tree.map(jnp.zeros_like, p)
        return jax.lax.scan(lambda g, xy: (add(g, jax.grad(one)(p, *xy)), None), zeros, (X, Y))[0]

    return grad


def scanned(p, x, dtype=HALF):
    def layer(x, w):
        return jnp.tanh(x @ w.astype(dtype) + p["b"].astype(dtype)[None]), None

    return jax.lax.scan(layer, x.astype(dtype), p["w"])[0].astype(jnp.float32)


def mixed(p, x, dtype=HALF):
    return net32(p, net(p, x, dtype) + x)


def called_twice(p, x, dtype=HALF):
    layer = jax.jit(lambda w: jnp.tanh((x.astype(dtype) @ w.astype(dtype)).astype(jnp.float32)))
    return layer(p["w"][0]) + p["b"][None] * layer(p["w"][1])


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
    "autocast of grad": lambda f: jaxscale.autocast(jax.grad(scale_backward(loss_of(net32, f)))),
}  # fmt: skip
MODELS = {"one call twice": called_twice, "autocast of mixed": mixed}  # else `net`


@cases(
    "place, exponent",
    [(place, e) for place in PLACES for e in (-60, 40)],
    fast=[("loss", -60), ("model", 40), ("one call twice", -60), ("autocast outside", -60)],
)
def test_gradients_are_right_whatever_the_size_of_the_loss(place, exponent):
    grads = jax.jit(PLACES[place](2.0**exponent))(PARAMS)
    model = functools.partial(MODELS.get(place, net), dtype=jnp.float32)
    assert error(grads, jax.grad(loss_of(model, 1.0))(PARAMS), 2.0**exponent) < ACCURACY
    assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype(jnp.float32)}


def test_without_it_they_are_not():
    assert error(jax.grad(loss_of(net))(PARAMS), REFERENCE, SMALL) > 0.99


def test_a_small_loss_beside_a_large_one():
    """Even where both go through one boundary, and so have one scale."""

    def both(net, q):
        small = 1e-6 * jnp.mean((net(q["p"], X) - Y) ** 2)
        return small + jnp.mean(jnp.sin(net(q["q"], X)))

    params = {"p": PARAMS, "q": {"w": PARAMS["w"][::-1], "b": PARAMS["b"]}}
    grads = jax.jit(jax.grad(scale_backward(functools.partial(both, net))))(params)
    assert error(grads["p"], REFERENCE, 1e-6) < ACCURACY
    assert error(grads, jax.grad(functools.partial(both, net32))(params)) < ACCURACY


@cases("retries", [0, 1, 2], fast=[1, 2])
def test_an_overflow_is_repeated_at_a_lower_scale(retries):
    """And what stays bad comes out as it is, for the optimizer to skip."""
    high = HIGH if retries == 2 else HIGH / 16
    fun = scale_backward(loss_of(net), high, retries=retries)
    grads = jax.jit(jax.grad(fun))(PARAMS)
    assert jaxscale.all_finite(grads) == (retries > 0)
    if retries:
        assert error(grads, REFERENCE, SMALL) < ACCURACY
    higher = jax.jit(jax.grad(scale_backward(loss_of(net), high * 2.0**12, retries=retries)))
    assert not jaxscale.all_finite(higher(PARAMS))


def test_bad_cotangents_are_not_repeated_and_stay_bad():
    runs = []

    @jax.custom_vjp
    def watched(x):
        return x

    def backward(_, ct):
        jax.debug.callback(lambda: runs.append(1))
        return (ct,)

    watched.defvjp(lambda x: (x, None), backward)
    fun = scale_backward(lambda w: jnp.sum(watched(w.astype(HALF)).astype(jnp.float32)))
    for factor, finite in ((jnp.inf, False), (jnp.nan, False), (1.0, True)):
        grads = jax.jit(jax.grad(lambda w, f=factor: f * fun(w)))(jnp.ones(3))
        assert jnp.isfinite(grads).all() == finite
    jax.effects_barrier()
    assert len(runs) == 3


def test_values_keep_their_bits_and_are_computed_once():
    runs = []

    def counted(p, x=X, y=Y):
        jax.debug.callback(lambda: runs.append(1))
        return loss_of(net)(p, x, y)

    fun = scale_backward(counted, HIGH)
    value, grads = jax.jit(jax.value_and_grad(fun))(PARAMS)
    jax.effects_barrier()
    assert len(runs) == 1  # and two retries
    assert error(grads, REFERENCE, SMALL) < ACCURACY
    assert_same_bits(value, jax.jit(jax.value_and_grad(loss_of(net)))(PARAMS)[0])
    assert_same_bits(jax.jit(fun)(PARAMS), jax.jit(loss_of(net))(PARAMS))
    for each in (loss_of(net), fun):
        assert len(named("dot_general", jax.grad(each), PARAMS)) == 8


def test_each_member_of_a_vmap_has_its_own_scale():
    factors = 2.0 ** jnp.array([-60.0, 0.0, 30.0])
    scaled = scale_backward(net)
    grads = jax.jit(jax.vmap(lambda f: jax.grad(loss_of(scaled, f))(PARAMS)))(factors)
    for i in range(3):
        one = jax.tree.map(lambda g, i=i: g[i], grads)
        assert error(one, REFERENCE, float(factors[i])) < ACCURACY
    # At a fixed scale only the second overflows, and only that is repeated.
    fixed = jax.vmap(lambda f: jax.grad(scale_backward(loss_of(net, f), 2.0**22))(PARAMS))
    second = jax.tree.map(lambda g: g[1], fixed(factors / 16))
    assert error(second, REFERENCE, 1 / 16) < ACCURACY


def test_what_is_no_array_of_numbers_passes():
    def fun(p, n, *, batch, key, **others):
        y = net(p, X)
        out = {"n": n + 1, "key": jax.random.split(key)[0], "batch": batch * 2, "list": [y]}
        out |= {"sown": y.astype(HALF), "sign": n > 2} | others
        return SMALL * jnp.mean((y - Y) ** 2), out

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


def test_float16_outputs_that_no_loss_depends_on_pass_in_a_scan():
    """Such as activations that a model sows for plots."""
    fun = scale_backward(lambda p, c: (c + loss_of(net)(p), net(p, X).astype(HALF)))
    for outer in (lambda f: f, jaxscale.autocast):
        loss = outer(lambda p: jax.lax.scan(lambda c, _: fun(p, c), 0.0, length=2)[0])
        assert error(jax.jit(jax.grad(loss))(PARAMS), REFERENCE, 2 * SMALL) < ACCURACY


def test_only_what_is_differentiated_has_a_backward_pass():
    """Frozen weights and batches cost nothing, as in the fine-tuning of a few."""

    for fun in (loss_of(net), scale_backward(loss_of(net))):
        of_biases = jax.grad(lambda b, fun=fun: fun(PARAMS | {"b": b}))
        assert len(named("dot_general", of_biases, PARAMS["b"])) == 5
    unused = scale_backward(lambda p, q: loss_of(net)(p))
    grads = jax.grad(unused, 1)(PARAMS, PARAMS)
    assert all((g == 0).all() for g in jax.tree.leaves(grads))
    stopped = scale_backward(lambda p: loss_of(net)(jax.lax.stop_gradient(p)))
    assert all((g == 0).all() for g in jax.tree.leaves(jax.grad(stopped)(PARAMS)))

    def beside_a_target(p):
        target = jax.lax.stop_gradient(net(p, -X).astype(HALF)).astype(jnp.float32)
        return loss_of(net)(p) + 2.0**20 * jnp.sum(target)

    # Nor do the cotangents of what is not differentiated say anything about the scale.
    assert error(jax.grad(scale_backward(beside_a_target))(PARAMS), REFERENCE, SMALL) < ACCURACY


def test_float32_alone_is_exact():
    """A penalty, and a parameter that only the float32 part reads."""

    def fun(net, p):
        return loss_of(net)(p) + 2.0**-40 * jnp.sum(p["w"] ** 2) + jnp.sum(p["only"] ** 3)

    params = PARAMS | {"only": jnp.linspace(0.3, 0.7, 3)}
    grads = jax.grad(scale_backward(functools.partial(fun, net)))(params)
    expected = jax.grad(functools.partial(fun, net32))(params)
    assert_same_bits(grads["only"], expected["only"])
    assert error(grads["w"], expected["w"]) < ACCURACY


@pytest.mark.standard_promotion
def test_float64_parameters_are_unscaled_in_float64():
    """These gradients are below the range of float32."""
    with x64():
        factor, w = np.float64(2.0**-130), PARAMS["w"][0].astype(jnp.float64)

        def loss(w, factor, dtype):
            y = jnp.tanh(X.astype(dtype) @ w.astype(dtype)).astype(jnp.float64)
            return factor * jnp.mean((y - Y) ** 2)

        grads = jax.jit(jax.grad(scale_backward(lambda w: loss(w, factor, HALF))))(w)
        assert grads.dtype == jnp.float64
        assert error(grads, jax.grad(loss)(w, 1.0, jnp.float64), float(factor)) < ACCURACY


def test_complex_parameters():
    c = jnp.full((8, 8), 1 + 1j)

    def fun(p, x):
        return jnp.real(x.astype(HALF).astype(p.dtype) @ p)

    grads = [
        jax.grad(lambda p, f=f: 2.0**-20 * jnp.mean(f(p, X) ** 2))(c)
        for f in (scale_backward(fun), fun)
    ]
    assert_same_bits(*grads)  # all that is scaled is scaled by a power of two


def test_bfloat16_passes():
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS)
    wrapped = scale_backward(lambda p, x: net(p, x).astype(jnp.bfloat16))
    grads = jax.grad(loss_of(lambda p, x: wrapped(p, x).astype(jnp.float32)))(params)
    assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype(jnp.bfloat16)}
    assert error(grads, REFERENCE, SMALL) < 2e-2  # bfloat16 rounds to 2**-9


@pytest.mark.standard_promotion  # of the programs themselves
@cases("name", half_programs.PROGRAMS, fast=["mlp", "own_precision"])
def test_autocast_is_the_same_inside_and_outside(name):
    fun, args = half_programs.PROGRAMS[name]

    def grads(wrap):
        return jax.grad(lambda p, *args: jax.tree.leaves(wrap(fun)(p, *args))[0] * SMALL)

    expected = jax.jit(grads(lambda f: f))(*args)
    products = []
    for wrap in (
        jaxscale.autocast,
        lambda f: scale_backward(jaxscale.autocast(f)),
        lambda f: jaxscale.autocast(scale_backward(f)),
    ):
        found = named("dot_general", grads(wrap), *args)
        products.append(sum(eqn.outvars[0].aval.dtype == HALF for eqn in found))
    assert error(jax.jit(grads(wrap))(*args), expected) < ACCURACY
    # Where a backward pass is rewritten, outer products and sums of products run in float32.
    if name not in ("over_devices", "second_derivatives"):
        assert len(set(products)) == 1


def test_in_a_step_with_a_loss_scale_both_divide_out():
    tx = jaxscale.loss_scaled(optax.sgd(1.0), 2.0**20)
    step = jax.jit(jaxscale.train_step(scale_backward(loss_of(net, 1.0)), tx))
    params, state, _ = step(PARAMS, tx.init(PARAMS))
    assert error(jax.tree.map(jnp.subtract, PARAMS, params), REFERENCE) < ACCURACY
    assert state.total_notfinite == 0


def second(loss):
    return lambda p: sum(jnp.sum(g**2) for g in jax.tree.leaves(jax.grad(loss)(p)))


def test_second_derivatives():
    wrapped = scale_backward(loss_of(net, 1.0))
    products = [
        jax.jit(lambda p, f=f: jax.jvp(jax.grad(f), (p,), (p,))[1])(PARAMS)
        for f in (wrapped, loss_of(net32, 1.0))
    ]
    assert error(*products) < ACCURACY
    no_loop = scale_backward(loss_of(net, 1.0), retries=0)
    assert not named("while", jax.grad(no_loop), PARAMS)
    got, expected = (jax.jit(jax.grad(second(f)))(PARAMS) for f in (no_loop, loss_of(net32, 1.0)))
    assert error(got, expected) < 2 * ACCURACY  # rounded in two backward passes


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


def test_a_debugger_of_nans_sees_none_in_a_pass_that_is_repeated():
    with jax.debug_nans(True):
        grads = jax.jit(jax.grad(scale_backward(loss_of(net), HIGH)))(PARAMS)
    assert error(grads, REFERENCE, SMALL) < ACCURACY


def test_the_power_is_exact():
    for size in (2.0**-149, 2.0**-126, 3e-20, 0.999, 1.0, 1.5, 65504.0, 3e38):
        power = float(_power(jnp.array([size, 0.0, size / 4], jnp.float32), 4))
        exponent = np.clip(-np.floor(np.log2(np.float64(np.float32(size)))), -126, 126)
        assert power == 2.0**exponent, size
    for others, power in ((jnp.inf, 1), (2.0**-14, 4), (2.0**-40, 16)):
        assert _power(jnp.array([1.0, others], jnp.float32), 4) == power


# Two devices with losses of different size. Each function is the loss of one of them.
MESH = Mesh(np.array(jax.devices()[:2]), ("d",))
P = PartitionSpec
XS, YS = jnp.concatenate([X, X / 2]), jnp.concatenate([Y, Y])
GIVEN = PARAMS, XS, YS, jnp.array([2.0**-30, 2.0**-34])


def local(dtype, p, x, y, factor):
    return jnp.sum(factor) * jnp.mean((net(p, x, dtype) - y) ** 2)


def summed(*args):
    return jax.lax.psum(local(*args), "d")


def sharded(dtype, p, *args):
    return summed(dtype, p | {"w": jax.lax.all_gather(p["w"], "d", axis=2, tiled=True)}, *args)


def normalized(dtype, p, x, y, factor):
    """Devices exchange numbers in the half-precision part, forward and backward."""
    x = net(p, x, dtype).astype(dtype)
    x = (x - jax.lax.pmean(x, "d")).astype(jnp.float32)
    return jnp.sum(factor) * jnp.mean((x - y) ** 2)


def called_in_calls(dtype, p, x, *more):
    """Calls in calls, which do not take the same."""
    inner = jax.jit(functools.partial(summed, dtype))
    return jax.jit(lambda p, x, more: inner(p, x, *more))(p, x, more)


def on_each(form, loss, wrap, dtype):
    """The gradients that each device has."""
    grad = jax.grad(wrap(functools.partial(loss, dtype)))
    if form == "pmap":
        split = [x.reshape(2, -1, *x.shape[1:]) for x in GIVEN[1:]]
        mapped = jax.pmap(grad, "d", in_axes=(None, 0, 0, 0), devices=jax.devices()[:2])
        return mapped(PARAMS, *split)
    of_params = {"w": P(None, None, "d") if loss is sharded else P(), "b": P()}
    specs = {"in_specs": (of_params, *[P("d")] * 3), "out_specs": P("d")}
    one = jax.shard_map(
        lambda *args: jax.tree.map(lambda g: g[None], grad(*args)),
        mesh=MESH,
        check_vma=form == "checked",
        **specs,
    )
    return jax.jit(one)(*GIVEN)


MAPPED = list(itertools.product(["checked", "unchecked"], [local, summed, sharded, normalized]))
MAPPED += [("pmap", local), ("pmap", summed), ("pmap", normalized)]


@cases("form, loss", MAPPED, fast=[("checked", summed), ("unchecked", local), ("pmap", normalized)])
@cases("scale", ["auto", HIGH], fast=[HIGH])
def test_devices_agree_by_themselves(form, loss, scale):
    """Otherwise one would wait for the other for ever, or sum what was scaled differently."""
    axis_name = "d" if (form, loss) == ("pmap", local) else None
    wrap = functools.partial(scale_backward, scale=scale, axis_name=axis_name)
    expected = on_each(form, loss, lambda f: f, jnp.float32)
    assert error(on_each(form, loss, wrap, HALF), expected) < 2 * ACCURACY


@cases("scale", ["auto", HIGH], fast=["auto"])
@cases("checked", [True, False], fast=[True])
@cases("loss", [summed, called_in_calls], fast=[called_in_calls])
def test_a_shard_map_around_the_loss(scale, checked, loss):
    """What follows the last half-precision value in it is unscaled, too; one axis is XLA's."""

    def grads(wrap, dtype):
        mapped = jax.shard_map(
            functools.partial(loss, dtype),
            mesh=Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("auto", "d")),
            in_specs=(P(), *[P("d")] * 3),
            out_specs=P(),
            axis_names={"d"},
            check_vma=checked,
        )
        return jax.jit(jax.grad(wrap(mapped)))(*GIVEN)

    wrap = functools.partial(scale_backward, scale=scale)
    assert error(grads(wrap, HALF), grads(lambda f: f, jnp.float32)) < ACCURACY


def test_axes_that_are_told_apart_are_left_alone_where_nothing_differs():
    fun = scale_backward(loss_of(net), HIGH, axis_name="d")
    mapped = jax.shard_map(jax.grad(fun), mesh=MESH, in_specs=P(), out_specs=P())
    assert error(jax.jit(mapped)(PARAMS), REFERENCE, SMALL) < ACCURACY


def test_devices_with_parameters_of_their_own_have_scales_of_their_own():
    def grads(p, factor):
        def one(p):
            return loss_of(net, factor[0])(jax.tree.map(lambda x: x[0], p))

        return jax.grad(scale_backward(one, HIGH))(p)

    mapped = jax.shard_map(grads, mesh=MESH, in_specs=P("d"), out_specs=P("d"))
    found = jax.jit(mapped)(jax.tree.map(lambda x: jnp.stack([x, x]), PARAMS), GIVEN[-1])
    for i, factor in enumerate(GIVEN[-1].tolist()):
        assert error(jax.tree.map(lambda g, i=i: g[i], found), REFERENCE, factor) < ACCURACY


@cases("kind", ["Auto", "Explicit"], fast=["Auto"])
def test_sharded_over_eight_devices(kind):
    mesh = jax.make_mesh((8,), ("d",), axis_types=(getattr(AxisType, kind),))
    with jax.sharding.use_mesh(mesh) if hasattr(jax.sharding, "use_mesh") else jax.set_mesh(mesh):
        params = jax.device_put(PARAMS, jax.NamedSharding(mesh, P()))
        x, y = (
            jax.device_put(jnp.tile(a, (2, 1)), jax.NamedSharding(mesh, P("d"))) for a in (X, Y)
        )
        grads = jax.jit(jax.grad(scale_backward(loss_of(net), HIGH)))(params, x, y)
    assert error(jax.device_get(grads), REFERENCE, SMALL) < ACCURACY
