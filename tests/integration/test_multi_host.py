"""Many hosts: processes that JAX joins on loopback. A NaN reaches one of them; one is lost.

They run ``examples/multi_host.py`` as a user does. What they computed is read from their
checkpoints, in this process, which is none of them.
"""

import contextlib
import functools
import os
import pathlib
import re
import runpy
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from tables import assert_same_bits

pytestmark = [pytest.mark.standard_promotion, pytest.mark.slow]

EXAMPLE = pathlib.Path(__file__).parent.parent.parent / "examples" / "multi_host.py"
STEPS, SAVE_EVERY = 14, 4
NAN_STEP, KILL_STEP = 7, 11
DEVICES = 4  # of all processes together
# How many processes there are, and which one has the fault: the coordinator.
HOSTS, VICTIM = 2, 0


@functools.cache
def example():
    return runpy.run_path(str(EXAMPLE))


@contextlib.contextmanager
def started(number, *options, command=(EXAMPLE, "--local")):
    """Starts some processes by the launcher. When it is left, whatever happened, none lives."""
    flags = f"--xla_force_host_platform_device_count={DEVICES // number}"
    # Compilation takes most of the time. Without the second flag float16 might be float32.
    flags += " --xla_backend_optimization_level=0 --xla_allow_excess_precision=false"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_LOG_COMPILES": "1"}
    # Processes share a pipe. Unbuffered, a line and its end are two writes, which others cut apart.
    environment |= {"PYTHONUNBUFFERED": ""}
    command = [sys.executable, *map(str, [*command, number, *options])]
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(
        command, env=environment, start_new_session=True, **how
    ) as launcher:
        try:
            yield launcher
        finally:
            kill_group(launcher)


def kill_group(launcher):
    """Returns whether there was anything to kill."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(launcher.pid, signal.SIGKILL)
        return True


def run(number, *options, **command):
    """Returns the exit code and the output of all processes. None of them may be left."""
    with started(number, *options, **command) as launcher:
        output, _ = launcher.communicate(timeout=300)
        assert not kill_group(launcher), output
    return launcher.returncode, output


def train(number, directory, *options):
    """Returns the output of a run to its last step, and what all processes say at the end."""
    code, output = run(number, "--steps", STEPS, "--checkpoints", directory, *options)
    assert code == 0, output
    end = r"process (\d): repeated (\d+), skipped (\d+), scale (\d+), digest of the state (\w{8})"
    ends = re.findall(end, output)
    assert sorted(int(process) for process, *_ in ends) == list(range(number)), output
    (agreed,) = {tuple(end) for _, *end in ends}
    # Each process compiles the step, and it does so once, restored or not. (The times tell two
    # compilations from one that is logged twice, as it is by JAX 0.6.)
    times = re.findall(
        r"Finished XLA compilation of jit\(train_step\) in ([\d.]+) sec", output
    )
    assert len(set(times)) == number
    return output, agreed


def restore(directory, step):
    """Returns parameters and optimizer state, restored by this process alone."""
    sharding = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
    avals = jax.eval_shape(example()["init"], jax.random.key(0))
    avals = jax.tree.map(lambda aval: aval.update(sharding=sharding), avals)
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(directory / str(step) / "default", avals)


def assert_the_nan_is_skipped(checkpoints, agreed):
    """The step with the NaN changes nothing, and all others make a step."""
    old_params, old_state = example()["init"](jax.random.key(0))
    bad_steps = []
    for step in range(1, STEPS + 1):
        params, opt_state = restore(checkpoints, step)
        if opt_state.step_applied:
            assert not np.array_equal(params[0][0], old_params[0][0]), step
        else:
            bad_steps.append(step)
            assert_same_bits(params, old_params)
            assert_same_bits(opt_state.inner_state, old_state.inner_state)
        assert opt_state.total_steps == step
        assert opt_state.total_notfinite == len(bad_steps), step
        assert opt_state.total_notfinite_loss == len(bad_steps), step
        old_params = params
        old_state = opt_state
    assert bad_steps == [NAN_STEP]
    retries, skipped, scale = map(int, agreed[:3])
    assert retries, "no real overflow was met"
    assert retries == old_state.total_retries
    assert skipped == len(bad_steps)
    assert scale == old_state.scaling.loss_scale
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(old_params))


def assert_a_lost_process_costs_some_steps(number, victim, checkpoints, *options):
    """Kills a process, and sees all stop. Returns what they say at the end when they went on."""
    killed = "--steps", STEPS, "--checkpoints", checkpoints, "--kill", KILL_STEP, victim
    code, output = run(number, *options, *killed)
    (codes,) = re.findall(r"Exit codes: \[(.*)\]", output)
    assert code == 1
    assert codes.split(", ")[victim] == str(-signal.SIGKILL)
    assert "digest of the state" not in output  # which says that a process has finished
    output, resumed = train(number, checkpoints, *options)
    # The last checkpoint may not have been complete when the process was lost.
    start = int(re.search(r"from step (\d+)", output).group(1))
    assert start in (SAVE_EVERY, 2 * SAVE_EVERY)
    return resumed


def test_all_skip_the_nan_of_one_process_and_a_lost_one_costs_some_steps(tmp_path):
    every = tmp_path / "every"
    some = tmp_path / "some"
    options = "--save-every", 1, "--nan", NAN_STEP, VICTIM
    _, agreed = train(HOSTS, every, *options)
    assert_the_nan_is_skipped(every, agreed)

    # Another process has the NaN than before, which must not matter.
    options = "--save-every", SAVE_EVERY, "--nan", NAN_STEP, (VICTIM + 1) % HOSTS
    resumed = assert_a_lost_process_costs_some_steps(HOSTS, VICTIM, some, *options)
    assert resumed == agreed


def test_processes_agree_by_themselves_on_the_scale_of_a_backward_pass():
    """Even if only one of them overflows: otherwise it would wait for the others for ever."""
    program = EXAMPLE.parent.parent / "tests" / "support" / "hosts.py"
    code, output = run(4, command=(program,))
    assert code == 0, output
    lines = re.findall(r"form (.+?) at (\S+?): error ([\d.]+), digest (\w{8})", output)
    assert len(lines) == 4 * 8, output
    agreed = {}
    for form, scale, error, digest in lines:
        assert float(error) < 2e-3, (form, scale)
        first = agreed.setdefault((form, scale), (error, digest))
        assert (error, digest) == first, (form, scale)
    assert len(agreed) == 8, output


SPLIT_STATES = [
    "check: nothing",
    r"check of a stuck one: 3 steps in a row were skipped",
    "check of a lost one: .*has made 3 steps, but its optimizer only 0",
    r"check of a population: `check\(tree\)`.*process_allgather",
    "metrics: .*'notfinite_count': 3",
    r"to_state_dict: .* at /inner_state/0/trace is split over .*process_allgather",
    r"gathered: \(8,\)",
    "restored: True",
]


def test_states_that_are_split_over_processes_are_checked_logged_and_saved():
    program = EXAMPLE.parent.parent / "tests" / "support" / "split_states.py"
    code, output = run(2, command=(program,))
    assert code == 0, output
    for line in SPLIT_STATES:
        assert len(re.findall(line, output)) == 2, (line, output)
