"""Equations inside of what holds them: loops, calls, custom derivatives and refs."""

import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
import traced_losses
from jax.experimental import pallas
from tables import assert_same_bits, cases
from traced_losses import (
    EIGHT,
    HALF,
    assert_fields,
    at,
    half,
    mean_square,
    not_differentiated,
    scaling,
    summed,
    trace,
    with_backward,
)

import jaxscale
from jaxscale.diagnostics._trace.backward import TracedBackward

pytestmark = pytest.mark.standard_promotion
line = functools.partial(traced_losses.marked, file=__file__)

# Functions that multiply an array by a number, at a marked line inside of what holds equations.


def while_loop(x, factor):
    def body(carry):
        i, x = carry
        return i + 1, x * at(i, 2, factor)  # plant: while

    _, multiplied = jax.lax.while_loop(lambda carry: carry[0] < 4, body, (0, x))
    return x + jax.lax.stop_gradient(multiplied)


def cond(x, factor):
    def multiply(x):
        return x * factor  # plant: cond

    return jax.lax.cond(x[0] > -100, multiply, lambda x: x, x)


@jax.checkpoint
def remat(x, factor):
    return jnp.sin(x * factor)  # plant: remat


@jax.jit
@jax.jit
def nested_jit(x, factor):
    return x * factor  # plant: nested_jit


def nested_scan(x, factor):
    def inner(x, t):
        return x * at(t, 5, factor), None  # plant: nested_scan

    def outer(x, times):
        return jax.lax.scan(inner, x, times)

    return jax.lax.scan(outer, x, jnp.arange(6).reshape(2, 3))[0]


def custom_jvp(x, factor):
    def rule(primals, tangents):
        return primals[0] * factor, tangents[0]  # plant: custom_jvp

    inner = jax.custom_jvp(lambda x: x * factor)
    inner.defjvp(rule)
    return inner(x)


def custom_vjp(x, factor):
    def forward(x):  # what runs, instead of the function itself
        return x * factor  # plant: custom_vjp

    return with_backward(lambda x: x * factor, lambda ct: ct, forward)(x)


def undifferentiated(x, factor):
    def fun(x):  # what runs, instead of the forward rule
        return x * factor  # plant: undifferentiated

    ruled = with_backward(fun, lambda ct: ct, lambda x: x)
    return x + ruled(jax.lax.stop_gradient(x))


@not_differentiated
def ref_in_a_call(x, factor):
    ref = jax.new_ref(x)

    @jax.jit
    def write(x):
        ref[...] = x * factor  # plant: ref_in_a_call

    write(x)
    return ref[...]


@not_differentiated
def ref_in_a_scan(x, factor):
    ref = jax.new_ref(x)

    def body(carry, i):
        before = ref[...]  # nothing else reads what is written
        ref[...] = before * at(i, 1, factor)  # plant: ref_in_a_scan
        return carry, before

    _, stacked = jax.lax.scan(body, 0, jnp.arange(3))
    return stacked[2]


@not_differentiated
def ref_in_a_loop(x, factor):
    ref = jax.new_ref(x)
    rounds = jax.new_ref(jnp.int32(0))

    def body(i):
        ref[:] *= at(i, 2, factor)  # plant: ref_in_a_loop
        rounds[...] += 1
        return i + 1

    jax.lax.while_loop(lambda i: i < 4, body, jnp.int32(0))
    return ref[...] * (rounds[...] == 4).astype(HALF)


class Holder(NamedTuple):
    """A function that multiplies, and in which iteration it does so by the factor."""

    multiply: Callable[[Any, Any], Any]
    iteration: tuple[int, ...] = ()


HOLDERS = {
    "while": Holder(while_loop, iteration=(2,)),
    "cond": Holder(cond),
    "remat": Holder(remat),
    "nested_jit": Holder(nested_jit),
    "nested_scan": Holder(nested_scan, iteration=(1, 2)),
    "custom_jvp": Holder(custom_jvp),
    "custom_vjp": Holder(custom_vjp),
    "undifferentiated": Holder(undifferentiated),
    "ref_in_a_call": Holder(ref_in_a_call),
    "ref_in_a_scan": Holder(ref_in_a_scan, iteration=(1,)),
    "ref_in_a_loop": Holder(ref_in_a_loop, iteration=(2,)),
}


def trace_holder(name, factor):
    def loss_fn(x, factor):
        return mean_square(HOLDERS[name].multiply(x, factor))

    return trace(loss_fn, EIGHT, HALF(factor))


