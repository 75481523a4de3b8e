"""The target of the doctor: a function that is found, imported and called.

What it returns is checked without running the loss, so that bad use ends in one sentence.
"""

import collections
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import GetAttrKey, KeyPath

from .._autocast.api import autocast
from .._jax.jaxprs import ClosedJaxpr, jaxpr_as_fun
from .._trees.gradient_leaves import leaf_name, list_gradients
from .._trees.leaves import dtype_of, is_array_like, is_python_number
from .._trees.nnx_objects import without_untrained
from .._trees.params import combine
from .._trees.pytrees import Leaf, Params, PyTree
from ..diagnostics._formats import describe, is_array
from ..diagnostics._switches.places import Constants, is_users_file

_SHAPE = (
    "It must return (loss_fn, params, batch), where loss_fn(params, batch) is the loss, or a pair "
    "of the loss and an auxiliary output."
)


class TargetError(ValueError):
    """Raised for bad use of the command. Its message is a sentence or two for the terminal."""


class Target(NamedTuple):
    """A loss, and what it is examined on.

    To trace a model takes long, so `loss_fn` evaluates what was traced once. Where each line of the
    model counts, `fun` is traced anew: evaluated, a backward rule is at the line that calls it.

    Attributes:
      name: the target, as named on the command line.
      fun: takes parameters and a batch, and returns the loss and the auxiliary output, or `None`.
      params: the floating and complex arrays, on the device, by the names of their leaves.
      batch: arrays on the device, and other leaves as they are.
      constants: the numbers of the source that were rounded when `fun` was first traced.
      program: the loss, computed of the leaves of `args`.
    """

    name: str
    fun: Callable[[dict[str, Any], Any], tuple[jax.Array, Any]]
    params: dict[str, Any]
    batch: Any
    constants: Constants
    program: ClosedJaxpr

    @property
    def args(self) -> tuple[dict[str, Any], Any]:
        """The parameters, and the arrays of the batch: compiled programs take no others."""
        return self.params, _keep_arrays(self.batch)

    def loss_fn(self, params: dict[str, Any], batch: PyTree) -> jax.Array:
        leaves = jax.tree.leaves((params, _keep_arrays(batch)))
        (loss,) = jaxpr_as_fun(self.program)(*leaves)
        return loss

    def under_autocast(self, dtype: str) -> Self:
        """Returns the target with its loss under `jaxscale.autocast`."""
        fun = autocast(self.fun, dtype=dtype)
        try:
            program = _trace(fun, self.params, self.batch)
        except Exception as error:
            raise TargetError(
                f"`jaxscale.autocast` raised on the loss of {self.name}: {error_line(error)}"
            ) from error
        return self._replace(fun=fun, program=program)


def _trace(
    fun: Callable[[dict[str, Any], Any], tuple[jax.Array, Any]],
    params: dict[str, Any],
    batch: PyTree,
) -> ClosedJaxpr:
    """Returns the loss as a program of its parameters and the arrays of its batch."""

    def loss_of(params: dict[str, Any], arrays: Any) -> jax.Array:
        loss, _ = fun(params, combine(arrays, batch))
        return loss

    return jax.make_jaxpr(loss_of)(params, _keep_arrays(batch))


def load(name: str) -> Target:
    """Calls the function at `module:function` or `file.py:function`, and checks what it returns."""
    place, colon, function_name = name.rpartition(":")
    if not (place and colon and function_name.isidentifier()):
        raise TargetError(
            f"The target must be module:function or path/to/file.py:function, got {name!r}."
        )
    _check_device()
    module = _import(place)
    function = getattr(module, function_name, None)
    if not callable(function):
        raise TargetError(_say_no_function(module, place, function_name))
    try:
        inspect.signature(function).bind()
    except TypeError:
        raise TargetError(
            f"`{function_name}` in {place} must be callable without arguments. {_SHAPE}"
        ) from None
    call = f"`{function_name}()`"
    try:
        returned = function()
    except Exception as error:
        raise TargetError(f"{call} failed: {error_line(error)}") from error
    return _check_returned(name, call, returned)


def _check_device() -> None:
    try:
        jax.devices()
    # such as JAX_PLATFORMS=cuda without a GPU
    except (RuntimeError, AssertionError) as error:
        wanted = getattr(jax.config, "jax_platforms", None) or "what JAX looks for"
        raise TargetError(
            f"JAX has no device to run on: {wanted} is not there."
        ) from error


def _import(place: str) -> ModuleType:
    is_file = place.endswith(".py")
    if is_file and not os.path.isfile(place):
        raise TargetError(f"The file {place} does not exist.")
    try:
        if is_file:
            return _import_file(place)
        sys.path.insert(0, os.getcwd())
        return importlib.import_module(place)
    except (Exception, SystemExit) as error:
        missing = None
        if isinstance(error, ModuleNotFoundError):
            missing = error.name
        if missing and (place == missing or place.startswith(f"{missing}.")):
            raise TargetError(
                f"There is no module {missing} in {os.getcwd()} or among the installed packages. "
                "For a file, write path/to/file.py:function."
            ) from error
        raise TargetError(f"{place} does not import: {error_line(error)}") from error


