"""Pictures of histograms and runs."""

import itertools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from departing import quietly, uses_what_goes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from tables import cases

import jaxscale
from jaxscale import diagnostics
from jaxscale.diagnostics._histogram import fetch
from jaxscale.diagnostics._plot import draw_histogram

pytestmark = [pytest.mark.standard_promotion, uses_what_goes]


def test_three_loss_scales_and_a_histogram_of_two_numbers_are_drawn():
    run = [{"loss_scale": scale} for scale in (8.0, jnp.float32(4.0), 2)]
    (stairs,) = diagnostics.plot(run).axes[0].lines
    assert stairs.get_xdata().tolist() == [1, 2, 3]
    assert stairs.get_ydata().tolist() == [8, 4, 2]
    figure = diagnostics.plot(diagnostics.histogram(jnp.array([1.0, 1e-9])))
    kept, *_ = figure.axes[0].get_legend().get_texts()
    assert kept.get_text() == "kept by float16: 50.0%"


KERNEL = np.exp2(np.random.default_rng(0).normal(-22, 4, 4000)).astype(np.float32)
GRADS = {"kernel": KERNEL, "out": np.array([0.0, np.inf, 1e-3], np.float32)}
HISTOGRAM = quietly(jax.jit(diagnostics.histogram), GRADS)
TX = jaxscale.loss_scaled(optax.sgd(0.1), jaxscale.DynamicLossScale(growth_interval=3))
PARAMS = jnp.ones(2)


def drawn(figure):
    """Lays a figure out: nothing sticks out of it, and no text lies over another."""
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw_without_rendering()
    around = figure.get_tightbbox(renderer).padded(-0.01)
    assert all(figure.bbox_inches.contains(*corner) for corner in around.corners())
    for ax in figure.axes:
        boxes = [text.get_window_extent(renderer) for text in ax.texts]
        for box, other in itertools.combinations(boxes, 2):
            assert not box.overlaps(other)
    return figure


def title_of(ax):
    return ax.get_title(loc="left")


@pytest.mark.worlds
@cases("loss_scale", [2.0**-10, 1.0, 2.0**15, 2.0**100], fast=[2.0**15])
def test_the_bars_are_the_shares_and_the_ranges_those_of_float16(loss_scale):
    figure = drawn(diagnostics.plot(HISTOGRAM, loss_scale=loss_scale))
    bars, ranges = figure.axes
    heights = []
    for stack in bars.containers:
        heights.append(sum(bar.get_height() for bar in stack))
    shares = diagnostics.shares(HISTOGRAM, loss_scale=loss_scale)["float16"]
    expected = 100 * np.array([shares.normal, shares.subnormal, shares.lost])
    np.testing.assert_allclose(heights, expected, rtol=1e-9, atol=1e-9)

    exponent = round(np.log2(loss_scale))
    assert title_of(ranges) == f"what formats hold at loss scale 2**{exponent}"
    # float16 holds 2**-24 to 2**16, divided by the scale.
    subnormal = ranges.containers[0][0]
    normal = ranges.containers[1][0]
    ends = [subnormal.get_x(), normal.get_x(), normal.get_x() + normal.get_width()]
    np.testing.assert_array_equal(ends, np.array([-24, -14, 16]) - exponent)


@cases("number", [0.0, 1.0])
def test_the_histogram_of_one_number(number):
    drawn(diagnostics.plot(diagnostics.histogram(jnp.full(3, number))))


def test_a_histogram_shows_the_scales_and_formats_that_it_is_asked_for():
    titles = {
        3: "at 8",
        20: "ranges at loss scale 2**20, the largest that does not overflow",
    }
    formats = ["float16", "bfloat16"]
    figure = drawn(draw_histogram(fetch("", HISTOGRAM), titles, formats))
    bars, *ranges = figure.axes
    assert [title_of(ax) for ax in ranges] == list(titles.values())
    for ax in ranges:
        assert [label.get_text() for label in ax.get_yticklabels()] == formats
    legend = bars.get_legend()
    assert legend.get_title().get_text() == "at loss scale 2**3"
    box = legend.get_window_extent(FigureCanvasAgg(figure).get_renderer())
    assert not box.overlaps(bars.bbox)
    assert figure.bbox.padded(1).contains(box.x1, box.y1)


@jax.jit
def step(state, grad, loss):
    _, state = TX.update(grad * PARAMS, state, PARAMS, value=loss)
    return state, jaxscale.metrics(state) | {"loss": loss}


@pytest.mark.worlds
def test_a_run_is_drawn_as_its_metrics_were():
    losses = np.float32(2.0 / np.arange(1, 13))
    losses[[7, 9]] = np.nan, np.inf
    # Of a run that was resumed: not all of its steps and skips are here.
    state = TX.init(PARAMS)._replace(
        total_notfinite=jnp.array(40), total_steps=jnp.array(90)
    )
    run = []
    for i, value in enumerate(losses):
        state, row = step(state, jnp.inf if i in (0, 4) else 1.0, value)
        run.append(row)
    loss, scale, skipped = drawn(diagnostics.plot(run)).axes
    expected = {
        loss: np.where(np.isfinite(losses), losses, np.nan),
        scale: [row["loss_scale"] for row in run],
        skipped: [1, 1, 1, 1, 2, 2, 2, 3, 3, 4, 4, 4],
    }
    for ax, numbers in expected.items():
        np.testing.assert_array_equal(ax.lines[0].get_xdata(), np.arange(91, 103))
        np.testing.assert_array_equal(ax.lines[0].get_ydata(), numbers)
    gaps = [line.get_xdata()[0] for line in loss.lines[1:]]
    assert gaps == [98, 100]  # where the loss is not finite


def test_without_matplotlib_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    for result in (HISTOGRAM, [{"loss_scale": 1.0}]):
        with pytest.raises(ImportError, match=r"`plot`.*: pip install matplotlib\."):
            diagnostics.plot(result)


BAD = {
    r"`plot\(result=.*got a tree without any leaf": (ValueError, [], {}),
    r"`plot\(result=.*got only `str`": (ValueError, "gradients", {}),
    r"power of two, got 3\.0": (ValueError, HISTOGRAM, {"loss_scale": 3.0}),
    r"`jaxscale\.metrics` returned.*list with one float": (
        TypeError,
        [{"loss_scale": 1.0}, 1.0],
        {},
    ),
}


@cases("message", BAD)
def test_bad_use_is_an_error(message):
    error, result, options = BAD[message]
    with pytest.raises(error, match=message):
        diagnostics.plot(result, **options)
