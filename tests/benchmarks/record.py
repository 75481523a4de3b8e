"""Records what the quickstart prints, for what the README says of it."""

import pathlib
import re
import subprocess
import sys
import tempfile

import report

ROOT = pathlib.Path(__file__).parent.parent.parent

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, ROOT / "examples" / "quickstart.py"]
        printed = subprocess.check_output(command, cwd=folder, text=True)
    # Without where the picture is, and how long it took.
    left_out = re.compile(re.escape(folder) + r"|\d:\d\d:\d\d$")
    lines = [line for line in printed.splitlines() if not left_out.search(line)]
    recorded = {"quickstart": {"machine": report.describe()[0], "printed": lines}}
    path = ROOT / "tests" / "benchmarks" / "results" / "examples-cpu.json"
    report.write(path, recorded)
