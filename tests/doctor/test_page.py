"""The page: that it holds everything, asks for nothing, escapes what it is given, and is brief."""

import base64
import html.parser
import json
import pathlib
import re
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale import diagnostics
from jaxscale._doctor import cli
from jaxscale._doctor.diagnosis import diagnose
from jaxscale._doctor.finding import Finding
from jaxscale._doctor.gradients import add_histograms, count_leaves
from jaxscale._doctor.measure import examine
from jaxscale._doctor.page import draw_page, say_missing
from jaxscale._doctor.record import make_record
from jaxscale._doctor.target import load

pytestmark = pytest.mark.standard_promotion

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

def wide():
    return (lambda params, batch: params["w"]), {{"w": jnp.float32(1)}}, None
"""
LINE = next(i for i, line in enumerate(MODEL.splitlines(), 1) if "60000" in line)


class Page(html.parser.HTMLParser):
    """A page as its elements, with tags and attributes, its text, and the text of each element."""

    def __init__(self, source):
        super().__init__()
        self.source = source
        self.tags = []
        self.text = ""
        self.texts = {}
        self.open = []
        self.feed(source)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.texts.setdefault(tag, []).append("")
        if tag not in ("meta", "img", "wbr"):
            self.open.append((tag, len(self.texts[tag]) - 1))

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag  # nothing is left open, nor closed too early

    def handle_data(self, data):
        self.text += data
        for tag, i in self.open:
            self.texts[tag][i] += data

    @property
    def flowing(self):
        return re.sub(r"\s+", " ", self.text)


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
    headings = [
        "Problems found: 1.",
        "It begins at",
        "Worth knowing",
        "How large they are",
        "By layer",
        "Leaf by leaf",
    ]
    assert sorted(headings, key=shown.text.index) == headings
    assert shown.texts["article"][0].split()[0] == "Problem"


def test_the_faulty_line_is_marked_among_those_around_it(exam, no_pictures):
    """Not by its colour alone. All keep their indentation, but what they have in common."""
    findings = diagnose(exam)
    shown = Page(draw_page(exam, findings))
    expected = []
    recorded = []
    for number in range(LINE - 2, LINE + 3):
        text = MODEL.splitlines()[number - 1]
        recorded.append([number, text])
        expected.append(f"  {number:5}  {text.removeprefix('    ')} ")
    expected[2] = expected[2].replace("  ", " >", 1)
    source = shown.texts["pre"][0].splitlines()
    assert [line for line in source if line.strip()] == expected
    assert shown.texts["mark"] == [expected[2]]
    assert make_record(exam, findings)["findings"][0]["source"] == recorded


def test_what_is_quoted_is_code(exam, no_pictures):
    """In titles and details, of problems and of what is only worth knowing."""
    finding = Finding(True, "`a title`", ("write `a detail`",))
    shown = Page(draw_page(exam, [finding, finding._replace(is_problem=False)]))
    assert shown.texts["code"].count("a title") == 2
    assert shown.texts["code"].count("a detail") == 2


def test_whatever_it_is_given_is_escaped(exam, model, no_pictures):
    findings = [
        *diagnose(exam),
        Finding(True, EVIL, (EVIL, f"`{EVIL}` and an odd `"), EVIL),
        Finding(False, EVIL, (EVIL,)),
    ]
    exam = exam._replace(loss_as_written=1.0, autocast=EVIL, dtypes=(EVIL,))
    shown = Page(draw_page(exam, findings))
    assert "<script" not in shown.source
    assert shown.texts["title"] == [f"jaxscale doctor: {model}:overflow"]
    assert {EVIL, "unused"} <= set(shown.texts["th"])
    assert shown.texts["h2"].count(EVIL) == 1
    assert shown.texts["p"].count(EVIL) == 2
    assert shown.texts["summary"][-1].strip() == EVIL
    assert EVIL in shown.texts["code"]


def test_what_is_computed_and_what_is_stored_is_told_apart(exam, no_pictures):
    grads = {"small": jnp.array([2.0**-30, 1.0]), "fine": jnp.ones(2)}
    calibration = diagnostics.Calibration(2.0**8, *[None] * 5)
    shown = draw_page_of(exam, grads, 2.0**8, shown_scale=1.0, calibration=calibration)
    assert "above are about computation" in shown.flowing
    assert (
        "The finished gradients, and what storing them would lose" in shown.texts["h2"]
    )
    # Each table names its own scale.
    assert shown.texts["h3"][1:] == [
        "By layer: what storing them without a loss scale would lose",
        "Leaf by leaf, at loss scale 2**8, the largest that does not overflow",
    ]
    layers, leaves = shown.texts["tbody"]
    assert layers.split() == ["small50.0%0%"]
    assert "Layers that lose nothing in float16 or bfloat16: 1 of 2." in shown.flowing
    # a subnormal at that scale: nothing becomes 0
    assert leaves.split() == ["small250.0%1", "fine20%1"]
    assert "The gradients as computed at loss scale 2**8, the largest" in shown.flowing
    headings = " ".join(shown.texts["th"])
    assert "subnormal" in shown.texts["th"]
    assert headings.count("subnormal") == 1
    assert "zero" not in headings


@pytest.mark.parametrize(
    ("dtypes", "judged"),
    [
        (("float16", "float32"), ["float16", "bfloat16"]),
        (("float8_e5m2",), ["float16", "bfloat16", "float8_e5m2"]),
    ],
    ids=["in float16", "in float8"],
)
def test_only_the_formats_of_the_model_are_judged(dtypes, judged, exam, no_pictures):
    shown = draw_page_of(exam, {"w": jnp.array([2.0**-20, 2.0**-30])}, dtypes=dtypes)
    headings = ["layer", *judged, "w"]
    assert shown.texts["th"][: len(headings)] == headings


def test_a_table_without_anything_to_tell_is_a_sentence(exam, no_pictures):
    shown = draw_page_of(exam, [np.ones(2, np.float32)] * 40, loss_scale=4.0)
    (leaves,) = shown.texts["tbody"]
    assert len(leaves.split()) == 30
    assert "And 10 more." in shown.flowing
    assert "Layers that lose nothing in float16 or bfloat16: 40 of 40." in shown.flowing


def test_a_table_shows_the_rows_that_tell_something(exam, no_pictures):
    bad = np.full(2, np.nan, np.float32)
    fine = np.full(2, 1.0, np.float32)
    tiny = np.full(2, 2.0**-40, np.float32)
    shown = draw_page_of(exam, {"0": bad, "fine": [fine] * 20, "tiny": [tiny] * 45})
    layers, leaves = map(str.split, shown.texts["tbody"])
    text = shown.flowing
    assert len(layers) == 40
    assert "Layers that lose less or nothing in float16 or bfloat16: 25 of 66." in text
    assert "Layers without a finite, nonzero gradient to judge: 1 of 66: 0." in text
    assert len(leaves) == 30
    assert leaves[0] == "022--"  # path, numbers, NaN, flushed, max |g|
    assert "And 36 more." in text


def test_nothing_is_drawn_of_nothing(exam):
    shown = draw_page_of(exam, {"w": np.full(2, np.nan, np.float32)})
    assert "img" not in shown.texts
    text = shown.flowing
    assert "2 gradients: 0% are exactly 0, 0 inf, 2 NaN. They were computed" in text
    assert "None is finite and nonzero" in text
    assert shown.texts["h2"][-1] == "The finished gradients"
    (heading,) = shown.texts["h3"]
    assert heading.startswith("Leaf by leaf")
    assert shown.texts["tbody"][-1].split() == ["w22-"]  # path, numbers, NaN, max |g|


def test_without_matplotlib_there_is_no_picture(exam, no_pictures):
    shown = Page(draw_page(exam, []))
    assert "no picture: it needs matplotlib, which was not installed" in shown.text
    assert say_missing().endswith(
        "it needs matplotlib, which is not installed: pip install matplotlib"
    )
    assert "img" not in shown.texts


def test_without_jinja2_the_results_are_still_told(
    model, capsys, monkeypatch, tmp_path
):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["doctor", f"{model}:wide", "--json-file", "results.json"]) == 0
    out, err = capsys.readouterr()
    assert "Nothing is wrong." in out
    missing = "There will be no report: it needs jinja2, which is not installed: pip install jinja2"
    assert err.splitlines()[0] == f"jaxscale doctor: {missing}"
    assert err.count("pip install") == 1
    assert "pip install" not in out
    assert "The report is in" not in out
    results = json.loads(pathlib.Path("results.json").read_text())
    assert not results["found"]
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]
