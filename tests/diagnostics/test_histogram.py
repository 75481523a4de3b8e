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
from tables import PASSIVE, assert_same_bits, avals, cases
from training import x64

import jaxscale
from jaxscale import diagnostics

SCALES = [1.0, 2.0**-3, 2.0**15, 2.0**40]
FIELDS = ("size", "nan", "inf", "zero", "flushed", "subnormal", "overflowed", "largest")
FORMATS = ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]
histogram, leaf_histograms, leaf_counts = map(
    jax.jit, (diagnostics.histogram, diagnostics.leaf_histograms, diagnostics.leaf_counts)
)


def float32_bits(number, seed=0):
    """Float32 numbers with random bits: all sizes, subnormal numbers, inf and NaN."""
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 2**32, number, np.uint32)
    bits[::5] &= np.uint32(0x807FFFFF)  # subnormal
    bits[::7] |= np.uint32(0x7F800000)  # NaN
    special = [0.0, -0.0, np.inf, -np.inf, 2.0**-149, 2.0**-126, np.finfo(np.float32).max]
    return np.concatenate([np.array(special, np.float32), bits.view(np.float32)])


def around_float16():
    """The neighbours of numbers at which float16 rounds differently at some scale."""
    edges = [2.0**-25, 2.0**-24, 2.0**-14 - 2.0**-25, 2.0**-14, 65504.0, 65520.0, 65536.0]
    values = np.array([edge / scale for edge in edges for scale in SCALES], np.float32)
    return np.concatenate([np.nextafter(values, np.float32(end)) for end in (0, np.inf)])


def every(dtype):
    """Every number of a format of 8 or 16 bits."""
    bits = jnp.finfo(dtype).bits
    return np.arange(2**bits, dtype=f"uint{bits}").view(jnp.dtype(dtype))


LEAVES = {
    "float32": lambda: np.concatenate([float32_bits(20_000), around_float16()]),
    "complex64": lambda: float32_bits(4001).view(np.complex64),
    **{dtype: functools.partial(every, dtype) for dtype in [*FORMATS, "float8_e4m3fnuz"]},
}


def numbers(leaf):
    x = np.asarray(leaf)
    x = np.stack([x.real, x.imag]) if np.iscomplexobj(x) else x
    with np.errstate(invalid="ignore"):  # of signaling NaNs
        return x.astype(np.float64)


def nonzero(leaf):
    x = np.abs(numbers(leaf))
    return x[np.isfinite(x) & (x > 0)]


def really_cast(leaf, dtype, loss_scale):
    """How many numbers become 0, a subnormal or a normal number, or inf, found by casting them."""
    # In float64, multiplying by a power of two is exact, so that the cast is the only rounding.
    with np.errstate(all="ignore"):
        x = (nonzero(leaf) * loss_scale).astype(dtype).astype(np.float64)
    normal = float(ml_dtypes.finfo(dtype).smallest_normal)
    masks = x == 0, (x > 0) & (x < normal), np.isfinite(x) & (x >= normal), ~np.isfinite(x)
    return [int(mask.sum()) for mask in masks]


def reference(leaf, loss_scale):
    """The same counts, found by casting to float16."""
    x = numbers(leaf)
    special = [int(mask.sum()) for mask in (np.isnan(x), np.isinf(x), x == 0)]
    flushed, subnormal, _, overflowed = really_cast(leaf, "float16", loss_scale)
    largest = float(nonzero(leaf).max(initial=0))
    counts = [x.size, *special, flushed, subnormal, overflowed, largest]
    return dict(zip(FIELDS, counts, strict=True))


def row_of(counts):
    (row,) = diagnostics.table(counts).rows
    return {name: getattr(row, name) for name in FIELDS}


@cases(
    ("dtype", "loss_scale"),
    itertools.product(LEAVES, SCALES),
    fast=[("float32", 1.0), ("complex64", 2.0**-3), ("float16", 2.0**15), ("bfloat16", 2.0**40)],
)
def test_counts_are_those_of_a_real_cast(dtype, loss_scale):
    leaf = LEAVES[dtype]()
    expected = reference(leaf, loss_scale)
    assert row_of(diagnostics.leaf_counts({"w": leaf}, loss_scale=loss_scale)) == expected
    # Also in one compiled program, where XLA on CPU takes subnormal numbers for zeros.
    assert row_of(leaf_counts(leaf, loss_scale=jnp.float32(loss_scale))) == expected


