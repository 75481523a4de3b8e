"""What steps hold that are compiled for a TPU, none of which is here: `programs.py` counts it.

The slow tests install the TPU's compiler into a folder of their own.
"""

import importlib.metadata
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import programs
import pytest
import targets

# All in one process, which installs the compiler once.
pytestmark = [pytest.mark.standard_promotion, pytest.mark.xdist_group("tpu")]

SCRIPT = pathlib.Path(programs.__file__)
CLIPPED_BARE = programs.BARE + programs.CLIPPED
CLIPPED_STEP = programs.TRAIN_STEP + programs.CLIPPED


def test_what_cannot_be_compiled_for_is_a_sentence_with_the_command_that_helps(
    monkeypatch,
):
    monkeypatch.setattr(targets, "_is_installed", lambda module: False)
    for kind, package in {
        "H100": '"jax-cuda12-plugin[with-cuda]"',
        "TPU v5e": "libtpu",
    }.items():
        sentence = re.escape(f"no compiler for {kind} is here: pip install {package}")
        with pytest.raises(targets.CannotCompile, match=f"^{sentence}$"):
            targets.devices(kind, "1")

    def refuse(name, platform, **options):
        raise RuntimeError(f"{platform} has no {name}\nand more")

    monkeypatch.setattr(targets, "_is_installed", lambda module: True)
    monkeypatch.setattr(targets.topologies, "get_topology_desc", refuse)
    sentence = (
        r"no devices v9:2x2 \(tpu has no v9:2x2\); .*: pip install --upgrade libtpu$"
    )
    with pytest.raises(targets.CannotCompile, match=sentence):
        targets.devices("TPU v9", "2x2")


