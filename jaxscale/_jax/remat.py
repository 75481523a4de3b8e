"""`jax.checkpoint`: programs that the backward pass computes again."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, jaxpr_as_fun
from jax.interpreters import partial_eval

from . import hijax
from .binding import bind
from .forms import reads_form
from .hijax import OBJECT
from .inlining import inlined
from .inner_programs import ClosedJaxpr, closed, without_constants
from .once import differentiated_once


@reads_form
def with_rematted(
    eqn: JaxprEqn, program: Jaxpr, arrays_per_input: Sequence[int] | None = None
) -> dict[str, Any]:
    """Returns the parameters of a `jax.checkpoint`, with `program` in the place of its own.

    `arrays_per_input` says how many arrays `program` takes for each input of the equation, after
    any constants of its own. Without it nothing is known of what the program takes.
    """
    remat_object = eqn.params.get("_prim")
    options = eqn.params if remat_object is None else remat_object.params
    prevent_cse = options["prevent_cse"]
    if isinstance(prevent_cse, bool):
        new_prevent_cse = prevent_cse
    elif not arrays_per_input:
        new_prevent_cse = any(prevent_cse)
    else:  # since JAX 0.12 one for each input
        of_arrays = repeat_each(prevent_cse, arrays_per_input)
        number_of_constants = len(program.invars) - len(of_arrays)
        new_prevent_cse = (False,) * number_of_constants + of_arrays
    options = options | {"jaxpr": program, "prevent_cse": new_prevent_cse}
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
    # JAX's new form cannot be transposed, and reverse mode transposes what is made in such a rule.
    if eqn.primitive.name == OBJECT and hijax.in_forward_rule.get():
        return _recomputed_transposed(program, prevent_cse)
    params = with_rematted(eqn, jaxpr)
    return differentiated_once(lambda *args: bind(eqn, [*consts, *args], params))


def _recomputed_transposed(
    program: ClosedJaxpr, prevent_cse: bool
) -> Callable[..., list[Any]]:
    """Returns a function that runs a program, which the transposed program computes again.

    Reverse mode transposes the derivative part of a forward rule as it stands, and JAX's new
    `jax.checkpoint` has no rule for that. A call of a `custom_jvp` function has one: it computes
    what is not linear in the function again, and transposes the rest. Until then the call is one
    equation, of which only the arguments are kept.

    An equation is linear as a whole if one of its inputs is. So a jitted function, which may
    compute values and tangents, is inlined, and outputs that read other inputs are another call.
    """
    parts = [_recomputed_call(part, prevent_cse) for part in _split_by_inputs(program)]

    def run(*args: Any) -> list[Any]:
        outputs: dict[int, Any] = {}
        for part in parts:
            results = part.fun(*(args[index] for index in part.inputs))
            outputs |= zip(part.outputs, results, strict=True)
        return [outputs[index] for index in sorted(outputs)]

    return run


class _Part(NamedTuple):
    """Some outputs of a program, as a function of the inputs that they read.

    Attributes:
      fun: the function, or the program that it runs.
      inputs: the numbers of the inputs.
      outputs: the numbers of the outputs.
    """

    fun: Any
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


def _split_by_inputs(program: ClosedJaxpr) -> list[_Part]:
    """Returns a program in parts, whose outputs all read the same inputs."""
    jaxpr, consts = without_constants(inlined(program))
    count = len(consts)
    outputs_by_inputs: dict[tuple[int, ...], list[int]] = {}
    for index in range(len(jaxpr.outvars)):
        inputs = _keep_outputs(jaxpr, [index]).inputs
        outputs_by_inputs.setdefault(inputs, []).append(index)
    parts = []
    for inputs, outputs in outputs_by_inputs.items():
        kept = closed(_keep_outputs(jaxpr, outputs).fun)
        constants = [consts[index] for index in inputs if index < count]
        fun = functools.partial(jaxpr_as_fun(kept), *constants)
        own_inputs = tuple(index - count for index in inputs if index >= count)
        parts.append(_Part(fun, own_inputs, tuple(outputs)))
    return parts


def _keep_outputs(jaxpr: Jaxpr, outputs: Sequence[int]) -> _Part:
    """Returns what computes some outputs of a program, and nothing else."""
    is_kept = [index in outputs for index in range(len(jaxpr.outvars))]
    kept, is_read = partial_eval.dce_jaxpr(jaxpr, is_kept)
    inputs = tuple(index for index, is_used in enumerate(is_read) if is_used)
    return _Part(kept, inputs, tuple(outputs))


def _recomputed_call(part: _Part, prevent_cse: bool) -> _Part:
    def run(*args: Any) -> list[Any]:
        if prevent_cse:
            # Each argument has its own barrier. Reverse mode would take all outputs of a shared one
            # for linear, as some of its inputs are, and could compute none of them again.
            args = tuple(map(jax.lax.optimization_barrier, args))
        return list(part.fun(*args))

    recomputed = jax.custom_jvp(run)
    recomputed.defjvp(functools.partial(jax.jvp, run))
    return part._replace(fun=recomputed)


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

    JAX's own objects lose it there, and put a barrier around their arguments and cotangents. That
    costs memory: XLA then stores a cotangent that it would not have stored, such as a number that
    was broadcast.
    """

    class RematWithoutBarrier(remat_class):
        def remat(self, trace: Any, *args: Any) -> Any:
            # JAX asks for the outputs, for what to keep, and for what the backward pass runs.
            outputs, residuals, run_again = super().remat(trace, *args)
            without_barrier = functools.partial(_run_without_barrier, run_again)
            return outputs, residuals, without_barrier

        def batch(self, axis_data: Any, args: Any, dims: Any) -> Any:
            batch = super().batch
            # `batch` also returns the dims, which are Python values. They cannot come out of a
            # traced function, so they are put in a list.
            out_dims = []

            def batched(*args: Any) -> Any:
                outputs, dims_of_outputs = batch(axis_data, args, dims)
                out_dims[:] = dims_of_outputs
                return outputs

            outputs = _run_without_barrier(batched, *args)
            return outputs, out_dims

    return RematWithoutBarrier


def _run_without_barrier(fun: Callable[..., Any], *args: Any) -> Any:
    """Runs a function that makes one `jax.checkpoint` object, but with one without a barrier."""
    program, types = jax.make_jaxpr(fun, return_shape=True)(*args)
    if [eqn.primitive.name for eqn in program.eqns] != [OBJECT]:
        # Another version of JAX. What it makes is right, and only stores more.
        return fun(*args)
    eqn = program.eqns[0]
    remat_object = eqn.params["_prim"]
    options = remat_object.params | {"prevent_cse": False}
    without_barrier = _class_without_barrier(type(remat_object))(**options)
    inputs = program.jaxpr.invars
    leaves = jax.tree.leaves(args)
    values: dict[Any, Any] = dict(zip(inputs, leaves, strict=True))
    args_of_eqn = [values[var] for var in eqn.invars]
    outputs = bind(eqn, args_of_eqn, {"_prim": without_barrier})
    values |= dict(zip(eqn.outvars, outputs, strict=True))
    results = [values[var] for var in program.jaxpr.outvars]
    return jax.tree.unflatten(jax.tree.structure(types), results)