@cases("loss_scale", SCALES, fast=[2.0**15])
def test_float64_keeps_its_precision_and_ends_where_float32_does(loss_scale):
    near = around_float16().astype(np.float64)
    ends = [1e300, -1e-300, 5e-324, np.nan, np.inf]
    leaf = np.concatenate([near, ends, np.nextafter(near, 0), np.nextafter(near, np.inf)])
    expected = reference(leaf, loss_scale) | {"largest": float(np.finfo(np.float32).max)}
    with x64():
        assert row_of(leaf_counts(leaf, loss_scale=loss_scale)) == expected


def test_what_is_not_a_gradient_is_left_out():
    grads = {"w": jnp.ones((2, 3)), "scalar": 3.0, "empty": jnp.zeros((0, 4))}
    others = PASSIVE | {"_overwrite_with_gradient": {"amax": jnp.array(jnp.nan)}}
    rows = diagnostics.table(diagnostics.leaf_counts(grads | others)).rows
    seen = {row.path: (row.size, row.largest) for row in rows}
    assert seen == {"w": (6, 1), "scalar": (1, 3), "empty": (0, 0)}


@pytest.mark.parametrize("odd", [jnp.float16, jax.ShapeDtypeStruct((2,), jnp.float32)])
def test_what_only_has_a_dtype_is_no_gradient_and_reaches_the_loss_as_it_is(odd):
    seen = []
    grads = {"w": jnp.array([1.0, jnp.inf]), "odd": odd}
    assert avals(diagnostics.leaf_counts(grads).leaves) == {"w": "float32[8]", "odd": None}
    assert diagnostics.leaf_histograms(grads)["odd"] is None
    with pytest.raises(ValueError, match=rf"got only `{type(odd).__name__}`\. Pass"):
        diagnostics.histogram({"odd": odd})

    def fun(params, batch, *, more=None):
        seen.extend([params["odd"], batch["odd"], *jax.tree.leaves(more)])
        return jnp.sum(params["w"] * batch["x"]).astype(jnp.float16), {"odd": odd}

    params, batch = {"w": jnp.ones(2), "odd": odd}, {"x": jnp.array([1.0, 2.0]), "odd": odd}
    scaling = jaxscale.FixedLossScale(8.0).init()
    options = {"transform": eqx.filter_value_and_grad, "has_aux": True}
    traced = diagnostics.trace(fun, scaling, **options)
    assert not traced(params, batch, more=[odd]).found
    assert traced(params, batch | {"x": grads["w"]}).nonfinite_arguments == ("args[1]['x']",)
    found = diagnostics.calibrate(fun, params, [batch], jit=eqx.filter_jit, **options)
    assert found.init_scale == 2.0**15
    assert len(seen) >= 7
    assert all(each is odd for each in seen)
    with pytest.raises(TypeError, match=r"floating parameters, got `.*` at args\[0\]\['odd'\]"):
        diagnostics.trace(fun, scaling, has_aux=True)(params, batch)


def test_worst_first_and_readable():
    grads = {"fine": jnp.ones(4), "tiny": jnp.full(4, 1e-9), "small": jnp.full(4, 1e-6)}
    grads["few"] = {"kernel": jnp.ones(100).at[:3].set(jnp.nan)}
    grads["many"] = [jnp.array([jnp.inf, -jnp.inf, 1.0])]
    found = diagnostics.table(leaf_counts(grads))
    assert [row.path for row in found.rows] == ["many/0", "few/kernel", "tiny", "small", "fine"]
    assert [row.path for row in found.nonfinite_rows] == ["many/0", "few/kernel"]
    lines = str(found).splitlines()
    assert lines[0] == "Leaves with inf or NaN: 2 of 5. In float16 at loss scale 2**0:"
    assert max(map(len, lines)) <= 80
    assert [list(cells) for cells in found.cells()[1:]] == [line.split() for line in lines[2:]]
    # A share of nothing is a dash.
    grads = {"nan": jnp.full(2, jnp.nan), "zero": jnp.zeros(2), "empty": jnp.zeros(0)}
    cells = {row[0]: row[4:] for row in diagnostics.table(leaf_counts(grads)).cells()[1:]}
    assert cells == {"nan": ("0%", *"----"), "zero": ("100%", *"---0"), "empty": (*"-----",)}


