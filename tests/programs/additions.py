"""Two laws: nothing is added in half precision, and only products read what was rounded to it.

Where a sum cancels, a summand that was rounded has lost the digits that remain, and a sum of many
stops growing. The same is lost if a sum in float32 is rounded, and then read in float32 again.
"""

import jax.numpy as jnp
from jaxpr_equations import equations

from jaxscale._jax import jaxprs

HALF = ("float16", "bfloat16")
PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot_general")
ADDITIONS = (
    "add",
    "add_any",
    "sub",
    "reduce_sum",
    "cumsum",
    "scatter-add",
    "scatter-sub",
    "psum",
    "reduce_window_sum",
    "select_and_scatter_add",
    "psum_invariant",
    "add_jaxvals",
)
# They move numbers, round them, or turn their signs. Their results come from where their inputs do.
MOVES = (
    "convert_element_type",
    "reshape",
    "transpose",
    "broadcast_in_dim",
    "slice",
    "squeeze",
    "dynamic_slice",
    "dynamic_update_slice",
    "rev",
    "concatenate",
    "pad",
    "gather",
    "select_n",
    "copy",
    "scatter",
    "optimization_barrier",
    "neg",
    "name",
    "split",
    "sharding_constraint",
    "pvary",
    "reduce_precision",
    "stop_gradient",
    "pbroadcast",
    "device_put",
    "all_gather",
    "all_to_all",
    "ppermute",
    "copy_to_host",
    "tile",
    "unstack",
)

# The origin of a value: a product, elsewhere, or what was rounded to half precision and
# came from elsewhere. A value made from several has the origin that is last in this list.
PRODUCT, OTHER, ROUNDED = range(3)


def find_additions(program):
    """Returns the additions in half precision."""
    found = {}
    for eqn in equations(program):
        if jaxprs.operation(eqn) in ADDITIONS and any(map(_is_half, eqn.outvars)):
            found[_describe(eqn)] = None
    return list(found)


def find_roundings(program):
    """Returns the places where what was rounded to half precision is read in float32 again."""
    jaxpr = getattr(program, "jaxpr", program)
    found = {}
    _walk(jaxpr, [OTHER] * len(jaxpr.invars), found)
    return list(found)


def _walk(jaxpr, inputs, found):
    """Returns the origins of a program's outputs, and notes what breaks the law in `found`."""
    origins = dict.fromkeys(jaxpr.constvars, OTHER)
    origins |= zip(jaxpr.invars, inputs, strict=True)

    def read(atom):
        # A number in the program is as exact as the result of a product.
        if hasattr(atom, "val"):
            return OTHER if jnp.ndim(atom.val) else PRODUCT
        return origins.get(atom, OTHER)

    for eqn in jaxpr.eqns:
        outputs = _origins_of(eqn, [read(atom) for atom in eqn.invars], found)
        origins |= zip(eqn.outvars, outputs, strict=True)
    return [read(atom) for atom in jaxpr.outvars]


def _origins_of(eqn, inputs, found):
    name = eqn.primitive.name
    programs = [jaxprs.closed(program).jaxpr for program in jaxprs.programs(eqn)]
    if programs:
        return _origins_of_call(eqn, programs, inputs, found)
    if name in PRODUCTS:
        return [PRODUCT]
    if name == "optimization_barrier":  # each output is one of the inputs
        return inputs
    if jaxprs.is_stand_in(eqn):
        return inputs[:1]
    is_half = [_is_half(atom) for atom in eqn.outvars]
    # Indices and masks do not count: numbers do not come from them.
    floating = []
    for origin, atom in zip(inputs, eqn.invars, strict=True):
        if _is_floating(atom):
            floating.append(origin)
    origin = max(floating, default=PRODUCT)
    if name == "convert_element_type":
        was_half = _is_half(eqn.invars[0])
        if origin == OTHER and is_half[0] and not was_half:
            origin = ROUNDED
        elif origin == ROUNDED and was_half and not is_half[0]:
            found[_describe(eqn)] = None
            origin = OTHER
    elif name not in MOVES and not all(is_half):
        origin = OTHER
    return [origin] * len(is_half)


def _origins_of_call(eqn, programs, inputs, found):
    opened = jaxprs.open_equation(eqn)
    if not opened:
        # The form is not known: nothing is taken for a product.
        for program in programs:
            _walk(program, [OTHER] * len(program.invars), found)
        return [OTHER] * len(eqn.outvars)
    origins = [PRODUCT] * len(eqn.outvars)
    for held in opened:
        of_inputs = [inputs[number] for number in held.inputs]
        of_outputs = _walk_turns(held, of_inputs, found)
        for number, origin in zip(held.outputs, of_outputs, strict=False):
            origins[number] = max(origins[number], origin)
    return origins


def _walk_turns(held, inputs, found):
    """Walks through a program, of a loop until the origins of what it carries stay the same."""
    is_stable = not held.fed_back
    while not is_stable:
        outputs = _walk(held.program.jaxpr, inputs, {})
        joined = list(inputs)
        for number, carried in held.fed_back:
            joined[carried] = max(joined[carried], outputs[number])
        is_stable = joined == inputs
        inputs = joined
    return _walk(held.program.jaxpr, inputs, found)


def _is_half(atom):
    return getattr(atom.aval, "dtype", None) in HALF


def _is_floating(atom):
    dtype = getattr(atom.aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def _describe(eqn):
    place = "?"
    for frame in getattr(eqn.source_info.traceback, "frames", ()):
        if "/programs/" in frame.file_name:
            file = frame.file_name.rsplit("/", 1)[-1]
            place = f"{file}:{frame.line_num}"
            break
    aval = eqn.outvars[0].aval.str_short()
    return f"{eqn.primitive.name} {aval} at {place}"
