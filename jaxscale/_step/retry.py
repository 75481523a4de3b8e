"""Backward passes that are repeated at a lower scale, inside of one training step.

So a batch is lost only if no scale helps. The model is in the program once: its pass is the body of
a loop that runs at least once, and exactly once if nothing overflows.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer

from .._gradients.facts import Facts
from .._gradients.value_and_grad import BackwardPass, Retries
from .._jax import varying
from .._policies.base import LossScale, adjust_scale
from .._trees.flat_functions import Traced
from .._trees.leaves import blank
from .._trees.pytrees import PyTree, ScaleState
from .._trees.selection import where

# How often a policy is told of one overflow. A policy with hysteresis lowers its scale only after
# several; one that tolerates more than this is left alone, and the step is skipped.
_MAX_BACKOFFS_PER_OVERFLOW = 100


class _Attempt(NamedTuple):
    """A pass, and what is to come after it."""

    backward_pass: BackwardPass
    scaling: Any  # that of the next pass; that of this one, unless it overflowed
    again: jax.Array  # bool[], whether there is a next pass


class _Backoff(NamedTuple):
    """The progress of a policy that is told of one overflow."""

    scaling: Any  # the scale state by now
    number: jax.Array  # i32[], how often it was told


def repeat_backward(
    call: str,
    policy: LossScale,
    backward: Callable[[Any], BackwardPass],
    scaling: ScaleState,
    retries: int,
    *,
    traced: bool,
) -> BackwardPass:
    """Repeats a pass until its gradients are finite, and returns the last one with its `retries`.

    A pass is made again if its loss is finite, its gradients are not, and the policy lowers the
    scale. A bad loss says nothing about the scale. The step goes on with the scale state of the
    last pass. If that failed as well, the batch is bad at every scale, which says nothing either:
    then the step goes on with the scale state of the first.
    """

    def try_pass(scaling: ScaleState, number: jax.Array) -> _Attempt:
        backward_pass = backward(scaling)
        facts: Any = backward_pass.facts  # known for every optimizer whose scale moves
        overflow = facts.loss_finite & ~facts.grads_finite & (number < retries)
        next_scaling = _lower_scale(policy, scaling, overflow, facts, traced)
        again = overflow & _is_lower(next_scaling, scaling)
        return _Attempt(backward_pass, next_scaling, again)

    number = jnp.zeros((), jnp.int32)
    if traced:
        argument = f"{call}(retries={retries})"
        last, number = _repeat_in_program(argument, try_pass, scaling, number)
    else:
        last = try_pass(scaling, number)
        while last.again:
            number = number + 1
            last = try_pass(last.scaling, number)
    facts: Any = last.backward_pass.facts
    # If even the last pass failed, the scale was not to blame.
    kept = where(facts.grads_finite, last.scaling, scaling)
    return last.backward_pass._replace(retries=Retries(number, kept))


def _repeat_in_program(
    argument: str,
    try_pass: Callable[[Any, Any], _Attempt],
    scaling: ScaleState,
    number: jax.Array,
) -> tuple[_Attempt, jax.Array]:
    """Repeats a pass in a loop of the program that is traced: returns the last, and their number.

    The loop carries arrays alone. What else a pass returns, such as functions in `aux`, stays
    outside.
    """
    program = Traced(try_pass, scaling, number)
    *_, type_of_again = program.output_leaves
    axes = ", ".join(map(repr, sorted(varying(type_of_again))))
    if axes:
        raise ValueError(
            f"`{argument}`: the devices along {axes} may disagree on whether to retry. Pass "
            f"`axis_name={axes}` to `loss_scaled`."
        )

    def attempt_of(arrays: list[Any]) -> _Attempt:
        return program.restored(arrays)

    def goes_on(carry: PyTree) -> jax.Array:
        _, arrays = carry
        return attempt_of(arrays).again

    def make_pass(carry: PyTree) -> Any:
        number, arrays = carry
        arrays = program.call_flat(attempt_of(arrays).scaling, number)
        # Strict promotion adds no bool to an integer.
        repeated = attempt_of(arrays).again.astype(jnp.int32)
        return number + repeated, arrays

    # Before the first pass there is no result. The last arrays are a scale state and a flag.
    scales = jax.tree.leaves(scaling)
    types = program.jaxpr.out_avals
    no_result = map(blank, types[: -len(scales) - 1])
    before_first = [*no_result, *scales, jnp.array(True)]
    number, arrays = jax.lax.while_loop(goes_on, make_pass, (number, before_first))
    return attempt_of(arrays), number


def is_traced(*inputs: Any) -> bool:
    """True if a step with these inputs is traced, so that their values are not known."""
    # Under `jit` even a sum of constants is traced; under `vmap` alone only what is mapped is.
    leaves = [jax.lax.add(1, 1), *jax.tree.leaves(inputs)]
    return any(isinstance(leaf, Tracer) for leaf in leaves)


def _lower_scale(
    policy: LossScale,
    scaling: ScaleState,
    overflow: jax.Array,
    facts: Facts,
    traced: bool,
) -> Any:
    """Lowers the scale after an overflow, if the policy ever does; otherwise it stays."""

    def goes_on(now: _Backoff) -> jax.Array:
        may_help = overflow & ~_is_lower(now.scaling, scaling)
        return may_help & (now.number < _MAX_BACKOFFS_PER_OVERFLOW)

    def back_off(now: _Backoff) -> _Backoff:
        lower = adjust_scale(policy, now.scaling, jnp.array(False), facts.largest)
        return _Backoff(lower, now.number + 1)

    now = _Backoff(scaling, jnp.zeros((), jnp.int32))
    if traced:
        return jax.lax.while_loop(goes_on, back_off, now).scaling
    while goes_on(now):
        now = back_off(now)
    return now.scaling


def _is_lower(state: ScaleState, than: ScaleState) -> jax.Array:
    """True if a scale is lower than another. One that is NaN is higher than any number."""
    # A checkpoint of another scaler may have NaN, which the policy replaces.
    is_replaced = jnp.isnan(than.loss_scale) & ~jnp.isnan(state.loss_scale)
    return is_replaced | (state.loss_scale < than.loss_scale)
