"""The exam: all diagnostics of one loss on its parameters and one batch."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._autocast.api import autocast
from .._jaxprs import (
    ClosedJaxpr,
    Jaxpr,
    Op,
    backward_rule,
    does,
    has_narrow_range,
    holds_half,
    programs,
    walk_program,
)
from .._trees.gradient_leaves import leaf_name
from ..diagnostics._histogram import find_shares_by_leaf, shares
from ..diagnostics._leaves import table
from ..diagnostics._switches.backward import Backward
from ..diagnostics._switches.board import Switchboard
from ..diagnostics._switches.places import Around, find_line
from ..diagnostics._switches.search import Search
from .announcer import Announce, announce_nothing
from .compiled import BackwardTrial, CompiledBackward
from .exam import Exam, Relief
from .faults import Check, Checker
from .gradients import (
    add_histograms,
    compare_gradients,
    count_leaves,
)
from .start import find_start
from .sums_of_gradients import count_summands
from .target import Target, TargetError, error_line

# The largest gradient at the largest loss scale is below this if something else limits the scale.
_FULL = 2.0**12
# times the largest loss scale: the one to try with some lines in float32
_HIGHER = 2.0**8
_MOST_LINES_OF_RELIEF = 4  # in float32, for a higher loss scale


def examine(
    target: Target,
    loss_scale: float | None,
    dtype: str | None = None,
    announce: Announce = announce_nothing,
    *,
    is_quick: bool = False,
) -> Exam:
    """Runs all diagnostics.

    `loss_scale` is `None` for the largest that does not overflow. `jaxscale.autocast` computes the
    loss in `dtype`, if there is one.
    """
    loss_as_written = None
    if dtype is not None:
        loss_as_written = CompiledBackward(target).compute_loss()
        target = target._replace(loss_fn=autocast(target.loss_fn, dtype=dtype))
    compiled = CompiledBackward(target)
    program = _trace_loss(compiled, target.name, dtype)
    dtypes = _find_dtypes(program)

    announce("compiling the backward pass")
    loss = float(compiled.differentiate(1.0).loss)
    calibration = None
    largest_scale = None
    overflows = False
    trial = BackwardTrial()
    if any(map(has_narrow_range, dtypes)) and math.isfinite(loss):
        announce("looking for the largest loss scale that fits", compiled.how_far)
        calibration = compiled.calibrate()
        # a dynamic scale ends near it, wherever it started
        largest_scale = calibration.init_scale
        overflows = calibration.overflows_at is not None
        if not is_quick:
            announce("trying `scale_backward`")
            trial = compiled.try_scale_backward()

    traced_scale = loss_scale or largest_scale or 1.0
    shown_scale = loss_scale or 1.0
    best_scale = largest_scale or traced_scale
    best = compiled.find_gradients(best_scale)
    histograms = count_leaves(best.tree)
    histogram = add_histograms(histograms)
    traced_grads = compiled.find_gradients(traced_scale)
    comparison = None
    if largest_scale is not None and shown_scale < largest_scale:
        shown_grads = compiled.find_gradients(shown_scale)
        comparison = compare_gradients(shown_grads.by_name, best.by_name)
    exam = Exam(
        target=target.name,
        autocast=dtype or "",
        is_quick=is_quick,
        is_auto=loss_scale is None,
        loss=loss,
        loss_as_written=loss_as_written,
        dtypes=tuple(sorted(map(str, dtypes))),
        dtypes_of_parameters=_name_dtypes(target.params),
        sums_of_gradients=count_summands(program, _name_leaves(target.params)),
        backward_rules=_find_backward_rules(program),
        loss_scale=traced_scale,
        shown_scale=shown_scale,
        calibration=calibration,
        start=find_start(largest_scale),
        trial=trial,
        largest=best.largest,
        is_limited=overflows and 0 < best.largest * best_scale < _FULL,
        ceiling=None,
        relief=None,
        comparison=comparison,
        nonfinite_arguments=(),
        nonfinite_outputs=_name_nonfinite(loss, traced_grads.by_name),
        constants=(),
        not_entered=(),
        check=Check(),
        half_draws=tuple(dict.fromkeys(_find_half_draws(program, ()))),
        zero=(),
        leaves=table(count_leaves(traced_grads.tree), loss_scale=traced_scale),
        histogram=histogram,
        shares=shares(histogram, loss_scale=shown_scale),
        layers=find_shares_by_leaf(histograms, round(math.log2(shown_scale))),
    )
    exam = _Lookout(target, compiled, announce).complete(exam)
    zero = _find_zero_leaves(exam.check.grads or best.by_name)
    return exam._replace(zero=zero)


def _name_dtypes(tree: Any) -> tuple[str, ...]:
    return tuple(sorted({str(jnp.result_type(leaf)) for leaf in jax.tree.leaves(tree)}))


def _name_leaves(tree: Any) -> list[str]:
    return [leaf_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def _trace_loss(
    compiled: CompiledBackward, name: str, dtype: str | None
) -> ClosedJaxpr:
    try:
        return jax.make_jaxpr(compiled.loss_of)(*compiled.args)
    except Exception as error:
        if dtype is None:
            raise
        # As it is written, the loss was run before.
        raise TargetError(
            f"`jaxscale.autocast` raised on the loss of {name}: {error_line(error)}"
        ) from error


def _name_nonfinite(loss: float, grads: Mapping[str, np.ndarray]) -> tuple[str, ...]:
    """Returns the loss and the gradients that are not finite, by their names."""
    names = [f"grads {n}" for n, grad in grads.items() if not np.isfinite(grad).all()]
    if not math.isfinite(loss):
        names.insert(0, "loss")
    return tuple(names)


class _Lookout:
    """Looks for the lines at which numbers are lost, and adds to an exam what that shows.

    `compiled` is the same pass as the model runs it. `announce` is told what is done next.
    """

    def __init__(
        self, target: Target, compiled: CompiledBackward, announce: Announce
    ) -> None:
        self._target = target
        self._compiled = compiled
        self._announce = announce

    def complete(self, exam: Exam) -> Exam:
        """Adds all that only switches can show."""
        is_bad = exam.nonfinite_outputs or exam.overflows_at or self._target.has_aux
        if exam.is_quick and not is_bad:
            return exam
        self._announce("putting a switch at each line")
        target = self._target
        args = (target.params, target.batch)
        backward = Backward(
            target.loss_fn, args, {}, target.constants, has_aux=target.has_aux
        )
        search = Search(Switchboard(backward))
        outputs = search.as_written(exam.loss_scale).outputs
        others = [
            name
            for name, output in outputs.items()
            if name.startswith("aux") and not np.isfinite(output).all()
        ]
        arguments = [
            name.replace("args[0]", "params") for name in backward.nonfinite_arguments
        ]
        operations = search.board.operations
        exam = exam._replace(
            nonfinite_arguments=tuple(n.replace("args[1]", "batch") for n in arguments),
            nonfinite_outputs=(*exam.nonfinite_outputs, *others),
            constants=tuple(operations.constants.values()),
            not_entered=tuple(sorted(operations.not_entered)),
        )
        checker = Checker(search, exam.largest_scale)
        if not (exam.is_quick and not exam.nonfinite_outputs):
            exam = exam._replace(check=self._check(exam, checker))
        if exam.overflows_at is None or exam.nonfinite_outputs:
            return exam
        self._announce("looking for what limits the loss scale")
        exam = exam._replace(ceiling=checker.find_ceiling(exam.overflows_at))
        if exam.is_quick:
            return exam
        return exam._replace(relief=self._find_relief(exam, search))

    def _check(self, exam: Exam, checker: Checker) -> Check:
        if exam.nonfinite_arguments and exam.nonfinite_outputs:
            return Check()
        self._announce("comparing with float32, and looking for lines at fault")
        scale = max(exam.loss_scale, exam.best_scale)
        compiled = self._compiled.find_gradients(scale).by_name
        return checker.check(exam.loss_scale, compiled, not exam.blames_autocast)

    def _find_relief(self, exam: Exam, search: Search) -> Relief | None:
        """Returns which lines in float32 let a higher loss scale fit, if one would be better."""
        would_help = exam.is_limited or exam.best_scale < 1
        ceiling = exam.ceiling
        if ceiling is None or not ceiling.where or not would_help:
            return None
        higher = max(exam.best_scale * _HIGHER, 1.0)
        error_of = search.overflows_at(higher)
        lines = search.find_lines(error_of, _MOST_LINES_OF_RELIEF)
        others = [p for p in search.board.places if p.line not in lines]
        if error_of(others):
            return None
        lines.sort(key=lambda line: line.where != ceiling.where)
        return Relief(higher, tuple(line.where for line in lines))


def _find_zero_leaves(grads: Mapping[str, np.ndarray]) -> tuple[str, ...]:
    return tuple(name for name, grad in grads.items() if grad.size and not grad.any())


def _find_dtypes(program: ClosedJaxpr) -> set[Any]:
    """Returns the floating dtypes that a program computes in."""
    variables = [*program.jaxpr.outvars]
    for eqn in walk_program(program):
        variables += eqn.outvars
    dtypes = set()
    for variable in variables:
        dtype = getattr(variable.aval, "dtype", None)
        if dtype is not None and jnp.issubdtype(dtype, jnp.floating):
            dtypes.add(dtype)
    return dtypes


def _find_half_draws(
    program: Jaxpr | ClosedJaxpr, around: Around
) -> Iterator[tuple[str, str]]:
    """Yields the dtype and the line of each draw of random numbers in half precision.

    JAX makes them of random bits, in one program.
    """
    draws = any(Op.RANDOM in does(eqn.primitive.name) for eqn in program.eqns)
    for eqn in program.eqns:
        if draws and Op.READS_BITS in does(eqn.primitive.name):
            made: Any = eqn.outvars[0].aval
            if holds_half(made):
                yield str(made.dtype), find_line(eqn, around).where
        for inner in programs(eqn):
            yield from _find_half_draws(inner, (*around, eqn))


def _find_backward_rules(program: ClosedJaxpr) -> dict[str, str]:
    """Returns the names of the backward rules, by the line that calls their functions."""
    rules = {}
    for eqn in walk_program(program):
        rule = backward_rule(eqn)
        if rule:
            where = find_line(eqn, ()).where
            if where:
                rules[where] = rule
    return rules
