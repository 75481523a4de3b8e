"""The policy that follows the largest gradient: its rule, its arithmetic, and what feeds it."""

import itertools
import json
import math

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import references
import simulator
from jax.sharding import PartitionSpec as P
from tables import assert_same_bits, avals

import jaxscale
from jaxscale import presets
from jaxscale._policies import adaptive

ADAPTIVE = jaxscale.AdaptiveLossScale
DEFAULT = ADAPTIVE()
SMALL = ADAPTIVE(
    init_scale=4.0, memory=3, period=5, search_period=2, min_scale=0.5, max_scale=2**20
)
BAD = None  # a step that overflows; others are given by their largest gradient

ENABLE_X64 = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64


def numbers(state):
    return tuple(leaf.item() for leaf in state)


def scanned(policy, state, sizes):
    """All states of a run. A size of inf stands for an overflow, one of -1 for no gradients."""

    def body(state, size):
        finite = size < jnp.inf
        seen = policy.adjust(state, finite, size)
        state = jaxscale.tree_where(size >= 0, seen, policy.adjust(state, finite))
        return state, state

    return jax.jit(lambda state, sizes: jax.lax.scan(body, state, sizes)[1])(state, sizes)


def trajectory(policy, state, sizes):
    states = []
    for size in sizes:
        largest = None if size < 0 else float(size)
        state = references.adaptive(policy, state, size < math.inf, largest)
        states.append(state)
    return states


def rows(states):
    return list(zip(*(leaf.tolist() for leaf in states), strict=True))


# The rule.


@st.composite
def policies(draw):
    levels = sorted(draw(st.integers(-14 * 4, 63)) / 4 for _ in range(3))
    scales = sorted(2.0 ** draw(st.integers(-20, 60)) for _ in range(3))
    counts = st.integers(1, 9) | st.integers(1, 2**31 - 1)
    return ADAPTIVE(
        **dict(zip(("min_level", "level", "max_level"), levels, strict=True)),
        **dict(zip(("min_scale", "init_scale", "max_scale"), scales, strict=True)),
        **{name: draw(counts) for name in ("memory", "period", "search_period")},
    )


SIZES = st.lists(
    st.sampled_from([-1.0, 0.0, math.inf, math.inf])
    | st.floats(-60, 40).map(lambda x: float(np.float32(2.0**x))),
    min_size=16,
    max_size=16,
)


@hypothesis.given(policies(), SIZES)
def test_it_follows_the_reference(policy, sizes):
    states = scanned(policy, policy.init(), jnp.array(sizes, jnp.float32))
    assert rows(states) == trajectory(policy, numbers(policy.init()), sizes)
    scales = np.asarray(states.loss_scale)
    assert set(np.frexp(scales)[0].tolist()) == {0.5}  # powers of two
    assert policy.min_scale <= scales.min() <= scales.max() <= policy.max_scale


@pytest.mark.slow
@hypothesis.given(
    st.integers(-30, 60),
    st.integers(-128 * 2**16, 128 * 2**16) | st.just(-256 * 2**16),
    st.integers(0, int(15.5 * 2**20)),
    st.integers(-128 * 2**16, 128 * 2**16) | st.just(-256 * 2**16),
    st.integers(0, 2**31 - 100),
    st.integers(0, 2**31 - 100) | st.none(),
    st.integers(0, 9),
    SIZES,
)
def test_it_follows_the_reference_from_any_state(
    exponent, peak, level, crest, finite_steps, held_steps, overflows, sizes
):
    held_steps = finite_steps if held_steps is None else held_steps
    state = adaptive.AdaptiveState(
        *(jnp.float32(x) for x in (2.0**exponent, peak / 2**16, level / 2**20, crest / 2**16)),
        *map(jnp.int32, (finite_steps, held_steps, overflows)),
    )
    states = scanned(DEFAULT, state, jnp.array(sizes, jnp.float32))
    assert rows(states) == trajectory(DEFAULT, numbers(state), sizes)


TRACES = simulator.recorded()


