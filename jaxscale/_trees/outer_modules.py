"""Calls of layers that belong to a module of Linen or Haiku which is being called itself.

Such a module holds its variables outside of the layer's arguments and results. What a traced
function writes there does not leave the trace: it would be left behind as tracers, in silence. None
of these libraries is imported here: if its module is being called, it is loaded already.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax

from .. import _jax


@contextlib.contextmanager
def keeping_outer_variables(
    call: str, fun: Callable[..., Any], args: tuple[Any, ...]
) -> Iterator[None]:
    """Inside of this context, a function is traced that must not write into a module around it.

    Args:
      call: what traces the function, such as `autocast(fun)`.
      fun: the function, which may be a layer itself.
      args: what it is called with.

    Raises:
      ValueError: if it did, with the names of some variables.
    """
    outer = list(_find_outer(fun))
    if not outer:
        yield
        return
    # They are kept alive, so that no other array has the identity of one of them.
    known = jax.tree.leaves((outer, args))
    identities = set(map(id, known))
    outer_traces = {None, *map(_jax.trace_of, known)}  # or of no trace at all
    yield
    for library, variables in _find_outer(fun):
        names = []
        for path, leaf in jax.tree_util.tree_leaves_with_path(variables):
            if id(leaf) not in identities and _jax.trace_of(leaf) not in outer_traces:
                names.append(jax.tree_util.keystr(path))
        if names:
            raise ValueError(
                f"`{call}` is called inside of a {library} module, and the call makes or changes "
                f"variables of that module, which cannot leave it: {', '.join(names[:3])}. Wrap "
                "the whole model, which returns its variables: `jaxscale.autocast(model.apply)`, "
                "or the loss. Call `model.init` without it."
            )


def _find_outer(fun: object) -> Iterator[tuple[str, Any]]:
    """Yields a library, and the variables of a module of it that is being called."""
    linen: Any = sys.modules.get("flax.linen")
    if linen is not None:
        modules = [fun, getattr(fun, "__self__", None), _calling_module()]
        for module in modules:
            if isinstance(module, linen.Module) and module.scope is not None:
                yield "Linen", module.scope.root.variables()
    haiku: Any = sys.modules.get("haiku")
    if haiku is not None:
        try:
            yield "Haiku", haiku.get_params()
            yield "Haiku", haiku.get_current_state()
        except ValueError:  # no module is being called
            return


def _calling_module() -> Any:
    """Returns the module of Linen whose method runs, or `None`. Linen does not publish it."""
    context = getattr(sys.modules.get("flax.linen.module"), "_context", None)
    stack = getattr(context, "module_stack", None) or [None]
    return stack[-1]
