"""Whether skipping spikes helps: small trainings that spike, in float32; and what is skipped.

    python tests/benchmarks/spikes.py [--only NAME ...] [--json FILE] [--plot FILE]
    python tests/benchmarks/spikes.py --redraw FILE --plot FILE
    python tests/benchmarks/spikes.py --streams [--json FILE]

Each program trains in four ways from the same parameters on the same batches: plainly, with
gradients clipped by their global norm, with the default `SpikeRule`, and with both. A step that is
not finite is skipped in all of them. What a program is measured by does not see the bad batches.

The figures of `--json` hold each loss and norm of the plain runs, which the tests replay.

With `--streams` nothing trains. The default rule judges norms that are made up, in
`tests/support/spike_streams.py`.
"""

import json
import pathlib
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import endings
import jax
import jax.numpy as jnp
import numpy as np
import optax
import report
from parity_linen import Transformer, mean_cross_entropy
from parity_setup import (
    CHARACTERS,
    distance,
    draw_rows,
    draw_text,
    held_out_text,
    read_digits,
)

import jaxscale

sys.path.append(str(pathlib.Path(__file__).parent.parent / "support"))
import spike_streams

LENGTH = 32
CLIP = 1.0


class Program(NamedTuple):
    """A training.

    Attributes:
      init: `init(key) -> players`, a list of parameters, each with an optimizer of its own.
      losses: for each player `loss(params, players, key, index) -> loss`.
      evaluate: `evaluate(players) -> value`, lower is better.
    """

    init: Callable[[jax.Array], list[Any]]
    losses: list[Callable[..., jax.Array]]
    evaluate: Callable[[list[Any]], jax.Array]


def transformer(bad=0.0, batch=16):
    """A decoder of letters; from step 100 on a part `bad` of its batches is random letters."""
    model = Transformer()

    def init(key):
        return [model.init(key, jnp.zeros((1, LENGTH), jnp.int32))]

    def cross_entropy(params, text):
        logits = model.apply(params, text[:, :-1])
        return mean_cross_entropy(logits, text[:, 1:])

    def loss(params, players, key, index):
        (text,) = draw_text(key, batch, LENGTH)
        noise_key = jax.random.fold_in(key, 1)
        bad_key = jax.random.fold_in(key, 2)
        noise = jax.random.randint(noise_key, text.shape, 0, CHARACTERS)
        is_bad = jax.random.bernoulli(bad_key, bad) & (index >= 100)
        return cross_entropy(params, jnp.where(is_bad, noise, text))

    def evaluate(players):
        return cross_entropy(players[0], *held_out_text(LENGTH))

    return Program(init, [loss], evaluate)


def gan(noise=16, width=128, batch=64):
    """Digits from noise: a generator and a discriminator of three layers each."""
    images, held_out = (
        jnp.asarray(digits.images).reshape(-1, 64) * 2 - 1 for digits in read_digits()
    )

    def init_layers(key, *sizes):
        keys = jax.random.split(key, len(sizes))
        layers = []
        for layer_key, inputs, outputs in zip(keys, sizes, sizes[1:], strict=False):
            weight = jax.random.normal(layer_key, (inputs, outputs))
            layers.append(weight * (2 / inputs) ** 0.5)
        return layers

    def run(weights, x):
        for weight in weights[:-1]:
            x = jax.nn.leaky_relu(x @ weight, 0.2)
        return x @ weights[-1]

    def init(key):
        generator_key, discriminator_key = jax.random.split(key)
        return [
            init_layers(generator_key, noise, width, width, 64),
            init_layers(discriminator_key, 64, width, width, 1),
        ]

    def generate(generator, key, number):
        return jnp.tanh(run(generator, jax.random.normal(key, (number, noise))))

    def generator_loss(params, players, key, index):
        logits = run(players[1], generate(params, key, batch))
        return jax.nn.softplus(-logits).mean()

    def discriminator_loss(params, players, key, index):
        (real,) = draw_rows(jax.random.fold_in(key, 1), batch, images)
        fake = generate(players[0], key, batch)
        loss_on_real = jax.nn.softplus(-run(params, real)).mean()
        loss_on_fake = jax.nn.softplus(run(params, fake)).mean()
        return loss_on_real + loss_on_fake

    def evaluate(players):
        fake = generate(players[0], jax.random.key(3), len(held_out))
        return distance(fake, held_out)

    return Program(init, [generator_loss, discriminator_loss], evaluate)


ADAM, MOMENTUM = optax.adam(2e-3, b2=0.99), optax.sgd(0.4, momentum=0.9)
# What it is, how it is made, the optimizer of each player, and the steps.
PROGRAMS = {
    "steady": ("a transformer, Adam at 0.002", transformer, ADAM, 400),
    "high rate": ("the same, momentum at 0.4", transformer, MOMENTUM, 400),
    "bad batches": (
        "as steady, 2 % random text",
        partial(transformer, bad=0.02),
        ADAM,
        400,
    ),
    "GAN": ("digits, Adam at 0.01", gan, optax.adam(1e-2, b1=0.5), 800),
}