def assert_found_inside(place, name):
    assert_fields(
        place,
        line=line(name),
        direction="forward",
        iteration=HOLDERS[name].iteration,
    )


@cases("name", HOLDERS, fast=["nested_scan"])
def test_nothing_is_found_inside_of(name):
    assert not trace_holder(name, 1).found


@cases("name", HOLDERS, fast=["nested_scan"])
def test_an_overflow_is_found_inside_of(name):
    first = trace_holder(name, 30000).first_nonfinite
    assert_found_inside(first, name)
    assert first.primitive == "mul"
    assert "loss" in first.reaches


def test_what_is_computed_again_is_the_same_place():
    # The forward pass makes the loss NaN, and what is computed again makes the gradients NaN.
    places = []
    for place in trace(summed(remat), EIGHT, HALF(30000)).nonfinite:
        if place.line == line("remat") and not place.scaled:
            places.append(place)
    (place,) = places
    assert_fields(place, primitive="mul", direction="forward")
    assert set(place.reaches) == {"loss", "grads"}


@cases("name", HOLDERS, fast=["nested_scan"])
def test_an_underflow_is_found_inside_of(name):
    assert_found_inside(trace_holder(name, 2.0**-17).underflows[0], name)


# Passes of the same programs.


@pytest.mark.worlds
@cases("name", HOLDERS, fast=["while"])
def test_a_pass_in_a_hurry_stops_at_the_first_overflow_of_a_full_one(name):
    def fun(x):
        # Neither is what is looked for: an inf on purpose, and one that no loss scale changes.
        unscaled = jnp.log(jax.lax.stop_gradient(x) * 0)
        masked = jnp.where(x > 1.5, -jnp.inf, unscaled)
        masked = jnp.where(x > 2, x, masked)
        multiplied = HOLDERS[name].multiply(x, HALF(256))
        return mean_square(multiplied + jnp.exp(masked))

    backward = TracedBackward(fun, (EIGHT,), {})
    for loss_scale in (2.0**-10, 2.0**3, 2.0**20):
        in_full = backward.run(loss_scale, is_brief=True).report().nonfinite
        overflows = [
            place for place in in_full if place.scaled and place.cause != "given"
        ]
        first = backward.first_overflow(loss_scale)
        assert backward.how_far().startswith("operation ")
        assert known_at_once([first]) == known_at_once([*overflows, None]), loss_scale
    assert first


def known_at_once(places):
    """The first place, if any, without what is known only once the pass is over."""
    first, *_ = places
    if first is None:
        return None
    return dataclasses.replace(first, reaches=(), visits=0, times=0)


def through_all_holders(x):
    for number, holder in enumerate(HOLDERS.values()):
        factor = 1.25
        if number % 2:
            factor = 0.75
        x = holder.multiply(x, HALF(factor))
    return mean_square(x)


@pytest.mark.slow
def test_all_of_them_compute_what_eager_evaluation_computes():
    traced_losses.assert_computed_eagerly(through_all_holders, EIGHT)


# A ref that is differentiated.

ONE_TO_EIGHT = np.arange(1, 9, dtype=HALF)


def sum_of_ref(x):
    ref = jax.new_ref(x)

    def body(i, carry):
        ref[i] = ref[i] * at(i, 2, 4)  # plant: backward of a ref
        return carry

    jax.lax.fori_loop(0, 8, body, 0)
    jax.ref.addupdate(ref, ..., ref[...])  # plant: sum in a ref
    return jnp.sum(ref[...].astype(jnp.float32))


@pytest.mark.slow
def test_a_ref_has_a_backward_pass():
    assert not trace(sum_of_ref, ONE_TO_EIGHT, loss_scale=2.0**12).found
    assert_fields(
        trace(sum_of_ref, ONE_TO_EIGHT, loss_scale=2.0**13).first_nonfinite,
        line=line("backward of a ref"),
        primitive="mul",
        direction="backward",
        iteration=(2,),
        times=1,
        visits=8,
        scaled=True,
        reaches=("grads",),
    )


@pytest.mark.slow
def test_a_sum_in_a_ref_overflows_like_any_other():
    assert_fields(
        trace(sum_of_ref, ONE_TO_EIGHT * 5000, loss_scale=1).first_nonfinite,
        line=line("sum in a ref"),
        primitive="addupdate",
        direction="forward",
        cause="range",
        inputs=("Ref{float16[8]}", "float16[8]"),
    )


