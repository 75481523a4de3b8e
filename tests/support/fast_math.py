"""Run by `test_verdict` under a compiler that may reorder arithmetic, and so make 0 of x - x.

In a process of its own: such an option of the compiler holds for all that a process compiles.
"""

import jax
import numpy as np
import optax
from following import Following

import jaxscale

TREE = {
    "float32": np.ones(1000, np.float32),
    "float16": np.ones((2, 3), np.float16),
    "complex": np.ones(7, np.complex64),
    "large": np.ones(2**17, np.float32),
}
OPTIMIZERS = [
    jaxscale.skip_nonfinite(optax.identity()),
    jaxscale.skip_nonfinite(optax.identity(), max_norm=1.0),
    jaxscale.loss_scaled(optax.identity(), Following()),
]


@jax.jit
def find_verdicts(tree):
    """Returns the verdict of `all_finite` on gradients, and whether each optimizer applies them."""
    verdicts = [jaxscale.all_finite(tree)]
    for tx in OPTIMIZERS:
        _, state = tx.update(tree, tx.init(tree))
        verdicts.append(state.step_applied)
    return verdicts


def spoil(leaf, bad):
    """A leaf whose last element is bad."""
    if np.iscomplexobj(leaf):
        bad = complex(1, bad)
    spoiled = leaf.copy()
    spoiled.flat[-1] = bad
    return spoiled


def main():
    assert all(find_verdicts(TREE))
    for name, leaf in TREE.items():
        for bad in (np.inf, -np.inf, np.nan):
            verdicts = find_verdicts(TREE | {name: spoil(leaf, bad)})
            assert not any(verdicts), (name, bad, verdicts)


if __name__ == "__main__":
    main()
