"""The run of every trainer: a small model in float16, whose loss is too small for it.

`python tests/trainers/runs.py keras_fit` prints a line for each run of a program: its last loss,
and how many steps were skipped.
"""

import importlib
import os
import sys

# Before JAX is imported. Without the flag XLA on CPU keeps float32 between two float16 operations.
os.environ.setdefault("XLA_FLAGS", "--xla_allow_excess_precision=false")

import numpy as np
import optax

import jaxscale

# A loss as small as that of a mean over many tokens: its cotangents flush to 0 in float16.
FACTOR = 2.0**-18
BATCH, WIDTH, FEATURES = 32, 32, 8
BAD_STEP = 3

# The arguments of each program's `train`: a dtype, whether it is scaled, whether bad steps are
# skipped, and the batch of step 3: good, bad (with an inf or a NaN in it), or none. It returns the
# last loss over all examples, and how many steps were skipped.
RUNS = {
    "float32": ("float32", False, False, "good"),
    "float16": ("float16", False, False, "good"),
    "float16, scaled": ("float16", True, True, "good"),
    "bad batch": ("float16", True, False, "bad"),
    "bad batch, skipped": ("float16", True, True, "bad"),
    "batch left out": ("float16", True, True, None),
}


def examples():
    """Returns inputs and targets, float32."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((8 * BATCH, FEATURES))
    y = np.sin(x @ rng.standard_normal((FEATURES, 1)))
    return x.astype("float32"), y.astype("float32")


def batches(number, batch):
    """Yields batches. That of `BAD_STEP` has an inf in it, or is left out, if asked for."""
    x, y = examples()
    for step in range(number):
        start = step * BATCH % len(x)
        inputs = x[start : start + BATCH].copy()
        is_bad = step == BAD_STEP
        if is_bad and batch == "bad":
            inputs[0, 0] = np.inf
        if not is_bad or batch is not None:
            yield inputs, y[start : start + BATCH]


def optimizer(skips, factor=FACTOR):
    """Returns Adam, guarded or not.

    It divides by the factor of the loss first, so the small loss makes no difference in float32.
    """
    tx = optax.chain(optax.scale(1 / factor), optax.adam(1e-2))
    if not skips:
        return tx
    return jaxscale.skip_nonfinite(tx, spikes=jaxscale.SpikeRule())


def skipped(state):
    """Returns how many steps were skipped, as a state in this tree counts; 0 if there is none."""
    try:
        return int(jaxscale.metrics(state)["total_notfinite"])
    except ValueError:
        return 0


if __name__ == "__main__":
    program = importlib.import_module(sys.argv[1])
    for name, run in RUNS.items():
        loss, count = program.train(*run)
        print(f"{name:20} {loss:.5f}  skipped {count}", flush=True)