def test_a_long_table_prints_what_has_something_to_tell():
    found = diagnostics.table(leaf_counts([jnp.full(2, 1e-9)] * 40))
    assert (len(found.rows), len(str(found).splitlines())) == (40, 2 + 24 + 1)
    assert str(found).endswith("and 16 more")
    fine, zero, half_zero = jnp.ones(2), jnp.zeros(2), jnp.array([0.0, 1.0])
    found = diagnostics.table(leaf_counts([fine] * 39 + [half_zero], loss_scale=8.0))
    assert len(found.rows) == len(found.cells()) - 1 == 40
    words = "inite, and stored in full by float16 at loss scale"
    assert str(found) == f"F{words} 2**3: 40 of 40 leaves"
    # What is not finite, lost, of fewer bits, or 0 everywhere.
    telling = [jnp.array([1.0, x]) for x in (jnp.nan, jnp.inf, 1e-9, 1e-6, 1e9)]
    found = diagnostics.table(leaf_counts([*telling, zero, *[fine] * 34, jnp.zeros(0)]))
    lines = str(found).splitlines()
    assert {line.split()[0] for line in lines[2:-1]} == set("012345")
    assert lines[-1] == f"f{words} 2**0: 35 of 41 leaves"


def test_population_and_time_are_summed_up():
    x = jnp.array([[1.0, jnp.inf], [jnp.nan, 8.0], [0.0, 2.0]])
    expected = row_of(leaf_counts(x))
    assert row_of(jax.vmap(diagnostics.leaf_counts)(x)) == expected
    _, stacked = jax.lax.scan(lambda carry, row: (carry, diagnostics.leaf_counts(row)), 0, x)
    assert row_of(stacked) == expected
    # Carried, it keeps its types.
    first = diagnostics.leaf_counts(x[0])
    last, _ = jax.lax.scan(lambda _, row: (diagnostics.leaf_counts(row), None), first, x)
    assert row_of(last) == row_of(leaf_counts(x[-1]))


@cases(
    ("call", "check", "axis_name"),
    itertools.product(["leaf_counts", "histogram"], [True, False], ["data", ("data",)]),
    fast=[("leaf_counts", False, ("data",)), ("histogram", True, "data")],
)
def test_devices_are_summed_up(call, check, axis_name):
    count, spec = getattr(diagnostics, call), PartitionSpec("data")
    mesh, summed = Mesh(np.array(jax.devices("cpu")), ("data",)), PartitionSpec()
    options = {"mesh": mesh, "in_specs": spec, "out_specs": summed, "check_vma": check}
    run = jax.shard_map(lambda x: count(x, axis_name=axis_name), **options)
    x = jnp.asarray(float32_bits(57))
    sharded = jax.device_put(x, NamedSharding(mesh, spec))
    for found in (jax.jit(run)(x), jax.jit(count)(sharded)):
        assert_same_bits(*(jax.tree.map(np.asarray, each) for each in (found, jax.jit(count)(x))))


@pytest.mark.skipif(not hasattr(jax.sharding, "auto_axes"), reason="JAX has it elsewhere")
def test_explicit_meshes():
    types = (jax.sharding.AxisType.Explicit,)
    mesh = jax.make_mesh((8,), ("data",), axis_types=types, devices=jax.devices("cpu"))
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.ones((8, 8)), NamedSharding(mesh, PartitionSpec("data")))
        auto = jax.sharding.auto_axes(diagnostics.histogram, out_sharding=PartitionSpec())
        assert np.asarray(jax.jit(auto)(x).counts).sum() == 64
        assert row_of(leaf_counts(x))["size"] == 64


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
SCALED = [*itertools.product(FORMATS, [0, 1, 7, 15, 24, 60])]
SCALED += [(dtype, -9) for dtype in FORMATS if dtype != "bfloat16"]


