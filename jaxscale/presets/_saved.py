"""What another library saved, read into a policy and a state; and PyTorch's, written back."""

from collections.abc import Mapping
from typing import Any

import jax.core
import jax.numpy as jnp

from .._policies.base import LossScale
from .._policies.dynamic import DynamicLossScale
from .._policies.fixed import FixedLossScale, NoOpLossScale
from .._state.scale import LossScaleState
from .._trees.grammar import with_article
from ._rule import to_python_number
from ._systems import flax, jmp, keras, tensorflow, tf_keras, torch

# The keys of PyTorch's `GradScaler.state_dict()`, and attributes of the scalers of Flax and jmp.
_OF_TORCH = "scale growth_factor backoff_factor growth_interval _growth_tracker"
_OF_FLAX = "growth_factor backoff_factor growth_interval scale minimum_scale fin_steps"
_OF_JMP = "period factor min_loss_scale loss_scale counter"


def from_torch(state_dict: Mapping[str, Any]) -> tuple[LossScale, LossScaleState]:
    """Returns the policy and the state of a PyTorch `GradScaler.state_dict()`.

    The policy is that of `torch` with the saved scale as `init_scale`; the state has the saved
    tracker. A disabled scaler has an empty `state_dict`. Call this once for each optimizer: two
    states that share their arrays cannot both be donated.

    Example:
      >>> from jaxscale import presets
      >>> policy = presets.torch(growth_interval=500)
      >>> saved = presets.to_torch(policy, policy.init())
      >>> policy, state = presets.from_torch(saved)
      >>> policy.growth_interval, state.loss_scale
      (500, Array(65536., dtype=float32))
    """
    _check_mapping(
        "from_torch(state_dict)", state_dict, "`scaler.state_dict()` of PyTorch"
    )
    if not state_dict:
        return _resume(NoOpLossScale())
    keys = _OF_TORCH.split()
    if set(state_dict) != set(keys):
        raise ValueError(
            "`presets.from_torch(state_dict)` must have the keys of PyTorch's "
            f"`GradScaler.state_dict()`, {', '.join(keys)}, got {', '.join(state_dict)}."
        )
    saved = {name: to_python_number(value) for name, value in state_dict.items()}
    tracker = saved.pop("_growth_tracker")
    if not saved["scale"]:
        raise ValueError(
            "`presets.from_torch(state_dict)`: its scale is 0, as PyTorch's becomes where every "
            "step overflows. Start with a new one: `loss_scaled(tx, presets.torch())`."
        )
    policy = torch(init_scale=saved.pop("scale"), **saved)
    return _resume(policy, tracker)


def to_torch(policy: LossScale, state: LossScaleState) -> dict[str, Any]:
    """Returns a dictionary for PyTorch's `GradScaler.load_state_dict`, of Python numbers.

    `policy` is a `DynamicLossScale` without hysteresis and growth delay, or the `NoOpLossScale` of
    a disabled scaler. The bounds of the policy are lost. `state` is its state, outside `jit`.
    """
    if isinstance(policy, NoOpLossScale):
        return {}
    if not isinstance(policy, DynamicLossScale):
        raise TypeError(
            f"`presets.to_torch(policy=...)` must be a `DynamicLossScale`, got {policy!r}. "
            "PyTorch's scaler has no other rule."
        )
    growth_delay = getattr(policy, "growth_delay", 0)
    if policy.hysteresis != 1 or growth_delay:
        raise ValueError(
            "`presets.to_torch(policy=...)` must back off on each non-finite step and count "
            f"each finite one, as PyTorch does, got hysteresis={policy.hysteresis} and "
            f"growth_delay={growth_delay}."
        )
    numbers = _read_attributes("to_torch", state, "loss_scale growth_tracker")
    return {
        "scale": numbers["loss_scale"],
        "growth_factor": policy.growth_factor,
        "backoff_factor": policy.backoff_factor,
        "growth_interval": policy.growth_interval,
        "_growth_tracker": numbers["growth_tracker"],
    }


def from_tensorflow(config: Mapping[str, Any]) -> tuple[LossScale, LossScaleState]:
    """Returns the policy and its initial state from a TensorFlow `LossScale.get_config()`.

    The `config` is that of a `DynamicLossScale` or of a `FixedLossScale`, or the form in which
    `tf.keras` stores it: `{"class_name": ..., "config": ...}`. The policy is that of `tensorflow`,
    or a `FixedLossScale`; TensorFlow keeps the scale itself in its checkpoints.
    """
    what = "`get_config()` of a loss scale of TensorFlow"
    _check_mapping("from_tensorflow(config)", config, what)
    config = config.get("config", config)
    if set(config) == {"loss_scale_value"}:
        return _resume(FixedLossScale(config["loss_scale_value"]))
    names = {"initial_loss_scale", "increment_period", "multiplier"}
    if set(config) - names or not config:
        raise ValueError(
            f"`presets.from_tensorflow(config)` takes the keys {', '.join(sorted(names))}, or "
            f"loss_scale_value alone, got {', '.join(config) or 'none'}."
        )
    return _resume(tensorflow(**config))


