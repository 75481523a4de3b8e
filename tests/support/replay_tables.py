"""Prints the rows of the tables of `tests/policies/traces/README.md`: policies replayed over runs.

By hand, from the top of the project: PYTHONPATH=. python tests/support/replay_tables.py
"""

import numpy as np
import simulator

import jaxscale
from jaxscale import presets

TORCH = presets.torch()
ADAPTIVE = jaxscale.AdaptiveLossScale()
# Presets with their defaults, and others.
NAMES = """
    torch apex apex_fp16_utils deepspeed flax keras megatron tensorflow
"""
POLICIES = {
    "**`AdaptiveLossScale()`**": ADAPTIVE,
    "`DynamicLossScale()`": jaxscale.DynamicLossScale(),
    **{f"`presets.{name}()`": getattr(presets, name)() for name in NAMES.split()},
    "`presets.torch(growth_interval=200)`": presets.torch(growth_interval=200),
    "`presets.torch(growth_interval=20000)`": presets.torch(growth_interval=20_000),
    "`presets.jmp(2**15)`": presets.jmp(2.0**15),
}


def summaries(policy, traces, retries=0):
    replays = simulator.replay(policy, traces, retries)
    return {name: replays[name].summary(trace) for name, trace in traces.items()}


def recorded_row(name, traces):
    """A row of the first table: skips and mean of each trace, and of all."""
    by_trace = summaries(POLICIES[name], traces)
    rows = by_trace.values()
    skips = column(rows, "skips")
    late = column(rows, "late")
    means = column(rows, "mean")
    cells = []
    for number, mean in zip(skips, late, strict=True):
        cells.append(f"{number} / {mean:.2f}")
    cells.append(str(sum(skips)))
    cells.append(f"{np.mean(late):.2f}")
    cells.append(f"{np.mean(means):.2f}")
    return table_row(name, cells)


def made_up_rows():
    """The second table: this rule and PyTorch's, without and with retries."""
    traces = simulator.made_up()
    policies = (ADAPTIVE, TORCH)
    once = [summaries(policy, traces) for policy in policies]
    again = [summaries(policy, traces, retries=20) for policy in policies]
    for name in traces:
        rows = [row[name] for row in once]
        cells = [str(skips) for skips in column(rows, "skips")]
        cells += [f"{mean:.2f}" for mean in column(rows, "mean")]
        cells += [str(low) for low in column(rows, "low")]
        cells += [str(row[name]["extra"]) for row in again]
        yield table_row(name, cells)


def column(rows, key):
    return [row[key] for row in rows]


def table_row(name, cells):
    return f"| {name} | {' | '.join(cells)} |"


if __name__ == "__main__":
    recorded = simulator.recorded()
    for name in POLICIES:
        print(recorded_row(name, recorded))
    for row in made_up_rows():
        print(row)
    for policy in (ADAPTIVE, TORCH):
        rows = summaries(policy, recorded, retries=20).values()
        skips = sum(column(rows, "skips"))
        print("With retries:", skips, sum(column(rows, "extra")))
