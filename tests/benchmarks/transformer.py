"""What a whole training step costs: a small float16 transformer, with each method.

    python tests/benchmarks/transformer.py [--size laptop|gpu] [--json FILE] [--only NAME ...]

Parameters are float32, the arithmetic is float16, losses and norms are taken in float32. The steps
are those of `methods.py`. First of all the losses of three steps are compared with those of the
same model in float32 (that the steps are right: `step.py`).
"""

import os

# For XLA on CPU, which may keep float32 between float16 operations. To be set before JAX starts.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_allow_excess_precision=false"
)

import hlo
import jax
import jax.numpy as jnp
import methods
import numpy as np
import optax
import processes
import report
import step as steps

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
    return {
        "tokens": tokens,
        "positions": positions,
        "blocks": blocks,
        "norm": jnp.ones(width),
    }


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
    losses = optax.softmax_cross_entropy_with_integer_labels(
        logits.astype(jnp.float32), targets
    )
    return jnp.mean(losses)


def prepare(name, size, clip):
    """Returns the report of a compiled training step, checked, and what runs it."""
    width, layers, batch, length = SIZES[size]
    rng = np.random.default_rng(0)
    params = init_params(rng, width, layers, length)
    tokens = jnp.array(rng.integers(0, VOCABULARY, (batch, length + 1), np.int32))
    method, bare = (methods.make(each, clip, loss_fn) for each in (name, methods.BARE))
    step, times = steps.compiled(method.step, method.init(params), tokens)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(params))
    reference = jax.jit(lambda carry, tokens: bare.step(carry, tokens, jnp.float32))
    losses = _losses(step, method.init(jax.tree.map(jnp.copy, params)), tokens)
    expected = _losses(reference, bare.init(params), tokens)
    faults = (
        []
        if np.allclose(losses, expected, rtol=1e-2)
        else [f"{losses}, not {expected}"]
    )
    run = processes.timed(
        lambda carry: step(carry, tokens)[0], method.init(params), jax.block_until_ready
    )
    return {"faults": faults, "parameters": parameters} | times | hlo.program(
        step, parameters
    ), run


def _losses(step, carry, tokens):
    losses = []
    for _ in range(3):
        carry, loss = step(carry, tokens)
        losses.append(float(loss))
    return losses


def main():
    parser = report.parser(__doc__, 11, 1, 300, methods.METHODS, SIZES)
    parser.add_argument("--clip", action="store_true", help="clip the global norm")
    options = parser.parse_args()
    console, result = report.begin()
    jobs = {name: (prepare, name, options.size, options.clip) for name in options.only}
    with console.status("") as status:
        reports = processes.measure(jobs, options, status.update, to_bare=methods.BARE)
    result["rows"] = [
        {"size": options.size, "clipped": options.clip, "methods": reports}
    ]
    report.write(options.json, result)
    parameters = next(
        each["parameters"] for each in reports.values() if "parameters" in each
    )
    clipped = "global norm clipped" if options.clip else "unclipped"
    title = f"transformer, {parameters / 1e6:.3g}M parameters, float16, {clipped}"
    console.print(report.table(title, steps.COLUMNS, reports))


if __name__ == "__main__":
    main()
