"""How trainings end: the tables and the pictures of `parity.py` and `spikes.py`."""

import pathlib

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
import numpy as np
import report

# The ways to train of `parity.py`, as in `parity_setup.WAYS`: no scale or the default one,
NAMES = ["float32", "float16", "float16 + jaxscale"]
# and what scales the backward pass.
SCALINGS = [NAMES[2], "adaptive", "scale_backward(loss)", "scale_backward(network)"]
# The ways of `spikes.py`.
WAYS = ["plain", "clipped", "rule", "clipped, rule"]
SHARES = {"flushed": "{:.1%}", "gradient_error": "{:.1%}", "skipped": "{:.3g}"}


def parser(doc):
    """Returns a parser of the options that both programs have."""
    result = report.parser(doc)
    add = result.add_argument
    add("--seeds", type=int, default=3, help="how many seeds")
    add(
        "--steps", type=int, help="training steps, instead of each program's own number"
    )
    add("--plot", type=pathlib.Path, help="where to draw the figures")
    add(
        "--redraw",
        type=pathlib.Path,
        metavar="FILE",
        help="take the figures from this file",
    )
    return result


def parity(rows):
    """Returns how the models end, and what became of float16 without a scale / with it."""
    headings = ["model", "like", "measured", *NAMES]
    headings += ["flushed", "gradient error", "skipped", "final scale"]
    lines = []
    for row in rows:
        line = [row["model"], row["like"], row["measured"]]
        for name in NAMES:
            line.append(report.mean_and_spread(row["ways"][name]["final"]))
        for key, form in SHARES.items():
            line.append(_join(row, NAMES[1:], form, _mean(key)))
        powers = np.round(np.log2(row["ways"][NAMES[2]]["loss_scale"]))
        line.append(f"2**{powers.min():.0f}")
        if powers.max() > powers.min():
            line[-1] += f" to 2**{powers.max():.0f}"
        lines.append(line)
    return report.markdown(headings, lines)


def scalings(rows):
    """Returns what became of each way to scale, in the order of `SCALINGS`."""
    headings = [
        "model",
        "default scale",
        "adaptive",
        "boundary at the loss",
        "at the network",
    ]
    headings += ["gradient error", "flushed", "skipped", "repeated"]
    lines = []
    for row in rows:
        line = [row["model"]]
        for name in SCALINGS:
            line.append(_join(row, [name], "{:.4g}", _mean("final")))
        for key in ("gradient_error", "flushed", "skipped"):
            line.append(_join(row, SCALINGS, SHARES[key], _mean(key)))
        counts = _join(
            row, SCALINGS[2:], "{0[repeated]} of {0[passes]}", lambda way: way
        )
        line.append(counts)
        lines.append(line)
    return report.markdown(headings, lines)


def costs(rows):
    """Returns what each way to scale costs, relative to float16 without a scale."""
    lines = []
    for row in rows:
        plain = row["ways"][NAMES[1]]["cost"]
        line = [row["model"]]
        for key in ("bytes", "temporary", "milliseconds"):

            def ratio(way, key=key, plain=plain):
                return np.median(np.divide(way["cost"][key], plain[key]))

            line.append(_join(row, SCALINGS, "{:.2f}", ratio))
        lines.append(line)
    return report.markdown(["model", "bytes moved", "temporary memory", "time"], lines)


def _mean(key):
    return lambda way: np.mean(way[key])


def _join(row, names, form, value):
    """Joins a value of each way to one cell, and "-" for a way that was not taken."""
    texts = []
    for name in names:
        way = row["ways"].get(name)
        texts.append(form.format(value(way)) if way else "-")
    return " / ".join(texts)


def spikes(rows):
    """Returns how the ways of `spikes.py` end, and what they skip."""
    headings = ["program", "", *WAYS, "skipped by the rule", "with clipping"]
    lines = []
    for row in rows:
        line = [row["program"], row["about"]]
        for way in WAYS:
            line.append(report.mean_and_spread(row["ways"][way]["final"]))
        for way in WAYS[2:]:
            skipped = row["ways"][way]["skipped"]
            line.append(", ".join(map(str, skipped)))
        lines.append(line)
    return report.markdown(headings, lines)


