"""How `scale_backward` runs a program that is split in two: forward, and back through both parts.

The backward pass has four steps:

1. The tail runs, unscaled.
2. The scale is chosen, from the cotangents that leave the tail.
3. The head runs with these cotangents scaled, and again if gradients overflow or flush (see
   `passes`).
4. The gradients are divided by the scale.
"""

import functools
import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.custom_derivatives import SymbolicZero
from jax.tree_util import Partial

from .. import _jax
from .._gradients.verdict import axis_names, no_such_axis
from .._trees.casts import blank, cast, widen
from .half_finder import counts_products, may_flush
from .head_and_tail import split
from .known_zeros import is_noting, note_tangents, note_zeros, noting
from .parts import Part
from .passes import PassOptions, pull_in_passes, pull_once

_NO_SECOND = (
    "`scale_backward(retries={})`: its backward pass was differentiated in reverse mode, such as "
    "for the gradient of a gradient norm. The loop of retries has no such derivative. Pass "
    "`retries=0`, and wrap what you compute from the gradients in `scale_backward` as well; or "
    "differentiate the gradients in forward mode: `jax.jvp(jax.grad(...), ...)`."
)
_UNSCALED_SECOND = (
    "`scale_backward(retries=0)`: its backward pass is differentiated in reverse mode, such as for "
    "the gradient of a gradient norm. That second pass is not scaled, and small values flush to 0 "
    "in it. Wrap what you compute from the gradients in `scale_backward` as well, separately from "
    "the loss: `loss(p) + scale_backward(lambda p: penalty(jax.grad(loss)(p)))(p)`."
)


class Options(NamedTuple):
    """The arguments of a `scale_backward`, checked."""

    scale: float | None  # `None`: chosen from the cotangents
    retries: int
    axis_name: Any


