"""Why float16: reinforcement learning, where two programs must agree on every probability.

A small transformer learns to sort digits: a little from examples, then from rewards, 1 for an
answer that is sorted and 0 for any other. One program, the sampler, writes the answers, digit by
digit, with a cache of keys and values. Another program, the trainer, learns from them, and weights
each digit by the ratio of its own probability and the sampler's. The ratio should be 1, but the two
programs use different operations, and so round differently. float16 has three bits more than
bfloat16, so in float16 the ratio should be 8 times closer to 1. The price is a loss scale. If a
step overflows, `retries` repeats it at a lower scale: samples cost too much to be dropped.

The program shows that ratio. It does not show runs that collapse because of it, as those of large
models are reported to do (arXiv 2510.26788): this model learns equally well in all precisions, and
loses few gradients without a scale. On a CPU two programs mostly add up in the same order. So this
sampler keeps its attention in float32, as the kernels of inference engines do.
"""

import argparse
import functools
import json
import os
import pathlib

# Set before JAX starts. Otherwise XLA on CPU may keep float32 between float16 operations.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_allow_excess_precision=false"
)

import jax
import jax.numpy as jnp
import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import optax
from jax.flatten_util import ravel_pytree
from rich.console import Console
from rich.progress import track
from rich.table import Table

import jaxscale

# a prompt is 8 digits and a separator; an answer is the digits, sorted
DIGITS, LENGTH = 10, 8
WIDTH, HEADS, LAYERS = 64, 4, 2
SHAPES = [("attention", (WIDTH, 3 * WIDTH)), ("mix", (WIDTH, WIDTH))]
SHAPES += [("up", (WIDTH, 4 * WIDTH)), ("down", (4 * WIDTH, WIDTH))]
PROMPTS, ANSWERS = 16, 8  # of each step, and to each prompt
SUPERVISED_STEPS, SUPERVISED_BATCH, LEARNING_RATE = 120, 128, 5e-4
# The scale grows every 10 steps instead of every 2000, and beyond 2**24, so that a short run shows
# what a long one would: it climbs until something overflows, and backs off.
LOSS_SCALE = jaxscale.DynamicLossScale(growth_interval=10, max_scale=2.0**40)
RUNS = {  # dtype, what wraps the optimizer, and retries
    "float32": (jnp.float32, jaxscale.skip_nonfinite, 0),
    "bfloat16": (jnp.bfloat16, jaxscale.skip_nonfinite, 0),
    "float16": (
        jnp.float16,
        functools.partial(jaxscale.loss_scaled, loss_scale=LOSS_SCALE),
        10,
    ),
}


def init_params(key):
    """Returns float32 parameters. The head is zero, so all digits are equally likely at first."""
    keys = iter(jax.random.split(key, 2 + LAYERS * len(SHAPES)))
    layers = [
        {
            name: jax.random.normal(next(keys), shape) / shape[0] ** 0.5
            for name, shape in SHAPES
        }
        for _ in range(LAYERS)
    ]
    rows = {"tokens": DIGITS + 1, "positions": 2 * LENGTH}
    tables = {
        name: jax.random.normal(next(keys), (number, WIDTH))
        for name, number in rows.items()
    }
    return tables | {"layers": layers, "head": jnp.zeros((WIDTH, DIGITS))}


def predict(params, tokens, positions, attend):
    """Returns the log-probabilities of the next digit; `attend(layer, ...)` is the attention."""
    x = params["tokens"][tokens] + params["positions"][positions]
    for index, layer in enumerate(params["layers"]):
        heads = (jax.nn.standardize(x) @ layer["attention"]).reshape(
            *x.shape[:-1], 3, HEADS, -1
        )
        x = (
            x
            + attend(index, *jnp.moveaxis(heads, -3, 0)).reshape(x.shape) @ layer["mix"]
        )
        x = x + jax.nn.relu(jax.nn.standardize(x) @ layer["up"]) @ layer["down"]
    return jax.nn.log_softmax(jax.nn.standardize(x) @ params["head"])


def choose(log_probs, digits):
    """Returns the log-probabilities of some digits."""
    return jnp.take_along_axis(log_probs, digits[..., None], -1)[..., 0]


def score(params, tokens):
    """The trainer's forward pass: log-probabilities of the answers' digits, all at once."""

    def attend(_, query, key, value):
        return jax.nn.dot_product_attention(query, key, value, is_causal=True)

    log_probs = predict(params, tokens[:, :-1], jnp.arange(2 * LENGTH), attend)
    return choose(log_probs[:, LENGTH:], tokens[:, LENGTH + 1 :])


