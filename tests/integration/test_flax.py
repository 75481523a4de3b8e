"""The front ends for Flax: the fields of a `TrainState`, the step of NNX, states in variables."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx, serialization
from flax.training import train_state
from overflowing import BAD_LOSS, GOOD, OVERFLOW
from overflowing import loss_fn as half_loss
from tables import (
    PARAMS,
    POLICIES,
    assert_close,
    assert_same_bits,
    avals,
    cases,
    gradients,
)
from training import amplified

import jaxscale
from jaxscale import diagnostics, presets

pytestmark = pytest.mark.standard_promotion

GRADIENTS, ADAM = gradients(0, 4), optax.adam(0.1)


class State(jaxscale.flax.TrainState):
    batch_stats: Any
    ema: Any
    key: jax.Array


def create(cls=jaxscale.flax.TrainState, tx=ADAM, **fields):
    params = jax.tree.map(jnp.copy, PARAMS)  # as tests donate them
    return cls.create(
        apply_fn=None, params=params, tx=jaxscale.loss_scaled(tx), **fields
    )


def with_fields():
    stats, ema = (
        {"mean": jnp.zeros(2), "count": jnp.array(3)},
        jax.tree.map(jnp.copy, PARAMS),
    )
    return create(State, batch_stats=stats, ema=ema, key=jax.random.key(0))


def advance(state, grads, **kwargs):
    return state.apply_gradients(
        grads=grads,
        batch_stats={
            "mean": state.batch_stats["mean"] + jnp.nan,
            "count": jnp.array(4),
        },
        ema=optax.incremental_update(state.params, state.ema, 0.1),
        key=jax.random.split(state.key, 1)[0],
        **kwargs,
    )


def next_key(key):
    return jax.random.split(key, 1)[0]


def without_counters(state):
    """A `TrainState` without what a skipped step changes: the scale and the counters."""
    return state.replace(opt_state=state.opt_state.inner_state)


@cases("names", [None, tuple, iter])
def test_a_skipped_step_keeps_every_field_but_those_that_are_opted_out(names):
    state = jax.jit(advance)(with_fields(), GRADIENTS[0])
    assert (state.step, state.batch_stats["count"]) == (1, 4)
    options = {}
    expected = state
    if names is not None:
        options["always_replace"] = names(["key"])
        expected = state.replace(key=next_key(state.key))
    bad = GRADIENTS[1] | {"w": GRADIENTS[1]["w"].at[1].set(jnp.inf)}
    kept = jax.jit(functools.partial(advance, **options))(state, bad)
    assert_same_bits(without_counters(kept), without_counters(expected))
    assert (kept.opt_state.total_notfinite, kept.opt_state.total_steps) == (1, 2)


def test_it_applies_what_flax_applies():
    ours, theirs = create(), create(train_state.TrainState)
    for grads in GRADIENTS:
        ours, theirs = (state.apply_gradients(grads=grads) for state in (ours, theirs))
    assert_same_bits(ours.params, theirs.params)
    assert ours.step == theirs.step == 4


def test_value_and_extra_arguments_are_forwarded():
    received = {}

    def update(updates, state, params=None, **extra_args):
        received.update(extra_args)
        return updates, state

    tx = optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), update)
    state = create(tx=tx).apply_gradients(
        grads=GRADIENTS[0], value=jnp.array(jnp.nan), extra_args={"value_fn": jnp.sum}
    )
    assert jnp.isnan(received["value"])
    assert received["value_fn"] is jnp.sum
    assert (state.step, state.opt_state.total_notfinite_loss) == (0, 1)


def test_the_step_returns_fields_and_outputs_and_never_changes_types():
    def train_loss(params, fields, x):
        """A loss with statistics that are NaN where the loss is."""
        loss, stats = half_loss(params, x), fields["batch_stats"]
        stats = {"mean": stats["mean"] + 0 * loss, "count": stats["count"] + 1}
        fields = {"batch_stats": stats, "key": jax.random.split(fields["key"], 1)[0]}
        return loss, (fields, {"traced": x})

    options = {
        "has_state": True,
        "has_aux": True,
        "retries": 9,
        "always_replace": ("key",),
    }
    step = jax.jit(jaxscale.flax.train_step(train_loss, **options), donate_argnums=0)
    state, key = with_fields(), jax.random.key(0)
    types = avals(state)
    for batch in (GOOD, OVERFLOW, GOOD, BAD_LOSS, GOOD):
        state, (loss, aux) = step(state, batch)
        key = jax.random.split(key, 1)[0]
        assert_same_bits((state.key, aux["traced"]), (key, batch))
        assert avals(state) == types
        assert jnp.isfinite(loss) == jnp.isfinite(batch[0])
    assert (state.step, state.opt_state.total_notfinite) == (4, 1)
    assert state.opt_state.total_retries > 0
    assert state.batch_stats["count"] == 3 + 4


class Counter(nnx.Variable):
    """A variable of a type of its own."""


class Model(nnx.Module):
    """A model with all that a forward pass changes: statistics, noise, and a counter."""

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


def loss_fn(model, x, factor=1.0):
    return amplified(jnp.mean((model(x) * 30) ** 2), factor)


X = jax.random.normal(jax.random.key(0), (8, 3))
BATCHES = [X, X * 0.5, X * jnp.inf, X, X * 2]
# At this scale only what is not finite overflows.
CALM = jaxscale.loss_scaled(ADAM, jaxscale.DynamicLossScale(init_scale=4.0))
STEP = nnx.jit(jaxscale.nnx.train_step(loss_fn))


def created(tx=CALM, make=Model, wrt=nnx.Param):
    model = make()
    return model, nnx.Optimizer(model, tx, wrt=wrt)


def state_of(model, optimizer, kind=...):
    return jax.tree.map(jnp.copy, (nnx.state(model, kind), nnx.state(optimizer)))


def by_hand(model, optimizer, x):
    """The step as users wrote it: everything but the noise is put back by hand."""
    old = nnx.to_pure_dict(nnx.state(model, (nnx.BatchStat, Counter)))
    opt_state, transform = optimizer.opt_state, nnx.value_and_grad
    loss, grads = jaxscale.value_and_grad(loss_fn, opt_state, transform=transform)(
        model, x
    )
    optimizer.update(model, grads, value=loss)
    new = nnx.to_pure_dict(nnx.state(model, (nnx.BatchStat, Counter)))
    finite = jaxscale.metrics(optimizer)["step_applied"]
    nnx.update(model, jaxscale.tree_where(finite, new, old))
    return loss


JITS = {
    "eager": lambda step: step,
    "donated": lambda step: nnx.jit(step, donate_argnums=(0, 1)),
    "inside": lambda step: nnx.jit(
        lambda model, optimizer, x: step(model, optimizer, x)
    ),
}


@cases("way", JITS, fast=["donated"])
def test_it_is_the_step_by_hand_and_a_bad_batch_leaves_no_trace_but_noise(way):
    ours, hand = created(), created()
    step = JITS[way](jaxscale.nnx.train_step(loss_fn))
    if way == "eager":
        # Bit for bit, as each operation runs by itself.
        assert_same = assert_same_bits
        step_by_hand = by_hand
    else:
        assert_same = assert_close  # two programs may round differently
        step_by_hand = nnx.jit(by_hand)
    without_noise = nnx.Not(nnx.RngState)
    for batch, is_bad in (
        (X * 0.5, False),
        (X.at[1, 2].set(jnp.nan), True),
        (X, False),
    ):
        before, _ = state_of(*ours, without_noise)
        loss = step(*ours, batch)
        expected_loss = step_by_hand(*hand, batch)
        assert_same((loss, *state_of(*ours)), (expected_loss, *state_of(*hand)))
        assert jaxscale.metrics(ours[1])["step_applied"] == (not is_bad)
        if is_bad:
            after, _ = state_of(*ours, without_noise)
            assert_same_bits(after, before)
    model, optimizer = ours
    assert (model.calls[...], model.dropout.rngs.count[...], optimizer.step[...]) == (
        2,
        3,
        3,
    )
    assert model.w_again is model.w


def test_objects_among_the_arguments_are_kept_too():
    def fun(model, x, metric, *, more):
        loss = loss_fn(model, x)
        metric.update(values=loss)
        more["count"][...] += 1
        return loss, {"noise": more["rngs"](), "name": more["name"]}

    both, metric = created(), nnx.metrics.Average()
    more = {"count": Counter(jnp.array(0)), "rngs": nnx.Rngs(7), "name": "as it is"}
    step = jaxscale.nnx.train_step(fun, has_aux=True)
    outputs = [step(*both, batch, metric, more=more) for batch in BATCHES]
    assert (metric.count[...], more["count"][...]) == (4, 4)
    assert jnp.isfinite(metric.total[...])
    assert [bool(jnp.isfinite(loss)) for loss, _ in outputs] == [
        True,
        True,
        False,
        True,
        True,
    ]
    noises = {tuple(jax.random.key_data(aux["noise"]).tolist()) for _, aux in outputs}
    assert len(noises) == len(BATCHES)
    assert {aux["name"] for _, aux in outputs} == {"as it is"}


@pytest.mark.filterwarnings("ignore:Using 'Module.sow")
def test_what_is_kept_is_the_users_to_say_and_intermediates_come_out():
    model, optimizer = created()
    jaxscale.nnx.train_step(loss_fn, keep=nnx.BatchStat)(model, optimizer, X * jnp.inf)
    assert model.mean[...].tolist() == [0, 0, 0]
    assert model.calls[...] == 1

    class Sowing(Model):
        def __call__(self, x):
            y = super().__call__(x)
            self.sow(nnx.Intermediate, "outputs", y)
            return y

    both = created(make=Sowing)
    for _ in range(2):
        STEP(*both, X)
    outputs = nnx.pop(both[0], nnx.Intermediate)
    assert [leaf.shape for leaf in jax.tree.leaves(outputs)] == [(8, 3)] * 2


def test_other_optimizers_apply_every_step():
    both, (same, optimizer) = created(optax.sgd(0.1)), created(optax.sgd(0.1))
    step, batches = jaxscale.nnx.train_step(loss_fn), (X, X * 0.5, X * 2)
    # They are warned of once, unless one says that it is meant.
    with pytest.warns(
        UserWarning, match="`nnx.train_step`: `tx` is a bare optimizer"
    ) as found:
        losses = [step(*both, batch) for batch in batches]
    assert [each.filename for each in found] == [__file__]
    for batch, loss in zip(batches, losses, strict=True):
        expected, grads = nnx.value_and_grad(loss_fn)(same, batch)
        optimizer.update(same, grads)
        assert_same_bits(loss, expected)
    assert_same_bits(state_of(*both), state_of(same, optimizer))
    step(*both, X * jnp.inf)
    assert np.isinf(both[0].mean[...]).any()
    meant = jaxscale.loss_scaled(optax.sgd(0.1), None, skip_nonfinite=False)
    jaxscale.nnx.train_step(loss_fn)(*created(meant), X)


LORA = functools.partial(nnx.LoRALinear, 3, 3, lora_rank=2, rngs=nnx.Rngs(0))
# A model, and what the optimizer trains of it.
TRAINED = {
    "a path": (Model, nnx.All(nnx.Param, nnx.PathContains("w"))),
    "LoRA": (LORA, nnx.LoRAParam),
}
# What may be said of it to `train_step`, given the `wrt` of the optimizer.
ARGNUMS = {
    "nothing": lambda wrt: {},
    "the model": lambda wrt: {"argnums": 0},
    "the same": lambda wrt: {"argnums": nnx.DiffState(0, wrt)},
}


@cases("name, argnums", [(name, argnums) for name in TRAINED for argnums in ARGNUMS])
def test_only_what_the_optimizer_trains_is_differentiated(name, argnums):
    make, wrt = TRAINED[name]
    model, optimizer = created(CALM, make, wrt)
    frozen = nnx.All(nnx.Param, nnx.Not(wrt))
    frozen_before, _ = state_of(model, optimizer, frozen)
    trained_before, _ = state_of(model, optimizer, wrt)

    def loss_fn(model, x):
        return jnp.mean((model(x) - 1) ** 2)

    jaxscale.nnx.train_step(loss_fn, **ARGNUMS[argnums](wrt))(model, optimizer, X)
    assert_same_bits(nnx.state(model, frozen), frozen_before)
    pairs = zip(
        jax.tree.leaves(trained_before),
        jax.tree.leaves(nnx.state(model, wrt)),
        strict=True,
    )
    assert any(not np.array_equal(old, new) for old, new in pairs)
    assert jaxscale.metrics(optimizer)["total_notfinite"] == 0


def test_a_hook_draws_noise_where_a_step_was_made_and_nowhere_else():
    model, optimizer = created(jaxscale.multi_steps(CALM, 2))
    model.noise = nnx.Rngs(5)
    model.drawn = Counter(jnp.array(0.0))

    def draw(model):
        model.drawn[...] = jax.random.normal(model.noise())

    step = nnx.jit(jaxscale.nnx.train_step(loss_fn, after=draw))
    counts = []
    numbers = []
    for batch in BATCHES:
        step(model, optimizer, batch)
        counts.append(int(model.noise.default.count[...]))
        numbers.append(float(model.drawn[...]))
    assert counts == [0, 1, 1, 2, 2]
    # None was drawn at first, and then one with each count.
    none, first, first_again, second, second_again = numbers
    assert none == 0
    assert first == first_again != 0
    assert second == second_again != 0
    assert first != second


def is_variable(node):
    return isinstance(node, nnx.Variable)


def plain(tree):
    """The arrays that are in the variables of a tree."""
    return jax.tree.map(
        lambda v: v[...] if is_variable(v) else v, tree, is_leaf=is_variable
    )


OWN = POLICIES | {
    "tolerance": presets.fairseq(),
    "logmax": presets.openseq2seq_logmax(),
}
OWN |= dict.fromkeys(("window", "window of Optax"), POLICIES["dynamic"])
INNER = {name: optax.sgd(0.1, momentum=0.5) for name in OWN}
INNER["window of Optax"] = optax.MultiSteps(ADAM, 2)
TXS = {n: jaxscale.loss_scaled(INNER[n], OWN[n], track_leaves=True) for n in OWN}
TXS["window"] = jaxscale.multi_steps(TXS["window"], 2)
LEAVES = plain(nnx.state(Model(), nnx.Param))
ONES, GRADS = jax.tree.map(jnp.ones_like, LEAVES), {"w": jnp.array([1.0, -3.0])}


class Opaque:
    """A variable that is a leaf, as those of Flax in its `hijax` mode and of Keras are."""

    def __init__(self, array):
        self.array = array

    def __jax_array__(self):
        return self.array


def trained(factors, name="dynamic"):
    both = created(TXS[name])
    for factor in factors:
        STEP(*both, X, jnp.float32(factor))
    return both


def complaint(*args, **kwargs):
    with pytest.raises(jaxscale.LossScaleStuckError) as error:
        jaxscale.check(*args, max_consecutive=2, **kwargs)
    return {str(error.value): 0}


def columns(state):
    history = diagnostics.History()
    history.append(state)
    return history.columns()


WHOLE = {  # of the name of an optimizer, and of its state, or a tree that holds it
    "metrics": lambda n, s: jaxscale.metrics(s),
    "value_and_grad": lambda n, s: jaxscale.value_and_grad(jnp.sum, s)(X),
    "check": lambda n, s: complaint(s, tx=TXS[n]),
}
CALLS = WHOLE | {  # of the state alone
    "scale": lambda n, s: jaxscale.scale(s, X),
    "unscale": lambda n, s: jaxscale.unscale(s, X),
    "grad": lambda n, s: jaxscale.grad(jnp.sum, s)(X),
    "metrics of the scale": lambda n, s: jaxscale.metrics(s.scaling),
    "History.append": lambda n, s: columns(s),
    "update": lambda n, s: OWN[n].update(s.scaling, GRADS),
    "adjust": lambda n, s: OWN[n].adjust(s.scaling, jnp.array(False), jnp.float32(3)),
    "to_state_dict": lambda n, s: jaxscale.to_state_dict(s),
    "from_state_dict": lambda n, s: jaxscale.from_state_dict(
        plain(created(TXS[n])[1].opt_state), jaxscale.to_state_dict(s)
    ),
    "tx.update": lambda n, s: TXS[n].update(ONES, s, LEAVES),
    "apply_gradients": lambda n, s: jaxscale.apply_gradients(
        TXS[n], ONES, s, LEAVES, value=jnp.float32(1)
    ),
}
OF_ONE_POLICY = {  # as there is only that rule, and as it is slow
    "to_torch": lambda n, s: presets.to_torch(OWN[n], s.scaling),
    "trace": lambda n, s: {str(diagnostics.trace(jnp.sum, s)(X)): 0},
}


@cases("name", OWN, fast=["dynamic"])
def test_every_function_takes_a_state_in_variables_as_one_without(name):
    model, optimizer = trained([jnp.inf] * 3, name)
    state, whole, arrays = (
        optimizer.opt_state,
        nnx.state(optimizer),
        plain(optimizer.opt_state),
    )
    opaque = jax.tree.map(Opaque, arrays)
    split_off = nnx.to_pure_dict(whole), nnx.split((model, optimizer))[1]
    assert any(map(is_variable, jax.tree.leaves(state, is_leaf=is_variable)))
    for call, function in (
        CALLS | (OF_ONE_POLICY if name == "dynamic" else {})
    ).items():
        expected = function(name, arrays)
        trees = [state] + [opaque] * (call in CALLS)
        for tree in trees + [optimizer, whole, *split_off] * (call in WHOLE):
            result = function(name, tree)
            assert_same_bits(result, expected)
            assert not any(
                map(is_variable, jax.tree.leaves(result, is_leaf=is_variable))
            ), call
    # What is in it goes into an optimizer by `nnx.update`, as without a variable.
    assert_same_bits(
        jaxscale.from_state_dict(opaque, jaxscale.to_state_dict(opaque)), arrays
    )
    # As one has them without an `nnx.Optimizer`: in parameters, gradients and moments alike.
    params = nnx.state(model, nnx.Param)
    grads, fresh = jax.tree.map(jnp.ones_like, params), TXS[name].init(params)
    updated = TXS[name].update(grads, fresh, params)
    assert jax.tree.structure(updated) == jax.tree.structure((params, fresh))
    assert_same_bits(
        plain(updated), TXS[name].update(*map(plain, (grads, fresh, params)))
    )
    names = {key for key in jaxscale.metrics(state) if "leaves" in key}
    assert names == {"nonfinite_leaves/w", "nonfinite_leaves/bias"}
    saved = jaxscale.to_state_dict(whole)
    # as if saved before there was such a counter
    assert saved["opt_state"].pop("total_steps") == 3
    fresh = nnx.state(created(TXS[name])[1])
    back = jaxscale.from_state_dict(fresh, saved)
    assert jax.tree.structure(back) == jax.tree.structure(fresh)
    found = jaxscale.metrics(back)
    assert (found["total_notfinite"], found["total_steps"]) == (3, 0)


def by_orbax(tree, path):
    """As it is read without a target: a dictionary for each variable."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path / "state", tree)
        checkpointer.wait_until_finished()
        return checkpointer.restore(path / "state")


