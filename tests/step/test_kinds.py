"""Every kind of parameter and of optimizer, through whole training steps."""

import contextlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tables import POLICIES, assert_same_bits, cases
from training import (
    MLP,
    assert_bad_steps_leave_no_trace,
    mlp_loss,
    trainer,
    x64,
)

import jaxscale

pytestmark = pytest.mark.standard_promotion

DYNAMIC = POLICIES["dynamic"]
HALVES = ["bfloat16", "float16"]

INNERS = {
    "adamw": optax.adamw(1e-2),
    "half_moments": optax.adam(1e-2, mu_dtype=jnp.bfloat16),
    "lbfgs": optax.lbfgs(),
    "schedule_free": optax.contrib.schedule_free_adamw(1e-2),
    "reduce_on_plateau": optax.chain(
        optax.adam(1e-2), optax.contrib.reduce_on_plateau(factor=0.5, patience=1, cooldown=1)
    ),
    "ema": optax.chain(optax.sgd(1e-2), optax.ema(0.9)),
}


def mlp(dtype):
    """Parameters of a dtype; a complex one has imaginary parts."""
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), MLP)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        params = jax.tree.map(lambda leaf: leaf * (1 + 0.5j), params)
    return params


def step_of(inner, dtype, fused):
    """A training step and its first carry."""
    # What float16 rounds to 0, or to few bits, depends on the scale; nothing else does.
    tx = jaxscale.loss_scaled(INNERS[inner], 2.0**8 if dtype == "float16" else DYNAMIC)

    def extra(batch, grads):
        return {"grad": grads, "value_fn": lambda params: mlp_loss(params, batch)}

    params = mlp(dtype)
    train_step = trainer(tx, mlp_loss, fused, extra=extra if "lbfgs" in inner else None)
    return train_step, (params, tx.init(params))


@cases(
    "inner, dtype",
    [(inner, "bfloat16") for inner in INNERS]
    + [(inner, "float16") for inner in ("adamw", "half_moments", "lbfgs", "schedule_free")]
    + [(inner, "complex64") for inner in ("adamw", "schedule_free")]
    + [(inner, "float64") for inner in ("adamw", "lbfgs")]
    # On accelerators both sides of the selection are computed: a line search runs on a bad step.
    + [(inner, "selected") for inner in ("lbfgs", "schedule_free", "reduce_on_plateau")],
    fast=[("adamw", "complex64")],
)
def test_bad_steps_leave_no_trace_in_any_dtype_or_optimizer(inner, dtype, monkeypatch):
    if dtype == "selected":
        dtype = "float32"
        monkeypatch.setattr(jax.lax, "platform_dependent", lambda *, cpu, default: default())
    with x64() if dtype == "float64" else contextlib.nullcontext():
        train_step, start = step_of(inner, dtype, fused=inner in list(INNERS)[::2])
        params, state = assert_bad_steps_leave_no_trace(train_step, start)
        assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(dtype)}
        assert not any(jnp.array_equal(params[name], start[0][name]) for name in ("w", "v"))
        if inner != "half_moments":  # narrow at the user's own wish
            for leaf in jax.tree.leaves(state.inner_state):
                floating = jnp.issubdtype(leaf.dtype, jnp.inexact)
                assert not floating or jnp.finfo(leaf.dtype).bits >= max(32, jnp.finfo(dtype).bits)


@cases("dtype, fused", itertools.product(HALVES, [True, False]), fast=[("float16", True)])
def test_the_sum_of_parameter_and_update_is_rounded_once(dtype, fused):
    rng = np.random.default_rng(0)
    params = jnp.asarray(rng.standard_normal(4096).astype(dtype))
    grads = jnp.asarray((rng.standard_normal(4096) * 2.0**-9).astype(np.float32))
    tx = jaxscale.loss_scaled(optax.scale(-1.0))
    if fused:
        moved, _ = jaxscale.apply_gradients(tx, grads, tx.init(params), params)
    else:
        updates, _ = tx.update(grads, tx.init(params), params)
        assert updates.dtype == jnp.float32
        moved = optax.apply_updates(params, updates)
    # NumPy's, in float32, of which no product is taken.
    p, u = np.asarray(params), -np.asarray(grads)
    once = (p.astype(np.float32) + u).astype(p.dtype)
    twice = (p.astype(np.float32) + u.astype(p.dtype).astype(np.float32)).astype(p.dtype)
    assert np.any(once != twice)
    assert_same_bits(moved, once)


@cases("dtype", [*HALVES, "float32", "complex64"], fast=["complex64"])
def test_a_skipped_step_keeps_the_signs_of_zeros(dtype):
    # Of both parts of a complex number.
    signs = np.array([complex(a, b) for a in (0.0, -0.0, 1.0) for b in (0.0, -0.0, 1.0)])
    params = jnp.asarray(signs if "complex" in dtype else signs.real, dtype)
    tx = jaxscale.loss_scaled(optax.sgd(1.0))
    for transform in (lambda f: f, jax.jit):
        grads = jnp.full_like(params, jnp.inf)
        updates, _ = transform(tx.update)(grads, tx.init(params), params)
        assert_same_bits(optax.apply_updates(params, updates), params)
