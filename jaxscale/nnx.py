"""A training step for Flax NNX, in which a skipped step leaves no trace in the model. Needs `flax`.

NNX changes a model in place: a forward pass with an inf leaves the inf in the batch statistics,
even if the optimizer skips the step. `train_step` runs the passes on a copy of the model, and then
writes back the old or the new values, as the verdict says. You need not name batch statistics, and
streams of random numbers go on. If a skipped step should let other variables go on as well, pass as
`keep` a filter of those that it keeps. `jaxscale.metrics` and `jaxscale.check` take the
`nnx.Optimizer`.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.tree_util import KeyPath

from ._trees.pytrees import Leaf, ScaleState

try:
    from flax import nnx
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "flax":
        raise
    message = "`jaxscale.nnx` needs Flax, which is not installed: pip install flax"
    raise ImportError(message) from error

from ._gradients.scaled import Scaled
from ._gradients.value_and_grad import BackwardPass, scale_transform
from ._jax import is_called_by_jax
from ._state.scale import unwrap
from ._step.bare_optimizer import as_optimizer
from ._step.loss_calls import explain_mistakes
from ._step.train_step import check_retries, make_step, name_step, warn_if_bare
from ._trees.arguments import int32
from ._trees.gradient_leaves import OVERWRITE_WITH_GRADIENT, replace_finite
from ._trees.selection import select_new
from ._went import warn_of

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
    after: Callable[[Any], None] | None = None,
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
      after: it goes in 0.7.0, as in `jaxscale.train_step`. A function `after(model)` that changes
        the model in place after the optimizer has changed it, for the uses in
        `jaxscale.train_step`. If the optimizer made no step, whatever `after` changed is put back,
        including random numbers. It should have no other side effects.
      **kwargs: passed to `nnx.value_and_grad`. Leave `argnums` out: the optimizer's `wrt` says
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
        `nnx.Optimizer`, if `after` returns anything, or if `jax.jit` calls it.
      ValueError: as `jaxscale.train_step`; when called, also if `argnums` names something that the
        optimizer does not train, or if a hook adds or removes variables of the model.

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
    if after is not None:
        warn_of("after")
    call = "nnx.train_step"
    int32(call, "retries", retries, least=0)
    transform_kwargs = kwargs
    warned: list[str] = []
    loss_fn = explain_mistakes(call, loss_fn, has_aux=has_aux)

    # `nnx.value_and_grad` accepts no keyword-only arguments.
    def positional_loss(model: object, args: tuple[Any, ...], kwargs: Any) -> Any:
        return loss_fn(model, *args, **kwargs)

    is_kept = nnx.filterlib.to_predicate(keep)

    def step(
        model: nnx.Module, optimizer: nnx.Optimizer, *args: Any, **kwargs: Any
    ) -> Any:
        if not isinstance(optimizer, nnx.Optimizer):
            raise TypeError(
                f"`{call}(...)(model, optimizer, ...)`: `optimizer` must be an `nnx.Optimizer`, "
                f"got {type(optimizer).__name__}. {_MAKE_IT}"
            )
        wrapped = as_optimizer(f"{call}(...)", optimizer.tx)
        check_retries(call, wrapped, retries)
        argument = f"{call}(...)(opt_state=...)"
        order = "(model, optimizer, ...)"
        before = unwrap(wrapped.enter(argument, optimizer.opt_state, order))
        if is_called_by_jax():
            # Nothing else shows it: the step would run, and its changes would be thrown away.
            raise TypeError(
                f"`{call}(...)` changes the model in place, and a transformation of JAX gave it a "
                "copy. Use that of NNX: `nnx.jit(step)` for `jax.jit(step)`."
            )
        objects = _take_objects(model, args, kwargs)
        graphdef, state_before = nnx.split(objects.graph)
        wrt = optimizer.wrt
        params = unwrap(nnx.state(model, wrt))
        wrapped.check_same(f"{call}(...)(optimizer=...)", before, params, _MAKE_IT)
        _check_argnums(call, transform_kwargs.get("argnums", 0), wrt)
        differentiated = wrt
        if nnx.to_flat_state(nnx.state(model, _is_overwrite)):
            # Statistics that travel as gradients are also differentiated; no optimizer sees them.
            differentiated = nnx.Any(wrt, _is_overwrite)
        argnums = nnx.DiffState(0, differentiated)
        leaves, treedef = jax.tree.flatten(state_before)

        def backward(scaling: ScaleState) -> BackwardPass:
            # A copy, made where the pass is traced: NNX lets a variable change only there.
            copy = nnx.merge(graphdef, treedef.unflatten(leaves))
            model, args, kwargs = objects.put_back(copy)
            make_pass = scale_transform(
                call,
                positional_loss,
                scaling,
                has_aux,
                nnx.value_and_grad,
                {**transform_kwargs, "argnums": argnums},
                "loss_fn",
            )
            result = make_pass(model, args, kwargs)
            grads = unwrap(nnx.state(result.grads.grads, wrt))
            overwrites = unwrap(nnx.state(result.grads.grads, _is_overwrite))
            _, state = nnx.split(copy)
            return result._replace(
                aux=(_PassState(state, overwrites), result.aux),
                grads=Scaled(grads, result.grads.divisor),
            )

        warn_if_bare(call, wrapped, before.inner_state, warned, stacklevel=3)
        inputs = (leaves, before, args, kwargs)
        made = make_step(
            call, wrapped, before, params, backward, inputs, retries, on_grads
        )
        state_after_pass, aux = made.backward_pass.aux
        select = functools.partial(select_new, f"{call}(loss_fn)", made.applied)
        is_trained = nnx.filterlib.to_predicate(wrt)
        state = _choose_state(
            state_before, state_after_pass, is_trained, is_kept, select
        )
        nnx.update(objects.graph, state)
        nnx.update(model, made.params)
        if after is not None:
            select = functools.partial(select_new, f"{call}(after=...)", made.stepped)
            _apply_after(model, after, select)
        nnx.update(optimizer.opt_state, nnx.state(made.opt_state))
        optimizer.step[...] += 1
        if has_aux:
            return made.backward_pass.loss, aux
        return made.backward_pass.loss

    return name_step(step)


class _PassState(NamedTuple):
    """The variables of a pass's objects after it."""

    state: nnx.State  # as the forward pass left them
    # the next values of those that travel as gradients, of the model alone
    overwrites: nnx.State