def streams(rows):
    """Returns what the rule for spikes skips of streams that are made up."""
    lines = []
    for row in rows:
        skips = f"{100 * row['share']:.3g} % {row['asked']}"
        if row["asked"] == "steps":
            skips = f"{np.mean(row['skipped']):.3g}"
        lines.append([row["stream"], skips])
    return report.markdown(["norms", "skipped"], lines)


def _save(figure, result, path):
    figure.suptitle(f"{result['seeds']} seeds, {report.where(result['machine'])}")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_parity(result, path):
    """Writes the picture of the figures."""
    rows = result["rows"]
    figure, (left, right) = plt.subplots(
        1,
        2,
        figsize=(11, 1.6 + 0.62 * len(rows)),
        width_ratios=[2, 1],
        layout="constrained",
    )
    # Markers, fills and places of their own: they can be told apart in grey.
    styles = [
        ("o", "black", "black"),
        ("X", "#d55e00", "#d55e00"),
        ("D", "white", "#0072b2"),
    ]
    height = 0.25
    for place, way in enumerate(NAMES):
        marker, face, edge = styles[place]
        style = {"markerfacecolor": face, "markeredgecolor": edge, "linestyle": ""}
        for number, row in enumerate(rows):
            y = number + (place - 1) * height
            reference = np.mean(row["ways"][NAMES[0]]["final"])
            values = np.array(row["ways"][way]["final"]) / reference
            label = way if number == 0 else None
            places = [y] * len(values)
            left.hlines(y, values.min(), values.max(), color=edge, linewidth=1.5)
            left.plot(values, places, marker, markersize=4, alpha=0.75, **style)
            left.plot(values.mean(), y, marker, markersize=9, label=label, **style)
            if place:
                share = 100 * np.mean(row["ways"][way]["flushed"])
                hatch = "" if place == 1 else "////"
                right.barh(
                    y, share, height, facecolor=face, edgecolor=edge, hatch=hatch
                )
                right.text(share + 0.3, y, f"{share:.1f}%", va="center", fontsize=8)
    left.axvline(1, color="0.7", linewidth=1, zorder=0)
    labels = [f"{row['model']}\n({row['measured']})" for row in rows]
    left.set_yticks(range(len(rows)), labels)
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
    _save(figure, result, path)


def _draw_ends(row, axes):
    # Markers of their own: they can be told apart in grey.
    markers = dict(zip(WAYS, "oXDs", strict=True))
    for place, way in enumerate(WAYS):
        values = row["ways"][way]["final"]
        color = "#0072b2" if "rule" in way else "black"
        places = [place] * len(values)
        axes.plot(places, values, markers[way], color=color, alpha=0.7)
        axes.hlines(np.mean(values), place - 0.3, place + 0.3, color=color)
    if axes.get_ylim()[1] > 1e3:  # of a run that diverged
        axes.set_yscale("log")
    axes.set_xticks(range(len(WAYS)), WAYS, rotation=20)
    axes.set_xlim(-0.5, len(WAYS) - 0.5)
    axes.set_title(f"{row['program']}\n{row['about']}", fontsize=10)


def _draw_losses(row, axes):
    # One line is dashed: they can be told apart in grey.
    for way, line, color in (("plain", "-", "black"), ("rule", "--", "#0072b2")):
        losses = row["ways"][way]["losses"][0][0]
        axes.plot(losses, line, color=color, linewidth=0.9, label=way)
    for step, _ in row["ways"]["rule"]["skips"][0]:
        axes.axvline(step, 0, 0.05, color="#d55e00", linewidth=1.2)
    axes.set_yscale("log")
    axes.set_xlabel(
        "step of the first seed; marks below: skipped by the rule", fontsize=8
    )


def draw_spikes(result, path):
    """Writes the picture: how each seed ends, above, and a training with and without the rule."""
    rows = result["rows"]
    figure, axes = plt.subplots(
        2, len(rows), figsize=(4 * len(rows), 6.5), layout="constrained", squeeze=False
    )
    for row, ends, curve in zip(rows, *axes, strict=True):
        _draw_ends(row, ends)
        _draw_losses(row, curve)
        ends.grid(axis="y", alpha=0.3)
        curve.grid(axis="y", alpha=0.3)
    axes[0, 0].set_ylabel("at the end: seeds and mean\n(lower is better)")
    axes[1, 0].set_ylabel("loss in training\n(GAN: the generator's)")
    axes[1, 0].legend()
    _save(figure, result, path)