@pytest.mark.slow
def test_the_gradients_of_a_ref_are_those_of_a_step():
    x = jnp.asarray(ONE_TO_EIGHT)
    run = TracedBackward(sum_of_ref, (x,), {}).run(8.0)
    expected = jax.jit(jaxscale.value_and_grad(sum_of_ref, scaling(8)))(x)
    assert_same_bits([run.values["loss"].array, run.grads["grads"]], list(expected))


# Programs with parts that never run, or with refs. Each returns x.


def scan_of_no_keys(x):
    keys = jax.random.split(jax.random.key(0), 3)[:0]
    x, (keys, stacked) = jax.lax.scan(lambda c, key: (c * 2, (key, c)), x, keys)
    return x + stacked.sum() + jax.random.key_data(keys).sum().astype(HALF)


def scans_of_nothing_in_a_scan(x):
    def body(x, t):
        x, stacked = jax.lax.scan(lambda c, _: (c * 2, c), x, length=0)
        return x * t, stacked

    x, stacked = jax.lax.scan(body, x, half(2, 0.25))
    return 2 * x + stacked.sum()


def while_of_no_rounds(x):
    def body(carry):
        i, x = carry
        return i - 1, x * 2

    start = (jnp.int32(0), jax.lax.stop_gradient(x))
    _, same = jax.lax.while_loop(lambda carry: carry[0] < 0, body, start)
    return 2 * x - same


def empty_arrays(x):
    nothing = x[:0]
    joined = jnp.concatenate([x, nothing / nothing])
    return joined + nothing.sum() + jnp.zeros((8, 0), HALF) @ nothing


def branch_outside(x):
    x = jax.lax.switch(7, [lambda x: x * 2, lambda x: x], x)
    return jax.lax.switch(-7, [lambda x: x, lambda x: x * 2], x)


@not_differentiated
def scan_of_no_rows_of_a_ref(x):
    ref = jax.new_ref(x)
    rows = jax.new_ref(jnp.zeros((0, 8), HALF))

    def body(carry, row):
        ref[...] = row[...]
        return carry, None

    jax.lax.scan(body, None, rows)
    return ref[...]


@not_differentiated
def rows_of_a_ref(x):
    ref = jax.new_ref(x.reshape(4, 2))

    def body(factor, row):
        row[0] = row[0] * factor
        return factor * 2, None

    jax.lax.scan(body, HALF(0.5), ref, reverse=True)
    return ref[...].reshape(8) * half(0.25, 1, 0.5, 1, 1, 1, 2, 1)


@not_differentiated
def keys_in_a_ref(x):
    ref = jax.new_ref(jax.random.split(jax.random.key(0), 2))
    ref[0] = ref[1]
    is_same = jax.random.bits(ref[0]) == jax.random.bits(ref[1])
    return x * is_same.astype(HALF)


@not_differentiated
def ref_that_held_nan(x):
    ref = jax.new_ref(jnp.full(8, jnp.nan, HALF))
    ref[:4] = x[:4]
    ref[4:] = x[4:]
    return ref[...]


OUTSIDE = jax.new_ref(jnp.ones(2, HALF))


@not_differentiated
def ref_from_outside(x):
    @jax.jit
    def write():
        OUTSIDE[1] = OUTSIDE[0] / 4

    OUTSIDE[0] += 1
    write()
    return x * OUTSIDE[1] * 2


@not_differentiated
def ref_that_held_nothing(x):
    ref = jax.empty_ref(jax.typeof(x))
    ref[...] = x
    return ref[...]


@not_differentiated
def run_state(x):
    def double(refs):
        source, target = refs
        target[...] = source[...] * 2
        source[0] = source[1]

    run = pallas.run_state(double)
    x, doubled = run((x, jnp.zeros(8, HALF)))
    return doubled - x.at[0].add(-1)


@not_differentiated
def shape_of_symbols(x):
    (size,) = jax.export.symbolic_shape("size")
    doubled = jax.export.export(jax.jit(lambda x: x * 2))
    return doubled(jax.ShapeDtypeStruct((size,), HALF)).call(x) - x


IDENTITIES = {
    "scan of no keys": scan_of_no_keys,
    "scans of nothing in a scan": scans_of_nothing_in_a_scan,
    "while of no rounds": while_of_no_rounds,
    "empty arrays": empty_arrays,
    "branch outside": branch_outside,
    "scan of no rows of a ref": scan_of_no_rows_of_a_ref,
    "rows of a ref": rows_of_a_ref,
    "keys in a ref": keys_in_a_ref,
    "ref that held nan": ref_that_held_nan,
    "ref from outside": ref_from_outside,
    "run_state": run_state,
    "shape of symbols": shape_of_symbols,
    "ref that held nothing": ref_that_held_nothing,
}


