"""A function of any arguments as a function of arrays, and back."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax

from .._jax import TRACED


class Leaves(NamedTuple):
    """The leaves of a tree, or what stands for them, and its structure."""

    leaves: list[Any]
    structure: Any  # as `jax.tree.structure` returns it


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
        self._output_structure: Any = None

    def __call__(self, *arrays: Any) -> list[jax.Array]:
        remaining = iter(arrays)
        leaves = []
        for leaf in self._leaves:
            if isinstance(leaf, TRACED):
                leaf = next(remaining)
            leaves.append(leaf)
        args, kwargs = jax.tree.unflatten(self._structure, leaves)
        outputs, self._output_structure = jax.tree.flatten(self._fun(*args, **kwargs))
        returned = []
        self._outputs = []
        for output in outputs:
            if isinstance(output, jax.Array):
                returned.append(output)
                output = _ARRAY  # no array of a trace is kept beyond it
            self._outputs.append(output)
        return returned

    def restored(self, outputs: Iterable[Any]) -> Any:
        """Returns what the original function returns, given the arrays in it."""
        return jax.tree.unflatten(self._output_structure, self._with_others(outputs))

    def parts(self, outputs: Iterable[Any]) -> list[Leaves]:
        """Returns the elements of the tuple that the original function returns, not rebuilt.

        The outputs may be anything, such as the types of arrays. Classes that look at their
        children would refuse those.
        """
        leaves = self._with_others(outputs)
        parts = []
        for structure in self._output_structure.children():
            part = list(itertools.islice(leaves, structure.num_leaves))
            parts.append(Leaves(part, structure))
        return parts

    def _with_others(self, outputs: Iterable[Any]) -> Iterator[Any]:
        """Yields all leaves that the original function returns, given the arrays among them."""
        arrays = iter(outputs)
        for output in self._outputs:
            if output is _ARRAY:
                yield next(arrays)
            else:
                yield output


# Stands for an array among the outputs of a function. No function returns it.
_ARRAY = object()


def array_names(tree: Any, kind: type | tuple[type, ...] = TRACED) -> list[str]:
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
