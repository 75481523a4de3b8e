"""Finiteness and selection, over every kind of leaf."""

import copy
import enum
import functools
import itertools
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax import export
from tables import PASSIVE, assert_same_bits, avals, cases
from training import x64

import jaxscale
from jaxscale import presets
from jaxscale._gradients import verdict as _verdict
from jaxscale._gradients.scaled import Scaled
from jaxscale._trees.casts import cast_like
from jaxscale._trees.gradient_leaves import map_gradients, only_gradients
from jaxscale._trees.params import apply_updates

DTYPES = ["float16", "bfloat16", "float32", "complex64", "float8_e5m2", "float8_e4m3fn"]


class Awkward:
    """What has a dtype, and cannot be compared, or only by element."""

    dtype = np.dtype(np.float32)
    __hash__ = None

    def __init__(self, compare):
        self.compare = compare

    def __eq__(self, other):
        return self.compare()


def raise_error():
    raise ZeroDivisionError


def compare_elements():
    return np.array([True, True])


Choice = enum.IntEnum("Choice", "FIRST SECOND")
# Leaves that are not arrays, in twos: whatever they have by the name of a dtype.
NOT_ARRAYS = {
    "scalar type": (jnp.float16, jnp.bfloat16),
    "aval": (
        jax.ShapeDtypeStruct((2,), jnp.float32),
        jax.ShapeDtypeStruct((), jnp.float32),
    ),
    "Linen module": (nn.Dense(2, dtype=jnp.float16), nn.Dense(3, dtype=jnp.float16)),
    "text of NumPy": (np.str_("a"), np.str_("b")),
    "array of text": (np.array(["a", "b"]), np.array(["a", "c"])),
    "array of objects": (np.array([None, print]), np.array([None])),
    "differences in time": (
        np.array([1, 2], "m8[s]"),
        np.array([1000, 2000], "m8[ms]"),
    ),
    "choice": (Choice.FIRST, Choice.SECOND),
    "awkward": (Awkward(raise_error), Awkward(raise_error)),
    "elementwise": (Awkward(compare_elements), Awkward(compare_elements)),
}
# What is one: with a NaN in it, a verdict sees it.
NAN = float("nan")
NUMBERS = [NAN, complex(0, NAN), np.full(2, NAN, np.float16), np.float64(NAN)]
NUMBERS += [ml_dtypes.bfloat16(NAN), jnp.asarray(NAN)]
EIGHT = jaxscale.FixedLossScale(8).init()
NOOP = jaxscale.NoOpLossScale().init()
NONE = functools.partial(jax.tree.map, lambda _: None)
# All that leave alone what is not a gradient: a tree as each gives it back.
FUNCTIONS = {
    "scale": functools.partial(jaxscale.scale, EIGHT),
    "unscale": functools.partial(jaxscale.unscale, EIGHT),
    "noop": functools.partial(jaxscale.unscale, NOOP),
    "apply_updates": lambda tree: apply_updates(tree, NONE(tree)),
    "map_gradients": functools.partial(map_gradients, lambda leaf: leaf * 2),
    "cast_like": lambda tree: cast_like(tree, tree),
    "tree_where": lambda tree: jaxscale.tree_where(True, tree, tree),
    "or else": lambda tree: jaxscale.tree_where(jnp.array(False), tree, tree),
}


@cases("leaf", NOT_ARRAYS, fast=["scalar type", "array of objects", "elementwise"])
def test_what_is_not_an_array_passes_through_everything(leaf):
    leaf, other = NOT_ARRAYS[leaf]
    tree = {"w": jnp.ones(2), "leaf": leaf, "none": None}
    for name, function in FUNCTIONS.items():
        passed = function(tree)
        assert (passed["leaf"] is leaf, passed["none"]) == (True, None), name
        assert passed["w"].shape == (2,)
    assert jax.tree.leaves(only_gradients(tree)) == [tree["w"]]
    assert _verdict.largest(Scaled(tree)) == 1
    assert jaxscale.all_finite(tree)
    for pred in (True, False):
        with pytest.raises(TypeError, match=r"not arrays.*\['leaf'\]"):
            jaxscale.tree_where(pred, tree, tree | {"leaf": other})
    # compared by its value
    if not isinstance(leaf, Awkward) and leaf is not jnp.float16:
        assert jaxscale.tree_where(False, leaf, copy.deepcopy(leaf)) is leaf


STEPS = {
    "bare": lambda tx: tx,
    "unskipped": lambda tx: jaxscale.loss_scaled(tx, None, skip_nonfinite=False),
    "tracking": lambda tx: jaxscale.loss_scaled(tx, track_leaves=True),
    "window": lambda tx: jaxscale.multi_steps(jaxscale.loss_scaled(tx), 1),
    "chained": lambda tx: optax.chain(jaxscale.loss_scaled(tx), optax.identity()),
}


FIRST_NOT_ARRAYS = {name: first for name, (first, _) in NOT_ARRAYS.items()}


