"""A table of JAX's primitives: what each does, as far as anything here asks.

`autocast`, `scale_backward`, the trace and the doctor read these rows. A primitive that has none
does nothing that is known, and is treated so: it runs once, in float32, and may lose and make
anything.
"""

import enum


class Op(enum.Flag):
    """Properties of a primitive."""

    PRODUCT = enum.auto()  # multiplies matrices, or convolves
    ELEMENTWISE = enum.auto()  # treats each element by itself
    REDUCTION = enum.auto()  # makes one number of many
    # Moves or chooses elements: to round before it is to round after it.
    MOVE = enum.auto()
    # Gives numbers that it is given: other ones of them, without a sign, or rounded.
    PASSES_ON = enum.auto()
    ARITHMETIC = enum.auto()  # combines two numbers, as an operator of Python does
    ADDS = enum.auto()
    # Adds or multiplies many numbers in the format of its result, so that a narrow one loses more
    # than rounding afterwards shows.
    ACCUMULATES = enum.auto()
    SUBTRACTS = enum.auto()
    MULTIPLIES = enum.auto()
    DIVIDES = enum.auto()
    LIMITS = enum.auto()  # keeps numbers within bounds
    EXPONENTIAL = enum.auto()
    LOGARITHM = enum.auto()
    SIGMOID = enum.auto()
    CHEAP = enum.auto()  # may be computed twice
    KEEPS_NOTHING = enum.auto()  # its derivative does not depend on what it reads
    POOLING = enum.auto()  # chooses the largest number of each window
    NO_GRADIENT = enum.auto()  # nothing comes back through it
    SUMS_BACKWARD = enum.auto()  # its derivative adds numbers up
    # Gives a value a name, by which a policy of `jax.checkpoint` keeps it.
    NAMES = enum.auto()
    # Makes numbers of those that it is given, as most do, and has no other property of these.
    OTHER = enum.auto()
    RETURNS_INPUTS = enum.auto()  # returns each input, when all of them are computed
    STOPS_TANGENTS = enum.auto()  # returns its input without its derivative
    CASTS = enum.auto()  # returns its input in another dtype
    COMPARES = enum.auto()  # says which of two numbers is larger
    LARGER = (
        enum.auto()
    )  # of two numbers: the larger one, or whether the first is larger
    SELECTS = enum.auto()  # takes each element from one of several arrays
    RANDOM = enum.auto()  # makes random bits
    # Its bits mean something in one dtype only.
    READS_BITS = enum.auto()
    # Takes a ref outside of `jit`, too.
    ON_REFS = enum.auto()
    # Holds jaxprs that are written for the precision that they have: a kernel, or an algorithm of
    # JAX's own.
    KERNEL = enum.auto()
    ALGORITHM = enum.auto()
    RUNS_ELSEWHERE = enum.auto()  # runs what is not a jaxpr, or not any more


_NONE = Op(0)
_ELEMENT = Op.ELEMENTWISE | Op.CHEAP
_REDUCE = Op.REDUCTION | Op.CHEAP
_LINEAR_MOVE = Op.MOVE | Op.PASSES_ON | Op.KEEPS_NOTHING
_CHEAP_MOVE = _LINEAR_MOVE | Op.CHEAP

