"""Prints the rows of the tables of `tests/policies/traces/README.md`: policies replayed over runs.

By hand, from the top of the project: PYTHONPATH=. python tests/support/replay_tables.py
"""

import numpy as np
import simulator

import jaxscale
from jaxscale import presets

TORCH, ADAPTIVE = presets.torch(), jaxscale.AdaptiveLossScale()
# Presets with their defaults, and others.
NAMES = "torch apex apex_fp16_utils chainer colossalai deepspeed fairseq flax jaxamp keras megatron"
NAMES += " mindspore_manager openseq2seq_backoff paddle tensorflow"
POLICIES = {
    "**`AdaptiveLossScale()`**": ADAPTIVE,
    "`DynamicLossScale()`": jaxscale.DynamicLossScale(),
    **{f"`presets.{name}()`": getattr(presets, name)() for name in NAMES.split()},
    "`presets.torch(growth_interval=200)`": presets.torch(growth_interval=200),
    "`presets.torch(growth_interval=20000)`": presets.torch(growth_interval=20_000),
    "`presets.fairseq(tolerance=0.05)`": presets.fairseq(tolerance=0.05),
    "`presets.jmp(2**15)`": presets.jmp(2.0**15),
    "`presets.mindformers(2**16, 2, 20)`": presets.mindformers(
        loss_scale_value=2.0**16, scale_factor=2, scale_window=20
    ),
    "`presets.mpx(2**15, 1)`": presets.mpx(2.0**15, 1.0),
    "`presets.openseq2seq_logmax(scale_max=2**24)`": presets.openseq2seq_logmax(
        scale_max=2.0**24
    ),
}


def summaries(policy, traces, retries=0):
    replays = simulator.replay(policy, traces, retries)
    return {name: replays[name].summary(trace) for name, trace in traces.items()}


def recorded_row(name, traces):
    """A row of the first table: skips and mean of each trace, and of all."""
    rows = summaries(POLICIES[name], traces).values()
    cells = [f"{row['skips']} / {row['late']:.2f}" for row in rows]
    skips = sum(row["skips"] for row in rows)
    late, mean = (np.mean([row[key] for row in rows]) for key in ("late", "mean"))
    return f"| {name} | {' | '.join(cells)} | {skips} | {late:.2f} | {mean:.2f} |"


def made_up_rows():
    """The second table: this rule and PyTorch's, without and with retries."""
    traces = simulator.made_up()
    once, again = (
        [summaries(p, traces, n) for p in (ADAPTIVE, TORCH)] for n in (0, 20)
    )
    for name in traces:
        cells = [row[name][key] for key in ("skips", "mean", "low") for row in once]
        cells += [row[name]["extra"] for row in again]
        cells = [
            f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in cells
        ]
        yield f"| {name} | {' | '.join(cells)} |"


if __name__ == "__main__":
    recorded = simulator.recorded()
    print(
        *(recorded_row(name, recorded) for name in POLICIES), *made_up_rows(), sep="\n"
    )
    for policy in (ADAPTIVE, TORCH):
        rows = summaries(policy, recorded, 20).values()
        print(
            "With retries:",
            *(sum(row[key] for row in rows) for key in ("skips", "extra")),
        )
