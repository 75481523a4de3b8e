"""Operations that are objects, which is the next form of `jax.checkpoint` and of custom rules.

JAX calls these operations hijax. All are equations of one primitive, `call_hi_primitive`, whose one
parameter is an object, a `HiPrim`. The object says how the operation runs (`expand`) and has the
rules that it is differentiated by.

Since JAX 0.12 the flags `JAX_REMAT3`, `JAX_CUSTOM_VJP3` and `JAX_CUSTOM_JVP3` ask for this form.
Without any flag, `jax.lax.custom_root` and a few functions of `jax.numpy` have it, and users may
write such operations themselves (`jax.experimental.hijax`).
"""

import contextlib
import functools
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import jax
from jax.extend.core import JaxprEqn

from ..jaxpr_types import Flags
from .equation_forms import FORMS, OBJECT, Form

# Classes of JAX, and the primitives that mean the same.
_OLD_NAMES = {
    "RematTraced": "remat2",
    "CustomJVPTraced": "custom_jvp_call",
    "CustomVJPTraced": "custom_vjp_call",
    "CheckpointName": "name",
    "CheckpointNameFwd": "name",
}

# A name says nothing but the name: what it runs is not looked at.
_NAMES = {"CheckpointName", "CheckpointNameFwd"}

_FLAGS = ("jax_remat3", "jax_custom_vjp3", "jax_custom_jvp3")


# Whether what is made now is the derivative part of a forward-mode rule. Reverse mode transposes
# that as it stands.
in_forward_rule: ContextVar[bool] = ContextVar("in_forward_rule", default=False)


@contextlib.contextmanager
def making_forward_rule() -> Iterator[None]:
    """Inside of this context, what is made is the derivative part of a forward-mode rule."""
    token = in_forward_rule.set(True)
    try:
        yield
    finally:
        in_forward_rule.reset(token)


def form_asked_for() -> Flags:
    """Returns the settings that choose a form. What is made in one form is not used in another."""
    flags = (bool(getattr(jax.config, flag, False)) for flag in _FLAGS)
    return (*flags, in_forward_rule.get())


def remember_by_form(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that remembers its results, each for calls that ask for the same form."""

    @functools.cache
    def known(form: Flags, *args: Hashable) -> Any:
        return fun(*args)

    @functools.wraps(fun)
    def remembered(*args: Hashable) -> Any:
        return known(form_asked_for(), *args)

    return remembered


def operation(eqn: JaxprEqn) -> str:
    """Returns the name of the primitive of an equation, or of one that means the same.

    So it is `remat2` for `jax.checkpoint` in either form.
    """
    name = eqn.primitive.name
    if name == OBJECT:
        return _OLD_NAMES.get(_class_of_jax(eqn), name)
    return name


def form_of(eqn: JaxprEqn) -> Form:
    """Returns the form in which an equation holds jaxprs."""
    return FORMS.get(operation(eqn), Form.NONE)


def holds_program(eqn: JaxprEqn) -> bool:
    """Returns whether an equation is an object that runs a jaxpr."""
    return eqn.primitive.name == OBJECT and _class_of_jax(eqn) not in _NAMES


def program_of(eqn: JaxprEqn) -> Any:
    """Returns the jaxpr that an object runs, of all inputs of its equation."""
    hi_prim = eqn.params["_prim"]
    match _class_of_jax(eqn):
        case "RematTraced":
            return hi_prim.jaxpr
        case "CustomJVPTraced" | "CustomVJPTraced":
            program = hi_prim.traced.jaxpr
            # Others of its inputs are for the rules alone.
            if len(program.in_avals) == len(eqn.invars):
                return program
    return _expanded(eqn, hi_prim)


_expansions: dict[Any, Any] = {}


def _expanded(eqn: JaxprEqn, hi_prim: Any) -> Any:
    """Returns the jaxpr of an object, traced once for as long as that lives."""
    # By its identity: objects that are equal may take other arrays.
    key = (id(hi_prim), form_asked_for())
    if key not in _expansions:

        def expand(*args: jax.Array) -> Any:
            values = hi_prim.in_tree.unflatten(args)
            return hi_prim.out_tree.flatten_up_to(hi_prim.expand(*values))

        with eqn.ctx.manager:
            program = jax.make_jaxpr(expand)(*hi_prim.in_avals_flat)
        weakref.finalize(hi_prim, _expansions.pop, key, None)
        _expansions[key] = program
    return _expansions[key]


def fitted(
    eqn: JaxprEqn, args: Sequence[Any], params: dict[str, Any]
) -> dict[str, Any]:
    """Returns the parameters of an equation for other arguments than its own.

    An object knows the types of its arguments. A name may be that of an array of any type.
    """
    if eqn.primitive.name != OBJECT or _class_of_jax(eqn) not in _NAMES:
        return params
    (named,) = args
    hi_prim = params["_prim"]
    return {"_prim": type(hi_prim)(hi_prim.name, jax.typeof(named))}


def differentiated_by(eqn: JaxprEqn) -> str | None:
    """Returns the kind of rule that differentiates an object: `jvp`, `vjp`, `None` for its jaxpr.

    A rule for `jvp` is also that of reverse mode, unless there is a `vjp` of its own. An object
    with a rule to transpose it is linear: so are then the operations in it.
    """
    cls = type(eqn.params["_prim"])
    base = cls.__mro__[-2]

    def is_own(name: str) -> bool:
        rule = getattr(cls, name, None)
        return rule is not None and rule is not getattr(base, name, None)

    if is_own("transpose"):
        return None
    if is_own("vjp_fwd") and cls.vjp_fwd.__module__ != base.__module__:
        return "vjp"
    for kind, name in (("jvp", "jvp"), ("vjp", "vjp_fwd")):
        if is_own(name):
            return kind
    return None


def class_of_object(eqn: JaxprEqn) -> str | None:
    """Returns the name of the class of the object that an equation is, if it is one."""
    hi_prim = eqn.params.get("_prim")
    if hi_prim is None:
        return None
    return type(hi_prim).__name__


def _class_of_jax(eqn: JaxprEqn) -> str:
    """Returns the name of the class of JAX's that an object is of, or `""` if there is none."""
    for cls in type(eqn.params.get("_prim")).__mro__:
        if cls.__module__.startswith("jax."):
            return cls.__name__
    return ""
