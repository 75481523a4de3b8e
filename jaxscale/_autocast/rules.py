"""The rules for equations that hold no programs.

A rule evaluates one equation of a program and returns its outputs. Four words:

- A value is *narrow* if the program declares it as float32 and it is computed in half precision.
- A *link* is an equation that is left to be computed later, when something reads its output. Links
  that follow one another are a *chain* (see `recompute.py`). The rule returns no outputs for them.
- Cotangents *meet* in a narrow value if it has several readers that are not all products. They must
  be added in float32.
- The *kind* of a value is what else is known of it: a constant, a parameter or a product.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.custom_derivatives import SymbolicZero

from .._jax import (
    JaxprEqn,
    bind,
    cast,
    dot_dimensions,
    operation,
    programs,
    with_preferred_type,
    with_result_type,
)
from . import table
from .casts import is_attention_scores
from .chains import fits_chain
from .frame import Frame
from .readers import has_gradient
from .recompute import LONGEST, join_operands, name_starts
from .values import (
    FLOAT32,
    Constant,
    Kind,
    Parameter,
    Product,
    ToRound,
    count_elements,
    is_float32,
)

Outputs = Sequence[Any]
Rule = Callable[[Frame, JaxprEqn], Outputs]


def run_as_written(frame: Frame, eqn: JaxprEqn) -> Outputs:
    """Evaluates an equation in the dtypes that the program declares."""
    return bind(eqn, frame.read_inputs_wide(eqn))


def run_in_float32(frame: Frame, eqn: JaxprEqn) -> Outputs:
    """Evaluates an equation, which the program declares in float32, or leaves it to a chain."""
    if fits_chain(frame, eqn):
        return leave_to_chain(frame, eqn)
    return run_as_written(frame, eqn)


def leave_to_chain(frame: Frame, eqn: JaxprEqn) -> Outputs:
    """Leaves an equation to be computed later, as the next link of the chains that it reads.

    If the chain would be too long, or links were computed too often in this program, those that
    the equation reads are computed now.
    """
    length = 1
    for atom in eqn.invars:
        link = frame.link_of(atom)
        if link is not None:
            length += link.size
    if length > LONGEST or frame.repeats_left < 0:
        frame.compute_links(eqn)
        # A new chain may start here, but only from a narrow value.
        if not frame.reads_narrow(eqn):
            return run_as_written(frame, eqn)
    for index, var in enumerate(eqn.outvars):
        frame.defer(var, frame.link(eqn, index))
    return ()


def multiply_matrices(frame: Frame, eqn: JaxprEqn) -> Outputs:
    """Evaluates a matrix product or a convolution, in half precision if `autocast` casts it."""
    if id(eqn) not in frame.readers.products:
        return run_as_written(frame, eqn)
    operands = _read_operands(frame, eqn)
    precision = frame.precision
    if is_attention_scores(eqn, frame.place.owner):
        # A softmax in float32 follows.
        return [_multiply_into_float32(eqn, operands, precision.narrow)]
    frame.kinds[eqn.outvars[0]] = Product()
    if precision.operand != precision.narrow:
        # of operands such as float8, the result would be in float8
        return bind(eqn, operands, with_result_type(eqn, precision.narrow))
    # JAX asks for float32 outputs in any float32 program. In half precision nothing is lost, as
    # hardware accumulates in float32 anyway.
    return bind(eqn, operands, with_preferred_type(eqn, FLOAT32, precision.narrow))


def _read_operands(frame: Frame, eqn: JaxprEqn) -> list[Any]:
    """Returns the operands of a product in half precision."""
    arrays = list(map(frame.read_half, eqn.invars))
    if _has_batch_dimensions(eqn):
        # Both are activations, as in attention, and large.
        arrays = join_operands(*arrays)
    operands = []
    for atom, array in zip(eqn.invars, arrays, strict=True):
        if is_float32(atom):
            array = frame.precision.as_operand(array)
        operands.append(array)
    return operands


def _has_batch_dimensions(eqn: JaxprEqn) -> bool:
    if eqn.primitive.name != "dot_general":
        return False
    return any(batch for _, batch in dot_dimensions(eqn))


def _multiply_into_float32(
    eqn: JaxprEqn, operands: Sequence[Any], dtype: np.dtype
) -> jax.Array:
    """Returns a product of half-precision arrays in float32. Its derivative is in half precision.

    JAX's own derivative would multiply float32 cotangents by half-precision operands, for which
    hardware has no fast product.
    """
    derivative_params = with_preferred_type(eqn, FLOAT32, dtype)

    @jax.custom_jvp
    def multiply(*operands: Any) -> jax.Array:
        return bind(eqn, operands)[0]

    def derive(operands: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
        terms = []
        for i, tangent in enumerate(tangents):
            if isinstance(tangent, SymbolicZero):
                continue
            varied = list(operands)
            varied[i] = tangent
            (term,) = bind(eqn, varied, derivative_params)
            terms.append(cast(term, FLOAT32))
        return multiply(*operands), sum(terms[1:], start=terms[0])

    multiply.defjvp(derive, symbolic_zeros=True)
    return multiply(*operands)


def follow_inputs(frame: Frame, eqn: JaxprEqn) -> Outputs:
    """Evaluates an equation in half precision if all of its floating-point inputs are in it."""
    if _reads_wide(frame, eqn):
        return run_in_float32(frame, eqn)
    # The types of a program that an equation holds, such as the comparator of a sort, are fixed.
    holds_programs = any(programs(eqn))
    if holds_programs or not frame.reads_narrow(eqn):
        return run_as_written(frame, eqn)
    if not has_gradient(eqn):
        return bind(eqn, list(map(frame.read_half_without_gradient, eqn.invars)))
    is_summed = eqn.primitive.name in table.SUMMED_BACKWARD
    # Where cotangents meet in an input, this equation runs in float32. One case is exempt: only
    # products read its outputs, and its derivative adds nothing up. Then the cotangents that it
    # sends back are rounded already.
    sends_back_rounded = not is_summed and _is_only_rounded(frame, eqn)
    if frame.reads_meeting(eqn) and not sends_back_rounded:
        return _follow_in_float32(frame, eqn)
    if is_summed:
        return _run_wide_and_round(frame, eqn)
    # This reader is no product, so where cotangents meet it reads a stand-in of its own.
    return bind(eqn, list(map(frame.read_own_half, eqn.invars)))


def _reads_wide(frame: Frame, eqn: JaxprEqn) -> bool:
    """Returns whether an equation reads a float32 value that is neither narrow nor a constant."""
    for atom in eqn.invars:
        is_wide = is_float32(atom) and not frame.is_narrow(atom)
        if is_wide and not isinstance(frame.kind_of(atom), Constant):
            return True
    return False


def _is_only_rounded(frame: Frame, eqn: JaxprEqn) -> bool:
    """Returns whether all readers of the float32 outputs round them, as products do."""
    return all(map(frame.is_only_rounded, filter(is_float32, eqn.outvars)))


def _run_wide_and_round(frame: Frame, eqn: JaxprEqn) -> Outputs:
    """Evaluates an equation in float32, and rounds the outputs.

    Readers in float32 get the values before rounding.
    """
    outputs = []
    for value, var in zip(run_as_written(frame, eqn), eqn.outvars, strict=True):
        if is_float32(var):
            frame.wides[var] = value
            value = cast(value, frame.precision.narrow)
        outputs.append(value)
    return outputs


def _follow_in_float32(frame: Frame, eqn: JaxprEqn) -> Outputs:
    """Evaluates an equation in float32, or leaves it to a chain.

    The outputs are narrow, but not rounded yet: readers in half precision round them.
    """
    if fits_chain(frame, eqn):
        return leave_to_chain(frame, eqn)
    outputs = []
    for value, var in zip(run_as_written(frame, eqn), eqn.outvars, strict=True):
        if is_float32(var):
            value = ToRound(value)
        outputs.append(value)
    return outputs


def follow_elementwise(frame: Frame, eqn: JaxprEqn) -> Outputs:
    """Evaluates an elementwise equation in half precision if all of its inputs are in it.

    If it broadcasts an input, its derivative is a sum, which must be computed in float32. Then the
    equation is computed in float32 too, as a link.
    """
    output: Any = eqn.outvars[0]
    if is_float32(output) and _broadcasts_narrow(frame, eqn, output.aval.shape):
        return leave_to_chain(frame, eqn)
    return follow_inputs(frame, eqn)


def _broadcasts_narrow(frame: Frame, eqn: JaxprEqn, shape: Any) -> bool:
    """Returns whether a narrow input of an equation has another shape than its output."""
    inputs: list[Any] = eqn.invars
    return any(frame.is_narrow(atom) and atom.aval.shape != shape for atom in inputs)


def move(frame: Frame, eqn: JaxprEqn) -> Outputs:
    """Evaluates an equation that moves the elements of its first input, or only names it."""
    moved = eqn.invars[0]
    _keep_kind(frame, eqn)
    if operation(eqn) == "broadcast_in_dim" and is_float32(moved):
        # The broadcast is also kept as a link, besides being done now: a chain that reads the
        # large array can then start from the small one, and keep that.
        frame.grown[eqn.outvars[0]] = frame.link_besides(eqn)
    if operation(eqn) != "name":
        return follow_inputs(frame, eqn)

    def name(half: jax.Array) -> jax.Array:
        return bind(eqn, [half])[0]

    # The name is for what the backward pass keeps: the arrays that a chain starts from, or the
    # half-precision one of the two views of a value.
    link = frame.link_of(moved)
    if link is not None:
        frame.defer(eqn.outvars[0], name_starts(link, name))
        return ()
    if frame.meets(moved):
        views = frame.read_views(moved)
        return [views._replace(half=name(views.half))]
    return follow_inputs(frame, eqn)


def _keep_kind(frame: Frame, eqn: JaxprEqn) -> None:
    """Gives the outputs of an equation the kind of its first input.

    Of a parameter fewer elements may be left, as after a slice.
    """
    kind = frame.kind_of(eqn.invars[0])
    for var in eqn.outvars:
        if isinstance(kind, Parameter):
            frame.kinds[var] = Parameter(min(kind.size, count_elements(var)))
        else:
            frame.kinds[var] = kind


def add(frame: Frame, eqn: JaxprEqn) -> Outputs:
    """Evaluates a sum. A bias is added to a product in float32.

    Only readers in half precision get the sum rounded.
    """
    first, second = eqn.invars
    total = eqn.outvars[0]
    for product, addend in ((first, second), (second, first)):
        if not isinstance(frame.kind_of(product), Product):
            continue
        addend_kind = frame.kind_of(addend)
        is_biased = _is_bias(addend_kind, total)
        if is_biased or isinstance(addend_kind, Product):
            frame.kinds[total] = Product()
        if is_biased and (frame.is_narrow(product) or frame.link_of(product)):
            return leave_to_chain(frame, eqn)
    return follow_elementwise(frame, eqn)


def _is_bias(kind: Kind, total: Any) -> bool:
    """Returns whether an addend is a bias: a parameter that is smaller than the total.

    If the total has at most one axis, the parameter may have any size.
    """
    if not isinstance(kind, Parameter):
        return False
    return total.aval.ndim <= 1 or kind.size < count_elements(total)


def multiply(frame: Frame, eqn: JaxprEqn) -> Outputs:
    """Evaluates a product of elements. A value times itself is a power, and so in float32."""
    first, second = eqn.invars
    if first is second:
        return run_in_float32(frame, eqn)
    return follow_elementwise(frame, eqn)


def subtract(frame: Frame, eqn: JaxprEqn) -> Outputs:
    """Evaluates a difference, in float32 if only operations in float32 read it.

    It cancels digits, so it is rounded only if something needs that. Before an exponential or a
    power, as in softmax, a variance or a loss, nothing does.
    """
    if eqn.outvars[0] in frame.readers.only_float32:
        return run_in_float32(frame, eqn)
    return follow_elementwise(frame, eqn)


def convert(frame: Frame, eqn: JaxprEqn) -> Outputs:
    """Evaluates a cast that the program itself makes."""
    atom: Any = eqn.invars[0]
    var: Any = eqn.outvars[0]
    dtype = np.dtype(var.aval.dtype)
    if frame.is_narrow(atom):
        return [_convert_narrow(frame, eqn, dtype)]
    if is_float32(atom) and dtype == frame.precision.narrow:
        return [frame.read_own_half(atom)]
    if is_float32(atom) and dtype == FLOAT32:
        return move(frame, eqn)
    if atom.aval.dtype == frame.precision.narrow and dtype == FLOAT32:
        # Readers in half precision take this array: rounding `var` would give the same numbers.
        frame.written[var] = frame.read_wide(atom)
    return run_as_written(frame, eqn)


def _convert_narrow(frame: Frame, eqn: JaxprEqn, dtype: np.dtype) -> Any:
    """Returns a narrow value in a dtype.

    It is cast from half precision: a cast to float32 first would restore no digits.
    """
    atom = eqn.invars[0]
    if dtype == FLOAT32:
        frame.kinds[eqn.outvars[0]] = frame.kind_of(atom)
        # As a call takes it: in both views, if its cotangents meet.
        return frame.read_for_call(atom)
    half = frame.read_own_half(atom)
    if dtype == frame.precision.narrow:
        return half
    return bind(eqn, [half])[0]


def pass_barrier(frame: Frame, eqn: JaxprEqn) -> Outputs:
    """Evaluates an `optimization_barrier`, which returns its inputs, each in its precision."""
    inputs = []
    for atom in eqn.invars:
        if frame.is_narrow(atom):
            inputs.append(frame.read_own_half(atom))
        else:
            inputs.append(frame.read_wide(atom))
    return bind(eqn, inputs)


SIMPLE_RULES: dict[str, Rule] = {
    **dict.fromkeys(table.FLOAT32, run_in_float32),
    **dict.fromkeys(table.PRODUCTS, multiply_matrices),
    **dict.fromkeys(table.ELEMENTWISE, follow_elementwise),
    **dict.fromkeys(table.MOVES, move),
    **dict.fromkeys(table.CHOICES, follow_inputs),
    # These take the place of the rules above for some operations.
    "add": add,
    "mul": multiply,
    "sub": subtract,
    "convert_element_type": convert,
    "optimization_barrier": pass_barrier,
}
