"""What the guides for contributors name is there: files, tests, functions, fields and links.

The guides are `CONTRIBUTING.md` and the READMEs of the folders. The README of the project and the
pages of the site are read by `test_package.py` and `test_site.py`.
"""

import ast
import pathlib
import re
from collections.abc import Iterator

from tables import cases

ROOT = pathlib.Path(__file__).parent.parent.parent
FOLDERS = ("jaxscale", "tests", "examples", ".github", ".ci")
# A guide of programs that others wrote names their files and functions.
OTHERS = ROOT / "tests" / "trainers" / "others"
# So do two rows of the table of trainers.
FILES_OF_OTHERS = {"tests/trainers/README.md": ["examples/vae.py", "ppo.py"]}


def find_guides() -> list[pathlib.Path]:
    """The guides within the project; what is built or installed there has guides of its own."""
    guides = list((ROOT / ".github").glob("*.md"))
    for folder in ("jaxscale", "tests"):
        guides += sorted((ROOT / folder).rglob("README.md"))
        guides += sorted((ROOT / folder).rglob("FORMAT.md"))
    return [guide for guide in guides if guide.parent != OTHERS]


GUIDES = {str(guide.relative_to(ROOT)): guide for guide in find_guides()}
# What these name is code of the project, so each name is one of the code. Guides of tests also
# name what other libraries have.
OF_OUR_CODE = [name for name in GUIDES if name.startswith(("jaxscale/", ".github/"))]

FILE = re.compile(r"[\w.][\w./-]*\.(?:py|md|json|npz|ipynb|jinja)")
PATH = re.compile(rf"(?<![\w/.])(?:{'|'.join(map(re.escape, FOLDERS))})/[\w./-]*\w")
NAME = re.compile(r"[A-Za-z_]\w*(?:\.\w+)*")


def in_backticks(text: str) -> list[str]:
    """The code within the sentences of a text, without its blocks."""
    sentences = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    return re.findall(r"`([^`\n]+)`", sentences)


def folders_around(text: str, guide: pathlib.Path) -> list[pathlib.Path]:
    """The folder of a guide, those that it names, and those of the paths that it names."""
    starts = [ROOT, ROOT / "jaxscale", guide.parent, guide.parent.parent]
    folders = list(starts)
    for named in {*PATH.findall(text), *in_backticks(text)}:
        for start in starts:
            path = start / named
            if path.is_dir():
                folders.append(path)
            elif path.is_file():
                folders.append(path.parent)
    return folders


def missing_files(text: str, guide: pathlib.Path) -> list[str]:
    """Files and folders that a text names and that are not there.

    A name without a folder may lie in any folder that the text names, and below the guide.
    """
    paths = set(PATH.findall(text))
    for code in in_backticks(text):
        program = code.split()[0]  # of a command
        if FILE.fullmatch(program):
            paths.add(program)
    folders = folders_around(text, guide)

    def is_there(path: str) -> bool:
        if any((folder / path).exists() for folder in folders):
            return True
        return "/" not in path and any(guide.parent.rglob(path))

    return sorted(path for path in paths if not is_there(path))


def missing_links(text: str, guide: pathlib.Path) -> list[str]:
    links = re.findall(r"\]\((?!https?:|#)([^)#]*)", text)
    return [link for link in links if not (guide.parent / link).exists()]


def words_of(node: ast.AST) -> Iterator[str]:
    """The names that a node of a program has."""
    for field in ("id", "attr", "arg", "name", "asname", "module"):
        word = getattr(node, field, None)
        if isinstance(word, str):
            yield from word.split(".")
    if (
        isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and node.value.isidentifier()
    ):
        yield node.value  # such as the name of a primitive


class Code:
    """The names in programs, without comments and docstrings."""

    def __init__(self, files: list[pathlib.Path]):
        self.words = {path.stem for path in files} | {
            path.parent.name for path in files
        }
        self.members = {}  # of each class, with those of the classes it comes from
        self.tests = set()
        for path in files:
            for node in ast.walk(ast.parse(path.read_text())):
                self.words.update(words_of(node))
                if isinstance(node, ast.ClassDef):
                    self.members[node.name] = self.members_of(node)
                if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                    self.tests.add(node.name)

    def members_of(self, node: ast.ClassDef) -> set[str]:
        members = set()
        for part in ast.walk(node):
            members.update(words_of(part))
        return members

    def has(self, name: str) -> bool:
        """Whether a name, with or without points, is one of the code."""
        first, *rest = name.split(".")
        if first.startswith("test_"):
            return first in self.tests or first in self.words
        if first in self.members and rest:
            return set(rest) <= self.members[first]
        return {first, *rest} <= self.words


SOURCES = [
    path for folder in ("jaxscale", "tests") for path in (ROOT / folder).rglob("*.py")
]
# This file has names that are not there.
NO_SOURCES = {pathlib.Path(__file__), *OTHERS.rglob("*.py")}
CODE = Code([path for path in SOURCES if path not in NO_SOURCES])


def missing_names(text: str) -> list[str]:
    """Functions, classes, fields and tests that a text names and that the code does not have."""
    missing = []
    for code in in_backticks(text):
        name = re.sub(r"\(.*\)$", "", code)
        if NAME.fullmatch(name) and not FILE.fullmatch(name) and not CODE.has(name):
            missing.append(name)
    return missing


@cases("name", GUIDES)
def test_files_and_links_of_a_guide_are_there(name):
    text = GUIDES[name].read_text()
    assert missing_files(text, GUIDES[name]) == FILES_OF_OTHERS.get(name, [])
    assert not missing_links(text, GUIDES[name])


@cases("name", OF_OUR_CODE)
def test_functions_and_tests_that_a_guide_names_are_there(name):
    assert not missing_names(GUIDES[name].read_text())


@cases("name", GUIDES)
def test_tests_that_a_guide_names_are_there(name):
    named = re.findall(r"\b(test_\w+)\b(?!\.)", GUIDES[name].read_text())
    assert not [test for test in named if not CODE.has(test)]


def test_what_is_not_there_is_found():
    guide = ROOT / "jaxscale" / "_step" / "README.md"
    files = "`plan.py`, `gone.py`, `_trees/leaf.py --slow`, `_trees/gone.py` and tests/step/gone.py"
    assert missing_files(files, guide) == [
        "_trees/gone.py",
        "gone.py",
        "tests/step/gone.py",
    ]
    assert missing_links("[a](plan.py) [b](gone.md) [c](https://jax.dev)", guide) == [
        "gone.md"
    ]
    names = "`apply_step`, `StepPlan.gone`, `StepPlan.differentiate`, `wholly_gone(x)`, `test_gone`"
    assert missing_names(names) == ["StepPlan.gone", "wholly_gone", "test_gone"]
