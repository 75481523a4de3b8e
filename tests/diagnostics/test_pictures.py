"""What the pictures, their text forms and JSON show, and the history that draws itself."""

import dataclasses
import functools
import io
import itertools
import json
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from planted import HALF, trace
from tables import assert_same_bits, cases

import jaxscale
from jaxscale import diagnostics
from jaxscale.diagnostics import _history
from jaxscale.diagnostics._histogram import EXPONENTS, fetch_histogram
from jaxscale.diagnostics._pictures import draw_histogram

pytestmark = pytest.mark.standard_promotion

RNG = np.random.default_rng(0)
GRADS = {
    "dense": {"kernel": np.exp2(RNG.normal(-22, 4, 4000)).astype(np.float32), "bias": np.ones(3)},
    "out": np.array([0.0, np.inf, 1e-3], np.float32),
}
histogram, leaf_histograms = map(jax.jit, (diagnostics.histogram, diagnostics.leaf_histograms))
HISTOGRAM, LEAVES = histogram(GRADS), leaf_histograms(GRADS)
SUGGESTED = diagnostics.suggest_scale(HISTOGRAM).suggested
TX = jaxscale.loss_scaled(optax.sgd(0.1), jaxscale.DynamicLossScale(growth_interval=3))
PARAMS = jnp.ones(2)
STEP = jax.jit(lambda state, grad, loss: TX.update(grad * PARAMS, state, PARAMS, value=loss)[1])


def drawn(figure):
    """Saves a figure, with every text inside it and none over another in the same axes."""
    canvas = FigureCanvasAgg(figure)
    canvas.print_png(io.BytesIO())
    renderer = canvas.get_renderer()
    inside = figure.bbox.padded(1)
    for ax in figure.axes:
        texts = [*ax.texts, ax.xaxis.label, ax.yaxis.label]
        for i, labels in enumerate((ax.get_xticklabels(), ax.get_yticklabels())):
            low, high = sorted(ax.axis()[2 * i : 2 * i + 2])
            texts += [label for label in labels if low <= label.get_position()[i] <= high]
        boxes = [text.get_window_extent(renderer) for text in texts if text.get_text()]
        for i, box in enumerate(boxes):
            assert all(inside.contains(*corner) for corner in box.corners())
            assert not any(box.overlaps(other) for other in boxes[:i])
    return figure


@cases(
    ("dtype", "loss_scale"),
    itertools.product(["float16", "float8_e4m3fn"], [2.0**-10, 1.0, SUGGESTED, 2.0**100]),
    fast=[("float16", SUGGESTED)],  # and it is not drawn twice
)
def test_the_bars_are_the_shares(loss_scale, dtype):
    figure = drawn(diagnostics.plot_histogram(HISTOGRAM, loss_scale=loss_scale, dtype=dtype))
    shares = diagnostics.shares(HISTOGRAM, loss_scale=loss_scale)[dtype]
    sums = [sum(bar.get_height() for bar in bars) for bars in figure.axes[0].containers]
    expected = 100 * np.array([shares.normal, shares.subnormal, shares.lost])
    np.testing.assert_allclose(sums, expected, rtol=1e-9, atol=1e-9)
    assert figure.axes[0].get_title(loc="left").startswith("4,006 gradients: <0.1% are exactly 0")
    suggested = diagnostics.suggest_scale(HISTOGRAM, dtype=dtype).suggested
    # float16 holds 2**-24 to 2**16, divided by the scale; below, by the suggested scale.
    for ax, scale in zip(figure.axes[1:], dict.fromkeys((loss_scale, suggested)), strict=True):
        assert f"2**{np.log2(scale):.0f}" in ax.get_title(loc="left")
        low, high = ax.containers[0][0], ax.containers[1][0]
        ends = low.get_x(), high.get_x(), high.get_x() + high.get_width()
        limits = ax.get_xlim()
        assert ends == tuple(np.clip(np.array([-24, -14, 16]) - np.log2(scale), *limits).tolist())


def test_the_histogram_of_few_different_numbers():
    for grads in (jnp.zeros(3), jnp.ones(1)):
        figure = drawn(diagnostics.plot_histogram(histogram(grads)))
        assert len(figure.axes) == 2
        assert len(diagnostics.text_histogram(histogram(grads)).splitlines()) == 7
    # 49 equal shares, which do not add up to 1 in floating point.
    grads = 2.0 ** jnp.arange(-7.0, 7.0)[:, None] * jnp.ones((14, 7))
    figure = diagnostics.plot_histogram(histogram(grads))
    assert figure.axes[0].get_legend().get_texts()[0].get_text() == "kept by float16: 100%"


