"""The scaled backward pass, run equation by equation to see where numbers get lost.

`Backward` holds the jaxpr of the loss and its scaled gradients, and runs it in the `Interpreter`:
at any loss scale, and with any part of it in float32. After each equation the interpreter calls
`_Findings.watch`, which asks `numbers` whether the equation made an inf or a NaN, or lost small
values. `_Findings.report` turns what was noted into a `TraceReport`: there `places` finds the
lines of the model. `trace` does all that once.
"""

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ..._jax import JaxprEqn
from ..._leaf import is_inexact
from ..._scaling import find_scaling
from ..._state import LossScaleState
from ..._tree import widen
from ..._value_and_grad import seeding, unseed, with_loss
from .._formats import is_ndarray, kind
from . import interpreter
from .constants import Constants
from .interpreter import Interpreter, Value, Visit, place_of
from .jaxpr import BACKWARD, EFFECT, FORWARD, HOLDERS
from .numbers import Birth, IncomparableError, Lost, birth, lost_values, nonfinite_mask
from .places import layer, lines
from .plan import Planner, RoundedAt
from .report import Place, TracedConstant, TracedNonfinite, TracedUnderflow, TraceReport

# A place is reported if it loses a larger share of the nonzero values.
_LOST_SHARE = 0.5


def trace(
    fun: Callable[..., Any],
    scaling: Any,
    *,
    transform: Callable[..., Any] = jax.value_and_grad,
    has_aux: bool = False,
    **kwargs: Any,
) -> Callable[..., TraceReport]:
    """Returns a function that finds where a backward pass overflows or underflows.

    The function runs the operations of `jaxscale.value_and_grad` one equation at a time,
    also those in `jit`, loops, `cond`, `remat` and custom derivatives. It looks at every
    number, computes again in float32 where numbers may have been lost, and gives the lines
    of the model where that happened. For the host, outside of `jit`, and for one small
    batch: the results of all equations are checked one by one, which is slow.

    Underflow is looked for in float16 and narrower formats: bfloat16 has the range of
    float32. A `shard_map`, a `pmap` or a kernel counts as one equation. A ref from outside
    `fun` keeps what it holds, because `fun` runs on a copy. A Python number is rounded
    before anything runs, and no equation shows that: in float16 `x * 1e-9` is `x * 0`. Such
    numbers are listed as `constants`, unless they stand in a function that was traced before.

    Args:
      fun: a function that returns a floating scalar, as for `jaxscale.value_and_grad`. It
        may be jitted or not: the trace sees inside either way.
      scaling: a `jaxscale.LossScaleState`, or a tree that holds exactly one. The
        scale in it is the one to trace with.
      transform: what differentiates, as for `jaxscale.value_and_grad`. Under a `vmap`, which
        gives several losses, the report has their mean.
      has_aux: whether `fun` returns a pair.
      **kwargs: passed to `transform`: `argnums`, `allow_int` and so on.

    Returns:
      A function with the arguments of `fun` that returns a `TraceReport`: print it.

    Raises:
      ValueError: if `scaling` holds no loss scale, or several, or that of a population.
      TypeError: when called, if the loss is not a floating scalar, if parameters are not
        floating, or inside `jit`.

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
    loss_scale = find_scaling("trace", scaling).loss_scale
    if loss_scale.shape:
        raise ValueError(
            f"`trace(scaling)` needs one loss scale, got an array of shape {loss_scale.shape}. "
            "Pass the state of one member of the population."
        )

    def trace_fun(*args: Any, **fun_kwargs: Any) -> TraceReport:
        _check(args, fun_kwargs, loss_scale)
        if transform is jax.value_and_grad and not kwargs.get("allow_int"):
            _check_floating(args, kwargs.get("argnums", 0))
        backward = Backward(fun, args, fun_kwargs, transform=transform, has_aux=has_aux, **kwargs)
        return backward.run(loss_scale).report()

    return trace_fun


class Backward:
    """The loss and its scaled gradients as a program that can be run in many ways.

    Args:
      fun: the loss, and its arguments.
      args: the arguments of the loss.
      fun_kwargs: its keyword arguments.
      constants: knows the numbers of the source that were rounded when `fun` was traced before.
      transform: what differentiates; this and the others are those of `trace`.
      has_aux: whether `fun` returns a pair.
      **kwargs: passed to `transform`.
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
        def backward(loss_scale: jax.Array) -> dict[str, Any]:
            # Not the state itself: with that of a `NoOpLossScale` no cotangent is scaled, and
            # there would be none to follow.
            state = LossScaleState(loss_scale, jnp.zeros(()), jnp.zeros(()))
            seeded, one_seed = seeding("trace", fun, state, has_aux)
            differentiated = transform(seeded, has_aux=True, **kwargs)
            # Copied inside the traced function: modules of Flax NNX may only change there.
            copies, copied_kwargs = jax.tree.map(lambda leaf: leaf, (args, fun_kwargs))
            output = differentiated(*copies, **copied_kwargs)
            loss, (aux, seed), grads = with_loss("trace", output)
            # In float32: the bounds of the divisor would be 0 and inf in float16, and the trace
            # would report them.
            grads = unseed(grads, widen(one_seed(seed)))
            return {"loss": loss} | _inexact("aux", aux) | _inexact("grads", grads)

        constants = Constants() if constants is None else constants
        # The arguments are constants of the jaxpr, so that a leaf that is not an array is kept.
        with constants.noticed():
            self._closed, shapes = jax.make_jaxpr(backward, return_shape=True)(jnp.float32(1))
        self._names = sorted(shapes)  # in the order in which a dictionary is flattened
        self._needs = tuple(
            BACKWARD if name.startswith("grads") else FORWARD for name in self._names
        )
        self._planner = Planner(constants)
        self._arguments = _inexact("args", args) | _inexact("kwargs", fun_kwargs)

    def run(
        self,
        loss_scale: Any,
        is_wide: Callable[[interpreter.Place], bool] = lambda place: False,
        look: Callable[[Visit], None] | None = None,
        is_brief: bool = False,
        is_shaken: bool = False,
    ) -> "Run":
        """Returns what one pass gives and does.

        Args:
          loss_scale: a `f32[]`.
          is_wide: whether the equation at a place is computed in float32, if it can be.
          look: is shown each equation.
          is_brief: whether to leave out what is made of numbers that are inf or NaN already.
          is_shaken: whether what is computed in float32 is changed by as much as float32 rounds.
        """
        findings, loss_scale = _Findings(look, is_brief), jnp.asarray(loss_scale, jnp.float32)
        with jax.debug_nans(False), jax.debug_infs(False):
            interpreter = Interpreter(self._planner, findings.watch, is_wide, is_shaken=is_shaken)
            outputs = interpreter.run(self._closed, [Value(loss_scale, True)], self._needs)
        return Run(
            dict(zip(self._names, outputs, strict=True)),
            findings,
            self._arguments,
            self._planner.rounded,
            float(loss_scale),
        )


