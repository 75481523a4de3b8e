"""Prints what the compiled steps of the benchmarks hold on one device, as JSON; runs none.

The tests have eight devices, where leaves are not put together: so this is a process of its own.
"""

import itertools
import json

import hlo
import jax
import jax.numpy as jnp
import jaxprs
import methods
import trees

import jaxscale

NAMES = (
    methods.BARE,
    "jaxscale.train_step",
    "jaxscale.apply_gradients",
    "jaxscale optax wrapper",
)
ADAPTIVE = "jaxscale.train_step, adaptive"


def shapes(layers):
    return trees.gpt2(768, layers)


def count(name, layers, dtype, clip):
    tree = shapes(layers)
    method = methods.make(name, clip)
    carry = jax.eval_shape(method.init, trees.avals(tree, "float32"))
    step = jax.jit(method.step, donate_argnums=0)
    traced = step.trace(carry, trees.avals(tree, dtype))
    compiled = traced.lower().compile()
    return hlo.program(compiled, trees.size(tree)) | {
        "equations": len(list(jaxprs.equations(traced.jaxpr))),
    }


def count_alone(fun, dtype, size=2**20):
    aval = jax.ShapeDtypeStruct((size,), dtype)
    return hlo.program(jax.jit(fun).lower(aval).compile(), size)


def norm(x):
    return jnp.sqrt(jnp.sum(x * x))


def main():
    names = (*NAMES, ADAPTIVE)
    rows = [*itertools.product(names, (1, 3), ["float32"], (False, True))]
    rows += itertools.product(names, [1], ["float16", "bfloat16"], [False])
    counted = {", ".join(map(str, row)): count(*row) for row in rows}
    for dtype in trees.DTYPES:
        counted[f"verdict, {dtype}"] = count_alone(jaxscale.all_finite, dtype)
    counted["norm, float32"] = count_alone(norm, "float32")
    print(json.dumps(counted))


if __name__ == "__main__":
    main()
