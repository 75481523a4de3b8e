"""The verdict: of every element of every leaf, from one pass, however leaves are put together."""

import functools
import itertools
import os
import re
import subprocess
import sys

import fast_math
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from tables import cases
from training import x64

import jaxscale
from jaxscale._gradients.reduction import reduce_gradients, reduce_sizes
from jaxscale._gradients.scaled import Scaled

DTYPES = ["float32", "float16", "bfloat16", "complex64", "float64", "complex128"]
DTYPES += ["float8_e5m2", "float8_e4m3fn", "float8_e4m3b11fnuz", "float8_e5m2fnuz"]
MIXED = ["mixed, on one device", "mixed, on several"]
# More of one shape than are put together, and some of another.
SHAPES = {f"{i:02}": (3,) for i in range(66)} | {
    "a": (2, 2),
    "b": (2, 2),
    "c": (),
    "d": (0,),
}


def is_finite(tree, **options):
    return reduce_gradients(tree, **options).finite()


def has_finite_sizes(tree, divisor=None, **options):
    return reduce_sizes(Scaled(tree, divisor), **options).finite()


def applies(tx):
    """Whether an optimizer applies gradients."""
    return lambda tree: tx.update(tree, tx.init(tree))[1].total_notfinite == 0


SGD = optax.identity()
TRACKED = {"max_norm": 1.0, "track_leaves": True}
# Ways to a verdict on the gradients in a tree, and then those of a step.
REDUCTIONS = {
    "public": jaxscale.all_finite,
    "with squares": functools.partial(is_finite, squares=True),
    "by leaf": functools.partial(is_finite, by_leaf=True),
    "of the largest": has_finite_sizes,
    "of the largest by leaf": functools.partial(has_finite_sizes, by_leaf=True),
    "of the largest, divided": functools.partial(
        has_finite_sizes, divisor=jnp.float32(2.0**4)
    ),
}
VERDICTS = REDUCTIONS | {
    "of a step": applies(jaxscale.skip_nonfinite(SGD)),
    "of a step, both": applies(jaxscale.skip_nonfinite(SGD, **TRACKED)),
    "of a step, adaptive, both": applies(
        jaxscale.loss_scaled(SGD, "adaptive", **TRACKED)
    ),
}


@pytest.fixture
def one_device(monkeypatch):
    """Leaves are put together where nothing has to be sent around for it."""
    monkeypatch.setattr(jax, "device_count", lambda: 1)


def filled(dtype, value=1.0):
    """A tree of numbers of a dtype, or of all dtypes in turn."""
    dtypes = itertools.cycle([dtype])
    if dtype in MIXED:
        dtypes = itertools.cycle(DTYPES)
    tree = {}
    for name, shape in SHAPES.items():
        tree[name] = np.full(shape, value, jnp.dtype(next(dtypes)))
    return tree


def spoil(leaf, i):
    """A leaf whose element `i` is inf, -inf or NaN, if it is complex in one of its parts."""
    bad = (np.inf, -np.inf, np.nan)[i % 3]
    if np.iscomplexobj(leaf):
        bad = complex(1, bad) if i % 2 else complex(bad, 1)
    spoiled = leaf.copy()
    spoiled.flat[i] = bad  # float8 without an inf has a NaN for it
    return spoiled


@pytest.mark.standard_promotion
@cases(
    "name, dtype",
    [*itertools.product(VERDICTS, MIXED), *itertools.product(REDUCTIONS, DTYPES)],
    fast=[
        ("public", MIXED[1]),
        ("of the largest", "complex64"),
        ("of a step, both", MIXED[0]),
    ],
)
def test_no_element_of_any_leaf_is_overlooked(name, dtype, request):
    if dtype != MIXED[1]:
        request.getfixturevalue("one_device")
    verdict = jax.jit(VERDICTS[name])
    with x64():
        tree = filled(dtype)
        assert verdict(tree)
        for leaf_name, leaf in tree.items():
            for i in range(leaf.size):
                assert not verdict(tree | {leaf_name: spoil(leaf, i)}), (leaf_name, i)


@pytest.mark.standard_promotion
@cases(
    "name, dtype",
    itertools.product(REDUCTIONS, DTYPES),
    fast=[("of the largest", "complex64")],
)
def test_the_largest_finite_number_passes(name, dtype, one_device):
    verdict = jax.jit(VERDICTS[name])
    with x64():
        largest = float(jnp.finfo(dtype).max)
        assert verdict(filled(dtype, largest))
        assert verdict(filled(dtype, -largest))


def reductions(fun, *args, branch=0):
    """How many reductions are in a program, and how many numbers they take in.

    Of what depends on the platform, the first branch is a CPU's, and the last everyone else's.
    """

    def equations(jaxpr):
        for eqn in jaxpr.eqns:
            if "branches" in eqn.params:
                yield from equations(eqn.params["branches"][branch].jaxpr)
            else:
                yield eqn

    sizes = []
    for eqn in equations(jax.make_jaxpr(fun)(*args).jaxpr):
        if eqn.primitive.name.startswith("reduce_"):
            sizes.append(eqn.invars[0].aval.size)
    return len(sizes), sum(sizes)


