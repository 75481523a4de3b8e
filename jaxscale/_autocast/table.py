"""Which operations run in half precision, which in float32, and which follow their inputs.

The names are those of JAX's primitives. The sources are the autocast op reference of PyTorch
(https://pytorch.org/docs/stable/amp.html#autocast-op-reference) and the lists of TensorFlow's
graph rewrite (`tensorflow/core/grappler/optimizers/auto_mixed_precision_lists.h`). Both name
functions. A primitive is smaller, so the tables differ in four places:

- A function that both list as float32, such as a norm, a loss or softmax, is made of primitives:
  its sums, exponentials, powers and quotients are in `FLOAT32`, and what follows those in it is
  also computed in float32, because it follows its inputs.
- A square is a power, also if it is written `x * x`: see `multiply`.
- What is added to a product, such as a bias, is added in float32 as PyTorch's promotion does, and
  the sum is rounded where half precision is read, as in its `linear`: see `add`.
- `div`, `sqrt`, `erf`, `sin` and `cos` are in neither float32 list, as the kernels of PyTorch and
  TensorFlow compute them in float32 inside. XLA's need not.

`tanh` and `logistic` are in neither list, as they are bounded by 1. But their tails are not: in
float16 XLA's `logistic` is 0 below -11, and the derivatives of both are 0 where they are rounded to
1. They are in `FLOAT32`. Products of `PRODUCTS` that are not of matrices run in float32 as sums and
products of elements do: see `is_cast`. A primitive in no table runs as it is written.
"""

# The named scope of what runs as it is written. It stays through `grad` and `vmap`.
FULL_PRECISION = "jaxscale_full_precision"

# Half precision: matrix products and convolutions.
PRODUCTS = {"dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general"}

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

# Float32, whatever comes in. The results stay in float32, as float16 may not hold them. First
# those that treat each element by itself:
FLOAT32_ELEMENTWISE = {
    # powers, quotients and roots
    *("pow", "integer_pow", "square", "sqrt", "rsqrt", "cbrt", "div", "rem"),
    # exponentials and logarithms
    *("exp", "exp2", "expm1", "log", "log1p"),
    # trigonometry
    *("sin", "cos", "tan", "asin", "acos", "atan", "atan2"),
    *("sinh", "cosh", "tanh", "asinh", "acosh", "atanh"),
    # special functions
    *("logistic", "erf", "erfc", "erf_inv", "lgamma", "digamma", "polygamma", "zeta"),
    *("igamma", "igammac", "igamma_grad_a", "regularized_incomplete_beta"),
    *("bessel_i0e", "bessel_i1e"),
}
FLOAT32 = FLOAT32_ELEMENTWISE | {
    # sums and products over elements, also those that end in one place of many
    *(
        "reduce_sum",
        "reduce_prod",
        "cumsum",
        "cumprod",
        "cumlogsumexp",
        "reduce_window_sum",
    ),
    *("scatter-add", "scatter-sub", "scatter-mul", "select_and_scatter_add"),
    *("psum", "psum_invariant", "reduce_scatter"),
    # linear algebra and transforms, which have no kernels for half precision
    *(
        "cholesky",
        "cholesky_update",
        "custom_linear_solve",
        "eig",
        "eigh",
        "fft",
        "geqrf",
    ),
    *(
        "geqp3",
        "hessenberg",
        "householder_product",
        "lu",
        "ormqr",
        "qr",
        "schur",
        "svd",
    ),
    *("symmetric_product", "triangular_solve", "tridiagonal", "tridiagonal_solve"),
}

# These follow their inputs: half precision if all their floating-point arrays are, else float32.
ELEMENTWISE = {
    *("abs", "add", "add_any", "ceil", "clamp", "floor", "max", "min", "mul", "neg"),
    *("round", "select_n", "sign", "sub"),
    *("eq", "eq_to", "ge", "gt", "is_finite", "le", "le_to", "lt", "lt_to", "ne"),
}

# These also follow their inputs, and only move the elements of one array.
MOVES = {
    *(
        "broadcast_in_dim",
        "copy",
        "copy_p",
        "device_put",
        "dynamic_slice",
        "expand_dims",
    ),
    *(
        "gather",
        "layout_constraint",
        "mesh_cast",
        "name",
        "pvary",
        "reshape",
        "reshard",
    ),
    *(
        "rev",
        "sharding_constraint",
        "slice",
        "split",
        "squeeze",
        "stop_gradient",
        "tile",
    ),
    *("transpose", "unstack", "with_memory_space_constraint"),
}

# These also follow their inputs: they move or choose elements of several arrays.
CHOICES = {
    *(
        "all_gather",
        "all_gather_invariant",
        "all_to_all",
        "approx_top_k",
        "argmax",
        "argmin",
    ),
    *(
        "concatenate",
        "cummax",
        "cummin",
        "dynamic_update_slice",
        "optimization_barrier",
    ),
    *("pad", "pbroadcast", "pmax", "pmin", "ppermute", "reduce_max", "reduce_min"),
    *("reduce_window_max", "reduce_window_min", "scatter", "sort", "stack", "top_k"),
}

# Of those that follow their inputs: the derivatives are sums over elements or quotients, or add
# what comes from two sides, as that of `abs`. They run in float32 on half-precision arrays and
# their results come back, which changes no bit of these, so that those sums are in float32.
SUMMED_BACKWARD = {
    *(
        "abs",
        "approx_top_k",
        "broadcast_in_dim",
        "cummax",
        "cummin",
        "gather",
        "pad",
        "pvary",
    ),
    *("reduce_max", "reduce_min", "reduce_window_max", "reduce_window_min", "scatter"),
    *("sort", "tile", "top_k"),
}

# Nothing comes back through these in the backward pass, nor through what returns no float.
WITHOUT_GRADIENT = {"ceil", "floor", "round", "sign", "stop_gradient"}

# To round before these is to round after them: they move or choose elements, or change a sign.
ROUNDED_ALIKE = (
    MOVES
    | (CHOICES - {"approx_top_k", "argmax", "argmin", "sort", "top_k"})
    | {"abs", "clamp", "max", "min", "neg", "select_n"}
)

# Elementwise operations in float32 on half-precision arrays are computed again in the backward
# pass, as their inputs need half the memory (see `recompute.py`), together with these:
CHAINED_MOVES = {
    *(
        "broadcast_in_dim",
        "concatenate",
        "copy",
        "expand_dims",
        "pad",
        "reshape",
        "rev",
    ),
    *("sharding_constraint", "slice", "split", "squeeze", "transpose"),
}
# A call is part of a chain if all that it holds is.
CALLS = {"custom_jvp_call", "jit", "pjit"}
CHAINED = FLOAT32_ELEMENTWISE | ELEMENTWISE | CHAINED_MOVES | CALLS
CHAINED |= {"convert_element_type", "stop_gradient"}

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
