"""The values of a jaxpr while it runs.

A narrow value has two views: an array in half precision, and its cast to float32. Where cotangents
come back to it from several readers, they are summed in float32. So readers take the second view,
or a form of the first whose gradient goes to the second. The same holds of a value in float32 and
its copy in half precision, which all that round it share, and of an array that the jaxpr declares
in half precision, such as a parameter.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import jax
import numpy as np

from .._jax.jaxprs import (
    Atom,
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    Recomputed,
    cast,
    current_scopes,
    stand_in,
)
from .execution_plan import Plan
from .narrow_values import (
    FLOAT32,
    Narrow,
    ToRound,
    has_dtype,
    is_float32,
    is_half,
)
from .product_owner import CallSite


class Rewriter(Protocol):
    """The runner of jaxprs: the `Autocast` of `interpreter.py`, which lies above this file."""

    dtype: np.dtype
    rewritten: WeakKeyDictionary[Any, dict[Any, Any]]

    def run(
        self,
        closed: ClosedJaxpr,
        args: Sequence[Any],
        site: CallSite,
        rounded_outputs: Sequence[bool] = (),
    ) -> list[Any]:
        """Runs a jaxpr with its products in half precision."""
        ...

    def run_from_outside(
        self, closed: ClosedJaxpr, args: Sequence[Any], site: CallSite
    ) -> list[Any]:
        """Runs a jaxpr that is not part of another one that runs."""
        ...

    def call_rule(self, fun: Callable[..., Any], site: CallSite, *args: object) -> Any:
        """Calls a derivative rule of a function whose call is still under way."""
        ...

    def tracing(self) -> AbstractContextManager[Any]:
        """Returns a context to trace functions of the user in."""
        ...


class Made(NamedTuple):
    """The origin of a value in float32 that a segment made.

    Attributes:
      segment: what the segment runs as.
      number: which of its outputs the value is.
      arrays: its outputs, and then its inputs.
    """

    segment: Recomputed
    number: int
    arrays: Sequence[jax.Array]


class Environment:
    """The values of one jaxpr while it runs.

    Attributes:
      autocast: the `Autocast` that runs it.
      dtype: the half-precision dtype.
      plan: what is known of the jaxpr before it runs.
      site: what is known of the jaxpr from where it is called.
      scopes: the named scopes around the jaxpr.
      values: the arrays of its variables, half-precision ones of those in `narrow`.
      narrow: the variables that are declared as float32 and whose numbers half precision holds,
        and those that came in two views. All that are declared in half precision are narrow, too.
      cotangent_sums: the variables whose cotangents are summed in float32, here or further back.
      wides: narrow values in float32.
      halves: values in float32, rounded for products.
      made: values in float32 that segments made.
      segments: what its segments run as. Equal ones run as one function.
    """

    def __init__(
        self, autocast: Rewriter, jaxpr: Jaxpr, plan: Plan, site: CallSite
    ) -> None:
        self.autocast = autocast
        self.dtype: np.dtype = autocast.dtype
        self.plan = plan
        self.site = site
        self.scopes = current_scopes()

        self.values: dict[Any, Any] = {}
        self.narrow: set[Any] = set()
        self.cotangent_sums = set(plan.cotangent_sums)
        self.wides: dict[Any, Any] = {}
        self.halves: dict[Any, Any] = {}
        self.made: dict[Any, Made] = {}
        self.segments: dict[Any, Recomputed] = {}

    # What is known of a value, and of what an equation reads.

    def is_narrow(self, atom: Atom) -> bool:
        """Returns whether half precision holds the numbers of a value."""
        if isinstance(atom, Literal):
            return False
        return atom in self.narrow or is_half(atom)

    def sums_cotangents(self, atom: Atom) -> bool:
        """Returns whether a value is narrow and its cotangents must be summed in float32."""
        return self.is_narrow(atom) and atom in self.cotangent_sums

    def reads_narrow(self, eqn: JaxprEqn) -> bool:
        """Returns whether an equation reads a narrow value."""
        return any(map(self.is_narrow, eqn.invars))

    def reads_cotangent_sum(self, eqn: JaxprEqn) -> bool:
        """Returns whether an equation reads a narrow value whose cotangents must be summed."""
        return any(map(self.sums_cotangents, eqn.invars))

    def is_only_rounded(self, var: Atom) -> bool:
        """Returns whether a value is only read to be rounded, as by a product."""
        return var in self.plan.only_rounded

    # A value, as its reader takes it.

    def read_wide(self, atom: Atom) -> Any:
        """Returns a value in the dtype that the jaxpr declares."""
        if isinstance(atom, Literal):
            return atom.val
        if not is_half(atom):
            return self.read_float32(atom)
        half = self.read_narrow(atom)
        if atom in self.cotangent_sums:
            return stand_in(half, self.read_float32(atom), half.dtype)
        return half

    def read_float32(self, atom: Atom) -> Any:
        """Returns the float32 view of a narrow value, and any other value as it is."""
        if isinstance(atom, Literal):
            return cast(atom.val, FLOAT32) if is_half(atom) else atom.val
        if atom in self.wides:
            return self.wides[atom]
        if not self.is_narrow(atom):
            return self.values[atom]
        self.wides[atom] = cast(self.values[atom], FLOAT32, atom.aval.weak_type)
        return self.wides[atom]

    def read_inputs_wide(self, eqn: JaxprEqn) -> list[Any]:
        """Returns the inputs of an equation, in the dtypes that the jaxpr declares."""
        return list(map(self.read_wide, eqn.invars))

    def read_half(self, atom: Atom) -> Any:
        """Returns a value as products read it: in half precision if it is declared as float32."""
        if not is_float32(atom):
            return self.read_wide(atom)
        if isinstance(atom, Literal):
            return _round_literal(atom, self.dtype)
        half = self._read_shared_half(atom)
        if atom in self.cotangent_sums:
            return stand_in(half, self.read_wide(atom), self.dtype)
        return half

    def read_source(self, atom: Atom) -> Any:
        """Returns the float32 array that a product's operand is rounded from, if there is one."""
        if isinstance(atom, Literal) or not is_float32(atom) or self.is_narrow(atom):
            return None
        return self.values[atom]

    def _read_shared_half(self, var: Atom) -> Any:
        if var in self.narrow:
            return self.read_narrow(var)
        if var not in self.halves:
            self.halves[var] = cast(self.values[var], self.dtype, var.aval.weak_type)
        return self.halves[var]

    def read_narrow(self, var: Atom) -> Any:
        """Returns the half-precision array of a narrow value, for what has no gradient."""
        if isinstance(var, Literal):
            return var.val
        if var not in self.values:
            dtype = var.aval.dtype if is_half(var) else self.dtype
            self.values[var] = cast(self.wides[var], dtype)
        return self.values[var]

    def read_without_gradient(self, atom: Atom) -> Any:
        """Returns a value as a call takes it whose cotangents JAX cannot compute."""
        if self.is_narrow(atom):
            return self.read_narrow(atom)
        return self.read_wide(atom)

    def read_views(self, var: Atom) -> Narrow:
        """Returns both views of a narrow value."""
        return Narrow(self.read_narrow(var), self.read_float32(var))

    def read_for_call(self, atom: Atom) -> Any:
        """Returns a value as a call takes it: both views of it, where its cotangents are summed."""
        if self.sums_cotangents(atom):
            return self.read_views(atom)
        if self.is_narrow(atom):
            return self.values[atom]
        return self.read_wide(atom)

    def read_output(self, atom: Atom) -> Any:
        """Returns a value as a jaxpr gives it back."""
        if is_half(atom):
            return self.read_wide(atom)
        if self.sums_cotangents(atom):
            return ToRound(self.read_wide(atom))
        return self.read_for_call(atom)

    # What equations return.

    def write(self, var: Atom, value: Any) -> None:
        """Keeps the value of a variable, in one view or in both."""
        if is_half(var) and has_dtype(value, FLOAT32):
            value = ToRound(value)  # the tangent of one with two views
        if isinstance(value, Narrow | ToRound):
            self.narrow.add(var)
            self.cotangent_sums.add(var)
            self.wides[var] = value.wide
            if isinstance(value, Narrow):
                self.values[var] = value.half
            return
        self.values[var] = value
        if is_float32(var) and has_dtype(value, self.dtype):
            self.narrow.add(var)

    def forget(self, var: Atom) -> None:
        """Lets go of the arrays of a variable that is not read again."""
        for arrays in (self.values, self.halves, self.wides, self.made):
            arrays.pop(var, None)


def _round_literal(literal: Literal, dtype: np.dtype) -> Any:
    if np.ndim(literal.val) == 0:
        return dtype.type(literal.val)
    return cast(literal.val, dtype)
