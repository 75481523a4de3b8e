"""The benchmarks run, every method that they time is right, and they count what they say."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import autocast_targets
import checks
import hlo
import jax
import jax.numpy as jnp
import jaxprs
import methods
import programs
import pytest
import trees
import zoo
from tables import cases

pytestmark = pytest.mark.standard_promotion

FOLDER = pathlib.Path(__file__).parent.parent / "benchmarks"
PACKAGES = {"Flax DynamicScale": "flax", "jmp": "jmp"}
INSTALLED = [
    name
    for name in methods.FROM_GRADIENTS
    if importlib.util.find_spec(PACKAGES.get(name, "optax"))
]


def run(script, *options):
    """What a benchmark prints."""
    process = subprocess.run(
        [sys.executable, FOLDER / script, *options],
        env=os.environ | {"XLA_FLAGS": ""},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


@pytest.mark.slow
def test_every_method_is_right():
    reports, _ = checks.small(INSTALLED, "float16", clip=True)
    for name, report in reports.items():
        wrong = {fault.split(":")[0] for fault in report["faults"]}
        assert wrong == set(), name


PROGRAM = """
%fused (a: f32[8,4], b: f32[100]) -> f32[8,4] {
  %a = f32[8,4]{1,0} parameter(0)
  %b = f32[100]{0} parameter(1)
  %part = f32[10]{0} slice(%b), slice={[0:10]}
  ROOT %sum = f32[8,4]{1,0} custom-call(%a, %part), custom_call_target="x"
}

%applied (p: (f32[8,4], f32[100])) -> f32[8,4] {
  %p = (f32[8,4]{1,0}, /*index=1*/f32[100]{0}) parameter(0)
  %x = f32[8,4]{1,0:T(8,128)} get-tuple-element(%p), index=0
  %y = f32[100]{0} get-tuple-element(%p), index=1
  ROOT %step = f32[8,4]{1,0} fusion(%x, %y), kind=kLoop, calls=%fused
}

%skipped (q: (f32[8,4], f32[100])) -> f32[8,4] {
  %q = (f32[8,4]{1,0}, f32[100]{0}) parameter(0)
  ROOT %same = f32[8,4]{1,0} get-tuple-element(%q), index=0
}

