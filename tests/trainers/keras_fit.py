"""Keras 3 on JAX: `model.fit`, with an optimizer of Optax."""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import keras
from runs import FACTOR, FEATURES, WIDTH, batches, examples, optimizer, skipped

import jaxscale

STEPS = 160


class Optax(keras.optimizers.Optimizer):
    """A transformation of Optax as an optimizer of Keras. Its state is in variables of Keras."""

    def __init__(self, tx, **kwargs):
        super().__init__(learning_rate=0.0, **kwargs)  # the rate is that of `tx`
        self.tx = tx

    def build(self, variables):
        if self.built:
            return
        super().build(variables)
        state = self.tx.init([v.value for v in variables])
        leaves, self._structure = jax.tree.flatten(state)
        self._leaves = []
        for leaf in leaves:
            variable = keras.Variable(leaf, dtype=leaf.dtype.name, trainable=False)
            self._track_variable(variable)
            self._leaves.append(variable)

    @property
    def state(self):
        return jax.tree.unflatten(self._structure, [v.value for v in self._leaves])

    def _backend_update_step(self, grads, variables, learning_rate):
        params = [v.value for v in variables]
        updates, state = self.tx.update(list(grads), self.state, params)
        for variable, update in zip(variables, updates, strict=True):
            variable.assign_add(update)
        for variable, leaf in zip(self._leaves, jax.tree.leaves(state), strict=True):
            variable.assign(leaf)


def small_loss(y, predictions):
    return FACTOR * keras.losses.mean_squared_error(y, predictions)


def train(dtype, scaled, skips, batch):
    keras.utils.set_random_seed(0)
    policy = "mixed_float16" if dtype == "float16" else dtype
    first = keras.layers.Dense(WIDTH, activation="tanh", dtype=policy)
    last = keras.layers.Dense(1, dtype=policy)
    model = keras.Sequential([keras.layers.Input((FEATURES,)), first, last])
    if scaled:
        model.compute_loss_and_updates = jaxscale.scale_backward(
            model.compute_loss_and_updates
        )
    # Without the last argument Keras wraps the optimizer by its own LossScaleOptimizer.
    model.compile(Optax(optimizer(skips)), loss=small_loss, auto_scale_loss=False)
    steps = STEPS - (batch is None)
    model.fit(batches(STEPS, batch), steps_per_epoch=steps, shuffle=False, verbose=0)
    x, y = examples()
    loss = model.evaluate(x, y, batch_size=len(x), verbose=0)
    return loss / FACTOR, skipped(model.optimizer.state)