def train(program, tx, way, seeds, steps):
    """Returns what came of a training, with a list over the seeds in each field."""
    if "clipped" in way:
        tx = optax.chain(optax.clip_by_global_norm(CLIP), tx)
    spikes = None
    if "rule" in way:
        spikes = jaxscale.SpikeRule()
    tx = jaxscale.skip_nonfinite(tx, spikes=spikes)

    def step(carry, index, key):
        players, states = map(list, carry)
        step_key = jax.random.fold_in(key, index)
        losses, norms, skipped = [], [], []
        for number, loss_fn in enumerate(program.losses):
            params = players[number]
            player_key = jax.random.fold_in(step_key, number)
            value_and_grad = jax.value_and_grad(loss_fn)
            loss, grads = value_and_grad(params, players, player_key, index)
            updates, state = tx.update(grads, states[number], params, value=loss)
            players[number] = optax.apply_updates(params, updates)
            states[number] = state
            squares = sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(grads))
            losses.append(loss)
            norms.append(jnp.sqrt(squares))
            skipped.append(~state.step_applied)
        return (players, states), tuple(map(jnp.stack, (losses, norms, skipped)))

    @jax.jit
    @jax.vmap
    def run(seed):
        players = program.init(jax.random.key(seed))
        carry = players, list(map(tx.init, players))
        step_of_seed = partial(step, key=jax.random.key(seed + 1000))
        (players, _), figures = jax.lax.scan(step_of_seed, carry, jnp.arange(steps))
        return program.evaluate(players), figures

    started = time.perf_counter()
    # losses, norms and skipped are [seed, step, player]
    final, (losses, norms, skipped) = run(jnp.asarray(seeds))
    return {
        "final": np.asarray(final).tolist(),
        "skipped": np.asarray(skipped).sum((1, 2)).tolist(),
        "seconds": time.perf_counter() - started,
        "losses": _short(losses),
        "norms": _short(norms),
        "skips": [np.argwhere(of_seed).tolist() for of_seed in np.asarray(skipped)],
    }


def _short(numbers):
    """Returns the numbers as lists, [seed][player][step], to four digits."""
    lists = np.asarray(numbers, np.float64).swapaxes(1, 2)
    return [[[float(f"{x:.4g}") for x in steps] for steps in seed] for seed in lists]


@partial(jax.jit, static_argnums=0)
def judge_streams(rule, norms):
    """Whether a rule skips each step, [run, step], by its norm alone."""

    def step(state, norm):
        is_spike, state = rule.judge(state, None, norm, True)
        return state, is_spike

    def judge_run(norms):
        _, is_spike = jax.lax.scan(step, rule.init(), norms)
        return is_spike

    return jax.vmap(judge_run)(norms)


def judge_stream(about, asked, stream):
    """Returns what is skipped of a stream: steps a run, and the share of those asked about."""
    norms = stream.norms.astype(np.float32)
    skipped = np.asarray(judge_streams(jaxscale.SpikeRule(), norms))
    hits = (skipped & stream.counted).sum()
    return {
        "stream": about,
        "asked": asked,
        "skipped": skipped.sum(1).tolist(),
        "share": float(hits / stream.counted.sum()),
    }


def judge_all_streams():
    """Returns a row for each stream of the table."""
    rows = []
    steps = spike_streams.STEPS
    for size in (10, 1e6, 1e30):
        stream = spike_streams.jumps(size, steps=steps)
        rows.append(judge_stream(f"1 ± 0.1, then {size:g} times that", "steps", stream))
    doubled = spike_streams.jumps(2, start=0.5, noise=0, runs=1, steps=steps)
    rows.append(judge_stream("0.5, then 1", "steps", doubled))
    from_zero = doubled._replace(norms=1.0 * doubled.counted)
    rows.append(judge_stream("0, then 1", "steps", from_zero))
    for name in spike_streams.DRAWN:
        rows.append(judge_stream(name, "steps", spike_streams.drawn(name)))
    for share in (0.01, 0.02, 0.03, 0.05):
        for otherwise in (0.0, 1e-6):
            stream = spike_streams.rare_gradients(share, otherwise)
            about = f"about 1 in {share:.0%} of the steps, else {otherwise:g}"
            rows.append(judge_stream(about, "of these", stream))
    for share in (0.03, 0.04, 0.05):
        stream = spike_streams.rare_kind(share, 1000.0)
        rows.append(
            judge_stream(f"1 ± 0.1, and 1000 in {share:.0%}", "of these", stream)
        )
    about = "1 ± 0.01, and 10 in every 50th step"
    rows.append(judge_stream(about, "of these", spike_streams.every_50th()))
    about = "1 ± 0.1, 1000 once, and 2 after 30 more steps"
    rows.append(judge_stream(about, "of the 2", spike_streams.single(600)))
    return rows


def main():
    parser = endings.parser(__doc__)
    names = list(PROGRAMS)
    parser.add_argument(
        "--only", nargs="+", choices=names, default=names, metavar="NAME"
    )
    parser.add_argument(
        "--streams", action="store_true", help="judge streams that are made up"
    )
    options = parser.parse_args()
    if options.streams:
        _, result = report.begin()
        result["rows"] = judge_all_streams()
        print(endings.streams(result["rows"]))
        return report.write(options.json, result, indent=None)
    if options.redraw:
        result = json.loads(options.redraw.read_text())
    else:
        _, result = report.begin()
        result["seeds"] = options.seeds
        for name in options.only:
            about, make, tx, steps = PROGRAMS[name]
            steps = options.steps or steps
            row = {"program": name, "about": about, "steps": steps, "ways": {}}
            for way in endings.WAYS:
                figures = train(make(), tx, way, range(options.seeds), steps)
                row["ways"][way] = figures
                shown = {key: figures[key] for key in ("final", "skipped", "seconds")}
                print(name, way, shown)
            for way in endings.WAYS[1:]:  # the tests replay the plain runs
                del row["ways"][way]["norms"]
                if way != "rule":  # the picture shows its losses
                    del row["ways"][way]["losses"]
            result["rows"].append(row)
    print(endings.spikes(result["rows"]))
    report.write(options.json, result, indent=None)
    if options.plot:
        endings.draw_spikes(result, options.plot)


if __name__ == "__main__":
    main()
