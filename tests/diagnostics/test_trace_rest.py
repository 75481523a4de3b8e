"""Traces of programs of which parts never run, and of what refs hold: the rest is reported."""

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas
from planted import HALF, marked, new_ref, trace
from tables import cases
from test_trace_programs import not_differentiated

from jaxscale.diagnostics._trace.backward import TracedBackward

pytestmark = pytest.mark.standard_promotion


# Programs with parts that never run, or with refs. Each returns x.


def _identity_derivative(fun):
    return functools.wraps(fun)(lambda x: not_differentiated(lambda x, _: fun(x))(x, None))


def _scan_of_no_keys(x):
    keys = jax.random.split(jax.random.key(0), 3)[:0]
    x, (keys, stacked) = jax.lax.scan(lambda c, key: (c * 2, (key, c)), x, keys)
    return x + stacked.sum() + jax.random.key_data(keys).sum().astype(HALF)


def _scans_of_nothing_in_a_scan(x):
    def body(x, t):
        x, stacked = jax.lax.scan(lambda c, _: (c * 2, c), x, length=0)
        return x * t, stacked

    x, stacked = jax.lax.scan(body, x, jnp.array([2, 0.25], HALF))
    return 2 * x + stacked.sum()


@_identity_derivative
def _scan_of_no_rows_of_a_ref(x):
    ref, rows = new_ref(x), new_ref(jnp.zeros((0, 8), HALF))

    def body(carry, row):
        ref[...] = row[...]
        return carry, None

    jax.lax.scan(body, 0, rows)
    return ref[...]


def _while_of_no_rounds(x):
    start = (jnp.int32(0), jax.lax.stop_gradient(x))
    same = jax.lax.while_loop(lambda c: c[0] < 0, lambda c: (c[0] - 1, c[1] * 2), start)[1]
    return 2 * x - same


def _empty_arrays(x):
    empty = x[:0]
    products = jnp.zeros((8, 0), HALF) @ empty
    return jnp.concatenate([x, empty / empty]) + empty.sum() + products


def _branch_outside(x):
    x = jax.lax.switch(jnp.int32(7), [lambda x: x * 2, lambda x: x], x)
    return jax.lax.switch(jnp.int32(-7), [lambda x: x, lambda x: x * 2], x)


@_identity_derivative
def _rows_of_a_ref(x):
    ref = new_ref(x.reshape(4, 2))

    def body(factor, row):
        row[0] = row[0] * factor
        return factor * 2, None

    jax.lax.scan(body, HALF(0.5), ref, reverse=True)
    return ref[...].reshape(8) * jnp.array([0.25, 1, 0.5, 1, 1, 1, 2, 1], HALF)


@_identity_derivative
def _keys_in_a_ref(x):
    ref = new_ref(jax.random.split(jax.random.key(0), 2))
    ref[0] = ref[1]
    return x * (jax.random.bits(ref[0]) == jax.random.bits(ref[1])).astype(HALF)


@_identity_derivative
def _ref_that_held_nan(x):
    ref = new_ref(jnp.full(8, jnp.nan, HALF))
    ref[:4], ref[4:] = x[:4], x[4:]
    return ref[...]


@_identity_derivative
def _ref_from_outside(x):
    OUTSIDE[0] += 1

    @jax.jit
    def inner():
        OUTSIDE[1] = OUTSIDE[0] / 4

    inner()
    return x * OUTSIDE[1] * 2


@_identity_derivative
def _ref_that_held_nothing(x):
    ref = jax.empty_ref(jax.typeof(x))
    ref[...] = x
    return ref[...]


@_identity_derivative
def _run_state(x):
    def double(refs):
        refs[1][...] = refs[0][...] * 2
        refs[0][0] = refs[0][1]

    x, doubled = pallas.run_state(double)((x, jnp.zeros(8, HALF)))
    return doubled - x.at[0].add(-1)


@_identity_derivative
def _shape_of_symbols(x):
    (size,) = jax.export.symbolic_shape("size")
    doubled = jax.export.export(jax.jit(lambda x: x * 2))
    return doubled(jax.ShapeDtypeStruct((size,), HALF)).call(x) - x


OUTSIDE = new_ref(jnp.ones(2, HALF))
IDENTITIES = [
    *(_scan_of_no_keys, _scans_of_nothing_in_a_scan, _scan_of_no_rows_of_a_ref),
    *(_while_of_no_rounds, _empty_arrays, _branch_outside, _rows_of_a_ref, _keys_in_a_ref),
    *(_ref_that_held_nan, _ref_from_outside, _run_state, _shape_of_symbols),
    *[_ref_that_held_nothing] * hasattr(jax, "empty_ref"),
]


@cases("identity", IDENTITIES, fast=[_scans_of_nothing_in_a_scan, _rows_of_a_ref])
def test_the_rest_of_a_program_is_reported(identity):
    def fun(x):
        y = identity(x).astype(jnp.float32) * 2.0**-23
        return jnp.sum(y.astype(HALF).astype(jnp.float32))  # plant: rest

    report = trace(fun, jnp.arange(1, 9, dtype=HALF), loss_scale=2.0**10)
    assert report.loss == 36 * 2.0**-23
    assert not report.nonfinite
    (place,) = (u for u in report.underflows if u.direction == "forward")
    assert (place.line, place.primitive) == (marked("rest", __file__), "convert_element_type")
    assert (place.inputs, place.subnormals) == (("float32[8]",), 8)
    np.testing.assert_array_equal(OUTSIDE[...], np.ones(2))  # as it was


@not_differentiated
def _kernel(x, _):
    def square(x, out):
        out[...] = x[...] * x[...]

    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pallas.pallas_call(square, out, interpret=True)(x)


def test_a_kernel_is_an_equation_that_float32_cannot_run():
    def fun(x):
        return jnp.sum(_kernel(x, None).astype(jnp.float32))

    backward = TracedBackward(fun, (jnp.array([1e-4] * 7 + [6e4], HALF),), {})
    report = backward.run(1.0).report()
    (place,) = report.nonfinite
    assert (place.primitive, place.elements) == ("pallas_call", 1)
    assert np.isnan(place.float32_result)
    assert (report.underflows, report.not_compared) == ((), ("pallas_call",))
    assert str(report).endswith("not compared with float32: pallas_call")
    assert backward.run(1.0, lambda key: True).report().loss == np.inf  # as it is written
