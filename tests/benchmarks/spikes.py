"""Whether skipping spikes helps: small trainings that spike, in float32; and what is skipped.

    python tests/benchmarks/spikes.py [--only NAME ...] [--json FILE] [--plot FILE]
    python tests/benchmarks/spikes.py --redraw FILE --plot FILE
    python tests/benchmarks/spikes.py --streams [--json FILE]

Each program trains in four ways from the same parameters on the same batches: plainly, with
gradients clipped by their global norm, with the default `SpikeRule`, and with both. A step that is
not finite is skipped in all of them. What a program is measured by does not see the bad batches.

The figures of `--json` hold each loss and norm of the plain runs, which the tests replay.

With `--streams` nothing trains. The default rule and OLMo's judge norms that are made up, in
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
from parity_linen import Transformer
from parity_setup import digits, distance, held_out_text, some, some_text

import jaxscale

sys.path.append(str(pathlib.Path(__file__).parent.parent / "support"))
import spike_streams

LENGTH, LETTERS = 32, 64
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
        return optax.softmax_cross_entropy_with_integer_labels(
            logits, text[:, 1:]
        ).mean()

    def loss(params, players, key, index):
        text = some_text(key, batch, LENGTH)
        noise = jax.random.randint(jax.random.fold_in(key, 1), text.shape, 0, LETTERS)
        is_bad = jax.random.bernoulli(jax.random.fold_in(key, 2), bad) & (index >= 100)
        return cross_entropy(params, jnp.where(is_bad, noise, text))

    return Program(
        init, [loss], lambda players: cross_entropy(players[0], held_out_text(LENGTH))
    )


def gan(noise=16, width=128, batch=64):
    """Digits from noise: a generator and a discriminator of three layers each."""
    images, held_out = (
        jnp.asarray(part[0]).reshape(-1, 64) * 2 - 1 for part in digits()
    )

    def layers(key, *sizes):
        keys = jax.random.split(key, len(sizes))
        pairs = zip(sizes, sizes[1:], keys, strict=False)
        return [jax.random.normal(k, pair) * (2 / pair[0]) ** 0.5 for *pair, k in pairs]

    def run(weights, x):
        for weight in weights[:-1]:
            x = jax.nn.leaky_relu(x @ weight, 0.2)
        return x @ weights[-1]

    def init(key):
        one, two = jax.random.split(key)
        return [layers(one, noise, width, width, 64), layers(two, 64, width, width, 1)]

    def generated(generator, key, number):
        return jnp.tanh(run(generator, jax.random.normal(key, (number, noise))))

    def generator_loss(params, players, key, index):
        return jax.nn.softplus(-run(players[1], generated(params, key, batch))).mean()

    def discriminator_loss(params, players, key, index):
        (real,) = some(jax.random.fold_in(key, 1), batch, images)
        fake = generated(players[0], key, batch)
        both = jax.nn.softplus(-run(params, real)), jax.nn.softplus(run(params, fake))
        return both[0].mean() + both[1].mean()

    def evaluate(players):
        return distance(
            generated(players[0], jax.random.key(3), len(held_out)), held_out
        )

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
    tx = jaxscale.skip_nonfinite(
        tx, spikes=jaxscale.SpikeRule() if "rule" in way else None
    )

    def step(carry, index, key):
        players, states = map(list, carry)
        key, seen = jax.random.fold_in(key, index), []
        for number, loss_fn in enumerate(program.losses):
            params = players[number]
            loss, grads = jax.value_and_grad(loss_fn)(
                params, players, jax.random.fold_in(key, number), index
            )
            updates, states[number] = tx.update(
                grads, states[number], params, value=loss
            )
            players[number] = optax.apply_updates(params, updates)
            norm = jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(grads)))
            seen.append((loss, norm, ~states[number].step_applied))
        return (players, states), [
            jnp.stack(column) for column in zip(*seen, strict=True)
        ]

    @jax.jit
    @jax.vmap
    def run(seed):
        players = program.init(jax.random.key(seed))
        carry = players, list(map(tx.init, players))
        one = partial(step, key=jax.random.key(seed + 1000))
        carry, seen = jax.lax.scan(one, carry, jnp.arange(steps))
        return program.evaluate(carry[0]), seen

    started = time.perf_counter()
    # each is [seed, step, player]
    final, (losses, norms, skipped) = run(jnp.asarray(seeds))
    return {
        "final": np.asarray(final).tolist(),
        "skipped": np.asarray(skipped).sum((1, 2)).tolist(),
        "seconds": time.perf_counter() - started,
        "losses": _short(losses),
        "norms": _short(norms),
        "skips": [np.argwhere(one).tolist() for one in np.asarray(skipped)],
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

    return jax.vmap(lambda run: jax.lax.scan(step, rule.init(), run)[1])(norms)


def judge_stream(about, asked, stream):
    """Returns what both rules skip of a stream: steps a run, and the share of those asked about."""
    row = {"stream": about, "asked": asked}
    for name, rule in (
        ("default", jaxscale.SpikeRule()),
        ("OLMo", jaxscale.presets.olmo()),
    ):
        skipped = np.asarray(judge_streams(rule, stream.norms.astype(np.float32)))
        hits = (skipped & stream.counted).sum()
        row[name] = {
            "skipped": skipped.sum(1).tolist(),
            "share": float(hits / stream.counted.sum()),
        }
    return row


def judge_all_streams():
    """Returns a row for each stream of the table."""
    rows = []
    for size in (10, 1e6, 1e30):
        stream = spike_streams.jumps(size, steps=spike_streams.STEPS)
        rows.append(judge_stream(f"1 ± 0.1, then {size:g} times that", "steps", stream))
    for start, size in ((0.5, 2), (0.0, 1)):
        stream = spike_streams.jumps(
            2, start=0.5, noise=0, runs=1, steps=spike_streams.STEPS
        )
        if start == 0:
            stream = stream._replace(norms=1.0 * stream.counted)
        rows.append(
            judge_stream(f"{start:g}, then {start * size or 1:g}", "steps", stream)
        )
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
    parser, names = endings.parser(__doc__), list(PROGRAMS)
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
                row["ways"][way] = train(make(), tx, way, range(options.seeds), steps)
                print(
                    name,
                    way,
                    {k: row["ways"][way][k] for k in ("final", "skipped", "seconds")},
                )
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
