"""What the programs share: options, what they ran on, files of figures, and tables."""

import argparse
import datetime
import importlib.metadata
import json
import pathlib
import platform
import re

import jax
import processes
from rich.console import Console
from rich.table import Table

import jaxscale

PACKAGES = [
    "jax",
    "jaxlib",
    "optax",
    "flax",
    "jmp",
    "mixed-precision-for-jax",
    "jaxamp",
]
PACKAGES += ["libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin"]


def parser(doc, rounds=None, seconds=None, limit=None, methods=(), sizes=()):
    """Returns a parser of options, with those of methods that take turns if these are given."""
    result = argparse.ArgumentParser(description=doc.splitlines()[0])
    add = result.add_argument
    add("--json", type=pathlib.Path, help="where to write the figures")
    if rounds:
        add("--rounds", type=int, default=rounds, help="turns of each method")
    if seconds:
        add("--seconds", type=float, default=seconds, help="length of a turn")
    if limit:
        add(
            "--limit", type=float, default=limit, help="seconds until a method is ready"
        )
    if methods:
        add(
            "--only",
            nargs="+",
            choices=methods,
            default=list(methods),
            metavar="METHOD",
        )
    if sizes:
        add("--size", choices=sizes, default="laptop")
    return result


def describe():
    """Returns machine, device, versions and date, and nothing to run: see `processes.call`."""
    versions = {"jaxscale": jaxscale.__version__}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    models = re.findall(
        r"model name\s*: (.*)", cpuinfo.read_text() if cpuinfo.exists() else ""
    )
    return {
        "device": jax.devices()[0].device_kind,
        "backend": jax.default_backend(),
        "processor": models[0] if models else platform.processor(),
        "cores": len(models) or None,
        "system": f"{platform.system()}-{platform.machine()}",
        "python": platform.python_version(),
        "versions": versions,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }, None


def line(described):
    """Returns what `describe` returned as one line of text."""
    versions = []
    for name, version in described["versions"].items():
        if version:
            versions.append(f"{name} {version}")
    return (
        f"{described['date']}: {described['backend']} ({described['device']}), "
        f"{described['cores']} cores of {described['processor']}, "
        f"Python {described['python']}, {', '.join(versions)}"
    )


def begin(width=170):
    """Returns a console, and the figures of a run that begins: what it runs on, and no rows."""
    console = Console(width=width)
    machine = processes.call(describe)
    console.print(line(machine))
    return console, {"machine": machine, "rows": []}


def write(path, figures, indent=1):
    """Writes the figures, if they are wanted: after each row, for a long run that is stopped."""
    if path:
        path.write_text(json.dumps(figures, indent=indent) + "\n")


def table(title, columns, reports, caption=None):
    """Returns a table of methods.

    Args:
      title: above it.
      columns: heading -> function of a report that gives its text. The last column has the error
        of a method that has one.
      reports: by method.
      caption: below it.
    """
    result = Table(title=title, caption=caption)
    result.add_column("method", no_wrap=True)
    *figures, last = columns
    for heading in figures:
        result.add_column(heading, justify="right")
    result.add_column(last, overflow="fold", max_width=40)
    for name, report in reports.items():
        cells = [""] * len(figures) + [report.get("error")]
        if "error" not in report:
            cells = [text(report) for text in columns.values()]
        result.add_row(name, *cells)
    return result


def markdown(headings, rows):
    """Returns a table of Markdown, as in `results/README.md`."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
