"""Laws of half-precision parameters: what a device rounds, keeps and draws."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from device_law import bits, check, distance, law, numbers

import jaxscale

STEPS = 30
WAYS = {
    "remainders": lambda tx: jaxscale.master_weights(tx),
    "copies": lambda tx: jaxscale.master_weights(tx, "float32"),
    "at random": lambda tx: jaxscale.stochastic_rounding(tx),
    "remainders, compact": lambda tx: jaxscale.master_weights(
        jaxscale.skip_nonfinite(jaxscale.compact_state(tx))
    ),
}
EVERY_WAY = {name: (name,) for name in WAYS}


def make_params(dtype):
    params = {"w": 1 + 0.1 * numbers(0, 96, 64), "b": 0.1 * numbers(1, 64)}
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), params)


def loss_fn(params, target):
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)
    return jnp.mean((wide["w"] + wide["b"] - target) ** 2)


TARGET = numbers(2, 96, 64)


def train(tx, params, target=TARGET, steps=STEPS):
    """Returns parameters and state after some steps, compiled once."""
    step = jax.jit(jaxscale.train_step(loss_fn, tx))
    state = tx.init(params)
    for _ in range(steps):
        params, state, _ = step(params, state, target)
    check(step._cache_size() == 1, "the step was compiled again")
    return params, state


@law("half-precision parameters move where they stand still without", EVERY_WAY)
def parameters_move(way):
    params = make_params(jnp.bfloat16)
    adam = optax.adam(1e-4)
    plain, _ = train(jaxscale.skip_nonfinite(adam), params)
    moved, state = train(WAYS[way](adam), params)
    if way != "at random":
        moved = jaxscale.master_params(state, moved)
    exact = make_params(jnp.bfloat16)
    exact = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), exact)
    wide, _ = train(jaxscale.skip_nonfinite(adam), exact)

    def mean_distance(tree):
        apart = tree["w"].astype(jnp.float32) - wide["w"]
        return float(jnp.abs(jnp.mean(apart)))

    figures = {"plain": mean_distance(plain), "kept": mean_distance(moved)}
    check(figures["kept"] < 0.1 * figures["plain"], f"they are off by {figures}")
    return figures


@law("remainders join to the float32 parameters, as copies do")
def remainders_are_copies():
    params = make_params(jnp.bfloat16)
    ends = []
    for way in ("remainders", "copies"):
        half, state = train(WAYS[way](optax.adam(1e-3)), params, steps=1)
        ends.append(jaxscale.master_params(state, half))
        rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), ends[-1])
        apart = distance(half, rounded)
        check(apart < 0.01, f"{way}: parameters are {apart} from the rounded ones")
    # Two programs divide and add in other kernels, which may differ in the last bit.
    apart = distance(*ends)
    check(apart < 1e-6, f"remainders and copies differ by {apart}")


@law("a skipped step keeps parameters and what stands beside them", EVERY_WAY)
def skipped_steps_keep_bits(way):
    tx = WAYS[way](optax.adam(1e-3))
    step = jax.jit(jaxscale.train_step(loss_fn, tx))
    params = make_params(jnp.bfloat16)
    params, state, _ = step(params, tx.init(params), TARGET)
    bad = np.full_like(np.asarray(TARGET), np.nan)
    new_params, new_state, _ = step(params, state, bad)
    check(bits(params) == bits(new_params), "parameters changed")
    check(bits(state.weights) == bits(new_state.weights), "what is kept changed")
    check(bits(state.inner_state) == bits(new_state.inner_state), "the state changed")


@law("random rounding is right on average")
def random_rounding_is_unbiased():
    # An update that is 0.3 of what lies between two numbers of bfloat16 at 1.
    count = 1 << 16
    params = jnp.ones(count, jnp.bfloat16)
    unit = 2.0**-7
    tx = jaxscale.stochastic_rounding(optax.sgd(1.0))
    state = tx.init(params)
    grads = jnp.full(count, -0.3 * unit, jnp.float32)
    new_params, _ = jax.jit(lambda *args: jaxscale.apply_gradients(tx, *args))(
        grads, state, params
    )
    moved = np.asarray(new_params.astype(jnp.float32)) - 1
    share = float(np.mean(moved == unit))
    check(set(np.unique(moved)) <= {0.0, unit}, "a number is no neighbour")
    error = abs(share - 0.3) / (0.3 * 0.7 / count) ** 0.5
    check(error < 4, f"{share} were rounded up, {error:.1f} standard errors off")
    return {"share": share, "standard_errors": error}
