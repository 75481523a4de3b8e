"""`scale_backward`: float32-quality gradients from a float16 backward pass, without any state."""

import contextlib
import functools
import inspect
from typing import NamedTuple

import half_programs
import hosts
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from half_programs import autocast_scaled, scaled_autocast
from jax.typing import DTypeLike
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
    net,
    net32,
    squared_grad_norm,
)
from tables import assert_same_bits, cases, member, spread, unchanged
from training import x64

import jaxscale
from jaxscale import scale_backward
from jaxscale._backward import passes
from jaxscale._backward.cotangent_scale import choose_power


@pytest.mark.standard_promotion
def test_a_small_loss_has_its_gradients():
    def loss(w):
        product = jnp.ones((2, 2), "float16") @ w.astype("float16")
        return 2.0**-30 * jnp.sum(product.astype("float32"))

    w = jnp.ones((2, 2))
    assert not jax.grad(loss)(w).any()
    gradient = jax.grad(jaxscale.scale_backward(loss))(w)
    np.testing.assert_array_equal(gradient, np.full((2, 2), 2.0**-29))


# Models that are differentiated, besides `net`, and a loss.


def scanned(p, x, dtype=HALF):
    def layer(x, w):
        return jnp.tanh(x @ w.astype(dtype) + p["b"].astype(dtype)[None]), None

    return jax.lax.scan(layer, x.astype(dtype), p["w"])[0].astype(jnp.float32)


def mixed(p, x, dtype=HALF):
    return net32(p, net(p, x, dtype) + x)


def called_twice(p, x, dtype=HALF):
    @jax.jit
    def layer(w):
        product = x.astype(dtype) @ w.astype(dtype)
        return jnp.tanh(product.astype(jnp.float32))

    return layer(p["w"][0]) + p["b"][None] * layer(p["w"][1])


def sown_loss(f):
    """Returns a loss whose scan body also outputs float16 values, such as activations for plots.

    No loss depends on these.
    """

    @scale_backward
    def add_loss(p, total):
        return total + loss_of(net, f / 2)(p), net(p, X, out=HALF)

    def loss(p):
        total, _ = jax.lax.scan(lambda total, _: add_loss(p, total), 0.0, length=2)
        return total

    return loss


# Where `scale_backward` is put: each function returns the gradient function of a loss times `f`.


def around_loss(f):
    return jax.grad(scale_backward(loss_of(net, f)))


def around_model(f):
    return jax.grad(loss_of(scale_backward(net), f))


def around_remat(f):
    return jax.grad(scale_backward(jax.checkpoint(jax.jit(loss_of(net, f)))))


def inside_remat(f):
    return jax.grad(jax.checkpoint(scale_backward(loss_of(net, f))))


def over_micro_batches(f):
    grad_of_one = jax.grad(scale_backward(loss_of(net, f / 16)))

    def grad(p):
        grads = jax.lax.map(lambda xy: grad_of_one(p, *xy), (X[:, None], Y[:, None]))
        return jax.tree.map(lambda leaf: leaf.sum(0), grads)

    return grad


def over_layers(f):
    return jax.grad(scale_backward(loss_of(scanned, f)))


def one_call_twice(f):
    return jax.grad(scale_backward(loss_of(called_twice, f)))


def around_autocast(f):
    return jax.grad(scale_backward(jaxscale.autocast(loss_of(net32, f))))


def inside_autocast(f):
    return jax.grad(autocast_scaled(loss_of(net32, f)))


def inside_autocast_mixed(f):
    return jax.grad(autocast_scaled(loss_of(mixed, f)))


def sowing(f):
    return jax.grad(sown_loss(f))


def beside_a_target(f):
    """The cotangents of what is not differentiated say nothing about the scale."""

    def loss(p):
        target = jax.lax.stop_gradient(net(p, -X, out=HALF)).astype(jnp.float32)
        return loss_of(net, f)(p) + 2.0**50 * f * jnp.sum(target)

    return jax.grad(scale_backward(loss))


def on_equal_devices(f):
    """Along an axis where nothing differs, devices need no common scale, even if it is named."""
    scale = HIGH * SMALL / f  # `HIGH` is for a loss of size `SMALL`
    loss = scale_backward(loss_of(net, f), scale, axis_name="d")
    whole = hosts.P()
    mesh = hosts.mesh_of("")
    return jax.shard_map(jax.grad(loss), mesh=mesh, in_specs=whole, out_specs=whole)


def autocast_of_grad(f):
    return jaxscale.autocast(jax.grad(scale_backward(loss_of(net32, f))))


