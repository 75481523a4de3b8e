"""One small model, trained by the step of each front end, which makes a `Run` of it.

Its loss takes parameters, statistics and a batch, and returns the statistics as they are after it.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tables import counters

import jaxscale

RNG = np.random.default_rng(0)
BATCHES = [jnp.asarray(RNG.standard_normal((16, 8)), jnp.float32) for _ in range(4)]
TARGETS = jnp.asarray(RNG.standard_normal((16, 4)), jnp.float32)
PARAMS = {
    "first": jnp.asarray(RNG.standard_normal((8, 16)) / 3, jnp.float32),
    "last": jnp.asarray(RNG.standard_normal((16, 4)) / 4, jnp.float32),
}
STATS = {
    "mean": jnp.zeros(8),
    "count": jnp.zeros((), jnp.int32),
    "average": jnp.zeros((16, 4)),
}


def loss_fn(params, stats, x):
    outputs = jax.nn.gelu(x @ params["first"]) @ params["last"]
    stats = stats | {
        "mean": stats["mean"] / 2 + jnp.mean(x, 0) / 2,
        "count": stats["count"] + 1,
    }
    return jnp.mean((outputs - TARGETS) ** 2), stats


def averaged(params, stats):
    """What the hook after a step makes of the statistics."""
    return stats | {"average": stats["average"] / 2 + params["last"] / 2}


def frozen(grads):
    """What the hook before a step makes of the gradients."""
    return grads | type(grads)({"first": jnp.zeros((8, 16))})


class Run:
    """A run: `step` takes a batch and returns the loss, `now` parameters and statistics."""

    def __init__(self, step, carry, now, optimizer=None):
        self._step, self._carry, self._now, self._optimizer = (
            step,
            carry,
            now,
            optimizer,
        )

    def step(self, x):
        *self._carry, loss = self._step(*self._carry, x)
        return loss

    def now(self):
        return self._now(*self._carry)

    def metrics(self):
        return counters(self._optimizer or self._carry)


def plain(tx, loss_fn=loss_fn, cast=lambda fun: fun, hooks=False, **options):
    """A function of a tree."""
    if hooks:
        options |= {"after": averaged, "on_grads": frozen}
    step = jax.jit(jaxscale.train_step(cast(loss_fn), tx, has_state=True, **options))
    return Run(
        step, (PARAMS, tx.init(PARAMS), STATS), lambda params, _, stats: (params, stats)
    )


class Module(eqx.Module):
    first: jax.Array
    last: jax.Array
    name: str = "not an array"

    def as_dict(self):
        return {"first": self.first, "last": self.last}


def equinox(tx, loss_fn=loss_fn, cast=lambda fun: fun, hooks=False, **options):
    """A module that is differentiated by a transformation of its library."""
    if hooks:
        options |= {"after": lambda model, stats: averaged(model.as_dict(), stats)}
        options |= {
            "on_grads": lambda g: eqx.tree_at(lambda m: m.first, g, jnp.zeros((8, 16)))
        }
    options |= {"transform": eqx.filter_value_and_grad, "has_state": True}
    loss = cast(lambda model, stats, x: loss_fn(model.as_dict(), stats, x))
    model = Module(**PARAMS)
    step = eqx.filter_jit(jaxscale.train_step(loss, tx, **options))
    carry = model, tx.init(eqx.filter(model, eqx.is_inexact_array)), STATS
    return Run(step, carry, lambda model, _, stats: (model.as_dict(), stats))


class State(jaxscale.flax.TrainState):
    batch_stats: dict


def linen(tx, loss_fn=loss_fn, cast=lambda fun: fun, hooks=False, **options):
    """A `TrainState` with statistics in a field."""

    def loss(params, fields, x):
        value, stats = loss_fn(params, fields["batch_stats"], x)
        return value, {"batch_stats": stats}

    if hooks:
        options |= {"on_grads": frozen}
        options |= {
            "after": lambda s: s.replace(batch_stats=averaged(s.params, s.batch_stats))
        }
    step = jax.jit(jaxscale.flax.train_step(cast(loss), has_state=True, **options))
    state = State.create(apply_fn=None, params=PARAMS, tx=tx, batch_stats=STATS)
    return Run(step, (state,), lambda state: (state.params, state.batch_stats))


class Network(nnx.Module):
    def __init__(self):
        for kind, leaves in ((nnx.Param, PARAMS), (nnx.BatchStat, STATS)):
            for name, leaf in leaves.items():
                setattr(self, name, kind(leaf))

    def as_dicts(self):
        return [
            {name: getattr(self, name)[...] for name in names}
            for names in (PARAMS, STATS)
        ]

    def write(self, stats):
        for name, value in stats.items():
            getattr(self, name)[...] = value


def objects(tx, loss_fn=loss_fn, cast=lambda fun: fun, hooks=False, **options):
    """A module of NNX, which changes in place."""

    def loss(model, x):
        value, stats = loss_fn(*model.as_dicts(), x)
        model.write(stats)
        return value

    if hooks:
        options |= {"after": lambda model: model.write(averaged(*model.as_dicts()))}
        options |= {"on_grads": frozen}
    model = Network()
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    step = nnx.jit(jaxscale.nnx.train_step(cast(loss), **options))
    return Run(lambda x: (step(model, optimizer, x),), (), model.as_dicts, optimizer)


FRONT_ENDS = {fun.__name__: fun for fun in (plain, equinox, linen, objects)}
