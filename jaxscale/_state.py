"""The state of a loss scale: its type, how it is found and checked, and scaling by it.

The types come first, then the checks of a state that a user passed, then multiplication and
division of a tree by the scale, and last the search for the one state in a larger tree.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ._checks import and_more
from ._tree import map_gradients, widen, widened


class LossScaleState(NamedTuple):
    """The state that a loss scale carries from one step to the next.

    It is a `NamedTuple` of arrays and nothing else, so that `jit`, `scan`, `vmap`,
    donation, checkpoints, `optax.tree.get(state, "loss_scale")` and `optax.tree.set`
    work without code of their own. A `jaxscale.LossScale` moves it, and also makes the
    initial state: `loss_scale.init()`.

    Attributes:
      loss_scale: `f32[]`, the number by which the next loss is scaled.
      growth_tracker: `i32[]`, finite steps in a row that count towards growth. Below 0
        while a policy lets some pass uncounted.
      hysteresis_tracker: `i32[]`, non-finite steps still tolerated before a backoff.

    Example:
      >>> import jaxscale
      >>> jaxscale.DynamicLossScale().init().loss_scale
      Array(32768., dtype=float32)
    """

    is_loss_scale_state = True  # the mark that `is_policy_state` looks for, not a field

    loss_scale: jax.Array  # f32[]
    growth_tracker: jax.Array  # i32[]
    hysteresis_tracker: jax.Array  # i32[]


class UnitLossScaleState(LossScaleState):
    """A state whose scale is known to be 1 while tracing, from its type alone."""

    __slots__ = ()


class AdaptiveState(NamedTuple):
    """The state that an `AdaptiveLossScale` carries from one step to the next.

    Attributes:
      loss_scale: `f32[]`, the number by which the next loss is scaled, a power of two.
      peak: `f32[]`, the binary logarithm of the usual largest gradient; -256 before the
        first.
      level: `f32[]`, the binary logarithm that the largest scaled gradient may reach.
      crest: `f32[]`, the binary logarithm of what the gradients of rare batches are taken to
        reach; -256 unless overflows repeat.
      finite_steps: `i32[]`, finite steps since the last overflow that lowered the level.
        It starts at `period`.
      held_steps: `i32[]`, finite steps since the crest was raised or reached.
      overflows: `i32[]`, overflows in a row, up to now.

    Example:
      >>> import jaxscale
      >>> jaxscale.AdaptiveLossScale().init().level
      Array(13., dtype=float32)
    """

    is_loss_scale_state = True  # not a field: it tells this type from other named tuples

    loss_scale: jax.Array  # f32[]
    peak: jax.Array  # f32[]
    level: jax.Array  # f32[]
    crest: jax.Array  # f32[]
    finite_steps: jax.Array  # i32[]
    held_steps: jax.Array  # i32[]
    overflows: jax.Array  # i32[]


def init_state(loss_scale: float) -> LossScaleState:
    """Returns an initial state, strongly typed so that a step keeps its types."""
    return LossScaleState(
        loss_scale=jnp.asarray(loss_scale, jnp.float32),
        growth_tracker=jnp.asarray(0, jnp.int32),
        hysteresis_tracker=jnp.asarray(0, jnp.int32),
    )


def healed(loss_scale: jax.Array, init_scale: float) -> jax.Array:
    """Returns a loss scale, or the initial one if it is 0, inf or NaN.

    A state may come from a checkpoint of another scaler, whose scale had run away.
    """
    usable = jnp.isfinite(loss_scale) & (loss_scale > 0)
    return jnp.where(usable, loss_scale, init_scale).astype(jnp.float32)


def is_policy_state(node: Any) -> bool:
    """Returns whether a node of a tree is the state of a policy, by the mark of its type.

    A field called `loss_scale` proves nothing: parameters, carries and logs have them too.
    """
    marked = getattr(type(node), "is_loss_scale_state", False) is True
    return marked and hasattr(node, "_fields")


def is_wrapped(node: Any) -> bool:
    """Returns whether a node is a variable around an array, as in an optimizer of Flax NNX."""
    return hasattr(type(node), "__jax_array__") and not isinstance(node, jax.Array)


def unwrapped(tree: Any) -> Any:
    """Returns a tree with arrays in the place of the variables around them."""
    return jax.tree.map(
        lambda leaf: leaf.__jax_array__() if is_wrapped(leaf) else leaf, tree, is_leaf=is_wrapped
    )


def policy_state(call: str, state: Any, kind: type = object, grads: Any = None) -> Any:
    """Returns the state that a policy was given, as arrays.

    Args:
      call: the method, such as `DynamicLossScale.update`.
      state: its argument `state`.
      kind: the type that the state must have.
      grads: its argument `grads`, to tell swapped arguments.

    Raises:
      TypeError: if it is not such a state. The message says what to pass.
      ValueError: if it is the state of a population.
    """
    if _is_state(grads) and not _is_state(state):
        hint = "The order of the arguments is (state, grads)."
    elif _is_optimizers(state) or hasattr(state, "opt_state"):
        hint = "Pass `opt_state.scaling`, or call `tx.update`, which moves the scale too."
    elif isinstance(state, kind):
        state = unwrapped(state)
        check_alone(f"{call}(state=...)", state)
        return state
    elif is_policy_state(state):
        hint = (
            "To take over that of another policy, use `jaxscale.from_state_dict(policy.init(), "
            "jaxscale.to_state_dict(state))`."
        )
    else:
        hint = "Pass what the policy's `init`, or its last step, returned."
    what = "the state of a policy" if kind is object else f"a `{kind.__name__}`"
    raise TypeError(f"`{call}(state=...)` must be {what}, got {type(state).__name__}. {hint}")


def check_alone(given: str, state: Any) -> None:
    """Raises a `ValueError` if a state is that of several members of a population."""
    shape = jnp.shape(getattr(state, "loss_scale", 0.0))
    if shape != ():
        raise ValueError(
            f"`{given}` must hold the one scale of one training run, got a `loss_scale` that has "
            f"shape {shape}: call it under `jax.vmap`, which gives each member its own."
        )


def _is_state(node: Any) -> bool:
    return is_policy_state(node) or _is_optimizers(node)


def _is_optimizers(node: Any) -> bool:
    # Known by its fields, as `LossScaledState` is defined in a module that imports this one.
    return hasattr(node, "scaling") and hasattr(node, "inner_state")


def multiply(tree: Any, factor: jax.Array) -> Any:
    """Returns a tree with its gradients multiplied by a scale, in float32 or wider."""
    number = _by_dtype(factor)
    return map_gradients(lambda leaf: _apply(jax.lax.mul, leaf, number(leaf)), tree)


def divide(tree: Any, divisor: jax.Array) -> Any:
    """Returns a tree with its gradients divided by a scale, in float32 or wider."""
    number = _by_dtype(divisor)
    return map_gradients(lambda leaf: _apply(jax.lax.div, leaf, number(leaf)), tree)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("grads", "divisor"), meta_fields=()
)
@dataclasses.dataclass(frozen=True)
class Scaled:
    """Gradients as a backward pass left them, and the number that they are to be divided by.

    On a CPU a step is skipped by a branch. Gradients that are divided before it would be stored,
    eight bytes for each parameter, written and read. Divided inside of the branch they fuse into
    the step. So the gradients and their divisor travel separately, and each reader divides.
    """

    grads: Any
    divisor: jax.Array | None = None  # `None` if they are unscaled already

    @functools.cached_property
    def unscaled(self) -> Any:
        """The gradients divided, in float32 or wider."""
        return self.grads if self.divisor is None else divide(self.grads, self.divisor)

    def unscale(self, grads: Any) -> Any:
        """Returns `grads`, which may be zeros in the place of these, times the reciprocal.

        XLA itself divides by one number in this way. But it treats a written division as
        expensive, and would store the result if two moments use it. Both give the same numbers
        if the divisor is a power of two.
        """
        if self.divisor is None:
            return grads
        number = _by_dtype(self.divisor, lambda divisor: 1 / divisor)
        return map_gradients(lambda leaf: _apply(jax.lax.mul, leaf, number(leaf)), grads)


def _apply(op: Callable[[Any, Any], jax.Array], leaf: Any, number: jax.Array) -> jax.Array:
    leaf = widen(leaf)
    if jnp.iscomplexobj(leaf):
        # By parts: the product of two complex numbers also has terms such as inf * 0, a NaN.
        return jax.lax.complex(_apply(op, leaf.real, number), _apply(op, leaf.imag, number))
    return op(leaf, number)


def _by_dtype(
    loss_scale: jax.Array, of: Callable[[jax.Array], jax.Array] = lambda number: number
) -> Callable[[Any], jax.Array]:
    """Returns a function from a leaf to the number that it is multiplied or divided by."""
    by_dtype = functools.cache(lambda dtype: of(representable(loss_scale, dtype)))
    return lambda leaf: by_dtype(widened(leaf))


def representable(loss_scale: jax.Array, dtype: Any) -> jax.Array:
    """Returns a loss scale as a number of a dtype, safe to multiply and to divide by.

    For a complex dtype the number has the dtype of its parts.
    """
    info = jnp.finfo(dtype)
    # At most the largest power of two, rather than the largest number, so that scaling stays
    # exact. And at most 2**126: XLA divides by multiplying with the reciprocal, and that of 2**127
    # is subnormal. It would be flushed to zero, and all gradients with it, though they are finite.
    largest = 2.0 ** min(info.maxexp - 1, 126)
    return jnp.clip(loss_scale, float(info.smallest_normal), largest).astype(info.dtype)


def find(call: str, tree: Any, matches: Callable[[Any], bool], what: str) -> Any:
    """Returns the one node of a tree that `matches`, or raises a `ValueError` if it is not one."""
    found = [
        (jax.tree_util.keystr(path) or "the tree itself", node)
        for path, node in jax.tree_util.tree_leaves_with_path(tree, is_leaf=matches)
        if matches(node)
    ]
    if len(found) == 1:
        return found[0][1]
    if found:
        places = ", ".join(path for path, _ in found)
        raise ValueError(
            f"`{call}` needs a tree with exactly one {what}, got {len(found)}, at {places}. "
            "Pass the one that belongs to this loss."
        )
    raise ValueError(
        f"`{call}` needs a tree with exactly one {what}, got none in {_contents(tree)}. "
        + _way_out(tree)
    )


def _way_out(tree: Any) -> str:
    if hasattr(tree, "init"):
        return "It makes states and is not one itself: pass what its `init` returned."
    if hasattr(tree, "opt_state") and jax.tree_util.all_leaves([tree]):  # it was not looked into
        return "Pass its `opt_state`."
    if callable(tree):
        return "The function to differentiate comes first, the state second."
    if "loss_scale" in getattr(tree, "_fields", ()):
        return (
            "If it is the state of a policy of your own, mark it as one: in `class "
            f"{type(tree).__name__}`, write `is_loss_scale_state = True`, without an annotation."
        )
    return (
        "Wrap the optimizer, `tx = jaxscale.loss_scaled(tx)`, and pass the state that "
        "`tx.init(params)` returned."
    )


def _contents(tree: Any, most: int = 8) -> str:
    """Returns the types and places of the outermost named tuples and leaves of a tree."""
    nodes = jax.tree_util.tree_leaves_with_path(
        tree, is_leaf=lambda node: node is None or hasattr(node, "_fields")
    )
    names = [
        f"{type(node).__name__} at {jax.tree_util.keystr(path)}"
        if path
        else f"the {type(node).__name__}"
        for path, node in nodes
    ]
    return ", ".join(names[:most] + and_more(names, most)) or "an empty tree"
