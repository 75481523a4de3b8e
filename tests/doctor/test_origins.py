"""What a loss is a sum of: how many numbers, and how many times each sum counts."""

import jax.numpy as jnp
from tables import cases

from jaxscale._doctor.origins import Operations
from jaxscale.diagnostics._trace.backward import TracedBackward

SIZE = 8
# A loss of eight numbers, and of each sum in it the size and the weight.
SUMS = {
    "sum": (lambda x: jnp.sum(x), [(SIZE, 1.0)]),
    "mean": (lambda x: jnp.mean(x), [(SIZE, 1 / SIZE)]),
    "divided": (lambda x: jnp.sum(x) / 4, [(SIZE, 1 / 4)]),
    "multiplied": (lambda x: jnp.sum(x) * 4, [(SIZE, 4.0)]),
    "multiplied from the left": (lambda x: 4 * jnp.sum(x), [(SIZE, 4.0)]),
    "moved": (lambda x: jnp.sum(x).reshape(1)[0] * 2, [(SIZE, 2.0)]),
    "two": (lambda x: jnp.sum(x**2) / 2 + 3 * jnp.sum(x), [(SIZE, 1 / 2), (SIZE, 3.0)]),
    "of sums": (
        lambda x: jnp.mean(jnp.sum(x.reshape(2, 4), axis=1)),
        [(2, 1 / 2), (4, 1 / 2)],
    ),
    "not linear": (lambda x: jnp.sqrt(jnp.sum(x)), []),
}


@cases("name", SUMS)
def test_the_sums_of_a_loss_have_their_weights(name):
    loss, expected = SUMS[name]
    run = TracedBackward(loss, (jnp.arange(1.0, 1 + SIZE),), {}).run(1.0)
    sums = Operations(run.findings).find_loss_sums(run)
    assert [(total.size, total.weight) for total in sums] == expected
