"""States of what is kept in fewer bits than it is computed in."""

from typing import Any, NamedTuple

import jax


class WeightsState(NamedTuple):
    """The state of `master_weights` and `stochastic_rounding`, beside half-precision parameters.

    Attributes:
      remainders: a tree with the structure of the parameters: `int16` beside each bfloat16 leaf,
        the bits that it leaves out; `None` beside other leaves, and as a whole if there are none.
      copies: by the name of their dtype, `"bfloat16"` or `"float16"`, such a tree with a `float32`
        copy of each leaf that has that dtype. `None` if there are none.
      key: `u32[2]`, the data of the key that stochastic rounding draws from, otherwise `None`.
    """

    remainders: Any = None
    copies: Any = None
    key: jax.Array | None = None


class CompactState(NamedTuple):
    """The state that `compact_state` carries from one step to the next.

    Attributes:
      inner_state: that of the wrapped transformation, with large float32 arrays in bfloat16.
      key: `u32[2]`, the data of the key that rounding draws from.
    """

    inner_state: Any
    key: jax.Array
