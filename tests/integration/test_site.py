"""The site: the blocks of its pages run, and its build is strict."""

import inspect
import os
import pathlib
import pkgutil
import re
import shlex
import subprocess
import sys

import pytest

import jaxscale

pytestmark = [pytest.mark.standard_promotion, pytest.mark.docs]

ROOT = pathlib.Path(__file__).parent.parent.parent
SITE = ROOT / ".github" / "site"
PAGES = {
    page.relative_to(SITE / "pages").with_suffix("").as_posix()
    for page in (SITE / "pages").rglob("*.md")
}
# The test's own flags are for speed. The pages are what a user runs.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
OPTIONS = {"env": ENVIRONMENT, "cwd": ROOT, "capture_output": True, "text": True}


NAMES = {
    "jaxscale": set(jaxscale.__all__) - {"diagnostics", "flax", "nnx", "presets"},
    "jaxscale.diagnostics": jaxscale.diagnostics.__all__,
    "jaxscale.nnx": ["train_step"],
    "jaxscale.flax": jaxscale.flax.__all__,
    "jaxscale.presets": jaxscale.presets.__all__,
}


def find_public():
    """Yields all public names, and the methods that have a docstring of their own."""
    for module, names in NAMES.items():
        for name in names:
            yield f"{module}.{name}"
            value = pkgutil.resolve_name(f"{module}.{name}")
            for member in vars(value) if inspect.isclass(value) else ():
                method = inspect.unwrap(getattr(value, member))
                # Of its own, and not one that a library or another class has made.
                is_own = getattr(method, "__qualname__", "") == f"{name}.{member}"
                is_public = is_own and not member.startswith("_") and method.__doc__
                if is_public and method.__module__.startswith("jaxscale"):
                    yield f"{module}.{name}.{member}"


@pytest.mark.slow
def test_the_site_has_all_pages_and_the_reference_all_names(tmp_path):
    """Built as CONTRIBUTING.md says, which also runs the blocks of all pages."""
    guide = (ROOT / ".github" / "CONTRIBUTING.md").read_text()
    (command,) = re.findall(r"^python (-m mkdocs build .*)$", guide, re.MULTILINE)
    command = [sys.executable, *shlex.split(command), "--site-dir", str(tmp_path)]
    result = subprocess.run(command, **OPTIONS)
    assert result.returncode == 0, result.stdout + result.stderr
    pages = {str(page.relative_to(tmp_path)) for page in tmp_path.rglob("*.html")}
    assert pages - {"404.html"} == {f"{page}.html" for page in PAGES}
    anchors = set()
    for page in (tmp_path / "reference").glob("*.html"):
        anchors |= set(re.findall(r'<h\d id="(jaxscale[\w.]+)"', page.read_text()))
    assert anchors >= set(find_public())


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
