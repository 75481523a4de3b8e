"""Exponents and formats against NumPy and real casts; scales against trying every one."""

import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from tables import assert_same_bits, cases
from test_leaves import LEAVES, float32_bits, nonzero, numbers, really_cast

from jaxscale import diagnostics

FORMATS = ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]
histogram, leaf_histograms = map(jax.jit, (diagnostics.histogram, diagnostics.leaf_histograms))


def boundaries():
    """Numbers at which any format rounds differently at scale 1, and their neighbours."""
    values = []
    for dtype in FORMATS:
        info = ml_dtypes.finfo(dtype)
        low, normal, most = map(float, (info.smallest_subnormal, info.smallest_normal, info.max))
        ulp = 2.0 ** (np.floor(np.log2(most)) - info.nmant)
        values += [low / 2, low, 1.5 * low, normal - low / 2, normal, most, most + ulp / 2]
    values = np.array(values, np.float32)
    return np.concatenate([values, np.nextafter(values, np.float32(0)), np.nextafter(values, 3e38)])


def counted(found, dtype, loss_scale=1.0):
    total = float(np.sum(found.counts))
    shares = diagnostics.shares(found, loss_scale=loss_scale)[dtype]
    return [round(share * total) for share in shares]


@cases("dtype", LEAVES, fast=["float32", "complex64", "float8_e4m3fn"])
def test_exponents_are_those_of_numpy(dtype):
    leaf = LEAVES[dtype]()
    expected, x = np.zeros(277), numbers(leaf)
    np.add.at(expected, np.frexp(nonzero(leaf))[1] - 1 + 149, 1)
    others = (np.sum(x == 0), np.sum(np.isinf(x)), np.sum(np.isnan(x)))
    for found in (diagnostics.histogram({"w": leaf}), histogram(leaf)):
        np.testing.assert_array_equal(np.sum(found.counts, axis=1), expected)
        assert tuple(map(int, (found.zero, found.inf, found.nan))) == others


# At -9 not bfloat16: NumPy would round its subnormal numbers twice, first to float32.
SCALED = [
    row
    for row in itertools.product(FORMATS, [-9, 0, 1, 7, 15, 24, 60])
    if row[1] >= 0 or row[0] != "bfloat16"
]


@cases(("dtype", "exponent"), SCALED, fast=[(dtype, 7) for dtype in FORMATS] + [("float16", -9)])
def test_shares_are_those_of_a_real_cast(dtype, exponent):
    # At the boundaries of that scale, and over the whole range.
    edges = boundaries()[boundaries() < 1e30] if exponent < 0 else boundaries()
    near = np.ldexp(edges.astype(np.float64), -exponent).astype(np.float32)
    leaf = np.concatenate([near, -edges, float32_bits(20_000)])
    scale = 2.0**exponent
    assert counted(histogram(leaf), dtype, scale) == really_cast(leaf, dtype, scale)


def test_histograms_add_up():
    parts = [float32_bits(100, seed) for seed in range(3)]
    both = histogram(np.concatenate(parts))
    assert_same_bits(sum(map(histogram, parts)), both)
    assert_same_bits(histogram({"a": parts[0], "b": [parts[1], None, parts[2]]}), both)
    assert_same_bits(sum(leaf_histograms(parts)), both)

    def add(total, x):
        return total + diagnostics.histogram(x), None

    empty = histogram(np.zeros(0, np.float32))
    assert_same_bits(jax.lax.scan(add, empty, np.stack(parts))[0], both)
    with pytest.raises(TypeError):
        both + 1
    # Histograms stacked by `vmap` are summed when they are read.
    stacked = jax.vmap(diagnostics.histogram)(np.stack(parts))
    assert diagnostics.shares(stacked) == diagnostics.shares(both)


def test_layers_are_grouped_by_depth():
    grads = {
        "a": {"w": jnp.full(3, 1e-9), "b": jnp.ones(1)},
        "c": [jnp.array([1.0, 1e6]), None, jnp.zeros(2)],
    }
    leaves = leaf_histograms(grads)
    lost = {}
    for depth in (None, 2, 1):
        layers = diagnostics.underflow(leaves, depth=depth).layers
        lost[depth] = {layer: shares["float16"].lost for layer, shares in layers.items()}
    assert lost[None] == lost[2] == {"a/b": 0, "a/w": 1, "c/0": 0.5, "c/2": 0}
    assert lost[1] == {"a": 0.75, "c": 0.5}
    scaled = diagnostics.underflow(leaves, depth=1, loss_scale=2.0**10)
    assert scaled.layers["a"]["float16"] == (0, 0.75, 0.25, 0)
    assert "at loss scale 2**10" in str(scaled)


