"""The pictures: figures of matplotlib, made without a window and without global state."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._trees.arguments import power_of_two
from ._formats import FORMATS
from ._histogram import (
    EXPONENTS,
    Histogram,
    Shares,
    count_together,
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
    """Returns a `matplotlib.figure.Figure` of gradients or of a run.

    The upper part of a picture of gradients shows them by their size, shaded by what float16 makes
    of them at the loss scale. The lower part shows which gradients each format holds at that scale:
    a larger one moves these ranges to the left. A run is drawn as its loss, loss scale and skipped
    steps over time.

    Args:
      result: a pytree of gradients, unscaled, as `jaxscale.diagnostics.sizes` takes it; or a list
        with a dictionary for each step: what `jaxscale.metrics` returned, and, if you add it, the
        loss under `"loss"`. Return the dictionary from the compiled step: numbers of a state that
        is donated to the next step are gone. (What `histogram` returned is taken until 0.7.0.)
      loss_scale: a power of two, for gradients.

    Raises:
      ImportError: if matplotlib is not installed.
      TypeError: if `result` is still traced, or a step of a run is something else.
      ValueError: if `loss_scale` is not a power of two, or no leaf is a gradient.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxscale
      >>> from jaxscale import diagnostics
      >>> grads = {"w": jnp.array([1e-9, 1e-3])}
      >>> figure = diagnostics.plot(grads, loss_scale=2.0**10)
      >>> [axes.get_title(loc="left") for axes in figure.axes][1:]
      ['what formats hold at loss scale 2**10']
      >>> figure.savefig("gradients.png")  # doctest: +SKIP
      >>> state = jaxscale.DynamicLossScale().init()
      >>> run = [jaxscale.metrics(state) | {"loss": loss} for loss in (3.0, 2.0)]
      >>> [axes.get_ylabel() for axes in diagnostics.plot(run).axes]
      ['loss', 'loss scale']
    """
    if isinstance(result, Sequence) and any(map(_is_step, result)):
        return _plot_run(result)
    if not isinstance(result, Histogram):
        result = count_together("plot", "result", result)
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
            "terminal, print what `sizes` returns."
        ) from error
    return Figure(figsize=(width, height), layout="constrained")


def draw_histogram(
    histogram: Histogram, titles: Mapping[int, str], formats: Sequence[str] = FORMATS
) -> Any:
    """Returns the figure of `plot` for a histogram on the host, for any scales and formats.

    `titles` has the title of the ranges by the exponent of each loss scale; the bars are judged
    at the first.
    """
    height = 0.6 + 0.3 * len(formats)  # of the ranges at one scale
    figure = _new_figure(5.6, 3.2 + height * len(titles))
    bars, *ranges = figure.subplots(
        1 + len(titles), 1, sharex=True, height_ratios=[3] + [height] * len(titles)
    )
    counts = np.asarray(histogram.counts)
    filled = EXPONENTS[counts.any(axis=1)]
    ends = [_find_range("float16") - exponent for exponent in titles]
    shown = np.concatenate([filled, *ends])
    bars.set_xlim(shown.min() - 2, shown.max() + 2)
    _draw_bars(bars, counts, next(iter(titles)))
    for ax, (exponent, title) in zip(ranges, titles.items(), strict=True):
        _draw_ranges(ax, exponent, find_all_shares(counts, exponent, formats))
        ax.set_title(title, loc="left", fontsize=10)
    ranges[-1].xaxis.set_major_formatter(lambda exponent, _: f"$2^{{{exponent:g}}}$")
    return _label_bottom(figure, "|gradient|, unscaled")


def _label_bottom(figure: Any, label: str) -> Any:
    """Returns a figure with a label and integers below its lowest axes."""
    lowest = figure.axes[-1]
    lowest.set_xlabel(label)
    lowest.xaxis.get_major_locator().set_params(integer=True)
    return figure


def _find_range(name: str) -> np.ndarray:
    """Returns the exponents at which a format's subnormal and normal numbers begin, and its end."""
    info = jnp.finfo(name)
    numbers = [info.smallest_subnormal, info.smallest_normal, info.max]
    _, exponents = np.frexp(np.array(numbers, np.float64))
    return exponents - [1, 1, 0]


def _draw_bars(ax: Any, counts: np.ndarray, exponent: int) -> None:
    """Draws the share of each exponent, stacked by what becomes of it."""
    flushed, subnormal, normal, overflowed = find_outcomes(counts, "float16", exponent)
    total = max(counts.sum(), 1.0)
    bottom = np.zeros(len(EXPONENTS))
    for words, numbers, color, hatch in (
        ("kept by float16", normal, _NORMAL, ""),
        ("kept as subnormal", subnormal, _SUBNORMAL, ""),
        ("flushed to 0, or overflow", flushed + overflowed, _LOST, "////"),
    ):
        filled = numbers > 0
        height = 100 * numbers / total
        ax.bar(
            EXPONENTS[filled] + 0.5, height[filled], width=1, bottom=bottom[filled],
            color=color, hatch=hatch, label=f"{words}: {percent(numbers.sum() / total)}", **_EDGE,
        )  # fmt: skip
        bottom += height
    ax.set_ylabel("share of the nonzero\ngradients (%)")
    # above the bars: beside them there is no room
    ax.legend(
        title=f"at loss scale {power(2.0**exponent)}", fontsize=8, title_fontsize=8,
        loc="lower left", bbox_to_anchor=(0, 1), frameon=False, alignment="left",
    )  # fmt: skip


def _draw_ranges(ax: Any, exponent: int, shares: Mapping[str, Shares]) -> None:
    """Draws, for each format, the range of gradients that it holds once they are scaled."""
    for row, (name, shares_of_format) in enumerate(shares.items()):
        low, normal, high = np.clip(_find_range(name) - exponent, *ax.get_xlim())
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


def _is_step(row: Any) -> bool:
    return isinstance(row, Mapping) and "loss_scale" in row


def _plot_run(rows: Sequence[Any]) -> Any:
    """Returns a figure of a run's loss, loss scale and skipped steps over time."""
    for row in rows:
        if not _is_step(row):
            raise TypeError(
                "`plot` of a run must get a list with what `jaxscale.metrics` returned after each "
                f"step, got a list with one {type(row).__name__}."
            )
    columns = {}
    for name in ("total_steps", *_LABELS):
        if all(name in row for row in rows):
            columns[name] = np.array(jax.device_get([row[name] for row in rows]))
    steps = columns.pop("total_steps", np.arange(1, len(rows) + 1))
    if "step_applied" in columns:
        columns["step_applied"] = np.cumsum(columns["step_applied"] == 0)
    figure = _new_figure(8, 1 + 1.7 * len(columns))
    figure.subplots(len(columns), 1, sharex=True)
    for ax, (name, column) in zip(figure.axes, columns.items(), strict=True):
        is_finite = np.isfinite(column)
        ax.step(steps, np.where(is_finite, column, np.nan), where="post", color=_NORMAL)
        for bad in steps[~is_finite]:
            ax.axvline(bad, color="black", lw=0.8, ls=":")
        if name != "step_applied" and np.all(column[is_finite] > 0):
            ax.set_yscale("log", base=2)
        ax.set_ylabel(_LABELS[name])
    return _label_bottom(figure, "step")


_LABELS = {
    "loss": "loss",
    "loss_scale": "loss scale",
    "step_applied": "steps skipped,\nin all",
}
