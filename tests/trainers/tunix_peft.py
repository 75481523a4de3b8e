"""Tunix's `PeftTrainer`, with a model of NNX and a loss function of one's own."""

import flax.nnx as nnx
import jax.numpy as jnp
from runs import FACTOR, FEATURES, RUNS, WIDTH, batches, examples, optimizer, skipped
from tunix.sft import peft_trainer

import jaxscale

STEPS = 160
WINDOW = 4
MORE_RUNS = {
    "trainer accumulates": (*RUNS["bad batch, skipped"], "trainer"),
    "optimizer accumulates": (*RUNS["bad batch, skipped"], "optimizer"),
}


class Model(nnx.Module):
    def __init__(self, dtype):
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(FEATURES, WIDTH, dtype=dtype, rngs=rngs)
        self.last = nnx.Linear(WIDTH, 1, dtype=dtype, rngs=rngs)

    def __call__(self, x):
        return self.last(nnx.tanh(self.first(x)))


def small_loss(model, x, y):
    return FACTOR * jnp.mean((model(x).astype(jnp.float32) - y) ** 2)


def train(dtype, scaled, skips, batch, accumulates=None):
    """Returns the last loss over all examples, and how many steps were skipped.

    `accumulates` is "trainer" or "optimizer" if one of them accumulates micro-batches.
    """
    model = Model(jnp.dtype(dtype))
    tx = optimizer(skips)
    if accumulates == "optimizer":
        tx = jaxscale.multi_steps(tx, WINDOW)
    config = peft_trainer.TrainingConfig(
        eval_every_n_steps=STEPS,
        gradient_accumulation_steps=WINDOW if accumulates == "trainer" else None,
    )
    trainer = peft_trainer.PeftTrainer(model, tx, config)
    loss_fn = small_loss
    if scaled:
        loss_fn = jaxscale.scale_backward(small_loss)
    trainer.with_loss_fn(loss_fn)
    trainer.train([{"x": x, "y": y} for x, y in batches(STEPS, batch)])
    return float(small_loss(model, *examples())) / FACTOR, skipped(trainer.optimizer)