def by_trying(leaf, dtype, tolerance):
    """The scales in the range, found by casting at every scale."""
    lost = {k: really_cast(leaf, dtype, 2.0**k) for k in range(-60, 61)}
    fits = [k for k in lost if not lost[k][3]]
    most = max(tolerance * len(nonzero(leaf)), min(lost[k][0] for k in fits))
    best = [k for k in fits if lost[k][0] <= most]
    return best, [k for k in best if not lost[k][0]]


SUGGESTED = itertools.product(
    ["float16", "float8_e4m3fn", "float8_e5m2"], [0.0, 0.01], [-30, -12, 4, 25], [2, 9]
)


@cases(
    ("dtype", "tolerance", "center", "spread"),
    SUGGESTED,
    fast=[("float16", 0.0, -30, 2), ("float16", 0.01, 4, 9), ("float8_e4m3fn", 0.01, -12, 2)],
)
def test_suggestions_are_the_best_of_all_scales(dtype, tolerance, center, spread):
    rng = np.random.default_rng(0)
    leaf = np.ldexp(rng.standard_normal(500), center + (rng.normal(0, spread, 500)).astype(int))
    leaf = leaf.astype(np.float32)
    best, lossless = by_trying(leaf, dtype, tolerance)
    found = diagnostics.suggest_scale(histogram(leaf), dtype=dtype, tolerance=tolerance)
    assert (found.lowest, found.highest) == (2.0 ** best[0], 2.0 ** best[-1])
    assert found.lossless == ((2.0 ** lossless[0], 2.0 ** lossless[-1]) if lossless else None)
    assert found.needed == (0 not in best)
    assert best[0] <= np.log2(found.suggested) <= best[-1]
    assert found.needed or found.suggested == 1
    shares = diagnostics.shares(histogram(leaf), loss_scale=found.suggested)[dtype]
    assert found.scaled == shares


def lost(flushed, overflowed):
    shares = f"{flushed} of the nonzero gradients are flushed to zero, and {overflowed} overflow"
    return f"loss scale: without one {shares}"


ZEROS = (
    "of all gradients are exactly 0: true zeros, or flushed before they were counted. To tell, "
    "compute them in float32 or at a high scale."
)
SENTENCES = {
    "not needed": ([1.0, 2.0], "float16 needs no loss scale: without one it loses nothing."),
    "wide": (
        [2.0**-40, 2.0**12],
        f"float16 gains nothing from a {lost('50.0%', '0%')}, and no scale loses less.",
    ),
    "no scale keeps all": (
        [2.0**-33, 2.0**-28, 2.0**9, 2.0**9],
        f"float16 needs a {lost('50.0%', '0%')}. Scales that flush at most 25.0% without an "
        "overflow: 2**4 to 2**6. Scales that lose nothing: none.",
    ),
    "nearly lossless": (
        [2.0**-40, *[2.0**-28] * 2000],
        f"float16 needs a {lost('100%', '0%')}. Scales that flush less than 0.1% without an "
        "overflow: 2**4 to 2**43. Scales that lose nothing: 2**16 to 2**43.",
    ),
    "zeros": (
        [0.0, 1.0, np.inf, np.nan],
        f"float16 needs no loss scale: without one it loses nothing. 25.0% {ZEROS} Inf or NaN, "
        "which are left out: 2.",
    ),
    "all zero": (
        [0.0],
        f"No gradient is finite and nonzero, so no loss scale can be suggested. 100% {ZEROS}",
    ),
}


@cases("name", SENTENCES)
def test_suggestions_in_words(name):
    values, expected = SENTENCES[name]
    assert str(diagnostics.suggest_scale(histogram(np.array(values, np.float32)))) == expected


W = jnp.ones(2)
H = histogram(W)
ERRORS = {
    r"power of two, got 3\.0.*2\.0\*\*1": lambda: diagnostics.shares(H, loss_scale=3.0),
    r"dtype=.*'float16'.*'float32'": lambda: diagnostics.suggest_scale(H, dtype="float32"),
    r"tolerance=.*between 0 and 1, got 2": lambda: diagnostics.suggest_scale(H, tolerance=2),
    r"`text_histogram\(loss_scale": lambda: diagnostics.text_histogram(H, loss_scale=0.3),
    r"underflow.*without any leaf.*leaf_histograms": lambda: diagnostics.underflow({}),
    r"depth=.*at least 1, got 0": lambda: diagnostics.underflow(H, depth=0),
    r"`leaf_histograms\(tree=.*without any leaf": lambda: diagnostics.leaf_histograms({}),
}
OF_TYPE = {
    r"`shares\(histogram=.*Array": lambda: diagnostics.shares(W),
    r"underflow.*float": lambda: diagnostics.underflow({"w": 1.0}),
    r"outside of `jit`": lambda: jax.jit(diagnostics.shares)(H),
}


@cases("message", [*ERRORS, *OF_TYPE])
def test_errors(message):
    with pytest.raises(TypeError if message in OF_TYPE else ValueError, match=message):
        (ERRORS | OF_TYPE)[message]()
