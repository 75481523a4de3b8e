"""States that earlier releases wrote are read, and their runs go on with the same bits."""

import gzip
import pathlib
import pickle
from itertools import product
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest
import released_states
from flax import nnx
from released_states import NEXT_FACTOR, counters, step
from tables import assert_close, assert_same_bits, avals, cases

import jaxscale
from jaxscale._state.scale import AdaptiveState

pytestmark = pytest.mark.standard_promotion

FOLDER = pathlib.Path(__file__).parent / "releases"
WRITTEN = {
    file.name.removesuffix(".pickle.gz"): pickle.loads(
        gzip.decompress(file.read_bytes())
    )
    for file in FOLDER.glob("*.pickle.gz")
}
OPTIMIZERS = released_states.make_optimizers()
# Some of them wrote states of policies that have gone since.
ROWS = [
    (release, name)
    for release, written in WRITTEN.items()
    for name in written["dicts"]
    if name in OPTIMIZERS
]
GONE = [
    (release, name)
    for release, written in WRITTEN.items()
    for name in written["dicts"]
    if name not in OPTIMIZERS
]


def from_dict(release, name):
    tx, params = OPTIMIZERS[name]
    fresh = tx.init(params)
    return jaxscale.from_state_dict(fresh, WRITTEN[release]["dicts"][name])


def from_pickle(release, name):
    state = pickle.loads(WRITTEN[release]["pickles"][name])
    return jax.tree.map(jnp.asarray, state)


def test_a_state_of_0_4_goes_on_after_as_many_steps():
    params = jnp.ones(2)
    fresh = jaxscale.loss_scaled(optax.sgd(0.1)).init(params)
    saved = {"version": 1, "scaling": {"loss_scale": 512.0}, "total_steps": 7}
    state = jaxscale.from_state_dict(fresh, saved | {"inner_state": None})
    assert (state.scaling.loss_scale, state.total_steps) == (512, 7)


def test_each_release_has_a_file():
    assert sorted(WRITTEN) == ["0.3.0", "0.4.0", "0.5.0", "0.6.0"]


@pytest.mark.worlds
@cases("release, name", ROWS)
def test_a_dictionary_goes_on_as_in_its_release(release, name):
    written = WRITTEN[release]
    state = from_dict(release, name)
    jaxscale.check(state)
    tx, _ = OPTIMIZERS[name]
    params, next_state = step(tx, written["before"][name], state, NEXT_FACTOR)
    expected_params, expected_counters, expected_scale = written["after"][name]
    assert_same_bits(params, expected_params)
    assert_same_bits(counters(next_state), expected_counters)
    assert next_state.scaling.loss_scale == expected_scale
    assert avals(next_state) == avals(state)


@pytest.mark.worlds
@pytest.mark.filterwarnings("ignore:.*`AdaptiveLossScale`")
@cases("release, name", GONE)
def test_a_run_whose_policy_has_gone_goes_on_at_its_scale(release, name):
    written = WRITTEN[release]
    saved = written["dicts"][name]
    tx, params = OPTIMIZERS["dynamic"]
    state = jaxscale.from_state_dict(tx.init(params), saved)
    assert state.scaling.loss_scale == saved["scaling"]["loss_scale"]
    params, next_state = step(tx, written["before"][name], state, NEXT_FACTOR)
    expected_params, expected_counters, _ = written["after"][name]
    assert_same_bits(counters(next_state), expected_counters)
    assert_close(params, expected_params)


@pytest.mark.parametrize("release", WRITTEN)
def test_what_is_dropped_of_an_adaptive_scale_is_said(release):
    tx, params = OPTIMIZERS["dynamic"]
    fresh = {"opt": tx.init(params)}
    of_pickle = jaxscale.to_state_dict(from_pickle(release, "adaptive"))
    message = "/opt/scaling has the state of an `AdaptiveLossScale`.*scale is kept"
    states = []
    for saved in (WRITTEN[release]["dicts"]["adaptive"], of_pickle):
        with pytest.warns(UserWarning, match=message) as caught:
            states.append(jaxscale.from_state_dict(fresh, {"opt": saved}))
        assert [warning.filename for warning in caught] == [__file__]
    assert_same_bits(*states)


class Peaks(NamedTuple):
    """A state of a user's own. Its `peak` is a number, where that of an adaptive one is a power."""

    is_loss_scale_state = True

    loss_scale: jax.Array
    peak: jax.Array


@pytest.mark.filterwarnings("ignore:.*`AdaptiveLossScale`")
def test_nothing_but_the_scale_of_an_adaptive_state_is_read_into_another():
    saved = WRITTEN["0.6.0"]["dicts"]["adaptive"]["scaling"]
    restored = jaxscale.from_state_dict(Peaks(jnp.float32(1), jnp.float32(3)), saved)
    assert restored == (saved["loss_scale"], 3)
    own = AdaptiveState(*map(jnp.zeros_like, saved.values()))  # as a copy of it has
    restored = jaxscale.from_state_dict({"own": own}, {"own": saved})
    assert restored["own"] == tuple(saved.values())


# 0.3.0 had a longer state for spikes.
@cases("release, name", [row for row in ROWS if row != ("0.3.0", "spikes")])
def test_a_pickle_is_what_the_dictionary_is(release, name):
    state = from_pickle(release, name)
    expected = from_dict(release, name)
    assert jax.tree.structure(state) == jax.tree.structure(expected)
    assert_same_bits(state, expected)
    assert jaxscale.metrics(state).keys() == jaxscale.metrics(expected).keys()


def types(tx, params):
    return jax.eval_shape(tx.init, params)


def variables(tx, params):
    model = nnx.Dict({name: nnx.Param(leaf) for name, leaf in params.items()})
    return nnx.Optimizer(model, tx, wrt=nnx.Param).opt_state


@cases("target, row", product([types, variables], ROWS))
def test_a_dictionary_is_read_into(target, row):
    release, name = row
    fresh = target(*OPTIMIZERS[name])
    state = jaxscale.from_state_dict(fresh, WRITTEN[release]["dicts"][name])
    assert_same_bits(jax.tree.leaves(state), jax.tree.leaves(from_dict(*row)))


# The fields of 0.4.0, by their places, which a pickle goes by.
ADAPTIVE = "loss_scale peak level crest finite_steps held_steps overflows"
FIELDS = {
    jaxscale.LossScaleState: "loss_scale growth_tracker hysteresis_tracker",
    AdaptiveState: ADAPTIVE,
    jaxscale.MultiStepsState: (
        "mini_step gradient_step counted acc_grads acc_value inner_opt_state divisor"
    ),
    jaxscale.SpikeState: (
        "losses grad_norms loss_count norm_count total_spikes spike_count loss_threshold "
        "norm_threshold loss_deviation norm_deviation total_norm_overflows cooldown"
    ),
    jaxscale.LossScaledState: (
        "scaling inner_state step_applied notfinite_count total_notfinite "
        "total_notfinite_loss total_steps total_retries total_exhausted backoff_count "
        "skip_rate row_notfinite_loss spikes nonfinite_leaves grad_norm weights"
    ),
}


@pytest.mark.parametrize("state", FIELDS, ids=lambda state: state.__name__)
def test_a_later_field_comes_last_and_has_a_default(state):
    fields = FIELDS[state].split()
    assert state._fields[: len(fields)] == tuple(fields)
    assert set(state._fields[len(fields) :]) <= set(state._field_defaults)