class BackwardPlan:
    """A program that is split in two, and the inputs with respect to which each is differentiated.

    Attributes:
      inputs: the variables of the program's inputs.
      head: the half-precision part.
      tail: the part that follows it.
      sources: for each input of the head that is a cast of an input of the program, that input.
      head_by: the inputs of the head with respect to which it is differentiated.
      head_sources: for each of these, the program input that it equals or is a cast of.
      tail_by: the inputs of the program with respect to which the tail is differentiated, beside
        the entries.
      entries: the outputs of the head where cotangents of the tail may enter it.
      entry_types: the type of each entry, once the program has run forward.
      axes: the named axes along which the program communicates.
      may_flush: whether its half precision flushes what float32 holds.
    """

    def __init__(
        self,
        program: _jax.ClosedJaxpr,
        under_autocast: bool,
        perturbed: tuple[bool, ...],
    ) -> None:
        """Splits a program.

        Args:
          program: the program.
          under_autocast: whether an `autocast` around it may yet make its products half precision.
          perturbed: for each of its inputs, whether it is differentiated with respect to it.
        """
        with_products = counts_products(program, under_autocast)
        self.may_flush = may_flush(program, with_products)
        parts = split(program, with_products)
        self.inputs = parts.inputs
        self.tail = parts.tail
        self.axes = _jax.collective_axes(program)
        differentiated_by = set(itertools.compress(self.inputs, perturbed))
        # The casts of parameters to half precision are taken out of the head and done in
        # `run_forward`. So the loop of retries, which keeps all gradients at once, holds them in
        # half precision: half the memory.
        self.head, self.sources = parts.head.without_casts(differentiated_by)
        differentiated_by |= set(self.sources)
        derived = self.head.find_derived(differentiated_by)
        self.head_by = [var for var in self.head.inputs if var in differentiated_by]
        self.head_sources = [self.sources.get(var, var) for var in self.head_by]
        self.tail_by = [var for var in self.tail.inputs if var in differentiated_by]
        self.entries = [var for var in self.head.outputs if var in derived]
        self.entry_types: list[Any] = []

    def run_forward(self, inputs: Sequence[Any]) -> tuple[tuple[Any, ...], Partial]:
        """Returns the outputs, and `pull(cotangents, options)`.

        That function returns the gradients for the inputs, `None` for an input that has none.
        """
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
                wanted=self.entries,
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

        inexact = [atom for atom in self.tail.outputs if _jax.holds_inexact(atom.aval)]
        outputs, pull_tail = _run_part(
            self.tail,
            env,
            by=[*entries, *self.tail_by],
            wanted=inexact,
            note_inputs=note_entries,
        )
        # JAX keeps `pull` for the backward pass as a tree of arrays.
        pull_back = functools.partial(self._pull_back, have_tangents)
        return tuple(outputs), Partial(pull_back, pull_head, pull_tail)

    def _pull_back(
        self,
        have_tangents: Sequence[bool],
        pull_head: Any,
        pull_tail: Any,
        cotangents: Any,
        options: Options,
    ) -> tuple[Any, ...]:
        """Returns the gradients for all inputs, `None` for those that have none."""
        entering, gradients = self._pull_through_tail(pull_tail, cotangents)
        # `None` where an entry has no tangent, or its cotangent is known to be zero
        at_entries = _jax.spread(have_tangents, entering, itertools.repeat(None))
        if self.head_by and any(cotangent is not None for cotangent in at_entries):
            # Only a signal: inside of `noting`, `_warn_unscaled` of an inner `scale_backward` knows
            # that this one scales it. The list is not read.
            with noting():
                of_head = self._pull_through_head(pull_head, at_entries, options)
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

    def _pull_through_tail(
        self, pull: Any, cotangents: Any
    ) -> tuple[list[Any], dict[Any, Any]]:
        """Pulls cotangents of the program's outputs back through the tail.

        Returns the cotangent of each entry with a tangent, `None` if it is known to be zero, and
        the gradients for `tail_by`.
        """
        inexact = filter(_jax.holds_inexact, cotangents)  # as in `run_forward`
        # The rule of `note_zeros` fills this list: one bool for each entry with a tangent, whether
        # its cotangent is zero. If JAX knows that all are, it never runs the rule, and the list
        # stays empty.
        with noting() as noted:
            pulled = pull(list(map(_instantiate, inexact)))
        # What `run_forward` differentiates the tail by: entries, then `tail_by`.
        num_entries = len(pulled) - len(self.tail_by)
        are_zeros = noted or [True] * num_entries
        entering = []
        for cotangent, is_zero in zip(pulled[:num_entries], are_zeros, strict=True):
            entering.append(None if is_zero else cotangent)
        gradients = dict(zip(self.tail_by, pulled[num_entries:], strict=True))
        return entering, gradients

    def _pull_through_head(
        self, pull: Any, at_entries: list[Any], options: Options
    ) -> list[jax.Array]:
        """Pulls cotangents back through the head, and returns the gradients in float32 or wider.

        There is one cotangent for each entry. It is `None` if it is known to be zero.
        """
        nonzero = [cotangent for cotangent in at_entries if cotangent is not None]
        axes = self._find_agreed_axes(nonzero, options.axis_name)

        def pull_scaled(scaled: list[Any]) -> list[Any]:
            remaining = iter(scaled)
            scaled_at_entries = []
            for aval, cotangent in zip(self.entry_types, at_entries, strict=True):
                if cotangent is None:
                    scaled_at_entries.append(_make_zero(aval))
                else:
                    scaled_at_entries.append(next(remaining))
            return list(pull(scaled_at_entries))

        dtypes = [var.aval.dtype for var in self.head_sources]
        # A pass that may be repeated is in a loop, of which JAX has no derivative in reverse mode.
        # `guard` says so, or warns that such a derivative is not scaled.
        if options.retries:
            pass_options = PassOptions(
                options.scale, options.retries, self.may_flush, axes
            )
            gradients = pull_in_passes(pull_scaled, nonzero, dtypes, pass_options)
            reason = _NO_SECOND.format(options.retries)
            guard = functools.partial(_jax.refuse_transposing, reason=reason)
        else:
            gradients = pull_once(pull_scaled, nonzero, dtypes, options.scale, axes)
            guard = functools.partial(_jax.note_transposing, note=_warn_unscaled)
        return list(map(guard, gradients))

    def _find_agreed_axes(
        self, cotangents: list[Any], axis_name: Any
    ) -> tuple[Any, ...] | None:
        """Returns the axes along which the devices must use one scale, or `None`.

        `head_by` is not empty: the caller checks that.
        """
        of_inputs = [_jax.varying(var.aval) for var in self.head_by]
        of_cotangents = map(_jax.varying, map(jax.typeof, cotangents))
        axes_of_any = frozenset().union(*of_inputs, *of_cotangents)
        axes_of_every_input = frozenset.intersection(*of_inputs)
        # If an input is the same along an axis, but another input or a cotangent varies along it,
        # JAX sums the gradient for that input over the axis. All terms must have one scale.
        axes_summed_over = axes_of_any - axes_of_every_input
        axes = set(axes_summed_over)
        # Along an axis where devices exchange numbers they must repeat a pass together, unless
        # types show that nothing differs along it.
        for axis in (*self.axes, *axis_names(axis_name)):
            if axis in axes_of_any or not _shows_in_types(axis):
                axes.add(axis)
        return tuple(sorted(axes, key=repr)) or None


def _run_part(
    part: Part,
    env: dict[Any, Any],
    *,
    by: Sequence[Any],
    wanted: Sequence[Any],
    note_inputs: Callable[..., Sequence[Any]] = lambda *inputs: inputs,
    note_outputs: Callable[..., Sequence[Any]] = lambda *outputs: outputs,
) -> tuple[list[Any], Any]:
    """Runs a part of a program on the values in `env`.

    Returns all of its outputs, and a function that pulls cotangents of the outputs in `wanted` back
    to the variables in `by`. `note_inputs` is applied to the values of `by`, and `note_outputs` to
    those of `wanted`: identities that record which derivatives JAX knows to be zero.
    """
    wanted_ids = set(map(id, wanted))  # by identity, as literals are not hashable
    places = [i for i, atom in enumerate(part.outputs) if id(atom) in wanted_ids]

    def run(*inputs: Any) -> Any:
        values = env | dict(zip(by, note_inputs(*inputs), strict=True))
        outputs = part(*[values[var] for var in part.inputs])
        wanted_outputs = note_outputs(*[outputs[i] for i in places])
        return list(wanted_outputs), outputs

    # `run` returns (the outputs in `wanted`, all outputs).
    _, pull, outputs = jax.vjp(run, *[env[var] for var in by], has_aux=True)
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
