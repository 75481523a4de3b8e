"""Counts and exponents against NumPy and real casts, for every dtype and every way to run."""

import functools
import itertools
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tables import PASSIVE, assert_same_bits, cases
from traced_losses import assert_fields
from training import x64

import jaxscale
from jaxscale import diagnostics

SCALES = [1.0, 2.0**-3, 2.0**15, 2.0**40]
FORMATS = ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]
histogram = jax.jit(diagnostics.histogram)
count_leaves = functools.partial(diagnostics.histogram, by_leaf=True)


def float32_bits(number, seed=0):
    """Float32 numbers with random bits: all sizes, subnormal numbers, inf and NaN."""
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 2**32, number, np.uint32)
    bits[::5] &= np.uint32(0x807FFFFF)  # subnormal
    bits[::7] |= np.uint32(0x7F800000)  # NaN
    special = [
        0.0,
        -0.0,
        np.inf,
        -np.inf,
        2.0**-149,
        2.0**-126,
        np.finfo(np.float32).max,
    ]
    return np.concatenate([np.array(special, np.float32), bits.view(np.float32)])


def neighbors(values):
    """The float32 numbers next to some numbers, on both sides."""
    values = np.array(values, np.float32)
    below = np.nextafter(values, np.float32(0))
    above = np.nextafter(values, np.float32(np.inf))
    return np.concatenate([below, above])


def edges_of(dtype):
    """Numbers at which a format rounds differently, or begins another range."""
    info = ml_dtypes.finfo(dtype)
    subnormal = float(info.smallest_subnormal)
    normal = float(info.smallest_normal)
    largest = float(info.max)
    spacing = 2.0 ** (np.floor(np.log2(largest)) - info.nmant)
    of_subnormals = [subnormal / 2, subnormal, 1.5 * subnormal]
    return [
        *of_subnormals,
        normal - subnormal / 2,
        normal,
        largest,
        largest + spacing / 2,
    ]


def around_float16():
    """The neighbors of numbers at which float16 rounds differently at some scale."""
    edges = [*edges_of("float16"), 2.0**16]
    return neighbors([edge / scale for edge in edges for scale in SCALES])


def every(dtype):
    """Every number of a format of 8 or 16 bits."""
    bits = jnp.finfo(dtype).bits
    return np.arange(2**bits, dtype=f"uint{bits}").view(jnp.dtype(dtype))


WHOLE_FORMATS = [*FORMATS, "float8_e4m3fnuz"]
DTYPES = ["float32", "complex64", *WHOLE_FORMATS]


def leaf_of(dtype):
    """A leaf with all sizes of numbers."""
    if dtype == "float32":
        return np.concatenate([float32_bits(20_000), around_float16()])
    if dtype == "complex64":
        return float32_bits(4001).view(np.complex64)
    return every(dtype)


def numbers(leaf):
    """The numbers of a leaf in float64; a complex element holds two."""
    x = np.asarray(leaf)
    if np.iscomplexobj(x):
        x = np.stack([x.real, x.imag])
    with np.errstate(invalid="ignore"):  # of signaling NaNs
        return x.astype(np.float64)


def nonzero(leaf):
    """The magnitudes of the finite nonzero numbers of a leaf."""
    x = np.abs(numbers(leaf))
    return x[np.isfinite(x) & (x > 0)]


class Casts(NamedTuple):
    """How many numbers a format makes 0, a subnormal or a normal number, or inf or NaN."""

    flushed: int
    subnormal: int
    normal: int
    overflowed: int


def really_cast(leaf, dtype, loss_scale):
    """Casts the finite nonzero numbers of a leaf, and counts what becomes of them."""
    # In float64, multiplying by a power of two is exact, so that the cast is the only rounding.
    with np.errstate(all="ignore"):
        x = (nonzero(leaf) * loss_scale).astype(dtype).astype(np.float64)
    is_finite = np.isfinite(x)
    is_normal = x >= float(ml_dtypes.finfo(dtype).smallest_normal)
    return Casts(
        flushed=np.count_nonzero(x == 0),
        subnormal=np.count_nonzero((x > 0) & ~is_normal),
        normal=np.count_nonzero(is_finite & is_normal),
        overflowed=np.count_nonzero(~is_finite),
    )


def reference(leaf, loss_scale):
    """The numbers of a row of the table, found by casting to float16."""
    x = numbers(leaf)
    casts = really_cast(leaf, "float16", loss_scale)
    largest = nonzero(leaf).max(initial=0)
    return {
        "size": x.size,
        "nan": np.count_nonzero(np.isnan(x)),
        "inf": np.count_nonzero(np.isinf(x)),
        "zero": np.count_nonzero(x == 0),
        "flushed": casts.flushed,
        "subnormal": casts.subnormal,
        "overflowed": casts.overflowed,
        "largest": 2.0 ** np.floor(np.log2(largest)) if largest else 0.0,
    }