PLACES = [
    *(around_loss, around_model, around_remat, inside_remat),
    *(over_micro_batches, over_layers, one_call_twice),
    *(around_autocast, inside_autocast, inside_autocast_mixed, autocast_of_grad),
    *(sowing, beside_a_target, on_equal_devices),
]
MODELS = {one_call_twice: called_twice, inside_autocast_mixed: mixed}  # else `net`


@pytest.mark.device
@cases(
    "place, exponent",
    spread(PLACES, [-60, 40], times=1),
    fast=[(beside_a_target, 40), (inside_autocast, -60), (around_model, -60)],
)
def test_gradients_are_right_whatever_the_size_of_the_loss(place, exponent):
    grads = jax.jit(place(2.0**exponent))(PARAMS)
    model = functools.partial(MODELS.get(place, net), dtype=jnp.float32)
    expected = jax.grad(loss_of(model, 1.0))(PARAMS)
    assert error(grads, expected, 2.0**exponent) < ACCURACY
    assert dtypes_of(grads) == {jnp.dtype(jnp.float32)}


def dtypes_of(tree):
    return {leaf.dtype for leaf in jax.tree.leaves(tree)}


def small_beside_large(model):
    """The sum of two losses, each with parameters of its own."""

    def loss(p):
        small = loss_of(model, 1e-6)(p["small"])
        large = jnp.mean(jnp.sin(model(p["large"], X)))
        return small + large

    return loss


@pytest.mark.worlds
def test_a_small_loss_beside_a_large_one():
    """Even where both go through one boundary, and so have one scale."""
    params = {"small": PARAMS, "large": PARAMS | {"w": PARAMS["w"][::-1]}}
    grads = jax.jit(jax.grad(scale_backward(small_beside_large(net))))(params)
    expected = jax.jit(jax.grad(small_beside_large(net32)))(params)
    for name in params:
        assert error(grads[name], expected[name]) < ACCURACY, name


@pytest.mark.worlds
@cases("axis_name", [None, "d"], fast=["d"])
def test_along_an_axis_that_is_named_there_is_one_scale(axis_name):
    """With `axis_name` it is that of the large loss, where the small one has no gradients left."""
    scaled = scale_backward(net, axis_name=axis_name)
    grads = jax.vmap(lambda f: jax.grad(loss_of(scaled, f))(PARAMS), axis_name="d")
    small = member(grads(jnp.array([1.0, SMALL**2])), 1)
    for leaf in small.values():
        assert jnp.any(leaf) == (axis_name is None)


# Retries.


# The factors of the losses of three members: the first never overflows, and the last once more than
# the second.
FACTORS = np.float32(SMALL * 2.0 ** np.array([-16.0, 0.0, 4.0]))
# The scale to start from, by `retries`. The second member overflows twice from `HIGH`, and once
# from `HIGH / 2**8`: with 0 retries that is not repaired.
START_SCALES = {0: HIGH / 2**8, 1: HIGH / 2**8, 2: HIGH}
MAPS = {"vmap": jax.vmap, "a loop": lambda fun: functools.partial(jax.lax.map, fun)}


@functools.cache
def grads_of_members(retries, mapped):
    def grad(f):
        loss = scale_backward(loss_of(net, f), START_SCALES[retries], retries=retries)
        return jax.grad(loss)(PARAMS)

    grads = jax.jit(MAPS[mapped](grad))(FACTORS)
    return [member(grads, i) for i in range(3)]


@pytest.mark.worlds
@cases("mapped", MAPS)
@cases("retries", START_SCALES, fast=[2])
def test_an_overflow_is_repeated_at_a_lower_scale_by_each_member_alone(retries, mapped):
    """And what still overflows is returned as it is, so that the optimizer can skip the step."""
    first, second, last = grads_of_members(retries, mapped)
    assert error(first, REFERENCE, SMALL / 2**16) < ACCURACY
    if retries:
        assert error(second, REFERENCE, SMALL) < ACCURACY
    else:
        assert not jaxscale.all_finite(second)
    assert not jaxscale.all_finite(last)


def watch(runs):
    """Returns an identity that appends "forward" or "backward" to `runs` as that pass runs."""

    def note(name, value):
        jax.debug.callback(lambda: runs.append(name))
        return value

    watched = jax.custom_vjp(functools.partial(note, "forward"))
    watched.defvjp(
        lambda p: (note("forward", p), None), lambda _, ct: (note("backward", ct),)
    )
    return watched


