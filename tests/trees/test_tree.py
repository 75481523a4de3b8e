"""Finiteness and selection, over every kind of leaf."""

import copy
import enum
import functools
import itertools
import operator
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
from jaxscale._gradients import verdict as _verdict
from jaxscale._gradients.scaled import Scaled
from jaxscale._trees.gradient_leaves import map_gradients, only_gradients
from jaxscale._trees.leaves import cast_like
from jaxscale._trees.params import apply_updates


def test_a_nan_is_left_out_by_a_selection():
    new = {"w": jnp.array([jnp.nan]), "b": None}
    old = {"w": jnp.array([1.0]), "b": None}
    assert jaxscale.tree_where(jnp.array(False), new, old) == {"w": 1, "b": None}


DTYPES = ["float16", "bfloat16", "float32", "complex64", "float8_e5m2", "float8_e4m3fn"]


class Awkward:
    """A value with a dtype that cannot be compared, or only by element."""

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
NUMBERS = {
    "float": NAN,
    "complex": complex(0, NAN),
    "array of NumPy": np.full(2, NAN, np.float16),
    "number of NumPy": np.float64(NAN),
    "bfloat16": ml_dtypes.bfloat16(NAN),
    "array": jnp.asarray(NAN),
}
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


some_not_arrays = cases(
    "name", NOT_ARRAYS, fast=["scalar type", "array of objects", "elementwise"]
)


@some_not_arrays
@pytest.mark.parametrize("function", FUNCTIONS)
def test_what_is_not_an_array_passes_through_everything(name, function):
    leaf, _ = NOT_ARRAYS[name]
    passed = FUNCTIONS[function]({"w": jnp.ones(2), "leaf": leaf, "none": None})
    assert passed["leaf"] is leaf
    assert passed["none"] is None
    assert passed["w"].shape == (2,)


@some_not_arrays
def test_what_is_not_an_array_is_no_gradient_and_compared_by_its_value(name):
    leaf, other = NOT_ARRAYS[name]
    tree = {"w": jnp.ones(2), "leaf": leaf, "none": None}
    assert jax.tree.leaves(only_gradients(tree)) == [tree["w"]]
    assert _verdict.largest(Scaled(tree)) == 1
    assert jaxscale.all_finite(tree)
    for pred in (True, False):
        with pytest.raises(TypeError, match=r"not arrays.*\['leaf'\]"):
            jaxscale.tree_where(pred, {"leaf": leaf}, {"leaf": other})
    # The others are the same object after a copy, or cannot be compared.
    if name not in ("scalar type", "awkward", "elementwise"):
        assert jaxscale.tree_where(False, leaf, copy.deepcopy(leaf)) is leaf


TRACKING = jaxscale.loss_scaled(optax.sgd(0.5), track_leaves=True)
# An optimizer, and what it makes of an infinite gradient.
STEPS = {
    "bare": (optax.sgd(0.5), -jnp.inf),
    "tracking": (TRACKING, 0.5),
    "window": (jaxscale.multi_steps(TRACKING, 1), 0.5),
}


@cases("name", STEPS, fast=["tracking"])
def test_a_step_leaves_alone_what_has_no_gradient(name):
    """As in a module of Equinox, whose gradients hold None there."""
    tx, after_inf = STEPS[name]
    first_not_arrays = {name: first for name, (first, _) in NOT_ARRAYS.items()}
    rest = PASSIVE | first_not_arrays | {"rate": 0.5}
    no_grads = NONE(rest)
    w = jnp.ones(2)
    params = rest | {"w": w}
    state = tx.init(no_grads | {"w": w})
    for grad, expected in ((1.0, 0.5), (jnp.inf, after_inf)):
        grads = no_grads | {"w": jnp.full(2, grad)}
        params, state = jaxscale.apply_gradients(tx, grads, state, params)
        assert params["w"].tolist() == [expected, expected]
        passed = {name: params[name] for name in rest}
        assert jax.tree.structure(passed) == jax.tree.structure(rest)
        assert all(map(operator.is_, jax.tree.leaves(passed), jax.tree.leaves(rest)))


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_of_any_type_is_a_gradient(name):
    number = NUMBERS[name]
    assert not jaxscale.all_finite(PASSIVE | {"w": jnp.ones(2), "number": number})
    assert only_gradients([number])[0] is number
    unscaled = jaxscale.unscale(EIGHT, number)
    assert isinstance(unscaled, jax.Array)
    assert not jnp.isfinite(unscaled).all()


