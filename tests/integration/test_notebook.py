"""The notebook for a GPU: how it is stored, what it installs, and that it runs on a CPU.

Its code is plain Python, without commands of IPython. So the cells in a row are a program, and
neither Jupyter nor a kernel is needed here.
"""

import json
import os
import pathlib
import re
import subprocess
import sys

import jax
import optax
import pytest

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
