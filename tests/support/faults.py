"""Faults put in on purpose: drawn on the host, put in on the device, and what must follow."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from references import trajectory

# Where a fault is born. The first two make the loss itself non-finite.
NOWHERE, INPUT, LOSS, COTANGENT, GRADIENT = range(5)
PLACES = {"input": INPUT, "loss": LOSS, "cotangent": COTANGENT, "gradient": GRADIENT}
VALUES = {"inf": np.inf, "-inf": -np.inf, "nan": np.nan}
# A run ends with so many good steps: what a bad one left behind has time to show.
GOOD_AT_THE_END = 8


class Fault(NamedTuple):
    """One fault, or, with a place of `NOWHERE`, none; or many, with a leading axis."""

    place: jax.Array  # i32[]
    value: jax.Array  # f32[], inf, -inf or NaN
    leaf: jax.Array  # i32[], of the tree that it is put into, modulo their number
    element: jax.Array  # i32[], of that leaf, modulo its size
    micro_batch: jax.Array  # i32[], where a step has several
    device: jax.Array  # i32[], where a program runs on each device by itself

    def only_if(self, here):
        """The fault where `here` holds, else none."""
        return self._replace(place=jnp.where(here, self.place, NOWHERE))

    def at(self, step):
        """One of many faults."""
        return Fault(*(field[step] for field in self))

    @property
    def bad(self):
        """Which steps have a fault."""
        return self.place != NOWHERE

    @property
    def bad_loss(self):
        """Which of them make the loss non-finite."""
        return (self.place == INPUT) | (self.place == LOSS)


def draw(rng, rates, places, micro_batches=1, devices=1):
    """Faults for as many steps as there are rates, each the probability of one in its step."""
    steps = len(rates)
    hit = rng.random(steps) < rates
    hit[-GOOD_AT_THE_END:] = False
    kinds = np.array([PLACES[place] for place in places])

    def below(limit):
        return rng.integers(limit, size=steps).astype(np.int32)

    return Fault(
        place=np.where(hit, rng.choice(kinds, steps), NOWHERE).astype(np.int32),
        value=rng.choice(list(VALUES.values()), steps).astype(np.float32),
        leaf=below(2**31),
        element=below(2**31),
        micro_batch=below(micro_batches),
        device=below(devices),
    )


def spoil(tree, fault, place):
    """The tree, with one bad element in one leaf if that is where the fault is born."""
    leaves, structure = jax.tree.flatten(tree)
    for i, leaf in enumerate(leaves):
        elements = jnp.arange(leaf.size, dtype=jnp.int32).reshape(leaf.shape)
        here = (fault.place == place) & (fault.leaf % len(leaves) == i)
        bad = here & (elements == fault.element % leaf.size)
        leaves[i] = jnp.where(bad, fault.value.astype(leaf.dtype), leaf)
    return jax.tree.unflatten(structure, leaves)


@jax.custom_vjp
def passed_back(x, fault):
    """`x`, whose cotangent gets the fault, as if the backward pass had overflowed there."""
    del fault
    return x


def _forward(x, fault):
    return x, fault


def _backward(fault, cotangent):
    return spoil(cotangent, fault, COTANGENT), None


passed_back.defvjp(_forward, _backward)


def finite(tree):
    """Whether a whole tree is finite, its moments and averages, too."""
    inexact = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    return jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in inexact]).all()


class Trace(NamedTuple):
    """Of which batches there must be a trace, given the bad ones: each a bool a step."""

    clean: np.ndarray  # which batches a run without faults has
    compared: np.ndarray  # after which steps that run must be where this one is
    grows: np.ndarray  # which steps count towards the growth of the scale


def one_by_one(bad):
    """Every bad batch is skipped, and that is all."""
    return Trace(clean=~bad, compared=np.ones_like(bad), grows=~bad)


def in_windows(bad, length, drop):
    """What `jaxscale.multi_steps` says: one step for so many micro-batches."""
    unfinished = np.ones(-len(bad) % length, bool)
    windows = np.concatenate([bad, unfinished]).reshape(-1, length)
    steps = ~(windows.any(1) if drop == "window" else windows.all(1))[:, None]
    clean = ~windows & steps
    last = np.arange(length) == length - 1
    # Elsewhere the window of this run has seen more micro-batches than that of the other.
    compared = (clean & (drop == "window")) | last
    return Trace(*(x.ravel()[: len(bad)] for x in (clean, compared, clean & last)))


def expected(faults, policy, grows):
    """What `jaxscale.metrics` must say after every step, by name."""
    bad, bad_loss = faults.bad, faults.bad_loss
    steps = np.arange(1, len(bad) + 1)
    last_good = np.maximum.accumulate(np.where(bad, 0, steps))
    start = policy.init()
    # If the loss is to blame, the scale is not; within a window there is nothing to count.
    verdicts = np.where(grows, True, np.where(bad & ~bad_loss, False, None))
    states = trajectory(policy, tuple(leaf.item() for leaf in start), verdicts)
    return {
        "step_applied": ~bad,
        "notfinite_count": steps - last_good,
        "total_notfinite": np.cumsum(bad),
        "total_notfinite_loss": np.cumsum(bad_loss),
        "total_steps": steps,
        **dict(zip(start._fields, np.array(states).T, strict=True)),
    }


def wrong_steps(seen, faults, policy, grows):
    """What is not as it must be, with the first step where: lines of text, none if all is well.

    `seen` has an array of one value a step by name, or of one a step and device.
    """
    wrong = []
    wanted = expected(faults, policy, grows) | {"finite": np.ones(len(faults.bad), bool)}
    for name, want in wanted.items():
        got = np.reshape(seen[name], (len(want), -1))
        steps = np.flatnonzero((got != want[:, None]).any(1))
        if len(steps):
            step = steps[0]
            wrong.append(f"{name} is {got[step].tolist()}, not {want[step]}, after step {step}")
    return wrong
