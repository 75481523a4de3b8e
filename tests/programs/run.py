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
    """Returns the verdict. An error that is raised becomes one."""
    printed = io.StringIO()  # some programs print
    try:
        with contextlib.redirect_stdout(printed):
            return trial.judge(entry)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        ours = [frame for frame in frames if "jaxscale" in frame.filename]
        *_, last = ours or frames
        file = "/".join(last.filename.split("/")[-2:])
        first_line, *_ = str(error).splitlines() or [""]
        words = f"{type(error).__name__}: {first_line[:200]} ({file}:{last.lineno})"
        return Verdict([words], float("inf"))


def table(results: dict[tuple[str, str], Verdict]) -> str:
    """Returns for each family and entry how many programs are right, and the largest ratio."""
    cells = collections.defaultdict(list)
    for (name, entry), verdict in results.items():
        family, *_ = name.split(".")
        cells[family, entry].append(verdict)
    tried = {entry for _, entry in cells}
    names = [entry for entry in ALL_ENTRIES if entry in tried]
    header = "| family | " + " | ".join(names) + " |"
    rule = "|---" * (len(names) + 1) + "|"
    lines = [header, rule]
    for family in corpus.FAMILIES:
        row = []
        for entry in names:
            verdicts = cells.get((family, entry), [])
            row.append(summarize(verdicts))
        if any(row):
            columns = " | ".join([family, *row])
            lines.append(f"| {columns} |")
    return "\n".join(lines)


def summarize(verdicts: list[Verdict]) -> str:
    """Returns how many programs are right, of how many, and the largest ratio of these."""
    if not verdicts:
        return ""
    ratios = [verdict.ratio for verdict in verdicts if not verdict.wrong]
    cell = f"{len(ratios)}/{len(verdicts)}"
    if any(ratios):
        cell += f" {max(ratios):.2f}"
    return cell


def make_parser() -> argparse.ArgumentParser:
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
    return parser


def read_results(paths: list[str]) -> dict[tuple[str, str], Verdict]:
    """Returns what `--json` wrote into some files."""
    results = {}
    for path in paths:
        for key, (wrong, ratio) in json.loads(pathlib.Path(path).read_text()).items():
            name, entry = key.split(": ")
            results[name, entry] = Verdict(wrong, ratio)
    return results


def main() -> int:
    options = make_parser().parse_args()
    if options.record:
        return record()
    rows = corpus.load()
    results = read_results(options.table or options.again or [])
    for name, entries in choose(options, rows, results).items():
        run_program(rows[name], entries, results)
        if options.json:
            by_text = {": ".join(key): verdict for key, verdict in results.items()}
            pathlib.Path(options.json).write_text(json.dumps(by_text, indent=0))
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
    names = []
    for name, row in rows.items():
        if not options.only or name in options.only or row.family in options.only:
            names.append(name)
    planned = two_entries(rows)
    wrong = {key for key, verdict in results.items() if verdict.wrong}
    part, parts = map(int, options.part.split("/"))
    chosen = {}
    for name in names[part - 1 :: parts]:
        entries = list(planned[name])
        if options.all:
            entries = list(ALL_ENTRIES)
        if options.entries:
            entries = options.entries
        if options.again:
            entries = [entry for entry in ALL_ENTRIES if (name, entry) in wrong]
        if entries:
            chosen[name] = entries
    return chosen


def record() -> int:
    rows = corpus.load()
    arrays = {}
    for name, entry in FAST.items():
        if entry != DOCTOR:
            arrays |= Trial(rows[name]).record(entry)
    np.savez_compressed(FILE, **arrays)
    print(f"wrote {FILE}: {FILE.stat().st_size} bytes")
    return 0


def run_program(
    row: corpus.Row, entries: list[str], results: dict[tuple[str, str], Verdict]
) -> None:
    """Takes a program through some entries, and adds the verdicts to the results."""
    start = time.perf_counter()
    cpu_start = time.process_time()
    trial = Trial(row)
    for entry in entries:
        verdict = try_out(trial, entry)
        results[row.name, entry] = verdict
        if verdict.wrong:
            print(f"{row.name}, {entry}: ratio {verdict.ratio:.3g}", flush=True)
            for line in verdict.wrong[:8]:
                print(f"    {line}", flush=True)
    wall = time.perf_counter() - start
    cpu = time.process_time() - cpu_start
    times = f"{wall:.1f} s, CPU {cpu:.1f} s"
    print(f"{row.name} ({row.framework}): {len(entries)} entries, {times}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
