"""jaxopt's `OptaxSolver.run_iterator`, which takes the optimizer and the loss."""

import jaxopt
from mlp import init, mean_squared_error, small_loss
from runs import batches, examples, optimizer, skipped
from watch import in_precision

STEPS = 160


def train(dtype, scaled, skips, batch):
    loss = in_precision(small_loss, dtype, scaled)
    solver = jaxopt.OptaxSolver(
        lambda params, data: loss(params, *data), optimizer(skips)
    )
    # The solver takes the first batch for the shapes of its state alone.
    data = [examples(), *batches(STEPS, batch)]
    params, state = solver.run_iterator(init(), iter(data))
    return float(mean_squared_error(params, *examples())), skipped(state)
