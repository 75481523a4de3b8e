"""The largest gradient: its value, for every kind of leaf, and what it costs."""

import hlo
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxscale
from jaxscale._verdict import largest

DTYPES = ["float16", "bfloat16", "float32", "float8_e5m2", "float8_e4m3fn"]
SHAPES = [(), (1,), (3, 5), (2**16,), (7, 2**14), (0,), (4, 0)]


def mesh(kind=jax.sharding.AxisType.Auto):
    return jax.sharding.Mesh(np.array(jax.devices("cpu")), ("data",), axis_types=(kind,))


def numbers(shape, dtype, seed=0):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.standard_normal(shape).astype(np.float32)).astype(dtype)


def expected(leaves):
    return max((float(np.abs(np.float64(x)).max(initial=0)) for x in leaves), default=0.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_the_largest_absolute_value(dtype):
    leaves = [numbers(shape, dtype, seed) for seed, shape in enumerate(SHAPES)]
    for tree in (leaves, leaves[:1], leaves[3:4], leaves[-2:], []):
        for fun in (largest, jax.jit(largest)):
            size = fun(tree)
            assert (size.dtype, size.shape) == (jnp.float32, ())
            assert size == expected(tree)


def test_every_single_element_is_read():
    for shape in ((5,), (16, 2**13)):  # large enough to be split, and small
        zeros = np.zeros(shape, np.float32)
        for place in (0, zeros.size // 2, zeros.size - 1):
            leaf = zeros.copy()
            leaf.flat[place] = -3.0
            assert jax.jit(largest)([jnp.asarray(leaf), jnp.ones(3, jnp.float16)]) == 3


def test_signs_and_parts_of_complex_numbers():
    assert largest({"w": jnp.array([-4.0, 3.0])}) == 4
    assert largest({"w": jnp.array([3 - 4j, 1 + 1j], jnp.complex64)}) == 4
    assert largest({"w": jnp.array([-6 + 1j], jnp.complex64), "b": jnp.float16(5)}) == 6
    assert largest({"n": jnp.arange(9), "none": None, "text": "no"}) == 0


def test_flaxs_overwrites_do_not_count():
    assert largest({"w": jnp.ones(2), "_overwrite_with_gradient": jnp.full(2, 9.0)}) == 1


def test_it_works_for_symbolic_shapes():
    (size,) = jax.export.symbolic_shape("n")
    aval = jax.ShapeDtypeStruct((size,), jnp.float32)
    exported = jax.export.export(jax.jit(lambda x: largest([x])))(aval)
    assert exported.call(jnp.array([1.0, -7.0, 2.0])) == 7


def compiled(policy, sharded):
    """The compiled update of a policy, by hand over devices or by the compiler."""
    state = policy.init()
    tree = [jnp.ones((8, 64), dtype) for dtype in ("float32", "float16", "float32", "bfloat16")]
    if not sharded:

        def update(state, tree):
            return policy.update(state, tree, axis_name="data")[0]

        specs = {"in_specs": (P(), P("data")), "out_specs": P()}
        update = jax.shard_map(update, mesh=mesh(), **specs)
        return jax.jit(update).lower(state, tree).compile()
    placed = jax.device_put(tree, NamedSharding(mesh(), P("data")))
    replicated = jax.device_put(state, NamedSharding(mesh(), P()))
    return jax.jit(policy.update).lower(replicated, placed).compile()


@pytest.mark.parametrize("sharded", [False, True])
def test_it_takes_one_message_more_than_the_verdict_alone(sharded):
    counts = [
        hlo.program(compiled(policy, sharded), 1)["all_reduces"]
        for policy in (jaxscale.AdaptiveLossScale(), jaxscale.DynamicLossScale())
    ]
    # As many more as the verdict takes: one, where XLA merges those of the leaves.
    assert counts[1] == 1 or (sharded and jax.__version_info__ < (0, 7))
    assert counts[0] == 2 * counts[1]


def test_its_kernels_do_not_grow_with_leaves():
    def kernels(leaves, size, dtype):
        def alone(tree):
            return largest(tree, "data")

        fun = jax.shard_map(alone, mesh=mesh(), in_specs=P(), out_specs=P())
        avals = [jax.ShapeDtypeStruct((size,), dtype)] * leaves
        program = hlo.program(jax.jit(fun).lower(avals).compile(), leaves * size)
        return program["kernels"], program["bytes_per_parameter"]

    for dtype, width in (("float32", 4), ("float16", 2)):
        assert kernels(3, 64, dtype)[0] == kernels(12, 64, dtype)[0]
        # What XLA stores is an eighth, written and read, of one leaf, and less of more leaves.
        for leaves, stored in ((1, width / 8), (16, width / 16)):
            assert kernels(leaves, 2**18, dtype)[1] <= width + 2 * stored + 0.1
