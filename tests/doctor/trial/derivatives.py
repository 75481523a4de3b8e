"""Faults of the backward pass: infinite derivatives, and rules that were written by hand."""

import jax
import jax.numpy as jnp
from flax import nnx
from trial_entry import cast, faulty, mean_square, normal


@faulty(source="https://github.com/pytorch/pytorch/issues/8069", kind="backward", tuned=True)
def angle_between_rotations(half=jnp.float16):
    """The arccos of a cosine clipped at 1 - 1e-7, which is 1."""
    params = {"r": normal(0, 3)}

    def loss_fn(params, target):
        r = params["r"].astype(half)
        r = r / jnp.linalg.norm(r.astype(jnp.float32)).astype(half)
        cosine = jnp.clip(target.astype(half) @ r, -1 + 1e-7, 1 - 1e-7)  # fault
        return jnp.mean(jnp.arccos(cosine).astype(jnp.float32))  # fault

    r = params["r"] / jnp.linalg.norm(params["r"])
    return loss_fn, params, jnp.stack([r * 1.001, jnp.roll(r, 1), -r[::-1]])


@faulty(source="https://github.com/kornia/kornia/pull/4613", kind="backward")
def branch_not_taken(half=jnp.float16):
    """A small rotation takes the other branch of a `where`, but the derivative takes both."""
    params = {"axis": jnp.array([[1e-4, 2e-4, 0.0], [0.3, -0.2, 0.5]])}

    def loss_fn(params, x):
        axis = params["axis"].astype(half)
        square = jnp.sum(axis * axis, axis=-1, keepdims=True)
        angle = jnp.sqrt(jnp.maximum(square, 1e-12))  # fault
        turned = jnp.where(square > 1e-6, jnp.sin(angle) / angle, 1 - square / 6) * axis  # fault
        return mean_square(jnp.cross(turned, x.astype(half)) + x.astype(half) - 1)

    return loss_fn, params, normal(1, 2, 3)


@faulty(source="https://github.com/pytorch/pytorch/issues/37154", kind="underflow")
def distances(half=jnp.float16):
    """Two atoms so close that the square of their distance is 0."""
    params = {"w": jnp.eye(3) * 1.0, "v": jnp.array([0.5, -0.2])}

    def loss_fn(params, position):
        p = cast(params, half)
        x = position.astype(half) @ p["w"]

        def distance(a, b):
            return jnp.sqrt(jnp.sum(jnp.square(a - b)))  # fault

        pairs = jnp.array([[0, 1], [1, 2], [2, 3]])
        d = jax.vmap(distance)(x[pairs[:, 0]], x[pairs[:, 1]])
        return mean_square(jnp.stack([d, d * d], axis=-1) @ p["v"] - 1)

    position = jnp.array([[0, 0, 0], [1e-4, 0, -1e-4], [0.5, 0.4, 0.1], [1, -0.5, 0.3]])
    return loss_fn, params, position


@faulty(
    source="https://github.com/lucidrains/vector-quantize-pytorch/issues/106", kind="cancellation"
)
def codebook_distances(half=jnp.float16):
    """x**2 - 2 x y + y**2 of vectors close together is less than 0."""

    class Quantizer(nnx.Module):
        def __init__(self):
            self.codes = nnx.Param(12 + normal(2, 6, 4, scale=0.05))

        def __call__(self, x):
            codes = self.codes[...].astype(half)
            square = jnp.sum(x * x, axis=1)[:, None] - 2 * x @ codes.T  # fault
            square = square + jnp.sum(codes * codes, axis=1)  # fault
            return jnp.sqrt(square)  # fault

    definition, params = nnx.split(Quantizer())

    def loss_fn(params, x):
        d = nnx.merge(definition, params)(x.astype(half))
        return jnp.mean((jax.nn.softmax(-d) * d).astype(jnp.float32))

    return loss_fn, params, 12 + normal(3, 5, 4, scale=0.05)


@faulty(source="https://github.com/pytorch/pytorch/issues/193040", kind="backward", tuned=True)
def reciprocal_in_a_rule(half=jnp.float16):
    """A rule for atan2 that forms 1 / (a**2 + b**2) before it multiplies by a or b."""

    @jax.custom_vjp
    def angle(a, b):
        return jnp.arctan2(a, b)

    def backward(saved, g):
        a, b = saved
        r = 1 / (a * a + b * b)  # fault
        return g * b * r, -g * a * r

    angle.defvjp(lambda a, b: (angle(a, b), (a, b)), backward)
    params = {"w": jnp.array([[1.0, 0.3], [-0.2, 1.0]])}

    def loss_fn(params, x):
        y = x.astype(half) @ params["w"].astype(half)
        return mean_square(angle(y[:, 0], y[:, 1]))

    return loss_fn, params, jnp.array([[0.5, 1.0], [2e-3, 2e-3], [-1.0, 0.4]])


@faulty(source="https://github.com/tinygrad/tinygrad/pull/15363", kind="backward")
def count_in_a_rule(half=jnp.float16):
    """A rule for the maximum that shares the gradient among 70000 equal elements."""

    @jax.custom_vjp
    def largest(x):
        return jnp.max(x)

    def backward(saved, g):
        x, y = saved
        mask = (x == y).astype(half)
        return (g * mask / jnp.sum(mask),)  # fault

    largest.defvjp(lambda x: (jnp.max(x), (x, jnp.max(x))), backward)

    def loss_fn(params, x):
        y = largest(x.astype(half) * params["w"].astype(half) + params["b"].astype(half))
        return jnp.square(y.astype(jnp.float32) - 3)

    return loss_fn, {"w": jnp.array(1.5), "b": jnp.zeros(70000)}, jnp.ones(70000)


@faulty(source="https://github.com/google-deepmind/optax/issues/1754", kind="epsilon")
def adam_inside_of_a_loss(half=jnp.float16):
    """Meta-learning: a step of Adam in half precision, for a weight without a gradient."""
    params = {"w": jnp.array([0.5, -1.0, 0.3]), "rate": jnp.array(0.1)}

    def loss_fn(params, batch):
        p, batch = cast(params, half), cast(batch, half)

        def inner(w):
            return jnp.mean(jnp.square(batch["x"] @ w - batch["y"]))

        g = jax.lax.stop_gradient(jax.grad(inner)(p["w"]))
        moment, square = 0.1 * g, 0.001 * g * g
        update = (moment / 0.1) / (jnp.sqrt(square / 0.001) + 1e-8)  # fault
        return inner(p["w"] - p["rate"] * update).astype(jnp.float32)

    x = normal(6, 4, 3).at[:, 2].set(0.0)  # a feature that is always 0
    return loss_fn, params, {"x": x, "y": normal(7, 4)}


@faulty(source="https://github.com/pytorch/pytorch/pull/33596", kind="backward")
def epsilon_squared(half=jnp.float16):
    """1e-3 protects a division, but not its derivative, which divides by the square of 1e-3."""
    params = {"w": normal(8, 3, 4), "v": normal(9, 4)}

    def loss_fn(params, x):
        p = cast(params, half)
        z = x.astype(half) @ p["w"]
        z = z / (jnp.max(jnp.abs(z), axis=-1, keepdims=True) + 1e-3)  # fault
        return mean_square(z @ p["v"] - 1)

    return loss_fn, params, normal(10, 4, 3).at[2].set(0.0)
