"""Replays, step by step, what 30 real loss scalers did. `traces/FORMAT.md` explains the files."""

import collections
import dataclasses
import functools

import jax
import numpy as np
import optax
import pytest
from peers import FIXED_BUT_SKIPPING, FOLDER, SYSTEMS, first_state, load, policy_of
from tables import cases

import jaxscale
from jaxscale import presets

INFO = np.finfo(np.float32)

LOGMAX = "openseq2seq_logmax"


def normal(scale):
    """How many scales are normal float32 numbers, before the first that is not."""
    scale = np.array(scale, np.float64)
    good = (scale >= INFO.smallest_normal) & (scale <= INFO.max)
    return len(scale) if good.all() else int(np.argmin(good))


@functools.partial(jax.jit, static_argnums=0)
def scan(signature, numbers, states, grads):
    """All steps of many policies that differ in their numbers only."""
    cls, switches, names = signature

    def run(numbers, state, grads):
        # Past the checks, which want Python numbers: so that many share one program.
        policy = object.__new__(cls)
        for name, value in (*switches, *zip(names, numbers, strict=True)):
            object.__setattr__(policy, name, value)

        def step(state, grad):
            state, applied = policy.update(state, {"w": grad})
            return state, (state, applied)

        return jax.lax.scan(step, state, grads)[1]

    return jax.vmap(run)(numbers, states, grads)


def replay(policies, states, grads):
    """Every state and verdict of every case, in few programs."""
    groups = collections.defaultdict(list)
    for i, policy in enumerate(policies):
        fields = dataclasses.asdict(policy)
        is_switch = {name: isinstance(value, (bool, str, tuple)) for name, value in fields.items()}
        switches = tuple((name, fields[name]) for name in fields if is_switch[name])
        names = tuple(name for name in fields if not is_switch[name])
        groups[type(policy), switches, names].append(i)
    outcome = {}
    for signature, members in groups.items():
        numbers = [np.array([getattr(policies[i], name) for i in members]) for name in signature[2]]
        numbers = [n.astype(np.float32 if n.dtype.kind == "f" else np.int32) for n in numbers]
        first = jax.tree.map(lambda *leaves: np.stack(leaves), *(states[i] for i in members))
        padded = filled_up(grads)[members]
        after, applied = jax.tree.map(np.asarray, scan(signature, numbers, first, padded))
        whole = jax.tree.map(lambda a, b: np.concatenate([a[:, None], b], axis=1), first, after)
        for row, i in enumerate(members):
            steps = len(grads[i])
            states_of_one = jax.tree.map(lambda x, row=row, n=steps: x[row, : n + 1], whole)
            outcome[i] = states_of_one, applied[row, :steps]
    return [outcome[i] for i in range(len(policies))]


def filled_up(grads):
    """Gradients of many cases in one array, with ones behind those of the shorter ones."""
    longest = max(map(len, grads))
    return np.stack([np.pad(g, (0, longest - len(g)), constant_values=1) for g in grads])


def gradients(case, steps):
    bad = np.resize([np.inf, -np.inf, np.nan], steps)
    return np.where(np.array(case["finite"][:steps]) == 1, 1.0, bad).astype(np.float32)


FAST = ["deepspeed_dynamic_loss_scaler", "mpx_dynamic_loss_scaling", "torch_grad_scaler"]


