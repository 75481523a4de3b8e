"""Words that several findings need: for lines of the model, lists of names, and constants."""

from collections.abc import Iterable, Sequence

from .._trees.grammar import and_more
from ..diagnostics._text import number, percent
from ..diagnostics._trace.report import Place, TracedConstant
from .exam import Exam

_MOST_NAMES = 5  # in a list
# after advice to write something else
NOT_TRIED = "This was not tried, as the doctor can only try other formats."


def list_names(names: Sequence[str]) -> str:
    """Returns the first few names, and how many more there are."""
    first_names = ", ".join(names[:_MOST_NAMES])
    return " ".join([first_names, *and_more(names, _MOST_NAMES)])


def say_error(error: float) -> str:
    """Returns a relative error in percent, at most 100%."""
    return percent(min(error, 1.0))


def name_operation(place: Place) -> str:
    """Returns an operation with its pass, in the middle of a sentence."""
    return f"`{place.primitive}`, in the {place.direction} pass,"


def name_line(place: Place) -> str:
    """Returns the file and the line of an equation."""
    return place.where or "no line of the model"


def name_lines(places: Iterable[Place]) -> str:
    """Returns the files and lines of equations, each once."""
    names = []
    for place in places:
        name = name_line(place)
        if name not in names:
            names.append(name)
    return list_names(names)


def join_lines(lines: Sequence[str], where: str, here: str) -> str:
    """Returns files and lines in words, with the word `here` for the one just named, `where`."""
    names = []
    for line in lines:
        if line == where:
            names.append(here)
        else:
            names.append(line)
    *others, last = names
    if not others:
        return last
    return f"{', '.join(others)} and {last}"


def say_rounded(constant: TracedConstant) -> str:
    """Returns what a number of the source became, as `1e-09 is 0 in float16`."""
    return (
        f"{number(constant.value, 9)} is {number(constant.became)} in {constant.dtype}"
    )


def say_rounded_at(place: Place, exam: Exam) -> list[str]:
    """Returns what numbers of the source became that stand in the line of an equation."""
    sentences = []
    for constant in exam.trace.constants:
        if constant.where == place.where:
            sentences.append(f"{say_rounded(constant)}.")
    return sentences


def say_backward_rule(place: Place, exam: Exam) -> list[str]:
    """Returns that a backward rule may be at fault, if the line of an equation calls one.

    The lines of a rule itself are known, unless a library wrote it or it was traced before.
    """
    rule = exam.backward_rules.get(place.where)
    if rule is None or place.direction != "backward":
        return []
    return [
        f"This line calls a function with a backward rule of its own, `{rule}`: the fault may be "
        "there."
    ]