# A factor on the loss outside of `scale_backward`, the scale, and the expected number of backward
# passes. `HIGH` overflows twice. What is inf or NaN from outside is never repeated.
PASSES = {
    "inf": (jnp.inf, "auto", 1),
    "NaN": (jnp.nan, "auto", 1),
    "fits": (1.0, "auto", 1),
    "overflows": (1.0, HIGH, 3),
}


@pytest.mark.worlds
@cases("name", PASSES, fast=["NaN", "overflows"])
def test_values_are_computed_once_and_only_what_may_be_finite_is_repeated(name):
    """Values are those of the function. A debugger of NaNs sees none in a pass that is repeated."""
    factor, scale, num_passes = PASSES[name]
    loss = loss_of(net)
    expected = jax.jit(loss)(PARAMS)
    assert_same_bits(jax.jit(scale_backward(loss, scale))(PARAMS), expected)
    runs = []
    watched = watch(runs)
    fun = scale_backward(lambda p: loss(watched(p)), scale)
    # The other cases repeat nothing, and a NaN in them is real.
    with jax.debug_nans(name == "overflows"):
        value_and_grad = jax.value_and_grad(lambda p: factor * fun(p))
        value, grads = jax.jit(value_and_grad)(PARAMS)
    jax.effects_barrier()
    assert_same_bits(value, factor * expected)
    # callbacks have no order
    assert sorted(runs) == ["backward"] * num_passes + ["forward"]
    if name in ("inf", "NaN"):
        assert not jaxscale.all_finite(grads)
    else:
        assert error(grads, REFERENCE, SMALL) < ACCURACY


def test_the_loop_holds_gradients_of_cast_parameters_in_half_precision():
    def model(p, x):
        return net(p | {"w": [p["w"]] * 3}, x)

    params = {"w": PARAMS["w"][0], "b": PARAMS["b"]}
    grad = jax.grad(scale_backward(loss_of(model)))
    (loop,) = equations_named("while", grad, params)
    arrays = [var.aval for var in loop.outvars if var.aval.shape]
    types = {str(aval) for aval in arrays if jnp.issubdtype(aval.dtype, jnp.floating)}
    assert types == {"float16[8,8]", "float16[8]"}


# Outliers: cotangents that are so much larger than all others that these flush beside them.


class Outliers(NamedTuple):
    """A loss whose cotangents are `factors` where they enter float16, and what becomes of it.

    Its gradient is the sum of `factors * x`. All of these are powers of two, or exact sums.
    """

    factors: list[float]
    x: list[float]
    gradient: float
    repeats: int = 0
    is_divided: bool = True
    num_passes: int = 3
    dtype: DTypeLike = HALF


HUGE, TINY = 2.0**40, 2.0**-3
OUTLIERS = {
    "none": Outliers([TINY] * 4, [1] * 4, 0.5, is_divided=False, num_passes=1),
    "that do not matter": Outliers([HUGE] + [TINY] * 4, [0] + [1] * 4, 0.5),
    "that cancel": Outliers([HUGE, -HUGE] + [TINY] * 4, [1] * 6, 0.5),
    "that are all there is": Outliers(
        [HUGE] + [TINY] * 4, [1] + [0] * 4, HUGE, is_divided=False, num_passes=1
    ),
    "beside what grows": Outliers(
        [HUGE] + [TINY] * 64, [0] + [2**12] * 64, 2.0**15, repeats=2, num_passes=5
    ),
    # Its range is that of float32, so nothing flushes.
    "that do not matter, in bfloat16": Outliers(
        [HUGE] + [TINY] * 4,
        [0] + [1] * 4,
        0.5,
        is_divided=False,
        num_passes=1,
        dtype=jnp.bfloat16,
    ),
    # What asks for a pass that does not help is dead.
    "above a dead layer": Outliers(
        [HUGE] + [TINY] * 4, [0] * 5, 0.0, is_divided=False, num_passes=2
    ),
    "on two levels": Outliers(
        [HUGE, 1.0] + [1 / HUGE] * 4,
        [0] * 2 + [1] * 4,
        np.nan,
        is_divided=False,
        num_passes=2,
    ),
}


def grad_of_outliers(row, options=()):
    """Returns a function of the loss's size and of what runs as each pass does."""
    factors = jnp.array(row.factors, jnp.float32)
    x = jnp.array(row.x, row.dtype)

    def grad(size, watched=unchanged):
        def loss(w):
            y = watched(x * w.astype(row.dtype))
            return size * jnp.sum(factors * y.astype(jnp.float32))

        return jax.grad(scale_backward(loss, **dict(options)))(jnp.float32(1))

    return grad


