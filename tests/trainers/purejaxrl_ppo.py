"""purejaxrl's `ppo.py`, which builds its optimizer and its loss itself: a training for each seed,
all under one `vmap`.

The network's gradients are made that small. The names that the program imports are replaced: its
network, its optimizer, and the wrappers of environments, which it expects beside itself. In a bad
step one reward of each seed is NaN, which spoils all updates from it.
"""

import sys
import types
from unittest import mock

import jax
import jax.numpy as jnp
import optax
from gymnax.wrappers import purerl
from runs import BAD_STEP
from watch import Journal, in_precision, small

STEPS = 40
UPDATES = 4
SEEDS = 8
LAST = 10
BAD_STEPS = UPDATES
CONFIG = {
    "LR": 5e-3,
    "NUM_ENVS": 8,
    "NUM_STEPS": 32,
    "TOTAL_TIMESTEPS": STEPS * 8 * 32,
    "UPDATE_EPOCHS": UPDATES,
    "NUM_MINIBATCHES": 1,
    "GAMMA": 0.99,
    "GAE_LAMBDA": 0.95,
    "CLIP_EPS": 0.2,
    "ENT_COEF": 0.01,
    "VF_COEF": 0.5,
    "MAX_GRAD_NORM": 0.5,
    "ACTIVATION": "tanh",
    "ENV_NAME": "CartPole-v1",
    "ANNEAL_LR": False,
}


class BadReward(purerl.GymnaxWrapper):
    """At one time the reward is NaN."""

    bad_time = -1

    def reset(self, key, params=None):
        observation, state = self._env.reset(key, params)
        return observation, (jnp.int32(0), state)

    def step(self, key, state, action, params=None):
        time, state = state
        observation, state, reward, done, info = self._env.step(
            key, state, action, params
        )
        reward = jnp.where(time == self.bad_time, jnp.nan, reward)
        return observation, (time + 1, state), reward, done, info


class LogWrapper(BadReward):
    """Counts true rewards, and hands on the bad one."""

    def __init__(self, env):
        super().__init__(purerl.LogWrapper(env))


sys.modules["wrappers"] = types.ModuleType("wrappers")
sys.modules["wrappers"].LogWrapper = LogWrapper
sys.modules["wrappers"].FlattenObservationWrapper = purerl.FlattenObservationWrapper
from others import purejaxrl_ppo as ppo  # noqa: E402

Plain = ppo.ActorCritic


def train(dtype, scaled, skips, batch):
    """Returns minus the mean length of the last episodes, and how many updates a seed skipped."""
    bad_time = BAD_STEP * CONFIG["NUM_STEPS"] + 5 if batch == "bad" else -1
    left_out = ()
    if batch is None:
        left_out = range(BAD_STEP * UPDATES, BAD_STEP * UPDATES + UPDATES)
    journal = Journal()

    class Network(Plain):
        def apply(self, *args):
            return small(in_precision(super().apply, dtype, scaled)(*args))

    def adam(learning_rate, eps):
        return journal.optimizer(skips, left_out, optax.adam(learning_rate, eps=eps))

    replaced = {
        "ActorCritic": Network,
        "optax": types.SimpleNamespace(**vars(optax) | {"adam": adam}),
    }
    seeds = jax.random.split(jax.random.key(0), SEEDS)
    with (
        mock.patch.multiple(ppo, **replaced),
        mock.patch.object(BadReward, "bad_time", bad_time),
    ):
        trained = jax.jit(jax.vmap(ppo.make_train(dict(CONFIG))))(seeds)
    lengths = trained["metrics"]["returned_episode_lengths"][:, -LAST:]
    return -float(lengths.mean()), journal.skipped
