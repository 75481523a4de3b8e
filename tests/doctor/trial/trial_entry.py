"""How a model enters the doctor's trial: `@faulty(...)` or `@healthy(...)` above its factory.

The factory takes the half-precision dtype and returns `(loss_fn, params, batch)`. Called with
`jnp.float32` it returns the twin that says what the gradients should be. Each line that ends in
`# fault` is a line that the doctor should point to.
"""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

KINDS = {
    "overflow": "a number beyond 65504",
    "epsilon": "a small constant that rounds to 0, or that vanishes beside 1",
    "underflow": "squares, products or exponentials that all become 0",
    "cancellation": "a difference of large numbers whose digits are gone",
    "rounding": "whole numbers, angles or weights that float16 cannot tell apart",
    "accumulation": "a sum that stops growing",
    "backward": "a backward pass that overflows or divides by 0 after a good forward pass",
    "flushed": "a gradient that becomes 0 at every loss scale that fits",
    "input": "masks, labels or indices that fail in float32, too",
}


class Entry(NamedTuple):
    """What is known of a model of the trial.

    Attributes:
      kind: one of `KINDS`, or `""` if the model is healthy.
      source: the public report whose fault this is, or for a healthy model what looks suspicious.
      tuned: whether the doctor may be tuned on it. The others only count.
      noise: part of the path of leaves whose gradients are 0 but for rounding, in float32, too.
    """

    kind: str
    source: str
    tuned: bool = False
    noise: str = ""

    @property
    def is_faulty(self) -> bool:
        return bool(self.kind)


def faulty(*, source: str, kind: str, tuned: bool = False) -> Callable[..., Any]:
    return lambda factory: _marked(factory, Entry(kind, source, tuned))


def healthy(*, looks: str, tuned: bool = False, noise: str = "") -> Callable[..., Any]:
    return lambda factory: _marked(factory, Entry("", looks, tuned, noise=noise))


def _marked(factory, entry):
    factory.entry = entry
    return factory


def fault_lines(factory) -> list[int]:
    """The numbers of the lines that end in `# fault`."""
    lines, first = inspect.getsourcelines(factory)
    return [first + i for i, line in enumerate(lines) if line.rstrip().endswith("# fault")]


def normal(seed: int, *shape: int, scale: float = 1.0) -> jax.Array:
    """Normally distributed float32 numbers, always the same."""
    numbers = np.random.default_rng(seed).standard_normal(shape) * scale
    return jnp.asarray(numbers, jnp.float32)


def filled(make: Callable[[], Any]) -> Any:
    """What a function would return, with numbers of its own: compiling initializers takes time.

    Matrices are random, biases 0 and other vectors 1.
    """
    return _filled(jax.eval_shape(make))


def split(make: Callable[[], Any]) -> Any:
    """An NNX module as its definition and its parameters, `filled`."""
    definition, shapes = nnx.split(nnx.eval_shape(make))
    return definition, _filled(shapes)


def _filled(shapes):
    seeds = iter(range(100, 200))

    def fill(path, leaf):
        if len(leaf.shape) > 1:
            return normal(next(seeds), *leaf.shape, scale=leaf.shape[0] ** -0.5)
        constant = jnp.zeros if "bias" in jax.tree_util.keystr(path) else jnp.ones
        return constant(leaf.shape, leaf.dtype)

    return jax.tree_util.tree_map_with_path(fill, shapes)


def cast(tree: Any, dtype: Any) -> Any:
    """The same tree with its floating-point leaves in one dtype."""
    return jax.tree.map(
        lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree
    )


def mean_square(x: jax.Array) -> jax.Array:
    """A harmless loss, in float32."""
    return jnp.mean(jnp.square(x.astype(jnp.float32)))
