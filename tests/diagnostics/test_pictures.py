"""What the pictures, their text forms and JSON show, and the history that draws itself."""

import dataclasses
import functools
import itertools
import json
import re
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from tables import assert_same_bits, cases, unchanged
from traced_losses import HALF, summed, trace

import jaxscale
from jaxscale import diagnostics
from jaxscale.diagnostics import _history
from jaxscale.diagnostics._histogram import EXPONENTS, fetch_histogram
from jaxscale.diagnostics._pictures import draw_histogram

pytestmark = pytest.mark.standard_promotion

KERNEL = np.exp2(np.random.default_rng(0).normal(-22, 4, 4000)).astype(np.float32)
GRADS = {
    "dense": {"kernel": KERNEL, "bias": np.ones(3)},
    "out": np.array([0.0, np.inf, 1e-3], np.float32),
}
histogram = jax.jit(diagnostics.histogram)
leaf_histograms = jax.jit(diagnostics.leaf_histograms)
HISTOGRAM = histogram(GRADS)
LEAVES = leaf_histograms(GRADS)
SUGGESTED = diagnostics.suggest_scale(HISTOGRAM).suggested
TX = jaxscale.loss_scaled(optax.sgd(0.1), jaxscale.DynamicLossScale(growth_interval=3))
PARAMS = jnp.ones(2)


@jax.jit
def step(state, grad, loss):
    _, state = TX.update(grad * PARAMS, state, PARAMS, value=loss)
    return state


def drawn(figure):
    """Lays a figure out, and checks that every text is inside it, and over no other of its axes."""
    canvas = FigureCanvasAgg(figure)
    figure.draw_without_rendering()
    inside = figure.bbox.padded(1)
    for ax in figure.axes:
        boxes = []
        for text in visible_texts(ax):
            box = text.get_window_extent(canvas.get_renderer())
            assert all(inside.contains(*corner) for corner in box.corners()), text
            assert not any(box.overlaps(other) for other in boxes), text
            boxes.append(box)
    return figure


def visible_texts(ax):
    left, right, bottom, top = ax.axis()
    texts = [*ax.texts, ax.xaxis.label, ax.yaxis.label]
    for label in ax.get_xticklabels():
        if min(left, right) <= label.get_position()[0] <= max(left, right):
            texts.append(label)
    for label in ax.get_yticklabels():
        if min(bottom, top) <= label.get_position()[1] <= max(bottom, top):
            texts.append(label)
    return [text for text in texts if text.get_text()]


def title_of(ax):
    return ax.get_title(loc="left")


# The histogram as a picture.


@functools.cache
def picture(loss_scale, dtype):
    figure = diagnostics.plot_histogram(HISTOGRAM, loss_scale=loss_scale, dtype=dtype)
    return drawn(figure)


DRAWN_SCALES = [2.0**-10, 1.0, SUGGESTED, 2.0**100]
PICTURES = list(itertools.product(["float16", "float8_e4m3fn"], DRAWN_SCALES))
DRAWN_FAST = [("float16", SUGGESTED)]  # and it is not drawn twice


@cases(("dtype", "loss_scale"), PICTURES, fast=DRAWN_FAST)
def test_the_bars_are_the_shares(loss_scale, dtype):
    bars = picture(loss_scale, dtype).axes[0]
    heights = []
    for stack in bars.containers:
        heights.append(sum(bar.get_height() for bar in stack))
    shares = diagnostics.shares(HISTOGRAM, loss_scale=loss_scale)[dtype]
    expected = 100 * np.array([shares.normal, shares.subnormal, shares.lost])
    np.testing.assert_allclose(heights, expected, rtol=1e-9, atol=1e-9)
    assert title_of(bars) == "4,006 gradients: <0.1% are exactly 0, 1 inf, 0 NaN."


@cases(("dtype", "loss_scale"), PICTURES, fast=DRAWN_FAST)
def test_the_ranges_are_those_of_float16_at_each_loss_scale(loss_scale, dtype):
    suggested = diagnostics.suggest_scale(HISTOGRAM, dtype=dtype).suggested
    scales = list(dict.fromkeys([loss_scale, suggested]))  # once if they are the same
    _, *ranges = picture(loss_scale, dtype).axes
    assert title_of(ranges[0]).startswith("what formats hold at ")
    for ax, scale in zip(ranges, scales, strict=True):
        exponent = round(np.log2(scale))
        assert f"2**{exponent}" in title_of(ax)
        # float16 holds 2**-24 to 2**16, divided by the scale.
        range_of_float16 = np.array([-24, -14, 16]) - exponent
        shown = np.clip(range_of_float16, *ax.get_xlim())
        np.testing.assert_array_equal(ends_of_first_range(ax), shown)
        if dtype == "float16":  # all of its range is shown
            np.testing.assert_array_equal(shown, range_of_float16)


