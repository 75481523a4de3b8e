"""XLA, as far as its versions differ."""

import jax

# A matrix can be read as a flat array without a copy, though it is stored for several readers.
VIEWS_ARE_FREE = jax.__version_info__ >= (0, 12)