def run(command, search=()):
    """What Python prints, given a command."""
    path = os.pathsep.join(
        [*search, str(SCRIPT.parent), os.environ.get("PYTHONPATH", "")]
    )
    environment = os.environ | {"XLA_FLAGS": "", "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, *command],
        env=environment,
        capture_output=True,
        text=True,
        timeout=1500,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# The first are devices that no compiler knows.
ROWS = """
import programs
names = [programs.BARE, programs.TRAIN_STEP]
programs.ROWS[:] = [
    programs.Row("TPU v0", "1x1", "one device"),
    programs.Row("CPU", "4", "FSDP", width=16, names=names),
]
programs.main()
"""


@pytest.mark.slow
def test_rows_without_a_compiler_do_not_stop_the_others(tmp_path):
    path = tmp_path / "programs.json"
    printed = run(["-c", ROWS, f"--json={path}"])
    missing, compiled = json.loads(path.read_text())["rows"]
    assert "pip install" in missing["error"]
    assert missing["error"] in " ".join(printed.split())
    assert missing["methods"] == {}
    bare = compiled["methods"][programs.BARE]
    step = compiled["methods"][programs.TRAIN_STEP]
    assert 0 < bare["kernels"] < step["kernels"]


@pytest.fixture(scope="module")
def compiler(tmp_path_factory):
    """A folder with the TPU's compiler."""
    folder = tmp_path_factory.mktemp("compiler")
    requirements = set()
    for line in importlib.metadata.requires("jax"):
        requirement, _, _ = line.partition(";")
        if requirement.startswith("libtpu"):
            requirements.add(requirement.strip())
    (libtpu,) = requirements
    options = ["--quiet", "--no-deps", f"--target={folder}"]
    command = [sys.executable, "-m", "pip", "install", *options, libtpu]
    installed = subprocess.run(command, capture_output=True, text=True)
    if installed.returncode:
        pytest.fail(
            f"pip cannot install {libtpu}, the TPU's compiler: {installed.stderr[-500:]}"
        )
    yield folder
    # half a gigabyte, of which pytest would keep that of three runs
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def figures(compiler, tmp_path_factory):
    """The figures of each method by layout and width, for the TPU v5e."""
    path = tmp_path_factory.mktemp("figures") / "programs.json"
    names = [programs.BARE, CLIPPED_BARE, programs.TRAIN_STEP, CLIPPED_STEP]
    options = ["--targets", "TPU v5e", "--dtypes", "float32", f"--json={path}"]
    options += ["--layouts", "one device", "FSDP", "FSDP and tensor parallel"]
    options += ["--only", *names]
    run([str(SCRIPT), *options], search=[str(compiler)])
    rows = json.loads(path.read_text())["rows"]
    return {(row["devices"], row["width"]): row["methods"] for row in rows}


@pytest.mark.slow
def test_autocast_on_a_tpu_needs_no_more_than_casts_by_hand(compiler, tmp_path):
    path = tmp_path / "targets.json"
    models = ["words", "convolutions"]
    options = ["--size=small", f"--json={path}", "--targets", "TPU v5e, bfloat16"]
    script = SCRIPT.with_name("autocast_targets.py")
    run([str(script), *options, "--models", *models], search=[str(compiler)])
    for row in json.loads(path.read_text())["rows"]:
        # Small arrays of float32 stay on the chip, so that casts by hand move more than float32.
        assert not [miss for miss in row["misses"] if "by hand" in miss], row


def exchanged(report, kind):
    """The sizes in bytes of all collectives of a kind, in order."""
    sizes = []
    for size, number in report["collectives"].get(kind, {}).items():
        sizes += [int(size)] * number
    return sorted(sizes)


@pytest.mark.slow
def test_on_a_tpu_nothing_waits_for_the_host_is_wide_or_compiles_twice(figures):
    assert sorted(figures) == [(1, 256), (1, 2048), (4, 1024), (256, 2048)]
    for place, reports in figures.items():
        for name, report in reports.items():
            assert "error" not in report, (place, name, report)
            assert report["host"] == 0, (place, name)
            assert report["64-bit"] == 0, (place, name)
            assert report["stable"] is True, (place, name)


@pytest.mark.slow
def test_on_one_tpu_a_step_exchanges_nothing(figures):
    for name, report in figures[1, 256].items():
        assert not report["collectives"], name


@pytest.mark.slow
@pytest.mark.parametrize("place", [(4, 1024), (256, 2048)])
@pytest.mark.parametrize("name", [programs.TRAIN_STEP, CLIPPED_STEP])
def test_on_tpus_a_step_exchanges_a_few_numbers_more_and_no_more_when_clipped(
    name, place, figures
):
    ours = figures[place][name]
    plain = figures[place][programs.BARE]
    clipped = figures[place][CLIPPED_BARE]
    # As with Optax's clipping: XLA divides the gathering of parameters a little differently in a
    # step that must see all gradients first.
    kinds = ours["collectives"].keys()
    assert kinds == clipped["collectives"].keys()
    for kind in kinds - {"all-reduce"}:
        assert exchanged(ours, kind) == exchanged(clipped, kind), kind
    # One number for each leaf, of which some travel together and some with the loss: never more
    # messages than the global norm of Optax takes.
    sizes = exchanged(ours, "all-reduce")
    clipped_sizes = exchanged(clipped, "all-reduce")
    assert len(sizes) <= len(clipped_sizes)
    plain_sizes = exchanged(plain, "all-reduce")
    assert sum(sizes) - sum(plain_sizes) <= 4 * 6


@pytest.mark.slow
def test_on_a_tpu_a_step_moves_the_bytes_of_optax_with_clipping(figures):
    for place, reports in figures.items():
        moved = {
            name: report["bytes_per_parameter"] for name, report in reports.items()
        }
        # Optax alone updates each parameter as its gradient leaves the matrix product, which no
        # one can who must see all gradients first: they are written and read, 8 bytes at most.
        assert max(moved.values()) <= moved[programs.BARE] + 8.1, place
        if place != (1, 256):
            # So has Optax's own clipping. 2 %: what is kept on the chip differs.
            for name in (programs.TRAIN_STEP, CLIPPED_STEP):
                assert moved[name] <= 1.02 * moved[CLIPPED_BARE], (place, name)
