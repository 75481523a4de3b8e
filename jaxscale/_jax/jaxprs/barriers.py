"""A barrier that stands on a CPU, and round some arrays on a GPU.

XLA for accelerators decides by itself what to compute again, and a barrier only keeps it from
fusing, but for one case: XLA for GPUs rather keeps in float32 what it has computed from an array in
half precision, which is kept anyway, than compute it twice. XLA for TPUs moves more with a barrier
there, too. XLA for CPUs merges whatever is computed twice, unless a barrier stands between.
`jax.checkpoint(prevent_cse=True)` and `jax.lax.optimization_barrier` have no choice of platform. A
`jax.lax.platform_dependent` has one, but is a branch with all its residuals.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from ..jaxpr_types import Arrays, BatchDims, Flags, Tangents


def barrier(*arrays: jax.Array, on_gpu: Sequence[bool] = ()) -> list[Any]:
    """Returns arrays as they are. On a CPU, XLA computes all of them before it uses one.

    It also does not take one for an array that it has already. Nor does XLA for GPUs, of the arrays
    that are flagged in `on_gpu`. The barrier of a derivative is that of cotangents: what is
    differentiated forward passes.
    """
    return _BARRIER.bind(*arrays, on_gpu=tuple(on_gpu))


def _return(*arrays: jax.Array, on_gpu: Flags) -> list[Any]:
    return list(arrays)


def _block(*arrays: jax.Array, on_gpu: Flags) -> list[Any]:
    return list(jax.lax.optimization_barrier(arrays))


def _block_some(*arrays: jax.Array, on_gpu: Flags) -> list[Any]:
    results = []
    for array, is_blocked in itertools.zip_longest(arrays, on_gpu):
        results.append(jax.lax.optimization_barrier(array) if is_blocked else array)
    return results


def _jvp(
    arrays: Arrays,
    tangents: Tangents,
    *,
    on_gpu: Flags,
) -> Any:
    return _BARRIER.bind(*arrays, on_gpu=on_gpu), list(tangents)


def _transpose(cotangents: Tangents, *arrays: jax.Array, on_gpu: Flags) -> list[Any]:
    filled = map(ad.instantiate_zeros, cotangents)
    return _BARRIER.bind(*filled, on_gpu=on_gpu)


def _batch(arrays: Arrays, dims: BatchDims, *, on_gpu: Flags) -> Any:
    return _BARRIER.bind(*arrays, on_gpu=on_gpu), dims


_BARRIER = Primitive("jaxscale_barrier")
_BARRIER.multiple_results = True
_BARRIER.def_impl(_return)
_BARRIER.def_abstract_eval(_return)
ad.primitive_jvps[_BARRIER] = _jvp
ad.primitive_transposes[_BARRIER] = _transpose
batching.primitive_batchers[_BARRIER] = _batch
mlir.register_lowering(_BARRIER, mlir.lower_fun(_return, multiple_results=True))
for _platform in ("cuda", "rocm"):
    mlir.register_lowering(
        _BARRIER,
        mlir.lower_fun(_block_some, multiple_results=True),
        platform=_platform,
    )
mlir.register_lowering(
    _BARRIER, mlir.lower_fun(_block, multiple_results=True), platform="cpu"
)