@cases(("dtype", "exponent"), SCALED, fast=[(dtype, 7) for dtype in FORMATS] + [("float16", -9)])
def test_shares_are_those_of_a_real_cast(dtype, exponent):
    # At the boundaries of that scale, and over the whole range.
    edges = boundaries()[boundaries() < 1e30] if exponent < 0 else boundaries()
    near = np.ldexp(edges.astype(np.float64), -exponent).astype(np.float32)
    leaf = np.concatenate([near, -edges, float32_bits(20_000)])
    shares = diagnostics.shares(histogram(leaf), loss_scale=2.0**exponent)[dtype]
    counts = [round(share * len(nonzero(leaf))) for share in shares]
    assert counts == really_cast(leaf, dtype, 2.0**exponent)


def test_histograms_add_up():
    parts = [float32_bits(100, seed) for seed in range(3)]
    both = histogram(np.concatenate(parts))
    assert_same_bits(sum(map(histogram, parts)), both)
    assert_same_bits(histogram({"a": parts[0], "b": [parts[1], None, parts[2]]}), both)
    assert_same_bits(sum(leaf_histograms(parts)), both)
    empty = histogram(np.zeros(0, np.float32))
    carried = jax.lax.scan(lambda h, x: (h + diagnostics.histogram(x), 0), empty, np.stack(parts))
    assert_same_bits(carried[0], both)
    with pytest.raises(TypeError):
        both + 1
    # Histograms stacked by `vmap` are summed when they are read.
    stacked = jax.vmap(diagnostics.histogram)(np.stack(parts))
    assert diagnostics.shares(stacked) == diagnostics.shares(both)


def test_layers_are_grouped_by_depth():
    rows = [jnp.array([1.0, 1e6]), None, jnp.zeros(2)]
    leaves = leaf_histograms({"a": {"w": jnp.full(3, 1e-9), "b": jnp.ones(1)}, "c": rows})
    layers = {depth: diagnostics.underflow(leaves, depth=depth).layers for depth in (None, 2, 1)}
    lost = {
        k: {name: of["float16"].lost for name, of in each.items()} for k, each in layers.items()
    }
    assert lost[None] == lost[2] == {"a/b": 0, "a/w": 1, "c/0": 0.5, "c/2": 0}
    assert lost[1] == {"a": 0.75, "c": 0.5}
    scaled = diagnostics.underflow(leaves, depth=1, loss_scale=2.0**10)
    assert scaled.layers["a"]["float16"] == (0, 0.75, 0.25, 0)
    assert "at loss scale 2**10" in str(scaled)


NARROW = ["float16", "float8_e4m3fn", "float8_e5m2"]


