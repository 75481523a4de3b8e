"""Counts and exponents against NumPy and real casts, for every dtype and every way to run."""

import functools
import itertools

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


def test_six_numbers_are_counted_shared_out_and_tabled():
    grads = {"w": jnp.array([1.5, 1e-9, 1e-6, 0.0, jnp.inf, jnp.nan])}
    counted = diagnostics.histogram(grads)
    assert (counted.zero, counted.inf, counted.nan) == (1, 1, 1)
    assert jnp.sum(counted.counts[149]) == 1  # from 1 to 2
    assert diagnostics.shares(counted)["float16"] == (1 / 3, 1 / 3, 1 / 3, 0)
    table = diagnostics.table(diagnostics.histogram(grads, by_leaf=True))
    assert table.rows == (("w", 6, 1, 1, 1, 1, 1, 0, 1.0),)


FORMATS = ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]
histogram = jax.jit(diagnostics.histogram)
count_leaves = functools.partial(diagnostics.histogram, by_leaf=True)


def float32_bits(number, seed=0):
    """Float32 numbers with random bits: all sizes, subnormal numbers, inf and NaN."""
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 2**32, number, np.uint32)
    bits[::5] &= np.uint32(0x807FFFFF)  # subnormal
    bits[::7] |= np.uint32(0x7F800000)  # NaN
    largest = np.finfo(np.float32).max
    special = [0.0, -0.0, np.inf, -np.inf, 2.0**-149, 2.0**-126, largest]
    return np.concatenate([np.array(special, np.float32), bits.view(np.float32)])


def edges_of(dtype):
    """Numbers at which a format rounds differently, or begins another range."""
    info = ml_dtypes.finfo(dtype)
    subnormal = float(info.smallest_subnormal)
    normal = float(info.smallest_normal)
    largest = float(info.max)
    spacing = 2.0 ** (np.floor(np.log2(largest)) - info.nmant)
    beside_0 = [subnormal / 2, subnormal, 1.5 * subnormal]
    return [
        *beside_0,
        normal - subnormal / 2,
        normal,
        largest,
        largest + spacing / 2,
    ]


def around_edges(exponent):
    """Numbers at the edges of formats at a loss scale, their neighbors, and the whole range."""
    edges = np.array([edge for name in FORMATS for edge in edges_of(name)], np.float32)
    below = np.nextafter(edges, np.float32(0))
    above = np.nextafter(edges, np.float32(np.inf))
    edges = np.concatenate([edges, below, above])
    if exponent < 0:
        edges = edges[edges < 1e30]
    near = np.ldexp(edges.astype(np.float64), -exponent).astype(np.float32)
    return np.concatenate([near, -edges, float32_bits(20_000)])


def leaf_of(dtype, exponent):
    """A leaf with all sizes of numbers; all numbers of a format of 8 or 16 bits."""
    if dtype == "float32":
        return around_edges(exponent)
    if dtype == "complex64":
        return float32_bits(4001).view(np.complex64)
    bits = jnp.finfo(dtype).bits
    return np.arange(2**bits, dtype=f"uint{bits}").view(jnp.dtype(dtype))


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


def really_cast(leaf, dtype, loss_scale):
    """Casts the nonzero numbers: how many become 0, subnormal, normal, and inf or NaN."""
    # In float64, multiplying by a power of two is exact, so that the cast is the only rounding.
    with np.errstate(all="ignore"):
        x = (nonzero(leaf) * loss_scale).astype(dtype).astype(np.float64)
    is_finite = np.isfinite(x)
    is_normal = is_finite & (x >= float(ml_dtypes.finfo(dtype).smallest_normal))
    is_subnormal = (x > 0) & is_finite & ~is_normal
    return list(map(np.count_nonzero, (x == 0, is_subnormal, is_normal, ~is_finite)))


def tabulate(grads, loss_scale=1.0):
    # Not in one program: that of a large tree takes long to compile.
    return diagnostics.table(count_leaves(grads), loss_scale=loss_scale)