def ends_of_first_range(ax):
    """Where the subnormal and the normal numbers of the first format begin, and where they end."""
    subnormal = ax.containers[0][0]
    normal = ax.containers[1][0]
    least_normal = normal.get_x()
    return subnormal.get_x(), least_normal, least_normal + normal.get_width()


FEW = {"zeros": jnp.zeros(3), "one number": jnp.ones(1)}


@cases("name", FEW)
def test_the_histogram_of_few_different_numbers(name):
    counted = histogram(FEW[name])
    figure = drawn(diagnostics.plot_histogram(counted))
    assert len(figure.axes) == 2
    text = diagnostics.text_histogram(counted)
    assert len(text.splitlines()) == 7


def test_shares_that_do_not_add_up_to_one_in_floating_point_are_all():
    powers = np.exp2(np.arange(-7, 7, dtype=np.float32))
    grads = np.stack([powers] * 7)
    figure = diagnostics.plot_histogram(histogram(grads))
    first_label = figure.axes[0].get_legend().get_texts()[0]
    assert first_label.get_text() == "kept by float16: 100%"


def test_a_narrow_histogram_shows_what_it_is_asked_for():
    titles = {
        3: "at 8",
        20: "ranges at loss scale 2**20, the largest that does not overflow",
    }
    formats = ["float16", "bfloat16"]
    numbers = fetch_histogram("", HISTOGRAM)
    figure = drawn(draw_histogram(numbers, titles, formats=formats, is_narrow=True))
    bars, *ranges = figure.axes
    assert [title_of(ax) for ax in ranges] == list(titles.values())
    for ax in ranges:
        assert [label.get_text() for label in ax.get_yticklabels()] == formats
    legend = bars.get_legend()
    assert legend.get_title().get_text() == "at loss scale 2**3"
    renderer = FigureCanvasAgg(figure).get_renderer()
    box = legend.get_window_extent(renderer)
    assert not box.overlaps(bars.get_window_extent(renderer))
    assert figure.bbox.padded(1).contains(box.x1, box.y1)


# The histogram as text.

TEXT_EXPONENTS = range(10, -22, -1)  # from the largest on, as the rows are
ONE_OF_EACH = histogram(1.5 * np.exp2(np.array(TEXT_EXPONENTS, np.float32)))
TEXT_SCALES = [2.0**-9, 1.0, 2.0**10]


def lines_of(loss_scale):
    return diagnostics.text_histogram(ONE_OF_EACH, loss_scale=loss_scale).splitlines()


@cases("loss_scale", TEXT_SCALES, fast=[2.0**10])
def test_each_row_of_text_says_what_each_format_makes_of_its_numbers(loss_scale):
    lines = lines_of(loss_scale)
    assert max(map(len, lines)) <= 80
    for row, exponent in zip(lines[3:-3], TEXT_EXPONENTS, strict=True):
        signs = signs_of_power(exponent, loss_scale)
        assert row.split() == [f"2**{exponent}", "3.1%", "#" * 24, *signs]


def signs_of_power(exponent, loss_scale):
    """What each format makes of the number of one power of two, as signs."""
    counts = np.where(EXPONENTS[:, None] == exponent, ONE_OF_EACH.counts, 0)
    histogram_of_power = ONE_OF_EACH._replace(counts=counts)
    shares = diagnostics.shares(histogram_of_power, loss_scale=loss_scale)
    signs = {
        (1, 0, 0, 0): "0",  # flushed
        (0, 1, 0, 0): "s",  # subnormal
        (0, 0, 1, 0): ".",  # normal
        (0, 0, 0, 1): "!",  # overflowed
    }
    return [signs[shares_of_format] for shares_of_format in shares.values()]


