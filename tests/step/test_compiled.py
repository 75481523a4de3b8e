"""What does not vary from machine to machine: traces, and what the compiled program holds."""

import json
import os
import pathlib
import re
import subprocess
import sys

import counts as counted
import jax
import jax.numpy as jnp
import optax
import pytest

import jaxscale

pytestmark = [pytest.mark.standard_promotion, pytest.mark.slow]

PARAMS = {f"w{i}": jnp.ones((64, 64)) for i in range(6)}
TX = jaxscale.loss_scaled(optax.adamw(1e-3))


def loss_fn(params, x):
    for w in params.values():
        x = jnp.tanh(x @ w.astype(jnp.float16))
    return jnp.mean(x.astype(jnp.float32))


def train_step(params, opt_state, x):
    loss, grads = jaxscale.value_and_grad(loss_fn, opt_state)(params, x)
    return *jaxscale.apply_gradients(TX, grads, opt_state, params, value=loss), loss


@pytest.fixture(scope="module")
def compiled():
    x = jnp.ones((8, 64), jnp.float16)
    step = jax.jit(train_step, donate_argnums=(0, 1))
    return step.lower(PARAMS, TX.init(PARAMS), x).compile()


def test_no_host_callback_and_no_transfer(compiled):
    assert not re.search(r"custom-call.*callback|infeed|outfeed|\bsend\b", compiled.as_text())


def test_donated_parameters_are_updated_in_place(compiled):
    memory = compiled.memory_analysis()
    size = sum(leaf.nbytes for leaf in jax.tree.leaves((PARAMS, TX.init(PARAMS).inner_state)))
    assert memory.alias_size_in_bytes >= size


@pytest.fixture(scope="module")
def counts():
    """What the benchmarks' steps hold, compiled for one device, of one layer and of three."""
    script = pathlib.Path(__file__).parent.parent / "support" / "counts.py"
    environment = os.environ | {"XLA_FLAGS": "", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


BARE, WHOLE, APPLY, WRAPPER = counted.NAMES
LEAVES = {layers: len(counted.shapes(layers)) for layers in (1, 3)}


@pytest.mark.parametrize("clip", [False, True])
def test_kernels_do_not_grow_with_leaves(counts, clip):
    def kernels(name, layers, clip):
        return counts[f"{name}, {layers}, float32, {clip}"]["kernels"]

    # Gradients that are unscaled before the branch are stored, each by a kernel of its own. Of the
    # wrapper's updates, each is applied outside of the branch.
    for name, each in ((WHOLE, 0), (APPLY, 1), (WRAPPER, 2)):
        extra = {
            layers: kernels(name, layers, clip) - kernels(BARE, layers, False) - each * leaves
            for layers, leaves in LEAVES.items()
        }
        assert extra[3] - extra[1] < 3
        assert extra[1] < 60
    # Optax's norm has a kernel for each leaf.
    assert kernels(WHOLE, 3, True) < kernels(BARE, 3, True)


def test_a_leaf_takes_few_equations_more_than_without_a_scale(counts):
    """To unscale it, for the verdict, and four selections. The updates of a skip are shared.

    The verdict of large leaves is written down twice, for CPUs, which split them, and for others.
    """

    def equations(name):
        few, many = (counts[f"{name}, {layers}, float32, False"]["equations"] for layers in (1, 3))
        return (many - few) / (LEAVES[3] - LEAVES[1])

    for name, most in ((WHOLE, 8), (APPLY, 7), (WRAPPER, 7)):
        assert equations(name) - equations(BARE) <= most


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_no_byte_is_moved_but_for_the_verdict(counts, dtype):
    rows = [counts[f"{name}, 1, {dtype}, False"] for name in counted.NAMES]
    bare, whole, apply, wrapper = (row["bytes_per_parameter"] for row in rows)
    # XLA stores what it reduces, or not: that depends on dtype and version, and is the same for
    # one leaf alone. The scalars of the state are some bytes in a thousand.
    verdict = counts[f"verdict, {dtype}"]
    assert whole <= bare + verdict["bytes_per_parameter"] + 0.1
    stored = rows[1]["temporary_bytes_per_parameter"]
    assert stored <= verdict["temporary_bytes_per_parameter"] + 0.1
    # Unscaled before the branch, gradients are written in float32, and read. Those of half
    # precision are read in float32 by the verdict, too, and no longer by the step.
    assert whole + 7.9 <= apply <= whole + (8.1 if dtype == "float32" else 12.1)
    # And the updates, in float32, are written, and read to apply them to parameters, which are
    # read and written once more.
    assert wrapper <= apply + 12.1
    assert [row["conditionals"] for row in rows] == [0, 1, 1, 1]


def test_norm_and_verdict_are_one_pass(counts):
    norm = counts["norm, float32"]["bytes_per_parameter"]
    for layers in LEAVES:
        bare = counts[f"{BARE}, {layers}, float32, False"]["bytes_per_parameter"]
        clipped = counts[f"{WHOLE}, {layers}, float32, True"]["bytes_per_parameter"]
        assert clipped <= bare + norm + 0.1


@pytest.mark.parametrize("key", ["1, float32", "3, float32", "1, float16", "1, bfloat16"])
def test_the_largest_gradient_costs_neither_a_pass_nor_a_kernel_for_each_leaf(counts, key):
    # XLA on a CPU stores integers where the verdict has bools: a quarter or half of a byte, in all.
    # The kernels are those of the state, which is made of integers. A norm is a sum over the same
    # numbers, which XLA on a CPU takes in a pass of its own.
    rows = [(f"{key}, False", 0.6, 15)] + [(f"{key}, True", 4.6, 40)] * (key == "1, float32")
    for row, moved, kernels in rows:
        default, largest = (counts[f"{name}, {row}"] for name in (WHOLE, counted.ADAPTIVE))
        assert largest["bytes_per_parameter"] - default["bytes_per_parameter"] <= moved
        assert largest["kernels"] - default["kernels"] < kernels
