"""The doctor as a function."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from .._trees.pytrees import Params, PyTree

if TYPE_CHECKING:
    from .._doctor.report import Report


def doctor(
    loss_fn: Callable[..., Any],
    params: Params,
    batch: PyTree,
    *,
    autocast: DTypeLike | None = None,
    loss_scale: float | None = None,
) -> "Report":
    """Examines a loss on its parameters and one batch: what is wrong in half precision, and where.

    This is what the command `jaxscale doctor` does. It runs the backward pass many times, each time
    with other lines in float32 and at another loss scale, which takes from seconds to a minute: use
    a small model and a small batch, and call it outside of `jit`.

    Args:
      loss_fn: the loss, `loss_fn(params, batch)`, or a pair of the loss and an auxiliary output:
        what you train with, without `loss_scaled`.
      params: the parameters. Floating and complex leaves are differentiated.
      batch: one batch.
      autocast: the format, such as `jnp.float16`, to examine the loss in under
        `jaxscale.autocast`. Without it the loss is examined as it is written.
      loss_scale: a power of two of at least 1. `None` for the largest that does not overflow on the
        batch.

    Returns:
      A report: `print` it for the text of the command. Its `findings` are a tuple, the problems
      first. Each has a `title`, `details`, the line as `where`, and `is_problem`. `to_json()`
      returns the text that `--json` prints, and `save_html(path)` writes the page, for which
      the extra `doctor` must be installed.

    Raises:
      ValueError: if the loss fails, or is not a floating number; if no parameter is floating; or if
        `loss_scale` is not a power of two of at least 1.
      TypeError: if `loss_scale` is not a number.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxscale import diagnostics
      >>> def loss_fn(w, x):
      ...     scores = x * w
      ...     return jnp.mean((scores * scores).astype(jnp.float32))
      >>> x = jnp.array([1.0, 2.0, 3.0, 400.0], jnp.float16)
      >>> report = diagnostics.doctor(loss_fn, jnp.float16(1.0), x)
      >>> problem = report.findings[0]
      >>> problem.is_problem, problem.title.partition(",")[0]
      (True, 'The loss is inf')
    """
    # It uses what stands beside this file, and few programs call it.
    from .._doctor.report import check_loss_scale, examine_target
    from .._doctor.target import make_target

    if loss_scale is not None:
        loss_scale = check_loss_scale("doctor", "loss_scale", loss_scale)
    dtype = None
    if autocast is not None:
        dtype = str(jnp.dtype(autocast))
    name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
    call = "`doctor(loss_fn, params, batch)`"
    target = make_target(name, call, loss_fn, params, batch)
    return examine_target(target, loss_scale, dtype)
