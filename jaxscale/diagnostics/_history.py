"""The metrics of a run, kept on the device and fetched when they are shown.

`append` must not wait for the device, or each step would wait for the one before it. It copies the
metrics into one small array on the device. Once many steps have gone by, `History` fetches the
oldest, which are long done, so that not too many arrays are kept.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from .._progress import metrics
from ._pictures import plot_run
from ._text import aligned, power, span

_CHUNK = 512  # steps that are fetched together, once there are that many later ones
_ROWS = 20  # of the text form


@functools.partial(jax.jit, static_argnames="dtypes")
def _pack(values: Sequence[Any], dtypes: Sequence[Any]) -> jax.Array:
    """Returns the bits of a step's numbers, copied: those of a donated state are gone soon."""
    numbers = map(jax.lax.convert_element_type, values, dtypes)
    return jnp.stack([jax.lax.bitcast_convert_type(number, jnp.uint32) for number in numbers])


class History:
    """The metrics of a run, step by step: `append` them, then `print` or `plot`.

    `append` leaves the numbers on the device and does not wait. `print`, `plot` and `columns` do.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> import jaxscale
      >>> from jaxscale import diagnostics
      >>> tx = jaxscale.loss_scaled(optax.sgd(0.1))
      >>> params = jnp.ones(2)
      >>> opt_state, history = tx.init(params), diagnostics.History()
      >>> for grad, loss in [(1.0, 3.0), (jnp.inf, 2.5), (1.0, 2.0)]:
      ...     _, opt_state = tx.update(jnp.full(2, grad), opt_state, params)
      ...     history.append(opt_state, loss=loss)
      >>> print(history)
      steps 1 to 3: 1 skipped, the loss scale from 2**14 to 2**15
      steps  loss  loss scale  skipped
      1         3       2**15        0
      2       2.5       2**14        1
      3         2       2**14        0
    """

    def __init__(self) -> None:
        self._dtypes: dict[str, Any] = {}  # those of the numbers of a step, by their names
        self._on_device: list[jax.Array] = []
        self._on_host: list[np.ndarray] = []

    def __len__(self) -> int:
        return sum(map(len, self._on_host)) + len(self._on_device)

    def append(self, tree: Any, *, loss: Any = None, **extra: Any) -> None:
        """Records one more step.

        Args:
          tree: what `jaxscale.metrics` accepts, such as the `opt_state` that the step returned, or
            the dictionary that `jaxscale.metrics` returned. The arrays are copied, so the state may
            be donated to the next step.
          loss: the loss of that step, a scalar.
          **extra: other scalars under their own names, such as the learning rate.

        Raises:
          ValueError: if `tree` holds no loss scale, or several, or those of several runs; if the
            names are not those of the first step.
          TypeError: if it is called inside `jit`.
        """
        is_metrics = isinstance(tree, Mapping) and "loss_scale" in tree
        values = dict(tree) if is_metrics else metrics(tree)
        if isinstance(values["loss_scale"], Tracer):
            raise TypeError(
                "`History.append` keeps arrays, so it cannot run inside `jit`. Call it on the "
                "state, or on the `jaxscale.metrics`, that the step returns."
            )
        given = extra if loss is None else {"loss": loss, **extra}
        for name, value in {"loss_scale": values["loss_scale"], **given}.items():
            if jnp.shape(value):
                raise ValueError(
                    f"`History.append` takes scalars, got `{name}` of shape {jnp.shape(value)}. "
                    "Keep one `History` for each run or device."
                )
        everything = sorted((values | given).items())
        numbers = {name: value for name, value in everything if jnp.shape(value) == ()}
        dtypes: dict[str, Any] = dict.fromkeys(numbers, np.float32)
        for name in numbers.keys() - given.keys():
            if not jnp.issubdtype(jnp.result_type(numbers[name]), jnp.floating):
                dtypes[name] = np.int32
        if some := {name for name, _ in dtypes.items() ^ (self._dtypes or dtypes).items()}:
            raise ValueError(
                "`History.append` must be given the same names at each step; only some steps had "
                f"{', '.join(sorted(some))}."
            )
        self._dtypes = dtypes
        self._on_device.append(_pack(list(numbers.values()), tuple(dtypes.values())))
        if len(self._on_device) >= 2 * _CHUNK:
            # The oldest: the device is done with them. Thousands of small arrays would pile up.
            self._fetch(_CHUNK)

    def _fetch(self, steps: int) -> None:
        some, self._on_device = self._on_device[:steps], self._on_device[steps:]
        self._on_host.append(np.stack(jax.device_get(some)))

    def columns(self) -> dict[str, np.ndarray]:
        """Returns what was appended: under each name an array over the steps, counters as int32."""
        if self._on_device:
            self._fetch(len(self._on_device))
        return {
            name: np.concatenate([part[:, i] for part in self._on_host]).view(dtype)
            for i, (name, dtype) in enumerate(self._dtypes.items())
        }

    def plot(self) -> Any:
        """Returns a `matplotlib.figure.Figure` of loss, loss scale and skipped steps over time.

        Raises:
          ImportError: if matplotlib is not installed.
          ValueError: if nothing was appended.
        """
        columns = self.columns()
        if not columns:
            raise ValueError("`History.plot` has nothing to draw: `append` was not called.")
        steps, skipped = _count(columns)
        return plot_run(steps, columns.get("loss"), columns["loss_scale"], skipped)

    def __str__(self) -> str:
        columns = self.columns()
        if not columns:
            return "no steps"
        steps, skipped = _count(columns)
        scales, rows = columns["loss_scale"], []
        for part in np.array_split(np.arange(len(steps)), min(_ROWS, len(steps))):
            first, last = part[0], part[-1]
            row = {"steps": span(str(steps[first]), str(steps[last]), "-")}
            if "loss" in columns:
                finite = columns["loss"][part][np.isfinite(columns["loss"][part])]
                row["loss"] = f"{finite.mean():.4g}" if finite.size else "not finite"
            row["loss scale"] = _format_scales(scales[part], "-")
            if skipped is not None:
                row["skipped"] = f"{skipped[last] - (skipped[first - 1] if first else 0)}"
            rows.append(row)
        known = "" if skipped is None else f"{skipped[-1]} skipped, "
        head = f"steps {steps[0]} to {steps[-1]}: {known}the loss scale "
        head += ("" if np.all(scales == scales[0]) else "from ") + _format_scales(scales, " to ")
        return f"{head}\n{aligned([list(rows[0]), *(list(row.values()) for row in rows)])}"


def _count(columns: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray | None]:
    """Returns the number of each step, from 1 on, and how many were skipped since the first."""
    steps = columns.get("total_steps", np.arange(1, len(columns["loss_scale"]) + 1))
    if "step_applied" not in columns:
        return steps, None
    bad = 1 - columns["step_applied"]
    total = columns.get("total_notfinite", np.cumsum(bad))
    return steps, total - total[0] + bad[0]


def _format_scales(scales: np.ndarray, between: str) -> str:
    return span(power(float(scales.min())), power(float(scales.max())), between)
