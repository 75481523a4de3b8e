"""Tables that laws range over: policies, inner optimizers, gradients, and ways to run."""

import contextlib
import functools
import heapq
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from following import Following

import jaxscale

POLICIES = {
    "noop": jaxscale.NoOpLossScale(),
    "fixed": jaxscale.FixedLossScale(8),
    "dynamic": jaxscale.DynamicLossScale(growth_interval=2, max_scale=2.0**17),
    "hysteresis": jaxscale.DynamicLossScale(
        growth_interval=3, hysteresis=2, min_scale=2.0**14
    ),
    "following": Following(init_scale=2.0**15),
}

INNERS = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "adam": optax.adam(0.1),
    "adamw_clipped": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1)),
    "lion_clipped": optax.chain(optax.clip(1.0), optax.lion(0.01)),
    "schedule": optax.sgd(optax.linear_schedule(0.1, 0.0, 5)),
    "inject_hyperparams": optax.inject_hyperparams(optax.adam)(learning_rate=0.1),
    "masked": optax.chain(
        optax.masked(optax.adam(0.1), {"w": True, "half": False, "b": True}),
        optax.masked(optax.set_to_zero(), {"w": False, "half": True, "b": False}),
    ),
    "multi_transform": optax.multi_transform(
        {"a": optax.adam(0.1), "s": optax.sgd(0.1)}, {"w": "a", "half": "s", "b": "s"}
    ),
    "multi_steps": optax.MultiSteps(optax.adam(0.1), every_k_schedule=2),
    "noisy": optax.chain(optax.add_noise(0.1, 0.5, 0), optax.sgd(0.1)),
}

BAD = {"inf": jnp.inf, "-inf": -jnp.inf, "nan": jnp.nan}

PARAMS = {
    "w": jnp.array([1.0, -2.0, 0.5], jnp.float32),
    "half": jnp.array([0.25, -1.5], jnp.bfloat16),
    "b": jnp.array(0.5, jnp.float32),
}
# Fewer of them, and gradients for these.
TWO = {"w": jnp.array([1.0, -2.0, 0.5]), "b": jnp.array(0.5)}
GRADS = {"w": jnp.array([0.3, -0.1, 0.2]), "b": jnp.array(1.0)}
# Of each kind of leaf that has a gradient, and of those that have none.
NESTED = {
    "dense": {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3, jnp.bfloat16)},
    "phase": jnp.ones(2, jnp.complex64),
    "none": None,
    "_overwrite_with_gradient": {"amax": jnp.array(1.0)},
}
# Leaves that are no gradients.
PASSIVE = {
    "int": jnp.arange(3),
    "bool": jnp.array([True, False]),
    "key": jax.random.key(0),
}
PASSIVE |= {
    "none": None,
    "masked": optax.MaskedNode(),
    "text": "no array",
    "python_int": 3,
}
PASSIVE |= {"float0": np.zeros((2,), jax.dtypes.float0)}


def cases(names, table, fast=(), shared=False):
    """Parametrizes a law by the rows of a table, a tuple for several names.

    The fast loop has the rows in `fast` alone, which `pairs` may have left out, or all of the table
    if none is named. If several laws are about one run of a row, they are `shared`:
    `--dist loadgroup` runs them in one worker.
    """
    rows = list(table)
    whole = getattr(table, "whole", rows)
    assert set(fast) <= set(whole), "a row that runs fast is one of the table"
    rows += [row for row in fast if row not in rows]
    parameters = []
    for row in rows:
        values = row
        if not isinstance(row, tuple):
            values = (row,)
        row_id = "-".join(getattr(value, "__name__", str(value)) for value in values)
        marks = []
        if fast and row not in fast:
            marks.append(pytest.mark.slow)
        if shared:
            marks.append(pytest.mark.xdist_group(f"{names}: {row_id}"))
        parameters.append(pytest.param(*values, marks=marks, id=row_id))
    return pytest.mark.parametrize(names, parameters)


class Thinned(list):
    """A part of the rows of a whole table."""

    def __init__(self, rows, whole):
        super().__init__(rows)
        self.whole = whole


def pairs(*columns, where=lambda *row: True, among=lambda *row: True):
    """A table in which each two values of two columns meet in a row, with far fewer than all rows.

    What goes wrong goes wrong with two of them; nearly nothing needs three at once. `where` says of
    a row whether it may be one, and `among` whether it may be chosen (see `half`).
    """
    whole = [row for row in itertools.product(*columns) if where(*row)]
    pairs_of = {}
    for row in whole:
        if among(*row):
            pairs_of[row] = set(itertools.combinations(enumerate(row), 2))
    left = set().union(*pairs_of.values())
    table = []
    # The row with most of those that are left, the first of several. What a row has of them only
    # falls, so that the top of the heap is right as soon as its number is of now.
    heap = [
        (-len(pairs), place, row) for place, (row, pairs) in enumerate(pairs_of.items())
    ]
    while left:
        number, place, row = heap[0]
        now = -len(left & pairs_of[row])
        heapq.heapreplace(heap, (now, place, row))
        if now == number:
            table.append(row)
            left -= pairs_of[row]
    return Thinned(table, whole=whole)


