"""Update and apply in one skip: `apply_gradients`, and the parts that other steps share."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeVar, overload

import jax
import jax.numpy as jnp
import optax

from .._gradients.scaled import Scaled
from .._gradients.verdict import Verdict
from .._state.find import find, is_loss_scaled
from .._state.optimizer import LossScaledState, MultiStepsState
from .._trees.checks import explain_errors
from .._trees.leaf import is_array_like
from .._trees.tree import apply_updates, combine, partition, select_like
from .checks import check_state
from .wrapper import takes_value, wrapper_of


def check_same_optimizer(
    given: str,
    tx: Any,
    opt_state: Any,
    params: Any,
    way: str = "Pass the state that `init` of this optimizer returned for these parameters.",
) -> None:
    """Raises a `ValueError` if a state is not like the one that `tx.init(params)` makes.

    Args:
      given: the step and its argument, for the message.
      tx: the optimizer.
      opt_state: what was passed as its state, checked.
      params: the parameters.
      way: the way out, for the message.
    """
    if not all(map(is_array_like, jax.tree.leaves(params))):
        return  # for such parameters `init` saw only a part of them, and which is not known
    try:
        expected = jax.eval_shape(tx.init, params)
    except Exception:  # an `init` that needs values cannot be asked here
        return
    wrapped = wrapper_of(tx) is not None
    trees = [tree.inner_state if wrapped else tree for tree in (expected, opt_state)]
    structures = list(map(jax.tree.structure, trees))
    if structures[0] != structures[1]:
        makes, got = map(str, structures)
    else:
        shapes = [[jnp.shape(leaf) for leaf in jax.tree.leaves(tree)] for tree in trees]
        # A scalar may have been replaced by numbers of the user's own, such as learning rates.
        others = [i for i, (a, b) in enumerate(zip(*shapes, strict=True)) if a and a != b]
        if not others:
            return
        path, _ = jax.tree_util.tree_leaves_with_path(trees[1])[others[0]]
        makes = f"an array of shape {shapes[0][others[0]]} at {jax.tree_util.keystr(path)}"
        got = f"one of shape {shapes[1][others[0]]}"
    raise ValueError(
        f"`{given}` is the state of another optimizer or of other parameters. `tx.init(params)` "
        f"makes {makes}, got {got}. {way}"
    )


_Params = TypeVar("_Params")
_State = TypeVar("_State")
_Kept = TypeVar("_Kept")

# The states of windows, each with the number of steps that the optimizer has made.
WINDOWS = (MultiStepsState, optax.MultiStepsState)


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

    Leaves without a gradient stay as they are. If a gradient is `None`, as
    `equinox.filter_grad` returns it for functions, text and integers, the leaf may be anything,
    and the optimizer sees `None` for it. Integers and typed keys with `float0` gradients
    stay if the optimizer passes these on, as `optax.masked` does. A leaf whose update is
    `None` stays, too.

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
    value = extra_args.pop("value", None)
    order = "(tx, grads, opt_state, params)"
    opt_state = check_optimizer("apply_gradients", tx, opt_state, order)
    params, opt_state = apply_step(tx, Scaled(grads), opt_state, params, value, extra_args)
    if keep is None:
        return params, opt_state
    return (
        params,
        opt_state,
        select_if_applied("apply_gradients(keep=...)", tx, opt_state, *keep),
    )


def check_optimizer(call: str, tx: Any, opt_state: Any, order: str) -> Any:
    """Returns the state that a step with `tx` was given, or raises an error.

    Args:
      call: the step, for the message.
      tx: the optimizer, wrapped or not.
      opt_state: what was passed as its state.
      order: the order of the step's arguments.
    """
    check_transformation(call, tx)
    given, wrapper = f"{call}(opt_state=...)", wrapper_of(tx)
    if wrapper is not None:
        return check_state(given, opt_state, wrapper.policy, order)
    if isinstance(opt_state, LossScaledState):
        raise TypeError(
            f"`{given}` is a `LossScaledState`, but `tx` is a bare optimizer. Pass the one that "
            "`loss_scaled` returned, or `opt_state.inner_state` to go on without it."
        )
    return opt_state


def check_transformation(call: str, tx: Any) -> None:
    """Raises a `TypeError` if `tx` is not an optimizer."""
    # An `optax.MultiSteps` has `init` and `update`, but is not a transformation.
    if not isinstance(tx, (optax.GradientTransformation, optax.MultiSteps)):
        raise TypeError(
            f"`{call}(tx, ...)`: `tx` must be an `optax.GradientTransformation`, got "
            f"{tx!r}. Call the function that makes it, as in `optax.adamw(1e-3)`."
        )


def apply_step(
    tx: Any,
    grads: Scaled,
    opt_state: Any,
    params: Any,
    value: Any,
    extra_args: Mapping[str, Any] = MappingProxyType({}),
    verdict: Verdict | None = None,
) -> tuple[Any, Any]:
    """Returns the parameters and the state of an optimizer, wrapped or not, after one step.

    See `Wrapper.apply` for the arguments.
    """
    # Leaves without a gradient go around the step, as only arrays can be selected and compiled.
    trained, rest = partition(params, grads.grads)
    wrapper = wrapper_of(tx)
    if wrapper is not None:
        trained, state = wrapper.apply(grads, opt_state, trained, value, extra_args, verdict)
        return combine(trained, rest), state
    tx = tx.gradient_transformation() if isinstance(tx, optax.MultiSteps) else tx
    update = optax.with_extra_args_support(tx).update
    if value is not None and takes_value(update):
        extra_args = {**extra_args, "value": value}
    with explain_errors():
        updates, state = update(grads.divided, opt_state, trained, **extra_args)
    return combine(apply_updates(trained, updates), rest), state


def select_if_applied(call: str, tx: Any, opt_state: Any, new: Any, old: Any) -> Any:
    """Returns `new` if the step that led to `opt_state` was applied, otherwise `old`.

    An optimizer without a verdict applies every step.
    """
    state = _with_verdict(call, tx, opt_state)
    return new if state is None else select_like(call, state.grads_finite, new, old)


def select_if_stepped(call: str, tx: Any, before: Any, after: Any, new: Any, old: Any) -> Any:
    """Returns `new` if the optimizer made a step between two of its states, otherwise `old`.

    A micro-batch of a window that is not full makes none, though it is not skipped either.
    """
    states = [_with_verdict(call, tx, each) for each in (before, after)]
    nodes = [
        given if state is None else state
        for given, state in zip((before, after), states, strict=True)
    ]
    windows: Any = [each.inner_state if is_loss_scaled(each) else each for each in nodes]
    if isinstance(windows[0], WINDOWS):
        stepped = windows[0].gradient_step != windows[1].gradient_step
    else:
        stepped = jnp.array(True) if states[1] is None else states[1].grads_finite
    return select_like(call, stepped, new, old)


def _with_verdict(call: str, tx: Any, opt_state: Any) -> LossScaledState | None:
    """Returns the state of a verdict among those of an optimizer, `None` if it has none."""
    wrapper = wrapper_of(tx)
    nodes = jax.tree.leaves(opt_state, is_leaf=is_loss_scaled)
    if (wrapper is not None and not wrapper.skips) or not any(map(is_loss_scaled, nodes)):
        return None
    return find(call, opt_state, is_loss_scaled, "`LossScaledState`")
