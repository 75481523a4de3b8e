"""The counts of a leaf against NumPy in float64, for every dtype and every way to run."""

import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tables import assert_same_bits, avals, cases

import jaxscale
from jaxscale import diagnostics

MESH = Mesh(np.array(jax.devices("cpu")), ("data",))
CHECK = "check_vma" if "check_vma" in jax.shard_map.__kwdefaults__ else "check_rep"
SCALES = [1.0, 2.0**-3, 2.0**15, 2.0**40]
FIELDS = ("size", "nan", "inf", "zero", "flushed", "subnormal", "overflowed", "largest")


def x64():
    return jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64()


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
    **{
        dtype: lambda dtype=dtype: every(dtype)
        for dtype in ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz")
    },
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


leaf_counts = jax.jit(diagnostics.leaf_counts)


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
    run = jax.jit(lambda leaf, s: diagnostics.leaf_counts(leaf, loss_scale=s))
    assert row_of(run(leaf, jnp.float32(loss_scale))) == expected


@cases("loss_scale", SCALES, fast=[2.0**15])
def test_float64_keeps_its_precision_and_ends_where_float32_does(loss_scale):
    leaf = np.concatenate(
        [around_float16().astype(np.float64), [1e300, -1e-300, 5e-324, np.nan, np.inf]]
    )
    leaf = np.concatenate([leaf, np.nextafter(leaf[:-5], 0), np.nextafter(leaf[:-5], np.inf)])
    expected = reference(leaf, loss_scale) | {"largest": float(np.finfo(np.float32).max)}
    with x64():
        assert row_of(jax.jit(diagnostics.leaf_counts)(leaf, loss_scale=loss_scale)) == expected


def test_what_is_not_a_gradient_is_left_out():
    tree = {
        "w": jnp.ones((2, 3)),
        "int": jnp.arange(3),
        "none": None,
        "masked": optax.MaskedNode(),
        "key": jax.random.key(0),
        "float0": np.zeros(2, jax.dtypes.float0),
        "_overwrite_with_gradient": {"amax": jnp.array(jnp.nan)},
        "scalar": 3.0,
        "empty": jnp.zeros((0, 4)),
    }
    rows = {row.path: row for row in diagnostics.table(diagnostics.leaf_counts(tree)).rows}
    assert set(rows) == {"w", "scalar", "empty"}
    assert (rows["w"].size, rows["scalar"].size, rows["empty"].size) == (6, 1, 0)
    assert rows["empty"].largest == 0


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
    grads = {
        "fine": jnp.ones(4),
        "few": {"kernel": jnp.ones(100).at[3].set(jnp.nan)},
        "many": [jnp.array([jnp.inf, -jnp.inf, 1.0])],
        "tiny": jnp.full(4, 1e-9),
        "small": jnp.full(4, 1e-6),
    }
    found = diagnostics.table(leaf_counts(grads))
    assert [row.path for row in found.rows] == ["many/0", "few/kernel", "tiny", "small", "fine"]
    assert [row.path for row in found.nonfinite_rows] == ["many/0", "few/kernel"]
    lines = str(found).splitlines()
    assert lines[0] == "Leaves with inf or NaN: 2 of 5. In float16 at loss scale 2**0:"
    assert max(map(len, lines)) <= 80
    assert [list(cells) for cells in found.cells()[1:]] == [line.split() for line in lines[2:]]


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


def test_a_share_of_nothing_is_a_dash():
    grads = {"nan": jnp.full(2, jnp.nan), "zero": jnp.zeros(2), "empty": jnp.zeros(0)}
    cells = {cells[0]: cells[4:] for cells in diagnostics.table(leaf_counts(grads)).cells()}
    assert cells["nan"] == ("0%", "-", "-", "-", "-")
    assert cells["zero"] == ("100%", "-", "-", "-", "0")
    assert cells["empty"] == ("-", "-", "-", "-", "-")


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
    run = jax.shard_map(
        lambda x: count(x, axis_name=axis_name),
        mesh=MESH, in_specs=spec, out_specs=PartitionSpec(), **{CHECK: check},
    )  # fmt: skip
    x = jnp.asarray(float32_bits(57))
    sharded = jax.device_put(x, NamedSharding(MESH, spec))
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


HUGE = jax.ShapeDtypeStruct((2**16, 2**15), jnp.float32)
TREES = {
    "empty": ({}, r"must hold floating or complex arrays, got a tree without any leaf"),
    "integers": ({"a": np.arange(3, dtype=np.int32), "b": True}, r"got only .*bool.*int32"),
    "huge": (HUGE, r"got 2147483648 elements at the root"),
}


@cases(("call", "name"), itertools.product(["leaf_counts", "histogram"], TREES))
def test_errors_of_trees(call, name):
    tree, message = TREES[name]
    function = getattr(diagnostics, call)
    with pytest.raises(ValueError, match=rf"`{call}\(.*=\.\.\.\)`.*{message}.*Pass"):
        jax.eval_shape(function, tree) if name == "huge" else function(tree)


G = np.ones(2, np.float32)
COUNTED = diagnostics.leaf_counts
ERRORS = {
    r"loss_scale=.*got 0\.0": lambda: COUNTED(G, loss_scale=0),
    r"one number.*\(2,\)": lambda: COUNTED(G, loss_scale=G),
    r"loss_scale=.*got <class": lambda: COUNTED(G, loss_scale=jnp.float16),
    r"`table\(counts=.*leaf_counts.*got ndarray": lambda: diagnostics.table(G),
    r"outside of `jit`": lambda: jax.jit(lambda g: diagnostics.table(COUNTED(g)).loss_scale)(G),
    r"to_json.*object": lambda: diagnostics.to_json(object()),
}


@cases("message", ERRORS)
def test_errors(message):
    with pytest.raises(ValueError if "0\\.0" in message else TypeError, match=message):
        ERRORS[message]()
