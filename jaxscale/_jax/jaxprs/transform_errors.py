"""An operation of a jaxpr that cannot be transformed: an error which names the user's line."""

import contextlib
import re
import traceback
from collections.abc import Iterator
from types import FrameType

import jax
from jax.extend.core import JaxprEqn

from .equation_forms import TESTED, UnknownFormError
from .source_lines import is_of_jax, is_own, users_line

# What Python raises where a jaxpr has another form than the code that reads it expects. Errors
# of classes of their own, such as those of JAX, say what they are about.
_OF_PYTHON = (
    *(AssertionError, AttributeError, IndexError, KeyError, StopIteration),
    *(TypeError, UnknownFormError, ValueError),
)


# `float32[8]` is the type of an array, as JAX writes it.
_PRECISION = re.compile(
    r"(?<![a-z])(float(16|32)|bfloat16|bf16|fp?(16|32)|half.precision)(?![\w\[])", re.I
)


@contextlib.contextmanager
def naming_the_line(call: str, way_out: str) -> Iterator[None]:
    """Inside of this context, what goes wrong with an operation is an error that names its line.

    Errors of the user's functions, and those that explain themselves, are left alone.

    Args:
      call: what transforms a jaxpr, such as `autocast(fun)`.
      way_out: what the user can do about it, a sentence.

    Raises:
      TypeError: in place of what Python raises where an operation has a form that nobody expected.
    """
    try:
        yield
    except _OF_PYTHON as error:
        operations = _find_operations(error)
        if not operations or not _is_unexpected(error):
            raise
        name = operations[-1].primitive.name
        # A jaxpr that JAX has cached, such as that of `jax.numpy.einsum`, does not know its
        # caller. The equation around it does.
        lines = filter(None, map(users_line, reversed(operations)))
        line = next(lines, "a line that JAX does not know")
        reason = type(error).__name__
        if str(error):
            reason += f": {error}"
        raise TypeError(
            f"`{call}` cannot transform the operation `{name}` at {line}, as it has a form that "
            f"is not known ({reason}). {way_out} jaxscale was tested with JAX {TESTED}; this is "
            f"JAX {jax.__version__}."
        ) from error


def _is_unexpected(error: BaseException) -> bool:
    """Returns whether an error is one that nobody wrote for the user to read."""
    # such as a class of JAX that derives from `TypeError`
    if type(error) not in _OF_PYTHON:
        return False
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    file = frame.f_code.co_filename
    if not (is_own(file) or is_of_jax(file)):
        return False
    return isinstance(error, LookupError) or not is_for_people(error)


def is_for_people(error: BaseException) -> bool:
    """Returns whether somebody wrote an error for the user to read, such as one of ours.

    These have a name in backticks, and those of Python itself have none.
    """
    return "`" in str(error)


def names_precision(error: BaseException) -> bool:
    """Returns whether an error names float32 or half precision, and not only types of arrays.

    One without a message, such as that of an `assert`, is read in the line that raised it. Errors
    that are raised in this package say themselves what they are about.
    """
    *_, last = traceback.extract_tb(error.__traceback__)
    if is_own(last.filename):
        return False
    return _PRECISION.search(str(error) or last.line or "") is not None


def passed_through(error: BaseException, function: str) -> bool:
    """Returns whether an error came out of a function of this package, by its name."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        if code.co_name == function and is_own(code.co_filename):
            return True
    return False


def _find_operations(error: BaseException) -> list[JaxprEqn]:
    """Returns the equations that were at work when an error was raised, outermost first."""
    operations = []
    for frame, _ in traceback.walk_tb(error.__traceback__):
        eqn = _operation_in(frame)
        if eqn is not None:
            operations.append(eqn)
    return operations


def _operation_in(frame: FrameType) -> JaxprEqn | None:
    """Returns the operation that a function of ours works on: the last of its local variables.

    An error that JAX raises does not say which operation it is about.
    """
    eqn = None
    if is_own(frame.f_code.co_filename):
        for value in frame.f_locals.values():
            if isinstance(value, JaxprEqn):
                eqn = value
    return eqn