def from_keras(config: Mapping[str, Any]) -> tuple[LossScale, LossScaleState]:
    """Returns the policy and its initial state from a Keras `LossScaleOptimizer.get_config()`.

    The `config` is that of Keras 3, of tf_keras (which has a key `dynamic`), or of Keras before
    TensorFlow 2.4 (which has `loss_scale`); its entries for the inner optimizer are ignored. The
    policy is that of `keras` or `tf_keras`; Keras keeps the scale itself with the weights.
    """
    what = "`get_config()` of a `LossScaleOptimizer` of Keras"
    _check_mapping("from_keras(config)", config, what)
    if isinstance(config.get("loss_scale"), Mapping):
        return from_tensorflow(config["loss_scale"])
    names = ("dynamic_growth_steps", "initial_scale")
    if not config.keys() >= set(names):
        raise ValueError(
            f"`presets.from_keras(config)` must have the keys {' and '.join(names)} of a "
            f"`LossScaleOptimizer`, got {', '.join(config) or 'none'}."
        )
    arguments = {name: config[name] for name in names}
    if "dynamic" in config:
        return _resume(tf_keras(dynamic=config["dynamic"], **arguments))
    return _resume(keras(**arguments))


def from_flax(dynamic_scale: Any) -> tuple[LossScale, LossScaleState]:
    """Returns the policy and the state of a `flax.training.dynamic_scale.DynamicScale`.

    The policy is that of `flax`; the state has the scale and the counter as they are in
    `dynamic_scale`, outside `jit`. Flax itself is not imported.
    """
    numbers = _read_attributes("from_flax", dynamic_scale, _OF_FLAX)
    tracker = numbers.pop("fin_steps")
    return _resume(flax(**numbers), tracker)


def from_jmp(loss_scale: Any) -> tuple[LossScale, LossScaleState]:
    """Returns the policy and the state of a `jmp.DynamicLossScale`, or a fixed one.

    The policy is that of `jmp`; the state has the scale and the counter as they are in
    `loss_scale`, outside `jit`. A `StaticLossScale` becomes a `FixedLossScale`, and a
    `NoOpLossScale` becomes the one of this library. Under `jit` jmp forgets its minimum; this reads
    the minimum that the object has now. jmp itself is not imported.
    """
    # jmp is not imported, so its types are known by name
    kind = type(loss_scale).__name__
    if kind == "NoOpLossScale":
        return _resume(NoOpLossScale())
    if kind == "StaticLossScale":
        numbers = _read_attributes("from_jmp", loss_scale, "loss_scale")
        return _resume(FixedLossScale(numbers["loss_scale"]))
    numbers = _read_attributes("from_jmp", loss_scale, _OF_JMP)
    tracker = numbers.pop("counter")
    # the array itself: its dtype says how far the scale grows
    numbers["loss_scale"] = loss_scale.loss_scale
    return _resume(jmp(**numbers), tracker)


def _resume(policy: LossScale, tracker: Any = 0) -> tuple[LossScale, LossScaleState]:
    """Returns a policy, and its first state with a growth tracker that was saved."""
    state = policy.init()
    if tracker:
        state = state._replace(growth_tracker=jnp.asarray(tracker, jnp.int32))
    return policy, state


def _check_mapping(argument: str, value: Any, what: str) -> None:
    if isinstance(value, Mapping):
        return
    hint = f"Pass what {what} returned."
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        hint += " A state of jaxscale is read by `jaxscale.from_state_dict`."
    raise TypeError(
        f"`presets.{argument}` must be a dict, got {type(value).__name__}. {hint}"
    )


def _read_attributes(call: str, instance: Any, names: str) -> dict[str, Any]:
    """Returns attributes of an object as Python numbers, or raises a `TypeError`."""
    missing = [name for name in names.split() if not hasattr(instance, name)]
    if missing:
        raise TypeError(
            f"`presets.{call}` got {with_article(type(instance).__name__)}, which has no "
            f"{' and no '.join(missing)}. "
            "Pass the scaler of that library, or to `to_torch` the state of a policy."
        )
    numbers = {}
    for name in names.split():
        value = getattr(instance, name)
        if isinstance(value, jax.core.Tracer):
            raise TypeError(
                f"`presets.{call}` reads values, so it cannot run inside `jit`: {name} is "
                "traced. Call it between two steps."
            )
        numbers[name] = to_python_number(value)
    return numbers
