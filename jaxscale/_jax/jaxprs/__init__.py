"""Jaxprs: reading them, running them and making equations of one's own.

Traced jaxprs are public in JAX, but the parameters of their equations are not: names and forms
move between versions. They are read in this folder alone, and each entry says which versions have
which form. Everything of `_jax` is here, too. A training step needs nothing of this folder, and
`import jaxscale` does not load it.
"""

from .. import *
from .barriers import *
from .batching import *
from .binding import *
from .calls import *
from .control_flow import *
from .derivatives import *
from .discharged_refs import *
from .equation_forms import *
from .equation_keys import *
from .half_products import *
from .held_jaxprs import *
from .hidden_jaxprs import *
from .hijax import *
from .inner_jaxprs import *
from .jaxpr_search import *
from .kept_rules import *
from .known_outputs import *
from .operations import *
from .products import *
from .recomputed import *
from .remat import *
from .shared_derivatives import *
from .source_lines import *
from .stand_ins import *
from .transform_errors import *