@contextlib.contextmanager
def reported():
    """Yields a list to which each call of a backward pass adds its report."""
    reports = []
    token = passes.observer.set(reports.append)
    try:
        yield reports
    finally:
        passes.observer.reset(token)


@pytest.mark.worlds
@cases(
    "name", OUTLIERS, fast=["that do not matter", "beside what grows", "on two levels"]
)
def test_no_outlier_makes_gradients_silently_zero(name):
    row = OUTLIERS[name]
    runs = []
    with reported() as reports:
        grad = jax.jit(lambda: grad_of_outliers(row)(1.0, watch(runs)))()
        jax.effects_barrier()
    assert_same_bits(grad, jnp.float32(row.gradient))
    assert runs.count("backward") == row.num_passes
    assert runs.count("forward") == 1
    (report,) = reports
    assert report.num_repeats == row.repeats
    assert report.is_divided == row.is_divided
    assert report.is_lost == np.isnan(row.gradient)


@pytest.mark.worlds
@cases("mapped", MAPS)
@cases("name", OUTLIERS, fast=["that cancel", "on two levels"])
def test_each_member_of_a_population_has_outliers_of_its_own(name, mapped):
    row = OUTLIERS[name]
    sizes = 2.0 ** jnp.array([-40.0, 0.0, 40.0])
    grads = jax.jit(MAPS[mapped](grad_of_outliers(row)))(sizes)
    assert_same_bits(grads, jnp.float32(row.gradient) * sizes)


# A loss in the body of a loop, whose own cotangent is 1: its size as a power of two, and how often
# the pass is repeated.
IN_A_LOOP = {0: 0, -16: 1, -24: 1, -40: 1, -50: 1}


@pytest.mark.worlds
@cases("exponent", IN_A_LOOP, fast=[-24])
def test_what_shrinks_inside_of_a_loop_is_pulled_back_at_a_larger_scale(exponent):
    factor = 2.0**exponent

    @scale_backward
    def loss(p):
        def add(total, xy):
            return total + loss_of(net, factor / len(X))(p, *xy), None

        return jax.lax.scan(add, 0.0, (X[:, None], Y[:, None]))[0]

    with reported() as reports:
        grads = jax.jit(jax.grad(loss))(PARAMS)
        jax.effects_barrier()
    assert error(grads, REFERENCE, factor) < ACCURACY
    (report,) = reports
    assert report.num_repeats == IN_A_LOOP[exponent]
    assert report.is_raised == (exponent < 0)


# What is small beside the cotangents that set the scale.


def layer_scaled(factor, has_norm):
    """Residual layers whose outputs are multiplied by a small factor at first."""
    rng = np.random.default_rng(2)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape) / shape[-2] ** 0.5, jnp.float32)

    x, labels = 5 * normal(64, 32), jnp.arange(64) % 10

    def norm(h):
        if not has_norm:
            return h
        return h / jnp.sqrt(jnp.mean(h**2, -1, keepdims=True) + 1e-6)

    def loss(p):
        h = x @ p["in"]
        for i in range(2):
            y = jax.nn.gelu(norm(h) @ p["up"][i]) @ p["down"][i]
            h = h + p["factor"][None] * y
        log_odds = jax.nn.log_softmax(norm(h) @ p["head"])
        return -jnp.mean(jnp.take_along_axis(log_odds, labels[:, None], 1))

    params = {
        "in": normal(32, 32),
        "head": normal(32, 10),
        "factor": jnp.full(32, factor),
    }
    return loss, params | {"up": normal(2, 32, 64), "down": normal(2, 64, 32)}


def shrinking(factor):
    """Layers whose output is multiplied by a small factor, beside a constant."""
    weights = jnp.linspace(-1, 1, 24).reshape(8, 3)

    def loss(p):
        h = jnp.tanh(X @ p["first"]) @ p["second"]
        return jnp.mean((1 + factor * h) @ weights)

    return loss, {"first": PARAMS["w"][0], "second": PARAMS["w"][1]}


def apart_in_a_loop(factor, other):
    """Two losses of different size, in the body of a loop."""

    def loss(p):
        def add(total, xy):
            sizes = {"large": factor, "small": factor * other}
            losses = [sizes[name] * loss_of(net32, 1.0)(p[name], *xy) for name in sizes]
            return total + sum(losses), None

        return jax.lax.scan(add, 0.0, (X[:, None], Y[:, None]))[0]

    return loss, {"large": PARAMS, "small": PARAMS | {"w": PARAMS["w"][::-1]}}


