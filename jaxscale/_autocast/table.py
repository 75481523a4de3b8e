"""Tables of JAX's primitives, and of the files that call them.

Products run in half precision. Everything else runs in float32, so it needs no list: neither that
of PyTorch (https://pytorch.org/docs/stable/amp.html#autocast-op-reference) nor that of TensorFlow
(`tensorflow/core/grappler/optimizers/auto_mixed_precision_lists.h`), which name the functions that
leave the range of float16, and let the rest follow its inputs. What a primitive does is in
`_jax/jaxprs/operations.py`, and which hold jaxprs in `equation_forms.py`. One without a row there
runs once, in float32.
"""

from .._jax.jaxprs import Form, Op, primitives_of, primitives_that

# The named scope of what runs as it is written. It stays through `grad` and `vmap`.
FULL_PRECISION = "jaxscale_full_precision"
# That of what gets its float32 arguments in half precision.
HALF_PRECISION = "jaxscale_half_precision"
# That of an `autocast` inside of another one.
INNER_AUTOCAST = "jaxscale_inner_autocast"

# Half precision: matrix products and convolutions.
PRODUCTS = primitives_that(Op.PRODUCT)

# A product belongs to whoever called JAX's product function: to the user, unless that is an
# algorithm of one of these libraries, which is written for float32. Libraries of layers are the
# user. What is named here begins the paths of its files.
ALGORITHMS = {
    "optax": ("",),
    "jax": (
        *("scipy/linalg.py", "scipy/optimize/", "scipy/spatial/", "scipy/special.py"),
        *("scipy/stats/", "tpu/linalg/", "lax/linalg.py", "numpy/polynomial.py"),
        *("random", "image/", "experimental/ode.py", "experimental/sparse/linalg.py"),
    ),
}
# In these files of JAX there are products that users call, too. So algorithms are functions there.
ALGORITHMS_BY_NAME = {
    "numpy/linalg.py": {"matrix_power", "_pinv", "_pinv_jvp", "_lstsq"},
    "numpy/lax_numpy.py": {"cov"},
    # moves numbers by a convolution with 0 and 1
    "lax/other.py": {"conv_general_dilated_patches"},
    "scipy/signal.py": {"detrend"},
}

# These files of JAX are products, or transform or map what they are given, as all files do that
# are in no folder of JAX. The caller is outside of them. A product that comes through a file which
# is in no list is the user's, too, and is named in a warning: so no file that moves in a new
# version of JAX moves in silence.
PASSING_ON = (
    # products
    *("lax/lax.py", "lax/convolution.py"),
    *("numpy/tensor_contractions.py", "numpy/einsum.py", "numpy/array_methods.py"),
    *("experimental/sparse/bcoo.py", "experimental/sparse/transform.py"),
    # transformations, maps and models
    *("interpreters/", "lax/control_flow/", "lax/eval_jaxpr.py", "numpy/vectorize.py"),
    *("experimental/jet.py", "experimental/rnn.py", "example_libraries/"),
)
PASSING_ON_BY_NAME = {
    *("matmul", "multi_dot", "tensordot", "vecdot"),
    *("convolve", "correlate", "_conv", "convolve2d", "correlate2d", "_convolve_nd"),
    *("apply_along_axis", "conv_general_dilated_local"),
}

# JAX's attention asks for its logits in float32, as a mask or a large key needs.
ATTENTION_FILE, ATTENTION = "nn/functions.py", "_dot_product_attention_core"

# These repeat an operand of fewer elements than they return.
ELEMENTWISE = primitives_that(Op.ELEMENTWISE)

# What may be computed again in the backward pass: elements one by one, one number of many, and
# moves that XLA makes a part of what reads them.
CHEAP = primitives_that(Op.CHEAP)

# A call is cheap if all that it holds is.
CHEAP_CALLS = primitives_of(Form.JIT, Form.CUSTOM_JVP)

# Functions with a derivative of their own.
WITH_RULES = {Form.CUSTOM_JVP, Form.CUSTOM_VJP, Form.OBJECT}

# These move or choose elements. They run in half precision if all that they move is there, and in
# float32 otherwise.
MOVES = primitives_that(Op.MOVE)

# These change the dtype.
CASTS = primitives_that(Op.CASTS)

# `checkpoint_name`, which says what a policy of `jax.checkpoint` keeps.
NAMES = primitives_that(Op.NAMES)

# These return what they are given, each in its precision.
BARRIERS = primitives_that(Op.RETURNS_INPUTS)

# Their derivatives add numbers up. Such moves run in float32, and their results are rounded where
# half precision is read, which changes no bit of them.
SUMMED_BACKWARD = primitives_that(Op.SUMS_BACKWARD)

# These choose the largest of some numbers. The backward pass keeps what they read.
POOLINGS = primitives_that(Op.POOLING)

# The backward pass keeps nothing of these.
KEEP_NOTHING = primitives_that(Op.KEEPS_NOTHING)

# Nothing comes back through these in the backward pass, nor through what returns no float.
WITHOUT_GRADIENT = primitives_that(Op.NO_GRADIENT)

# Algorithms of JAX's own that hold jaxprs, which stay as they are written.
AS_WRITTEN = primitives_that(Op.ALGORITHM)

# Kernels that are written for the precision that they have.
KERNELS = primitives_that(Op.KERNEL)

# What runs in them is not a jaxpr, or not any more.
OPAQUE = primitives_that(Op.RUNS_ELSEWHERE)
