"""The state of a loss scale, what is multiplied and divided by it, and how it is found."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ._quotient import recall, remember
from ._tree import map_gradients, widen


class LossScaleState(NamedTuple):
    """What a loss scale carries from one step to the next.

    A ``NamedTuple`` of arrays and nothing else, so that ``jit``, ``scan``, ``vmap``,
    donation, checkpoints, ``optax.tree.get(state, "loss_scale")`` and ``optax.tree.set``
    work with no code of their own. How it moves is the business of a
    :class:`jaxscale.LossScale`, which also makes the first one: ``loss_scale.init()``.

    Attributes:
      loss_scale: ``f32[]``, what the next loss is scaled by.
      growth_tracker: ``i32[]``, finite steps in a row that count towards growth. Below 0
        while a policy lets some pass uncounted.
      hysteresis_tracker: ``i32[]``, non-finite steps still tolerated before a backoff.

    Example:
      >>> import jaxscale
      >>> jaxscale.DynamicLossScale().init().loss_scale
      Array(32768., dtype=float32)
    """

    loss_scale: jax.Array  # f32[]
    growth_tracker: jax.Array  # i32[]
    hysteresis_tracker: jax.Array  # i32[]


class UnitLossScaleState(LossScaleState):
    """A state whose scale is known to be 1 while tracing, from its type alone."""

    __slots__ = ()


def init_state(loss_scale: float, hysteresis: int = 0, streak: int = 0) -> LossScaleState:
    """Returns a first state, strongly typed so that a step keeps its avals."""
    return LossScaleState(
        loss_scale=jnp.asarray(loss_scale, jnp.float32),
        growth_tracker=jnp.asarray(streak, jnp.int32),
        hysteresis_tracker=jnp.asarray(hysteresis, jnp.int32),
    )


def healed(loss_scale: jax.Array, init_scale: float) -> jax.Array:
    """Returns a loss scale, or a first one if it is 0, inf or NaN.

    A state may come from elsewhere: a checkpoint of a scaler that had run away.
    """
    usable = jnp.isfinite(loss_scale) & (loss_scale > 0)
    return jnp.where(usable, loss_scale, init_scale).astype(jnp.float32)


def scale(state: Any, tree: Any) -> Any:
    """Returns a tree multiplied by the loss scale.

    To scale a loss by hand; :func:`jaxscale.value_and_grad` needs no such call.

    Args:
      state: a :class:`LossScaleState`, or a tree that holds exactly one.
      tree: a pytree, such as a loss.

    Returns:
      The tree with its floating and complex leaves multiplied, in float32 or wider:
      float16 and bfloat16 leaves come back as float32. Other leaves are untouched.

    Raises:
      ValueError: if ``state`` holds no loss scale, or several.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxscale
      >>> jaxscale.scale(jaxscale.FixedLossScale(8).init(), jnp.float16(3.0))
      Array(24., dtype=float32)
    """
    state = find_scaling("scale", state)
    if isinstance(state, UnitLossScaleState):
        return map_gradients(widen, tree)
    number = _by_dtype(state.loss_scale)
    return map_gradients(lambda leaf: _apply(jax.lax.mul, leaf, number(leaf)), tree)


def unscale(state: Any, tree: Any) -> Any:
    """Returns a tree divided by the loss scale.

    Pass the state that the gradients were scaled with, not the updated one.

    Args:
      state: a :class:`LossScaleState`, or a tree that holds exactly one.
      tree: a pytree of scaled gradients.

    Returns:
      The tree with its floating and complex leaves divided, in float32 or wider: float16
      and bfloat16 leaves come back as float32, where small gradients do not underflow
      again; float32, float64 and complex ones keep their dtype. Other leaves, and
      whatever is under a key ``_overwrite_with_gradient``, are untouched.

    Raises:
      ValueError: if ``state`` holds no loss scale, or several.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxscale
      >>> state = jaxscale.DynamicLossScale(init_scale=2.0**15).init()
      >>> jaxscale.unscale(state, {"w": jnp.float16(1.0), "b": None})
      {'b': None, 'w': Array(3.0517578e-05, dtype=float32)}
    """
    state = find_scaling("unscale", state)
    if isinstance(state, UnitLossScaleState):
        return map_gradients(widen, tree)
    return divide(tree, state.loss_scale)


def divide(tree: Any, divisor: jax.Array) -> Any:
    """Returns a tree with its gradients divided by a scale, in float32 or wider."""
    number = _by_dtype(divisor)

    def divide_leaf(leaf: Any) -> jax.Array:
        quotient = _apply(jax.lax.div, leaf, number(leaf))
        remember(quotient, leaf, number(leaf))
        return quotient

    return map_gradients(divide_leaf, tree)


def divided_again(tree: Any) -> tuple[Any, Callable[[Any], Any]]:
    """Returns a tree with scaled gradients where they are known, and what unscales it."""
    leaves, treedef = jax.tree.flatten(tree)
    quotients = [recall(leaf) for leaf in leaves]
    dividends = [
        leaf if quotient is None else quotient.dividend
        for leaf, quotient in zip(leaves, quotients, strict=True)
    ]

    # What XLA makes of a division by one number. Written down, it is no division for which
    # XLA, as it takes that to be expensive, would store what two moments are computed from.
    factors = {id(each.divisor): 1 / each.divisor for each in quotients if each is not None}

    def unscaled(tree: Any) -> Any:
        return treedef.unflatten(
            leaf if quotient is None else _apply(jax.lax.mul, leaf, factors[id(quotient.divisor)])
            for leaf, quotient in zip(jax.tree.leaves(tree), quotients, strict=True)
        )

    return treedef.unflatten(dividends), unscaled


def _apply(op: Callable[[Any, Any], jax.Array], leaf: Any, number: jax.Array) -> jax.Array:
    leaf = widen(leaf)
    if jnp.iscomplexobj(leaf):
        # By parts, as a complex product makes inf * 0 of the parts, which is NaN.
        return jax.lax.complex(_apply(op, leaf.real, number), _apply(op, leaf.imag, number))
    return op(leaf, number)


def _by_dtype(loss_scale: jax.Array) -> Callable[[Any], jax.Array]:
    """Returns what gives the number that a leaf is multiplied with or divided by."""
    by_dtype = functools.cache(functools.partial(representable, loss_scale))
    return lambda leaf: by_dtype(widen(leaf).dtype)


def representable(loss_scale: jax.Array, dtype: Any) -> jax.Array:
    """Returns a loss scale as a number of a dtype by which one can multiply and divide.

    Of a complex dtype, as one of its parts.
    """
    info = jnp.finfo(dtype)
    # At most the largest power of two, and not the largest number: scaling stays exact. And
    # at most 2**126: XLA divides by multiplying with the reciprocal, and that of 2**127 is
    # subnormal, which flushes to zero, and with it would all gradients, finite as they are.
    largest = 2.0 ** min(info.maxexp - 1, 126)
    return jnp.clip(loss_scale, float(info.smallest_normal), largest).astype(info.dtype)


def _is_scaling(node: Any) -> bool:
    # Any NamedTuple with a number of that name, so that a policy may bring its own state.
    number = getattr(node, "loss_scale", None) if hasattr(node, "_fields") else None
    return len(jax.tree.leaves(number)) == 1 and not hasattr(number, "_fields")


def find_scaling(call: str, tree: Any) -> Any:
    """Returns the one loss scale state in a tree, as arrays."""
    state = find(call, tree, _is_scaling, "loss scale state")
    # In the optimizers of Flax NNX each array is wrapped in a variable.
    return type(state)(*map(jnp.asarray, state))


def find(call: str, tree: Any, matches: Callable[[Any], bool], what: str) -> Any:
    """Returns the one node of a tree that ``matches``, or raises what was found where."""
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
        return "It makes states and is none itself: pass what its `init` returned."
    if hasattr(tree, "opt_state"):
        return "Pass its `opt_state`."
    if callable(tree):
        return "The function to differentiate comes first, the state second."
    return (
        "Wrap the optimizer, `tx = jaxscale.loss_scaled(tx)`, and pass the state that "
        "`tx.init(params)` returned."
    )


def _contents(tree: Any, most: int = 8) -> str:
    """Returns the types of the outermost named tuples and leaves of a tree, and where."""
    nodes = jax.tree_util.tree_leaves_with_path(
        tree, is_leaf=lambda node: node is None or hasattr(node, "_fields")
    )
    names = [
        f"{type(node).__name__} at {jax.tree_util.keystr(path)}"
        if path
        else f"the {type(node).__name__}"
        for path, node in nodes
    ]
    more = [f"and {len(names) - most} more"] if len(names) > most else []
    return ", ".join(names[:most] + more) or "an empty tree"
