"""The rules of other loss scalers under their own argument names.

If you come from another loss scaler, keep the behaviour with which your run was tuned:
`jaxscale.loss_scaled(optimizer, jaxscale.presets.torch(growth_interval=500))`. Each function takes
the arguments of one library and returns a policy; its docstring says where the rule comes from and
what differs. Most return a `PresetLossScale`, a `jaxscale.DynamicLossScale` with switches. All
raise a `ValueError` if an argument is out of range, and a `TypeError` if its type is wrong; the
error names the argument as the library does.

>>> from jaxscale import presets
>>> presets.flax(growth_interval=2000).growth_interval  # Flax counts one less than it takes
2001

The tests replay, step by step, what 14 versions of these scalers did.

Arguments have the names and defaults of the library. Docstrings explain those that are not here:

- `init_scale`, `initial_scale`, `init_loss_scale`, `initial_loss_scale`, `loss_scale`, `scale`:
  the scale of the first step;
- `growth_interval`, `scale_window`, `incr_every_n_steps`, `dynamic_growth_steps`, `period`: how
  many finite steps in a row it takes to grow;
- `growth_factor`, `incr_ratio`: the scale is multiplied by this when it grows;
- `backoff_factor`, `decr_ratio`: the scale is multiplied by this when it backs off;
- `factor`, `scale_factor`, `multiplier`: a growth multiplies the scale by this, and a backoff
  divides it;
- `min_scale`, `minimum_scale`, `min_loss_scale`: a backoff ends at least here; `None` and 0 mean no
  minimum;
- `hysteresis`, `delayed_shift`, `decr_every_n_nan_or_inf`: how many non-finite steps it takes to
  back off;
- `enabled`: if it is `False`, nothing is scaled.

A preset has the rule of its library, but not these defects. If no test is named, the traces in
`tests/presets/traces` show them:

===================================  ==================================================
library                              defect
===================================  ==================================================
PyTorch, Keras 3                     no floor: the scale reaches 0 (tag
                                     `subnormal_or_zero`), and NaN is applied
Keras 3, Megatron-LM                 no cap: the scale becomes inf and stays (tag
                                     `nonfinite_scale`)
Flax, PyTorch, Keras 3, Apex         a counter restored beyond the interval never grows
                                     (tag `restored`); here it does at once:
                                     `test_a_tracker_restored_beyond_the_interval_grows_at_once`
jmp                                  the minimum is lost in any `jit` (mode `jit`)
DeepSpeed                            raises at the floor; here `jaxscale.check` does, if it
                                     is called
`optax.apply_if_finite`              applies the NaN in the end; here no step does:
                                     `test_steps_are_skipped_as_in_optax`
===================================  ==================================================

One preset keeps a defect, because it is part of the rule: the cap of `flax` is not a power of two,
so a scale that has reached it rounds what it scales. The cap of `jaxscale.DynamicLossScale` is a
power of two.

What a library saved of its scale is read in three lines, which the page *Coming from PyTorch AMP*
has.
"""

import typing as _typing

from .._went import missing_name as _missing_name
from ._rule import PresetLossScale
from ._systems import (
    apex,
    apex_fp16_utils,
    apex_hysteresis,
    deepspeed,
    flax,
    jmp,
    keras,
    megatron,
    tensorflow,
    tensorflow_contrib,
    tf_keras,
    torch,
)

__all__ = [
    "PresetLossScale", "apex", "apex_fp16_utils", "apex_hysteresis", "deepspeed", "flax", "jmp",
    "keras", "megatron", "tensorflow", "tensorflow_contrib", "tf_keras", "torch",
]  # fmt: skip

# hidden from type checkers, which would take any name for one that it knows
if not _typing.TYPE_CHECKING:

    def __getattr__(name):
        raise _missing_name(__name__, name)
