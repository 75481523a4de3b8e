"""Flax NNX: its training step, and states as its optimizer holds them, each array in a variable."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx, serialization
from tables import assert_close, assert_same_bits, cases
from training import amplified

import jaxscale
import jaxscale.nnx
from jaxscale import diagnostics, presets

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


def loss_fn(model, x, factor=1.0):
    return amplified(jnp.mean((model(x) * 30) ** 2), factor)


X = jax.random.normal(jax.random.key(0), (8, 3))
BATCHES = [X, X * 0.5, X * jnp.inf, X, X * 2]
OWN = {
    "noop": jaxscale.NoOpLossScale(),
    "dynamic": jaxscale.DynamicLossScale(growth_interval=2),
    "logmax": presets.openseq2seq_logmax(),
    "adaptive": jaxscale.AdaptiveLossScale(),
}
TXS = {
    name: jaxscale.loss_scaled(optax.sgd(0.1, momentum=0.5), policy, track_leaves=True)
    for name, policy in OWN.items()
}
# At this scale only what is not finite overflows.
CALM = jaxscale.loss_scaled(optax.adam(0.1), jaxscale.DynamicLossScale(init_scale=4.0))
STEP = nnx.jit(jaxscale.nnx.train_step(loss_fn))


def created(tx=CALM, make=Model, wrt=nnx.Param):
    model = make()
    return model, nnx.Optimizer(model, tx, wrt=wrt)


def trained(factors, policy="dynamic"):
    """A model and its optimizer after steps with gradients that many times as large."""
    both = created(TXS[policy])
    for factor in factors:
        STEP(*both, X, jnp.float32(factor))
    return both


def state_of(model, optimizer, kind=...):
    return jax.tree.map(jnp.copy, (nnx.state(model, kind), nnx.state(optimizer)))


def is_variable(node):
    return isinstance(node, nnx.Variable)


def plain(tree):
    """The arrays that are in the variables of a tree."""
    return jax.tree.map(lambda v: v[...] if is_variable(v) else v, tree, is_leaf=is_variable)


# The training step.


def by_hand(model, optimizer, x):
    """The step as users wrote it: everything but the noise is put back by hand."""
    old = nnx.to_pure_dict(nnx.state(model, (nnx.BatchStat, Counter)))
    opt_state, transform = optimizer.opt_state, nnx.value_and_grad
    loss, grads = jaxscale.value_and_grad(loss_fn, opt_state, transform=transform)(model, x)
    optimizer.update(model, grads, value=loss)
    new = nnx.to_pure_dict(nnx.state(model, (nnx.BatchStat, Counter)))
    finite = jaxscale.metrics(optimizer)["step_applied"]
    nnx.update(model, jaxscale.tree_where(finite, new, old))
    return loss


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
    for i, batch in enumerate((X * 0.5, X.at[1, 2].set(jnp.nan), X)):
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
        return loss, {"noise": more["rngs"](), "name": more["name"]}

    both, metric = created(), nnx.metrics.Average()
    more = {"count": Counter(jnp.array(0)), "rngs": nnx.Rngs(7), "name": "as it is"}
    step = jaxscale.nnx.train_step(fun, has_aux=True)
    outputs = [step(*both, batch, metric, more=more) for batch in BATCHES]
    assert (metric.count[...], more["count"][...]) == (4, 4)
    assert jnp.isfinite(metric.total[...])
    assert [bool(jnp.isfinite(loss)) for loss, _ in outputs] == [True, True, False, True, True]
    noises = {tuple(jax.random.key_data(aux["noise"]).tolist()) for _, aux in outputs}
    assert len(noises) == len(BATCHES)
    assert {aux["name"] for _, aux in outputs} == {"as it is"}


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

    both = created(make=Sowing)
    for _ in range(2):
        STEP(*both, X)
    outputs = nnx.pop(both[0], nnx.Intermediate)
    assert [leaf.shape for leaf in jax.tree.leaves(outputs)] == [(8, 3)] * 2


def test_other_optimizers_apply_every_step():
    both, (same, optimizer) = created(optax.sgd(0.1)), created(optax.sgd(0.1))
    step, batches = jaxscale.nnx.train_step(loss_fn), (X, X * 0.5, X * 2)
    # They are warned of once, unless one says that it is meant.
    with pytest.warns(UserWarning, match="`nnx.train_step`: `tx` is a bare optimizer") as found:
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


def lora():
    return nnx.LoRALinear(3, 3, lora_rank=2, rngs=nnx.Rngs(0))


TRAINED = {
    # name: a model, what the optimizer trains of it, and `argnums` that say the same
    "a path": (Model, nnx.All(nnx.Param, nnx.PathContains("w")), 0),
    "LoRA": (lora, nnx.LoRAParam, nnx.DiffState(0, nnx.LoRAParam)),
}


@cases("name", TRAINED)
def test_only_what_the_optimizer_trains_is_differentiated(name):
    make, wrt, argnums = TRAINED[name]
    both, frozen = created(CALM, make, wrt), nnx.All(nnx.Param, nnx.Not(wrt))
    for options in ({}, {"argnums": argnums}):
        before, trained = (state_of(*both, kind)[0] for kind in (frozen, wrt))
        step = jaxscale.nnx.train_step(lambda model, x: jnp.mean((model(x) - 1) ** 2), **options)
        step(*both, X)
        assert_same_bits(state_of(*both, frozen)[0], before)
        pairs = zip(*map(jax.tree.leaves, (trained, nnx.state(both[0], wrt))), strict=True)
        assert any(not np.array_equal(old, new) for old, new in pairs)
    assert jaxscale.metrics(both[1])["total_notfinite"] == 0


def test_a_hook_draws_noise_where_a_step_was_made_and_nowhere_else():
    model, optimizer = created(jaxscale.multi_steps(CALM, 2))
    model.noise, model.drawn = nnx.Rngs(5), Counter(jnp.array(0.0))

    def draw(model):
        model.drawn[...] = jax.random.normal(model.noise())

    step, made = nnx.jit(jaxscale.nnx.train_step(loss_fn, after=draw)), 0
    for steps, batch in zip((0, 1, 1, 2, 2), BATCHES, strict=True):
        drawn = jnp.copy(model.drawn[...])
        step(model, optimizer, batch)
        assert model.noise.default.count[...] == steps
        assert (model.drawn[...] != drawn) == (steps > made)
        made = steps


# States in variables, in all functions.

W = jnp.array([1.0, 2.0])
GRADS = {"w": jnp.array([1.0, -3.0])}


def squares(w):
    return jnp.sum(w**2)


def complaint(*args, **kwargs):
    with pytest.raises(jaxscale.LossScaleStuckError) as error:
        jaxscale.check(*args, max_consecutive=2, **kwargs)
    return {str(error.value): 0}


def columns(state):
    history = diagnostics.History()
    history.append(state)
    return history.columns()


def plain_step(state):
    """The arguments of a step that is made by hand: the state as it is, the others as arrays."""
    params = plain(nnx.state(Model(), nnx.Param))
    return jax.tree.map(jnp.ones_like, params), state, params


CALLS = {
    # name: of the name of a policy, and of the state of an optimizer with it
    "scale": lambda p, s: jaxscale.scale(s, W),
    "unscale": lambda p, s: jaxscale.unscale(s, W),
    "value_and_grad": lambda p, s: jaxscale.value_and_grad(squares, s)(W),
    "grad": lambda p, s: jaxscale.grad(squares, s)(W),
    "metrics": lambda p, s: jaxscale.metrics(s),
    "metrics of the scale": lambda p, s: jaxscale.metrics(s.scaling),
    "History.append": lambda p, s: columns(s),
    "check": lambda p, s: complaint(s, tx=TXS[p]),
    "update": lambda p, s: OWN[p].update(s.scaling, GRADS),
    "adjust": lambda p, s: OWN[p].adjust(s.scaling, jnp.array(False), jnp.float32(3)),
    "to_state_dict": lambda p, s: jaxscale.to_state_dict(s),
    "from_state_dict": lambda p, s: jaxscale.from_state_dict(
        plain(created(TXS[p])[1].opt_state), jaxscale.to_state_dict(s)
    ),
    "tx.update": lambda p, s: TXS[p].update(*plain_step(s)),
    "apply_gradients": lambda p, s: jaxscale.apply_gradients(
        TXS[p], *plain_step(s), value=jnp.float32(1)
    ),
}
OF_ONE_POLICY = {  # as there is only that rule, and as it is slow
    "to_torch": lambda p, s: presets.to_torch(OWN[p], s.scaling),
    "trace": lambda p, s: {str(diagnostics.trace(squares, s)(W)): 0},
}


@cases("policy", OWN, fast=["dynamic"])
def test_every_function_takes_a_state_in_variables_as_one_without(policy):
    _, optimizer = trained([jnp.inf] * 3, policy)
    state = optimizer.opt_state
    assert any(map(is_variable, jax.tree.leaves(state, is_leaf=is_variable)))
    for call, function in (CALLS | (OF_ONE_POLICY if policy == "dynamic" else {})).items():
        result = function(policy, state)
        assert_same_bits(result, function(policy, plain(state)))
        assert not any(map(is_variable, jax.tree.leaves(result, is_leaf=is_variable))), call
    assert_same_bits(jaxscale.metrics(optimizer), jaxscale.metrics(state))
    names = {key for key in jaxscale.metrics(state) if "leaves" in key}
    assert names == {"nonfinite_leaves/w", "nonfinite_leaves/bias"}


WRAPPERS = {
    "dynamic": lambda inner: jaxscale.loss_scaled(inner, track_leaves=True),
    "adaptive": lambda inner: jaxscale.loss_scaled(inner, "adaptive"),
    "other states": lambda inner: jaxscale.loss_scaled(inner, presets.fairseq()),
    "window": lambda inner: jaxscale.multi_steps(jaxscale.loss_scaled(inner), 2),
    "window of Optax": lambda inner: jaxscale.loss_scaled(optax.MultiSteps(inner, 2)),
}


@cases("name", WRAPPERS, fast=["dynamic"])
def test_the_state_of_an_optimizer_may_be_split_off(name):
    tx = WRAPPERS[name](optax.adam(0.1))
    model, optimizer = created(tx)
    optimizer.update(model, jax.tree.map(lambda w: w * jnp.nan, nnx.state(model, nnx.Param)))
    expected, state = jaxscale.metrics(optimizer), nnx.state(optimizer)
    scaled = jaxscale.value_and_grad(jnp.sum, optimizer)(X)
    for tree in (state, nnx.to_pure_dict(state), nnx.split((model, optimizer))[1], optimizer):
        assert_same_bits(dict(jaxscale.metrics(tree)), expected)
        assert_same_bits(jaxscale.value_and_grad(jnp.sum, tree)(X), scaled)
        with pytest.raises(jaxscale.LossScaleStuckError, match="1 steps in a row"):
            jaxscale.check(tree, tx=tx, max_consecutive=0)
    saved = jaxscale.to_state_dict(state)
    assert saved["opt_state"].pop("total_steps") == 1  # as if saved before there was such a counter
    fresh = nnx.state(created(tx)[1])
    restored = jaxscale.from_state_dict(fresh, saved)
    assert jax.tree.structure(restored) == jax.tree.structure(fresh)
    found = jaxscale.metrics(restored)
    assert (found["total_notfinite"], found["total_steps"]) == (1, 0)


def by_orbax(tree, path):
    """As it is read without a target: a dictionary for each variable."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path / "state", tree)
        checkpointer.wait_until_finished()
        return checkpointer.restore(path / "state")