@cases("name", STEPS, fast=["tracking"])
def test_a_step_leaves_alone_what_has_no_gradient(name):
    """As in a module of Equinox, whose gradients hold None there."""
    rest = PASSIVE | FIRST_NOT_ARRAYS | {"rate": 0.5}
    no_grads = NONE(rest)
    skips = name not in ("bare", "unskipped")
    tx = STEPS[name](optax.sgd(0.5))
    params = rest | {"w": jnp.ones(2)}
    state = tx.init(no_grads | {"w": jnp.ones(2)})
    after_bad = 0.5 if skips else -jnp.inf
    for grad, expected in ((1.0, 0.5), (jnp.inf, after_bad)):
        grads = no_grads | {"w": jnp.full(2, grad)}
        params, state = jaxscale.apply_gradients(tx, grads, state, params)
        assert params["w"].tolist() == [expected, expected]
        for key, node in rest.items():
            pairs = zip(
                jax.tree.leaves(params[key]), jax.tree.leaves(node), strict=True
            )
            assert all(new is old for new, old in pairs), key


def test_numbers_of_every_type_are_gradients_and_nothing_else_is():
    for number in NUMBERS:
        assert not jaxscale.all_finite(PASSIVE | {"w": jnp.ones(2), "number": number})
        assert only_gradients([number])[0] is number
        unscaled = jaxscale.unscale(EIGHT, number)
        assert isinstance(unscaled, jax.Array)
        assert not jnp.isfinite(unscaled).all()
    assert jaxscale.all_finite(PASSIVE)
    assert jaxscale.all_finite(
        {"_overwrite_with_gradient": {"amax": jnp.array(jnp.nan)}}
    )


@cases("compiled", [False, True], fast=[True])
def test_tree_where_selects_bits(compiled):
    new = {dtype: jnp.array([1.5, -0.0], dtype) for dtype in DTYPES}
    # Not for float8: XLA on CPU selects it by way of float16, and NaN has many forms.
    old = {
        dtype: jnp.array([2.0 if "float8" in dtype else np.nan, 0.0], dtype)
        for dtype in DTYPES
    }
    tree_where = jax.jit(jaxscale.tree_where) if compiled else jaxscale.tree_where
    for pred, expected in ((True, new), (False, old)):
        chosen = tree_where(jnp.array(pred), new, old)
        assert_same_bits(chosen, expected)
        assert avals(chosen) == avals(new)


def test_tree_where_takes_every_kind_of_leaf():
    other = PASSIVE | {
        "int": jnp.arange(3) + 5,
        "key": jax.random.key(7),
        "python_int": 4,
    }
    for pred, expected in ((True, PASSIVE), (np.bool_(False), other)):
        chosen = jaxscale.tree_where(pred, PASSIVE, other)
        assert jax.tree.structure(chosen) == jax.tree.structure(PASSIVE)
        assert (chosen["text"], chosen["float0"].dtype) == (
            "no array",
            jax.dtypes.float0,
        )
        for name in ("int", "bool", "key", "python_int"):
            assert jnp.all(chosen[name] == expected[name])


MEETING = [
    "bool",
    "int8",
    "uint8",
    "int32",
    "float8_e5m2",
    "float16",
    "float32",
    "complex64",
]
# At the ends of the ranges, and beyond.
PYTHON = [
    True,
    False,
    0,
    -1,
    2,
    127,
    128,
    -128,
    -129,
    255,
    256,
    2**31 - 1,
    2**31,
    -(2**31),
]
PYTHON += [
    -(2**31) - 1,
    10**400,
    -0.0,
    1.0,
    1.5,
    0.1,
    3e9,
    61439.0,
    61440.0,
    65519.99,
    65520.0,
]
PYTHON += [
    -65520.0,
    3.4028235e38,
    1e39,
    -1e300,
    float("-inf"),
    float("nan"),
    1 + 0j,
    1 + 2j,
]
PYTHON += [complex(0, float("nan")), complex(1e39, 0)]


def convert(number, dtype):
    """What NumPy makes of a Python number, or `None` where that is another number."""
    is_complex = dtype.kind == "c"
    if not is_complex:
        if number.imag != 0:
            return None
        number = number.real
    if not jnp.issubdtype(dtype, jnp.inexact):
        return convert_exactly(number, dtype)
    try:
        with np.errstate(all="ignore"), warnings.catch_warnings(action="ignore"):
            array = np.asarray(number * 1.0).astype(dtype)
    except OverflowError:
        return None
    # What rounds stays as finite as it was.
    return array if np.isfinite(array) == np.isfinite(number) else None


def convert_exactly(number, dtype):
    try:
        with np.errstate(all="ignore"), warnings.catch_warnings(action="ignore"):
            array = np.asarray(number).astype(dtype)
    except OverflowError:
        return None
    return array if array.item() == number else None


