"""The bits of parameters that are kept in two halves, or rounded to nearest or at random."""

import functools
import math
from itertools import combinations, product

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tables import cases, each

import jaxscale
from jaxscale._storage import noise, rounding


def test_a_bfloat16_weight_moves_by_less_than_it_can_hold():
    tx = jaxscale.master_weights(optax.sgd(1.0))
    params = jnp.ones((1,), jnp.bfloat16)
    state = tx.init(params)
    grads = jnp.full((1,), 2**-10, "bfloat16")  # below 1 comes 1 - 2**-8
    for _ in range(4):
        params, state = jaxscale.apply_gradients(tx, grads, state, params)
    assert params == 1 - 2**-8


# float32 numbers by their upper 16 bits: all of them, and these lower ones. 0x8000 is a tie.
LOWS = [0, 1, 0x1000, 0x3FFF, 0x7FFF, 0x8000, 0x8001, 0xC000, 0xEFFF, 0xFFFF]
HIGHS = np.arange(2**16, dtype=np.uint32) << 16
HALVES = [jnp.bfloat16, jnp.float16]
RESTS = [-(2**15), -1, 0, 1, 2**15 - 1]


def numbers_of(low):
    return jnp.asarray((HIGHS | np.uint32(low)).view(np.float32))


def bits_of(array):
    array = np.asarray(array)
    return array.view({2: np.uint16, 4: np.uint32}[array.itemsize])


def is_nan(bits):
    return (bits & 0x7FFFFFFF) > 0x7F800000


@pytest.mark.device
@cases("low, compiled", product(LOWS, [False, True]))
def test_two_halves_are_the_number_bit_for_bit(low, compiled):
    split, join = rounding.split, rounding.join
    if compiled:
        split, join = jax.jit(split), jax.jit(join)
    numbers = numbers_of(low)
    halves = split(numbers)
    assert halves.high.dtype == jnp.bfloat16
    assert halves.rest.dtype == jnp.int16
    bits = bits_of(numbers)
    back = bits_of(join(*halves))
    numbers_are = ~is_nan(bits)
    np.testing.assert_array_equal(back[numbers_are], bits[numbers_are])
    # A NaN stays NaN or inf.
    high = bits_of(halves.high) & 0x7FFF
    assert (high[is_nan(bits)] >= 0x7F80).all()
    assert ((back[is_nan(bits)] & 0x7FFFFFFF) >= 0x7F800000).all()


@cases("low", LOWS)
def test_the_upper_half_is_rounded_to_nearest_and_ties_go_away_from_zero(low):
    numbers = numbers_of(low)
    bits = bits_of(numbers).astype(np.int64)
    magnitude = bits & 0x7FFFFFFF
    expected = (magnitude + 0x8000) >> 16 | (bits >> 16 & 0x8000)
    finite = magnitude < 0x7F800000
    high = bits_of(rounding.nearest(numbers, jnp.bfloat16))
    np.testing.assert_array_equal(high[finite], expected[finite])
    cast = bits_of(numbers.astype(jnp.bfloat16))
    if low != 0x8000:  # ties go to even there; a CPU flushes subnormal numbers
        normal = finite & (magnitude >= 0x00800000)
        np.testing.assert_array_equal(high[normal], cast[normal])


@cases("rest", RESTS)
def test_no_rest_makes_a_finite_parameter_nonfinite_or_moves_it_by_more_than_half(rest):
    highs = jnp.asarray((HIGHS >> 16).astype(np.uint16).view(jnp.bfloat16))
    joined = rounding.join(highs, jnp.full(highs.shape, rest, jnp.int16))
    finite = np.isfinite(np.asarray(highs.astype(jnp.float32)))
    assert np.isfinite(np.asarray(joined))[finite].all()
    again = bits_of(rounding.split(joined).high)
    difference = again.astype(int) - bits_of(highs).astype(int)
    # a zero that somebody set stays a zero, or less than half of the smallest number
    assert (difference[finite] == 0).all()


@cases("low, compiled", product(LOWS, [False, True]))
def test_float16_is_rounded_as_by_a_cast_and_saturates(low, compiled):
    nearest = functools.partial(rounding.nearest, dtype=jnp.float16)
    if compiled:
        nearest = jax.jit(nearest)
    numbers = numbers_of(low)
    rounded = np.asarray(nearest(numbers))
    wide = np.asarray(numbers)
    with np.errstate(all="ignore"):
        expected = wide.astype(np.float16)
    overflows = np.isinf(expected) & np.isfinite(wide)
    expected = np.where(overflows, np.copysign(65504, wide), expected)
    expected = expected.astype(np.float16)
    nan = np.isnan(wide)
    np.testing.assert_array_equal(bits_of(rounded)[~nan], bits_of(expected)[~nan])
    assert np.isnan(rounded[nan]).all()


# Copies.


