"""The files, tests, functions, fields and links in the guides for contributors are there.

The guides are `CONTRIBUTING.md` and the READMEs of the folders. The README of the project and the
pages of the site are read by `test_package.py` and `test_site.py`.
"""

import pathlib
import re

import pytest
from tables import cases

pytestmark = pytest.mark.docs

ROOT = pathlib.Path(__file__).parent.parent.parent
FOLDERS = ("jaxscale", "tests", "examples", ".github", ".ci")
# Two rows of the table of trainers name files of others.
FILES_OF_OTHERS = {"tests/trainers/README.md": ["examples/vae.py", "ppo.py"]}


def find_guides() -> list[pathlib.Path]:
    """Returns the guides of the project, without those of what is built or installed in it."""
    guides = list((ROOT / ".github").glob("*.md"))
    for folder in ("jaxscale", "tests"):
        guides += sorted((ROOT / folder).rglob("README.md"))
        guides += sorted((ROOT / folder).rglob("FORMAT.md"))
    return guides


GUIDES = {str(guide.relative_to(ROOT)): guide for guide in find_guides()}

FILE = re.compile(r"[\w.][\w./-]*\.(?:py|md|json|npz|ipynb|jinja|cff)")
PATH = re.compile(rf"(?<![\w/.])(?:{'|'.join(map(re.escape, FOLDERS))})/[\w./-]*\w")


def in_backticks(text: str) -> list[str]:
    """Returns the code within the sentences of a text, without its blocks."""
    sentences = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    return re.findall(r"`([^`\n]+)`", sentences)


def folders_around(text: str, guide: pathlib.Path) -> list[pathlib.Path]:
    """Returns the folder of a guide, those that it names, and those of the files that it names."""
    starts = [ROOT, ROOT / "jaxscale", guide.parent, guide.parent.parent]
    folders = list(starts)
    for name in {*PATH.findall(text), *in_backticks(text)}:
        for start in starts:
            path = start / name
            if path.is_dir():
                folders.append(path)
            elif path.is_file():
                folders.append(path.parent)
    return folders


def missing_files(text: str, guide: pathlib.Path) -> list[str]:
    """Returns the files and folders that a text names and that are not there.

    A file that is named without its folder may be in any folder that the text names, or below
    the guide.
    """
    programs = [code.split()[0] for code in in_backticks(text)]
    paths = {program for program in programs if FILE.fullmatch(program)}
    paths.update(PATH.findall(text))
    folders = folders_around(text, guide)

    def is_there(path: str) -> bool:
        if any((folder / path).exists() for folder in folders):
            return True
        return "/" not in path and any(guide.parent.rglob(path))

    return sorted(path for path in paths if not is_there(path))


def missing_links(text: str, guide: pathlib.Path) -> list[str]:
    """Returns the links of a text that lead to no file."""
    links = re.findall(r"\]\((?!https?:|#)([^)#]*)", text)
    return [link for link in links if not (guide.parent / link).exists()]


@cases("name", GUIDES)
def test_files_and_links_of_a_guide_are_there(name):
    text = GUIDES[name].read_text()
    assert missing_files(text, GUIDES[name]) == FILES_OF_OTHERS.get(name, [])
    assert not missing_links(text, GUIDES[name])


GUIDE = ROOT / "jaxscale" / "_step" / "README.md"


def test_a_file_that_is_not_there_is_found():
    text = "`plan.py`, `gone.py`, `_trees/leaf.py --slow`, `_trees/gone.py` and tests/step/gone.py"
    expected = ["_trees/gone.py", "gone.py", "tests/step/gone.py"]
    assert missing_files(text, GUIDE) == expected


def test_a_link_that_leads_nowhere_is_found():
    text = "[a](plan.py) [b](gone.md) [c](https://jax.dev)"
    assert missing_links(text, GUIDE) == ["gone.md"]
