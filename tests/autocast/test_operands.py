"""Products may read their operands in another precision than what follows them is kept in."""

import jax
import jax.numpy as jnp
import numpy as np
from half_programs import equations

from jaxscale._autocast.interpreter import Autocast
from jaxscale._autocast.values import Precision

X = jnp.linspace(-1.0, 1.0, 12).reshape(3, 4)
W = jnp.linspace(0.5, -0.5, 16).reshape(4, 4)


def network(w, x):
    hidden = jnp.maximum(x @ w, 0.0)
    hidden = jax.lax.dot(hidden, w)  # asks for no result type
    weights = jax.nn.softmax(hidden @ w)
    return jnp.sum(weights**2)


def run_with_operands(operand, narrow):
    precision = Precision(operand=np.dtype(operand), narrow=np.dtype(narrow))
    autocast = Autocast(precision, half_carries=False)
    return lambda *args: autocast.call(network, args, {})


def dtypes_of(atoms):
    return {atom.aval.dtype.name for atom in atoms}


def test_only_products_read_operands():
    program = jax.make_jaxpr(run_with_operands("float8_e4m3fn", "bfloat16"))(W, X)
    operands = set()
    others = set()
    for eqn in equations(program.jaxpr):
        if eqn.primitive.name == "dot_general":
            operands |= dtypes_of(eqn.invars)
            others |= dtypes_of(eqn.outvars)
        elif eqn.primitive.name != "convert_element_type":
            others |= dtypes_of([*eqn.invars, *eqn.outvars])
    assert operands == {"float8_e4m3fn"}
    assert others <= {"bfloat16", "float32", "bool"}
    assert "bfloat16" in others


def test_gradients_of_operands_come_close():
    gradient = jax.grad(run_with_operands("float16", "bfloat16"))(W, X)
    assert gradient.dtype == np.float32
    np.testing.assert_allclose(gradient, jax.grad(network)(W, X), atol=0.02)