WAYS = {
    "to_state_dict": lambda optimizer, _: jaxscale.to_state_dict(optimizer.opt_state),
    "of arrays": lambda optimizer, _: jaxscale.to_state_dict(
        plain(optimizer.opt_state)
    ),
    "Flax": lambda optimizer, _: serialization.to_state_dict(optimizer.opt_state),
    "NNX": lambda optimizer, _: nnx.to_pure_dict(nnx.state(optimizer))["opt_state"],
    "orbax": lambda optimizer, path: by_orbax(optimizer.opt_state, path),
    "orbax, of NNX": lambda optimizer, path: by_orbax(nnx.state(optimizer), path)[
        "opt_state"
    ],
}


@cases("way", WAYS, fast=["orbax, of NNX"])
def test_a_run_goes_on_from_what_was_saved(way, tmp_path):
    model, optimizer = trained([1, jnp.inf, 1])
    saved = WAYS[way](optimizer, tmp_path)
    same_model, fresh = trained([])
    nnx.update(same_model, nnx.state(model))
    for target in (plain(fresh.opt_state), fresh.opt_state):
        back = jaxscale.from_state_dict(target, saved)
        assert_same_bits(plain(back), plain(optimizer.opt_state))
        assert jax.tree.structure(back) == jax.tree.structure(target)
        nnx.update(fresh.opt_state, nnx.state(back))
        assert_same_bits(fresh.opt_state, optimizer.opt_state)
    for factor in (1, jnp.inf, 1):
        STEP(model, optimizer, X, jnp.float32(factor))
        STEP(same_model, fresh, X, jnp.float32(factor))
    assert_same_bits(fresh.opt_state, optimizer.opt_state)
    assert_same_bits(nnx.state(same_model), nnx.state(model))