class Run(NamedTuple):
    """One pass.

    Attributes:
      values: the loss, the gradients and what else is returned, by their names.
      findings: what was seen on the way.
      arguments: the floating-point arguments, by their names.
      rounded: the numbers that a narrow format rounded to 0 or inf, and where.
      loss_scale: the loss scale.
    """

    values: dict[str, Value]
    findings: "_Findings"
    arguments: dict[str, Any]
    rounded: Sequence[RoundedAt]
    loss_scale: float

    @property
    def grads(self) -> dict[str, np.ndarray]:
        """The gradients, by their names."""
        values = self.values.items()
        return {name: np.asarray(v.array) for name, v in values if name.startswith("grads")}

    def report(self) -> TraceReport:
        """Returns all that was seen, as Python values."""
        return self.findings.report(self.values, self.arguments, self.rounded, self.loss_scale)


def _check(args: Any, kwargs: Any, loss_scale: Any) -> None:
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((args, kwargs, loss_scale))):
        raise TypeError(
            "`trace` reads values, so it cannot run inside `jit` or another transformation. "
            "Call it where the training step is called, with the same arguments."
        )


def _check_floating(args: tuple[Any, ...], argnums: Any) -> None:
    for i in argnums if isinstance(argnums, Sequence) else [argnums]:
        for path, leaf in jax.tree_util.tree_leaves_with_path(args[i : i + 1 or None]):
            if not is_inexact(leaf):
                raise TypeError(
                    f"`trace(fun)` differentiates floating parameters, got {kind(leaf)} at "
                    f"args[{i}]{jax.tree_util.keystr(path[1:])}. Take it out of the parameters, "
                    "or pass allow_int=True or another argnums=...."
                )


