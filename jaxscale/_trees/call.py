"""A function of any arguments as one of arrays, with objects of Flax NNX among them.

What a traced function writes into a module of NNX, in place, must leave the trace as an output. NNX
can split its objects into arrays and a description, and later bring the objects up to date. Flax is
not imported here: if there are such objects, it is loaded already.
"""

import functools
import itertools
import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax

from .._jax import TRACED

# Names this use of NNX, which keeps track of objects that several arguments share.
_TAG = "jaxscale"


class Flat:
    """A function that takes and returns lists of arrays.

    Its arguments are `arrays`, those of JAX among the arguments of the original function.
    Everything else, numbers and NumPy arrays among them, reaches that, and comes back, as it is.
    """

    def __init__(self, fun: Callable[..., Any], args: Any, kwargs: Any, name: str) -> None:
        self.__name__ = self.__qualname__ = name
        self._fun = fun
        self._leaves, self._tree = jax.tree.flatten((args, kwargs))
        self.arrays = [leaf for leaf in self._leaves if isinstance(leaf, TRACED)]
        self._out_tree: Any = None
        self._others: list[Any] = []  # for each output: None if it is an array, else it in a tuple

    def __call__(self, *arrays: Any) -> list[Any]:
        given = iter(arrays)
        leaves = [next(given) if isinstance(x, TRACED) else x for x in self._leaves]
        args, kwargs = jax.tree.unflatten(self._tree, leaves)
        outputs, self._out_tree = jax.tree.flatten(self._fun(*args, **kwargs))
        self._others = [None if isinstance(out, jax.Array) else (out,) for out in outputs]
        return [out for out in outputs if isinstance(out, jax.Array)]

    def restored(self, outputs: Iterable[Any]) -> Any:
        """Returns what the original function returns, given the arrays in it."""
        return jax.tree.unflatten(self._out_tree, self._with_others(outputs))

    def parts(self, outputs: Iterable[Any]) -> list["Leaves"]:
        """Returns the elements of the tuple that the original function returns, not rebuilt.

        The outputs may be anything, such as the types of arrays. Classes that look at their
        children would refuse those.
        """
        leaves = iter(self._with_others(outputs))
        return [
            Leaves(list(itertools.islice(leaves, part.num_leaves)), part)
            for part in self._out_tree.children()
        ]

    def _with_others(self, outputs: Iterable[Any]) -> list[Any]:
        arrays = iter(outputs)
        return [next(arrays) if other is None else other[0] for other in self._others]


class Leaves(NamedTuple):
    """The leaves of a tree, or what stands for them, and its structure."""

    leaves: list[Any]
    structure: Any


def array_names(tree: Any, kind: Any = TRACED) -> list[str]:
    """Returns where each array of JAX is in a tree, as `['w']`, for messages.

    A class need not know how to name its children. Then its leaves are numbered.
    """
    leaves = jax.tree.leaves(tree)
    try:
        pairs = jax.tree_util.tree_leaves_with_path(tree)
        names = [jax.tree_util.keystr(path) for path, _ in pairs]
    except Exception:  # a message is no reason to stop
        names = []
    if len(names) != len(leaves):
        names = [f", leaf {i}" for i in range(len(leaves))]
    pairs = zip(leaves, names, strict=True)
    return [name for leaf, name in pairs if isinstance(leaf, kind)]


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
        objects = [x for x in jax.tree.leaves((args, kwargs), is_leaf=_is_object) if _is_object(x)]
        return nnx.to_tree((objects, output), ctxtag=_TAG)

    with nnx.update_context(_TAG):
        given = nnx.to_tree((args, kwargs), ctxtag=_TAG)
        returned = call(pure, (given,), {})
        _, output = nnx.from_tree(returned, ctxtag=_TAG, is_inner=False)
    return output


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