@cases("loss_scale", TEXT_SCALES, fast=[2.0**10])
def test_the_last_rows_of_text_are_the_shares(loss_scale):
    *_, flushed, subnormal, overflowed = lines_of(loss_scale)
    shares = diagnostics.shares(ONE_OF_EACH, loss_scale=loss_scale)
    expected = 100 * np.transpose(list(shares.values()))
    assert_row_has_percents(flushed, expected[0])
    assert_row_has_percents(subnormal, expected[1])
    assert_row_has_percents(overflowed, expected[3])


def assert_row_has_percents(row, expected):
    percents = [float(cell.removesuffix("%")) for cell in row.split()[-4:]]
    np.testing.assert_allclose(percents, expected, atol=0.051)


def test_a_long_text_adds_up_powers_of_two():
    lines = diagnostics.text_histogram(HISTOGRAM).splitlines()
    assert len(lines) <= 38
    assert max(map(len, lines)) <= 80
    total = 0.0
    for row in lines[3:-3]:
        _, share, *_ = row.split()
        total += float(share.strip("<%"))
    assert 99 < total < 101


# What each layer loses.


def test_the_underflow_map_shows_what_each_layer_loses():
    underflow = diagnostics.underflow(LEAVES)
    (ax,) = drawn(diagnostics.plot_underflow(underflow)).axes
    lost = []
    for shares in underflow.layers.values():
        lost.append([100 * of_format.lost for of_format in shares.values()])
    np.testing.assert_array_equal(ax.images[0].get_array(), lost)
    layers = [label.get_text() for label in ax.get_yticklabels()]
    assert layers == list(underflow.layers)
    tick = ax.xaxis.get_major_ticks()[0]
    assert tick.label1.get_visible()  # below
    assert tick.label2.get_visible()  # above


def test_the_map_of_many_layers_is_legible():
    leaves = {f"layers/{i}": LEAVES["out"] for i in range(20)}
    many = diagnostics.underflow(leaves)
    drawn(diagnostics.plot_underflow(many))


def test_layers_without_numbers_are_not_said_to_lose_nothing():
    grads = {
        "a": jnp.array([1.0, 1e-9]),
        "b": jnp.full(2, jnp.nan),
        "c": jnp.zeros(2),
    }
    histograms = leaf_histograms(grads)
    underflow = diagnostics.underflow(histograms)
    cells = [row.split()[1:] for row in str(underflow).splitlines()[2:]]
    assert cells == [["50.0%", "0%", "50.0%", "50.0%"], ["-"] * 4, ["-"] * 4]
    (ax,) = drawn(diagnostics.plot_underflow(underflow)).axes
    assert [text.get_text() for text in ax.texts] == np.ravel(cells).tolist()


# The history of a run.


class Recorded(NamedTuple):
    """A history, and the metrics of each step, fetched at once."""

    history: diagnostics.History
    metrics: dict[str, np.ndarray]


def record(steps, bad=(), losses=None):
    """Records some steps, of which some are bad, and have losses of their own."""
    losses = losses or {}
    history = diagnostics.History()
    state = TX.init(PARAMS)
    rows = []
    for number in range(steps):
        loss = jnp.float32(losses.get(number, 2.0 / (number + 1)))
        grad = jnp.float32(np.inf if number in bad else 1)
        state = step(state, grad, loss)
        history.append(state, loss=loss)
        rows.append({"loss": loss, **jaxscale.metrics(state)})
    return Recorded(history, jax.tree.map(lambda *values: np.array(values), *rows))


@pytest.fixture(scope="module")
def twelve_steps():
    return record(12, bad=(3, 4), losses={7: np.nan, 9: np.inf})


def test_a_history_is_what_the_metrics_were(twelve_steps):
    history, metrics = twelve_steps
    jax.tree.map(np.testing.assert_array_equal, history.columns(), metrics)
    assert len(history) == 12


def test_the_picture_of_a_history_is_what_the_metrics_were(twelve_steps):
    history, metrics = twelve_steps
    loss, scale, skipped = drawn(history.plot()).axes
    assert_equal = np.testing.assert_array_equal
    assert_equal(scale.lines[0].get_ydata(), np.log2(metrics["loss_scale"]))
    assert_equal(skipped.lines[0].get_ydata(), metrics["total_notfinite"])
    assert_equal(skipped.lines[1].get_xdata(), [4, 5, 8, 10])
    assert_equal(loss.lines[1].get_xdata(), [8, 10])