@cases("squares", [False, True])
def test_leaves_of_one_type_are_reduced_as_one(squares, one_device):
    tree = {f"w{i}": jnp.ones((4, 2)) for i in range(70)}
    tree |= {"b": jnp.ones(8), "half": jnp.ones((4, 2), jnp.bfloat16)}
    together = functools.partial(is_finite, squares=squares)
    assert reductions(together, tree) == (2 + 1 + 1, 4 * 8)  # 64 + 6, and two more
    assert reductions(functools.partial(together, by_leaf=True), tree) == (72, 72 * 8)
    large = {f"w{i}": jax.ShapeDtypeStruct((2**16,), jnp.float32) for i in range(20)}
    assert reductions(together, large)[0] == 2  # 16 + 4


def test_a_large_leaf_is_taken_in_parts_on_a_cpu_alone(one_device):
    # Of an axis that can be divided, the rest stays whole.
    shapes = {
        (2**16,): 8,
        (9, 2**13): 8,
        (2**14 + 2, 6): 2,
        (2**16 + 1,): 1,
        (2**15,): 1,
    }
    verdict = jax.jit(jaxscale.all_finite)
    for shape, parts in shapes.items():
        leaf = np.ones(shape, np.float32)
        size = np.prod(shape)
        assert reductions(jaxscale.all_finite, leaf) == (1, size // parts)
        assert reductions(jaxscale.all_finite, leaf, branch=-1) == (1, size)
        for i in np.random.default_rng(0).integers(0, size, 16):
            spoiled = leaf.copy()
            spoiled.flat[i] = np.nan
            assert not verdict(spoiled)


@cases("dtype", ["float16", "complex64"])
def test_the_sum_of_squares_is_that_of_all(dtype, one_device):
    rng = np.random.default_rng(0)
    tree = {}
    expected = 0.0
    for name, leaf in filled(dtype).items():
        tree[name] = rng.standard_normal(leaf.shape).astype(leaf.dtype)
        expected += np.sum(np.abs(tree[name].astype(np.complex128)) ** 2)
    total = reduce_gradients(tree, squares=True).squares()
    assert total.dtype == jnp.float32
    # a float32 sum of 110 numbers
    np.testing.assert_allclose(total, expected, rtol=1e-6)


def test_a_sum_of_squares_that_overflows_is_no_verdict():
    reduction = reduce_gradients({"w": jnp.full(4, 3e38)}, squares=True)
    assert reduction.finite()
    assert reduction.squares() == np.inf


def test_a_sum_of_squares_has_the_widest_type():
    with x64():
        tree = {"a": jnp.full(2, 1e100), "b": np.float32(1)}
        total = reduce_gradients(tree, squares=True).squares()
        np.testing.assert_allclose(total, 2e200, rtol=1e-15)


def test_by_leaf_says_which(one_device):
    tree = filled("float32") | {"a": np.array([[1, np.nan], [1, 1]], np.float32)}
    expected = [name != "a" for name in sorted(tree)]
    of_finite = reduce_gradients(tree, by_leaf=True)
    assert list(map(bool, of_finite.finite_groups())) == expected
    of_sizes = reduce_sizes(Scaled(tree), by_leaf=True)
    assert list(map(bool, of_sizes.finite_groups())) == expected


@cases("axis_type, number", [(AxisType.Auto, 3), (AxisType.Explicit, 2)])
def test_where_leaves_lie_is_known_or_they_stay_apart(axis_type, number):
    # Of one shape, but divided differently: to put them together would send one of them around.
    # So would it to take them in parts, large as they are.
    mesh = jax.make_mesh((8,), ("x",), axis_types=(axis_type,))
    specs = [PartitionSpec("x"), PartitionSpec(None, "x"), PartitionSpec("x")]
    tree = [
        jax.device_put(jnp.ones((512, 512)), NamedSharding(mesh, spec))
        for spec in specs
    ]
    assert reductions(jaxscale.all_finite, tree)[0] == number
    compiled = jax.jit(jaxscale.all_finite).lower(tree).compile()
    assert not re.search("all-gather|all-to-all|permute", compiled.as_text())
    assert compiled(tree)


def test_inside_of_shard_map_all_leaves_lie_on_one_device():
    counts = []

    def verdict(tree):
        counts.append(reductions(jaxscale.all_finite, tree)[0])
        return jaxscale.all_finite(tree, axis_name="x")

    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    data = PartitionSpec("x")
    fun = jax.jit(
        jax.shard_map(verdict, mesh=mesh, in_specs=data, out_specs=PartitionSpec())
    )
    tree = {name: jnp.ones(16) for name in "abcd"}
    assert fun(tree)
    assert not fun(tree | {"c": tree["c"].at[13].set(jnp.inf)})
    assert set(counts) == {1}


@cases("devices", [1, 8], fast=[8])
def test_fast_math_removes_no_verdict(devices):
    flags = f"--xla_cpu_enable_fast_math=true --xla_force_host_platform_device_count={devices}"
    environment = os.environ | {"XLA_FLAGS": flags}
    subprocess.run([sys.executable, fast_math.__file__], check=True, env=environment)