@pytest.mark.worlds
@cases("dtype, rounded_by", product(HALVES, ["nearest", "cast"]))
def test_a_copy_survives_that_the_parameter_is_rounded_from(dtype, rounded_by):
    # ties among them
    copies = jnp.concatenate([numbers_of(0x8000), numbers_of(0x1000), numbers_of(1)])
    copies = copies[jnp.isfinite(copies) & (jnp.abs(copies) > 1e-30)]
    params = rounding.nearest(copies, dtype)
    if rounded_by == "cast":  # which does not saturate
        copies = copies[jnp.abs(copies) < 65000]
        params = copies.astype(dtype)
    kept = rounding.follow(copies, params)
    np.testing.assert_array_equal(bits_of(kept), bits_of(copies))


@cases("dtype", HALVES)
def test_a_copy_of_a_parameter_that_was_replaced_starts_again(dtype):
    copies = jnp.float32([1.0, 1.0, 1.0, 0.5, -1.0, jnp.nan, 1.0, 0.0])
    params = jnp.array([0, -1, 1.02, 2, 1, 1, jnp.inf, -3], dtype)
    kept = rounding.follow(copies, params)
    np.testing.assert_array_equal(kept, params.astype(jnp.float32))


# At random.


def neighbours(numbers, dtype):
    """The number itself, if the dtype holds it, or the two around it, below and above."""
    narrow = np.asarray(numbers).astype(dtype)
    wide = narrow.astype(np.float64)
    exact = np.asarray(numbers, np.float64)
    bits = narrow.view(np.uint16)
    toward_zero = np.where(np.abs(wide) > np.abs(exact), bits - 1, bits)
    away = np.where(toward_zero.view(dtype) == exact, toward_zero, toward_zero + 1)
    ends = toward_zero.view(dtype).astype(float), away.view(dtype).astype(float)
    return np.minimum(*ends), np.maximum(*ends)


RANDOM = {
    "ordinary": np.geomspace(1e-3, 1e3, 16, dtype=np.float32),
    "negative": -np.geomspace(1e-3, 1e3, 16, dtype=np.float32),
    "held": np.float32([0.0, -0.0, 1.0, -1.5, 2.0**-14, 65280]),
    "rarely up": np.float32([1 + 2.0**-18, 1 + 2.0**-20, -1 - 2.0**-17]),
    "rarely down": np.float32([1 + 2.0**-7 - 2.0**-20, 2 - 2.0**-20]),
    "subnormal float16": np.float32([6.0e-5, 3.1e-6, 4.4e-8, 1.7e-8, -2.9e-8]),
    "next to the end of float16": np.float32([65503.9, 65473.0, -65490.0]),
}


def draws(numbers, dtype, number=100_000):
    """Rounds numbers many times: an array of draws by numbers."""
    many = jnp.broadcast_to(numbers, (number, *numbers.shape))
    words = jnp.asarray([0x12345678, 0x9ABCDEF0], jnp.uint32)
    bits = noise.make_noise(words, many)
    rounded = jax.jit(rounding.stochastic, static_argnums=1)(many, dtype, bits)
    assert rounded.dtype == dtype
    return np.asarray(rounded)


@pytest.mark.worlds
@pytest.mark.device
@cases("name, dtype", product(RANDOM, HALVES), fast=each(RANDOM, HALVES))
def test_rounding_at_random_is_right_on_average(name, dtype):
    numbers = RANDOM[name]
    rounded = draws(jnp.asarray(numbers), dtype).astype(np.float64)
    below, above = neighbours(numbers, np.dtype(dtype))
    assert ((rounded == below) | (rounded == above)).all()
    width = above - below
    exact = numbers.astype(np.float64)
    share = np.where(width > 0, (exact - below) / np.where(width > 0, width, 1), 0)
    error = np.abs(rounded.mean(axis=0) - exact)
    standard = width * np.sqrt(share * (1 - share) / len(rounded))
    assert (error <= 4 * standard + 1e-12 * np.abs(exact)).all()
    if name == "held":
        expected = np.broadcast_to(numbers, rounded.shape)
        np.testing.assert_array_equal(np.signbit(rounded), np.signbit(expected))


LARGEST = {jnp.bfloat16: float(jnp.finfo(jnp.bfloat16).max), jnp.float16: 65504.0}


@pytest.mark.device
@cases("dtype", HALVES)
def test_no_finite_number_is_rounded_to_inf_and_what_is_not_finite_stays(dtype):
    largest = LARGEST[dtype]
    beyond = float(np.finfo(np.float32).max)
    ends = [largest, largest * (1 + 2**-10), beyond, math.inf]
    numbers = jnp.float32([*ends, *(-x for x in ends), math.nan])
    rounded = draws(numbers, dtype, 1000).astype(np.float64)
    expected = [largest, largest, largest, math.inf]
    expected += [-x for x in expected]
    np.testing.assert_array_equal(
        rounded, np.broadcast_to([*expected, math.nan], (1000, 9))
    )


