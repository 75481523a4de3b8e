"""A training step for Flax NNX, in which a skipped step leaves no trace in the model. Needs `flax`.

NNX changes a model in place: a forward pass with an inf leaves it in the batch statistics, whether
the optimizer skips the step or not. `train_step` runs the passes on a copy of the model, and then
puts into the model what the verdict chooses. Batch statistics need no mention, and streams of
random numbers go on. If other variables must go on, too, `keep` is the filter of those that must
not. `jaxscale.metrics` and `jaxscale.check` take the `nnx.Optimizer`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax

try:
    from flax import nnx
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "flax":
        raise
    message = "`jaxscale.nnx` needs Flax, which is not installed: pip install flax"
    raise ImportError(message) from error

from ._gradients.scaled import Scaled
from ._jax import is_called_by_jax
from ._state.scale import unwrap
from ._step.apply import select_if_applied, select_if_stepped
from ._step.checks import check_same_optimizer
from ._step.optimizer import apply_step, as_optimizer
from ._step.plan import StepPlan, refuse_more_arguments
from ._step.retry import BackwardResult, is_traced
from ._step.train_step import with_name
from ._trees.tree import OVERWRITE_WITH_GRADIENT, replace_finite

__all__ = ["train_step"]

# Streams of random numbers go on, or the next step would repeat the noise of a skipped one.
# Intermediates are outputs of the forward pass, not its state.
_STATE = nnx.Not(nnx.Any(nnx.RngState, nnx.Intermediate))

_MAKE_IT = "Make it from this model, by `nnx.Optimizer(model, tx, wrt=nnx.Param)`."


@refuse_more_arguments(
    "nnx.train_step",
    "the step takes the optimizer when it is called: `step = "
    "nnx.jit(jaxscale.nnx.train_step(loss_fn))`, and then `loss = step(model, optimizer, ...)`",
)
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
    """Returns a training step that updates a model and its optimizer in place.

    A skipped step puts back whatever the forward pass changed: batch statistics, caches and
    counters, in the model and in other NNX objects among the arguments. Streams of random numbers
    go on. The step is not compiled: write `nnx.jit(jaxscale.nnx.train_step(loss_fn))`. (Under
    `jax.jit` it would change a copy of the model, and train nothing.)

    Args:
      loss_fn: the loss, `loss_fn(model, *args)`, as in `jaxscale.train_step`.
      has_aux: as there.
      retries: as in `jaxscale.train_step`. Each pass starts from the model as it was.
      keep: which variables a skipped step keeps, as a filter of NNX. By default all but streams of
        random numbers and intermediates.
      on_grads: as in `jaxscale.train_step`. The gradients are an `nnx.State` of arrays, without
        those of FP8 statistics: variables of a type named `_overwrite_with_gradient`, as
        `nnx.bridge.ToNNX` makes them of Flax's. Every applied step replaces these, whatever
        `wrt` is.
      after: a function `after(model)` that changes the model in place, after the optimizer has, for
        the uses in `jaxscale.train_step`. Whatever it changes is put back where the optimizer made
        no step, random numbers included. It should have no other side effects.
      **kwargs: passed to `nnx.value_and_grad`. Leave `argnums` out: the optimizer's `wrt` says
        what is differentiated.

    Returns:
      `step(model, optimizer, *args) -> loss`; with `has_aux` it returns `(loss, aux)`. The
      optimizer is an `nnx.Optimizer(model, tx, wrt=...)`; what it trains is differentiated, with
      `wrt=nnx.LoRAParam` only the LoRA weights. If `tx` is not a `jaxscale.loss_scaled` optimizer,
      every step is applied, bad ones too. Its `step` counts all calls, also those that were
      skipped. Keyword arguments go to `loss_fn`. Changes that `loss_fn` itself makes to trained
      variables are dropped, and so are those of attributes that are not arrays, such as a Python
      number. The verdict is about the loss and the gradients: if statistics may turn NaN while
      these are finite, let `loss_fn` return
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
    call = "nnx.train_step"
    plan = StepPlan(
        call, loss_fn, nnx.value_and_grad, False, has_aux, retries, kwargs, on_grads, after
    )

    # As `nnx.value_and_grad` accepts no keyword-only arguments.
    def positional(model: Any, args: Any, kwargs: Any) -> Any:
        return plan.run_loss(model, *args, **kwargs)

    is_kept = nnx.filterlib.to_predicate(keep)

    def step(model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(optimizer, nnx.Optimizer):
            raise TypeError(
                f"`{call}(...)(model, optimizer, ...)`: `optimizer` must be an `nnx.Optimizer`, "
                f"got {type(optimizer).__name__}. {_MAKE_IT}"
            )
        tx, wrt = as_optimizer(f"{call}(...)", optimizer.tx), optimizer.wrt
        given, order = f"{call}(...)(opt_state=...)", "(model, optimizer, ...)"
        start = unwrap(tx.check_state(given, optimizer.opt_state, order))
        if is_called_by_jax():
            # Nothing else shows it: the step would run, and its changes would be thrown away.
            raise TypeError(
                f"`{call}(...)` changes the model in place, and a transformation of JAX gave it a "
                "copy. Use that of NNX: `nnx.jit(step)` for `jax.jit(step)`."
            )
        plan.check_retries(tx)
        graph, put_together = _taken_apart(model, args, kwargs)
        graphdef, before = nnx.split(graph)
        params = unwrap(nnx.state(model, wrt))
        check_same_optimizer(f"{call}(...)(optimizer=...)", tx, start, params, _MAKE_IT)
        if plan.kwargs.get("argnums", 0) not in (0, nnx.DiffState(0, wrt)):
            raise ValueError(
                f"`{call}(argnums={plan.kwargs['argnums']!r})`: what the optimizer trains is "
                f"differentiated, and this one has wrt={wrt!r}. Leave `argnums` out, and say it "
                "there: `nnx.Optimizer(model, tx, wrt=nnx.LoRAParam)` trains the LoRA weights "
                "alone."
            )
        # Statistics that travel as gradients are differentiated, too, and no optimizer sees them.
        overwrites = bool(nnx.to_flat_state(nnx.state(model, _is_overwrite)))
        trains = nnx.DiffState(0, nnx.Any(wrt, _is_overwrite) if overwrites else wrt)
        differentiated = dataclasses.replace(
            plan, loss_fn=positional, kwargs={**plan.kwargs, "argnums": trains}
        )
        leaves, treedef = jax.tree.flatten(before)

        def backward(scaling: Any) -> BackwardResult:
            # A copy, made where the pass is traced: NNX lets a variable change only there.
            copy = nnx.merge(graphdef, treedef.unflatten(leaves))
            model, args, kwargs = put_together(copy)
            made = differentiated.backward(scaling, model, args, kwargs)
            grads = unwrap(nnx.state(made.grads.grads, wrt))
            replacing = unwrap(nnx.state(made.grads.grads, _is_overwrite))
            state = nnx.split(copy)[1], replacing
            return made._replace(state=state, grads=Scaled(grads, made.grads.divisor))

        traced = is_traced(leaves, start, args, kwargs)
        made = plan.run_backward(tx, start, backward, traced, params)
        params, opt_state = apply_step(tx, start, params, made)
        keeping = functools.partial(select_if_applied, f"{call}(loss_fn)", tx, opt_state)
        trained = nnx.filterlib.to_predicate(wrt)
        state, replaced = made.state
        new: dict[Any, Any] = dict(nnx.to_flat_state(state))
        # Of the model, which is the first of the objects.
        replacing: dict[Any, Any] = {(0, *path): leaf for path, leaf in nnx.to_flat_state(replaced)}
        for path, old in nnx.to_flat_state(before):
            if trained(path, old):
                del new[path]
            elif path in replacing or is_kept(path, old):
                name, array = ".".join(map(str, path)), unwrap(old)
                value = unwrap(new[path])
                if path in replacing:
                    value = replace_finite(replacing[path], array)
                new[path] = keeping({name: value}, {name: array})[name]
        nnx.update(graph, nnx.from_flat_state(new))
        nnx.update(model, params)
        if after is not None:
            finish = functools.partial(
                select_if_stepped, f"{call}(after=...)", tx, start, opt_state
            )
            _change(model, after, finish)
        nnx.update(optimizer.opt_state, nnx.state(opt_state))
        optimizer.step[...] += 1
        return (made.loss, made.aux) if has_aux else made.loss

    return with_name(step)


def _is_overwrite(path: Any, variable: Any) -> bool:
    """Returns whether what is returned as the gradient of a variable is its next value."""
    return OVERWRITE_WITH_GRADIENT in (base.__name__ for base in type(variable).__mro__)


def _change(
    model: nnx.Module, after: Callable[[Any], Any], finish: Callable[[Any, Any], Any]
) -> None:
    """Lets a hook change a model, and puts into it what `finish` chooses of new and old."""

    def variables() -> dict[Any, Any]:
        return {path: unwrap(leaf) for path, leaf in nnx.to_flat_state(nnx.state(model))}

    call, old = "`nnx.train_step(after=...)`", variables()
    output = after(model)
    if output is not None:
        raise TypeError(
            f"{call} changes the model in place and must return None, got {type(output).__name__}."
        )
    new = variables()
    if apart := {".".join(map(str, path)) for path in new.keys() ^ old.keys()}:
        raise ValueError(
            f"{call} must keep the variables of the model, but it added or removed "
            f"{', '.join(sorted(apart))}. Make them where the model is made."
        )
    changed = {path: leaf for path, leaf in new.items() if leaf is not old[path]}
    for path, leaf in changed.items():
        name = ".".join(map(str, path))
        changed[path] = finish({name: leaf}, {name: old[path]})[name]
    nnx.update(model, nnx.from_flat_state(changed))


def _taken_apart(model: Any, args: Any, kwargs: Any) -> tuple[Any, Callable[[Any], Any]]:
    """Returns the NNX objects among the arguments, and how a copy of them is put back."""
    leaves, treedef = jax.tree.flatten((args, kwargs), is_leaf=nnx.graph.is_graph_node)
    places = [i for i, leaf in enumerate(leaves) if nnx.graph.is_graph_node(leaf)]

    def put_together(graph: Any) -> Any:
        model, objects = graph
        copies = dict(zip(places, objects, strict=True))
        args, kwargs = treedef.unflatten(copies.get(i, leaf) for i, leaf in enumerate(leaves))
        return model, args, kwargs

    return (model, [leaves[i] for i in places]), put_together
