"""Whether float16 with a loss scale trains like float32, on programs that were written in float32.

    python tests/benchmarks/parity.py [--models NAME ...] [--json FILE] [--plot FILE]
    python tests/benchmarks/parity.py --redraw FILE --plot FILE

Each model trains in six ways, from the same parameters on the same data: in float32 as written, by
`jaxscale.autocast` alone, where a step that is not finite is skipped, and by `autocast` with the
default loss scale, the adaptive one, `scale_backward` around the loss, and around the network. Its
code is the same each time (`parity_setup.py`). Several seeds show how far two runs differ anyhow.
What is trained is evaluated in float32.

A gradient element counts as flushed if it is exactly zero, but not in float32 at the same
parameters on the same batch. The gradient error is the norm of their difference from float32's,
relative to the norm of the latter. Both are taken at several moments of the training, of which the
share is the mean, the error the median. Where `scale_backward` repeats a backward pass at a lower
scale, that is counted in each step.

Last, one step of one seed is compiled for each way in float16, and timed: the ways in turns.
"""

import contextlib
import functools
import json
import operator
import os
import time
from typing import NamedTuple

# For XLA on CPU, which may keep float32 between float16 operations. To be set before JAX starts.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_allow_excess_precision=false"
)

import endings
import jax
import jax.numpy as jnp
import numpy as np
import parity_equinox
import parity_linen
import parity_plain
import report
from parity_setup import WAYS, Model

import jaxscale
from jaxscale._backward import passes

# The chunks of a training, between which the gradients are looked at.
CHUNKS = 5
MODELS = {
    "super-resolution": Model(
        parity_plain.super_resolution,
        "examples/quickstart.py",
        "test MSE, 1e-4",
        60,
        48,
    ),
    "transformer": Model(
        parity_linen.transformer, "nanodo, in nn.scan and nn.remat", "test loss", 250, 8
    ),
    "ResNet": Model(
        parity_linen.resnet,
        "Flax's imagenet example",
        "test loss",
        160,
        32,
        vmapped=False,
    ),
    "LSTM": Model(parity_plain.lstm, "Haiku's rnn example", "test loss", 300, 16),
    "GAN": Model(
        parity_equinox.dcgan,
        "Equinox's DCGAN example",
        "distance to digits",
        250,
        32,
        vmapped=False,
    ),
    "PPO": Model(parity_linen.ppo, "purejaxrl's ppo.py", "return, of 500", 150, 8),
    "PINN": Model(
        parity_plain.allen_cahn,
        "jaxpi's Allen-Cahn",
        "test loss",
        1000,
        256,
        differentiated=True,
    ),
}


