"""The report as one HTML page, with the pictures inside: it needs no script and no network."""

import base64
import html
import io
from collections.abc import Callable, Sequence
from typing import Any

from ..diagnostics._pictures import plot_histogram, plot_underflow
from ..diagnostics._text import number, power, text_histogram
from .exam import Exam
from .findings import Finding, verdict

_STYLE = """
body { max-width: 56rem; margin: 0 auto; padding: 1rem; line-height: 1.45;
  font-family: system-ui, sans-serif; color: #111; background: #fff; }
h1 { font-size: 1.5rem; margin-bottom: 0.2rem; }
h2 { font-size: 1.2rem; margin-top: 2rem; }
h3 { font-size: 1rem; margin: 0 0 0.4rem; overflow-wrap: anywhere; }
p { margin: 0.3rem 0; }
article { border: 1px solid #999; border-left-width: 0.3rem; padding: 0.6rem 0.8rem;
  margin: 0.8rem 0; }
article.problem { border-color: #111; border-left-width: 0.7rem; }
.kind { font-weight: bold; text-transform: uppercase; font-size: 0.75rem; }
.verdict { font-size: 1.25rem; font-weight: bold; }
pre { background: #f2f2f2; padding: 0.5rem; overflow-x: auto; font-size: 0.85rem; }
pre b { background: #ffe08a; outline: 1px solid #111; }
.wide { overflow-x: auto; }
img { display: block; max-width: 100%; min-width: 34rem; height: auto; }
table { border-collapse: collapse; font-size: 0.85rem; }
td, th { border-bottom: 1px solid #bbb; padding: 0.2rem 0.6rem; text-align: right; }
td:first-child, th:first-child { text-align: left; }
code { font-family: ui-monospace, monospace; }
"""  # fmt: skip

WITHOUT_PICTURES = (
    'The pictures need matplotlib, which is not installed: pip install "jaxscale[pictures]".'
)


def page(exam: Exam, found: Sequence[Finding]) -> tuple[str, bool]:
    """Returns the report as HTML, and whether it has pictures."""
    problems = [finding for finding in found if finding.is_problem]
    notes = [finding for finding in found if not finding.is_problem]
    pictures = _pictures(exam)
    parts = [
        "<h1>jaxscale doctor</h1>",
        f"<p><code>{html.escape(exam.target)}</code></p>",
        f'<p class="verdict">{verdict(exam, found)}</p>',
        _paragraph(setting(exam)),
        *(_finding("problem", finding) for finding in problems),
        "<h2>Worth knowing</h2>" if notes else "",
        *(_finding("note", finding) for finding in notes),
        "<h2>How large the gradients are</h2>",
        _paragraph(
            f"The upper part shows what float16 would keep {_where(exam)}. The lower part shows "
            "the range of each format there, and at the scale that suits the gradients best: a "
            "larger scale moves the range to the left, towards smaller gradients. Inf and NaN "
            "have no size and are not drawn. Numbers computed on the way to these gradients are "
            "not drawn either, and may be smaller."
        ),
        pictures[0] if pictures else f"<pre>{html.escape(_text(exam))}</pre>",
        "<h2>Which layers lose what</h2>",
        _paragraph(
            "The share of each layer's gradients that would be lost if they were stored in a "
            f"format {_where(exam)}. A dash means that none of them is finite and nonzero."
        ),
        pictures[1] if pictures else f"<pre>{html.escape(str(exam.layers))}</pre>",
        "" if pictures else _paragraph(WITHOUT_PICTURES),
        "<h2>Gradients, leaf by leaf</h2>",
        _paragraph("The gradients, and what float16 makes of them, at loss scale "
                   f"{power(exam.leaves.loss_scale)}, worst first."),
        _table(exam),
    ]  # fmt: skip
    body = "\n".join(part for part in parts if part)
    head = (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>jaxscale doctor: {html.escape(exam.target)}</title>\n<style>{_STYLE}</style>\n"
    )
    return f"{head}</head>\n<body>\n{body}\n</body>\n</html>\n", bool(pictures)


def setting(exam: Exam) -> str:
    """Returns the loss, the dtypes of the model, and the scale of the exam, in words."""
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


def _where(exam: Exam) -> str:
    if exam.shown_scale == 1:
        return "without a loss scale"
    return f"at loss scale {power(exam.shown_scale)}"


def _paragraph(text: str) -> str:
    """Returns a paragraph, with code where there are backticks."""
    pieces = [html.escape(piece) for piece in text.split("`")]
    marked = [f"<code>{piece}</code>" if i % 2 else piece for i, piece in enumerate(pieces)]
    return f"<p>{''.join(marked)}</p>"


def _finding(kind: str, finding: Finding) -> str:
    lines = [
        f"<b>{i:5}  {html.escape(text)}</b>" if i == finding.line else f"{i:5}  {html.escape(text)}"
        for i, text in finding.source
    ]
    return "\n".join(
        [
            f'<article class="{kind}"><span class="kind">{kind}</span>',
            f"<h3>{html.escape(finding.title)}</h3>",
            "<pre>" + "\n".join(lines) + "</pre>" if lines else "",
            *map(_paragraph, finding.details),
            "</article>",
        ]
    )


def _pictures(exam: Exam) -> list[str]:
    scale = exam.shown_scale
    drawings: list[tuple[str, Callable[[], Any]]] = [
        ("Histogram of the gradients by powers of two, and the ranges of four formats",
         lambda: plot_histogram(exam.histogram, loss_scale=scale)),
        (exam.layers.title, lambda: plot_underflow(exam.layers)),
    ]  # fmt: skip
    try:
        return [_picture(words, draw()) for words, draw in drawings]
    except ImportError:
        return []


def _picture(words: str, figure: Any) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130, bbox_inches="tight")
    data = base64.b64encode(buffer.getvalue()).decode()
    alt = html.escape(words, quote=True)
    return f'<div class="wide"><img alt="{alt}" src="data:image/png;base64,{data}"></div>'


def _text(exam: Exam) -> str:
    return text_histogram(exam.histogram, loss_scale=exam.shown_scale)


def _table(exam: Exam) -> str:
    rows = []
    for cells in exam.leaves.cells():
        tag = "td" if rows else "th"
        rows.append("".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells))
    lines = "\n".join(f"<tr>{row}</tr>" for row in rows)
    return f'<div class="wide"><table>{lines}</table></div>'
