"""What a step between two passes costs: ours beside bare optax and the peers.

    python tests/benchmarks/step.py [--size laptop|gpu] [--json FILE] [--only NAME ...]

Checks each method first, then times all of them in turn, and prints a table for each tree,
dtype of gradients, and with and without clipping of the global norm. What a row includes:
`methods.py`. What is counted as a kernel: `hlo.py`.
"""

import gc
import itertools
import statistics
import time

import checks
import hlo
import jax
import jax.numpy as jnp
import methods
import processes
import report
import trees


def compiled(step, *args):
    """Returns a step that consumes its first argument, and the seconds to trace and compile it."""
    jax.config.update("jax_enable_compilation_cache", False)
    trace_s = []
    for _ in range(3):
        jax.clear_caches()
        gc.collect()  # of what is left of the last one, nothing is freed while this is timed
        start = time.perf_counter()
        traced = jax.jit(lambda *args: step(*args), donate_argnums=0).trace(*args)
        trace_s.append(time.perf_counter() - start)
    start = time.perf_counter()
    program = traced.lower().compile()
    compile_s = time.perf_counter() - start
    return program, {"trace_s": statistics.median(trace_s), "compile_s": compile_s}


def prepare(name, shapes, dtype, clip):
    """Returns the report of one method's compiled step, checked, and what runs it."""
    method = methods.make(name, clip)
    carry = jax.eval_shape(method.init, trees.avals(shapes, "float32"))
    step, times = compiled(method.step, carry, trees.avals(shapes, dtype))
    leaves = [list(shapes)[i] for i in sorted({0, len(shapes) // 2, len(shapes) - 1})]
    # A float32 norm over millions of elements is off by more than its last bits.
    rtol = 1e-3 if clip else 1e-5
    faults = checks.run(method, step, shapes, dtype, clip, leaves, rtol, steps=2)
    carry = method.init(trees.params(shapes))
    grads = trees.gradients(shapes, dtype, float(method.scale(carry)))
    run = processes.timed(lambda carry: step(carry, grads), carry, jax.block_until_ready)
    return {"faults": faults} | times | hlo.program(step, trees.size(shapes)), run


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
    reports = processes.measure(jobs, options, show, to_bare=methods.BARE, to_limit="limit")
    limit_s = reports.pop("limit")["step_s"]
    for each in reports.values():
        for key in ("trace_s", "compile_s", "dispatch_s") if "to_bare" in each else ():
            each[f"{key[:-2]}_to_bare"] = each[key] / reports[methods.BARE][key]
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


def _ratio(key, form):
    return lambda report: form.format(**report[key]) if key in report else ""


COLUMNS = {
    "step ms": lambda report: f"{1e3 * report['step_s']:.3g}",
    "/ bare": _ratio("to_bare", "{median:.2f}"),
    "quartiles": _ratio("to_bare", "{low:.2f}-{high:.2f}"),
    "/ limit": _ratio("to_limit", "{median:.2f}"),
    "bytes/p": lambda report: f"{report['bytes_per_parameter']:.1f}",
    "temp/p": lambda report: f"{report['temporary_bytes_per_parameter']:.1f}",
    "kernels": lambda report: str(report["kernels"]),
    "trace s": lambda report: f"{report['trace_s']:.2f}",
    "compile s": lambda report: f"{report['compile_s']:.1f}",
    "dispatch ms": lambda report: f"{1e3 * report['dispatch_s']:.2f}",
    "checks": lambda report: "; ".join(report["faults"]) or "right",
}


def table(row):
    """Returns a table of one row of :func:`measure`."""
    clipped = "global norm clipped" if row["clipped"] else "unclipped"
    return report.table(
        f"{row['tree']}: {row['leaves']} leaves, {row['parameters'] / 1e6:.3g}M parameters, "
        f"{row['gradients']} gradients, {clipped}",
        COLUMNS,
        row["methods"],
        f"limit: {row['limit_bytes_per_parameter']:g} bytes/parameter at "
        f"{row['bytes_per_second'] / 1e9:.3g} GB/s, in {1e3 * row['limit_s']:.3g} ms",
    )


def main():
    parser = report.parser(__doc__, 15, 0.3, 300, methods.FROM_GRADIENTS, trees.TREES)
    add = parser.add_argument
    add("--trees", nargs="+", choices=trees.TREES["laptop"], default=list(trees.TREES["laptop"]))
    add("--gradients", nargs="+", choices=trees.DTYPES, default=list(trees.DTYPES))
    add("--clip", nargs="+", choices=trees.CLIPS, default=list(trees.CLIPS))
    options = parser.parse_args()
    kinds = list(itertools.product(options.gradients, options.clip))
    console, result = report.begin()
    result["checks"] = []
    result["settings"] = {"size": options.size, "rounds": options.rounds, "limit_s": options.limit}
    with console.status("") as status:
        for dtype, clip in kinds:
            status.update(f"checks of every leaf: {dtype} gradients, {clip}")
            reports = processes.call(checks.small, options.only, dtype, trees.CLIPS[clip])
            checked = {"gradients": dtype, "clipped": trees.CLIPS[clip], "methods": reports}
            result["checks"].append(checked)
            for name, each in reports.items():
                for fault in [each["error"]] if "error" in each else each["faults"]:
                    console.print(f"{dtype}, {clip}: {name}: {fault}")
        for tree, (dtype, clip) in itertools.product(options.trees, kinds):
            shapes, clipped = trees.TREES[options.size][tree], trees.CLIPS[clip]
            row = measure(tree, shapes, dtype, clipped, options.only, options, status.update)
            result["rows"].append(row)
            console.print(table(row))
            report.write(options.json, result)


if __name__ == "__main__":
    main()
