"""Tunix's `GRPOLearner`: its own loss and trainer, and completions that do not follow the policy.

They are drawn beforehand, so that runs which round differently train on the same ones.
"""

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
from runs import BAD_STEP, FACTOR, optimizer, skipped
from tunix.rl import function_registry, rl_cluster
from tunix.rl.grpo import grpo_learner
from tunix.rl.rollout import base_rollout

import jaxscale

STEPS = 60
PROMPTS = 8
GENERATIONS = 8
LENGTH = 6
PAD = 0
EOS = 1
WORDS = 10
WIDTH = 32


class Ids:
    def pad_id(self):
        return PAD

    def eos_id(self):
        return EOS


class Tokenizer(Ids):
    """Words are numbers."""

    def encode(self, text):
        return [int(word) for word in text.split()]

    def decode(self, ids):
        return " ".join(map(str, ids))

    def bos_id(self):
        return EOS


class Rollout(Ids, base_rollout.BaseRollout):
    """Draws completions at random. A prompt is the step, the word that is wanted, and a reward."""

    def __init__(self, rollout_actor, tokenizer, **_):
        self._model = rollout_actor
        self._tokenizer = tokenizer

    def generate(self, prompts, rollout_config, **_):
        completions = []
        wanted = []
        for i, prompt in enumerate(prompts):
            rng = np.random.default_rng([i, *prompt.encode()])
            completions.append(rng.integers(2, WORDS, LENGTH).astype(np.int32))
            _, word, _ = prompt.split()
            wanted.append([int(word)])
        return base_rollout.RolloutOutput(
            text=[self._tokenizer.decode(ids) for ids in completions],
            logits=[],
            tokens=completions,
            left_padded_prompt_tokens=np.array(wanted, np.int32),
            logprobs=None,
        )

    def get_per_token_logps(self, *args, **kwargs):
        raise NotImplementedError

    def update_params(self, params, filter_types=None):
        pass

    def model(self):
        return self._model


class Policy(nnx.Module):
    """Says the next word from the mean of all before."""

    def __init__(self, dtype):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(WORDS, WIDTH, dtype=dtype, rngs=rngs)
        self.first = nnx.Linear(WIDTH, WIDTH, dtype=dtype, rngs=rngs)
        self.last = nnx.Linear(WIDTH, WORDS, dtype=dtype, rngs=rngs)

    def __call__(self, tokens, positions, cache, attention_mask):
        number = jnp.arange(1, tokens.shape[1] + 1, dtype=self.first.dtype)
        x = jnp.cumsum(self.embed(tokens), 1) / number[:, None]
        return self.last(nnx.tanh(self.first(x))).astype(jnp.float32), cache


def reward(prompts, completions, **_):
    """Returns the share of words that are the wanted one, times what the prompt says."""
    rewards = []
    for prompt, completion in zip(prompts, completions, strict=True):
        _, word, factor = prompt.split()
        count = completion.split().count(word)
        rewards.append(float(factor) * count / LENGTH)
    return rewards


def small_loss(*args, **kwargs):
    loss, aux = function_registry.get_policy_loss_fn("grpo")(*args, **kwargs)
    return FACTOR * loss, aux


function_registry.register_policy_loss_fn("small")(small_loss)
function_registry.register_policy_loss_fn("small, scaled")(
    jaxscale.scale_backward(small_loss)
)


def batches(batch):
    for step in range(STEPS):
        factors = ["1"] * PROMPTS
        is_bad = step == BAD_STEP
        if is_bad and batch == "bad":
            factors[0] = "inf"
        if not is_bad or batch is not None:
            prompts = [f"{step} {2 + i} {factor}" for i, factor in enumerate(factors)]
            yield {"prompts": np.array(prompts)}


def train(dtype, scaled, skips, batch):
    """Returns how unlikely the wanted word is at the end, and how many steps were skipped."""
    model = Policy(jnp.dtype(dtype))
    roles = rl_cluster.Role
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("fsdp",))
    config = rl_cluster.ClusterConfig(
        role_to_mesh=dict.fromkeys((roles.ACTOR, roles.REFERENCE, roles.ROLLOUT), mesh),
        rollout_engine=Rollout,
        training_config=rl_cluster.RLTrainingConfig(
            actor_optimizer=optimizer(skips), eval_every_n_steps=STEPS, max_steps=STEPS
        ),
        rollout_config=base_rollout.RolloutConfig(
            max_tokens_to_generate=LENGTH, max_prompt_length=1, temperature=1.0
        ),
    )
    cluster = rl_cluster.RLCluster(
        actor=model, tokenizer=Tokenizer(), cluster_config=config
    )
    algorithm = grpo_learner.GRPOConfig(
        num_generations=GENERATIONS,
        beta=0.0,
        policy_loss_fn="small, scaled" if scaled else "small",
    )
    learner = grpo_learner.GRPOLearner(cluster, algorithm, reward)
    learner.train(batches(batch))
    wanted = jnp.arange(2, 2 + PROMPTS)[:, None]
    logits, _ = cluster.actor_trainer.model(wanted, None, None, None)
    log_p = jnp.take_along_axis(jax.nn.log_softmax(logits[:, 0]), wanted, 1)
    return float(-log_p.mean()), skipped(cluster.actor_trainer.optimizer)
