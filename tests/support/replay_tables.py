"""Prints the rows of the tables of `tests/policies/traces/README.md`: policies replayed over runs.

Run by hand, from the top of the project (about a minute):

    PYTHONPATH=. python tests/support/replay_tables.py
"""

import numpy as np
import simulator

import jaxscale
from jaxscale import presets

TORCH, ADAPTIVE = presets.torch(), jaxscale.AdaptiveLossScale()
POLICIES = {
    "**`AdaptiveLossScale()`**": ADAPTIVE,
    "`presets.torch()`": TORCH,
    "`presets.torch(growth_interval=200)`": presets.torch(growth_interval=200),
    "`presets.torch(growth_interval=20000)`": presets.torch(growth_interval=20_000),
    "`DynamicLossScale()`": jaxscale.DynamicLossScale(),
    "`presets.apex()`": presets.apex(),
    "`presets.apex_fp16_utils()`": presets.apex_fp16_utils(),
    "`presets.chainer()`": presets.chainer(),
    "`presets.colossalai()`": presets.colossalai(),
    "`presets.deepspeed()`": presets.deepspeed(),
    "`presets.fairseq()`": presets.fairseq(),
    "`presets.fairseq(tolerance=0.05)`": presets.fairseq(tolerance=0.05),
    "`presets.flax()`": presets.flax(),
    "`presets.jaxamp()`": presets.jaxamp(),
    "`presets.jmp(2**15)`": presets.jmp(2.0**15),
    "`presets.keras()`": presets.keras(),
    "`presets.megatron()`": presets.megatron(),
    "`presets.mindformers(2**16, 2, 20)`": presets.mindformers(
        loss_scale_value=2.0**16, scale_factor=2, scale_window=20
    ),
    "`presets.mindspore_manager()`": presets.mindspore_manager(),
    "`presets.mpx(2**15, 1)`": presets.mpx(2.0**15, 1.0),
    "`presets.openseq2seq_backoff()`": presets.openseq2seq_backoff(),
    "`presets.openseq2seq_logmax(scale_max=2**24)`": presets.openseq2seq_logmax(scale_max=2.0**24),
    "`presets.paddle()`": presets.paddle(),
    "`presets.tensorflow()`": presets.tensorflow(),
}


def summaries(policy, traces, retries=0):
    replays = simulator.replay(policy, traces, retries)
    return {name: replays[name].summary(trace) for name, trace in traces.items()}


def recorded_row(name, policy, traces):
    """A row of the first table: skips and mean of each trace, and of all."""
    rows = summaries(policy, traces).values()
    cells = [f"{row['skips']} / {row['late']:.2f}" for row in rows]
    skips = sum(row["skips"] for row in rows)
    late, mean = (np.mean([row[key] for row in rows]) for key in ("late", "mean"))
    return f"| {name} | {' | '.join(cells)} | {skips} | {late:.2f} | {mean:.2f} |"


def made_up_rows(traces):
    """The second table: this rule and PyTorch's, without and with retries."""
    ours, theirs = (summaries(policy, traces) for policy in (ADAPTIVE, TORCH))
    again, theirs_again = (summaries(policy, traces, 20) for policy in (ADAPTIVE, TORCH))
    for name in traces:
        a, t = ours[name], theirs[name]
        yield (
            f"| {name} | {a['skips']} | {t['skips']} | {a['mean']:.2f} | {t['mean']:.2f} | "
            f"{a['low']} | {t['low']} | {again[name]['extra']} | {theirs_again[name]['extra']} |"
        )


def main():
    traces = simulator.recorded()
    for name, policy in POLICIES.items():
        print(recorded_row(name, policy, traces), flush=True)
    print(*made_up_rows(simulator.made_up()), sep="\n")
    for name, policy in (("`AdaptiveLossScale()`", ADAPTIVE), ("`presets.torch()`", TORCH)):
        rows = summaries(policy, traces, 20).values()
        extra, skips = (sum(row[key] for row in rows) for key in ("extra", "skips"))
        steps = sum(len(trace.ceiling) for trace in traces.values())
        print(f"{name} with retries: {skips} skips, {extra} repeated, {extra / steps * 1e4:.2f}")


if __name__ == "__main__":
    main()
