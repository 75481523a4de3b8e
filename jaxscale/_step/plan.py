"""The arguments of a training step, whichever front end it is for, and the passes it makes."""

import dataclasses
import functools
import inspect
import operator
import traceback
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from .._gradients.scaled import Scaled
from .._gradients.value_and_grad import backward_pass
from .._gradients.verdict import axis_names
from .._jax import is_told_apart
from .._state.find import is_loss_scaled
from .._trees.checks import int32, one_of
from .._trees.grammar import with_article
from .._trees.leaf import dtype_of, is_array_like, is_inexact_leaf
from .._trees.tree import cast, leaf_name, map_gradients, trained_params, widen
from .optimizer import Optimizer
from .retry import BackwardResult, repeat_backward, trace_once
from .skip import store_once
from .wrapper import Wrapper

_Function = TypeVar("_Function", bound=Callable[..., Any])


def refuse_more_arguments(call: str, way: str) -> Callable[[_Function], _Function]:
    """Returns a decorator for a function of the loss, which says where the optimizer goes."""

    def decorate(function: _Function) -> _Function:
        @functools.wraps(function)
        def checked(loss_fn: Any, *others: Any, **kwargs: Any) -> Any:
            if others:
                raise TypeError(
                    f"`{call}(loss_fn)` takes the loss alone, got {with_article(_kind(others[0]))} "
                    f"beside it. Leave that out: {way}."
                )
            return function(loss_fn, **kwargs)

        checked_function: Any = checked
        return checked_function

    return decorate


def _kind(value: Any) -> str:
    return type(value).__name__


