"""What ties states, gradients and policies together in a step."""

from .._state import releases

__getattr__ = releases.refuse_0_1  # 0.1 had a state here, and its pickles look for it
