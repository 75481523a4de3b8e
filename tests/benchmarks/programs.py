"""What the programs for an H100 and for TPUs hold, compiled on a machine that need have neither.

    pip install libtpu "jax-cuda12-plugin[with-cuda]"   # the compilers; no driver, no device
    python tests/benchmarks/programs.py [--json FILE] [--targets NAME ...] [--layouts NAME ...]

Of each method's step: the bytes that it moves, the memory that it needs beside its arguments, its
kernels, what devices send each other, and the time to compile. Nothing is run. How it is counted:
`hlo.py`; the steps: `whole.py`, on the devices of `layouts.py`, and those of `methods.py`, which
begin with the gradients.
"""

import argparse
import json
import math
import pathlib
import statistics
import time
from typing import NamedTuple

import targets  # before JAX, whose compilers ask for the machine

# isort: split
import hlo
import jax
import layouts
import machine
import methods
import numpy as np
import processes
import trees
import whole
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.console import Console
from rich.table import Table

CLIPPED = ", clipped"
OPTIMIZER = "optimizer alone"
BARE, TRAIN_STEP, APPLY = methods.BARE, "jaxscale.train_step", "jaxscale.apply_gradients"
ADAPTIVE = f"{TRAIN_STEP}, adaptive"
# Their columns in the results; what is clipped is compared with what is clipped.
OURS = [TRAIN_STEP, ADAPTIVE, TRAIN_STEP + CLIPPED]
OURS += [f"{TRAIN_STEP}, retries", f"{TRAIN_STEP}, spikes"]
OTHERS = [APPLY, "jaxscale optax wrapper", "jaxscale.scale_backward"]
OTHERS += ["Flax DynamicScale", "jmp", "optax.apply_if_finite"]
PLAIN = [BARE, BARE + CLIPPED]
TWO, BRIEF, MORE = [BARE, TRAIN_STEP], [BARE, *OURS[:2]], [*PLAIN, *OURS]
ALL = [*MORE, *OTHERS]
# Of steps that begin with the gradients, which there is nothing to retry or to scale in.
STEPS = [name for name in ALL if name.removesuffix(CLIPPED) in methods.METHODS]


class Row(NamedTuple):
    """Programs that are compared: of one model, for the same devices."""

    target: str
    shape: str  # how the devices are wired
    layout: str
    dtype: str = "float32"  # of the parameters; with the optimizer alone, of the gradients
    width: int = 2048
    names: list[str] = TWO
    slices: int = 1

    @property
    def devices(self):
        return self.slices * math.prod(map(int, self.shape.split("x")))


ROWS = [
    Row("H100", "1", OPTIMIZER, names=[*STEPS, ADAPTIVE + CLIPPED]),
    Row("H100", "1", OPTIMIZER, "float16", names=BRIEF),
    Row("TPU v5e", "1x1", OPTIMIZER, names=[*BRIEF, APPLY, OTHERS[-1]]),
    Row("TPU v5e", "1x1", OPTIMIZER, "bfloat16", names=BRIEF),
    Row("TPU v5e", "16x16", "FSDP and tensor parallel", names=ALL),
    Row("TPU v5e", "2x2", "FSDP", width=1024, names=MORE),
    Row("TPU v5e", "1x1", "one device", width=256),
    Row("TPU v5e", "1x1", "one device", names=MORE),
    Row("TPU v5e", "2x2", layouts.PIPELINE, width=1024),
    Row("TPU v5e", "2x2", "tensor parallel", width=1024),
    Row("H100", "1", "one device", names=ALL),
    Row("TPU v5p", "8x8x4", "FSDP"),
    Row("TPU v6e", "16x16", "FSDP and tensor parallel", names=[*PLAIN, TRAIN_STEP]),
    Row("TPU v5e", "16x16", "FSDP and tensor parallel", "bfloat16"),
    Row("TPU v5e", "4x4", "FSDP in each slice", width=1024, names=[*PLAIN, TRAIN_STEP], slices=2),
    Row("H100", "8", "FSDP"),
    Row("TPU v5e", "1x1", "one device", "bfloat16"),
    Row("TPU v5p", "1x1x1", "one device"),
    Row("TPU v6e", "1x1", "one device"),
]


def find_devices(row):
    """Returns an empty report, or the sentence to show in place of a row; and nothing to run."""
    try:
        targets.devices(row.target, row.shape, row.slices)
    except targets.CannotCompile as error:
        return {"error": str(error)}, None
    return {}, None


def compile_step(row, name):
    """Returns the report of a program, and nothing to run."""
    # Of the machine that traces, too: whether there are several decides how gradients are read.
    jax.config.update("jax_num_cpu_devices", row.devices)
    jax.config.update("jax_enable_compilation_cache", False)
    devices = targets.devices(row.target, row.shape, row.slices)[: row.devices]
    clip, name = name.endswith(CLIPPED), name.removesuffix(CLIPPED)
    if row.layout == OPTIMIZER:
        there = NamedSharding(Mesh(np.array(devices), ("data",)), PartitionSpec())
        shapes = trees.TREES["gpu"]["gpt2"]
        params, batch = (trees.avals(shapes, dtype, there) for dtype in ("float32", row.dtype))
        init, step, *_ = methods.make(name, clip)
    else:
        half = "float16" if row.target == "H100" else "bfloat16"
        loss_fn, params, batch = layouts.make(
            row.layout, devices, row.width, row.dtype, half, row.slices
        )
        init, step = whole.steps(loss_fn, clip)[name]
    carry = layouts.place(jax.eval_shape(init, params), params)
    traced = jax.jit(step, donate_argnums=0).trace(carry, batch)
    start = time.process_time()
    compiled = traced.lower().compile()
    seconds = time.process_time() - start
    of_a_device = sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in jax.tree.leaves(params)
    )
    report = hlo.program(compiled, of_a_device)
    return report | {"stable": _is_stable(traced, compiled, carry), "compile_s": seconds}, None


