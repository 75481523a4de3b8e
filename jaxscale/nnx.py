"""A training step for Flax NNX, in which a skipped step leaves no trace in the model. Needs `flax`.

NNX changes a model in place: a forward pass with an inf leaves the inf in the batch statistics,
even if the optimizer skips the step. `train_step` runs the passes on a copy of the model, and then
writes back the old or the new values, as the verdict says. You need not name batch statistics, and
streams of random numbers go on. If a skipped step should let other variables go on as well, pass as
`keep` a filter of those that it keeps. `jaxscale.metrics` and `jaxscale.check` take the
`nnx.Optimizer`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

try:
    from flax import nnx
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "flax":
        raise
    message = "`jaxscale.nnx` needs Flax, which is not installed: pip install flax"
    raise ImportError(message) from error

from ._jax import is_called_by_jax
from ._state.scale import unwrap
from ._step.loss_calls import explain_mistakes
from ._step.train_step import StepNames, build_step, name_step
from ._trees.arguments import int32
from ._trees.gradient_leaves import OVERWRITE_WITH_GRADIENT, replace_finite
from ._trees.pytrees import Params
from ._went import refuse_gone

__all__ = ["train_step"]

# Streams of random numbers go on, or the next step would repeat the noise of a skipped one.
# Intermediates are outputs of the forward pass, not its state.
_STATE = nnx.Not(nnx.Any(nnx.RngState, nnx.Intermediate))

_MAKE_IT = "Make it from this model, by `nnx.Optimizer(model, tx, wrt=nnx.Param)`."


def train_step(
    loss_fn: Callable[..., Any],
    *,
    has_aux: bool = False,
    retries: int = 0,
    keep: Any = _STATE,
    on_grads: Callable[[Any], Any] | None = None,
    **kwargs: Any,
) -> Callable[..., Any]:
    """Makes a training step that updates a model and its optimizer in place.

    A skipped step puts back whatever the forward pass changed: batch statistics, caches and
    counters, in the model and in other NNX objects among the arguments. Streams of random numbers
    go on. The step is not compiled: write `nnx.jit(jaxscale.nnx.train_step(loss_fn))`. (`jax.jit`
    would change a copy of the model and train nothing, so it is an error.)

    Args:
      loss_fn: the loss, `loss_fn(model, *args)`, as in `jaxscale.train_step`.
      has_aux: as in `jaxscale.train_step`.
      retries: as in `jaxscale.train_step`. Each pass starts from the model as it was.
      keep: which variables a skipped step keeps, as a filter of NNX. By default all but streams of
        random numbers and intermediates.
      on_grads: as in `jaxscale.train_step`. The gradients are an `nnx.State` of arrays, without
        those of FP8 statistics. These are variables of a type named `_overwrite_with_gradient`, as
        `nnx.bridge.ToNNX` makes them from Flax's. Every applied step replaces them, whatever
        `wrt` is.
      **kwargs: passed to `jax.value_and_grad`. Leave `argnums` out: the optimizer's `wrt` says
        what is differentiated.

    Returns:
      `step(model, optimizer, *args) -> loss`; with `has_aux` it returns `(loss, aux)`. The
      optimizer is an `nnx.Optimizer(model, tx, wrt=...)`. The step differentiates what the
      optimizer trains, such as only the LoRA weights with `wrt=nnx.LoRAParam`. If `tx` is not a
      `jaxscale.loss_scaled` optimizer, every step is applied, even bad ones. The optimizer's `step`
      counts all calls, including skipped steps. Keyword arguments go to `loss_fn`. Changes that
      `loss_fn` itself makes to trained variables are dropped, and so are changes to attributes that
      are not arrays, such as a Python number. The verdict depends on the loss and the gradients. If
      statistics may become NaN while these are finite, let `loss_fn` return
      `jnp.where(jaxscale.all_finite(nnx.state(model, nnx.BatchStat)), loss, jnp.nan)`.

    Warns:
      UserWarning: as in `jaxscale.train_step`, at the first call.

    Raises:
      TypeError: as `jaxscale.train_step`; when called, also if the second argument is not an
        `nnx.Optimizer`, or if `jax.jit` calls it.
      ValueError: as `jaxscale.train_step`; when called, also if `argnums` names something that the
        optimizer does not train.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from flax import nnx
      >>> import jaxscale, jaxscale.nnx
      >>> model = nnx.BatchNorm(2, momentum=0.5, rngs=nnx.Rngs(0))
      >>> tx = jaxscale.loss_scaled(optax.sgd(0.1))
      >>> optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
      >>> step = nnx.jit(jaxscale.nnx.train_step(lambda model, x: jnp.mean(model(x) ** 2)))
      >>> for size in [1.0, jnp.inf]:
      ...     loss = step(model, optimizer, jnp.full((4, 2), size))
      ...     print(model.mean[...], jaxscale.metrics(optimizer)["step_applied"])
      [0.5 0.5] True
      [0.5 0.5] False
    """
    call = "nnx.train_step"
    refuse_gone(call, kwargs)
    int32(call, "retries", retries, least=0)
    argnums = kwargs.pop("argnums", 0)
    explained_loss = explain_mistakes(call, loss_fn, has_aux=has_aux)
    names = StepNames(
        call=call,
        opt_state=f"{call}(...)(optimizer=...)",
        order="(model, optimizer, ...)",
        state=f"{call}(loss_fn)",
        way_out=_MAKE_IT,
    )

    def step(
        model: nnx.Module, optimizer: nnx.Optimizer, *args: Any, **loss_kwargs: Any
    ) -> Any:
        if not isinstance(optimizer, nnx.Optimizer):
            raise TypeError(
                f"`{call}(...)(model, optimizer, ...)`: `optimizer` must be an `nnx.Optimizer`, "
                f"got {type(optimizer).__name__}. {_MAKE_IT}"
            )
        if is_called_by_jax():
            # Nothing else shows it: the step would run, and its changes would be thrown away.
            raise TypeError(
                f"`{call}(...)` changes the model in place, and a transformation of JAX gave it a "
                "copy. Use that of NNX: `nnx.jit(step)` for `jax.jit(step)`."
            )
        wrt = optimizer.wrt
        _check_argnums(call, argnums, wrt)
        # Other NNX objects among the arguments change with the model, and so go beside it.
        inputs, treedef = jax.tree.flatten((args, loss_kwargs), is_leaf=_is_object)
        objects = [leaf for leaf in inputs if _is_object(leaf)]
        values = [None if _is_object(leaf) else leaf for leaf in inputs]
        filters = _make_filters(nnx.state((model, objects)), wrt, keep)
        graphdef, _, *carried, passing = nnx.split((model, objects), *filters)
        params = unwrap(nnx.state(model, wrt))

        def pure_loss(
            params: Params, carried: _Carried, passing: nnx.State, values: list[Any]
        ) -> Any:
            # A copy, made where the pass is traced: NNX lets a variable change only there.
            states = (nnx.State({0: params}), *carried, passing)
            copies = nnx.merge(graphdef, *states, copy=True)
            copied_model, copied_objects = copies
            remaining = iter(copied_objects)
            leaves = []
            for leaf, value in zip(inputs, values, strict=True):
                leaves.append(next(remaining) if _is_object(leaf) else value)
            args, loss_kwargs = treedef.unflatten(leaves)
            loss = explained_loss(copied_model, *args, **loss_kwargs)
            aux = None
            if has_aux:
                loss, aux = loss
            _, _, *states, passing = nnx.split(copies, *filters)
            return loss, (_Carried(*states), (passing, aux))

        pure_step = build_step(
            names,
            pure_loss,
            optimizer.tx,
            transform=_value_and_grad,
            has_state=True,
            has_aux=True,
            retries=retries,
            on_grads=on_grads,
            kwargs=kwargs,
        )
        opt_state = unwrap(optimizer.opt_state)
        params, opt_state, carried, (loss, (passing, aux)) = pure_step(
            params, opt_state, _Carried(*carried), passing, values
        )
        nnx.update((model, objects), *carried, passing)
        nnx.update(model, params)
        nnx.update(optimizer.opt_state, nnx.state(opt_state))
        optimizer.step[...] += 1
        if has_aux:
            return loss, aux
        return loss

    return name_step(step)


class _Carried(NamedTuple):
    """The variables of a model, and of objects beside it, that a skipped step keeps."""

    statistics: nnx.State  # of the model: what is replaced by its gradients
    others: nnx.State


def _is_object(node: object) -> bool:
    return nnx.graph.is_graph_node(node)


def _make_filters(state: nnx.State, wrt: Any, keep: Any) -> list[Any]:
    """Makes filters for the variables of a model and of objects beside it.

    These are what the optimizer trains, what is replaced by its gradient, what a skipped step
    keeps, and all others: also those that the loss function adds.
    """
    is_trained = nnx.filterlib.to_predicate(wrt)
    is_kept = nnx.filterlib.to_predicate(keep)
    groups = {}
    for path, variable in nnx.to_flat_state(state):
        is_of_model = path[0] == 0  # the first of the pair
        if is_of_model and is_trained(path[1:], variable):
            groups[path] = "trained"
        elif is_of_model and _is_overwrite(variable):
            groups[path] = "overwritten"
        elif is_kept(path, variable):
            groups[path] = "kept"

    def is_in(group: str) -> Callable[[Any, Any], bool]:
        return lambda path, variable: groups.get(path) == group

    return [is_in("trained"), is_in("overwritten"), is_in("kept"), ...]


def _value_and_grad(
    fun: Callable[..., Any], has_aux: bool, **kwargs: Any
) -> Callable[..., Any]:
    """Differentiates as `jax.value_and_grad`, and puts statistics that are gradients in place."""

    def differentiated(params: Params, carried: _Carried, *args: Any) -> Any:
        def loss(trained: Any, *args: Any) -> Any:
            params, statistics = trained
            return fun(params, carried._replace(statistics=statistics), *args)

        value_and_grad = jax.value_and_grad(loss, has_aux=has_aux, **kwargs)
        trained = params, carried.statistics
        (value, output), (grads, new) = value_and_grad(trained, *args)
        statistics = jax.tree.map(replace_finite, new, carried.statistics)
        new_carried, others = output.aux
        new_carried = new_carried._replace(statistics=statistics)
        return (value, output._replace(aux=(new_carried, others))), grads

    return differentiated


def _check_argnums(call: str, argnums: Any, wrt: Any) -> None:
    """Raises a `ValueError` if something else is to be differentiated than is trained."""
    if argnums not in (0, nnx.DiffState(0, wrt)):
        raise ValueError(
            f"`{call}(argnums={argnums!r})`: what the optimizer trains is "
            f"differentiated, and this one has wrt={wrt!r}. Leave `argnums` out, and say it "
            "there: `nnx.Optimizer(model, tx, wrt=nnx.LoRAParam)` trains the LoRA weights "
            "alone."
        )


def _is_overwrite(variable: object) -> bool:
    """Tells a variable whose gradient is its next value."""
    return OVERWRITE_WITH_GRADIENT in (base.__name__ for base in type(variable).__mro__)
