"""Faults in losses: logarithms, exponentials and constants that float16 cannot hold."""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from jax.scipy.special import gammaln
from trial_entry import cast, faulty, filled, mean_square, normal, split


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


@faulty(source="https://github.com/radixark/miles/pull/1363", kind="overflow")
def policy_ratio(half=jnp.float16):
    """PPO: the ratio of an unlikely action is inf, and its advantage is 0."""
    params = {"w": jnp.array([[1.0, 6.0], [0.5, -2.0]])}
    batch = {
        "x": jnp.array([[0.2, 1.0], [1.0, 0.1], [2.0, 0.0]]),
        "old": jnp.array([-0.5, -0.7, -13.0]),
        "advantage": jnp.array([0.5, -0.3, 0.0]),
    }

    def loss_fn(params, batch):
        logits = batch["x"].astype(half) @ params["w"].astype(half)
        new = jax.nn.log_softmax(logits)[:, 1]
        advantage = batch["advantage"].astype(half)
        ratio = jnp.exp(new - batch["old"].astype(half))  # fault
        clipped = jnp.clip(ratio, 0.8, 1.2) * advantage
        return -jnp.mean(jnp.minimum(ratio * advantage, clipped).astype(jnp.float32))

    return loss_fn, params, batch


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


@faulty(source="https://github.com/chainer/chainer/issues/6702", kind="overflow")
def mean_absolute_error(half=jnp.float16):
    """The absolute errors of a batch of images, added up before they are divided."""

    class Decoder(nn.Module):
        @nn.compact
        def __call__(self, z):
            return nn.Dense(1024, dtype=half)(z)

    model, batch = Decoder(), {"z": normal(6, 8, 2), "y": normal(7, 8, 1024, scale=20.0)}
    params = filled(lambda: model.init(jax.random.key(0), batch["z"]))

    def loss_fn(params, batch):
        error = jnp.abs(model.apply(params, batch["z"]) - batch["y"].astype(half))
        return (jnp.sum(error) / 8192).astype(jnp.float32)  # fault

    return loss_fn, params, batch


@faulty(source="https://github.com/Lightning-Universe/lightning-bolts/issues/811", kind="overflow")
def nt_xent(half=jnp.float16):
    """SimCLR subtracts the similarity of each vector with itself: exp(1 / 0.07)."""
    params = {"w": normal(8, 3, 4)}

    def loss_fn(params, x):
        z = x.astype(half) @ params["w"].astype(half)
        z = z / jnp.linalg.norm(z.astype(jnp.float32), axis=1, keepdims=True).astype(half)
        similar = jnp.exp(z @ z.T / 0.07)  # fault
        negative = jnp.sum(similar, axis=1) - jnp.diagonal(similar)
        positive = jnp.roll(jnp.diagonal(z @ z.T, 1), 1)[:1] / 0.07
        return jnp.mean((jnp.log(negative) - positive).astype(jnp.float32))

    return loss_fn, params, 1 + normal(9, 4, 3, scale=0.2)


@faulty(source="https://github.com/cfoster0/CLAP/issues/28", kind="overflow")
def learned_temperature(half=jnp.float16):
    """The scale of the logits is learned as its logarithm, and not clipped at 100."""

    class Clip(eqx.Module):
        image: eqx.nn.Linear
        text: eqx.nn.Linear
        log_scale: jax.Array

        def __call__(self, image, text):
            a, b = jax.vmap(self.image)(image), jax.vmap(self.text)(text)
            a, b = (jnp.tanh(z) / 2 for z in (a, b))
            return a @ b.T * jnp.exp(self.log_scale)  # fault

    keys = jax.random.split(jax.random.key(1))
    model = Clip(*(eqx.nn.Linear(3, 4, key=key) for key in keys), jnp.array(11.3))

    def loss_fn(model, batch):
        logits = cast(model, half)(*cast(batch, half))
        return -jnp.mean(jnp.diagonal(jax.nn.log_softmax(logits)).astype(jnp.float32))

    return loss_fn, model, (normal(10, 3, 3), normal(11, 3, 3))


@faulty(source="https://github.com/clab/dynet/pull/561", kind="epsilon")
def gumbel_noise(half=jnp.float16):
    """-log(-log(u + 1e-20) + 1e-20), with a u that rounds to 1."""
    params = {"logits": normal(12, 3, 4)}

    def loss_fn(params, uniform):
        u = uniform.astype(half)
        noise = -jnp.log(-jnp.log(u + 1e-20) + 1e-20)  # fault
        sample = jax.nn.softmax((params["logits"].astype(half) + noise) / 0.5)
        return mean_square(sample * jnp.arange(4))

    uniform = jnp.array([[0.3, 0.8, 0.1, 0.5], [0.9, 0.4, 0.99985, 0.2], [0.6, 0.7, 0.2, 0.3]])
    return loss_fn, params, uniform


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


