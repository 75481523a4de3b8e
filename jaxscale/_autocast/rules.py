"""The rules for equations that hold no programs, and for those that are computed when needed.

A rule evaluates one equation of a program and returns its outputs. The words for what it reads:

- A value is *narrow* if the program declares it as float32 and it is computed in half precision.
- A *link* is an equation that is computed later, when something reads its result. The links that
  lead to a value are its *chain* (see `recompute.py`). The rule of a link returns no outputs.
- A narrow value *meets* cotangents if it has several readers and not all are products. What they
  send back is to be added in float32, so readers other than products take its float32 view.
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
from .casts import is_logits
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
    """Evaluates an equation in float32, or leaves it to a chain."""
    if fits_chain(frame, eqn):
        return leave_to_chain(frame, eqn)
    return run_as_written(frame, eqn)


def leave_to_chain(frame: Frame, eqn: JaxprEqn) -> Outputs:
    """Leaves an equation to be computed later, at the end of the chain that it reads.

    If that chain would be too long, it is computed now, and the equation starts a new one.
    """
    length = 1
    for atom in eqn.invars:
        link = frame.link_of(atom)
        if link is not None:
            length += link.size
    if length > LONGEST or frame.repeats < 0:
        frame.compute_links(eqn)
        if not frame.reads_narrow(eqn):
            return run_as_written(frame, eqn)
    for index, var in enumerate(eqn.outvars):
        frame.defer(var, frame.link(eqn, index))
    return ()


def multiply_matrices(frame: Frame, eqn: JaxprEqn) -> Outputs:
    """Evaluates a product of the model in half precision, and that of a library as written."""
    if id(eqn) not in frame.readers.products:
        return run_as_written(frame, eqn)
    operands = _read_operands(frame, eqn)
    precision = frame.precision
    if is_logits(eqn, frame.place.owner):
        return [_multiply_into_float32(eqn, operands, precision.narrow)]
    frame.kinds[eqn.outvars[0]] = Product()
    if precision.operand != precision.narrow:
        return bind(eqn, operands, with_result_type(eqn, precision.narrow))
    # JAX asks for float32 outputs in any float32 program. In half precision nothing is lost, as
    # hardware accumulates in float32 anyway.
    return bind(eqn, operands, with_preferred_type(eqn, FLOAT32, precision.narrow))


def _read_operands(frame: Frame, eqn: JaxprEqn) -> list[Any]:
    """Returns what a product in half precision reads."""
    arrays = list(map(frame.read_half, eqn.invars))
    if _is_of_activations(eqn):
        arrays = join_operands(*arrays)
    operands = []
    for atom, array in zip(eqn.invars, arrays, strict=True):
        if is_float32(atom):
            array = frame.precision.as_operand(array)
        operands.append(array)
    return operands


def _is_of_activations(eqn: JaxprEqn) -> bool:
    """Returns whether a product has batch dimensions, such as those of attention."""
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
    params = with_preferred_type(eqn, FLOAT32, dtype)

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
            (term,) = bind(eqn, varied, params)
            terms.append(cast(term, FLOAT32))
        return multiply(*operands), sum(terms[1:], start=terms[0])

    multiply.defjvp(derive, symbolic_zeros=True)
    return multiply(*operands)


def follow_inputs(frame: Frame, eqn: JaxprEqn) -> Outputs:
    """Evaluates an equation in half precision if all floating-point arrays that it reads are."""
    if _reads_wide(frame, eqn):
        return run_in_float32(frame, eqn)
    # A program that an equation holds, such as the comparator of a sort, is typed in float32.
    holds_programs = any(programs(eqn))
    if holds_programs or not frame.reads_narrow(eqn):
        return run_as_written(frame, eqn)
    if not has_gradient(eqn):
        return bind(eqn, list(map(frame.read_half_without_gradient, eqn.invars)))
    # Its cotangents may meet those of other readers, and are not to be rounded before. They are
    # rounded already if all come from products, and its derivative adds up none of them.
    is_summed = eqn.primitive.name in table.SUMMED_BACKWARD
    sends_back_rounded = not is_summed and _is_only_rounded(frame, eqn)
    if frame.reads_meeting(eqn) and not sends_back_rounded:
        return _follow_in_float32(frame, eqn)
    if is_summed:
        return _run_wide_and_round(frame, eqn)
    return bind(eqn, list(map(frame.read_own_half, eqn.invars)))


def _reads_wide(frame: Frame, eqn: JaxprEqn) -> bool:
    """Returns whether an equation reads a float32 value that is neither narrow nor a constant."""
    for atom in eqn.invars:
        is_wide = is_float32(atom) and not frame.is_narrow(atom)
        if is_wide and not isinstance(frame.kind_of(atom), Constant):
            return True
    return False


def _is_only_rounded(frame: Frame, eqn: JaxprEqn) -> bool:
    """Returns whether everything that reads the outputs rounds them, as a product does."""
    return all(map(frame.is_only_rounded, filter(is_float32, eqn.outvars)))


def _run_wide_and_round(frame: Frame, eqn: JaxprEqn) -> Outputs:
    """Evaluates an equation in float32, and rounds what it returns.

    Readers that are to read float32 get what was not rounded.
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

    What it returns is narrow, but only those readers round it that read half precision.
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
    """Evaluates an elementwise equation in half precision if all arrays that it reads are.

    If it broadcasts one, its derivative sums cotangents, which is to be done in float32.
    """
    output: Any = eqn.outvars[0]
    if is_float32(output) and _broadcasts_narrow(frame, eqn, output.aval.shape):
        return leave_to_chain(frame, eqn)
    return follow_inputs(frame, eqn)


