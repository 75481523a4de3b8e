"""The site: its blocks run, its build is strict, and a browser finds what its pages refer to."""

import importlib.util
import inspect
import os
import pathlib
import pkgutil
import re
import shlex
import subprocess
import sys

import pytest
from tables import cases

import jaxscale

# All in one process, which builds the site once.
pytestmark = [
    pytest.mark.standard_promotion,
    pytest.mark.docs,
    pytest.mark.xdist_group("site"),
]

ROOT = pathlib.Path(__file__).parent.parent.parent
SITE = ROOT / ".github" / "site"
PAGES = {
    page.relative_to(SITE / "pages").with_suffix("").as_posix(): page
    for page in sorted((SITE / "pages").rglob("*.md"))
}


def load_hooks():
    """Loads what the build adds to mkdocs."""
    spec = importlib.util.spec_from_file_location("hooks", SITE / "hooks.py")
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    return hooks


HOOKS = load_hooks()
# The test's own flags are for speed. The pages are what a user runs.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
OPTIONS = {"env": ENVIRONMENT, "cwd": ROOT, "capture_output": True, "text": True}


# The build of the site runs the blocks of all pages.
@cases("page", ["index"])
def test_the_blocks_of_a_page_run(page):
    HOOKS.run_blocks(PAGES[page].read_text(), page)


def block(code, language="python"):
    return f"```{language}\n{code}\n```\n"


WRONG_BLOCKS = {
    "error": (block("1 / 0"), ZeroDivisionError, "division by zero"),
    "syntax": (block("x ="), SyntaxError, r"invalid syntax \(page, line 2\)"),
    "output": (
        block("print(1)") + "\n" + block("2", "text"),
        ValueError,
        r"printed\n1\n.*\n2\n",
    ),
    "second": (block("x = 1") + "\n" + block("x / 0"), ZeroDivisionError, "by zero"),
}


@cases("name", WRONG_BLOCKS)
def test_a_wrong_block_is_an_error(name):
    markdown, error, message = WRONG_BLOCKS[name]
    with pytest.raises(error, match=message):
        HOOKS.run_blocks(markdown, "page")


def has_own_docstring(cls, method):
    """Returns whether a class has this method from itself, with a docstring."""
    function = inspect.unwrap(getattr(cls, method))
    if getattr(function, "__qualname__", "") != f"{cls.__name__}.{method}":
        return False
    return function.__module__.startswith("jaxscale") and function.__doc__


NAMES = {
    "jaxscale": set(jaxscale.__all__) - {"diagnostics", "flax", "nnx", "presets"},
    "jaxscale.diagnostics": jaxscale.diagnostics.__all__,
    "jaxscale.nnx": ["train_step"],
    "jaxscale.flax": jaxscale.flax.__all__,
    "jaxscale.presets": jaxscale.presets.__all__,
}


def public_names():
    """Yields all public names, and the methods that have a docstring of their own."""
    for module, names in NAMES.items():
        for name in names:
            yield f"{module}.{name}"
            value = pkgutil.resolve_name(f"{module}.{name}")
            if not inspect.isclass(value):
                continue
            for method in vars(value):
                if not method.startswith("_") and has_own_docstring(value, method):
                    yield f"{module}.{name}.{method}"


PUBLIC = set(public_names())


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Builds the site as CONTRIBUTING.md says, and returns its folder."""
    guide = (ROOT / ".github" / "CONTRIBUTING.md").read_text()
    (command,) = re.findall(r"^python (-m mkdocs build .*)$", guide, re.MULTILINE)
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, *shlex.split(command), "--site-dir", str(folder)]
    result = subprocess.run(command, **OPTIONS)
    assert result.returncode == 0, result.stdout + result.stderr
    return folder


@pytest.mark.slow
def test_the_site_has_all_pages_and_the_reference_all_names(built):
    pages = [page.relative_to(built).with_suffix("") for page in built.rglob("*.html")]
    assert {str(page) for page in pages} - {"404"} == set(PAGES)
    anchors = set()
    for page in (built / "reference").glob("*.html"):
        anchors |= set(re.findall(r'<h\d id="(jaxscale[\w.]+)"', page.read_text()))
    assert anchors >= PUBLIC


WRONG_PAGE = """# Wrong

[a page](nothing.md), [a place](index.md#nothing), ![a picture](nothing.png), `jaxscale.nothing`,
`examples/nothing.py`, [a name][jaxscale.nothing_at_all]

```python
1 / 0
```
"""


@pytest.mark.slow
def test_a_build_fails_on_whatever_is_broken(tmp_path):
    (tmp_path / "pages").mkdir()
    (tmp_path / "pages" / "index.md").write_text(WRONG_PAGE)
    changed = {"site_dir": str(tmp_path / "site"), "docs_dir": str(tmp_path / "pages")}
    changed |= {"strict": True, "nav": [{"Start": "index.md"}, {"Other": "missing.md"}]}
    program = (
        "import logging\nfrom mkdocs.commands.build import build\n"
        "from mkdocs.config import load_config\nlogging.basicConfig()\n"
        f"build(load_config({str(SITE / 'mkdocs.yml')!r}, **{changed!r}))"
    )
    result = subprocess.run([sys.executable, "-c", program], **OPTIONS)
    assert result.returncode != 0
    output = result.stdout + result.stderr
    for words in (
        "nothing.md",
        "#nothing",
        "nothing.png",
        "no jaxscale.nothing",
        "missing.md",
        "no examples/nothing.py",
        "'jaxscale.nothing_at_all'",
        "ZeroDivisionError",
    ):
        assert words in output, words
