"""What a step between two passes costs: ours beside bare optax and the peers.

    python tests/benchmarks/step.py [--size laptop|gpu] [--json FILE] [--only NAME ...]

Checks each method first, then times all of them in turn on a tree like GPT-2: two tables for each
dtype of gradients. In one a step begins with the gradients. In the other, `--forms products`, it
makes them itself, each by a product with 8 rows. What a row includes: `methods.py`. What is counted
as a kernel: `hlo.py`.
"""

import gc
import itertools
import statistics
import time

import checks
import hlo
import jax
import methods
import processes
import report
import trees


def compile_step(step, *args):
    """Compiles a step that consumes its first argument.

    Returns it, and the seconds that it took to trace and to compile.
    """
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
    carry_avals = jax.eval_shape(method.init, trees.avals(shapes, "float32"))
    step, times = compile_step(method.step, carry_avals, trees.avals(shapes, dtype))
    names = list(shapes)
    spoiled = [names[0], names[len(names) // 2], names[-1]]
    # A float32 norm over millions of elements is off by more than its last bits.
    rtol = 1e-3 if clip else 1e-5
    faults = checks.run(method, step, shapes, dtype, clip, spoiled, rtol, steps=2)
    carry = method.init(trees.params(shapes))
    scale = float(method.scale(carry))
    grads = trees.gradients(shapes, dtype, scale)
    report = {"faults": faults} | times | hlo.program(step, trees.size(shapes))
    return report, repeat_step(step, carry, grads)


def repeat_step(step, carry, batch):
    return processes.timed(
        lambda carry: step(carry, batch), carry, jax.block_until_ready
    )


def prepare_with_products(name, shapes, dtype, clip):
    """Returns the report of one method's whole step, with its backward pass, and what runs it."""
    method = methods.make(name, clip, trees.products(dtype))
    carry = method.init(trees.params(shapes))
    rows = trees.rows(shapes, dtype)

    def step_without_loss(carry, rows):
        carry, _ = method.step(carry, rows)
        return carry

    step, times = compile_step(step_without_loss, carry, rows)
    report = {"faults": []} | times | hlo.program(step, trees.size(shapes))
    return report, repeat_step(step, carry, rows)


FORMS = {"gradients": prepare, "products": prepare_with_products}


def measure(form, dtype, options, show):
    """Returns one table's figures, as JSON types."""
    shapes = trees.SIZES[options.size]
    make = FORMS[form]
    jobs = {name: (make, name, shapes, dtype, options.clip) for name in options.only}
    reports = processes.measure(jobs, options, show, to_bare=methods.BARE)
    for figures in reports.values():
        if "to_bare" in figures:
            bare = reports[methods.BARE]
            for key in ("trace", "compile", "dispatch"):
                figures[f"{key}_to_bare"] = figures[f"{key}_s"] / bare[f"{key}_s"]
    return {
        "leaves": len(shapes),
        "parameters": trees.size(shapes),
        "gradients": dtype,
        "clipped": options.clip,
        "products": form == "products",
        "methods": reports,
    }


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
    columns = dict(COLUMNS)
    begins_with = "gradients"
    if row["products"]:
        begins_with = "products"
        del columns["checks"]
    clipped = "global norm clipped" if row["clipped"] else "unclipped"
    size = f"{row['leaves']} leaves, {row['parameters'] / 1e6:.3g}M parameters"
    title = f"GPT-2: {size}, {row['gradients']} {begins_with}, {clipped}"
    return report.table(title, columns, row["methods"])


def main():
    parser = report.parser(__doc__, 15, 0.3, 300, methods.FROM_GRADIENTS, trees.SIZES)
    add = parser.add_argument
    add("--gradients", nargs="+", choices=trees.DTYPES, default=list(trees.DTYPES))
    add("--clip", action="store_true", help="clip the global norm")
    add(
        "--forms",
        nargs="+",
        choices=FORMS,
        default=list(FORMS),
        help="whether a step begins with the gradients, or with the products that make them",
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
            for name, figures in reports.items():
                faults = figures.get("faults")
                if "error" in figures:
                    faults = [figures["error"]]
                for fault in faults:
                    console.print(f"{dtype}: {name}: {fault}")
        for dtype, form in itertools.product(options.gradients, options.forms):
            result["rows"].append(measure(form, dtype, options, status.update))
            console.print(table(result["rows"][-1]))
            report.write(options.json, result)


if __name__ == "__main__":
    main()