def sample(params, prompts, key):
    """The sampler: prompts with answers, and log-probabilities of the answers' digits."""
    positions = jnp.arange(2 * LENGTH)
    attention = jaxscale.full_precision(jax.nn.dot_product_attention)

    def step(carry, inputs):
        tokens, cache = carry
        position, key = inputs

        def attend(index, query, *key_and_value):
            nonlocal cache
            cache = cache.at[index, :, :, position].set(
                jnp.stack(key_and_value)[:, :, 0]
            )
            return attention(
                query, *cache[index], mask=(positions <= position)[None, None, None]
            )

        log_probs = predict(params, tokens[:, position, None], position[None], attend)[
            :, 0
        ]
        digits = jax.random.categorical(key, log_probs)
        known = position < LENGTH  # then the next token is in the prompt
        tokens = tokens.at[:, position + 1].set(
            jnp.where(known, tokens[:, position + 1], digits)
        )
        return (tokens, cache), choose(log_probs, digits)

    tokens = jnp.pad(prompts, ((0, 0), (0, LENGTH)))
    cache = jnp.zeros((LAYERS, 2, len(prompts), 2 * LENGTH, HEADS, WIDTH // HEADS))
    keys = jax.random.split(key, 2 * LENGTH)
    (tokens, _), log_probs = jax.lax.scan(step, (tokens, cache), (positions, keys))
    return tokens, log_probs[LENGTH:].T


def ask(key, number):
    """Returns prompts and their true answers."""
    digits = jax.random.randint(key, (number, LENGTH), 0, DIGITS)
    return jnp.pad(digits, ((0, 0), (0, 1)), constant_values=DIGITS), jnp.sort(digits)


def policy_loss(params, tokens, sampled, advantages):
    """Returns the loss, whose gradient is a policy gradient, and the trainer's log-probabilities.

    `sampled` are the sampler's log-probabilities. Each digit is weighted by the ratio of the
    probabilities.
    """
    log_probs = score(params, tokens)
    return -jnp.mean(jnp.exp(log_probs - sampled) * advantages[:, None]), log_probs


def supervise(seed):
    """Returns parameters that were trained a little on true answers, in float32."""
    tx = jaxscale.skip_nonfinite(optax.adam(1e-3))
    train_step = jax.jit(jaxscale.train_step(lambda *args: -jnp.mean(score(*args)), tx))
    params = init_params(jax.random.key(seed))
    opt_state = tx.init(params)
    for step in range(SUPERVISED_STEPS):
        key = jax.random.fold_in(jax.random.key(seed), step)
        tokens = jnp.concatenate(ask(key, SUPERVISED_BATCH), 1)
        params, opt_state, _ = train_step(params, opt_state, tokens)
    return params


def make_programs(dtype, wrap, retries):
    """Returns the optimizer and what is compiled once: the sampler, the step, a measurement."""
    half = functools.partial(jaxscale.autocast, dtype=dtype)
    tx = wrap(optax.adam(LEARNING_RATE))
    train_step = jaxscale.train_step(
        half(policy_loss), tx, has_aux=True, retries=retries
    )

    def lost_share(params, opt_state, *batch):
        """Returns the share of the gradients that are zero, among those nonzero in float32."""
        differentiate = jaxscale.grad(half(policy_loss), opt_state, has_aux=True)
        grads, _ = ravel_pytree(differentiate(params, *batch)[0])
        exact, _ = ravel_pytree(jax.grad(policy_loss, has_aux=True)(params, *batch)[0])
        return jnp.sum((grads == 0) & (exact != 0)) / jnp.sum(exact != 0)

    return tx, jax.jit(half(sample)), jax.jit(train_step), jax.jit(lost_share)


def reinforce(name, params, seed, num_steps, programs):
    """Learns from rewards; returns the figures of the run, and two curves by step."""
    tx, sampler, train_step, lost_share = programs
    opt_state, batch = tx.init(params), ()
    rewards, ratios = [], []  # the ratios' logarithms
    for step in track(range(num_steps), f"{name}, seed {seed}"):
        keys = jax.random.split(
            jax.random.fold_in(jax.random.key(seed), SUPERVISED_STEPS + step)
        )
        prompts, answers = (
            jnp.repeat(each, ANSWERS, 0) for each in ask(keys[0], PROMPTS)
        )
        tokens, sampled = sampler(params, prompts, keys[1])
        right = jnp.all(tokens[:, LENGTH + 1 :] == answers, 1).reshape(PROMPTS, ANSWERS)
        others = right.mean(1, keepdims=True)  # answers to the same prompt
        advantages = (right - others) / (right.std(1, keepdims=True) + 1e-4)
        batch = tokens, sampled, advantages.reshape(-1)
        params, opt_state, (_, log_probs) = train_step(params, opt_state, *batch)
        rewards.append(right.mean())
        ratios.append(np.asarray(log_probs - sampled, np.float64))
    jaxscale.check(opt_state, tx=tx)
    now, ratios, fifth = (
        jaxscale.metrics(opt_state),
        np.array(ratios),
        max(1, num_steps // 5),
    )
    figures = {
        "RMS of log(ratio)": np.sqrt(np.mean(ratios**2)),
        "KL divergence (k3)": np.mean(np.expm1(ratios) - ratios),
        # of it and its inverse
        "largest ratio, less 1": np.expm1(np.max(np.abs(ratios))),
        "reward, first fifth": np.mean(rewards[:fifth]),
        "reward, last fifth": np.mean(rewards[-fifth:]),
        "gradients lost": lost_share(params, opt_state, *batch),
        "lost without scale": lost_share(
            params, jaxscale.NoOpLossScale().init(), *batch
        ),
        "skipped steps": now["total_notfinite"],
        "repeated passes": now["total_retries"],
        "log2(loss scale)": np.log2(now["loss_scale"]),
    }
    return figures, np.sqrt(np.mean(ratios**2, (1, 2))), np.array(rewards)


def draw(curves, path):
    """Draws the ratio and the reward by step: each seed thin, their mean thick."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.4), layout="constrained")
    styles = [("black", ":"), ("#d55e00", "--"), ("#0072b2", "-")]  # differ in grey too
    for (name, runs), (color, line) in zip(curves.items(), styles, strict=True):
        for axis, of_seeds in zip(axes, zip(*runs, strict=True), strict=True):
            window = max(1, len(of_seeds[0]) // 10)
            smooth = [
                np.convolve(each, np.ones(window) / window, "valid")
                for each in of_seeds
            ]
            steps = np.arange(window, window + len(smooth[0]))
            axis.plot(
                steps, np.transpose(smooth), line, color=color, linewidth=0.6, alpha=0.6
            )
            axis.plot(
                steps, np.mean(smooth, 0), line, color=color, linewidth=2.5, label=name
            )
    axes[0].set(xlabel="step", ylabel="RMS of log(trainer's / sampler's)", yscale="log")
    axes[0].set_title("How far the probabilities of the two programs differ")
    axes[1].set(xlabel="step", ylabel="right answers", title="Reward")
    axes[1].legend()
    figure.savefig(path, dpi=90)


def main(num_steps=120, num_seeds=3, picture="rl.png"):
    """Trains in three precisions, prints a table, and writes a picture and the figures."""
    console = Console()
    matplotlib.use("agg")  # draws into a file, even on machines without a screen
    starts = [supervise(seed) for seed in range(num_seeds)]
    results, curves = {}, {}
    for name, run in RUNS.items():
        programs = make_programs(*run)
        runs = [
            reinforce(name, start, i, num_steps, programs)
            for i, start in enumerate(starts)
        ]
        results[name] = {
            key: [figures[key] for figures, *_ in runs] for key in runs[0][0]
        }
        curves[name] = [curve for _, *curve in runs]

    table = Table(f"{num_seeds} seeds, ± deviation", *results)
    for key in results["float32"]:
        values = [of[key] for of in results.values()]
        table.add_row(key, *(f"{np.mean(of):.2g} ± {np.std(of):.1g}" for of in values))
    table.caption = "lost: gradients of the last batch that are 0, but not in float32"
    console.print(table)
    draw(curves, picture)
    path = pathlib.Path(picture).resolve()
    path.with_suffix(".json").write_text(
        json.dumps(results, indent=1, default=float) + "\n"
    )
    console.print(f"The picture is in {path}", soft_wrap=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--steps", type=int, default=120, help="training steps of each run"
    )
    parser.add_argument("--seeds", type=int, default=3, help="runs in each precision")
    parser.add_argument(
        "--picture", default="rl.png", help="where to write the picture"
    )
    arguments = parser.parse_args()
    main(arguments.steps, arguments.seeds, arguments.picture)
