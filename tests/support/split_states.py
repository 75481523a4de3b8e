"""States that are split over processes, as `check`, `metrics` and `to_state_dict` see them.

`python tests/support/split_states.py 2` runs this in two processes, which JAX joins on loopback.
Each prints what it got.
"""

import functools
import pathlib
import runpy
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxscale

EXAMPLE = pathlib.Path(__file__).parent.parent.parent / "examples" / "multi_host.py"


def split(mesh, tree):
    """Puts arrays over all devices by rows, and scalars on each."""

    def place(leaf):
        sharding = NamedSharding(mesh, P("d") if jnp.ndim(leaf) else P())
        leaf = np.asarray(leaf)
        return jax.make_array_from_callback(leaf.shape, sharding, leaf.__getitem__)

    return jax.tree.map(place, tree)


def message_of(fun, *args):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            fun(*args)
        except (ValueError, UserWarning, jaxscale.LossScaleStuckError) as error:
            return str(error)
    return "nothing"


def say(name, text):
    print(f"{name}: {text}", flush=True)


def main():
    mesh = Mesh(np.array(jax.devices()), "d")
    tx = jaxscale.loss_scaled(
        optax.sgd(0.1, momentum=0.9), spikes=jaxscale.SpikeRule(window=8), max_norm=1.0
    )
    params = jnp.ones(8)
    whole = tx.init(params)
    for _ in range(3):
        _, whole = tx.update(jnp.full(8, jnp.nan), whole, params)
    state = split(mesh, whole)
    say("split", not state.spikes.losses.is_fully_addressable)
    say("check", message_of(jaxscale.check, state))
    stuck = functools.partial(jaxscale.check, max_consecutive=2)
    say("check of a stuck one", message_of(stuck, state))
    train_state = TrainState(
        3, None, split(mesh, params), tx, split(mesh, tx.init(params))
    )
    say("check of a lost one", message_of(jaxscale.check, train_state))
    numbers = jaxscale.metrics(state)
    say(
        "metrics", {name: np.asarray(value).tolist() for name, value in numbers.items()}
    )
    say("to_state_dict", message_of(jaxscale.to_state_dict, state))
    gathered = process_allgather(state, tiled=True)
    saved = jaxscale.to_state_dict(gathered)
    say("gathered", saved["spikes"]["losses"].shape)
    restored = jaxscale.from_state_dict(state, saved)
    say(
        "restored",
        restored.inner_state[0].trace.sharding == state.inner_state[0].trace.sharding,
    )
    members = jax.vmap(tx.init)(jnp.ones((8, 2)))
    say("check of a population", message_of(jaxscale.check, split(mesh, members)))


if __name__ == "__main__":
    if "--process-id" not in sys.argv:
        sys.exit(runpy.run_path(str(EXAMPLE))["launch"](int(sys.argv[1])))
    address, number, process = sys.argv[-5::2]
    jax.distributed.initialize(address, int(number), int(process))
    main()
