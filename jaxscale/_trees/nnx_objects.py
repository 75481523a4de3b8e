"""Calls of functions whose arguments hold objects of Flax NNX.

What a traced function writes into a module of NNX, in place, must leave the trace as an output. NNX
can split its objects into arrays and a description, and later bring the objects up to date. Flax is
not imported here: if there are such objects, it is loaded already.
"""

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax

from .pytrees import PyTree

# Names this use of NNX, which keeps track of objects that several arguments share.
_TAG = "jaxscale"


def wrap_call(call: Callable[..., Any], fun: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that calls `call(fun, args, kwargs)`, also for objects of NNX."""
    module = getattr(fun, "__self__", None)
    method = getattr(fun, "__func__", None)
    if not holds_objects(module) and holds_objects(fun):
        module = fun
        method = _call_module

    @functools.wraps(fun, updated=())  # the attributes of a module are not copied
    def transformed_fun(*args: Any, **kwargs: Any) -> Any:
        # A module of NNX is an argument of its own methods: they may change it.
        if method is not None and holds_objects(module):
            return call_with_objects(call, method, (module, *args), kwargs)
        if holds_objects((args, kwargs)):
            return call_with_objects(call, fun, args, kwargs)
        return call(fun, args, kwargs)

    return transformed_fun


def _call_module(module: Any, *args: Any, **kwargs: Any) -> Any:
    return module(*args, **kwargs)


def holds_objects(tree: PyTree) -> bool:
    """True if there are objects of NNX in a tree."""
    return "flax.nnx" in sys.modules and len(_list_objects(tree)) > 0


def _list_objects(tree: PyTree) -> list[Any]:
    leaves = jax.tree.leaves(tree, is_leaf=_is_object)
    return list(filter(_is_object, leaves))


def call_with_objects(
    call: Callable[..., Any],
    fun: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    """Calls `call(fun, args, kwargs)`, where `call` knows trees of arrays alone.

    Objects of NNX among the arguments are brought up to date.
    """
    nnx: Any = sys.modules["flax.nnx"]
    if not all(map(_may_change, _list_objects((args, kwargs)))):
        return _call_beside_objects(call, fun, args, kwargs)

    def call_pure(nodes: PyTree) -> Any:
        inner_args, inner_kwargs = nnx.from_tree(nodes, ctxtag=_TAG, is_inner=True)
        output = fun(*inner_args, **inner_kwargs)
        objects = _list_objects((inner_args, inner_kwargs))
        return nnx.to_tree((objects, output), ctxtag=_TAG)

    with nnx.update_context(_TAG):
        nodes = nnx.to_tree((args, kwargs), ctxtag=_TAG)
        returned = call(call_pure, (nodes,), {})
        _, output = nnx.from_tree(returned, ctxtag=_TAG, is_inner=False)
    return output


def _call_beside_objects(
    call: Callable[..., Any],
    fun: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    """Calls `call(fun, args, kwargs)`, while the objects pass `call` by as they are.

    They come from outside of a `jit` around this call. So the function may read them, and NNX
    raises an error if it tries to change them.
    """
    leaves, structure = jax.tree.flatten((args, kwargs), is_leaf=_is_object)

    def call_with_leaves(others: list[Any]) -> Any:
        merged = []
        for leaf, other in zip(leaves, others, strict=True):
            merged.append(leaf if _is_object(leaf) else other)
        inner_args, inner_kwargs = structure.unflatten(merged)
        return fun(*inner_args, **inner_kwargs)

    others = [None if _is_object(leaf) else leaf for leaf in leaves]
    return call(call_with_leaves, (others,), {})


def _may_change(node: object) -> bool:
    """True if all variables of an object are of this level of tracing."""
    nnx: Any = sys.modules["flax.nnx"]
    if isinstance(node, nnx.Variable):
        members = [node]
    else:
        members = [member for _, member in nnx.iter_graph(node)]
    for member in members:
        # Other members of a graph are not asked: a class such as `kind = nnx.Param` has no such
        # state, and an `nnx.Rngs` takes any name for that of a stream.
        if isinstance(member, nnx.Variable):
            state = getattr(member, "_trace_state", None)
            if state is not None and not state.is_valid():
                return False
    return True


def without_untrained(tree: PyTree) -> Any:
    """Returns a tree with `None` for what variables of NNX hold that are not an `nnx.Param`."""
    if not holds_objects(tree):
        return tree
    nnx: Any = sys.modules["flax.nnx"]

    def is_variable(node: object) -> bool:
        return isinstance(node, nnx.Variable)

    def keep_params(node: object) -> Any:
        if not is_variable(node) or isinstance(node, nnx.Param):
            return node
        return jax.tree.map(lambda leaf: None, node)

    return jax.tree.map(keep_params, tree, is_leaf=is_variable)


def _is_object(node: object) -> bool:
    nnx: Any = sys.modules["flax.nnx"]
    return isinstance(node, (nnx.Pytree, nnx.Variable))