def test_the_text_of_a_history_is_what_the_metrics_were(twelve_steps):
    summary, _, *rows = str(twelve_steps.history).splitlines()
    assert summary.startswith("steps 1 to 12: 4 skipped, the loss scale from 2**")
    skipped = [row.split()[-1] for row in rows]
    assert skipped == list("000110010100")


def test_a_long_history_is_fetched_in_parts(monkeypatch):
    monkeypatch.setattr(_history, "_CHUNK", 4)
    device_get = jax.device_get
    fetched = []

    def counted(arrays):
        fetched.append(len(arrays))
        return device_get(arrays)

    monkeypatch.setattr(jax, "device_get", counted)
    history, metrics = record(47, bad=(0, 20, 21))
    assert fetched == [4] * 10  # never the latest
    assert len(history) == 47
    jax.tree.map(np.testing.assert_array_equal, history.columns(), metrics)


def test_a_long_history_is_summed_up():
    history, _ = record(47, bad=(0, 20, 21))
    _, _, *rows = str(history).splitlines()
    assert len(rows) == 20
    skipped = [int(row.split()[-1]) for row in rows]
    assert sum(skipped) == 3
    drawn(history.plot())


def test_append_does_not_wait_for_the_device():
    @jax.jit
    def slow_step(state, x):
        x = jax.lax.fori_loop(0, 300, lambda i, x: jnp.tanh(x @ x), x)
        return step(state, jnp.sum(x) * 0 + 1, jnp.float32(1))

    history = diagnostics.History()
    x = jnp.ones((300, 300))
    # The first step compiles everything.
    state = slow_step(TX.init(PARAMS), x)
    state.total_steps.block_until_ready()
    history.append(state, loss=state.scaling.loss_scale)
    # In the second nothing waits.
    state = slow_step(state, x)
    history.append(state, loss=state.scaling.loss_scale)
    assert not state.total_steps.is_ready()
    assert history.columns()["total_steps"].tolist() == [1, 2]


def test_append_copies_what_the_next_step_may_overwrite():
    @functools.partial(jax.jit, donate_argnums=0)
    def donating_step(state):
        return TX.update(PARAMS, state, PARAMS)[1]

    history = diagnostics.History()
    state = TX.init(PARAMS)
    for _ in range(4):
        state = donating_step(state)
        history.append(state)
    assert history.columns()["total_steps"].tolist() == [1, 2, 3, 4]


def test_a_history_of_metrics_and_other_numbers():
    history = diagnostics.History()
    assert str(history) == "no steps"
    state = jaxscale.DynamicLossScale().init()
    for i in range(2):
        history.append(jax.jit(jaxscale.metrics)(state), learning_rate=0.5**i, norm=i)
    assert str(history).splitlines()[0] == "steps 1 to 2: the loss scale 2**15"
    assert history.columns()["learning_rate"].tolist() == [1.0, 0.5]
    assert len(drawn(history.plot()).axes) == 1


def resumed(*grads):
    """The history of some steps of a run that had skipped 40 of 90 before."""
    state = TX.init(PARAMS)._replace(
        total_notfinite=jnp.array(40), total_steps=jnp.array(90)
    )
    history = diagnostics.History()
    for grad in grads:
        state = step(state, jnp.float32(grad), jnp.float32(1))
        history.append(state)
    return history


def test_steps_that_were_skipped_before_a_history_began_do_not_count():
    assert str(resumed(1.0, jnp.inf)).startswith("steps 91 to 92: 1 skipped")


def test_a_skip_in_the_first_row_of_a_history_is_marked():
    _, skipped = drawn(resumed(jnp.inf, 1.0).plot()).axes
    assert skipped.lines[1].get_xdata().tolist() == [91]


def test_a_history_takes_numbers_of_python_numpy_and_jax():
    history = diagnostics.History()
    numbers = {"loss_scale": 2.0**15, "step_applied": True, "n": 3}
    for convert in (unchanged, jnp.asarray, np.asarray):
        history.append(jax.tree.map(convert, numbers))
    expected = {
        "loss_scale": np.float32([2**15] * 3),
        "n": np.int32([3] * 3),
        "step_applied": np.int32([1] * 3),
    }
    assert_same_bits(history.columns(), expected)


