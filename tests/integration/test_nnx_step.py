"""The training step for Flax NNX: a skipped step leaves no trace in the model."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from tables import assert_close, assert_same_bits, cases

import jaxscale
import jaxscale.nnx

pytestmark = pytest.mark.standard_promotion


class Counter(nnx.Variable):
    """A variable of a type of its own."""


class Model(nnx.Module):
    """With all that a forward pass changes: statistics, noise, and a counter."""

    def __init__(self):
        self.w, self.bias = nnx.Param(jnp.ones(3)), nnx.Param(jnp.zeros(3))
        self.w_again = self.w
        self.mean = nnx.BatchStat(jnp.zeros(3))
        self.dropout = nnx.Dropout(0.25, rngs=nnx.Rngs(0))
        self.calls = Counter(jnp.array(0))

    def __call__(self, x):
        self.calls[...] += 1
        self.mean[...] += x[0]
        return self.dropout(x * self.w_again[...][None] + self.bias[...][None])


def loss_fn(model, x):
    return jnp.mean((model(x) * 30) ** 2)


X = jax.random.normal(jax.random.key(0), (8, 3))


def calm():
    """At this scale only what is not finite overflows."""
    return jaxscale.loss_scaled(optax.adam(0.1), jaxscale.DynamicLossScale(init_scale=4.0))


def created(tx=None, model=None):
    model = Model() if model is None else model
    return model, nnx.Optimizer(model, calm() if tx is None else tx, wrt=nnx.Param)


def state_of(model, optimizer, kind=...):
    return jax.tree.map(jnp.copy, (nnx.state(model, kind), nnx.state(optimizer)))


def by_hand(model, optimizer, x):
    """The step as users wrote it: everything but the noise is put back by hand."""
    kept = (nnx.BatchStat, Counter)
    old = nnx.to_pure_dict(nnx.state(model, kept))
    value_and_grad = jaxscale.value_and_grad(
        loss_fn, optimizer.opt_state, transform=nnx.value_and_grad
    )
    loss, grads = value_and_grad(model, x)
    optimizer.update(model, grads, value=loss)
    finite = jaxscale.metrics(optimizer)["step_applied"]
    nnx.update(model, jaxscale.tree_where(finite, nnx.to_pure_dict(nnx.state(model, kept)), old))
    return loss


def batches(bad=jnp.inf):
    return [X, X * 0.5, X.at[1, 2].set(bad), X, X * 2]


JITS = {
    "eager": lambda step: step,
    "donated": lambda step: nnx.jit(step, donate_argnums=(0, 1)),
    "inside": lambda step: nnx.jit(lambda model, optimizer, x: step(model, optimizer, x)),
}


@cases("way", JITS, fast=["donated"])
def test_it_is_the_step_by_hand_and_a_bad_batch_leaves_no_trace_but_noise(way):
    ours, hand = created(), created()
    step = JITS[way](jaxscale.nnx.train_step(loss_fn))
    expected = by_hand if way == "eager" else nnx.jit(by_hand)
    # Bit for bit where each operation runs by itself; two programs may round differently.
    same = assert_same_bits if way == "eager" else assert_close
    for i, batch in enumerate(batches(jnp.nan)[1:4]):
        before = state_of(*ours, nnx.Not(nnx.RngState))[0]
        loss = step(*ours, batch)
        same((loss, *state_of(*ours)), (expected(*hand, batch), *state_of(*hand)))
        assert jaxscale.metrics(ours[1])["step_applied"] == (i != 1)
        if i == 1:
            assert_same_bits(state_of(*ours, nnx.Not(nnx.RngState))[0], before)
    model, optimizer = ours
    assert (model.calls[...], model.dropout.rngs.count[...], optimizer.step[...]) == (2, 3, 3)
    assert model.w_again is model.w


def test_objects_among_the_arguments_are_kept_too():
    def fun(model, x, metric, *, more):
        loss = loss_fn(model, x)
        metric.update(values=loss)
        more["count"][...] += 1
        noise = more["rngs"]()
        return loss, {"noise": noise, "name": more["name"]}

    model, optimizer = created()
    metric, count, rngs = nnx.metrics.Average(), Counter(jnp.array(0)), nnx.Rngs(7)
    step = jaxscale.nnx.train_step(fun, has_aux=True)
    noises = set()
    for batch in batches():
        more = {"count": count, "rngs": rngs, "name": "as it is"}
        loss, aux = step(model, optimizer, batch, metric, more=more)
        noises.add(tuple(jax.random.key_data(aux["noise"]).tolist()))
    assert aux["name"] == "as it is"
    assert (metric.count[...], count[...]) == (4, 4)
    assert jnp.isfinite(metric.total[...])
    assert jnp.isfinite(loss)
    assert len(noises) == len(batches())


def test_what_is_kept_is_the_users_to_say():
    model, optimizer = created()
    jaxscale.nnx.train_step(loss_fn, keep=nnx.BatchStat)(model, optimizer, X * jnp.inf)
    assert model.mean[...].tolist() == [0, 0, 0]
    assert model.calls[...] == 1


@pytest.mark.filterwarnings("ignore:Using 'Module.sow")
def test_intermediates_come_out():
    class Sowing(Model):
        def __call__(self, x):
            y = super().__call__(x)
            self.sow(nnx.Intermediate, "outputs", y)
            return y

    model, optimizer = created(model=Sowing())
    step = nnx.jit(jaxscale.nnx.train_step(loss_fn))
    step(model, optimizer, X)
    step(model, optimizer, X)
    outputs = nnx.pop(model, nnx.Intermediate)
    assert [leaf.shape for leaf in jax.tree.leaves(outputs)] == [(8, 3)] * 2


def test_other_optimizers_apply_every_step():
    model, optimizer = created(optax.sgd(0.1))
    same, plain = created(optax.sgd(0.1))
    step = jaxscale.nnx.train_step(loss_fn)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for batch in batches(0.0):
            loss, grads = nnx.value_and_grad(loss_fn)(same, batch)
            plain.update(same, grads)
            assert_same_bits(step(model, optimizer, batch), loss)
    assert_same_bits(state_of(model, optimizer), state_of(same, plain))
    step(model, optimizer, X * jnp.inf)
    assert np.isinf(model.mean[...]).any()
    # They are warned of once, unless one says that it is meant.
    (only,) = (each for each in found if "bare optimizer" in str(each.message))
    assert "`nnx.train_step`: `tx` is a bare optimizer" in str(only.message)
    assert only.filename == __file__
    meant = jaxscale.loss_scaled(optax.sgd(0.1), None, skip_nonfinite=False)
    jaxscale.nnx.train_step(loss_fn)(*created(meant), X)


TRAINED = {
    # name: a model, what the optimizer trains of it, and `argnums` that say the same
    "a path": (Model, nnx.All(nnx.Param, nnx.PathContains("w")), 0),
    "LoRA": (
        lambda: nnx.LoRALinear(3, 3, lora_rank=2, rngs=nnx.Rngs(0)),
        nnx.LoRAParam,
        nnx.DiffState(0, nnx.LoRAParam),
    ),
}


@cases("name", TRAINED)
def test_only_what_the_optimizer_trains_is_differentiated(name):
    make, wrt, argnums = TRAINED[name]
    model = make()
    optimizer = nnx.Optimizer(model, calm(), wrt=wrt)

    def fun(model, x):
        return jnp.mean((model(x) - 1) ** 2)

    frozen = nnx.All(nnx.Param, nnx.Not(wrt))
    for options in ({}, {"argnums": argnums}):
        before, trained = (state_of(model, optimizer, kind)[0] for kind in (frozen, wrt))
        jaxscale.nnx.train_step(fun, **options)(model, optimizer, X)
        assert_same_bits(state_of(model, optimizer, frozen)[0], before)
        pairs = zip(*map(jax.tree.leaves, (trained, nnx.state(model, wrt))), strict=True)
        assert any(not np.array_equal(old, new) for old, new in pairs)
    assert jaxscale.metrics(optimizer)["total_notfinite"] == 0


WRAPPERS = {
    "dynamic": lambda inner: jaxscale.loss_scaled(inner, track_leaves=True),
    "adaptive": lambda inner: jaxscale.loss_scaled(inner, "adaptive"),
    "other states": lambda inner: jaxscale.loss_scaled(inner, jaxscale.presets.fairseq()),
    "window": lambda inner: jaxscale.multi_steps(jaxscale.loss_scaled(inner), 2),
    "window of Optax": lambda inner: jaxscale.loss_scaled(optax.MultiSteps(inner, 2)),
}


@cases("name", WRAPPERS, fast=["dynamic"])
def test_the_state_of_an_optimizer_may_be_split_off(name):
    tx = WRAPPERS[name](optax.adam(0.1))
    model, optimizer = created(tx)
    optimizer.update(model, jax.tree.map(lambda w: w * jnp.nan, nnx.state(model, nnx.Param)))
    expected = jaxscale.metrics(optimizer)
    state = nnx.state(optimizer)
    for tree in (state, nnx.to_pure_dict(state), nnx.split((model, optimizer))[1]):
        found = jaxscale.metrics(tree)
        assert found.keys() == expected.keys()
        assert_same_bits([found[name] for name in expected], list(expected.values()))
        scaled = [jaxscale.value_and_grad(jnp.sum, each)(X) for each in (tree, optimizer)]
        assert_same_bits(*scaled)
        for each in (tree, optimizer):
            with pytest.raises(jaxscale.LossScaleStuckError, match="1 steps in a row"):
                jaxscale.check(each, tx=tx, max_consecutive=0)
    saved = jaxscale.to_state_dict(state)
    assert saved["opt_state"].pop("total_steps") == 1  # as if saved before there was such a counter
    fresh = nnx.state(created(tx)[1])
    restored = jaxscale.from_state_dict(fresh, saved)
    assert jax.tree.structure(restored) == jax.tree.structure(fresh)
    assert jaxscale.metrics(restored)["total_notfinite"] == 1
    assert jaxscale.metrics(restored)["total_steps"] == 0


def test_a_hook_draws_noise_where_a_step_was_made_and_nowhere_else():
    model, optimizer = created(jaxscale.multi_steps(calm(), 2))
    model.noise, model.drawn = nnx.Rngs(5), Counter(jnp.array(0.0))

    def draw(model):
        model.drawn[...] = jax.random.normal(model.noise())

    step = nnx.jit(jaxscale.nnx.train_step(loss_fn, after=draw))
    made = 0
    for steps, batch in zip((0, 1, 1, 2, 2), batches(), strict=True):
        drawn = jnp.copy(model.drawn[...])
        step(model, optimizer, batch)
        assert model.noise.default.count[...] == steps
        assert (model.drawn[...] != drawn) == (steps > made)
        made = steps


def other():
    """The optimizer of a model that has the parameters of a linear layer, with other shapes."""
    return created(model=nnx.Linear(3, 5, rngs=nnx.Rngs(0)))[1]


def grown(model):
    model.extra = Counter(jnp.zeros(()))


ERRORS = {
    "a hook that returns the model": (lambda: jaxscale.nnx.train_step(loss_fn, after=lambda model: model)(*created(), X), TypeError, r"nnx\.train_step\(after=\.\.\.\)` changes the model in place.*return None, got Model"),
    "a hook that adds a variable": (lambda: jaxscale.nnx.train_step(loss_fn, after=grown)(*created(), X), ValueError, r"nnx\.train_step\(after=\.\.\.\)` must keep the variables.*added or removed extra\. Make"),
    "the transformation": (lambda: jaxscale.nnx.train_step(loss_fn)(created()[0], calm(), X), TypeError, r"must be an `nnx\.Optimizer`.*GradientTransformation.*wrt="),
    "swapped": (lambda: jaxscale.nnx.train_step(loss_fn)(*created()[::-1], X), TypeError, r"nnx\.train_step\(\.\.\.\)\(model, optimizer.*got Model"),
    "an auxiliary output": (lambda: jaxscale.nnx.train_step(lambda m, x: (loss_fn(m, x), x))(*created(), X), TypeError, r"nnx\.train_step\(loss_fn\).*got \(an array, an array\)\. Pass has_aux=True.* the loss\."),
    "compiled by JAX": (lambda: jax.jit(jaxscale.nnx.train_step(loss_fn))(*created(), X), TypeError, r"nnx\.train_step.*`nnx\.jit\(step\)` for `jax\.jit"),
    "the step for plain functions": (lambda: jaxscale.train_step(loss_fn, calm(), transform=nnx.value_and_grad), TypeError, r"train_step\(transform=.*Use `jaxscale\.nnx\.train_step`"),
    "an optimizer of another model": (lambda: jaxscale.nnx.train_step(loss_fn)(created()[0], other(), X), ValueError, r"`nnx\.train_step\(\.\.\.\)\(optimizer=.*of another optimizer or of other parameters"),
    "what is not trained": (lambda: jaxscale.nnx.train_step(loss_fn, argnums=1)(*created(), X), ValueError, r"nnx\.train_step\(argnums=1\).*wrt=<class 'flax.*Param'>.*tx, wrt=nnx\.LoRAParam"),
    "no batch": (lambda: jaxscale.nnx.train_step(loss_fn)(*created()), TypeError, r"nnx\.train_step\(loss_fn\)`: `loss_fn` takes \(model, x\): missing.*with \(Model\)"),
    "retries without a scale": (lambda: jaxscale.nnx.train_step(loss_fn, retries=2)(*created(optax.sgd(0.1)), X), ValueError, r"nnx\.train_step\(retries=2\).*loss scale.*loss_scaled\(tx\)"),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_bad_input(name):
    call, error, message = ERRORS[name]
    with pytest.raises(error, match=message):
        call()
