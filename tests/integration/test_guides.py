"""The files and links in the guides for contributors are there.

The guides are `CONTRIBUTING.md` and the READMEs of the folders. The README of the project and the
pages of the site are read by `test_package.py` and `test_site.py`.
"""

import pathlib
import re

import pytest
from tables import cases

pytestmark = pytest.mark.docs

ROOT = pathlib.Path(__file__).parents[2]
GUIDES = [ROOT / ".github" / "CONTRIBUTING.md"]
for room in ("jaxscale", "tests"):
    GUIDES += (ROOT / room).rglob("README.md")
OF_OTHERS = ["examples/vae.py"]  # which the table of trainers names
PATH = re.compile(r"(?<![\w/.])(?:jaxscale|tests|examples|\.github|\.ci)/[\w./-]*\w")
LINK = re.compile(r"\]\((?!https?:|#)([^)#]*)")


def missing(text, folder):
    """Returns the paths and links of a text that lead nowhere."""
    paths = [(name, ROOT / name) for name in PATH.findall(text)]
    links = [(name, folder / name) for name in LINK.findall(text)]
    return [name for name, path in paths + links if not path.exists()]


@cases("guide", sorted(str(guide.relative_to(ROOT)) for guide in GUIDES))
def test_files_and_links_of_a_guide_are_there(guide):
    text = (ROOT / guide).read_text()
    assert set(missing(text, (ROOT / guide).parent)) <= set(OF_OTHERS)


def test_what_is_not_there_is_found():
    text = "`tests/step/gone.py`, [a](api.py), [b](gone.md), [c](https://jax.dev), tests/step"
    folder = ROOT / "jaxscale" / "_autocast"
    assert missing(text, folder) == ["tests/step/gone.py", "gone.md"]
