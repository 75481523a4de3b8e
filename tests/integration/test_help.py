"""What a user reads is true: `help`, names, the command line, the API reference, the README."""

import functools
import inspect
import json
import operator
import os
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
from tables import cases
from test_package import ALL, METHODS, PUBLIC, ROOT

import jaxscale
import jaxscale.__main__

pytestmark = pytest.mark.standard_promotion

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
    assert not set(jaxscale.__all__) - set(re.findall(r"`(?:jaxscale\.)?(\w+)[`(.]", doc))


def test_all_is_what_is_public():
    core = {name for name in PUBLIC if "." not in name}
    assert set(jaxscale.__all__) == core | {"diagnostics", "flax", "nnx", "presets"}
    assert set(jaxscale.__all__) <= set(dir(jaxscale))
    with pytest.raises(AttributeError, match=r"^module 'jaxscale' has no attribute 'nothing'$"):
        _ = jaxscale.nothing
    for module in (jaxscale.diagnostics, jaxscale.presets):
        prefix = module.__name__.removeprefix("jaxscale.") + "."
        public = {name.removeprefix(prefix) for name in ALL if name.startswith(prefix)}
        assert set(module.__all__) == public


def test_names_in_docstrings_resolve():
    for name, doc in DOCS.items():
        assert not [each for each in NAME.findall(doc) if not resolves(each)], name
    wrong = ("jaxscale.presets.pytorch", "LossScaledState.scale", "optax.apply_if", "jax.nunpy")
    assert not any(map(resolves, wrong))


PROGRAMS = {
    "lazy": """
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
""",
    "without Flax": """
import importlib.util, pydoc, pytest, sys
own = importlib.util.find_spec
importlib.util.find_spec = lambda name, *args: None if name == "flax" else own(name, *args)
sys.modules["flax"] = None
import jaxscale
assert not {"flax", "nnx"} & {*jaxscale.__all__, *dir(jaxscale)}
for statement in ("jaxscale.flax", "from jaxscale import flax", "jaxscale.nnx"):
    with pytest.raises(ImportError, match=r'pip install "jaxscale\\[flax\\]"'):
        exec(statement)
exec("from jaxscale import *")
assert "four functions" in pydoc.render_doc(jaxscale)
""",
}


@cases("name", PROGRAMS, fast=["lazy"])
def test_modules_are_imported_when_used_and_without_flax_it_is_said_what_to_install(name):
    subprocess.run([sys.executable, "-c", PROGRAMS[name]], check=True)


@cases("flags", ["", "--xla_a=1", "--xla_allow_excess_precision=true"])
def test_the_command_sets_the_flag_first(monkeypatch, flags):
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    seen = []

    monkeypatch.setenv("XLA_FLAGS", flags)
    monkeypatch.setattr(sys, "argv", ["jaxscale", "doctor", "a:b"])
    main = "jaxscale._doctor.cli.main"
    monkeypatch.setattr(main, lambda argv: seen.append((argv, os.environ["XLA_FLAGS"])) or 7)
    assert pkgutil.resolve_name(scripts["jaxscale"])() == 7
    ((argv, flags_then),) = seen
    own = [] if "excess" in flags else ["--xla_allow_excess_precision=false"]
    assert (argv, flags_then.split()) == (["doctor", "a:b"], flags.split() + own)


def prints(word, run, argv, monkeypatch, capsys):
    """Whether a command ends well and says this, in this process: another takes long to start."""
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"])
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(SystemExit) as exit_:
        run()
    return exit_.value.code == 0 and word in capsys.readouterr().out


def test_the_command_alone_prints_the_help(monkeypatch, capsys):
    assert prints("doctor", jaxscale.__main__.main, ["jaxscale"], monkeypatch, capsys)


