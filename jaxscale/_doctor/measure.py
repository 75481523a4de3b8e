"""The exam: all diagnostics of one loss on its parameters and one batch."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._autocast.uncast_warnings import describe_halves_left
from .._jax.jaxprs import (
    ClosedJaxpr,
    Op,
    backward_rule,
    does,
    has_narrow_range,
    holds_half,
    walk_program,
)
from .._trees.pytrees import PyTree
from ..diagnostics._histogram import find_shares_by_leaf, shares
from ..diagnostics._leaves import table
from ..diagnostics._switches.backward import Backward
from ..diagnostics._switches.board import Switchboard
from ..diagnostics._switches.operations import Operations
from ..diagnostics._switches.places import find_line
from ..diagnostics._switches.search import Search
from .announcer import Announce, announce_nothing
from .compiled import BackwardTrial, CompiledBackward
from .exam import Exam, Relief
from .faults import Check, Checker
from .gradients import (
    add_histograms,
    compare_gradients,
    count_leaves,
    find_largest,
)
from .start import find_start
from .sums_of_gradients import count_summands
from .target import Target

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
    halves_left = ()
    if dtype is not None:
        loss_as_written = float(jax.jit(target.loss_fn)(*target.args))
        halves_left = describe_halves_left(target.program, dtype)
        target = target.under_autocast(dtype)
    program = target.program
    dtypes = _find_dtypes(program)

    announce("compiling the backward pass")
    compiled = CompiledBackward(target)
    loss = float(compiled.differentiate(1.0).loss)
    calibration = None
    largest_scale = None
    overflows = False
    trial = BackwardTrial()
    if any(map(has_narrow_range, dtypes)) and math.isfinite(loss):
        announce("looking for the largest loss scale that fits")
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
    largest = find_largest(best)
    histograms = count_leaves(best)
    histogram = add_histograms(histograms)
    traced_grads = compiled.find_gradients(traced_scale)
    comparison = None
    if largest_scale is not None and shown_scale < largest_scale:
        shown_grads = compiled.find_gradients(shown_scale)
        comparison = compare_gradients(shown_grads, best)
    exam = Exam(
        target=target.name,
        autocast=dtype or "",
        is_quick=is_quick,
        is_auto=loss_scale is None,
        loss=loss,
        loss_as_written=loss_as_written,
        halves_left=halves_left,
        dtypes=tuple(sorted(map(str, dtypes))),
        dtypes_of_parameters=_name_dtypes(target.params),
        sums_of_gradients=(),
        backward_rules=_find_backward_rules(program),
        loss_scale=traced_scale,
        shown_scale=shown_scale,
        calibration=calibration,
        start=find_start(largest_scale),
        trial=trial,
        largest=largest,
        is_limited=overflows and 0 < largest * best_scale < _FULL,
        ceiling=None,
        relief=None,
        comparison=comparison,
        nonfinite_arguments=(),
        nonfinite_outputs=_name_nonfinite(loss, traced_grads),
        constants=(),
        not_entered=(),
        check=Check(),
        half_draws=(),
        zero=(),
        leaves=table(count_leaves(traced_grads), loss_scale=traced_scale),
        histogram=histogram,
        shares=shares(histogram, loss_scale=shown_scale),
        layers=find_shares_by_leaf(histograms, round(math.log2(shown_scale))),
    )
    exam = _look_for_lines(exam, target, compiled, announce)
    zero = _find_zero_leaves(exam.check.grads or best)
    return exam._replace(zero=zero)


def _name_dtypes(tree: PyTree) -> tuple[str, ...]:
    return tuple(sorted({str(jnp.result_type(leaf)) for leaf in jax.tree.leaves(tree)}))


def _name_nonfinite(loss: float, grads: Mapping[str, np.ndarray]) -> tuple[str, ...]:
    """Returns the loss and the gradients that are not finite, by their names."""
    names = [f"grads {n}" for n, grad in grads.items() if not np.isfinite(grad).all()]
    if not math.isfinite(loss):
        names.insert(0, "loss")
    return tuple(names)


def _look_for_lines(
    exam: Exam, target: Target, compiled: CompiledBackward, announce: Announce
) -> Exam:
    """Adds to an exam what only switches can show: the lines at which numbers are lost.

    `compiled` is the same pass as the model runs it.
    """
    announce("putting a switch at each line")
    args = (target.params, target.batch)
    backward = Backward(target.fun, args, {}, target.constants, has_aux=True)
    search = Search(Switchboard(backward))
    operations = search.board.operations
    bad_aux: list[str] = []
    # A quick exam of a model without such outputs compiles no switchboard.
    if any(name.startswith("aux") for name in backward.names):
        written = search.as_written(exam.loss_scale)
        bad_aux = [name for name in written.nonfinite if name.startswith("aux")]
    exam = exam._replace(
        nonfinite_arguments=tuple(map(_rename, backward.nonfinite_arguments)),
        nonfinite_outputs=(*exam.nonfinite_outputs, *bad_aux),
        constants=tuple(operations.constants.values()),
        not_entered=tuple(sorted(operations.not_entered)),
        sums_of_gradients=count_summands(operations, target.params),
        half_draws=tuple(dict.fromkeys(_find_half_draws(operations))),
    )
    checker = Checker(search, exam.largest_scale)
    can_check = not (exam.nonfinite_arguments and exam.nonfinite_outputs)
    if can_check and (exam.nonfinite_outputs or not exam.is_quick):
        announce("comparing with float32, and looking for lines at fault")
        scale = max(exam.loss_scale, exam.best_scale)
        grads = compiled.find_gradients(scale)
        is_mask = not exam.blames_autocast
        exam = exam._replace(check=checker.check(exam.loss_scale, grads, is_mask))
    if exam.overflows_at is None or exam.nonfinite_outputs:
        return exam
    announce("looking for what limits the loss scale")
    exam = exam._replace(ceiling=checker.find_ceiling(exam.overflows_at))
    if exam.is_quick:
        return exam
    return exam._replace(relief=_find_relief(exam, search))


def _rename(argument: str) -> str:
    return argument.replace("args[0]", "params").replace("args[1]", "batch")


def _find_relief(exam: Exam, search: Search) -> Relief | None:
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


def _find_half_draws(operations: Operations) -> Iterator[tuple[str, str]]:
    """Yields the dtype and the line of each draw of random numbers in half precision.

    JAX makes them of random bits, in one program.
    """
    draws = set()  # programs, by the equations that hold them
    for key, operation in operations.by_key.items():
        op = does(operation.eqn.primitive.name)
        made: Any = operation.eqn.outvars[0].aval
        if Op.RANDOM in op:
            draws.add(key[:-1])
        elif Op.READS_BITS in op and holds_half(made) and key[:-1] in draws:
            yield str(made.dtype), operation.place.line.where


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
