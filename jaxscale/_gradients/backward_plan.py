"""How `scale_backward` runs a program that is split in two: forward, and back through both parts.

The backward pass has four steps:

1. The tail runs, unscaled.
2. The scale is chosen, from the cotangents that leave the tail.
3. The head runs with these cotangents scaled, and again at a lower scale if it overflows.
4. The gradients are divided by the scale.
"""

import functools
import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.tree_util import Partial

from .. import _jax
from .._trees.casts import blank, cast, widen
from .cotangent_scale import MOST_RAISED, choose_power, pull_with_retries
from .head_and_tail import split
from .known_zeros import is_noting, note_tangents, note_zeros, noting
from .parts import Part
from .reduction import reduce_sizes
from .scaled import Scaled, divide, multiply
from .verdict import agree_on_sizes, axis_names, no_such_axis

_NO_SECOND = (
    "`scale_backward(retries={})`: its backward pass was differentiated in reverse mode, such as "
    "for the gradient of a gradient norm. The loop of retries has no such derivative. Pass "
    "`retries=0`, and wrap what is made of the gradients by `scale_backward`, too; or "
    "differentiate the gradients in forward mode: `jax.jvp(jax.grad(...), ...)`."
)
_UNSCALED_SECOND = (
    "`scale_backward(retries=0)`: its backward pass is differentiated in reverse mode, such as for "
    "the gradient of a gradient norm. That second pass is not scaled, and small values flush to 0 "
    "in it. Wrap what is made of the gradients by `scale_backward`, too, apart from the loss: "
    "`loss(p) + scale_backward(lambda p: penalty(jax.grad(loss)(p)))(p)`."
)


class Options(NamedTuple):
    """The arguments of a `scale_backward`, checked."""

    scale: float | None  # `None` to take it from the cotangents
    retries: int
    axis_name: Any


