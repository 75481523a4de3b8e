"""Whether a method's step is right: beside plain optax, and on gradients that overflow."""

import functools

import jax
import jax.numpy as jnp
import methods
import numpy as np
import optax
import trees

# Few leaves, but a scalar, an odd size, and several of one shape, as groups may be formed of them.
SMALL = {
    "w": (8, 16),
    "scalar": (),
    "odd": (3, 7),
    "a": (40,),
    "b": (40,),
    "c": (40,),
    "one": (1,),
}
BAD = {"inf": np.inf, "-inf": -np.inf, "NaN": np.nan}


def run(method, step, shapes, dtype, clip, leaves, rtol, steps):
    """Returns what is wrong with a step, a list of texts.

    Args:
      method: a :class:`methods.Method`.
      step: its step, as it will be timed. It may consume its carry.
      shapes: the tree.
      dtype: of the gradients.
      clip: whether the global norm is clipped.
      leaves: the names of the leaves to spoil, one after the other.
      rtol: of moments, beside those of plain optax on the unscaled gradients.
      steps: how many steps to compare.
    """
    faults = []
    scaled = functools.cache(functools.partial(trees.gradients, shapes, dtype))
    bare = methods.make(methods.BARE, clip)
    bare_step = jax.jit(bare.step)
    carry, exact = (each.init(trees.params(shapes)) for each in (method, bare))
    for i in range(steps):
        scale = float(method.scale(carry))
        unscaled = jax.tree.map(
            lambda g, by=scale: g.astype(jnp.float32) / by, scaled(scale)
        )
        carry, exact = step(carry, scaled(scale)), bare_step(exact, unscaled)
        wrong = _differences((method, carry), (bare, exact), rtol)
        faults += [f"step {i + 1}: {what} are wrong" for what in wrong]

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
            if not _same_bits(
                *((method.params(c), method.inner(c)) for c in (after, carry))
            ):
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


def _differences(ours, theirs, rtol):
    """The names of what differs by more than rounding; parameters are of order one."""

    def trees_of(method, carry):
        state = method.inner(carry)
        mu, nu = (optax.tree_utils.tree_get(state, name) for name in ("mu", "nu"))
        return {
            "parameters": method.params(carry),
            "first moments": mu,
            "second moments": nu,
        }

    tolerances = [(1e-6, 1e-6), (rtol, rtol * 0.1 * trees.GRADIENT), (2 * rtol, 0.0)]
    pairs = zip(
        trees_of(*ours).items(), trees_of(*theirs).values(), tolerances, strict=True
    )
    return [
        what
        for (what, tree), expected, (relative, absolute) in pairs
        if not all(
            jnp.allclose(tree[k], expected[k], relative, absolute) for k in expected
        )
    ]


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
