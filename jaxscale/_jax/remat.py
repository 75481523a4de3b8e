"""`jax.checkpoint`: programs that the backward pass computes again."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, jaxpr_as_fun

from . import hijax
from .binding import bind
from .forms import reads_form
from .hijax import OBJECT
from .inner_programs import ClosedJaxpr, without_constants
from .once import differentiated_once


@reads_form
def with_rematted(
    eqn: JaxprEqn, program: Jaxpr, numbers: Sequence[int] | None = None
) -> dict[str, Any]:
    """Returns the parameters of a `jax.checkpoint` of another program.

    `numbers` says how many arrays that program takes for each input of the equation, after any
    constants of its own. Without it nothing is known of what the program takes.
    """
    remat_object = eqn.params.get("_prim")
    options = eqn.params if remat_object is None else remat_object.params
    prevent_cse = options["prevent_cse"]
    if isinstance(prevent_cse, bool):
        of_program = prevent_cse
    elif not numbers:
        of_program = any(prevent_cse)
    else:  # since JAX 0.12 one for each input
        of_arrays = repeat_each(prevent_cse, numbers)
        number_of_constants = len(program.invars) - len(of_arrays)
        of_program = (False,) * number_of_constants + of_arrays
    options = options | {"jaxpr": program, "prevent_cse": of_program}
    if remat_object is None:
        return options
    return eqn.params | {"_prim": type(remat_object)(**options)}


def repeat_each(entries: Sequence[Any], numbers: Sequence[int]) -> tuple[Any, ...]:
    """Returns each entry as often as its number says."""
    repeated = []
    for entry, number in zip(entries, numbers, strict=True):
        repeated += [entry] * number
    return tuple(repeated)


def rematerialized(
    program: ClosedJaxpr, *, prevent_cse: bool
) -> Callable[..., list[Any]]:
    """Returns a function that runs a program, which the backward pass computes again.

    With `prevent_cse` a barrier keeps XLA from taking what the forward pass computed.
    """
    eqn = _remat(prevent_cse)
    jaxpr, consts = without_constants(program)
    if eqn.primitive.name == OBJECT and hijax.in_forward_rule.get():
        return _recomputed_transposed(program, prevent_cse)
    params = with_rematted(eqn, jaxpr)
    return differentiated_once(lambda *args: bind(eqn, [*consts, *args], params))


def _recomputed_transposed(
    program: ClosedJaxpr, prevent_cse: bool
) -> Callable[..., list[Any]]:
    """Returns a function that runs a program, which the transposed program computes again.

    JAX's new `jax.checkpoint` cannot be transposed where it stands. A `custom_jvp` function can,
    and all that is kept for that are its arguments.
    """

    def run(*args: Any) -> list[Any]:
        if prevent_cse:
            # One barrier each: the outputs of a common one would all depend on what is transposed.
            args = tuple(map(jax.lax.optimization_barrier, args))
        return list(jaxpr_as_fun(program)(*args))

    recomputed = jax.custom_jvp(run)
    recomputed.defjvp(functools.partial(jax.jvp, run))
    return recomputed


@hijax.remember_by_form
def _remat(prevent_cse: bool) -> JaxprEqn:
    """Returns an equation of `jax.checkpoint`, whose program is to be replaced."""
    # Its primitive and parameters come from JAX itself, as both have changed.
    negate = jax.checkpoint(jnp.negative, prevent_cse=prevent_cse)
    eqn = jax.make_jaxpr(negate)(0.0).eqns[0]
    if prevent_cse or eqn.primitive.name != OBJECT:
        return eqn
    remat_object = eqn.params["_prim"]
    without_barrier = _class_without_barrier(type(remat_object))
    return eqn.replace(params={"_prim": without_barrier(**remat_object.params)})


@functools.cache
def _class_without_barrier(remat_class: Any) -> Any:
    """Returns a class of objects that keep `prevent_cse=False` inside of a `jax.checkpoint`.

    JAX's own forget it there. A barrier around their arguments and cotangents is the price: XLA
    then stores a cotangent that it would not have stored, such as a number that was broadcast.
    """

    class RematWithoutBarrier(remat_class):
        def remat(self, trace: Any, *args: Any) -> Any:
            outputs, residuals, run_again = super().remat(trace, *args)
            without_barrier = functools.partial(_run_without_barrier, run_again)
            return outputs, residuals, without_barrier

        def batch(self, axis_data: Any, args: Any, dims: Any) -> Any:
            batch = super().batch
            out_dims = []

            def batched(*args: Any) -> Any:
                outputs, dims_of_outputs = batch(axis_data, args, dims)
                out_dims.extend(dims_of_outputs)
                return outputs

            outputs = _run_without_barrier(batched, *args)
            return outputs, out_dims

    return RematWithoutBarrier


def _run_without_barrier(fun: Callable[..., Any], *args: Any) -> Any:
    """Runs a function that makes one `jax.checkpoint`, and makes one without a barrier of it."""
    program, types = jax.make_jaxpr(fun, return_shape=True)(*args)
    if [eqn.primitive.name for eqn in program.eqns] != [OBJECT]:
        # Another version of JAX. What it makes is right, and only stores more.
        return fun(*args)
    eqn = program.eqns[0]
    remat_object = eqn.params["_prim"]
    options = remat_object.params | {"prevent_cse": False}
    without_barrier = _class_without_barrier(type(remat_object))(**options)
    inputs = program.jaxpr.invars
    values: dict[Any, Any] = dict(zip(inputs, jax.tree.leaves(args), strict=True))
    args_of_eqn = [values[var] for var in eqn.invars]
    outputs = bind(eqn, args_of_eqn, {"_prim": without_barrier})
    values |= dict(zip(eqn.outvars, outputs, strict=True))
    leaves = [values[var] for var in program.jaxpr.outvars]
    return jax.tree.unflatten(jax.tree.structure(types), leaves)
