"""diffrax's example of a neural ODE, which builds its optimizer and its loss itself.

The model's gradients are made that small. The names that the program imports are replaced: its
model, its optimizer, and its loader of data.
"""

import types
from unittest import mock

import jax
import jax.numpy as jnp
import optax
from others import diffrax_neural_ode as example
from runs import BAD_STEP
from watch import Journal, in_precision, small

STEPS = 60
BATCH = 16
LENGTH = 0.2
NeuralODE = example.NeuralODE
load_all = example.dataloader


def train(dtype, scaled, skips, batch):
    """Returns the last loss over all examples, and how many steps were skipped."""
    journal = Journal()

    class Model(NeuralODE):
        def __call__(self, ts, y0):
            solve = in_precision(super().__call__, dtype, scaled)
            return small(solve(ts, y0))

    def load(*args, **kwargs):
        for step, (y,) in enumerate(load_all(*args, **kwargs)):
            if step == BAD_STEP and batch == "bad":
                y = y.at[0, 3].set(jnp.nan)
            if step != BAD_STEP or batch is not None:
                yield (y,)

    def adabelief(learning_rate):
        return journal.optimizer(skips, tx=optax.adabelief(learning_rate))

    replaced = {
        "NeuralODE": Model,
        "dataloader": load,
        "optax": types.SimpleNamespace(**vars(optax) | {"adabelief": adabelief}),
    }
    try:
        with mock.patch.multiple(example, **replaced):
            ts, ys, model = example.main(
                dataset_size=128,
                batch_size=BATCH,
                lr=1e-2,
                steps_strategy=[STEPS - (batch is None)],
                length_strategy=[LENGTH],
                width_size=32,
                plot=False,
            )
    except RuntimeError:  # the solver refuses a field that is NaN
        return float("nan"), journal.skipped
    length = int(len(ts) * LENGTH)
    ts = ts[:length]
    ys = ys[:, :length]
    predictions = jax.vmap(lambda y: NeuralODE.__call__(model, ts, y))(ys[:, 0])
    return float(jnp.mean((predictions - ys) ** 2)), journal.skipped
