"""What a step between two passes costs: ours beside bare optax and the peers.

    python tests/benchmarks/step.py [--size laptop|gpu] [--json FILE] [--only NAME ...] [--products]

Checks each method first, then times all of them in turn on a tree like GPT-2: a table for each
dtype of gradients. What a row includes: `methods.py`. What is counted as a kernel: `hlo.py`. With
`--products` the step makes its gradients itself, each by a product with 8 rows.
"""

import gc
import statistics
import time

import checks
import hlo
import jax
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
        # of what is left of the last one, nothing is freed while this is timed
        gc.collect()
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
    run = processes.timed(
        lambda carry: step(carry, grads), carry, jax.block_until_ready
    )
    return {"faults": faults} | times | hlo.program(step, trees.size(shapes)), run


def prepare_with_products(name, shapes, dtype, clip):
    """Returns the report of one method's whole step, with its backward pass, and what runs it."""
    method = methods.make(name, clip, trees.products(dtype))
    carry, rows = method.init(trees.params(shapes)), trees.rows(shapes, dtype)
    step, times = compiled(lambda carry, rows: method.step(carry, rows)[0], carry, rows)
    run = processes.timed(lambda carry: step(carry, rows), carry, jax.block_until_ready)
    return {"faults": []} | times | hlo.program(step, trees.size(shapes)), run


def measure(dtype, options, show):
    """Returns one table's figures, as JSON types."""
    shapes = trees.SIZES[options.size]
    make = prepare_with_products if options.products else prepare
    jobs = {name: (make, name, shapes, dtype, options.clip) for name in options.only}
    reports = processes.measure(jobs, options, show, to_bare=methods.BARE)
    for each in reports.values():
        for key in ("trace_s", "compile_s", "dispatch_s") if "to_bare" in each else ():
            each[f"{key[:-2]}_to_bare"] = each[key] / reports[methods.BARE][key]
    number = {"leaves": len(shapes), "parameters": trees.size(shapes)}
    form = {"gradients": dtype, "clipped": options.clip, "products": options.products}
    return number | form | {"methods": reports}


def _ratio(key, form):
    return lambda report: form.format(**report[key]) if key in report else ""


COLUMNS = {
    "step ms": lambda report: f"{1e3 * report['step_s']:.3g}",
    "/ bare": _ratio("to_bare", "{median:.2f}"),
    "quartiles": _ratio("to_bare", "{low:.2f}-{high:.2f}"),
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
    size = f"{row['leaves']} leaves, {row['parameters'] / 1e6:.3g}M parameters"
    made = "products" if row["products"] else "gradients"
    title = f"GPT-2: {size}, {row['gradients']} {made}, {clipped}"
    columns = {name: show for name, show in COLUMNS.items() if name != "checks"}
    return report.table(title, columns if row["products"] else COLUMNS, row["methods"])


def main():
    parser = report.parser(__doc__, 15, 0.3, 300, methods.FROM_GRADIENTS, trees.SIZES)
    add = parser.add_argument
    add("--gradients", nargs="+", choices=trees.DTYPES, default=list(trees.DTYPES))
    add("--clip", action="store_true", help="clip the global norm")
    add(
        "--products",
        action="store_true",
        help="with a backward pass, of products with 8 rows",
    )
    options = parser.parse_args()
    console, result = report.begin()
    result["checks"] = []
    result["settings"] = {
        "size": options.size,
        "rounds": options.rounds,
        "limit_s": options.limit,
    }
    with console.status("") as status:
        for dtype in options.gradients:
            status.update(f"checks of every leaf: {dtype} gradients")
            reports = processes.call(checks.small, options.only, dtype, options.clip)
            checked = {"gradients": dtype, "clipped": options.clip, "methods": reports}
            result["checks"].append(checked)
            for name, each in reports.items():
                for fault in [each["error"]] if "error" in each else each["faults"]:
                    console.print(f"{dtype}: {name}: {fault}")
        for dtype in options.gradients:
            result["rows"].append(measure(dtype, options, status.update))
            console.print(table(result["rows"][-1]))
            report.write(options.json, result)


if __name__ == "__main__":
    main()
