"""The notebook for a GPU: how it is stored, what it installs, and that it runs on a CPU.

Its code is plain Python, without commands of IPython. So the cells in a row are a program, and
neither Jupyter nor a kernel is needed here.
"""

import ast
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import optax
import pytest
from tables import cases

import jaxscale

# All in one process, which runs the notebook once.
pytestmark = [
    pytest.mark.standard_promotion,
    pytest.mark.docs,
    pytest.mark.xdist_group("notebook"),
]

ROOT = pathlib.Path(__file__).parent.parent.parent
PATH = ROOT / "examples" / "gpu.ipynb"
NOTEBOOK = json.loads(PATH.read_text())
CODE = {
    cell["id"]: "".join(cell["source"])
    for cell in NOTEBOOK["cells"]
    if cell["cell_type"] == "code"
}
METHODS = ["float32, plain Optax", "float32", "bfloat16", "float16"]
PINNED = [f"{name}=={importlib.metadata.version(name)}" for name in ("jax", "jaxlib")]


def test_it_is_stored_without_outputs():
    for cell in NOTEBOOK["cells"]:
        fields = {"cell_type", "id", "metadata", "source"}
        if cell["cell_type"] == "code":
            fields |= {"outputs", "execution_count"}
            assert cell["outputs"] == [], cell["id"]
            assert cell["execution_count"] is None, cell["id"]
        assert cell.keys() == fields, cell["id"]
        assert cell["metadata"] == {}, cell["id"]
    assert not re.findall(r"/(?:home|root|tmp|work|usr|Users)/", PATH.read_text())


def test_its_format_has_a_name_for_each_cell():
    assert (NOTEBOOK["nbformat"], NOTEBOOK["nbformat_minor"]) == (4, 5)
    names = [cell["id"] for cell in NOTEBOOK["cells"]]
    assert len(set(names)) == len(names)


@cases("cell", CODE)
def test_its_code_has_no_commands_of_ipython(cell):
    ast.parse(CODE[cell])


def test_the_address_of_the_repository_is_written_once():
    assert len(re.findall("OWNER/", PATH.read_text())) == 1


def define(cell, **names):
    """Runs only the imports, functions and classes of a cell. Returns its names."""
    tree = ast.parse(CODE[cell])
    kinds = (ast.FunctionDef, ast.ClassDef, ast.ImportFrom)
    tree.body = [node for node in tree.body if isinstance(node, kinds)]
    exec(compile(tree, PATH.name, "exec"), names)
    return names


def test_it_asks_for_figures_where_they_are_taken():
    template = (ROOT / ".github" / "ISSUE_TEMPLATE" / "figures.md").read_text()
    (name,) = re.findall("^name: (.*)$", template, re.MULTILINE)
    assert "examples/gpu.ipynb" in template
    texts = {cell["id"]: "".join(cell["source"]) for cell in NOTEBOOK["cells"]}
    for cell in ("title", "table-text"):
        assert f'("{name}")' in texts[cell]


class Answer(NamedTuple):
    """What `nvidia-smi` prints, how it ends, and what the notebook reads."""

    output: str | None  # `None` if there is no such program
    status: int | None
    gpus: list[str]


NVIDIA = {
    "two GPUs": Answer(
        "Tesla T4, 15360 MiB\nTesla T4, 15360 MiB\n", 0, ["Tesla T4, 15360 MiB"] * 2
    ),
    "no driver": Answer(
        "NVIDIA-SMI has failed because it could not talk to the driver.\n", 9, []
    ),
    "not there": Answer(None, None, []),
}


@cases("name", NVIDIA)
def test_gpus_are_those_that_the_driver_names(name):
    output, status, gpus = NVIDIA[name]
    result = SimpleNamespace(stdout=output, returncode=status)
    names = define(
        "device",
        shutil=SimpleNamespace(which=lambda _: output),
        subprocess=SimpleNamespace(run=lambda *_, **__: result),
    )
    assert names["ask_nvidia"]("name,memory.total") == gpus


def run_install_cell(monkeypatch, folder, modules, returncode=0):
    """Runs the first cell where only these modules are there; returns what it would run."""
    commands = []
    specs = {name: SimpleNamespace(origin=origin) for name, origin in modules.items()}

    def run(command, **_):
        commands.append(command)
        return SimpleNamespace(returncode=returncode, stderr="no such address")

    monkeypatch.chdir(folder)
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", specs.get)
        patch.setattr(subprocess, "run", run)
        exec(compile(CODE["install"], PATH.name, "exec"), {})
    return commands


ALL_THERE = {"jax": "a.py", "jaxlib": "a.py", "optax": "a.py", "jaxscale": "a.py"}
REPOSITORY = re.search(r'REPOSITORY = "(.*)"', CODE["install"]).group(1)
FOLDERS = {  # where the notebook runs, and what pip is to install there
    "examples": (ROOT / "examples", str(ROOT)),
    "the clone": (ROOT, str(ROOT)),
    "beside the clone": (None, "jaxscale"),
    "elsewhere": (None, f"git+{REPOSITORY}"),
}


