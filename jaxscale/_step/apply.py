"""Update and apply in one skip: `apply_gradients`."""

from collections.abc import Mapping
from typing import Any, TypeVar

import optax

from .._gradients.scaled import Scaled
from .._gradients.value_and_grad import BackwardPass
from .._trees.pytrees import Grads
from .._went import refuse_gone
from .bare_optimizer import as_optimizer
from .checks import check_gradients
from .train_step import apply_pass

_Params = TypeVar("_Params")
_State = TypeVar("_State")


def apply_gradients(
    tx: optax.GradientTransformation,
    grads: Grads,
    opt_state: _State,
    params: _Params,
    **extra_args: Any,
) -> tuple[_Params, _State]:
    """Applies gradients: returns the parameters and the optimizer state after one step.

    This is the same as `tx.update` followed by `optax.apply_updates`, to rounding. If `tx` is a
    `loss_scaled` optimizer, both are skipped together, so no updates are stored.

    A leaf of any kind stays as it is if its gradient is `None`. `equinox.filter_grad` returns
    `None` for functions, text and integers. The optimizer sees `None` for such a leaf. Integers and
    typed keys with `float0` gradients stay if the optimizer passes these gradients on, as
    `optax.masked` does. A leaf whose update is `None` also stays.

    Args:
      tx: the optimizer.
      grads: the gradients, with the structure of `params`, or `None` for a leaf.
      opt_state: the state of `tx`. For an Equinox module `model`, make it with
        `tx.init(equinox.filter(model, equinox.is_inexact_array))`.
      params: the parameters.
      **extra_args: passed to `tx.update`: `value=loss` and so on.

    Returns:
      The new parameters, with the shapes and dtypes of `params`, and the new state. After a
      skipped step the parameters are the old ones, bit for bit.

    Warns:
      UserWarning: if `tx` has a `loss_scaled` optimizer inside of another one.

    Raises:
      TypeError: if `tx` is not a gradient transformation, or if `opt_state` is not its state.
      ValueError: if `grads` has another structure or other shapes than `params`, or if `opt_state`
        is that of other parameters.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> import jaxscale
      >>> tx = jaxscale.loss_scaled(optax.sgd(0.5))
      >>> params = jnp.array(1.0)
      >>> opt_state = tx.init(params)
      >>> for grad in [jnp.array(1.0), jnp.array(jnp.inf)]:
      ...     params, opt_state = jaxscale.apply_gradients(tx, grad, opt_state, params)
      ...     print(params, opt_state.step_applied)
      0.5 True
      0.5 False
    """
    refuse_gone("apply_gradients", extra_args)
    order = "(tx, grads, opt_state, params)"
    value = extra_args.pop("value", extra_args.get("loss"))
    return apply_once(
        "apply_gradients", tx, grads, opt_state, params, value, extra_args, order
    )


def apply_once(
    call: str,
    tx: Any,
    grads: Grads,
    opt_state: Any,
    params: Any,
    value: object,
    extra_args: Mapping[str, Any],
    order: str = "",
) -> tuple[Any, Any]:
    """Makes one step of an optimizer, in the name of a `call`."""
    optimizer = as_optimizer(call, tx)
    state = optimizer.enter(f"{call}(opt_state=...)", opt_state, order)
    check_gradients(f"{call}(grads=...)", grads, params)
    optimizer.check_same(f"{call}(opt_state=...)", state, params)
    backward_pass = BackwardPass(Scaled(grads), loss=value)
    made = apply_pass(optimizer, backward_pass, state, params, extra_args)
    return made.params, made.opt_state
