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
    draw = functools.cache(functools.partial(trees.gradients, shapes, dtype))
    bare = methods.make(methods.BARE, clip)
    bare_step = jax.jit(bare.step)
    carry = method.init(trees.params(shapes))
    bare_carry = bare.init(trees.params(shapes))
    for i in range(steps):
        scale = float(method.scale(carry))
        grads = draw(scale)
        bare_carry = bare_step(bare_carry, _unscale(grads, scale))
        carry = step(carry, grads)
        wrong = _differences(_parts(method, carry), _parts(bare, bare_carry), rtol)
        faults += [f"step {i + 1}: {what} are wrong" for what in wrong]

    grads = draw(float(method.scale(carry)))
    largest = float(jnp.finfo(dtype).max)
    for name in leaves:
        changed = grads | {name: jnp.full_like(grads[name], largest)}
        after = step(_copy(carry), changed)
        if _count(method, after) != _count(method, carry) + 1:
            faults.append(f"skipped finite gradients of {largest:.3g} in {name}")
    if method.skips:
        for i, name in enumerate(leaves):
            for label, bad in BAD.items():
                # In turns, the first number of a leaf and its last one.
                changed = grads | {name: _spoil(grads[name], bad, -(i % 2))}
                after = step(_copy(carry), changed)
                for trace in _traces_of_skip(method, carry, after):
                    faults.append(f"{label} in {name} {trace}")
    return faults


def _unscale(grads, scale):
    return jax.tree.map(lambda grad: grad.astype(jnp.float32) / scale, grads)


def _traces_of_skip(method, before, after):
    """Lists what is wrong with a step that should have been skipped."""
    traces = []
    if not _same_bits(
        (method.params(after), method.inner(after)),
        (method.params(before), method.inner(before)),
    ):
        traces.append("was not skipped, or left a trace")
    scale = float(method.scale(before))
    if scale > 1 and float(method.scale(after)) != scale / 2:
        traces.append("did not halve the scale")
    return traces


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


def _parts(method, carry):
    """Returns parameters and moments, under the names that a fault is reported by."""
    state = method.inner(carry)
    return {
        "parameters": method.params(carry),
        "first moments": optax.tree_utils.tree_get(state, "mu"),
        "second moments": optax.tree_utils.tree_get(state, "nu"),
    }


def _differences(parts, expected, rtol):
    """Lists the parts that differ by more than rounding; parameters are of order one."""
    tolerances = {
        "parameters": (1e-6, 1e-6),
        "first moments": (rtol, rtol * 0.1 * trees.GRADIENT),
        "second moments": (2 * rtol, 0.0),
    }
    different = []
    for part, tree in parts.items():
        relative, absolute = tolerances[part]
        for name, leaf in expected[part].items():
            if not jnp.allclose(tree[name], leaf, relative, absolute):
                different.append(part)
                break
    return different


def _spoil(leaf, bad, index):
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
