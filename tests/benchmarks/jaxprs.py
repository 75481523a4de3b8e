"""What a traced program holds: products in half precision, and what the backward pass keeps."""

import jax
import jax.numpy as jnp

PRODUCTS = {"dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general"}
HALF = {"float16", "bfloat16"}


def equations(jaxpr):
    """All equations of a jaxpr, with those of the jaxprs in their parameters; each once.

    So a loop counts as one turn, and all branches of a conditional count.
    """
    waiting = [getattr(jaxpr, "jaxpr", jaxpr)]
    while waiting:
        for eqn in waiting.pop().eqns:
            yield eqn
            # JAX's new form of `jax.checkpoint` and of custom rules holds them in an object.
            params = getattr(eqn.params.get("_prim"), "params", eqn.params)
            for value in params.values():
                for each in value if isinstance(value, tuple | list) else (value,):
                    inner = getattr(each, "jaxpr", each)
                    if hasattr(inner, "eqns"):
                        waiting.append(inner)


def numbers_reduced(jaxpr):
    """Returns how many numbers go into sums, maxima and the like."""
    reductions = (
        eqn for eqn in equations(jaxpr) if eqn.primitive.name.startswith("reduce_")
    )
    return sum(eqn.invars[0].aval.size for eqn in reductions)


def products(jaxpr):
    """Returns how many matrix products and convolutions read half precision alone, and of all."""
    half = total = 0
    for eqn in equations(jaxpr):
        if eqn.primitive.name in PRODUCTS:
            read = [atom.aval.dtype for atom in eqn.invars]
            total += 1
            half += {
                dtype.name for dtype in read if jnp.issubdtype(dtype, jnp.inexact)
            } <= HALF
    return half, total


def residual_bytes(loss_fn, params):
    """Returns the bytes that the forward pass keeps for the backward pass.

    Each array once, and without those that are there anyway: parameters, inputs and constants.
    """
    kept = jax.make_jaxpr(lambda params: jax.tree.leaves(jax.vjp(loss_fn, params)[1]))(
        params
    )
    given = {*kept.jaxpr.invars, *kept.jaxpr.constvars}
    variables = {atom for atom in kept.jaxpr.outvars if not hasattr(atom, "val")}
    return sum(var.aval.size * var.aval.dtype.itemsize for var in variables - given)
