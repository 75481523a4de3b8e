"""The rules for all operations but calls, loops and branches (see `higher_order.py`).

A rule evaluates one equation of a program and returns its outputs. The words:

- A *reader* of a value is an equation that takes it as an input, or the program if it returns it.
- To *round* is to cast float32 to half precision.
- A value is *narrow* if the program declares it as float32, and its readers may run in half
  precision. It was computed in half precision, or is rounded only for such readers (`ToRound`).
- A narrow value has two *views*: the *half* is in half precision, the *wide* one is in float32.
- Cotangents *meet* in a narrow value if several readers send one back and not all of them are
  products, or if they meet in the value that it was computed from. They must be added in float32.
- So a reader of such a value takes the wide view, or a *stand-in*: the half with a gradient that
  goes to the wide view. All products share one stand-in; each other reader has its *own half*.
- A *product* is a matrix product or a convolution.
- The *kind* of a value is what else is known of it: a constant, a parameter, a product's result.
- A *link* is an equation that is left to be computed when something reads its output. A rule that
  leaves one returns no outputs. Links that follow one another are a *chain* (see `recompute.py`).
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
    """Evaluates an equation in the dtypes that the program declares, or leaves it to a chain."""
    if fits_chain(frame, eqn):
        return leave_to_chain(frame, eqn)
    return run_as_written(frame, eqn)


def leave_to_chain(frame: Frame, eqn: JaxprEqn) -> Outputs:
    """Leaves an equation to be computed later, as the next link of the chains that it reads.

    If the links that it reads have `LONGEST` equations or more, or chains have already computed too
    many in this program (`repeats_left`), these links are computed now.
    """
    num_equations = 1
    for atom in eqn.invars:
        link = frame.link_of(atom)
        if link is not None:
            num_equations += link.size
    if num_equations > LONGEST or frame.repeats_left < 0:
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
        # A softmax in float32 reads the scores, so they stay in float32.
        return [_multiply_into_float32(eqn, operands, precision.narrow)]
    frame.kinds[eqn.outvars[0]] = Product()
    if precision.operand != precision.narrow:
        # Asked for no type, operands such as float8 give a result in float8. So always ask.
        return bind(eqn, operands, with_result_type(eqn, precision.narrow))
    # In a float32 program, JAX asks products for float32 outputs. Asking for half precision instead
    # only rounds the result: hardware accumulates in float32 anyway.
    params = with_preferred_type(eqn, old=FLOAT32, new=precision.narrow)
    return bind(eqn, operands, params)


def _read_operands(frame: Frame, eqn: JaxprEqn) -> list[Any]:
    """Returns the operands of a product in half precision."""
    arrays = list(map(frame.read_half, eqn.invars))
    if _has_batch_dimensions(eqn):
        # Both operands are large, as in attention. Their gradients are tied together, so that XLA
        # does not keep an operand for one of them while it goes on from the other.
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
    # for each operand: the axes that it sums over, and its batch axes
    return any(batch for _, batch in dot_dimensions(eqn))


def _multiply_into_float32(
    eqn: JaxprEqn, operands: Sequence[Any], dtype: np.dtype
) -> jax.Array:
    """Returns, in float32, a product of half-precision arrays.

    JAX's own derivative would multiply float32 cotangents by half-precision operands, for which
    hardware has no fast product. This one multiplies in half precision, and then casts.
    """
    derivative_params = with_preferred_type(eqn, old=FLOAT32, new=dtype)

    @jax.custom_jvp
    def multiply(*operands: Any) -> jax.Array:
        return bind(eqn, operands)[0]

    def derive(operands: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
        terms = []
        for i, tangent in enumerate(tangents):
            if isinstance(tangent, SymbolicZero):
                continue
            with_tangent = list(operands)
            with_tangent[i] = tangent
            (term,) = bind(eqn, with_tangent, derivative_params)
            terms.append(cast(term, FLOAT32))
        return multiply(*operands), sum(terms[1:], start=terms[0])

    multiply.defjvp(derive, symbolic_zeros=True)
    return multiply(*operands)


def follow_inputs(frame: Frame, eqn: JaxprEqn) -> Outputs:
    """Evaluates an equation in float32 if it reads a wide value, or else as its inputs allow."""
    if _reads_wide(frame, eqn):
        return run_in_float32(frame, eqn)
    # The types of a program that an equation holds, such as that of `x.at[i].apply`, are fixed.
    holds_programs = any(programs(eqn))
    if holds_programs or not frame.reads_narrow(eqn):
        return run_as_written(frame, eqn)
    if not has_gradient(eqn):
        return bind(eqn, list(map(frame.read_half_without_gradient, eqn.invars)))
    return _follow_narrow(frame, eqn)


def _follow_narrow(frame: Frame, eqn: JaxprEqn) -> Outputs:
    """Evaluates an equation with a gradient, whose float32 inputs are narrow or constants."""
    adds_up_backward = eqn.primitive.name in table.SUMMED_BACKWARD
    # If cotangents meet in an input, it runs in float32, so that they are not rounded first. But if
    # all readers round its outputs, as products do, what it sends back was rounded already.
    sends_back_rounded = not adds_up_backward and _is_only_rounded(frame, eqn)
    if frame.reads_meeting(eqn) and not sends_back_rounded:
        return _follow_in_float32(frame, eqn)
    if adds_up_backward:
        return _run_wide_and_round(frame, eqn)
    # This reader is not a product. So where cotangents meet, it gets a stand-in of its own.
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
    """Evaluates an equation in float32, for the sums in its derivative, and rounds its outputs."""
    outputs = []
    for value, var in zip(run_as_written(frame, eqn), eqn.outvars, strict=True):
        if is_float32(var):
            frame.wides[var] = value  # for readers in float32
            value = cast(value, frame.precision.narrow)
        outputs.append(value)
    return outputs


def _follow_in_float32(frame: Frame, eqn: JaxprEqn) -> Outputs:
    """Evaluates an equation in float32, as cotangents meet in its inputs, or leaves it to a chain.

    If it is evaluated now, its outputs are marked `ToRound`, as cotangents must also meet in these:
    readers in half precision round them, others do not.
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
    """Evaluates an elementwise equation as `follow_inputs` does, unless it broadcasts.

    The gradient of a narrow input that it broadcasts is a sum, which must be computed in float32.
    So the equation is then computed in float32 too, as a link.
    """
    output: Any = eqn.outvars[0]
    if is_float32(output) and _broadcasts_narrow(frame, eqn, output.aval.shape):
        return leave_to_chain(frame, eqn)
    return follow_inputs(frame, eqn)


