"""The package's own promises: layers, names, types, and that what a user reads is true."""

import ast
import doctest
import functools
import graphlib
import importlib.util
import inspect
import json
import operator
import os
import pathlib
import pkgutil
import re
import runpy
import subprocess
import sys
import tomllib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from departing import uses_what_goes
from tables import cases

import jaxscale
import jaxscale.__main__

pytestmark = pytest.mark.standard_promotion  # as users have it

# A module imports from its own row and from the rows above it in this list; never in a circle.
ROWS = [
    "_jax",
    "_jax.jaxprs",
    "_boundary _trees _went",
    "_autocast _state",
    "_gradients",
    "_backward _policies _storage",
    "_step",
    "_progress",
    "diagnostics flax nnx presets",
    "_doctor",
]
ROW = {name: i for i, row in enumerate(ROWS) for name in row.split()}
# What a module imports from below when it is called: the doctor, which uses what stands beside it.
DOORS = {"diagnostics._examine": "_doctor"}
# The wings of the house, and those from which each may import besides itself. What is in none of
# them, all may share.
WINGS = {
    "a step of one's own": "_trees _state _gradients _policies _step _progress flax nnx presets",
    "rewritten programs": "_jax.jaxprs _boundary _autocast _backward",
    "tools": "diagnostics _doctor",
}
MAY_IMPORT = {
    "a step of one's own": (),
    "rewritten programs": ("a step of one's own",),
    "tools": ("a step of one's own", "rewritten programs"),
}
WING = {room: wing for wing, rooms in WINGS.items() for room in rooms.split()}
ROOT = pathlib.Path(__file__).parent.parent.parent
PACKAGE = pathlib.Path(jaxscale.__file__).parent


def public(module, prefix=""):
    """Returns what is public in a module, by name, without its modules."""
    return {
        f"{prefix}{name}": value
        for name, value in vars(module).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }


# `__getattr__` imports these when they are used, and does not keep them.
LAZY = ["autocast", "full_precision", "half_precision", "scale_backward"]
PUBLIC = public(jaxscale) | {name: getattr(jaxscale, name) for name in LAZY}
PUBLIC["nnx.train_step"] = jaxscale.nnx.train_step
PUBLIC |= {
    f"flax.{name}": getattr(jaxscale.flax, name) for name in jaxscale.flax.__all__
}
ALL = (
    PUBLIC
    | public(jaxscale.presets, "presets.")
    | public(jaxscale.diagnostics, "diagnostics.")
)


def find_methods():
    """Yields the public methods of all classes that are no NamedTuples, by name."""
    for name, cls in ALL.items():
        if not inspect.isclass(cls) or hasattr(cls, "_fields"):
            continue
        for method, function in vars(cls).items():
            if not method.startswith("_") and callable(getattr(cls, method)):
                yield f"{name}.{method}", function


METHODS = dict(find_methods())


def module_of(file):
    """Returns the module of a file, such as `diagnostics._trace.places`."""
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    if parts[-1] == "__init__" and len(parts) > 1:
        parts = parts[:-1]
    return ".".join(parts)


@functools.cache
def imports(module):
    """Returns the modules that one of the package imports."""
    file = MODULES[module]
    package = ".".join(["jaxscale", *file.parent.relative_to(PACKAGE).parts])
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            path = "." * node.level + (node.module or "")
            base = importlib.util.resolve_name(path, package)
            for alias in node.names:
                below = f"{base}.{alias.name}"
                is_module = below.removeprefix("jaxscale.") in MODULES
                names.add(below if is_module else base)
    return names


MODULES = {module_of(file): file for file in sorted(PACKAGE.rglob("*.py"))}
EXTRAS = {
    "flax": {"flax"},
    "nnx": {"flax"},
    "diagnostics._plot": {"matplotlib"},
    "_doctor.page": {"jinja2"},
}


def own_imports(module):
    """Returns the modules of the package that one of them imports."""
    start = "jaxscale."
    return {
        name.removeprefix(start) for name in imports(module) if name.startswith(start)
    }


