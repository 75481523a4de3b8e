"""For trainers that keep the state of their optimizer to themselves, or choose their batches."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from runs import FACTOR, optimizer

import jaxscale


def in_precision(fun, dtype, scaled):
    """Returns the function as a run has it: in float32, in float16, or in float16 and scaled."""
    if dtype == "float32":
        return fun
    fun = jaxscale.autocast(fun)
    if scaled:
        fun = jaxscale.scale_backward(fun)
    return fun


def small(outputs, factor=FACTOR):
    """Returns the outputs, with gradients as if the loss were multiplied by a small factor.

    For a trainer whose loss is its own.
    """
    return jax.tree.map(lambda x: optax.scale_gradient(x, factor), outputs)


class WatchedState(NamedTuple):
    step: jax.Array
    inner: Any


class Journal:
    """What optimizers met, written down on the host.

    Attributes:
      steps: how many steps were made.
      bad: the steps whose gradients were not finite.
      skipped: how many steps `skip_nonfinite` skipped, according to its `on_skip`.
    """

    def __init__(self):
        self.steps = 0
        self.bad = set()
        self.skipped = 0

    def _write(self, step, is_finite):
        step = int(step)
        self.steps = max(self.steps, step + 1)
        if not is_finite:
            self.bad.add(step)

    def _write_skip(self, metrics):
        self.skipped = max(self.skipped, int(np.max(metrics["total_notfinite"])))

    def optimizer(self, skips, left_out=(), tx=None, factor=FACTOR):
        """Returns the optimizer of `runs`, which writes into the journal and leaves out steps."""
        tx = optimizer(skips, factor, tx, self._write_skip)
        left_out = jnp.array([-1, *sorted(left_out)])

        def init(params):
            return WatchedState(jnp.int32(0), tx.init(params))

        def update(grads, state, params=None, **extra):
            updates, inner = tx.update(grads, state.inner, params, **extra)
            is_out = (left_out == state.step).any()
            # In plain JAX, as runs of the functions under test are compared with this.
            updates = jax.tree.map(
                lambda u: jnp.where(is_out, jnp.zeros_like(u), u), updates
            )
            inner = jax.tree.map(
                lambda new, old: jnp.where(is_out, old, new), inner, state.inner
            )
            are_finite = [jnp.isfinite(grad).all() for grad in jax.tree.leaves(grads)]
            is_finite = jnp.array(are_finite).all()
            jax.debug.callback(self._write, state.step, is_finite)
            return updates, WatchedState(state.step + 1, inner)

        return optax.GradientTransformationExtraArgs(init, update)


def train_by(fit):
    """Returns the `train` of a program whose trainer draws its batches itself.

    `fit` takes the arguments of `train`, and the steps that the optimizer leaves out. A bad batch
    is left out by leaving out the steps that were bad in a run with it.
    """

    def train(dtype, scaled, skips, batch):
        left_out = ()
        if batch is None:
            _, journal = fit(dtype, scaled, skips, "bad")
            left_out = journal.bad
            batch = "good"
        loss, journal = fit(dtype, scaled, skips, batch, left_out)
        return loss, journal.skipped

    return train
