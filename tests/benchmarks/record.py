"""Records what examples print, for what the README says of them.

PYTHONPATH=. python tests/benchmarks/record.py quickstart gradients
"""

import json
import pathlib
import subprocess
import sys
import tempfile

import machine

ROOT = pathlib.Path(__file__).parent.parent.parent
RESULTS = ROOT / "tests" / "benchmarks" / "results" / "examples-cpu.json"


def main(names):
    """Runs each of these examples, and replaces what is recorded of it."""
    recorded = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in names:
        command = [sys.executable, ROOT / "examples" / f"{name}.py"]
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(
                command, cwd=folder, stdout=subprocess.PIPE, text=True, check=True
            )
        # Without the line that says where the picture is.
        lines = [line for line in done.stdout.splitlines() if folder not in line]
        recorded[name] = {"machine": machine.describe()[0], "printed": lines}
    RESULTS.write_text(json.dumps(recorded, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