def half(first, second):
    """Returns whether two values are among the half of all pairs in which each value is as often.

    For `among` of `pairs`, with two long columns, whose pairs are most of the table.
    """
    places = {}
    for column in (first, second):
        for place, value in enumerate(column):
            places[value] = place

    def is_chosen(one, other):
        return (places[one] + places[other]) % 2 == 0

    return is_chosen


def each(*columns):
    """A table in which each value of each column stands in a row: as many as the longest has."""
    rows = zip(*map(itertools.cycle, columns), strict=True)
    return list(itertools.islice(rows, max(map(len, columns))))


def spread(first, second, times=2):
    """A table in which each value of one column meets some of another, each as often as any other.

    For a program and the ways to run it, where what goes wrong goes wrong with most programs of a
    way, or in most ways of a program.
    """
    rows = []
    of_second = itertools.cycle(second)
    for number, value in enumerate(first):
        # not the same ones again and again, where the one length divides the other
        if number and number * times % len(second) == 0:
            next(of_second)
        rows += [(value, next(of_second)) for _ in range(times)]
    return Thinned(rows, whole=list(itertools.product(first, second)))


def unchanged(fun):
    """A transformation that does nothing, in the place of one."""
    return fun


def gradients(seed, number):
    """Gradients of ordinary size, a bfloat16 leaf among them."""
    # NumPy's: with JAX's, whoever imports this would compile
    rng = np.random.default_rng(seed)

    def like(leaf):
        return jnp.asarray(rng.standard_normal(leaf.shape).astype(leaf.dtype))

    return [{name: like(leaf) for name, leaf in PARAMS.items()} for _ in range(number)]


def spoiled(grads, bad):
    """The same gradients with one bad element."""
    return grads | {"w": grads["w"].at[1].set(bad)}


def wide(tree):
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


def stack(*trees):
    """The tree of a population of these members."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def member(tree, i):
    """One member of a population."""
    return jax.tree.map(lambda leaf: leaf[i], tree)


def step(tx, params, opt_state, grads, **extra):
    updates, opt_state = tx.update(grads, opt_state, params, **extra)
    return optax.apply_updates(params, updates), opt_state


def fused_step(tx, params, opt_state, grads, **extra):
    return jaxscale.apply_gradients(tx, grads, opt_state, params, **extra)


def run(tx, grads, compiled=True, params=PARAMS):
    """Parameters and optimizer state after a list of gradients."""
    opt_state = tx.init(params)
    one_step = functools.partial(step, tx)
    if compiled:
        one_step = jax.jit(one_step)
    for g in grads:
        params, opt_state = one_step(params, opt_state, g)
    return params, opt_state


def take_form_for_accelerators(monkeypatch):
    """Compiles what other machines get for the CPU, which otherwise takes the other form."""
    monkeypatch.setattr(
        jax.lax, "platform_dependent", lambda *args, cpu, default: default(*args)
    )


def _numbers(leaf):
    if jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf)


def assert_same_bits(actual, expected):
    """Two trees have one structure, and their leaves the same dtypes and bits."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    leaves = jax.tree_util.tree_leaves_with_path(actual)
    expected_leaves = jax.tree.leaves(expected)
    for (path, leaf), expected_leaf in zip(leaves, expected_leaves, strict=True):
        b = _numbers(expected_leaf)
        a = _numbers(leaf)
        where = jax.tree_util.keystr(path)
        assert (a.dtype, a.shape) == (b.dtype, b.shape), where
        assert a.tobytes() == b.tobytes(), f"{where}: {a} != {b}"


def assert_close(actual, expected):
    """Equal to rounding: two compiled programs may contract products and sums differently."""

    def assert_leaf_close(a, b):
        a = _numbers(a).astype("float64")
        b = _numbers(b).astype("float64")
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-7)

    jax.tree.map(assert_leaf_close, actual, expected)


def avals(tree):
    """The type of each leaf, as text."""

    def describe(leaf):
        aval = jax.typeof(leaf)
        if aval.weak_type:
            return f"{aval}weak"
        return str(aval)

    return jax.tree.map(describe, tree)


def counters(state):
    return {name: value.item() for name, value in jaxscale.metrics(state).items()}


def warned(match, is_due):
    """Returns a context in which there must be a warning, if it is due, and otherwise none."""
    if is_due:
        return pytest.warns(UserWarning, match=match)
    return contextlib.nullcontext()
