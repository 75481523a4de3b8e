"""What a wrapped optimizer remembers of its calls, to trace less. No step depends on it."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import optax

from .matching import TreeTypes, types_of
from .retry import BackwardResult
from .unread import find_unread, may_leave_unread, without_leaves


class _InitTypes(NamedTuple):
    """The types of what an `init` was called with, and of the state that it made."""

    params: TreeTypes
    inner_state: TreeTypes


class Memory:
    """The types of the last `init`, and by the kind of `update` which gradients are never read."""

    def __init__(self) -> None:
        self._init_types: _InitTypes | None = None
        self._unread: dict[Any, list[bool]] = {}

    @property
    def is_new(self) -> bool:
        """Whether no `init` has been called yet."""
        return self._init_types is None

    def keep_types(self, params: optax.Params, inner_state: Any) -> None:
        self._init_types = _InitTypes(types_of(params), types_of(inner_state))

    def expected_types(
        self, params: optax.Params, init: Callable[[Any], Any]
    ) -> TreeTypes:
        """Returns the types of the `inner_state` that `init` makes for these parameters.

        To trace `init` in each step would take a fifth as long as tracing plain Optax.
        """
        types = self._init_types
        if types is not None and types.params == types_of(params):
            return types.inner_state
        state = jax.eval_shape(init, params)
        return types_of(state.inner_state)

    def leave_out_unread(
        self,
        tx: optax.GradientTransformationExtraArgs,
        opt_state: Any,
        result: BackwardResult,
        params: optax.Params | None,
        extra_args: Mapping[str, Any],
    ) -> BackwardResult:
        """Returns a backward pass with zeros for the gradients that the optimizer never reads."""
        if not may_leave_unread(opt_state):
            return result
        grads = result.grads.grads
        call = (
            _hashable_types(grads),
            _hashable_types(params),
            result.loss is None,
            tuple(sorted(extra_args)),
        )
        if call not in self._unread:
            self._unread[call] = find_unread(
                tx, grads, opt_state, params, result.loss, extra_args
            )
        left = without_leaves(result.grads, self._unread[call])
        return result._replace(grads=left)


def _hashable_types(tree: Any) -> Any:
    types = types_of(tree)
    return types.structure, tuple(types.leaves)
