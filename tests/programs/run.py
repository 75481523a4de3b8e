"""Runs programs of the corpus through entries of jaxscale, and prints what is wrong.

PYTHONPATH=. python tests/programs/run.py                       # two entries for each program
PYTHONPATH=. python tests/programs/run.py --all                 # every program, every entry
PYTHONPATH=. python tests/programs/run.py --only vision.vit speech --entries flax nnx
PYTHONPATH=. python tests/programs/run.py --record              # what the fast tests read
"""

import argparse
import contextlib
import io
import os
import sys
import traceback

# As in the tests: no float32 between two operations in half precision, on any CPU.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_allow_excess_precision=false --xla_cpu_max_isa=AVX2 --xla_backend_optimization_level=0",
)

import corpus
import numpy as np
from entries import DOCTOR
from law import FILE, Trial, Verdict
from plan import ALL_ENTRIES, FAST, two_entries


def try_out(trial: Trial, entry: str) -> Verdict:
    """Returns the verdict. An error that is raised becomes one."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # some programs print
            return trial.judge(entry)
    except Exception:
        return Verdict([traceback.format_exc()], float("inf"))


def record() -> None:
    rows = corpus.load()
    arrays = {}
    for name, entry in FAST.items():
        if entry != DOCTOR:
            arrays |= Trial(rows[name]).record(entry)
    np.savez_compressed(FILE, **arrays)
    print(f"wrote {FILE}: {FILE.stat().st_size} bytes")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--all", action="store_true", help="every entry, instead of two")
    add("--only", nargs="+", default=[], help="programs or families")
    add("--entries", nargs="+", choices=ALL_ENTRIES, help="these entries")
    add("--record", action="store_true", help="write the file of the fast tests")
    return parser.parse_args()


def main() -> int:
    options = parse()
    if options.record:
        record()
        return 0
    rows = corpus.load()
    planned = two_entries(rows)
    num_wrong = 0
    for name, row in rows.items():
        if options.only and not {name, row.family} & set(options.only):
            continue
        trial = Trial(row)
        entries = ALL_ENTRIES if options.all else planned[name]
        for entry in options.entries or entries:
            verdict = try_out(trial, entry)
            num_wrong += bool(verdict.wrong)
            print(f"{name}, {entry}: ratio {verdict.ratio:.3g}", flush=True)
            for line in verdict.wrong[:8]:
                print(f"    {line}", flush=True)
    return int(num_wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
