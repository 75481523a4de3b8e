"""One process for each method: they take turns, and one that does not come back is stopped.

A compilation cannot be interrupted, only a process can. All of them live through all rounds, so
that what the machine does meanwhile falls on all methods alike; while one has its turn the others
wait. Their times for tracing and compiling are those of a process that did nothing before.
"""

import multiprocessing
import os
import statistics
import time

import numpy as np

# Its imports are made once, in the process that the others are forked from.
PRELOAD = ["jax", "optax", "jaxscale.flax", "flax.linen", "flax.training.dynamic_scale"]
PRELOAD += ["jmp"]
# Several processes share one GPU.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


class Process:
    """A process that makes something ready, and then runs it as often as it is asked to."""

    def __init__(self, make, *args):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self._pipe, end = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(end, make, args), daemon=True
        )
        self._process.start()
        end.close()

    def answer(self, limit=None):
        """Returns what it sent, or ``{"error": ...}`` after ``limit`` seconds or its death."""
        try:
            if self._pipe.poll(limit):
                return self._pipe.recv()
            self.stop()
            return {"error": f"> {limit:g} s", "limit": limit}
        except EOFError:
            self.stop()
            return {"error": f"died with exit code {self._process.exitcode}"}

    def run(self, *args):
        self._pipe.send(args)
        return self.answer()

    def stop(self):
        self._process.kill()
        self._process.join()


def _serve(pipe, make, args):
    try:
        report, run = make(*args)
    except Exception as error:
        kind = type(error).__name__
        if isinstance(error, ImportError):
            kind = "not installed"
        first_line = str(error).partition("\n")[0]
        return pipe.send({"error": f"{kind}: {first_line[:200]}"})
    pipe.send(report)
    while True:
        pipe.send(run(*pipe.recv()))


def call(make, *args, limit=None):
    """Returns the report of ``make``, made in a process of its own."""
    process = Process(make, *args)
    report = process.answer(limit)
    process.stop()
    return report


def prepare(jobs, limit, show=lambda name: None):
    """Starts one process after another. ``jobs``: name -> (make, *args).

    Returns the processes that came up, and the reports of all.
    """
    processes, reports = {}, {}
    for name, job in jobs.items():
        show(name)
        process = Process(*job)
        reports[name] = process.answer(limit)
        if "error" in reports[name]:
            process.stop()
        else:
            processes[name] = process
    return processes, reports


def take_turns(processes, rounds, seconds, show=lambda name: None):
    """Returns for each process a list of what ``run(seconds)`` said, one for each round."""
    names = list(processes)
    turns = {name: [] for name in names}
    for i in range(rounds):
        show(f"round {i + 1} of {rounds}")
        first = i % len(names)  # another one begins in each round
        for name in names[first:] + names[:first]:
            turns[name].append(processes[name].run(seconds))
    for process in processes.values():
        process.stop()
    return turns


def measure(jobs, options, show, **references):
    """Returns the reports of jobs that take turns, each with the medians of what its turns said.

    `references` has the name of the job whose time a ratio is taken to, by the name of the ratio.
    """
    ready, reports = prepare(jobs, options.limit, show)
    turns = take_turns(ready, options.rounds, options.seconds, show)
    for name, own_turns in turns.items():
        for key in own_turns[0]:
            reports[name][key] = statistics.median(turn[key] for turn in own_turns)
        for key, reference in references.items():
            if reference in turns:
                reports[name][key] = ratio(own_turns, turns[reference])
    return reports


def timed(call, carry, block):
    """Returns a ``run(seconds)`` that repeats ``carry = call(carry)`` and times it.

    It returns the seconds of a step, of many that were queued; and the seconds until an idle
    machine's call returned, which is what Python and the runtime need to start a step.
    """

    def run(seconds):
        nonlocal carry
        dispatch, alone = [], []
        for _ in range(3):
            start = time.perf_counter()
            carry = call(carry)
            dispatch.append(time.perf_counter() - start)
            block(carry)
            alone.append(time.perf_counter() - start)
        number = max(1, min(200, int(seconds / min(alone))))
        start = time.perf_counter()
        for _ in range(number):
            carry = call(carry)
        block(carry)
        return {
            "step_s": (time.perf_counter() - start) / number,
            "dispatch_s": min(dispatch),
        }

    return run


def ratio(turns, others, key="step_s"):
    """Returns median and quartiles of a ratio, taken round by round."""
    ratios = [a[key] / b[key] for a, b in zip(turns, others, strict=True)]
    low, median, high = np.quantile(ratios, [0.25, 0.5, 0.75]).tolist()
    return {"median": median, "low": low, "high": high}
