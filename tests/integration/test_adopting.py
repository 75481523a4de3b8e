"""A run begun with a bare optimizer goes on with a wrapped one, and the other way round."""

import itertools

import jax
import optax
import pytest
from flax import config
from flax.training import checkpoints, train_state
from tables import INNERS, PARAMS, assert_same_bits, cases, gradients, wide

import jaxscale
import jaxscale.flax

pytestmark = pytest.mark.standard_promotion

GRADS = gradients(0, 6)


def run(tx, opt_state, params, grads):
    for each in grads:
        # What `loss_scaled` does to the dtypes, a bare optimizer is given.
        params, opt_state = jaxscale.apply_gradients(tx, wide(each), opt_state, params)
    return params, opt_state


WIDE = wide(PARAMS)
# Every way of each to the other.
ADOPT = {
    "in memory": lambda fresh, old: fresh._replace(inner_state=old),
    "saved": lambda fresh, old: fresh._replace(
        inner_state=jaxscale.from_state_dict(
            fresh.inner_state, jaxscale.to_state_dict({"s": old})["s"]
        )
    ),
}
LEAVE = {
    "in memory": lambda fresh, old: old.inner_state,
    "saved": lambda fresh, old: jaxscale.from_state_dict(
        fresh, jaxscale.to_state_dict(old)["inner_state"]
    ),
}


@cases(
    "inner, way",
    itertools.product([name for name in INNERS if name != "multi_steps"], ADOPT),
    fast=[("momentum", "saved")],
)
def test_a_run_goes_on_as_if_nothing_had_changed(inner, way):
    bare = INNERS[inner]
    wrapped = jaxscale.loss_scaled(bare)
    expected = run(bare, bare.init(WIDE), WIDE, GRADS)
    params, opt_state = run(bare, bare.init(WIDE), WIDE, GRADS[:2])
    opt_state = ADOPT[way](wrapped.init(WIDE), opt_state)
    params, opt_state = run(wrapped, opt_state, params, GRADS[2:4])
    opt_state = LEAVE[way](bare.init(WIDE), opt_state)
    assert_same_bits(run(bare, opt_state, params, GRADS[4:]), expected)


BARE, WRAPPED = optax.adam(0.1), jaxscale.loss_scaled(optax.adam(0.1))
MESSAGES = {
    "a bare state for a training step": (lambda: jaxscale.train_step(lambda p: p["w"].sum(), WRAPPED)(WIDE, BARE.init(WIDE)), r"train_step.*tx\.init\(params\)\._replace\(inner_state=state\)"),
    "a bare state in a TrainState": (lambda: (flax_state(WRAPPED, jaxscale.flax.TrainState) .replace(opt_state=BARE.init(WIDE)) .apply_gradients(grads=GRADS[0])), r"got tuple\. To go on with.*tx\.init\(params\)\._replace\(inner_state=state\)"),
    "a saved bare state": (lambda: jaxscale.from_state_dict(WRAPPED.init(WIDE), jaxscale.to_state_dict(BARE.init(WIDE))), r"saved at / .*was not wrapped.*target\._replace\(inner_state="),
    "a saved bare state, in a tree": (lambda: jaxscale.from_state_dict({"opt": WRAPPED.init(WIDE)}, jaxscale.to_state_dict({"opt": BARE.init(WIDE)})), r"saved at /opt .*was not wrapped"),
    "a saved wrapped state": (lambda: jaxscale.from_state_dict(BARE.init(WIDE), jaxscale.to_state_dict(WRAPPED.init(WIDE))), r'`loss_scaled` optimizer, and the target is not: .*"inner_state"'),
}  # fmt: skip


@pytest.mark.parametrize("name", MESSAGES)
def test_adoption_error_messages(name):
    call, message = MESSAGES[name]
    with pytest.raises((TypeError, ValueError), match=message):
        call()


def flax_state(tx, cls):
    return cls.create(apply_fn=None, params=WIDE, tx=tx)


@cases("name", ["adam", "momentum", "sgd"], fast=["momentum"])
def test_a_flax_checkpoint_that_lost_the_optimizer_is_seen(name, tmp_path, recwarn):
    inner = INNERS[name]
    old = flax_state(inner, train_state.TrainState)
    for grads in GRADS[:3]:
        old = old.apply_gradients(grads=wide(grads))
    fresh = flax_state(jaxscale.loss_scaled(inner), jaxscale.flax.TrainState)
    before = config.flax_use_orbax_checkpointing
    config.update("flax_use_orbax_checkpointing", True)
    try:
        checkpoints.save_checkpoint(tmp_path, old, 3)
        restored = checkpoints.restore_checkpoint(tmp_path, fresh)
        bare = checkpoints.restore_checkpoint(tmp_path, old)
    finally:
        config.update("flax_use_orbax_checkpointing", before)
    assert restored.step == 3
    assert_same_bits(restored.opt_state, fresh.opt_state)  # silently
    recwarn.clear()
    adopted = restored.replace(opt_state=fresh.opt_state._replace(inner_state=bare.opt_state))
    jaxscale.check(fresh)
    jaxscale.check(adopted)
    jaxscale.check(adopted.apply_gradients(grads=GRADS[4]))
    assert not [each for each in recwarn if "`check`" in str(each.message)]
    if not jax.tree.leaves(fresh.opt_state.inner_state):
        return  # nothing was lost
    with pytest.warns(UserWarning, match=r"made 3 steps.*only 0.*_replace\(inner_state="):
        jaxscale.check(restored)
