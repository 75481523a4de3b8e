"""What a step between two passes costs: ours beside bare optax and the peers.

    python tests/benchmarks/step.py [--size laptop|gpu] [--json FILE] [--only NAME ...]

Checks each method first, then times all of them in turn, and prints a table for each tree,
dtype of gradients, and with and without clipping of the global norm. What a row includes:
`methods.py`. What is counted as a kernel: `hlo.py`.
"""

import argparse
import gc
import itertools
import json
import pathlib
import statistics
import time

import checks
import hlo
import jax
import jax.numpy as jnp
import machine
import methods
import processes
import trees
from rich.console import Console
from rich.table import Table


def prepare(name, shapes, dtype, clip):
    """Returns the report of one method's compiled step, checked, and what runs it."""
    jax.config.update("jax_enable_compilation_cache", False)
    method = methods.make(name, clip)
    carry = jax.eval_shape(method.init, trees.avals(shapes, "float32"))
    grads = trees.avals(shapes, dtype)
    trace_s = []
    for _ in range(3):
        jax.clear_caches()
        gc.collect()  # of what is left of the last one, nothing is freed while this is timed
        step = jax.jit(lambda carry, grads: method.step(carry, grads), donate_argnums=0)
        start = time.perf_counter()
        traced = step.trace(carry, grads)
        trace_s.append(time.perf_counter() - start)
    start = time.perf_counter()
    step = traced.lower().compile()
    compile_s = time.perf_counter() - start

    leaves = [list(shapes)[i] for i in sorted({0, len(shapes) // 2, len(shapes) - 1})]
    # A float32 norm over millions of elements is off by more than its last bits.
    rtol = 1e-3 if clip else 1e-5
    faults = checks.run(method, step, shapes, dtype, clip, leaves, rtol, steps=2)
    carry = method.init(trees.params(shapes))
    grads = trees.gradients(shapes, dtype, float(method.scale(carry)))
    run = processes.timed(lambda carry: step(carry, grads), carry, jax.block_until_ready)
    report = {"faults": faults, "trace_s": statistics.median(trace_s), "compile_s": compile_s}
    return report | hlo.program(step, trees.size(shapes)), run


def prepare_stream(number_of_bytes):
    """Returns an empty report, and what times the plainest loop over so many bytes: ``x += y``.

    It holds no more than a gibibyte, which is far beyond any cache, and repeats it.
    """
    held = min(number_of_bytes, 2**30)
    x, y = (jnp.full(max(1, held // 12), value, jnp.float32) for value in (0.0, 1.0))
    add = jax.jit(jnp.add, donate_argnums=0)
    run = processes.timed(lambda x: add(x, y), x, jax.block_until_ready)

    def scaled(seconds):
        turn = run(seconds)
        return turn | {"step_s": turn["step_s"] * number_of_bytes / held}

    return {}, scaled


def measure(tree, shapes, dtype, clip, names, options, show):
    """Returns one table's figures, as JSON types."""
    number_of_bytes = trees.limit_bytes(shapes, dtype)
    jobs = {name: (prepare, name, shapes, dtype, clip) for name in names}
    jobs["limit"] = (prepare_stream, number_of_bytes)
    ready, reports = processes.prepare(
        jobs, options.limit, lambda name: show(f"{name}: trace, compile, check")
    )
    turns = processes.take_turns(ready, options.rounds, options.seconds, show)
    del reports["limit"]
    for name, report in reports.items():
        if name in turns:
            report["step_s"] = statistics.median(turn["step_s"] for turn in turns[name])
            report["dispatch_s"] = statistics.median(turn["dispatch_s"] for turn in turns[name])
            report["to_limit"] = processes.ratio(turns[name], turns["limit"])
        if name in turns and methods.BARE in turns:
            report["to_bare"] = processes.ratio(turns[name], turns[methods.BARE])
            for key in ("trace_s", "compile_s", "dispatch_s"):
                report[f"{key[:-2]}_to_bare"] = report[key] / reports[methods.BARE][key]
    limit_s = statistics.median(turn["step_s"] for turn in turns["limit"])
    return {
        "tree": tree,
        "leaves": len(shapes),
        "parameters": trees.size(shapes),
        "gradients": dtype,
        "clipped": clip,
        "limit_bytes_per_parameter": number_of_bytes / trees.size(shapes),
        "limit_s": limit_s,
        "bytes_per_second": number_of_bytes / limit_s,
        "methods": reports,
    }


def table(row):
    """Returns a table of one row of :func:`measure`."""
    clipped = "global norm clipped" if row["clipped"] else "unclipped"
    result = Table(
        title=f"{row['tree']}: {row['leaves']} leaves, {row['parameters'] / 1e6:.3g}M parameters, "
        f"{row['gradients']} gradients, {clipped}",
        caption=f"limit: {row['limit_bytes_per_parameter']:g} bytes/parameter at "
        f"{row['bytes_per_second'] / 1e9:.3g} GB/s, in {1e3 * row['limit_s']:.3g} ms",
    )
    result.add_column("method", no_wrap=True)
    columns = ["step ms", "/ bare", "quartiles", "/ limit", "bytes/p", "temp/p", "kernels"]
    for heading in [*columns, "trace s", "compile s", "dispatch ms"]:
        result.add_column(heading, justify="right")
    result.add_column("checks", overflow="fold", max_width=40)
    for name, report in row["methods"].items():
        result.add_row(name, *_cells(report))
    return result


def _cells(report):
    if "error" in report:
        took = report["error"] if "limit" in report else ""
        return [*[""] * 8, took, "", "" if took else report["error"]]
    to_bare = report.get("to_bare")
    return [
        f"{1e3 * report['step_s']:.3g}",
        f"{to_bare['median']:.2f}" if to_bare else "",
        f"{to_bare['low']:.2f}-{to_bare['high']:.2f}" if to_bare else "",
        f"{report['to_limit']['median']:.2f}",
        f"{report['bytes_per_parameter']:.1f}",
        f"{report['temporary_bytes_per_parameter']:.1f}",
        f"{report['kernels']}",
        f"{report['trace_s']:.2f}",
        f"{report['compile_s']:.1f}",
        f"{1e3 * report['dispatch_s']:.2f}",
        f"{len(report['faults'])} faults" if report["faults"] else "right",
    ]


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--size", choices=trees.TREES, default="laptop")
    add("--trees", nargs="+", choices=trees.TREES["laptop"], default=list(trees.TREES["laptop"]))
    add("--gradients", nargs="+", choices=trees.DTYPES, default=list(trees.DTYPES))
    add("--clip", nargs="+", choices=trees.CLIPS, default=list(trees.CLIPS))
    add(
        "--only", nargs="+", choices=methods.METHODS, metavar="METHOD", help=str([*methods.METHODS])
    )
    add("--rounds", type=int, default=15, help="turns of each method")
    add("--seconds", type=float, default=0.3, help="length of a turn")
    add("--limit", type=float, default=300, help="seconds to trace, compile and check a method")
    add("--json", type=pathlib.Path, help="where to write the figures")
    return parser.parse_args()


def main():
    options = arguments()
    console = Console(width=150)
    names = [name for name in methods.METHODS if name in (options.only or methods.METHODS)]
    kinds = list(itertools.product(options.gradients, options.clip))
    result = {"machine": processes.call(machine.describe), "checks": [], "rows": []}
    result["settings"] = {"size": options.size, "rounds": options.rounds, "limit_s": options.limit}
    console.print(machine.line(result["machine"]))
    with console.status("") as status:
        for dtype, clip in kinds:
            status.update(f"checks of every leaf: {dtype} gradients, {clip}")
            reports = processes.call(checks.small, names, dtype, trees.CLIPS[clip])
            checked = {"gradients": dtype, "clipped": trees.CLIPS[clip], "methods": reports}
            result["checks"].append(checked)
            for name, report in reports.items():
                for fault in [report["error"]] if "error" in report else report["faults"]:
                    console.print(f"{dtype}, {clip}: {name}: {fault}")
        for tree, (dtype, clip) in itertools.product(options.trees, kinds):
            shapes = trees.TREES[options.size][tree]
            row = measure(tree, shapes, dtype, trees.CLIPS[clip], names, options, status.update)
            result["rows"].append(row)
            console.print(table(row))
            if options.json:  # after each row: a long run that is stopped leaves what it has
                options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
