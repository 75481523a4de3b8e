"""Replays a policy over what a run allowed: at which scales each step would have overflowed.

A trace has, for each step of a run, the highest exponent of a scale at which the gradients were
finite (`ceiling`), and the binary logarithm of the largest unscaled gradient (`largest`). The
gradients do not depend on the scale, up to rounding, so one run serves all policies. A step whose
scale lies above the ceiling overflows; with `retries` the policy backs off within the step, until
the scale fits.
"""

import pathlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxscale

FOLDER = pathlib.Path(__file__).parent.parent / "policies" / "traces"

BAD = -99  # no scale would have helped: the batch is bad
LOW = 6  # binades below the ceiling: a scale this low is needlessly low


class Trace(NamedTuple):
    """The limits of a run, step by step."""

    ceiling: np.ndarray  # i[n], the highest exponent that does not overflow, or `BAD`
    # f[n], log2 of the largest unscaled gradient; -inf if all are zero
    largest: np.ndarray
    # bool[n], whether the loss itself was bad, and was passed
    told: np.ndarray | None = None


class Replay(NamedTuple):
    """The moves of a policy on a trace, step by step."""

    scale: np.ndarray  # f[n], the scale of the last backward pass of each step
    skipped: np.ndarray  # bool[n]
    extra: np.ndarray  # i[n], backward passes that were repeated

    def summary(self, trace):
        """Skips, repeated passes, and the mean exponent where some scale would have fitted."""
        fits = trace.ceiling > BAD
        exponent = np.log2(self.scale, dtype=np.float64)
        late = fits & (np.arange(len(fits)) >= len(fits) // 2)
        return {
            "skips": int(self.skipped[fits].sum()),
            "extra": int(self.extra[fits].sum()),
            "mean": float(exponent[fits].mean()),
            "late": float(exponent[late].mean()),
            "low": int((trace.ceiling - exponent >= LOW)[fits].sum()),
        }


def recorded():
    """The five runs that were recorded, by name."""
    traces = {}
    for path in sorted(FOLDER.glob("*.npz")):
        run = np.load(path)
        ceiling = run["ceiling"].astype(np.int32)
        traces[path.stem] = Trace(ceiling, run["largest"] / 256)
    return traces


def replay(policy, traces, retries=0):
    """A `Replay` for each of some traces, by name. All of them run in one program."""
    lengths = [len(trace.ceiling) for trace in traces.values()]
    longest = max(lengths)
    steps_of_traces = [_steps(trace, longest) for trace in traces.values()]
    columns = map(np.stack, zip(*steps_of_traces, strict=True))

    def run(*steps):
        return _run(policy, retries, steps)

    run_all = jax.jit(jax.vmap(run))
    outcome = [np.asarray(column) for column in run_all(*columns)]

    replays = {}
    for index, (name, length) in enumerate(zip(traces, lengths, strict=True)):
        of_trace = [column[index, :length] for column in outcome]
        replays[name] = Replay(*of_trace)
    return replays


def _steps(trace, length):
    """The highest scale, the largest gradient and whether the loss was bad, for `length` steps."""
    highest = np.where(trace.ceiling > BAD, np.ldexp(1.0, trace.ceiling), 0)
    largest = np.exp2(trace.largest)
    told = trace.told
    if told is None:
        told = np.zeros(len(trace.ceiling), bool)
    missing = (0, length - len(trace.ceiling))
    return (
        np.pad(highest.astype(np.float32), missing),
        np.pad(largest.astype(np.float32), missing),
        np.pad(told, missing, constant_values=True),
    )


def _run(policy, retries, steps):
    def step(state, now):
        highest, size, told = now

        def again(carry):
            state, extra = carry
            return (state.loss_scale > highest) & (extra < retries) & ~told

        def back_off(carry):
            state, extra = carry
            lower = policy.adjust(state, jnp.array(False), jnp.float32(jnp.inf))
            return lower, extra + 1

        tried, extra = jax.lax.while_loop(again, back_off, (state, jnp.int32(0)))
        bad = tried.loss_scale > highest
        moved = policy.adjust(tried, ~bad, jnp.where(bad, jnp.inf, size))
        after = jaxscale.tree_where(told, tried, moved)
        return after, (tried.loss_scale, bad | told, extra)

    _, outcome = jax.lax.scan(step, policy.init(), steps)
    return outcome