WAYS = {
    "to_state_dict": lambda optimizer, _: jaxscale.to_state_dict(optimizer.opt_state),
    "of arrays": lambda optimizer, _: jaxscale.to_state_dict(plain(optimizer.opt_state)),
    "Flax": lambda optimizer, _: serialization.to_state_dict(optimizer.opt_state),
    "NNX": lambda optimizer, _: nnx.to_pure_dict(nnx.state(optimizer))["opt_state"],
    "orbax": lambda optimizer, path: by_orbax(optimizer.opt_state, path),
    "orbax, of NNX": lambda optimizer, path: by_orbax(nnx.state(optimizer), path)["opt_state"],
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


def test_variables_of_the_parameters_stay():
    # As one has them without an `nnx.Optimizer`: in parameters, gradients and moments alike.
    params, tx = nnx.state(Model(), nnx.Param), TXS["dynamic"]
    grads, state = jax.tree.map(jnp.ones_like, params), tx.init(params)
    updates, after = tx.update(grads, state, params)
    assert jax.tree.structure((updates, after)) == jax.tree.structure((params, state))
    assert_same_bits(plain((updates, after)), tx.update(*map(plain, (grads, state, params))))


class Opaque:
    """A variable that is a leaf, as those of Flax in its `hijax` mode and of Keras are."""

    def __init__(self, array):
        self.array = array

    def __jax_array__(self):
        return self.array


def test_a_variable_may_be_a_leaf():
    state = OWN["dynamic"].init()
    opaque = jax.tree.map(Opaque, state)
    for fun in (
        lambda s: OWN["dynamic"].update(s, GRADS),
        lambda s: jaxscale.metrics({"a": s}),
        jaxscale.to_state_dict,
    ):
        assert_same_bits(fun(opaque), fun(state))
    # What is in it goes into an optimizer by `nnx.update`, as without a variable.
    assert_same_bits(jaxscale.from_state_dict(opaque, jaxscale.to_state_dict(opaque)), state)


def test_a_variable_may_hold_a_tree():
    # One that has the name by which a variable is written, too.
    for held in ({"a": W, "b": W}, {"value": W}):
        tree = {"x": nnx.Param(held)}
        written = {"x": jax.tree.map(lambda leaf: leaf + 1, held)}
        for saved in (written, {"x": {"value": written["x"]}}):
            back = jaxscale.from_state_dict(tree, saved)
            assert jax.tree.structure(back) == jax.tree.structure(tree)
            assert_same_bits(jax.tree.leaves(back), jax.tree.leaves(written))
        assert jaxscale.to_state_dict(tree)["x"].keys() == held.keys()
