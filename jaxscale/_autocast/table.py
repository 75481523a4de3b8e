"""What `autocast` knows of JAX's primitives, by their names.

Products run in half precision. Everything else runs in float32, so it needs no list: neither that
of PyTorch (https://pytorch.org/docs/stable/amp.html#autocast-op-reference) nor that of TensorFlow
(`tensorflow/core/grappler/optimizers/auto_mixed_precision_lists.h`), which name the functions that
leave the range of float16, and let the rest follow its inputs. The lists here say what may be
computed twice, what is only moved, and how derivatives add up. A primitive that is in none of them
runs once, in float32.
"""

# The named scope of what runs as it is written. It stays through `grad` and `vmap`.
FULL_PRECISION = "jaxscale_full_precision"

# Half precision: matrix products and convolutions.
PRODUCTS = {"dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general"}

# A sum of two products is one, too: that of their operands, side by side.
ADDITIONS = {"add", "add_any"}

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
    "scipy/signal.py": {"detrend"},
}

# These files of JAX are products, or transform or map what they are given, as all files do that
# are in no folder of JAX. The caller is outside of them. A product that comes through a file which
# is in no list is the user's, too, and is named in a warning: so no file that moves in a new
# version of JAX moves in silence.
PASSING_ON = (
    # products
    *("lax/lax.py", "lax/convolution.py", "lax/other.py"),
    *("numpy/tensor_contractions.py", "numpy/einsum.py", "numpy/array_methods.py"),
    *("experimental/sparse/bcoo.py", "experimental/sparse/transform.py"),
    # transformations, maps and models
    *("interpreters/", "lax/control_flow/", "lax/eval_jaxpr.py", "numpy/vectorize.py"),
    *("experimental/jet.py", "experimental/rnn.py", "example_libraries/"),
)
PASSING_ON_BY_NAME = {
    *("matmul", "multi_dot", "tensordot", "vecdot"),
    *("convolve", "correlate", "_conv", "convolve2d", "correlate2d", "_convolve_nd"),
    "apply_along_axis",
}

# JAX's attention asks for its logits in float32, as a mask or a large key needs.
ATTENTION_FILE, ATTENTION = "nn/functions.py", "_dot_product_attention_core"

# Cheap: each element by itself. What is cheap may be computed again in the backward pass.
ELEMENTWISE = {
    # arithmetic
    *("abs", "add", "add_any", "ceil", "clamp", "floor", "max", "min", "mul", "neg"),
    *("round", "select_n", "sign", "sub", "convert_element_type", "stop_gradient"),
    # powers, quotients and roots
    *("pow", "integer_pow", "square", "sqrt", "rsqrt", "cbrt", "div", "rem"),
    # exponentials and logarithms
    *("exp", "exp2", "expm1", "log", "log1p"),
    # trigonometry
    *("sin", "cos", "tan", "asin", "acos", "atan", "atan2"),
    *("sinh", "cosh", "tanh", "asinh", "acosh", "atanh"),
    # special functions that are not loops
    *("logistic", "erf", "erfc", "erf_inv"),
    # comparisons and logic
    *("eq", "eq_to", "ge", "gt", "is_finite", "le", "le_to", "lt", "lt_to", "ne"),
    *("and", "or", "not", "xor"),
}

# Cheap: one number of many.
REDUCTIONS = {
    *("reduce_sum", "reduce_max", "reduce_min", "argmax", "argmin"),
    *("reduce_and", "reduce_or"),
}

# Cheap: moves of whole arrays, which XLA makes a part of what reads them.
CHEAP_MOVES = {
    *("broadcast_in_dim", "concatenate", "copy", "expand_dims", "pad", "reshape"),
    *("rev", "sharding_constraint", "slice", "split", "squeeze", "stack", "tile"),
    *("transpose", "unstack"),
}

CHEAP = ELEMENTWISE | REDUCTIONS | CHEAP_MOVES

# A call is cheap if all that it holds is.
CHEAP_CALLS = {"custom_jvp_call", "jit", "pjit"}

# These move or choose elements: to round before them is to round after them. They run in half
# precision if all that they move is there, and in float32 otherwise.
MOVES = CHEAP_MOVES | {
    *("all_gather", "all_gather_invariant", "all_to_all", "copy_p", "device_put"),
    *("dynamic_slice", "dynamic_update_slice", "gather", "layout_constraint"),
    *("mesh_cast", "name", "pbroadcast", "ppermute", "pvary", "reshard", "scatter"),
    "with_memory_space_constraint",
}

# `checkpoint_name`, which says what a policy of `jax.checkpoint` keeps.
NAME = "name"

# Their derivatives add numbers up. So these moves run in float32, and their results are rounded
# where half precision is read, which changes no bit of them.
SUMMED_BACKWARD = {
    *("all_gather", "broadcast_in_dim", "gather", "pad", "pvary", "scatter", "tile"),
}

# Their derivatives do not depend on what they read, so the backward pass keeps nothing of them.
KEEP_NOTHING = CHEAP_MOVES | {
    *(NAME, "add", "add_any", "sub", "neg", "convert_element_type", "reduce_sum"),
}

# Nothing comes back through these in the backward pass, nor through what returns no float.
WITHOUT_GRADIENT = {"ceil", "floor", "round", "sign", "stop_gradient"}

# Algorithms of JAX's own that hold programs, which stay as they are written.
AS_WRITTEN = {"custom_linear_solve"}

# What runs in them is not a program of JAX, or not any more.
OPAQUE = {
    *(
        "call_exported",
        "call_tf",
        "xla_call_module",
        "ffi_call",
        "pure_callback",
        "io_callback",
    ),
    *("triton_kernel_call", "tpu_custom_call", "mosaic_gpu"),
    "noinline",  # of Equinox: a callback that compiles a function of its own
}

# Kernels that are written for the precision that they have.
KERNELS = {"pallas_call", "composite", "custom_partitioning", "core_map", "mpmd_map"}
