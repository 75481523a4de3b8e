"""The page of the doctor, as its elements and texts."""

import base64
import html.parser
import json
import pathlib
import re
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from departing import uses_what_goes
from tables import cases

from jaxscale import diagnostics
from jaxscale._doctor.diagnosis import diagnose
from jaxscale._doctor.finding import Finding
from jaxscale._doctor.gradients import add_histograms, count_leaves
from jaxscale._doctor.measure import examine
from jaxscale._doctor.page import draw_page
from jaxscale._doctor.target import load

pytestmark = [pytest.mark.standard_promotion, uses_what_goes]

EVIL = "<script>alert('&amp;')"
# Two leaves: one overflows at the line with the comment, and one is 0 everywhere.
MODEL = f"""
import jax.numpy as jnp

def overflow():
    def loss_fn(params, batch):
        y = (batch * params["{EVIL}"]).astype(jnp.float16)
        y = y * jnp.float16(60000)  # {EVIL}
        return jnp.mean(y.astype(jnp.float32))
    return loss_fn, {{"{EVIL}": jnp.ones(2), "unused": jnp.ones(2)}}, jnp.array([1.0, 3.0])
"""


class Page(html.parser.HTMLParser):
    """A page as its elements, with tags and attributes, its text, and the text of each element."""

    def __init__(self, source):
        super().__init__()
        self.source = source
        self.tags = []
        self.texts = {"": [""]}  # that of the page has no tag
        self.open = [("", 0)]
        self.feed(source)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.texts.setdefault(tag, []).append("")
        if tag not in ("meta", "img", "wbr"):
            self.open.append((tag, len(self.texts[tag]) - 1))

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag  # nothing is left open, nor closed too early

    def handle_data(self, data):
        for tag, i in self.open:
            self.texts[tag][i] += data

    @property
    def flowing(self):
        return re.sub(r"\s+", " ", self.texts[""][0])


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "<script>.py"
    path.write_text(MODEL)
    return path


@pytest.fixture(scope="module")
def exam(model):
    return examine(load(f"{model}:overflow"), None)


def draw_page_of(exam, grads, loss_scale=1.0, shown_scale=None, **others):
    """Returns the page of the same exam, but with other gradients."""
    histograms = count_leaves(grads)
    shown_scale = shown_scale or loss_scale
    exam = exam._replace(
        loss_scale=loss_scale,
        shown_scale=shown_scale,
        is_auto=shown_scale != loss_scale,
        leaves=diagnostics.table(histograms, loss_scale=loss_scale),
        histogram=add_histograms(histograms),
        layers=diagnostics.shares(histograms, loss_scale=shown_scale),
        **others,
    )
    return Page(draw_page(exam, []))


def test_the_report_on_a_product_with_60000_has_one_problem(doctor, no_pictures):
    assert doctor("small:overflow").status == 1
    shown = Page(pathlib.Path("jaxscale-doctor.html").read_text())
    assert shown.texts["title"] == ["jaxscale doctor: small:overflow"]
    assert "Problems found: 1." in shown.flowing


def test_what_is_quoted_is_code(exam, no_pictures):
    """In problems and in what is only worth knowing."""
    problem = Finding(True, "Too `large`.", ("Write `y / 2`.",))
    shown = Page(draw_page(exam, [problem, problem._replace(is_problem=False)]))
    assert [shown.texts["code"].count(words) for words in ("large", "y / 2")] == [2, 2]


@pytest.mark.worlds
def test_it_holds_everything_and_asks_for_nothing(exam):
    shown = Page(draw_page(exam, diagnose(exam)))
    assert not {"script", "link", "iframe"} & {tag for tag, _ in shown.tags}
    assert not re.search(r"https?://|@import|url\(", shown.source)
    (picture,) = [attrs for tag, attrs in shown.tags if tag == "img"]
    kind, data = picture["src"].split(",")
    assert kind == "data:image/png;base64"
    assert base64.b64decode(data).startswith(b"\x89PNG")
    assert "4 gradients: " in picture["alt"]
    assert "viewport" in [attrs.get("name") for _, attrs in shown.tags]
    # The problem comes first.
    headings = ["Problems found: 1.", "It begins at", "Worth knowing", "Leaf by leaf"]
    assert sorted(headings, key=shown.flowing.index) == headings
    assert shown.texts["article"][0].split()[0] == "Problem"


def test_the_faulty_line_is_marked_among_those_around_it(exam, no_pictures):
    """Not by its colour alone. All keep their indentation, but what they have in common."""
    shown = Page(draw_page(exam, diagnose(exam)))
    lines = shown.texts["pre"][0].strip("\n").splitlines()
    code = [line.removeprefix("    ") for line in MODEL.splitlines()[4:9]]
    expected = [f"  {i:5}  {text} " for i, text in enumerate(code, 5)]
    expected[2] = expected[2].replace("  ", " >", 1)
    assert lines == expected
    assert shown.texts["mark"] == [expected[2]]