def test_a_narrow_histogram_shows_what_it_is_asked_for():
    titles = {3: "at 8", 20: "ranges at loss scale 2**20, the largest that does not overflow"}
    formats = ["float16", "bfloat16"]
    figure = drawn(
        draw_histogram(fetch_histogram("", HISTOGRAM), titles, formats=formats, is_narrow=True)
    )
    bars, *ranges = figure.axes
    assert [ax.get_title(loc="left") for ax in ranges] == list(titles.values())
    for ax in ranges:
        assert [label.get_text() for label in ax.get_yticklabels()] == formats
    assert bars.get_legend().get_title().get_text() == "at loss scale 2**3"
    renderer = FigureCanvasAgg(figure).get_renderer()
    box, of_bars = (each.get_window_extent(renderer) for each in (bars.get_legend(), bars))
    assert not box.overlaps(of_bars)
    assert figure.bbox.padded(1).contains(box.x1, box.y1)


@cases("loss_scale", [2.0**-9, 1.0, 2.0**10], fast=[2.0**10])
def test_the_histogram_as_text(loss_scale):
    exponents = range(10, -22, -1)
    found = histogram(1.5 * np.exp2(np.array(exponents, np.float32)))
    lines = diagnostics.text_histogram(found, loss_scale=loss_scale).splitlines()
    assert max(map(len, lines)) <= 80
    # Each row says what each format makes of its numbers.
    for line, exponent in zip(lines[3:-3], exponents, strict=True):
        one = found._replace(counts=np.where(EXPONENTS[:, None] == exponent, found.counts, 0))
        shares = diagnostics.shares(one, loss_scale=loss_scale).values()
        signs = ["0s.!"[list(each).index(1)] for each in shares]
        assert line.split() == [f"2**{exponent}", "3.1%", "#" * 24, *signs]
    shares = np.array([*diagnostics.shares(found, loss_scale=loss_scale).values()])
    totals = [[float(word.removesuffix("%")) for word in line.split()[-4:]] for line in lines[-3:]]
    np.testing.assert_allclose(totals, 100 * shares.T[[0, 1, 3]], atol=0.051)  # not those kept


def test_the_histogram_as_text_fits_a_terminal():
    lines = diagnostics.text_histogram(HISTOGRAM).splitlines()
    assert len(lines) <= 38
    assert max(map(len, lines)) <= 80
    shares = [float(line.split()[1].strip("<%")) for line in lines[3:-3]]
    assert 99 < sum(shares) < 101  # a row adds up several powers of two


def test_the_underflow_map():
    layers = diagnostics.underflow(LEAVES)
    (ax,) = drawn(diagnostics.plot_underflow(layers)).axes
    lost = [[s.lost for s in shares.values()] for shares in layers.layers.values()]
    np.testing.assert_array_equal(ax.images[0].get_array(), 100 * np.array(lost))
    assert [label.get_text() for label in ax.get_yticklabels()] == list(layers.layers)
    tick = ax.xaxis.get_major_ticks()[0]  # its name is above and below
    assert (tick.label1.get_visible(), tick.label2.get_visible()) == (True, True)
    many = diagnostics.underflow({f"layers/{i}": LEAVES["out"] for i in range(20)})
    drawn(diagnostics.plot_underflow(many))
    # Layers without numbers are not said to lose nothing.
    grads = {"a": jnp.array([1.0, 1e-9]), "b": jnp.full(2, jnp.nan), "c": jnp.zeros(2)}
    found = diagnostics.underflow(leaf_histograms(grads))
    assert [line.split()[1:] for line in str(found).splitlines()[3:]] == [["-"] * 4] * 2
    texts = [text.get_text() for text in drawn(diagnostics.plot_underflow(found)).axes[0].texts]
    assert (texts[0], texts[4:]) == ("50.0%", ["-"] * 8)


