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
from ._text import align_columns, join_ends, power

_CHUNK = 512  # steps that are fetched together, once there are that many later ones
_ROWS = 20  # of the text form


@functools.partial(jax.jit, static_argnames="dtypes")
def _pack(values: Sequence[Any], dtypes: Sequence[Any]) -> jax.Array:
    """Copies the bits of a step's numbers into one array: a donated state is soon overwritten."""
    bits = []
    for value, dtype in zip(values, dtypes, strict=True):
        number = jax.lax.convert_element_type(value, dtype)
        bits.append(jax.lax.bitcast_convert_type(number, jnp.uint32))
    return jnp.stack(bits)


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
        # the dtypes of a step's numbers, by their names
        self._dtypes: dict[str, Any] = {}
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
        of_state = _find_metrics(tree)
        of_user = extra
        if loss is not None:
            of_user = {"loss": loss, **extra}
        _check_scalars({"loss_scale": of_state["loss_scale"], **of_user})

        numbers = {}
        dtypes = {}
        for name, value in sorted({**of_state, **of_user}.items()):
            if jnp.shape(value):
                continue
            is_floating = jnp.issubdtype(jnp.result_type(value), jnp.floating)
            is_counter = name not in of_user and not is_floating
            numbers[name] = value
            dtypes[name] = np.int32 if is_counter else np.float32
        self._check_names(dtypes)
        self._dtypes = dtypes
        self._on_device.append(_pack(list(numbers.values()), tuple(dtypes.values())))
        if len(self._on_device) >= 2 * _CHUNK:
            # The device is done with the oldest. Thousands of small arrays would pile up there.
            self._fetch(_CHUNK)

    def _check_names(self, dtypes: dict[str, Any]) -> None:
        """Raises a `ValueError` unless a step has the numbers that the steps before have."""
        if not self._dtypes:
            return
        differing = dict(dtypes.items() ^ self._dtypes.items())
        if differing:
            names = ", ".join(sorted(differing))
            raise ValueError(
                "`History.append` must be given the same names at each step; only some steps had "
                f"{names}."
            )

    def _fetch(self, steps: int) -> None:
        """Fetches the oldest steps that are still on the device."""
        oldest = self._on_device[:steps]
        self._on_device = self._on_device[steps:]
        self._on_host.append(np.stack(jax.device_get(oldest)))

    def columns(self) -> dict[str, np.ndarray]:
        """Returns what was appended: under each name an array over the steps, counters as int32."""
        if self._on_device:
            self._fetch(len(self._on_device))
        columns = {}
        for index, (name, dtype) in enumerate(self._dtypes.items()):
            bits = np.concatenate([part[:, index] for part in self._on_host])
            columns[name] = bits.view(dtype)
        return columns

    def plot(self) -> Any:
        """Returns a `matplotlib.figure.Figure` of loss, loss scale and skipped steps over time.

        Raises:
          ImportError: if matplotlib is not installed.
          ValueError: if nothing was appended.
        """
        columns = self.columns()
        if not columns:
            raise ValueError(
                "`History.plot` has nothing to draw: `append` was not called."
            )
        return plot_run(
            steps=_number_steps(columns),
            loss=columns.get("loss"),
            loss_scale=columns["loss_scale"],
            skipped=_count_skipped(columns),
        )

    def __str__(self) -> str:
        columns = self.columns()
        if not columns:
            return "no steps"
        steps = _number_steps(columns)
        skipped = _count_skipped(columns)
        scales = columns["loss_scale"]
        parts = np.array_split(np.arange(len(steps)), min(_ROWS, len(steps)))
        table = {"steps": [_format_steps(steps[part]) for part in parts]}
        if "loss" in columns:
            table["loss"] = [_format_losses(columns["loss"][part]) for part in parts]
        table["loss scale"] = [_format_scales(scales[part], "-") for part in parts]
        if skipped is not None:
            skipped_by_then = [skipped[part[-1]] for part in parts]
            table["skipped"] = list(map(str, np.diff(skipped_by_then, prepend=0)))
        rows = zip(*table.values(), strict=True)

        summary = f"steps {steps[0]} to {steps[-1]}: "
        if skipped is not None:
            summary += f"{skipped[-1]} skipped, "
        summary += "the loss scale "
        if not np.all(scales == scales[0]):
            summary += "from "
        summary += _format_scales(scales, " to ")
        return f"{summary}\n{align_columns([list(table), *rows])}"


def _find_metrics(tree: Any) -> Mapping[str, Any]:
    """Returns the metrics in a tree, which may be those that `jaxscale.metrics` returned."""
    values = tree
    if not (isinstance(tree, Mapping) and "loss_scale" in tree):
        values = metrics(tree)
    if isinstance(values["loss_scale"], Tracer):
        raise TypeError(
            "`History.append` keeps arrays, so it cannot run inside `jit`. Call it on the "
            "state, or on the `jaxscale.metrics`, that the step returns."
        )
    return values


def _check_scalars(values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if jnp.shape(value):
            raise ValueError(
                f"`History.append` takes scalars, got `{name}` of shape {jnp.shape(value)}. "
                "Keep one `History` for each run or device."
            )


def _number_steps(columns: Mapping[str, np.ndarray]) -> np.ndarray:
    """Returns the number of each step: that of the run, or from 1 on if it is not known."""
    if "total_steps" in columns:
        return columns["total_steps"]
    return np.arange(1, len(columns["loss_scale"]) + 1)


def _count_skipped(columns: Mapping[str, np.ndarray]) -> np.ndarray | None:
    """Returns how many steps were skipped up to each step, from the first that was appended on."""
    if "step_applied" not in columns:
        return None
    is_skipped = 1 - columns["step_applied"]
    if "total_notfinite" not in columns:
        return np.cumsum(is_skipped)
    total = columns["total_notfinite"]
    skipped_before = total[0] - is_skipped[0]
    return total - skipped_before


def _format_steps(steps: np.ndarray) -> str:
    return join_ends(str(steps[0]), str(steps[-1]), "-")


def _format_losses(losses: np.ndarray) -> str:
    finite = losses[np.isfinite(losses)]
    if not finite.size:
        return "not finite"
    return f"{finite.mean():.4g}"


def _format_scales(scales: np.ndarray, between: str) -> str:
    return join_ends(power(float(scales.min())), power(float(scales.max())), between)
