"""Backward passes that are repeated at a lower scale, inside of one training step.

So a batch is lost only if no scale helps. The model is in the program once: its pass is the body of
a loop that runs at least once, and exactly once if nothing overflows.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer

from .._gradients.scaled import Scaled
from .._gradients.verdict import Verdict
from .._jax import collective_axes, varying
from .._policies.base import LossScale, adjust_scale
from .._trees.flat import Flat
from .._trees.tree import blank, tree_where
from .counters import Retries

# How often a policy is told of one overflow. A policy with hysteresis lowers its scale only after
# several; one that tolerates more than this is left alone, and the step is skipped.
_MAX_BACKOFFS_PER_OVERFLOW = 100


class BackwardResult(NamedTuple):
    """What one forward and backward pass gave."""

    loss: Any  # f32[], `None` if it is not known
    state: Any  # what the loss function carries beside the parameters, if it does
    aux: Any
    grads: Scaled
    verdict: Verdict | None = None
    seen: Scaled | None = None  # the gradients before `on_grads` changed them, if it did
    retries: Retries | None = None  # if the pass may be repeated


def repeat_backward(
    call: str,
    policy: LossScale,
    backward: Callable[[Any], BackwardResult],
    scaling: Any,
    retries: int,
    *,
    traced: bool,
) -> BackwardResult:
    """Returns the last pass, with the scale state to go on with and the number of passes before.

    A pass is made again if its loss is finite, its gradients are not, and the policy lowers the
    scale. A bad loss says nothing about the scale. Neither does a batch that is bad at every scale
    that was tried: the scale state is then the first one, and otherwise the last.
    """

    def one_pass(scaling: Any, number: Any) -> tuple[BackwardResult, Any, jax.Array]:
        """Returns a pass, the scale state of the next one, and whether to make that."""
        made = backward(scaling)
        verdict: Any = made.verdict  # known for every optimizer whose scale moves
        overflow = verdict.loss_finite & ~verdict.grads_finite & (number < retries)
        lower = _lowered(policy, scaling, overflow, made, traced)
        return made, lower, overflow & _is_lower(lower, scaling)

    first, number = scaling, jnp.zeros((), jnp.int32)
    if not traced:
        made, lower, again = one_pass(scaling, number)
        while again:
            scaling, number = lower, number + 1
            made, lower, again = one_pass(scaling, number)
        return _with_retries(made, number, scaling, first)

    # Traced once, for its types and for the loop.
    flat = Flat(one_pass, (scaling, number), {}, "arrays_of_pass")
    arrays_of_pass = jax.jit(flat)
    types = jax.make_jaxpr(arrays_of_pass)(*flat.arrays).out_avals
    if apart := varying(types[-1]):
        axes = ", ".join(map(repr, sorted(apart)))
        raise ValueError(
            f"`{call}(retries={retries})`: the devices along {axes} may disagree on whether to "
            f"retry. Pass `axis_name={axes}` to `loss_scaled`."
        )
    # The last outputs are a scale state and a flag, as the inputs are a scale state and a number.
    carried = len(types) - len(flat.arrays)

    def body(carry: Any) -> Any:
        scaling, number, *_ = carry
        arrays = arrays_of_pass(*jax.tree.leaves((scaling, number)))
        _, lower, again = flat.restored(arrays)
        number += again.astype(jnp.int32)  # a bool is not promoted where promotion is strict
        return tree_where(again, lower, scaling), number, again, arrays[:carried]

    carry = scaling, number, jnp.array(True), [blank(aval) for aval in types[:carried]]
    scaling, number, again, arrays = jax.lax.while_loop(lambda carry: carry[2], body, carry)
    made, _, _ = flat.restored([*arrays, *jax.tree.leaves(scaling), again])
    return _with_retries(made, number, scaling, first)


def _with_retries(made: BackwardResult, number: Any, last: Any, first: Any) -> BackwardResult:
    verdict: Any = made.verdict
    return made._replace(retries=Retries(number, tree_where(verdict.grads_finite, last, first)))


def trace_once(
    backward: Callable[[Any], BackwardResult], scaling: Any
) -> tuple[Callable[[Any], BackwardResult], list[Any]]:
    """Returns a pass that is traced once, for the types of a scale state, and the axes it uses."""
    flat = Flat(backward, (scaling,), {}, "arrays_of_pass")
    arrays_of_pass = jax.jit(flat)
    axes = collective_axes(jax.make_jaxpr(arrays_of_pass)(*flat.arrays))
    return lambda scaling: flat.restored(arrays_of_pass(*jax.tree.leaves(scaling))), axes


def is_traced(*inputs: Any) -> bool:
    """Returns whether a step with these inputs is traced, so that their values are not known."""
    # Under `jit` even a sum of constants is traced; under `vmap` alone only what is mapped is.
    leaves = [jax.lax.add(1, 1), *jax.tree.leaves(inputs)]
    return any(isinstance(leaf, Tracer) for leaf in leaves)


def _lowered(
    policy: LossScale, scaling: Any, overflow: jax.Array, made: BackwardResult, traced: bool
) -> Any:
    """Returns a scale state after an overflow, with a lower scale if the policy ever lowers it."""
    verdict: Any = made.verdict

    def goes_on(carry: Any) -> jax.Array:
        state, moves, number = carry
        return overflow & moves & ~_is_lower(state, scaling) & (number < _MAX_BACKOFFS_PER_OVERFLOW)

    def back_off(carry: Any) -> Any:
        state, _, number = carry
        new = adjust_scale(policy, state, jnp.array(False), verdict.largest)
        pairs = zip(jax.tree.leaves(new), jax.tree.leaves(state), strict=True)
        # At its floor a scale stays, and so does everything else in its state.
        moves = functools.reduce(jnp.logical_or, (jnp.any(a != b) for a, b in pairs))
        return new, moves, number + 1

    carry = scaling, jnp.array(True), jnp.zeros((), jnp.int32)
    if traced:
        return jax.lax.while_loop(goes_on, back_off, carry)[0]
    while goes_on(carry):
        carry = back_off(carry)
    return carry[0]


def _is_lower(state: Any, than: Any) -> jax.Array:
    # So that a scale which is NaN, as a checkpoint of another scaler may have it, is higher.
    return ~(state.loss_scale >= than.loss_scale)