def run(steps, bad=(), losses=None):
    """A history, and the metrics of each step, fetched at once."""
    history, state, seen = diagnostics.History(), TX.init(PARAMS), []
    for step in range(steps):
        loss = jnp.float32((losses or {}).get(step, 2.0 / (step + 1)))
        state = STEP(state, jnp.float32(np.inf if step in bad else 1), loss)
        history.append(state, loss=loss)
        seen.append({"loss": loss} | jaxscale.metrics(state))
    return history, {name: np.array([step[name] for step in seen]) for name in seen[0]}


def test_a_history_is_what_the_metrics_were():
    history, seen = run(12, bad=(3, 4), losses={7: np.nan, 9: np.inf})
    columns = history.columns()
    jax.tree.map(np.testing.assert_array_equal, columns, seen)
    assert len(history) == 12
    figure = drawn(history.plot())
    loss, scale, skipped = figure.axes
    np.testing.assert_array_equal(scale.lines[0].get_ydata(), np.log2(seen["loss_scale"]))
    np.testing.assert_array_equal(skipped.lines[0].get_ydata(), seen["total_notfinite"])
    np.testing.assert_array_equal(skipped.lines[1].get_xdata(), [4, 5, 8, 10])
    np.testing.assert_array_equal(loss.lines[1].get_xdata(), [8, 10])
    lines = str(history).splitlines()
    assert lines[0].startswith("steps 1 to 12: 4 skipped, the loss scale from 2**")
    assert [line.split()[-1] for line in lines[2:]] == list("000110010100")


def test_a_long_history_is_fetched_in_parts_and_summed_up(monkeypatch):
    monkeypatch.setattr(_history, "_CHUNK", 4)
    fetched, device_get = [], jax.device_get
    monkeypatch.setattr(jax, "device_get", lambda x: fetched.append(len(x)) or device_get(x))
    history, seen = run(47, bad=(0, 20, 21))
    assert fetched == [4] * 10  # never the latest
    assert len(history) == 47
    jax.tree.map(np.testing.assert_array_equal, history.columns(), seen)
    lines = str(history).splitlines()
    assert len(lines) == 22
    assert sum(int(line.split()[-1]) for line in lines[2:]) == 3
    drawn(history.plot())


def test_append_does_not_wait_for_the_device_and_copies_what_it_is_given():
    @jax.jit
    def slow(state, x):
        x = jax.lax.fori_loop(0, 300, lambda i, x: jnp.tanh(x @ x), x)
        return STEP(state, jnp.sum(x) * 0 + 1, jnp.float32(1))

    history, state, x = diagnostics.History(), TX.init(PARAMS), jnp.ones((300, 300))
    for ready in (True, False):  # the first run compiles everything; in the second nothing waits
        state = slow(state, x)
        if ready:
            state.total_steps.block_until_ready()
        history.append(state, loss=state.scaling.loss_scale)
    assert not state.total_steps.is_ready()
    assert history.columns()["total_steps"].tolist() == [1, 2]
    # And the state may be donated to the next step.
    step = jax.jit(lambda state: TX.update(PARAMS, state, PARAMS)[1], donate_argnums=0)
    history, state = diagnostics.History(), TX.init(PARAMS)
    for _ in range(4):
        state = step(state)
        history.append(state)
    assert history.columns()["total_steps"].tolist() == [1, 2, 3, 4]


def test_metrics_of_the_step_itself_and_other_numbers():
    history = diagnostics.History()
    state = jaxscale.DynamicLossScale().init()
    assert str(history) == "no steps"
    for i in range(2):
        history.append(jax.jit(jaxscale.metrics)(state), learning_rate=0.5**i, norm=i)
    assert str(history).splitlines()[0] == "steps 1 to 2: the loss scale 2**15"
    assert history.columns()["learning_rate"].tolist() == [1.0, 0.5]
    assert len(drawn(history.plot()).axes) == 1
    # Recorded from the middle of a run on: steps skipped before do not count.
    state = TX.init(PARAMS)._replace(total_notfinite=jnp.array(40), total_steps=jnp.array(90))
    history = diagnostics.History()
    for grad in (1.0, jnp.inf):
        state = STEP(state, jnp.float32(grad), jnp.float32(1))
        history.append(state)
    assert str(history).startswith("steps 91 to 92: 1 skipped")
    # And Python numbers.
    numbers, history = {"loss_scale": 2.0**15, "step_applied": True, "n": 3}, diagnostics.History()
    for values in (numbers, jax.tree.map(jnp.asarray, numbers), jax.tree.map(np.asarray, numbers)):
        history.append(values)
    columns = {"loss_scale": np.float32([2**15] * 3), "n": np.int32([3] * 3)}
    assert_same_bits(history.columns(), columns | {"step_applied": np.int32([1] * 3)})


