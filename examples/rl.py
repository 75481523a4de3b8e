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
from collections.abc import Callable
from typing import NamedTuple

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

# A prompt is 8 digits and a separator. An answer is the digits, sorted.
DIGITS = 10
LENGTH = 8
WIDTH = 64
HEADS = 4
LAYERS = 2
SHAPES = {
    "attention": (WIDTH, 3 * WIDTH),
    "mix": (WIDTH, WIDTH),
    "up": (WIDTH, 4 * WIDTH),
    "down": (4 * WIDTH, WIDTH),
}
PROMPTS = 16  # of each step
ANSWERS = 8  # to each prompt
SUPERVISED_STEPS = 120
SUPERVISED_BATCH = 128
LEARNING_RATE = 5e-4
# The scale grows every 10 steps instead of every 2000, and beyond 2**24, so that a short run shows
# what a long one would: it climbs until something overflows, and backs off.
LOSS_SCALE = jaxscale.DynamicLossScale(growth_interval=10, max_scale=2.0**40)
scale_loss = functools.partial(jaxscale.loss_scaled, loss_scale=LOSS_SCALE)
RUNS = {  # the dtype, what wraps the optimizer, and the retries
    "float32": (jnp.float32, jaxscale.skip_nonfinite, 0),
    "bfloat16": (jnp.bfloat16, jaxscale.skip_nonfinite, 0),
    "float16": (jnp.float16, scale_loss, 10),
}


def init_params(key):
    """Returns float32 parameters. The head is zero, so all digits are equally likely at first."""
    keys = iter(jax.random.split(key, 2 + LAYERS * len(SHAPES)))
    layers = []
    for _ in range(LAYERS):
        layer = {}
        for name, shape in SHAPES.items():
            layer[name] = jax.random.normal(next(keys), shape) / shape[0] ** 0.5
        layers.append(layer)
    return {
        "tokens": jax.random.normal(next(keys), (DIGITS + 1, WIDTH)),
        "positions": jax.random.normal(next(keys), (2 * LENGTH, WIDTH)),
        "layers": layers,
        "head": jnp.zeros((WIDTH, DIGITS)),
    }


def predict(params, tokens, positions, attend):
    """Returns the log-probabilities of the next digit; `attend(layer, ...)` is the attention."""
    x = params["tokens"][tokens] + params["positions"][positions]
    for index, layer in enumerate(params["layers"]):
        projected = jax.nn.standardize(x) @ layer["attention"]
        heads = projected.reshape(*x.shape[:-1], 3, HEADS, -1)
        query, key, value = jnp.moveaxis(heads, -3, 0)
        attended = attend(index, query, key, value).reshape(x.shape)
        x = x + attended @ layer["mix"]
        hidden = jax.nn.relu(jax.nn.standardize(x) @ layer["up"])
        x = x + hidden @ layer["down"]
    return jax.nn.log_softmax(jax.nn.standardize(x) @ params["head"])


def choose(log_probs, digits):
    """Returns the log-probabilities of some digits."""
    return jnp.take_along_axis(log_probs, digits[..., None], -1)[..., 0]


def score(params, tokens):
    """Returns the trainer's log-probabilities of the answers' digits, all at once."""

    def attend(_, query, key, value):
        return jax.nn.dot_product_attention(query, key, value, is_causal=True)

    log_probs = predict(params, tokens[:, :-1], jnp.arange(2 * LENGTH), attend)
    return choose(log_probs[:, LENGTH:], tokens[:, LENGTH + 1 :])


