"""The machine that a benchmark runs on, files of figures, and tables."""

import datetime
import importlib.metadata
import json
import pathlib
import platform
import re

import jax

import jaxscale

PACKAGES = ["jax", "jaxlib", "optax", "flax", "jmp", "libtpu"]
PACKAGES += ["jax-cuda12-plugin", "jax-cuda13-plugin"]


def describe():
    """Returns machine, device, versions and date."""
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
    }


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


def write(path, figures, indent=1):
    """Writes the figures, if they are wanted: after each row, for a long run that is stopped."""
    if path:
        path.write_text(json.dumps(figures, indent=indent) + "\n")


def markdown(headings, rows):
    """Returns a table of Markdown, as in `results/README.md`."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
