"""The passes of a jaxpr that is split in two: forward, and back through both parts.

The backward pass has four steps:

1. The tail runs, unscaled.
2. The scale is chosen, from the cotangents that leave the tail.
3. The head runs with these cotangents scaled, and again if gradients overflow or flush (see
   `passes`).
4. The gradients are divided by the scale.
"""

import dataclasses
import functools
import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakValueDictionary

import jax
from jax.custom_derivatives import SymbolicZero
from jax.tree_util import Partial

from .._gradients.verdict import axis_names, no_such_axis
from .._jax import jaxprs
from .._jax.jaxprs import AxisName, AxisNames, Flags, SymbolicTangent, SymbolicTangents
from .._trees.leaves import cast, widen
from .half_finder import counts_products, may_flush
from .head_and_tail import ends_in_loop, split
from .jaxpr_parts import Part
from .known_zeros import is_noting, note_tangents, note_zeros, noting
from .passes import Options, PassReport, observe, pull_back

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


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _NoCotangent:
    """Stands for the cotangent of a value of a type, if it is known to be zero."""

    aval: Any


class BackwardPlan:
    """A jaxpr that is split in two, and the inputs with respect to which each is differentiated.

    Attributes:
      inputs: the variables of the jaxpr's inputs.
      head: the half-precision part.
      tail: the part that follows it.
      sources: for each input of the head that is a cast of an input of the jaxpr, that input.
      head_by: the inputs of the head with respect to which it is differentiated.
      head_sources: for each of these, the jaxpr input that it equals or is a cast of.
      tail_by: the inputs of the jaxpr with respect to which the tail is differentiated, beside
        the entries.
      entries: the outputs of the head where cotangents of the tail may enter it.
      axes: the named axes along which the jaxpr communicates.
      may_flush: whether its half precision flushes what float32 holds.
      in_loop: whether cotangents enter half precision inside of what is not divided, as a loop.
    """

    def __init__(
        self,
        program: jaxprs.ClosedJaxpr,
        under_autocast: bool,
        perturbed: Flags,
    ) -> None:
        """Splits a jaxpr.

        Args:
          program: the jaxpr.
          under_autocast: whether an `autocast` around it may yet make its products half precision.
          perturbed: for each of its inputs, whether it is differentiated with respect to it.
        """
        with_products = counts_products(program, under_autocast)
        self.may_flush = may_flush(program, with_products)
        parts = split(program, with_products)
        self.inputs = parts.inputs
        self.tail = parts.tail
        self.axes = jaxprs.collective_axes(program)
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
        self.in_loop = ends_in_loop(self.head.steps, self.entries)
        # Calls of equal jaxprs share a plan, and what JAX knows of these two functions: each is
        # traced once for arrays of the same types.
        self._traced_forward = jax.jit(self._run_forward)
        self._pull_head = jax.jit(self._pull_through_head, static_argnames="options")

    def run_forward(self, inputs: Sequence[Any]) -> tuple[tuple[Any, ...], Partial]:
        """Returns the outputs, and `pull(cotangents, options)`.

        That function returns the gradients for the inputs, `None` for an input that has none.
        """
        outputs, pulls = jaxprs.run_traced(self._traced_forward, inputs)
        # JAX keeps `pull` for the backward pass as a tree of arrays.
        return tuple(outputs), Partial(self._pull_back, *pulls)

    def _run_forward(self, *inputs: jax.Array) -> tuple[list[Any], tuple[Any, ...]]:
        """Returns the outputs, and what `_pull_back` needs of this run."""
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
        # The types in a `shard_map` are known only now.
        zeros = [_NoCotangent(jax.typeof(env[var])) for var in self.entries]
        have_tangents = noted or [False] * len(self.entries)
        entries = list(itertools.compress(self.entries, have_tangents))
        num_entries = len(entries)

        def note_entries(*values: jax.Array) -> Any:
            return *note_zeros(*values[:num_entries]), *values[num_entries:]

        inexact = [
            atom for atom in self.tail.outputs if jaxprs.holds_inexact(atom.aval)
        ]
        outputs, pull_tail = _run_part(
            self.tail,
            env,
            by=[*entries, *self.tail_by],
            wanted=inexact,
            note_inputs=note_entries,
        )
        flags = jaxprs.StaticFlags(have_tangents)
        return outputs, (flags, zeros, pull_head, pull_tail)

    def _pull_back(
        self,
        have_tangents: Sequence[bool],
        zeros: list[_NoCotangent],
        pull_head: Callable[..., Any],
        pull_tail: Callable[..., Any],
        cotangents: SymbolicTangents,
        options: Options,
    ) -> tuple[Any, ...]:
        """Returns the gradients for all inputs, `None` for those that have none.

        `zeros` are what the entries get that have no tangent, or no cotangent.
        """
        entering, gradients = self._pull_through_tail(pull_tail, cotangents)
        at_entries = []
        for zero, cotangent in zip(
            zeros,
            jaxprs.spread(have_tangents, entering, itertools.repeat(None)),
            strict=True,
        ):
            at_entries.append(zero if cotangent is None else cotangent)
        nonzero = jax.tree.leaves(at_entries)
        if self.head_by and nonzero:
            axes = self._find_agreed_axes(nonzero, options.axes)
            options = options._replace(
                axes=axes, may_flush=self.may_flush, in_loop=self.in_loop
            )
            # Only a signal: inside of `noting`, `_warn_unscaled` of an inner `scale_backward` knows
            # that this one scales it. The list is not read.
            with noting():
                of_head, report = self._pull_head(
                    pull_head, at_entries, options=options
                )
            observe(report)
            of_head = map(_guard(options), of_head)
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
        self, pull: Callable[..., Any], cotangents: SymbolicTangents
    ) -> tuple[list[Any], dict[Any, Any]]:
        """Pulls cotangents of the jaxpr's outputs back through the tail.

        Returns the cotangent of each entry with a tangent, `None` if it is known to be zero, and
        the gradients for `tail_by`.
        """
        inexact = filter(jaxprs.holds_inexact, cotangents)  # as in `run_forward`
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
        self, pull: Callable[..., Any], at_entries: list[Any], options: Options
    ) -> tuple[list[jax.Array], PassReport | None]:
        """Pulls cotangents back through the head, and returns the gradients in float32 or wider."""
        nonzero, tree = jax.tree.flatten(at_entries)

        def pull_scaled(scaled: list[Any]) -> list[Any]:
            scaled_at_entries = jax.tree.unflatten(tree, scaled)
            return list(pull(list(map(_instantiate, scaled_at_entries))))

        dtypes = [var.aval.dtype for var in self.head_sources]
        return pull_back(pull_scaled, nonzero, dtypes, options)

    def _find_agreed_axes(
        self, cotangents: list[Any], axis_name: AxisNames
    ) -> tuple[Any, ...] | None:
        """Returns the axes along which the devices must use one scale, or `None`.

        `head_by` is not empty: the caller checks that.
        """
        of_inputs = [jaxprs.varying(var.aval) for var in self.head_by]
        of_cotangents = map(jaxprs.varying, map(jax.typeof, cotangents))
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


