"""Whether a method's step is right: against NumPy in float64, and on gradients that overflow."""

import functools

import jax
import jax.numpy as jnp
import methods
import numpy as np
import optax
import trees

# Few leaves, but a scalar, an odd size, and several of one shape, as groups may be formed of them.
SMALL = {"w": (8, 16), "scalar": (), "odd": (3, 7), "a": (40,), "b": (40,), "c": (40,), "one": (1,)}
BAD = {"inf": np.inf, "-inf": -np.inf, "NaN": np.nan}
SAMPLE = 1024  # elements of a leaf that are compared with the reference


def run(method, step, shapes, dtype, clip, leaves, rtol, steps):
    """Returns what is wrong with a step, a list of texts.

    Args:
      method: a :class:`methods.Method`.
      step: its step, as it will be timed. It may consume its carry.
      shapes: the tree.
      dtype: of the gradients.
      clip: whether the global norm is clipped.
      leaves: the names of the leaves to spoil, one after the other.
      rtol: of moments against the reference, whose norm is exact.
      steps: how many steps to compare.
    """
    faults = []
    scaled = functools.cache(functools.partial(trees.gradients, shapes, dtype))
    carry = method.init(trees.params(shapes))
    reference = Reference(trees.params(shapes), clip)
    for i in range(steps):
        scale = float(method.scale(carry))
        reference.step(scaled(scale), scale)
        carry = step(carry, scaled(scale))
        faults += [f"step {i + 1}: {fault}" for fault in reference.differences(method, carry, rtol)]

    scale = float(method.scale(carry))
    finite = scaled(scale)
    largest = jnp.finfo(dtype).max
    for name in leaves:
        grads = finite | {name: jnp.array(np.full_like(finite[name], largest))}
        if _count(method, step(_copy(carry), grads)) != _count(method, carry) + 1:
            faults.append(f"skipped finite gradients of {float(largest):.3g} in {name}")
    for i, name in enumerate(leaves if method.skips else ()):
        for label, bad in BAD.items():
            grads = finite | {name: _spoiled(finite[name], bad, -(i % 2))}
            after = step(_copy(carry), grads)
            if not _same_bits(*((method.params(c), method.inner(c)) for c in (after, carry))):
                faults.append(f"{label} in {name} was not skipped, or left a trace")
            if scale > 1 and float(method.scale(after)) != scale / 2:
                faults.append(f"{label} in {name} did not halve the scale")
    return faults


def small(names, dtype, clip):
    """Returns the faults of each method, on every leaf of a small tree; and nothing to run."""
    reports = {}
    for name in names:
        try:
            method = methods.make(name, clip, growth_interval=2)
        except ImportError as error:
            reports[name] = {"error": f"not installed: {error}"}
            continue
        step = jax.jit(method.step)
        faults = run(method, step, SMALL, dtype, clip, list(SMALL), 1e-5, steps=5)
        reports[name] = {"faults": faults}
    return reports, None


class Reference:
    """AdamW with clipping, in NumPy and float64, on the first elements of each leaf."""

    def __init__(self, params, clip):
        self.params = {name: _sample(leaf) for name, leaf in params.items()}
        self.mu = {name: np.zeros_like(leaf) for name, leaf in self.params.items()}
        self.nu = dict(self.mu)
        self.count, self.clip, self._norms = 0, clip, {}

    def step(self, scaled, scale):
        self.count += 1
        factor = min(1.0, methods.CLIP / self._norm(scaled, scale)) if self.clip else 1.0
        for name in scaled:
            grad = _sample(scaled[name]) / scale * factor
            mu = self.mu[name] = 0.9 * self.mu[name] + 0.1 * grad
            nu = self.nu[name] = 0.999 * self.nu[name] + 0.001 * grad**2
            mu, nu = mu / (1 - 0.9**self.count), nu / (1 - 0.999**self.count)
            update = mu / (np.sqrt(nu) + 1e-8) + 1e-4 * self.params[name]
            self.params[name] = self.params[name] - methods.LEARNING_RATE * update

    def _norm(self, scaled, scale):
        if scale not in self._norms:
            leaves = (np.asarray(leaf, np.float64) / scale for leaf in scaled.values())
            self._norms[scale] = np.sqrt(sum(np.sum(leaf**2) for leaf in leaves))
        return self._norms[scale]

    def differences(self, method, carry, rtol):
        """The names of what differs by more than rounding; parameters are of order one."""
        state = method.inner(carry)
        mu, nu = (optax.tree_utils.tree_get(state, name) for name in ("mu", "nu"))
        compared = {
            "parameters": (method.params(carry), self.params, 1e-6, 1e-6),
            "first moments": (mu, self.mu, rtol, rtol * 0.1 * trees.GRADIENT),
            "second moments": (nu, self.nu, 2 * rtol, 0.0),
        }
        return [
            f"{what} are wrong"
            for what, (tree, expected, *tolerances) in compared.items()
            if not all(np.allclose(_sample(tree[k]), expected[k], *tolerances) for k in expected)
        ]


def _sample(leaf):
    small = leaf if leaf.size < 2**20 else leaf.ravel()[:SAMPLE]
    return np.asarray(small).ravel()[:SAMPLE].astype(np.float64)


def _spoiled(leaf, bad, index):
    spoiled = np.array(leaf)
    spoiled.flat[index] = bad
    return jnp.asarray(spoiled)


def _count(method, carry):
    return int(optax.tree_utils.tree_get(method.inner(carry), "count"))


def _copy(tree):
    return jax.tree.map(jnp.copy, tree)


@jax.jit
def _same_bits(tree, other):
    def same(a, b):
        return jnp.array_equal(*(x.view(f"uint{8 * x.dtype.itemsize}") for x in (a, b)))

    return jnp.all(jnp.array(jax.tree.leaves(jax.tree.map(same, tree, other))))
