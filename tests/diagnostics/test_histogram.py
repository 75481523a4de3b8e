"""Counts and exponents against NumPy and real casts, for every dtype and every way to run."""

import functools
import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from departing import quietly, uses_what_goes
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tables import PASSIVE, assert_same_bits, cases
from training import x64

import jaxscale
from jaxscale import diagnostics

pytestmark = uses_what_goes


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
    bits[::5] &= 0x807FFFFF  # subnormal
    bits[::7] |= 0x7F800000  # NaN
    bits[:5] = [0, 0x80000000, 0x7F800000, 0xFF800000, 1]  # 0, inf and the least
    return bits.view(np.float32)


def find_ties():
    """The numbers halfway between two of a small format: there rounding changes its direction."""
    ties = []
    for name in FORMATS:
        bits = ml_dtypes.finfo(name).bits
        x = np.arange(2 ** (bits - 1), dtype=f"uint{bits}").view(name).astype(float)
        x = x[np.isfinite(x)]
        ties += [(x[1:] + x[:-1]) / 2, [1.5 * x[-1] - 0.5 * x[-2]]]
    return np.concatenate(ties)


with np.errstate(invalid="ignore"):  # of signaling NaNs
    TIES = find_ties()


def around_ties(exponent):
    """Ties at a loss scale, their neighbors, and the whole range."""
    with np.errstate(over="ignore"):
        ties = np.float32(np.ldexp(TIES, -exponent))
        below = np.nextafter(ties, np.float32(0))
        above = np.nextafter(ties, np.float32(np.inf))
    return np.concatenate([ties, -below, above, float32_bits(20_000)])


def leaf_of(dtype, exponent):
    """A leaf with all sizes of numbers; all numbers of a format of 8 or 16 bits."""
    if dtype == "float32":
        return around_ties(exponent)
    if dtype == "complex64":
        return float32_bits(4002).view(np.complex64)
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
    rounded = np.float32([np.inf, 0, 1 / 3, np.nan, -np.inf])
    with x64():
        assert_same_bits(histogram(numbers), histogram(rounded))


# What has a dtype and no numbers: a scalar type, and the shape of an array.
ODD = {"scalar type": jnp.float16, "shape": jax.ShapeDtypeStruct((2,), jnp.float32)}


def test_what_is_not_a_gradient_is_left_out():
    grads = {"w": jnp.ones((2, 3)), "scalar": 3.0, "empty": jnp.zeros((0, 4))}
    overwritten = {"_overwrite_with_gradient": {"amax": jnp.array(jnp.nan)}}
    tree = grads | PASSIVE | ODD | overwritten
    sizes = {row.path: (row.size, row.largest) for row in tabulate(tree).rows}
    assert sizes == {"w": (6, 1), "scalar": (1, 2), "empty": (0, 0)}
    assert len(jax.tree.leaves(count_leaves(tree))) == 4 * len(sizes)


def test_what_only_has_a_dtype_reaches_the_loss_as_it_is():
    def fun(params, batch):
        assert params["odd"] == batch["odd"] == ODD
        loss = jnp.sum(params["w"] * batch["x"]).astype(jnp.float16)
        return loss, batch["odd"]

    params = {"w": jnp.ones(2), "odd": ODD}
    batch = {"x": jnp.array([1.0, 2.0]), "odd": ODD}
    options = {"transform": eqx.filter_value_and_grad, "has_aux": True}
    traced = diagnostics.trace(fun, jaxscale.FixedLossScale(8.0).init(), **options)
    assert traced(params, batch).error == 0
    bad_batch = batch | {"x": jnp.array([1.0, jnp.inf])}
    assert traced(params, bad_batch).nonfinite_arguments == ("args[1]['x']",)
    jit = eqx.filter_jit
    found = diagnostics.calibrate(fun, params, [batch], jit=jit, **options)
    assert found.init_scale == 2.0**15


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


def test_a_share_of_nothing_is_a_dash():
    grads = {"nan": full(2, np.nan), "zero": full(2, 0.0), "empty": full(0, 0.0)}
    _, *rows = tabulate(grads).cells(9)
    shares = {path: " ".join(cells[3:]) for path, *cells in rows}
    assert shares == {"nan": "0% - - - -", "zero": "100% - - - 0", "empty": "- - - - -"}


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
    x = jnp.asarray(float32_bits(64))
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
HISTOGRAM = quietly(histogram, W)
HUGE = jax.ShapeDtypeStruct((2**16, 2**15), "f4")
RETURNED = r"must get what `jaxscale\.diagnostics\.histogram` returned"
INTEGERS = {"a": np.arange(3, dtype=np.int32), "b": True}
# A function, its argument and its options, by the message.
VALUE_ERRORS = {
    r"`histogram\(tree=.*arrays, got a tree without any leaf\. Pass": (
        diagnostics.histogram,
        {},
    ),
    r"`histogram\(tree=.*got only .*bool.*int32.*\. Pass": (
        diagnostics.histogram,
        INTEGERS,
    ),
    r"`histogram\(tree=.*got only `ShapeDtypeStruct`, `_ScalarMeta`\. Pass": (
        diagnostics.histogram,
        ODD,
    ),
    r"`histogram\(tree=.*2147483648 elements at the root.*Pass": (
        functools.partial(jax.eval_shape, diagnostics.histogram),
        HUGE,
    ),
    r"`shares.*power of two, got 3\.0.*2\.0\*\*1": (
        functools.partial(diagnostics.shares, loss_scale=3.0),
        HISTOGRAM,
    ),
    r"`table.*power of two, got 0\.3": (
        functools.partial(diagnostics.table, loss_scale=0.3),
        {"w": HISTOGRAM},
    ),
}
TYPE_ERRORS = {
    rf"`shares` {RETURNED}.*ndarray": (diagnostics.shares, W),
    r"`shares`.*got float": (diagnostics.shares, {"w": 1.0}),
    r"`table`.*got ndarray": (diagnostics.table, W),
    r"`shares`.*outside of `jit`, got Histogram": (
        jax.jit(diagnostics.shares),
        HISTOGRAM,
    ),
    r"`table`.*outside of `jit`, got Histogram": (
        jax.jit(diagnostics.table),
        {"w": HISTOGRAM},
    ),
}


@cases("message", VALUE_ERRORS | TYPE_ERRORS)
def test_errors(message):
    function, argument = (VALUE_ERRORS | TYPE_ERRORS)[message]
    error = ValueError if message in VALUE_ERRORS else TypeError
    with pytest.raises(error, match=message):
        function(argument)
