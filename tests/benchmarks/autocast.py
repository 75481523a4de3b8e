"""What `jaxscale.autocast` does to models, beside other ways to float16, in one run.

    python tests/benchmarks/autocast.py [--size laptop|gpu] [--h100 SIZE] [--json FILE]

The models are Flax models written for float32 (`models.py`), the ways are in `casts.py`. For each:

- products: how many matrix products and convolutions read half precision alone, in the program of
  the loss (forward) and in what its gradient adds (backward, with what is computed again). One in
  a loop counts once.
- cosine: between the gradients and those of float32, of the whole tree and of the leaf where it
  is smallest, before training; and how many elements are not finite. The table has 1 - cosine.
- loss: of the last ten steps of a training on new data in each step, and its difference from
  float32's. Steps whose gradients are not finite are skipped, and counted.
- kept: the bytes that the forward pass keeps for the backward pass, besides parameters and batch;
  and temp, what XLA needs for loss and gradients on the device that this runs on, with what it
  computes again, reuses and converts. With `--h100` also on an NVIDIA H100, for which they
  are compiled without one (see `targets.py`).
- trace, compile: CPU time for loss and gradients with nothing cached, relative to float32; methods
  take turns.

All methods multiply the loss by 1024, which is fixed, and divide the gradients by it. Only casts
differ.
"""

import os
import statistics
import sys
import time

# To be set before JAX starts: without a GPU, the plugin that compiles for one asks for its driver
# unless only the CPU is asked for.
if any(option.startswith("--h100") for option in sys.argv):
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
# And XLA on CPU may keep float32 between float16 operations.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_allow_excess_precision=false"
)

import casts
import jax
import jax.numpy as jnp
import jaxprs
import models
import numpy as np
import optax
import processes
import report

SCALE = 2.0**10
LEARNING_RATE, LAST = 1e-3, 10


def scaled(loss_fn):
    """Returns a function of parameters and batch, to the loss and its gradients."""

    def value_and_grad(params, batch):
        loss, grads = jax.value_and_grad(lambda *args: SCALE * loss_fn(*args))(
            params, batch
        )
        return loss / SCALE, jax.tree.map(lambda g: g / SCALE, grads)

    return value_and_grad


def compiled(fun, *args):
    """Returns the program, and the CPU time of tracing and compiling with nothing cached."""
    jax.clear_caches()
    start = time.process_time()  # of this process and its threads, whatever others run
    traced = jax.jit(lambda *args: fun(*args)).trace(*args)
    middle = time.process_time()
    program = traced.lower().compile()
    return program, {
        "trace_s": middle - start,
        "compile_s": time.process_time() - middle,
    }


def prepare(name, kind, size, steps, expected=None):
    """Returns the report of a method, and what times its tracing and compiling.

    Without the gradients of float32 that are expected, the report has the gradients themselves.
    """
    jax.config.update("jax_enable_compilation_cache", False)
    task = models.MODELS[kind](size)
    loss_fn = casts.METHODS[name](task)
    params, batch = task.init(), task.batch(0)
    step = scaled(loss_fn)
    half, total = jaxprs.products(jax.make_jaxpr(loss_fn)(params, batch))
    half_of_both, both = jaxprs.products(jax.make_jaxpr(step)(params, batch))
    program, _ = compiled(step, params, batch)
    grads = [
        np.asarray(g, np.float64) for g in jax.tree.leaves(program(params, batch)[1])
    ]
    report = {
        "parameters": sum(g.size for g in grads),
        "forward": {"half": half, "products": total},
        "backward": {"half": half_of_both - half, "products": both - total},
        "kept_bytes": jaxprs.residual_bytes(
            lambda params: loss_fn(params, batch), params
        ),
        "temporary_bytes": program.memory_analysis().temp_size_in_bytes,
        "not_finite": sum(int(np.sum(~np.isfinite(g))) for g in grads),
    }
    report |= {"grads": grads} if expected is None else cosines(grads, expected)
    report |= train(program, params, task, steps)
    if name == casts.FLOAT32:
        # What training itself makes of a difference as small as those of half precision.
        rounded = jax.tree.map(
            lambda p: p.astype(jnp.float16).astype(jnp.float32), params
        )
        report["from_rounded"] = train(program, rounded, task, steps)

    # once, however long it takes
    return report, lambda _: compiled(step, params, batch)[1]


def cosines(grads, expected):
    """Returns the cosine of the whole tree, and of the leaf where it is smallest."""

    def cosine(one, other):
        norms = np.linalg.norm(one) * np.linalg.norm(other)
        return float(np.vdot(one, other) / norms) if norms else 0.0

    whole = [np.concatenate([*map(np.ravel, leaves)]) for leaves in (grads, expected)]
    return {
        "cosine": cosine(*whole),
        "smallest_cosine": min(map(cosine, grads, expected)),
    }