def test_it_follows_the_reference_bit_for_bit_along_every_trace():
    replays = simulator.replay(DEFAULT, TRACES)
    for name, (ceiling, largest, _) in TRACES.items():
        state, states = numbers(DEFAULT.init()), []
        sizes = np.exp2(largest).astype(np.float32).tolist()
        for fits, size in zip(ceiling.tolist(), sizes, strict=True):
            states.append(state)
            state = references.adaptive(DEFAULT, state, state[0] <= 2.0**fits, size)
        assert rows(replays[name].states) == states, name


# What happens, in words: a policy, its largest gradients, and the scale, peak and level after each.
# The level begins at 13 and rises by half in each of these steps, as long as it searches.
STORIES = {
    "a first gradient is believed at once, and the scale doubles": (
        [2.0**-5, 2.0**-5, 2.0**-5],
        [(8, -5, 13.5), (16, -5, 14), (32, -5, 14.5)],
    ),
    "a larger one raises the peak, which fades": (
        [1.0, 64.0, 1.0, 1.0],
        [(8, 0, 13.5), (16, 6, 14), (32, 4, 14.5), (64, 4 - 4 / 3, 15)],
    ),
    "the scale falls at once": (
        [2.0**-4, 2.0**12, 2.0**12],
        [(8, -4, 13.5), (4, 12, 14), (4, 12, 14.5)],
    ),
    "what has fitted raises the level": (
        [1.0, BAD, 2.0**11],
        [(8, 0, 13.5), (4, 0, 2.5), (1, 11, 11)],
    ),
    "an overflow while the scale rises tells the level": (
        [1.0, BAD, 1.0, 1.0],
        [(8, 0, 13.5), (4, 0, 2.5), (8, 0, 3), (8, 0, 3.5)],
    ),
    "overflows in a row": (
        [2.0**11, 2.0**11, BAD, BAD, BAD, BAD, 2.0**11],
        [(4, 11, 13.5), (8, 11, 14), (4, 11, 13), *[(0.5, 11, 13)] * 3, (1, 11, 13.2)],
    ),
    "before the first gradient nothing is learned": (
        [BAD, BAD, 2.0**-3],
        [(2, -256, 13), (0.5, -256, 13), (1, -3, 13.5)],
    ),
    "zeros teach nothing": (
        [1.0, 0.0, BAD, 0.0, 1.0],
        [(8, 0, 13.5), (8, 0, 13.5), (4, 0, 2.5), (4, 0, 2.5), (8, 0, 3)],
    ),
}


@pytest.mark.parametrize("story", STORIES)
def test_what_happens_when(story):
    sizes, expected = STORIES[story]
    given = [math.inf if size is BAD else size for size in sizes]
    states = scanned(SMALL, SMALL.init(), jnp.array(given, jnp.float32))
    np.testing.assert_allclose(np.stack(states[:3], 1), expected, atol=1e-4)


def test_after_an_overflow_the_level_waits_before_it_searches():
    policy = ADAPTIVE(init_scale=2.0**13, max_level=14.0, period=4, search_period=1)
    sizes = [1.0, 1.0, math.inf] + [1.0] * 6
    states = scanned(policy, policy.init(), jnp.array(sizes, jnp.float32))
    assert states.level.tolist() == [14, 14, 13, 13.25, 13.5, 13.75, 14, 14, 14]
    assert states.finite_steps.tolist() == [5, 6, 0, 1, 2, 3, 4, 5, 6]
    assert states.loss_scale.tolist() == [2.0**14] * 2 + [2.0**13] * 4 + [2.0**14] * 3


def test_single_overflows_that_repeat_make_room_until_a_rare_batch_passes():
    policy = ADAPTIVE(init_scale=2.0**20, max_level=13.0, memory=4, period=64)
    bad, usual, unseen = math.inf, 2.0**-7, adaptive.UNSEEN
    # The largest gradient, and then the exponent of the scale and the crest.
    expected = [
        (usual, 20, unseen),
        (bad, 19, unseen),  # once, or after 16 steps: the level is to blame
        *[(usual, 19, unseen)] * 16,
        (bad, 18, unseen),
        *[(usual, 18, unseen)] * 15,
        (bad, 14, -4),  # again: rare batches may be
        (usual, 14, -4),
        (bad, 1, 8),  # even larger ones
        (usual, 1, 8),
        (1.0, 2, 4),  # it falls half the way to one that passes, and a search begins
        *[(usual, e, 4) for e in (3, 4, 5, 5)],
        (bad, 4, 4),
        (usual, 4, 4),
        (bad, 0, 7),  # it was reached, so that it was almost right
        (usual, 0, 7),
        (2.0**5, 1, 6),
        *[(usual, 1, 6)] * 31,
        (usual, 2, 2.75),  # it was held for 32 steps
        (usual, 3, 0.3125),
        *[(2.0**4, 3, 4)] * 2,  # as large as one of these
        (usual, 3, 4),
    ]
    sizes, exponents, crests = (np.array(column) for column in zip(*expected, strict=True))
    states = scanned(policy, policy.init(), jnp.array(sizes, jnp.float32))
    assert np.log2(states.loss_scale).tolist() == exponents.tolist()
    np.testing.assert_allclose(states.crest, crests, atol=0.01)


