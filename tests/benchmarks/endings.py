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
        cells = [report.mean_and_spread(row["ways"][name]["final"]) for name in NAMES]
        cells += [
            _each(row, NAMES[1:], form, _mean(key)) for key, form in SHARES.items()
        ]
        scales = row["ways"][NAMES[2]]["loss_scale"]
        ends = [f"2**{np.log2(bound(scales)):.0f}" for bound in (np.min, np.max)]
        lines.append([row["model"], row["like"], row["measured"], *cells])
        lines[-1].append(" to ".join(dict.fromkeys(ends)))
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
        cells = [_each(row, [name], "{:.4g}", _mean("final")) for name in SCALINGS]
        for key in ("gradient_error", "flushed", "skipped"):
            cells.append(_each(row, SCALINGS, SHARES[key], _mean(key)))
        counts = _each(
            row,
            SCALINGS[2:],
            "{0[0]} of {0[1]}",
            lambda way: (way["repeated"], way["passes"]),
        )
        lines.append([row["model"], *cells, counts])
    return report.markdown(headings, lines)


def costs(rows):
    """Returns what each way to scale costs, relative to float16 without a scale."""
    lines = []
    for row in rows:
        plain = row["ways"][NAMES[1]]["cost"]
        lines.append([row["model"]])
        for key in ("bytes", "temporary", "milliseconds"):

            def ratio(way, key=key, plain=plain):
                return np.median(np.divide(way["cost"][key], plain[key]))

            lines[-1].append(_each(row, SCALINGS, "{:.2f}", ratio))
    return report.markdown(["model", "bytes moved", "temporary memory", "time"], lines)


def _mean(key):
    return lambda way: np.mean(way[key])


def _each(row, names, form, value):
    """Returns a value of each way in one cell."""
    ways = [row["ways"].get(name) for name in names]
    return " / ".join(form.format(value(way)) if way else "-" for way in ways)


def spikes(rows):
    """Returns how the ways of `spikes.py` end, and what they skip."""
    headings = ["program", "", *WAYS, "skipped by the rule", "with clipping"]
    lines = []
    for row in rows:
        finals = [report.mean_and_spread(row["ways"][way]["final"]) for way in WAYS]
        skipped = [", ".join(map(str, row["ways"][way]["skipped"])) for way in WAYS[2:]]
        lines.append([row["program"], row["about"], *finals, *skipped])
    return report.markdown(headings, lines)


def streams(rows):
    """Returns what the default rule and OLMo's skip of streams that are made up."""

    def shown(row, rule):
        if row["asked"] == "steps":
            return f"{np.mean(row[rule]['skipped']):.3g}"
        return f"{100 * row[rule]['share']:.3g} % {row['asked']}"

    headings = ["norms", "default", "OLMo"]
    lines = [[row["stream"], shown(row, "default"), shown(row, "OLMo")] for row in rows]
    return report.markdown(headings, lines)


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
    for place, (way, (marker, face, edge)) in enumerate(
        zip(NAMES, styles, strict=True)
    ):
        for number, row in enumerate(rows):
            y = number + (place - 1) * height
            reference = np.mean(row["ways"][NAMES[0]]["final"])
            values = np.array(row["ways"][way]["final"]) / reference
            label = way if number == 0 else None
            left.hlines(y, values.min(), values.max(), color=edge, linewidth=1.5)
            seeds = {"markerfacecolor": face, "markeredgecolor": edge, "linestyle": ""}
            left.plot(
                values, [y] * len(values), marker, markersize=4, alpha=0.75, **seeds
            )
            left.plot(values.mean(), y, marker, markersize=9, label=label, **seeds)
            if place:
                share = 100 * np.mean(row["ways"][way]["flushed"])
                hatch = "" if place == 1 else "////"
                right.barh(
                    y, share, height, facecolor=face, edgecolor=edge, hatch=hatch
                )
                right.text(share + 0.3, y, f"{share:.1f}%", va="center", fontsize=8)
    left.axvline(1, color="0.7", linewidth=1, zorder=0)
    left.set_yticks(
        range(len(rows)), [f"{row['model']}\n({row['measured']})" for row in rows]
    )
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


def draw_spikes(result, path):
    """Writes the picture: how each seed ends, above, and a training with and without the rule."""
    rows = result["rows"]
    figure, axes = plt.subplots(
        2, len(rows), figsize=(4 * len(rows), 6.5), layout="constrained", squeeze=False
    )
    for row, ends, curve in zip(rows, *axes, strict=True):
        # Markers of their own, and a dashed line: they can be told apart in grey.
        for place, (way, marker) in enumerate(zip(WAYS, "oXDs", strict=True)):
            values = row["ways"][way]["final"]
            color = "#0072b2" if "rule" in way else "black"
            ends.plot([place] * len(values), values, marker, color=color, alpha=0.7)
            ends.hlines(np.mean(values), place - 0.3, place + 0.3, color=color)
        if ends.get_ylim()[1] > 1e3:  # of a run that diverged
            ends.set_yscale("log")
        ends.set_xticks(range(len(WAYS)), WAYS, rotation=20)
        ends.set_xlim(-0.5, len(WAYS) - 0.5)
        ends.set_title(f"{row['program']}\n{row['about']}", fontsize=10)
        for way, line, color in (("plain", "-", "black"), ("rule", "--", "#0072b2")):
            losses = row["ways"][way]["losses"][0][0]
            curve.plot(losses, line, color=color, linewidth=0.9, label=way)
        for step in {step for step, _ in row["ways"]["rule"]["skips"][0]}:
            curve.axvline(step, 0, 0.05, color="#d55e00", linewidth=1.2)
        curve.set_yscale("log")
        curve.set_xlabel(
            "step of the first seed; marks below: skipped by the rule", fontsize=8
        )
        for each in (ends, curve):
            each.grid(axis="y", alpha=0.3)
    axes[0, 0].set_ylabel("at the end: seeds and mean\n(lower is better)")
    axes[1, 0].set_ylabel("loss in training\n(GAN: the generator's)")
    axes[1, 0].legend()
    _save(figure, result, path)