class BackwardPlan:
    """A program that is split in two, and by which inputs each part is differentiated.

    Attributes:
      inputs: the variables of the program's inputs.
      head: the half-precision part.
      tail: the part that follows it.
      sources: for each input of the head that is a cast of an input of the program, that input.
      head_by: the inputs of the head that it is differentiated by.
      head_sources: for each of these, the input of the program that it is or is cast from.
      tail_by: the inputs of the program that the tail is differentiated by.
      entries: the outputs of the head where cotangents of the tail may enter it.
      entry_types: the type of each entry, once the program has run forward.
      axes: the named axes along which the program communicates.
    """

    def __init__(
        self,
        program: _jax.ClosedJaxpr,
        under_autocast: bool,
        perturbed: tuple[bool, ...],
    ) -> None:
        """Splits a program. `perturbed` says by which of its inputs it is differentiated."""
        parts = split(program, under_autocast)
        self.inputs = parts.inputs
        self.tail = parts.tail
        self.axes = _jax.collective_axes(program)
        differentiated_by = set(itertools.compress(self.inputs, perturbed))
        # Parameters are cast before the head, and their gradients cast back after it. The loop of
        # retries keeps all gradients in memory at once. In half precision they take half the memory
        # of float32.
        self.head, self.sources = parts.head.without_casts(differentiated_by)
        differentiated_by |= set(self.sources)
        derived = self.head.find_derived(differentiated_by)
        self.head_by = [var for var in self.head.inputs if var in differentiated_by]
        self.head_sources = [self.sources.get(var, var) for var in self.head_by]
        self.tail_by = [var for var in self.tail.inputs if var in differentiated_by]
        self.entries = [var for var in self.head.outputs if var in derived]
        self.entry_types: list[Any] = []

    def run_forward(self, inputs: Sequence[Any]) -> tuple[tuple[Any, ...], Partial]:
        """Returns the outputs, and what pulls cotangents back through both parts."""
        env = dict(zip(self.inputs, inputs, strict=True))
        for var, source in self.sources.items():
            env[var] = cast(env[source], var.aval.dtype)
        # The rule of `note_tangents` fills this list: one bool for each entry, whether it has a
        # tangent. If none has one, JAX never runs the rule, and the list stays empty.
        with noting() as noted:
            crossing, pull_head = _run_part(
                self.head,
                env,
                by=self.head_by,
                of=self.entries,
                note_outputs=note_tangents,
            )
        env |= zip(self.head.outputs, crossing, strict=True)
        # The types in a `shard_map` are known only now, and are the same in each call.
        self.entry_types = [jax.typeof(env[var]) for var in self.entries]
        have_tangents = noted or [False] * len(self.entries)
        entries = list(itertools.compress(self.entries, have_tangents))
        num_entries = len(entries)

        def note_entries(*values: Any) -> Any:
            return *note_zeros(*values[:num_entries]), *values[num_entries:]

        outputs, pull_tail = _run_part(
            self.tail,
            env,
            by=[*entries, *self.tail_by],
            of=[atom for atom in self.tail.outputs if _jax.holds_inexact(atom.aval)],
            note_inputs=note_entries,
        )
        # What a backward pass keeps must be a tree of arrays. So these marks are a tree without
        # arrays, whose structure says which entries have a tangent.
        entry_marks = [() if has_tangent else None for has_tangent in have_tangents]
        pull = Partial(self._pull_back, entry_marks, pull_head, pull_tail)
        return tuple(outputs), pull

    def _pull_back(
        self,
        entry_marks: Sequence[Any],
        pull_head: Any,
        pull_tail: Any,
        cotangents: Any,
        options: Options,
    ) -> tuple[Any, ...]:
        """Returns the gradients for all inputs, `None` for those that have none."""
        inexact = filter(_jax.holds_inexact, cotangents)
        # The rule of `note_zeros` fills this list: one bool for each entry with a tangent, whether
        # its cotangent is zero. If JAX knows that all are, it never runs the rule, and the list
        # stays empty.
        with noting() as noted:
            pulled = pull_tail(list(map(_instantiate, inexact)))
        num_entries = len(pulled) - len(self.tail_by)
        of_tail = pulled[num_entries:]
        gradients = dict(zip(self.tail_by, of_tail, strict=True))
        are_zeros = noted or [True] * num_entries
        cotangents_and_zeros = zip(pulled[:num_entries], are_zeros, strict=True)
        entering = []
        for mark in entry_marks:
            cotangent = None
            if mark is not None:
                cotangent, is_zero = next(cotangents_and_zeros)
                if is_zero:
                    cotangent = None
            entering.append(cotangent)
        if self.head_by and any(cotangent is not None for cotangent in entering):
            # `_warn_unscaled` of an inner `scale_backward` sees by this that it is scaled. The list
            # is not read.
            with noting():
                of_head = self._pull_through_head(pull_head, entering, options)
            for var, gradient in zip(self.head_sources, of_head, strict=True):
                if gradients.get(var) is not None:
                    gradient = gradient + widen(gradients[var])
                gradients[var] = gradient
        results = []
        for var in self.inputs:
            gradient = None
            if var in gradients:
                gradient = cast(gradients[var], var.aval.dtype)
            results.append(gradient)
        return tuple(results)

    def _pull_through_head(
        self, pull: Any, cotangents: list[Any], options: Options
    ) -> list[jax.Array]:
        """Pulls cotangents back through the head, and returns the gradients in float32 or wider.

        There is one cotangent for each entry. It is `None` if nothing depends on the entry.
        """
        entering = [cotangent for cotangent in cotangents if cotangent is not None]
        axes = self._find_agreed_axes(entering, options.axis_name)

        def pull_scaled(scale: jax.Array) -> list[Any]:
            scaled = iter(multiply(entering, scale))
            at_entries = []
            for aval, cotangent in zip(self.entry_types, cotangents, strict=True):
                if cotangent is None:
                    at_entries.append(_make_zero(aval))
                else:
                    at_entries.append(cast(next(scaled), cotangent.dtype))
            return list(pull(at_entries))

        scale = jnp.float32(options.scale or 1)
        may_repeat = jnp.array(True)
        if options.scale is None or options.retries:
            largest = _find_largest(entering, axes)
            # No retry helps if a cotangent is inf or NaN before it is scaled.
            may_repeat = jnp.all(jnp.isfinite(largest))
            if options.scale is None:
                # Only a retry could take a raised scale back.
                most_raised = MOST_RAISED if options.retries else 0
                scale = choose_power(largest, most_raised)
        if options.retries:
            scaled, scale = pull_with_retries(
                pull_scaled, scale, may_repeat, options.retries, axes
            )
            reason = _NO_SECOND.format(options.retries)
            guard = functools.partial(_jax.refuse_transposing, reason=reason)
        else:
            scaled = pull_scaled(scale)
            guard = functools.partial(_jax.note_transposing, note=_warn_unscaled)
        in_own_dtypes = []
        for gradient, var in zip(scaled, self.head_sources, strict=True):
            in_own_dtypes.append(cast(gradient, var.aval.dtype))
        return list(map(guard, divide(in_own_dtypes, scale)))

    def _find_agreed_axes(
        self, entering: list[Any], axis_name: Any
    ) -> tuple[Any, ...] | None:
        """Returns the axes along which the devices must use one scale."""
        of_inputs = [_jax.varying(var.aval) for var in self.head_by]
        of_cotangents = map(_jax.varying, map(jax.typeof, entering))
        axes_of_any = frozenset().union(*of_inputs, *of_cotangents)
        axes_of_every_input = frozenset.intersection(*of_inputs)
        # JAX sums the gradient of an input over each axis along which the input is the same on all
        # devices, but other values differ. The terms of that sum must have one scale.
        axes = set(axes_of_any - axes_of_every_input)
        # Along an axis where devices exchange numbers they must repeat a pass together, unless
        # types show that nothing differs along it.
        for axis in (*self.axes, *axis_names(axis_name)):
            if axis in axes_of_any or not _shows_in_types(axis):
                axes.add(axis)
        return tuple(sorted(axes, key=repr)) or None


