"""States as the optimizer of Flax NNX holds them, each array in a variable, in all functions."""

import functools
import itertools

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx, serialization
from tables import POLICIES, assert_same_bits, cases

import jaxscale
from jaxscale import diagnostics, presets

pytestmark = pytest.mark.standard_promotion

OWN = {name: POLICIES[name] for name in ("noop", "fixed", "dynamic")} | {
    "fairseq": presets.fairseq(),
    "logmax": presets.openseq2seq_logmax(),
    "adaptive": jaxscale.AdaptiveLossScale(),
}


def is_variable(node):
    return isinstance(node, nnx.Variable)


def plain(tree):
    """The arrays that are in the variables of a tree."""
    return jax.tree.map(
        lambda node: node[...] if is_variable(node) else node, tree, is_leaf=is_variable
    )


@functools.cache
def transformation(policy):
    return jaxscale.loss_scaled(optax.sgd(0.1, momentum=0.5), OWN[policy], track_leaves=True)


def created(policy="dynamic"):
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    return model, nnx.Optimizer(model, transformation(policy), wrt=nnx.Param)


@nnx.jit
def one_step(model, optimizer, bad):
    def loss_fn(model):
        return jnp.sum(model(jnp.ones((1, 2)))) * bad

    grads = jaxscale.grad(loss_fn, optimizer.opt_state, transform=nnx.grad)(model)
    optimizer.update(model, grads)


def trained(steps, policy="dynamic"):
    model, optimizer = created(policy)
    for bad in steps:
        one_step(model, optimizer, jnp.float32(bad))
    return model, optimizer


def restored(policy="dynamic"):
    _, optimizer = created(policy)
    saved = jaxscale.to_state_dict(trained([1, jnp.inf, 1], policy)[1].opt_state)
    restored = jaxscale.from_state_dict(optimizer.opt_state, saved)
    nnx.update(optimizer.opt_state, nnx.state(restored))
    return optimizer


STATES = {
    "fresh": lambda policy: created(policy)[1],
    "stuck": lambda policy: trained([jnp.inf] * 3, policy)[1],
    "restored": restored,
}
W = jnp.array([1.0, 2.0])
GRADS = {"w": jnp.array([1.0, -3.0])}
BAD = {"w": jnp.array([1.0, jnp.nan])}


def loss_fn(w):
    return jnp.sum(w**2)


def complaint(*args, **kwargs):
    try:
        jaxscale.check(*args, max_consecutive=2, **kwargs)
    except jaxscale.LossScaleStuckError as error:
        return {str(error): 0}


def columns(state):
    history = diagnostics.History()
    history.append(state)
    return history.columns()


def plain_step(policy, state):
    """The arguments of a step that is made by hand: the state as it is, the others as arrays."""
    params = plain(nnx.state(created(policy)[0], nnx.Param))
    return jax.tree.map(jnp.ones_like, params), state, params


CALLS = {
    # name: of the name of a policy, and of the state of an optimizer with it
    "scale": lambda p, s: jaxscale.scale(s, W),
    "unscale": lambda p, s: jaxscale.unscale(s, W),
    "value_and_grad": lambda p, s: jaxscale.value_and_grad(loss_fn, s)(W),
    "grad": lambda p, s: jaxscale.grad(loss_fn, s)(W),
    "metrics": lambda p, s: jaxscale.metrics(s),
    "metrics of the scale": lambda p, s: jaxscale.metrics(s.scaling),
    "History.append": lambda p, s: columns(s),
    "check": lambda p, s: complaint(s),
    "check, with the optimizer": lambda p, s: complaint(s, tx=transformation(p)),
    "update": lambda p, s: OWN[p].update(s.scaling, GRADS),
    "update, overflown": lambda p, s: OWN[p].update(s.scaling, BAD),
    "adjust, with a size": lambda p, s: OWN[p].adjust(s.scaling, jnp.array(True), jnp.float32(3)),
    "adjust": lambda p, s: OWN[p].adjust(s.scaling, jnp.array(True)),
    "adjust, overflown": lambda p, s: OWN[p].adjust(s.scaling, jnp.array(False)),
    "to_state_dict": lambda p, s: jaxscale.to_state_dict(s),
    "to_state_dict of the scale": lambda p, s: jaxscale.to_state_dict(s.scaling),
    "from_state_dict": lambda p, s: jaxscale.from_state_dict(
        plain(created(p)[1].opt_state), jaxscale.to_state_dict(s)
    ),
    "to_torch": lambda p, s: presets.to_torch(OWN[p], s.scaling),
    "tx.update": lambda p, s: transformation(p).update(*plain_step(p, s)),
    "apply_gradients": lambda p, s: jaxscale.apply_gradients(
        transformation(p), *plain_step(p, s), value=jnp.float32(1)
    ),
    "trace": lambda p, s: {str(diagnostics.trace(loss_fn, s)(W)): 0},
}


