"""Update and apply in one skip: `apply_gradients`."""

from collections.abc import Mapping
from typing import Any, TypeVar, overload

import optax

from .._gradients.scaled import Scaled
from .._trees.pytrees import Grads, OptState, Params
from .._trees.selection import select_new
from .backward_pass import Pass
from .bare_optimizer import as_optimizer
from .checks import is_pair
from .matching_trees import check_gradients
from .step_plan import MadeStep, apply_pass

_Params = TypeVar("_Params")
_State = TypeVar("_State")
_Kept = TypeVar("_Kept")


@overload
def apply_gradients(
    tx: optax.GradientTransformation,
    grads: Grads,
    opt_state: _State,
    params: _Params,
    *,
    keep: None = None,
    **extra_args: Any,
) -> tuple[_Params, _State]: ...
@overload
def apply_gradients(
    tx: optax.GradientTransformation,
    grads: Grads,
    opt_state: _State,
    params: _Params,
    *,
    keep: tuple[_Kept, _Kept],
    **extra_args: Any,
) -> tuple[_Params, _State, _Kept]: ...
def apply_gradients(
    tx: optax.GradientTransformation,
    grads: Grads,
    opt_state: OptState,
    params: Params,
    *,
    keep: tuple[Any, Any] | None = None,
    **extra_args: Any,
) -> Any:
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
      keep: a pair `(new, old)` of any other state, two trees as `jaxscale.tree_where` takes them:
        batch statistics, target networks, loss weights. A skipped step keeps the old one.
      **extra_args: passed to `tx.update`: `value=loss` and so on.

    Returns:
      The new parameters, with the shapes and dtypes of `params`, and the new state; with `keep`,
      also the chosen member of the pair. After a skipped step the parameters are the old ones,
      bit for bit.

    Warns:
      UserWarning: if `tx` has a `loss_scaled` optimizer inside of another one.

    Raises:
      TypeError: if `tx` is not a gradient transformation, if `opt_state` is not its state, or if
        `keep` is not a pair.
      ValueError: if `grads` has another structure or other shapes than `params`, if `opt_state` is
        that of other parameters, or if the trees in `keep` differ in structure or shapes.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> import jaxscale
      >>> tx = jaxscale.loss_scaled(optax.sgd(0.5))
      >>> params, mean = jnp.array(1.0), jnp.array(0.0)
      >>> opt_state = tx.init(params)
      >>> for grad in [jnp.array(1.0), jnp.array(jnp.inf)]:
      ...     params, opt_state, mean = jaxscale.apply_gradients(
      ...         tx, grad, opt_state, params, keep=(mean + 1, mean)
      ...     )
      ...     print(params, mean)
      0.5 1.0
      0.5 1.0
    """
    if keep is not None and not is_pair(keep):
        raise TypeError(
            f"`apply_gradients(keep=...)` must be a pair (new, old), got {type(keep).__name__}."
        )
    call = "apply_gradients"
    order = "(tx, grads, opt_state, params)"
    value = extra_args.pop("value", extra_args.get("loss"))
    made = apply_once(call, tx, grads, opt_state, params, value, extra_args, order)
    if keep is None:
        return made.params, made.opt_state
    new, old = keep
    kept = select_new("apply_gradients(keep=...)", made.applied, new, old)
    return made.params, made.opt_state, kept


def apply_once(
    call: str,
    tx: Any,
    grads: Grads,
    opt_state: OptState,
    params: Params,
    value: Any,
    extra_args: Mapping[str, Any],
    order: str = "",
) -> MadeStep:
    """Makes one step of an optimizer, in the name of a `call`."""
    own = as_optimizer(call, tx)
    state = own.enter(f"{call}(opt_state=...)", opt_state, order)
    check_gradients(f"{call}(grads=...)", grads, params)
    own.check_same(f"{call}(opt_state=...)", state, params)
    run = Pass(Scaled(grads), loss=value)
    return apply_pass(own, run, state, params, extra_args)
