"""A loss in half precision whose gradients overflow at a scale that is known, and steps with it."""

import jax
import jax.numpy as jnp
import optax
from tables import INNERS, PARAMS, POLICIES

import jaxscale


def loss_fn(params, x):
    """A mean over float16 numbers. With x = 8 the gradients overflow at a scale of 2**15."""
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.float16), params)
    sums = half["w"] * x.astype(jnp.float16) + half["b"]
    outputs = sums * half["half"].sum()
    return jnp.mean(outputs.astype(jnp.float32) ** 2)


GOOD = jnp.full(3, 0.5)
OVERFLOW = jnp.full(3, 8.0)  # of the gradients alone
BAD_LOSS = jnp.full(3, jnp.nan)
BATCHES = [GOOD, GOOD * 2, OVERFLOW, GOOD, BAD_LOSS, GOOD, GOOD * 3]
FINITE = [GOOD, OVERFLOW, GOOD * 2, GOOD, GOOD, GOOD, GOOD * 3, GOOD]

WINDOWS = {
    "inside": lambda tx, policy: jaxscale.loss_scaled(
        jaxscale.multi_steps(tx, 2), policy
    ),
    "outside": lambda tx, policy: jaxscale.multi_steps(
        jaxscale.loss_scaled(tx, policy), 2
    ),
    "of optax": lambda tx, policy: jaxscale.loss_scaled(
        optax.MultiSteps(tx, 2), policy
    ),
}
OPTIONS = {
    "axis": {"axis_name": "devices"},
    "norm": {"max_norm": 0.1},
    "checked": {"check_updates": True},
    "tracked": {"track_leaves": True},
    "switched off": {"skip_nonfinite": False, "loss_scale": None},
}
# Each with one thing that is not the default.
OPTIMIZERS = {
    name: wrap(INNERS["adam"], POLICIES["dynamic"]) for name, wrap in WINDOWS.items()
}
OPTIMIZERS |= {
    name: jaxscale.loss_scaled(
        INNERS["adam"], **{"loss_scale": POLICIES["dynamic"]} | options
    )
    for name, options in OPTIONS.items()
}


def hot(scale=2.0**24):
    """An optimizer that starts at a scale at which every batch overflows."""
    policy = jaxscale.DynamicLossScale(init_scale=scale, growth_interval=4)
    return jaxscale.loss_scaled(INNERS["adam"], policy)


def run(step, opt_state, batches=BATCHES, params=PARAMS):
    """Parameters, optimizer state and losses after some batches."""
    losses = []
    for batch in batches:
        params, opt_state, loss = step(params, opt_state, batch)
        losses.append(loss)
    return params, opt_state, losses
