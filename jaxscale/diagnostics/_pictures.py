"""The pictures: figures of matplotlib, made without a window and without global state."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .._trees.checks import one_of, power_of_two
from ._formats import FORMAT_BY_NAME, FORMATS, check_result
from ._histogram import (
    EXPONENTS,
    Histogram,
    HostHistogram,
    Shares,
    fetch_histogram,
    find_all_shares,
    find_outcomes,
    find_shares,
)
from ._suggest import suggest_scale
from ._text import find_filled_rows, percent, power, summarize_counts
from ._underflow import Underflow

# From light to dark, so that they also differ in grey.
_LOST = "#fde0c5"
_SUBNORMAL = "#eb7f5e"  # kept in part
_NORMAL = "#3f3b7a"  # kept in full
_EDGE = {"edgecolor": "black", "linewidth": 0.4}  # of bars


def can_draw() -> bool:
    """Returns whether matplotlib is installed."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        return False
    return True


def _new_figure(call: str, width: float, height: float) -> Any:
    """Returns an empty figure, or raises an `ImportError` without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            f"`{call}` draws with matplotlib, which is not installed: "
            "pip install matplotlib. In a terminal, use the text form."
        ) from error
    return Figure(figsize=(width, height), layout="constrained")


def plot_histogram(
    histogram: Histogram, *, loss_scale: float = 1.0, dtype: str = "float16"
) -> Any:
    """Returns a `matplotlib.figure.Figure` of a histogram and of the range of each format.

    The upper part shows the gradients by their size, shaded by what `dtype` makes of them at the
    loss scale. The lower part shows the gradients that each format holds, at that scale and, if it
    is another, at the one that `suggest_scale` suggests for `dtype`: a larger scale moves these
    ranges to the left.

    Args:
      histogram: what `histogram` returned; leading axes are summed up.
      loss_scale: a power of two.
      dtype: `"float16"`, `"bfloat16"`, `"float8_e4m3fn"` or `"float8_e5m2"`.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxscale import diagnostics
      >>> histogram = diagnostics.histogram({"w": jnp.array([1e-9, 1e-3])})
      >>> figure = diagnostics.plot_histogram(histogram, loss_scale=2.0**10)
      >>> [axes.get_title(loc="left") for axes in figure.axes][1:]
      ['what formats hold at loss scale 2**10', 'at the suggested loss scale, 2**15']
      >>> figure.savefig("gradients.png")  # doctest: +SKIP
    """
    exponent = power_of_two("plot_histogram", "loss_scale", loss_scale)
    one_of("plot_histogram", "dtype", dtype, FORMATS)
    numbers = fetch_histogram("plot_histogram", histogram)
    suggestion = suggest_scale(histogram, dtype=dtype)
    titles = {exponent: f"what formats hold at loss scale {power(2.0**exponent)}"}
    if suggestion.suggested is not None:
        suggested = round(np.log2(suggestion.suggested))
        scale = power(suggestion.suggested)
        title = f"at the suggested loss scale, {scale}"
        if not suggestion.needed:
            title = (
                f"at loss scale {scale}, where {dtype} keeps these as well as anywhere"
            )
        if suggested == exponent:
            title = f"what formats hold {title}"
        titles[suggested] = title
    return draw_histogram(numbers, titles, dtype=dtype)


def draw_histogram(
    numbers: HostHistogram,
    titles: Mapping[int, str],
    *,
    dtype: str = "float16",
    formats: Sequence[str] = FORMATS,
    is_narrow: bool = False,
) -> Any:
    """Returns the figure of `plot_histogram`, for any scales and formats.

    `titles` has the title of the ranges by the exponent of each loss scale; the bars are judged
    at the first. A narrow figure is for a page that says itself how many gradients there are.
    """
    scales = list(titles)
    width = 9.0
    height = 0.6 + 0.25 * len(formats)  # of the ranges at one scale
    if is_narrow:
        width = 5.6
        height = 0.6 + 0.3 * len(formats)
    figure = _new_figure("plot_histogram", width, 3.2 + height * len(scales))
    height_ratios = [3] + [height] * len(scales)
    bars, *ranges = figure.subplots(
        len(height_ratios), 1, sharex=True, height_ratios=height_ratios
    )
    _draw_bars(bars, numbers.counts, scales[0], dtype)
    if is_narrow:  # no room for the legend beside the bars, nor for so long a title
        bars.get_legend().set(
            loc="lower left", bbox_to_anchor=(0, 1), frame_on=False, alignment="left"
        )
    else:
        bars.set_title(summarize_counts(numbers), loc="left", fontsize=10)
    bars.set_xlim(_find_limits(numbers, scales, dtype))
    between = "   "
    if is_narrow:
        between = "\n"
    for ax, exponent in zip(ranges, scales, strict=True):
        shares = find_all_shares(numbers.counts, exponent, formats)
        _draw_ranges(ax, exponent, shares, between)
        ax.set_title(titles[exponent], loc="left", fontsize=10)
    lowest = ranges[-1]
    lowest.set_xlabel("|gradient|, unscaled")
    lowest.xaxis.set_major_formatter(lambda value, _: f"$2^{{{value:.0f}}}$")
    _mark_integers(lowest.xaxis)
    return figure


def _mark_integers(axis: Any, **options: Any) -> None:
    axis.get_major_locator().set_params(integer=True, **options)


def _find_limits(
    numbers: HostHistogram, scales: Sequence[int], dtype: str
) -> tuple[int, int]:
    """Returns the exponents between which all gradients are, and the range of a format."""
    least_gradient, largest_gradient = EXPONENTS[list(find_filled_rows(numbers))]
    number_format = FORMAT_BY_NAME[dtype]
    least_held = number_format.least_exponent - max(scales)
    largest_held = number_format.largest_exponent - min(scales)
    low = min(least_gradient, least_held) - 2
    high = max(largest_gradient, largest_held) + 3
    return low, high


def _draw_bars(ax: Any, counts: np.ndarray, exponent: int, dtype: str) -> None:
    """Draws the share of each exponent, stacked by what becomes of it."""
    filled = np.flatnonzero(counts.sum(axis=1))
    total = max(counts.sum(), 1.0)
    outcomes = find_outcomes(counts, dtype, exponent)
    lost = outcomes.flushed + outcomes.overflowed
    # not from the heights, which are rounded
    shares = find_shares(counts, dtype, exponent)
    stack = (
        (f"kept by {dtype}", outcomes.normal, shares.normal, _NORMAL, ""),
        ("kept as subnormal", outcomes.subnormal, shares.subnormal, _SUBNORMAL, ""),
        ("flushed to 0, or overflow", lost, shares.lost, _LOST, "////"),
    )
    bottom = np.zeros(len(filled))
    for words, numbers, share, color, hatch in stack:
        height = 100 * numbers[filled] / total
        ax.bar(
            EXPONENTS[filled] + 0.5, height, width=1, bottom=bottom,
            color=color, hatch=hatch, label=f"{words}: {percent(share)}", **_EDGE,
        )  # fmt: skip
        bottom = bottom + height
    ax.set_ylabel("share of the nonzero\ngradients (%)")
    top = 1.1 * bottom.max(initial=0)
    if not top:
        top = 1
    ax.set_ylim(0, top)
    title = f"at loss scale {power(2.0**exponent)}"
    ax.legend(title=title, fontsize=8, title_fontsize=8, loc="best")


def _draw_ranges(
    ax: Any, exponent: int, shares: Mapping[str, Shares], between: str
) -> None:
    """Draws, for each format, the range of gradients that it holds once they are scaled.

    `between` stands between what it says of the numbers on either side.
    """
    for row, (name, shares_of_format) in enumerate(shares.items()):
        number_format = FORMAT_BY_NAME[name]
        ends = np.array([
            number_format.least_exponent,
            number_format.least_normal_exponent,
            number_format.largest_exponent + 1,
        ])  # fmt: skip
        low, normal, high = np.clip(ends - exponent, *ax.get_xlim())
        for left, right, color in ((low, normal, _SUBNORMAL), (normal, high, _NORMAL)):
            ax.barh(row, right - left, left=left, height=0.6, color=color, **_EDGE)
        flushed = f"to 0: {percent(shares_of_format.flushed)}"
        overflowed = f"overflow: {percent(shares_of_format.overflowed)}"
        ax.text(
            1.01, row, f"{flushed}{between}{overflowed}",
            transform=ax.get_yaxis_transform(), va="center", fontsize=8,
        )  # fmt: skip
    ax.set_yticks(range(len(shares)), shares, fontsize=8)
    ax.invert_yaxis()


def plot_underflow(underflow: Underflow) -> Any:
    """Returns a `matplotlib.figure.Figure` of what each format would lose of each layer.

    Args:
      underflow: what `underflow` returned.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxscale import diagnostics
      >>> histograms = diagnostics.leaf_histograms({"w": jnp.array([1e-9, 1.0])})
      >>> figure = diagnostics.plot_underflow(diagnostics.underflow(histograms))
      >>> [text.get_text() for text in figure.axes[0].texts]
      ['50.0%', '0%', '50.0%', '50.0%']
    """
    check_result("plot_underflow", "underflow", underflow, Underflow, "underflow")
    layers = underflow.layers
    percentages = []
    for shares in layers.values():
        percentages.append([100 * shares[name].lost for name in FORMATS])
    height = 1.5 + 0.26 * len(layers)
    figure = _new_figure("plot_underflow", 8, height)
    ax = figure.subplots()
    # Everything lost is a middle grey: black would be an alarm, and FP8 loses most of many layers.
    ax.imshow(percentages, cmap="Greys", vmin=0, vmax=200, aspect="auto")
    for row, cells in enumerate(underflow.rows()):
        _, *texts = cells  # the name of the layer stands beside the axis
        for column, text in enumerate(texts):
            ax.text(column, row, text, ha="center", va="center", fontsize=8)
    ax.set_xticks(range(len(FORMATS)), FORMATS, fontsize=8)
    # the bottom of a large map is far away
    ax.tick_params(axis="x", top=True, labeltop=True)
    ax.set_yticks(range(len(layers)), layers, fontsize=8)
    ax.set_title(
        underflow.title.replace(" at loss", "\nat loss"), loc="left", fontsize=10
    )
    return figure


def plot_run(
    steps: np.ndarray,
    loss: np.ndarray | None,
    loss_scale: np.ndarray,
    skipped: np.ndarray | None,
) -> Any:
    """Returns a figure of a run's loss, loss scale and skipped steps over time."""
    columns = {_draw_loss: loss, _draw_loss_scale: loss_scale, _draw_skipped: skipped}
    shown = {draw: column for draw, column in columns.items() if column is not None}
    figure = _new_figure("History.plot", 8, 1 + 1.7 * len(shown))
    figure.subplots(len(shown), 1, sharex=True)
    for ax, (draw, column) in zip(figure.axes, shown.items(), strict=True):
        draw(ax, steps, column)
    lowest = figure.axes[-1]
    lowest.set_xlabel("step")
    _mark_integers(lowest.xaxis)
    return figure


