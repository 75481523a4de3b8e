"""One small model, trained by the step of each front end, which makes a `Run` of it.

Its loss takes parameters, statistics and a batch, and returns the statistics as they are after it.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tables import counters, unchanged

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
    hidden = jax.nn.gelu(x @ params["first"])
    errors = hidden @ params["last"] - TARGETS
    mean = stats["mean"] / 2 + jnp.mean(x, 0) / 2
    stats = stats | {"mean": mean, "count": stats["count"] + 1}
    return jnp.mean(errors**2), stats


def averaged(params, stats):
    """The statistics after a step of the optimizer."""
    average = stats["average"] / 2 + params["last"] / 2
    return stats | {"average": average}


FROZEN = jnp.zeros((8, 16))


def frozen(grads):
    """The hook before a step, which freezes a layer."""
    return grads | type(grads)({"first": FROZEN})


class Run:
    """A run: `step` takes a batch and returns the loss, `now` parameters and statistics."""

    def __init__(self, step, carry, now, optimizer=None):
        self._step = step
        self._carry = carry
        self._now = now
        self._optimizer = optimizer

    def step(self, x):
        *self._carry, loss = self._step(*self._carry, x)
        return loss

    def now(self):
        return self._now(*self._carry)

    def metrics(self):
        return counters(self._optimizer or self._carry)


def once_made(before, opt_state, new, old):
    """What is new once the optimizer has made a step, as the page of recipes has it."""
    has_stepped = opt_state.step_applied
    window = opt_state.inner_state
    if isinstance(window, jaxscale.MultiStepsState):
        has_stepped = window.gradient_step > before.inner_state.gradient_step
    return jaxscale.tree_where(has_stepped, new, old)


def plain(tx, loss_fn=loss_fn, cast=unchanged, hooks=False, params=PARAMS, **options):
    """A function of a tree."""
    if hooks:
        options |= {"on_grads": frozen}
    train_step = jaxscale.train_step(cast(loss_fn), tx, has_state=True, **options)

    @jax.jit
    def step(params, opt_state, stats, x):
        before = opt_state
        params, opt_state, stats, loss = train_step(params, opt_state, stats, x)
        if hooks:
            stats = once_made(before, opt_state, averaged(params, stats), stats)
        return params, opt_state, stats, loss

    carry = params, tx.init(params), STATS
    return Run(step, carry, lambda params, _, stats: (params, stats))


class Module(eqx.Module):
    first: jax.Array
    last: jax.Array
    name: str = "not an array"

    def as_dict(self):
        return {"first": self.first, "last": self.last}


def equinox(tx, loss_fn=loss_fn, cast=unchanged, hooks=False, params=PARAMS, **options):
    """A module that is differentiated by a transformation of its library."""

    def loss(model, stats, x):
        return loss_fn(model.as_dict(), stats, x)

    def freeze(grads):
        return eqx.tree_at(lambda model: model.first, grads, FROZEN)

    if hooks:
        options |= {"on_grads": freeze}
    options |= {"transform": eqx.filter_value_and_grad, "has_state": True}
    model = Module(**params)
    train_step = jaxscale.train_step(cast(loss), tx, **options)

    @eqx.filter_jit
    def step(model, opt_state, stats, x):
        before = opt_state
        model, opt_state, stats, loss = train_step(model, opt_state, stats, x)
        if hooks:
            new = averaged(model.as_dict(), stats)
            stats = once_made(before, opt_state, new, stats)
        return model, opt_state, stats, loss

    carry = model, tx.init(eqx.filter(model, eqx.is_inexact_array)), STATS
    return Run(step, carry, lambda model, _, stats: (model.as_dict(), stats))


class State(jaxscale.flax.TrainState):
    batch_stats: dict


def linen(tx, loss_fn=loss_fn, cast=unchanged, hooks=False, params=PARAMS, **options):
    """A `TrainState` with statistics in a field."""

    def loss(params, fields, x):
        value, stats = loss_fn(params, fields["batch_stats"], x)
        return value, {"batch_stats": stats}

    if hooks:
        options |= {"on_grads": frozen}
    train_step = jaxscale.flax.train_step(cast(loss), has_state=True, **options)

    @jax.jit
    def step(state, x):
        before = state.opt_state
        state, loss = train_step(state, x)
        if hooks:
            new = averaged(state.params, state.batch_stats)
            stats = once_made(before, state.opt_state, new, state.batch_stats)
            state = state.replace(batch_stats=stats)
        return state, loss

    state = State.create(apply_fn=None, params=params, tx=tx, batch_stats=STATS)
    return Run(step, (state,), lambda state: (state.params, state.batch_stats))


class Network(nnx.Module):
    def __init__(self, params):
        for name, leaf in params.items():
            setattr(self, name, nnx.Param(leaf))
        for name, leaf in STATS.items():
            setattr(self, name, nnx.BatchStat(leaf))

    def as_dicts(self):
        return self.read(PARAMS), self.read(STATS)

    def read(self, names):
        return {name: getattr(self, name)[...] for name in names}

    def write(self, stats):
        for name, value in stats.items():
            getattr(self, name)[...] = value


def objects(tx, loss_fn=loss_fn, cast=unchanged, hooks=False, params=PARAMS, **options):
    """A module of NNX, which changes in place."""

    def loss(model, x):
        value, stats = loss_fn(*model.as_dicts(), x)
        model.write(stats)
        return value

    if hooks:
        options |= {"on_grads": frozen}
    model = Network(params)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    train_step = jaxscale.nnx.train_step(cast(loss), **options)

    @nnx.jit
    def step(model, optimizer, x):
        before = nnx.as_pure(optimizer.opt_state)
        loss = train_step(model, optimizer, x)
        if hooks:
            params, stats = model.as_dicts()
            opt_state = nnx.as_pure(optimizer.opt_state)
            model.write(once_made(before, opt_state, averaged(params, stats), stats))
        return loss

    return Run(lambda x: (step(model, optimizer, x),), (), model.as_dicts, optimizer)


FRONT_ENDS = {fun.__name__: fun for fun in (plain, equinox, linen, objects)}
