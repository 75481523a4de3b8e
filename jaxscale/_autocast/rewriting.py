"""Rewritten jaxprs of equations, for the inputs that these come with.

A jaxpr is rewritten once for each combination of precisions that its inputs come in, and takes
the place of the one that the equation has.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from .._jax import jaxprs
from .._jax.jaxprs import Atom, ClosedJaxpr, Flags, Jaxpr, JaxprEqn, cast, closed
from .environment import Environment, Rewriter
from .narrow_values import (
    FLOAT32,
    Narrow,
    ToRound,
    Value,
    as_declared,
    has_dtype,
    is_float32,
    is_half,
    without_mark,
)
from .product_owner import CallSite
from .rules import Outputs


class Rewritten(NamedTuple):
    """A jaxpr, rewritten, with what is known of its outputs.

    Attributes:
      program: the jaxpr.
      to_round: which of its outputs are narrow, and given back in float32: see `ToRound`.
    """

    program: ClosedJaxpr
    to_round: list[bool]

    def mark(self, values: Sequence[Any]) -> Outputs:
        """Returns the outputs of an equation with this jaxpr, marked where they are to round."""
        outputs = []
        for value, is_to_round in zip(values, self.to_round, strict=True):
            if is_to_round:
                value = ToRound(value)
            outputs.append(value)
        return outputs


class RewriteOptions(NamedTuple):
    """Choices in rewriting a jaxpr, besides the precision of its inputs.

    Attributes:
      fixed: the dtypes of the first outputs: whether each is half precision or what the jaxpr
        declares. The others come in the precision that they were computed in.
      rounded_outputs: as in `plan`.
      in_float32: whether narrow outputs are given back in float32, and marked `ToRound`. So the
        cotangents that a derivative rule of the user gets are not rounded.
      in_loop: whether the jaxpr is the body of a loop.
    """

    fixed: Flags = ()
    rounded_outputs: Flags = ()
    in_float32: bool = False
    in_loop: bool = False


_NO_OPTIONS = RewriteOptions()


def rewrite(
    env: Environment,
    eqn: JaxprEqn,
    program: Jaxpr | ClosedJaxpr,
    args: Sequence[Any],
    options: RewriteOptions = _NO_OPTIONS,
) -> Rewritten:
    """Rewrites a jaxpr that an equation holds for its place in the jaxpr around.

    For a narrow value whose cotangents are summed, the new jaxpr takes both views.
    """
    autocast = env.autocast
    site = env.site.inside(eqn, program, options.in_loop)
    variables = closed(program).jaxpr.invars
    views = []
    for var, arg in zip(variables, args, strict=True):
        views.append(_view_of(var, arg, autocast.dtype))
    settings = jaxprs.form_asked_for(), jaxprs.precision_of_all()
    key = (tuple(views), site, options, settings)
    known: dict[Any, Rewritten] = autocast.rewritten.setdefault(program, {})
    if key not in known:
        types: list[Any] = []
        for var, view in zip(variables, views, strict=True):
            types.append(_types_of(var, view, autocast.dtype))
        known[key] = _rewrite(autocast, program, site, options, types)
    return known[key]


def _rewrite(
    autocast: Rewriter,
    program: Jaxpr | ClosedJaxpr,
    site: CallSite,
    options: RewriteOptions,
    types: Sequence[Any],
) -> Rewritten:
    """Rewrites a jaxpr that takes arrays of some types for its inputs."""
    to_round: list[bool] = []
    declared = closed(program).jaxpr.outvars
    leaves, tree = jax.tree.flatten(types)

    def run(*leaves: jax.Array) -> list[Any]:
        args = jax.tree.unflatten(tree, leaves)
        outputs = autocast.run(closed(program), args, site, options.rounded_outputs)
        for i, is_fixed_half in enumerate(options.fixed):
            if is_fixed_half:
                outputs[i] = cast(without_mark(outputs[i]), autocast.dtype)
            else:
                outputs[i] = as_declared(outputs[i], declared[i])
        if options.in_float32:
            for i, output in enumerate(outputs):
                outputs[i] = as_declared(output, declared[i])
                view = _view_of(declared[i], output, autocast.dtype)
                if view == "half" or isinstance(output, ToRound):
                    outputs[i] = ToRound(outputs[i])
        to_round[:] = [isinstance(output, ToRound) for output in outputs]
        return list(map(without_mark, outputs))

    return Rewritten(jax.make_jaxpr(run)(*leaves), to_round)


def _view_of(var: Atom, arg: Value, dtype: np.dtype) -> str:
    """Returns the form in which a jaxpr is passed the value of a variable."""
    if isinstance(arg, Narrow):
        return "both"
    if is_float32(var) and has_dtype(arg, dtype):
        return "half"
    return "declared"


def _types_of(var: Atom, view: str, dtype: np.dtype) -> Any:
    """Returns the type, or the types, that a jaxpr takes for a variable in a view."""
    match view:
        case "both":
            if is_half(var):
                dtype = var.aval.dtype
            return Narrow(var.aval.update(dtype=dtype), var.aval.update(dtype=FLOAT32))
        case "half":
            return var.aval.update(dtype=dtype)
    return var.aval


def read_inputs(env: Environment, eqn: JaxprEqn) -> list[Any]:
    """Returns the inputs of an equation as calls take them: narrow ones in one view or in both."""
    return list(map(env.read_for_call, eqn.invars))
