"""How a step is skipped: what a CPU stores for it, and what it leaves to the other machines."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxprs import equations

from jaxscale._jax import varying
from jaxscale._step.skip import store_once


def barriers(program):
    """How many optimization barriers a traced program has."""
    return sum(eqn.primitive.name == "optimization_barrier" for eqn in equations(program))


def test_gradients_share_one_barrier():
    grads = {"w": jnp.ones(3), "half": jnp.ones(2, jnp.bfloat16), "none": None}
    program = jax.make_jaxpr(store_once)(grads)
    assert barriers(program) == 1
    assert jax.tree.structure(store_once(grads)) == jax.tree.structure(grads)


def test_gradients_that_are_stored_vary_along_the_axes_that_they_did():
    mesh = Mesh(np.array(jax.devices()[:2]), ("d",))
    axes = {}

    def store(shared, own):
        stored = store_once({"shared": shared, "own": own, "other": own * 2})
        axes.update({name: varying(jax.typeof(leaf)) for name, leaf in stored.items()})
        return stored["shared"]

    mapped = jax.shard_map(store, mesh=mesh, in_specs=(P(), P("d")), out_specs=P())
    program = jax.make_jaxpr(mapped)(jnp.ones(2), jnp.ones(2))
    assert axes == {"shared": frozenset(), "own": {"d"}, "other": {"d"}}
    assert barriers(program) == 2
