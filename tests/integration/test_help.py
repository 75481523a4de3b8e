"""What a user reads: `help`, the names that resolve, the command line, the API reference."""

import importlib
import inspect
import os
import pkgutil
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

# A name in single backticks must resolve if it has points and starts with a public class, or with a
# package of `PACKAGES`.
NAME = re.compile(r"(?<!`)`([A-Za-z_]\w*(?:\.\w+)*)(?:\([^`]*\))?`(?!`)", re.DOTALL)
PACKAGES = ("equinox", "flax", "jax", "jaxscale", "json", "math", "matplotlib", "optax")
CLASSES = {name.rpartition(".")[2]: value for name, value in ALL.items() if inspect.isclass(value)}


def resolves(name):
    """Whether attributes, modules or fields lead along these names, where they must."""
    first, _, rest = name.partition(".")
    if first in CLASSES and rest:
        fields = getattr(CLASSES[first], "__dataclass_fields__", ())
        return hasattr(CLASSES[first], rest) or rest in fields
    try:
        return first not in PACKAGES or bool(pkgutil.resolve_name(name))
    except (AttributeError, ImportError):
        return False


def test_help_starts_with_what_most_people_need():
    doc = inspect.getdoc(jaxscale)
    assert re.findall(r"^- `(\w+)\(", doc, flags=re.MULTILINE) == FIRST
    assert jaxscale.__all__[:4] == FIRST
    mentioned = re.findall(r"`(?:jaxscale\.)?(\w+)[`(.]", doc)
    assert not set(jaxscale.__all__) - set(mentioned)


def test_all_is_what_is_public():
    core = {name for name in PUBLIC if "." not in name}
    assert set(jaxscale.__all__) == core | {"diagnostics", "flax", "nnx", "presets"}
    assert set(jaxscale.__all__) <= set(dir(jaxscale))
    for module in (jaxscale.diagnostics, jaxscale.presets):
        prefix = module.__name__.removeprefix("jaxscale.") + "."
        public = {name.removeprefix(prefix) for name in ALL if name.startswith(prefix)}
        assert set(module.__all__) == public


def test_names_in_docstrings_resolve():
    for name, doc in DOCS.items():
        assert not [each for each in NAME.findall(doc) if not resolves(each)], name
    wrong = ("jaxscale.presets.pytorch", "LossScaledState.scale", "optax.apply_if", "jax.nunpy")
    assert not any(map(resolves, wrong))


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
