"""Update and apply in one skip: `apply_gradients`, and what a step keeps of other state."""

from typing import Any, TypeVar, overload

import optax

from .._gradients.scaled import Scaled
from .._state.find import is_loss_scaled
from .._state.optimizer import WINDOW_STATES
from .._trees.tree import select_like
from .optimizer import Optimizer, apply_step, as_optimizer
from .retry import BackwardResult

_Params = TypeVar("_Params")
_State = TypeVar("_State")
_Kept = TypeVar("_Kept")


@overload
def apply_gradients(
    tx: optax.GradientTransformation,
    grads: Any,
    opt_state: _State,
    params: _Params,
    *,
    keep: None = None,
    **extra_args: Any,
) -> tuple[_Params, _State]: ...
@overload
def apply_gradients(
    tx: optax.GradientTransformation,
    grads: Any,
    opt_state: _State,
    params: _Params,
    *,
    keep: tuple[_Kept, _Kept],
    **extra_args: Any,
) -> tuple[_Params, _State, _Kept]: ...
def apply_gradients(
    tx: optax.GradientTransformation,
    grads: Any,
    opt_state: Any,
    params: Any,
    *,
    keep: tuple[Any, Any] | None = None,
    **extra_args: Any,
) -> Any:
    """Returns the parameters and the optimizer state after one step.

    The same as `tx.update` followed by `optax.apply_updates`, to rounding. If `tx` is a
    `loss_scaled` optimizer, both are skipped together, so no updates are stored.

    A leaf whose gradient is `None`, as `equinox.filter_grad` returns it for functions, text and
    integers, stays as it is, whatever it is. The optimizer sees `None` for it. Integers and typed
    keys with `float0` gradients stay if the optimizer passes these on, as `optax.masked` does. A
    leaf whose update is `None` stays, too.

    Args:
      tx: the optimizer.
      grads: the gradients, with the structure of `params`, or `None` for a leaf.
      opt_state: the state of `tx`. For an Equinox module `model` it is made by
        `tx.init(equinox.filter(model, equinox.is_inexact_array))`.
      params: the parameters.
      keep: a pair `(new, old)` of any other state, as `jaxscale.tree_where` takes them: batch
        statistics, target networks, loss weights. A skipped step keeps the old one.
      **extra_args: passed to `tx.update`: `value=loss` and so on.

    Returns:
      The new parameters, with the shapes and dtypes of `params`, and the new state; with `keep`
      also what was chosen of the pair. After a non-finite step the parameters are the old ones,
      bit for bit.

    Raises:
      TypeError: if `tx` is not a gradient transformation, if `opt_state` is not its state, or if
        `keep` is not a pair.
      ValueError: if `grads` has another structure than `params`, and `params` hold leaves
        that are not arrays; or if the trees in `keep` differ in structure or shapes.

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
    if keep is not None and not (isinstance(keep, tuple) and len(keep) == 2):
        raise TypeError(
            f"`apply_gradients(keep=...)` must be a pair (new, old), got {type(keep).__name__}."
        )
    optimizer = as_optimizer("apply_gradients", tx)
    order = "(tx, grads, opt_state, params)"
    opt_state = optimizer.check_state("apply_gradients(opt_state=...)", opt_state, order)
    value = extra_args.pop("value", extra_args.get("loss"))
    made = BackwardResult(value, None, None, Scaled(grads))
    params, opt_state = apply_step(
        optimizer, opt_state, params, made, extra_args, given="apply_gradients(grads=...)"
    )
    if keep is None:
        return params, opt_state
    kept = select_if_applied("apply_gradients(keep=...)", optimizer, opt_state, *keep)
    return params, opt_state, kept


def select_if_applied(call: str, optimizer: Optimizer, opt_state: Any, new: Any, old: Any) -> Any:
    """Returns `new` if the step that led to `opt_state` was applied, otherwise `old`."""
    state = optimizer.find_verdict(call, opt_state)
    # An optimizer without a verdict applies every step.
    return new if state is None else select_like(call, state.step_applied, new, old)


def select_if_stepped(
    call: str, optimizer: Optimizer, before: Any, after: Any, new: Any, old: Any
) -> Any:
    """Returns `new` if the optimizer made a step between two of its states, otherwise `old`.

    A micro-batch of a window that is not full makes none, though it is not skipped either.
    """

    def window(state: Any) -> Any:
        state = optimizer.find_verdict(call, state) or state
        return state.inner_state if is_loss_scaled(state) else state

    if isinstance(window(before), WINDOW_STATES):
        stepped = window(before).gradient_step != window(after).gradient_step
    else:
        stepped = getattr(optimizer.find_verdict(call, after), "step_applied", True)
    return select_like(call, stepped, new, old)