def row_of(leaf, loss_scale=1.0):
    """The numbers in the table of one leaf."""
    (row,) = tabulate({"w": leaf}, loss_scale).rows
    fields = row._asdict()
    assert fields.pop("path") == "w"
    return fields


def tabulate(grads, loss_scale=1.0):
    # Not in one program: that of a large tree takes long to compile.
    return diagnostics.table(count_leaves(grads), loss_scale=loss_scale)


@cases(
    ("dtype", "loss_scale"),
    itertools.product(DTYPES, SCALES),
    fast=[
        ("float32", 1.0),
        ("complex64", 2.0**-3),
        ("float16", 2.0**15),
        ("bfloat16", 2.0**40),
    ],
)
def test_the_counts_of_a_row_are_those_of_a_real_cast(dtype, loss_scale):
    leaf = leaf_of(dtype)
    assert row_of(leaf, loss_scale) == reference(leaf, loss_scale)


def test_float64_is_rounded_to_float32():
    numbers = np.array([1e300, 5e-324, 1 / 3, np.nan, -np.inf])
    with np.errstate(all="ignore"):
        rounded = numbers.astype(np.float32)
    with x64():
        assert_same_bits(histogram(numbers), histogram(rounded))


# What has a dtype and no numbers: a scalar type, and the shape of an array.
ODD = {"scalar type": jnp.float16, "shape": jax.ShapeDtypeStruct((2,), jnp.float32)}


def test_what_is_not_a_gradient_is_left_out():
    grads = {"w": jnp.ones((2, 3)), "scalar": 3.0, "empty": jnp.zeros((0, 4))}
    overwritten = {"amax": jnp.array(jnp.nan)}
    others = PASSIVE | ODD | {"_overwrite_with_gradient": overwritten}
    table = tabulate(grads | others)
    rows = {row.path: row for row in table.rows}
    assert set(rows) == {"scalar", "w", "empty"}
    assert_fields(rows["w"], size=6, largest=1)
    assert_fields(rows["scalar"], size=1, largest=2)
    assert_fields(rows["empty"], size=0, largest=0)
    histograms = count_leaves(grads | others)
    assert len(jax.tree.leaves(histograms)) == 4 * len(rows)


@cases("name", ODD)
def test_what_only_has_a_dtype_is_told_by_its_type(name):
    kind = type(ODD[name]).__name__
    with pytest.raises(ValueError, match=rf"got only `{kind}`\. Pass"):
        diagnostics.histogram({"odd": ODD[name]})


@cases("name", ODD, fast=["scalar type"])
def test_what_only_has_a_dtype_reaches_the_loss_as_it_is(name):
    odd = ODD[name]

    def fun(params, batch, *, more=()):
        for value in (params["odd"], batch["odd"], *more):
            assert value is odd
        loss = jnp.sum(params["w"] * batch["x"]).astype(jnp.float16)
        return loss, {"odd": odd}

    params = {"w": jnp.ones(2), "odd": odd}
    batch = {"x": jnp.array([1.0, 2.0]), "odd": odd}
    options = {"transform": eqx.filter_value_and_grad, "has_aux": True}
    traced = diagnostics.trace(fun, jaxscale.FixedLossScale(8.0).init(), **options)
    assert traced(params, batch, more=[odd]).error == 0
    bad_batch = batch | {"x": jnp.array([1.0, jnp.inf])}
    assert traced(params, bad_batch).nonfinite_arguments == ("args[1]['x']",)
    calibration = diagnostics.calibrate(
        fun, params, [batch], jit=eqx.filter_jit, **options
    )
    assert calibration.init_scale == 2.0**15


def full(size, value):
    return np.full(size, value, np.float32)


MIXED = {
    "fine": full(4, 1.0),
    "tiny": full(4, 1e-9),
    "small": full(4, 1e-6),
    "few": {"kernel": np.concatenate([full(3, np.nan), full(97, 1.0)])},
    "many": [np.float32([np.inf, -np.inf, 1.0])],
}


def test_the_worst_leaves_come_first():
    table = tabulate(MIXED)
    paths = [row.path for row in table.rows]
    assert paths == ["many/0", "few/kernel", "tiny", "small", "fine"]
    assert [row.path for row in table.nonfinite_rows] == ["many/0", "few/kernel"]


