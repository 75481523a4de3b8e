"""Functions with a backward rule that each derivative keeps for itself.

`jax.custom_vjp` keeps the tree of its residuals beside the equation. A jaxpr that is called many
times, such as that of a `jax.jit`, has one such equation for all calls. If the residuals depend on
which inputs are perturbed, the last call that was differentiated decides for all of them.

Here a primitive of our own runs the jaxpr. Its derivative runs the forward pass, and binds a
linear primitive from tangents to tangents, which exists to be transposed. So the residuals and
their tree belong to the equation of one derivative.
"""

import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive, jaxpr_as_fun, unmapped_aval
from jax.interpreters import ad, batching, mlir

from ..dtypes import holds_inexact
from ..jaxpr_types import (
    AbstractValue,
    ArrayLike,
    Arrays,
    BatchAxis,
    BatchDims,
    Flags,
    Tangents,
)
from ..pruned_jaxprs import ClosedJaxpr, spread
from .batching import over_batch, set_batching
from .derivatives import tangent_type
from .equation_forms import KEPT_RULE
from .program_primitives import program_primitive

# Takes the cotangents of all outputs, and returns one for each input: `None` for one without.
_Pull = Callable[[Sequence[Any]], Sequence[Any]]


def keep_rule(
    program: ClosedJaxpr,
    run_forward: Callable[..., tuple[Sequence[Any], _Pull]],
    no_forward_mode: str,
    *args: ArrayLike,
) -> list[Any]:
    """Runs a jaxpr that has a backward rule, and no rule for forward mode.

    Args:
      program: the jaxpr. It holds no tracers.
      run_forward: the same for reverse mode: `run_forward(perturbed, *args)` also returns the
        function that pulls cotangents back, as a tree of what it keeps (`jax.tree_util.Partial`).
        Cotangents that are known to be zero are `SymbolicZero`.
      no_forward_mode: what the error says to who differentiates the jaxpr in forward mode.
      args: the arguments.
    """

    def derive(perturbed: Flags, args: Sequence[Any], tangents: Sequence[Any]) -> Any:
        outputs, pull = run_forward(perturbed, *args)
        kept, tree = jax.tree.flatten(pull)
        types = [tangent_type(jax.typeof(output)) for output in outputs]
        have_tangents = list(map(holds_inexact, outputs))

        def pull_kept(kept: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
            of_outputs = spread(have_tangents, cotangents, map(SymbolicZero, types))
            pulled = jax.tree.unflatten(tree, kept)(of_outputs)
            return list(itertools.compress(pulled, perturbed))

        derivatives = _PULL.bind(
            *kept,
            *tangents,
            num_kept=len(kept),
            pull=pull_kept,
            types=tuple(itertools.compress(types, have_tangents)),
            no_forward_mode=no_forward_mode,
        )
        return list(outputs), derivatives

    outputs: list[Any] = _KEPT_RULE.bind(*args, call_jaxpr=program, derive=derive)
    return outputs


def _derive(
    args: Arrays,
    tangents: Tangents,
    *,
    call_jaxpr: ClosedJaxpr,
    derive: Callable[..., Any],
) -> Any:
    perturbed = tuple(
        holds_inexact(arg) and type(tangent) is not ad.Zero
        for arg, tangent in zip(args, tangents, strict=True)
    )
    varied = list(itertools.compress(tangents, perturbed))
    outputs, derivatives = derive(perturbed, list(args), varied)
    zeros = map(ad.Zero, map(tangent_type, call_jaxpr.out_avals))
    return outputs, spread(map(holds_inexact, outputs), derivatives, zeros)


def _batch_rule(
    axis: BatchAxis,
    args: Arrays,
    dims: BatchDims,
    *,
    call_jaxpr: ClosedJaxpr,
    derive: Callable[..., Any],
) -> Any:
    dims = list(dims)
    run = over_batch(jaxpr_as_fun(call_jaxpr), axis, tuple(dims))
    batched = jax.make_jaxpr(run)(*map(jax.typeof, args))

    def derive_batch(perturbed: Flags, args: Arrays, tangents: Tangents) -> Any:
        varied = list(itertools.compress(dims, perturbed))
        derive_each = over_batch(
            functools.partial(derive, perturbed), axis, (dims, varied)
        )
        return derive_each(args, tangents)

    outputs = _KEPT_RULE.bind(*args, call_jaxpr=batched, derive=derive_batch)
    return outputs, [0] * len(outputs)


def _refuse(*_: object, no_forward_mode: str, **__: object) -> Any:
    raise TypeError(no_forward_mode)


def _types_of(*_: object, types: Sequence[Any], **__: object) -> list[Any]:
    return list(types)


def _jvp(
    primals: Arrays,
    tangents: Tangents,
    *,
    num_kept: int,
    **params: Any,
) -> Any:
    if any(type(tangent) is not ad.Zero for tangent in tangents[:num_kept]):
        _refuse(**params)
    kept = primals[:num_kept]
    varied = map(ad.instantiate_zeros, tangents[num_kept:])
    made = _PULL.bind(*primals, num_kept=num_kept, **params)
    return made, _PULL.bind(*kept, *varied, num_kept=num_kept, **params)


def _transpose(
    cotangents: Tangents,
    *args: jax.Array,
    num_kept: int,
    pull: Callable[..., list[Any]],
    types: Sequence[AbstractValue],
    **_: object,
) -> list[Any]:
    given = []
    for cotangent, aval in zip(cotangents, types, strict=True):
        is_zero = type(cotangent) is ad.Zero
        given.append(SymbolicZero(aval) if is_zero else cotangent)
    return [None] * num_kept + pull(args[:num_kept], given)


def _batch(
    axis: BatchAxis,
    args: Arrays,
    dims: BatchDims,
    *,
    num_kept: int,
    pull: Callable[..., list[Any]],
    types: Sequence[AbstractValue],
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


_KEPT_RULE = program_primitive(KEPT_RULE)
ad.primitive_jvps[_KEPT_RULE] = _derive
set_batching(_KEPT_RULE, _batch_rule)

_PULL: Any = Primitive("jaxscale_pull")
_PULL.multiple_results = True
_PULL.def_impl(_refuse)
_PULL.def_abstract_eval(_types_of)
ad.primitive_jvps[_PULL] = _jvp
ad.primitive_transposes[_PULL] = _transpose
set_batching(_PULL, _batch)
mlir.register_lowering(_PULL, _refuse)
