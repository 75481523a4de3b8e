"""A barrier that stands on a CPU alone.

XLA for accelerators decides by itself what to compute again, and a barrier only keeps it from
fusing. XLA for CPUs merges whatever is computed twice, unless a barrier stands between.
`jax.checkpoint(prevent_cse=True)` and `jax.lax.optimization_barrier` have no choice of platform. A
`jax.lax.platform_dependent` has one, but is a branch with all its residuals.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


def barrier(*arrays: Any, everywhere: Sequence[bool] = ()) -> list[Any]:
    """Returns arrays as they are. On a CPU, XLA computes all of them before it uses one.

    It also does not take one for an array that it has already. Nor does XLA for accelerators, of
    the arrays that are flagged in `everywhere`. The barrier of a derivative is that of cotangents:
    what is differentiated forward passes.
    """
    return _BARRIER.bind(*arrays, everywhere=tuple(everywhere))


def _return(*arrays: Any, everywhere: Any) -> list[Any]:
    return list(arrays)


def _block(*arrays: Any, everywhere: Any) -> list[Any]:
    return list(jax.lax.optimization_barrier(arrays))


def _block_some(*arrays: Any, everywhere: Any) -> list[Any]:
    results = []
    for array, is_blocked in itertools.zip_longest(arrays, everywhere):
        results.append(jax.lax.optimization_barrier(array) if is_blocked else array)
    return results


def _jvp(arrays: Any, tangents: Any, *, everywhere: Any) -> Any:
    return _BARRIER.bind(*arrays, everywhere=everywhere), list(tangents)


def _transpose(cotangents: Any, *arrays: Any, everywhere: Any) -> list[Any]:
    filled = map(ad.instantiate_zeros, cotangents)
    return _BARRIER.bind(*filled, everywhere=everywhere)


def _batch(arrays: Any, dims: Any, *, everywhere: Any) -> Any:
    return _BARRIER.bind(*arrays, everywhere=everywhere), dims


_BARRIER = Primitive("jaxscale_barrier_on_cpu")
_BARRIER.multiple_results = True
_BARRIER.def_impl(_return)
_BARRIER.def_abstract_eval(_return)
ad.primitive_jvps[_BARRIER] = _jvp
ad.primitive_transposes[_BARRIER] = _transpose
batching.primitive_batchers[_BARRIER] = _batch
mlir.register_lowering(_BARRIER, mlir.lower_fun(_block_some, multiple_results=True))
mlir.register_lowering(
    _BARRIER, mlir.lower_fun(_block, multiple_results=True), platform="cpu"
)