def test_a_variable_may_hold_a_tree():
    # One that has the name by which a variable is written, too.
    for held in ({"a": X, "b": X}, {"value": X}):
        tree = {"x": nnx.Param(held)}
        written = {"x": jax.tree.map(lambda leaf: leaf + 1, held)}
        for saved in (written, {"x": {"value": written["x"]}}):
            back = jaxscale.from_state_dict(tree, saved)
            assert jax.tree.structure(back) == jax.tree.structure(tree)
            assert_same_bits(jax.tree.leaves(back), jax.tree.leaves(written))
        assert jaxscale.to_state_dict(tree)["x"].keys() == held.keys()


# The optimizer's window, and the step of the `TrainState` after each of some micro-batches.
COUNTED = {
    "none": (lambda tx: jaxscale.loss_scaled(tx), [1, 2, 2, 3, 4, 5]),
    "ours": (
        lambda tx: jaxscale.multi_steps(jaxscale.loss_scaled(tx), 2),
        [0, 1, 1, 2, 2, 3],
    ),
    "Optax'": (
        lambda tx: jaxscale.loss_scaled(optax.MultiSteps(tx, 2)),
        [0, 1, 1, 1, 2, 2],
    ),
}


@pytest.mark.standard_promotion
@cases("window", COUNTED)
def test_the_step_counts_steps_of_the_optimizer_with_any_window(window):
    wrap, expected = COUNTED[window]
    state = jaxscale.flax.TrainState.create(
        apply_fn=None, params={"w": jnp.zeros(2)}, tx=wrap(optax.adam(0.1))
    )
    update = jax.jit(
        lambda state, size: state.apply_gradients(grads={"w": jnp.full(2, size)})
    )
    steps = []
    for size in (1.0, 1.0, jnp.inf, 1.0, 1.0, 1.0):
        state = update(state, size)
        steps.append(int(state.step))
        (count,) = [
            leaf for _, leaf in optax.tree.get_all_with_path(state.opt_state, "count")
        ]
        assert count == state.step
    assert steps == expected
