"""The parameters in float32, as an optimizer has them: read from its state, and put into it."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from .._state.find import find_optimizer_state, is_loss_scaled, restore_types
from .._state.scale import unwrap
from .._state.storage import WeightsState
from .._trees.pytrees import PyTree
from .param_leaves import describe_leaf, fits, flatten, known_dtype_of, make_state
from .rounding import HALF_DTYPES
from .storage_formats import Stored, format_beside
from .weights import Applied


def master_params(opt_state: optax.OptState, params: optax.Params) -> optax.Params:
    """Returns the parameters in float32, as the optimizer has them.

    For evaluation, averages and export: with `jaxscale.master_weights` these have all the bits
    that half-precision parameters leave out. An average of weights should be made of them::

        average = optax.incremental_update(jaxscale.master_params(opt_state, params), average, 1e-3)

    Args:
      opt_state: the state of the optimizer, or a tree that holds it, such as a `TrainState` or an
        `nnx.Optimizer.opt_state`.
      params: the parameters. One that was replaced since the last step is near what it is now: what
        stood beside the old one is still added, at most half of its last bit. To put other float32
        parameters in, use `with_master_params`.

    Returns:
      A tree like `params`, in which bfloat16 and float16 leaves are float32, and all others as they
      are: arrays of JAX as copies, so that a step may donate `params`. Half-precision leaves beside
      which nothing is kept, as with `jaxscale.stochastic_rounding`, are cast.

    Raises:
      ValueError: if there is not exactly one `LossScaledState` in `opt_state`, or if it is that of
        other parameters.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> import jaxscale
      >>> tx = jaxscale.master_weights(optax.sgd(1.0))
      >>> params = jnp.array(1.0, jnp.bfloat16)
      >>> params, state = jaxscale.apply_gradients(tx, jnp.array(0.001), tx.init(params), params)
      >>> print(params, jaxscale.master_params(state, params))
      1 0.999
    """
    state = find_optimizer_state("master_params", restore_types(opt_state))
    arrays = unwrap(params)
    wide = _widen_params("master_params", unwrap(state.weights), arrays)
    return jax.tree.unflatten(jax.tree.structure(params), jax.tree.leaves(wide))


def with_master_params(
    opt_state: optax.OptState, float32_params: optax.Params
) -> tuple[optax.Params, Any]:
    """Puts float32 parameters into a state, to go on from them without losing 16 bits.

    The inverse of `master_params`, for `jaxscale.master_weights`: moments and counters stay. To
    begin from a float32 checkpoint::

        half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), float32_params)
        params, opt_state = jaxscale.with_master_params(tx.init(half), float32_params)

    Args:
      opt_state: the state of an optimizer for half-precision parameters, or a tree that holds it.
      float32_params: the parameters in float32, with their structure.

    Returns:
      The parameters in the dtypes that the state was made for, and the state. (If that is a
      `TrainState`, put the parameters in as well: `state.replace(params=params)`.) A leaf beside
      which nothing is kept keeps its dtype. All arrays are copies, so that a step may donate them.

    Raises:
      ValueError: if there is not exactly one `LossScaledState` in `opt_state`, if it keeps no
        float32 parameters, or if it is that of other parameters.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> import jaxscale
      >>> tx = jaxscale.master_weights(optax.sgd(1.0))
      >>> state = tx.init(jnp.array(0.0, jnp.bfloat16))
      >>> params, state = jaxscale.with_master_params(state, jnp.array(1.001))
      >>> print(params, params.dtype, jaxscale.master_params(state, params))
      1 bfloat16 1.001
    """
    call = "with_master_params"
    state = find_optimizer_state(call, opt_state)
    weights = unwrap(state.weights)
    if weights is None or (weights.remainders is None and weights.copies is None):
        raise ValueError(
            f"`{call}(opt_state=...)` must keep float32 parameters, and this one keeps none. Wrap "
            "the optimizer in `jaxscale.master_weights`, and make the state from half-precision "
            "parameters; or cast the parameters yourself, as in `jax.tree.map(lambda p: "
            "p.astype(jnp.bfloat16), float32_params)`."
        )
    arrays = unwrap(float32_params)
    params, new_weights = _narrow_params(call, weights, arrays)

    def replace(node: PyTree) -> Any:
        return node._replace(weights=new_weights) if is_loss_scaled(node) else node

    new_state = jax.tree.map(replace, opt_state, is_leaf=is_loss_scaled)
    return (
        jax.tree.unflatten(jax.tree.structure(float32_params), jax.tree.leaves(params)),
        jax.tree.unflatten(jax.tree.structure(opt_state), jax.tree.leaves(new_state)),
    )


def _widen_params(
    call: str, state: WeightsState | None, params: optax.Params
) -> optax.Params:
    """Returns float32 parameters, by what stands beside them and by nothing else."""
    tree = flatten(call, params, state)
    wide = []
    for leaf in tree.leaves:
        leaf = leaf._replace(format=format_beside(leaf.beside))
        if leaf.param is not None and not fits(leaf):
            raise ValueError(
                f"`{call}(params=...)` must be the parameters as the optimizer keeps them: that at "
                f"{leaf.name} is {describe_leaf(leaf.param)}, and the state has "
                f"{describe_leaf(leaf.beside)} for one of dtype {leaf.dtype}."
            )
        if known_dtype_of(leaf.param) in HALF_DTYPES:
            format: Any = leaf.format
            wide.append(format.widen(leaf.param, leaf.beside))
        else:
            wide.append(_copied(leaf.param))
    return tree.unflatten(wide)


def _copied(param: object) -> Any:
    """Returns a copy of an array, and everything else as it is.

    A module keeps Python's numbers as they are: some layers ask for their types.
    """
    return jnp.copy(param) if isinstance(param, jax.Array) else param


def _narrow_params(
    call: str, state: WeightsState, wide_params: optax.Params
) -> Applied:
    """Returns parameters as they are kept, made of float32 ones, and what is beside them."""
    tree = flatten(call, wide_params, state)
    params = []
    beside = []
    for leaf in tree.leaves:
        stored = Stored(_copied(leaf.param), leaf.beside)
        if leaf.beside is not None and leaf.param is not None:
            if jnp.shape(leaf.param) != jnp.shape(leaf.beside):
                raise ValueError(
                    f"`{call}(float32_params=...)` must be for the parameters of this state: that "
                    f"at {leaf.name} is {describe_leaf(leaf.param)}, and the state was made for "
                    f"{leaf.dtype}{list(jnp.shape(leaf.beside))}."
                )
            like = jax.ShapeDtypeStruct(jnp.shape(leaf.param), leaf.dtype)
            # The caller's own array must not become the copy that a step donates.
            wide = jnp.array(leaf.param, jnp.float32)
            stored = format_beside(leaf.beside).store(wide, like, None)
        params.append(stored.param)
        beside.append(stored.beside)
    return Applied(tree.unflatten(params), make_state(tree, beside, state.key))