def test_without_matplotlib_there_is_still_text(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    history = record(2).history
    underflow = diagnostics.underflow(LEAVES)
    plots = {
        "plot_histogram": lambda: diagnostics.plot_histogram(HISTOGRAM),
        "plot_underflow": lambda: diagnostics.plot_underflow(underflow),
        "History.plot": history.plot,
    }
    for call, plot in plots.items():
        with pytest.raises(ImportError, match=rf"`{call}`.*: pip install matplotlib\."):
            plot()
    assert str(history)
    assert diagnostics.text_histogram(HISTOGRAM)


STATE = TX.init(PARAMS)
STATES = jax.vmap(lambda _: STATE)(PARAMS)
HISTORY = diagnostics.History()
BAD_VALUES = {
    "exactly one loss scale": lambda: HISTORY.append(PARAMS),
    r"got `loss_scale` of shape \(2,\)": lambda: HISTORY.append(STATES),
    r"`plot_histogram\(dtype=.*'x'": lambda: diagnostics.plot_histogram(
        HISTOGRAM, dtype="x"
    ),
    r"takes scalars, got `loss` of shape \(2,\)": lambda: HISTORY.append(
        STATE, loss=PARAMS
    ),
    r"only some steps had loss, norm": lambda: record(1).history.append(
        STATE, norm=1.0
    ),
    r"nothing to draw": HISTORY.plot,
}
BAD_TYPES = {
    r"cannot run inside `jit`": lambda: jax.jit(HISTORY.append)(STATE),
    r"`plot_underflow.*dict": lambda: diagnostics.plot_underflow(LEAVES),
}


@cases("message", BAD_VALUES)
def test_bad_values_are_errors(message):
    with pytest.raises(ValueError, match=message):
        BAD_VALUES[message]()


@cases("message", BAD_TYPES)
def test_bad_types_are_errors(message):
    with pytest.raises(TypeError, match=message):
        BAD_TYPES[message]()


# All results as JSON.


def plain(value):
    """The values of a report in dictionaries and lists, as `json` takes them."""
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if dataclasses.is_dataclass(value):
        value = vars(value)
    if isinstance(value, (jax.Array, np.ndarray)):
        return np.asarray(value).tolist()
    if isinstance(value, dict):
        return {name: plain(part) for name, part in value.items()}
    if isinstance(value, (tuple, list)):
        return [plain(part) for part in value]
    return value


@summed
def with_everything(w):
    """A loss with an overflow, an underflow, and a number that is rounded to 0."""
    large = w * HALF(60000) * HALF(60000)
    small = w * HALF(2.0**-11) * HALF(2.0**-11)
    return -(large + small + 1e-9)


def all_results():
    """Results of all functions, with the numbers that JSON lacks among them."""
    w = jnp.array([1e-9, 2e-5, 1.0, jnp.inf, jnp.nan, -0.0], jnp.float32)
    counts = diagnostics.leaf_counts({"w": w, "b": [PARAMS, None]})
    table = diagnostics.table(counts)
    shares = diagnostics.shares(HISTOGRAM)
    history = diagnostics.History()
    for loss in (1.5, jnp.inf, -jnp.inf, jnp.nan, 1 / 3):
        history.append(STATE, loss=loss)
    report = trace(with_everything, jnp.ones(3, HALF), loss_scale=1)
    products = diagnostics.products(lambda w: w @ w, jnp.ones((2, 2)))
    return [
        counts,
        table,
        *table.rows,
        HISTOGRAM,
        LEAVES,
        shares,
        *shares.values(),
        diagnostics.suggest_scale(HISTOGRAM),
        diagnostics.suggest_scale(histogram(FEW["zeros"])),
        diagnostics.underflow(LEAVES),
        diagnostics.calibrate(lambda w, x: jnp.sqrt(w * x), 1.0, [jnp.float32(0)]),
        report,
        *report.constants,
        *report.nonfinite,
        *report.underflows,
        products,
        *products.lines,
        history.columns(),
    ]


def test_all_results_are_the_same_in_json():
    results = all_results()
    public = vars(diagnostics).values()
    classes = {value for value in public if isinstance(value, type)}
    of_results = {type(result) for result in results}
    assert classes - of_results == {diagnostics.History}
    losses = [getattr(result, "loss", None) for result in results]
    assert -np.inf in losses
    # To the last bit; the numbers that JSON lacks are strings, which `float` reads.
    written = diagnostics.to_json(results)
    text = json.dumps(written, allow_nan=False)
    unquoted = re.sub('"(NaN|-?Infinity)"', r"\1", text)
    expected = json.dumps(plain(results))
    assert unquoted == expected
