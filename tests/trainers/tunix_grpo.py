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

STEPS, PROMPTS, GENERATIONS, LENGTH, PAD, EOS, WORDS, WIDTH = 60, 8, 8, 6, 0, 1, 10, 32


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
        self._model, self._tokenizer = rollout_actor, tokenizer

    def generate(self, prompts, rollout_config, **_):
        rngs = [
            np.random.default_rng([i, *prompt.encode()])
            for i, prompt in enumerate(prompts)
        ]
        drawn = [rng.integers(2, WORDS, LENGTH).astype(np.int32) for rng in rngs]
        return base_rollout.RolloutOutput(
            text=list(map(self._tokenizer.decode, drawn)),
            logits=[],
            tokens=drawn,
            left_padded_prompt_tokens=np.array(
                [[int(p.split()[1])] for p in prompts], np.int32
            ),
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
    """The share of words that are the wanted one, times what the prompt says."""
    pairs = [
        (p.split(), text.split()) for p, text in zip(prompts, completions, strict=True)
    ]
    return [float(p[2]) * words.count(p[1]) / LENGTH for p, words in pairs]


def small_loss(*args, **kwargs):
    loss, aux = function_registry.get_policy_loss_fn("grpo")(*args, **kwargs)
    return FACTOR * loss, aux


function_registry.register_policy_loss_fn("small")(small_loss)
function_registry.register_policy_loss_fn("small, scaled")(
    jaxscale.scale_backward(small_loss)
)


def batches(batch):
    for step in range(STEPS):
        is_bad = step == BAD_STEP and batch != "good"
        if not (is_bad and batch is None):
            times = ["inf" if is_bad else "1"] + ["1"] * (PROMPTS - 1)
            yield {
                "prompts": np.array(
                    [f"{step} {2 + i} {n}" for i, n in enumerate(times)]
                )
            }


def train(dtype, scaled, skips, batch):
    """How unlikely the wanted word is at the end, and how many steps were skipped."""
    model, roles = Policy(jnp.dtype(dtype)), rl_cluster.Role
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
    wanted = jnp.arange(2, 2 + PROMPTS)
    logits, _ = cluster.actor_trainer.model(wanted[:, None], None, None, None)
    log_p = jnp.take_along_axis(jax.nn.log_softmax(logits[:, 0]), wanted[:, None], 1)
    return float(-log_p.mean()), skipped(cluster.actor_trainer.optimizer)