def _import_file(path: str) -> ModuleType:
    path = os.path.abspath(path)
    # The folder of a file comes first, as when Python runs a script.
    sys.path.insert(0, os.path.dirname(path))
    name = os.path.basename(path).removesuffix(".py")
    spec: Any = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(name, module)  # for classes that look for their module
    spec.loader.exec_module(module)
    return module


def _say_no_function(module: ModuleType, place: str, name: str) -> str:
    if hasattr(module, name):
        return f"`{name}` in {place} is not a function, but {describe(getattr(module, name))}."
    functions = []
    for other, value in vars(module).items():
        is_own = inspect.isfunction(value) and value.__module__ == module.__name__
        if is_own and not other.startswith("_"):
            functions.append(other)
    return f"There is no function `{name}` in {place}; it has {', '.join(functions) or 'none'}."


def _check_returned(name: str, call: str, returned: PyTree) -> Target:
    """Returns what a function returned as a target, or raises an error that names the `call`."""
    what = ""
    if not isinstance(returned, tuple):
        what = describe(returned)
    elif len(returned) != 3:
        what = f"{len(returned)} values"
    elif not callable(returned[0]):
        what = f"{describe(returned[0])} instead of a loss function"
    if what:
        raise TargetError(f"{call} returned {what}. {_SHAPE}")
    return make_target(name, call, *returned)


def make_target(
    name: str,
    call: str,
    loss_fn: Callable[..., Any],
    params: Params,
    batch: PyTree,
) -> Target:
    """Returns a loss on its parameters and batch as a target; errors name the `call`."""
    _check_params(call, params)
    # On the device, as in a compiled step. NumPy would compute with NumPy arrays, and nothing could
    # be traced.
    params = jax.tree.map(_put_on_device, params)
    batch = jax.tree.map(_put_on_device, batch)

    trained, restore = _take_gradients(params)

    def fun(trained: Mapping[str, Any], batch: PyTree) -> tuple[Any, Any]:
        # Modules hold functions and counters as well, which have no derivative.
        output = loss_fn(restore(trained), batch)
        if isinstance(output, tuple) and len(output) == 2 and _is_loss(output[0]):
            return output
        if _is_loss(output):
            return output, None
        raise TargetError(
            f"The loss function of {call} must return one floating number, or a pair that begins "
            f"with one, got {describe(output)}. Reduce it, for example with `.mean()`."
        )

    constants = Constants()
    try:
        with constants.notice():
            program = _trace(fun, trained, batch)
    except TargetError:
        raise
    except Exception as error:
        raise TargetError(
            f"The loss function of {call} failed: {error_line(error)}"
        ) from error
    return Target(name, fun, trained, batch, constants, program)


def _check_params(call: str, params: Params) -> None:
    if not list_gradients(params):
        kinds = sorted(set(map(describe, jax.tree.leaves(params))))
        raise TargetError(
            f"The parameters of {call} are a tree without any floating array: "
            f"{', '.join(kinds) or 'an empty tree'}."
        )


def _take_gradients(
    params: optax.Params,
) -> tuple[dict[str, Any], Callable[[Mapping[str, Any]], optax.Params]]:
    """Returns the leaves of parameters that have gradients, and what makes parameters of others.

    They come by their names, as a class may look at its children, and refuse others.
    """
    params_of_model = without_untrained(params)
    if not list_gradients(params_of_model):
        params_of_model = params
    trained = collections.OrderedDict()  # JAX would sort others
    for path, leaf in list_gradients(params_of_model):
        if not _is_number_of_module(path, leaf):
            trained[leaf_name(path)] = leaf
    pairs, structure = jax.tree_util.tree_flatten_with_path(params)

    def restore(trained: Mapping[str, Any]) -> optax.Params:
        leaves = [trained.get(leaf_name(path), leaf) for path, leaf in pairs]
        return structure.unflatten(leaves)

    return trained, restore


def _is_number_of_module(path: KeyPath, leaf: Leaf) -> bool:
    """Returns whether a leaf is a Python number that an attribute of an object holds.

    `equinox.filter_value_and_grad` trains arrays alone. In a dict or a list a number is trained.
    """
    is_attribute = any(isinstance(key, GetAttrKey) for key in path)
    return is_attribute and is_python_number(leaf)


def _put_on_device(leaf: Leaf) -> Any:
    if is_array(leaf):
        return jnp.asarray(leaf)
    return leaf


def _keep_arrays(batch: PyTree) -> Any:
    """Returns a batch with `None` for all leaves that are no arrays."""
    return jax.tree.map(lambda leaf: leaf if is_array(leaf) else None, batch)


def _is_loss(value: Any) -> bool:
    is_scalar = is_array_like(value) and not jnp.shape(value)
    return is_scalar and jnp.issubdtype(dtype_of(value), jnp.floating)


def error_line(error: BaseException) -> str:
    """Returns an error in one line, with the innermost place in the user's own source."""
    what = type(error).__name__
    message = str(error).strip()
    if message:
        what += f": {message.splitlines()[0]}"
    if isinstance(error, SyntaxError):  # its message names the place
        return what
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if is_users_file(frame.filename) and "site-packages" not in frame.filename:
            return f"{what} ({frame.filename}:{frame.lineno})"
    return what
