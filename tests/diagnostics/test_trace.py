"""Effects of each line of a model on the loss and the gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from departing import uses_what_goes
from tables import cases
from traced_losses import HALF, faulty_lines, normal, trace

import jaxscale
from jaxscale import diagnostics

pytestmark = [pytest.mark.standard_promotion, uses_what_goes]


def test_three_times_60000_overflows():
    def loss_fn(w):
        return (w * jnp.float16(60000)).astype(jnp.float32)

    scaling = jaxscale.FixedLossScale(1.0).init()
    report = diagnostics.trace(loss_fn, scaling)(jnp.float16(3.0))
    assert (report.loss, report.float32_loss) == (np.inf, 180000)
    assert "loss" in report.nonfinite_outputs


W = normal(0, 4, 4)
X = normal(1, 8, 4)


def mean_square(x):
    return jnp.mean(x.astype(jnp.float32) ** 2)


def overflow(w, x):
    y = x.astype(HALF) @ w.astype(HALF)
    y = y * HALF(60000)  # fault
    return mean_square(y.astype(jnp.float32) / 60000)


def underflow(w, x):
    y = x.astype(HALF) @ w.astype(HALF)
    # Its derivative would overflow, at the same line.
    gate = jax.lax.stop_gradient(y * HALF(2.0**-14) * HALF(2.0**-12))  # fault
    return mean_square(y.astype(jnp.float32) * gate.astype(jnp.float32) * 2.0**26)


def rounding(w, x):
    y = x.astype(HALF) @ w.astype(HALF)
    y = (y + HALF(20000)) - HALF(20000)  # fault
    return mean_square(y)


def overflow_of_float8(w, x):
    y = (x @ w) * 1000
    y = y.astype(jnp.float8_e4m3fn)  # fault
    return mean_square(y.astype(jnp.float32) / 1000)


@cases("fault", [overflow, underflow, rounding, overflow_of_float8], fast=[overflow])
def test_the_line_to_blame_comes_first_and_is_wrong_alone(fault):
    report = trace(fault, W, X, loss_scale=64.0)
    unscaled = trace(fault, W, X, loss_scale=1.0)
    assert unscaled.float32_loss == report.float32_loss
    (line,) = report.blamed
    assert line == report.lines[0]
    assert [line.line] == faulty_lines(fault)
    assert line.source.endswith("# fault")
    assert report.limit == fault.__name__.split("_")[0]
    assert line.error > 0.1
    assert report.error >= line.error / 2
    for other in report.lines[1:]:
        assert other.error < 0.1
    assert f"to blame: {line}" in str(report)


def test_without_a_fault_nothing_is_blamed_and_all_errors_are_small():
    report = trace(lambda w, x: mean_square(x.astype(HALF) @ w.astype(HALF)), W, X)
    assert not report.blamed
    assert not report.limit
    assert not report.nonfinite_outputs
    np.testing.assert_allclose(report.loss, report.float32_loss, rtol=1e-2)
    assert 0 < report.error < 1e-2
    for line in report.lines:
        assert line.error < 1e-2
        assert line.loss_error < 1e-2


def test_what_is_not_finite_in_float32_either_is_where_it_is_made():
    def loss_fn(w, x):
        y = x @ w
        y = jnp.log(y - y)  # fault
        return mean_square(y)

    report = trace(loss_fn, W, X)
    (line,) = report.blamed
    assert [line.line] == faulty_lines(loss_fn)
    assert "loss" in report.nonfinite_outputs


def test_a_loss_scale_that_is_too_large_has_the_line_that_it_overflows_at():
    def loss_fn(w, x):
        y = x.astype(HALF) @ w.astype(HALF)  # fault
        return mean_square(y) * 2.0**10

    assert not trace(loss_fn, W, X, loss_scale=1.0).blamed
    report = trace(loss_fn, W, X, loss_scale=2.0**20)
    assert report.error == np.inf
    assert faulty_lines(loss_fn)[0] in [line.line for line in report.lines]


def test_layers_and_arguments_have_their_names():
    def loss_fn(w, x):
        with jax.named_scope("first"):
            y = x.astype(HALF) @ w.astype(HALF)
        return mean_square(y)

    layers = [layer for line in trace(loss_fn, W, X).lines for layer in line.layers]
    assert "first" in layers
    report = trace(loss_fn, W, X.at[0, 0].set(jnp.inf))
    assert report.nonfinite_arguments == ("args[1]",)


def test_a_ref_keeps_what_it_holds():
    ref = jax.new_ref(jnp.zeros((), HALF))

    def loss_fn(w, x):
        y = x.astype(HALF) @ w.astype(HALF)
        ref[...] = jax.lax.stop_gradient(jnp.max(y))
        return mean_square(y)

    trace(loss_fn, W, X)
    assert ref[...] == 0


BAD_USE = {
    "a tracer": (
        lambda: jax.jit(lambda w: trace(mean_square, w).loss)(W),
        TypeError,
        "cannot run inside `jit`",
    ),
    "an integer parameter": (
        lambda: trace(lambda n: n * 1.0, jnp.int32(1)),
        TypeError,
        "differentiates floating parameters, got int32",
    ),
    "a population": (
        lambda: diagnostics.trace(
            mean_square, jax.vmap(jaxscale.DynamicLossScale().init, axis_size=2)()
        ),
        ValueError,
        "needs one loss scale",
    ),
    "no state": (lambda: diagnostics.trace(mean_square, {}), ValueError, "`trace`"),
}


@cases("name", BAD_USE)
def test_bad_use_is_told(name):
    call, error, words = BAD_USE[name]
    with pytest.raises(error, match=words):
        call()