def test_a_table_prints_its_cells():
    table = tabulate(MIXED)
    lines = str(table).splitlines()
    assert lines[0] == "Leaves with inf or NaN: 2 of 5. In float16 at loss scale 2**0:"
    assert max(map(len, lines)) <= 80
    for cells, line in zip(table.cells(9)[1:], lines[2:], strict=True):
        assert list(cells) == line.split()


# A leaf, and its cells behind those of its path and its counts.
SHARES_OF_NOTHING = {
    "nan": (full(2, np.nan), ("0%", "-", "-", "-", "-")),
    "zero": (full(2, 0.0), ("100%", "-", "-", "-", "0")),
    "empty": (full(0, 0.0), ("-", "-", "-", "-", "-")),
}


@cases("name", SHARES_OF_NOTHING)
def test_a_share_of_nothing_is_a_dash(name):
    leaf, shares = SHARES_OF_NOTHING[name]
    _, cells = tabulate(leaf).cells(9)
    assert cells[4:] == shares


def test_a_long_table_prints_its_first_rows():
    table = tabulate([full(2, 1e-9)] * 40)
    assert len(table.rows) == 40
    assert len(str(table).splitlines()) == 2 + 24 + 1
    assert str(table).endswith("and 16 more")


ROWS = jnp.array([[1.0, jnp.inf], [jnp.nan, 8.0], [0.0, 2.0]])


@pytest.mark.worlds
def test_population_and_time_are_summed_up():
    def add_row(total, row):
        return total + diagnostics.histogram(row), count_leaves({"w": row})

    empty = diagnostics.histogram(np.zeros(0, np.float32))
    total, stacked = jax.lax.scan(add_row, empty, ROWS)
    assert_same_bits(total, diagnostics.histogram(ROWS))
    assert diagnostics.table(stacked) == tabulate({"w": ROWS})
    of_rows = jax.vmap(diagnostics.histogram)(ROWS)
    assert diagnostics.shares(of_rows) == diagnostics.shares(total)


@pytest.mark.worlds
@cases(
    ("check", "axis_name"),
    itertools.product([True, False], ["data", ("data",)]),
    fast=[(True, "data")],
)
def test_devices_are_summed_up(check, axis_name):
    mesh = Mesh(np.array(jax.devices("cpu")), ("data",))
    count_by_device = jax.shard_map(
        functools.partial(count_leaves, axis_name=axis_name),
        mesh=mesh,
        in_specs=PartitionSpec("data"),
        out_specs=PartitionSpec(),
        check_vma=check,
    )
    x = jnp.asarray(float32_bits(57))
    sharded = jax.device_put(x, NamedSharding(mesh, PartitionSpec("data")))
    expected = jax.device_get(histogram(x))
    assert_same_bits(jax.device_get(jax.jit(count_by_device)(x)), expected)
    assert_same_bits(jax.device_get(histogram(sharded)), expected)


def test_explicit_meshes():
    explicit = jax.sharding.AxisType.Explicit
    devices = jax.devices("cpu")
    mesh = jax.make_mesh((8,), ("data",), axis_types=(explicit,), devices=devices)
    with jax.set_mesh(mesh):
        sharding = NamedSharding(mesh, PartitionSpec("data"))
        x = jax.device_put(jnp.ones((8, 8)), sharding)
        count = jax.sharding.auto_axes(
            diagnostics.histogram, out_sharding=PartitionSpec()
        )
        assert np.asarray(jax.jit(count)(x).counts).sum() == 64


def boundaries():
    """Numbers at which any format rounds differently at scale 1, and their neighbors."""
    values = [edge for dtype in FORMATS for edge in edges_of(dtype)]
    return np.concatenate([np.array(values, np.float32), neighbors(values)])


def assert_counts_like_numpy(histogram, leaf):
    x = numbers(leaf)
    _, exponents = np.frexp(nonzero(leaf))
    expected = np.bincount(exponents - 1 + 149, minlength=277)
    counts = np.sum(histogram.counts, axis=1)
    np.testing.assert_array_equal(counts, expected)
    assert float(histogram.zero) == np.count_nonzero(x == 0)
    assert float(histogram.inf) == np.count_nonzero(np.isinf(x))
    assert float(histogram.nan) == np.count_nonzero(np.isnan(x))


@cases("dtype", DTYPES, fast=["float32", "complex64", "float8_e4m3fn"])
def test_exponents_are_those_of_numpy(dtype):
    leaf = leaf_of(dtype)
    assert_counts_like_numpy(diagnostics.histogram({"w": leaf}), leaf)
    assert_counts_like_numpy(histogram(leaf), leaf)


