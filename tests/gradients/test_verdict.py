"""The verdict: of every element of every leaf, from one pass, however leaves are put together."""

import functools
import itertools
import os
import re
import subprocess
import sys
from typing import NamedTuple

import fast_math
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from following import Following
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from tables import cases, spread
from training import x64

import jaxscale
from jaxscale._gradients.reduction import reduce_gradients, reduce_sizes
from jaxscale._gradients.scaled import Scaled


def test_an_inf_is_found_and_large_numbers_pass():
    assert jaxscale.all_finite({"w": jnp.array([3e38, -3e38]), "b": None})
    assert not jaxscale.all_finite({"w": jnp.array([1.0, jnp.inf]), "b": None})


DTYPES = [
    *("float32", "float16", "bfloat16", "complex64", "float64", "complex128"),
    *("float8_e5m2", "float8_e4m3fn", "float8_e4m3b11fnuz", "float8_e5m2fnuz"),
]
MIXED = ["mixed, on one device", "mixed, on several"]
# 66 leaves of one shape, as at most 64 share one reduction, and some of other shapes.
SHAPES = {f"{i:02}": (3,) for i in range(66)}
SHAPES |= {"a": (2, 2), "b": (2, 2), "c": (), "d": (0,)}


def is_finite(tree, **options):
    return reduce_gradients(tree, **options).finite()


def has_finite_sizes(tree, divisor=None, **options):
    return reduce_sizes(Scaled(tree, divisor), **options).finite()


def applies(tx):
    """Returns a function that says whether an optimizer applies gradients."""

    def verdict(tree):
        _, state = tx.update(tree, tx.init(tree))
        return state.total_notfinite == 0

    return verdict


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
    "of a step, with norm and leaves": applies(jaxscale.skip_nonfinite(SGD, **TRACKED)),
    "of a step, following, with norm and leaves": applies(
        jaxscale.loss_scaled(SGD, Following(), **TRACKED)
    ),
}


@pytest.fixture
def one_device(monkeypatch):
    """Leaves are put together where nothing has to be sent around for it."""
    monkeypatch.setattr(jax, "device_count", lambda: 1)


def filled(dtype):
    """A tree of numbers of a dtype, or of all dtypes in turn."""
    dtypes = itertools.cycle([dtype])
    if dtype in MIXED:
        dtypes = itertools.cycle(DTYPES)
    tree = {}
    for name, shape in SHAPES.items():
        tree[name] = np.ones(shape, jnp.dtype(next(dtypes)))
    return tree


def spoil(leaf, i):
    """A leaf whose element `i` is inf, -inf or NaN; of a complex element, one part is."""
    bad = (np.inf, -np.inf, np.nan)[i % 3]
    if np.iscomplexobj(leaf):
        bad = complex(1, bad) if i % 2 else complex(bad, 1)
    spoiled = leaf.copy()
    spoiled.flat[i] = bad  # float8 without an inf has a NaN for it
    return spoiled


@pytest.mark.worlds
@pytest.mark.device
@pytest.mark.standard_promotion
@cases(
    "dtype, name",
    # Those that are mixed have each dtype.
    [*itertools.product(MIXED, VERDICTS), *spread(DTYPES, REDUCTIONS)],
    fast=[(MIXED[1], "public"), (MIXED[0], "of a step, with norm and leaves")],
)
def test_no_element_of_any_leaf_is_overlooked(dtype, name, request):
    if dtype != MIXED[1]:
        request.getfixturevalue("one_device")
    verdict = jax.jit(VERDICTS[name])
    with x64():
        tree = filled(dtype)
        assert verdict(tree)
        for key, leaf in tree.items():
            for i in range(leaf.size):
                spoiled = tree | {key: spoil(leaf, i)}
                assert not verdict(spoiled), (key, i)


@pytest.mark.worlds
@pytest.mark.device
@pytest.mark.standard_promotion
@cases(
    "dtype, name",
    spread([MIXED[0], *DTYPES], REDUCTIONS),
    fast=[("complex64", "of the largest"), (MIXED[0], "of the largest")],
)
def test_the_largest_finite_number_passes(dtype, name, one_device):
    verdict = jax.jit(REDUCTIONS[name])
    with x64():
        tree = filled(dtype)
        for sign in (1.0, -1.0):
            for leaf in tree.values():
                leaf[...] = sign * float(jnp.finfo(leaf.dtype).max)
            assert verdict(tree), sign


class Reductions(NamedTuple):
    """The number of reductions in a program, and of the numbers that they take in."""

    number: int
    num_inputs: int


def list_equations(jaxpr, branch):
    for eqn in jaxpr.eqns:
        if "branches" in eqn.params:
            yield from list_equations(eqn.params["branches"][branch].jaxpr, branch)
        else:
            yield eqn