@cases("name, policy", itertools.product(STATES, OWN), fast=[("stuck", "dynamic")])
def test_every_function_takes_a_state_in_variables_as_one_without(name, policy):
    optimizer = STATES[name](policy)
    state = optimizer.opt_state
    assert any(map(is_variable, jax.tree.leaves(state, is_leaf=is_variable)))
    for call, function in CALLS.items():
        if call in ("trace", "to_torch") and policy != "dynamic":
            continue  # slow, and the same for all; and there is only that rule
        result = function(policy, state)
        assert_same_bits(result, function(policy, plain(state)))
        assert not any(map(is_variable, jax.tree.leaves(result, is_leaf=is_variable))), call
    stuck = complaint(state) is not None
    assert stuck == (name == "stuck")
    assert_same_bits(jaxscale.metrics(optimizer), jaxscale.metrics(state))
    names = {key for key in jaxscale.metrics(state) if "leaves" in key}
    assert names == {"nonfinite_leaves/kernel", "nonfinite_leaves/bias"}


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
    "Flax, of arrays": lambda optimizer, _: serialization.to_state_dict(plain(optimizer.opt_state)),
    "NNX": lambda optimizer, _: nnx.to_pure_dict(nnx.state(optimizer))["opt_state"],
    "orbax": lambda optimizer, path: by_orbax(optimizer.opt_state, path),
    "orbax, of NNX": lambda optimizer, path: by_orbax(nnx.state(optimizer), path)["opt_state"],
}


@cases("way", WAYS, fast=["orbax, of NNX"])
def test_a_run_goes_on_from_what_was_saved(way, tmp_path):
    model, optimizer = trained([1, jnp.inf, 1])
    saved = WAYS[way](optimizer, tmp_path)
    same_model, fresh = created()
    nnx.update(same_model, nnx.state(model))
    for target in (plain(fresh.opt_state), fresh.opt_state):
        back = jaxscale.from_state_dict(target, saved)
        assert_same_bits(plain(back), plain(optimizer.opt_state))
        assert jax.tree.structure(back) == jax.tree.structure(target)
        nnx.update(fresh.opt_state, nnx.state(back))
        assert_same_bits(fresh.opt_state, optimizer.opt_state)
    for steps in (1, jnp.inf, 1):
        one_step(model, optimizer, jnp.float32(steps))
        one_step(same_model, fresh, jnp.float32(steps))
    assert_same_bits(fresh.opt_state, optimizer.opt_state)
    assert_same_bits(nnx.state(same_model), nnx.state(model))


@cases("policy", OWN, fast=["dynamic"])
def test_a_scale_is_put_back_by_itself(policy):
    model, optimizer = trained([1, jnp.inf], policy)
    before = plain(optimizer.opt_state)
    first = OWN[policy].init()
    nnx.update(optimizer.opt_state.scaling, nnx.state(first))
    assert_same_bits(plain(optimizer.opt_state), before._replace(scaling=first))
    one_step(model, optimizer, jnp.float32(1))
    expected = OWN[policy].adjust(first, jnp.array(True)).loss_scale
    if policy not in ("logmax", "adaptive"):  # which look at the gradients
        assert jaxscale.metrics(optimizer.opt_state)["loss_scale"] == expected


def test_variables_of_the_parameters_stay():
    # As one has them without an `nnx.Optimizer`: in parameters, gradients and moments alike.
    params, tx = nnx.state(created()[0], nnx.Param), transformation("dynamic")
    grads = jax.tree.map(jnp.ones_like, params)
    state = tx.init(params)
    updates, after = tx.update(grads, state, params)
    assert jax.tree.structure((updates, after)) == jax.tree.structure((params, state))
    expected = tx.update(*map(plain, (grads, state, params)))
    assert_same_bits(plain((updates, after)), expected)


class Opaque:
    """A variable that is a leaf, as those of Flax in its `hijax` mode and of Keras are."""

    def __init__(self, array):
        self.array = array

    def __jax_array__(self):
        return self.array


def test_a_variable_may_be_a_leaf():
    state = OWN["dynamic"].init()
    opaque = jax.tree.map(Opaque, state)
    moved = OWN["dynamic"].update(opaque, GRADS)
    assert_same_bits(moved, OWN["dynamic"].update(state, GRADS))
    assert_same_bits(jaxscale.metrics({"a": opaque}), jaxscale.metrics(state))
    assert_same_bits(jaxscale.to_state_dict(opaque), jaxscale.to_state_dict(state))
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