SMALL_PARTS = {
    "LayerScale 1e-4": layer_scaled(1e-4, has_norm=True),
    "LayerScale 1e-5": layer_scaled(1e-5, has_norm=True),
    "LayerScale 1e-6": layer_scaled(1e-6, has_norm=True),
    "LayerScale 1e-6 without a norm": layer_scaled(1e-6, has_norm=False),
    "shrinks by 1e-7": shrinking(1e-7),
    "shrinks by 1e-9": shrinking(1e-9),
    "1e-6 apart in a loop": apart_in_a_loop(1.0, 1e-6),
    "1e-8 apart in a loop": apart_in_a_loop(1.0, 1e-8),
    "1e-7 apart in a loop, small": apart_in_a_loop(1e-2, 1e-7),
    "1e-12 apart in a loop": apart_in_a_loop(1.0, 1e-12),
}


@pytest.mark.worlds
@cases("wrap", [scaled_autocast, autocast_scaled])
@cases("name", SMALL_PARTS, fast=["LayerScale 1e-6", "1e-8 apart in a loop"])
def test_each_gradient_is_right_however_small_it_is_beside_the_others(name, wrap):
    loss, params = SMALL_PARTS[name]
    grads = jax.jit(jax.grad(wrap(loss)))(params)
    expected = jax.grad(loss)(params)
    pairs = zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True)
    assert max(error(got, right) for got, right in pairs) < 2e-2


def zero_in_a_loop(p):
    def add(total, x):
        return total + jnp.mean(x[None] @ p["w"][0]), None

    return jax.lax.scan(add, 0.0, jnp.zeros_like(X))[0]


# Losses without a gradient.
WITHOUT_GRADIENT = {
    "a batch of zeros": lambda p: jnp.mean((0 * X @ p["w"][0] - Y) ** 2),
    "dead layers": lambda p: jnp.mean(jax.nn.relu(X @ p["w"][0] - 99.0) @ p["w"][1]),
    "a loop": zero_in_a_loop,
}


@pytest.mark.worlds
@cases("retries", [0, 1, 2, 3, 4], fast=[2])
@cases("name", WITHOUT_GRADIENT)
def test_true_zeros_stay_zeros(name, retries):
    loss = jaxscale.autocast(WITHOUT_GRADIENT[name])
    wrapped = scale_backward(loss, retries=retries)
    grads = jax.jit(jax.grad(wrapped))({"w": PARAMS["w"]})
    assert_same_bits(jnp.abs(grads["w"]), jnp.zeros_like(PARAMS["w"]))


def test_numbers_of_a_finite_pass_are_not_given_up_for_a_larger_scale():
    """At the larger scale some overflow, and others only then do not flush."""
    sizes = 2.0 ** jnp.array([-14.0, -40.0, -20.0])

    @scale_backward
    def loss(w):
        def add(total, size):
            half = w.astype(HALF).astype("float32")
            return total + jnp.sum(size * sizes * half), None

        return jax.lax.scan(add, 0.0, jnp.ones(4))[0]

    assert_same_bits(jax.jit(jax.grad(loss))(jnp.ones(3)), 4 * sizes)


# What makes one pass, whatever becomes of small cotangents.
ONE_PASS = {
    "without retries": {"retries": 0},
    "at a scale that is given": {"scale": 1 / HUGE},
}


@cases("name", ONE_PASS)
def test_where_one_pass_is_asked_for_small_cotangents_flush(name):
    """With retries there is NaN, as most of them did; without, nothing looks at the result."""
    row = OUTLIERS["that do not matter"]
    grad = grad_of_outliers(row, ONE_PASS[name].items())(1.0)
    expected = np.nan if "scale" in ONE_PASS[name] else 0.0
    assert_same_bits(grad, jnp.float32(expected))


@pytest.mark.worlds
@cases("check_vma", [True, False])
def test_devices_pull_outliers_apart_together(check_vma):
    """Those of one device make cotangents of all others flush, and are all that `b` reads.

    `b` has a gradient in the first pass, and the type of `w`: each is judged by itself.
    """
    row = OUTLIERS["that do not matter"]
    factors = jnp.full((8, 4), TINY).at[0].set(HUGE)
    x = jnp.ones((8, 4), HALF).at[0].set(0)

    def loss(p, factors, x):
        y = x * p["w"].astype(HALF) + (1 - x) * p["b"].astype(HALF)
        return jax.lax.psum(jnp.sum(factors * y.astype(jnp.float32)), "d")

    of_devices = jax.shard_map(
        scale_backward(loss),
        mesh=hosts.mesh_of(""),
        in_specs=(hosts.P(), hosts.P("d"), hosts.P("d")),
        out_specs=hosts.P(),
        check_vma=check_vma,
    )
    params = {"w": jnp.float32(1), "b": jnp.float32(1)}
    grads = jax.jit(jax.grad(of_devices))(params, factors, x)
    expected = {"w": jnp.float32(7 * row.gradient), "b": jnp.float32(4 * HUGE)}
    assert_same_bits(grads, expected)


