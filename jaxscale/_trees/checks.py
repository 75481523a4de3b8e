"""Checks of arguments, and the errors they raise.

Each reads Python values or shapes and dtypes, never the values of arrays. `call` and `name` say
in a message which argument of which function is wrong.
"""

import math
import numbers
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp


def finite_number(call: str, name: str, value: Any) -> float:
    """Returns `value` as a finite Python float, or raises an error that names it."""
    given = f"`{call}({name}=...)` must be a finite number, got {value!r}"
    if isinstance(value, bool):  # a bool is an int to Python, and would pass for 1.0
        raise ValueError(f"{given}. Pass a number such as 2.0**15.")
    if not isinstance(value, numbers.Real):
        raise TypeError(
            f"{given} of type {type(value).__name__}. Pass a Python or NumPy scalar; "
            "the arguments of a policy are fixed before anything is traced."
        )
    if not math.isfinite(value):
        raise ValueError(f"{given}.")
    return float(value)


def positive(call: str, name: str, value: Any) -> float:
    """Returns `value` as a finite Python float above 0."""
    value = finite_number(call, name, value)
    if not value > 0:
        raise ValueError(f"`{call}({name}=...)` must be above 0, got {value}.")
    return value


def normal_float32(call: str, name: str, value: Any) -> float:
    """Returns `value` as a positive float that float32 holds as a normal number."""
    value = finite_number(call, name, value)
    info = jnp.finfo(jnp.float32)
    low, high = float(info.smallest_normal), float(info.max)
    if not low <= value <= high:
        raise ValueError(
            f"`{call}({name}=...)` must lie in float32's normal range, {low} to {high}, "
            f"got {value}. Outside of it a scale would turn into 0 or inf."
        )
    return value


def power_of_two(call: str, name: str, value: Any) -> int:
    """Returns the exponent of `value`, a power of two that float32 holds."""
    value = normal_float32(call, name, value)
    mantissa, exponent = math.frexp(value)
    if mantissa != 0.5:
        raise ValueError(
            f"`{call}({name}=...)` must be a power of two, got {value}. For other scales it is "
            f"not known exactly what is lost: pass 2.0**{exponent - 1}."
        )
    return exponent - 1


def growth_factor(call: str, name: str, value: Any) -> float:
    """Returns `value` as a float above 1."""
    value = finite_number(call, name, value)
    if not value > 1:
        raise ValueError(
            f"`{call}({name}=...)` must be above 1, got {value}. It multiplies the scale: "
            "pass 2.0 to double it, or use `FixedLossScale` for a scale that does not grow."
        )
    return value


def backoff_factor(call: str, name: str, value: Any) -> float:
    """Returns `value` as a float between 0 and 1."""
    value = finite_number(call, name, value)
    if not 0 < value < 1:
        raise ValueError(
            f"`{call}({name}=...)` must lie between 0 and 1, got {value}. It multiplies the "
            "scale: pass 0.5 to halve it."
        )
    return value


def int32(call: str, name: str, value: Any, least: int = 1, unit: str = "steps") -> int:
    """Returns `value` as a Python int that is at least `least` and fits in an int32."""
    given = f"`{call}({name}=...)` must be an integer, at least {least}, got {value!r}"
    if isinstance(value, bool):
        raise ValueError(f"{given}. It counts {unit}.")
    try:
        value = operator.index(value)
    except TypeError:
        raise TypeError(f"{given}. It counts {unit}: pass an int.") from None
    if not least <= value <= jnp.iinfo(jnp.int32).max:
        raise ValueError(f"{given}. It is counted in an int32.")
    return value


def one_of(call: str, name: str, value: Any, choices: tuple[Any, ...]) -> Any:
    """Returns `value` if it equals one of `choices` and has the same type."""
    for choice in choices:
        if type(value) is type(choice) and value == choice:
            return choice
    raise ValueError(
        f"`{call}({name}=...)` must be one of {', '.join(map(repr, choices))}, got {value!r}."
    )


def with_article(word: str) -> str:
    """Returns a word after "a", or after "an" before a vowel."""
    return f"an {word}" if word[0] in "AEIOaeio" else f"a {word}"


def and_more(items: Sequence[Any], most: int) -> list[str]:
    """Returns the last word of a list that shows only `most` items: "and 3 more", or nothing."""
    return [f"and {len(items) - most} more"] if len(items) > most else []


def scalar_bool(call: str, name: str, value: Any) -> jax.Array:
    """Returns `value` as a `bool[]` array, or raises a `TypeError`."""
    is_bool = getattr(value, "dtype", type(value)) in (bool, jnp.bool_)
    if isinstance(value, type) or not is_bool or jnp.shape(value):
        raise TypeError(
            f"`{call}({name}=...)` must be a scalar bool, got {_kind(value)}. "
            "To reduce a tree of gradients to one, use `jaxscale.all_finite(grads)`."
        )
    return jnp.asarray(value, jnp.bool_)


def scalar_float32(call: str, name: str, value: Any) -> jax.Array:
    """Returns `value` as an `f32[]` array, or raises a `TypeError`."""
    dtype = getattr(value, "dtype", None)
    is_array = dtype is not None and jnp.issubdtype(dtype, jnp.floating) and value.shape == ()
    if not is_array and not isinstance(value, numbers.Real):
        raise TypeError(
            f"`{call}({name}=...)` must be a floating scalar, the largest absolute value among "
            f"the gradients, got {_kind(value)}. `update(state, grads)` finds it."
        )
    return jnp.asarray(value, jnp.float32)


def _kind(value: Any) -> str:
    if hasattr(value, "dtype") and not isinstance(value, type):
        return f"{value.dtype}{list(jnp.shape(value))}"
    return type(value).__name__
