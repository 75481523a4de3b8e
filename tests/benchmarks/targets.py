"""The machines that programs are compiled for, and their compilers, which need no such machine.

pip install libtpu "jax-cuda12-plugin[with-cuda]"
"""

import importlib.util
import os

# The TPU's compiler asks for the machine that it is on, before it is loaded, and no cloud answers.
os.environ.update(
    {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-4",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_WORKER_ID": "0",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # by several processes: no device is shared
    }
    | os.environ
)

import jax
from jax.experimental import topologies

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
# What brings the compiler for a platform: the module to look for, and what to install.
COMPILERS = {
    "tpu": ("libtpu", "libtpu"),
    "cuda": ("jax_plugins.xla_cuda12", '"jax-cuda12-plugin[with-cuda]"'),
}


class CannotCompile(Exception):
    """There is no compiler for a machine, and how to get it."""


def devices(kind, shape, slices=1):
    """Returns devices to compile for, none of which need be there.

    Args:
      kind: `H100`, a TPU as `TPU v5e`, or `CPU`, the one that this runs on.
      shape: how many, along each of the axes that they are wired along: `2x2`.
      slices: how many of these, joined by a network.

    Raises:
      CannotCompile: if the compiler is not installed, or does not know such devices.
    """
    if kind == "CPU":
        return jax.devices("cpu")
    platform = "cuda" if kind == "H100" else "tpu"
    module, package = COMPILERS[platform]
    if not _is_installed(module):
        raise CannotCompile(f"no compiler for {kind} is here: pip install {package}")
    if platform == "cuda":
        name, extra = kind, {"target_config": H100, "topology": f"{slices}x1x{shape}"}
    else:
        name = f"{kind.removeprefix('TPU ')}:{shape}"
        extra = {"num_slices": slices} if slices > 1 else {}
    try:
        return topologies.get_topology_desc(name, platform, **extra).devices
    except Exception as error:
        raise CannotCompile(
            f"the compiler has no devices {name} ({str(error).splitlines()[0]}); "
            f"a newer one may have: pip install --upgrade {package}"
        ) from error


def _is_installed(module):
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package that it is in
        return False
