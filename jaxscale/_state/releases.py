"""Pickles that earlier releases wrote. They name a class, and hold its fields by their places.

So classes stay where they are, and a new field comes last and has a default.
"""

import functools
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

_State = TypeVar("_State", bound=type)


def upgrades(
    upgrade: Callable[[tuple[Any, ...]], tuple[Any, ...]],
) -> Callable[[_State], _State]:
    """Returns a decorator of a named tuple that may be made of the fields of an earlier release.

    `upgrade` gets the fields that the tuple is made of, by their places, and returns today's.
    """

    def decorate(cls: _State) -> _State:
        new: Any = cls.__new__

        @functools.wraps(new)
        def make(cls: Any, *fields: Any, **named: Any) -> Any:
            return new(cls, *upgrade(fields), **named)

        changed: Any = cls
        changed.__new__ = make
        return cls

    return decorate


def refuse_0_1(name: str) -> NoReturn:
    """Raises an error for a class whose place in 0.1 a pickle names, or that never was there."""
    if name not in ("LossScaledState", "LossScaleState"):
        raise AttributeError(f"There is no {name} here.")
    raise ImportError(
        f"This pickle is of jaxscale 0.1, whose {name} had other fields. With that version, save "
        "`jaxscale.to_state_dict(state)`; this one reads it by "
        "`jaxscale.from_state_dict(tx.init(params), saved)`."
    )
