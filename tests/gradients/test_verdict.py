"""The verdict: of every element of every leaf, from one pass, however leaves are put together."""

import functools
import itertools
import os
import re
import subprocess
import sys

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
SHAPES = {f"{i:02}": (3,) for i in range(66)} | {"a": (2, 2), "b": (2, 2), "c": (), "d": (0,)}


def finite(tree, **how):
    return reduce_gradients(tree, **how).finite()


def of_sizes(tree, divisor=None, **how):
    return reduce_sizes(Scaled(tree, divisor), **how).finite()


def of_a_step(make, **options):
    tx = make(optax.identity(), **options)
    return lambda tree: tx.update(tree, tx.init(tree))[1].total_notfinite == 0


partial, both = functools.partial, {"max_norm": 1.0, "track_leaves": True}
VERDICTS = {
    "public": jaxscale.all_finite,
    "with squares": partial(finite, squares=True),
    "by leaf": partial(finite, by_leaf=True),
    "of the largest": of_sizes,
    "of the largest by leaf": partial(of_sizes, by_leaf=True),
    "of the largest, divided": partial(of_sizes, divisor=jnp.float32(2.0**4)),
    "of a step": of_a_step(jaxscale.skip_nonfinite),
    "of a step, both": of_a_step(jaxscale.skip_nonfinite, **both),
    "of a step, adaptive, both": of_a_step(jaxscale.loss_scaled, loss_scale="adaptive", **both),
}


@pytest.fixture
def one_device(monkeypatch):
    """Leaves are put together where nothing has to be sent around for it."""
    monkeypatch.setattr(jax, "device_count", lambda: 1)


def filled(dtype, value=1.0):
    """A tree of numbers of a dtype, or of all dtypes in turn."""
    kinds = itertools.cycle(DTYPES if "mixed" in dtype else [dtype])
    pairs = zip(SHAPES.items(), kinds, strict=False)
    return {name: np.full(shape, value, jnp.dtype(kind)) for (name, shape), kind in pairs}


@pytest.mark.standard_promotion
@cases(
    "name, dtype",
    [*itertools.product(VERDICTS, MIXED), *itertools.product(list(VERDICTS)[:6], DTYPES)],
    fast=[("public", MIXED[1]), ("of the largest", "complex64"), ("of a step, both", MIXED[0])],
)
def test_no_element_of_any_leaf_is_overlooked(name, dtype, request):
    if dtype != MIXED[1]:
        request.getfixturevalue("one_device")
    verdict = jax.jit(VERDICTS[name])
    with x64():
        tree = filled(dtype)
        assert verdict(tree)
        if dtype in DTYPES:
            for value in (largest := float(jnp.finfo(dtype).max), -largest):
                assert verdict(filled(dtype, value))
        for leaf, i in ((name, i) for name in SHAPES for i in range(tree[name].size)):
            bad, spoiled = (np.inf, -np.inf, np.nan)[i % 3], tree[leaf].copy()
            if np.iscomplexobj(spoiled):
                bad = complex(1, bad) if i % 2 else complex(bad, 1)
            spoiled.flat[i] = bad  # float8 without an inf has a NaN for it
            assert not verdict(tree | {leaf: spoiled}), (leaf, i)


def reductions(fun, *args, branch=0):
    """How many reductions are in a program, and how many numbers they take in.

    Of what depends on the platform, the first branch is a CPU's, and the last everyone else's.
    """

    def equations(jaxpr):
        for eqn in jaxpr.eqns:
            branches = eqn.params.get("branches")
            yield from equations(branches[branch].jaxpr) if branches else [eqn]

    every = equations(jax.make_jaxpr(fun)(*args).jaxpr)
    sizes = [e.invars[0].aval.size for e in every if e.primitive.name.startswith("reduce_")]
    return len(sizes), sum(sizes)


@cases("squares", [False, True])
def test_leaves_of_one_type_are_reduced_as_one(squares, one_device):
    tree = {f"w{i}": jnp.ones((4, 2)) for i in range(70)}
    tree |= {"b": jnp.ones(8), "half": jnp.ones((4, 2), jnp.bfloat16)}
    together = partial(finite, squares=squares)
    assert reductions(together, tree) == (2 + 1 + 1, 4 * 8)  # 64 + 6, and two more
    assert reductions(partial(together, by_leaf=True), tree) == (72, 72 * 8)
    large = {f"w{i}": jax.ShapeDtypeStruct((2**16,), jnp.float32) for i in range(20)}
    assert reductions(together, large)[0] == 2  # 16 + 4


