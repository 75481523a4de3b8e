"""Everything that depends on the version of JAX or on its internals, and nothing else does.

Traced programs are public in JAX, but the parameters of their equations are not: names and forms
move between versions. They are read in this folder alone, and each entry says which versions have
which form. `tests/integration/test_jax.py` tests each of these assumptions by name, so that a new
version of JAX which breaks one is told from a fault of jaxscale.
"""

from .barriers import *
from .binding import *
from .calls import *
from .control_flow import *
from .derivatives import *
from .dtypes import *
from .failures import *
from .forms import *
from .half_products import *
from .hijax import *
from .inner_programs import *
from .kept_rules import *
from .mesh_axes import *
from .once import *
from .opening import *
from .operations import *
from .products import *
from .python_frames import *
from .reach import *
from .recomputed import *
from .refs import *
from .remat import *
from .search import *
from .source_lines import *
from .stand_ins import *
