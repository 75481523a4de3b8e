"""What `SpikeRule` promises, in plain Python, and what it is compared on.

That is streams of losses and norms, what OLMo-core did on them, and runs that were recorded.
"""

import functools
import gzip
import json
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np


class Promised:
    """`SpikeRule`, in float64 and on lists. It also says by how little each decision was made."""

    def __init__(self, window=128, sigmas=6.0, min_history=None):
        self.window, self.sigmas = window, sigmas
        self.history = max(2, window // 2) if min_history is None else min_history

    def spikes(self, losses, norms):
        """Whether each step is skipped. `seen` has both thresholds and deviations of each."""
        self.windows, self.margins, skipped = ([], []), [], []
        self.seen = []
        for values in zip(losses, norms, strict=True):
            if all(map(math.isfinite, values)):
                looks = [self.look(*pair) for pair in zip(self.windows, values, strict=True)]
                skipped.append(any(is_spike for is_spike, _ in looks))
                self.seen.append([seen for _, seen in looks])
            else:
                skipped.append(False)
                self.seen.append(self.seen[-1])
        return skipped

    def look(self, window, value):
        is_spike, seen, judges = False, (math.inf, 0.0), len(window) >= self.history
        if judges or len(window) >= 4:
            mean = math.fsum(window) / len(window)
            squares = math.fsum((x - mean) ** 2 for x in window)
            std = max(math.sqrt(squares / (len(window) - 1)), 1e-6 * abs(mean))
            if std > 0:
                if judges:
                    seen = mean + self.sigmas * std, (value - mean) / std
                    is_spike = value > seen[0]
                    self.margins.append(abs(seen[1] - self.sigmas))
                reach = 5 * self.sigmas * std
                value = min(max(value, mean - reach), mean + reach)
        window.append(value)
        del window[: -self.window]
        return is_spike, seen


STEPS = 400


def noise(seed=0, size=0.01):
    return size * np.random.default_rng(seed).standard_normal(STEPS)


def stream(**places):
    """Losses about 1 and norms about 0.5, and other losses in some places."""
    losses = 1 + noise()
    for place, loss in places.items():
        losses[int(place.strip("_"))] = loss
    return losses, 0.5 + noise(1)


def shifted(by, at=200, seed=0):
    return (1 + noise(seed) + by * (np.arange(STEPS) >= at), 0.5 + noise(1))


RAMP = np.linspace(0, 1, STEPS)
STREAMS = {
    "steady": stream(),
    "spikes": stream(_70=3.0, _200=10.0, _230=3.0, _300=1.07),
    "spiking norm": stream(_200=10.0)[::-1],
    "too early": stream(_20=10.0, _63=10.0, _64=100.0),
    "1e30": stream(_200=1e30, _230=50.0, _260=1e38),
    "-1e30": stream(_200=-1e30, _230=50.0, _260=1e38),
    "not finite": stream(_5=np.nan, _100=np.inf, _101=-np.inf, _102=10.0, _200=np.nan, _230=3.0),
    "up": shifted(1.0),
    "down and up": (1 + noise() - ((np.arange(STEPS) >= 200) & (np.arange(STEPS) < 300)), 1.0),
    "linear": (10 - 9 * RAMP + noise(), 5 * RAMP + noise(1)),
    "exponential": (np.exp(3 - 3 * RAMP + noise()), np.exp(5 * RAMP + noise(1))),
    "negative": (stream(_200=-4.0)[0] - 6 + RAMP, 0.5 + noise(1)),
    "about zero": (noise(), np.abs(noise(1))),
    "constant": (np.where(np.arange(STEPS) == 200, 1 + 1e-4, 1.0), np.full(STEPS, 2.0)),
    "a rounding": (np.where(np.arange(STEPS) == 200, 1 + 2e-7, 1.0), np.full(STEPS, 2.0)),
    "zeros": (np.where(np.arange(STEPS) < 200, 0.0, 2 + noise()), np.zeros(STEPS)),
    "heavy tails": (np.exp(noise(size=0.6)), np.exp(noise(1, size=1.0))),
    "huge": (3e38 * stream(_200=1.1)[0], 1e-30 * (1 + noise(1))),
}
STREAMS = {
    name: tuple(np.broadcast_to(values, STEPS).astype(np.float32) for values in pair)
    for name, pair in STREAMS.items()
}


@functools.partial(jax.jit, static_argnums=0)
def judge_all(rule, losses, norms):
    """Whether each step is a spike, and the states after each step."""

    def step(state, values):
        is_spike, state = rule.judge(
            state, *values, jnp.isfinite(values[0]) & jnp.isfinite(values[1])
        )
        return state, (is_spike, state)

    return jax.lax.scan(step, rule.init(), (losses, norms))[1]


def skipped(rule, losses, norms=None):
    """The numbers of the steps that are spikes, with norms of 1 if none are given."""
    losses = np.asarray(losses, np.float32)
    norms = np.ones_like(losses) if norms is None else norms
    return np.flatnonzero(judge_all(rule, losses, norms)[0]).tolist()


TESTS = pathlib.Path(__file__).parent.parent
RECORDED = TESTS / "benchmarks" / "results" / "spikes-cpu.json"
OLMO = "olmo_skip_step_optimizer"


def olmo_runs():
    """Each run of OLMo-core's own optimizers, with its losses and norms, by `id`."""
    with gzip.open(TESTS / "presets" / "traces" / f"{OLMO}.json.gz") as file:
        trace = json.load(file)
    for case in trace["cases"]:
        values = trace["streams"][case["seq"]]
        yield case["id"], case | {k: np.array(v, np.float32) for k, v in values.items()}


def recorded():
    """Losses and norms of the plain runs of `benchmarks/spikes.py`, by program, seed and player."""
    for row in json.loads(RECORDED.read_text())["rows"]:
        plain = row["ways"]["plain"]
        for seed, runs in enumerate(zip(plain["losses"], plain["norms"], strict=True)):
            for player, pair in enumerate(zip(*runs, strict=True)):
                # A run that diverged is not finite in the end.
                pair = np.array(pair, np.float32)
                yield f"{row['program']} {seed} {player}", pair[:, np.isfinite(pair).all(0)]
