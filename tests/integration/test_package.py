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
from tables import cases

import jaxscale
import jaxscale.__main__

pytestmark = pytest.mark.standard_promotion  # as users have it

# A module imports from its own row and from the rows above it in this list; never in a circle.
ROWS = [
    "_jax",
    "_boundary _trees",
    "_autocast _state",
    "_gradients",
    "_policies",
    "_step",
]
ROWS += ["_progress", "diagnostics flax nnx presets", "_doctor"]
ROW = {name: i for i, row in enumerate(ROWS) for name in row.split()}
ROOT = pathlib.Path(__file__).parent.parent.parent
PACKAGE = pathlib.Path(jaxscale.__file__).parent


def public(module, prefix=""):
    names = [name for name in vars(module) if not name.startswith("_")]
    named = {f"{prefix}{name}": getattr(module, name) for name in names}
    return {name: value for name, value in named.items() if not inspect.ismodule(value)}


PUBLIC = public(jaxscale) | {"nnx.train_step": jaxscale.nnx.train_step}
PUBLIC |= {
    f"flax.{name}": getattr(jaxscale.flax, name) for name in jaxscale.flax.__all__
}
ALL = (
    PUBLIC
    | public(jaxscale.presets, "presets.")
    | public(jaxscale.diagnostics, "diagnostics.")
)
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
    package, found = (
        ".".join(["jaxscale", *file.parent.relative_to(PACKAGE).parts]),
        set(),
    )
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            base = importlib.util.resolve_name(
                "." * node.level + (node.module or ""), package
            )
            for alias in node.names:
                below = f"{base}.{alias.name}"
                found.add(below if below.removeprefix("jaxscale.") in MODULES else base)
    own = {
        name.removeprefix("jaxscale.") for name in found if name.startswith("jaxscale.")
    }
    others = {name.split(".")[0] for name in found} - {"jaxscale"}
    return own, others - sys.stdlib_module_names


MODULES = {module_of(file): file for file in sorted(PACKAGE.rglob("*.py"))}
IMPORTS = {module: imports(file) for module, file in MODULES.items()}


def test_imports_run_one_way_and_nothing_else_is_imported():
    graph = {
        module: own for module, (own, _) in IMPORTS.items() if module != "__init__"
    }
    graphlib.TopologicalSorter(graph).prepare()  # raises an error that names the circle
    assert not [
        f"{module} imports {other}"
        for module, own in graph.items()
        if module != "__main__"
        for other in own
        if ROW[other.split(".")[0]] > ROW[module.split(".")[0]]
    ]
    extras = {
        "flax": {"flax"},
        "nnx": {"flax"},
        "diagnostics._pictures": {"matplotlib"},
    }
    extras |= {"_doctor.page": {"jinja2"}}
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
    "total_notfinite_loss total_steps total_retries total_exhausted backoff_count "
    "skip_rate row_notfinite_loss spikes nonfinite_leaves grad_norm",
}


def test_names_and_dependencies_are_those_of_the_contract():
    assert set(PUBLIC) == set(CONTRACT.split())
    for name, fields in FIELDS.items():
        assert PUBLIC[name]._fields == tuple(fields.split())
    update = inspect.signature(jaxscale.loss_scaled(optax.sgd(0.1)).update)
    assert list(update.parameters) == [
        "updates",
        "state",
        "params",
        "value",
        "extra_args",
    ]
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "dependencies"
    ]
    assert {re.match(r"\w+", line).group() for line in declared} == {
        "jax",
        "jaxlib",
        "optax",
    }


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
        not in (
            "loss_scale",
            "scale",
            "dtype",
            "spikes",
            "nonfinite_leaves",
            "grad_norm",
        )
        and parameter.kind is not parameter.KEYWORD_ONLY
    ]


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
    command = [
        sys.executable,
        "-m",
        "pyright",
        "--pythonpath",
        sys.executable,
        "--outputjson",
    ]
    result = subprocess.run(
        [*command, "-p", str(tmp_path)], capture_output=True, text=True
    )
    report = json.loads(result.stdout)
    assert report["summary"]["filesAnalyzed"] == 1
    errors = {
        e["range"]["start"]["line"]: e["message"] for e in report["generalDiagnostics"]
    }
    marks = [re.search(r'# error: "(\w+)"', line) for line in program.splitlines()]
    expected = {i: mark.group(1) for i, mark in enumerate(marks) if mark}
    assert len(expected) == 8
    assert errors.keys() == expected.keys()
    assert len(errors) == len(report["generalDiagnostics"])
    assert not [word for line, word in expected.items() if word not in errors[line]]


FIRST = ["loss_scaled", "train_step", "metrics", "check"]
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
    assert not set(jaxscale.__all__) - set(
        re.findall(r"`(?:jaxscale\.)?(\w+)[`(.]", doc)
    )


def test_all_is_what_is_public():
    core = {name for name in PUBLIC if "." not in name}
    assert set(jaxscale.__all__) == core | {"diagnostics", "flax", "nnx", "presets"}
    assert dir(jaxscale) == sorted(jaxscale.__all__)
    with pytest.raises(
        AttributeError, match=r"^module 'jaxscale' has no attribute 'nothing'$"
    ):
        _ = jaxscale.nothing
    for module in (jaxscale.diagnostics, jaxscale.presets):
        prefix = module.__name__.removeprefix("jaxscale.") + "."
        public = {name.removeprefix(prefix) for name in ALL if name.startswith(prefix)}
        assert set(module.__all__) == public


