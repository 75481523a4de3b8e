"""For trainers that keep the state of their optimizer, or choose their batches, themselves."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from runs import FACTOR, optimizer

import jaxscale


def in_precision(fun, dtype, scaled):
    """The function as a run has it: in float32, in float16, or in float16 and scaled."""
    if dtype == "float32":
        return fun
    fun = jaxscale.autocast(fun)
    return jaxscale.scale_backward(fun) if scaled else fun


def small(outputs, factor=FACTOR):
    """The outputs, whose gradients come back as if the loss were that small.

    For a trainer whose loss is its own.
    """
    return jax.tree.map(lambda x: optax.scale_gradient(x, factor), outputs)


class WatchedState(NamedTuple):
    step: jax.Array
    inner: Any


class Journal:
    """What optimizers met, written down on the host.

    Attributes:
      steps: how many steps were taken.
      bad: the steps whose gradients were not finite.
      skipped: how many steps `skip_nonfinite` skipped, as its `on_skip` says.
    """

    def __init__(self):
        self.steps, self.bad, self.skipped = 0, set(), 0

    def _write(self, step, is_finite):
        self.steps = max(self.steps, int(step) + 1)
        if not is_finite:
            self.bad.add(int(step))

    def _write_skip(self, metrics):
        self.skipped = max(self.skipped, int(np.max(metrics["total_notfinite"])))

    def optimizer(self, skips, left_out=(), tx=None, factor=FACTOR):
        """The optimizer of `runs`, which tells the journal, and leaves out those steps."""
        tx = optimizer(skips, factor, tx, self._write_skip)
        left_out = jnp.array([-1, *sorted(left_out)])

        def init(params):
            return WatchedState(jnp.int32(0), tx.init(params))

        def update(grads, state, params=None, **extra):
            updates, inner = tx.update(grads, state.inner, params, **extra)
            is_finite = jnp.array(
                [jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]
            ).all()
            is_out = (left_out == state.step).any()
            updates = jax.tree.map(
                lambda u: jnp.where(is_out, jnp.zeros_like(u), u), updates
            )
            inner = jax.tree.map(
                lambda new, old: jnp.where(is_out, old, new), inner, state.inner
            )
            jax.debug.callback(self._write, state.step, is_finite)
            return updates, WatchedState(state.step + 1, inner)

        return optax.GradientTransformationExtraArgs(init, update)
