"""The front ends for Flax: the fields of a `TrainState`, the step of NNX, states in variables."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from departing import uses_what_goes
from flax import nnx, serialization
from overflowing import BAD_LOSS, GOOD, OVERFLOW
from overflowing import loss_fn as half_loss
from tables import (
    PARAMS,
    POLICIES,
    assert_same_bits,
    avals,
    cases,
    gradients,
    spoiled,
)
from training import amplified

import jaxscale
from jaxscale import diagnostics

pytestmark = [pytest.mark.standard_promotion, uses_what_goes]


def test_a_train_state_skips_a_bad_step():
    state = jaxscale.flax.TrainState.create(
        apply_fn=None,
        params={"w": jnp.array([1.0, 2.0])},
        tx=jaxscale.loss_scaled(optax.sgd(0.5)),
    )
    for grad in ([2.0, 4.0], [jnp.inf, 0.0]):
        state = state.apply_gradients(grads={"w": jnp.array(grad)})
    np.testing.assert_array_equal(state.params["w"], [0, 0])
    assert state.step == 1
    assert jaxscale.metrics(state.opt_state)["loss_scale"] == 2.0**14


GRADIENTS = gradients(0, 4)
ADAM = optax.adam(0.1)


class State(jaxscale.flax.TrainState):
    batch_stats: Any
    ema: Any
    key: jax.Array


def create(cls=jaxscale.flax.TrainState, tx=ADAM, **fields):
    params = jax.tree.map(jnp.copy, PARAMS)  # as tests donate them
    tx = jaxscale.loss_scaled(tx)
    return cls.create(apply_fn=None, params=params, tx=tx, **fields)


def with_fields():
    stats = {"mean": jnp.zeros(2), "count": jnp.array(3)}
    ema = jax.tree.map(jnp.copy, PARAMS)
    return create(State, batch_stats=stats, ema=ema, key=jax.random.key(0))


def next_key(key):
    return jax.random.split(key, 1)[0]


def advance(state, grads, **kwargs):
    mean = state.batch_stats["mean"] + jnp.nan
    return state.apply_gradients(
        grads=grads,
        batch_stats={"mean": mean, "count": jnp.array(4)},
        ema=optax.incremental_update(state.params, state.ema, 0.1),
        key=next_key(state.key),
        **kwargs,
    )


def without_counters(state):
    """A `TrainState` without what a skipped step changes: the scale and the counters."""
    return state.replace(opt_state=state.opt_state.inner_state)


@pytest.mark.worlds
@cases("names", [None, tuple, iter], fast=[None])
def test_a_skipped_step_keeps_every_field_but_those_that_are_opted_out(names):
    state = jax.jit(advance)(with_fields(), GRADIENTS[0])
    assert state.step == 1
    assert state.batch_stats["count"] == 4
    options = {}
    expected = state
    if names is not None:
        options["always_replace"] = names(["key"])
        expected = state.replace(key=next_key(state.key))
    bad = spoiled(GRADIENTS[1], jnp.inf)
    kept = jax.jit(functools.partial(advance, **options))(state, bad)
    assert_same_bits(without_counters(kept), without_counters(expected))
    assert kept.opt_state.total_notfinite == 1
    assert kept.opt_state.total_steps == 2


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
    assert state.step == 0
    assert state.opt_state.total_notfinite_loss == 1


def loss_with_fields(params, fields, x):
    """A loss with statistics that are NaN where the loss is."""
    loss = half_loss(params, x)
    stats = fields["batch_stats"]
    stats = {"mean": stats["mean"] + 0 * loss, "count": stats["count"] + 1}
    fields = {"batch_stats": stats, "key": next_key(fields["key"])}
    return loss, (fields, {"traced": x})


@pytest.mark.worlds
def test_the_step_returns_fields_and_outputs_and_never_changes_types():
    differentiated = []

    def differentiate(fun, **options):
        differentiated.append(fun)
        return jax.value_and_grad(fun, **options)

    step = jaxscale.flax.train_step(
        loss_with_fields,
        transform=differentiate,
        has_state=True,
        has_aux=True,
        retries=9,
        always_replace=("key",),
    )
    step = jax.jit(step, donate_argnums=0)
    state = with_fields()
    types = avals(state)
    key = jax.random.key(0)
    for batch in (GOOD, OVERFLOW, GOOD, BAD_LOSS, GOOD):
        state, (loss, aux) = step(state, batch)
        key = next_key(key)
        assert_same_bits(state.key, key)
        assert_same_bits(aux["traced"], batch)
        assert avals(state) == types
        assert jnp.isfinite(loss) == jnp.isfinite(batch[0])
    assert differentiated
    assert state.step == 4
    assert state.opt_state.total_notfinite == 1
    assert state.opt_state.total_retries > 0
    assert state.batch_stats["count"] == 3 + 4


class Counter(nnx.Variable):
    """A variable of a type of its own."""


class Model(nnx.Module):
    """A model with all that a forward pass changes: statistics, noise, and a counter."""

    def __init__(self):
        self.w = nnx.Param(jnp.ones(3))
        self.bias = nnx.Param(jnp.zeros(3))
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


@pytest.mark.worlds
def test_objects_among_the_arguments_are_kept_too():
    def fun(model, x, metric, *, more):
        loss = loss_fn(model, x)
        metric.update(values=loss)
        more["count"][...] += 1
        more["other"].kernel[...] += 1
        return loss, {"noise": more["rngs"](), "name": more["name"]}

    both = created()
    metric = nnx.metrics.Average()
    other = nnx.Linear(2, 1, rngs=nnx.Rngs(0))  # whose parameters nobody trains
    before = other.kernel[...]
    more = {"count": Counter(jnp.array(0)), "rngs": nnx.Rngs(7), "name": "as it is"}
    more["other"] = other
    more["part"] = both[0].dropout  # of the model
    step = jaxscale.nnx.train_step(fun, has_aux=True)
    noises = set()
    for batch in BATCHES:
        loss, aux = step(*both, batch, metric, more=more)
        assert jnp.isfinite(loss) == jnp.isfinite(batch).all()
        assert aux["name"] == "as it is"
        noises.add(str(jax.random.key_data(aux["noise"])))
    assert len(noises) == len(BATCHES)
    assert metric.count[...] == more["count"][...] == 4
    np.testing.assert_allclose(other.kernel[...], before + 4, rtol=1e-6)
    assert jnp.isfinite(metric.total[...])


def test_what_is_kept_is_the_users_to_say():
    model, optimizer = created()
    step = jaxscale.nnx.train_step(loss_fn, keep=nnx.BatchStat)
    step(model, optimizer, X * jnp.inf)
    assert model.mean[...].tolist() == [0, 0, 0]
    assert model.calls[...] == 1


class Sowing(Model):
    def __call__(self, x):
        y = super().__call__(x)
        self.sow(nnx.Intermediate, "outputs", y)
        return y


@pytest.mark.worlds
@pytest.mark.filterwarnings("ignore:Using 'Module.sow")
def test_intermediates_come_out():
    model, optimizer = created(make=Sowing)
    for _ in range(2):
        STEP(model, optimizer, X)
    outputs = nnx.pop(model, nnx.Intermediate)
    assert [leaf.shape for leaf in jax.tree.leaves(outputs)] == [(8, 3)] * 2


def test_a_bare_optimizer_is_warned_of_at_the_line_that_makes_the_step():
    step = jaxscale.nnx.train_step(loss_fn)
    bare = "`nnx.train_step`: `tx` is a bare optimizer"
    with pytest.warns(UserWarning, match=bare) as caught:
        step(*created(optax.sgd(0.1)), X)
    assert [warning.filename for warning in caught] == [__file__]


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


@cases(
    "name, argnums",
    [(name, argnums) for name in TRAINED for argnums in ARGNUMS],
    fast=[("a path", argnums) for argnums in ARGNUMS],
)
def test_only_what_the_optimizer_trains_is_differentiated(name, argnums):
    make, wrt = TRAINED[name]
    model, optimizer = created(CALM, make, wrt)
    frozen = nnx.All(nnx.Param, nnx.Not(wrt))
    frozen_before, _ = state_of(model, optimizer, frozen)
    trained_before, _ = state_of(model, optimizer, wrt)

    def loss_fn(model, x):
        errors = model(x) - 1
        return jnp.mean(errors**2)

    options = ARGNUMS[argnums](wrt)
    train_step = jaxscale.nnx.train_step(loss_fn, **options)
    train_step(model, optimizer, X)
    frozen_after = nnx.state(model, frozen)
    assert_same_bits(frozen_after, frozen_before)
    trained_after = nnx.state(model, wrt)
    is_same = jax.tree.map(np.array_equal, trained_after, trained_before)
    assert not all(jax.tree.leaves(is_same))
    metrics = jaxscale.metrics(optimizer)
    assert metrics["total_notfinite"] == 0


@pytest.mark.worlds
def test_a_variable_that_holds_a_dictionary_keeps_it():
    """As an average of all parameters does. In a skipped step it keeps its values, too."""
    model, optimizer = created(CALM)
    trained = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    model.average = Counter(jax.tree.map(jnp.copy, trained))

    def loss_that_halves(model, x):
        old = model.average.get_value()
        model.average.set_value(jax.tree.map(lambda leaf: leaf / 2, old))
        return loss_fn(model, x)

    step = nnx.jit(jaxscale.nnx.train_step(loss_that_halves))
    for batch in BATCHES:
        expected = jax.tree.map(np.asarray, model.average.get_value())
        step(model, optimizer, batch)
        if jaxscale.metrics(optimizer)["step_applied"]:
            expected = jax.tree.map(lambda leaf: leaf / 2, expected)
        average = model.average.get_value()
        assert type(average) is dict
        assert jax.tree.structure(average) == jax.tree.structure(trained)
        assert_same_bits(average, expected)


def is_variable(node):
    return isinstance(node, nnx.Variable)


def plain(tree):
    """The arrays that are in the variables of a tree."""

    def take_array(leaf):
        return leaf[...] if is_variable(leaf) else leaf

    return jax.tree.map(take_array, tree, is_leaf=is_variable)


def holds_variables(tree):
    return any(map(is_variable, jax.tree.leaves(tree, is_leaf=is_variable)))


OWN = POLICIES | dict.fromkeys(("window", "window of Optax"), POLICIES["dynamic"])
INNER = {name: optax.sgd(0.1, momentum=0.5) for name in OWN}
INNER["window of Optax"] = optax.MultiSteps(ADAM, 2)
OPTIONS = {"track_leaves": True, "spikes": jaxscale.SpikeRule(window=4)}
TXS = {n: jaxscale.loss_scaled(INNER[n], OWN[n], **OPTIONS) for n in OWN}
TXS["window"] = jaxscale.multi_steps(TXS["window"], 2)
LEAVES = plain(nnx.state(Model(), nnx.Param))
ONES = jax.tree.map(jnp.ones_like, LEAVES)
GRADS = {"w": jnp.array([1.0, -3.0])}


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


def restore(name, state):
    _, optimizer = created(TXS[name])
    saved = jaxscale.to_state_dict(state)
    return jaxscale.from_state_dict(plain(optimizer.opt_state), saved)


WHOLE = {  # of the name of an optimizer, and of its state, or a tree that holds it
    "metrics": lambda n, s: jaxscale.metrics(s),
    "value_and_grad": lambda n, s: jaxscale.value_and_grad(jnp.sum, s)(X),
    "check": lambda n, s: complaint(s, tx=TXS[n]),
    "trace": lambda n, s: {str(diagnostics.trace(jnp.sum, s)(X)): 0},
}
CALLS = WHOLE | {  # of the state alone
    "scale": lambda n, s: jaxscale.scale(s, X),
    "unscale": lambda n, s: jaxscale.unscale(s, X),
    "grad": lambda n, s: jaxscale.grad(jnp.sum, s)(X),
    "metrics of the scale": lambda n, s: jaxscale.metrics(s.scaling),
    "update": lambda n, s: OWN[n].update(s.scaling, GRADS),
    "adjust": lambda n, s: OWN[n].adjust(s.scaling, jnp.array(False), jnp.float32(3)),
    "to_state_dict": lambda n, s: jaxscale.to_state_dict(s),
    "from_state_dict": restore,
    "tx.update": lambda n, s: TXS[n].update(ONES, s, LEAVES),
    "apply_gradients": lambda n, s: jaxscale.apply_gradients(
        TXS[n], ONES, s, LEAVES, value=jnp.float32(1)
    ),
}


class Skipped(NamedTuple):
    """A run all of whose steps were skipped, and the state of its optimizer."""

    model: Any
    optimizer: Any
    state: Any  # in variables
    arrays: Any  # without variables
    opaque: Any  # in variables that are leaves


@functools.cache
def skip_three_steps(name):
    model, optimizer = trained([jnp.inf] * 3, name)
    state = optimizer.opt_state
    assert holds_variables(state)
    arrays = plain(state)
    return Skipped(model, optimizer, state, arrays, jax.tree.map(Opaque, arrays))


def assert_takes_variables(function, name, trees, arrays=None):
    """A function of a state in variables returns what it does of one without."""
    expected = function(name, arrays or skip_three_steps(name).arrays)
    for tree in trees:
        result = function(name, tree)
        assert_same_bits(result, expected)
        assert not holds_variables(result)


every_policy = cases("name", OWN, fast=["dynamic"], shared=True)


@pytest.mark.worlds
@every_policy
def test_every_function_takes_a_state_in_variables_as_one_without(name):
    run = skip_three_steps(name)
    functions = dict(CALLS)
    if name == "following":  # the `adjust` of a user's own policy gets arrays
        del functions["adjust"]
    for function in functions.values():
        assert_takes_variables(function, name, [run.state, run.opaque])


@pytest.mark.worlds
@every_policy
def test_a_state_in_variables_is_found_in_any_tree(name):
    run = skip_three_steps(name)
    whole = nnx.state(run.optimizer)
    _, split_off = nnx.split((run.model, run.optimizer))
    mappings = [whole, nnx.to_pure_dict(whole), split_off]
    mapped = run.arrays
    if name == "noop":
        # A mapping has no types: that the scale is always 1 is not known any more.
        scaling = jaxscale.LossScaleState(*mapped.scaling)
        mapped = mapped._replace(scaling=scaling)
    for function in WHOLE.values():
        assert_takes_variables(function, name, [run.optimizer])
        assert_takes_variables(function, name, mappings, mapped)


@every_policy
def test_a_state_is_read_into_variables_that_are_leaves_as_arrays(name):
    """Then it goes into an optimizer by `nnx.update`, as without a variable."""
    run = skip_three_steps(name)
    saved = jaxscale.to_state_dict(run.opaque)
    assert_same_bits(jaxscale.from_state_dict(run.opaque, saved), run.arrays)


@every_policy
def test_parameters_gradients_and_moments_may_be_in_variables(name):
    """As one has them without an `nnx.Optimizer`."""
    tx = TXS[name]
    params = nnx.state(Model(), nnx.Param)
    grads = jax.tree.map(jnp.ones_like, params)
    state = tx.init(params)
    updated = tx.update(grads, state, params)
    assert jax.tree.structure(updated) == jax.tree.structure((params, state))
    expected = tx.update(plain(grads), plain(state), plain(params))
    assert_same_bits(plain(updated), expected)


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
    # Also one with a key by whose name a variable is written.
    for content in ({"a": X, "b": X}, {"value": X}):
        tree = {"x": nnx.Param(content)}
        written = jax.tree.map(lambda leaf: leaf + 1, content)
        for saved in (written, {"value": written}):
            restored = jaxscale.from_state_dict(tree, {"x": saved})
            assert jax.tree.structure(restored) == jax.tree.structure(tree)
            leaves = jax.tree.leaves(restored)
            assert_same_bits(leaves, jax.tree.leaves(written))
        as_dict = jaxscale.to_state_dict(tree)
        assert as_dict["x"].keys() == content.keys()