DTYPES = ["float32", "complex64", *FORMATS, "float8_e4m3fnuz"]
EXPONENTS = [-9, -3, 0, 1, 7, 15, 24, 40, 60]
FAST = [("float32", 7), ("complex64", -3), ("float16", 15), ("bfloat16", 40)]
FAST += [("float32", -9), ("float8_e4m3fn", 0)]


@cases(("dtype", "exponent"), itertools.product(DTYPES, EXPONENTS), fast=FAST)
def test_counts_are_those_of_numpy_and_of_real_casts(dtype, exponent):
    leaf = leaf_of(dtype, exponent)
    loss_scale = 2.0**exponent
    x = numbers(leaf)
    others = [np.isnan(x).sum(), np.isinf(x).sum(), (x == 0).sum()]

    counted = histogram(leaf)
    _, exponents = np.frexp(nonzero(leaf))
    by_exponent = np.bincount(exponents + 148, minlength=277)
    np.testing.assert_array_equal(np.sum(counted.counts, axis=1), by_exponent)
    assert list(map(float, counted[:0:-1])) == others
    assert_same_bits(diagnostics.histogram({"w": leaf}), counted)

    shares = diagnostics.shares(counted, loss_scale=loss_scale)
    for name in FORMATS:
        # NumPy would round subnormal numbers twice, first to float32.
        if exponent >= 0 or name != "bfloat16":
            counts = np.round(np.array(shares[name]) * len(nonzero(leaf)))
            assert counts.tolist() == really_cast(leaf, name, loss_scale), name

    (row,) = tabulate({"w": leaf}, loss_scale).rows
    flushed, subnormal, _, overflowed = really_cast(leaf, "float16", loss_scale)
    largest = 2.0 ** (exponents.max() - 1)
    expected = ("w", x.size, *others, flushed, subnormal, overflowed, largest)
    assert row == expected


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
    rows = {row.path: row for row in tabulate(grads | others).rows}
    assert set(rows) == {"scalar", "w", "empty"}
    assert_fields(rows["w"], size=6, largest=1)
    assert_fields(rows["scalar"], size=1, largest=2)
    assert_fields(rows["empty"], size=0, largest=0)
    assert len(jax.tree.leaves(count_leaves(grads | others))) == 4 * len(rows)


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


def test_a_table_prints_its_cells_with_the_worst_leaves_first():
    table = tabulate(MIXED)
    worst = ["many/0", "few/kernel"]
    assert [row.path for row in table.rows] == [*worst, "tiny", "small", "fine"]
    assert [row.path for row in table.nonfinite_rows] == worst
    lines = str(table).splitlines()
    assert lines[0] == "Leaves with inf or NaN: 2 of 5. In float16 at loss scale 2**0:"
    assert max(map(len, lines)) <= 80
    for cells, line in zip(table.cells(9)[1:], lines[2:], strict=True):
        assert list(cells) == line.split()


# A leaf, and its cells behind those of its path and its counts: a share of nothing is a dash.
SHARES_OF_NOTHING = {
    "nan": (full(2, np.nan), "0% - - - -"),
    "zero": (full(2, 0.0), "100% - - - 0"),
    "empty": (full(0, 0.0), "- - - - -"),
}


@cases("name", SHARES_OF_NOTHING)
def test_a_share_of_nothing_is_a_dash(name):
    leaf, shares = SHARES_OF_NOTHING[name]
    _, cells = tabulate(leaf).cells(9)
    assert " ".join(cells[4:]) == shares


def test_a_long_table_prints_its_first_rows():
    table = tabulate([full(2, 1e-9)] * 40)
    assert len(table.rows) == 40
    *lines, last = str(table).splitlines()
    assert (len(lines), last) == (2 + 24, "and 16 more")


ROWS = jnp.array([[1.0, jnp.inf], [jnp.nan, 8.0], [0.0, 2.0]])


@pytest.mark.worlds
def test_population_and_time_are_summed_up():
    def add_row(total, row):
        return total + diagnostics.histogram(row), count_leaves({"w": row})

    empty = diagnostics.histogram(full(0, 0.0))
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
    x = jnp.asarray(float32_bits(57))
    sharded = jax.device_put(x, NamedSharding(mesh, PartitionSpec("data")))
    expected = histogram(x)
    assert_same_bits(histogram(sharded), expected)
    for count in (count_leaves, diagnostics.histogram):
        count_by_device = jax.shard_map(
            functools.partial(count, axis_name=axis_name),
            mesh=mesh,
            in_specs=PartitionSpec("data"),
            out_specs=PartitionSpec(),
            check_vma=check,
        )
        assert_same_bits(jax.jit(count_by_device)(x), expected)


