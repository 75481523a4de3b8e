"""The policies: how a loss scale starts and how it moves, and the short forms of them."""

import numbers

from .._went import SEE_PAGE
from .base import LossScale
from .dynamic import DynamicLossScale
from .fixed import FixedLossScale, NoOpLossScale
from .spikes import SpikeRule


def as_loss_scale(spec: object) -> LossScale:
    """Returns the policy that a short form stands for.

    Args:
      spec: `None` for `jaxscale.NoOpLossScale`, a Python or NumPy number such as 8 for
        `jaxscale.FixedLossScale`, `"dynamic"` for `jaxscale.DynamicLossScale` with its defaults,
        or a `jaxscale.LossScale`, which is returned as it is.

    Raises:
      TypeError: if `spec` is anything else, such as a bool or an array.
      ValueError: if it is another string, or a number that is not a valid scale.

    Example:
      >>> import jaxscale
      >>> jaxscale.as_loss_scale(8)
      FixedLossScale(loss_scale=8.0)
    """
    return read_loss_scale("as_loss_scale", spec)


def read_loss_scale(call: str, spec: object) -> LossScale:
    """Returns what `as_loss_scale` does, with errors in the name of `call`."""
    if spec is None:
        return NoOpLossScale()
    if isinstance(spec, LossScale):
        return spec
    if isinstance(spec, str) and spec == "dynamic":
        return DynamicLossScale()
    if isinstance(spec, numbers.Real) and not isinstance(spec, bool):
        return FixedLossScale(float(spec))
    error = ValueError if isinstance(spec, str) else TypeError
    hint = ""
    if isinstance(spec, str) and spec == "adaptive":
        hint = f' "adaptive" is {SEE_PAGE}'
    elif isinstance(spec, SpikeRule):
        hint = " A rule for spikes is not a loss scale: pass it as `spikes=`."
    elif isinstance(spec, type):
        hint = f" Did you mean `{spec.__name__}()`?"
    elif callable(spec):
        name = getattr(spec, "__name__", repr(spec))
        hint = f" It is a function: call it, as in `{name}()`, to get the policy that it makes."
    raise error(
        f"`{call}` got {spec!r} of type {type(spec).__name__}. A loss scale is "
        'given as None (no scaling), a number of at least 1 (fixed), "dynamic", or '
        "a `jaxscale.LossScale` such as `jaxscale.DynamicLossScale(growth_interval=500)`."
        f"{hint}"
    )