def test_in_a_run_of_overflows_the_scale_falls_faster_and_faster():
    policy = ADAPTIVE(init_scale=2.0**50)
    states = scanned(policy, policy.init(), jnp.full(5, jnp.inf))
    assert np.log2(states.loss_scale).tolist() == [49, 41, 25, 9, 0]
    assert states.overflows.tolist() == [1, 2, 3, 4, 5]


def test_what_the_level_may_not_fall_the_peak_rises_and_fades_again():
    policy = ADAPTIVE(init_scale=2.0**13, level=13.0, min_level=13.0, memory=2, period=2**20)
    sizes = [1.0, math.inf, 1.0, 1.0, 1.0]
    states = scanned(policy, policy.init(), jnp.array(sizes, jnp.float32))
    assert states.level[1] == 13
    assert states.peak.tolist() == pytest.approx([0, 1, 0.5, 0.25, 0.125], abs=2e-3)
    assert states.loss_scale.tolist() == [2.0**13] + [2.0**12] * 4


def test_without_gradients_it_doubles_every_period_and_backs_off():
    policy = ADAPTIVE(init_scale=2.0**8, period=4, search_period=4)
    state, scales = policy.init(), []
    for finite in [True] * 12 + [False] + [True] * 4 + [False] * 2 + [True] * 4:
        state = policy.adjust(state, finite)
        scales.append(int(np.log2(state.loss_scale)))
    assert scales == [8] * 3 + [9] * 4 + [10] * 4 + [11, 10, 10, 10, 10, 11, 10, 2, 2, 2, 2, 3]


@pytest.mark.parametrize("grads", [None, {}, {"n": jnp.arange(3)}, [None]])
def test_a_tree_without_gradients_is_no_gradients(grads):
    state = DEFAULT.init()
    assert_same_bits(DEFAULT.update(state, grads)[0], DEFAULT.adjust(state, True))


@pytest.mark.parametrize("size", [0.0, 2.0**-140, -0.0])
def test_gradients_of_zero_leave_every_bit(size):
    state = DEFAULT.init()
    for start in (state, DEFAULT.adjust(DEFAULT.adjust(state, True, jnp.ones(())), False)):
        for adjust in (DEFAULT.adjust, jax.jit(DEFAULT.adjust)):
            after = adjust(start, True, jnp.float32(size))
            assert_same_bits(after, start)


# Arithmetic.


@pytest.mark.parametrize("transform", [lambda fun: fun, jax.jit])
@pytest.mark.parametrize("x64", [False, True])
def test_logarithms_and_powers_are_exact(transform, x64):
    exponents = np.arange(-126, 128)
    rng = np.random.default_rng(0)
    between = rng.uniform(1, 2, (100, len(exponents))).astype(np.float32)
    sizes = np.ldexp(between, exponents).astype(np.float32)
    with ENABLE_X64(x64):
        powers = transform(adaptive._power)(jnp.asarray(exponents, jnp.int32))
        logarithms = transform(adaptive._log2)(powers)
        others = transform(adaptive._log2)(jnp.asarray(sizes))
        assert powers.dtype == jnp.float32
        assert logarithms.dtype == others.dtype == jnp.int32
    assert powers.tolist() == [math.ldexp(1, e) for e in exponents.tolist()]
    assert logarithms.tolist() == (exponents * 2**16).tolist()
    expected = exponents * 2.0**16 + np.floor((between.astype(np.float64) - 1) * 2**16)
    assert (np.asarray(others) == expected).all()
    error = np.log2(sizes.astype(np.float64)) - np.asarray(others) / 2**16
    assert 0 <= error.min() <= error.max() < 0.0862


