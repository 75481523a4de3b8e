"""The arguments of a training step, whichever front end it is for, and the passes it makes."""

import dataclasses
import functools
import inspect
import operator
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import KeyPath

from .._gradients.scaled import Scaled
from .._gradients.value_and_grad import scale_transform
from .._gradients.verdict import axis_names
from .._jax import (
    AxisNames,
    collective_axes,
    is_told_apart,
    stacklevel_outside,
)
from .._state.optimizer import WINDOW_STATES, LossScaledState
from .._trees.arguments import int32
from .._trees.casts import cast, widen
from .._trees.flat_functions import Traced
from .._trees.gradient_leaves import leaf_name, map_gradients
from .._trees.grammar import with_article
from .._trees.leaves import dtype_of, is_array_like, is_inexact_leaf
from .._trees.params import combine, trained_params
from .._trees.pytrees import Leaf, OptState, ScaleState
from .advance import judge_pass
from .backward_pass import Pass
from .bare_optimizer import BareOptimizer, holds_loss_scaled, say_inside
from .call_update import NO_ARGS
from .checks import is_pair
from .retry import repeat_backward
from .wrapped_optimizer import WrappedOptimizer


class MadeStep(NamedTuple):
    """A step that was made or skipped."""

    run: Pass  # the last backward pass
    params: optax.Params
    opt_state: Any  # as users get it
    # bool[], whether it was not skipped, and whether the optimizer made a step; `None` if always
    applied: jax.Array | None
    stepped: jax.Array | None


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """The arguments of a `train_step`, checked.

    Attributes:
      call: the name of the `train_step`, for messages.
      loss_fn: the loss, a function of what is trained, of the state that is carried if there is
        any, and of whatever else the step is called with.
      transform: the function that differentiates it, such as `jax.value_and_grad`.
      has_state: whether `loss_fn` takes and returns a state that the step carries.
      has_aux: whether `loss_fn` returns an auxiliary output.
      retries: how many times a step may repeat its backward pass.
      kwargs: the arguments of `transform`.
      on_grads: the hook for the gradients, or `None`.
      after: the hook for what a step has made, or `None`. The front end calls it.
      warnings_given: filled by the first warning of a bare optimizer, so that it is the only one.
    """

    call: str
    loss_fn: Callable[..., Any]
    transform: Callable[..., Any]
    has_state: bool
    has_aux: bool
    retries: int
    kwargs: Mapping[str, Any]
    on_grads: Callable[[Any], Any] | None = None
    after: Callable[..., Any] | None = None
    warnings_given: list[str] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        int32(self.call, "retries", self.retries, least=0)

    def check_retries(self, own: WrappedOptimizer) -> None:
        """Raises a `ValueError` if retries cannot help, as the scale of the optimizer is fixed."""
        if not self.retries or own.can_back_off:
            return
        got = f"one with {with_article(type(own.policy).__name__)}"
        if isinstance(own, BareOptimizer):
            if own.hides_loss_scaled():
                raise ValueError(say_inside(f"{self.call}(retries={self.retries})"))
            got = "a bare optimizer"
        raise ValueError(
            f"`{self.call}(retries={self.retries})` needs a loss scale that can be lowered, got "
            f"{got}. Write `tx = jaxscale.loss_scaled(tx)`, whose policy lowers it, or leave "
            "`retries` out."
        )

    def warn_if_bare(self, own: WrappedOptimizer, opt_state: OptState) -> None:
        """Warns, once in the life of a step, if nothing in an optimizer skips bad steps."""
        if self.warnings_given or not isinstance(own, BareOptimizer):
            return
        if holds_loss_scaled(opt_state):
            return
        message = (
            f"`{self.call}`: `tx` is a bare optimizer, so the loss is not scaled, and a step with "
            "an inf or a NaN is applied. Wrap it: `tx = jaxscale.loss_scaled(tx)`, or, for "
            "bfloat16 and float32, `jaxscale.skip_nonfinite(tx)`. If this is intentional, write "
            "`jaxscale.loss_scaled(tx, None, skip_nonfinite=False)`."
        )
        self.warnings_given.append(message)
        warnings.warn(message, stacklevel=stacklevel_outside())

    def call_loss(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the loss function, and says what does not fit: its arguments, or its output."""
        try:
            output = self.loss_fn(*args, **kwargs)
        except TypeError as error:
            reason = _explain_misfit(self.loss_fn, args, kwargs, error)
            if not reason:
                raise
            arguments = [_describe(arg) for arg in args]
            arguments += [f"{name}=..." for name in kwargs]
            parts = "what is trained, and whatever else the step was given."
            if self.has_state:
                parts = (
                    "what is trained, the state, and whatever else the step was given."
                )
            elif not self.call.startswith("nnx"):
                parts += " Pass has_state=True if one of them is state that the step carries."
            raise TypeError(
                f"`{self.call}(loss_fn)`: `loss_fn` {reason}. The step called it with "
                f"({', '.join(arguments)}): {parts}"
            ) from error
        self._check_output(output)
        return output

    def differentiate(self, scaling: ScaleState, *args: Any, **kwargs: Any) -> Pass:
        """Makes one pass with a loss scale state."""
        call_loss = functools.partial(self.call_loss)
        run_backward = scale_transform(
            self.call,
            functools.update_wrapper(call_loss, self.loss_fn),
            scaling,
            self.has_state or self.has_aux,
            self.transform,
            self.kwargs,
            "loss_fn",
        )
        result = run_backward(*args, **kwargs)
        state = result.aux
        aux = result.aux
        if self.has_state and self.has_aux:
            state, aux = result.aux
        return Pass(result.grads, result.loss, state=state, aux=aux)

    def make_step(
        self,
        own: WrappedOptimizer,
        state: LossScaledState,
        params: optax.Params,
        backward: Callable[[Any], Pass],
        *,
        traced: bool,
    ) -> MadeStep:
        """Makes the backward passes of a step, and the step. `backward` makes one pass."""
        self.warn_if_bare(own, state.inner_state)
        start = own.find_start_scale(state)

        def hooked_pass(scaling: ScaleState) -> Pass:
            return self._call_hook(backward(scaling), params)

        one_pass = hooked_pass
        if own.judges and traced and (self.on_grads is not None or self.retries):
            one_pass = Traced(hooked_pass, start)
            axis_name = self._add_axes(own.axis_name, collective_axes(one_pass.jaxpr))
            own = dataclasses.replace(own, axis_name=axis_name)

        def judged_pass(scaling: ScaleState) -> Pass:
            run = one_pass(scaling)
            trained = trained_params(params, run.grads.grads)
            return judge_pass(own, run, state, trained, NO_ARGS)

        if self.retries:
            run = repeat_backward(
                self.call, own.policy, judged_pass, start, self.retries, traced=traced
            )
        else:
            run = one_pass(start)
        return apply_pass(own, run, state, params, NO_ARGS)

    def _add_axes(self, axis_name: AxisNames, axes: Sequence[Any]) -> Any:
        """Adds axes along which a pass exchanges numbers to those whose devices agree."""
        # Devices that part would wait for each other for ever, or go on with other parameters.
        # Without a hook they cannot part unnoticed where types tell them apart.
        names = list(axis_names(axis_name))
        for axis in axes:
            may_part = self.on_grads is not None or not is_told_apart(axis)
            if may_part and axis not in names:
                names.append(axis)
        if not names:
            return None
        return tuple(names)

    def _check_output(self, output: Any) -> None:
        """Raises a `TypeError` if the loss function returned another number of things."""
        flags = ""
        expected = "a loss"
        fits = not isinstance(output, tuple)
        if self.has_state and self.has_aux:
            flags = "has_state=True, has_aux=True"
            expected = "(loss, (state, aux))"
            fits = is_pair(output) and is_pair(output[1])
        elif self.has_state or self.has_aux:
            name = "state" if self.has_state else "aux"
            flags = f"has_{name}=True"
            expected = f"(loss, {name})"
            fits = is_pair(output)
        if fits:
            return
        called = f"{self.call}(loss_fn)"
        way_out = "Pass has_aux=True if it returns anything beside the loss"
        if flags:
            called = f"{self.call}(loss_fn, {flags})"
            way_out = f"Return it so, or leave {flags} out"
        elif not self.call.startswith("nnx"):
            way_out += ", and has_state=True if that is state that a skipped step keeps"
        raise TypeError(
            f"`{called}`: `loss_fn` must return {expected}, got {_describe(output)}. {way_out}."
        )

    def _call_hook(self, run: Pass, params: optax.Params) -> Pass:
        """Gives the gradients of a pass to `on_grads`, and goes on with those that it returns."""
        if self.on_grads is None:
            return run
        old_leaves, structure = jax.tree.flatten(
            map_gradients(widen, run.grads.divided)
        )
        new = self.on_grads(structure.unflatten(old_leaves))
        new_leaves = jax.tree.leaves(new)
        same_structure = jax.tree.structure(new) == structure
        if same_structure and all(map(operator.is_, new_leaves, old_leaves)):
            return run  # it only looked at them
        call = f"{self.call}(on_grads=...)"
        grads = _check_hooked(call, new, structure.unflatten(old_leaves), params)
        return run._replace(grads=Scaled(grads), before_hook=run.grads)


def explain_mistakes(
    call: str,
    loss_fn: Callable[..., Any],
    has_state: bool = False,
    has_aux: bool = False,
) -> Callable[..., Any]:
    """Wraps a loss function so that errors say what does not fit: its arguments, or its output."""
    plan = StepPlan(call, loss_fn, jax.value_and_grad, has_state, has_aux, 0, {})
    return plan.call_loss


def apply_pass(
    own: WrappedOptimizer,
    run: Pass,
    state: LossScaledState,
    params: optax.Params,
    extra_args: Mapping[str, Any],
) -> MadeStep:
    """Makes a step of a backward pass. The state was checked."""
    # Leaves without a gradient go around the step, as only arrays can be selected and compiled.
    trained = trained_params(params, run.grads.grads)
    trained, new_state = own.apply(run, state, trained, extra_args)
    verdict = own.find_verdict(new_state)
    applied = None
    if verdict is not None:
        applied = verdict.step_applied
    stepped = applied
    window = (verdict or new_state).inner_state
    if isinstance(window, WINDOW_STATES):  # ours, or that of Optax
        # One that is not full makes no step, though its micro-batch is not skipped either.
        window_before = (own.find_verdict(state) or state).inner_state
        stepped = window.gradient_step != window_before.gradient_step
    return MadeStep(
        run=run,
        params=combine(trained, params),
        opt_state=own.leave(new_state),
        applied=applied,
        stepped=stepped,
    )


def _check_hooked(
    call: str, new: optax.Updates, old: optax.Updates, params: optax.Params
) -> optax.Updates:
    """Returns the gradients of a hook in the dtypes of those that it got, or raises an error.

    Their shapes may also be those of the parameters, where it got gradients by example.
    """
    start = f"`{call}` must return gradients like those that it got"
    structure = jax.tree.structure(old)
    new_structure = jax.tree.structure(new)
    if new_structure != structure:
        raise ValueError(
            f"{start}, {structure}, and returned {new_structure}. Return all of them, those that "
            "it does not change included."
        )

    def check_leaf(path: KeyPath, old: Leaf, new: Leaf, param: Leaf) -> Any:
        if not is_inexact_leaf(old):
            return new
        place = f"{start}: at {leaf_name(path)} it"
        dtype = dtype_of(old)
        if not is_inexact_leaf(new) or dtype_of(new) != dtype:
            returned = type(new).__name__
            if is_array_like(new):
                returned = dtype_of(new)
            raise TypeError(
                f"{place} got {dtype} and returned {returned}. Cast the result."
            )
        if jnp.shape(new) not in (jnp.shape(old), jnp.shape(param)):
            raise ValueError(
                f"{place} got the shape {jnp.shape(old)}, and the parameter has "
                f"{jnp.shape(param)}, but it returned {jnp.shape(new)}."
            )
        return cast(new, dtype)

    params = trained_params(params, old)
    if jax.tree.structure(params) != structure:
        params = old
    return jax.tree_util.tree_map_with_path(check_leaf, old, new, params)


def _explain_misfit(
    fun: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    error: TypeError,
) -> str:
    """Returns why a call of a function failed before the function ran, empty if it did run."""
    # a decorator, such as `autocast`, may say nothing of what it takes
    fun = inspect.unwrap(fun)
    entered = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    if getattr(fun, "__code__", None) in entered:
        return ""
    try:
        inspect.signature(fun).bind(*args, **kwargs)
    except TypeError as reason:
        return f"takes {inspect.signature(fun)}: {reason}"
    except ValueError:  # a function that does not say what it takes
        return ""
    return ""


def _describe(output: object) -> str:
    """Returns the types in an output, as deep as tuples go."""
    if isinstance(output, tuple) and not hasattr(output, "_fields"):
        return f"({', '.join(map(_describe, output))})"
    if is_array_like(output):
        return "an array"
    return type(output).__name__
