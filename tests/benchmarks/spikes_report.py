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
    pass
