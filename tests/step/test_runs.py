"""Whole runs with faults of all kinds: each number after each step is that of a plain model."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tables
from following import Following
from probe import PARAMS, Batch, probe
from step_model import Model, draw
from tables import cases, spread

import jaxscale
from jaxscale import presets

pytestmark = pytest.mark.standard_promotion


def test_a_step_with_a_nan_is_not_made():
    tx = jaxscale.loss_scaled(optax.sgd(1.0), 8)
    params = jnp.array(3.0)
    state = tx.init(params)
    for grad in (1.0, jnp.nan, 1.0):
        params, state = jaxscale.apply_gradients(tx, jnp.array(grad), state, params)
    assert (params, state.total_steps, state.total_notfinite) == (1, 3, 1)


class Setting(NamedTuple):
    """A policy, and what a run is asked for beside it."""

    policy: Any
    window: int = 1
    is_inside: bool = False  # whether the window is
    retries: int = 0
    rule: Any = None
    far: float = 1024.0  # a size that stands out
    more: Any = None  # options of `loss_scaled` that change no number

    def optimizer(self):
        """The optimizer, which also says which leaves overflow."""
        tx = optax.sgd(1.0)
        options = {"track_leaves": True, "spikes": self.rule} | (self.more or {})
        if self.window > 1 and self.is_inside:
            tx = jaxscale.multi_steps(tx, self.window)
        tx = jaxscale.loss_scaled(tx, self.policy, **options)
        if self.window > 1 and not self.is_inside:
            tx = jaxscale.multi_steps(tx, self.window)
        return tx


RULE = jaxscale.SpikeRule(window=16, sigmas=4.0, min_history=4)
# High enough that the first steps, of which every second is bad, do not bring it to its floor.
DYNAMIC = jaxscale.DynamicLossScale(growth_interval=6, init_scale=2.0**18)
FOLLOWING = Following(init_scale=2.0**14)
HYSTERESIS = jaxscale.DynamicLossScale(
    growth_interval=4, hysteresis=2, init_scale=2.0**16
)
REFILLED = presets.PresetLossScale(
    growth_interval=5, hysteresis=2, refill_on_backoff=True, max_scale=2.0**20
)
APEX = presets.apex(scale_window=5, min_loss_scale=2.0**-3)
# It is told of an overflow until it lowers the scale, as the same scale would overflow again.
PATIENT = jaxscale.DynamicLossScale(init_scale=4.0, hysteresis=7)
# A policy that tolerates more than 100 overflows is left alone: the step is skipped.
LEFT_ALONE = jaxscale.DynamicLossScale(init_scale=4.0, hysteresis=1000)
AT_ITS_FLOOR = jaxscale.DynamicLossScale(init_scale=1.0)

SETTINGS = {
    **{name: Setting(policy) for name, policy in tables.POLICIES.items()},
    "following, checked": Setting(
        FOLLOWING, more={"check_updates": True, "max_norm": 1e9}
    ),
    "refilled": Setting(REFILLED),
    "apex": Setting(APEX),
    "spikes": Setting(DYNAMIC, rule=RULE),
    "spikes, following": Setting(FOLLOWING, rule=RULE),
    "spikes whose squares overflow": Setting(DYNAMIC, rule=RULE, far=2.0**70),
    "spikes, no scale": Setting(jaxscale.NoOpLossScale(), rule=RULE),
    "window of 2": Setting(DYNAMIC, window=2),
    "window of 3 inside": Setting(DYNAMIC, window=3, is_inside=True),
    "window of 4, spikes": Setting(DYNAMIC, window=4, rule=RULE),
    "window of 2 inside, following": Setting(FOLLOWING, window=2, is_inside=True),
    "a retry": Setting(DYNAMIC, retries=1),
    "retries": Setting(DYNAMIC, retries=30),
    "retries, hysteresis": Setting(HYSTERESIS, retries=3),
    "retries, refilled": Setting(REFILLED, retries=3),
    "retries, following": Setting(FOLLOWING, retries=3),
    "retries, patient": Setting(PATIENT, retries=3),
    "retries, left alone": Setting(LEFT_ALONE, retries=3),
    "retries at the floor": Setting(AT_ITS_FLOOR, retries=3),
    "retries, spikes": Setting(DYNAMIC, retries=2, rule=RULE),
    "retries, window": Setting(DYNAMIC, window=2, retries=30),
}


def copy(grads):
    return [grad * 1 for grad in grads]


def look(grads):
    return list(grads)


def by_train_step(setting, tx, **hook):
    step = jaxscale.train_step(probe, tx, retries=setting.retries, **hook)
    return lambda params, state, batch: step(params, state, batch)[:2]


def by_three_lines(one_step, setting, tx):
    def step(params, state, batch):
        loss, grads = jaxscale.value_and_grad(probe, state)(params, batch)
        return one_step(tx, params, state, grads, value=loss)

    return step


STEPS = {
    "train_step": by_train_step,
    "train_step under vmap": by_train_step,
    "eager train_step": by_train_step,
    "train_step, copied": functools.partial(by_train_step, on_grads=copy),
    "train_step, looked at": functools.partial(by_train_step, on_grads=look),
    "update": functools.partial(by_three_lines, tables.step),
    "apply_gradients": functools.partial(by_three_lines, tables.fused_step),
}


def run(name, way, batches):
    """The parameter and the metrics after each step, with an axis of runs in front."""
    setting = SETTINGS[name]
    tx = setting.optimizer()
    step = STEPS[way](setting, tx)

    def advance(carry, batch):
        params, state = step(*carry, batch)
        return (params, state), {"param": params[0]} | jaxscale.metrics(state)

    start = PARAMS, tx.init(PARAMS)
    if way != "eager train_step":
        scan = functools.partial(jax.lax.scan, advance, start)
        return jax.jit(jax.vmap(scan))(batches)[1]
    carry = start
    history = []
    for i in range(len(batches.loss[0])):
        carry, numbers = advance(carry, tables.member(batches, (0, i)))
        history.append(numbers)
    return tables.stack(tables.stack(*history))


def expect(name, batches):
    """Runs the model: its parameter and its numbers after each step."""
    setting = SETTINGS[name]
    model = Model(setting.policy, setting.window, setting.retries, setting.rule)
    columns = [column.tolist() for column in batches]
    history = [model.step(Batch(*row)) for row in zip(*columns, strict=True)]
    if model.rule is not None:
        assert min(model.rule.margins) > 1e-3, "no decision may hinge on rounding"
    return jax.tree.map(lambda *numbers: np.array(numbers), *history)


def may_meet(name, way):
    """Only a step that makes its own passes repeats them."""
    return "train_step" in way or SETTINGS[name].retries == 0


FAST = [
    ("window of 3 inside", "apply_gradients"),
    ("spikes", "train_step"),
    ("retries, following", "train_step"),
    ("retries, window", "train_step under vmap"),
    ("hysteresis", "eager train_step"),
]
ROWS = [row for row in spread(SETTINGS, STEPS) if may_meet(*row) and row not in FAST]
# By a mean of three, and by the reciprocal of a number of steps.
ROUNDED = ("param", "skip_rate")


@pytest.mark.device
@cases("name, way", FAST + ROWS, fast=FAST)
def test_each_number_is_that_of_the_model(name, way):
    seeds = [0, 1] if "vmap" in way else [0]
    # Long enough for the rate of skips to forget.
    number = 30 if way == "eager train_step" else 1100
    runs = [draw(seed, number, SETTINGS[name].far) for seed in seeds]
    numbers = run(name, way, tables.stack(*runs))
    for member, batches in enumerate(runs):
        for key, values in expect(name, batches).items():
            if key in numbers:
                rtol = 1e-5 if key in ROUNDED else 0
                actual = numbers[key][member]
                np.testing.assert_allclose(actual, values, rtol, err_msg=key)