@faulty(source="https://github.com/ultralytics/yolov5/issues/2376", kind="epsilon")
def intersection_over_union(half=jnp.float16):
    """A predicted box of no area on a target of no area: 1e-9 does not protect the division."""
    params = {"w": jnp.eye(2), "b": jnp.zeros(2)}

    def loss_fn(params, batch):
        p = cast(params, half)
        size = jax.nn.relu(batch["x"].astype(half) @ p["w"] + p["b"])
        target = batch["size"].astype(half)
        both = jnp.prod(jnp.minimum(size, target), axis=-1)
        union = jnp.prod(size, axis=-1) + jnp.prod(target, axis=-1) - both + 1e-9  # fault
        return 1 - jnp.mean((both / union).astype(jnp.float32))  # fault

    x = jnp.array([[0.3, 0.4], [1e-4, 2e-4], [0.5, 0.2]])
    return loss_fn, params, {"x": x, "size": jnp.array([[0.2, 0.4], [2e-4, 1e-4], [0.4, 0.3]])}


@faulty(source="https://github.com/lightonai/pylate/issues/239", kind="epsilon")
def scores_to_the_unit_interval(half=jnp.float16):
    """The scores of a teacher, minus the smallest, divided by their range of 0 plus 1e-8."""

    class Student(eqx.Module):
        layer: eqx.nn.Linear

        def __call__(self, x):
            return jax.vmap(jax.vmap(self.layer))(x)[..., 0]

    model = Student(eqx.nn.Linear(3, 1, key=jax.random.key(4)))
    teacher = jnp.array([[0.1, 0.5, 0.9], [0.7, 0.7, 0.7]])

    def loss_fn(model, x):
        student = jax.nn.log_softmax(cast(model, half)(x.astype(half)))
        low, high = (f(teacher, axis=-1, keepdims=True).astype(half) for f in (jnp.min, jnp.max))
        target = (teacher.astype(half) - low) / (high - low + 1e-8)  # fault
        return -jnp.mean((jax.nn.softmax(target) * student).astype(jnp.float32))

    return loss_fn, model, normal(13, 2, 3, 3)


@faulty(source="https://github.com/tracel-ai/burn/issues/5373", kind="overflow")
def softplus_by_hand(half=jnp.float16):
    params = {"w": jnp.array([4.0, 2.0]), "b": jnp.array(1.0)}

    def loss_fn(params, x):
        p = cast(params, half)
        density = jnp.log(1 + jnp.exp(x.astype(half) @ p["w"] + p["b"]))  # fault
        return jnp.mean((1 - jnp.exp(-density)).astype(jnp.float32))

    return loss_fn, params, jnp.array([[0.1, -0.4], [2.5, 1.0], [-1.0, 0.3]])


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


@faulty(source="https://github.com/fastino-ai/GLiNER2/pull/155", kind="backward")
def survival(half=jnp.float16):
    """log1p(-p) with p clipped at 1 - 1e-6, which is 1: -inf, of which exp makes a good 0."""
    params = {"w": jnp.array([1.0, -0.5, 0.5]), "b": jnp.array(1.0)}

    def loss_fn(params, x):
        p = cast(params, half)
        probability = jax.nn.sigmoid(x.astype(half) @ p["w"] + p["b"])
        probability = jnp.minimum(probability, 1 - 1e-6)  # fault
        none = jnp.exp(jnp.sum(jnp.log1p(-probability), axis=-1))  # fault
        return jnp.mean((1 - none).astype(jnp.float32))

    return loss_fn, params, normal(17, 3, 2, 3, scale=0.5).at[1, 0].set(jnp.array([4.0, -6.0, 8.0]))


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


@faulty(source="https://github.com/google-deepmind/optax/issues/1185", kind="input")
def label_out_of_range(half=jnp.float16):
    """A label of 4 among 4 classes: the loss of that row is NaN in every format."""
    params = {"w": normal(18, 3, 4)}

    def loss_fn(params, batch):
        log_p = jax.nn.log_softmax(batch["x"].astype(half) @ params["w"].astype(half))
        chosen = jnp.take_along_axis(log_p, batch["y"][:, None], axis=-1)  # fault
        return -jnp.mean(chosen.astype(jnp.float32))

    return loss_fn, params, {"x": normal(19, 3, 3), "y": jnp.array([0, 4, 2])}


@faulty(source="https://github.com/vanderschaarlab/synthcity/issues/331", kind="overflow")
def unbounded_log_variance(half=jnp.float16):
    """A VAE's encoder says a log variance of 12."""

    class VAE(nn.Module):
        @nn.compact
        def __call__(self, x):
            mean = nn.Dense(2, dtype=half)(x)
            log_variance = nn.Dense(2, dtype=half)(x)
            kl = jnp.exp(log_variance) + mean * mean - 1 - log_variance  # fault
            return nn.Dense(3, dtype=half)(mean), 0.5 * jnp.sum(kl, axis=-1)

    model, x = VAE(), jnp.array([[0.1, 0.2, -0.3], [6.0, -3.0, 4.0]])
    params = filled(lambda: model.init(jax.random.key(5), x))
    params["params"]["Dense_1"]["kernel"] = jnp.array([[1.0, 0.1], [-0.5, 0.2], [1.0, -0.3]])

    def loss_fn(params, x):
        decoded, kl = model.apply(params, x)
        return mean_square(decoded - 1) + 1e-4 * jnp.mean(kl.astype(jnp.float32))

    return loss_fn, params, x


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