ENTRY %main (x: f32[8,4], y: f32[100], ok: pred[]) -> f32[8,4] {
  %x = f32[8,4]{1,0} parameter(0)
  %y = f32[100]{0} parameter(1)
  %ok = pred[] parameter(2)
  %fetch = (f32[8,4]{1,0:S(1)}, f32[8,4]{1,0}, u32[]{:S(2)}) copy-start(%x)
  %near = f32[8,4]{1,0:S(1)} copy-done(%fetch)
  %twice = f32[8,4]{1,0:S(1)} add(%near, %near)
  %start = pred[] all-reduce-start(%ok), channel_id=1, to_apply=%and
  %agreed = pred[] all-reduce-done(%start)
  %both = (f32[8,4]{1,0}, f32[100]{0}) tuple(%x, %y)
  ROOT %out = f32[8,4] conditional(%agreed, %both, %both), branch_computations={%skipped, %applied}
}
"""


def test_kernels_and_bytes_are_those_of_the_text():
    kernels, moved = hlo.cost(PROGRAM)
    assert kernels == {"fusion": 1, "all-reduce": 1, "add": 1}
    # One pred in and out; 32 numbers in and out, and of 100 the ten that are taken; 32 more that
    # are fetched from main memory, but not what becomes of them on the chip.
    assert moved == 2 + 4 * (32 + 32 + 10) + 4 * 32
    assert hlo.exchanged(PROGRAM) == {"all-reduce": {"1": 1}}
    assert hlo.oddities(PROGRAM) == {"host": 0, "64-bit": 0}
    wide = PROGRAM.replace(
        "  %twice = f32", "  %wide = s64[]{:S(1)} add(%ok, %ok)\n  %twice = f32"
    )
    waits = wide.replace("  %wide", "  %out = token[] outfeed(%ok)\n  %wide")
    assert hlo.oddities(waits) == {"host": 1, "64-bit": 1}


def test_what_is_stored_by_columns_is_counted_outside_of_fusions():
    assert hlo.stored_by_columns(PROGRAM) == 0
    near = "%near = f32[8,4]{"
    assert hlo.stored_by_columns(PROGRAM.replace(near + "1,0", near + "0,1")) == 1
    # no fusion stores what it reads
    read = "%a = f32[8,4]{1,0}"
    assert hlo.stored_by_columns(PROGRAM.replace(read, "%a = f32[8,4]{0,1}")) == 0


BOTH = [methods.BARE, "jaxscale.apply_gradients"]


def timed(path, *command):
    """The rows that one of the benchmarks that time steps writes, for `BOTH`."""
    options = ["--rounds=2", "--seconds=0.001", f"--json={path}", "--only", *BOTH]
    printed = run(*command, *options)
    assert all(name in printed for name in BOTH)
    result = json.loads(path.read_text())
    assert result["machine"]["versions"]["jax"] == jax.__version__
    for row in result["rows"]:
        assert list(row["methods"]) == BOTH
        assert all(report["faults"] == [] for report in row["methods"].values())
    return result["rows"]


@pytest.mark.slow
def test_steps_are_timed_alone(tmp_path):
    command = ["step.py", "--size=tiny", "--clip", "--gradients=float16"]
    row, with_products = timed(tmp_path / "step.json", *command)
    assert (row["products"], with_products["products"]) == (False, True)
    assert row["leaves"] == with_products["leaves"] == 16
    tiny = trees.SIZES["tiny"]
    assert row["parameters"] == trees.size(tiny)
    # Gradients are read twice, parameters and moments read and written.
    least_bytes = 2 * 2 + 2 * 3 * 4 - 2
    for name, report in row["methods"].items():
        assert report["to_bare"]["median"] > 0, name
        assert report["bytes_per_parameter"] > least_bytes, name
        by_kind = report["kernels_by_kind"]
        assert report["kernels"] == sum(by_kind.values()) > 0


@pytest.mark.slow
def test_the_whole_step_holds_no_more_than_its_parts_by_hand(tmp_path):
    """On a CPU, where casts at the end of the backward pass could be computed for each reader."""
    names = ["jaxscale.train_step", "jaxscale.apply_gradients"]
    path = tmp_path / "products.json"
    command = [
        "--size=tiny",
        "--forms=products",
        "--gradients=float16",
        "--rounds=1",
        "--seconds=0.1",
    ]
    run("step.py", *command, f"--json={path}", "--only", *names)
    (row,) = json.loads(path.read_text())["rows"]
    whole, by_hand = (row["methods"][name] for name in names)
    assert whole["bytes_per_parameter"] <= by_hand["bytes_per_parameter"]


def test_products_are_counted_in_programs_inside_of_programs():
    def loss_fn(w):
        @jax.checkpoint
        def body(x, _):
            return jnp.sin(x @ w), None

        x, _ = jax.lax.scan(body, jnp.ones((2, 2)), length=3)
        half = x.astype(jnp.float16)
        axes = ((1,), (0,)), ((), ())
        mixed = jax.lax.dot_general(half, w, axes, preferred_element_type=jnp.float32)
        half_product = half @ w.astype(jnp.float16)
        return jnp.sum(mixed) + jnp.sum(half_product)

    w = jnp.ones((2, 2))
    forward = jax.make_jaxpr(loss_fn)(w)
    assert jaxprs.products(forward) == (1, 3)
    both = jax.make_jaxpr(jax.value_and_grad(loss_fn))(w)
    # Backward two for each of the three, and the one in the loop is computed again.
    assert jaxprs.products(both) == (3, 3 + 6 + 1)


SMALL = zoo.SIZES["small"]
# In MB: what is kept for the backward pass, and temporary memory on a CPU, with float16. As counted
# with JAX 0.12, and rounded up; of the LSTM with 0.6.2, which keeps 1 % more.
KEPT_AND_TEMPORARY = {
    "decoder": (8.84, 18.6),
    "decoder, scanned": (17.0, 33.0),
    "convolutions": (1.12, 2.44),
    "ResNet": (2.96, 7.22),
    "LSTM": (1.88, 2.58),
    "words": (2.59, 8.99),
}


@pytest.mark.worlds
@cases("model", SMALL)
def test_autocast_keeps_no_more_than_was_counted(model):
    kept = autocast_targets.kept_bytes(
        SMALL[model], autocast_targets.AUTOCAST, "float16"
    )
    by_hand = autocast_targets.kept_bytes(
        SMALL[model], autocast_targets.BY_HAND, "float16"
    )
    limit, _ = KEPT_AND_TEMPORARY[model]
    assert kept <= limit * 1e6
    assert kept < by_hand


@pytest.mark.worlds
@cases("model", SMALL, fast=["LSTM"])
def test_autocast_needs_no_more_memory_on_a_cpu_than_was_counted(model):
    target = autocast_targets.TARGETS["CPU, float16"]
    compiled = autocast_targets.compile_for(
        target, SMALL[model], autocast_targets.AUTOCAST
    )
    _, limit = KEPT_AND_TEMPORARY[model]
    # 1 %: XLA's buffers differ a little from version to version.
    assert compiled.memory_analysis().temp_size_in_bytes <= 1.01 * limit * 1e6


@pytest.mark.slow
def test_autocast_compiled_for_a_gpu_needs_no_more_than_casts_by_hand(tmp_path):
    if not importlib.util.find_spec("jax_plugins"):
        pytest.skip("no compiler for an H100 is here")
    path = tmp_path / "targets.json"
    # Not the small ResNet: of its twelve arrays, one in half precision is more at the peak.
    models = ["LSTM", "convolutions", "words", *autocast_targets.LAYERS]
    options = ["--size=small", f"--json={path}", "--targets", "H100, bfloat16"]
    run("autocast_targets.py", *options, "--models", *models)
    for row in json.loads(path.read_text())["rows"]:
        assert row["misses"] == [], row


@pytest.mark.slow
def test_scale_backward_compiled_for_a_gpu_moves_no_more_than_was_counted(tmp_path):
    """A step of a layer whose parameters are most of what it reads, beside plain optax."""
    if not importlib.util.find_spec("jax_plugins"):
        pytest.skip("no compiler for an H100 is here")
    path = tmp_path / "programs.json"
    names = [programs.BARE, "jaxscale.scale_backward"]
    options = ["--targets", "H100", "--layouts", "one device", f"--json={path}"]
    run("programs.py", *options, "--only", *names)
    (row,) = json.loads(path.read_text())["rows"]
    plain, ours = (row["methods"][name] for name in names)
    # The branch that keeps gradients for another pass is in it: 4 bytes, which few steps move.
    assert ours["bytes_per_parameter"] <= 1.31 * plain["bytes_per_parameter"]
    # Gradients in half precision, twice.
    temporary = "temporary_bytes_per_parameter"
    assert ours[temporary] <= plain[temporary] + 3.7


@pytest.mark.slow
def test_a_device_is_examined(tmp_path):
    run("device.py", "--size=tiny", f"--out={tmp_path}")
    (path,) = tmp_path.iterdir()
    result = json.loads(path.read_text())
    assert path.stem == result["machine"]["device"] == "cpu"
    assert result["machine"]["versions"]["jax"] == jax.__version__
    for name, figures in result["figures"].items():
        forms = figures["forms"]
        if not importlib.util.find_spec("jmp"):
            forms.pop("float16 by dtype=, jmp", None)
        exact = forms.pop("float32, optax")
        assert exact["to_float32"]["time"] == exact["to_float32"]["memory"] == 1
        for form, row in forms.items():
            assert row["losses"] == pytest.approx(exact["losses"], rel=1e-2), form
            assert row["losses"] != exact["losses"], (name, form)
            assert row["step_s"] > 0, form
            assert row["bytes"] == row["argument_bytes"] + row["temporary_bytes"]
