"""How a step and its compilation grow with the number of leaves and of parameters.

    python tests/benchmarks/leaves.py [--json FILE] [--picture FILE] [--only NAME ...]

One axis at a time: leaves of 256 elements each, and sixteen leaves of more and more. A method
that is not ready within the limit is stopped, and not tried on larger trees.
"""

import argparse
import json
import pathlib

import machine
import matplotlib
import methods
import processes
import step
import trees
from rich.console import Console
from rich.table import Table

matplotlib.use("agg")
import matplotlib.pyplot as plt

AXES = {
    "leaves": ([10, 30, 100, 300, 1000, 3000], lambda number: trees.small(number, 256)),
    "parameters": (
        [10**4, 10**5, 10**6, 10**7, 10**8],
        lambda number: trees.small(16, number // 16 // 128 * 128),
    ),
}


def sweep(axis, options, names, console, status):
    """Returns the rows of `step.measure` along an axis, and prints each as it comes."""
    rows, too_slow = [], {}
    largest = {"leaves": options.leaves, "parameters": options.parameters}[axis]
    numbers, shapes_of = AXES[axis]
    for number in (number for number in numbers if number <= largest):
        shapes = shapes_of(number)
        what = f"{number:,} {axis}"
        rest = [name for name in names if name not in too_slow]
        row = step.measure(
            what,
            shapes,
            options.gradients,
            False,
            rest,
            options,
            lambda text, what=what: status.update(f"{what}: {text}"),
        )
        row["methods"] |= too_slow
        too_slow |= {name: report for name, report in row["methods"].items() if "limit" in report}
        rows.append({"axis": axis, "number": number} | row)
        console.print(step.table(row))
    return rows


def summary(rows):
    """Returns a table with a row for each method: compilation and step along an axis."""
    result = Table(title=f"by {rows[0]['axis']}: seconds to compile, ratio of a step to bare")
    result.add_column("method", no_wrap=True)
    for row in rows:
        result.add_column(f"{row['number']:,}", justify="right")
    for name in rows[0]["methods"]:
        reports = [row["methods"][name] for row in rows]
        result.add_row(name, *map(_cell, reports))
    return result


def _cell(report):
    if "error" in report:
        return report["error"] if "limit" in report else "-"
    ratio = report.get("to_bare")
    return f"{report['compile_s']:.1f} s" + (f", {ratio['median']:.2f}" if ratio else "")


def draw(rows, described, path):
    """Writes the picture: time to compile and time of a step, along both axes."""
    figure, axes = plt.subplots(2, 2, figsize=(11, 8), sharex="col", layout="constrained")
    quantities = {"compile_s": "seconds to compile", "step_s": "seconds of a step"}
    # A marker for each, too: they can be told apart in grey.
    styles = dict(
        zip(
            methods.METHODS,
            zip(plt.color_sequences["tab10"], "os^vDPX*", strict=False),
            strict=True,
        )
    )
    for column, axis in zip(axes.T, AXES, strict=True):
        along = [row for row in rows if row["axis"] == axis]
        for panel, (key, label) in zip(column, quantities.items(), strict=True):
            for name, (color, marker) in styles.items():
                _line(panel, along, name, key, color, marker)
            panel.set(xscale="log", yscale="log", ylabel=label)
            panel.grid(alpha=0.3)
        if along:
            size = "of 256 elements" if axis == "leaves" else "in 16 leaves"
            column[1].set_xlabel(f"{axis} {size}")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    axes[0, 1].sharey(axes[0, 0])
    figure.legend(handles, labels, loc="outside lower center", ncols=4)
    figure.suptitle(
        f"AdamW, {rows[0]['gradients']} gradients: {described['device']}, "
        f"JAX {described['versions']['jax']}, {described['date'][:10]}. A cross: stopped there."
    )
    figure.savefig(path, dpi=120)


def _line(panel, rows, name, key, color, marker):
    points = [(row["number"], row["methods"].get(name, {})) for row in rows]
    measured = [(number, report[key]) for number, report in points if key in report]
    style = {"color": color, "linewidth": 2.5 if name in (methods.BARE, *methods.OURS) else 1.2}
    if measured:
        line = {"marker": marker, "markersize": 5, "label": name}
        panel.plot(*zip(*measured, strict=True), **line, **style)
    stopped = [(number, report["limit"]) for number, report in points if "limit" in report]
    if stopped and key == "compile_s":
        panel.plot(*stopped[0], "x", markersize=9, markeredgewidth=2, color=color)
        if measured:
            panel.plot(*zip(measured[-1], stopped[0], strict=True), ":", **style)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--gradients", choices=trees.DTYPES, default="float16")
    add("--leaves", type=int, default=3000, help="the largest number of leaves")
    add("--parameters", type=int, default=10**8, help="the largest number of parameters")
    add("--only", nargs="+", choices=methods.METHODS, metavar="METHOD")
    add("--rounds", type=int, default=7, help="turns of each method")
    add("--seconds", type=float, default=0.2, help="length of a turn")
    add("--limit", type=float, default=180, help="seconds to trace, compile and check a method")
    add("--json", type=pathlib.Path, help="where to write the figures")
    add("--picture", type=pathlib.Path, default="leaves.png", help="where to draw them")
    options = parser.parse_args()
    console = Console(width=150)
    names = [name for name in methods.METHODS if name in (options.only or methods.METHODS)]
    described = processes.call(machine.describe)
    console.print(machine.line(described))
    rows = []
    with console.status("") as status:
        for axis in AXES:
            along = sweep(axis, options, names, console, status)
            rows += along
            if along:
                console.print(summary(along))
                draw(rows, described, options.picture)
            if options.json:
                figures = {"machine": described, "rows": rows}
                options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