@cases(
    ("dtype", "tolerance", "center", "spread"),
    itertools.product(NARROW, [0.0, 0.01], [-30, -12, 4, 25], [2, 9]),
    fast=[("float16", 0.0, -30, 2), ("float16", 0.01, 4, 9), ("float8_e4m3fn", 0.01, -12, 2)],
)
def test_suggestions_are_the_best_of_all_scales(dtype, tolerance, center, spread):
    rng = np.random.default_rng(0)
    leaf = np.ldexp(rng.standard_normal(500), center + (rng.normal(0, spread, 500)).astype(int))
    leaf = leaf.astype(np.float32)
    lost = {k: really_cast(leaf, dtype, 2.0**k) for k in range(-60, 61)}
    fits = [k for k in lost if not lost[k][3]]
    most = max(tolerance * len(nonzero(leaf)), min(lost[k][0] for k in fits))
    best = [k for k in fits if lost[k][0] <= most]
    lossless = [k for k in best if not lost[k][0]]
    found = diagnostics.suggest_scale(histogram(leaf), dtype=dtype, tolerance=tolerance)
    assert (found.lowest, found.highest) == (2.0 ** best[0], 2.0 ** best[-1])
    assert found.lossless == ((2.0 ** lossless[0], 2.0 ** lossless[-1]) if lossless else None)
    assert found.needed == (0 not in best)
    assert found.suggested == (2.0 ** ((best[0] + best[-1]) // 2) if found.needed else 1)
    assert found.scaled == diagnostics.shares(histogram(leaf), loss_scale=found.suggested)[dtype]


LOST = "a loss scale: without one {} of the nonzero gradients are flushed to zero, and 0% overflow"
FINE = "float16 needs no loss scale: without one it loses nothing."
ZEROS = "of all gradients are exactly 0: true zeros, or flushed before they were counted. To tell, "
ZEROS += "compute them in float32 or at a high scale."
BETTER = (
    f"float16 needs {LOST}. Scales that flush {{}} without an overflow: {{}}. Scales that lose "
)
SENTENCES = {
    "not needed": ([1.0, 2.0], FINE),
    "wide": ([2.0**-40, 2.0**12],
        f"float16 gains nothing from {LOST}, and no scale loses less.".format("50.0%")),
    "no scale keeps all": ([2.0**-33, 2.0**-28, 2.0**9, 2.0**9],
        BETTER.format("50.0%", "at most 25.0%", "2**4 to 2**6") + "nothing: none."),
    "nearly lossless": ([2.0**-40, *[2.0**-28] * 2000],
        BETTER.format("100%", "less than 0.1%", "2**4 to 2**43") + "nothing: 2**16 to 2**43."),
    "zeros": ([0.0, 1.0, np.inf, np.nan],
        f"{FINE} 25.0% {ZEROS} Inf or NaN, which are left out: 2."),
    "all zero": ([0.0],
        f"No gradient is finite and nonzero, so no loss scale can be suggested. 100% {ZEROS}"),
}  # fmt: skip


@cases("name", SENTENCES)
def test_suggestions_in_words(name):
    values, expected = SENTENCES[name]
    assert str(diagnostics.suggest_scale(histogram(np.array(values, np.float32)))) == expected


TREES = {
    "empty": ({}, r"must hold floating or complex arrays, got a tree without any leaf"),
    "integers": ({"a": np.arange(3, dtype=np.int32), "b": True}, r"got only .*bool.*int32"),
    "huge": (jax.ShapeDtypeStruct((2**16, 2**15), "f4"), r"got 2147483648 elements at the root"),
}


@cases(("call", "name"), itertools.product(["leaf_counts", "histogram"], TREES))
def test_errors_of_trees(call, name):
    tree, message = TREES[name]
    function = getattr(diagnostics, call)
    with pytest.raises(ValueError, match=rf"`{call}\(.*=\.\.\.\)`.*{message}.*Pass"):
        jax.eval_shape(function, tree) if name == "huge" else function(tree)


W = np.ones(2, np.float32)
H, COUNTED = histogram(W), diagnostics.leaf_counts
ERRORS = {
    r"power of two, got 3\.0.*2\.0\*\*1": lambda: diagnostics.shares(H, loss_scale=3.0),
    r"dtype=.*'float16'.*'float32'": lambda: diagnostics.suggest_scale(H, dtype="float32"),
    r"tolerance=.*between 0 and 1, got 2": lambda: diagnostics.suggest_scale(H, tolerance=2),
    r"`text_histogram\(loss_scale": lambda: diagnostics.text_histogram(H, loss_scale=0.3),
    r"underflow.*without any leaf.*leaf_histograms": lambda: diagnostics.underflow({}),
    r"depth=.*at least 1, got 0": lambda: diagnostics.underflow(H, depth=0),
    r"`leaf_histograms\(tree=.*without any leaf": lambda: diagnostics.leaf_histograms({}),
    r"loss_scale=.*got 0\.0": lambda: COUNTED(W, loss_scale=0),
}
OF_TYPE = {
    r"`shares\(histogram=.*ndarray": lambda: diagnostics.shares(W),
    r"`shares\(histogram=.*Array": lambda: diagnostics.shares(jnp.ones(2)),
    r"underflow.*float": lambda: diagnostics.underflow({"w": 1.0}),
    r"outside of `jit`, got Hist": lambda: jax.jit(diagnostics.shares)(H),
    r"one number.*\(2,\)": lambda: COUNTED(W, loss_scale=W),
    r"loss_scale=.*got <class": lambda: COUNTED(W, loss_scale=jnp.float16),
    r"`table\(counts=.*leaf_counts.*got ndarray": lambda: diagnostics.table(W),
    r"outside of `jit`, got Leaf": lambda: jax.jit(lambda w: diagnostics.table(COUNTED(w)).rows)(W),
    r"to_json.*object": lambda: diagnostics.to_json(object()),
}


@cases("message", [*ERRORS, *OF_TYPE])
def test_errors(message):
    with pytest.raises(TypeError if message in OF_TYPE else ValueError, match=message):
        (ERRORS | OF_TYPE)[message]()
