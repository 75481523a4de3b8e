"""Counts that are the same on every machine: traces, and the kernels of compiled programs."""

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
from jaxscale._jax import VIEWS_ARE_FREE

pytestmark = [
    pytest.mark.standard_promotion,
    pytest.mark.slow,
    pytest.mark.xdist_group("counts"),  # in one worker, as all need what takes the time
]


def test_a_step_of_adamw_has_one_branch():
    tx = jaxscale.loss_scaled(optax.adamw(1e-3))
    w = jnp.ones((64, 64))
    compiled = jax.jit(tx.update).lower(w, tx.init(w), w).compile()
    assert compiled.as_text().count(" conditional(") == 1


PARAMS = {f"w{i}": jnp.ones((64, 64)) for i in range(6)}
TX = jaxscale.loss_scaled(optax.adamw(1e-3))


def loss_fn(params, x):
    for w in params.values():
        x = jnp.tanh(x @ w.astype(jnp.float16))
    return jnp.mean(x.astype(jnp.float32))


def by_hand(params, opt_state, x):
    loss, grads = jaxscale.value_and_grad(loss_fn, opt_state)(params, x)
    params, opt_state = jaxscale.apply_gradients(
        TX, grads, opt_state, params, value=loss
    )
    return params, opt_state, loss


STEPS = {"by hand": by_hand, "whole": jaxscale.train_step(loss_fn, TX)}


@pytest.mark.parametrize("name", STEPS)
def test_nothing_is_transferred_and_donated_parameters_are_updated_in_place(name):
    opt_state = TX.init(PARAMS)
    step = jax.jit(STEPS[name], donate_argnums=(0, 1))
    compiled = step.lower(PARAMS, opt_state, jnp.ones((8, 64), jnp.float16)).compile()
    assert not re.search(
        r"custom-call.*callback|infeed|outfeed|\bsend\b", compiled.as_text()
    )
    size = sum(leaf.nbytes for leaf in jax.tree.leaves((PARAMS, opt_state.inner_state)))
    assert compiled.memory_analysis().alias_size_in_bytes >= size


@pytest.fixture(scope="module")
def count():
    """Counts what is in the benchmarks' steps, compiled for one device, of one layer and three."""
    script = pathlib.Path(__file__).parent.parent / "support" / "counts.py"
    environment = os.environ | {
        # What is counted is decided before LLVM makes code of it.
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run(
        [sys.executable, script],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout)

    def read(what, name, *row):
        return counts[", ".join(map(str, (name, *row)))][what]

    return read


BARE, WHOLE, APPLY, WRAPPER = counted.NAMES
FEW, MANY = (len(counted.shapes(layers)) for layers in (1, 3))
MORE_MATRICES = 2 * 4  # in two layers
# How many kernels and, at the most, equations a leaf takes. Gradients that are unscaled before the
# branch are stored, each by a kernel; an update of the wrapper is applied outside of it. The
# equations unscale, judge (twice: CPUs split large leaves), and select four times. A matrix takes
# two more for its flat view, which a CPU stores, and back.
EACH = {WHOLE: (0, 8), APPLY: (1, 7), WRAPPER: (2, 7)}


@pytest.mark.parametrize("name", EACH)
def test_a_leaf_takes_few_kernels_and_equations_more_than_without_a_scale(count, name):
    def more(what, layers, clip=False):
        bare = count(what, BARE, layers, "float32", False)
        return count(what, name, layers, "float32", clip) - bare

    kernels, equations = EACH[name]
    for clip in (False, True):
        other_kernels = more("kernels", 1, clip) - kernels * FEW
        assert other_kernels < 60
        assert more("kernels", 3, clip) - kernels * MANY < other_kernels + 3
    more_equations = more("equations", 3) - more("equations", 1)
    assert more_equations <= equations * (MANY - FEW) + 4 * MORE_MATRICES


MOVED = "bytes_per_parameter"
STORED = "temporary_bytes_per_parameter"


@pytest.mark.parametrize("dtype", counted.DTYPES)
def test_few_bytes_are_moved_and_stored_beside_those_of_the_optimizer(count, dtype):
    bare, whole, apply, wrapper = (
        count(MOVED, name, 1, dtype, False) for name in counted.NAMES
    )
    # XLA stores what it reduces, or not: that depends on dtype and version, and is the same for
    # one leaf alone. The scalars of the state are some bytes in a thousand.
    assert whole <= bare + count(MOVED, "verdict", dtype) + 0.1
    stored = count(STORED, WHOLE, 1, dtype, False)
    assert stored <= count(STORED, "verdict", dtype) + 0.1
    # Gradients that are unscaled before the branch are written in float32, and read. Those of half
    # precision are also read in float32 by the verdict, and no longer by the step.
    assert 7.9 <= apply - whole <= (8.1 if dtype == "float32" else 12.1)
    # The updates, in float32, are written, and read to apply them to parameters, which are read
    # and written once more.
    assert wrapper <= apply + 12.1


@pytest.mark.skipif(not VIEWS_ARE_FREE, reason="XLA would copy what is read by rows")
@pytest.mark.parametrize("dtype", counted.DTYPES[1:])
def test_gradients_of_half_precision_products_are_stored_by_rows_alone(count, dtype):
    # XLA would also store them by columns: 4 bytes more, which are written and read.
    for name in (WHOLE, APPLY):
        assert count(STORED, name, dtype, "products") < 7.5
    bare = count(MOVED, BARE, dtype, "products")
    verdict = count(MOVED, "verdict", "float32")
    assert count(MOVED, WHOLE, dtype, "products") <= bare + verdict + 10.2


def test_norm_and_verdict_are_one_pass(count):
    norm = count(MOVED, "norm", "float32")
    for layers in (1, 3):
        bare = count(MOVED, BARE, layers, "float32", False)
        clipped = count(MOVED, WHOLE, layers, "float32", True)
        assert clipped <= bare + norm + 0.1
    # Optax's norm has a kernel for each leaf.
    bare_kernels = count("kernels", BARE, 3, "float32", True)
    assert count("kernels", WHOLE, 3, "float32", True) < bare_kernels


# XLA on a CPU stores integers where the verdict has bools: a quarter or half of a byte, in all. The
# kernels are those of the state, which is made of integers. A norm is a sum over the same numbers,
# which XLA on a CPU takes in a pass of its own.
LARGEST = {
    (1, "float32", False): (0.6, 15),
    (3, "float32", False): (0.6, 15),
    (1, "float16", False): (0.6, 15),
    (1, "bfloat16", False): (0.6, 15),
    (1, "float32", True): (4.6, 40),
}


@pytest.mark.parametrize("row", LARGEST)
def test_the_largest_gradient_costs_neither_a_pass_nor_a_kernel_for_each_leaf(
    count, row
):
    def more(what):
        return count(what, counted.FOLLOWING, *row) - count(what, WHOLE, *row)

    most_bytes, most_kernels = LARGEST[row]
    assert more(MOVED) <= most_bytes
    assert more("kernels") < most_kernels
