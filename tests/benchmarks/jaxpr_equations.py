"""Contents of a traced program: equations, reductions, residuals of the backward pass."""

import jax


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
                if not isinstance(value, tuple | list):
                    value = [value]
                programs = [getattr(item, "jaxpr", item) for item in value]
                waiting += [program for program in programs if hasattr(program, "eqns")]


def numbers_reduced(jaxpr):
    """Returns how many numbers go into sums, maxima and the like."""
    reductions = (
        eqn for eqn in equations(jaxpr) if eqn.primitive.name.startswith("reduce_")
    )
    return sum(eqn.invars[0].aval.size for eqn in reductions)


def residual_bytes(loss_fn, params, *batch):
    """Returns the bytes that the forward pass keeps for the backward pass.

    Each array once, and without those that are there anyway: parameters, inputs and constants.
    """

    def residuals(params, *batch):
        _, pull = jax.vjp(lambda params: loss_fn(params, *batch), params)
        return jax.tree.leaves(pull)

    program = jax.make_jaxpr(residuals)(params, *batch).jaxpr
    kept = {atom for atom in program.outvars if not hasattr(atom, "val")}
    kept -= {*program.invars, *program.constvars}
    return sum(var.aval.size * var.aval.dtype.itemsize for var in kept)