def _draw_loss(ax: Any, steps: np.ndarray, loss: np.ndarray) -> None:
    is_finite = np.isfinite(loss)
    finite_or_gap = np.where(is_finite, loss, np.nan)
    ax.plot(steps, finite_or_gap, color=_NORMAL, lw=1)
    finite = loss[is_finite]
    if finite.size and finite.min() > 0:
        ax.set_yscale("log")
    ax.set_ylabel("loss")
    if is_finite.all():
        return
    bad = steps[~is_finite]
    at_the_top = np.full(bad.shape, 0.93)  # they have no height
    height_of_axes = ax.get_xaxis_transform()
    ax.plot(bad, at_the_top, "kx", ms=5, transform=height_of_axes, label="inf or NaN")
    ax.legend(fontsize=8, loc="best")


def _draw_loss_scale(ax: Any, steps: np.ndarray, loss_scale: np.ndarray) -> None:
    ax.step(steps, np.log2(loss_scale), where="post", color=_NORMAL)
    ax.yaxis.set_major_formatter(lambda value, _: f"$2^{{{value:g}}}$")
    _mark_integers(ax.yaxis, min_n_ticks=1)
    ax.margins(y=0.15)
    ax.set_ylabel("loss scale")


def _draw_skipped(ax: Any, steps: np.ndarray, skipped: np.ndarray) -> None:
    ax.step(steps, skipped, where="post", color=_NORMAL, lw=1)
    # `History` counts from before the first row, which may be a skipped step itself.
    is_skipped = np.diff(skipped, prepend=0) > 0
    ax.plot(
        steps[is_skipped], skipped[is_skipped], "o",
        color=_SUBNORMAL, mec="black", mew=0.4, ms=4,
    )  # fmt: skip
    ax.set_ylabel("steps skipped,\nin all")
    _mark_integers(ax.yaxis, min_n_ticks=1)
    low = min(skipped[0], 0)
    high = 1.1 * skipped.max() + 0.5
    ax.set_ylim(low, high)
