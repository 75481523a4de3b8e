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


def scaled_value_and_grad(loss_fn):
    """Returns a function of parameters and batch, to the loss and its gradients."""

    def scaled_loss_fn(params, batch):
        return SCALE * loss_fn(params, batch)

    def value_and_grad(params, batch):
        loss, grads = jax.value_and_grad(scaled_loss_fn)(params, batch)
        return loss / SCALE, jax.tree.map(lambda grad: grad / SCALE, grads)

    return value_and_grad


def compile_anew(fun, *args):
    """Compiles with nothing cached. Returns the program, and CPU times of tracing and compiling."""
    jax.clear_caches()
    start = time.process_time()  # of this process and its threads, whatever others run
    traced = jax.jit(lambda *args: fun(*args)).trace(*args)
    trace_s = time.process_time() - start
    start = time.process_time()
    program = traced.lower().compile()
    compile_s = time.process_time() - start
    return program, {"trace_s": trace_s, "compile_s": compile_s}


def prepare(name, kind, size, steps, expected=None):
    """Returns the report of a method, and what times its tracing and compiling.

    Without the gradients of float32 that are expected, the report has the gradients themselves.
    """
    jax.config.update("jax_enable_compilation_cache", False)
    task = models.MODELS[kind](size)
    loss_fn = casts.METHODS[name](task)
    params = task.init()
    batch = task.batch(0)
    value_and_grad = scaled_value_and_grad(loss_fn)
    forward = jaxprs.products(jax.make_jaxpr(loss_fn)(params, batch))
    both = jaxprs.products(jax.make_jaxpr(value_and_grad)(params, batch))
    program, _ = compile_anew(value_and_grad, params, batch)
    _, grads = program(params, batch)
    grads = [np.asarray(grad, np.float64) for grad in jax.tree.leaves(grads)]
    report = {
        "parameters": sum(grad.size for grad in grads),
        "forward": {"half": forward.half, "products": forward.total},
        "backward": {
            "half": both.half - forward.half,
            "products": both.total - forward.total,
        },
        "kept_bytes": jaxprs.residual_bytes(
            lambda params: loss_fn(params, batch), params
        ),
        "temporary_bytes": program.memory_analysis().temp_size_in_bytes,
        "not_finite": sum(np.sum(~np.isfinite(grad)).item() for grad in grads),
    }
    if expected is None:
        report["grads"] = grads
    else:
        report |= cosines(grads, expected)
    report |= train(program, params, task, steps)
    if name == casts.FLOAT32:
        # What training itself makes of a difference as small as those of half precision.
        half_params = jax.tree.map(lambda p: p.astype(jnp.float16), params)
        rounded_params = jax.tree.map(lambda p: p.astype(jnp.float32), half_params)
        report["from_rounded"] = train(program, rounded_params, task, steps)

    def compile_again(seconds):
        """Compiles once, however long it takes."""
        _, times = compile_anew(value_and_grad, params, batch)
        return times

    return report, compile_again


def cosines(grads, expected):
    """Returns the cosine of the whole tree, and of the leaf where it is smallest."""

    def cosine(one, other):
        norms = np.linalg.norm(one) * np.linalg.norm(other)
        if norms == 0:
            return 0.0
        return float(np.vdot(one, other) / norms)

    def join(leaves):
        return np.concatenate([np.ravel(leaf) for leaf in leaves])

    return {
        "cosine": cosine(join(grads), join(expected)),
        "smallest_cosine": min(map(cosine, grads, expected)),
    }


def train(program, params, task, steps):
    """Returns the losses of a training with AdamW, and the number of skipped steps."""
    tx = optax.apply_if_finite(optax.adamw(LEARNING_RATE), max_consecutive_errors=steps)

    @jax.jit
    def update(grads, state, params):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    losses = []
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
    sharding = SingleDeviceSharding(device)
    task = models.MODELS[kind](size)
    params = jax.eval_shape(task.init)
    batch = jax.eval_shape(lambda: task.batch(0))
    args = jax.tree.map(lambda aval: aval.update(sharding=sharding), (params, batch))
    value_and_grad = scaled_value_and_grad(casts.METHODS[name](task))
    compiled = jax.jit(value_and_grad).lower(*args).compile()
    return {"temporary_bytes": compiled.memory_analysis().temp_size_in_bytes}, None


def _show_h100(report):
    if "h100" not in report:
        return ""
    return f"{report['h100']['temporary_bytes'] / 1e6:.0f}"


def table(row):
    exact = row["methods"][casts.FLOAT32]
    rounded = exact["from_rounded"]["loss"] - exact["loss"]
    columns = {
        "forward": lambda report: "{half}/{products}".format(**report["forward"]),
        "backward": lambda report: "{half}/{products}".format(**report["backward"]),
        "1 - cosine": lambda report: f"{1 - report['cosine']:.1e}",
        "largest": lambda report: f"{1 - report['smallest_cosine']:.1e}",
        "loss - float32": lambda report: f"{report['loss'] - exact['loss']:+.4f}",
        "kept MB": lambda report: f"{report['kept_bytes'] / 1e6:.1f}",
        "temp MB": lambda report: f"{report['temporary_bytes'] / 1e6:.1f}",
        "H100 MB": _show_h100,
        "trace": lambda report: f"{report['trace']['median']:.2f}",
        "compile": lambda report: f"{report['compile']['median']:.2f}",
    }
    title = f"{row['model']}, {row['parameters'] / 1e6:.3g}M parameters"
    caption = (
        f"float32 after {row['steps']} steps: {exact['loss']:.4f}, {rounded:+.4f} if it starts "
        "from rounded weights"
    )
    return report.table(title, columns, row["methods"], caption)


def measure(kind, names, options, show):
    """Returns the row of a model."""
    first, *others = names
    model = (kind, options.size, options.steps)
    limit = options.limit
    ready, reports = processes.prepare({first: (prepare, first, *model)}, limit, show)
    exact = reports[first]
    if "error" in exact:
        raise SystemExit(f"{first}: {exact['error']}")
    grads = exact.pop("grads")
    exact |= cosines(grads, grads)
    jobs = {name: (prepare, name, *model, grads) for name in others}
    others_ready, reports_of_others = processes.prepare(jobs, limit, show)
    ready |= others_ready
    reports |= reports_of_others
    turns = processes.take_turns(ready, options.rounds, None, show)
    for name, times in turns.items():
        for key in ("trace", "compile"):
            seconds = statistics.median(turn[f"{key}_s"] for turn in times)
            ratio = processes.ratio(times, turns[first], f"{key}_s")
            reports[name][key] = ratio | {"seconds": seconds}
    if options.h100:
        for name in ready:
            show(f"{name}: compiling for an H100")
            memory = processes.call(
                compile_for_h100, name, kind, options.h100, limit=limit
            )
            reports[name]["h100"] = {"size": options.h100} | memory
    return {
        "model": kind,
        "size": options.size,
        "parameters": exact["parameters"],
        "steps": options.steps,
        "scale": SCALE,
        "methods": reports,
    }


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
