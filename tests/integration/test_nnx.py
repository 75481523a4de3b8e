"""States as the optimizer of Flax NNX holds them, each array in a variable, in all functions."""

import functools

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx, serialization
from tables import assert_same_bits, cases

import jaxscale
from jaxscale import diagnostics, presets

pytestmark = pytest.mark.standard_promotion

OWN = {
    "noop": jaxscale.NoOpLossScale(),
    "dynamic": jaxscale.DynamicLossScale(growth_interval=2),
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


W = jnp.array([1.0, 2.0])
GRADS = {"w": jnp.array([1.0, -3.0])}


def loss_fn(w):
    return jnp.sum(w**2)


def complaint(*args, **kwargs):
    with pytest.raises(jaxscale.LossScaleStuckError) as error:
        jaxscale.check(*args, max_consecutive=2, **kwargs)
    return {str(error.value): 0}


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
    "check": lambda p, s: complaint(s, tx=transformation(p)),
    "update": lambda p, s: OWN[p].update(s.scaling, GRADS),
    "adjust": lambda p, s: OWN[p].adjust(s.scaling, jnp.array(False), jnp.float32(3)),
    "to_state_dict": lambda p, s: jaxscale.to_state_dict(s),
    "from_state_dict": lambda p, s: jaxscale.from_state_dict(
        plain(created(p)[1].opt_state), jaxscale.to_state_dict(s)
    ),
    "tx.update": lambda p, s: transformation(p).update(*plain_step(p, s)),
    "apply_gradients": lambda p, s: jaxscale.apply_gradients(
        transformation(p), *plain_step(p, s), value=jnp.float32(1)
    ),
}
OF_ONE_POLICY = {  # as there is only that rule, and as it is slow
    "to_torch": lambda p, s: presets.to_torch(OWN[p], s.scaling),
    "trace": lambda p, s: {str(diagnostics.trace(loss_fn, s)(W)): 0},
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
    for bad in (1, jnp.inf, 1):
        one_step(model, optimizer, jnp.float32(bad))
        one_step(same_model, fresh, jnp.float32(bad))
    assert_same_bits(fresh.opt_state, optimizer.opt_state)
    assert_same_bits(nnx.state(same_model), nnx.state(model))


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
