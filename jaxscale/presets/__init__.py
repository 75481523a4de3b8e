"""Every peer's rule under its own argument names, and what the peers saved.

Who comes from another loss scaler keeps the behaviour their run was tuned with:
`jaxscale.loss_scaled(optimizer, jaxscale.presets.torch(growth_interval=500))`. Each
function takes the arguments of one peer and returns a policy; its docstring says where
the rule is from and what differs. The tests replay what the peers did, step by step,
from the files in `tests/traces`:

=========================================  ==========================================
file                                       preset
=========================================  ==========================================
apex_amp_loss_scaler                       `apex`
apex_fp16_utils_dynamic_loss_scaler        `apex_fp16_utils`
apex_update_scale_hysteresis               `apex_hysteresis`
colossalai_dynamic_grad_scaler             `colossalai`
deepspeed_dynamic_loss_scaler              `deepspeed`
fairseq_dynamic_loss_scaler                `fairseq`
flax_dynamic_scale                         `flax`
jmp_dynamic_loss_scale                     `jmp`
keras3_loss_scale_optimizer_jax            `keras`
keras3_loss_scale_optimizer_tensorflow     `keras`
megatron_dynamic_grad_scaler               `megatron`
mindspore_dynamic_loss_scale_manager       `mindspore_manager`
mindspore_dynamic_loss_scale_update_cell   `mindspore_cell`
mindspore_dynamic_loss_scaler              `mindspore`
mpx_dynamic_loss_scaling                   `mpx`
openseq2seq_backoff                        `openseq2seq_backoff`
openseq2seq_logmax                         `openseq2seq_logmax`
optax_apply_if_finite                      `jaxscale.skip_nonfinite`
optax_multisteps_skip_not_finite           `jaxscale.skip_nonfinite` of `MultiSteps`
paddle_grad_scaler                         `paddle`
paddle_update_loss_scaling_op              `paddle_op`
tf1_contrib_exponential_update             `tensorflow_contrib`
tf_compat_v1_dynamic_loss_scale            `tensorflow`
tf_keras_loss_scale_optimizer              `tf_keras`
torch_grad_scaler                          `torch`
torch_grad_scaler_two_optimizers           `torch`
=========================================  ==========================================

The rule is the peer's; its defects are not. What is not reproduced, each seen in its
traces or in a test of `test_user_reports.py`:

===================================  ==================================================
peer                                 defect, and where it shows
===================================  ==================================================
PyTorch, Keras 3, Paddle             no floor: the scale reaches 0 (tag
                                     `subnormal_or_zero`), and NaN is applied
Keras 3, Megatron-LM, Paddle         no cap: the scale becomes inf and stays (tag
                                     `nonfinite_scale`)
Flax, MPX                            the cap is no power of two: unscaling rounds for ever
                                     after (`test_every_scale_is_a_power_of_two...`)
Flax, PyTorch, Keras 3, Apex         a counter restored beyond the interval never grows
                                     (`test_a_tracker_restored_beyond_the_interval...`)
jmp                                  the minimum is lost in any `jit`
                                     (`test_min_scale_survives_jit`)
MPX                                  gradients are unscaled by the next scale
                                     (`test_unscale_uses_forward_scale`)
DeepSpeed, fairseq, MindSpore        raise at the floor or after many skips, where
                                     `jaxscale.check` does, if it is called
OpenSeq2Seq's LogMax                 the units of a non-finite step, and NaN after an
                                     all-zero gradient (see `openseq2seq_logmax`)
`optax.apply_if_finite`            applies the NaN in the end
                                     (`test_no_update_is_nan_inf_or_scaled`)
===================================  ==================================================

The functions `from_...` read what a peer saved, or a live object of it, and return a
policy and a state; put the state into `opt_state._replace(scaling=state)`.
"""

from .._policies.logmax import LogMaxLossScale as LogMaxLossScale
from .._policies.logmax import LogMaxState as LogMaxState
from .._policies.tolerance import ToleranceLossScale as ToleranceLossScale
from .._policies.tolerance import ToleranceState as ToleranceState
from ._engines import colossalai as colossalai
from ._engines import deepspeed as deepspeed
from ._engines import fairseq as fairseq
from ._jax import flax as flax
from ._jax import jmp as jmp
from ._jax import mpx as mpx
from ._mindspore import mindspore as mindspore
from ._mindspore import mindspore_cell as mindspore_cell
from ._mindspore import mindspore_manager as mindspore_manager
from ._paddle import paddle as paddle
from ._paddle import paddle_op as paddle_op
from ._saved import from_flax as from_flax
from ._saved import from_jmp as from_jmp
from ._saved import from_keras as from_keras
from ._saved import from_tensorflow as from_tensorflow
from ._saved import from_torch as from_torch
from ._saved import to_torch as to_torch
from ._tensorflow import keras as keras
from ._tensorflow import openseq2seq_backoff as openseq2seq_backoff
from ._tensorflow import openseq2seq_logmax as openseq2seq_logmax
from ._tensorflow import tensorflow as tensorflow
from ._tensorflow import tensorflow_contrib as tensorflow_contrib
from ._tensorflow import tf_keras as tf_keras
from ._torch import apex as apex
from ._torch import apex_fp16_utils as apex_fp16_utils
from ._torch import apex_hysteresis as apex_hysteresis
from ._torch import megatron as megatron
from ._torch import torch as torch
