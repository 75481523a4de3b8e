"""How numbers, tables and results are written, for people and for programs."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np


def percent(share: float) -> str:
    """Returns a share in percent: ``0%`` only if it is 0, and ``100%`` only if it is 1."""
    if share in (0, 1):
        return f"{share:.0%}"
    if share < 0.001:
        return "<0.1%"
    return ">99.9%" if share >= 0.9995 else f"{share:.1%}"


def power(loss_scale: float) -> str:
    """Returns a loss scale as ``2**k``, or as a decimal if it is no power of two."""
    mantissa, exponent = math.frexp(loss_scale)
    return f"2**{exponent - 1}" if mantissa == 0.5 else f"{loss_scale:g}"


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Returns a table for a terminal: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            [row[0].ljust(widths[0])]
            + [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        ).rstrip()
        for row in rows
    )


def to_json(result: Any) -> Any:
    """Returns a result of this module as what ``json.dumps`` accepts.

    Args:
      result: what any function of this module returned, outside of ``jit``, or a container
        of it. Of a :class:`History` pass ``history.columns()``.

    Returns:
      Named tuples and dataclasses as dictionaries; arrays and other sequences as lists;
      NaN and the infinities, which JSON lacks, as the texts ``"NaN"``, ``"Infinity"`` and
      ``"-Infinity"``, of which ``float`` makes the numbers again. No number is rounded.

    Raises:
      TypeError: if it holds something that is neither a number, a text nor a container.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxscale import diagnostics
      >>> counts = diagnostics.leaf_counts({"w": jnp.array([1.0, jnp.nan])})
      >>> diagnostics.to_json(diagnostics.table(counts))["rows"][0]["nan"]
      1
      >>> diagnostics.to_json(jnp.array([1.0, -jnp.inf]))
      [1.0, '-Infinity']
    """
    if hasattr(result, "_asdict"):
        result = result._asdict()
    if dataclasses.is_dataclass(result) and not isinstance(result, type):
        result = {each.name: getattr(result, each.name) for each in dataclasses.fields(result)}
    if isinstance(result, Mapping):
        return {str(key): to_json(value) for key, value in result.items()}
    if isinstance(result, (np.ndarray, np.generic, jax.Array)):
        result = np.asarray(result).tolist()
    if isinstance(result, (list, tuple)):
        return [to_json(value) for value in result]
    if isinstance(result, float) and not math.isfinite(result):
        return "NaN" if math.isnan(result) else "Infinity" if result > 0 else "-Infinity"
    if result is None or isinstance(result, (bool, int, float, str)):
        return result
    raise TypeError(
        f"`to_json(result=...)` got a {type(result).__name__}. Pass what `jaxscale.diagnostics` "
        "returns, or numbers, texts, lists and dictionaries."
    )
