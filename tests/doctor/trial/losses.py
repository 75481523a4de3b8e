"""Faults in losses: logarithms, exponentials and constants that float16 cannot hold."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from jax.scipy.special import gammaln
from trial_entry import cast, faulty, mean_square, normal, split


@faulty(
    source="https://github.com/rwightman/efficientdet-pytorch/issues/291",
    kind="epsilon",
    tuned=True,
)
def log_of_epsilon(half=jnp.float16):
    """The logarithm of a width of 0 plus 1e-8, which is 0."""
    params = {"w": normal(0, 3, 2), "b": jnp.zeros(2)}

    def loss_fn(params, x):
        p = cast(params, half)
        width = jax.nn.relu(x.astype(half) @ p["w"] + p["b"])
        return mean_square(jnp.log(width + 1e-8) * 0.01)  # fault

    return loss_fn, params, normal(1, 6, 3)


@faulty(source="https://github.com/keras-team/keras-core/issues/196", kind="epsilon")
def clipped_probability(half=jnp.float16):
    """Clipping at 1 - 1e-7 does nothing: that is 1, and log(1 - 1) is -inf."""

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(1, dtype=half, use_bias=False)(x)[:, 0]

    model = Net()
    batch = {"x": jnp.array([[2.0, 1.0], [-6.0, 12.0]]), "y": jnp.array([1.0, 0.0])}
    params = {"params": {"Dense_0": {"kernel": jnp.array([[0.5], [1.0]])}}}

    def loss_fn(params, batch):
        p = jax.nn.sigmoid(model.apply(params, batch["x"]))
        p, y = jnp.clip(p, 1e-7, 1 - 1e-7), batch["y"].astype(half)  # fault
        losses = y * jnp.log(p) + (1 - y) * jnp.log(1 - p)  # fault
        return -jnp.mean(losses.astype(jnp.float32))

    return loss_fn, params, batch


@faulty(source="https://github.com/kornia/kornia/issues/918", kind="backward")
def focal_loss(half=jnp.float16):
    """The derivative of a root of 1 - p, where p is 1."""
    params = {"w": jnp.array([1.0, 2.0]), "b": jnp.zeros(())}

    def loss_fn(params, x):
        p = cast(params, half)
        probability = jax.nn.sigmoid(x.astype(half) @ p["w"] + p["b"])
        weight = jnp.power(1 - probability, 0.5)  # fault
        return -jnp.mean((weight * jnp.log(probability)).astype(jnp.float32))

    return loss_fn, params, jnp.array([[1.0, 0.5], [-1.0, 0.2], [3.0, 3.5]])


@faulty(source="https://github.com/OpenRLHF/OpenRLHF/pull/1335", kind="backward")
def clipped_divergence(half=jnp.float16):
    """The k3 estimate of the KL divergence is clipped after the exponential: inf in the forward
    pass becomes 10, and in the backward pass 0 times inf."""
    params = {"w": normal(2, 3)}

    def loss_fn(params, batch):
        new = jax.nn.log_sigmoid(batch["x"].astype(half) @ params["w"].astype(half))
        log_ratio = batch["reference"].astype(half) - new
        kl = jnp.exp(log_ratio) - 1 - log_ratio  # fault
        return jnp.mean(jnp.clip(kl, -10, 10).astype(jnp.float32))

    batch = {"x": normal(3, 4, 3), "reference": jnp.array([-0.5, -0.3, -1.0, 12.0])}
    return loss_fn, params, batch


@faulty(
    source="https://github.com/qubvel-org/segmentation_models.pytorch/issues/463", kind="overflow"
)
def dice(half=jnp.float16):
    """The sum over a mask of 512 by 512 pixels."""
    params = {"w": jnp.array(3.0), "b": jnp.array(0.5)}

    def loss_fn(params, batch):
        p = cast(params, half)
        output = jax.nn.sigmoid(p["w"] * batch["image"].astype(half) + p["b"])
        target = batch["mask"].astype(half)
        intersection = jnp.sum(output * target)  # fault
        return 1.0 - (2 * intersection / jnp.sum(output + target)).astype(jnp.float32)  # fault

    image = 1 + normal(4, 512, 512, scale=0.1)
    return loss_fn, params, {"image": image, "mask": jnp.ones((512, 512))}


@faulty(source="https://github.com/pytorch/pytorch/issues/91597", kind="overflow", tuned=True)
def number_of_elements(half=jnp.float16):
    """A sum divided by 70000, which is inf in float16: the loss is 0, and so are its gradients."""
    params = {"w": jnp.array(0.01)}

    def loss_fn(params, x):
        total = jnp.sum(jnp.abs(params["w"].astype(half) * x.astype(half)))
        return (total / x.size).astype(jnp.float32)  # fault

    return loss_fn, params, normal(5, 70000)


@faulty(source="https://github.com/huggingface/trl/issues/7221", kind="overflow")
def entropy_bonus(half=jnp.float16):
    """The logarithm of a probability is -inf, and the probability 0."""

    class Policy(nnx.Module):
        def __init__(self, rngs):
            self.head = nnx.Linear(2, 3, dtype=half, rngs=rngs)

        def __call__(self, x):
            return self.head(x) * 40

    definition, params = split(lambda: Policy(nnx.Rngs(0)))

    def loss_fn(params, x):
        log_p = jax.nn.log_softmax(nnx.merge(definition, params)(x))  # fault
        entropy = -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)  # fault
        return -jnp.mean(entropy.astype(jnp.float32))

    return loss_fn, params, jnp.array([[0.1, 0.2], [1500.0, -1000.0]])


@faulty(source="https://github.com/kscalelabs/minppo/pull/19", kind="underflow")
def gaussian_entropy(half=jnp.float16):
    """The entropy of a Gaussian policy whose deviation is 1e-4: its square is 0."""
    params = {"log_std": jnp.array([-9.2, -1.0]), "w": normal(14, 3, 2)}

    def loss_fn(params, x):
        p = cast(params, half)
        deviation = jnp.exp(p["log_std"])
        entropy = 0.5 * jnp.log(2 * jnp.pi * jnp.square(deviation + 1e-8))  # fault
        return mean_square(x.astype(half) @ p["w"]) - jnp.mean(entropy.astype(jnp.float32))

    return loss_fn, params, normal(15, 4, 3)


@faulty(source="https://github.com/scverse/scvi-tools/issues/2965", kind="overflow")
def negative_binomial(half=jnp.float16):
    """The logarithm of the gamma function of a large inverse dispersion."""
    params = {"mu": jnp.array([1.0, 0.5]), "log_theta": jnp.array([9.4, 2.0])}

    def loss_fn(params, counts):
        p, y = cast(params, half), counts.astype(half)
        mu, theta = jnp.exp(p["mu"]), jnp.exp(p["log_theta"])
        choose = gammaln(y + theta) - gammaln(theta)  # fault
        return jnp.mean((y * jnp.log(mu + theta) - y * p["mu"] - choose).astype(jnp.float32)) * 1e-2

    return loss_fn, params, jnp.array([[1.0, 0.0], [3.0, 1.0]])


@faulty(source="https://github.com/NVIDIA/physicsnemo-sym/pull/160", kind="overflow")
def second_derivative(half=jnp.float16):
    """The residual of a differential equation: the second derivative is beyond 65504."""
    params = {"w": jnp.array([330.0, 40.0]), "a": jnp.array([1.0, 0.5])}

    def loss_fn(params, points):
        p = cast(params, half)

        def u(x):
            return jnp.sum(p["a"] * jnp.sin(p["w"] * x))  # fault

        u_xx = jax.vmap(jax.grad(jax.grad(u)))(points.astype(half))  # fault
        return mean_square(u_xx.astype(jnp.float32) * 1e-5 + 1)

    return loss_fn, params, jnp.array([0.005, 0.0052, 0.0044])
