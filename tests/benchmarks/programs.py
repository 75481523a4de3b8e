"""What the programs for an H100 and for TPUs hold, compiled on a machine that need have neither.

    pip install libtpu "jax-cuda12-plugin[with-cuda]"   # the compilers; no driver, no device
    python tests/benchmarks/programs.py [--json FILE] [--targets NAME ...] [--layouts NAME ...]

Of each method's step: the bytes that it moves, the memory that it needs beside its arguments, its
kernels, what devices send each other, and the time to compile. Nothing is run. How it is counted:
`hlo.py`; the steps: `methods.py`, on the devices of `layouts.py`.
"""

import math
import time
from typing import NamedTuple

import targets  # before JAX, whose compilers ask for the machine

# isort: split
import hlo
import jax
import layouts
import methods
import numpy as np
import processes
import report
import trees
from jax.sharding import Mesh, NamedSharding, PartitionSpec

CLIPPED = ", clipped"
OPTIMIZER = "optimizer alone"
BARE, TRAIN_STEP, APPLY = (
    methods.BARE,
    "jaxscale.train_step",
    "jaxscale.apply_gradients",
)
ADAPTIVE = f"{TRAIN_STEP}, adaptive"
# Their columns in the results; what is clipped is compared with what is clipped.
OURS = [TRAIN_STEP, ADAPTIVE, TRAIN_STEP + CLIPPED]
OURS += [f"{TRAIN_STEP}, retries", f"{TRAIN_STEP}, spikes"]
OTHERS = [APPLY, "jaxscale optax wrapper", "jaxscale.scale_backward"]
OTHERS += ["Flax DynamicScale", "jmp", "optax.apply_if_finite"]
PLAIN = [BARE, BARE + CLIPPED]
TWO, BRIEF, MORE = [BARE, TRAIN_STEP], [BARE, *OURS[:2]], [*PLAIN, *OURS]
ALL = [*MORE, *OTHERS]
STEPS = [name for name in ALL if name.removesuffix(CLIPPED) in methods.FROM_GRADIENTS]


class Row(NamedTuple):
    """Programs that are compared: of one model, for the same devices."""

    target: str
    shape: str  # how the devices are wired
    layout: str
    # of the parameters; with the optimizer alone, of the gradients
    dtype: str = "float32"
    width: int = 2048
    names: list[str] = TWO
    slices: int = 1

    @property
    def devices(self):
        return self.slices * math.prod(map(int, self.shape.split("x")))


ROWS = [
    Row("H100", "1", OPTIMIZER, names=[*STEPS, ADAPTIVE + CLIPPED]),
    Row("H100", "1", OPTIMIZER, "float16", names=BRIEF),
    Row("H100", "1", "one device", names=ALL),
    Row("TPU v5e", "1x1", OPTIMIZER, names=[*BRIEF, APPLY, OTHERS[-1]]),
    Row("TPU v5e", "16x16", "FSDP and tensor parallel", names=ALL),
    Row("TPU v5e", "2x2", "FSDP", width=1024, names=MORE),
    Row("TPU v5e", "1x1", "one device", names=MORE),
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
    # The machine that traces also has that many: several are a reason to read gradients in another
    # way.
    jax.config.update("jax_num_cpu_devices", row.devices)
    jax.config.update("jax_enable_compilation_cache", False)
    devices = targets.devices(row.target, row.shape, row.slices)[: row.devices]
    clip, name = name.endswith(CLIPPED), name.removesuffix(CLIPPED)
    if row.layout == OPTIMIZER:
        there = NamedSharding(Mesh(np.array(devices), ("data",)), PartitionSpec())
        shapes = trees.SIZES["gpu"]
        params = trees.avals(shapes, "float32", there)
        batch = trees.avals(shapes, row.dtype, there)
        method = methods.make(name, clip)
    else:
        half = "float16" if row.target == "H100" else "bfloat16"
        loss_fn, params, batch = layouts.make(
            row.layout, devices, row.width, row.dtype, half, row.slices
        )
        method = methods.make(name, clip, loss_fn)
    carry = layouts.place(jax.eval_shape(method.init, params), params)
    traced = jax.jit(method.step, donate_argnums=0).trace(carry, batch)
    start = time.process_time()
    compiled = traced.lower().compile()
    seconds = time.process_time() - start
    parameters = 0  # of one device
    for leaf in jax.tree.leaves(params):
        parameters += math.prod(leaf.sharding.shard_shape(leaf.shape))
    report = hlo.program(compiled, parameters)
    report["stable"] = _is_stable(traced, compiled, carry)
    report["compile_s"] = seconds
    return report, None


def _is_stable(traced, compiled, carry):
    """Returns whether the next step takes what this one returns, and nothing is compiled anew."""
    before = jax.tree.leaves(carry)
    # The loss comes last, and belongs to no leaf of the carry.
    outputs = zip(
        traced.jaxpr.out_avals, jax.tree.leaves(compiled.output_shardings), strict=True
    )
    kept = list(outputs)[: len(before)]
    for old, (aval, sharding) in zip(before, kept, strict=True):
        if (old.shape, old.dtype) != (aval.shape, aval.dtype):
            return False
        if old.weak_type != aval.weak_type:
            return False
        if not old.sharding.is_equivalent_to(sharding, old.ndim):
            return False
    return True


def title(row):
    """Returns what a row of the results is about, in words."""
    width = f", width {row['width']}" if row["layout"] != OPTIMIZER else ""
    return f"{row['devices']} x {row['target']}, {row['layout']}, {row['dtype']}{width}"


COLUMNS = {
    "bytes/p": lambda each: f"{each['bytes_per_parameter']:.2f}",
    "temp/p": lambda each: f"{each['temporary_bytes_per_parameter']:.2f}",
    "kernels": lambda each: str(each["kernels"]),
    "host": lambda each: str(each["host"]),
    "64-bit": lambda each: str(each["64-bit"]),
    "stable": lambda each: str(each["stable"]),
    "compile s": lambda each: f"{each['compile_s']:.1f}",
    "collectives": lambda each: ", ".join(
        f"{sum(sizes.values())} {kind}" for kind, sizes in each["collectives"].items()
    ),
}


def main():
    parser = report.parser(__doc__, limit=600)
    add = parser.add_argument
    add("--targets", nargs="+", default=[row.target for row in ROWS])
    places = [OPTIMIZER, *layouts.LAYOUTS]
    add("--layouts", nargs="+", choices=places, default=places, metavar="LAYOUT")
    add(
        "--dtypes",
        nargs="+",
        choices=trees.DTYPES,
        default=trees.DTYPES,
        help="of parameters",
    )
    add("--only", nargs="+", choices=[*ALL, ADAPTIVE + CLIPPED], metavar="METHOD")
    options = parser.parse_args()
    console, result = report.begin()
    for row in ROWS:
        chosen = row.target in options.targets and row.layout in options.layouts
        if not chosen or row.dtype not in options.dtypes:
            continue
        figures = row._asdict()
        del figures["names"]
        figures |= {"devices": row.devices, "methods": {}}
        figures |= processes.call(find_devices, row)
        result["rows"].append(figures)
        if "error" in figures:
            console.print(figures["error"])
        else:
            names = [name for name in row.names if name in (options.only or row.names)]
            with console.status("") as status:
                for name in names:
                    status.update(f"{title(figures)}: {name}")
                    figures["methods"][name] = processes.call(
                        compile_step, row, name, limit=options.limit
                    )
            console.print(report.table(title(figures), COLUMNS, figures["methods"]))
        report.write(options.json, result)


if __name__ == "__main__":
    main()