def normalized(eps, num_rows=8, num_zeros=2):
    """Returns a loss of normalized rows, some of which are padding, and its parameters."""
    rng = np.random.default_rng(1)

    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    x, targets = normal(num_rows, 16), normal(num_rows, 8)
    x[:num_zeros] = 0

    def loss(p):
        y = jnp.tanh(x @ p["first"]) @ p["second"]
        squares = jnp.sum(y * y, -1, keepdims=True)
        rows = y * jax.lax.rsqrt(jnp.maximum(squares, eps))
        return jnp.mean(jnp.sum((rows - targets) ** 2, -1))

    return loss, {"first": normal(16, 32) / 4, "second": normal(32, 8) / 6}


NORMS = {
    "1e-24": normalized(1e-24),
    "1e-12": normalized(1e-12),
    "1e-6": normalized(1e-6),
    "one row of 256": normalized(1e-12, 256, 1),
}


@pytest.mark.worlds
@cases("wrap", [scaled_autocast, autocast_scaled])
@cases("name", NORMS, fast=["1e-24"])
def test_padding_under_a_norm_leaves_the_gradients_of_all_other_rows(name, wrap):
    loss, params = NORMS[name]
    grads = jax.jit(jax.grad(wrap(loss)))(params)
    expected = jax.grad(loss)(params)
    for leaf in params:
        assert error(grads[leaf], expected[leaf]) < ACCURACY, leaf


# What passes as it is.


def loss_and_aux(p, n, *, batch, key, **others):
    """A loss, and outputs of any type."""
    y = net(p, X)
    numbers = {"n": n + 1, "sign": n > 2, "batch": batch * 2}
    arrays = {"key": jax.random.split(key)[0], "list": [y], "sown": y.astype(HALF)}
    return loss_of(net)(p), others | numbers | arrays


OTHERS = {"nothing": None, "text": "text", "function": jnp.tanh}


def arguments_of_any_type():
    """Returns the arguments of `loss_and_aux`, and those by keyword."""
    # The batch is not differentiated, so it may be float16.
    arrays = {"key": jax.random.key(0), "batch": jnp.ones(2, HALF)}
    return (PARAMS, jnp.int32(3)), OTHERS | arrays


@pytest.mark.worlds
def test_aux_of_any_type_passes_through():
    args, kwargs = arguments_of_any_type()
    grad = jax.value_and_grad(
        scale_backward(loss_and_aux), (0, 1), has_aux=True, allow_int=True
    )
    (_, aux), (grads, none) = grad(*args, **kwargs)
    assert error(grads, REFERENCE, SMALL) < ACCURACY
    assert none.dtype == jax.dtypes.float0
    assert OTHERS.items() <= aux.items()


def test_the_signature_is_that_of_the_function():
    def fun(p, n, *, batch, **others):
        return loss_of(net)(p)

    wrapped = scale_backward(fun)
    assert inspect.signature(wrapped) == inspect.signature(fun)
    assert wrapped.__name__ == "fun"


def test_only_what_is_differentiated_has_a_backward_pass():
    """Frozen weights and batches cost nothing, as in the fine-tuning of a few."""
    # 3 products run forward. Backward, 2 are for the inputs of layers, and 3 more for the weights.
    for fun in (loss_of(net), scale_backward(loss_of(net))):
        of_biases = jax.grad(lambda b, fun=fun: fun(PARAMS | {"b": b}))
        assert len(equations_named("dot_general", of_biases, PARAMS["b"])) == 5
        assert len(equations_named("dot_general", jax.grad(fun), PARAMS)) == 8


def test_what_is_stopped_or_unused_has_gradients_of_zero():
    stopped = scale_backward(lambda p, q: loss_of(net)(jax.lax.stop_gradient(p)))
    grads = jax.grad(stopped, (0, 1))(PARAMS, PARAMS)
    unused = jax.grad(scale_backward(lambda p, q: loss_of(net)(p)), 1)(PARAMS, PARAMS)
    assert all((g == 0).all() for g in jax.tree.leaves((grads, unused)))


