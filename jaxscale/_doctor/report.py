"""The report: what the doctor found, as text, as JSON and as a page."""

import json
import math
import os
import pathlib
import shutil
import textwrap
import warnings
from typing import NamedTuple

import numpy as np

from .._trees.arguments import limited, normal_float32
from .announcer import Announce, announce_nothing
from .diagnosis import diagnose, say_setting, say_verdict
from .exam import Exam
from .finding import Finding
from .measure import examine
from .page import draw_page
from .record import make_record
from .target import Target, TargetError, error_line

_WIDTH = 88  # of the text, where standard output is not a terminal
_WIDEST = 100  # and at most: longer lines are hard to read


check_loss_scale = limited(
    normal_float32,
    lambda scale: scale >= 1 and math.frexp(scale)[0] == 0.5,
    "be a power of two, at least 1",
    " Leave it out for the largest that does not overflow.",
)


class Report(NamedTuple):
    """What the doctor found; `print` it for the text of the command.

    Attributes:
      exam: the measurements.
      findings: what follows from them, the problems first.
    """

    exam: Exam
    findings: tuple[Finding, ...]

    def __str__(self) -> str:
        # `COLUMNS` counts before the terminal itself does.
        width = min(shutil.get_terminal_size((_WIDTH, 24)).columns, _WIDEST)
        lines = _wrap(say_verdict(self.exam, self.findings), "", width)
        lines += _wrap(say_setting(self.exam), "", width)
        for finding in self.findings:
            lines.append("")
            lines += _summarize_finding(finding, width)
        return "\n".join(lines)

    def to_json(self) -> str:
        """Returns all results as JSON, in which infinities and NaN are strings."""
        record = make_record(self.exam, self.findings)
        return json.dumps(record, indent=1, allow_nan=False)

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Writes the page, one HTML file.

        Raises:
          ImportError: if Jinja2 is not installed.
        """
        page = draw_page(self.exam, self.findings)
        pathlib.Path(path).write_text(page, encoding="utf-8")


def examine_target(
    target: Target,
    loss_scale: float | None,
    dtype: str | None,
    announce: Announce = announce_nothing,
    *,
    is_quick: bool = False,
) -> Report:
    """Makes the exam and its diagnosis. `loss_scale` and `dtype` are as `examine` takes them."""
    try:
        # What NumPy and `autocast` warn of while JAX traces is in the report.
        with np.errstate(over="ignore", under="ignore"), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`autocast` (changes nothing|to)")
            exam = examine(target, loss_scale, dtype, announce, is_quick=is_quick)
    except TargetError:
        raise
    except Exception as error:
        raise TargetError(
            f"{target.name} failed when it was run on its batch: {error_line(error)}"
        ) from error
    return Report(exam, tuple(diagnose(exam)))


def _summarize_finding(finding: Finding, width: int) -> list[str]:
    mark = "! " if finding.is_problem else "- "
    lines = _wrap(finding.title, mark, width)
    for number, text in finding.source:
        if number == finding.line:
            lines.append(_shorten(f"      {text.strip()}", width))
    for detail in finding.details:
        lines += _wrap(detail, "  ", width)
    return lines


def _wrap(text: str, indent: str, width: int) -> list[str]:
    return textwrap.wrap(
        text,
        width,
        initial_indent=indent,
        subsequent_indent=" " * len(indent),
        break_long_words=False,  # paths, which one may want to copy
        break_on_hyphens=False,
    )


def _shorten(line: str, width: int) -> str:
    if len(line) <= width:
        return line
    return f"{line[: width - 4]} ..."