def test_names_in_docstrings_resolve():
    for name, doc in DOCS.items():
        assert not [each for each in NAME.findall(doc) if not resolves(each)], name
    wrong = (
        "jaxscale.presets.pytorch",
        "LossScaledState.scale",
        "optax.apply_if",
        "jax.nunpy",
    )
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
for statement in (
    "jaxscale.flax",
    "from jaxscale import flax",
    "import jaxscale.flax",
    "jaxscale.nnx",
    "import jaxscale.nnx",
):
    module = statement.split()[-1].removeprefix("jaxscale.")
    message = f"`jaxscale.{module}` needs Flax, which is not installed: pip install flax$"
    with pytest.raises(ImportError, match=message):
        exec(statement)
exec("from jaxscale import *")
assert "four functions" in pydoc.render_doc(jaxscale)
""",
}


@cases("name", PROGRAMS, fast=["lazy"])
def test_modules_are_imported_when_used_and_without_flax_it_is_said_what_to_install(
    name,
):
    subprocess.run([sys.executable, "-c", PROGRAMS[name]], check=True)


@cases("flags", ["", "--xla_a=1", "--xla_allow_excess_precision=true"])
def test_the_command_sets_the_flag_first(monkeypatch, flags):
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    seen = []

    monkeypatch.setenv("XLA_FLAGS", flags)
    monkeypatch.setattr(sys, "argv", ["jaxscale", "doctor", "a:b"])
    main = "jaxscale._doctor.cli.main"
    monkeypatch.setattr(
        main, lambda argv: seen.append((argv, os.environ["XLA_FLAGS"])) or 7
    )
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


README = (ROOT / "README.md").read_text()
SITE = ROOT / ".github" / "site" / "pages"
GUIDE = "\n".join([README, *(page.read_text() for page in sorted(SITE.rglob("*.md")))])
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
EXAMPLES = {path.stem: path for path in sorted((ROOT / "examples").glob("*.py"))}
# the examples that print a table and write a picture, and words of that table
DRAWN = {
    "quickstart": ["float32", "float16", "scaled", "skipped", "flushed"],
    "rl": [
        "float32",
        "bfloat16",
        "float16",
        "KL",
        "reward",
        "skipped",
        "repeated",
        "lost",
    ],
}


def test_readme_runs():
    names = {}
    for block in BLOCKS:  # each goes on from those before
        exec(compile(block, "README.md", "exec"), names)
    assert names["opt_state"].total_steps == 10
    assert not np.array_equal(names["params"]["w"], jnp.zeros((4, 1)))


def test_readme_is_short_and_all_of_it_runs():
    assert len(README.splitlines()) <= 150
    fences = re.findall(r"^```(.*)$", README, re.MULTILINE)
    assert fences[::2] == ["diff", "bash", "python"]


def test_readme_and_site_name_what_is_there():
    for name in set(re.findall(r"jaxscale\.([a-zA-Z_]+(?:\.\w+)?)", GUIDE)) - {"py"}:
        operator.attrgetter(name)(jaxscale)
    for path in re.findall(r"`((?:examples|tests|jaxscale)/[\w./]+)`", GUIDE):
        assert (ROOT / path).exists(), path
    assert set(EXAMPLES) == set(re.findall(r"examples/(\w+)\.py", GUIDE))


def place_of(heading):
    """The anchor of a heading, as GitHub and the site make it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def test_links_of_the_readme_lead_to_what_is_there():
    links = re.findall(r"\]\(([^)]*)\)", README)
    assert links
    for link in links:
        path, _, place = link.partition("#")
        headings = re.findall(r"^#+ (.*)$", (ROOT / path).read_text(), re.MULTILINE)
        assert not place or place in map(place_of, headings), link


def test_readme_says_how_a_run_begun_with_plain_optax_goes_on():
    # As `test_a_run_goes_on_as_if_nothing_had_changed` does, with the same bits.
    ((there, back),) = re.findall(
        r"`opt_state = (tx\.init\(params\).*?)`; back: `(.*?)`", README
    )
    params, bare = jnp.ones(3), optax.adam(0.1)
    names = {
        "tx": jaxscale.loss_scaled(bare),
        "params": params,
        "old_state": bare.init(params),
    }
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
    environment = {
        name: value for name, value in os.environ.items() if name != "XLA_FLAGS"
    }
    picture = tmp_path / "picture.png"
    command = [
        sys.executable,
        str(EXAMPLES[name]),
        "--steps",
        "3",
        "--picture",
        str(picture),
    ]
    command += ["--seeds", "1"] if name == "rl" else []
    options = {
        "env": environment,
        "cwd": tmp_path,
        "capture_output": True,
        "text": True,
    }
    result = subprocess.run(command, **options)
    assert result.returncode == 0, result.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert not [word for word in DRAWN[name] if word not in result.stdout]
    if name == "rl":  # 8 times with rounding errors of random signs, 3 bits apart
        figures = json.loads(picture.with_suffix(".json").read_text())
        (half,), (bfloat,) = (
            figures[f]["RMS of log(ratio)"] for f in ("float16", "bfloat16")
        )
        assert bfloat > 3 * half > 0


@pytest.mark.slow
@cases("name", EXAMPLES)
def test_example_has_help(name, monkeypatch, capsys):
    path = str(EXAMPLES[name])
    option = "--picture" if name == "gradients" else "--steps"  # the one trains nothing
    run = functools.partial(runpy.run_path, path, run_name="__main__")
    assert prints(option, run, [path, "--help"], monkeypatch, capsys)
