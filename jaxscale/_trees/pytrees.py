"""Names for the types of trees and their parts, which are whatever the user's are."""

from typing import Any

PyTree = Any  # a tree as JAX knows it, such as the parameters or a batch
Leaf = Any  # an array, a number, or what else stands in a tree

Params = PyTree
Grads = PyTree  # with the structure of the parameters; updates, too
OptState = PyTree

# The state of a policy: a `LossScaleState` or one of the user's own.
ScaleState = Any
