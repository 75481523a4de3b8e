"""Prints what the compiled steps of the benchmarks hold on one device, as JSON; runs none.

The tests have eight devices, where leaves are not put together: so this is a process of its own.
"""

import itertools
import json
import math

import hlo
import jax
import jax.numpy as jnp
import jaxpr_equations
import methods

import jaxscale

NAMES = (
    methods.BARE,
    "jaxscale.train_step",
    "jaxscale.apply_gradients",
    "jaxscale optax wrapper",
)
FOLLOWING = "jaxscale.train_step, following"


DTYPES = ("float32", "float16", "bfloat16")


def shapes(layers):
    """The shapes of GPT-2: 124 million parameters at 12 layers."""
    block = {
        "norm_1/scale": (768,),
        "norm_1/bias": (768,),
        "attention/in/kernel": (768, 3 * 768),
        "attention/in/bias": (3 * 768,),
        "attention/out/kernel": (768, 768),
        "attention/out/bias": (768,),
        "norm_2/scale": (768,),
        "norm_2/bias": (768,),
        "mlp/in/kernel": (768, 4 * 768),
        "mlp/in/bias": (4 * 768,),
        "mlp/out/kernel": (4 * 768, 768),
        "mlp/out/bias": (768,),
    }
    whole = {"tokens": (50257, 768), "positions": (1024, 768), "norm/scale": (768,)}
    for i in range(layers):
        whole |= {f"{i:02}/{name}": shape for name, shape in block.items()}
    return whole | {"norm/bias": (768,)}


def avals(shapes, dtype):
    return {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes.items()}


def size(shapes):
    """The number of parameters."""
    return sum(math.prod(shape) for shape in shapes.values())


def count(name, layers, dtype, clip):
    tree = shapes(layers)
    method = methods.METHODS[name](clip)
    carry = jax.eval_shape(method.init, avals(tree, "float32"))
    step = jax.jit(method.step, donate_argnums=0)
    traced = step.trace(carry, avals(tree, dtype))
    compiled = traced.lower().compile()
    return hlo.program(compiled, size(tree)) | {
        "equations": len(list(jaxpr_equations.equations(traced.jaxpr))),
    }


def count_products(name, dtype):
    """Counts what is in a step whose gradients are those of products in half precision."""
    tree = {}
    for key, shape in shapes(3).items():
        if "kernel" in key:
            tree[key] = shape
    method = methods.METHODS[name](False)

    def step(carry, inputs, cotangents):
        params, _ = carry
        grads = {}
        for key, matrix in params.items():
            _, pull = jax.vjp(lambda w, x=inputs[key]: x @ w.astype(dtype), matrix)
            (grads[key],) = pull(cotangents[key])
        return method.step(carry, grads)

    carry = jax.eval_shape(method.init, avals(tree, "float32"))
    inputs = avals({key: (8, rows) for key, (rows, _) in tree.items()}, dtype)
    cotangents = avals({key: (8, width) for key, (_, width) in tree.items()}, dtype)
    jitted = jax.jit(step, donate_argnums=0)
    compiled = jitted.lower(carry, inputs, cotangents).compile()
    return hlo.program(compiled, size(tree))


def count_alone(fun, dtype, size=2**20):
    aval = jax.ShapeDtypeStruct((size,), dtype)
    return hlo.program(jax.jit(fun).lower(aval).compile(), size)


def norm(x):
    return jnp.sqrt(jnp.sum(x * x))


def main():
    names = (*NAMES, FOLLOWING)
    rows = [*itertools.product(names, (1, 3), ["float32"], (False, True))]
    rows += itertools.product(names, [1], ["float16", "bfloat16"], [False])
    counted = {", ".join(map(str, row)): count(*row) for row in rows}
    for dtype in DTYPES:
        counted[f"verdict, {dtype}"] = count_alone(jaxscale.all_finite, dtype)
    for row in itertools.product(NAMES[:3], DTYPES[1:]):
        counted[", ".join((*row, "products"))] = count_products(*row)
    counted["norm, float32"] = count_alone(norm, "float32")
    print(json.dumps(counted))


if __name__ == "__main__":
    main()
