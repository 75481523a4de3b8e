"""The package's own promises: its layers, names and types, and docstrings that are true."""

import ast
import doctest
import graphlib
import importlib.util
import inspect
import json
import pathlib
import re
import runpy
import subprocess
import sys
import tomllib

import optax
import pytest
from tables import cases

import jaxscale

# A module imports from its own row and from the rows above it in this list; never in a circle.
ROWS = ["_jax", "_trees", "_autocast _state", "_gradients", "_policies", "_step", "_progress"]
ROWS += ["diagnostics flax nnx presets", "_doctor"]
ROW = {name: i for i, row in enumerate(ROWS) for name in row.split()}
ROOT = pathlib.Path(__file__).parent.parent.parent
PACKAGE = pathlib.Path(jaxscale.__file__).parent


def public(module, prefix=""):
    names = [name for name in vars(module) if not name.startswith("_")]
    named = {f"{prefix}{name}": getattr(module, name) for name in names}
    return {name: value for name, value in named.items() if not inspect.ismodule(value)}


PUBLIC = public(jaxscale) | {
    "flax.TrainState": jaxscale.flax.TrainState,
    "flax.train_step": jaxscale.flax.train_step,
    "nnx.train_step": jaxscale.nnx.train_step,
}
DIAGNOSTICS = public(jaxscale.diagnostics, "diagnostics.")
ALL = PUBLIC | public(jaxscale.presets, "presets.") | DIAGNOSTICS
METHODS = {
    f"{name}.{method}": function
    for name, cls in ALL.items()
    if inspect.isclass(cls) and not hasattr(cls, "_fields")
    for method, function in vars(cls).items()
    if not method.startswith("_") and callable(getattr(cls, method))
}


def module_of(file):
    """A file as `diagnostics._trace.places`; a folder's `__init__` as the folder."""
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def imports(file):
    """The modules of the package that a file imports, and the packages of others."""
    package, found = ".".join(["jaxscale", *file.parent.relative_to(PACKAGE).parts]), set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            for alias in node.names:
                below = f"{base}.{alias.name}"
                found.add(below if below.removeprefix("jaxscale.") in MODULES else base)
    own = {name.removeprefix("jaxscale.") for name in found if name.startswith("jaxscale.")}
    others = {name.split(".")[0] for name in found} - {"jaxscale"}
    return own, others - sys.stdlib_module_names


MODULES = {module_of(file): file for file in sorted(PACKAGE.rglob("*.py"))}
IMPORTS = {module: imports(file) for module, file in MODULES.items()}


def test_imports_run_one_way_and_nothing_else_is_imported():
    graph = {module: own for module, (own, _) in IMPORTS.items() if module != "__init__"}
    graphlib.TopologicalSorter(graph).prepare()  # raises an error that names the circle
    assert not [
        f"{module} imports {other}"
        for module, own in graph.items()
        if module != "__main__"
        for other in own
        if ROW[other.split(".")[0]] > ROW[module.split(".")[0]]
    ]
    extras = {"flax": {"flax"}, "nnx": {"flax"}, "diagnostics._pictures": {"matplotlib"}}
    extras |= {"_doctor.html": {"jinja2"}}
    for module, (_, others) in IMPORTS.items():
        assert others <= {"jax", "numpy", "optax"} | extras.get(module, set()), module


CONTRACT = """
AdaptiveLossScale AdaptiveState DynamicLossScale FixedLossScale LossScale LossScaleState
LossScaleStuckError LossScaledState MultiStepsState NoOpLossScale SpikeRule SpikeState all_finite
apply_gradients as_loss_scale autocast check flax.TrainState flax.train_step from_state_dict
full_precision grad loss_scaled metrics multi_steps nnx.train_step scale scale_backward
skip_nonfinite to_state_dict train_step tree_where unscale value_and_grad
"""
FIELDS = {
    "LossScaleState": "loss_scale growth_tracker hysteresis_tracker",
    "AdaptiveState": "loss_scale peak level crest finite_steps held_steps overflows",
    "LossScaledState": "scaling inner_state step_applied notfinite_count total_notfinite "
    "total_notfinite_loss total_steps total_retries total_exhausted backoff_count spikes "
    "nonfinite_leaves grad_norm",
}


def test_names_and_dependencies_are_those_of_the_contract():
    assert set(PUBLIC) == set(CONTRACT.split())
    for name, fields in FIELDS.items():
        assert PUBLIC[name]._fields == tuple(fields.split())
    update = inspect.signature(jaxscale.loss_scaled(optax.sgd(0.1)).update)
    assert list(update.parameters) == ["updates", "state", "params", "value", "extra_args"]
    # `test_help.py` sees in a fresh process that nothing else is imported.
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert {re.match(r"\w+", line).group() for line in declared} == {"jax", "jaxlib", "optax"}


def test_options_are_keyword_only():
    # The exceptions are `loss_scaled(inner, 128)`, `autocast(fun, jnp.bfloat16)`,
    # `scale_backward(fun, 128)` and the last two fields of a NamedTuple; and an exception has the
    # signature of all exceptions: none.
    assert not [
        f"{name}({parameter})"
        for name, obj in ALL.items()
        if name != "LossScaleStuckError"
        for parameter in inspect.signature(obj).parameters.values()
        if parameter.default is not parameter.empty
        and parameter.name
        not in ("loss_scale", "scale", "dtype", "spikes", "nonfinite_leaves", "grad_norm")
        and parameter.kind is not parameter.KEYWORD_ONLY
    ]


def test_bugs_are_planted_in_functions_that_there_are():
    mutations = runpy.run_path(str(ROOT / "tests" / "mutations.py"))
    mutations["tests_by_definition"](list(mutations["definitions"]()))  # exits at any other


@pytest.mark.standard_promotion  # as users have it
@cases("module", [module for module in MODULES if not module.endswith("__main__")])
def test_examples_in_docstrings_run(module):
    name = f"jaxscale.{module}".removesuffix(".__init__")
    failed, _ = doctest.testmod(importlib.import_module(name))
    assert failed == 0


@pytest.mark.slow
def test_pyright_finds_each_typo_of_a_users_program_and_nothing_else(tmp_path):
    program = (ROOT / "tests" / "support" / "typed_program.py").read_text()
    # JAX and optax are judged by their own types, which strict mode finds fault with.
    config = {"typeCheckingMode": "strict", "pythonVersion": "3.11"}
    config |= {"reportMissingTypeStubs": "none", "extraPaths": [str(ROOT)]}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(config))
    (tmp_path / "program.py").write_text(program)
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--outputjson"]
    result = subprocess.run([*command, "-p", str(tmp_path)], capture_output=True, text=True)
    report = json.loads(result.stdout)
    assert report["summary"]["filesAnalyzed"] == 1
    errors = {e["range"]["start"]["line"]: e["message"] for e in report["generalDiagnostics"]}
    marks = [re.search(r'# error: "(\w+)"', line) for line in program.splitlines()]
    expected = {i: mark.group(1) for i, mark in enumerate(marks) if mark}
    assert len(expected) == 8
    assert errors.keys() == expected.keys()
    assert len(errors) == len(report["generalDiagnostics"])
    assert not [word for line, word in expected.items() if word not in errors[line]]
