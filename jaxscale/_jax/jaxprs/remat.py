"""`jax.checkpoint`: jaxprs that the backward pass computes again."""

from collections.abc import Sequence
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn

from .equation_forms import reads_form


@reads_form
def with_rematted(
    eqn: JaxprEqn, program: Jaxpr, arrays_per_input: Sequence[int] | None = None
) -> dict[str, Any]:
    """Returns the parameters of a `jax.checkpoint`, with `program` in the place of its own.

    `arrays_per_input` says how many arrays `program` takes for each input of the equation, after
    any constants of its own. Without it nothing is known of what the jaxpr takes.
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
