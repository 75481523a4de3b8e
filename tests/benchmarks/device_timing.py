"""Times the forms of a model that `device.py` trains, in turns, and counts their memory."""

import gc
import statistics
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
from device_models import BY_HAND, FLOAT32, FORMS

NOT_RUN = "not run: out of time"


class Plan(NamedTuple):
    """The timing of a size. Times are in seconds."""

    turn: float
    rounds: int
    reserve: float  # left for all turns
    compilation: float  # that of a form is expected to take at least that long


PLANS = {"tiny": Plan(0.01, 3, 2.0, 2.0), "full": Plan(0.25, 15, 40.0, 20.0)}


class Trainer:
    """A compiled step that is trained on one batch."""

    def __init__(self, form, task, start):
        begin = time.perf_counter()
        self._in_use = read_memory("bytes_in_use")
        params, state = jax.tree.map(jnp.array, start)
        self._batch = task.batch
        self._carry, step = form.make(task, params, state)
        self._num_traces = 0

        def count(*args):
            self._num_traces += 1
            return step(*args)

        jitted = jax.jit(count, donate_argnums=0)
        lowered = jitted.lower(self._carry, *self._batch)
        traced = time.perf_counter()
        self._step = lowered.compile()
        compiled = time.perf_counter()
        self.figures = {"trace_s": traced - begin, "compile_s": compiled - traced}
        self.figures |= count_bytes(self._step)

    def warm_up(self):
        """Makes the first steps; notes their losses, and the memory that they took."""
        peak = read_memory("peak_bytes_in_use")
        losses = []
        for _ in range(3):
            self._carry, loss = self._step(self._carry, *self._batch)
            losses.append(float(loss))
        self.figures["losses"] = losses
        # The device knows the peak of the whole process: it is this form's if it rose.
        new_peak = read_memory("peak_bytes_in_use")
        if peak is not None and new_peak > peak:
            self.figures["peak_bytes"] = new_peak - self._in_use
        self.figures["step_s_alone"] = self.turn(0.0, steps=3)

    def turn(self, seconds, steps=None):
        """Returns the seconds of a step, of as many as fit into a turn."""
        if steps is None:
            steps = max(1, min(100, int(seconds / self.figures["step_s_alone"])))
        start = time.perf_counter()
        for _ in range(steps):
            self._carry, loss = self._step(self._carry, *self._batch)
        jax.block_until_ready((self._carry, loss))
        return (time.perf_counter() - start) / steps


def read_memory(name):
    """Returns a number of the device's own statistics, or None where it has none."""
    statistics_of_device = jax.devices()[0].memory_stats() or {}
    return statistics_of_device.get(name)


def count_bytes(compiled):
    """Returns what a compiled program keeps, by XLA's own count."""
    analysis = compiled.memory_analysis()
    if analysis is None:
        return {}
    arguments = analysis.argument_size_in_bytes
    temporary = analysis.temp_size_in_bytes
    return {
        "argument_bytes": arguments,
        "temporary_bytes": temporary,
        "alias_bytes": analysis.alias_size_in_bytes,
        "bytes": arguments + temporary,
    }


def measure(task, forms, plan, until, now, say, save):
    """Fills in the figures of a task's forms, and calls `save` after each.

    Args:
      task: a `device_models.Task`.
      forms: the names of its forms.
      plan: a `Plan`.
      until: the time after which nothing new begins.
      now: returns the time.
      say: prints a line.
      save: `save(reports)`, with reports by form.
    """
    reports = {name: {"error": NOT_RUN} for name in forms}
    trainers = {}
    longest = plan.compilation
    start = task.init()
    for name in forms:
        begin = now()
        if begin + longest + plan.reserve > until:
            say(f"  {name}: {NOT_RUN}")
            continue
        trainer = None
        gc.collect()  # of one that failed, the memory is given back
        try:
            trainer = Trainer(FORMS[name], task, start)
            trainer.warm_up()
        except Exception as error:
            reports[name] = {"error": f"{type(error).__name__}: {error}"[:2000]}
            say(f"  {name}: {reports[name]['error'][:200]}")
        else:
            trainers[name] = trainer
            reports[name] = trainer.figures
            say(f"  {name}: {_line(trainer.figures)}")
        save(reports)
        longest = max(longest, now() - begin)

    turns = {name: [] for name in trainers}
    for _ in range(plan.rounds):
        for name, trainer in trainers.items():
            turns[name].append(trainer.turn(plan.turn))
        if now() > until:
            break
    for name, times in turns.items():
        reports[name]["step_s"] = statistics.median(times)
        reports[name]["turns_s"] = times
    for name in turns:
        _compare(reports, turns, name, "to_float32", FLOAT32)
        _compare(reports, turns, name, "to_by_hand", BY_HAND.get(name))
    save(reports)


def _line(figures):
    parts = [f"compiled in {figures['compile_s']:.1f} s"]
    parts.append(f"{1e3 * figures['step_s_alone']:.2f} ms")
    if "bytes" in figures:
        parts.append(f"{figures['bytes'] / 2**30:.2f} GiB")
    parts.append("losses " + ", ".join(f"{loss:.4f}" for loss in figures["losses"]))
    return ", ".join(parts)


def _compare(reports, turns, name, key, reference):
    """Adds the ratios of time, taken turn by turn, and of memory."""
    if reference not in turns:
        return
    pairs = zip(turns[name], turns[reference], strict=True)
    ratio = {"time": statistics.median(own / other for own, other in pairs)}
    if "bytes" in reports[name]:
        ratio["memory"] = reports[name]["bytes"] / reports[reference]["bytes"]
    reports[name][key] = ratio
