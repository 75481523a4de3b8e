"""Entries of the zoo: `@faulty(...)` or `@healthy(...)` above a loss makes a model of it.

The arguments of the loss are the batch, and those by keyword alone the parameters, with their
values as defaults. All come in half precision. A loss that takes `half`, this dtype, gets them in
float32 and casts them by itself, and one that takes nothing else returns `loss_fn, params, batch`.
With `linen=True` a loss is the body of a Flax module, which makes its own parameters.

Each line that ends in `# fault` is a line that the doctor should point to; so is one that ends in
`# line`, in a healthy model. What enters is a function of `half`: with float32 it returns the twin
that says what the gradients should be.
"""

import functools
import importlib
import inspect
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

KINDS = {
    "overflow": "a number beyond 65504",
    "epsilon": "a small constant that rounds to 0, or that vanishes beside 1",
    "underflow": "squares, products or exponentials that all become 0",
    "cancellation": "a difference of large numbers whose digits are gone",
    "rounding": "whole numbers, angles or weights that float16 cannot tell apart",
    "accumulation": "a sum that stops growing",
    "backward": "a backward pass that overflows or divides by 0 after a good forward pass",
    "flushed": "a gradient that becomes 0 at every loss scale that fits",
    "compiled": "what XLA rewrites, so that only the compiled program is wrong",
    "input": "masks, labels, indices or other numbers that fail in float32 as well",
}


class Entry(NamedTuple):
    """A model, the facts about it, and the doctor's words."""

    kind: str  # one of `KINDS`, or `""` if the model is healthy
    # the public report of this fault, or what looks suspicious in a healthy model
    source: str
    # In the paths of leaves whose gradients are 0 but for rounding, in float32 as well.
    noise: str = ""
    linen: bool = False  # whether the loss is the body of a Flax module
    has_line: bool = True  # whether the doctor names the marked line, if there is one
    cure: str = ""  # better than a cast, by its name in the doctor's table of cures
    says: Sequence[str] = ()
    never: Sequence[str] = ()

    @property
    def is_faulty(self):
        return bool(self.kind)


def faulty(kind, report="", **others):
    return enter(Entry(kind, report, **others))


def healthy(looks, **others):
    return enter(Entry("", looks, **others))


def enter(entry):
    """Returns a decorator that makes a model of a loss."""

    def make_model(loss):
        names = inspect.signature(loss).parameters
        params = loss.__kwdefaults__
        batch = loss.__defaults__

        def model(half=jnp.float16):
            if not batch:
                return loss(half)
            if entry.linen:
                return _in_a_module(functools.partial(loss, half), batch)
            if "half" in names:
                return lambda p, batch: loss(half, *batch, **p), params, batch
            return lambda p, b: loss(*cast(b, half), **cast(p, half)), params, batch

        model.entry = entry
        model.loss = loss
        model.lines = find_marked_lines(loss)
        return model

    return make_model


def cure_of(model):
    """Returns what enters a loss as healthy, on the parameters and the batch of a faulty one."""

    def enter_loss(loss):
        loss.__defaults__ = model.loss.__defaults__
        loss.__kwdefaults__ = model.loss.__kwdefaults__
        return healthy("what the doctor advises")(loss)

    return enter_loss


def find_marked_lines(function):
    """Returns the numbers of the lines that the doctor should point to."""
    lines, first = inspect.getsourcelines(function)
    marks = ("# fault\n", "# line\n")
    return [number for number, line in enumerate(lines, first) if line.endswith(marks)]


def load_models(*modules):
    """Returns the models of some files, by the names that the doctor takes."""
    models = {}
    for module in modules:
        for name, value in vars(importlib.import_module(module)).items():
            if hasattr(value, "entry"):
                models[f"{module}:{name}"] = value
    return models


def _in_a_module(body, batch):
    class Net(nn.Module):
        @nn.compact
        def __call__(self, *batch):
            return body(*batch)

    keys = {name: jax.random.key(i) for i, name in enumerate(["params", "dropout"])}
    # With numbers of its own: compiling initializers takes time.
    others = filled(jax.eval_shape(Net().init, keys, *batch))
    params = others.pop("params")

    def loss_fn(params, batch):
        variables = {"params": params} | others
        rngs = {"dropout": jax.random.key(2)}
        loss, _ = Net().apply(variables, *batch, rngs=rngs, mutable=list(others))
        return loss

    return loss_fn, params, batch


# What a model is given is of NumPy, so that nothing is compiled for it.
MAKERS = np.array, np.ones, np.zeros, np.eye
array, ones, zeros, eye = (functools.partial(make, dtype=np.float32) for make in MAKERS)


def normal(seed, *shape, scale=1.0, zero=slice(0)):
    """Normally distributed float32 numbers, always the same, some of them set to 0."""
    numbers = np.random.default_rng(seed).standard_normal(shape) * scale
    numbers[zero] = 0
    return array(numbers)


def projections(seed):
    """The matrices that make queries, keys and values."""
    return [normal(seed + i, 4, 4) for i in range(3)]


def project(x, qkv):
    """Queries, keys and values of some vectors."""
    return [x @ w for w in qkv]


def with_rule(fun, backward):
    """A function with a backward rule of its own, of its arguments and the cotangent."""
    function = jax.custom_vjp(fun)
    function.defvjp(lambda *args: (fun(*args), args), backward)
    return function


def filled(shapes):
    """Arrays of these shapes: matrices are random, biases 0 and other vectors 1."""
    seeds = itertools.count(100)

    def fill(path, leaf):
        if len(leaf.shape) > 1:
            return normal(next(seeds), *leaf.shape, scale=leaf.shape[0] ** -0.5)
        constant = jnp.zeros if "bias" in jax.tree_util.keystr(path) else jnp.ones
        return constant(leaf.shape, leaf.dtype)

    return jax.tree_util.tree_map_with_path(fill, shapes)


def cast(tree, dtype):
    """The same tree with its floating-point leaves in one dtype."""

    def cast_leaf(leaf):
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf.astype(dtype)
        return leaf

    return jax.tree.map(cast_leaf, tree)


# Harmless losses, in float32.


def mean(x):
    return jnp.mean(x.astype(jnp.float32))


def mean_square(x):
    return jnp.mean(jnp.square(x.astype(jnp.float32)))
