"""Finiteness and selection, over every kind of leaf."""

import copy
import enum
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
from jaxscale._trees.tree import apply_updates, cast_like, map_gradients, only_gradients


def eager(fun):
    return fun


TRANSFORMS = [eager, jax.jit]
DTYPES = ["float16", "bfloat16", "float32", "complex64", "float8_e5m2", "float8_e4m3fn"]


class Choice(enum.IntEnum):
    FIRST = 1
    SECOND = 2


class Awkward:
    """What has a dtype, and cannot be compared."""

    dtype = np.dtype(np.float32)

    def __eq__(self, other):
        raise ValueError("no")

    __hash__ = None


class Elementwise(Awkward):
    def __eq__(self, other):
        return np.array([True, True])


# Leaves that are not arrays, in twos: whatever they have by the name of a dtype.
NOT_ARRAYS = {
    "scalar type": (jnp.float16, jnp.bfloat16),
    "aval": (jax.ShapeDtypeStruct((2,), jnp.float32), jax.ShapeDtypeStruct((), jnp.float32)),
    "Linen module": (nn.Dense(2, dtype=jnp.float16), nn.Dense(3, dtype=jnp.float16)),
    "text of NumPy": (np.str_("a"), np.str_("b")),
    "array of text": (np.array(["a", "b"]), np.array(["a", "c"])),
    "array of objects": (np.array([None, print]), np.array([None])),
    "differences in time": (np.array([1, 2], "m8[s]"), np.array([1000, 2000], "m8[ms]")),
    "choice": (Choice.FIRST, Choice.SECOND),
    "awkward": (Awkward(), Awkward()),
    "elementwise": (Elementwise(), Elementwise()),
}
# What is one: with a NaN in it, a verdict sees it.
NUMBERS = [
    float("nan"),
    complex(0, float("nan")),
    np.full(2, np.nan, np.float16),
    np.float64("nan"),
    ml_dtypes.bfloat16(float("nan")),
    jnp.asarray(float("nan")),
]


def moved_by_nothing(tree):
    return apply_updates(tree, jax.tree.map(lambda _: None, tree))


def stepped(tree):
    tx, grads = jaxscale.loss_scaled(optax.sgd(1.0)), only_gradients(tree)
    return jaxscale.apply_gradients(tx, grads, tx.init(grads), tree)[0]


