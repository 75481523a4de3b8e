"""Objects of Flax NNX among the arguments of a function, which it may change in place.

The function is traced, so what it writes into a module must leave the trace as an output. NNX can
split its objects into arrays and a description, and later bring the objects up to date. Flax is
not imported here: if there are such objects, it is loaded already.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

import jax

# Names this use of NNX, which keeps track of objects that several arguments share.
_TAG = "jaxscale"


def wrap_call(call: Callable[..., Any], fun: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that runs in `call`, which takes a function and its arguments."""
    bound, unbound = getattr(fun, "__self__", None), getattr(fun, "__func__", None)
    if not holds_objects(bound) and holds_objects(fun):
        bound, unbound = fun, lambda module, *args, **kwargs: module(*args, **kwargs)

    @functools.wraps(fun, updated=())  # a module has attributes that are not to be copied
    def transformed_fun(*args: Any, **kwargs: Any) -> Any:
        # A module of NNX is an argument of its own methods: they may change it.
        if unbound is not None and holds_objects(bound):
            return call_with_objects(call, unbound, (bound, *args), kwargs)
        if holds_objects((args, kwargs)):
            return call_with_objects(call, fun, args, kwargs)
        return call(fun, args, kwargs)

    return transformed_fun


def holds_objects(tree: Any) -> bool:
    """Returns whether there are objects of NNX in a tree."""
    return "flax.nnx" in sys.modules and any(
        map(_is_object, jax.tree.leaves(tree, is_leaf=_is_object))
    )


def call_with_objects(
    call: Callable[..., Any], fun: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """Returns what `call(fun, args, kwargs)` returns, where `call` knows trees of arrays alone.

    Objects of NNX among the arguments are brought up to date.
    """
    nnx: Any = sys.modules["flax.nnx"]
    leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=_is_object)
    if not all(map(_may_change, filter(_is_object, leaves))):
        # From outside of a `jit` around this: the function may read them, and NNX says so if it
        # tries to change them.
        def with_objects(others: Any) -> Any:
            pairs = zip(leaves, others, strict=True)
            args, kwargs = tree.unflatten(a if _is_object(a) else b for a, b in pairs)
            return fun(*args, **kwargs)

        return call(with_objects, ([None if _is_object(x) else x for x in leaves],), {})

    def pure(given: Any) -> Any:
        args, kwargs = nnx.from_tree(given, ctxtag=_TAG, is_inner=True)
        output = fun(*args, **kwargs)
        return nnx.to_tree((_only_objects((args, kwargs)), output), ctxtag=_TAG)

    with nnx.update_context(_TAG):
        given = nnx.to_tree((args, kwargs), ctxtag=_TAG)
        returned = call(pure, (given,), {})
        _, output = nnx.from_tree(returned, ctxtag=_TAG, is_inner=False)
    return output


def _only_objects(tree: Any) -> Any:
    return jax.tree.map(lambda x: x if _is_object(x) else None, tree, is_leaf=_is_object)


def _may_change(node: Any) -> bool:
    """Returns whether all variables of an object are of this level of tracing."""
    nnx: Any = sys.modules["flax.nnx"]
    held = [node] if isinstance(node, nnx.Variable) else (each for _, each in nnx.iter_graph(node))
    # Of the others in a graph, a class such as `kind = nnx.Param` has no such state, and an
    # `nnx.Rngs` takes any name for that of a stream.
    variables = (each for each in held if isinstance(each, nnx.Variable))
    states = (getattr(each, "_trace_state", None) for each in variables)
    return all(state is None or state.is_valid() for state in states)


def _is_object(node: Any) -> bool:
    nnx: Any = sys.modules["flax.nnx"]
    return isinstance(node, (nnx.Object, nnx.Variable, getattr(nnx, "Pytree", nnx.Object)))