def room_of(module):
    rooms = [room for room in ROW if f"{module}.".startswith(f"{room}.")]
    return max(rooms, key=len, default=module)


def row_of(module):
    return ROW[room_of(module)]


def test_imports_never_run_in_a_circle():
    graph = {module: own_imports(module) for module in MODULES if module != "__init__"}
    graphlib.TopologicalSorter(graph).prepare()  # raises an error that names the circle


def test_a_module_imports_only_what_lies_above_it_and_what_is_declared():
    for module in MODULES:
        packages = {name.split(".")[0] for name in imports(module)}
        declared = {"jaxscale", "jax", "numpy", "optax"} | EXTRAS.get(module, set())
        assert packages - sys.stdlib_module_names <= declared, module
        if module not in ("__init__", "__main__"):
            for other in own_imports(module):
                is_door = room_of(other) == DOORS.get(module)
                assert is_door or row_of(other) <= row_of(module), (module, other)


def test_a_wing_knows_nothing_of_those_that_it_does_not_need():
    for module in MODULES:
        wing = WING.get(room_of(module))
        if wing is not None:
            for other in own_imports(module):
                of_other = WING.get(room_of(other), wing)
                allowed = (wing, *MAY_IMPORT[wing])
                assert of_other in allowed, (module, other)


CONTRACT = """
DynamicLossScale FixedLossScale LossScale LossScaleState
LossScaleStuckError LossScaledState MultiStepsState NoOpLossScale SpikeRule SpikeState all_finite
apply_gradients as_loss_scale autocast check compact_state flax.TrainState flax.train_step
from_state_dict full_precision grad half_precision loss_scaled master_params master_weights metrics
multi_steps
nnx.train_step scale scale_backward skip_nonfinite stochastic_rounding to_state_dict train_step
tree_where unscale value_and_grad with_master_params
"""


def test_names_are_those_of_the_contract():
    assert set(PUBLIC) == set(CONTRACT.split())
    update = inspect.signature(jaxscale.loss_scaled(optax.sgd(0.1)).update)
    names = "updates state params value extra_args"
    assert list(update.parameters) == names.split()


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


# `loss_scaled(inner, 128)`, `scale_backward(fun, 128)`, `autocast(fun, jnp.bfloat16)`,
# `master_weights(inner, "float32")`, and the last fields of a NamedTuple.
POSITIONAL = (
    "loss_scale",
    "scale",
    "dtype",
    "storage",
    "spikes",
    "nonfinite_leaves",
    "grad_norm",
    "weights",
)


# An exception has the signature of all exceptions, which is none.
def test_options_are_keyword_only():
    for name in ALL.keys() - {"LossScaleStuckError"}:
        fields = getattr(ALL[name], "_fields", ())  # those of a NamedTuple have places
        for parameter in inspect.signature(ALL[name]).parameters.values():
            is_option = parameter.default is not parameter.empty
            if is_option and parameter.name not in (*POSITIONAL, *fields):
                assert parameter.kind is parameter.KEYWORD_ONLY, (name, parameter)


@pytest.mark.docs
@uses_what_goes
@cases("room", sorted({room_of(module) for module in MODULES} - {"__main__"}))
def test_examples_in_docstrings_run(room):
    for module in MODULES:
        if room_of(module) == room:
            name = f"jaxscale.{module}".removesuffix(".__init__")
            failed, _ = doctest.testmod(importlib.import_module(name))
            assert failed == 0, module


@pytest.mark.slow
def test_pyright_finds_each_typo_of_a_users_program_and_nothing_else(tmp_path):
    program = (ROOT / "tests" / "support" / "typed_program.py").read_text()
    # Strict mode would also find fault with the types of JAX and Optax.
    config = {
        "typeCheckingMode": "strict",
        "pythonVersion": "3.11",
        "reportMissingTypeStubs": "none",
        "extraPaths": [str(ROOT)],
    }
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(config))
    (tmp_path / "program.py").write_text(program)
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable]
    command += ["--outputjson", "-p", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True)
    report = json.loads(result.stdout)
    assert report["summary"]["filesAnalyzed"] == 1
    errors = {}
    for error in report["generalDiagnostics"]:
        line = error["range"]["start"]["line"]
        assert line not in errors, f"two errors in line {line}"
        errors[line] = error["message"]
    expected = {}
    for line, text in enumerate(program.splitlines()):
        for word in re.findall(r'# error: "(\w+)"', text):
            # A mark that is alone in its line is that of the next one.
            is_alone = text.lstrip().startswith("#")
            expected[line + is_alone] = word
    assert len(expected) == 6
    assert errors.keys() == expected.keys()
    for line, word in expected.items():
        assert word in errors[line], line


