"""A soak: faults at random places and rates, and at the end nothing is to be seen of them.

Each run trains twice with one compiled step: once with the faults, once on the good batches
only. After each batch the two must have the same bits in everything that is trained (inside of
a window of micro-batches, at its end), every counter must be what the faults say, and every
number finite. `test_soak.py` runs it in short; a run is as long as one wants.
"""

import dataclasses
import functools
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import network
import numpy as np
import optax
from faults import (
    GRADIENT,
    INPUT,
    LOSS,
    PLACES,
    VALUES,
    Fault,
    Trace,
    draw,
    finite,
    in_windows,
    one_by_one,
    passed_back,
    spoil,
    wrong_steps,
)
from tables import INNERS, PARAMS, POLICIES

import jaxscale
from jaxscale import presets

STRETCH = 20  # where a run has several rates, how many steps each holds before another does
BATCH_SIZE, MICRO_BATCHES = 64, 4
CHUNK = 500  # steps in one `scan`: on CPU the time of each grows with their number


@dataclasses.dataclass(frozen=True)
class Wrapper:
    """What is around, or inside of, the loss scale; and what must be left of bad batches."""

    make: Callable[..., Any]  # of an optimizer, a policy, and how many micro-batches make a step
    trace: Callable[[np.ndarray], Trace] = one_by_one
    length: int = 1


def loss_scaled(inner, policy, every_k, **kwargs):
    del every_k
    return jaxscale.loss_scaled(inner, policy, **kwargs)


def multi_steps_inside(inner, policy, every_k, **kwargs):
    del every_k  # a bad micro-batch is replaced by the next, so all windows are as long
    return jaxscale.loss_scaled(optax.MultiSteps(inner, MICRO_BATCHES), policy, **kwargs)


def dropping(drop, length):
    def make(inner, policy, every_k, **kwargs):
        scaled = jaxscale.loss_scaled(inner, policy, **kwargs)
        return jaxscale.multi_steps(scaled, every_k, drop=drop)

    return Wrapper(make, functools.partial(in_windows, length=length, drop=drop), length)


LOSS_SCALED = Wrapper(loss_scaled)
MULTI_STEPS_INSIDE = Wrapper(multi_steps_inside)
# Of two, so that the mean over those that are left is exact, as in a window that is shorter.
DROP_MICRO_BATCH = dropping("micro_batch", 2)
DROP_WINDOW = dropping("window", MICRO_BATCHES)


@dataclasses.dataclass(frozen=True)
class Scalars:
    """A run on a handful of numbers."""

    policy: Any  # with bounds within which float32 gradients neither overflow nor underflow
    inner: Any
    wrapper: Wrapper = LOSS_SCALED


SCALARS = {
    "no scale, masked": Scalars(POLICIES["noop"], INNERS["masked"]),
    "fixed, momentum": Scalars(POLICIES["fixed"], INNERS["momentum"]),
    "dynamic, clipped adamw": Scalars(POLICIES["dynamic"], INNERS["adamw_clipped"]),
    "hysteresis, inject_hyperparams": Scalars(POLICIES["hysteresis"], INNERS["inject_hyperparams"]),
    "apex, adam with a schedule": Scalars(
        presets.apex(scale_window=50, min_loss_scale=2.0**-10),
        optax.adam(optax.cosine_decay_schedule(0.1, 10**6)),
    ),
    "colossalai, noise": Scalars(
        presets.colossalai(growth_interval=20, min_scale=1.0, max_scale=2.0**20), INNERS["noisy"]
    ),
    "tolerance, clipped lion": Scalars(
        presets.ToleranceLossScale(growth_interval=5, tolerance=0.25, max_scale=2.0**20),
        INNERS["lion_clipped"],
    ),
    "dynamic, MultiSteps of adam": Scalars(POLICIES["dynamic"], INNERS["adam"], MULTI_STEPS_INSIDE),
    "dynamic, micro-batches dropped": Scalars(
        POLICIES["dynamic"], INNERS["adam"], DROP_MICRO_BATCH
    ),
    "hysteresis, windows dropped": Scalars(
        POLICIES["hysteresis"], INNERS["adamw_clipped"], DROP_WINDOW
    ),
}


