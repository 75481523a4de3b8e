"""The pictures: figures of matplotlib, made without a window and without global state."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._trees.checks import power_of_two
from ._formats import FORMATS, exponent_of
from ._histogram import (
    EXPONENTS,
    Histogram,
    Shares,
    fetch,
    find_all_shares,
    find_outcomes,
)
from ._text import percent, power

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


def plot(result: Any, *, loss_scale: float = 1.0) -> Any:
    """Returns a `matplotlib.figure.Figure` of a histogram or of a run.

    The upper part of a histogram shows the gradients by their size, shaded by what float16 makes of
    them at the loss scale. The lower part shows which gradients each format holds at that scale: a
    larger one moves these ranges to the left. A run is drawn as its loss, loss scale and skipped
    steps over time.

    Args:
      result: what `histogram` returned, its leading axes summed up; or a list with a dictionary for
        each step: what `jaxscale.metrics` returned, and, if you add it, the loss under `"loss"`.
        Return the dictionary from the compiled step: numbers of a state that is donated to the next
        step are gone.
      loss_scale: a power of two, for a histogram.

    Raises:
      ImportError: if matplotlib is not installed.
      TypeError: if `result` is something else, or still traced.
      ValueError: if `loss_scale` is not a power of two, or a run has no steps.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxscale
      >>> from jaxscale import diagnostics
      >>> histogram = diagnostics.histogram({"w": jnp.array([1e-9, 1e-3])})
      >>> figure = diagnostics.plot(histogram, loss_scale=2.0**10)
      >>> [axes.get_title(loc="left") for axes in figure.axes][1:]
      ['what formats hold at loss scale 2**10']
      >>> figure.savefig("gradients.png")  # doctest: +SKIP
      >>> state = jaxscale.DynamicLossScale().init()
      >>> run = [jaxscale.metrics(state) | {"loss": loss} for loss in (3.0, 2.0)]
      >>> [axes.get_ylabel() for axes in diagnostics.plot(run).axes]
      ['loss', 'loss scale']
    """
    if isinstance(result, Sequence) and not isinstance(result, Histogram | str):
        return _plot_run(result)
    exponent = power_of_two("plot", "loss_scale", loss_scale)
    title = f"what formats hold at loss scale {power(2.0**exponent)}"
    return draw_histogram(fetch("plot", result), {exponent: title})


def _new_figure(width: float, height: float) -> Any:
    """Returns an empty figure, or raises an `ImportError` without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "`plot` draws with matplotlib, which is not installed: pip install matplotlib. In a "
            "terminal, print what `shares` or `table` returns."
        ) from error
    return Figure(figsize=(width, height), layout="constrained")


def draw_histogram(
    histogram: Histogram, titles: Mapping[int, str], formats: Sequence[str] = FORMATS
) -> Any:
    """Returns the figure of `plot` for a histogram on the host, for any scales and formats.

    `titles` has the title of the ranges by the exponent of each loss scale; the bars are judged
    at the first.
    """
    scales = list(titles)
    height = 0.6 + 0.3 * len(formats)  # of the ranges at one scale
    figure = _new_figure(5.6, 3.2 + height * len(scales))
    bars, *ranges = figure.subplots(
        1 + len(scales), 1, sharex=True, height_ratios=[3] + [height] * len(scales)
    )
    counts = np.asarray(histogram.counts)
    _draw_bars(bars, counts, scales[0])
    bars.set_xlim(_find_limits(counts, scales))
    for ax, (exponent, title) in zip(ranges, titles.items(), strict=True):
        _draw_ranges(ax, exponent, find_all_shares(counts, exponent, formats))
        ax.set_title(title, loc="left", fontsize=10)
    lowest = ranges[-1]
    lowest.set_xlabel("|gradient|, unscaled")
    lowest.xaxis.set_major_formatter(lambda value, _: f"$2^{{{value:.0f}}}$")
    _mark_integers(lowest.xaxis)
    return figure


def _mark_integers(axis: Any, **options: Any) -> None:
    axis.get_major_locator().set_params(integer=True, **options)


def _find_range(name: str) -> np.ndarray:
    """Returns the exponents at which a format's subnormal and normal numbers begin, and its end."""
    info = jnp.finfo(name)
    edges = (info.smallest_subnormal, info.smallest_normal, info.max)
    exponents = np.array([exponent_of(float(edge)) for edge in edges])
    return exponents + np.array([0, 0, 1])


def _find_limits(counts: np.ndarray, scales: Sequence[int]) -> tuple[int, int]:
    """Returns the exponents between which all gradients are, and the range of float16."""
    range_of_float16 = _find_range("float16")
    shown = [
        *EXPONENTS[counts.any(axis=1)],
        *range_of_float16 - max(scales),
        *range_of_float16 - min(scales),
    ]
    return min(shown) - 2, max(shown) + 2


