"""What the programs for a GPU and a TPU hold, compiled on a machine that need have neither.

    pip install jax-cuda12-plugin[with-cuda] libtpu   # the compilers; no driver, no device
    python tests/benchmarks/programs.py [--json FILE] [--devices 1 8] [--only NAME ...]

Counts the kernels of one step of each method, the bytes that they move, and the all-reduces, for
one device and for several that share each leaf. Nothing is run. How it is counted: `hlo.py`.
"""

import argparse
import itertools
import json
import os
import pathlib

# The TPU's compiler asks for the machine it is to compile for, before it is loaded.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-8")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")

import hlo
import jax
import machine
import methods
import numpy as np
import processes
import trees
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.console import Console
from rich.table import Table

# What XLA has to know of an NVIDIA H100 SXM to compile for it.
H100 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 84929347584
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 7 }
runtime_version { major: 12 minor: 8 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
TARGETS = {
    "H100": {
        "platform": "cuda",
        "topology_name": "H100",
        "target_config": H100,
        "topology": "1x1x8",
    },
    "TPU v5e": {"platform": "tpu", "topology_name": "v5e:2x4"},
}


def compile_step(target, devices, name, shapes, dtype, clip):
    """Returns the report of a program, and nothing to run."""
    described = topologies.get_topology_desc(**TARGETS[target]).devices
    mesh = Mesh(np.array(described[:devices]), ("data",))

    def placed(aval):
        """A leaf's first axis that can be is divided among the devices."""
        axis = next((i for i, size in enumerate(aval.shape) if size % devices == 0), None)
        spec = PartitionSpec(*[None] * (axis or 0), "data") if axis is not None else PartitionSpec()
        sharding = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)

    method = methods.make(name, clip)
    carry = jax.eval_shape(method.init, trees.avals(shapes, "float32"))
    carry, grads = jax.tree.map(placed, (carry, trees.avals(shapes, dtype)))
    step = jax.jit(
        method.step,
        donate_argnums=0,
        out_shardings=jax.tree.map(lambda aval: aval.sharding, carry),
    )
    compiled = step.lower(carry, grads).compile()
    return hlo.program(compiled, trees.size(shapes) / devices), None


def table(row):
    clipped = "global norm clipped" if row["clipped"] else "unclipped"
    result = Table(
        title=f"{row['devices']} x {row['target']}: {row['tree']}, {row['leaves']} leaves, "
        f"{row['parameters'] / 1e6:.3g}M parameters, {row['gradients']} gradients, {clipped}",
        caption=f"limit: {row['limit_bytes_per_parameter']:g} bytes/parameter",
    )
    result.add_column("method", no_wrap=True)
    for heading in ["kernels", "/ bare", "bytes/p", "temp/p", "all-reduces"]:
        result.add_column(heading, justify="right")
    result.add_column("kinds")
    bare = row["methods"].get(methods.BARE, {}).get("kernels")
    for name, report in row["methods"].items():
        if "error" in report:
            result.add_row(name, *[""] * 5, report["error"])
            continue
        result.add_row(
            name,
            str(report["kernels"]),
            f"{report['kernels'] / bare:.2f}" if bare else "",
            f"{report['bytes_per_parameter']:.1f}",
            f"{report['temporary_bytes_per_parameter']:.1f}",
            str(report["all_reduces"]),
            ", ".join(f"{count} {kind}" for kind, count in report["kernels_by_kind"].items()),
        )
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    add("--devices", nargs="+", type=int, default=[1, 8])
    add("--size", choices=trees.TREES, default="gpu", help="of the trees")
    add("--trees", nargs="+", choices=trees.TREES["gpu"], default=["gpt2"])
    add("--gradients", nargs="+", choices=trees.DTYPES, default=["float32", "float16"])
    add("--clip", nargs="+", choices=trees.CLIPS, default=list(trees.CLIPS))
    add("--only", nargs="+", choices=methods.METHODS, metavar="METHOD")
    add("--limit", type=float, default=300, help="seconds to compile a program")
    add("--json", type=pathlib.Path, help="where to write the figures")
    options = parser.parse_args()
    console = Console(width=120)
    names = [name for name in methods.METHODS if name in (options.only or methods.METHODS)]
    result = {"machine": processes.call(machine.describe), "rows": []}
    console.print(machine.line(result["machine"]))
    axes = options.targets, options.devices, options.trees, options.gradients, options.clip
    with console.status("") as status:
        for target, devices, tree, dtype, clip in itertools.product(*axes):
            shapes = trees.TREES[options.size][tree]
            case = {"target": target, "devices": devices, "tree": tree, "leaves": len(shapes)}
            row = case | {
                "parameters": trees.size(shapes),
                "gradients": dtype,
                "clipped": trees.CLIPS[clip],
                "limit_bytes_per_parameter": trees.limit_bytes(shapes, dtype) / trees.size(shapes),
                "methods": {},
            }
            for name in names:
                status.update(f"{devices} x {target}, {dtype} gradients, {clip}: {name}")
                job = (compile_step, target, devices, name, shapes, dtype, trees.CLIPS[clip])
                row["methods"][name] = processes.call(*job, limit=options.limit)
            result["rows"].append(row)
            console.print(table(row))
            if options.json:
                options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
