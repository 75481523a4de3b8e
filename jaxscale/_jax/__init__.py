"""Everything that depends on the version of JAX or on its internals, and nothing else does.

Traced programs are public in JAX, but the parameters of their equations are not: names and forms
move between versions. They are read in this folder alone, and each entry says which versions have
which form. `tests/integration/test_jax.py` tests each of these assumptions by name, so that a new
version of JAX which breaks one is told from a fault of jaxscale.
"""

from .assembly import *
from .dtypes import *
from .equations import *
from .failures import *
from .gradients import *
from .hijax import *
from .once import *
from .reach import *
from .surroundings import *