@pytest.mark.worlds
def test_what_is_not_in_half_precision_keeps_its_precision():
    """A penalty, a parameter that only the float32 part reads, and a complex one."""
    only = jnp.linspace(0.3, 0.7, 3)
    imaginary = jnp.asarray(np.eye(8) * 1j)
    params = PARAMS | {"only": only, "complex": imaginary}
    complex_x = np.complex64((1 + 0.5j) * np.asarray(X))

    def grad(wrap, model):
        def fun(p):
            x = jnp.real(complex_x @ p["complex"])
            of_weights = 2.0**-40 * jnp.sum(p["w"] ** 2)
            of_only = jnp.sum(p["only"] ** 3)
            penalty = of_weights + of_only
            loss_fn = loss_of(model)
            return loss_fn(p, x) + penalty

        return jax.grad(wrap(fun))(params)

    grads = grad(scale_backward, net)
    expected = grad(unchanged, net32)
    assert_same_bits(grads.pop("only"), expected.pop("only"))
    for name in grads:
        assert error(grads[name], expected[name]) < ACCURACY, name


# What is around the model and around the loss, the exponent of the loss, and how exact gradients
# are. bfloat16 rounds to 2**-9. A loss of about 2**-130 is below the normal numbers of float32, so
# only float64 holds it accurately.
WRAPPED = {
    "bfloat16": (scale_backward, unchanged, -30, 2e-2),
    "float64": (unchanged, scale_backward, -130, ACCURACY),
}


@pytest.mark.worlds
@pytest.mark.standard_promotion
@cases("dtype", WRAPPED)
def test_gradients_have_the_dtype_of_the_parameters(dtype):
    wrap_model, wrap_loss, exponent, accuracy = WRAPPED[dtype]

    def wide_model(p, x):
        model = wrap_model(functools.partial(net, out=dtype))
        return model(p, x).astype(jnp.float64)

    with x64():
        params = jax.tree.map(lambda p: p.astype(dtype), PARAMS)
        loss = wrap_loss(loss_of(wide_model, np.float64(2.0**exponent)))
        grads = jax.jit(jax.grad(loss))(params)
    assert dtypes_of(grads) == {jnp.dtype(dtype)}
    assert error(grads, REFERENCE, 2.0**exponent) < accuracy


# With `autocast`, and derivatives of derivatives.


def grad_of_first_output(fun):
    loss = half_programs.loss_of(fun)
    return jax.grad(lambda *args: loss(*args) * SMALL)


@pytest.mark.worlds
@pytest.mark.device
@pytest.mark.standard_promotion  # the programs themselves mix dtypes
@cases("name", half_programs.PROGRAMS, fast=["mlp", "own_precision"])
def test_gradients_are_right_inside_of_autocast(name):
    fun, args = half_programs.PROGRAMS[name]
    grads = jax.jit(grad_of_first_output(autocast_scaled(fun)))(*args)
    expected = jax.jit(grad_of_first_output(fun))(*args)
    assert error(grads, expected) < ACCURACY


OF_ONE_PASS = sorted(
    half_programs.PROGRAMS.keys() - {"over_devices", "second_derivatives"}
)


@pytest.mark.worlds
@pytest.mark.standard_promotion
@cases("name", OF_ONE_PASS, fast=["attention", "lstm"])
def test_an_ordinary_program_makes_one_backward_pass(name):
    if name == "lstm" and jax.__version_info__ < (0, 12):
        pytest.skip("an error there: its stack of carries is not read, as Limits says")
    fun, args = half_programs.PROGRAMS[name]
    loss = half_programs.loss_of(scaled_autocast(fun))
    with reported() as reports:
        jax.jit(jax.grad(loss))(*args)
        jax.effects_barrier()
    assert not any(report.num_repeats or report.is_divided for report in reports)


@pytest.mark.worlds
@pytest.mark.standard_promotion
@cases("name", OF_ONE_PASS, fast=["mlp", "own_precision"])
def test_as_many_products_are_in_half_precision_inside_of_autocast_and_outside(name):
    fun, args = half_programs.PROGRAMS[name]
    counts = set()
    for wrap in (jaxscale.autocast, scaled_autocast, autocast_scaled):
        grad = grad_of_first_output(wrap(fun))
        products = equations_named("dot_general", grad, *args)
        counts.add(sum(eqn.invars[0].aval.dtype == HALF for eqn in products))
    assert len(counts) == 1