@pytest.mark.parametrize("finite", [True, False])
@pytest.mark.parametrize("bad", [0.0, -1.0, np.inf, np.nan, 3e38])
def test_a_restored_state_that_is_unusable_heals(bad, finite):
    for name in adaptive.AdaptiveState._fields[:4]:
        ruined = DEFAULT.init()._replace(**{name: jnp.float32(bad)})
        for _ in range(3):
            ruined = DEFAULT.adjust(ruined, finite, jnp.ones(()))
            assert DEFAULT.min_scale <= ruined.loss_scale <= DEFAULT.max_scale
            assert math.frexp(ruined.loss_scale)[0] == 0.5
            assert DEFAULT.min_level <= ruined.level <= DEFAULT.max_level
            assert -256 <= min(ruined.peak, ruined.crest) <= max(ruined.peak, ruined.crest) <= 128


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_a_restored_level_that_is_not_finite_starts_anew(bad):
    state = DEFAULT.init()._replace(level=jnp.float32(bad))
    assert_same_bits(DEFAULT.adjust(state, True), DEFAULT.adjust(DEFAULT.init(), True))


def test_a_restored_scale_that_is_not_a_power_of_two_becomes_one():
    state = DEFAULT.init()._replace(loss_scale=jnp.float32(65504))
    assert DEFAULT.adjust(state, False).loss_scale == 2.0**14
    assert DEFAULT.adjust(state, True, jnp.zeros(())).loss_scale == 2.0**15


# Gradients of every kind.