def test_whatever_it_is_given_is_escaped(exam, no_pictures):
    findings = [
        *diagnose(exam),
        Finding(True, EVIL, (EVIL, f"`{EVIL}` and an odd `"), EVIL),
        Finding(False, EVIL, (EVIL,)),
    ]
    evil = exam._replace(loss_as_written=1.0, autocast=EVIL, dtypes=(EVIL,))
    shown = Page(draw_page(evil, findings))
    assert "<script" not in shown.source
    assert {EVIL, "unused"} <= set(shown.texts["th"])
    assert (shown.texts["h2"].count(EVIL), shown.texts["p"].count(EVIL)) == (1, 2)
    assert shown.texts["summary"][-1].strip() == EVIL
    assert EVIL in shown.texts["code"]


def test_what_is_computed_and_what_is_stored_is_visible_in_types(exam, no_pictures):
    """Each table names its own scale."""
    grads = {"small": jnp.array([2.0**-30, 1.0]), "fine": jnp.ones(2)}
    calibration = diagnostics.Calibration(2.0**8, *[None] * 5)
    shown = draw_page_of(exam, grads, 2.0**8, shown_scale=1.0, calibration=calibration)
    assert shown.texts["h3"][1:] == [
        "By layer: what storing them without a loss scale would lose",
        "Leaf by leaf, at loss scale 2**8, the largest that does not overflow",
    ]
    layers, leaves = shown.texts["tbody"]
    assert layers.split() == ["small50.0%0%"]
    # a subnormal at that scale: nothing becomes 0
    assert leaves.split() == ["small250.0%1", "fine20%1"]
    for words in (
        "above are about computation",
        "The finished gradients, and what storing them would lose",
        "Layers that lose nothing in float16 or bfloat16: 1 of 2.",
        "The gradients as computed at loss scale 2**8, the largest",
    ):
        assert words in shown.flowing


FULL = np.ones(2, np.float32)
TINY = FULL * 2.0**-40
BAD = FULL * np.nan
# The gradients, how many rows the tables of layers and of leaves have, the first leaf (its path,
# its size, and the columns that tell something), and what is said of the others.
TABLES = {
    "nothing to tell": (
        [FULL] * 40,
        (30,),
        "02",
        ["And 10 more.", "lose nothing in float16 or bfloat16: 40 of 40."],
    ),
    "the worst ones": (
        {"0": BAD, "fine": [FULL] * 20, "tiny": [TINY] * 45},
        (40, 30),
        "022--",
        [
            "And 36 more.",
            "lose less or nothing in float16 or bfloat16: 25 of 66.",
            "Layers without a finite, nonzero gradient to judge: 1 of 66: 0.",
        ],
    ),
    "nothing finite": (
        {"w": BAD},
        (1,),
        "w22-",
        [
            "2 gradients: 0% are exactly 0, 0 inf, 2 NaN. They were computed",
            "None is finite and nonzero",
        ],
    ),
}


@cases("name", TABLES)
def test_tables_show_the_rows_that_tell_something(name, exam):
    grads, lengths, first, said = TABLES[name]
    shown = draw_page_of(exam, grads)
    assert ("img" in shown.texts) == (name != "nothing finite")
    tables = [body.split() for body in shown.texts["tbody"]]
    assert tuple(map(len, tables)) == lengths
    assert tables[-1][0].startswith(first)
    for words in said:
        assert words in shown.flowing


@cases("dtype", ["float32", "float8_e5m2"])
def test_only_the_formats_of_the_model_are_judged(dtype, exam, no_pictures):
    shown = draw_page_of(exam, {"w": TINY}, dtypes=("float16", dtype))
    headings = ["layer", "float16", "bfloat16"] + ["float8_e5m2"] * (dtype[5] == "8")
    assert shown.texts["th"][: len(headings) + 1] == [*headings, "w"]


def test_without_matplotlib_there_is_no_picture(exam, no_pictures):
    shown = Page(draw_page(exam, []))
    assert "no picture: it needs matplotlib, which was not installed" in shown.flowing
    assert "img" not in shown.texts


@cases("missing", ["jinja2", "matplotlib"])
def test_what_is_not_installed_is_told_and_all_else_too(
    missing, doctor, monkeypatch, tmp_path
):
    module = {"jinja2": "jinja2", "matplotlib": "matplotlib.figure"}[missing]
    monkeypatch.setitem(sys.modules, module, None)
    answer = doctor("small:wide", "--json-file", "results.json")
    assert answer.status == 0
    assert answer.err.startswith("jaxscale doctor: The")
    needs = f"it needs {missing}, which is not installed: pip install {missing}\n"
    assert answer.err.endswith(needs)
    assert "Nothing is wrong." in answer.out
    assert not json.loads(pathlib.Path("results.json").read_text())["found"]
    is_written = pathlib.Path("jaxscale-doctor.html").exists()
    assert is_written == ("The report is in" in answer.out) == (missing != "jinja2")