@pytest.mark.worlds
def test_a_tangent_of_the_gradients():
    def tangent_of_grad(loss):
        return jax.jit(lambda p: jax.jvp(jax.grad(loss), (p,), (p,))[1])(PARAMS)

    got = tangent_of_grad(scale_backward(loss_of(net, 1.0)))
    assert error(got, tangent_of_grad(loss_of(net32, 1.0))) < ACCURACY


@pytest.mark.worlds
def test_second_derivatives_need_a_scale_backward_of_their_own_and_no_loop():
    """The inner one scales the first backward pass, the outer one the second. Each rounds."""

    def grad_of_penalty(loss):
        return jax.jit(jax.grad(scale_backward(squared_grad_norm(loss))))(PARAMS)

    no_loop = scale_backward(loss_of(net, 1.0), retries=0)
    expected = grad_of_penalty(loss_of(net32, 1.0))
    assert error(grad_of_penalty(no_loop), expected) < 2 * ACCURACY
    assert not equations_named("while", jax.grad(no_loop), PARAMS)


def grad_of_small_penalty(exponent, wrap):
    """Returns the gradient of a penalty on the gradients of a loss with a small factor.

    The penalty grows as `factor**2`. It is divided by `factor`, so its gradient is `factor` times
    that for a loss without a factor.
    """
    factor = 2.0**exponent
    penalty = wrap(squared_grad_norm(scale_backward(loss_of(net, factor), retries=0)))
    return jax.jit(jax.grad(lambda p: penalty(p) / factor))(PARAMS)


exponents = cases("exponent", [-20, -60], fast=[-20])


@pytest.mark.worlds
@exponents
def test_a_second_reverse_pass_has_a_scale_backward_of_its_own_or_flushes_and_says_so(
    exponent,
):
    expected = jax.grad(squared_grad_norm(loss_of(net32, 1.0)))(PARAMS)
    grads = grad_of_small_penalty(exponent, scale_backward)
    assert error(grads, expected, 2.0**exponent) < 2 * ACCURACY
    message = r"retries=0.*second pass is not scaled.*in `scale_backw"
    with pytest.warns(UserWarning, match=message):
        flushed = grad_of_small_penalty(exponent, unchanged)
    assert error(flushed, expected, 2.0**exponent) > 0.9


# The scale itself.


# The largest cotangent, the sum, and the exponent of the power: of the sum to 2**15, of the largest
# to 2**10 at most, and to 2**0 at least.
POWERS = {
    "one": (1.0, 1.0, 10),
    "a few": (1.5, 40.0, 10),
    "many": (1.0, 2.0**11, 4),
    "a batch": (0.999, 2.0**11 - 1, 5),
    "too many": (1.0, 2.0**20, 0),
    "a sum that overflows": (3e38, np.inf, -117),
    "large": (65504.0, 65504.0, -5),
    "tiny": (3e-20, 3e-20, 75),
    "the smallest": (2.0**-149, 2.0**-149, 126),
}


@cases("name", POWERS)
def test_the_power_is_exact(name):
    largest, total, exponent = POWERS[name]
    assert choose_power(jnp.float32(largest), jnp.float32(total)) == 2.0**exponent


@cases("largest", [np.inf, np.nan])
def test_a_cotangent_that_is_not_finite_makes_the_power_1(largest):
    assert choose_power(jnp.float32(largest), jnp.float32(np.nan)) == 1


# What is around a loss, and the dtype that it casts to itself.
AROUND_LOSS = {
    "auto": (scale_backward, HALF),
    "too high": (functools.partial(scale_backward, scale=hosts.HIGH), HALF),
    "with autocast": (scaled_autocast, jnp.float32),
}


@pytest.mark.worlds
@cases(
    "form, around",
    spread(list(hosts.FORMS), list(AROUND_LOSS), times=1),
    fast=[
        ("inside summed", "too high"),
        ("around called_in_calls", "auto"),
        ("inside normalized", "with autocast"),
    ],
)
def test_devices_agree_by_themselves(form, around):
    """Otherwise one would wait for the other forever, or sum what was scaled differently.

    A form in `hosts.FORMS` names where `scale_backward` is, which loss it is for, and whether the
    `shard_map` goes without types: "unchecked".
    """
    wrap, dtype = AROUND_LOSS[around]
    if form == "by_pmap local" and dtype == HALF:
        # Its devices exchange nothing, and would agree on nothing by themselves.
        wrap = functools.partial(wrap, axis_name="d")
    worst_error, _ = hosts.compared(form, hosts.mesh_of(form), wrap, dtype)
    assert worst_error < ACCURACY