@pytest.mark.slow
def test_the_api_reference_builds(tmp_path):
    guide = (ROOT / ".github/CONTRIBUTING.md").read_text()
    (command,) = re.findall(r"^python -m (pdoc .*)$", guide, re.MULTILINE)
    command = [sys.executable, "-m", *command.replace("-o api", f"-o {tmp_path}").split()]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    # The type of an optimizer state in Optax, which Flax annotates with, names itself, and pdoc
    # cannot resolve that.
    warnings = [line for line in result.stderr.splitlines() if line.startswith("Warn")]
    assert not [line for line in warnings if "'ArrayTree'" not in line]
    pages = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.html")} - {"index.html"}
    assert pages == {f"{name.replace('.', '/')}.html" for name in MODULES}


README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
EXAMPLES = {path.stem: path for path in sorted((ROOT / "examples").glob("*.py"))}
DRAWN = {  # the examples that print a table and write a picture, and words of that table
    "quickstart": ["float32", "float16", "scaled", "skipped", "flushed"],
    "rl": ["float32", "bfloat16", "float16", "KL", "reward", "skipped", "repeated", "lost"],
}


@cases("number", [2, len(BLOCKS)], fast=[2])
def test_readme_runs(number):
    names = {}
    for block in BLOCKS[:number]:  # each goes on from those before
        exec(compile(block, "README.md", "exec"), names)
    start = names["params"], names["opt_state"], names["batch"]
    params, opt_state, _ = names["my_step"](*start)
    assert opt_state.step_applied
    assert not np.array_equal(params["w"], start[0]["w"])


def test_readme_names_what_is_there():
    for name in set(re.findall(r"jaxscale\.([a-zA-Z_]+(?:\.\w+)?)", README)) - {"py"}:
        operator.attrgetter(name)(jaxscale)
    for path in re.findall(r"`((?:examples|tests|jaxscale)/[\w./]+)`", README):
        assert (ROOT / path).exists(), path
    assert set(EXAMPLES) == set(re.findall(r"examples/(\w+)\.py", README))


def test_readme_says_how_a_run_begun_with_plain_optax_goes_on():
    # As `test_a_run_goes_on_as_if_nothing_had_changed` does, with the same bits.
    ((there, back),) = re.findall(r"`opt_state = (tx\.init\(params\).*?)`; back: `(.*?)`", README)
    params, bare = jnp.ones(3), optax.adam(0.1)
    names = {"tx": jaxscale.loss_scaled(bare), "params": params, "old_state": bare.init(params)}
    names["opt_state"] = eval(there, names)
    assert names["opt_state"].inner_state is names["old_state"]
    assert eval(back, names) is names["old_state"]


@pytest.mark.slow
@cases("name", [name for name in EXAMPLES if name not in DRAWN])
def test_example_runs(name):
    assert np.isfinite(runpy.run_path(str(EXAMPLES[name]))["main"](3))
    assert not jax.config.jax_enable_x64


@pytest.mark.slow
@cases("name", DRAWN)
def test_drawn_example_runs_end_to_end(name, tmp_path):
    # As a user runs it: it sets XLA flags of its own, before JAX is imported.
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    picture = tmp_path / "picture.png"
    command = [sys.executable, str(EXAMPLES[name]), "--steps", "3", "--picture", str(picture)]
    command += ["--seeds", "1"] if name == "rl" else []
    options = {"env": environment, "cwd": tmp_path, "capture_output": True, "text": True}
    result = subprocess.run(command, **options)
    assert result.returncode == 0, result.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert not [word for word in DRAWN[name] if word not in result.stdout]
    if name == "rl":  # 8 times with rounding errors of random signs, 3 bits apart
        figures = json.loads(picture.with_suffix(".json").read_text())
        (half,), (bfloat,) = (figures[f]["RMS of log(ratio)"] for f in ("float16", "bfloat16"))
        assert bfloat > 3 * half > 0


@pytest.mark.slow
@cases("name", EXAMPLES)
def test_example_has_help(name, monkeypatch, capsys):
    path = str(EXAMPLES[name])
    option = "--picture" if name == "gradients" else "--steps"  # the one trains nothing
    run = functools.partial(runpy.run_path, path, run_name="__main__")
    assert prints(option, run, [path, "--help"], monkeypatch, capsys)