def _find_largest(cotangents: list[Any], axes: Any) -> jax.Array:
    """Returns the largest magnitude of each cotangent on all devices, an `f32[n]`."""
    # `agree_on_sizes` takes bits, and returns floats.
    bits = reduce_sizes(Scaled(cotangents), by_leaf=True).numbers
    no_flags = jnp.zeros(0, jnp.bool_)
    _, largest = agree_on_sizes(no_flags, dict(enumerate(bits)), axes)
    return jnp.stack(list(largest.values()))


def _run_part(
    part: Part,
    env: dict[Any, Any],
    *,
    by: Sequence[Any],
    of: Sequence[Any],
    note_inputs: Callable[..., Sequence[Any]] = lambda *inputs: inputs,
    note_outputs: Callable[..., Sequence[Any]] = lambda *outputs: outputs,
) -> tuple[list[Any], Any]:
    """Runs a part of a program on the values in `env`.

    Returns all of its outputs, and a function that pulls cotangents of those in `of` back to the
    variables in `by`. The values of both may go through functions that note what JAX knows of
    their derivatives.
    """
    differentiated = set(map(id, of))  # by identity, as literals are not hashable
    places = [i for i, atom in enumerate(part.outputs) if id(atom) in differentiated]

    def run(*values: Any) -> Any:
        values_of = env | dict(zip(by, note_inputs(*values), strict=True))
        outputs = part(*[values_of[var] for var in part.inputs])
        outputs_of = note_outputs(*[outputs[i] for i in places])
        return list(outputs_of), outputs

    inputs = [env[var] for var in by]
    _, pull, outputs = jax.vjp(run, *inputs, has_aux=True)
    return outputs, pull


def _warn_unscaled() -> None:
    """Warns of a second reverse pass, unless a `scale_backward` around this one scales it.

    An outer `scale_backward` pulls back inside of `noting`: that is how this one sees it.
    """
    if not is_noting():
        warnings.warn(_UNSCALED_SECOND, stacklevel=2)


def _instantiate(cotangent: Any) -> Any:
    """Returns a cotangent as `jax.vjp` takes it: an array of zeros if it is known to be zero."""
    if isinstance(cotangent, SymbolicZero):
        return _make_zero(cotangent.aval)
    return cotangent


def _make_zero(aval: Any) -> Any:
    """Returns the cotangent of a value that nothing depends on."""
    zero = _jax.zero_cotangent(aval)
    if zero is None:  # this version of JAX takes only arrays
        return blank(aval)
    return zero


def _shows_in_types(axis: Any) -> bool:
    """Returns whether types show what varies along a named axis.

    Raises a `NameError` if there is no such axis.
    """
    try:
        return _jax.is_told_apart(axis)
    except NameError as error:
        argument = f"`scale_backward(axis_name={axis!r})`"
        raise no_such_axis(argument, "largest cotangent") from error
