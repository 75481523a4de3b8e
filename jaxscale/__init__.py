"""Loss scaling for JAX and Optax: train in float16, and never apply a bad step.

Most people need four functions, in this order:

- `loss_scaled(optimizer)` wraps an optimizer, so that it skips bad steps and moves the loss scale.
- `train_step(loss_fn, optimizer)` makes the whole step: loss, gradients, update or skip.
- `metrics(opt_state)` reads the loss scale and the counters, for logging.
- `check(opt_state)` raises an error with the likely cause if training is stuck.

The rest, by group:

- In a step of your own: `value_and_grad(loss_fn, opt_state)` computes the loss and its gradients
  with a scaled backward pass, and `apply_gradients(tx, grads, opt_state, params)` updates or skips.
  `grad` is `value_and_grad` without the loss.
- In a step that is not yours to edit, such as a trainer's: `scale_backward(fun)` scales the
  backward pass of a loss or a model. It has no state, and no `metrics`.
- Optimizers: `skip_nonfinite` skips bad steps without scaling, for bfloat16 and float32.
  `multi_steps` accumulates several micro-batches for each step.
- Half-precision parameters: `master_weights` makes bfloat16 and float16 weights learn as float32
  ones do, for 2 bytes a parameter; `stochastic_rounding` makes them learn for none.
  `master_params` reads the float32 parameters, and `with_master_params` starts from them.
  `compact_state` keeps the state of an optimizer in bfloat16, in half of its bytes.
- Precision: `autocast` computes matrix products in float16 without touching the model. Leave it
  out if the model does its own casting, as Flax layers with `dtype=` do. `full_precision` exempts a
  part of a model, and `half_precision` casts for a kernel that takes half precision alone.
- Policies, the rules by which the scale moves: `DynamicLossScale`, the default;
  `FixedLossScale`, `NoOpLossScale`, their base class `LossScale`, for rules of your own, and
  `as_loss_scale`, which reads short forms such as `"dynamic"` or 128. `jaxscale.presets` has the
  rules of other libraries.
- Spikes: `SpikeRule` also skips finite steps whose loss or gradient norm stands out.
- Pure functions for your own loop: `scale`, `unscale`, `all_finite`, `tree_where`.
- Saving: `to_state_dict` and `from_state_dict`.
- States: `LossScaledState` is that of an optimizer, `LossScaleState` that of a policy,
  `MultiStepsState` that of an accumulator, and `SpikeState` that of a `SpikeRule`.
- Errors: `LossScaleStuckError`, which `check` raises.
- Front ends: `jaxscale.flax` has a `TrainState` and a `train_step` for Linen, and `jaxscale.nnx` a
  `train_step` for NNX. Equinox needs none.
- Diagnostics: `jaxscale.diagnostics.doctor` says where a model overflows and what underflows, and
  so does the command `jaxscale doctor`; `jaxscale.diagnostics.sizes` says it of gradients.

## What float16 loses, and what to do about it

float16 ends at 65504, and half of its smallest number, 2**-24, rounds to 0:

>>> import jax, jax.numpy as jnp, jaxscale
>>> jnp.array([65519.0, 65520, 2**-24, 2**-25]).astype(jnp.float16).tolist()
[65504.0, inf, 5.960464477539063e-08, 0.0]

The forward pass can overflow: in squares, long sums and exponentials. A loss scale does not help
there: `autocast` keeps such operations in float32. The backward pass can underflow: the gradient of
a mean over a million numbers begins at 1e-6, and each layer multiplies it by something small. But a
backward pass is linear, so the loss is multiplied by a power of two, which rounds nothing, and the
gradients are divided by the same number in float32:

>>> def loss_fn(w):  # its derivative is 2**-30
...     return jnp.float32(2**-10) * (w.astype(jnp.float16) * jnp.float16(2**-20))
>>> w = jnp.float32(1)
>>> float(jax.grad(loss_fn)(w)) * 2**30
0.0
>>> float(jaxscale.grad(loss_fn, jaxscale.FixedLossScale(2**15).init())(w)) * 2**30
1.0

Too large a scale makes the gradients inf or NaN. The step is then skipped and the scale is lowered.
That is how the right scale is found, so one skip in thousands of steps is not a fault. If there is
a fault, `check` says what it is, and `jaxscale doctor` names the line. bfloat16 has the range of
float32, so it needs no scale, only `skip_nonfinite`.

- Try the default rule first. Pass a number, such as 128, if you know that it fits.
- With `retries=10`, `train_step` loses no batch to a scale that is too high. Each overflow costs
  one more backward pass.
- `SpikeRule` skips single bad batches in any precision. It does not replace `max_norm`, which
  clips, or a lower learning rate. If it skips more than one step in 20, spikes are how the run
  behaves.
"""

