"""The scaled backward pass, run equation by equation to see where numbers get lost."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ..._gradients.scaled import divide
from ..._gradients.value_and_grad import seed_cotangent, unpack_output
from ..._jax import JaxprEqn, Scan, While
from ..._state.find import find_scale_state
from ..._state.scale import LossScaleState
from ..._trees.casts import widen
from ..._trees.leaf import is_inexact_leaf
from .._formats import describe, is_array
from .findings import Findings, OverflowSeen, Run, pick_grads
from .interpreter import (
    TOP,
    Interpreter,
    IsWide,
    Location,
    Origins,
    Value,
    Visit,
)
from .needs import BACKWARD, FORWARD, EquationKey, read_holder
from .places import Constants, find_line
from .plan import Planner
from .program import compile_fast
from .report import TracedNonfinite, TraceReport


def trace(
    fun: Callable[..., Any],
    scaling: Any,
    *,
    transform: Callable[..., Any] | None = None,
    has_aux: bool = False,
    **kwargs: Any,
) -> Callable[..., TraceReport]:
    """Returns a function that finds where a backward pass overflows or underflows.

    The function runs the operations of `jaxscale.value_and_grad` one equation at a time, also those
    in `jit`, loops, `cond`, `remat` and custom derivatives. It looks at every number, computes
    again in float32 where numbers may have been lost, and gives the lines of the model where that
    happened. Call it on the host, outside of `jit`, and with one small batch: it is slow.

    Only float16 and narrower formats are checked for underflow: bfloat16 has the range of float32.
    A `shard_map`, a `pmap` or a kernel counts as one equation. A ref from outside `fun` keeps what
    it holds, because `fun` runs on a copy. A Python number is rounded before anything runs, and no
    equation shows that: in float16 `x * 1e-9` is `x * 0`. Such numbers are listed as `constants`,
    unless they stand in a function that was traced before.

    Args:
      fun: a function that returns a floating scalar. It may be jitted.
      scaling: a `jaxscale.LossScaleState` with the scale to trace with, or a tree with one.
      transform: what differentiates, as for `jaxscale.value_and_grad`. Of several losses, under a
        `vmap`, the report has the mean.
      has_aux: whether `fun` returns a pair.
      **kwargs: passed to `transform`: `argnums`, `allow_int` and so on.

    Returns:
      A function with the arguments of `fun` that returns a `TraceReport`: print it.

    Raises:
      ValueError: if `scaling` holds no loss scale, or several, or that of a population.
      TypeError: when called, if the loss is no floating scalar, a parameter is not floating, or
        inside `jit`.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxscale
      >>> from jaxscale import diagnostics
      >>> scaling = jaxscale.DynamicLossScale().init()
      >>> def loss_fn(w, x):
      ...     scores = x * w
      ...     return jnp.mean((scores * scores).astype(jnp.float32))
      >>> x = jnp.array([1.0, 2.0, 3.0, 400.0], jnp.float16)
      >>> report = diagnostics.trace(loss_fn, scaling)(jnp.float16(1.0), x)
      >>> first = report.first_nonfinite
      >>> first.direction, first.primitive, first.dtype, first.share
      ('forward', 'mul', 'float16', 0.25)
      >>> first.source
      'return jnp.mean((scores * scores).astype(jnp.float32))'
    """
    loss_scale = find_scale_state("trace", scaling).loss_scale
    if loss_scale.shape:
        raise ValueError(
            f"`trace(scaling)` needs one loss scale, got an array of shape {loss_scale.shape}. "
            "Pass the state of one member of the population."
        )

    differentiate = transform or jax.value_and_grad

    def trace_fun(*args: Any, **fun_kwargs: Any) -> TraceReport:
        leaves = jax.tree.leaves((args, fun_kwargs, loss_scale))
        if any(isinstance(leaf, Tracer) for leaf in leaves):
            raise TypeError(
                "`trace` reads values, so it cannot run inside `jit` or another transformation. "
                "Call it where the training step is called, with the same arguments."
            )
        check_floating("trace", args, differentiate, kwargs)
        traced = TracedBackward(
            fun, args, fun_kwargs, transform=differentiate, has_aux=has_aux, **kwargs
        )
        return traced.run(loss_scale).report()

    return trace_fun


def check_floating(
    call: str,
    args: tuple[Any, ...],
    transform: Callable[..., Any],
    options: Mapping[str, Any],
    also: str = "",
) -> None:
    """Raises a `TypeError` unless all leaves of the parameters are floating, as JAX needs them.

    `also` is what else a call needs for a module of Equinox.
    """
    if transform is not jax.value_and_grad or options.get("allow_int"):
        return
    argnums = options.get("argnums", 0)
    if not isinstance(argnums, Sequence):
        argnums = [argnums]
    for i in argnums:
        # a tuple of one parameter, empty if there is none at this position
        parameter = args[i : i + 1 or None]
        for path, leaf in jax.tree_util.tree_leaves_with_path(parameter):
            if not is_inexact_leaf(leaf):
                raise TypeError(
                    f"`{call}(fun)` differentiates floating parameters, got {describe(leaf)} at "
                    f"args[{i}]{jax.tree_util.keystr(path[1:])}. Take it out of the parameters, "
                    "or pass allow_int=True or another argnums=.... For a module of Equinox pass "
                    f"transform=equinox.filter_value_and_grad{also}."
                )


class TracedBackward:
    """The loss and its scaled gradients, given as to `trace`, as a program to run in many ways.

    `constants` are the numbers of the source that were rounded when `fun` was traced before.
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        args: tuple[Any, ...],
        fun_kwargs: dict[str, Any],
        constants: Constants | None = None,
        *,
        transform: Callable[..., Any] = jax.value_and_grad,
        has_aux: bool = False,
        **kwargs: Any,
    ) -> None:
        def compute_named(loss_scale: jax.Array) -> dict[str, Any]:
            """Returns the loss, the auxiliary output and the gradients, by their names."""
            # Not the state itself: with that of a `NoOpLossScale` no cotangent is scaled, and
            # there would be none to follow.
            state = LossScaleState(loss_scale, jnp.zeros(()), jnp.zeros(()))
            seeded, reduce_seed = seed_cotangent("trace", fun, state, has_aux)
            differentiated = transform(seeded, has_aux=True, **kwargs)
            # Copied inside the traced function: modules of Flax NNX may only change there.
            copies, copied_kwargs = jax.tree.map(lambda leaf: leaf, (args, fun_kwargs))
            output = unpack_output("trace", differentiated(*copies, **copied_kwargs))
            # In float32: the bounds of the divisor would be 0 and inf in float16, and the trace
            # would report them.
            grads = divide(output.grads, widen(reduce_seed(output.seed)))
            return {
                "loss": output.loss,
                **_name_inexact("aux", output.aux),
                **_name_inexact("grads", grads),
            }

        if constants is None:
            constants = Constants()
        # The arguments are constants of the jaxpr, so that a leaf that is not an array is kept.
        with constants.notice():
            make_jaxpr = jax.make_jaxpr(compute_named, return_shape=True)
            self._closed, shapes = make_jaxpr(jnp.float32(1))
        self._names = sorted(shapes)  # in the order in which a dictionary is flattened
        self._needs = tuple(map(_find_need, self._names))
        self._planner = Planner(constants)
        self._arguments = _name_inexact("args", args) | _name_inexact(
            "kwargs", fun_kwargs
        )
        # For `how_far`: how many equations the last pass had, and where this one is.
        self._total = 0
        self._done = 0
        self._location = TOP

    def run(
        self,
        loss_scale: float | jax.Array,
        is_wide: IsWide = lambda key: False,
        look: Callable[[Visit], None] | None = None,
        is_brief: bool = False,
        is_shaken: bool = False,
    ) -> Run:
        """Returns what one pass gives and does. `look` is shown each equation.

        A brief one leaves out what is made of numbers that are inf or NaN already. A shaken one
        changes what is computed in float32 by as much as float32 rounds.
        """
        findings = Findings(look, is_brief)
        outputs = self._interpret(findings, loss_scale, is_wide, is_shaken)
        return Run(
            values=dict(zip(self._names, outputs, strict=True)),
            findings=findings,
            arguments=self._arguments,
            rounded=self._planner.rounded,
            loss_scale=float(loss_scale),
        )

    def first_overflow(self, loss_scale: float) -> TracedNonfinite | None:
        """Returns the first place that depends on the loss scale and makes inf or NaN.

        The pass stops there, so it is not known whether that reaches the gradients.
        """
        findings = Findings(look=None, is_brief=True, is_hasty=True)
        try:
            self._interpret(
                findings, loss_scale, is_wide=lambda key: False, is_shaken=False
            )
        except OverflowSeen:
            return findings.list_nonfinite(reached={})[-1]
        return None

    def _interpret(
        self,
        findings: Findings,
        loss_scale: float | jax.Array,
        is_wide: IsWide,
        is_shaken: bool,
    ) -> list[Value]:
        """Runs the program, shows it to the findings, and returns its outputs."""

        def watch(visit: Visit) -> list[Origins]:
            self._location = Location(visit.around, visit.iteration)
            return findings.watch(visit)

        def count(key: EquationKey) -> bool:  # called once for each equation
            self._done += 1
            return is_wide(key)

        self._total = self._done
        self._done = 0
        self._location = TOP
        interpreter = Interpreter(self._planner, watch, count, is_shaken)
        scale = Value(jnp.float32(loss_scale), scaled=True)
        with jax.debug_nans(False), jax.debug_infs(False):
            return interpreter.interpret(self._closed, [scale], self._needs)

    def run_compiled(
        self, loss_scale: float, is_wide: IsWide
    ) -> dict[str, np.ndarray] | None:
        """Returns the gradients of the pass compiled as one program, some equations in float32.

        XLA may put operations together there. A loop is one equation. `None` if the program has
        refs, which only run outside of it.
        """
        plan = self._planner.plan(self._closed, self._needs)
        if plan.has_refs:
            return None

        # As arguments: of constants XLA would compute the results ahead of time.
        values = {const.slot: const.value for const in plan.consts}
        values[plan.inputs[0]] = jnp.float32(loss_scale)
        compute_outputs = functools.partial(plan.compute, is_wide=is_wide)
        # As the trace rounds: each equation to its own dtype.
        compiled = compile_fast(compute_outputs, xla_allow_excess_precision=False)
        with jax.debug_nans(False), jax.debug_infs(False):
            outputs = compiled(values)
        return pick_grads(dict(zip(self._names, outputs, strict=True)))

    def how_far(self) -> str:
        """Returns how far the pass that runs now has come, in words. Another thread may ask."""
        words = f"operation {self._done}"
        if self._total > 0:
            words += f" of about {self._total}"
        location = self._location
        loops = [
            eqn for eqn in location.around if isinstance(read_holder(eqn), Scan | While)
        ]
        # A loop that is entered has no index before its first operation.
        for loop, iteration in zip(loops, location.iteration, strict=False):
            words += f", {_say_iteration(loop, iteration)}"
        return words


def _say_iteration(eqn: JaxprEqn, iteration: int) -> str:
    """Returns how far a loop has come, and its line."""
    loop = read_holder(eqn)
    words = f"iteration {iteration + 1}"
    if isinstance(loop, Scan):  # a `while` has no known length
        done = iteration + 1
        if loop.reverse:
            done = loop.length - iteration
        words = f"iteration {done} of {loop.length}"
    line = find_line(eqn, ())
    if not line.file:
        return words
    return f"{words} at {line}"


def _find_need(name: str) -> int:
    if name.startswith("grads"):
        return BACKWARD
    return FORWARD


def _name_inexact(name: str, tree: Any) -> dict[str, Any]:
    """Returns the floating-point and complex arrays of a tree, by their paths."""
    arrays = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if is_array(leaf) and is_inexact_leaf(leaf):
            arrays[name + jax.tree_util.keystr(path)] = leaf
    return arrays