_plans: WeakValueDictionary[Any, BackwardPlan] = WeakValueDictionary()


def plan_for(
    program: jaxprs.ClosedJaxpr, under_autocast: bool, perturbed: Flags
) -> BackwardPlan:
    """Returns the plan of a jaxpr, the same one for equal jaxprs while it is in use."""
    jaxpr = program.jaxpr
    key = (
        jaxprs.key_of(jaxpr.eqns, jaxpr.invars, jaxpr.outvars),
        tuple(program.in_avals),
        under_autocast,
        perturbed,
    )
    try:
        plan = _plans.get(key)
    except TypeError:  # a parameter that has no hash
        return BackwardPlan(program, under_autocast, perturbed)
    if plan is None:
        plan = _plans[key] = BackwardPlan(program, under_autocast, perturbed)
    return plan


def _run_part(
    part: Part,
    env: dict[Any, Any],
    *,
    by: Sequence[Any],
    wanted: Sequence[Any],
    note_inputs: Callable[..., Sequence[Any]] = lambda *inputs: inputs,
    note_outputs: Callable[..., Sequence[Any]] = lambda *outputs: outputs,
) -> tuple[list[Any], Any]:
    """Runs a part of a jaxpr on the values in `env`.

    Returns all of its outputs, and a function that pulls cotangents of the outputs in `wanted` back
    to the variables in `by`. `note_inputs` is applied to the values of `by`, and `note_outputs` to
    those of `wanted`: identities that record which derivatives JAX knows to be zero.
    """
    wanted_ids = set(map(id, wanted))  # by identity, as literals are not hashable
    places = [i for i, atom in enumerate(part.outputs) if id(atom) in wanted_ids]

    def run(*inputs: jax.Array) -> Any:
        values = env | dict(zip(by, note_inputs(*inputs), strict=True))
        outputs = part(*[values[var] for var in part.inputs])
        wanted_outputs = note_outputs(*[outputs[i] for i in places])
        return list(wanted_outputs), outputs

    # `run` returns (the outputs in `wanted`, all outputs).
    _, pull, outputs = jax.vjp(run, *[env[var] for var in by], has_aux=True)
    return outputs, pull


def _guard(options: Options) -> Callable[[jax.Array], jax.Array]:
    """Returns an identity for gradients that are differentiated in reverse mode.

    A pass that may be repeated is in a loop, of which JAX has no such derivative. It says so, or
    warns that such a derivative is not scaled.
    """
    if options.retries:
        reason = _NO_SECOND.format(options.retries)
        return functools.partial(jaxprs.refuse_transposing, reason=reason)
    return functools.partial(jaxprs.note_transposing, note=_warn_unscaled)


def _warn_unscaled() -> None:
    """Warns of a second reverse pass, unless a `scale_backward` around this one scales it.

    An outer `scale_backward` pulls back inside of `noting`: that is how this one sees it.
    """
    if not is_noting():
        warnings.warn(_UNSCALED_SECOND, stacklevel=2)


def _instantiate(cotangent: SymbolicTangent | _NoCotangent) -> Any:
    """Returns a cotangent as `jax.vjp` takes it, also if it is known to be zero."""
    if isinstance(cotangent, SymbolicZero | _NoCotangent):
        return jaxprs.zero_cotangent(cotangent.aval)
    return cotangent


def _shows_in_types(axis: AxisName) -> bool:
    """Returns whether types show what varies along a named axis.

    Raises a `NameError` if there is no such axis.
    """
    try:
        return jaxprs.is_visible_in_types(axis)
    except NameError as error:
        argument = f"`scale_backward(axis_name={axis!r})`"
        raise no_such_axis(argument, "largest cotangent") from error