# Names of primitives, by what they do.
_ROWS = {
    Op.PRODUCT: "dot_general conv_general_dilated ragged_dot_general",
    # Elements, one by one. First arithmetic:
    _ELEMENT | Op.ADDS | Op.ARITHMETIC | Op.KEEPS_NOTHING: "add",
    _ELEMENT | Op.SUBTRACTS | Op.ARITHMETIC | Op.KEEPS_NOTHING: "sub",
    _ELEMENT | Op.ADDS | Op.KEEPS_NOTHING: "add_any",
    _ELEMENT | Op.SUBTRACTS | Op.KEEPS_NOTHING: "neg",
    _ELEMENT | Op.PASSES_ON | Op.KEEPS_NOTHING | Op.CASTS: "convert_element_type",
    _ELEMENT | Op.ARITHMETIC | Op.MULTIPLIES: "mul",
    _ELEMENT | Op.ARITHMETIC | Op.DIVIDES: "div",
    _ELEMENT | Op.ARITHMETIC: "rem pow",
    _ELEMENT | Op.EXPONENTIAL: "exp exp2",
    _ELEMENT | Op.LOGARITHM: "log log1p",
    _ELEMENT | Op.SIGMOID: "logistic",
    _ELEMENT: """
        cbrt expm1 sin cos tan asin acos atan atan2 sinh cosh tanh asinh acosh atanh
        erf erfc erf_inv
        integer_pow square sqrt rsqrt
        eq eq_to is_finite le_to lt_to ne
        and or not xor""",
    _ELEMENT | Op.COMPARES: "ge le lt",
    _ELEMENT | Op.COMPARES | Op.LARGER: "gt",
    _ELEMENT | Op.PASSES_ON: "abs",
    _ELEMENT | Op.PASSES_ON | Op.SELECTS: "select_n",
    _ELEMENT | Op.PASSES_ON | Op.LIMITS: "clamp",
    _ELEMENT | Op.PASSES_ON | Op.LIMITS | Op.ARITHMETIC: "min",
    _ELEMENT | Op.PASSES_ON | Op.LIMITS | Op.ARITHMETIC | Op.LARGER: "max",
    _ELEMENT | Op.NO_GRADIENT: "ceil floor round sign",
    _ELEMENT
    | Op.NO_GRADIENT
    | Op.PASSES_ON
    | Op.KEEPS_NOTHING
    | Op.STOPS_TANGENTS: "stop_gradient",
    # One number of many:
    _REDUCE | Op.ADDS | Op.KEEPS_NOTHING | Op.ACCUMULATES: "reduce_sum",
    _REDUCE | Op.PASSES_ON: "reduce_max reduce_min",
    _REDUCE: "argmax argmin reduce_and reduce_or",
    # Moves of whole arrays, which XLA makes a part of what reads them:
    _CHEAP_MOVE: """
        concatenate copy reshape rev sharding_constraint slice split squeeze
        stack transpose unstack""",
    _CHEAP_MOVE | Op.SUMS_BACKWARD: "broadcast_in_dim tile pad",
    # Other moves:
    _LINEAR_MOVE: """
        all_gather_invariant all_to_all device_put dynamic_slice dynamic_update_slice
        layout_constraint pbroadcast ppermute reshard
        with_memory_space_constraint""",
    _LINEAR_MOVE | Op.NAMES: "name",
    _LINEAR_MOVE | Op.SUMS_BACKWARD: "all_gather gather pvary scatter",
    # What is computed once:
    Op.PASSES_ON: "reduce_precision",
    Op.PASSES_ON | Op.RETURNS_INPUTS: "optimization_barrier",
    Op.ON_REFS: "new_ref get swap addupdate freeze free_ref",
    Op.REDUCTION | Op.MULTIPLIES | Op.ACCUMULATES: "reduce_prod",
    Op.MULTIPLIES | Op.ACCUMULATES: "cumprod",
    Op.ACCUMULATES: "scatter-add cumsum reduce_window_sum select_and_scatter_add",
    Op.READS_BITS: "bitcast_convert_type",
    Op.RANDOM: "random_bits rng_bit_generator",
    Op.OTHER: "sort cummax cummin empty_ref iota",
    Op.POOLING: "reduce_window_max",
    # What holds jaxprs, and is in no form that `equation_forms.py` has:
    Op.ALGORITHM: "custom_linear_solve",
    Op.KERNEL: "pallas_call composite custom_partitioning core_map mpmd_map",
    # The last is of Equinox: a callback that compiles a function of its own.
    Op.RUNS_ELSEWHERE: """
        call_exported call_tf ffi_call pure_callback io_callback
        triton_kernel_call tpu_custom_call mosaic_gpu noinline""",
}

_OPERATIONS: dict[str, Op] = {}
for _op, _names in _ROWS.items():
    _OPERATIONS |= dict.fromkeys(_names.split(), _op)


def does(name: str) -> Op:
    """Returns the properties of a primitive, by its name."""
    return _OPERATIONS.get(name, _NONE)


def primitives_that(op: Op) -> frozenset[str]:
    """Returns the names of the primitives that do all of something."""
    return frozenset(name for name, done in _OPERATIONS.items() if op in done)
