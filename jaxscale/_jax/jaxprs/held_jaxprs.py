"""The inside of an equation: its jaxprs, and which of its inputs and outputs are theirs.

A form that JAX adds is a row of `FORMS`, and one function here.
"""

from collections.abc import Callable, Container, Sequence
from typing import NamedTuple

from jax.extend.core import JaxprEqn

from ..pruned_jaxprs import ClosedJaxpr
from .calls import callee
from .control_flow import branches, mapped, scan, while_loop
from .equation_forms import PLAIN_CALLS, Form, UnknownFormError
from .hijax import form_of


class Held(NamedTuple):
    """A jaxpr that an equation holds.

    Attributes:
      program: the jaxpr.
      inputs: for each of its inputs, which input of the equation that is.
      outputs: for each of its outputs, which output of the equation that is. The test of a loop
        has none.
      fed_back: the outputs that a loop feeds back, each with the input of the jaxpr that it is
        in the next turn.
    """

    program: ClosedJaxpr
    inputs: Sequence[int]
    outputs: Sequence[int]
    fed_back: Sequence[tuple[int, int]] = ()


def open_equation(eqn: JaxprEqn) -> list[Held]:
    """Returns the jaxprs that an equation holds, in the order of its parameters.

    There are none if it is of no form that is known. What it holds then, `programs` may see.

    Raises:
      UnknownFormError: if it is of a known form, and has other parameters than any known version.
    """
    reader = _READERS.get(form_of(eqn))
    if reader is None:
        return []
    return reader(eqn)


def called_program(
    eqn: JaxprEqn, forms: Container[Form] = PLAIN_CALLS
) -> ClosedJaxpr | None:
    """Returns the jaxpr that an equation calls, if it is a call of one of some forms.

    Returns `None` for other equations, and for those with parameters that are not known.
    """
    if form_of(eqn) not in forms:
        return None
    try:
        (held,) = open_equation(eqn)
    except UnknownFormError:
        return None
    return held.program


def _open_call(eqn: JaxprEqn) -> list[Held]:
    return [_alike(eqn, callee(eqn))]


def _open_mapped(eqn: JaxprEqn) -> list[Held]:
    return [_alike(eqn, mapped(eqn).program)]


def _alike(eqn: JaxprEqn, program: ClosedJaxpr) -> Held:
    return Held(program, range(len(eqn.invars)), range(len(eqn.outvars)))


def _open_scan(eqn: JaxprEqn) -> list[Held]:
    loop = scan(eqn)
    fed_back = [(i, loop.consts + i) for i in range(loop.carries)]
    return [_alike(eqn, loop.body)._replace(fed_back=fed_back)]


def _open_while(eqn: JaxprEqn) -> list[Held]:
    loop = while_loop(eqn)
    # The constants of the test come first, then those of the body, then what is carried.
    first_carry = loop.test_consts + loop.body_consts
    carried = range(first_carry, len(eqn.invars))
    fed_back = [(i, loop.body_consts + i) for i in range(len(carried))]
    held = {
        "cond_jaxpr": Held(loop.test, (*range(loop.test_consts), *carried), ()),
        "body_jaxpr": Held(
            loop.body,
            range(loop.test_consts, len(eqn.invars)),
            range(len(carried)),
            fed_back,
        ),
    }
    return [held[name] for name in eqn.params if name in held]


def _open_branches(eqn: JaxprEqn) -> list[Held]:
    inputs = range(1, len(eqn.invars))  # the first says which branch it is
    outputs = range(len(eqn.outvars))
    return [Held(branch, inputs, outputs) for branch in branches(eqn)]


_READERS: dict[Form, Callable[[JaxprEqn], list[Held]]] = {
    **dict.fromkeys(PLAIN_CALLS, _open_call),
    Form.CUSTOM_VJP: _open_call,
    Form.OBJECT: _open_call,
    Form.SCAN: _open_scan,
    Form.WHILE: _open_while,
    Form.BRANCHES: _open_branches,
    Form.SHARD_MAP: _open_mapped,
}
