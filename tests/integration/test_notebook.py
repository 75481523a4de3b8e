"""The notebook for a GPU: it is stored without outputs, and runs on a CPU.

Its code is plain Python, without commands of IPython. So the cells in a row are a program, and
neither Jupyter nor a kernel is needed here.
"""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.standard_promotion, pytest.mark.docs]

ROOT = pathlib.Path(__file__).parents[2]
PATH = ROOT / "examples" / "gpu.ipynb"
CODE = [
    cell
    for cell in json.loads(PATH.read_text())["cells"]
    if cell["cell_type"] == "code"
]


def test_it_is_stored_without_outputs():
    for cell in CODE:
        assert cell["outputs"] == [], cell["id"]
        assert cell["execution_count"] is None, cell["id"]
    assert not re.findall(r"/(?:home|root|tmp|work|usr|Users)/", PATH.read_text())


@pytest.mark.slow
def test_it_runs_on_a_cpu_and_prints_its_table(tmp_path):
    program = tmp_path / "gpu.py"
    program.write_text("\n\n".join("".join(cell["source"]) for cell in CODE))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    environment.pop("XLA_FLAGS", None)
    result = subprocess.run(
        [sys.executable, str(program)],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    rows = re.findall(r"^\| ([\w, ]+?) \|.* (\d\.\d+)", result.stdout, re.MULTILINE)
    methods, losses = zip(*rows, strict=True)
    assert methods == ("float32, plain Optax", "float32", "bfloat16", "float16")
    # Data and start are the same: only the precision differs.
    losses = [float(loss) for loss in losses]
    assert max(losses) - min(losses) < 0.05
