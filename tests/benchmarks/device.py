"""Times training on the device that is there, as on one GPU.

    python tests/benchmarks/device.py [--out FOLDER] [--minutes 9] [--size tiny|full]

Nothing needs to be installed but JAX, Optax, Flax and rich. It times a transformer and a ResNet
(`device_models.py`). A model that fails stops nothing. The figures are written after each form,
into a file named after the device. What does not fit into the minutes is noted as not run. The tiny
size is the default on a CPU. Laws on a device are the tests with the mark `device`.
"""

import argparse
import os
import pathlib
import re
import sys
import time

# Before JAX starts, as it would take most of the memory at once.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# The package need not be installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent.parent))

import device_models
import device_timing
import jax
import report
from rich.console import Console
from rich.table import Table

START = time.perf_counter()
FOLDER = pathlib.Path(__file__).resolve().parent
# The share of the time that is left that the first model may take.
FIRST_MODEL_SHARE = 0.6


def elapsed():
    return time.perf_counter() - START


def say(text):
    print(f"[{elapsed():6.1f} s] {text}", flush=True)


def time_models(size, until, result, save):
    for index, (name, make) in enumerate(device_models.TASKS.items()):
        last = index == len(device_models.TASKS) - 1
        share = 1.0 if last else FIRST_MODEL_SHARE
        task_until = elapsed() + share * (until - elapsed())
        say(f"{name}, until {task_until:.0f} s")
        try:
            task = make(size)
        except Exception as error:
            result["figures"][name] = {"error": f"{type(error).__name__}: {error}"}
            continue
        figures = result["figures"][name] = {"settings": task.settings}

        def save_forms(reports, figures=figures):
            figures["forms"] = reports
            save()

        forms = device_models.forms_of(name, size)
        plan = device_timing.PLANS[size]
        device_timing.measure(task, forms, plan, task_until, elapsed, say, save_forms)


def _ratio(figures, key):
    ratio = figures.get(key, {})
    return "/".join(f"{value:.2f}" for value in ratio.values())


def _gib(figures, key):
    return f"{figures[key] / 2**30:.2f}" if key in figures else ""


def print_tables(console, result):
    for name, figures in result["figures"].items():
        table = Table(title=f"{name}: {figures.get('settings')}")
        table.add_column("form", no_wrap=True)
        headings = [
            "step ms",
            "/ float32 (time/memory)",
            "/ by hand",
            "GiB",
            "peak GiB",
        ]
        for heading in headings:
            table.add_column(heading, justify="right")
        table.add_column("losses, or why there are none", max_width=60)
        for form, row in figures.get("forms", {}).items():
            cells = [form, *[""] * len(headings), row.get("error", "")[:200]]
            if "step_s" in row:
                losses = " ".join(f"{loss:.4f}" for loss in row["losses"])
                cells = [form, f"{1e3 * row['step_s']:.2f}"]
                cells += [_ratio(row, "to_float32"), _ratio(row, "to_by_hand")]
                cells += [_gib(row, "bytes"), _gib(row, "peak_bytes"), losses]
            table.add_row(*cells)
        console.print(table)


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    default = FOLDER / "results" / "devices"
    add("--out", type=pathlib.Path, default=default, help="folder of the figures")
    add("--minutes", type=float, default=9.0, help="after which nothing new begins")
    add("--size", choices=["tiny", "full"], help="tiny on a CPU, or else full")
    return parser.parse_args()


def main():
    options = parse()
    device = jax.devices()[0]
    size = options.size or ("tiny" if device.platform == "cpu" else "full")
    machine, _ = report.describe()
    machine["platform_version"] = device.client.platform_version
    machine["memory"] = device_timing.read_memory("bytes_limit")
    settings = {"size": size, "minutes": options.minutes}
    settings["float32_products"] = "of the default precision, on a GPU TF32"
    result = {"machine": machine, "settings": settings, "figures": {}}
    options.out.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^a-z0-9]+", "_", device.device_kind.lower()).strip("_")
    path = options.out / f"{name}.json"

    def save():
        settings["seconds"] = round(elapsed(), 1)
        report.write(path, result)

    say(report.line(machine))
    save()
    until = 60 * options.minutes
    time_models(size, until, result, save)
    save()
    print_tables(Console(width=170), result)
    say(f"written to {path}")


if __name__ == "__main__":
    main()
