"""Loss scaling for JAX and Optax: train in float16, and never apply a bad step."""

from ._accumulate import MultiStepsState as MultiStepsState
from ._optimizer import apply_gradients as apply_gradients
from ._optimizer import loss_scaled as loss_scaled
from ._optimizer import multi_steps as multi_steps
from ._optimizer import skip_nonfinite as skip_nonfinite
from ._policies.base import LossScale as LossScale
from ._policies.dynamic import DynamicLossScale as DynamicLossScale
from ._policies.fixed import FixedLossScale as FixedLossScale
from ._policies.fixed import NoOpLossScale as NoOpLossScale
from ._policies.spec import as_loss_scale as as_loss_scale
from ._progress import LossScaleStuckError as LossScaleStuckError
from ._progress import check as check
from ._progress import metrics as metrics
from ._scaling import scale as scale
from ._scaling import unscale as unscale
from ._state import LossScaleState as LossScaleState
from ._state_dict import from_state_dict as from_state_dict
from ._state_dict import to_state_dict as to_state_dict
from ._step import LossScaledState as LossScaledState
from ._tree import tree_where as tree_where
from ._value_and_grad import grad as grad
from ._value_and_grad import value_and_grad as value_and_grad
from ._verdict import all_finite as all_finite

__version__ = "0.1.0"
