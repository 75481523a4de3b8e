"""The scaled backward pass of a loss as a jaxpr, and how its programs are compiled."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._gradients.scaled import divide
from ..._gradients.value_and_grad import scale_transform
from ..._jax.jaxprs import without_refs
from ..._state.scale import LossScaleState
from ..._trees.gradient_leaves import leaf_name
from ..._trees.leaves import is_inexact_leaf, widen
from ..._trees.pytrees import Leaf, PyTree
from .._formats import describe, is_array
from .places import Constants

OF_GRADIENT = "grads "  # begins the name of an output that is a gradient


def check_floating(
    call: str,
    args: tuple[Any, ...],
    transform: Callable[..., Any],
    options: Mapping[str, Any],
    also: str = "",
) -> None:
    """Raises a `TypeError` unless all leaves of the parameters are floating, as JAX needs them.

    `also` is what else a call needs for a module of Equinox.
    """
    if transform is not jax.value_and_grad or options.get("allow_int"):
        return
    argnums = options.get("argnums", 0)
    if not isinstance(argnums, Sequence):
        argnums = [argnums]
    for i in argnums:
        # a tuple of one parameter, empty if there is none at this position
        parameter = args[i : i + 1 or None]
        for path, leaf in jax.tree_util.tree_leaves_with_path(parameter):
            if not is_inexact_leaf(leaf):
                raise TypeError(
                    f"`{call}(fun)` differentiates floating parameters, got {describe(leaf)} at "
                    f"args[{i}]{jax.tree_util.keystr(path[1:])}. Take it out of the parameters, "
                    "or pass allow_int=True or another argnums=.... For a module of Equinox pass "
                    f"transform=equinox.filter_value_and_grad{also}."
                )


class Backward:
    """The loss, the auxiliary output and the unscaled gradients as a function of the loss scale.

    `constants` are the numbers of the source that were rounded when `fun` was traced before.

    Attributes:
      jaxpr: the program. It takes its constants, which the arguments are among, and the loss scale.
      consts: its constants.
      names: the names of its outputs. Those of gradients begin with `OF_GRADIENT`.
      constants: the numbers of the source that were rounded.
      nonfinite_arguments: the names of the arguments that hold inf or NaN.
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        args: tuple[Any, ...],
        fun_kwargs: dict[str, Any],
        constants: Constants | None = None,
        *,
        transform: Callable[..., Any] = jax.value_and_grad,
        has_aux: bool = False,
        **kwargs: Any,
    ) -> None:
        def compute_named(loss_scale: jax.Array) -> dict[str, Any]:
            # Not the state itself: with that of a `NoOpLossScale` no cotangent is scaled, and
            # there would be none to follow.
            state = LossScaleState(loss_scale, jnp.zeros(()), jnp.zeros(()))
            run_backward = scale_transform(
                "trace", fun, state, has_aux, transform, kwargs
            )
            # Copied inside the traced function: modules of Flax NNX may only change there.
            copies, copied_kwargs = jax.tree.map(lambda leaf: leaf, (args, fun_kwargs))
            run = run_backward(*copies, **copied_kwargs)
            # In float32: the bounds of the divisor would be 0 and inf in float16, and the trace
            # would report them.
            grads = divide(run.grads.grads, widen(run.grads.divisor))
            return {
                "loss": run.loss,
                **_name_inexact("aux", run.aux),
                **_name_inexact(OF_GRADIENT, grads, leaf_name),
            }

        self.constants = constants or Constants()
        # The arguments are constants of the jaxpr, so that a leaf that is not an array is kept.
        with self.constants.notice():
            make_jaxpr = jax.make_jaxpr(compute_named, return_shape=True)
            closed, shapes = make_jaxpr(jnp.float32(1))
        self.jaxpr, self.consts = without_refs(closed)
        self.names = sorted(shapes)  # in the order in which a dictionary is flattened
        arguments = _name_inexact("args", args) | _name_inexact("kwargs", fun_kwargs)
        self.nonfinite_arguments = tuple(
            name for name, leaf in arguments.items() if not is_finite(leaf)
        )


def _name_inexact(
    name: str, tree: PyTree, name_leaf: Callable[[Any], str] = jax.tree_util.keystr
) -> dict[str, Any]:
    """Returns the floating-point and complex arrays of a tree, by their paths after a name."""
    arrays = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if is_array(leaf) and is_inexact_leaf(leaf):
            arrays[name + name_leaf(path)] = leaf
    return arrays


def is_finite(leaf: Leaf) -> bool:
    return bool(np.isfinite(np.asarray(leaf)).all())


def compile_fast(fun: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Returns a function, which runs a few times at most, compiled fast; `options` are XLA's."""
    # Not optimised, a CPU contracts no products and sums, as in operations that run by themselves.
    if jax.default_backend() == "cpu":
        options["xla_backend_optimization_level"] = 0
    return jax.jit(fun, compiler_options=options)