EIGHT = jaxscale.FixedLossScale(8).init()
# All that leave alone what is not a gradient: a tree as each gives it back.
FUNCTIONS = {
    "scale": lambda tree: jaxscale.scale(EIGHT, tree),
    "unscale": lambda tree: jaxscale.unscale(EIGHT, tree),
    "noop": lambda tree: jaxscale.unscale(jaxscale.NoOpLossScale().init(), tree),
    "apply_updates": moved_by_nothing,
    "apply_gradients": stepped,
    "map_gradients": lambda tree: map_gradients(lambda leaf: leaf * 2, tree),
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
    if not isinstance(leaf, Awkward) and leaf is not jnp.float16:  # compared by its value
        assert jaxscale.tree_where(False, leaf, copy.deepcopy(leaf)) is leaf


STEPS = {
    "bare": lambda tx: tx,
    "unskipped": lambda tx: jaxscale.loss_scaled(tx, None, skip_nonfinite=False),
    "tracking": lambda tx: jaxscale.loss_scaled(tx, track_leaves=True),
    "window": lambda tx: jaxscale.multi_steps(jaxscale.loss_scaled(tx), 1),
    "chained": lambda tx: optax.chain(jaxscale.loss_scaled(tx), optax.identity()),
}


@cases("name", STEPS, fast=["tracking"])
def test_a_step_leaves_alone_what_has_no_gradient(name):
    """As in a module of Equinox, whose gradients hold None there."""
    rest = PASSIVE | {leaf: first for leaf, (first, _) in NOT_ARRAYS.items()} | {"rate": 0.5}
    tx, none = STEPS[name](optax.sgd(0.5)), jax.tree.map(lambda _: None, rest)
    params, state = rest | {"w": jnp.ones(2)}, tx.init(none | {"w": jnp.ones(2)})
    kept = -jnp.inf if name in ("bare", "unskipped") else 0.5
    for number, moved in ((1.0, 0.5), (jnp.inf, kept)):
        grads = none | {"w": jnp.full(2, number)}
        params, state = jaxscale.apply_gradients(tx, grads, state, params)
        assert params["w"].tolist() == [moved, moved]
        leaves = (jax.tree.leaves(tree | {"w": None}) for tree in (params, rest))
        assert all(new is old for new, old in zip(*leaves, strict=True))


def test_numbers_of_every_type_are_gradients_and_nothing_else_is():
    for number in NUMBERS:
        assert not jaxscale.all_finite(PASSIVE | {"w": jnp.ones(2), "number": number})
        assert only_gradients([number])[0] is number
        unscaled = jaxscale.unscale(EIGHT, number)
        assert isinstance(unscaled, jax.Array)
        assert not jnp.isfinite(unscaled).all()
    assert jaxscale.all_finite(PASSIVE)
    assert jaxscale.all_finite({"_overwrite_with_gradient": {"amax": jnp.array(jnp.nan)}})


@cases("transform", TRANSFORMS, fast=[jax.jit])
def test_tree_where_selects_bits(transform):
    new = {dtype: jnp.array([1.5, -0.0], dtype) for dtype in DTYPES}
    # Not for float8: XLA on CPU selects it by way of float16, and NaN has many forms.
    old = {dtype: jnp.array([2.0 if "float8" in dtype else np.nan, 0.0], dtype) for dtype in DTYPES}
    tree_where = transform(jaxscale.tree_where)
    for pred, expected in ((True, new), (False, old)):
        chosen = tree_where(jnp.array(pred), new, old)
        assert_same_bits(chosen, expected)
        assert avals(chosen) == avals(new)


def test_tree_where_takes_every_kind_of_leaf():
    other = PASSIVE | {"int": jnp.arange(3) + 5, "key": jax.random.key(7), "python_int": 4}
    for pred, expected in ((True, PASSIVE), (np.bool_(False), other)):
        chosen = jaxscale.tree_where(pred, PASSIVE, other)
        assert jax.tree.structure(chosen) == jax.tree.structure(PASSIVE)
        assert (chosen["text"], chosen["float0"].dtype) == ("no array", jax.dtypes.float0)
        for name in ("int", "bool", "key", "python_int"):
            assert jnp.all(chosen[name] == expected[name])


MEETING = ["bool", "int8", "uint8", "int32", "float8_e5m2", "float16", "float32", "complex64"]
# At the ends of the ranges, and beyond.
PYTHON = [True, False, 0, -1, 2, 127, 128, -128, -129, 255, 256, 2**31 - 1, 2**31, -(2**31)]
PYTHON += [-(2**31) - 1, 10**400, -0.0, 1.0, 1.5, 0.1, 3e9, 61439.0, 61440.0, 65519.99, 65520.0]
PYTHON += [-65520.0, 3.4028235e38, 1e39, -1e300, float("-inf"), float("nan"), 1 + 0j, 1 + 2j]
PYTHON += [complex(0, float("nan")), complex(1e39, 0)]


def converted(number, dtype):
    """What NumPy makes of a Python number, or ``None`` where that is another number."""
    if isinstance(number, complex) and dtype.kind != "c":
        if number.imag != 0:
            return None
        number = number.real
    inexact = jnp.issubdtype(dtype, jnp.inexact)
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            if inexact and isinstance(number, int):
                number = float(number)
            there = np.asarray(number).astype(dtype)
        except OverflowError:
            return None
        # Integers and bools are exact, and what rounds stays as finite as it was.
        same = np.isfinite(there) == np.isfinite(number) if inexact else there.item() == number
    return there if same else None


@cases("dtype", MEETING, fast=["bool", "uint8", "float16"])
def test_a_python_number_takes_the_dtype_of_the_array_it_meets(dtype):
    array, dtype = jnp.ones((), dtype), jnp.dtype(dtype)
    for number in PYTHON:
        expected = converted(number, dtype)
        for pred, (a, b) in itertools.product(
            (True, False), ((number, array), (np.asarray(array), number))
        ):
            if expected is None:
                with pytest.raises(TypeError, match=r"\['x'\].*does not hold"):
                    jaxscale.tree_where(pred, {"x": a}, {"x": b})
                continue
            chosen = jaxscale.tree_where(pred, {"x": a}, {"x": b})["x"]
            assert avals(chosen) == avals(array)
            right = expected if (a if pred else b) is number else np.asarray(array)
            if right == right:
                assert_same_bits(chosen, right)
            else:  # of which there are several in float8
                assert chosen != chosen


@cases("transform", TRANSFORMS, fast=[eager])
def test_a_weakly_typed_array_takes_the_dtype_of_a_strongly_typed_one(transform):
    tree_where = transform(lambda pred, a, b: jaxscale.tree_where(pred, a, b))
    ranks = {"bool": 0, "int8": 1, "uint8": 1, "int32": 1, "complex64": 3}
    for number, dtype in itertools.product((3, 3.0, 3 + 0j), MEETING):
        weak, strong = jnp.asarray(number), jnp.ones((), dtype)
        for pred, (a, b) in itertools.product((True, False), ((weak, strong), (strong, weak))):
            if [int, float, complex].index(type(number)) + 1 > ranks.get(dtype, 2):
                with pytest.raises(TypeError, match=r"dtypes.*the root"):
                    tree_where(pred, a, b)
                continue
            chosen = tree_where(pred, a, b)
            assert avals(chosen) == avals(strong)
            assert chosen == jnp.asarray(3 if (a if pred else b) is weak else 1, dtype)
        # Two of one dtype stay weakly typed.
        assert avals(tree_where(True, weak, weak + 1)) == avals(weak)


@pytest.mark.standard_promotion
def test_two_python_numbers_become_what_jax_makes_of_them():
    for a, b in itertools.product((True, 2, 1.5, 2j), repeat=2):
        dtype = jnp.result_type(a, b)
        for pred, expected in ((True, a), (False, b)):
            assert_same_bits(jaxscale.tree_where(pred, a, b), jnp.asarray(expected, dtype))
    for large in (2**31, 1e39):
        with pytest.raises(TypeError, match="does not hold"):
            jaxscale.tree_where(True, large, large)
    with x64():
        assert jaxscale.tree_where(True, 2**40, 1).item() == 2**40
        assert avals(jaxscale.tree_where(True, 2**20, jnp.int32(1))) == "int32[]"


def test_what_holds_no_numbers_meets_none():
    for leaf in (np.zeros((), jax.dtypes.float0), jax.random.key(0)):
        for other in (1, 1.5, jnp.asarray(1), jnp.int32(1)):
            for a, b in ((leaf, other), (other, leaf)):
                with pytest.raises(TypeError, match="dtypes"):
                    jaxscale.tree_where(True, a, b)


@cases("dtype", ["float32", "complex64", "float64", "complex128"], fast=["complex128"])
def test_no_finite_gradient_ruins_logmax_for_good(dtype):
    policy = presets.openseq2seq_logmax(beta1=0.0, beta2=0.0)
    with x64():
        info = np.finfo(dtype)
        extremes = [info.max, info.max, info.smallest_normal, info.smallest_subnormal, 0, 1.0]
        numbers = [n * (1 + 1j) if "complex" in dtype else n for n in extremes]
        update, state = jax.jit(policy.update), policy.init()
        for number in [*numbers, np.inf, *numbers, *[0.25] * 3]:
            state, _ = update(state, {"w": jnp.asarray([0.125, number], dtype)})
            assert all(jnp.isfinite(field) for field in state)
            assert avals(state) == avals(policy.init())


def test_shapes_may_be_symbols():
    (rows,) = export.symbolic_shape("rows")

    def step(pred, params, grads):
        moved = apply_updates(params, jaxscale.unscale(EIGHT, grads))
        return cast_like(jaxscale.tree_where(pred, moved, params), params)

    def sizes(rows):
        return rows, rows - 1, 2 * rows  # of which the second may be 0

    shapes = [jax.ShapeDtypeStruct((size, 2), jnp.float32) for size in sizes(rows)]
    exported = export.export(jax.jit(step))(jax.ShapeDtypeStruct((), jnp.bool_), shapes, shapes)
    for number in (1, 3):
        params = [jnp.ones((size, 2)) for size in sizes(number)]
        moved = exported.call(jnp.array(True), params, [-16 * leaf for leaf in params])
        assert all((leaf == -1).all() for leaf in moved)