@cases("system", SYSTEMS, fast=FAST)
def test_scale_and_counters_are_those_of_the_library(system):
    replayed = []
    for case in load(system):
        policy = policy_of(system, case)
        state = first_state(system, case, policy)
        tracker = getattr(state, "growth_tracker", 0)
        if tracker >= getattr(policy, "growth_interval", 1) and "tf" not in system:
            continue  # a counter restored beyond the interval, which grows at once here
        # Until the library's scale leaves the normal float32 numbers.
        steps = min(len(case["finite"]), normal(case["scale"]) - 1)
        replayed.append((case, policy, state, gradients(case, steps)))
    outcome = replay(*zip(*(each[1:] for each in replayed), strict=True))
    for (case, policy, _, grads), (states, applied) in zip(replayed, outcome, strict=True):
        steps, where = len(grads), f"{system} {case['id']}"
        want = np.array(case["scale"][: steps + 1], np.float64).astype(np.float32)
        changes = np.cumsum(np.diff(want, prepend=want[:1]) != 0)
        ulps = 2 * changes * ("inexact" in case["tags"])
        error = np.abs(states.loss_scale - want)
        assert (error <= ulps * np.spacing(np.minimum(want, 2.0**127))).all(), where
        skips = case["config"].get("kind") and system in FIXED_BUT_SKIPPING
        verdict = np.isfinite(grads) if skips else applied
        assert verdict.tolist() == [bool(a) for a in case["applied"][:steps]], where
        if not isinstance(policy, (jaxscale.FixedLossScale, jaxscale.NoOpLossScale)):
            counters = {name: np.array(v[: steps + 1]) for name, v in case["counters"].items()}
            for name, expected in SYSTEMS[system][1](counters, policy):
                got = getattr(states, name)
                same = expected(got) if callable(expected) else got == expected
                assert np.all(same), f"{where}: {name} {got}"


def test_logmax_follows_openseq2seq_up_to_its_defects():
    recorded, policies, grads = load(LOGMAX), [], []
    for case in recorded:
        config, amax = dict(case["config"]), np.array(case["amax"], np.float32)
        amax[np.array(case["has_nan"]) == 1] = np.nan
        stops = amax == 0  # its scale is NaN for good
        if config["log_max"] == 4:
            # It counts a non-finite step as 2**log_max. That is what 16 means here.
            config["log_max"] = 16.0
        else:
            stops |= ~np.isfinite(amax)
        policies.append(presets.openseq2seq_logmax(**config))
        grads.append(amax[: np.argmax(stops)] if stops.any() else amax)
    outcome = replay(policies, [policy.init() for policy in policies], grads)
    for case, amax, (states, applied) in zip(recorded, grads, outcome, strict=True):
        want = np.array(case["scale"][: len(amax) + 1])
        np.testing.assert_allclose(states.loss_scale, want, rtol=0.02, err_msg=case["id"])
        assert applied.tolist() == [bool(a) for a in case["applied"][: len(amax)]]
        for name in states._fields[1:]:
            want = np.array(case["counters"][name][: len(amax) + 1])
            got = getattr(states, name)
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5, err_msg=case["id"])


OPTAX = ["optax_apply_if_finite", "optax_multisteps_skip_not_finite"]


@pytest.mark.standard_promotion
@cases("system", OPTAX, fast=OPTAX[:1])
def test_steps_are_skipped_as_in_optax(system):
    recorded = load(system)
    is_multi = "multisteps" in system
    for every_k in sorted({case["config"].get("every_k", 0) for case in recorded}):
        inner = optax.MultiSteps(optax.sgd(-1.0), every_k) if is_multi else optax.scale(1.0)
        tx = jaxscale.skip_nonfinite(inner)

        def step(state, grad, tx=tx):
            updates, state = tx.update(grad, state)
            return state, (state, updates != 0)

        group = [case for case in recorded if case["config"].get("every_k", 0) == every_k]
        grads = [gradients(case, len(case["finite"])) for case in group]
        run = jax.vmap(lambda g, tx=tx, step=step: jax.lax.scan(step, tx.init(g[0]), g)[1])
        states, applied = jax.tree.map(np.asarray, jax.jit(run)(filled_up(grads)))
        source = states.inner_state if is_multi else states
        for i, case in enumerate(group):
            n = len(case["finite"])
            want = np.array(case["applied"]) == 1
            # Where it applied a gradient that is not finite.
            gave_up = want & (np.array(case["finite"]) == 0)
            assert applied[i, :n].tolist() == (want & ~gave_up).tolist(), case["id"]
            for name, counter in case["counters"].items():
                name = "step_applied" if name == "last_finite" else name
                assert getattr(source, name)[i, :n].tolist() == counter[1:], (case["id"], name)


def test_every_file_is_replayed():
    files = {path.name.removesuffix(".json.gz") for path in FOLDER.glob("*.json.gz")}
    assert files == {*SYSTEMS, LOGMAX, *OPTAX, "olmo_skip_step_optimizer"}
    assert len(files) == 31
    assert "what 30 versions of these scalers did" in presets.__doc__
