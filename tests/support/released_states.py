"""States as a release wrote them: `python tests/support/released_states.py FILE`, with the release.

It runs with every release from 0.1.0 on, whose folder comes first in `PYTHONPATH`. What it wrote is
in `tests/state/releases`, one file for each, and never changes.
"""

import pathlib
import pickle
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxscale

SGD = optax.sgd(0.5, momentum=0.5)
PARAMS = {"w": jnp.array([1.0, -2.0]), "b": jnp.array(0.5)}
# Of each step, the factor of its gradients. All numbers are exact.
FACTORS = [1.0, 2.0, np.inf, 4.0, 1.0]
NEXT_FACTOR = 2.0


def make_optimizers():
    scaled = jaxscale.loss_scaled
    optimizers = {
        "dynamic": scaled(SGD, jaxscale.DynamicLossScale(growth_interval=2)),
        "fixed": scaled(SGD, 8),
        "no scale": scaled(SGD, None),
        "tracked": scaled(SGD, max_norm=2.0, track_leaves=True),
        "window": jaxscale.multi_steps(scaled(SGD), 4),
    }
    if jaxscale.__version__ == "0.1.0":
        return optimizers
    rule = jaxscale.SpikeRule(window=4, min_history=2)
    return optimizers | {
        "adaptive": scaled(SGD, "adaptive"),
        "spikes": scaled(SGD, spikes=rule),
    }


def step(tx, params, state, factor):
    grads = {"w": jnp.array([1.0, 2.0]) * factor, "b": jnp.array(-1.0) * factor}
    updates, state = tx.update(grads, state, params, value=jnp.float32(1.0))
    return optax.apply_updates(params, updates), state


def counters(state):
    names = ("notfinite_count", "total_notfinite", "total_steps")
    return {name: getattr(state, name) for name in names}


def main(path):
    written = {"pickles": {}, "dicts": {}, "before": {}, "after": {}}
    for name, tx in make_optimizers().items():
        params = PARAMS
        state = tx.init(params)
        for factor in FACTORS:
            params, state = step(tx, params, state, factor)
        written["pickles"][name] = pickle.dumps(jax.device_get(state), protocol=4)
        written["dicts"][name] = jaxscale.to_state_dict(state)
        written["before"][name] = jax.device_get(params)
        # What one more step makes of them.
        params, state = step(tx, params, state, NEXT_FACTOR)
        scale = state.scaling.loss_scale
        written["after"][name] = jax.device_get((params, counters(state), scale))
    pathlib.Path(path).write_bytes(pickle.dumps(written, protocol=4))


if __name__ == "__main__":
    main(sys.argv[1])
