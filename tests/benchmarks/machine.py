"""What a benchmark ran on: machine, device, versions and date."""

import datetime
import importlib.metadata
import pathlib
import platform
import re

import jax

import jaxscale

PACKAGES = ["jax", "jaxlib", "optax", "flax", "jmp", "mixed-precision-for-jax", "jaxamp"]
PACKAGES += ["libtpu", "jax-cuda12-plugin"]


def describe():
    """Returns what this runs on as JSON types, and nothing to run: see `processes.call`."""
    versions = {"jaxscale": jaxscale.__version__}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    models = re.findall(r"model name\s*: (.*)", cpuinfo.read_text() if cpuinfo.exists() else "")
    return {
        "device": jax.devices()[0].device_kind,
        "backend": jax.default_backend(),
        "processor": models[0] if models else platform.processor(),
        "cores": len(models) or None,
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": versions,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }, None


def line(described):
    """Returns it as one line of text."""
    versions = [f"{name} {version}" for name, version in described["versions"].items() if version]
    return (
        f"{described['date']}: {described['backend']} ({described['device']}), "
        f"{described['cores']} cores of {described['processor']}, "
        f"Python {described['python']}, {', '.join(versions)}"
    )
