"""JAX, as far as its versions differ or its internals are read: what a training step needs of it.

The folder `jaxprs` has the rest, which reads and rewrites programs; it is imported when it is used.
Nothing outside of these two depends on the version of JAX or on its internals.
`tests/integration/test_jax.py` tests each assumption by name, so that a new version of JAX which
breaks one is told from a fault of jaxscale.
"""

from .compiler import *
from .dtypes import *
from .jaxpr_types import *
from .mesh_axes import *
from .pruned_jaxprs import *
from .python_frames import *
from .refs import *