def test_explicit_meshes():
    explicit = (jax.sharding.AxisType.Explicit,)
    devices = jax.devices("cpu")
    mesh = jax.make_mesh((8,), ("data",), axis_types=explicit, devices=devices)
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.ones(64), NamedSharding(mesh, PartitionSpec("data")))
        count = jax.sharding.auto_axes(
            diagnostics.histogram, out_sharding=PartitionSpec()
        )
        assert jnp.sum(jax.jit(count)(x).counts) == 64


PARTS = [float32_bits(100, seed) for seed in range(3)]
TREE = {"a": {"w": PARTS[0]}, "b": [PARTS[1], None, PARTS[2], full(2, 0.0)]}
WHOLE = np.concatenate(jax.tree.leaves(TREE))


@pytest.mark.worlds
def test_histograms_and_shares_are_those_of_each_leaf_and_of_all():
    whole = histogram(WHOLE)
    by_leaf = count_leaves(TREE)
    leaves = jax.tree.leaves(TREE)
    assert_same_bits(diagnostics.histogram(TREE), whole)
    assert_same_bits(sum(map(histogram, leaves)), whole)
    shares = diagnostics.shares(by_leaf, loss_scale=2.0**10)
    assert list(shares) == ["a/w", "b/0", "b/2", "b/3"]
    for path, leaf in zip(shares, leaves, strict=True):
        alone = diagnostics.shares(histogram(leaf), loss_scale=2.0**10)
        assert shares[path] == alone
    with pytest.raises(TypeError):
        whole + 1


W = np.ones(2, np.float32)
HISTOGRAM = histogram(W)
HUGE = jax.ShapeDtypeStruct((2**16, 2**15), "f4")
TREES = {
    r"floating or complex arrays, got a tree without any leaf": {},
    r"got only .*bool.*int32": {"a": np.arange(3, dtype=np.int32), "b": True},
    r"got only `_ScalarMeta`": {"odd": ODD["scalar type"]},
    r"got only `ShapeDtypeStruct`": {"odd": ODD["shape"]},
}


@cases("message", TREES)
def test_trees_without_gradients_are_errors(message):
    with pytest.raises(ValueError, match=rf"`histogram\(tree=.*{message}.*\. Pass"):
        diagnostics.histogram(TREES[message])


RETURNED = r"must get what `jaxscale\.diagnostics\.histogram` returned"
ERRORS = {
    r"`histogram\(tree=.*2147483648 elements at the root.*Pass": (
        ValueError,
        lambda: jax.eval_shape(diagnostics.histogram, HUGE),
    ),
    r"`shares.*power of two, got 3\.0.*2\.0\*\*1": (
        ValueError,
        lambda: diagnostics.shares(HISTOGRAM, loss_scale=3.0),
    ),
    r"`table.*power of two, got 0\.3": (
        ValueError,
        lambda: diagnostics.table({"w": HISTOGRAM}, loss_scale=0.3),
    ),
    rf"`shares` {RETURNED}.*ndarray": (TypeError, lambda: diagnostics.shares(W)),
    r"`shares`.*got float": (TypeError, lambda: diagnostics.shares({"w": 1.0})),
    r"`table`.*got ndarray": (TypeError, lambda: diagnostics.table(W)),
    r"`shares`.*outside of `jit`, got Histogram": (
        TypeError,
        lambda: jax.jit(diagnostics.shares)(HISTOGRAM),
    ),
    r"`table`.*outside of `jit`, got Histogram": (
        TypeError,
        lambda: jax.jit(diagnostics.table)({"w": HISTOGRAM}),
    ),
}


@cases("message", ERRORS)
def test_errors(message):
    error, call = ERRORS[message]
    with pytest.raises(error, match=message):
        call()
