"""The tables and the picture of `parity.py`: how the ways end, and what share is flushed."""

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
import numpy as np
from rich.table import Table

# The ways to train, in the order of `parity_setup.WAYS`: without a scale or with the default one,
NAMES = ["float32", "float16", "float16 + jaxscale"]
# and what scales the backward pass.
SCALINGS = [NAMES[2], "adaptive", "scale_backward(loss)", "scale_backward(network)"]


# Of the two in float16: without a loss scale, and with it.
HEADINGS = ["flushed", "gradient error", "skipped", "final scale"]


def table(rows):
    """Returns the rows as a table of rich."""
    result = Table(
        title="mean over the seeds ± the standard deviation; then float16 / with a scale"
    )
    result.add_column("model", no_wrap=True)
    result.add_column("measured", no_wrap=True)
    for heading in NAMES + HEADINGS:
        result.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        result.add_row(row["model"], row["measured"], *_cells(row))
    return result


def markdown(rows):
    """Returns the rows as a table of Markdown, as in `results/README.md`."""
    headings = ["model", "like", "measured", *NAMES, *HEADINGS]
    return _in_markdown(rows, headings, lambda row: [row["like"], row["measured"], *_cells(row)])


def scalings(rows):
    """Returns what became of each way to scale, in the order of `SCALINGS`, in Markdown."""
    headings = ["model", "default scale", "adaptive", "boundary at the loss", "at the network"]
    headings += ["gradient error", "flushed", "skipped", "repeated"]
    shares = {"gradient_error": "{:.1%}", "flushed": "{:.1%}", "skipped": "{:.3g}"}

    def cells(row):
        finals = _each(row, SCALINGS, "{:.4g}", lambda way: np.mean(way["final"]))
        yield from finals.split(" / ")
        for key, form in shares.items():
            yield _each(row, SCALINGS, form, lambda way, key=key: np.mean(way[key]))
        yield _each(row, SCALINGS[2:], "{} of {}", lambda way: (way["repeated"], way["passes"]))

    return _in_markdown(rows, headings, cells)


def costs(rows):
    """Returns what each way to scale costs, relative to float16 without a scale, in Markdown."""
    figures = {"bytes": np.divide, "temporary": np.divide, "milliseconds": _median_ratio}
    headings = ["model", "bytes moved", "temporary memory", "time"]

    def cells(row):
        plain = row["ways"][NAMES[1]]["cost"]
        for key, ratio in figures.items():
            yield _each(
                *(row, SCALINGS, "{:.2f}"),
                lambda way, key=key, ratio=ratio: ratio(way["cost"][key], plain[key]),
            )

    return _in_markdown(rows, headings, cells)


def _median_ratio(times, others):
    return np.median(np.divide(times, others))


def _each(row, names, form, value):
    """Returns a value of each way in one cell."""
    ways = [row["ways"].get(name) for name in names]
    values = [way and np.atleast_1d(value(way)) for way in ways]
    return " / ".join("-" if each is None else form.format(*each) for each in values)


def _in_markdown(rows, headings, cells):
    lines = [headings, ["---"] * len(headings), *([row["model"], *cells(row)] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cells(row):
    """Returns what the tables say of a model."""
    ways = [row["ways"][name] for name in NAMES]
    finals = [f"{np.mean(way['final']):.4g} ± {_spread(way['final']):.2g}" for way in ways]

    def both(key, form):
        return " / ".join(form.format(np.mean(way[key])) for way in ways[1:])

    shares = both("flushed", "{:.1%}"), both("gradient_error", "{:.1%}"), both("skipped", "{:.3g}")
    low, high = (f"2**{np.log2(bound(ways[2]['loss_scale'])):.0f}" for bound in (np.min, np.max))
    return [*finals, *shares, low if low == high else f"{low} to {high}"]


def _spread(values):
    return np.std(values, ddof=1) if len(values) > 1 else 0.0


def draw(result, path):
    """Writes the picture of the figures."""
    rows = result["rows"]
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(11, 1.6 + 0.62 * len(rows)), width_ratios=[2, 1], layout="constrained"
    )
    # Markers, fills and places of their own: they can be told apart in grey.
    styles = [("o", "black", "black"), ("X", "#d55e00", "#d55e00"), ("D", "white", "#0072b2")]
    height = 0.25
    for place, (way, (marker, face, edge)) in enumerate(zip(NAMES, styles, strict=True)):
        for number, row in enumerate(rows):
            y = number + (place - 1) * height
            reference = np.mean(row["ways"][NAMES[0]]["final"])
            values = np.array(row["ways"][way]["final"]) / reference
            label = way if number == 0 else None
            style = {"color": edge, "solid_capstyle": "butt"}
            left.plot([values.min(), values.max()], [y, y], linewidth=1.5, **style)
            seeds = {"markerfacecolor": face, "markeredgecolor": edge, "linestyle": ""}
            left.plot(values, [y] * len(values), marker, markersize=4, alpha=0.75, **seeds)
            left.plot(values.mean(), y, marker, markersize=9, label=label, **seeds)
            if place:
                share = 100 * np.mean(row["ways"][way]["flushed"])
                hatch = "" if place == 1 else "////"
                right.barh(y, share, height, facecolor=face, edgecolor=edge, hatch=hatch)
                right.text(share + 0.3, y, f"{share:.1f}%", va="center", fontsize=8)
    left.axvline(1, color="0.7", linewidth=1, zorder=0)
    left.set_yticks(range(len(rows)), [f"{row['model']}\n({row['measured']})" for row in rows])
    left.set_xlabel("relative to the mean of float32")
    left.set_title("at the end: each seed (small), and their mean (large)", fontsize=10)
    right.set_yticks(range(len(rows)), [])
    right.set_xlim(0, 1.25 * max(5, right.get_xlim()[1]))  # room for the numbers
    right.set_xlabel("percent of the gradient elements")
    right.set_title("flushed to zero, without and with a loss scale", fontsize=10)
    for axes in (left, right):
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.grid(axis="x", alpha=0.3)
        for number in range(1, len(rows)):
            axes.axhline(number - 0.5, color="0.85", linewidth=0.8)
    figure.legend(loc="outside lower center", ncols=3)
    described = result["machine"]
    figure.suptitle(
        f"{result['seeds']} seeds: {described['device']}, JAX {described['versions']['jax']}, "
        f"{described['date'][:10]}"
    )
    figure.savefig(path, dpi=110)