def _broadcasts_narrow(frame: Frame, eqn: JaxprEqn, shape: Any) -> bool:
    """Returns whether a narrow input of an equation differs in shape from the output."""
    inputs: list[Any] = eqn.invars
    return any(frame.is_narrow(atom) and atom.aval.shape != shape for atom in inputs)


def move(frame: Frame, eqn: JaxprEqn) -> Outputs:
    """Evaluates an equation that moves the elements of its first input, or gives it a name."""
    _keep_kind(frame, eqn)
    if operation(eqn) == "name":
        return _name(frame, eqn)
    if operation(eqn) == "broadcast_in_dim" and is_float32(eqn.invars[0]):
        # A chain that reads the large array may start from the small one instead, and keep only
        # that. So the broadcast is kept as a link too.
        frame.grown[eqn.outvars[0]] = frame.link_besides(eqn)
    return follow_inputs(frame, eqn)


def _name(frame: Frame, eqn: JaxprEqn) -> Outputs:
    """Names a value for a policy of `jax.checkpoint`, as `checkpoint_name` asks.

    The name goes to what the backward pass keeps. For a link, these are the half-precision arrays
    that its chain starts from, and for a value in which cotangents meet, its half.
    """

    def give_name(half: jax.Array) -> jax.Array:
        return bind(eqn, [half])[0]

    named = eqn.invars[0]
    link = frame.link_of(named)
    if link is not None:
        frame.defer(eqn.outvars[0], name_starts(link, give_name))
        return ()
    if frame.meets(named):
        views = frame.read_views(named)
        return [views._replace(half=give_name(views.half))]
    return follow_inputs(frame, eqn)


def _keep_kind(frame: Frame, eqn: JaxprEqn) -> None:
    """Gives the outputs of an equation the kind of its first input.

    A parameter may have fewer elements left, as after a slice.
    """
    kind = frame.kind_of(eqn.invars[0])
    for var in eqn.outvars:
        if isinstance(kind, Parameter):
            frame.kinds[var] = Parameter(min(kind.size, count_elements(var)))
        else:
            frame.kinds[var] = kind


def add(frame: Frame, eqn: JaxprEqn) -> Outputs:
    """Evaluates a sum. If it adds a bias to a product, it is computed in float32.

    Then only readers in half precision get it rounded.
    """
    first, second = eqn.invars
    total = eqn.outvars[0]
    for term, addend in ((first, second), (second, first)):
        if not isinstance(frame.kind_of(term), Product):
            continue
        addend_kind = frame.kind_of(addend)
        is_biased = _is_bias(addend_kind, total)
        # A product plus a bias or another product counts as a product.
        if is_biased or isinstance(addend_kind, Product):
            frame.kinds[total] = Product()
        # A product that is neither narrow nor a link is in float32 already.
        if is_biased and (frame.is_narrow(term) or frame.link_of(term)):
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
    """Evaluates an elementwise product. A square is a power, and so is computed in float32."""
    first, second = eqn.invars
    if first is second:
        return run_in_float32(frame, eqn)
    return follow_elementwise(frame, eqn)


def subtract(frame: Frame, eqn: JaxprEqn) -> Outputs:
    """Evaluates a difference, in float32 if only operations in float32 read it.

    It cancels digits, so the result stays in float32 if all of its readers are in float32 anyway,
    as are an exponential or a power in softmax, a variance or a loss.
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
        # Only the weak type changes.
        return move(frame, eqn)
    if atom.aval.dtype == frame.precision.narrow and dtype == FLOAT32:
        # Readers in half precision take the array before the cast, which is declared so: rounding
        # `var` again would give the same numbers.
        frame.written[var] = frame.read_wide(atom)
    return run_as_written(frame, eqn)


def _convert_narrow(frame: Frame, eqn: JaxprEqn, dtype: np.dtype) -> Any:
    """Returns a narrow value in the dtype that a cast asks for."""
    atom = eqn.invars[0]
    if dtype == FLOAT32:
        frame.kinds[eqn.outvars[0]] = frame.kind_of(atom)
        # It stays narrow. If its cotangents meet, it is returned in both views.
        return frame.read_for_call(atom)
    half = frame.read_own_half(atom)
    if dtype == frame.precision.narrow:
        return half
    # To another dtype, by way of float32, the numbers would be the same.
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
    # Operations with a rule of their own. It takes the place of the one above, if there is one.
    "add": add,
    "mul": multiply,
    "sub": subtract,
    "convert_element_type": convert,
    "optimization_barrier": pass_barrier,
}
