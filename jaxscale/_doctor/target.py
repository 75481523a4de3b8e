"""The target of the doctor: a function that is found, imported and called.

What it returns is checked without running the loss, so that bad use ends in one sentence.
"""

import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import GetAttrKey, KeyPath

from .._trees.gradient_leaves import leaf_name, list_gradients, only_gradients
from .._trees.leaves import dtype_of, is_array_like, is_python_number
from .._trees.nnx_objects import without_untrained
from .._trees.params import combine
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

    Attributes:
      name: the target, as named on the command line.
      loss_fn: takes `params` and `batch`, and returns the loss, or a pair that begins with it.
      params: the floating and complex arrays, on the device, with `None` for other leaves.
      batch: arrays on the device, and other leaves as they are.
      has_aux: whether `loss_fn` returns a pair.
      constants: the numbers of the source that were rounded when `loss_fn` was first traced.
    """

    name: str
    loss_fn: Callable[[optax.Params, Any], Any]
    params: optax.Params
    batch: Any
    has_aux: bool
    constants: Constants


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


def _check_returned(name: str, call: str, returned: Any) -> Target:
    """Returns what a function returned as a target, or raises an error that names the `call`."""
    if not isinstance(returned, tuple):
        raise TargetError(f"{call} returned {describe(returned)}. {_SHAPE}")
    if len(returned) != 3:
        raise TargetError(f"{call} returned {len(returned)} values. {_SHAPE}")
    loss_fn, params, batch = returned
    if not callable(loss_fn):
        raise TargetError(
            f"{call} returned {describe(loss_fn)} instead of a loss function. {_SHAPE}"
        )
    _check_params(call, params)
    # On the device, as in a compiled step. NumPy would compute with NumPy arrays, and nothing could
    # be traced.
    params = jax.tree.map(_put_on_device, params)
    batch = jax.tree.map(_put_on_device, batch)

    trained, restore = _take_gradients(params)

    def loss_of_gradients(trained: optax.Params, batch: Any) -> Any:
        # Modules hold functions and counters as well, which have no derivative.
        return loss_fn(restore(trained), batch)

    has_aux = False

    def compute_loss(trained: optax.Params) -> Any:
        nonlocal has_aux
        output = loss_of_gradients(trained, batch)
        has_aux = isinstance(output, tuple) and len(output) == 2 and _is_loss(output[0])
        loss = output
        if has_aux:
            loss = output[0]
        if not _is_loss(loss):
            raise TargetError(
                f"The loss function of {call} must return one floating number, or a pair that "
                f"begins with one, got {describe(loss)}. Reduce it, for example with `.mean()`."
            )
        return loss

    constants = Constants()
    what = f"The loss function of {call}"
    _trace(compute_loss, trained, constants, failure=f"{what} failed")

    def list_derivatives(trained: optax.Params) -> list[Any]:
        # A class may look at its children, and would refuse the shapes that stand for them here.
        return jax.tree.leaves(jax.grad(compute_loss)(trained))

    _trace(
        list_derivatives, trained, constants, failure=f"{what} cannot be differentiated"
    )
    return Target(name, loss_of_gradients, trained, batch, has_aux, constants)


def _check_params(call: str, params: Any) -> None:
    if not list_gradients(params):
        kinds = sorted(set(map(describe, jax.tree.leaves(params))))
        raise TargetError(
            f"{call} returned parameters without any floating array: "
            f"{', '.join(kinds) or 'an empty tree'}."
        )


def _take_gradients(
    params: optax.Params,
) -> tuple[optax.Params, Callable[[optax.Params], optax.Params]]:
    """Returns the leaves of parameters that have gradients, and what makes parameters of others.

    They come in the tree of the parameters, with `None` for other leaves. If a class in it refuses
    that, they come in a dict, by their names.
    """
    params_of_model = without_untrained(params)
    if not list_gradients(params_of_model):
        params_of_model = params
    try:
        trained = only_gradients(_leave_out_numbers(params_of_model))
        return trained, lambda trained: combine(trained, params)
    except Exception:  # whatever the class raises
        pairs, structure = jax.tree_util.tree_flatten_with_path(params)

    def restore(trained: Any) -> optax.Params:
        leaves = [trained.get(leaf_name(path), leaf) for path, leaf in pairs]
        return structure.unflatten(leaves)

    trained = {}
    for path, leaf in list_gradients(params_of_model):
        if not _is_number_of_module(path, leaf):
            trained[leaf_name(path)] = leaf
    return trained, restore


def _leave_out_numbers(params: optax.Params) -> optax.Params:
    """Returns parameters with `None` for the Python numbers of modules, such as a dropout rate."""

    def keep_others(path: KeyPath, leaf: Any) -> Any:
        if _is_number_of_module(path, leaf):
            return None
        return leaf

    return jax.tree_util.tree_map_with_path(keep_others, params)


def _is_number_of_module(path: KeyPath, leaf: Any) -> bool:
    """Returns whether a leaf is a Python number that an attribute of an object holds.

    `equinox.filter_value_and_grad` trains arrays alone. In a dict or a list a number is trained.
    """
    is_attribute = any(isinstance(key, GetAttrKey) for key in path)
    return is_attribute and is_python_number(leaf)


def _put_on_device(leaf: Any) -> Any:
    if is_array(leaf):
        return jnp.asarray(leaf)
    return leaf


def _trace(
    function: Callable[[optax.Params], Any],
    params: optax.Params,
    constants: Constants,
    failure: str,
) -> None:
    """Traces a function and notes its constants, or raises an error that begins with `failure`."""
    try:
        with constants.notice():
            jax.eval_shape(function, params)
    except TargetError:
        raise
    except Exception as error:
        raise TargetError(f"{failure}: {error_line(error)}") from error


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
