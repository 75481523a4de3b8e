"""What a whole training step costs: a small float16 transformer, with each method.

    python tests/benchmarks/transformer.py [--size laptop|gpu] [--json FILE] [--only NAME ...]

The model is Flax's, with `dtype=jnp.float16` in every layer (`models.py`, `casts.py`); parameters,
losses and norms are float32. The steps are those of `methods.py`. First of all the losses of three
steps are compared with those of the same model in float32 (that the steps are right: `step.py`).
"""

import os

# For XLA on CPU, which may keep float32 between float16 operations. To be set before JAX starts.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_allow_excess_precision=false"

import casts
import hlo
import jax
import jax.numpy as jnp
import methods
import models
import numpy as np
import processes
import report
import step as steps


def prepare(name, size, clip):
    """Returns the report of a compiled training step, checked, and what runs it."""
    task = models.transformer(size)
    params, batch = task.init(), task.batch(0)
    method = methods.make(name, clip, casts.flax_dtype(task))
    exact = methods.make(methods.BARE, clip, casts.float32(task))
    step, times = steps.compiled(method.step, method.init(params), batch)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(params))
    losses = _losses(step, method.init(jax.tree.map(jnp.copy, params)), batch)
    expected = _losses(jax.jit(exact.step), exact.init(params), batch)
    faults = [] if np.allclose(losses, expected, rtol=1e-2) else [f"{losses}, not {expected}"]
    run = processes.timed(
        lambda carry: step(carry, batch)[0], method.init(params), jax.block_until_ready
    )
    return {"faults": faults, "parameters": parameters} | times | hlo.program(step, parameters), run


def _losses(step, carry, batch):
    losses = []
    for _ in range(3):
        carry, loss = step(carry, batch)
        losses.append(float(loss))
    return losses


def main():
    parser = report.parser(__doc__, 11, 1, 300, methods.METHODS, models.SIZES)
    parser.add_argument("--clip", action="store_true", help="clip the global norm")
    options = parser.parse_args()
    console, result = report.begin()
    jobs = {name: (prepare, name, options.size, options.clip) for name in options.only}
    with console.status("") as status:
        reports = processes.measure(jobs, options, status.update, to_bare=methods.BARE)
    result["rows"] = [{"size": options.size, "clipped": options.clip, "methods": reports}]
    parameters = reports[methods.BARE]["parameters"]
    clipped = "global norm clipped" if options.clip else "unclipped"
    title = f"transformer, {parameters / 1e6:.3g}M parameters, float16, {clipped}"
    console.print(report.table(title, steps.COLUMNS, reports))
    report.write(options.json, result)


if __name__ == "__main__":
    main()
