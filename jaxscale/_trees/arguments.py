"""Checks of arguments, and the errors they raise.

Each reads Python values or shapes and dtypes, never the values of arrays. `call` and `name` say
in a message which argument of which function is wrong.
"""

import math
import numbers
import operator
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp

from .numbers import LARGEST, SMALLEST_NORMAL


def finite_number(call: str, name: str, value: object) -> float:
    """Returns `value` as a finite Python float, or raises an error that names it."""
    message = f"`{call}({name}=...)` must be a finite number, got {value!r}."
    if not isinstance(value, numbers.Real):
        raise TypeError(message)
    # A bool is an int to Python, and would pass for 1.0.
    if isinstance(value, bool) or not math.isfinite(value):
        raise ValueError(message)
    return float(value)


# A check returns the value of an argument, or raises an error that names it and its call.
Check = Callable[[str, str, Any], Any]


def limited(
    check: Check, is_allowed: Callable[[Any], bool], must: str, why: str = ""
) -> Check:
    """Returns a check whose value must also be allowed: what it must be, and why, for the error."""

    def check_limits(call: str, name: str, value: object) -> Any:
        number = check(call, name, value)
        if not is_allowed(number):
            raise ValueError(f"`{call}({name}=...)` must {must}, got {number}.{why}")
        return number

    return check_limits


positive = limited(finite_number, lambda number: number > 0, "be above 0")
# What float32 holds as a normal number.
normal_float32 = limited(
    finite_number,
    lambda number: SMALLEST_NORMAL <= number <= LARGEST,
    f"lie in float32's normal range, {SMALLEST_NORMAL} to {LARGEST}",
    " Outside of it a scale would turn into 0 or inf.",
)


def check_fields(instance: object, checks: Mapping[str, Check]) -> None:
    """Checks fields of a frozen dataclass, and puts what the checks return in their place."""
    call = type(instance).__name__
    for name, check in checks.items():
        if hasattr(instance, name):
            value = check(call, name, getattr(instance, name))
            # A frozen dataclass does not allow plain assignment.
            object.__setattr__(instance, name, value)


def power_of_two(call: str, name: str, value: object) -> int:
    """Returns the exponent of `value`, a power of two that float32 holds."""
    number = normal_float32(call, name, value)
    mantissa, exponent = math.frexp(number)
    if mantissa != 0.5:
        raise ValueError(
            f"`{call}({name}=...)` must be a power of two, got {number}. For other scales it is "
            f"not known exactly what is lost: pass 2.0**{exponent - 1}."
        )
    return exponent - 1


def int32(call: str, name: str, value: Any, least: int = 1) -> int:
    """Returns `value` as a Python int that is at least `least` and fits in an int32."""
    message = (
        f"`{call}({name}=...)` must be an integer below 2**31, at least {least}, got "
        f"{value!r}."
    )
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(message) from None
    if isinstance(value, bool) or not least <= number < 2**31:
        raise ValueError(message)
    return number


def one_of(call: str, name: str, value: object, choices: tuple[Any, ...]) -> Any:
    """Returns `value` if it equals one of `choices` and has the same type."""
    for choice in choices:
        if type(value) is type(choice) and value == choice:
            return choice
    raise ValueError(
        f"`{call}({name}=...)` must be one of {', '.join(map(repr, choices))}, got {value!r}."
    )


def describe_value(value: Any) -> str:
    """Returns the dtype and shape of an array, or the type of anything else, for messages."""
    if hasattr(value, "dtype") and not isinstance(value, type):
        return f"{value.dtype}{list(jnp.shape(value))}"
    return type(value).__name__
