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

    def init_block():
        return {
            "norms": jnp.ones((2, width)),
            "qkv": normal(width, 3, width // HEAD, HEAD),
            "out": normal(width // HEAD, HEAD, width),
            "in": normal(width, 4 * width),
            "down": normal(4 * width, width),
            "bias": jnp.zeros(4 * width),
        }

    return {
        "blocks": [init_block() for _ in range(layers)],
        "tokens": normal(VOCABULARY, width),
        "positions": normal(length, width),
        "norm": jnp.ones(width),
    }


def normalize(x, scale):
    x = x.astype(jnp.float32)
    mean_square = jnp.mean(x**2, -1, keepdims=True)
    x = x * jax.lax.rsqrt(mean_square + 1e-6)
    return (x * scale).astype(scale.dtype)


def loss_fn(params, tokens, dtype=jnp.float16):
    """Returns the mean cross entropy of the next token, a float32."""
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
    inputs = tokens[:, :-1]
    targets = tokens[:, 1:]
    length = inputs.shape[1]
    x = params["tokens"][inputs] + params["positions"][:length]
    causal = jnp.tril(jnp.ones((length, length), bool))
    for block in params["blocks"]:
        x = x + attend(block, normalize(x, block["norms"][0]), causal)
        y = normalize(x, block["norms"][1])
        hidden = jax.nn.gelu(y @ block["in"] + block["bias"])
        x = x + hidden @ block["down"]
    logits = normalize(x, params["norm"]) @ params["tokens"].T
    logits = logits.astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return jnp.mean(losses)


def attend(block, x, mask):
    """Returns the attention of a block, with a softmax in float32."""
    query, key, value = jnp.einsum("btd,dchk->cbhtk", x, block["qkv"])
    scores = jnp.einsum("bhtk,bhsk->bhts", query, key).astype(jnp.float32)
    scores = jnp.where(mask, scores / HEAD**0.5, -1e9)
    weights = jax.nn.softmax(scores).astype(x.dtype)
    mixed = jnp.einsum("bhts,bhsk->bthk", weights, value)
    return jnp.einsum("bthk,hkd->btd", mixed, block["out"])


def prepare(name, size, clip):
    """Returns the report of a compiled training step, checked, and what runs it."""
    width, layers, batch, length = SIZES[size]
    rng = np.random.default_rng(0)
    params = init_params(rng, width, layers, length)
    tokens = jnp.array(rng.integers(0, VOCABULARY, (batch, length + 1), np.int32))
    method = methods.make(name, clip, loss_fn)
    step, times = steps.compile_step(method.step, method.init(params), tokens)
    losses = _losses(step, method.init(jax.tree.map(jnp.copy, params)), tokens)

    bare = methods.make(methods.BARE, clip, loss_fn)
    bare_step = jax.jit(lambda carry, tokens: bare.step(carry, tokens, jnp.float32))
    expected = _losses(bare_step, bare.init(params), tokens)
    faults = []
    if not np.allclose(losses, expected, rtol=1e-2):
        faults.append(f"{losses}, not {expected}")

    def step_without_loss(carry, tokens):
        carry, _ = step(carry, tokens)
        return carry

    parameters = sum(leaf.size for leaf in jax.tree.leaves(params))
    report = {"faults": faults, "parameters": parameters}
    report |= times | hlo.program(step, parameters)
    return report, steps.repeat_step(step_without_loss, method.init(params), tokens)


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
    row = {"size": options.size, "clipped": options.clip, "methods": reports}
    result["rows"] = [row]
    report.write(options.json, result)
    parameters = next(
        figures["parameters"] for figures in reports.values() if "parameters" in figures
    )
    clipped = "global norm clipped" if options.clip else "unclipped"
    title = f"transformer, {parameters / 1e6:.3g}M parameters, float16, {clipped}"
    console.print(report.table(title, steps.COLUMNS, reports))


if __name__ == "__main__":
    main()