DTYPES = ["float16", "bfloat16", "float32", "complex64", "float8_e5m2", "float8_e4m3fn"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_tells_its_largest_magnitude(dtype):
    grads = {"w": jnp.array([0.0, -0.125, 0.0625]).astype(dtype), "n": jnp.arange(9), "x": None}
    state = DEFAULT.update(DEFAULT.init(), grads)[0]
    assert (state.peak, state.loss_scale) == (-3, 2.0**9)


def test_float64_and_mixed_dtypes():
    with ENABLE_X64(True):
        grads = {
            "a": jnp.array([2.0**-9], jnp.bfloat16),
            "b": jnp.array([2.0**-30, -(2.0**-7)], jnp.float64),
            "c": jnp.array([2.0**-8 * 1j], jnp.complex128),
        }
        update = jax.jit(DEFAULT.update)
        state = update(DEFAULT.init(), grads)[0]
        assert state.peak == -7
        assert avals(state) == avals(ADAPTIVE().init())
        huge = update(state, {"w": jnp.array(1e300, jnp.float64)})[0]
        assert (huge.loss_scale, huge.peak < 128) == (1, True)


def test_a_finite_verdict_on_gradients_that_are_not_changes_nothing_for_nan():
    # `adjust` believes its caller. NaN is not a size.
    state = DEFAULT.adjust(DEFAULT.init(), True, jnp.ones(()))
    assert_same_bits(DEFAULT.adjust(state, True, jnp.float32(-jnp.nan)), state)


# Transformations and the optimizer.


def test_members_of_a_population_have_a_scale_each():
    sizes = jnp.array([2.0**-3, jnp.inf, 0.0, 2.0**-9], jnp.float32)
    first = DEFAULT.adjust(DEFAULT.init(), True, jnp.array(2.0**-5))
    alone = [DEFAULT.update(first, size)[0] for size in sizes]
    together = jax.jit(jax.vmap(DEFAULT.update, (None, 0)))(first, sizes)[0]
    assert_same_bits(together, jax.tree.map(lambda *leaves: jnp.stack(leaves), *alone))


def collectives(jaxpr):
    """The collectives of a program, with the shapes that they exchange."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in ("pmin", "pmax", "psum", "psum2", "all_gather"):
            yield eqn.primitive.name, *(atom.aval.shape for atom in eqn.invars)
        for inner in jax.tree.leaves(list(eqn.params.values())):
            if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                yield from collectives(getattr(inner, "jaxpr", inner))


def test_devices_agree_by_one_message_as_with_the_default():
    mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")), ("data",))
    sizes = 2.0 ** -jnp.arange(8.0)[::-1]
    exchanged = {}
    for policy in (DEFAULT, jaxscale.DynamicLossScale()):

        def update(grads, policy=policy):
            tree = {"a": grads, "b": [grads / 2, jax.lax.complex(grads, grads)]}
            return policy.update(policy.init(), tree, axis_name="data")[0]

        agreed = jax.jit(jax.shard_map(update, mesh=mesh, in_specs=P("data"), out_specs=P()))
        exchanged[type(policy)] = sorted(collectives(jax.make_jaxpr(agreed)(sizes).jaxpr))
        if policy is DEFAULT:
            assert agreed(sizes).peak == 0
    assert exchanged[jaxscale.DynamicLossScale] == [("pmin", ())]
    assert exchanged[ADAPTIVE] == [("pmin", (1,))]


PARAMS = {"w": jnp.array([1.0, -2.0]), "b": jnp.array(0.5, jnp.bfloat16)}


def batches(*sizes):
    return [jax.tree.map(lambda p, size=size: jnp.full_like(p, size), PARAMS) for size in sizes]


def test_a_wrapped_optimizer_moves_it_and_a_bad_loss_does_not():
    tx = jaxscale.loss_scaled(optax.sgd(0.5), "adaptive")
    state = tx.init(PARAMS)
    expected = DEFAULT.init()
    losses = 1, 2, jnp.nan, 3
    for grads, loss in zip(batches(0.25, jnp.inf, jnp.nan, 0.5), losses, strict=True):
        _, state = jax.jit(tx.update)(grads, state, PARAMS, value=jnp.float32(loss))
        if np.isfinite(loss):
            expected = DEFAULT.update(expected, grads)[0]
        assert_same_bits(state.scaling, expected)
    assert (state.total_notfinite, state.total_notfinite_loss) == (2, 1)
    logged = jaxscale.metrics(state)
    assert (logged["loss_scale"], logged["peak"]) == (2.0**7, -1)
    assert logged["level"] == expected.level
    assert jaxscale.metrics({"policy alone": expected}) == expected._asdict()
    jaxscale.check(state, tx=tx)


def test_micro_batches_teach_it_too():
    tx = jaxscale.multi_steps(jaxscale.loss_scaled(optax.sgd(0.5), DEFAULT), 2)
    state = tx.init(PARAMS)
    for grads in batches(0.25, 0.5, jnp.inf):
        _, state = tx.update(grads, state, PARAMS)
    assert state.scaling.peak == -1
    assert state.scaling.overflows == 1


def test_stuck_at_the_floor_is_told_from_falling():
    tx = jaxscale.loss_scaled(optax.sgd(0.5), "adaptive")
    state = tx.init(PARAMS)
    for grads in batches(*[jnp.nan] * 4):
        _, state = tx.update(grads, state, PARAMS)
    with pytest.raises(jaxscale.LossScaleStuckError, match="scale of 1 scales nothing"):
        jaxscale.check(state, tx=tx, max_consecutive=3)


def test_a_state_of_another_policy_is_taken_over_by_its_scale():
    saved = jaxscale.to_state_dict(jaxscale.DynamicLossScale(init_scale=2.0**10).init())
    state = jaxscale.from_state_dict(DEFAULT.init(), saved)
    assert numbers(state) == (2.0**10, *numbers(DEFAULT.init())[1:])
    back = jaxscale.from_state_dict(
        jaxscale.DynamicLossScale().init(), jaxscale.to_state_dict(state)
    )
    assert numbers(back) == (2.0**10, 0, 1)


def test_a_state_has_distinct_buffers_and_keeps_its_types():
    state = DEFAULT.init()
    jax.jit(lambda state: state, donate_argnums=0)(ADAPTIVE().init())
    for size, finite in itertools.product([None, 0.0, 1.0], [True, False]):
        largest = None if size is None else jnp.float32(size)
        assert avals(DEFAULT.adjust(state, finite, largest)) == avals(state)
    python = adaptive.AdaptiveState(256.0, -5.0, 13.0, -5.0, 3, 3, 0)
    with ENABLE_X64(True):
        assert avals(DEFAULT.adjust(python, True, jnp.float32(1))) == avals(state)


def test_config_round_trips_through_json():
    config = json.loads(json.dumps(SMALL.get_config()))
    assert ADAPTIVE.from_config(config) == SMALL
    assert {type(value) for value in config.values()} == {float, int}
    assert ADAPTIVE(init_scale=np.float32(4), period=np.int64(3)) == ADAPTIVE(
        init_scale=4, period=3
    )


REJECTED = {
    "level too high": ({"level": 16}, ValueError, r"`AdaptiveLossScale\(level=.*below 16, got 16"),
    "level too low": ({"level": -15}, ValueError, r"level=.*at least -14.*got -15.*pass 13\.0"),
    "level NaN": ({"level": np.nan}, ValueError, r"`AdaptiveLossScale\(level=.*finite.*nan"),
    "level text": ({"level": "13"}, TypeError, r"`AdaptiveLossScale\(level=.*'13' of type str"),
    "min_level": ({"min_level": -20.0}, ValueError, r"min_level=.*got -20\.0"),
    "max_level": ({"max_level": 16.0}, ValueError, r"max_level=.*below 16, got 16\.0"),
    "levels": ({"level": 8, "min_level": 9}, ValueError, r"min_level <= level <= max_level, got 9"),
    "period": ({"period": 0}, ValueError, r"`AdaptiveLossScale\(period=.*at least 1, got 0"),
    "period float": ({"period": 2.5}, TypeError, r"period=.*integer.*got 2\.5.*pass an int"),
    "search": ({"search_period": -1}, ValueError, r"search_period=.*at least 1, got -1"),
    "memory": ({"memory": 0}, ValueError, r"memory=.*at least 1, got 0"),
    "bounds": (
        {"min_scale": 2, "max_scale": 1},
        ValueError,
        r"min_scale <= init_scale <= max_scale, got 2\.0, 256\.0 and 1\.0",
    ),
    "init above": ({"init_scale": 2.0**61}, ValueError, r"min_scale <= init_scale <= max_scale"),
    "no power": ({"init_scale": 1000}, ValueError, r"init_scale=.*power of two.*1000.*2\.0\*\*9"),
    "max no power": ({"max_scale": 65504}, ValueError, r"max_scale=.*power of two, got 65504"),
    "scale 0": ({"min_scale": 0}, ValueError, r"min_scale=.*normal range.*got 0"),
}


@pytest.mark.parametrize("case", REJECTED)
def test_bad_arguments(case):
    arguments, error, message = REJECTED[case]
    with pytest.raises(error, match=message):
        ADAPTIVE(**arguments)


def test_a_state_of_another_policy_is_not_taken():
    for other in (jaxscale.DynamicLossScale(), presets.openseq2seq_logmax()):
        with pytest.raises(TypeError, match=r"AdaptiveLossScale\.adjust.*`AdaptiveState`, got"):
            DEFAULT.adjust(other.init(), True)
        tx = jaxscale.loss_scaled(optax.sgd(0.1), DEFAULT)
        state = tx.init(PARAMS)._replace(scaling=other.init())
        with pytest.raises(TypeError, match="that of an AdaptiveLossScale is an AdaptiveState"):
            tx.update(PARAMS, state, PARAMS)


def test_a_run_that_sees_nothing_but_zeros_is_stuck():
    params = {"w": jnp.ones(3)}

    def run(policy, grads, steps):
        tx = jaxscale.loss_scaled(optax.sgd(0.1), policy)
        state = tx.init(params)
        step = jax.jit(lambda state: tx.update(grads, state, params)[1])
        for _ in range(steps):
            state = step(state)
        return state

    zeros = jax.tree.map(jnp.zeros_like, params)
    jaxscale.check(run("adaptive", zeros, 5), max_consecutive=5)
    with pytest.raises(jaxscale.LossScaleStuckError, match=r"0 in 6 steps at loss scale 256.*init"):
        jaxscale.check(run("adaptive", zeros, 6), max_consecutive=5)
    jaxscale.check(run("adaptive", params, 6), max_consecutive=5)
    jaxscale.check(run("dynamic", zeros, 6), max_consecutive=5)