def _is_stable(traced, compiled, carry):
    """Returns whether the next step takes what this one returns, and nothing is compiled anew."""
    before = jax.tree.leaves(carry)
    after = zip(traced.jaxpr.out_avals, jax.tree.leaves(compiled.output_shardings), strict=True)
    return all(
        (old.shape, old.dtype, old.weak_type) == (aval.shape, aval.dtype, aval.weak_type)
        and old.sharding.is_equivalent_to(sharding, len(old.shape))
        for old, (aval, sharding) in zip(before, after, strict=False)  # after it the loss
    )


def title(row):
    """Returns what a row of the results is about, in words."""
    width = f", width {row['width']}" if row["layout"] != OPTIMIZER else ""
    return f"{row['devices']} x {row['target']}, {row['layout']}, {row['dtype']}{width}"


def table(row):
    result = Table(title=title(row))
    result.add_column("method", no_wrap=True)
    for heading in ["bytes/p", "temp/p", "kernels", "host", "64-bit", "stable", "compile s"]:
        result.add_column(heading, justify="right")
    result.add_column("collectives")
    for name, report in row["methods"].items():
        if "error" in report:
            result.add_row(name, *[""] * 7, report["error"])
            continue
        counts = {kind: sum(sizes.values()) for kind, sizes in report["collectives"].items()}
        result.add_row(
            name,
            f"{report['bytes_per_parameter']:.2f}",
            f"{report['temporary_bytes_per_parameter']:.2f}",
            *(str(report[key]) for key in ("kernels", "host", "64-bit", "stable")),
            f"{report['compile_s']:.1f}",
            ", ".join(f"{count} {kind}" for kind, count in counts.items()),
        )
    return result


def markdown(rows, names):
    """Returns the tables of `results/README.md`: each method beside plain optax."""
    headings = [
        name.split(".")[-1].replace("jaxscale optax wrapper", "three lines") for name in names
    ]
    lines = ["| | plain optax | " + " | ".join(headings) + " |"]
    lines += ["|---" * (2 + len(names)) + "|"]
    compiled = {name: [] for name in names}
    for row in rows:
        reports = {name: each for name, each in row["methods"].items() if "error" not in each}
        if BARE not in reports or not set(names) & set(reports):
            continue
        cells = []
        for name in names:
            plain = reports.get(BARE + CLIPPED if name.endswith(CLIPPED) else BARE)
            report = reports.get(name)
            cells.append(_compared(report, plain) if report and plain else "")
            if report and plain:
                compiled[name].append(report["compile_s"] / plain["compile_s"])
        plain = reports[BARE]["bytes_per_parameter"]
        lines.append(f"| {title(row)} | {plain:.1f} | " + " | ".join(cells) + " |")
    medians = [f"{statistics.median(each):.2f}" if each else "" for each in compiled.values()]
    lines.append("| *time to compile, median* | | " + " | ".join(medians) + " |")
    return "\n".join(lines)


def _compared(report, plain):
    """The bytes relative to those of plain optax, temporary memory and collectives beyond it."""
    counts = [
        sum(sum(sizes.values()) for sizes in each["collectives"].values())
        for each in (report, plain)
    ]
    moved = report["bytes_per_parameter"] / plain["bytes_per_parameter"]
    memory, less = (each["temporary_bytes_per_parameter"] for each in (report, plain))
    more = f", {counts[0] - counts[1]:+d}" if counts[1] else ""
    return f"{moved:.2f}, {memory - less:+.1f}{more}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--targets", nargs="+", default=list(dict.fromkeys(row.target for row in ROWS)))
    add("--layouts", nargs="+", choices=[OPTIMIZER, *layouts.LAYOUTS], metavar="LAYOUT")
    add("--dtypes", nargs="+", choices=trees.DTYPES, default=trees.DTYPES, help="of parameters")
    add("--only", nargs="+", choices=[*ALL, ADAPTIVE + CLIPPED], metavar="METHOD")
    add("--limit", type=float, default=600, help="seconds to compile a program")
    add("--json", type=pathlib.Path, help="where to write the figures")
    add("--goes-on", action="store_true", help="keep the rows that are there, of a run that ended")
    options = parser.parse_args()
    console = Console(width=140)
    result = {"machine": processes.call(machine.describe), "rows": []}
    console.print(machine.line(result["machine"]))
    chosen = [
        row
        for row in ROWS
        if row.target in options.targets
        and row.layout in (options.layouts or [row.layout])
        and row.dtype in options.dtypes
    ]
    if options.goes_on:
        result["rows"] = json.loads(options.json.read_text())["rows"]
    order = [title(row._asdict() | {"devices": row.devices}) for row in ROWS]
    known = {title(row) for row in result["rows"]}
    for row in chosen:
        names = [name for name in row.names if name in (options.only or row.names)]
        if title(row._asdict() | {"devices": row.devices}) in known:
            continue
        missing = processes.call(find_devices, row)
        with console.status("") as status:
            reports = {}
            for name in () if missing else names:
                status.update(f"{row.devices} x {row.target}, {row.layout}: {name}")
                reports[name] = processes.call(compile_step, row, name, limit=options.limit)
        figures = row._asdict() | {"devices": row.devices, "methods": reports} | missing
        del figures["names"]
        result["rows"] = sorted([*result["rows"], figures], key=lambda row: order.index(title(row)))
        console.print(missing["error"] if missing else table(figures))
        if options.json:
            options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
