"""What a user reads: `help`, the names that resolve, the command line, the API reference."""

import builtins
import importlib
import inspect
import keyword
import os
import re
import subprocess
import sys
import tomllib

import pytest
from tables import cases
from test_package import ALL, METHODS, PUBLIC, ROOT

import jaxscale
import jaxscale.__main__
import jaxscale.diagnostics
import jaxscale.flax
import jaxscale.nnx
import jaxscale.presets

FIRST = ["loss_scaled", "train_step", "metrics", "check"]
MODULES = [getattr(jaxscale, name) for name in ("diagnostics", "flax", "nnx", "presets")]
MODULES = {module.__name__: module for module in (jaxscale, *MODULES)}
DOCS = {
    name: inspect.getdoc(getattr(value, "__func__", value)) or ""
    for name, value in (ALL | METHODS | MODULES).items()
}

# A name in single backticks is one or more identifiers with points between them, and perhaps
# arguments behind. Names with a point must resolve if they start with `jaxscale`, with a public
# class, or with a package of `PACKAGES`. Names without one must resolve if they are of several
# words (`loss_scale`, `LossScale`), which code of a formula or of a user's loop is not: they are
# public, or an argument, a field or a method of what is public, or a builtin, or in `OTHERS`.
NAME = re.compile(r"(?<!`)`([A-Za-z_]\w*(?:\.\w+)*)(?:\([^`]*\))?`(?!`)", re.DOTALL)
SEVERAL_WORDS = re.compile(r"\w+_\w+|[A-Z]\w*[a-z][A-Z]\w*")
PACKAGES = {"equinox", "flax", "jax", "jmp", "json", "math", "matplotlib", "optax"}
# A key that Flax gives a meaning, an argument of jax.grad, the peers' classes and functions, each
# named after its peer in the sentence, and tags of the traces.
OTHERS = """
_overwrite_with_gradient allow_int shard_map NamedTuple AdaptiveLossScaleUpdateCell BackoffScaler
DelayedScaling DynamicGradScaler DynamicLossScaleManager DynamicLossScaler DynamicScalerState
ExponentialUpdateLossScaleManager FixedLossScaleManager GradScaler LogMaxScaler SkipStepConfig
SkipStepOptimizer skip_step_on_spikes LossScaleOptimizer
MultiSteps StaticLossScale update_loss_scaling update_scale_hysteresis nonfinite_scale
subnormal_or_zero
"""
OTHERS = set(OTHERS.split())
TESTS = {path.name: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
TESTS_TEXT = "".join(TESTS.values())


def known_names():
    names = {name.rpartition(".")[2] for name in ALL} | set(dir(builtins)) | set(keyword.kwlist)
    for value in (ALL | METHODS).values():
        if inspect.isclass(value):
            names |= {name for name in dir(value) if not name.startswith("_")}
            names |= set(getattr(value, "__dataclass_fields__", ()))
        if callable(value) and value is not jaxscale.LossScaleStuckError:
            names |= set(inspect.signature(value).parameters)
    return names


KNOWN = known_names()
CLASSES = {name.rpartition(".")[2]: value for name, value in ALL.items() if inspect.isclass(value)}


def resolves(root, parts):
    """Whether attributes, modules or fields lead from an object along these names."""
    for part in parts:
        if not hasattr(root, part) and inspect.ismodule(root):
            try:
                importlib.import_module(f"{root.__name__}.{part}")
            except ImportError:
                return False
        if part in getattr(root, "__dataclass_fields__", {}):
            return True
        if not hasattr(root, part):
            return False
        root = getattr(root, part)
    return True


def unresolved(doc):
    """Returns the names in backticks that should resolve, by the rule above, and do not."""
    missing = []
    for name in NAME.findall(doc):
        first, *rest = name.split(".")
        if first.startswith("test_"):  # a file of tests, or a test in one
            found = f"{first}.py" in TESTS if rest else f"def {first}(" in TESTS_TEXT
        elif not rest:
            found = name in KNOWN | OTHERS or not SEVERAL_WORDS.fullmatch(name)
        elif first == "jaxscale" or first in PACKAGES:
            found = resolves(importlib.import_module(first), rest)
        else:
            found = first not in CLASSES or resolves(CLASSES[first], rest)
        if not found:
            missing.append(name)
    return missing


def test_help_starts_with_what_most_people_need():
    doc = inspect.getdoc(jaxscale)
    assert re.findall(r"^- `(\w+)\(", doc, flags=re.MULTILINE) == FIRST
    assert jaxscale.__all__[:4] == FIRST
    mentioned = re.findall(r"`(?:jaxscale\.)?(\w+)[`(.]", doc)
    assert not set(jaxscale.__all__) - set(mentioned)


def test_all_is_what_is_public():
    modules = {"diagnostics", "flax", "nnx", "presets"}
    core = {name for name in PUBLIC if "." not in name}
    assert set(jaxscale.__all__) == core | modules
    assert set(jaxscale.__all__) <= set(dir(jaxscale))
    for module in (jaxscale.diagnostics, jaxscale.presets):
        prefix = module.__name__.removeprefix("jaxscale.") + "."
        public = {
            name.removeprefix(prefix)
            for name, value in ALL.items()
            if name.startswith(prefix) and not inspect.ismodule(value)
        }
        assert set(module.__all__) == public


def test_names_in_docstrings_resolve():
    assert not {name: missing for name, doc in DOCS.items() if (missing := unresolved(doc))}


UNRESOLVED = {
    "`jaxscale.metrics`, `jaxscale.presets.pytorch(init_scale=1)`": ["jaxscale.presets.pytorch"],
    "`LossScaledState.scaling`, `LossScaledState.scale`": ["LossScaledState.scale"],
    "`optax.apply_if_finite`, `optax.apply_if`": ["optax.apply_if"],
    "`growth_interval`, `growth_steps`, `LossScalerState`": ["growth_steps", "LossScalerState"],
    "`x`, `vmap`, `x + 1`, `tx.init(params)`, `f(x_0)`": [],
    "`test_readme_runs`, `test_readme_sings`, `test_write.py`": [
        "test_readme_sings",
        "test_write.py",
    ],
}


def test_unresolved_names_are_found():
    assert {doc: unresolved(doc) for doc in UNRESOLVED} == UNRESOLVED


LAZY = """
import optax, sys
before = set(sys.modules)
import jaxscale
added = {name.split(".")[0] for name in set(sys.modules) - before} - {"jaxscale", "jax"}
assert not added - set(sys.stdlib_module_names), added
names = ["diagnostics", "flax", "nnx", "presets"]
modules = [f"jaxscale.{name}" for name in names]
assert set(names) <= set(dir(jaxscale))
assert not set(modules) & set(sys.modules) and "flax" not in sys.modules
assert [getattr(jaxscale, name) for name in names] == [sys.modules[m] for m in modules]
try:
    jaxscale.nothing
except AttributeError as error:
    assert str(error) == "module 'jaxscale' has no attribute 'nothing'"
else:
    raise SystemExit("no AttributeError")
"""
WITHOUT_FLAX = """
import importlib.util, pydoc, sys
own = importlib.util.find_spec
importlib.util.find_spec = lambda name, *args: None if name == "flax" else own(name, *args)
sys.modules["flax"] = None
import jaxscale
assert not {"flax", "nnx"} & {*jaxscale.__all__, *dir(jaxscale)}
for statement in ("jaxscale.flax", "from jaxscale import flax", "jaxscale.nnx"):
    try:
        exec(statement)
    except ImportError as error:
        assert 'pip install "jaxscale[flax]"' in str(error), error
    else:
        raise SystemExit("no ImportError")
exec("from jaxscale import *")
assert "four functions" in pydoc.render_doc(jaxscale)
"""


PROGRAMS = {"lazy": LAZY, "without Flax": WITHOUT_FLAX}


@cases("name", PROGRAMS, fast=["lazy"])
def test_modules_are_imported_when_used_and_without_flax_it_is_said_what_to_install(name):
    subprocess.run([sys.executable, "-c", PROGRAMS[name]], check=True)


@pytest.mark.parametrize("flags", ["", "--xla_a=1", "--xla_allow_excess_precision=true"])
def test_the_command_sets_the_flag_first(monkeypatch, flags):
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, name = scripts["jaxscale"].partition(":")
    seen = []

    def run(argv):
        seen.append((argv, os.environ["XLA_FLAGS"].split()))
        return 7

    monkeypatch.setenv("XLA_FLAGS", flags)
    monkeypatch.setattr(sys, "argv", ["jaxscale", "doctor", "a:b"])
    monkeypatch.setattr("jaxscale._doctor.cli.main", run)
    assert getattr(importlib.import_module(module), name)() == 7
    own = [] if "excess" in flags else ["--xla_allow_excess_precision=false"]
    assert seen == [(["doctor", "a:b"], flags.split() + own)]


def test_the_command_alone_prints_the_help(monkeypatch, capsys):
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"])
    monkeypatch.setattr(sys, "argv", ["jaxscale"])
    with pytest.raises(SystemExit) as exit_:
        jaxscale.__main__.main()
    assert exit_.value.code == 0
    assert "doctor" in capsys.readouterr().out


@pytest.mark.slow
def test_the_api_reference_builds(tmp_path):
    (command,) = re.findall(
        r"^python -m (pdoc .*)$", (ROOT / ".github/CONTRIBUTING.md").read_text(), re.MULTILINE
    )
    command = command.replace("-o api", f"-o {tmp_path}").split()
    result = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=True
    )
    # The type of an optimizer state in Optax, which Flax annotates with, names itself, and pdoc
    # cannot resolve that.
    warnings = [line for line in result.stderr.splitlines() if line.startswith("Warn")]
    assert not [line for line in warnings if "'ArrayTree'" not in line]
    pages = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.html")} - {"index.html"}
    assert pages == {f"{name.replace('.', '/')}.html" for name in MODULES}
    for name, module in MODULES.items():
        page = (tmp_path / f"{name.replace('.', '/')}.html").read_text()
        assert not [
            each
            for each in module.__all__
            if not inspect.ismodule(getattr(module, each)) and f'<section id="{each}">' not in page
        ]