PARTS = (jaxscale, jaxscale.diagnostics, jaxscale.flax, jaxscale.nnx, jaxscale.presets)
DOCUMENTED = {module.__name__: module for module in PARTS}
DOCS = {
    name: inspect.getdoc(getattr(value, "__func__", value)) or ""
    for name, value in (ALL | METHODS | DOCUMENTED).items()
}

# A name in backticks must resolve if it starts with a public class and a point, or with these.
NAME = re.compile(r"(?<!`)`([A-Za-z_]\w*(?:\.\w+)*)(?:\([^`]*\))?`(?!`)", re.DOTALL)
PACKAGES = ("equinox", "flax", "jax", "jaxscale", "json", "math", "matplotlib", "optax")
CLASSES = {
    name.rpartition(".")[2]: value
    for name, value in ALL.items()
    if inspect.isclass(value)
}


def resolves(name):
    """Returns whether a name leads to an attribute, module or field, if it has to."""
    first, _, rest = name.partition(".")
    if first in CLASSES and rest:
        fields = getattr(CLASSES[first], "__dataclass_fields__", ())
        return hasattr(CLASSES[first], rest) or rest in fields
    if first not in PACKAGES:
        return True
    try:
        return bool(pkgutil.resolve_name(name))
    except (AttributeError, ImportError):
        return False


def test_all_is_what_is_public():
    core = {name for name in PUBLIC if "." not in name}
    assert set(jaxscale.__all__) == core | {"diagnostics", "flax", "nnx", "presets"}
    assert dir(jaxscale) == sorted(jaxscale.__all__)


@cases("module", [jaxscale.diagnostics, jaxscale.presets])
def test_all_of_a_module_is_what_is_public_in_it(module):
    assert set(module.__all__) == set(public(module))


@pytest.mark.docs
def test_names_in_docstrings_resolve():
    for name, doc in DOCS.items():
        for inner in NAME.findall(doc):
            assert resolves(inner), f"{name}: {inner}"


# Programs that import the package, each in a process of its own.
IMPORTS_LAZILY = """
import sys
import optax
loaded_before = set(sys.modules)
import jaxscale
loaded = set(sys.modules)
packages = {name.split(".")[0] for name in loaded - loaded_before}
foreign = packages - {"jaxscale", "jax"} - set(sys.stdlib_module_names)
assert not foreign, foreign
assert "flax" not in loaded
for name in ("_autocast", "_backward", "_boundary", "_jax.jaxprs"):
    assert f"jaxscale.{name}" not in loaded, name
assert callable(jaxscale.autocast) and "autocast" in dir(jaxscale)
for name in ("diagnostics", "flax", "nnx", "presets"):
    module = f"jaxscale.{name}"
    assert name in dir(jaxscale), name
    assert module not in loaded, module
    assert getattr(jaxscale, name) is sys.modules[module], module
"""
WITHOUT_FLAX = """
import importlib.util, pydoc, sys
import pytest
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "flax" else find_spec(name, *rest)
sys.modules["flax"] = None
import jaxscale
assert not {"flax", "nnx"} & {*jaxscale.__all__, *dir(jaxscale)}
for statement in (
    *("jaxscale.flax", "from jaxscale import flax", "import jaxscale.flax"),
    *("jaxscale.nnx", "import jaxscale.nnx"),
):
    module = statement.split()[-1].removeprefix("jaxscale.")
    message = f"`jaxscale.{module}` needs Flax, which is not installed: pip install flax$"
    with pytest.raises(ImportError, match=message):
        exec(statement)
exec("from jaxscale import *")
assert "four functions" in pydoc.render_doc(jaxscale)
"""


