"""NetKet's `VMC`, which takes the optimizer, and the model by its state; the loss is its own.

The Hamiltonian is that much smaller, so the gradients are. In a bad step it is NaN.
"""

import flax.linen as nn
import jax.numpy as jnp
import netket as nk
import numpy as np
from runs import BAD_STEP, FACTOR
from watch import Journal, in_precision

STEPS, SITES, WIDTH = 100, 8, 16
CHAIN = nk.graph.Chain(SITES)
SPINS = nk.hilbert.Spin(0.5, SITES)
ENERGY = nk.operator.Ising(SPINS, CHAIN, h=1.0)
SMALL = nk.operator.Ising(SPINS, CHAIN, h=FACTOR, J=FACTOR)
BAD = nk.operator.Ising(SPINS, CHAIN, h=float("nan"), J=FACTOR)


class LogAmplitude(nn.Module):
    @nn.compact
    def __call__(self, spins):
        hidden = nn.Dense(WIDTH, param_dtype="float32")(spins.astype("float32"))
        last = nn.Dense(1, param_dtype="float32")(nn.silu(hidden))
        return last[..., 0].astype("float32")


def train(dtype, scaled, skips, batch):
    """Returns the energy above the ground state's, in float32, and how many steps were skipped."""
    model = LogAmplitude()
    journal = Journal()
    state = nk.vqs.MCState(
        nk.sampler.ExactSampler(SPINS),
        init_fun=model.init,
        apply_fun=in_precision(model.apply, dtype, scaled),
        n_samples=256,
        seed=0,
        sampler_seed=1,
    )
    left_out = [BAD_STEP] if batch is None else []
    tx = journal.optimizer(skips, left_out)
    driver = nk.driver.VMC(SMALL, tx, variational_state=state)
    for step in range(STEPS):
        driver._ham = BAD if step == BAD_STEP and batch == "bad" else SMALL
        driver.run(1, show_progress=False)
    log_psi = model.apply(state.variables, SPINS.all_states())
    psi = np.exp(np.asarray(log_psi, "float64") - float(jnp.max(log_psi)))
    matrix = ENERGY.to_dense().real
    energy = psi @ matrix @ psi / (psi @ psi)
    lowest = np.linalg.eigvalsh(matrix)[0]
    return energy - lowest, journal.skipped
