"""A function of any arguments as one of arrays: what is traced, and what is not."""

from collections.abc import Callable, Iterable
from typing import Any

import jax

from .._jax import TRACED


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

    def input_names(self) -> list[str]:
        """Returns where each array is among the arguments, as `args[0]['w']`."""
        return [
            ("kwargs" if path[0].idx else "args") + jax.tree_util.keystr(path[1:])
            for path, leaf in _with_paths(self._tree, self._leaves)
            if isinstance(leaf, TRACED)
        ]

    def output_names(self) -> list[str]:
        """Returns where each array is in what the function returns, as `['logits']`."""
        return [
            jax.tree_util.keystr(path)
            for path, other in _with_paths(self._out_tree, self._others)
            if other is None
        ]

    def restored(self, outputs: Iterable[Any]) -> Any:
        """Returns what the original function returns, given the arrays in it."""
        arrays = iter(outputs)
        leaves = [next(arrays) if other is None else other[0] for other in self._others]
        return jax.tree.unflatten(self._out_tree, leaves)


def _with_paths(tree: Any, leaves: list[Any]) -> list[tuple[Any, Any]]:
    numbered = jax.tree_util.tree_leaves_with_path(tree.unflatten(range(len(leaves))))
    return [(path, leaves[number]) for path, number in numbered]
