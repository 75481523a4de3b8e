"""Runs programs of the corpus through entries of jaxscale, and prints what is wrong.

    PYTHONPATH=. python tests/programs/run.py --all                 # every program, every entry
    PYTHONPATH=. python tests/programs/run.py                       # two entries for each program
    PYTHONPATH=. python tests/programs/run.py --only vision.vit speech --entries flax nnx

`--part 1/2` takes every second program, to use two processes. `--json` keeps the results, and
`--again` tries once more what was wrong in such files. `--record` writes what the fast tests
compare with. The last lines are a table: for each family and entry how many programs are right, of
how many, and the largest error beside that of the reference.
"""

import argparse
import collections
import contextlib
import io
import json
import os
import pathlib
import sys
import time
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
    """Returns the verdict, or the error that was raised, as one."""
    printed = io.StringIO()  # some programs print
    try:
        with contextlib.redirect_stdout(printed):
            return trial.judge(entry)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        ours = [frame for frame in frames if "jaxscale" in frame.filename] or frames
        place = f"{'/'.join(ours[-1].filename.split('/')[-2:])}:{ours[-1].lineno}"
        first_line = (str(error).splitlines() or [""])[0][:200]
        return Verdict(
            [f"{type(error).__name__}: {first_line} ({place})"], float("inf")
        )


def table(results: dict[tuple[str, str], Verdict]) -> str:
    """Returns for each family and entry how many programs are right, and the largest ratio."""
    cells = collections.defaultdict(list)
    for (name, entry), verdict in results.items():
        cells[name.split(".")[0], entry].append(verdict)
    names = [entry for entry in ALL_ENTRIES if any(key[1] == entry for key in cells)]
    lines = ["| family | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for family in corpus.FAMILIES:
        row = [family]
        for entry in names:
            found = cells.get((family, entry), [])
            right = sum(not verdict.wrong for verdict in found)
            ratios = [verdict.ratio for verdict in found if not verdict.wrong]
            ratio = f" {max(ratios):.2f}" if any(ratios) else ""
            row.append(f"{right}/{len(found)}{ratio}" if found else "")
        if any(row[1:]):
            lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--all", action="store_true", help="every entry, instead of two"
    )
    parser.add_argument("--only", nargs="+", default=[], help="programs or families")
    parser.add_argument(
        "--entries", nargs="+", choices=ALL_ENTRIES, help="these entries"
    )
    parser.add_argument(
        "--part", default="1/1", help="the i-th of n parts: every n-th program"
    )
    parser.add_argument(
        "--json", help="a file for the results, which others may be added to"
    )
    parser.add_argument(
        "--table", nargs="+", help="print the table of such files, and run nothing"
    )
    parser.add_argument(
        "--record", action="store_true", help="write the file of the fast tests"
    )
    parser.add_argument(
        "--again", nargs="+", help="what is wrong in such files, and no more"
    )
    options = parser.parse_args()
    if options.record:
        return record()
    rows, results = corpus.load(), {}
    for path in options.table or options.again or ():
        for key, (wrong, ratio) in json.loads(pathlib.Path(path).read_text()).items():
            results[tuple(key.split(": "))] = Verdict(wrong, ratio)
    for name, given in choose(options, rows, results).items():
        run_program(rows[name], given, results)
        if options.json:
            found = {": ".join(key): verdict for key, verdict in results.items()}
            pathlib.Path(options.json).write_text(json.dumps(found, indent=0))
    print(table(results))
    wrong = sum(bool(verdict.wrong) for verdict in results.values())
    print(f"{len(results) - wrong} of {len(results)} are right.")
    return int(wrong > 0)


def choose(
    options: argparse.Namespace,
    rows: dict[str, corpus.Row],
    results: dict[tuple[str, str], Verdict],
) -> dict[str, list[str]]:
    """Returns the entries that each program is to go through."""
    if options.table:
        return {}
    part, parts = map(int, options.part.split("/"))
    names = [
        name
        for name, row in rows.items()
        if not options.only or name in options.only or row.family in options.only
    ]
    chosen = {name: list(two_entries(rows)[name]) for name in names[part - 1 :: parts]}
    for name in chosen:
        if options.entries or options.all:
            chosen[name] = options.entries or list(ALL_ENTRIES)
        if options.again:
            chosen[name] = [
                e
                for e in ALL_ENTRIES
                if (name, e) in results and results[name, e].wrong
            ]
    return {name: given for name, given in chosen.items() if given}


def record() -> int:
    rows, found = corpus.load(), {}
    for name, entry in FAST.items():
        if entry != DOCTOR:
            found |= Trial(rows[name]).record(entry)
    np.savez_compressed(FILE, **found)
    print(f"wrote {FILE}: {FILE.stat().st_size} bytes")
    return 0


def run_program(
    row: corpus.Row, given: list[str], results: dict[tuple[str, str], Verdict]
) -> None:
    start = time.perf_counter(), time.process_time()
    trial = Trial(row)
    for entry in given:
        verdict = results[row.name, entry] = try_out(trial, entry)
        if verdict.wrong:
            print(f"{row.name}, {entry}: ratio {verdict.ratio:.3g}", flush=True)
            for line in verdict.wrong[:8]:
                print(f"    {line}", flush=True)
    wall, cpu = time.perf_counter() - start[0], time.process_time() - start[1]
    print(
        f"{row.name} ({row.framework}): {len(given)} entries, {wall:.1f} s, CPU {cpu:.1f} s",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
