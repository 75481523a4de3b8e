"""The files, links and headings that guides name are there.

The guides are the README of the project, `CONTRIBUTING.md` and the READMEs of the folders.
`test_site.py` builds the pages of the site.
"""

import pathlib
import re

import pytest
from tables import cases

pytestmark = pytest.mark.docs

ROOT = pathlib.Path(__file__).parents[2]
GUIDES = [ROOT / "README.md", ROOT / ".github" / "CONTRIBUTING.md"]
for room in ("jaxscale", "tests"):
    GUIDES += (ROOT / room).rglob("README.md")
OF_OTHERS = ["examples/vae.py"]  # which the table of trainers names
PATH = re.compile(r"(?<![\w/.])(?:jaxscale|tests|examples|\.github|\.ci)/[\w./-]*\w")
LINK = re.compile(r"\]\((?!https?:|#)([^)#]*)(?:#([^)]*))?")


def has_heading(page, place):
    """Returns whether a page has a heading with this anchor, as GitHub and the site make it."""
    for heading in re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE):
        words = re.sub(r"[^\w\- ]", "", heading.strip().lower())
        if words.replace(" ", "-") == place:
            return True
    return False


def missing(text, folder):
    """Returns the paths and links of a text that lead nowhere."""
    paths = [name for name in PATH.findall(text) if not (ROOT / name).exists()]
    links = []
    for name, place in LINK.findall(text):
        page = folder / name
        if not page.exists() or (place and not has_heading(page, place)):
            links.append(name)
    return paths + links


@cases("guide", sorted(str(guide.relative_to(ROOT)) for guide in GUIDES))
def test_files_and_links_of_a_guide_are_there(guide):
    text = (ROOT / guide).read_text()
    assert set(missing(text, (ROOT / guide).parent)) <= set(OF_OTHERS)


def test_what_is_not_there_is_found():
    text = "`tests/step/gone.py`, [a](api.py), [b](gone.md), [c](https://jax.dev), tests/step"
    text += " [d](README.md#gone)"
    folder = ROOT / "jaxscale" / "_autocast"
    assert missing(text, folder) == ["tests/step/gone.py", "gone.md", "README.md"]
