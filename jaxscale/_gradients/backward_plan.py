"""How `scale_backward` runs a program that is split in two: forward, and back through both parts.

The backward pass has four steps: the tail, unscaled; the scale, from the cotangents that leave it;
the head, with these cotangents scaled, and again at a lower scale if it overflows; the division.
"""

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
    """A program, split, and what is differentiated in each part by what.

    Attributes:
      inputs: the variables of the program's inputs.
      head: the half-precision part.
      tail: what follows it.
      sources: for each input of the head that is a cast of an input of the program, that input.
      head_by: the inputs of the head that it is differentiated by.
      head_of: for each of these, the input of the program that it is or is cast from.
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
        by = set(itertools.compress(self.inputs, perturbed))
        # Parameters are cast before the head, and the gradients cast back after it: in the loop
        # of retries all of them are in memory at once, and take half of it.
        self.head, self.sources = parts.head.without_casts(by)
        by |= set(self.sources)
        derived = self.head.find_derived(by)
        self.head_by = [var for var in self.head.inputs if var in by]
        self.head_of = [self.sources.get(var, var) for var in self.head_by]
        self.tail_by = [var for var in self.tail.inputs if var in by]
        self.entries = [var for var in self.head.outputs if var in derived]
        self.entry_types: list[Any] = []

    def run_forward(self, inputs: Sequence[Any]) -> tuple[tuple[Any, ...], Partial]:
        """Returns the outputs, and what pulls cotangents back through both parts."""
        env = dict(zip(self.inputs, inputs, strict=True))
        for var, source in self.sources.items():
            env[var] = cast(env[source], var.aval.dtype)
        with noting() as have_tangents:
            crossing, pull_head = _vjp(
                self.head, env, self.head_by, self.entries, note_outputs=note_tangents
            )
        env |= zip(self.head.outputs, crossing, strict=True)
        # Of a `shard_map` the types are known only now, and are the same in each call.
        self.entry_types = [jax.typeof(env[var]) for var in self.entries]
        # If none has a tangent, no rule was asked.
        have_tangents = have_tangents or [False] * len(self.entries)
        entries = list(itertools.compress(self.entries, have_tangents))
        differentiated = [
            atom for atom in self.tail.outputs if _jax.holds_inexact(atom.aval)
        ]

        def note_entries(*values: Any) -> Any:
            return *note_zeros(*values[: len(entries)]), *values[len(entries) :]

        outputs, pull_tail = _vjp(
            self.tail,
            env,
            [*entries, *self.tail_by],
            differentiated,
            note_inputs=note_entries,
        )
        # What a backward pass keeps is a tree of arrays. This one has none: its structure says
        # which entries have a tangent.
        entry_marks = [() if has_tangent else None for has_tangent in have_tangents]
        return tuple(outputs), Partial(
            self._pull_back, entry_marks, pull_head, pull_tail
        )

    def _pull_back(
        self,
        entry_marks: Sequence[Any],
        pull_head: Any,
        pull_tail: Any,
        cotangents: Any,
        options: Options,
    ) -> tuple[Any, ...]:
        """Returns the gradients for all inputs, `None` for those that have none."""
        inexact = [each for each in cotangents if _jax.holds_inexact(each)]
        with noting() as are_zeros:
            pulled = pull_tail([_without_symbol(each) for each in inexact])
        entry_count = len(pulled) - len(self.tail_by)
        gradients = dict(zip(self.tail_by, pulled[entry_count:], strict=True))
        # If all of them are zeros, no rule was asked.
        are_zeros = are_zeros or [True] * entry_count
        with_tangents = zip(pulled[:entry_count], are_zeros, strict=True)
        entering = []
        for mark in entry_marks:
            if mark is None:
                entering.append(None)
                continue
            cotangent, is_zero = next(with_tangents)
            entering.append(None if is_zero else cotangent)
        if self.head_by and any(each is not None for each in entering):
            # Noting tells `_warn_unscaled` that this is the backward pass of a boundary.
            with noting():
                of_head = self._pull_through_head(pull_head, entering, options)
            for var, gradient in zip(self.head_of, of_head, strict=True):
                if gradients.get(var) is not None:
                    gradient = gradient + widen(gradients[var])
                gradients[var] = gradient
        return tuple(
            cast(gradients[var], var.aval.dtype) if var in gradients else None
            for var in self.inputs
        )

    def _pull_through_head(
        self, pull: Any, cotangents: list[Any], options: Options
    ) -> list[jax.Array]:
        """Returns what the head makes of cotangents, in float32 or wider.

        There is one cotangent for each entry. It is `None` if nothing depends on the entry.
        """
        entering = [each for each in cotangents if each is not None]
        axes = self._agreed_axes(entering, options.axis_name)

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
        is_finite = jnp.array(True)
        if options.scale is None or options.retries:
            bits = reduce_sizes(Scaled(entering), by_leaf=True).numbers
            _, agreed = agree_on_sizes(
                jnp.zeros(0, jnp.bool_), dict(enumerate(bits)), axes
            )
            largest = jnp.stack(list(agreed.values()))
            is_finite = jnp.all(jnp.isfinite(largest))
            if options.scale is None:
                scale = choose_power(largest, MOST_RAISED if options.retries else 0)
        if options.retries:
            scaled, scale = pull_with_retries(
                pull_scaled, scale, is_finite, options.retries, axes
            )
        else:
            scaled = pull_scaled(scale)
        pairs = zip(scaled, self.head_of, strict=True)
        gradients = divide(
            [cast(gradient, var.aval.dtype) for gradient, var in pairs], scale
        )
        if not options.retries:
            return [
                _jax.note_transposing(gradient, _warn_unscaled)
                for gradient in gradients
            ]
        reason = _NO_SECOND.format(options.retries)
        return [_jax.refuse_transposing(gradient, reason) for gradient in gradients]

    def _agreed_axes(
        self, entering: list[Any], axis_name: Any
    ) -> tuple[Any, ...] | None:
        """Returns the axes along which the devices must use one scale."""
        of_inputs = [_jax.varying(var.aval) for var in self.head_by]
        of_cotangents = [_jax.varying(jax.typeof(each)) for each in entering]
        vary_somewhere = frozenset().union(*of_inputs, *of_cotangents)
        # Where an input does not vary, its gradient is a sum over devices.
        axes = set(vary_somewhere.difference(frozenset.intersection(*of_inputs)))
        # Where the devices exchange numbers, none may go round again alone. What does not vary
        # is the same on all of them.
        for axis in (*self.axes, *axis_names(axis_name)):
            if axis in vary_somewhere or not _is_told_apart(axis):
                axes.add(axis)
        return tuple(sorted(axes, key=repr)) or None


def _vjp(
    part: Part,
    env: dict[Any, Any],
    by: Sequence[Any],
    of: Sequence[Any],
    note_inputs: Callable[..., Sequence[Any]] = lambda *inputs: inputs,
    note_outputs: Callable[..., Sequence[Any]] = lambda *outputs: outputs,
) -> tuple[list[Any], Any]:
    """Returns the outputs of a part, and what pulls cotangents of those in `of` back to `by`.

    Both may go through functions that note what JAX knows of their derivatives.
    """
    places = []
    for i, atom in enumerate(part.outputs):
        if any(atom is each for each in of):  # by identity: literals are not hashable
            places.append(i)

    def run_part(*values: Any) -> Any:
        values_of = env | dict(zip(by, note_inputs(*values), strict=True))
        outputs = part(*(values_of[var] for var in part.inputs))
        return list(note_outputs(*(outputs[i] for i in places))), outputs

    _, pull, outputs = jax.vjp(run_part, *(env[var] for var in by), has_aux=True)
    return outputs, pull


def _warn_unscaled() -> None:
    """Warns of a second reverse pass, unless that is the backward pass of a boundary itself."""
    if not is_noting():
        warnings.warn(_UNSCALED_SECOND, stacklevel=2)


def _without_symbol(cotangent: Any) -> Any:
    """Returns a cotangent as `jax.vjp` takes it: zeros where it is known to be zero."""
    if isinstance(cotangent, SymbolicZero):
        return _make_zero(cotangent.aval)
    return cotangent


def _make_zero(aval: Any) -> Any:
    """Returns the cotangent of a value that nothing depends on."""
    zero = _jax.zero_cotangent(aval)
    return blank(aval) if zero is None else zero


def _is_told_apart(axis: Any) -> bool:
    """Returns whether types say what differs along a named axis, which must be there."""
    try:
        return _jax.is_told_apart(axis)
    except NameError as error:
        argument = f"`scale_backward(axis_name={axis!r})`"
        raise no_such_axis(argument, "largest cotangent") from error
