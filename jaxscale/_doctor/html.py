"""The report as one HTML page, with its picture inside: it needs no script and no network.

The layout and most of the words are in `page.html.jinja`, which escapes whatever it is given.
"""

import base64
import importlib.resources
import io
import itertools
import math
import textwrap
from collections.abc import Sequence
from typing import Any

from ..diagnostics._formats import FORMATS
from ..diagnostics._histogram import HostHistogram, fetch_histogram
from ..diagnostics._leaves import partition_leaves
from ..diagnostics._pictures import can_draw, draw_histogram
from ..diagnostics._text import number, percent, power, summarize_counts, text_histogram
from .exam import Exam
from .finding import Finding, list_names
from .findings import verdict

_MOST_LEAVES = 30  # in its table
_MOST_LAYERS = 40  # in theirs
_JUDGED = ("float16", "bfloat16")  # besides the formats that the model computes in
_NO_PAGE = "There will be no report: it needs jinja2, which is not installed: pip install jinja2"
_NO_PICTURE = (
    "The report will have no picture: it needs matplotlib, which is not installed: pip install "
    "matplotlib"
)


def find_missing() -> str:
    """Returns a sentence on what the report needs and is not installed, or `""`."""
    try:
        import jinja2  # noqa: F401
    except ImportError:
        return _NO_PAGE
    return "" if can_draw() else _NO_PICTURE


def draw_page(exam: Exam, found: Sequence[Finding]) -> str | None:
    """Returns the report as HTML, or `None` without Jinja2."""
    try:
        import jinja2
    except ImportError:
        return None
    numbers = fetch_histogram("doctor", exam.histogram)
    has_sizes = bool(numbers.counts.sum())
    picture = _draw_picture(exam, numbers) if has_sizes and can_draw() else None
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    source = importlib.resources.files("jaxscale._doctor") / "page.html.jinja"
    return environment.from_string(source.read_text(encoding="utf-8")).render(
        exam=exam,
        found=found,
        verdict=verdict(exam, found),
        setting=setting(exam),
        dedent=textwrap.dedent,
        at_seen=_say_scale(exam, exam.fits or exam.loss_scale),
        at_shown=_say_scale(exam, exam.shown_scale),
        at_used=_say_scale(exam, exam.loss_scale),
        summary=summarize_counts(numbers),
        has_sizes=has_sizes,
        picture=picture,
        text_picture=text_histogram(exam.histogram, loss_scale=exam.shown_scale),
        layers=_tabulate_layers(exam),
        leaves=_tabulate_leaves(exam),
    )


def setting(exam: Exam) -> str:
    scale = f"at loss scale {power(exam.loss_scale)}, as given"
    if exam.is_auto:
        scale = f"at loss scale {power(exam.loss_scale)}, the largest that does not overflow"
        if exam.fits is None:
            scale = "without a loss scale"
    computes = " and ".join(exam.dtypes) + ", by `jaxscale.autocast`" * bool(exam.autocast)
    return (
        f"The loss is {number(exam.loss, 4)}. The model computes in {computes}. It was "
        f"examined on one batch {scale}."
    )


def _say_scale(exam: Exam, scale: float) -> str:
    if scale == 1:
        return "without a loss scale"
    largest = ", the largest that does not overflow" * (scale == exam.fits)
    return f"at loss scale {power(scale)}{largest}"


def _draw_picture(exam: Exam, numbers: HostHistogram) -> str:
    """Returns the histogram as the base64 of a PNG."""
    # First the scale of the table of layers. The suggestion of `plot_histogram` would be one more.
    scales = exam.shown_scale, exam.loss_scale, exam.fits or exam.loss_scale
    titles = {round(math.log2(scale)): f"ranges {_say_scale(exam, scale)}" for scale in scales}
    figure = draw_histogram(numbers, titles, formats=_judged_formats(exam), is_narrow=True)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150)
    return base64.b64encode(buffer.getvalue()).decode()


def _judged_formats(exam: Exam) -> list[str]:
    return [name for name in FORMATS if name in _JUDGED or name in exam.dtypes]


def _tabulate_layers(exam: Exam) -> dict[str, Any]:
    """Returns what each layer loses: for each format the share as text, and in percent."""
    formats, layers = _judged_formats(exam), exam.layers.layers
    # The shares of a layer without finite nonzero gradients are all 0.
    seen = {name: shares for name, shares in layers.items() if any(shares["float16"])}
    lost = {name: max(shares[dtype].lost for dtype in formats) for name, shares in seen.items()}
    worst = sorted(filter(lost.get, lost), key=lambda name: -lost[name])[:_MOST_LAYERS]
    rows = [
        (name, [(percent(lost), 100 * lost) for lost in (shares[f].lost for f in formats)])
        for name, shares in seen.items()
        if name in worst
    ]
    others = []
    if blank := [name for name in layers if name not in seen]:
        count = f"{len(blank)} of {len(layers)}"
        names = list_names(blank)
        others.append(f"Layers without a finite, nonzero gradient to judge: {count}: {names}.")
    if rest := len(seen) - len(rows):
        what = "less or nothing" if len(worst) < sum(map(bool, lost.values())) else "nothing"
        where = " or ".join(formats)
        others.append(f"Layers that lose {what} in {where}: {rest} of {len(layers)}.")
    return {"headings": formats, "rows": rows, "others": others}


def _tabulate_leaves(exam: Exam) -> dict[str, Any]:
    """Returns the leaves that have something to tell, without the columns that have nothing."""
    shown, others = partition_leaves(exam.leaves, _MOST_LEAVES)
    columns = list(zip(*shown.cells(), strict=True))
    told = [not {"0", "0%", "-"}.issuperset(column[1:]) for column in columns]
    told[0] = told[1] = told[-1] = True
    headings, *rows = zip(*itertools.compress(columns, told), strict=True)
    return {"headings": headings, "rows": rows, "others": others}