# At -9 not bfloat16: NumPy would round its subnormal numbers twice, first to float32.
NARROW = ["float16", "float8_e4m3fn", "float8_e5m2"]
SCALED = [
    *itertools.product(FORMATS, [0, 1, 7, 15, 24, 60]),
    *itertools.product(NARROW, [-9]),
]
SCALED_FAST = [*itertools.product(FORMATS, [7]), ("float16", -9)]


def leaf_around_boundaries(exponent):
    """Numbers at the boundaries of formats at a loss scale, and over the whole range."""
    edges = boundaries()
    if exponent < 0:
        edges = edges[edges < 1e30]
    near = np.ldexp(edges.astype(np.float64), -exponent).astype(np.float32)
    return np.concatenate([near, -edges, float32_bits(20_000)])


@cases(("dtype", "exponent"), SCALED, fast=SCALED_FAST)
def test_shares_are_those_of_a_real_cast(dtype, exponent):
    loss_scale = 2.0**exponent
    leaf = leaf_around_boundaries(exponent)
    shares = diagnostics.shares(histogram(leaf), loss_scale=loss_scale)
    counts = np.round(np.array(shares[dtype]) * len(nonzero(leaf)))
    assert Casts(*counts) == really_cast(leaf, dtype, loss_scale)


PARTS = [float32_bits(100, seed) for seed in range(3)]
WHOLE = np.concatenate(PARTS)


@pytest.mark.worlds
def test_histograms_add_up():
    whole = histogram(WHOLE)
    assert_same_bits(sum(map(histogram, PARTS)), whole)
    assert_same_bits(sum(count_leaves(PARTS)), whole)
    tree = {"a": PARTS[0], "b": [PARTS[1], None, PARTS[2]]}
    assert_same_bits(diagnostics.histogram(tree), whole)
    with pytest.raises(TypeError):
        whole + 1


def test_shares_leaf_by_leaf_are_those_of_each_leaf():
    grads = {"a": {"w": PARTS[0]}, "b": [PARTS[1], None, full(2, 0.0)]}
    by_leaf = diagnostics.shares(count_leaves(grads), loss_scale=2.0**10)
    assert list(by_leaf) == ["a/w", "b/0", "b/2"]
    for path, leaf in zip(by_leaf, jax.tree.leaves(grads), strict=True):
        alone = diagnostics.shares(histogram(leaf), loss_scale=2.0**10)
        assert by_leaf[path] == alone


TREES = {
    "empty": ({}, r"must hold floating or complex arrays, got a tree without any leaf"),
    "integers": (
        {"a": np.arange(3, dtype=np.int32), "b": True},
        r"got only .*bool.*int32",
    ),
    "huge": (
        jax.ShapeDtypeStruct((2**16, 2**15), "f4"),
        r"got 2147483648 elements at the root",
    ),
}


@cases("name", TREES)
def test_errors_of_trees(name):
    tree, message = TREES[name]
    count = functools.partial(jax.eval_shape, diagnostics.histogram)
    if name != "huge":
        count = diagnostics.histogram
    with pytest.raises(ValueError, match=rf"`histogram\(tree=.*{message}.*Pass"):
        count(tree)


W = np.ones(2, np.float32)
HISTOGRAM = histogram(W)


LEAVES = {"w": HISTOGRAM}
BAD_VALUES = {
    r"`shares.*power of two, got 3\.0.*2\.0\*\*1": lambda: diagnostics.shares(
        HISTOGRAM, loss_scale=3.0
    ),
    r"`table.*power of two, got 0\.3": lambda: diagnostics.table(
        LEAVES, loss_scale=0.3
    ),
}
BAD_TYPES = {
    r"`shares` must get what `jaxscale\.diagnostics\.histogram` returned.*ndarray": (
        lambda: diagnostics.shares(W)
    ),
    r"`shares`.*got float": lambda: diagnostics.shares({"w": 1.0}),
    r"`table`.*got ndarray": lambda: diagnostics.table(W),
    r"`shares`.*outside of `jit`, got Histogram": lambda: jax.jit(diagnostics.shares)(
        HISTOGRAM
    ),
    r"`table`.*outside of `jit`, got Histogram": lambda: jax.jit(diagnostics.table)(
        LEAVES
    ),
}


@cases("message", BAD_VALUES)
def test_bad_values_are_errors(message):
    with pytest.raises(ValueError, match=message):
        BAD_VALUES[message]()


@cases("message", BAD_TYPES)
def test_bad_types_are_errors(message):
    with pytest.raises(TypeError, match=message):
        BAD_TYPES[message]()
