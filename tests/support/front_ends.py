"""One small model, trained by the step of each front end: a tree, Equinox, Linen and NNX.

Each front end makes, of an optimizer and a loss, a `Run`. The loss is a function of parameters,
statistics and a batch, and returns the statistics as they are after it.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxscale
import jaxscale.flax
import jaxscale.nnx

RNG = np.random.default_rng(0)
BATCHES = [jnp.asarray(RNG.standard_normal((16, 8)), jnp.float32) for _ in range(4)]
TARGETS = jnp.asarray(RNG.standard_normal((16, 4)), jnp.float32)
PARAMS = {
    "first": jnp.asarray(RNG.standard_normal((8, 16)) / 3, jnp.float32),
    "last": jnp.asarray(RNG.standard_normal((16, 4)) / 4, jnp.float32),
}
STATS = {"mean": jnp.zeros(8), "count": jnp.zeros((), jnp.int32), "average": jnp.zeros((16, 4))}


def loss_fn(params, stats, x):
    outputs = jax.nn.gelu(x @ params["first"]) @ params["last"]
    stats = stats | {"mean": stats["mean"] / 2 + jnp.mean(x, 0) / 2, "count": stats["count"] + 1}
    return jnp.mean((outputs - TARGETS) ** 2), stats


def averaged(params, stats):
    """What the hook after a step makes of the statistics."""
    return stats | {"average": stats["average"] / 2 + params["last"] / 2}


class Run:
    """A run: `step` takes a batch and returns the loss."""

    def __init__(self, step, now, state):
        self.step = step
        self.now = now  # returns parameters and statistics
        self.state = state  # returns what holds the state of the optimizer

    def metrics(self):
        return {name: value.item() for name, value in jaxscale.metrics(self.state()).items()}


def _looped(inner, *carry):
    """A step that keeps its carry, and what returns that."""
    held = list(carry)

    def step(x):
        *held[:], loss = inner(*held, x)
        return loss

    return step, held


def plain(tx, loss_fn=loss_fn, cast=lambda fun: fun, hooks=False, **options):
    """A function of a tree."""
    if hooks:
        options |= {"after": averaged}
        options |= {"on_grads": lambda grads: grads | {"first": jnp.zeros((8, 16))}}
    inner = jax.jit(jaxscale.train_step(cast(loss_fn), tx, has_state=True, **options))
    step, held = _looped(inner, PARAMS, tx.init(PARAMS), STATS)
    return Run(step, lambda: (held[0], held[2]), lambda: held[1])


class Module(eqx.Module):
    first: jax.Array
    last: jax.Array
    name: str = "not an array"


def equinox(tx, loss_fn=loss_fn, cast=lambda fun: fun, hooks=False, **options):
    """A module that is differentiated by a transformation of its library."""

    def as_dict(model):
        return {"first": model.first, "last": model.last}

    if hooks:
        options |= {"after": lambda model, stats: averaged(as_dict(model), stats)}
        options |= {"on_grads": lambda g: eqx.tree_at(lambda m: m.first, g, jnp.zeros((8, 16)))}
    options |= {"transform": eqx.filter_value_and_grad, "has_state": True}
    loss = cast(lambda model, stats, x: loss_fn(as_dict(model), stats, x))
    model = Module(**PARAMS)
    inner = eqx.filter_jit(jaxscale.train_step(loss, tx, **options))
    step, held = _looped(inner, model, tx.init(eqx.filter(model, eqx.is_inexact_array)), STATS)
    return Run(step, lambda: (as_dict(held[0]), held[2]), lambda: held[1])


class State(jaxscale.flax.TrainState):
    batch_stats: dict


def linen(tx, loss_fn=loss_fn, cast=lambda fun: fun, hooks=False, **options):
    """A `TrainState` with statistics in a field."""

    def loss(params, fields, x):
        value, stats = loss_fn(params, fields["batch_stats"], x)
        return value, {"batch_stats": stats}

    def after(state):
        return state.replace(batch_stats=averaged(state.params, state.batch_stats))

    if hooks:
        options |= {"after": after}
        options |= {"on_grads": lambda grads: grads | {"first": jnp.zeros((8, 16))}}
    inner = jax.jit(jaxscale.flax.train_step(cast(loss), has_state=True, **options))
    state = State.create(apply_fn=None, params=PARAMS, tx=tx, batch_stats=STATS)
    step, held = _looped(inner, state)
    return Run(step, lambda: (held[0].params, held[0].batch_stats), lambda: held[0])


class Network(nnx.Module):
    def __init__(self):
        for kind, leaves in ((nnx.Param, PARAMS), (nnx.BatchStat, STATS)):
            for name, leaf in leaves.items():
                setattr(self, name, kind(leaf))


def objects(tx, loss_fn=loss_fn, cast=lambda fun: fun, hooks=False, **options):
    """A module of NNX, which changes in place."""

    def as_dicts(model):
        return [{name: getattr(model, name)[...] for name in names} for names in (PARAMS, STATS)]

    def write(model, stats):
        for name, value in stats.items():
            getattr(model, name)[...] = value

    def loss(model, x):
        value, stats = loss_fn(*as_dicts(model), x)
        write(model, stats)
        return value

    def freeze(grads):
        grads["first"] = jnp.zeros((8, 16))
        return grads

    if hooks:
        options |= {
            "on_grads": freeze,
            "after": lambda model: write(model, averaged(*as_dicts(model))),
        }
    model = Network()
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    inner = nnx.jit(jaxscale.nnx.train_step(cast(loss), **options))
    return Run(lambda x: inner(model, optimizer, x), lambda: as_dicts(model), lambda: optimizer)


FRONT_ENDS = {fun.__name__: fun for fun in (plain, equinox, linen, objects)}
