"""What a whole training step costs: a small float16 transformer, with each method.

    python tests/benchmarks/transformer.py [--size laptop|gpu] [--json FILE] [--only NAME ...]

Parameters are float32, the arithmetic is float16, losses and norms are taken in float32. The steps
are those of `whole.py`. First of all the losses of three steps are compared with those of the same
model in float32 (that the steps are right: `step.py`).
"""

import argparse
import json
import os
import pathlib
import statistics
import time

# For XLA on CPU, which may keep float32 between float16 operations. To be set before JAX starts.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_allow_excess_precision=false"

import hlo
import jax
import jax.numpy as jnp
import machine
import methods
import numpy as np
import optax
import processes
import trees
import whole
from rich.console import Console
from rich.table import Table

VOCABULARY, HEAD = 512, 64
SIZES = {  # width, layers, batch, length
    "tiny": (64, 1, 2, 16),
    "laptop": (256, 4, 4, 128),
    "gpu": (768, 12, 16, 1024),
}


def init_params(rng, width, layers, length):
    def normal(*shape):
        return jnp.array(0.02 * rng.standard_normal(shape, np.float32))

    blocks = [
        {
            "norms": jnp.ones((2, width)),
            "qkv": normal(width, 3, width // HEAD, HEAD),
            "out": normal(width // HEAD, HEAD, width),
            "in": normal(width, 4 * width),
            "down": normal(4 * width, width),
            "bias": jnp.zeros(4 * width),
        }
        for _ in range(layers)
    ]
    tokens, positions = normal(VOCABULARY, width), normal(length, width)
    return {"tokens": tokens, "positions": positions, "blocks": blocks, "norm": jnp.ones(width)}


def normalize(x, scale):
    x = x.astype(jnp.float32)
    x = x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)
    return (x * scale).astype(scale.dtype)


def loss_fn(params, tokens, dtype=jnp.float16):
    """Returns the mean cross entropy of the next token, a float32."""
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    length = inputs.shape[1]
    x = params["tokens"][inputs] + params["positions"][:length]
    causal = jnp.tril(jnp.ones((length, length), bool))
    for block in params["blocks"]:
        y = normalize(x, block["norms"][0])
        q, k, v = jnp.einsum("btd,dchk->cbhtk", y, block["qkv"])
        scores = jnp.einsum("bhtk,bhsk->bhts", q, k).astype(jnp.float32) / HEAD**0.5
        weights = jax.nn.softmax(jnp.where(causal, scores, -1e9)).astype(dtype)
        mixed = jnp.einsum("bhts,bhsk->bthk", weights, v)
        x = x + jnp.einsum("bthk,hkd->btd", mixed, block["out"])
        y = normalize(x, block["norms"][1])
        x = x + jax.nn.gelu(y @ block["in"] + block["bias"]) @ block["down"]
    logits = normalize(x, params["norm"]) @ params["tokens"].T
    losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), targets)
    return jnp.mean(losses)


def prepare(name, size, clip):
    """Returns the report of a compiled training step, checked, and what runs it."""
    jax.config.update("jax_enable_compilation_cache", False)
    width, layers, batch, length = SIZES[size]
    rng = np.random.default_rng(0)
    params = init_params(rng, width, layers, length)
    tokens = jnp.array(rng.integers(0, VOCABULARY, (batch, length + 1), np.int32))
    steps = whole.steps(loss_fn, clip)
    (init, step), (init_bare, bare) = steps[name], steps[methods.BARE]
    start = time.perf_counter()
    traced = jax.jit(step, donate_argnums=0).trace(init(params), tokens)
    trace_s = time.perf_counter() - start
    start = time.perf_counter()
    step = traced.lower().compile()
    compile_s = time.perf_counter() - start

    parameters = sum(leaf.size for leaf in jax.tree.leaves(params))
    reference = jax.jit(lambda carry, tokens: bare(carry, tokens, jnp.float32))
    losses = _losses(step, init(jax.tree.map(jnp.copy, params)), tokens)
    expected = _losses(reference, init_bare(params), tokens)
    faults = [] if np.allclose(losses, expected, rtol=1e-2) else [f"{losses}, not {expected}"]
    run = processes.timed(lambda carry: step(carry, tokens)[0], init(params), jax.block_until_ready)
    times = {"trace_s": trace_s, "compile_s": compile_s}
    return {"faults": faults, "parameters": parameters} | times | hlo.program(step, parameters), run


def _losses(step, carry, tokens):
    losses = []
    for _ in range(3):
        carry, loss = step(carry, tokens)
        losses.append(float(loss))
    return losses


def table(row):
    parameters = next(r["parameters"] for r in row["methods"].values() if "parameters" in r)
    clipped = "global norm clipped" if row["clipped"] else "unclipped"
    result = Table(title=f"transformer, {parameters / 1e6:.3g}M parameters, float16, {clipped}")
    result.add_column("method", no_wrap=True)
    headings = ["step ms", "/ bare", "quartiles", "temp/p", "kernels", "trace s", "compile s"]
    for heading in headings:
        result.add_column(heading, justify="right")
    result.add_column("check", overflow="fold")
    for name, report in row["methods"].items():
        if "error" in report:
            result.add_row(name, *[""] * len(headings), report["error"])
            continue
        to_bare = report.get("to_bare")
        result.add_row(
            name,
            f"{1e3 * report['step_s']:.3g}",
            f"{to_bare['median']:.3f}" if to_bare else "",
            f"{to_bare['low']:.3f}-{to_bare['high']:.3f}" if to_bare else "",
            f"{report['temporary_bytes_per_parameter']:.1f}",
            str(report["kernels"]),
            f"{report['trace_s']:.2f}",
            f"{report['compile_s']:.1f}",
            "; ".join(report["faults"]) or "right",
        )
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--size", choices=SIZES, default="laptop")
    add("--clip", nargs="+", choices=trees.CLIPS, default=list(trees.CLIPS))
    add("--only", nargs="+", choices=whole.NAMES, metavar="METHOD")
    add("--rounds", type=int, default=11, help="turns of each method")
    add("--seconds", type=float, default=1, help="length of a turn")
    add("--limit", type=float, default=300, help="seconds to trace, compile and check a method")
    add("--json", type=pathlib.Path, help="where to write the figures")
    options = parser.parse_args()
    console = Console(width=130)
    names = [name for name in whole.NAMES if name in (options.only or whole.NAMES)]
    result = {"machine": processes.call(machine.describe), "rows": []}
    console.print(machine.line(result["machine"]))
    with console.status("") as status:
        for clip in options.clip:
            jobs = {name: (prepare, name, options.size, trees.CLIPS[clip]) for name in names}
            ready, reports = processes.prepare(jobs, options.limit, status.update)
            turns = processes.take_turns(ready, options.rounds, options.seconds, status.update)
            for name, taken in turns.items():
                reports[name]["step_s"] = statistics.median(turn["step_s"] for turn in taken)
                if methods.BARE in turns:
                    reports[name]["to_bare"] = processes.ratio(taken, turns[methods.BARE])
            row = {"size": options.size, "clipped": trees.CLIPS[clip], "methods": reports}
            result["rows"].append(row)
            console.print(table(row))
            if options.json:
                options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