import importlib as _importlib
import importlib.util as _util
import typing as _typing

from ._gradients.scaled import scale, unscale
from ._gradients.value_and_grad import grad, value_and_grad
from ._gradients.verdict import all_finite
from ._policies import as_loss_scale
from ._policies.base import LossScale
from ._policies.dynamic import DynamicLossScale
from ._policies.fixed import FixedLossScale, NoOpLossScale
from ._policies.spikes import SpikeRule
from ._progress import LossScaleStuckError, check, metrics
from ._state.optimizer import LossScaledState, MultiStepsState, SpikeState
from ._state.scale import LossScaleState
from ._state.state_dict import from_state_dict, to_state_dict
from ._step.apply import apply_gradients
from ._step.half_precision import compact_state, master_weights, stochastic_rounding
from ._step.train_step import train_step
from ._step.transformations import loss_scaled, multi_steps, skip_nonfinite
from ._storage.master_params import master_params, with_master_params
from ._trees.selection import tree_where
from ._went import missing_name as _missing_name

# A group a line, in the order of the docstring and of the API reference.
__all__ = [  # noqa: RUF022
    "loss_scaled", "train_step", "metrics", "check",
    "value_and_grad", "apply_gradients", "grad",
    "scale_backward",
    "skip_nonfinite", "multi_steps",
    "master_weights", "stochastic_rounding", "master_params", "with_master_params",
    "compact_state",
    "autocast", "full_precision", "half_precision",
    "DynamicLossScale", "FixedLossScale", "NoOpLossScale", "LossScale",
    "as_loss_scale",
    "SpikeRule",
    "scale", "unscale", "all_finite", "tree_where",
    "to_state_dict", "from_state_dict",
    "LossScaledState", "LossScaleState", "MultiStepsState", "SpikeState",
    "LossScaleStuckError",
    "diagnostics", "presets",
]  # fmt: skip
# `from jaxscale import *` and `help` read each of them
if _util.find_spec("flax") is not None:
    __all__ += ["flax", "nnx"]

__version__ = "0.6.0"

if _typing.TYPE_CHECKING:
    from . import diagnostics as diagnostics
    from . import flax as flax
    from . import nnx as nnx
    from . import presets as presets
    from ._autocast.api import autocast as autocast
    from ._autocast.api import full_precision as full_precision
    from ._autocast.api import half_precision as half_precision
    from ._backward.scale_backward import scale_backward as scale_backward
# hidden from type checkers, which would take any name for one that `__getattr__` knows
else:
    _MODULES = ("diagnostics", "flax", "nnx", "presets")
    # What rewrites programs, which a training step does without, and where it is.
    _FUNCTIONS = {
        "autocast": "._autocast.api",
        "full_precision": "._autocast.api",
        "half_precision": "._autocast.api",
        "scale_backward": "._backward.scale_backward",
    }

    def __getattr__(name):
        """Returns what is imported when it is first used, so that the core stays light."""
        if name in _MODULES:
            return _importlib.import_module(f".{name}", __name__)
        if name in _FUNCTIONS:
            return getattr(_importlib.import_module(_FUNCTIONS[name], __name__), name)
        raise _missing_name(__name__, name)

    def __dir__():
        """Returns the public names, those of modules that are not imported yet among them."""
        return sorted(__all__)
