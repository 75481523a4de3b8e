"""A function of any arguments as a function of arrays, and back."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax

from .._jax import TRACED
from .pytrees import PyTree


class Flat:
    """A function that takes and returns lists of arrays.

    Its arguments are `arrays`, those of JAX among the arguments of the original function.
    Everything else, numbers and NumPy arrays among them, reaches the original function as it is,
    and comes back as it is.

    Attributes:
      arrays: the arrays of JAX among the arguments of the original function.
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        name: str,
    ) -> None:
        self.__name__ = name
        self.__qualname__ = name
        self._fun = fun
        self._leaves, self._structure = jax.tree.flatten((args, kwargs))
        self.arrays = [leaf for leaf in self._leaves if isinstance(leaf, TRACED)]
        # What the last call returned, with `_ARRAY` in the place of each array.
        self._outputs: list[Any] = []
        self.output_structure: Any = None

    def __call__(self, *arrays: Any) -> list[jax.Array]:
        remaining = iter(arrays)
        leaves = []
        for leaf in self._leaves:
            if isinstance(leaf, TRACED):
                leaf = next(remaining)
            leaves.append(leaf)
        args, kwargs = jax.tree.unflatten(self._structure, leaves)
        outputs, self.output_structure = jax.tree.flatten(self._fun(*args, **kwargs))
        returned = []
        self._outputs = []
        for output in outputs:
            if isinstance(output, jax.Array):
                returned.append(output)
                output = _ARRAY  # no array of a trace is kept beyond it
            self._outputs.append(output)
        return returned

    def restored(self, outputs: Iterable[Any]) -> Any:
        """Makes the result of the original function, given the arrays in it."""
        return jax.tree.unflatten(self.output_structure, self.with_others(outputs))

    def with_others(self, outputs: Iterable[Any]) -> Iterator[Any]:
        """Yields all leaves that the original function returns, given the arrays among them.

        The arrays may be anything, such as their types.
        """
        arrays = iter(outputs)
        for output in self._outputs:
            if output is _ARRAY:
                yield next(arrays)
            else:
                yield output


class Traced(Flat):
    """A function of trees as a program: traced once, however often it is called.

    It is called with the arrays of other trees like those that it is made with.

    Attributes:
      jaxpr: the program.
      output_leaves: the leaves that it returns, with types in the place of arrays.
    """

    def __init__(self, fun: Callable[..., Any], *args: Any) -> None:
        super().__init__(fun, args, {}, getattr(fun, "__name__", "traced"))
        self._compiled = jax.jit(super().__call__)
        self.jaxpr = jax.make_jaxpr(self._compiled)(*self.arrays)
        self.output_leaves = list(self.with_others(self.jaxpr.out_avals))

    def __call__(self, *args: Any) -> Any:
        return self.restored(self.call_flat(*args))

    def call_flat(self, *args: Any) -> list[jax.Array]:
        """Returns the arrays among what the function returns."""
        arrays = [leaf for leaf in jax.tree.leaves(args) if isinstance(leaf, TRACED)]
        return self._compiled(*arrays)


# Stands for an array among the outputs of a function. No function returns it.
_ARRAY = object()


def array_names(tree: PyTree, kind: type | tuple[type, ...] = TRACED) -> list[str]:
    """Returns where each array of JAX is in a tree, as `['w']`, for messages.

    If a class cannot name its children, all leaves are numbered instead.
    """
    leaves = jax.tree.leaves(tree)
    try:
        pairs = jax.tree_util.tree_leaves_with_path(tree)
        names = [jax.tree_util.keystr(path) for path, _ in pairs]
    except Exception:  # a message is no reason to stop
        names = []
    if len(names) != len(leaves):
        names = [f", leaf {index}" for index in range(len(leaves))]
    return [
        name for leaf, name in zip(leaves, names, strict=True) if isinstance(leaf, kind)
    ]
