"""`Options`: an optimizer, and what `loss_scaled` and the wrappers around it were asked for."""

import dataclasses
from typing import Any

import optax

from .._policies.base import LossScale
from .._policies.spikes import SpikeRule
from .._storage.weights import Rounded, Weights
from .checks import TreeTypes
from .window import Window


@dataclasses.dataclass(frozen=True)
class Options:
    """An optimizer, and how its steps are skipped and its scale moves.

    Attributes:
      inner: the optimizer inside.
      policy: how the loss scale moves.
      call: the public function that made it, the outermost of several, for messages.
      axis_name: the axes whose devices decide together, or `None`.
      window: how micro-batches are accumulated, `None` if they are not.
      max_norm: the global norm to clip gradients to, or `None`.
      skips: whether bad steps are skipped. If not, no step is judged.
      check_updates: whether a step is taken back if what it makes is not finite.
      track_leaves: whether the state says which leaves the last overflow was in.
      spikes: the rule that skips finite steps, or `None`.
      weights: how half-precision parameters are kept.
      known_types: the types of the inner states for parameters that were seen, to trace less.
      known_unread: which gradients are never read, by the kind of call, to trace less.
    """

    inner: optax.GradientTransformationExtraArgs
    policy: LossScale
    call: str = dataclasses.field(default="loss_scaled", compare=False)
    axis_name: Any = None
    window: Window | None = None
    max_norm: float | None = None
    skips: bool = True
    check_updates: bool = False
    track_leaves: bool = False
    spikes: SpikeRule | None = None
    weights: Weights = dataclasses.field(default_factory=Rounded)
    known_types: dict[Any, TreeTypes] = dataclasses.field(
        default_factory=dict, compare=False
    )
    known_unread: dict[Any, list[bool]] = dataclasses.field(
        default_factory=dict, compare=False
    )
