"""Judges: whatever may refuse a step. Each votes on facts, and never reads the gradients.

A judge keeps what it remembers in fields of the `LossScaledState` that are its own. It is asked
with `good`, which says whether all judges before it accept the step: it neither counts nor learns
from a step that an earlier one refused. A new judge is a class with these four members, and a line
in `Options.judges`.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._gradients.facts import Facts, flags_by_leaf, last_flags, shown_norm
from .._policies.spikes import SpikeRule


class Vote(NamedTuple):
    """A judge's opinion of a step."""

    good: jax.Array  # bool[], whether it may be made
    blames_scale: jax.Array  # bool[], whether the loss scale is to fall
    frees_scale: jax.Array  # bool[], whether the loss scale may move at all
    own: dict[str, Any]  # the next values of the judge's fields


@dataclasses.dataclass(frozen=True)
class FiniteJudge:
    """Refuses gradients and losses that are not finite. Only gradients say anything of the scale.

    Attributes:
      tracks_leaves: whether the state says which leaves the last overflow was in.
    """

    tracks_leaves: bool

    fields = ("nonfinite_leaves",)
    needs_norm = False

    def init(self, params: optax.Params) -> dict[str, Any]:
        flags = None
        if self.tracks_leaves:
            # One for the gradient of each parameter. None is set, as nothing overflowed yet.
            flags = flags_by_leaf(params)
        return {"nonfinite_leaves": flags}

    def judge(self, facts: Facts, own: dict[str, Any], good: jax.Array) -> Vote:
        flags = own["nonfinite_leaves"]
        if flags is not None:
            flags = last_flags(flags, facts.nonfinite_leaves, facts.grads_finite)
        return Vote(
            good=facts.grads_finite & facts.loss_finite,
            blames_scale=~facts.grads_finite,
            frees_scale=facts.loss_finite,
            own={"nonfinite_leaves": flags},
        )


@dataclasses.dataclass(frozen=True)
class SpikeJudge:
    """Refuses finite steps whose loss or norm stands out, which says nothing of the scale.

    Attributes:
      rule: what stands out.
    """

    rule: SpikeRule

    fields = ("spikes",)
    needs_norm = True

    def init(self, params: optax.Params) -> dict[str, Any]:
        return {"spikes": self.rule.init()}

    def judge(self, facts: Facts, own: dict[str, Any], good: jax.Array) -> Vote:
        norm = shown_norm(facts.norm)
        is_spike, spikes = self.rule.judge(own["spikes"], facts.loss, norm, good)
        never = jnp.zeros_like(is_spike)
        return Vote(~is_spike, never, ~is_spike, {"spikes": spikes})


Judge = FiniteJudge | SpikeJudge