def count_reductions(fun, tree, branch=0):
    """Counts reductions. If the platform decides, the first branch is that of a CPU."""
    sizes = []
    for eqn in list_equations(jax.make_jaxpr(fun)(tree).jaxpr, branch):
        if eqn.primitive.name.startswith("reduce_"):
            sizes.append(eqn.invars[0].aval.size)
    return Reductions(len(sizes), sum(sizes))


# Leaves of 8 numbers: 70 of one type, one of another shape, and one of another dtype.
LEAVES_OF_8 = {f"w{i}": jnp.ones((4, 2)) for i in range(70)}
LEAVES_OF_8 |= {"b": jnp.ones(8), "half": jnp.ones((4, 2), jnp.bfloat16)}


@cases("squares", [False, True])
def test_leaves_of_one_type_are_reduced_together(squares, one_device):
    reduce = functools.partial(is_finite, squares=squares)
    # 64 + 6 leaves of one type, and two others.
    assert count_reductions(reduce, LEAVES_OF_8) == Reductions(4, num_inputs=4 * 8)
    by_leaf = functools.partial(reduce, by_leaf=True)
    assert count_reductions(by_leaf, LEAVES_OF_8) == Reductions(72, num_inputs=72 * 8)
    large = jax.ShapeDtypeStruct((2**16,), jnp.float32)
    assert count_reductions(reduce, [large] * 20).number == 2  # 16 + 4


# The shape of a leaf, and in how many parts it is taken: of an axis that can be divided.
PARTS = {
    "one axis": ((2**16,), 8),
    "the second axis": ((9, 2**13), 8),
    "an axis that is even": ((2**14 + 2, 6), 2),
    "an odd axis": ((2**16 + 1,), 1),
    "a small leaf": ((2**15,), 1),
}


@cases("name", PARTS)
def test_a_large_leaf_is_taken_in_parts_on_a_cpu_alone(name, one_device):
    shape, num_parts = PARTS[name]
    leaf = np.ones(shape, np.float32)
    on_cpu = count_reductions(jaxscale.all_finite, leaf)
    elsewhere = count_reductions(jaxscale.all_finite, leaf, branch=-1)
    assert on_cpu == Reductions(1, leaf.size // num_parts)
    assert elsewhere == Reductions(1, leaf.size)
    verdict = jax.jit(jaxscale.all_finite)
    for i in np.random.default_rng(0).integers(0, leaf.size, 16):
        spoiled = leaf.copy()
        spoiled.flat[i] = np.nan
        assert not verdict(spoiled), i


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
    # a float32 sum of the squares of 207 numbers, or of twice as many parts
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


@pytest.mark.worlds
def test_by_leaf_says_which(one_device):
    tree = filled("float32") | {"a": np.array([[1, np.nan], [1, 1]], np.float32)}
    expected = [name != "a" for name in sorted(tree)]
    of_finite = reduce_gradients(tree, by_leaf=True)
    assert list(map(bool, of_finite.finite_groups())) == expected
    of_sizes = reduce_sizes(Scaled(tree), by_leaf=True)
    assert list(map(bool, of_sizes.finite_groups())) == expected


@cases("axis_type, number", [(AxisType.Auto, 3), (AxisType.Explicit, 2)])
def test_where_leaves_lie_is_known_or_they_stay_apart(axis_type, number):
    # The leaves have one shape, but are divided differently. Putting them together would send one
    # of them around, and so would taking them in parts.
    mesh = jax.make_mesh((8,), ("x",), axis_types=(axis_type,))
    tree = []
    for spec in [PartitionSpec("x"), PartitionSpec(None, "x"), PartitionSpec("x")]:
        sharding = NamedSharding(mesh, spec)
        tree.append(jax.device_put(jnp.ones((512, 512)), sharding))
    assert count_reductions(jaxscale.all_finite, tree).number == number
    compiled = jax.jit(jaxscale.all_finite).lower(tree).compile()
    assert not re.search("all-gather|all-to-all|permute", compiled.as_text())
    assert compiled(tree)


def test_inside_of_shard_map_all_leaves_lie_on_one_device():
    counts = []

    def verdict(tree):
        counts.append(count_reductions(jaxscale.all_finite, tree).number)
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


@pytest.mark.worlds
@cases("devices", [1, 8], fast=[8])
def test_fast_math_removes_no_verdict(devices):
    flags = f"--xla_cpu_enable_fast_math=true --xla_force_host_platform_device_count={devices}"
    environment = os.environ | {"XLA_FLAGS": flags}
    subprocess.run([sys.executable, fast_math.__file__], check=True, env=environment)
