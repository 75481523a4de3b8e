"""Records what examples print, for what the README says of them.

PYTHONPATH=. python tests/benchmarks/record.py quickstart gradients
"""

import json
import pathlib
import re
import subprocess
import sys
import tempfile

import report

ROOT = pathlib.Path(__file__).parent.parent.parent
RESULTS = ROOT / "tests" / "benchmarks" / "results" / "examples-cpu.json"


def main(names):
    """Runs each of these examples, and replaces what is recorded of it."""
    recorded = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in names:
        command = [sys.executable, ROOT / "examples" / f"{name}.py"]
        with tempfile.TemporaryDirectory() as folder:
            printed = subprocess.check_output(command, cwd=folder, text=True)
        # Without where the picture is, and how long it took.
        left_out = re.compile(re.escape(folder) + r"|\d:\d\d:\d\d$")
        lines = [line for line in printed.splitlines() if not left_out.search(line)]
        recorded[name] = {"machine": report.describe()[0], "printed": lines}
    RESULTS.write_text(json.dumps(recorded, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
