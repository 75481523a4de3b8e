"""Models under `autocast`, compiled for an H100, a TPU v5e and a CPU.

    pip install libtpu "jax-cuda12-plugin[with-cuda]"   # the compilers; no driver, no device
    python tests/benchmarks/autocast_targets.py [--targets NAME ...] [--models NAME ...] [--json F]

Loss and gradients in three ways: in float32, with casts by hand, and under `autocast`. The models
are those of `zoo.py`, with casts around their products, and those of `device_models.py` in full
size, each of whose layers gets a `dtype`, so that what is between products is rounded, too. Of each
compiled program, which is not run: the bytes of main memory that it moves, its kernels, and its
temporary memory. Of a loop one turn counts. How it is counted: `hlo.py`. Besides, the bytes that
JAX keeps for the backward pass, which are those of the traced program, on any machine.
"""

import targets  # before JAX, whose compilers ask for the machine

# isort: split
import argparse
import pathlib
import time
from typing import Any, NamedTuple

import hlo
import jax
import jax.numpy as jnp
import jaxpr_equations
import report
import zoo
from jax.sharding import SingleDeviceSharding

import jaxscale

LAYERS = {"ResNet-50": "ResNet", "GPT-2 small": "transformer"}
FLOAT32, BY_HAND, AUTOCAST = "float32", "by hand", "autocast"
WAYS = [FLOAT32, BY_HAND, AUTOCAST]


class Target(NamedTuple):
    """A machine to compile for, and the half precision of products there."""

    kind: str
    shape: str
    half: str


TARGETS = {
    "H100, float16": Target("H100", "1", "float16"),
    "H100, bfloat16": Target("H100", "1", "bfloat16"),
    "TPU v5e, bfloat16": Target("TPU v5e", "1x1", "bfloat16"),
    "CPU, float16": Target("CPU", "1", "float16"),
}
# On a CPU, where XLA computes little again by itself, less memory costs bytes.
GOALS = {"CPU": ["temporary_bytes"]}
GOALS_OF_OTHERS = ["bytes", "xla_bytes", "kernels", "temporary_bytes"]
# Between products `autocast` moves float32, where layers with a `dtype` move half precision.
GOALS_OF_LAYERS = ["temporary_bytes"]


class Layers(NamedTuple):
    """A model of `device_models.py`, as those of the zoo are used. By hand its layers are cast."""

    task: Any

    def arguments(self):
        """Returns the types of parameters, state and batch."""
        return jax.eval_shape(lambda: (*self.task.init(), *self.task.batch))

    def in_precision(self, dtype):
        """Returns the loss as a function of parameters, state and batch."""
        loss = self.task.loss(None if dtype == FLOAT32 else jnp.dtype(dtype))
        return lambda *args: loss(*args)[0]


def make_model(name):
    """Returns a model by its name."""
    if name not in LAYERS:
        return zoo.MODELS[name]
    import device_models  # which needs Flax

    return Layers(device_models.TASKS[LAYERS[name]]("full"))


def loss_of(model, way, half):
    """Returns the loss of a model as a function of parameters and batch."""
    if way == BY_HAND:
        return model.in_precision(half)
    loss = model.in_precision(FLOAT32)
    return loss if way == FLOAT32 else jaxscale.autocast(loss, half)


def compile_for(target, model, way):
    """Returns value and gradient of a model, compiled for the first device of a target."""
    device, *_ = targets.devices(target.kind, target.shape)
    there = SingleDeviceSharding(device)
    args = jax.tree.map(lambda aval: aval.update(sharding=there), model.arguments())
    value_and_grad = jax.value_and_grad(loss_of(model, way, target.half))
    return jax.jit(value_and_grad).lower(*args).compile()


def kept_bytes(model, way, half):
    """Returns the bytes that the forward pass keeps, besides parameters and batch."""
    return jaxpr_equations.residual_bytes(loss_of(model, way, half), *model.arguments())


def figures(target, model, way):
    """Returns what a compiled program holds."""
    start = time.process_time()
    compiled = compile_for(target, model, way)
    kernels, moved = hlo.cost(compiled.as_text())
    analysis = compiled.cost_analysis()
    return {
        "kept_bytes": kept_bytes(model, way, target.half),
        "bytes": moved,
        "xla_bytes": analysis and analysis["bytes accessed"],
        "kernels": kernels.total(),
        "temporary_bytes": compiled.memory_analysis().temp_size_in_bytes,
        "compile_s": time.process_time() - start,
    }


def measure(name, model):
    """Returns the figures of a model on a target, and the goals that it misses."""
    target = TARGETS[name]
    ways = {way: figures(target, make_model(model), way) for way in WAYS}
    goals = GOALS.get(target.kind, GOALS_OF_OTHERS)
    if model in LAYERS:
        goals = GOALS_OF_LAYERS
    return {"ways": ways, "misses": misses(ways, goals)}


def misses(ways, goals, tolerance=1.03):
    """Returns how `autocast` misses its goals: no more than by hand, nor than in float32.

    The number of kernels is compared with casts by hand alone, as casts are kernels, too.
    """
    result = []
    for figure in goals:
        exact, by_hand, own = (ways[way][figure] for way in WAYS)
        if own is None:  # the compiler for this target does not count it
            continue
        if own > tolerance * by_hand:
            result.append(f"{figure}: {own / by_hand:.2f} of by hand")
        if own > exact and figure != "kernels":
            result.append(f"{figure}: {own / exact:.2f} of float32")
    return result


def markdown(rows):
    """Returns what each way needs, as in `results/README.md`."""
    headings = [
        "compiled for",
        "model",
        "MB moved",
        "kernels",
        "temporary MB",
        "kept MB",
    ]
    lines = []
    for row in rows:
        line = [row["target"], row["model"]]
        columns = {
            "bytes": 1e6,
            "kernels": 1,
            "temporary_bytes": 1e6,
            "kept_bytes": 1e6,
        }
        for figure, unit in columns.items():
            numbers = [row["ways"][way][figure] / unit for way in WAYS]
            line.append(", ".join(f"{number:.4g}" for number in numbers))
        lines.append(line)
    return report.markdown(headings, lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    models = list(zoo.MODELS)
    add("--targets", nargs="+", choices=TARGETS, default=list(TARGETS), metavar="NAME")
    add("--models", nargs="+", choices=[*models, *LAYERS], default=models)
    add("--json", type=pathlib.Path, help="where to write the figures")
    options = parser.parse_args()
    jax.config.update("jax_enable_compilation_cache", False)
    machine = report.describe()
    print(report.line(machine))
    result = {"machine": machine, "rows": []}
    for target in options.targets:
        for model in options.models:
            row = {"target": target, "model": model}
            row |= measure(target, model)
            result["rows"].append(row)
            print(row["misses"] or "holds")
            report.write(options.json, result)
    print(markdown(result["rows"]))


if __name__ == "__main__":
    main()
