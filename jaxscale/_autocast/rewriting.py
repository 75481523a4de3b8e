"""How a program that an equation holds is rewritten, for the inputs that it comes with.

A program is rewritten once for each combination of precisions that its inputs come in, and takes
the place of the one that the equation has.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from .. import _jax
from .._jax import ClosedJaxpr, Jaxpr, JaxprEqn, cast, closed
from .callers import Place, owner_of
from .frame import Frame
from .recompute import Link, Narrow
from .rules import Outputs
from .values import Kind, ToRound, as_declared, has_dtype, is_float32, without_mark


class Inputs(NamedTuple):
    """What a program is given.

    Attributes:
      args: the values, narrow ones in one view or in both, and links.
      kinds: what else is known of them.
    """

    args: list[Any]
    kinds: list[Kind]


class Rewritten(NamedTuple):
    """A program, rewritten, with what is known of its outputs.

    Attributes:
      program: the program.
      kinds: what else is known of its outputs.
      to_round: which of them are narrow, and given back in float32: see `ToRound`.
    """

    program: ClosedJaxpr
    kinds: list[Kind]
    to_round: list[bool]

    def mark(self, values: Sequence[Any]) -> Outputs:
        """Returns the outputs of an equation with this program, marked where they are to round."""
        outputs = []
        for value, is_to_round in zip(values, self.to_round, strict=True):
            if is_to_round:
                value = ToRound(value)
            outputs.append(value)
        return outputs


class Way(NamedTuple):
    """How a program is rewritten, besides for its inputs.

    Attributes:
      fixed: the dtypes of the first outputs: whether each is half precision or what the program
        declares. The others come in the precision that they were computed in.
      rounded_outputs: as in `find_readers`.
      in_loop: whether the program is the body of a loop.
    """

    fixed: tuple[bool, ...] = ()
    rounded_outputs: tuple[bool, ...] = ()
    in_loop: bool = False


_AS_IT_COMES = Way()


def rewrite(
    frame: Frame,
    eqn: JaxprEqn,
    program: Jaxpr | ClosedJaxpr,
    inputs: Inputs,
    way: Way = _AS_IT_COMES,
) -> Rewritten:
    """Rewrites a program that an equation holds for its place in the program around.

    For a link the new program takes the arrays that the link starts from, and for a narrow value
    whose cotangents meet it takes both views.
    """
    autocast = frame.autocast
    place = place_inside(frame, eqn, way.in_loop)
    variables = closed(program).jaxpr.invars
    views = []
    for var, arg in zip(variables, inputs.args, strict=True):
        views.append(_view_of(var, arg, autocast.precision.narrow))
    key = (tuple(views), tuple(inputs.kinds), place, way, _jax.form_asked_for())
    known: dict[Any, Rewritten] = {}
    if "link" not in views:  # which belongs to one place of one program
        known = autocast.rewritten.setdefault(program, known)
    if key not in known:
        types: list[Any] = []
        for var, arg, view in zip(variables, inputs.args, views, strict=True):
            types += _types_of(var, arg, view, autocast.precision.narrow)
        known[key] = _rewrite(autocast, program, inputs, place, way, types)
    return known[key]


def _rewrite(
    autocast: Any,
    program: Jaxpr | ClosedJaxpr,
    inputs: Inputs,
    place: Place,
    way: Way,
    types: Sequence[Any],
) -> Rewritten:
    """Rewrites a program that takes arrays of some types for its inputs."""
    kinds: list[Kind] = []
    to_round: list[bool] = []
    declared = closed(program).jaxpr.outvars
    narrow = autocast.precision.narrow
    tree = jax.tree.structure(inputs.args)

    def run(*leaves: Any) -> list[Any]:
        args = jax.tree.unflatten(tree, leaves)
        result = autocast.run(
            closed(program), args, inputs.kinds, place, way.rounded_outputs
        )
        outputs = list(result.outputs)
        for i, is_half in enumerate(way.fixed):
            if is_half:
                outputs[i] = cast(without_mark(outputs[i]), narrow)
            else:
                outputs[i] = as_declared(outputs[i], declared[i])
        kinds[:] = result.kinds
        to_round[:] = [isinstance(output, ToRound) for output in outputs]
        return list(map(without_mark, outputs))

    return Rewritten(jax.make_jaxpr(run)(*types), kinds, to_round)


def _view_of(var: Any, arg: Any, narrow: np.dtype) -> str:
    """Returns in which form a program is passed the value of a variable."""
    if isinstance(arg, Link):
        return "link"
    if isinstance(arg, Narrow):
        return "both"
    if is_float32(var) and has_dtype(arg, narrow):
        return "half"
    return "declared"


def _types_of(var: Any, arg: Any, view: str, narrow: np.dtype) -> list[Any]:
    """Returns the types of the arrays that a program takes for a variable in a view."""
    match view:
        case "link":
            return list(map(jax.typeof, jax.tree.leaves(arg)))
        case "both":
            return [var.aval.update(dtype=narrow), var.aval]
        case "half":
            return [var.aval.update(dtype=narrow)]
    return [var.aval]


def place_inside(frame: Frame, eqn: JaxprEqn, in_loop: bool = False) -> Place:
    """Returns what programs that an equation holds know of where they are."""
    owner = owner_of(eqn, frame.place.owner)
    return Place(in_loop or frame.place.in_loop, owner)


def read_inputs(frame: Frame, eqn: JaxprEqn, with_links: bool = False) -> Inputs:
    """Returns the inputs of an equation as calls take them, computed unless `with_links`."""
    args = []
    for atom in eqn.invars:
        link = frame.link_of(atom)
        if with_links and link is not None:
            args.append(link)
        else:
            args.append(frame.read_for_call(atom))
    return Inputs(args, list(map(frame.kind_of, eqn.invars)))
