"""The pictures: figures of matplotlib, of which no window and no global state knows."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .._trees.checks import one_of, power_of_two
from ._formats import FORMAT, FORMATS, check_result
from ._histogram import EXPONENTS, Histogram, Numbers, Shares, outcomes, read, shares_of
from ._suggest import suggest_scale
from ._text import filled_rows, head, percent, power
from ._underflow import Underflow

# Lost, kept in part, kept: from light to dark, so that they differ in grey too.
_LOST, _SUBNORMAL, _NORMAL = "#fde0c5", "#eb7f5e", "#3f3b7a"


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


def plot_histogram(histogram: Histogram, *, loss_scale: float = 1.0, dtype: str = "float16") -> Any:
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
    numbers = read("plot_histogram", histogram)
    suggestion = suggest_scale(histogram, dtype=dtype)
    titles = {exponent: "what formats hold at loss scale {}"}
    if suggestion.suggested is not None:
        words = "at the suggested loss scale, {}"
        if not suggestion.needed:
            words = f"at loss scale {{}}, where {dtype} keeps these as well as anywhere"
        suggested = round(np.log2(suggestion.suggested))
        titles[suggested] = f"what formats hold {words}" if suggested == exponent else words
    titles = {k: title.format(power(2.0**k)) for k, title in titles.items()}
    return draw_histogram(numbers, titles, dtype=dtype)


def draw_histogram(
    numbers: Numbers,
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
    height = 0.6 + (0.3 if is_narrow else 0.25) * len(formats)
    figure = _new_figure("plot_histogram", 5.6 if is_narrow else 9, 3.2 + height * len(scales))
    axes = figure.subplots(
        1 + len(scales), 1, sharex=True, squeeze=False, height_ratios=[3] + [height] * len(scales)
    )[:, 0]
    first, last = (int(EXPONENTS[row]) for row in filled_rows(numbers))
    edges = FORMAT[dtype]
    ends = [end - k for k in scales for end in (edges.least_exponent, edges.largest_exponent)]
    limits = min(first, *ends) - 2, max(last, *ends) + 3
    _draw_bars(axes[0], numbers.counts, scales[0], dtype)
    if is_narrow:  # no room for the legend beside the bars, nor for so long a title
        axes[0].get_legend().set(
            loc="lower left", bbox_to_anchor=(0, 1), frame_on=False, alignment="left"
        )
    else:
        axes[0].set_title(head(numbers), loc="left", fontsize=10)
    axes[0].set_xlim(limits)
    for ax, (k, title) in zip(axes[1:], titles.items(), strict=True):
        shares = {name: shares_of(numbers.counts, k)[name] for name in formats}
        _draw_ranges(ax, k, shares, limits, "\n" if is_narrow else "   ")
        ax.set_title(title, loc="left", fontsize=10)
    axes[-1].set_xlabel("|gradient|, unscaled")
    axes[-1].xaxis.set_major_formatter(lambda value, _: f"$2^{{{value:.0f}}}$")
    axes[-1].xaxis.get_major_locator().set_params(integer=True)
    return figure


def _draw_bars(ax: Any, counts: np.ndarray, exponent: int, dtype: str) -> None:
    """Draws the share of each exponent, stacked by what becomes of it."""
    filled = np.flatnonzero(counts.sum(axis=1))
    flushed, subnormal, normal, overflowed = outcomes(counts, dtype, exponent)[:, filled]
    whole = shares_of(counts, exponent)[dtype]  # not from the heights, which are rounded
    bottom = np.zeros(len(filled))
    for number, share, word, color, hatch in (
        (normal, whole.normal, f"kept by {dtype}", _NORMAL, ""),
        (subnormal, whole.subnormal, "kept as subnormal", _SUBNORMAL, ""),
        (flushed + overflowed, whole.lost, "flushed to 0, or overflow", _LOST, "////"),
    ):
        height = 100 * number / max(counts.sum(), 1.0)
        ax.bar(
            EXPONENTS[filled] + 0.5, height, width=1, bottom=bottom, color=color, hatch=hatch,
            edgecolor="black", linewidth=0.4, label=f"{word}: {percent(share)}",
        )  # fmt: skip
        bottom = bottom + height
    ax.set_ylabel("share of the nonzero\ngradients (%)")
    ax.set_ylim(0, 1.1 * bottom.max(initial=0) or 1)
    ax.legend(
        title=f"at loss scale {power(2.0**exponent)}", fontsize=8, title_fontsize=8, loc="best"
    )


def _draw_ranges(
    ax: Any, exponent: int, shares: Mapping[str, Shares], limits: Any, between: str
) -> None:
    """Draws, for each format, the range of gradients that it holds once they are scaled."""
    for row, (name, lost) in enumerate(shares.items()):
        edges = FORMAT[name]
        ends = np.array([*edges[3:5], edges.largest_exponent + 1]) - exponent
        low, normal, high = np.clip(ends, *limits)
        for left, right, color in ((low, normal, _SUBNORMAL), (normal, high, _NORMAL)):
            width = right - left
            ax.barh(row, width, left=left, height=0.6, color=color, edgecolor="black", lw=0.4)
        words = (f"to 0: {percent(lost.flushed)}", f"overflow: {percent(lost.overflowed)}")
        ax.text(
            1.01, row, between.join(words),
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
    lost = np.array([[shares[name].lost for name in FORMATS] for shares in layers.values()])
    texts = [text for _, *row in underflow.rows() for text in row]
    figure = _new_figure("plot_underflow", 8, 1.5 + 0.26 * len(layers))
    ax = figure.subplots()
    # Everything lost is a middle grey: black would be an alarm, and FP8 loses most of many layers.
    ax.imshow(100 * lost, cmap="Greys", vmin=0, vmax=200, aspect="auto")
    for (row, column), text in zip(np.ndindex(*lost.shape), texts, strict=True):
        ax.text(column, row, text, ha="center", va="center", fontsize=8)
    ax.set_xticks(range(len(FORMATS)), FORMATS, fontsize=8)
    ax.tick_params(axis="x", top=True, labeltop=True)  # the bottom of a large map is far away
    ax.set_yticks(range(len(layers)), layers, fontsize=8)
    ax.set_title(underflow.title.replace(" at loss", "\nat loss"), loc="left", fontsize=10)
    return figure


def plot_run(
    steps: np.ndarray, loss: np.ndarray | None, loss_scale: np.ndarray, skipped: np.ndarray | None
) -> Any:
    """Returns a figure of a run's loss, loss scale and skipped steps over time."""
    rows = 1 + (loss is not None) + (skipped is not None)
    figure = _new_figure("History.plot", 8, 1 + 1.7 * rows)
    axes = iter(figure.subplots(rows, 1, sharex=True, squeeze=False)[:, 0])
    if loss is not None:
        ax, finite = next(axes), np.isfinite(loss)
        ax.plot(steps, np.where(finite, loss, np.nan), color=_NORMAL, lw=1)
        if finite.any() and np.all(loss[finite] > 0):
            ax.set_yscale("log")
        ax.set_ylabel("loss")
        if not finite.all():
            bad = steps[~finite]
            place = ax.get_xaxis_transform()  # at the top, because they have no height
            ax.plot(bad, np.full(bad.shape, 0.93), "kx", ms=5, transform=place, label="inf or NaN")
            ax.legend(fontsize=8, loc="best")
    ax = next(axes)
    ax.step(steps, np.log2(loss_scale), where="post", color=_NORMAL)
    ax.yaxis.set_major_formatter(lambda value, _: f"$2^{{{value:g}}}$")
    ax.yaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    ax.margins(y=0.15)
    ax.set_ylabel("loss scale")
    if skipped is not None:
        ax = next(axes)
        ax.step(steps, skipped, where="post", color=_NORMAL, lw=1)
        more = np.diff(skipped, prepend=skipped[0]) > 0
        ax.plot(steps[more], skipped[more], "o", color=_SUBNORMAL, mec="black", mew=0.4, ms=4)
        ax.set_ylabel("steps skipped,\nin all")
        ax.yaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
        ax.set_ylim(min(skipped[0], 0), 1.1 * skipped.max() + 0.5)
    figure.axes[-1].set_xlabel("step")
    figure.axes[-1].xaxis.get_major_locator().set_params(integer=True)
    return figure