def test_nothing_else_is_a_gradient():
    overwrites = {"_overwrite_with_gradient": {"amax": jnp.array(jnp.nan)}}
    assert jaxscale.all_finite(PASSIVE)
    assert jaxscale.all_finite(overwrites)


# `tree_where`.

WHERE = {"eager": jaxscale.tree_where, "compiled": jax.jit(jaxscale.tree_where)}


@cases("form", WHERE, fast=["compiled"])
def test_tree_where_selects_bits(form):
    new = {}
    old = {}
    for dtype in DTYPES:
        new[dtype] = jnp.array([1.5, -0.0], dtype)
        # Not for float8: XLA on CPU selects it by way of float16, and NaN has many forms.
        first = 2.0 if "float8" in dtype else np.nan
        old[dtype] = jnp.array([first, 0.0], dtype)
    for pred, expected in ((True, new), (False, old)):
        chosen = WHERE[form](jnp.array(pred), new, old)
        assert_same_bits(chosen, expected)
        assert avals(chosen) == avals(new)


@pytest.mark.parametrize("pred", [True, np.bool_(False), np.array(True)])
def test_tree_where_takes_every_kind_of_leaf(pred):
    changed = {
        "int": jnp.arange(3) + 5,
        "key": jax.random.key(7),
        "python_int": 4,
    }
    other = PASSIVE | changed
    chosen = jaxscale.tree_where(pred, PASSIVE, other)
    expected = PASSIVE if pred else other
    assert jax.tree.structure(chosen) == jax.tree.structure(PASSIVE)
    assert chosen["text"] == "no array"
    assert chosen["float0"].dtype == jax.dtypes.float0
    for name in ("int", "bool", "key", "python_int"):
        is_equal = chosen[name] == expected[name]
        assert jnp.all(is_equal), name


MEETING = [
    *("bool", "int8", "uint8", "int32"),
    *("float8_e5m2", "float16", "float32", "complex64"),
]
# At the ends of the ranges, and beyond.
PYTHON = [
    *(True, False, 0, -1, 2, 127, 128, -128, -129, 255, 256),
    *(2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 10**400),
    *(-0.0, 1.0, 1.5, 0.1, 3e9, 61439.0, 61440.0, 65519.99, 65520.0, -65520.0),
    *(3.4028235e38, 1e39, -1e300, -np.inf, np.nan),
    *(1 + 0j, 1 + 2j, complex(0, np.nan), complex(1e39, 0)),
]


KINDS = [jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating]


def is_of_higher_kind(number, dtype):
    kinds = [
        next(i for i, kind in enumerate(KINDS) if jnp.issubdtype(of, kind))
        for of in (type(number), dtype)
    ]
    return kinds[0] > kinds[1]


def convert(number, dtype):
    """Converts a Python number by NumPy; `None` where that raises an `OverflowError`."""
    try:
        with np.errstate(all="ignore"), warnings.catch_warnings(action="ignore"):
            if jnp.issubdtype(dtype, jnp.inexact):
                return np.asarray(number * 1.0).astype(dtype)
            return np.asarray(number, dtype)
    except OverflowError:
        return None


def assert_meets(leaf, array, expected, tree_where=jaxscale.tree_where):
    """One of both is selected, with the type of the array: the leaf as what is expected of it."""
    array_value = np.asarray(array)
    selections = [
        (tree_where(True, leaf, array), expected),
        (tree_where(False, array, leaf), expected),
        (tree_where(True, array, leaf), array_value),
        (tree_where(False, leaf, array), array_value),
    ]
    for chosen, value in selections:
        assert avals(chosen) == avals(jnp.asarray(array))
        if value == value:
            assert_same_bits(chosen, value)
        else:  # of which there are several in float8
            assert chosen != chosen


