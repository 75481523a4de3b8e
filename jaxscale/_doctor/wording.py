"""Words that several findings need: for lines of the model, lists of names, and constants."""

from collections.abc import Sequence

from .._trees.grammar import and_more
from ..diagnostics._switches.operations import Rounded
from ..diagnostics._text import number, percent

_MOST_NAMES = 5  # in a list


def list_names(names: Sequence[str]) -> str:
    """Returns the first few names, and how many more there are."""
    first_names = ", ".join(names[:_MOST_NAMES])
    return " ".join([first_names, *and_more(names, _MOST_NAMES)])


def say_error(error: float) -> str:
    """Returns a relative error in percent, at most 100%."""
    return percent(min(error, 1.0))


def name_operation(operation: str, direction: str) -> str:
    """Returns an operation with its pass, in the middle of a sentence."""
    return f"`{operation}`, in the {direction} pass,"


def join_lines(lines: Sequence[str], where: str, here: str) -> str:
    """Returns files and lines in words, with the word `here` for the one just named, `where`."""
    names = [here if line == where else line for line in lines]
    others = ", ".join(names[:-1])
    return " and ".join(filter(None, [others, names[-1]]))


def say_rounded(constant: Rounded) -> str:
    """Returns what a number of the source became, as `1e-09 is 0 in float16`."""
    exact = number(constant.exact, 9)
    return f"{exact} is {number(constant.became)} in {constant.dtype}"


def say_mean(size: int, where: str) -> str:
    return (
        f"The loss is a sum over {size:,} numbers{where}. Take a mean instead, with "
        "`jnp.mean`: the loss and all gradients become smaller by that factor, and with gradients "
        "as small as that nothing overflows, as was tried."
    )
