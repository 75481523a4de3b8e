"""Where 0.2 had `SpikeState`, and its pickles look for it."""

from .optimizer import SpikeState as SpikeState
