"""What is carried from one step to the next."""

from . import releases

__getattr__ = releases.refuse_0_1  # 0.1 had states here, and its pickles look for them
