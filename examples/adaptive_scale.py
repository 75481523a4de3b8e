"""A loss scale that follows the largest gradient: a policy of one's own, to copy.

The default rule doubles the scale now and then, until something overflows, and loses a step each
time. This one looks at the largest gradient instead, and keeps it below a level that float16 bears.
Copy the class `FollowLargest`. It needs nothing else of this file.

The program trains a network that reads digits, by the default rule and by this one, and starts each
far too high as well. The loss is a sum, so a large scale overflows.
"""

import argparse
import dataclasses
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits

import jaxscale

LAYER_SIZES = [64, 256, 128, 10]
BATCH_SIZE = 128


class FollowLargestState(NamedTuple):
    """The state of a `FollowLargest`.

    The line without an annotation is no field. It marks the type as the state of a policy, by which
    `jaxscale.metrics`, `jaxscale.value_and_grad` and checkpoints know it.
    """

    is_loss_scale_state = True

    loss_scale: jax.Array  # f32[]
    peak: jax.Array  # f32[], the usual largest gradient, or 0 before the first
    level: jax.Array  # f32[], what the largest scaled gradient may reach


@dataclasses.dataclass(frozen=True)
class FollowLargest(jaxscale.LossScale):
    """Keeps the usual largest gradient, times the scale, below a level.

    The numbers between the layers may be larger than the largest gradient, and overflow first. How
    much larger they are is learned: an overflow sets the level to half of what the largest scaled
    gradient had reached, and finite steps raise it slowly. The scale falls at once, and at most
    doubles in a step, so that it may start low.

    With `needs_largest = True`, `adjust` gets the largest absolute value among the gradients of a
    step, unscaled and over all devices. It comes from the pass that looks for inf and NaN anyway.
    """

    init_scale: float = 2.0**8
    level: float = 2.0**13
    max_level: float = 2.0**15
    memory: float = 500.0  # after so many steps a peak has lost most of its weight
    period: int = 2000  # in so many finite steps the level doubles
    max_scale: float = 2.0**60

    needs_largest = True

    def init(self) -> Any:
        """Returns the first state, of strongly typed arrays: a step then compiles once."""
        return FollowLargestState(
            loss_scale=jnp.float32(self.init_scale),
            peak=jnp.float32(0),
            level=jnp.float32(self.level),
        )

    def adjust(self, state, grads_finite, largest=None) -> Any:
        """Returns the next state. `largest` is `None` if there are no gradients."""
        if largest is None:
            largest = jnp.float32(0)
        is_seen = jnp.isfinite(largest) & (largest > 0)
        after_finite = jaxscale.tree_where(
            is_seen, self._after_finite(state, largest), state
        )
        return jaxscale.tree_where(
            grads_finite, after_finite, self._after_overflow(state)
        )

    def _after_finite(self, state, largest):
        peak = state.peak + (largest - state.peak) / self.memory
        peak = jnp.maximum(largest, peak)
        level = jnp.minimum(state.level * 2.0 ** (1 / self.period), self.max_level)
        highest = jnp.minimum(2 * state.loss_scale, self.max_scale)
        scale = floor_to_power_of_two(jnp.minimum(level / peak, highest))
        return FollowLargestState(jnp.maximum(scale, 1.0), peak, level)

    def _after_overflow(self, state):
        reached = state.peak * state.loss_scale  # 0 before the first gradients
        lower = jnp.clip(reached / 2, 1.0, state.level)
        return FollowLargestState(
            loss_scale=jnp.maximum(state.loss_scale / 2, 1.0),
            peak=state.peak,
            level=jnp.where(reached > 0, lower, state.level),
        )


def floor_to_power_of_two(x):
    """Returns the largest power of two that is not above a positive number.

    A scale that is a power of two rounds no gradient.
    """
    mantissa, exponent = jnp.frexp(x)
    return jnp.ldexp(jnp.ones_like(mantissa), exponent - 1)


def init_params(key):
    """Returns float32 weights and biases, one pair per layer."""
    init = jax.nn.initializers.he_normal()
    keys = jax.random.split(key, len(LAYER_SIZES) - 1)
    params = []
    for layer_key, (inputs, outputs) in zip(keys, pairwise(LAYER_SIZES), strict=True):
        weight = init(layer_key, (inputs, outputs))
        params.append((weight, jnp.zeros(outputs)))
    return params


@jaxscale.autocast
def loss_fn(params, batch):
    """Returns the summed cross-entropy of a batch."""
    activations, labels = batch
    for weight, bias in params[:-1]:
        activations = jax.nn.relu(activations @ weight + bias)
    weight, bias = params[-1]
    logits = activations @ weight + bias
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).sum()


def train(loss_scale, retries, batches):
    """Returns the metrics of a run, and the loss of its last step."""
    tx = jaxscale.loss_scaled(optax.adamw(1e-3), loss_scale)
    train_step = jax.jit(jaxscale.train_step(loss_fn, tx, retries=retries))
    params = init_params(jax.random.key(0))
    opt_state = tx.init(params)
    loss = jnp.inf
    for batch in batches:
        params, opt_state, loss = train_step(params, opt_state, batch)
    jaxscale.check(opt_state, tx=tx)
    return jaxscale.metrics(opt_state), float(loss)


def make_batches(num_steps):
    """Returns a batch of images and labels for each step."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    rng = np.random.default_rng(0)
    batches = []
    for _ in range(num_steps):
        chosen = rng.choice(len(images), BATCH_SIZE, replace=False)
        batches.append((images[chosen], labels[chosen]))
    return batches


def power_of_two(scale):
    """Writes a loss scale as a power."""
    return f"2**{np.log2(scale):.0f}"


def main(num_steps: int = 300) -> float:
    """Trains with each rule and each start, prints a table, and returns the last loss."""
    batches = make_batches(num_steps)
    high = 2.0**24
    runs = {  # the rule, and the retries
        "dynamic": (jaxscale.DynamicLossScale(), 0),
        "dynamic, too high": (jaxscale.DynamicLossScale(init_scale=high), 0),
        "follow": (FollowLargest(), 0),
        "follow, too high": (FollowLargest(init_scale=high), 0),
        "follow, too high, with retries": (FollowLargest(init_scale=high), 30),
    }
    table = Table("rule", "from", "skipped", "retries", "to", "last loss")
    loss = float("nan")
    for name, (policy, retries) in runs.items():
        metrics, loss = train(policy, retries, batches)
        table.add_row(
            name,
            power_of_two(policy.init_scale),
            str(metrics["total_notfinite"]),
            str(metrics["total_retries"]),
            power_of_two(metrics["loss_scale"]),
            f"{loss:.3f}",
        )
    Console(width=100).print(table)
    return loss


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--steps", type=int, default=300, help="training steps of each run"
    )
    main(parser.parse_args().steps)