def stack(trees):
    """Stacks trees of arrays, along a new axis in front."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


@contextlib.contextmanager
def counted_repeats():
    """Yields a list to which each backward pass of `scale_backward` adds its repeats."""
    repeats = []
    token = passes.observer.set(lambda report: repeats.append(int(report.num_repeats)))
    try:
        yield repeats
    finally:
        passes.observer.reset(token)


class Look(NamedTuple):
    """What a way does to the gradients of a loss, at a moment of the training."""

    scale: jax.Array
    skipped: jax.Array  # the number of steps, so far
    flushed: jax.Array  # the share of the gradients' elements
    error: jax.Array  # of the gradients, relative to their norm


def look_at_gradients(loss, way):
    """Compares the gradients of a loss in one way with those of float32."""
    metrics = jaxscale.metrics(loss.opt_state)
    scale = metrics["loss_scale"]
    skipped = metrics["total_notfinite"]
    if not way.half:
        return Look(scale, skipped, jnp.zeros(()), jnp.zeros(()))
    exact = jax.tree.leaves(jax.grad(loss.loss_fn)(loss.params))
    grads = jaxscale.grad(way.cast(loss.loss_fn), loss.opt_state)(loss.params)
    flushed = nonzero = error = norm = 0
    for grad, true in zip(jax.tree.leaves(grads), exact, strict=True):
        flushed += jnp.sum((grad == 0) & (true != 0))
        nonzero += jnp.sum(true != 0)
        error += jnp.sum((grad - true) ** 2)
        norm += jnp.sum(true**2)
    share = flushed / jnp.maximum(nonzero, 1)
    return Look(scale, skipped, share, jnp.sqrt(error / norm))


def map_seeds(function, number, vmapped):
    """Returns the compiled function of a number of seeds, from that of one.

    Its one argument and its result are trees, whose arrays get an axis of the seeds in front.
    """
    if vmapped:
        return jax.jit(jax.vmap(function))
    compiled = jax.jit(function)

    def run_one_by_one(args):
        results = []
        for seed in range(number):
            results.append(compiled(jax.tree.map(operator.itemgetter(seed), args)))
        return stack(results)

    return run_one_by_one


def train(model, way, seeds, steps, batch, show):
    """Returns what came of a model trained in one way, with a list over the seeds in each field."""
    program = model.make(way, steps, batch)
    number = len(seeds)

    def step_key(seed, index):
        return jax.random.fold_in(jax.random.key(seed + 1000), index)

    chunks = min(CHUNKS, steps)
    chunk = steps // chunks
    # XLA on CPU takes many times as long for a convolution in a loop.
    compiled_steps = chunk if model.vmapped else 1

    def run_seed(args):
        carry, seed, first = args
        if compiled_steps == 1:
            carry, loss = program.step(carry, step_key(seed, first))
            return carry, loss[None]
        indices = first + jnp.arange(compiled_steps)
        return jax.lax.scan(
            lambda carry, i: program.step(carry, step_key(seed, i)), carry, indices
        )

    def look_at_seed(args):
        carry, seed, first = args
        losses = program.losses(carry, step_key(seed, first))
        return stack([look_at_gradients(loss, way) for loss in losses])

    run_chunk = map_seeds(run_seed, number, model.vmapped)
    look = map_seeds(look_at_seed, number, model.vmapped)
    evaluate = map_seeds(program.evaluate, number, model.vmapped)
    started = time.perf_counter()
    # Not compiled as a whole, which would take longer than all that it saves.
    carry = stack([program.init(jax.random.key(seed)) for seed in seeds])
    seeds = jnp.asarray(seeds)
    first = jnp.zeros_like(seeds)
    # compiled here, so that its repeats are not counted
    looks = [look((carry, seeds, first))]
    history = []
    with counted_repeats() as repeats:
        for _ in range(chunks):
            for _ in range(chunk // compiled_steps):
                carry, losses = run_chunk((carry, seeds, first))
                first += compiled_steps
                history.append(losses)
            looks.append(look((carry, seeds, first)))
            show(float(losses[:, -1].mean()))
        jax.effects_barrier()
    history = np.concatenate(history, 1)
    looks = jax.tree.map(np.asarray, stack(looks))  # [time, seed, loss]
    # An overflow, which is skipped, counts as an infinite error.
    errors = np.nan_to_num(looks.error, nan=np.inf)
    return {
        "final": evaluate(carry).tolist(),
        "train_loss": history[:, -max(1, steps // 10) :].mean(1).tolist(),
        "flushed": looks.flushed.mean((0, 2)).tolist(),
        "gradient_error": np.median(errors, (0, 2)).tolist(),
        "skipped": looks.skipped[-1].sum(-1).tolist(),
        "loss_scale": looks.scale[-1].tolist(),
        "passes": len(repeats),
        "repeated": sum(repeats),
        "seconds": time.perf_counter() - started,
    }


def costs(model, ways, steps, batch, rounds):
    """Returns what a step of one seed costs in float16: XLA's figures, and times in turns."""
    figures = {}
    runs = {}
    key = jax.random.key(0)
    for way in ways:
        if not way.half:
            continue
        program = model.make(way, steps, batch)
        carry = jax.jit(program.init)(key)
        compiled = jax.jit(program.step).lower(carry, key).compile()
        figures[way.name] = {
            "bytes": compiled.cost_analysis()["bytes accessed"],
            "temporary": compiled.memory_analysis().temp_size_in_bytes,
            "milliseconds": [],
        }
        runs[way.name] = functools.partial(compiled, carry, key)
    for _ in range(rounds):
        for name, run in runs.items():
            started = time.perf_counter()
            jax.block_until_ready(run())
            seconds = time.perf_counter() - started
            figures[name]["milliseconds"].append(1e3 * seconds)
    return figures


def measure(name, options, show):
    """Returns the row of a model: what came of each way, and what a step of it costs."""
    model = MODELS[name]
    steps = options.steps or model.steps
    batch = options.batch or model.batch
    row = {"model": name, "like": model.like, "measured": model.measured, "ways": {}}
    ways = WAYS
    if model.differentiated:
        ways = [way for way in WAYS if way.boundary != "network"]
    for way in ways:

        def show_loss(loss, way=way):
            show(f"{name}, {way.name}: loss {loss:.5g}")

        seeds = range(options.seeds)
        row["ways"][way.name] = train(model, way, seeds, steps, batch, show_loss)
    for way, cost in costs(model, ways, steps, batch, options.rounds).items():
        row["ways"][way]["cost"] = cost
    return row | {"steps": steps, "batch": batch}


def main():
    parser = endings.parser(__doc__)
    add = parser.add_argument
    add("--models", nargs="+", choices=MODELS, default=list(MODELS), metavar="MODEL")
    add("--batch", type=int, help="the size of a batch, instead of that of each model")
    add("--rounds", type=int, default=15, help="how often a step of each way is timed")
    options = parser.parse_args()
    if options.redraw:
        result = json.loads(options.redraw.read_text())
    else:
        console, result = report.begin()
        result["seeds"] = options.seeds
        with console.status("") as status:
            for name in options.models:
                result["rows"].append(measure(name, options, status.update))
                report.write(options.json, result)
    for table in (endings.parity, endings.scalings, endings.costs):
        print(table(result["rows"]), end="\n\n")
    if options.plot:
        endings.draw_parity(result, options.plot)


if __name__ == "__main__":
    main()