@cases("name", IDENTITIES, fast=["scans of nothing in a scan", "rows of a ref"])
def test_the_rest_of_a_program_is_reported(name):
    @summed
    def loss_fn(x):
        y = IDENTITIES[name](x).astype(jnp.float32) * 2.0**-23
        return y.astype(HALF)  # plant: rest

    report = trace(loss_fn, ONE_TO_EIGHT, loss_scale=2.0**10)
    assert report.loss == 36 * 2.0**-23
    assert not report.nonfinite
    (place,) = [place for place in report.underflows if place.direction == "forward"]
    assert_fields(
        place,
        line=line("rest"),
        primitive="convert_element_type",
        inputs=("float32[8]",),
        subnormals=8,
    )


def test_a_ref_from_outside_keeps_what_it_holds():
    trace(summed(ref_from_outside), ONE_TO_EIGHT)
    np.testing.assert_array_equal(OUTSIDE[...], np.ones(2))


def square_kernel():
    """A loss of a kernel for float16, and its arguments: one square overflows, the others vanish.

    Float32 cannot run it.
    """

    def square(x, out):
        out[...] = x[...] * x[...]

    shape = jax.ShapeDtypeStruct((8,), HALF)
    kernel = pallas.pallas_call(square, shape, interpret=True)
    return summed(not_differentiated(kernel)), (half(*[1e-4] * 7, 6e4),)


def test_what_reads_a_number_in_float32_does_not_round_it():
    def fun(w):
        return ((w + HALF(0.5)) - HALF(2048)).astype(jnp.float32)

    backward = TracedBackward(fun, (HALF(2048),), {})
    run = backward.run(1.0)
    first, *_ = run.findings.equations  # the sum
    in_float32 = backward.run(1.0, is_wide=lambda key: key == first)
    assert run.report().loss == 0
    assert in_float32.report().loss == 0.5


@pytest.mark.worlds
def test_the_compiled_program_has_the_gradients_of_its_equations():
    def fun(w):
        def body(x, y):
            return jnp.tanh(x * y), x

        last, rows = jax.lax.scan(body, w[0], w)
        return jnp.sum(rows.astype(jnp.float32)) + last.astype(jnp.float32)

    backward = TracedBackward(fun, (ONE_TO_EIGHT,), {})
    compiled = backward.run_compiled(1.0, lambda key: False)
    np.testing.assert_allclose(
        compiled["grads"], backward.run(1.0).grads["grads"], rtol=2e-3
    )


def test_equations_of_the_compiled_program_may_be_in_float32():
    def fun(w):
        return (w * HALF(600) * HALF(600)).astype(jnp.float32)

    backward = TracedBackward(fun, (HALF(1),), {})
    assert backward.run_compiled(1.0, lambda key: False)["grads"] == np.inf
    assert backward.run_compiled(1.0, lambda key: True)["grads"] == 360000


def test_a_program_with_refs_is_not_compiled_as_a_whole():
    backward = TracedBackward(summed(ref_from_outside), (ONE_TO_EIGHT,), {})
    assert backward.run_compiled(1.0, lambda key: False) is None


LIBRARY = """
def double(x):
    return x * 60000 * 60000

def loss(x):
    return double(x).astype("float32").sum()
"""


def test_lines_of_an_installed_package_come_after_the_users(tmp_path, monkeypatch):
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "a_library.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(str(folder))
    library = importlib.import_module("a_library")
    report = trace(summed(library.double), ONE_TO_EIGHT)
    assert report.first_nonfinite.file.endswith("traced_losses.py")
    report = trace(library.loss, ONE_TO_EIGHT)
    assert report.first_nonfinite.file.endswith("a_library.py")


def test_a_kernel_is_an_equation_that_float32_cannot_run():
    backward = TracedBackward(*square_kernel(), {})
    report = backward.run(1.0).report()
    (place,) = report.nonfinite
    assert_fields(place, primitive="pallas_call", elements=1)
    assert np.isnan(place.float32_result)
    assert_fields(report, underflows=(), not_compared=("pallas_call",))
    assert str(report).endswith("not compared with float32: pallas_call")
    # It runs as it is written where float32 is asked for.
    assert backward.run(1.0, is_wide=lambda key: True).report().loss == np.inf
