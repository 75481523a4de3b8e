"""The report as one HTML page, with its picture inside: it needs no script and no network.

The layout and most of the words are in `page.html.jinja`, which escapes whatever it is given.
"""

import base64
import importlib.resources
import io
import math
import operator
import textwrap
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from .._trees.grammar import and_more
from ..diagnostics._formats import FORMATS
from ..diagnostics._histogram import Histogram
from ..diagnostics._plot import can_draw, draw_histogram
from ..diagnostics._text import percent, power
from .diagnosis import say_setting, say_verdict
from .exam import Exam
from .finding import Finding
from .wording import list_names

_MOST_LEAVES = 30  # in its table
_MOST_LAYERS = 40  # in theirs
_JUDGED = ("float16", "bfloat16")  # besides the formats that the model computes in
_NOTHING = {"0", "0%", "-"}  # cells that have nothing to tell
_NO_PAGE = "There will be no report: it needs jinja2, which is not installed: pip install jinja2"
_NO_PICTURE = (
    "The report will have no picture: it needs matplotlib, which is not installed: pip install "
    "matplotlib"
)


class _Table(NamedTuple):
    """The leaves that have something to tell."""

    headings: Sequence[str]
    rows: Sequence[tuple[Any, ...]]  # a name, and what each column says of it
    others: list[str]  # sentences on the others


def say_missing() -> str:
    """Returns a sentence on what the report needs and is not installed, or `""`."""
    try:
        import jinja2  # noqa: F401
    except ImportError:
        return _NO_PAGE
    if not can_draw():
        return _NO_PICTURE
    return ""


def draw_page(exam: Exam, findings: Sequence[Finding]) -> str:
    """Returns the report as HTML, or raises an `ImportError` without Jinja2."""
    import jinja2

    has_sizes = bool(np.any(exam.histogram.counts))
    picture = None
    if has_sizes and can_draw():
        picture = _draw_picture(exam)
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    template = importlib.resources.files("jaxscale._doctor") / "page.html.jinja"
    return environment.from_string(template.read_text(encoding="utf-8")).render(
        target=exam.target,
        findings=findings,
        verdict=say_verdict(exam, findings),
        setting=say_setting(exam),
        dedent=textwrap.dedent,
        percent=percent,
        at_best=_say_scale(exam, exam.best_scale),
        at_shown=_say_scale(exam, exam.shown_scale),
        at_traced=_say_scale(exam, exam.loss_scale),
        summary=_summarize_counts(exam.histogram),
        has_sizes=has_sizes,
        picture=picture,
        layers=_tabulate_layers(exam),
        leaves=_tabulate_leaves(exam),
    )


def _say_scale(exam: Exam, scale: float) -> str:
    if scale == 1:
        return "without a loss scale"
    if scale == exam.largest_scale:
        return f"at loss scale {power(scale)}, the largest that does not overflow"
    return f"at loss scale {power(scale)}"


def _summarize_counts(histogram: Histogram) -> str:
    """Returns how many gradients there are, and how many of them no bar shows."""
    num_zero, num_inf, num_nan = map(float, histogram[1:])
    total = float(np.sum(histogram.counts)) + num_zero + num_inf + num_nan
    share = percent(num_zero / max(total, 1.0))
    return (
        f"{total:,.0f} gradients: {share} are exactly 0, {num_inf:,.0f} inf, "
        f"{num_nan:,.0f} NaN."
    )


def _draw_picture(exam: Exam) -> str:
    """Returns the histogram as the base64 of a PNG."""
    # First the scale of the table of layers.
    scales = (exam.shown_scale, exam.loss_scale, exam.best_scale)
    titles = {}
    for scale in scales:
        exponent = round(math.log2(scale))
        titles[exponent] = f"ranges {_say_scale(exam, scale)}"
    figure = draw_histogram(exam.histogram, titles, _list_formats(exam))
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150)
    return base64.b64encode(buffer.getvalue()).decode()


def _list_formats(exam: Exam) -> list[str]:
    """Returns the formats that layers are judged by."""
    return [name for name in FORMATS if name in _JUDGED or name in exam.dtypes]


def _tabulate_layers(exam: Exam) -> _Table:
    """Returns the shares that each format would lose of the layers that lose something."""
    formats = _list_formats(exam)
    layers = exam.layers
    blank = []
    lost = {}  # by each format, of each other layer
    for name, shares in layers.items():
        # The shares of a layer without finite nonzero gradients are all 0.
        if any(shares["float16"]):
            lost[name] = [shares[judge].lost for judge in formats]
        else:
            blank.append(name)
    losing = [name for name, losses in lost.items() if any(losses)]
    worst = sorted(losing, key=lambda name: -max(lost[name]))[:_MOST_LAYERS]
    rows = [(name, *lost[name]) for name in losing if name in worst]

    others = []
    if blank:
        count = f"{len(blank)} of {len(layers)}"
        names = list_names(blank)
        others.append(
            f"Layers without a finite, nonzero gradient to judge: {count}: {names}."
        )
    num_others = len(lost) - len(rows)
    if num_others:
        what = "nothing"
        if len(worst) < len(losing):
            what = "less or nothing"
        where = " or ".join(formats)
        others.append(
            f"Layers that lose {what} in {where}: {num_others} of {len(layers)}."
        )
    return _Table(formats, rows, others)


def _tabulate_leaves(exam: Exam) -> _Table:
    """Returns the worst leaves, without the columns that have nothing to tell."""
    headings, *rows = exam.leaves.cells(_MOST_LEAVES)
    last = len(headings) - 1
    shown = []  # the numbers of the columns
    for i in range(len(headings)):
        # the path, how many numbers, and the largest
        is_always_shown = i in (0, 1, last)
        if is_always_shown or any(row[i] not in _NOTHING for row in rows):
            shown.append(i)
    take_shown = operator.itemgetter(*shown)
    others = and_more(exam.leaves.rows, _MOST_LEAVES)
    return _Table(take_shown(headings), list(map(take_shown, rows)), others)
