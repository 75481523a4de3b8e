"""A user's program in which pyright, in its strict mode, finds the errors that are marked.

A mark is a word of the message. `test_package` runs pyright, and nothing runs this program.
"""

from typing import NamedTuple

import jax
import optax

import jaxscale


class Params(NamedTuple):
    w: jax.Array
    b: jax.Array


def loss_fn(params: Params, x: jax.Array, *, noise: float = 0.0) -> jax.Array:
    return ((x @ params.w + params.b + noise) ** 2).mean()


def loss_with_output(params: Params, x: jax.Array) -> tuple[jax.Array, dict[str, int]]:
    return loss_fn(params, x), {"size": x.size}


tx = jaxscale.loss_scaled(optax.adamw(1e-3), "dynamic", max_norm=1.0)
others = [
    jaxscale.loss_scaled(optax.sgd(0.1), 128),
    jaxscale.loss_scaled(optax.sgd(0.1), None, skip_nonfinite=False),
    jaxscale.loss_scaled(
        optax.sgd(0.1), jaxscale.DynamicLossScale(growth_interval=500)
    ),
    jaxscale.multi_steps(optax.sgd(0.1), 4),
    jaxscale.skip_nonfinite(optax.sgd(0.1), track_leaves=True),
]


def loss_with_state(params: Params, count: int, x: jax.Array) -> tuple[jax.Array, int]:
    return loss_fn(params, x), count + 1


def step(
    params: Params, state: jaxscale.LossScaledState, x: jax.Array
) -> tuple[jax.Array, int]:
    old = params
    first: jax.Array
    first, grads = jaxscale.value_and_grad(loss_fn, state)(params, x, noise=0.5)
    params, state = jaxscale.apply_gradients(tx, grads, state, params, value=first)
    kept = jaxscale.tree_where(jaxscale.metrics(state)["step_applied"], params, old)
    (loss, output), _ = jaxscale.value_and_grad(loss_with_output, state, has_aux=True)(
        params, x
    )
    _, again = jaxscale.grad(loss_with_output, state, has_aux=True)(params, x)
    return first + loss + kept.w.sum(), output["size"] + again["size"]


def whole_steps(params: Params, x: jax.Array) -> tuple[jax.Array, int, int]:
    opt_state = tx.init(params)
    params, opt_state, loss = jaxscale.train_step(loss_fn, tx, retries=2)(
        params, opt_state, x
    )
    with_output = jaxscale.train_step(loss_with_output, tx, has_aux=True)
    params, opt_state, (loss, output) = with_output(params, opt_state, x)
    with_state = jaxscale.train_step(loss_with_state, tx, has_state=True)
    params, opt_state, count, loss = with_state(params, opt_state, 3, x)
    grads = jaxscale.grad(loss_fn, opt_state)(params, x)
    params, opt_state = jaxscale.apply_gradients(tx, grads, opt_state, params)
    count = jaxscale.tree_where(opt_state.step_applied, count, 2)
    return loss + params.w.sum(), output["size"], count


def typos(params: Params, opt_state: jaxscale.LossScaledState, x: jax.Array) -> None:
    tx = jaxscale.loss_scaled(optax.sgd(0.1), "dynamc")  # error: "dynamc"
    jaxscale.value_and_grad(loss_fn, opt_state)(params)  # error: "x"
    jaxscale.grad(loss_fn, opt_state)(params, x, y=x)  # error: "y"
    # error: "LossScaledState"
    params, opt_state = jaxscale.apply_gradients(tx, params, x, params)
    kept: int = jaxscale.tree_where(True, x, x)  # error: "Array"
    jaxscale.train_step(loss_fn, tx)(params, opt_state)  # error: "x"
    print(params, opt_state, kept)