@pytest.mark.worlds
@pytest.mark.parametrize(
    "program", [IMPORTS_LAZILY, WITHOUT_FLAX], ids=["all", "no Flax"]
)
def test_a_program_imports_the_package(program):
    # Of this checkout, whatever is installed.
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment)


@cases("flags", ["", "--xla_a=1", "--xla_allow_excess_precision=true"])
def test_the_command_sets_the_flag_first(monkeypatch, flags):
    calls = []

    def main(argv):
        calls.append((argv, os.environ["XLA_FLAGS"].split()))
        return 7

    monkeypatch.setenv("XLA_FLAGS", flags)
    monkeypatch.setattr(sys, "argv", ["jaxscale", "doctor", "a:b"])
    monkeypatch.setattr("jaxscale._doctor.cli.main", main)
    assert pkgutil.resolve_name(PROJECT["scripts"]["jaxscale"])() == 7
    expected = flags.split()
    if "excess" not in flags:
        expected.append("--xla_allow_excess_precision=false")
    assert calls == [(["doctor", "a:b"], expected)]


def prints(word, run, argv, monkeypatch, capsys):
    """Returns whether a command succeeds and prints a word. A new process would start slowly."""
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"])
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(SystemExit) as exit_:
        run()
    return exit_.value.code == 0 and word in capsys.readouterr().out


def test_the_command_alone_prints_the_help(monkeypatch, capsys):
    assert prints("doctor", jaxscale.__main__.main, ["jaxscale"], monkeypatch, capsys)


README = (ROOT / "README.md").read_text()
SITE = ROOT / ".github" / "site" / "pages"
GUIDE = "\n".join([README, *(page.read_text() for page in sorted(SITE.rglob("*.md")))])
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
EXAMPLES = {path.stem: path for path in sorted((ROOT / "examples").glob("*.py"))}
# The examples that print a table and write a picture.
DRAWN = ["quickstart", "rl"]


def test_readme_runs():
    names = {}
    for block in BLOCKS:  # each goes on from those before
        exec(compile(block, "README.md", "exec"), names)
    assert names["opt_state"].total_steps == 10
    assert not np.array_equal(names["params"]["w"], jnp.zeros((4, 1)))


@pytest.mark.docs
def test_readme_and_site_name_what_is_there():
    # `test_went.py` evaluates what the page of that has.
    went = (SITE / "went.md").read_text()
    guide = GUIDE.replace(went, "")
    for name in set(re.findall(r"jaxscale\.([a-zA-Z_]+(?:\.\w+)?)", guide)) - {"py"}:
        operator.attrgetter(name)(jaxscale)
    assert set(EXAMPLES) == set(re.findall(r"examples/(\w+)\.py", GUIDE))


@pytest.mark.slow
@cases("name", [name for name in EXAMPLES if name not in DRAWN])
def test_example_runs(name):
    assert np.isfinite(runpy.run_path(str(EXAMPLES[name]))["main"](3))
    assert not jax.config.jax_enable_x64


@pytest.mark.slow
@cases("name", DRAWN)
def test_drawn_example_runs_end_to_end(name, tmp_path):
    # As a user runs it: it sets XLA flags of its own, before JAX is imported.
    environment = dict(os.environ)
    environment.pop("XLA_FLAGS", None)
    picture = tmp_path / "picture.png"
    command = [sys.executable, str(EXAMPLES[name])]
    command += ["--steps", "3", "--picture", str(picture)]
    if name == "rl":
        command += ["--seeds", "1"]
    result = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")
    for word in ("float32", "float16", "skipped"):
        assert word in result.stdout, word
    if name == "rl":  # 8 times with rounding errors of random signs, 3 bits apart
        figures = json.loads(picture.with_suffix(".json").read_text())
        (half,) = figures["float16"]["RMS of log(ratio)"]
        (bfloat,) = figures["bfloat16"]["RMS of log(ratio)"]
        assert bfloat > 3 * half > 0