@cases("where", FOLDERS)
@cases("missing", ["jaxscale", "optax", "jaxscale, of which there is a folder"])
def test_what_is_there_stays_and_jax_is_pinned(tmp_path, monkeypatch, where, missing):
    folder, source = FOLDERS[where]
    if where == "beside the clone":
        source = str(tmp_path / "jaxscale")
        (tmp_path / "jaxscale" / "jaxscale").mkdir(parents=True)
        (tmp_path / "jaxscale" / "jaxscale" / "__init__.py").touch()
    modules = dict(ALL_THERE)
    if missing == "jaxscale, of which there is a folder":
        modules["jaxscale"] = None
    else:
        del modules[missing]
    commands = run_install_cell(monkeypatch, folder or tmp_path, modules)
    install = [sys.executable, "-m", "pip", "install", "--quiet"]
    assert commands == [[*install, source, *PINNED]]


def test_nothing_is_installed_where_all_is_there(tmp_path, monkeypatch):
    assert run_install_cell(monkeypatch, tmp_path, ALL_THERE) == []


def test_jax_is_not_installed_for_the_user(tmp_path, monkeypatch):
    message = r"^JAX is not installed\. Install the one for"
    with pytest.raises(ModuleNotFoundError, match=message):
        run_install_cell(monkeypatch, tmp_path, {})


def test_what_cannot_be_installed_is_an_error(tmp_path, monkeypatch):
    message = rf"from git\+{REPOSITORY}:\nno such address"
    with pytest.raises(RuntimeError, match=message):
        run_install_cell(monkeypatch, tmp_path, {"jax": "a.py"}, returncode=1)


PEAKS = {  # what the device says before and after a method, and what the table says
    "no count": (None, None, "not counted"),
    "another count": ({"num_allocs": 3}, {"num_allocs": 4}, "not counted"),
    "it rose": (
        {"peak_bytes_in_use": 5},
        {"peak_bytes_in_use": 1_780_000_000},
        "1.78 GB",
    ),
    "it stayed": (
        {"peak_bytes_in_use": 2_500_000},
        {"peak_bytes_in_use": 2_500_000},
        "at most 2.5 MB",
    ),
}


@cases("name", PEAKS)
def test_a_peak_that_did_not_rise_is_a_limit(name):
    before, after, expected = PEAKS[name]
    readings = iter((before, after))
    device = SimpleNamespace(memory_stats=lambda: next(readings))
    names = define(
        "train", device=device, NamedTuple=NamedTuple, Callable=Callable, Any=Any
    )
    read = names["read_peak_bytes"]
    assert names["describe_peak"](read(), read()) == expected


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """Runs all cells as a program of its own, and returns what it prints."""
    folder = tmp_path_factory.mktemp("notebook")
    program = folder / "gpu.py"
    program.write_text("\n\n".join(CODE.values()))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    environment.pop("XLA_FLAGS", None)
    result = subprocess.run(
        [sys.executable, str(program)],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def read_table(printed):
    """Returns the columns of the table, and its rows by their first cell."""
    lines = [line for line in printed.splitlines() if line.startswith("|")]
    columns, rule, *rows = [line.strip("| ").split(" | ") for line in lines]
    assert rule == ["---"] * len(columns)
    return columns, {row[0]: dict(zip(columns, row, strict=True)) for row in rows}


@pytest.mark.slow
def test_it_runs_on_a_cpu_and_prints_its_table(printed):
    columns, rows = read_table(printed)
    assert columns[0] == f"cpu, JAX {jax.__version__}, jaxscale {jaxscale.__version__}"
    assert list(rows) == METHODS
    last_line = printed.splitlines()[-1]
    assert last_line == "This is a CPU: times and memory mean nothing here."
    assert f"optax {optax.__version__}" in printed
    first_loss = float(re.search(r"loss at the start: (\S+)", printed).group(1))
    plain = float(rows["float32, plain Optax"]["last loss"])
    for name, row in rows.items():
        times = re.findall(r"\d+\.\d\d", row["step: median (quartiles)"])
        median, low, high = map(float, times)
        assert 0 < low <= median <= high, name
        assert re.fullmatch(r"\d+\.\d MB", row["memory of a step"]), name
        assert row["peak on the device"] == "not counted", name
        # Data and start are the same: only the precision differs.
        assert abs(float(row["last loss"]) - plain) < 0.05, name
    assert plain < first_loss / 2


@pytest.mark.slow
def test_each_method_computes_in_its_precision(printed):
    counts = dict(re.findall(r"^    (.*): (\{.*\})$", printed, re.MULTILINE))
    assert list(counts) == METHODS
    for name, count in counts.items():
        # Six in each of two blocks, one at the end, and two backward for each of these.
        assert ast.literal_eval(count) == {name.split(",")[0]: 39}, name


@pytest.mark.slow
def test_a_nan_leaves_no_trace_but_in_plain_optax(printed):
    _, rows = read_table(printed)
    for name, row in rows.items():
        changed = int(row["changed by a NaN"].replace(",", ""))
        words = (
            rf"{name}: loss of the bad batch nan, steps skipped: (\d)\n.* batch (\S+)\n"
        )
        skipped, next_loss = re.search(words, printed).groups()
        if name == "float32, plain Optax":
            assert changed > 0
            assert skipped == "0"
            assert next_loss == "nan"
        else:
            assert changed == 0, name
            assert skipped == "1", name
            assert next_loss != "nan", name