@dataclasses.dataclass(frozen=True)
class Model:
    """A run of the network."""

    policy: Any
    place: Callable[..., Any] = network.on_one_device
    wrapper: Wrapper = LOSS_SCALED
    micro_batches: int = 1
    axis_name: str | None = None


IN_A_NETWORK = "input", "cotangent", "gradient"  # where a fault may be
# At these scales nothing of the network overflows: a step is skipped for a fault or not at all.
MOVING = jaxscale.DynamicLossScale(init_scale=2.0**8, growth_interval=3, max_scale=2.0**10)
TOLERANT = dataclasses.replace(MOVING, hysteresis=2)
MODELS = {
    "network, MultiSteps": Model(MOVING, wrapper=MULTI_STEPS_INSIDE),
    "network, micro-batches in the step": Model(MOVING, micro_batches=MICRO_BATCHES),
    "8 devices, jit, sharded parameters": Model(TOLERANT, network.under_jit),
    "8 devices, shard_map": Model(TOLERANT, network.on_each_device, axis_name="data"),
}


@dataclasses.dataclass
class Outcome:
    """What a run had in it, and what went wrong: lines of text, none if all is well."""

    faults: Fault
    seen: dict[str, np.ndarray]
    wrong: list[str]

    def counts(self):
        """How many faults there were, by value and by place."""
        faults, bad = self.faults, self.faults.bad
        values = {name: np.isclose(faults.value, v, equal_nan=True) for name, v in VALUES.items()}
        places = {name: faults.place == number for name, number in PLACES.items()}
        return {name: int((bad & these).sum()) for name, these in (values | places).items()}


def generator(*words):
    """Random numbers of their own for each run."""
    return np.random.default_rng(zlib.crc32(repr(words).encode()))


def distance(params, target, fault):
    params = passed_back(params, fault)
    squares = jax.tree.map(lambda p, t: jnp.mean((p.astype(jnp.float32) - t) ** 2), params, target)
    return sum(squares.values())


def kept_of_scalars(params, opt_state):
    """What a bad batch must leave no trace in, a PRNG key as numbers."""

    def raw(leaf):
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return jax.random.key_data(leaf) if is_key else leaf

    return jax.tree.map(raw, (params, opt_state.inner_state))


@functools.cache
def scalar_scan(name):
    """Many steps of a run, compiled, and what they start from."""
    run = SCALARS[name]

    def optimizer(lengths):
        return run.wrapper.make(run.inner, run.policy, lambda step: lengths[step])

    def step(tx, carry, batch):
        params, opt_state = carry
        target, fault = batch
        target = spoil(target, fault, INPUT)
        loss, grads = jaxscale.value_and_grad(distance, opt_state)(params, target, fault)
        grads, loss = spoil(grads, fault, GRADIENT), spoil(loss, fault, LOSS)
        updates, opt_state = tx.update(grads, opt_state, params, value=loss)
        params = optax.apply_updates(params, updates)
        seen = {"finite": finite((updates, params, opt_state)), "loss": loss}
        seen |= jaxscale.metrics(opt_state)
        return (params, opt_state), (kept_of_scalars(params, opt_state), seen)

    @jax.jit
    def scan(lengths, carry, batches):
        return jax.lax.scan(functools.partial(step, optimizer(lengths)), carry, batches)

    return scan, (PARAMS, optimizer(None).init(PARAMS))


def train_scalars(name, lengths, batches):
    """What a run keeps before and after each step, and what is seen after each."""
    scan, carry = scalar_scan(name)
    steps = len(lengths)
    kept, seen = [jax.tree.map(lambda leaf: leaf[None], kept_of_scalars(*carry))], []
    for start in range(0, steps, CHUNK):
        # The last one is filled up, so that all are as long.
        chosen = np.resize(np.arange(start, steps)[:CHUNK], min(CHUNK, steps))
        chunk = jax.tree.map(lambda x, chosen=chosen: x[chosen], batches)
        carry, outcome = scan(lengths, carry, chunk)
        for history, part in zip((kept, seen), jax.device_get(outcome), strict=True):
            history.append(part)
    kept, seen = (jax.tree.map(lambda *xs: np.concatenate(xs), *x) for x in (kept, seen))
    return kept, {key: values[:steps] for key, values in seen.items()}


