"""The public wrappers for half-precision parameters and states.

`master_weights` and `stochastic_rounding` put what they are given into the `WrappedOptimizer` that
`loss_scaled` and `multi_steps` make, in any order of nesting.
"""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from .._storage.compact import CompactOptimizer
from .._storage.weights import MasterWeights, Rounded, StochasticRounding, Weights
from .._trees.arguments import int32, one_of
from .checks import as_transformation
from .transformations import rewrap, wrap
from .wrapped_optimizer import find_wrapped_optimizer


def master_weights(
    inner: optax.GradientTransformation,
    storage: Literal["remainder", "float32"] = "remainder",
    *,
    mask: Any | Callable[[optax.Params], Any] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Makes bfloat16 and float16 parameters learn as float32 ones do, for 2 bytes a parameter.

    bfloat16 has 8 bits of precision, so an update below 0.2 % of a weight is rounded away: under
    Adam at a learning rate of 1e-4, a weight of 1.0 stays 1.0 for ever. Here the optimizer sees and
    updates float32 parameters, and the model reads the rounded ones::

        tx = jaxscale.master_weights(optax.adamw(1e-4))

    A bfloat16 parameter is the upper half of a float32 number. So only the other 16 bits are kept,
    as `int16`, and no bit of the float32 parameter is lost. A weight and its state take 2 + 2 + 8
    bytes under AdamW, and 2 + 2 + 4 with `jaxscale.compact_state`; float32 takes 4 + 8.

    Wrap the whole optimizer, and put nothing behind this in an `optax.chain`: what `update` returns
    is the difference of two rounded parameters, in float32. `optax.apply_updates` adds that as it
    should; `jaxscale.apply_gradients` and `jaxscale.train_step` store the new parameters
    themselves. (An `optax.apply_if_finite` around this cannot be compiled, as its branches have
    updates of different dtypes. It is not needed: bad steps are skipped.)

    A weight that somebody replaced, by a checkpoint or an average, is never set back: the optimizer
    goes on from what is there, to half of its last bit. A skipped step keeps all bits. Averages of
    weights should be made of `jaxscale.master_params`: in bfloat16, an average with a factor of
    0.999 never moves.

    Args:
      inner: the optimizer, or one that `loss_scaled`, `skip_nonfinite` or `multi_steps` wrapped.
        The order does not matter. One that is not wrapped skips steps as by `skip_nonfinite`.
      storage: what stands beside a bfloat16 parameter. `"remainder"`: the bits that it leaves out,
        2 bytes. `"float32"`: a copy, 4 bytes, which is easier to read with other tools. The
        parameters are the same. float16 parameters have a copy in both cases; they end at 65504.
      mask: which parameters are meant: a tree of bools with their structure, or with one bool for a
        part of them, or a function that makes one. What is left out, such as a frozen base of LoRA,
        is rounded as before and needs no bytes. Leaves of other dtypes are never meant.

    Returns:
      An `optax.GradientTransformationExtraArgs` as `loss_scaled` returns it. The field `weights` of
      its state has the trees `remainders` (`int16`) or `copies` (`float32`), with the structure of
      the parameters. `update` needs `params`. Updates of half-precision parameters are float32.

    Raises:
      TypeError: if `inner` is not a gradient transformation, or is wrapped in this or in
        `stochastic_rounding` already; at `init`, if `mask` holds something else than bools.
      ValueError: if `storage` is not one of the two; at `init`, if `mask` has another structure
        than the parameters; at `update`, if the parameters are missing or the state is that of
        other ones.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> import jaxscale
      >>> tx = jaxscale.master_weights(optax.sgd(1.0))
      >>> params = jnp.array(1.0, jnp.bfloat16)
      >>> state = tx.init(params)
      >>> for _ in range(3):  # each is less than half of the distance to the next number
      ...     updates, state = tx.update(jnp.array(-0.0015), state, params)
      ...     params = optax.apply_updates(params, updates)
      ...     print(params, round(float(jaxscale.master_params(state, params)), 6))
      1 1.0015
      1 1.003
      1.00781 1.0045
    """
    one_of("master_weights", "storage", storage, ("remainder", "float32"))
    weights = MasterWeights(storage=storage, mask=mask)
    return _keep("master_weights", inner, weights)


def stochastic_rounding(
    inner: optax.GradientTransformation,
    *,
    seed: int = 0,
    mask: Any | Callable[[optax.Params], Any] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Makes bfloat16 and float16 parameters learn, for no byte more: they are rounded at random.

    A new parameter is rounded up or down, the more often to a neighbour the nearer it is. So it is
    right on average, and an update that is too small for one step counts in one of many::

        tx = jaxscale.stochastic_rounding(optax.adamw(1e-4))

    A weight and its state take 2 + 8 bytes under AdamW, and 2 + 4 with `jaxscale.compact_state`;
    float32 takes 4 + 8. The price is noise: at a learning rate of 1e-4 a weight of 1.0 wanders
    with a standard deviation of 0.015, where that of float32 is 0.0007. `jaxscale.master_weights`
    has none, for 2 bytes a parameter.

    It is used as `master_weights` is, with the same rules: nothing behind it in a chain, and
    updates in float32. A skipped step keeps the key, so that it leaves no trace.

    Each leaf and each step draws its own bits, and so does each member of a population if `vmap` of
    `init` is over the parameters. In a sweep from the same weights, give each member a `seed`. In
    `shard_map`, devices draw differently along the axes along which the type of a leaf says that it
    varies, so that copies stay equal. With `check_vma=False` and in `pmap` types say nothing, and
    all devices draw the same bits for their parts.

    Args:
      inner: as in `master_weights`.
      seed: that of the random bits, an integer from 0 to 2**31 - 1. In a sweep it may be an integer
        of JAX, one for each member: `jax.vmap(train)(rates, jnp.arange(len(rates)))`.
      mask: as in `master_weights`. What is left out is rounded to nearest.

    Returns:
      An `optax.GradientTransformationExtraArgs` as `loss_scaled` returns it. The field `weights` of
      its state has a `key`, `u32[2]`.

    Raises:
      TypeError: as `master_weights`; if `seed` is not an integer, such as a key.
      ValueError: as `master_weights`; if `seed` is below 0.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> import jaxscale
      >>> tx = jaxscale.stochastic_rounding(optax.sgd(1.0))
      >>> params = jnp.ones(10_000, jnp.bfloat16)
      >>> grads = jnp.full(10_000, -0.001)
      >>> updates, state = tx.update(grads, tx.init(params), params)
      >>> params = optax.apply_updates(params, updates)
      >>> print(sorted(set(params.tolist())), round(float(params.mean(dtype=jnp.float32)), 3))
      [1.0, 1.0078125] 1.001
    """
    weights = StochasticRounding(
        seed=_check_seed("stochastic_rounding", seed), mask=mask
    )
    return _keep("stochastic_rounding", inner, weights)


def compact_state(
    inner: optax.GradientTransformation,
    *,
    seed: int = 0,
    mask: Any | Callable[[Any], Any] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Keeps the state of an optimizer in bfloat16: 4 bytes a parameter for AdamW, where it has 8.

    The optimizer computes in float32. Between two steps, what it keeps in large float32 arrays is
    bfloat16, rounded at random so that it is right on average. (Rounded to nearest, a mean of
    squares with a factor of 0.999 would stand still.) Put it around the optimizer, and everything
    else of this library around it::

        tx = jaxscale.loss_scaled(jaxscale.compact_state(optax.adamw(1e-3)))

    With `jaxscale.master_weights` around it, a bfloat16 weight and its state take 8 bytes under
    AdamW, and with `jaxscale.stochastic_rounding` 6, where float32 takes 12.

    Compact are moments: float32 arrays of one dimension or more, with at least 4,096 elements, that
    a state of Optax holds and that are known to bear rounding. Those are the moments of adam and
    what Optax makes of it, lion, momentum, muon, adafactor, sm3, adagrad, rmsprop, adadelta,
    adabelief, adan, ademamix, `optax.ema` and `optax.MultiSteps`, with which final losses were
    those of float32 states within noise; inside of schedule_free they were 6 % off. Everything else
    stays in float32: an optimizer may estimate a learning rate from sums, or take inverse roots of
    factors, and then little noise does much. One warning names such arrays, and `mask` asks for
    them.

    Three kinds are always left as they are: what the optimizer itself keeps in bfloat16, as with
    `mu_dtype`; small arrays, such as the moments of most LoRA matrices; and weights that a state
    holds, as those of sam, madgrad, cocob and schedule_free do, because rounding these would move
    the model at any learning rate.

    Args:
      inner: the optimizer. It must not be wrapped by jaxscale.
      seed: as in `stochastic_rounding`. With the same seed, the two draw different bits.
      mask: which arrays of the state are meant, in the place of known moments: a tree of bools with
        the structure of the state of `inner`, or with one bool for a part of it, or a function that
        makes one of that state. `True` means all of them.

    Warns:
      UserWarning: once, at `init`, if there is no `mask` and large arrays stay in float32 that are
        neither moments nor weights.

    Returns:
      An `optax.GradientTransformationExtraArgs`. Its state has the fields `inner_state`, that of
      `inner` with compact arrays, and `key`, `u32[2]`. `jaxscale.from_state_dict` reads a float32
      state into a compact one, rounded to nearest once, and a compact one into a float32 state.

    Raises:
      TypeError: if `inner` is not a gradient transformation, or is wrapped by jaxscale; if `seed`
        is not an integer, such as a key.
      ValueError: if `seed` is below 0; at `init`, if `mask` has another structure than the state.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> import jaxscale
      >>> tx = jaxscale.compact_state(optax.adamw(1e-3))
      >>> state = tx.init({"w": jnp.zeros((64, 64)), "b": jnp.zeros(64)})
      >>> moments = optax.tree.get(state, "nu")
      >>> print(moments["w"].dtype, moments["b"].dtype)
      bfloat16 float32
    """
    if find_wrapped_optimizer(inner) is not None:
        raise TypeError(
            "`compact_state(inner)`: `inner` is wrapped by jaxscale already, and its counters and "
            "its scale are not for rounding. Put `compact_state` inside: "
            "`jaxscale.loss_scaled(jaxscale.compact_state(optax.adamw(1e-3)))`."
        )
    optimizer = CompactOptimizer(
        inner=as_transformation("compact_state(inner)", inner),
        seed=_check_seed("compact_state", seed),
        mask=mask,
    )
    return optax.GradientTransformationExtraArgs(optimizer.init, optimizer.update)


def _check_seed(call: str, seed: object) -> Any:
    """Returns a seed as a Python int or as an integer of JAX, or raises an error.

    The values of JAX's integers are not known where they are traced, and so are not looked at.
    """
    if isinstance(seed, bool):
        raise TypeError(
            f"`{call}(seed=...)` must be an integer below 2**31, at least 0, got {seed}."
        )
    is_array = isinstance(seed, jax.Array)
    if is_array and seed.ndim == 0 and jnp.issubdtype(seed.dtype, jnp.integer):
        return seed
    return int32(call, "seed", seed, least=0)


def _keep(
    call: str, inner: object, weights: Weights
) -> optax.GradientTransformationExtraArgs:
    """Returns an optimizer that keeps its half-precision parameters in a way of their own."""
    optimizer = wrap(call, inner)
    if not isinstance(optimizer.weights, Rounded):
        raise TypeError(
            f"`{call}(inner)`: `inner` is wrapped in `{optimizer.weights.call}` already, and "
            "parameters are kept in one way. Leave one of the two out."
        )
    return rewrap(optimizer, call, weights=weights)