def train(program, params, task, steps):
    """Returns the losses of a training with AdamW, and the number of skipped steps."""
    tx = optax.apply_if_finite(optax.adamw(LEARNING_RATE), max_consecutive_errors=steps)

    @jax.jit
    def update(grads, state, params):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state, losses = tx.init(params), []
    for i in range(steps):
        loss, grads = program(params, task.batch(i))
        params, state = update(grads, state, params)
        losses.append(float(loss))
    last = statistics.mean(losses[-LAST:])
    return {"loss": last, "skipped": int(state.total_notfinite), "losses": losses}


def compile_for_h100(name, kind, size):
    """Returns the memory that loss and gradients need there, and nothing to run."""
    import targets
    from jax.sharding import SingleDeviceSharding

    device, *_ = targets.devices("H100", "1")
    task = models.MODELS[kind](size)
    args = jax.tree.map(
        lambda aval: jax.ShapeDtypeStruct(
            aval.shape, aval.dtype, sharding=SingleDeviceSharding(device)
        ),
        (jax.eval_shape(task.init), jax.eval_shape(lambda: task.batch(0))),
    )
    step = scaled(casts.METHODS[name](task))
    analysis = jax.jit(step).lower(*args).compile().memory_analysis()
    return {"temporary_bytes": analysis.temp_size_in_bytes}, None


def table(row):
    exact = row["methods"][casts.FLOAT32]
    rounded = exact["from_rounded"]["loss"] - exact["loss"]
    columns = {
        "forward": lambda each: "{half}/{products}".format(**each["forward"]),
        "backward": lambda each: "{half}/{products}".format(**each["backward"]),
        "1 - cosine": lambda each: f"{1 - each['cosine']:.1e}",
        "largest": lambda each: f"{1 - each['smallest_cosine']:.1e}",
        "loss - float32": lambda each: f"{each['loss'] - exact['loss']:+.4f}",
        "kept MB": lambda each: f"{each['kept_bytes'] / 1e6:.1f}",
        "temp MB": lambda each: f"{each['temporary_bytes'] / 1e6:.1f}",
        "H100 MB": lambda each: (
            f"{each['h100']['temporary_bytes'] / 1e6:.0f}" if "h100" in each else ""
        ),
        "trace": lambda each: f"{each['trace']['median']:.2f}",
        "compile": lambda each: f"{each['compile']['median']:.2f}",
    }
    return report.table(
        f"{row['model']}, {row['parameters'] / 1e6:.3g}M parameters",
        columns,
        row["methods"],
        f"float32 after {row['steps']} steps: {exact['loss']:.4f}, {rounded:+.4f} if it starts "
        "from rounded weights",
    )


def measure(kind, names, options, show):
    """Returns the row of a model."""
    first, *others = names
    model, limit = (kind, options.size, options.steps), options.limit
    ready, reports = processes.prepare({first: (prepare, first, *model)}, limit, show)
    if "error" in reports[first]:
        raise SystemExit(f"{first}: {reports[first]['error']}")
    grads = reports[first].pop("grads")
    reports[first] |= cosines(grads, grads)
    jobs = {name: (prepare, name, *model, grads) for name in others}
    more, of_others = processes.prepare(jobs, limit, show)
    ready, reports = ready | more, reports | of_others
    turns = processes.take_turns(ready, options.rounds, None, show)
    for name, taken in turns.items():
        for key in ("trace", "compile"):
            seconds = statistics.median(turn[f"{key}_s"] for turn in taken)
            ratio = processes.ratio(taken, turns[first], f"{key}_s")
            reports[name][key] = ratio | {"seconds": seconds}
    for name in ready if options.h100 else ():
        show(f"{name}: compiling for an H100")
        report = processes.call(compile_for_h100, name, kind, options.h100, limit=limit)
        reports[name]["h100"] = {"size": options.h100} | report
    parameters, fixed = (
        reports[first]["parameters"],
        {"steps": options.steps, "scale": SCALE},
    )
    row = {"model": kind, "size": options.size, "parameters": parameters}
    return row | fixed | {"methods": reports}


def main():
    parser = report.parser(__doc__, 3, None, 600, casts.METHODS, models.SIZES)
    add = parser.add_argument
    add(
        "--models",
        nargs="+",
        choices=models.MODELS,
        default=list(models.MODELS),
        metavar="MODEL",
    )
    add("--steps", type=int, default=60, help="of the training")
    add(
        "--h100",
        choices=models.SIZES,
        help="also compile models of this size for an H100",
    )
    options = parser.parse_args()
    names = [name for name in casts.METHODS if name in {casts.FLOAT32, *options.only}]
    console, result = report.begin(width=140)
    with console.status("") as status:
        for kind in options.models:
            row = measure(kind, casts.apart(names, kind), options, status.update)
            result["rows"].append(row)
            console.print(table(row))
            report.write(options.json, result)


if __name__ == "__main__":
    main()