def run_scalars(name, seed, steps, rate):
    """The outcome of a run on a handful of numbers."""
    run = SCALARS[name]
    rng = generator(seed, name, rate)
    faults = draw(rng, np.full(steps, rate), PLACES)
    targets = {
        key: rng.normal(size=(steps, *leaf.shape)).astype(np.float32)
        for key, leaf in PARAMS.items()
    }
    trace = run.wrapper.trace(faults.bad)
    # The clean batches, then some of them again: as many steps, so one program for both.
    clean_batches = jax.tree.map(
        lambda x: x[np.resize(np.flatnonzero(trace.clean), steps)], (targets, faults)
    )

    lengths = np.full(steps, run.wrapper.length, np.int32)
    kept, seen = train_scalars(name, lengths, (targets, faults))
    lengths = clean_lengths(trace.clean, run.wrapper.length)
    clean, _ = train_scalars(name, lengths, clean_batches)

    wrong = wrong_steps(seen, faults, run.policy, trace.grows)
    compared = np.flatnonzero(trace.compared)
    for (path, ours), theirs in zip(
        jax.tree_util.tree_leaves_with_path(kept), jax.tree.leaves(clean), strict=True
    ):
        # Byte by byte, a step a row.
        rows = [
            np.ascontiguousarray(x).view(np.uint8).reshape(len(compared), -1)
            for x in (ours[compared + 1], theirs[np.cumsum(trace.clean)[compared]])
        ]
        differs = compared[(rows[0] != rows[1]).any(1)]
        if len(differs):
            where = jax.tree_util.keystr(path)
            wrong.append(f"{where} is not that of the clean run after step {differs[0]}")
    return Outcome(faults, seen, wrong + recompiled(scalar_scan(name)[0]))


def clean_lengths(clean, length):
    """How many micro-batches each step of the clean run is made from, for as many as there are."""
    padded = np.concatenate([clean, np.zeros(-len(clean) % length, bool)])
    counted = padded.reshape(-1, length).sum(1)
    lengths = np.full(len(clean), length, np.int32)
    lengths[: np.count_nonzero(counted)] = counted[counted > 0]
    return lengths


def first_state(run):
    """The state of the network before the first step."""
    inner = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adam(optax.warmup_cosine_decay_schedule(0.0, 3e-3, 50, 10_000, 1e-4)),
    )
    wrapper = run.wrapper
    return network.create(wrapper.make(inner, run.policy, wrapper.length, axis_name=run.axis_name))


def run_model(name, seed, steps, rates):
    """The outcome of a run of the network, at each of the rates for stretches of steps."""
    run = MODELS[name]
    step = functools.partial(network.train_step, micro_batches=run.micro_batches)
    step, same_bits, state = run.place(step, network.same_bits, first_state(run))
    images, labels = network.digits()
    rng = generator(seed, name)
    rates = np.repeat(rng.choice(rates, -(-steps // STRETCH)), STRETCH)[:steps]
    faults = draw(rng, rates, IN_A_NETWORK, run.micro_batches, devices=8)
    trace = run.wrapper.trace(faults.bad)

    clean, history, differs = state, [], []
    for i in range(steps):
        chosen = rng.integers(len(images), size=BATCH_SIZE)
        batch = images[chosen], labels[chosen], faults.at(i)
        scaling = state.opt_state.scaling
        # Eight devices share few threads: none may be left behind in the program before.
        state, seen = jax.block_until_ready(step(state, *batch))
        history.append(jax.device_get(seen))
        if trace.clean[i]:
            # At the same scale, as float16 rounds by it; whether that is right is seen apart.
            clean = clean.replace(opt_state=clean.opt_state._replace(scaling=scaling))
            clean, _ = jax.block_until_ready(step(clean, *batch))
        if trace.compared[i] and not np.all(jax.block_until_ready(same_bits(state, clean))):
            differs.append(i)

    seen = {key: np.array([one[key] for one in history]) for key in history[0]}
    wrong = wrong_steps(seen, faults, run.policy, trace.grows)
    if differs:
        wrong.append(f"the state is not that of the clean run after step {differs[0]}")
    wrong += network.disagreements(state) + recompiled(step)
    return Outcome(faults, seen, wrong)


def recompiled(compiled):
    """What is to be said if there was more than one compilation."""
    number = compiled._cache_size()
    return [] if number == 1 else [f"compiled {number} times"]