class _Objects(NamedTuple):
    """The NNX objects among the arguments of a step."""

    graph: Any  # the model, and a list of the others
    # from a copy of `graph` to `(model, args, kwargs)` with it
    put_back: Callable[[Any], Any]


def _take_objects(model: nnx.Module, args: tuple[Any, ...], kwargs: Any) -> _Objects:
    """Takes the NNX objects out of the arguments of a step, and says how to put copies back."""
    is_object = nnx.graph.is_graph_node
    leaves, treedef = jax.tree.flatten((args, kwargs), is_leaf=is_object)
    places = [place for place, leaf in enumerate(leaves) if is_object(leaf)]
    objects = [leaves[place] for place in places]

    def put_back(graph: Any) -> Any:
        copied_model, copies = graph
        copied_leaves = list(leaves)
        for place, copy in zip(places, copies, strict=True):
            copied_leaves[place] = copy
        args, kwargs = treedef.unflatten(copied_leaves)
        return copied_model, args, kwargs

    return _Objects(graph=(model, objects), put_back=put_back)


def _check_argnums(call: str, argnums: Any, wrt: Any) -> None:
    """Raises a `ValueError` if something else is to be differentiated than is trained."""
    if argnums not in (0, nnx.DiffState(0, wrt)):
        raise ValueError(
            f"`{call}(argnums={argnums!r})`: what the optimizer trains is "
            f"differentiated, and this one has wrt={wrt!r}. Leave `argnums` out, and say it "
            "there: `nnx.Optimizer(model, tx, wrt=nnx.LoRAParam)` trains the LoRA weights "
            "alone."
        )


def _is_overwrite(path: KeyPath, variable: object) -> bool:
    """Returns whether what is returned as the gradient of a variable is its next value."""
    return OVERWRITE_WITH_GRADIENT in (base.__name__ for base in type(variable).__mro__)


def _choose_state(
    before: nnx.State,
    after_pass: _PassState,
    is_trained: Callable[[Any, Any], bool],
    is_kept: Callable[[Any, Any], bool],
    select: Callable[[Any, Any], Any],
) -> nnx.State:
    """Returns the next state of the objects of a step, without what the optimizer trains.

    `select` chooses between a new and an old value. It is asked about the variables that a skipped
    step keeps; the others are new.
    """
    new: dict[Any, Any] = dict(nnx.to_flat_state(after_pass.state))
    # The model is the first of the objects, so 0 is the first part of its paths.
    overwrites: dict[Any, Any] = {}
    for path, leaf in nnx.to_flat_state(after_pass.overwrites):
        overwrites[0, *path] = leaf
    for path, variable in nnx.to_flat_state(before):
        if is_trained(path, variable):
            del new[path]
            continue
        if path not in overwrites and not is_kept(path, variable):
            continue
        old_value = unwrap(variable)
        new_value = unwrap(new[path])
        if path in overwrites:
            new_value = replace_finite(overwrites[path], old_value)
        chosen = _select_named(select, path, new_value, old_value)
        new[path] = _with_value(variable, chosen)
    return nnx.from_flat_state(new)


def _apply_after(
    model: nnx.Module, after: Callable[[Any], Any], select: Callable[[Any, Any], Any]
) -> None:
    """Lets a hook change a model, and puts into it what `select` chooses of new and old."""
    call = "`nnx.train_step(after=...)`"
    old = _read_variables(model)
    output = after(model)
    if output is not None:
        raise TypeError(
            f"{call} changes the model in place and must return None, got {type(output).__name__}."
        )
    new = _read_variables(model)
    only_one_has = new.keys() ^ old.keys()
    if only_one_has:
        names = sorted({_join_path(path) for path in only_one_has})
        raise ValueError(
            f"{call} must keep the variables of the model, but it added or removed "
            f"{', '.join(names)}. Make them where the model is made."
        )
    changed = {}
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        value = new[path]
        if value is not old[path]:
            chosen = _select_named(select, path, value, old[path])
            changed[path] = _with_value(variable, chosen)
    nnx.update(model, nnx.from_flat_state(changed))


def _with_value(variable: object, value: object) -> Any:
    """Returns a variable of a state with another value.

    A value alone would not do: if that is a dictionary, NNX takes it for a part of the state.
    """
    if isinstance(variable, nnx.Variable):
        return variable.replace(value)
    return value


def _read_variables(model: nnx.Module) -> dict[Any, Any]:
    """Returns the arrays in the variables of a model, by path."""
    return {path: unwrap(leaf) for path, leaf in nnx.to_flat_state(nnx.state(model))}


def _select_named(
    select: Callable[[Any, Any], Any], path: KeyPath, new: Leaf, old: Leaf
) -> Any:
    """Calls `select` with two values under the name of their variable, for its messages."""
    name = _join_path(path)
    return select({name: new}, {name: old})[name]


def _join_path(path: KeyPath) -> str:
    return ".".join(map(str, path))
