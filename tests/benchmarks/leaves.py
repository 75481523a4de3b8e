"""How a step and its compilation grow with the number of leaves and of parameters.

    python tests/benchmarks/leaves.py [--json FILE] [--picture FILE] [--only NAME ...]

One axis at a time: leaves of 256 elements each, and sixteen leaves of more and more. A method
that is not ready within the limit is stopped, and not tried on larger trees.
"""

import pathlib

import matplotlib
import methods
import report
import step
import trees

matplotlib.use("agg")
import matplotlib.pyplot as plt

AXES = {
    "leaves": ([10, 30, 100, 300, 1000, 3000], lambda number: trees.small(number, 256)),
    "parameters": (
        [10**4, 10**5, 10**6, 10**7, 10**8],
        lambda number: trees.small(16, number // 16 // 128 * 128),
    ),
}


def sweep(axis, options, console):
    """Returns the rows of `step.measure` along an axis, and prints each as it comes."""
    rows, too_slow = [], {}
    numbers, shapes_of = AXES[axis]
    for number in (number for number in numbers if number <= getattr(options, axis)):
        what, rest = f"{number:,} {axis}", [name for name in options.only if name not in too_slow]
        with console.status("") as status:
            row = step.measure(
                what,
                shapes_of(number),
                options.gradients,
                False,
                rest,
                options,
                lambda text, status=status, what=what: status.update(f"{what}: {text}"),
            )
        row["methods"] |= too_slow
        too_slow |= {name: each for name, each in row["methods"].items() if "limit" in each}
        rows.append({"axis": axis, "number": number} | row)
        console.print(step.table(row))
    return rows


def summary(rows):
    """Returns a table with a row for each method: compilation and step along an axis."""
    columns = {f"{row['number']:,}": _cell(row) for row in rows}
    title = f"by {rows[0]['axis']}: seconds to compile, ratio of a step to bare"
    return report.table(title, columns, {name: {"name": name} for name in rows[0]["methods"]})


def _cell(row):
    def text(method):
        each = row["methods"][method["name"]]
        if "error" in each:
            return each["error"] if "limit" in each else "-"
        ratio = f", {each['to_bare']['median']:.2f}" if "to_bare" in each else ""
        return f"{each['compile_s']:.1f} s{ratio}"

    return text


def draw(rows, described, path):
    """Writes the picture: time to compile and time of a step, along both axes."""
    figure, axes = plt.subplots(2, 2, figsize=(11, 8), sharex="col", layout="constrained")
    quantities = {"compile_s": "seconds to compile", "step_s": "seconds of a step"}
    for column, axis in zip(axes.T, AXES, strict=True):
        along = [row for row in rows if row["axis"] == axis]
        for panel, (key, label) in zip(column, quantities.items(), strict=True):
            # A marker for each, too: they can be told apart in grey.
            colors = zip(methods.FROM_GRADIENTS, plt.color_sequences["tab10"], strict=True)
            for (name, color), marker in zip(colors, "os^vDPX*<>", strict=True):
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
        f"AdamW, {rows[0]['gradients']} gradients: {report.where(described)}. "
        "A cross: stopped there."
    )
    figure.savefig(path, dpi=120)


def _line(panel, rows, name, key, color, marker):
    points = [(row["number"], row["methods"].get(name, {})) for row in rows]
    measured = [(number, each[key]) for number, each in points if key in each]
    is_thick = name == methods.BARE or name.startswith("jaxscale")
    style = {"color": color, "linewidth": 2.5 if is_thick else 1.2}
    if measured:
        line = {"marker": marker, "markersize": 5, "label": name}
        panel.plot(*zip(*measured, strict=True), **line, **style)
    stopped = [(number, each["limit"]) for number, each in points if "limit" in each]
    if stopped and key == "compile_s":
        panel.plot(*stopped[0], "x", markersize=9, markeredgewidth=2, color=color)
        if measured:
            panel.plot(*zip(measured[-1], stopped[0], strict=True), ":", **style)


def main():
    names = methods.FROM_GRADIENTS
    parser = report.parser(__doc__, rounds=7, seconds=0.2, limit=180)
    add = parser.add_argument
    add("--gradients", choices=trees.DTYPES, default="float16")
    add("--leaves", type=int, default=3000, help="the largest number of leaves")
    add("--parameters", type=int, default=10**8, help="the largest number of parameters")
    add("--only", nargs="+", choices=names, default=names, metavar="METHOD")
    add("--picture", type=pathlib.Path, default="leaves.png", help="where to draw them")
    options = parser.parse_args()
    console, figures = report.begin()
    for axis in AXES:
        along = sweep(axis, options, console)
        figures["rows"] += along
        if along:
            console.print(summary(along))
            draw(figures["rows"], figures["machine"], options.picture)
        report.write(options.json, figures)


if __name__ == "__main__":
    main()
