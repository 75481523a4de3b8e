"""Functions with a backward rule that each derivative keeps for itself.

`jax.custom_vjp` keeps the tree of its residuals beside the equation. A program that is called many
times, such as that of a `jax.jit`, has one such equation for all calls. If the residuals depend on
which inputs are perturbed, the last call that was differentiated decides for all of them.

Here the rule is that of a `jax.custom_jvp`. It runs the forward pass, and binds a linear primitive
from tangents to tangents, which exists to be transposed. So the residuals and their tree belong to
the equation of one derivative.
"""

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive, unmapped_aval
from jax.interpreters import ad, batching, mlir

from . import hijax
from .derivatives import tangent_type
from .dtypes import holds_inexact
from .inner_programs import spread
from .mesh_axes import over_batch, set_batching

_Flags = tuple[bool, ...]
# Takes the cotangents of all outputs, and returns one for each input: `None` for one without.
_Pull = Callable[[Sequence[Any]], Sequence[Any]]


def keep_rule(
    run: Callable[..., tuple[Any, ...]],
    run_forward: Callable[..., tuple[Sequence[Any], _Pull]],
    no_forward_mode: str,
    *args: Any,
) -> tuple[Any, ...]:
    """Calls a function of arrays that has a backward rule, and no rule for forward mode.

    Args:
      run: the function. It returns a tuple of arrays.
      run_forward: the same for reverse mode: `run_forward(perturbed, *args)` also returns the
        function that pulls cotangents back, as a tree of what it keeps (`jax.tree_util.Partial`).
        Cotangents that are known to be zero are `SymbolicZero`.
      no_forward_mode: what the error says to who differentiates the function in forward mode.
      args: the arguments.
    """

    @jax.custom_jvp
    def fun(*args: Any) -> tuple[Any, ...]:
        return run(*args)

    def derive(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
        perturbed = tuple(
            holds_inexact(primal) and not isinstance(tangent, SymbolicZero)
            for primal, tangent in zip(primals, tangents, strict=True)
        )
        outputs, pull = run_forward(perturbed, *primals)
        kept, tree = jax.tree.flatten(pull)
        types = [tangent_type(jax.typeof(output)) for output in outputs]
        have_tangents = list(map(holds_inexact, outputs))

        def pull_kept(kept: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
            of_outputs = spread(have_tangents, cotangents, map(SymbolicZero, types))
            pulled = jax.tree.unflatten(tree, kept)(of_outputs)
            return list(itertools.compress(pulled, perturbed))

        made = _PULL.bind(
            *kept,
            *itertools.compress(tangents, perturbed),
            num_kept=len(kept),
            pull=pull_kept,
            types=tuple(itertools.compress(types, have_tangents)),
            no_forward_mode=no_forward_mode,
        )
        derivatives = spread(have_tangents, made, map(SymbolicZero, types))
        return tuple(outputs), tuple(derivatives)

    derive.__name__ = hijax.KEPT_RULE
    fun.defjvp(derive, symbolic_zeros=True)
    return fun(*args)


def _refuse(*_: Any, no_forward_mode: str, **__: Any) -> Any:
    raise TypeError(no_forward_mode)


def _types_of(*_: Any, types: Sequence[Any], **__: Any) -> list[Any]:
    return list(types)


def _jvp(primals: Any, tangents: Any, *, num_kept: int, **params: Any) -> Any:
    if any(type(tangent) is not ad.Zero for tangent in tangents[:num_kept]):
        _refuse(**params)
    kept = primals[:num_kept]
    varied = map(ad.instantiate_zeros, tangents[num_kept:])
    made = _PULL.bind(*primals, num_kept=num_kept, **params)
    return made, _PULL.bind(*kept, *varied, num_kept=num_kept, **params)


def _transpose(
    cotangents: Any, *args: Any, num_kept: int, pull: Any, types: Any, **_: Any
) -> list[Any]:
    given = []
    for cotangent, aval in zip(cotangents, types, strict=True):
        is_zero = type(cotangent) is ad.Zero
        given.append(SymbolicZero(aval) if is_zero else cotangent)
    return [None] * num_kept + pull(args[:num_kept], given)


def _batch(
    axis: Any,
    args: Any,
    dims: Any,
    *,
    num_kept: int,
    pull: Any,
    types: Any,
    **params: Any,
) -> Any:
    tangents = []
    for tangent, dim in zip(args[num_kept:], dims[num_kept:], strict=True):
        tangents.append(batching.bdim_at_front(tangent, dim, axis.size))

    def pull_batch(kept: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        are_zeros = [isinstance(cotangent, SymbolicZero) for cotangent in cotangents]

        def pull_one(kept: Sequence[Any], others: Sequence[Any]) -> list[Any]:
            nonzero = iter(others)
            given = []
            for is_zero, aval in zip(are_zeros, types, strict=True):
                given.append(SymbolicZero(aval) if is_zero else next(nonzero))
            return pull(kept, given)

        others = list(itertools.compress(cotangents, map(operator.not_, are_zeros)))
        pull_each = over_batch(pull_one, axis, (list(dims[:num_kept]), 0))
        return pull_each(list(kept), others)

    made = _PULL.bind(
        *args[:num_kept],
        *tangents,
        num_kept=num_kept,
        pull=pull_batch,
        types=tuple(unmapped_aval(axis.size, 0, aval) for aval in types),
        **params,
    )
    return made, [0] * len(made)


_PULL: Any = Primitive("jaxscale_pull")
_PULL.multiple_results = True
_PULL.def_impl(_refuse)
_PULL.def_abstract_eval(_types_of)
ad.primitive_jvps[_PULL] = _jvp
ad.primitive_transposes[_PULL] = _transpose
set_batching(_PULL, _batch)
mlir.register_lowering(_PULL, _refuse)
