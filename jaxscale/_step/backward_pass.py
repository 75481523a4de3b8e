"""`Pass`, which one forward and backward pass made, and `Retries`, what came of repeating it."""

from typing import Any, NamedTuple

import jax

from .._gradients.facts import Facts
from .._gradients.scaled import Scaled


class Retries(NamedTuple):
    """The outcome of repeating the backward pass of a step."""

    number: jax.Array  # i32[], how many passes came before the last one
    scaling: Any  # the scale state to go on with


class Pass(NamedTuple):
    """The results of one forward and backward pass, and the facts about them."""

    grads: Scaled
    loss: Any = None  # f32[], `None` if it is not known
    state: Any = (
        None  # what the loss function carries beside the parameters, if it does
    )
    aux: Any = None  # what else the loss function returned, if it does
    before_hook: Scaled | None = None  # what `on_grads` got, if it changed that
    facts: Facts | None = None
    retries: Retries | None = None  # if the pass may be repeated
