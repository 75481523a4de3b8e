"""JAX, as far as its versions differ or its internals are read: what a training step needs of it.

`_jaxprs` has the rest, which reads and rewrites programs. No other folder depends on the version
of JAX or on its internals. `tests/integration/test_jax.py` tests each assumption by name, so that a
new version of JAX which breaks one is told from a fault of jaxscale.
"""

from .dtypes import *
from .jaxpr_types import *
from .jaxprs import *
from .mesh_axes import *
from .python_frames import *
from .refs import *
