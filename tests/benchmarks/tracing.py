"""What it costs to trace `jaxscale.autocast` of many layers, beside plain JAX and casts by hand.

    python tests/benchmarks/tracing.py [--layers 300] [--rounds 7] [--json FILE]

Each layer is `x + activation(x @ w)`, written in a Python loop. Times are those of the process, of
`jax.make_jaxpr`, in turns; the ratio is the median of the turns'. `JAX_REMAT3=1` and the like ask
for JAX's new forms of `jax.checkpoint` and of derivative rules, for all methods.
"""

import gc
import time

import jax
import jax.numpy as jnp
import numpy as np
import report

import jaxscale

ACTIVATIONS = {"tanh": jnp.tanh, "gelu": jax.nn.gelu, "relu": jax.nn.relu}


def multiply(x, w):
    return x @ w


def multiply_by_hand(x, w):
    return (x.astype(jnp.float16) @ w.astype(jnp.float16)).astype(jnp.float32)


def make_network(activation, product=multiply):
    """Returns a function that was never traced."""

    def network(weights, x):
        for w in weights:
            x = x + activation(product(x, w))
        return jnp.sum(x)

    return network


METHODS = {
    "plain JAX": make_network,
    "casts by hand": lambda activation: make_network(activation, multiply_by_hand),
    "jaxscale.autocast": lambda activation: jaxscale.autocast(make_network(activation)),
}
PASSES = {"forward": lambda fun: fun, "gradient": jax.grad}


def seconds_to_trace(fun, *args):
    gc.collect()
    gc.disable()
    try:
        start = time.process_time()
        jax.make_jaxpr(fun)(*args)
        return time.process_time() - start
    finally:
        gc.enable()


def measure(activation, layers, rounds):
    """Returns for each method the median of its times, and of the ratios to plain JAX."""
    weights = [jnp.ones((4, 4))] * layers
    x = jnp.ones((2, 4))
    times = {name: {direction: [] for direction in PASSES} for name in METHODS}
    for _ in range(rounds + 1):
        for name, make in METHODS.items():
            for direction, differentiate in PASSES.items():
                fun = differentiate(make(ACTIVATIONS[activation]))
                times[name][direction].append(seconds_to_trace(fun, weights, x))
    figures = {name: {} for name in METHODS}
    for name in METHODS:
        for direction in PASSES:
            # The first turn filled JAX's caches.
            seconds = np.array(times[name][direction][1:])
            plain = np.array(times["plain JAX"][direction][1:])
            figures[name][direction] = {
                "seconds": float(np.median(seconds)),
                "ratio": float(np.median(seconds / plain)),
            }
    return figures


def table(row):
    def show(direction):
        return lambda figures: "{seconds:.3f} s, {ratio:.2f}".format(
            **figures[direction]
        )

    columns = {direction: show(direction) for direction in PASSES}
    title = (
        f"{row['layers']} layers of {row['activation']}: seconds, and beside plain JAX"
    )
    return report.table(title, columns, row["methods"])


def main():
    parser = report.parser(__doc__, rounds=7)
    parser.add_argument("--layers", type=int, default=300)
    parser.add_argument(
        "--activations", nargs="+", choices=ACTIVATIONS, default=list(ACTIVATIONS)
    )
    options = parser.parse_args()
    console, result = report.begin()
    for activation in options.activations:
        figures = measure(activation, options.layers, options.rounds)
        row = {"activation": activation, "layers": options.layers, "methods": figures}
        result["rows"].append(row)
        console.print(table(row))
        report.write(options.json, result)


if __name__ == "__main__":
    main()