def _draw_bars(ax: Any, counts: np.ndarray, exponent: int) -> None:
    """Draws the share of each exponent, stacked by what becomes of it."""
    filled = np.flatnonzero(counts.sum(axis=1))
    flushed, subnormal, normal, overflowed = find_outcomes(counts, "float16", exponent)
    # not from the heights, which are rounded
    shares = find_all_shares(counts, exponent)["float16"]
    stack = (
        ("kept by float16", normal, shares.normal, _NORMAL, ""),
        ("kept as subnormal", subnormal, shares.subnormal, _SUBNORMAL, ""),
        ("flushed to 0, or overflow", flushed + overflowed, shares.lost, _LOST, "////"),
    )
    bottom = np.zeros(len(filled))
    for words, numbers, share, color, hatch in stack:
        height = 100 * numbers[filled] / max(counts.sum(), 1.0)
        ax.bar(
            EXPONENTS[filled] + 0.5, height, width=1, bottom=bottom,
            color=color, hatch=hatch, label=f"{words}: {percent(share)}", **_EDGE,
        )  # fmt: skip
        bottom = bottom + height
    ax.set_ylabel("share of the nonzero\ngradients (%)")
    # above the bars: beside them there is no room
    ax.legend(
        title=f"at loss scale {power(2.0**exponent)}", fontsize=8, title_fontsize=8,
        loc="lower left", bbox_to_anchor=(0, 1), frameon=False, alignment="left",
    )  # fmt: skip


def _draw_ranges(ax: Any, exponent: int, shares: Mapping[str, Shares]) -> None:
    """Draws, for each format, the range of gradients that it holds once they are scaled."""
    for row, (name, shares_of_format) in enumerate(shares.items()):
        ends = _find_range(name) - exponent
        low, normal, high = np.clip(ends, *ax.get_xlim())
        for left, right, color in ((low, normal, _SUBNORMAL), (normal, high, _NORMAL)):
            ax.barh(row, right - left, left=left, height=0.6, color=color, **_EDGE)
        flushed = f"to 0: {percent(shares_of_format.flushed)}"
        overflowed = f"overflow: {percent(shares_of_format.overflowed)}"
        ax.text(
            1.01, row, f"{flushed}\n{overflowed}",
            transform=ax.get_yaxis_transform(), va="center", fontsize=8,
        )  # fmt: skip
    ax.set_yticks(range(len(shares)), shares, fontsize=8)
    ax.invert_yaxis()


def _plot_run(rows: Sequence[Any]) -> Any:
    """Returns a figure of a run's loss, loss scale and skipped steps over time."""
    for row in rows:
        if not (isinstance(row, Mapping) and "loss_scale" in row):
            raise TypeError(
                "`plot` of a run must get a list with what `jaxscale.metrics` returned after each "
                f"step, got a list with one {type(row).__name__}."
            )
    if not rows:
        raise ValueError("`plot` has nothing to draw: it got a list without any step.")
    names = ("loss", "loss_scale", "step_applied", "total_steps")
    columns = {}
    for name in names:
        if all(name in row for row in rows):
            columns[name] = np.array(jax.device_get([row[name] for row in rows]))
    steps = columns.pop("total_steps", np.arange(1, len(rows) + 1))
    figure = _new_figure(8, 1 + 1.7 * len(columns))
    figure.subplots(len(columns), 1, sharex=True)
    for ax, (name, column) in zip(figure.axes, columns.items(), strict=True):
        _DRAW[name](ax, steps, column)
    lowest = figure.axes[-1]
    lowest.set_xlabel("step")
    _mark_integers(lowest.xaxis)
    return figure


def _draw_loss(ax: Any, steps: np.ndarray, loss: np.ndarray) -> None:
    is_finite = np.isfinite(loss)
    finite_or_gap = np.where(is_finite, loss, np.nan)
    ax.plot(steps, finite_or_gap, color=_NORMAL, lw=1)
    for bad in steps[~is_finite]:
        ax.axvline(bad, color="black", lw=0.8, ls=":")
    if np.all(loss[is_finite] > 0):
        ax.set_yscale("log")
    ax.set_ylabel("loss")


def _draw_loss_scale(ax: Any, steps: np.ndarray, loss_scale: np.ndarray) -> None:
    ax.step(steps, np.log2(loss_scale), where="post", color=_NORMAL)
    ax.yaxis.set_major_formatter(lambda value, _: f"$2^{{{value:g}}}$")
    _mark_integers(ax.yaxis, min_n_ticks=1)
    ax.margins(y=0.15)
    ax.set_ylabel("loss scale")


def _draw_skipped(ax: Any, steps: np.ndarray, applied: np.ndarray) -> None:
    is_skipped = applied == 0
    skipped = np.cumsum(is_skipped)
    ax.step(steps, skipped, where="post", color=_NORMAL, lw=1)
    ax.plot(
        steps[is_skipped], skipped[is_skipped], "o",
        color=_SUBNORMAL, mec="black", mew=0.4, ms=4,
    )  # fmt: skip
    ax.set_ylabel("steps skipped,\nin all")
    _mark_integers(ax.yaxis, min_n_ticks=1)
    ax.set_ylim(0, 1.1 * skipped.max() + 0.5)


_DRAW = {
    "loss": _draw_loss,
    "loss_scale": _draw_loss_scale,
    "step_applied": _draw_skipped,
}