@dataclasses.dataclass(frozen=True)
class StepPlan:
    call: str
    loss_fn: Callable[..., Any]
    transform: Callable[..., Any]
    has_state: bool
    has_aux: bool
    retries: int
    kwargs: Mapping[str, Any]
    on_grads: Callable[[Any], Any] | None = None
    after: Callable[..., Any] | None = None
    warned: list[bool] = dataclasses.field(default_factory=list)  # of a bare optimizer, once

    def __post_init__(self) -> None:
        if not callable(self.loss_fn):
            raise TypeError(
                f"`{self.call}(loss_fn)` must be a function that returns the loss, got "
                f"{type(self.loss_fn).__name__}."
            )
        for name, hook in {"on_grads": self.on_grads, "after": self.after}.items():
            if not (hook is None or callable(hook)):
                raise TypeError(
                    f"`{self.call}({name}=...)` must be a function or None, got "
                    f"{type(hook).__name__}."
                )
        for name in ("has_state", "has_aux"):
            one_of(self.call, name, getattr(self, name), (False, True))
        int32(self.call, "retries", self.retries, 0, "passes")
        try:
            inspect.signature(self.transform).bind(self.loss_fn, has_aux=True, **self.kwargs)
        except TypeError as error:
            name = getattr(self.transform, "__name__", type(self.transform).__name__)
            raise TypeError(
                f"`{self.call}(...)` got unexpected keyword arguments for `transform`, "
                f"`{name}`: {error}. Arguments of the optimizer, such as "
                "`axis_name`, go to `jaxscale.loss_scaled`."
            ) from error
        except ValueError:  # a function that does not say what it takes
            pass

    def check_retries(self, optimizer: Optimizer) -> None:
        if not self.retries or optimizer.can_back_off:
            return
        policy = with_article(type(optimizer.policy).__name__)
        got = "another optimizer" if optimizer.policy is None else f"one with {policy}"
        raise ValueError(
            f"`{self.call}(retries={self.retries})` needs a loss scale that can be lowered, got "
            f"{got}. Wrap the optimizer outermost, `tx = jaxscale.loss_scaled(tx)`, or leave "
            "`retries` out."
        )

    def warn_if_bare(self, optimizer: Optimizer, opt_state: Any, stacklevel: int) -> None:
        """Warns, once in the life of a step, if nothing in an optimizer skips bad steps."""
        if self.warned or isinstance(optimizer, Wrapper):
            return
        if any(map(is_loss_scaled, jax.tree.leaves(opt_state, is_leaf=is_loss_scaled))):
            return
        self.warned.append(True)
        warnings.warn(
            f"`{self.call}`: `tx` is a bare optimizer, so the loss is not scaled, and a step with "
            "an inf or a NaN is applied. Wrap it: `tx = jaxscale.loss_scaled(tx)`, or, for "
            "bfloat16 and float32, `jaxscale.skip_nonfinite(tx)`. If it is meant so, write "
            "`jaxscale.loss_scaled(tx, None, skip_nonfinite=False)`.",
            stacklevel=stacklevel,
        )

    def run_loss(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what the loss function does, or says how it was called if it does not fit."""
        try:
            return self.loss_fn(*args, **kwargs)
        except TypeError as error:
            reason = _misfit(self.loss_fn, args, kwargs, error)
            if not reason:
                raise
            given = ", ".join([*map(_described, args), *(f"{name}=..." for name in kwargs)])
            state, hint = "the state, " * self.has_state, ""
            if not self.has_state and not self.call.startswith("nnx"):
                hint = " Pass has_state=True if one of them is state that the step carries."
            raise TypeError(
                f"`{self.call}(loss_fn)`: `loss_fn` {reason}. The step called it with ({given}): "
                f"what is trained, {state}and whatever else the step was given.{hint}"
            ) from error

    def backward(self, scaling: Any, *args: Any, **kwargs: Any) -> BackwardResult:
        """Returns one pass with a loss scale state; `None` is a scale of 1."""
        loss_fn, has_aux = self._checked_loss_fn(), self.has_state or self.has_aux
        differentiated = backward_pass(
            self.call, loss_fn, scaling, has_aux, self.transform, self.kwargs, "loss_fn"
        )
        loss, aux, grads = differentiated(*args, **kwargs)
        state, aux = aux if self.has_state and self.has_aux else (aux, aux)
        return BackwardResult(loss, state, aux, grads)

    def run_backward(
        self,
        optimizer: Optimizer,
        opt_state: Any,
        backward: Callable[[Any], BackwardResult],
        traced: bool,
        params: Any,
    ) -> BackwardResult:
        """Returns the backward pass whose gradients are to be applied, with its verdict."""

        def run(scaling: Any) -> BackwardResult:
            return self._hooked(backward(scaling), params)

        self.warn_if_bare(optimizer, opt_state, stacklevel=4)
        start, axis_name = optimizer.scale_state(self.call, opt_state), optimizer.axis_name
        one_pass = run
        if optimizer.skips and traced and (self.on_grads is not None or self.retries):
            one_pass, axes = trace_once(run, start)
            # Devices that part would wait for each other for ever, or go on with other parameters.
            # Without a hook they cannot part unnoticed where types tell them apart.
            known = axis_names(axis_name)
            new = [axis for axis in axes if self.on_grads is not None or not is_told_apart(axis)]
            axis_name = (*known, *(axis for axis in new if axis not in known)) or None

        def judged(scaling: Any) -> BackwardResult:
            made = one_pass(scaling)
            if optimizer.skips:
                made = made._replace(grads=Scaled(store_once(made.grads.grads), made.grads.divisor))
            verdict = optimizer.judge(made, opt_state, axis_name)
            return made._replace(verdict=verdict, seen=None)

        if not self.retries:
            return judged(start)
        policy: Any = optimizer.policy  # one that moves, as `check_retries` saw
        return repeat_backward(self.call, policy, judged, start, self.retries, traced=traced)

    def _checked_loss_fn(self) -> Callable[..., Any]:
        """Returns the loss function with a check of what it returns."""
        parts = ["state"] * self.has_state + ["aux"] * self.has_aux
        expected = ["a loss", "(loss, {})", "(loss, ({}, {}))"][len(parts)].format(*parts)
        flags = "".join(f", has_{part}=True" for part in parts)

        @functools.wraps(self.loss_fn)
        def checked(*args: Any, **kwargs: Any) -> Any:
            output = self.run_loss(*args, **kwargs)
            fits = _is_pair(output) if parts else not isinstance(output, tuple)
            if fits and (len(parts) < 2 or _is_pair(output[1])):
                return output
            hint = f"Return it so, or leave{flags[1:]} out."
            if not parts:
                hint = "Pass has_aux=True if it returns anything beside the loss"
                state = ", and has_state=True if that is state that a skipped step keeps"
                hint += "." if self.call.startswith("nnx") else f"{state}."
            raise TypeError(
                f"`{self.call}(loss_fn{flags})`: `loss_fn` must return {expected}, got "
                f"{_described(output)}. {hint}"
            )

        return checked

    def _hooked(self, made: BackwardResult, params: Any) -> BackwardResult:
        """Returns a pass with the gradients that `on_grads` made of its own, unscaled."""
        if self.on_grads is None:
            return made
        old, structure = jax.tree.flatten(map_gradients(widen, made.grads.divided))
        grads = self.on_grads(structure.unflatten(old))
        new = jax.tree.leaves(grads)
        if jax.tree.structure(grads) == structure and all(map(operator.is_, new, old)):
            return made  # it only looked at them
        call = f"{self.call}(on_grads=...)"
        grads = _like(call, grads, structure.unflatten(old), params)
        return made._replace(grads=Scaled(grads), seen=made.grads)


def _like(call: str, grads: Any, old: Any, params: Any) -> Any:
    """Returns the gradients of a hook in the dtypes of those that it got, or raises an error.

    Their shapes may also be those of the parameters, where it got gradients by example.
    """
    got = f"`{call}` must return gradients like those that it got"
    structures = jax.tree.structure(old), jax.tree.structure(grads)
    if structures[0] != structures[1]:
        raise ValueError(
            f"{got}, {structures[0]}, and returned {structures[1]}. Return all of them, those "
            "that it does not change, too."
        )

    def check(path: Any, grad: Any, new: Any, param: Any) -> Any:
        if not is_inexact_leaf(grad):
            return new
        at, shapes = f"{got}: at {leaf_name(path)} it", (jnp.shape(grad), jnp.shape(param))
        if not is_inexact_leaf(new) or dtype_of(new) != dtype_of(grad):
            kind = dtype_of(new) if is_array_like(new) else type(new).__name__
            raise TypeError(f"{at} got {dtype_of(grad)} and returned {kind}. Cast the result.")
        if jnp.shape(new) not in shapes:
            raise ValueError(
                f"{at} got the shape {shapes[0]}, and the parameter has {shapes[1]}, but it "
                f"returned {jnp.shape(new)}."
            )
        return cast(new, dtype_of(grad))

    params = trained_params(params, old)
    params = params if jax.tree.structure(params) == structures[0] else old
    return jax.tree_util.tree_map_with_path(check, old, grads, params)


def _misfit(fun: Callable[..., Any], args: Any, kwargs: Mapping[str, Any], error: TypeError) -> str:
    """Returns why a call of a function failed before the function ran, or nothing if it did run."""
    fun = inspect.unwrap(fun)  # a decorator, such as `autocast`, may say nothing of what it takes
    entered = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    if getattr(fun, "__code__", None) not in entered:
        try:
            inspect.signature(fun).bind(*args, **kwargs)
        except TypeError as reason:
            return f"takes {inspect.signature(fun)}: {reason}"
        except ValueError:  # a function that does not say what it takes
            pass
    return ""


def _is_pair(output: Any) -> bool:
    return isinstance(output, tuple) and len(output) == 2


def _described(output: Any) -> str:
    """Returns the types in an output, as deep as tuples go."""
    if not isinstance(output, tuple) or hasattr(output, "_fields"):
        return type(output).__name__ if not is_array_like(output) else "an array"
    return f"({', '.join(map(_described, output))})"