@cases("dtype", HALVES)
def test_rounding_at_random_keeps_each_number_that_is_held(dtype):
    held = jnp.asarray((HIGHS >> 16).astype(np.uint16).view(dtype))
    wide = held.astype(jnp.float32)
    if dtype == jnp.bfloat16:  # by its bits, as a CPU flushes subnormal numbers
        wide = numbers_of(0)
    for bits in (0, 0xFFFFFFFF):
        bits = jnp.full(held.shape, bits, jnp.uint32)
        rounded = rounding.stochastic(wide, dtype, bits)
        nan = np.isnan(np.asarray(held, np.float32))
        np.testing.assert_array_equal(bits_of(rounded)[~nan], bits_of(held)[~nan])
        assert np.isnan(np.asarray(rounded, np.float32))[nan].all()


# The random bits.


def words_at(key_number):
    key = noise.make_key(key_number, [])
    return noise.draw_words(key, 1)[0]


def share_of_equal_bits(first, second):
    """Returns the share of equal bits of two arrays, in standard errors from one half."""
    differing = np.bitwise_count(np.asarray(first) ^ np.asarray(second))
    return (differing.mean() / 32 - 0.5) * 2 * math.sqrt(differing.size * 32)


@cases("seed", range(4))
def test_bits_are_independent_of_their_neighbours(seed):
    like = jnp.zeros((512, 512))
    bits = np.asarray(noise.make_noise(words_at(seed), like))
    each = (bits[..., None] >> np.arange(32, dtype=np.uint32)) & 1
    limit = 4.5  # standard errors, as many are looked at
    by_bit = (each.mean(axis=(0, 1)) - 0.5) * 2 * 512
    assert np.abs(by_bit).max() < limit
    pairs = {
        "next": (bits[:, 1:], bits[:, :-1]),
        "below": (bits[1:], bits[:-1]),
        "far": (bits[256:], bits[:256]),
    }
    for name, pair in pairs.items():
        assert abs(share_of_equal_bits(*pair)) < limit, name
    # Rounding reads the upper bits: pairs of them, of one place and the next, are even.
    octets = bits.ravel() >> 24
    table = np.histogram2d(octets[1:], octets[:-1], bins=64)[0]
    chi = ((table - table.mean()) ** 2 / table.mean()).sum()
    assert abs(chi - 4095) < 5 * math.sqrt(2 * 4095)


def words_of_steps(key, number=2):
    """The words that some steps draw for two arrays each."""
    words = []
    for _ in range(number):
        key, drawn = noise.split_key(key)
        words += [*noise.draw_words(drawn, 2)]
    return words


def keys_of_members(like):
    return jax.vmap(lambda x: noise.make_key(0, [x]))(jnp.zeros(3))


def keys_of_streams(like):
    """As weights and the state of their optimizer, which both begin with the seed 0."""
    return [noise.make_key(0, [like], stream=stream) for stream in range(3)]


@pytest.mark.worlds
@cases("keys_of", [keys_of_members, keys_of_streams], fast=[keys_of_members])
def test_steps_arrays_members_and_users_of_a_seed_draw_differently(keys_of):
    like = jnp.zeros(2**16)
    words = []
    for key in keys_of(like):
        words += words_of_steps(key)
    arrays = [np.asarray(noise.make_noise(word, like)) for word in words]
    for first, second in combinations(arrays, 2):
        assert abs(share_of_equal_bits(first, second)) < 4.5
        # as many as among random words: 2**16 * 2**16 / 2**32
        assert np.intersect1d(first, second).size < 10


def test_weights_and_the_state_of_their_optimizer_have_keys_of_their_own():
    inner = jaxscale.compact_state(optax.sgd(0.1))
    state = jaxscale.stochastic_rounding(inner).init({"w": jnp.zeros(2**16)})
    assert (state.weights.key != state.inner_state.key).any()


def test_members_of_a_population_of_populations_have_keys_of_their_own():
    def make(x):
        return noise.make_key(7, [x])

    keys = jax.jit(jax.vmap(jax.vmap(make)))(jnp.zeros((3, 3))).reshape(-1, 2)
    assert len(np.unique(np.asarray(keys), axis=0)) == 9


# Derivatives.


def roundings(dtype):
    """All ways to round, as functions of a float32 number."""
    bits = jnp.zeros((), jnp.uint32)
    yield lambda x: rounding.nearest(x, dtype)
    yield lambda x: rounding.stochastic(x, dtype, bits)
    yield lambda x: rounding.follow(x, rounding.nearest(x, dtype))
    yield lambda x: rounding.join(*rounding.split(x))


@pytest.mark.worlds
@cases("dtype, way", product(HALVES, range(4)))
def test_rounding_has_the_derivative_of_a_cast(dtype, way):
    rounded = list(roundings(dtype))[way]

    def value(x):
        return rounded(x).astype(jnp.float32) * 3

    x = jnp.float32(0.3)
    assert jax.grad(value)(x) == 3
    assert jax.jvp(value, (x,), (jnp.float32(2),))[1] == 6
    assert jax.jacfwd(value)(x) == 3
