"""What it costs to trace `jaxscale.autocast` of many layers, beside plain JAX and casts by hand.

    python tests/benchmarks/tracing.py [--layers 300] [--rounds 7] [--json FILE]

Each layer is `x + activation(x @ w)`, written in a Python loop. Times are those of the process, of
`jax.make_jaxpr`, in turns; the ratio is the median of the turns'. `JAX_REMAT3=1` and the like ask
for JAX's new forms of `jax.checkpoint` and of derivative rules, for all methods.
"""

import gc
import statistics
import time

import jax
import jax.numpy as jnp
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
    weights, x = [jnp.ones((4, 4))] * layers, jnp.ones((2, 4))
    taken = {name: {each: [] for each in PASSES} for name in METHODS}
    for _ in range(rounds + 1):  # the first turn fills JAX's caches
        for name, method in METHODS.items():
            for each, differentiated in PASSES.items():
                fun = differentiated(method(ACTIVATIONS[activation]))
                taken[name][each].append(seconds_to_trace(fun, weights, x))
    figures = {}
    for name, times in taken.items():
        figures[name] = {}
        for each in PASSES:
            pairs = list(zip(times[each], taken["plain JAX"][each], strict=True))[1:]
            ratio = statistics.median(ours / plain for ours, plain in pairs)
            median = statistics.median(ours for ours, _ in pairs)
            figures[name][each] = {"seconds": median, "ratio": ratio}
    return figures


def table(row):
    def column(each):
        return lambda figures: "{seconds:.3f} s, {ratio:.2f}".format(**figures[each])

    columns = {each: column(each) for each in PASSES}
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
