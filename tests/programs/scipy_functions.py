"""The functions of `jax.scipy` that have a derivative, behind a layer that is trained."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy as jsp
import jax.scipy.spatial.transform  # which `jax.scipy` does not import by itself
from corpus import (
    Program,
    apply_dense,
    normal,
    program,
    two_layers,
)


def behind_layers(
    loss_of: Callable[[Any], Any], outputs: int = 8, rows: int = 8
) -> Program:
    """Returns a program with a loss of the outputs of two layers."""
    params = two_layers(6, 24, outputs)

    def loss(params, x):
        hidden = jnp.tanh(apply_dense(params["hidden"], x))
        outputs = apply_dense(params["head"], hidden)
        return jnp.mean(loss_of(outputs)), {}

    return Program(loss, params, normal(rows, 6, seed=3), scale=2.0**4)


def definite(x: jax.Array) -> jax.Array:
    """Returns a symmetric and positive definite matrix, made from any matrix."""
    return x.T @ x / len(x) + jnp.eye(x.shape[-1])


@program("jax")
def linalg_of_factors():
    def loss(x):
        matrix = definite(x)
        matrix += jnp.diag(jnp.arange(5.0))
        values, _ = jsp.linalg.eigh(matrix)
        q, r = jsp.linalg.qr(x, mode="economic")
        singular = jsp.linalg.svd(x, compute_uv=False)
        total = jnp.sum(jnp.log(values))
        total += jnp.sum(r**2)
        total += jnp.sum(singular)
        return total + jnp.sum(q[0] ** 2)

    return behind_layers(loss, outputs=5)


@program("jax")
def linalg_of_exponentials():
    """A matrix exponential, as in flows and continuous-time chains: its products are its own."""

    def loss(x):
        rates = x.reshape(2, 4, 4) / 2
        exponentials = jax.vmap(jsp.linalg.expm)(rates)
        moved = exponentials @ jnp.ones(4)
        return jnp.square(moved)

    return behind_layers(loss, outputs=4)


@program("jax")
def integral_of_a_curve():
    def loss(x):
        return jsp.integrate.trapezoid(jnp.cos(x) ** 2, dx=0.1, axis=-1)

    return behind_layers(loss)


@program("jax")
def solution_by_conjugate_gradients():
    """`sparse.linalg.cg` with a product of the user, and its implicit derivative."""

    def loss(x):
        matrix = definite(x)
        right = normal(6, seed=12)

        def multiply(v):
            return matrix @ v

        solved, _ = jsp.sparse.linalg.cg(multiply, right, maxiter=12)
        other, _ = jsp.sparse.linalg.bicgstab(multiply, right, maxiter=12)
        return jnp.sum(solved**2) + jnp.sum(other**2)

    return behind_layers(loss, outputs=6)