def _inexact(name: str, tree: Any) -> dict[str, Any]:
    """Returns the floating-point and complex arrays of a tree, by their paths."""
    return {
        name + jax.tree_util.keystr(path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if is_ndarray(leaf) and is_inexact(leaf)
    }


class _Findings:
    """What was seen at each place. A place is an equation and the equations that hold it."""

    def __init__(self, look: Callable[[Visit], None] | None, is_brief: bool) -> None:
        self._look, self._is_brief = look, is_brief
        self.visits: collections.Counter[Any] = collections.Counter()  # in order of execution
        self.equations: dict[Any, tuple[JaxprEqn, tuple[JaxprEqn, ...]]] = {}
        self.times: collections.Counter[Any] = collections.Counter()
        self.births: dict[Any, tuple[Visit, Birth]] = {}
        self.lost: dict[Any, tuple[Visit, Lost]] = {}
        self.not_compared: set[str] = set()
        self.not_entered: set[str] = set()

    def watch(self, visit: Visit) -> list[frozenset[Any]]:
        """Returns where the inf and NaN of each output come from, and notes new ones."""
        place = place_of(visit.eqn, visit.around)
        self.visits[place] += 1
        self.equations[place] = visit.eqn, visit.around
        if visit.eqn.primitive.name in HOLDERS:
            self.not_entered.add(visit.eqn.primitive.name)
        if self._look:
            self._look(visit)
        if visit.need == EFFECT:  # only printed: it reaches no output
            return [frozenset()] * len(visit.outputs)
        self._note_lost(place, visit)
        bad = [nonfinite_mask(output) for output in visit.outputs]
        if not any(mask.any() for mask in bad):
            return [frozenset()] * len(bad)
        origins = frozenset().union(*(value.origins for value in visit.inputs))
        explained = any(self.births[origin][1].cause != "given" for origin in origins)
        born = None
        if not (explained and self._is_brief):
            arrays = [value.array for value in visit.inputs]
            born = birth(visit.eqn, arrays, visit.outputs, explained=explained)
        if born is None and not origins:
            output = next(i for i, mask in enumerate(bad) if mask.any())
            born = Birth(output, int(bad[output].sum()), "given")
        if born is not None:
            self.times["birth", place] += 1
            if place not in self.births or self.births[place][1].cause == "given" != born.cause:
                self.births.pop(place, None)  # so that it moves to the end: order of execution
                self.births[place] = visit, born
            origins |= {place}
        return [origins if mask.any() else frozenset() for mask in bad]

    def _note_lost(self, place: Any, visit: Visit) -> None:
        try:
            arrays = [value.array for value in visit.inputs]
            lost = lost_values(visit.eqn, arrays, visit.outputs, least=_LOST_SHARE)
        except IncomparableError:
            self.not_compared.add(visit.eqn.primitive.name)
            return
        if lost is not None:
            self.times["lost", place] += 1
            if place not in self.lost or lost.share > self.lost[place][1].share:
                self.lost[place] = visit, lost

    def report(
        self,
        outputs: dict[str, Value],
        arguments: dict[str, Any],
        rounded: Sequence[RoundedAt],
        loss_scale: float,
    ) -> TraceReport:
        """Returns all that was seen, as Python values."""
        reached = collections.defaultdict(list)
        for name, value in outputs.items():
            for origin in value.origins:
                reached[origin].append(name)
        births = [
            TracedNonfinite(
                **self._place("birth", place, visit, born.output, _share(visit, born)),
                elements=born.elements,
                cause=born.cause,
                least_input=born.least_input,
                largest_input=born.largest_input,
                float32_result=born.float32_result,
                reaches=tuple(reached[place]),
            )
            for place, (visit, born) in self.births.items()
        ]
        made = [birth for birth in births if birth.cause != "given"]
        # A given inf or NaN is of interest if a NaN was made of infinities, or if no place that
        # made one explains the outputs.
        explained = any(birth.reaches and birth.cause != "infinities" for birth in made)
        given = [birth for birth in births if birth.cause == "given" and birth.reaches]
        underflows = [
            TracedUnderflow(
                **self._place("lost", place, visit, lost.output, lost.share),
                nonzero=lost.nonzero,
                zeros=lost.zeros,
                subnormals=lost.subnormals,
                lost_sum=lost.lost_sum,
            )
            for place, (visit, lost) in self.lost.items()
        ]
        return TraceReport(
            loss=float(np.mean(np.asarray(outputs["loss"].array), dtype=np.float64)),
            loss_scale=loss_scale,
            equations=self.visits.total(),
            nonfinite=_without_repeats(made if explained else made + given),
            underflows=_without_repeats(underflows),
            nonfinite_arguments=_nonfinite_names(arguments),
            nonfinite_outputs=_nonfinite_names({k: v.array for k, v in outputs.items()}),
            not_compared=tuple(sorted(self.not_compared)),
            not_entered=tuple(sorted(self.not_entered)),
            constants=_traced_constants(rounded),
        )

    def place(self, visit: Visit, share: float) -> Place:
        """Returns a visited equation as a place of a report.

        Args:
          visit: the equation.
          share: the share of its numbers that was lost.
        """
        place = place_of(visit.eqn, visit.around)
        return Place(**self._place("", place, visit, 0, share))

    def _place(
        self, kind: str, place: Any, visit: Visit, output: int, share: float
    ) -> dict[str, Any]:
        eqn = visit.eqn
        line, *callers = lines(eqn, visit.around) or [None]
        return {
            "primitive": eqn.primitive.name,
            "dtype": str(visit.outputs[output].dtype),
            "shape": tuple(map(int, visit.outputs[output].shape)),
            "inputs": tuple(atom.aval.str_short() for atom in eqn.invars),
            "direction": "forward" if visit.need & FORWARD else "backward",
            "scaled": any(value.scaled for value in visit.inputs),
            "where": str(line) if line else "",
            "file": line.file if line else "",
            "line": line.number if line else 0,
            "source": line.text if line else "",
            "called_from": tuple(map(str, callers)),
            "layer": layer(eqn, visit.around),
            "iteration": visit.iteration,
            "times": self.times[kind, place],
            "visits": self.visits[place],
            "share": share,
        }


def _traced_constants(rounded: Sequence[RoundedAt]) -> tuple[TracedConstant, ...]:
    found: dict[Any, TracedConstant] = {}
    for eqn, around, number in rounded:
        line = lines(eqn, around)[0]
        constant = TracedConstant(
            value=number.exact,
            became=float(number.literal.val),
            dtype=str(np.asarray(number.literal.val).dtype),
            primitive=eqn.primitive.name,
            where=str(line),
            file=line.file,
            line=line.number,
            source=line.text,
        )
        found.setdefault((line.file, line.number, constant.value, constant.dtype), constant)
    return tuple(found.values())


def _share(visit: Visit, born: Birth) -> float:
    return born.elements / visit.outputs[born.output].size


def _without_repeats(places: Sequence[Any]) -> tuple[Any, ...]:
    """Returns places without the repeats that `remat` runs in the backward pass."""
    kept: dict[Any, Any] = {}
    for place in places:
        key = place.primitive, place.dtype, place.shape, place.file, place.line, place.share
        first = kept.get(key)
        if first is None or place.scaled or first.direction == place.direction:
            kept[(*key, len(kept)) if first else key] = place
        elif isinstance(place, TracedNonfinite):
            reaches = tuple(dict.fromkeys(first.reaches + place.reaches))
            kept[key] = dataclasses.replace(first, reaches=reaches)
    return tuple(kept.values())


def _nonfinite_names(leaves: dict[str, Any]) -> tuple[str, ...]:
    return tuple(name for name, leaf in leaves.items() if nonfinite_mask(leaf).any())
