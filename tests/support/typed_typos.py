"""A user's program with typos: pyright finds those marked, and no others.

A mark is a word of the message. `test_package` runs pyright, and nothing runs this program.
"""

import jax
import optax

import jaxscale


def loss_fn(w: jax.Array, x: jax.Array) -> jax.Array:
    return (w * x).sum()


def program(w: jax.Array, opt_state: jaxscale.LossScaledState) -> None:
    tx = jaxscale.loss_scaled(optax.sgd(0.1), "dynamc")  # error: "dynamc"
    jaxscale.multi_steps(tx, 2, drop="windw")  # error: "windw"
    jaxscale.multi_steps(tx, 2, growth_unit="step")  # error: "step"
    jaxscale.value_and_grad(loss_fn, opt_state)(w)  # error: "x"
    jaxscale.grad(loss_fn, opt_state)(w, w, y=w)  # error: "y"
    w, opt_state = jaxscale.apply_gradients(tx, w, w, w)  # error: "LossScaledState"
    kept: int = jaxscale.tree_where(True, w, w)  # error: "Array"
    jaxscale.train_step(loss_fn, tx)(w, opt_state)  # error: "x"
    print(w, opt_state, kept)