def assert_does_not_meet(leaf, array, message, tree_where=jaxscale.tree_where):
    match = rf"{message}.*\['x'\]|\['x'\].*{message}"
    for pred, (a, b) in itertools.product(
        [True, False], [(leaf, array), (array, leaf)]
    ):
        with pytest.raises(TypeError, match=match):
            tree_where(pred, {"x": a}, {"x": b})


@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
@cases("dtype", MEETING, fast=["bool", "uint8", "float16"])
def test_a_python_number_takes_the_dtype_of_the_array_it_meets(dtype):
    for array in (jnp.ones((), dtype), np.ones((), dtype)):
        for number in PYTHON:
            if is_of_higher_kind(number, array.dtype):
                assert_does_not_meet(number, array, "dtypes")
                continue
            expected = convert(number, array.dtype)
            if expected is not None:
                assert_meets(number, array, expected)
                continue
            with pytest.raises((OverflowError, TypeError)):  # the latter by `ml_dtypes`
                jaxscale.tree_where(True, number, array)


# Weakly typed numbers, and the dtypes of those that are of a lower kind.
WEAK = {
    "integer": (3, ["bool"]),
    "floating": (3.0, ["bool", "int8", "uint8", "int32"]),
    "complex": (3 + 0j, MEETING[:-1]),
}


@cases("form", WHERE, fast=["eager"])
@cases("kind", WEAK)
def test_a_weakly_typed_array_takes_the_dtype_of_a_strongly_typed_one(kind, form):
    number, lower = WEAK[kind]
    weak = jnp.asarray(number)
    for dtype in MEETING:
        array = jnp.ones((), dtype)
        if dtype in lower:
            assert_does_not_meet(weak, array, "dtypes", WHERE[form])
        else:
            assert_meets(weak, array, jnp.asarray(3, dtype), WHERE[form])
    # Two of them stay so.
    assert avals(WHERE[form](True, weak, weak + 1)) == avals(weak)


@pytest.mark.standard_promotion
def test_two_python_numbers_become_what_jax_makes_of_them():
    for a, b in itertools.product((True, 2, 1.5, 2j), repeat=2):
        dtype = jnp.result_type(a, b)
        assert_same_bits(jaxscale.tree_where(True, a, b), jnp.asarray(a, dtype))
        assert_same_bits(jaxscale.tree_where(False, a, b), jnp.asarray(b, dtype))


def test_a_python_number_may_be_wider_than_32_bits_where_jax_holds_such():
    with pytest.raises(OverflowError):
        jaxscale.tree_where(True, 2**31, 2**31)
    with x64():
        assert jaxscale.tree_where(True, 2**40, 1).item() == 2**40
        assert avals(jaxscale.tree_where(True, 2**20, jnp.int32(1))) == "int32[]"


def test_what_holds_no_numbers_meets_none():
    for leaf in (np.zeros((), jax.dtypes.float0), jax.random.key(0)):
        for other in (1, 1.5, jnp.asarray(1), jnp.int32(1)):
            assert_does_not_meet(leaf, other, "dtypes")


def make_leaves(make, n, m):
    """Leaves of several sizes. The second may be empty; the last is large, and has no symbol."""
    return [
        make((n, m), jnp.float16),
        make((n - 1, m), jnp.float16),
        make((2 * n, 2), jnp.float32),
        make((2**17,), jnp.float32),
    ]


@pytest.mark.worlds
def test_shapes_may_be_symbols():
    def step(params, grads):
        moved = apply_updates(params, jaxscale.unscale(EIGHT, grads))
        is_good = jaxscale.all_finite(grads)
        is_good &= _verdict.largest(Scaled(grads)) == 16
        return cast_like(jaxscale.tree_where(is_good, moved, params), params)

    types = make_leaves(jax.ShapeDtypeStruct, *export.symbolic_shape("n, m"))
    exported = export.export(jax.jit(step))(types, types)
    for number in (1, 3):
        params = make_leaves(jnp.ones, number, 2)
        grads = [-16 * leaf for leaf in params]
        expected = [-leaf for leaf in params]
        assert_same_bits(exported.call(params, grads), expected)
        for index in (0, 2, 3):
            bad = list(grads)
            bad[index] = grads[index].at[..., -1].set(jnp.inf)
            assert_same_bits(exported.call(params, bad), params)
