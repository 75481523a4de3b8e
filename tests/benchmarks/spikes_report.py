"""The table and the picture of `spikes.py`: how the ways end, and what they skip."""

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
import numpy as np

WAYS = ["plain", "clipped", "rule", "clipped, rule"]


def markdown(rows):
    """Returns the rows as a table of Markdown, as in `results/README.md`."""
    headings = ["program", "", *WAYS, "skipped by the rule", "with clipping"]
    lines = [headings, ["---"] * len(headings)]
    for row in rows:
        ways = row["ways"]
        finals = [
            f"{np.mean(ways[way]['final']):.4g} ± {_spread(ways[way]['final']):.2g}" for way in WAYS
        ]
        skipped = [", ".join(map(str, ways[way]["skipped"])) for way in WAYS[2:]]
        lines.append([row["program"], row["about"], *finals, *skipped])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _spread(values):
    return np.std(values, ddof=1) if len(values) > 1 else 0.0


def draw(result, path):
    """Writes the picture: how each seed ends, above, and a training with and without the rule."""
    rows = result["rows"]
    figure, axes = plt.subplots(
        2, len(rows), figsize=(4 * len(rows), 6.5), layout="constrained", squeeze=False
    )
    # Markers of their own, and a dashed line: they can be told apart in grey.
    markers = ["o", "X", "D", "s"]
    for row, ends, curve in zip(rows, *axes, strict=True):
        for place, (way, marker) in enumerate(zip(WAYS, markers, strict=True)):
            values = row["ways"][way]["final"]
            color = "#0072b2" if "rule" in way else "black"
            ends.plot([place] * len(values), values, marker, color=color, alpha=0.7)
            ends.hlines(np.mean(values), place - 0.3, place + 0.3, color=color)
        ends.set_xticks(range(len(WAYS)), WAYS, rotation=20)
        ends.set_xlim(-0.5, len(WAYS) - 0.5)
        ends.set_title(f"{row['program']}\n{row['about']}", fontsize=10)
        for way, line, color in (("plain", "-", "black"), ("rule", "--", "#0072b2")):
            losses = row["ways"][way]["losses"][0][0]
            curve.plot(losses, line, color=color, linewidth=0.9, label=way)
        for step in {step for step, _ in row["ways"]["rule"]["skips"][0]}:
            curve.axvline(step, 0, 0.05, color="#d55e00", linewidth=1.2)
        curve.set_yscale("log")
        curve.set_xlabel("step of the first seed; marks below: skipped by the rule", fontsize=8)
        for each in (ends, curve):
            each.grid(axis="y", alpha=0.3)
    axes[0, 0].set_ylabel("at the end: seeds and mean\n(lower is better)")
    axes[1, 0].set_ylabel("loss in training\n(GAN: the generator's)")
    axes[1, 0].legend()
    described = result["machine"]
    figure.suptitle(
        f"{result['seeds']} seeds, float32: {described['device']}, "
        f"JAX {described['versions']['jax']}, {described['date'][:10]}"
    )
    figure.savefig(path, dpi=110)
    plt.close(figure)