def test_a_large_leaf_is_taken_in_parts_on_a_cpu_alone(one_device):
    # Of an axis that can be divided, the rest stays whole.
    shapes = {(2**16,): 8, (9, 2**13): 8, (2**14 + 2, 6): 2, (2**16 + 1,): 1, (2**15,): 1}
    for shape, parts in shapes.items():
        leaf, size, verdict = (
            np.ones(shape, np.float32),
            np.prod(shape),
            jax.jit(jaxscale.all_finite),
        )
        assert reductions(jaxscale.all_finite, leaf) == (1, size // parts)
        assert reductions(jaxscale.all_finite, leaf, branch=-1) == (1, size)
        for i in np.random.default_rng(0).integers(0, size, 16):
            spoiled = leaf.copy()
            spoiled.flat[i] = np.nan
            assert not verdict(spoiled)


def test_the_sum_of_squares_is_that_of_all(one_device):
    rng = np.random.default_rng(0)
    for dtype in ("float16", "complex64"):
        tree = filled(dtype)
        tree = {k: rng.standard_normal(v.shape).astype(v.dtype) for k, v in tree.items()}
        expected = sum(np.sum(np.abs(leaf.astype(np.complex128)) ** 2) for leaf in tree.values())
        total = reduce_gradients(tree, squares=True).squares()
        assert total.dtype == jnp.float32
        np.testing.assert_allclose(total, expected, rtol=1e-6)  # a float32 sum of 110 numbers
    evidence = reduce_gradients({"w": jnp.full(4, 3e38)}, squares=True)
    assert (bool(evidence.finite()), float(evidence.squares())) == (True, np.inf)
    with x64():
        total = reduce_gradients(
            {"a": jnp.full(2, 1e100), "b": np.float32(1)}, squares=True
        ).squares()
        np.testing.assert_allclose(total, 2e200, rtol=1e-15)


def test_by_leaf_says_which(one_device):
    tree = filled("float32") | {"a": np.array([[1, np.nan], [1, 1]], np.float32)}
    for evidence in (
        reduce_gradients(tree, by_leaf=True),
        reduce_sizes(Scaled(tree), by_leaf=True),
    ):
        assert list(map(bool, evidence.finite_groups())) == [name != "a" for name in sorted(tree)]


def test_where_leaves_lie_is_known_or_they_stay_apart():
    # Of one shape, but divided differently: to put them together would send one of them around.
    # So would it to take them in parts, large as they are.
    for axis_type, number in ((AxisType.Auto, 3), (AxisType.Explicit, 2)):
        mesh = jax.make_mesh((8,), ("x",), axis_types=(axis_type,))
        specs = [PartitionSpec("x"), PartitionSpec(None, "x"), PartitionSpec("x")]
        tree = [jax.device_put(jnp.ones((512, 512)), NamedSharding(mesh, spec)) for spec in specs]
        assert reductions(jaxscale.all_finite, tree)[0] == number
        compiled = jax.jit(jaxscale.all_finite).lower(tree).compile()
        assert not re.search("all-gather|all-to-all|permute", compiled.as_text())
        assert compiled(tree)
    # Inside of `shard_map` all of them lie on one device.
    counts = []

    def verdict(tree):
        counts.append(reductions(jaxscale.all_finite, tree)[0])
        return jaxscale.all_finite(tree, axis_name="x")

    mesh, data = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,)), PartitionSpec("x")
    fun = jax.jit(jax.shard_map(verdict, mesh=mesh, in_specs=data, out_specs=PartitionSpec()))
    tree = {name: jnp.ones(16) for name in "abcd"}
    assert fun(tree)
    assert not fun(tree | {"c": tree["c"].at[13].set(jnp.inf)})
    assert set(counts) == {1}


@cases("devices", [1, 8], fast=[8])
def test_fast_math_removes_no_verdict(devices):
    # A compiler that may reorder arithmetic makes 0 of x - x. In a process of its own: such
    # options hold for all that a process compiles.
    code = """
import jax, jax.numpy as jnp, numpy as np, optax, jaxscale
tree = {"f": np.ones(1000, np.float32), "h": np.ones((2, 3), np.float16),
        "c": np.ones(7, np.complex64), "l": np.ones(2**17, np.float32)}
txs = [jaxscale.skip_nonfinite(optax.identity(), max_norm=norm) for norm in (None, 1.0)]
txs.append(jaxscale.loss_scaled(optax.identity(), "adaptive"))
@jax.jit
def verdicts(tree):
    states = [tx.update(tree, tx.init(tree))[1] for tx in txs]
    return [jaxscale.all_finite(tree), *(state.step_applied for state in states)]
assert all(verdicts(tree))
for name, leaf in tree.items():
    for bad in (np.inf, -np.inf, np.nan):
        spoiled = leaf.copy()
        spoiled.flat[-1] = complex(1, bad) if name == "c" else bad
        assert not any(verdicts(tree | {name: spoiled})), (name, bad)
"""
    flags = f"--xla_cpu_enable_fast_math=true --xla_force_host_platform_device_count={devices}"
    environment = os.environ | {"XLA_FLAGS": flags}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