def test_without_matplotlib_there_is_still_text(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    history, _ = run(2)
    given = {"plot_histogram": HISTOGRAM, "plot_underflow": diagnostics.underflow(LEAVES)}
    plots = {name: functools.partial(getattr(diagnostics, name), x) for name, x in given.items()}
    for call, plot in (plots | {"History.plot": history.plot}).items():
        with pytest.raises(ImportError, match=rf"`{call}`.*: pip install matplotlib\."):
            plot()
    assert str(history)
    assert diagnostics.text_histogram(HISTOGRAM)


STATE, NEW = TX.init(PARAMS), diagnostics.History()
ERRORS = {
    "exactly one loss scale": lambda: NEW.append(PARAMS),
    r"got `loss_scale` of shape \(2,\)": lambda: NEW.append(jax.vmap(lambda _: STATE)(PARAMS)),
    r"`plot_histogram\(dtype=.*'x'": lambda: diagnostics.plot_histogram(HISTOGRAM, dtype="x"),
    r"takes scalars, got `loss` of shape \(2,\)": lambda: NEW.append(STATE, loss=PARAMS),
    r"only some steps had loss, norm": lambda: run(1)[0].append(STATE, norm=1.0),
    r"nothing to draw": NEW.plot,
}
OF_TYPE = {
    r"cannot run inside `jit`": lambda: jax.jit(NEW.append)(STATE),
    r"`plot_underflow.*dict": lambda: diagnostics.plot_underflow(LEAVES),
}


@cases("message", [*ERRORS, *OF_TYPE])
def test_errors(message):
    with pytest.raises(TypeError if message in OF_TYPE else ValueError, match=message):
        (ERRORS | OF_TYPE)[message]()


def plain(value):
    """The values of a report in dictionaries and lists, as `json` takes them."""
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if dataclasses.is_dataclass(value):
        value = vars(value)
    if isinstance(value, (jax.Array, np.ndarray)):
        return np.asarray(value).tolist()
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    return [*map(plain, value)] if isinstance(value, (tuple, list)) else value


def test_all_results_are_the_same_in_json():
    w = jnp.array([1e-9, 2e-5, 1.0, jnp.inf, jnp.nan, -0.0], jnp.float32)
    counts = diagnostics.leaf_counts(grads := {"w": w, "b": [PARAMS, None]})
    found, leaves = histogram(grads), leaf_histograms(grads)

    def loss_fn(w):  # with an overflow, an underflow, and a number that is rounded to 0
        y = w * HALF(60000) * HALF(60000) + w * HALF(2.0**-11) * HALF(2.0**-11)
        return -jnp.sum((y + 1e-9).astype(jnp.float32))

    report = trace(loss_fn, jnp.ones(3, HALF), loss_scale=1)
    table, history = diagnostics.table(counts), diagnostics.History()
    for loss in (1.5, jnp.inf, -jnp.inf, jnp.nan, 1 / 3):
        history.append(STATE, loss=loss)
    results = [
        *(counts, table, *table.rows, found, leaves, history.columns()),
        *(diagnostics.shares(found), *diagnostics.shares(found).values()),
        *map(diagnostics.suggest_scale, (found, histogram(jnp.zeros(1)))),
        *(report, *report.constants, *report.nonfinite, *report.underflows),
        diagnostics.underflow(leaves),
        diagnostics.calibrate(lambda w, x: jnp.sqrt(w * x), 1.0, [jnp.float32(0)]),
        *(products := diagnostics.products(lambda w: w @ w, jnp.ones((2, 2))), *products.lines),
    ]
    classes = {of for of in vars(diagnostics).values() if isinstance(of, type)}
    assert classes - set(map(type, results)) == {diagnostics.History}
    assert report.loss == -np.inf
    # To the last bit; the numbers that JSON lacks are strings, which `float` reads.
    text = json.dumps(diagnostics.to_json(results), allow_nan=False)
    assert re.sub('"(NaN|-?Infinity)"', r"\1", text) == json.dumps(plain(results))
