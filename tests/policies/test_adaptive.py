"""The policy that follows the largest gradient: its rule, in plain Python and in arrays."""

import functools
import itertools
import math

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import references
from tables import assert_same_bits

import jaxscale

ADAPTIVE = jaxscale.AdaptiveLossScale
DEFAULT = ADAPTIVE()
BAD = math.inf  # a step that overflows; others are given by their largest gradient
NO_GRADIENTS = -1.0
LENGTH = 16  # of a run: one program for all


def numbers(state):
    return tuple(leaf.item() for leaf in state)


@functools.partial(jax.jit, static_argnums=0)
def scanned(policy, state, sizes):
    """The states after each step, from a first one."""

    def body(state, size):
        finite = size < jnp.inf
        seen = policy.adjust(state, finite, size)
        state = jaxscale.tree_where(size >= 0, seen, policy.adjust(state, finite))
        return state, state

    return jax.lax.scan(body, state, sizes)[1]


def trajectory(policy, state, sizes):
    states = []
    for size in sizes:
        largest = None if size < 0 else float(size)
        state = references.adaptive(policy, state, size < math.inf, largest)
        states.append(state)
    return states


def by_step(states):
    return list(zip(*(leaf.tolist() for leaf in states), strict=True))


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
    st.sampled_from([NO_GRADIENTS, 0.0, BAD, BAD])
    | st.floats(-60, 40).map(lambda x: float(np.float32(2.0**x))),
    min_size=LENGTH,
    max_size=LENGTH,
)
# Each policy is a program of its own.
FEW = hypothesis.settings(max_examples=hypothesis.settings.default.max_examples // 5)


@FEW
@hypothesis.given(policies(), SIZES)
def test_it_follows_the_reference(policy, sizes):
    states = scanned(policy, policy.init(), np.float32(sizes))
    assert by_step(states) == trajectory(policy, numbers(policy.init()), sizes)
    assert set(np.frexp(states.loss_scale)[0].tolist()) == {0.5}  # powers of two
    assert policy.min_scale <= states.loss_scale.min()
    assert states.loss_scale.max() <= policy.max_scale


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
# Counters at their end; and between a threshold and its double or half: an overflow that repeats, a
# gradient that comes near the crest, a crest that is held no longer.
@hypothesis.example(8, 0, 0, 2**23, 2**31 - 5, 2**31 - 5, 0, [1.0] * LENGTH)
@hypothesis.example(8, 0, 2**23, 0, DEFAULT.period * 3 // 8, None, 0, [BAD] * LENGTH)
@hypothesis.example(4, 0, 2**23, 2**19, 9, 1, 0, [8.0] * LENGTH)
@hypothesis.example(4, 0, 2**23, 2**19, 10**6, DEFAULT.period * 3 // 4, 0, [1.0] * LENGTH)
def test_it_follows_the_reference_from_any_state(
    exponent, peak, level, crest, finite_steps, held_steps, overflows, sizes
):
    held_steps = finite_steps if held_steps is None else held_steps
    state = jaxscale.AdaptiveState(
        *(jnp.float32(x) for x in (2.0**exponent, peak / 2**16, level / 2**20, crest / 2**16)),
        *map(jnp.int32, (finite_steps, held_steps, overflows)),
    )
    states = scanned(DEFAULT, state, np.float32(sizes))
    assert by_step(states) == trajectory(DEFAULT, numbers(state), sizes)


adjust = jax.jit(DEFAULT.adjust)


def test_a_tree_without_gradients_is_no_gradients():
    state, update = DEFAULT.init(), jax.jit(DEFAULT.update)
    for grads in (None, {}, {"n": jnp.arange(3)}, [None]):
        assert_same_bits(update(state, grads)[0], adjust(state, True))


def test_what_has_no_size_leaves_every_bit():
    state = DEFAULT.init()
    for start in (state, adjust(adjust(state, True, jnp.float32(1)), False)):
        for size in (0.0, 2.0**-140, -0.0, -jnp.nan):  # `adjust` believes that they were finite
            assert_same_bits(adjust(start, True, jnp.float32(size)), start)


def test_a_restored_state_that_is_unusable_heals():
    fields = jaxscale.AdaptiveState._fields[:4]
    numbers = (0.0, -1.0, np.inf, np.nan, 3e38)
    for name, bad, finite in itertools.product(fields, numbers, (True, False)):
        ruined = DEFAULT.init()._replace(**{name: jnp.float32(bad)})
        for _ in range(3):
            ruined = adjust(ruined, finite, jnp.float32(1))
            assert DEFAULT.min_scale <= ruined.loss_scale <= DEFAULT.max_scale
            assert math.frexp(ruined.loss_scale)[0] == 0.5
            assert DEFAULT.min_level <= ruined.level <= DEFAULT.max_level
            assert -256 <= min(ruined.peak, ruined.crest) <= max(ruined.peak, ruined.crest) <= 128


def test_a_restored_state_starts_anew_or_from_the_power_of_two_below():
    first = DEFAULT.init()
    for bad in (np.inf, -np.inf, np.nan):
        assert_same_bits(adjust(first._replace(level=jnp.float32(bad)), True), adjust(first, True))
    state = first._replace(loss_scale=jnp.float32(65504))
    assert adjust(state, False).loss_scale == 2.0**14
    assert adjust(state, True, jnp.float32(0)).loss_scale == 2.0**15


REJECTED = {
    "level too high": ({"level": 16}, r"`AdaptiveLossScale\(level=.*below 16, got 16.*pass 13\.0"),
    "levels": ({"level": 8, "min_level": 9}, r"min_level <= level <= max_level, got 9"),
    "scales": ({"min_scale": 2, "max_scale": 1}, r"<= max_scale, got 2\.0, 256\.0 and 1"),
    "no power": ({"init_scale": 1000}, r"init_scale=.*power of two.*1000.*2\.0\*\*9"),
} | {name: ({name: -20}, rf"`AdaptiveLossScale\({name}=.*got -20") for name in DEFAULT.get_config()}


@pytest.mark.parametrize("case", REJECTED)
def test_bad_arguments(case):
    arguments, message = REJECTED[case]
    with pytest.raises(ValueError, match=message):
        ADAPTIVE(**arguments)