def assert_meets(leaf, array, expected, message="", tree_where=jaxscale.tree_where):
    """It becomes what is expected, of the array's type, or is an error where that is `None`."""
    for pred, (a, b) in itertools.product(
        (True, False), ((leaf, array), (array, leaf))
    ):
        if expected is None:
            with pytest.raises(
                TypeError, match=rf"{message}.*\['x'\]|\['x'\].*{message}"
            ):
                tree_where(pred, {"x": a}, {"x": b})
            continue
        chosen = tree_where(pred, {"x": a}, {"x": b})["x"]
        assert avals(chosen) == avals(jnp.asarray(array))
        right = expected if (a if pred else b) is leaf else np.asarray(array)
        if right == right:
            assert_same_bits(chosen, right)
        else:  # of which there are several in float8
            assert chosen != chosen


@cases("dtype", MEETING, fast=["bool", "uint8", "float16"])
def test_a_python_number_takes_the_dtype_of_the_array_it_meets(dtype):
    for number, array in itertools.product(
        PYTHON, (jnp.ones((), dtype), np.ones((), dtype))
    ):
        assert_meets(number, array, convert(number, jnp.dtype(dtype)), "does not hold")


@cases("compiled", [False, True], fast=[False])
def test_a_weakly_typed_array_takes_the_dtype_of_a_strongly_typed_one(compiled):
    tree_where = jax.jit(jaxscale.tree_where) if compiled else jaxscale.tree_where
    ranks = {"bool": 0, "int8": 1, "uint8": 1, "int32": 1, "complex64": 3}
    for rank, number in enumerate((3, 3.0, 3 + 0j), 1):
        weak = jnp.asarray(number)
        for dtype in MEETING:
            expected = jnp.asarray(3, dtype) if rank <= ranks.get(dtype, 2) else None
            assert_meets(weak, jnp.ones((), dtype), expected, "dtypes", tree_where)
        # Two of one dtype stay weakly typed.
        assert avals(tree_where(True, weak, weak + 1)) == avals(weak)


@pytest.mark.standard_promotion
def test_two_python_numbers_become_what_jax_makes_of_them():
    for pair in itertools.product((True, 2, 1.5, 2j), repeat=2):
        for pred, expected in zip((True, False), pair, strict=True):
            chosen = jaxscale.tree_where(pred, *pair)
            assert_same_bits(chosen, jnp.asarray(expected, jnp.result_type(*pair)))
    for large in (2**31, 1e39):
        with pytest.raises(TypeError, match="does not hold"):
            jaxscale.tree_where(True, large, large)
    with x64():
        assert jaxscale.tree_where(True, 2**40, 1).item() == 2**40
        assert avals(jaxscale.tree_where(True, 2**20, jnp.int32(1))) == "int32[]"


def test_what_holds_no_numbers_meets_none():
    for leaf in (np.zeros((), jax.dtypes.float0), jax.random.key(0)):
        for other in (1, 1.5, jnp.asarray(1), jnp.int32(1)):
            assert_meets(leaf, other, None, "dtypes")


@cases("dtype", ["float32", "complex64", "float64", "complex128"], fast=["complex128"])
def test_no_finite_gradient_ruins_logmax_for_good(dtype):
    policy = presets.openseq2seq_logmax(beta1=0.0, beta2=0.0)
    info = np.finfo(dtype)
    numbers = [info.max, info.max, info.smallest_normal, info.smallest_subnormal, 0, 1]
    if "complex" in dtype:
        numbers = [number * (1 + 1j) for number in numbers]
    with x64():
        update = jax.jit(policy.update)
        state = policy.init()
        for number in (*numbers, np.inf, *numbers, 0.25, 0.25, 0.25):
            state, _ = update(state, {"w": jnp.asarray([0.125, number], dtype)})
            assert all(jnp.isfinite(field) for field in state), number
            assert avals(state) == avals(policy.init()), number


def make_leaves(make, n, m):
    """Leaves of two sizes. The second may be empty; the last is large, and has no symbol."""
    return [
        make((n, m), jnp.float16),
        make((n - 1, m), jnp.float16),
        make((2 * n, 2), jnp.float32),
        make((2**17,), jnp.float32),
    ]


def test_shapes_may_be_symbols():
    def step(params, grads):
        moved = apply_updates(params, jaxscale.unscale(EIGHT, grads))
        is_good = jaxscale.all_finite(grads)
        return cast_like(jaxscale.tree_where(is_good, moved, params), params)

    shapes = make_leaves(jax.ShapeDtypeStruct, *export.symbolic_shape("n, m"))
    exported = export.export(jax.jit(step))(shapes, shapes)
    for number in (1, 3):
        params = make_leaves(jnp.ones, number, 2)
        grads = [-16 * leaf for leaf in params]
        assert all((leaf == -1).all() for leaf in exported.call(params, grads)), number
        for index in (0, 2, 3):
            bad = list(grads)
            bad[index] = grads[index].at[..., -1].set(jnp.inf)
            assert_same_bits(exported.call(params, bad), params)
