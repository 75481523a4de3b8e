"""Loss scaling for JAX and Optax: train in float16, and never apply a bad step."""

from ._accumulate import MultiStepsState as MultiStepsState
from ._apply_gradients import apply_gradients as apply_gradients
from ._check import LossScaleStuckError as LossScaleStuckError
from ._check import check as check
from ._dynamic import DynamicLossScale as DynamicLossScale
from ._finite import all_finite as all_finite
from ._fixed import FixedLossScale as FixedLossScale
from ._fixed import NoOpLossScale as NoOpLossScale
from ._loss_scale import LossScale as LossScale
from ._loss_scaled import loss_scaled as loss_scaled
from ._loss_scaled import multi_steps as multi_steps
from ._loss_scaled import skip_nonfinite as skip_nonfinite
from ._report import metrics as metrics
from ._scaling import scale as scale
from ._scaling import unscale as unscale
from ._spec import as_loss_scale as as_loss_scale
from ._state import LossScaleState as LossScaleState
from ._state_dict import from_state_dict as from_state_dict
from ._state_dict import to_state_dict as to_state_dict
from ._step import LossScaledState as LossScaledState
from ._tree import tree_where as tree_where
from ._value_and_grad import grad as grad
from ._value_and_grad import value_and_grad as value_and_grad

__version__ = "0.1.0"
