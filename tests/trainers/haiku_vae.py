"""Haiku's `examples/vae.py`, which builds its optimizer and its loss itself.

The model's gradients are made that small. The names that the program imports are replaced: the
transformation of its model, its optimizer, its data set, which is downloaded, and its log.
"""

import itertools
import sys
import types
from unittest import mock

import haiku as hk
import numpy as np
import optax
from runs import BAD_STEP
from watch import Journal, in_precision, small

sys.modules.setdefault("tensorflow_datasets", types.ModuleType("tensorflow_datasets"))
from others import haiku_vae as vae  # noqa: E402

STEPS = 60
BATCH = 32
SIDE = 8


def images(split, batch_size, seed, bad_step=None):
    """Yields batches of rings of two sizes, in noise."""
    rng = np.random.default_rng([seed, len(split)])
    places = np.linspace(-1, 1, SIDE)
    radii = np.hypot(places[:, None], places)
    for step in itertools.count():
        radius = rng.choice([0.4, 0.9], (batch_size, 1, 1))
        ring = np.abs(radii - radius) < 0.2
        noise = rng.random((batch_size, SIDE, SIDE)) < 0.05
        image = (ring ^ noise)[..., None].astype("float32")
        # The program takes the first batch for the shapes alone.
        if step == bad_step and split == "train":
            image[0, 0, 0] = np.nan
        yield vae.Batch(image)


def train(dtype, scaled, skips, batch):
    """Returns the last loss of a batch for validation, and how many steps were skipped."""
    journal = Journal()
    log = []
    left_out = [BAD_STEP] if batch is None else []
    bad_step = BAD_STEP + 1 if batch == "bad" else None

    def transform(fun):
        model = hk.transform(fun)
        apply = in_precision(model.apply, dtype, scaled)
        return model._replace(apply=lambda *args: small(apply(*args)))

    def load(split, batch_size, seed):
        return images(split, batch_size, seed, bad_step)

    def adam(learning_rate):
        return journal.optimizer(skips, left_out, optax.adam(learning_rate))

    replaced = {
        "hk": types.SimpleNamespace(**vars(hk) | {"transform": transform}),
        "optax": types.SimpleNamespace(**vars(optax) | {"adam": adam}),
        "load_dataset": load,
        "logging": types.SimpleNamespace(info=log.append),
        "Config": lambda: config,
    }
    config = vae.Config(batch_size=BATCH, training_steps=STEPS, eval_every=STEPS - 1)
    with mock.patch.multiple(vae, **replaced):
        vae.main(None)
    return -log[-1]["elbo"], journal.skipped
