"""States as a release wrote them: `python tests/support/released_states.py FILE`, with the release.

It runs with every release from 0.3.0 on, whose folder comes first in `PYTHONPATH`. What it wrote is
in `tests/state/releases`, one file for each, and never changes.
"""

import gzip
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
# Moments of fewer numbers stay in float32.
HALF = {"w": jnp.ones((64, 64), jnp.bfloat16), "b": jnp.array(0.5, jnp.bfloat16)}


def make_optimizers():
    """Returns by name an optimizer, and the parameters that it starts from."""
    scaled = jaxscale.loss_scaled
    rule = jaxscale.SpikeRule(window=4, min_history=2)
    optimizers = {
        "dynamic": scaled(SGD, jaxscale.DynamicLossScale(growth_interval=2)),
        "fixed": scaled(SGD, 8),
        "no scale": scaled(SGD, None),
        "tracked": scaled(SGD, max_norm=2.0, track_leaves=True),
        "window": jaxscale.multi_steps(scaled(SGD), 4),
        "spikes": scaled(SGD, spikes=rule),
    }
    rows = {name: (tx, PARAMS) for name, tx in optimizers.items()}
    if jaxscale.__version__ == "0.3.0":
        return rows
    compact = jaxscale.compact_state(SGD)
    of_half = {
        "remainders": jaxscale.master_weights(SGD),
        "copies": jaxscale.master_weights(scaled(SGD), "float32"),
        "compact": jaxscale.master_weights(compact),
        "rounded at random": jaxscale.stochastic_rounding(compact),
        "half, window": jaxscale.master_weights(jaxscale.multi_steps(scaled(SGD), 4)),
    }
    return rows | {name: (tx, HALF) for name, tx in of_half.items()}


def step(tx, params, state, factor):
    grads = jax.tree.map(lambda leaf: jnp.ones_like(leaf) * factor, params)
    grads["b"] = -grads["b"]
    if params["w"].shape == (2,):
        grads["w"] = jnp.array([1.0, 2.0]) * factor
    updates, state = tx.update(grads, state, params, value=jnp.float32(1.0))
    return optax.apply_updates(params, updates), state


def counters(state):
    names = ("notfinite_count", "total_notfinite", "total_steps")
    return {name: getattr(state, name) for name in names}


def main(path):
    written = {"pickles": {}, "dicts": {}, "before": {}, "after": {}}
    for name, (tx, params) in make_optimizers().items():
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
    packed = gzip.compress(pickle.dumps(written, protocol=4), mtime=0)
    pathlib.Path(path).write_bytes(packed)


if __name__ == "__main__":
    main(sys.argv[1])