def _broadcasts_narrow(frame: Frame, eqn: JaxprEqn, shape: Any) -> bool:
    """Returns whether a narrow value that an equation reads has another shape than its output."""
    inputs: list[Any] = eqn.invars
    return any(frame.is_narrow(atom) and atom.aval.shape != shape for atom in inputs)


def move(frame: Frame, eqn: JaxprEqn) -> Outputs:
    """Evaluates an equation that moves the elements of its first input, or only names it."""
    moved = eqn.invars[0]
    _keep_kind(frame, eqn)
    if eqn.primitive.name == "broadcast_in_dim" and is_float32(moved):
        # A chain that reads the large array starts from the small one, and keeps that.
        frame.grown[eqn.outvars[0]] = frame.link_besides(eqn)
    if operation(eqn) != "name":
        return follow_inputs(frame, eqn)

    def name(half: jax.Array) -> jax.Array:
        return bind(eqn, [half])[0]

    # The name is for what the backward pass keeps: the arrays that a chain starts from, and of the
    # two views of a value the half-precision one.
    link = frame.link_of(moved)
    if link is not None:
        frame.defer(eqn.outvars[0], name_starts(link, name))
        return ()
    if frame.meets(moved):
        views = frame.read_views(moved)
        return [views._replace(half=name(views.half))]
    return follow_inputs(frame, eqn)


def _keep_kind(frame: Frame, eqn: JaxprEqn) -> None:
    """Gives the outputs of an equation the kind of what it moves, of which it may drop a part."""
    kind = frame.kind_of(eqn.invars[0])
    for var in eqn.outvars:
        frame.kinds[var] = kind
        if isinstance(kind, Parameter):
            size = min(kind.size, count_elements(var))
            frame.kinds[var] = Parameter(size)


def add(frame: Frame, eqn: JaxprEqn) -> Outputs:
    """Evaluates a sum. A bias is added to a product in float32.

    Only readers in half precision get the sum rounded.
    """
    first, second = eqn.invars
    total = eqn.outvars[0]
    for term, added in ((first, second), (second, first)):
        if not isinstance(frame.kind_of(term), Product):
            continue
        added_kind = frame.kind_of(added)
        is_bias = _is_bias(added_kind, total)
        if is_bias or isinstance(added_kind, Product):
            frame.kinds[total] = Product()
        if is_bias and (frame.is_narrow(term) or frame.link_of(term) is not None):
            return leave_to_chain(frame, eqn)
    return follow_elementwise(frame, eqn)


def _is_bias(kind: Kind, total: Any) -> bool:
    """Returns whether a term is a bias: a parameter, and smaller than the sum if that has rows."""
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

    A difference cancels digits. Before an exponential or a power, as in softmax, a variance or a
    loss, rounding it would make the loss of digits visible, and nothing needs it rounded.
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
        # A product that reads the result reads this, as casting it back would give it exactly.
        frame.written[var] = frame.read_wide(atom)
    return run_as_written(frame, eqn)


def _convert_narrow(frame: Frame, eqn: JaxprEqn, dtype: np.dtype) -> Any:
    """Returns a narrow value in a dtype.

    It is cast from half precision: a cast to float32 first would restore no digits.
    """
    atom = eqn.invars[0]
    if dtype == FLOAT32:
        frame.kinds[eqn.outvars[0]] = frame.kind_of(atom)
        return frame.read_for_call(atom)
    half = frame.read_own_half(atom)
    if dtype == frame.precision.narrow:
        return half
    return bind(eqn, [half])[0]


def pass_barrier(frame: Frame, eqn: JaxprEqn) -> Outputs:
    """Evaluates an `optimization_barrier`, whose outputs are its inputs, each in its precision."""
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
    # Some of the operations above, by rules of their own.
    "add": add,
    "mul": multiply,
    "sub": subtract,
    "convert_element_type": convert,
    "optimization_barrier": pass_barrier,
}