def sample(params, prompts, key):
    """Returns prompts with the sampler's answers, and its log-probabilities of their digits."""
    positions = jnp.arange(2 * LENGTH)
    attention = jaxscale.full_precision(jax.nn.dot_product_attention)

    def step(carry, inputs):
        tokens, cache = carry
        position, digit_key = inputs

        def attend(index, query, key, value):
            nonlocal cache
            key_and_value = jnp.stack([key, value])[:, :, 0]
            cache = cache.at[index, :, :, position].set(key_and_value)
            keys, values = cache[index]
            mask = (positions <= position)[None, None, None]
            return attention(query, keys, values, mask=mask)

        token = tokens[:, position, None]
        log_probs = predict(params, token, position[None], attend)[:, 0]
        digits = jax.random.categorical(digit_key, log_probs)
        is_prompt = position < LENGTH  # then the next token is known
        next_tokens = jnp.where(is_prompt, tokens[:, position + 1], digits)
        tokens = tokens.at[:, position + 1].set(next_tokens)
        return (tokens, cache), choose(log_probs, digits)

    tokens = jnp.pad(prompts, ((0, 0), (0, LENGTH)))
    cache = jnp.zeros((LAYERS, 2, len(prompts), 2 * LENGTH, HEADS, WIDTH // HEADS))
    keys = jax.random.split(key, 2 * LENGTH)
    (tokens, _), log_probs = jax.lax.scan(step, (tokens, cache), (positions, keys))
    return tokens, log_probs[LENGTH:].T


def ask(key, number):
    """Returns prompts and their true answers."""
    digits = jax.random.randint(key, (number, LENGTH), 0, DIGITS)
    prompts = jnp.pad(digits, ((0, 0), (0, 1)), constant_values=DIGITS)
    return prompts, jnp.sort(digits)


def policy_loss(params, tokens, sampled, advantages):
    """Returns the loss, whose gradient is a policy gradient, and the trainer's log-probabilities.

    `sampled` are the sampler's log-probabilities. Each digit is weighted by the ratio of the
    probabilities.
    """
    log_probs = score(params, tokens)
    ratios = jnp.exp(log_probs - sampled)
    return -jnp.mean(ratios * advantages[:, None]), log_probs


def supervised_loss(params, tokens):
    """Returns the cross-entropy of true answers."""
    return -jnp.mean(score(params, tokens))


def supervise(seed):
    """Returns parameters that were trained a little on true answers, in float32."""
    tx = jaxscale.skip_nonfinite(optax.adam(1e-3))
    train_step = jax.jit(jaxscale.train_step(supervised_loss, tx))
    params = init_params(jax.random.key(seed))
    opt_state = tx.init(params)
    for step in range(SUPERVISED_STEPS):
        key = jax.random.fold_in(jax.random.key(seed), step)
        prompts, answers = ask(key, SUPERVISED_BATCH)
        tokens = jnp.concatenate([prompts, answers], 1)
        params, opt_state, _ = train_step(params, opt_state, tokens)
    return params


class Programs(NamedTuple):
    """An optimizer, and the programs that are compiled once for all seeds."""

    tx: optax.GradientTransformation
    sample: Callable
    train_step: Callable
    lost_share: Callable


def make_programs(dtype, wrap, retries):
    """Returns the programs that compute in a dtype."""
    tx = wrap(optax.adam(LEARNING_RATE))
    half_loss = jaxscale.autocast(policy_loss, dtype=dtype)
    train_step = jaxscale.train_step(half_loss, tx, has_aux=True, retries=retries)

    def lost_share(params, opt_state, *batch):
        """Returns the share of the gradients that are zero, among those nonzero in float32."""
        differentiate = jaxscale.grad(half_loss, opt_state, has_aux=True)
        differentiate_exactly = jax.grad(policy_loss, has_aux=True)
        grads, _ = ravel_pytree(differentiate(params, *batch)[0])
        exact, _ = ravel_pytree(differentiate_exactly(params, *batch)[0])
        return jnp.sum((grads == 0) & (exact != 0)) / jnp.sum(exact != 0)

    return Programs(
        tx=tx,
        sample=jax.jit(jaxscale.autocast(sample, dtype=dtype)),
        train_step=jax.jit(train_step),
        lost_share=jax.jit(lost_share),
    )


class Result(NamedTuple):
    """The figures of a run with one seed, and two curves by step."""

    figures: dict
    mismatch: np.ndarray  # the RMS of log(ratio) in each step
    rewards: np.ndarray  # the mean reward of each step


def compute_advantages(is_right):
    """Returns the advantage of each answer over the others to the same prompt."""
    by_prompt = is_right.reshape(PROMPTS, ANSWERS)
    mean = by_prompt.mean(1, keepdims=True)
    deviation = by_prompt.std(1, keepdims=True)
    return ((by_prompt - mean) / (deviation + 1e-4)).reshape(-1)


def reinforce(name, params, seed, num_steps, programs):
    """Trains on rewards, from supervised parameters."""
    opt_state = programs.tx.init(params)
    batch = ()
    rewards, log_ratios = [], []
    for step in track(range(num_steps), f"{name}, seed {seed}"):
        key = jax.random.fold_in(jax.random.key(seed), SUPERVISED_STEPS + step)
        ask_key, sample_key = jax.random.split(key)
        prompts, answers = ask(ask_key, PROMPTS)
        prompts = jnp.repeat(prompts, ANSWERS, 0)
        answers = jnp.repeat(answers, ANSWERS, 0)
        tokens, sampled = programs.sample(params, prompts, sample_key)
        is_right = jnp.all(tokens[:, LENGTH + 1 :] == answers, 1)
        batch = tokens, sampled, compute_advantages(is_right)
        params, opt_state, (_, log_probs) = programs.train_step(
            params, opt_state, *batch
        )
        rewards.append(is_right.mean())
        log_ratios.append(np.asarray(log_probs - sampled, np.float64))
    jaxscale.check(opt_state, tx=programs.tx)

    metrics = jaxscale.metrics(opt_state)
    unscaled = jaxscale.NoOpLossScale().init()
    log_ratios = np.array(log_ratios)
    fifth = max(1, num_steps // 5)
    figures = {
        "RMS of log(ratio)": np.sqrt(np.mean(log_ratios**2)),
        "KL divergence (k3)": np.mean(np.expm1(log_ratios) - log_ratios),
        # Of the ratio and its inverse.
        "largest ratio, less 1": np.expm1(np.max(np.abs(log_ratios))),
        "reward, first fifth": np.mean(rewards[:fifth]),
        "reward, last fifth": np.mean(rewards[-fifth:]),
        "gradients lost": programs.lost_share(params, opt_state, *batch),
        "lost without scale": programs.lost_share(params, unscaled, *batch),
        "skipped steps": metrics["total_notfinite"],
        "repeated passes": metrics.get("total_retries", 0),
        "log2(loss scale)": np.log2(metrics["loss_scale"]),
    }
    mismatch = np.sqrt(np.mean(log_ratios**2, (1, 2)))
    return Result(figures, mismatch, np.array(rewards))


def draw_curves(axis, curves, label, color, line):
    """Draws a curve by step, smoothed: each seed thin, their mean thick."""
    window = max(1, len(curves[0]) // 10)
    smooth = [np.convolve(curve, np.ones(window) / window, "valid") for curve in curves]
    steps = np.arange(window, window + len(smooth[0]))
    axis.plot(steps, np.transpose(smooth), line, color=color, linewidth=0.6, alpha=0.6)
    axis.plot(steps, np.mean(smooth, 0), line, color=color, linewidth=2.5, label=label)


def draw(runs, path):
    """Draws the ratio and the reward by step into a file."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.4), layout="constrained")
    styles = [("black", ":"), ("#d55e00", "--"), ("#0072b2", "-")]  # differ in grey too
    for (name, results), style in zip(runs.items(), styles, strict=True):
        draw_curves(left, [result.mismatch for result in results], name, *style)
        draw_curves(right, [result.rewards for result in results], name, *style)
    left.set(xlabel="step", ylabel="RMS of log(trainer's / sampler's)", yscale="log")
    left.set_title("How far the probabilities of the two programs differ")
    right.set(xlabel="step", ylabel="right answers", title="Reward")
    right.legend()
    figure.savefig(path, dpi=90)


def make_table(figures):
    """Returns a table of the mean and the deviation of each figure over the seeds."""
    num_seeds = len(figures["float32"]["skipped steps"])
    table = Table(f"{num_seeds} seeds, ± deviation", *figures)
    for key in figures["float32"]:
        cells = []
        for name in figures:
            values = figures[name][key]
            cells.append(f"{np.mean(values):.2g} ± {np.std(values):.1g}")
        table.add_row(key, *cells)
    table.caption = "lost: gradients of the last batch that are 0, but not in float32"
    return table


def main(num_steps=120, num_seeds=3, picture="rl.png"):
    """Trains in three precisions, prints a table, and writes a picture and the figures."""
    console = Console()
    matplotlib.use("agg")  # draws into a file, even on machines without a screen
    starts = [supervise(seed) for seed in range(num_seeds)]
    runs, figures = {}, {}
    for name, (dtype, wrap, retries) in RUNS.items():
        programs = make_programs(dtype, wrap, retries)
        results = []
        for seed, start in enumerate(starts):
            results.append(reinforce(name, start, seed, num_steps, programs))
        runs[name] = results
        figures[name] = {
            key: [result.figures[key] for result in results]
            for key in results[0].figures
        }

    console.print(make_table(figures))
    draw(runs, picture)
    path = pathlib.Path(picture).resolve()
    text = json.dumps(figures, indent=1, default=float)
    path.with_suffix(".json").write_text(text + "\n")
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
