"""Assumptions about the inside of JAX, and what is done where they no longer hold.

If a row of `ASSUMED`, or a test above `rename`, fails with a new version of JAX, its name says what
changed: mend that entry of `jaxscale/_jax`. Until then users of that version
see a warning.
"""

import ast
import functools
import itertools
import pathlib
import re
import tomllib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from autodiff import DERIVATIVES, HAS_NEW_FORM, form
from autodiff import FORMS as AUTODIFF
from departing import uses_what_goes
from forged import forged
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive, primitives
from jax.sharding import AxisType, PartitionSpec
from tables import assert_same_bits, cases, each

import jaxscale
from jaxscale import diagnostics
from jaxscale._jax import jaxprs
from jaxscale.diagnostics._switches.backward import Backward
from jaxscale.diagnostics._switches.board import Switchboard

pytestmark = pytest.mark.standard_promotion

PROJECT = pathlib.Path(__file__).parent.parent.parent
INSIDE = re.compile(
    r"jax\._src|jax\.extend|_getframe|f_locals|get_bind_params|source_info|inner_aval|\.vma\b"
    r"|manual_axis_type|\.ctx\b|to_tangent_aval|call_wrapped|primitive\.bind\("
    # Those of an equation, whatever it is called, and not those of a `TrainState`.
    r"|(?<!\bstate)\.params(?:\[|\.get\b)"
    r"|[\"'](?:call_jaxpr|fun_jaxpr|num_consts|num_carry|preferred_element_type)[\"']"
)
SCALING = jaxscale.NoOpLossScale().init()
X = jnp.linspace(-1.0, 1.0, 12).reshape(3, 4)
W = jnp.eye(4) * 0.5


def test_only_one_room_knows_the_inside_of_jax():
    names_by_file = {}
    for file in (PROJECT / "jaxscale").rglob("*.py"):
        names = INSIDE.findall(file.read_text())
        if names and PROJECT / "jaxscale/_jax" not in file.parents:
            names_by_file[file.relative_to(PROJECT)] = names
    assert not names_by_file


PRIMITIVES = {p.name for p in vars(primitives).values() if isinstance(p, Primitive)}
PRIMITIVES |= jaxprs.FORMS.keys() | jaxprs.primitives_that(jaxprs.Op(0))
# What else may write the name of a primitive, and why.
MAY_NAME_PRIMITIVES = {
    "_doctor/cures.py": "says in words what an operation is known for",
    "_state/saved_numbers.py": "`threefry2x32` is an implementation of keys",
    "_storage/noise.py": "`threefry2x32` is an implementation of keys",
    "_trees/gradient_leaves.py": "`name` is an attribute",
    "diagnostics/_plot.py": "`log` is a scale of Matplotlib",
    "diagnostics/_switches/evaluate.py": "names the functions of two kinds of `scatter`",
    "diagnostics/_switches/places.py": "says which primitive an operator of Python is",
    "presets/_rule.py": "`clamp` is a policy's",
}


@pytest.mark.worlds
def test_what_a_primitive_does_is_asked_of_one_table():
    """No other room writes the name of a primitive, so that a new one is one row."""
    names_by_file = {}
    for file in (PROJECT / "jaxscale").rglob("*.py"):
        path = file.relative_to(PROJECT / "jaxscale").as_posix()
        words = set()
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                words.add(node.value)
        if words & PRIMITIVES and PROJECT / "jaxscale/_jax" not in file.parents:
            names_by_file[path] = words & PRIMITIVES
    assert names_by_file.keys() <= MAY_NAME_PRIMITIVES.keys(), names_by_file


def test_the_versions_that_were_tested_are_those_that_are_promised():
    oldest, newest = jaxprs.TESTED.split(" to ")
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    assert f"jax>={oldest}" in project["dependencies"]
    minor, _, _ = newest.rpartition(".")
    assert f" JAX {minor} " in (PROJECT / "README.md").read_text()


def equation(fun, *args):
    return jax.make_jaxpr(fun)(*args).eqns[0]


def names(program):
    return [e.primitive.name for e in program.jaxpr.eqns]


def multiply(x):
    return x @ W


def own_backward(kept, cotangent):
    return (cotangent @ W.T,)


own_vjp = jax.custom_vjp(multiply)
own_vjp.defvjp(lambda x: (x @ W, None), own_backward)
own_jvp = jax.custom_jvp(multiply)
own_jvp.defjvp(lambda primals, tangents: (primals[0] @ W, tangents[0] @ W))


def on_one_device(fun):
    mesh = jax.make_mesh((1,), ("i",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("i")
    return jax.shard_map(fun, mesh=mesh, in_specs=spec, out_specs=spec)


def scan_backwards(x):
    def body(carries, y):
        first, second = carries
        return (second @ W, y), first

    return jax.lax.scan(body, (x[0], x[0]), x, reverse=True)


def multiply_while_large(x):
    return jax.lax.while_loop(lambda c: c[0, 0] > 9.0, multiply, x)


def multiply_if_positive(x):
    return jax.lax.cond(x[0, 0] > 0.0, multiply, lambda x: x, x)


def find_root(x):
    return jax.lax.custom_root(
        lambda y: y @ W - x, x, lambda f, y: y @ W, lambda f, y: y
    )


# What holds programs: functions of `x`, by the primitives of their equations.
HOLDING = {
    "jit": jax.jit(multiply),
    "remat2": jax.checkpoint(multiply),
    "custom_jvp_call": own_jvp,
    "custom_vjp_call": own_vjp,
    "scan": scan_backwards,
    "while": multiply_while_large,
    "cond": multiply_if_positive,
    "shard_map": on_one_device(multiply),
}
if jax.__version_info__ >= (0, 12):  # before, its equations stand in place of the call
    HOLDING["eval_jaxpr"] = jax.jit(multiply).trace(X)
# In JAX's new form of autodiff all of these are one primitive, without any flag a `custom_root`.
OLD_AND_NEW = ["remat2", "custom_jvp_call", "custom_vjp_call"]
if HAS_NEW_FORM:
    HOLDING["call_hi_primitive"] = find_root
READERS = {"scan": jaxprs.scan, "while": jaxprs.while_loop, "cond": jaxprs.branches}
READERS |= {"shard_map": jaxprs.mapped}


def holding(name):
    eqns = jax.make_jaxpr(HOLDING[name])(X).eqns
    (eqn,) = (e for e in eqns if jaxprs.operation(e) == name)
    return eqn


def read(eqn):
    return READERS.get(eqn.primitive.name, jaxprs.callee)(eqn)


def is_called(eqn):
    called = read(eqn)
    takes_same = len(called.jaxpr.invars) == len(eqn.invars)
    return takes_same and names(called) == ["dot_general"]


def is_program_of_root(eqn):
    """Its program takes what its rules need as well, and holds that with the product."""
    (program,) = jaxprs.programs(eqn)
    inner = [names(each) for eqn in program.jaxpr.eqns for each in jaxprs.programs(eqn)]
    takes_same = len(jaxprs.callee(eqn).in_avals) == len(eqn.invars)
    return takes_same and inner == [["dot_general"]]


def is_divided(eqn):
    """A call of a part of a program is the same kind of call, and means the same."""
    call = functools.partial(jaxprs.call_part, eqn, lambda x: [x * 2])
    is_same_call = jaxprs.operation(equation(call, [X])) == jaxprs.operation(eqn)
    (doubled,) = call([X])
    return is_same_call and (doubled == X * 2).all() and jaxprs.is_divisible(eqn)


def is_scan_read(eqn):
    body, *others = read(eqn)
    return len(body.jaxpr.outvars) == 3 and others == [1, 2, 3, True]


def is_while_read(eqn):
    _, test_consts, body, body_consts = read(eqn)
    return names(body) == ["dot_general"] and (test_consts, body_consts) == (0, 1)


def is_mapped_again(eqn):
    (x,) = read(eqn).map(lambda w, x: (x,))(W, X)
    return x.shape == X.shape


def made_again(eqn):
    def again(x):
        with jaxprs.context(eqn), jaxprs.source(eqn, jaxprs.current_scopes()):
            return jaxprs.bind(eqn, [x])[0]

    return equation(again, X)


def has_preferred_type(eqn):
    params = jaxprs.with_preferred_type(eqn, np.float32, np.float16)
    (product,) = jaxprs.bind(eqn, [X.astype("float16"), W.astype("float16")], params)
    return product.dtype == np.float16


def is_name_of_any_type(eqn):
    (named,) = jaxprs.bind(eqn, [X.astype("float16")])
    return named.dtype == np.float16


def are_branches_swapped(eqn):
    params = jaxprs.with_programs(eqn, read(eqn)[::-1])
    (output,) = jaxprs.bind(eqn, [0, W, X], params)
    return (output == X @ W).all()


def options(eqn):
    """The parameters of a `jax.checkpoint`, in either form."""
    return getattr(eqn.params.get("_prim"), "params", eqn.params)


def is_pinned(eqn):
    """A program that takes two arrays in the place of one pins both, and not its constants."""
    jaxpr = jax.make_jaxpr(lambda constant, a, b: a + b)(X, X, X).jaxpr
    again = eqn.replace(params=jaxprs.with_rematted(eqn, jaxpr, [2]))
    part = eqn.replace(params=jaxprs.with_rematted(eqn, jaxpr))
    is_pinned_by_input = options(again)["prevent_cse"] == (False, True, True)
    return is_pinned_by_input and options(part)["prevent_cse"] is True


def is_run_again(eqn):
    """A scan of another body is as long, and runs in the same direction."""
    _, _, outputs = jaxprs.scan_again(eqn, read(eqn).body, [W], [X[0], X[0]], [X])
    _, expected = scan_backwards(X)
    return (outputs == expected).all()


def named(x):
    return checkpoint_name(x, "x")


HIGHEST = jax.lax.Precision.HIGHEST
DEVICE = jax.sharding.SingleDeviceSharding(jax.devices()[0])
SCOPED = jax.named_scope("inner")(lambda x: -x)
PRODUCT = functools.partial(jnp.dot, b=W, precision=HIGHEST)
# What holds programs, or another function of `x`, and what its first equation shows.
ASSUMED = {name: (name, is_called) for name in HOLDING if name not in READERS} | {
    "scan": ("scan", is_scan_read),
    "while": ("while", is_while_read),
    "cond": ("cond", lambda e: [*map(names, read(e))] == [[], ["dot_general"]]),
    "another scan": ("scan", is_run_again),
    "order of branches": ("cond", are_branches_swapped),
    "shard_map": ("shard_map", lambda e: "dot_general" in names(read(e).program)),
    "map": ("shard_map", is_mapped_again),
    "division of a jit": ("jit", is_divided),
    "division of a remat": ("remat2", is_divided),
    "placed inputs": (
        jax.jit(jnp.sin, in_shardings=DEVICE),
        lambda e: not jaxprs.is_divisible(e),
    ),
    "placed outputs": (
        jax.jit(jnp.sin, out_shardings=DEVICE),
        lambda e: not jaxprs.is_divisible(e),
    ),
    "cast": (
        lambda x: jaxprs.cast(x, "float16"),
        lambda e: e.params["new_dtype"] == np.float16,
    ),
    "scopes": (
        SCOPED,
        lambda e: [*map(jaxprs.scope_names, (e, made_again(e)))] == [["inner"]] * 2,
    ),
    "lines": (SCOPED, lambda e: __file__ in [file for file, *_ in jaxprs.frames(e)]),
    "lines again": (
        SCOPED,
        lambda e: [*jaxprs.frames(made_again(e))] == [*jaxprs.frames(e)],
    ),
    "backward rule": (
        "custom_vjp_call",
        lambda e: jaxprs.backward_rule(e) == "own_backward",
    ),
    "no backward rule": ("jit", lambda e: jaxprs.backward_rule(e) is None),
    "ref": (lambda x: jax.new_ref(x)[...], lambda e: jaxprs.is_ref(e.outvars[0])),
    "no ref": (jnp.sin, lambda e: not jaxprs.is_ref(e.outvars[0])),
    "name": (named, lambda e: jaxprs.operation(e) == "name"),
    "name of another type": (named, is_name_of_any_type),
    "precision": (PRODUCT, lambda e: HIGHEST in jaxprs.product_precision(e)),
    "preferred type": (PRODUCT, has_preferred_type),
}


OF_NEW = {}
# Rows whose equation has two forms, and what is assumed of the new one alone.
OF_BOTH = {name for name, (what, _) in ASSUMED.items() if what in OLD_AND_NEW}
OF_BOTH |= {"name", "name of another type", "pinned inputs"}
if HAS_NEW_FORM:
    ASSUMED["pinned inputs"] = (
        jax.checkpoint(lambda x: x * 2.0, prevent_cse=(True,)),
        is_pinned,
    )
    OF_NEW = {
        "expansion": (
            jnp.frexp.__wrapped__,
            lambda e: len(jaxprs.callee(e).out_avals) == 2,
        ),
        "a root": (
            "call_hi_primitive",
            lambda e: jaxprs.differentiated_by(e) == "jvp",
        ),
        "call_hi_primitive": ("call_hi_primitive", is_program_of_root),
    }
    ASSUMED |= OF_NEW


def rows():
    for name in ASSUMED:
        yield from ((name, kind) for kind in (AUTODIFF if name in OF_BOTH else ["old"]))


@cases("name, kind", rows())
def test_an_equation_is_as_assumed(name, kind):
    what, holds = ASSUMED[name]
    with form(AUTODIFF[kind]):
        eqn = holding(what) if isinstance(what, str) else equation(what, X)
        is_new = name in OF_NEW or kind == "new"
        assert (eqn.primitive.name == jaxprs.OBJECT) == is_new
        assert holds(eqn)


@cases("name", HOLDING)
def test_an_equation_is_opened_with_what_its_programs_read_and_return(name):
    eqn = holding(name)
    opened = jaxprs.open_equation(eqn)
    programs = [jaxprs.closed(program).jaxpr for program in jaxprs.programs(eqn)]
    assert [held.program.jaxpr for held in opened] == programs
    for held in opened:
        jaxpr = held.program.jaxpr
        for var, number in zip(jaxpr.invars, held.inputs, strict=True):
            shape = eqn.invars[number].aval.shape
            assert var.aval.shape in (shape, shape[1:])  # a slice, in a scan
        for atom, number in zip(jaxpr.outvars, held.outputs, strict=False):
            assert eqn.outvars[number].aval.dtype == atom.aval.dtype
        for output, number in held.fed_back:
            types = jaxpr.outvars[output].aval, jaxpr.invars[number].aval
            outside = eqn.outvars[output].aval, eqn.invars[held.inputs[number]].aval
            assert len(set(types + outside)) == 1
    assert any(held.fed_back for held in opened) == (name in ("scan", "while"))


COLUMNS = np.arange(4.0, dtype=np.float32)
WITH_CONSTANT = jax.make_jaxpr(lambda x: x * COLUMNS)(X)


def test_a_program_without_refs_does_the_same_at_the_same_lines():
    ref = jax.new_ref(X)

    def add_rows(x):
        def body(total, row):
            ref[0] += row
            return total + jnp.sum(ref[...]), None

        return jax.lax.scan(body, 0.0, x)[0]

    jaxpr, consts = jaxprs.without_refs(jax.make_jaxpr(add_rows)(X))
    total, *_ = jaxprs.jaxpr_as_fun(jaxprs.closed(jaxpr))(*consts, X)
    sums = np.sum(X) + np.cumsum(np.sum(X, axis=1))
    np.testing.assert_allclose(total, np.sum(sums), rtol=1e-6)
    for eqn in jaxprs.walk_program(jaxpr):
        assert not any(map(jaxprs.is_ref, (*eqn.invars, *eqn.outvars)))
        if eqn.primitive.name in ("add", "reduce_sum", "scan"):
            files = [file for file, *_ in jaxprs.frames(eqn)]
            assert __file__ in files or eqn.outvars[0].aval.dtype == np.int32


def test_programs_give_their_constants():
    jaxpr, constants = jaxprs.without_constants(WITH_CONSTANT)
    assert not jaxpr.constvars
    assert len(jaxpr.invars) == 1 + len(constants)


def squash(x, scale, index):
    """Has an output that depends on nothing, one that is an integer, and one without derivative."""
    hidden = jnp.tanh(x * COLUMNS) * scale
    chosen = jnp.where(index > 0, hidden, jax.lax.stop_gradient(x))
    return chosen + 0 * x, jnp.argmax(hidden), jnp.ones(3), jax.lax.stop_gradient(scale)


SQUASHED = (X, jnp.float32(1.5), jnp.int32(1))


def squash_again(*args):
    return tuple(jaxprs.Recomputed(jax.make_jaxpr(squash)(*SQUASHED), False).run(*args))


def by_x_and_scale(fun):
    """A function of two arrays, for derivatives by both."""

    def differentiable(x, scale):
        chosen, _, ones, same = fun(x, scale, SQUASHED[2])
        return chosen + jnp.sum(ones) * same

    return differentiable


def differentiate_scan(fun):
    def loss(x, scale):
        scales = jnp.stack([scale, scale])
        return jnp.sum(jax.lax.scan(lambda c, s: (fun(c, s), 0), x, scales)[0])

    return jax.grad(loss, (0, 1))


WAYS = DERIVATIVES | {"in a scan": differentiate_scan}


@pytest.mark.worlds
@cases("way, kind", itertools.product(WAYS, AUTODIFF), fast=each(WAYS, AUTODIFF))
def test_programs_that_are_recomputed_have_the_same_derivatives(way, kind):
    with form(AUTODIFF[kind]):
        actual = WAYS[way](by_x_and_scale(squash_again))(*SQUASHED[:2])
        expected = WAYS[way](by_x_and_scale(squash))(*SQUASHED[:2])
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_a_recomputed_program_that_is_linear_is_transposed():
    types = jax.ShapeDtypeStruct((), jnp.float32)
    transposed = []
    for fun in (squash_again, squash):
        linear = functools.partial(lambda fun, scale: fun(X, scale, 1)[0], fun)
        transposed += jax.linear_transpose(linear, types)(X)
    np.testing.assert_allclose(*transposed, rtol=1e-6)


def test_a_recomputed_program_keeps_what_its_derivative_reads():
    def keep(fun):
        _, pull = jax.vjp(lambda x, y: fun(x, y)[0], X, X + 1)
        return [leaf.shape for leaf in jax.tree.leaves(pull) if leaf.ndim]

    program = jax.make_jaxpr(lambda x, y: jnp.exp(jnp.sin(x)) + y)(X, X)
    assert keep(jaxprs.Recomputed(program, False).run) == [X.shape]


@jax.custom_jvp
def pass_if_asked_for(x, y):
    """Returns `x`, whose derivative it takes only where `y` has one, which it does not read."""
    return x


def pass_tangent(primals, tangents):
    x_dot, y_dot = tangents
    if isinstance(y_dot, SymbolicZero):
        x_dot = jnp.zeros_like(primals[0])
    return primals[0], x_dot


pass_if_asked_for.defjvp(pass_tangent, symbolic_zeros=True)


@cases("by", ["x", "y", "xy"])
def test_a_rule_in_a_recomputed_program_may_ask_what_has_a_derivative(by):
    def squash(x, y):
        return jnp.sin(pass_if_asked_for(x, y))

    argnums = tuple(map("xy".index, by))
    again = jaxprs.Recomputed(jax.make_jaxpr(squash)(X, X), False).run
    actual = jax.grad(lambda x, y: jnp.sum(again(x, y)[0]), argnums)(X, X)
    expected = jax.grad(lambda x, y: jnp.sum(squash(x, y)), argnums)(X, X)
    assert_same_bits(actual, expected)


def test_numpy_says_that_jax_rounds_a_number_to_zero():
    board = Switchboard(Backward(lambda x: jnp.sum(x * 1e-9), (jnp.float16(1),), {}))
    (rounded,) = board.operations.constants.values()
    assert (rounded.exact, rounded.became) == (1e-9, 0)


def test_callers_in_jax_are_seen():
    def is_called_by_jax(x):
        return jaxprs.is_called_by_jax()

    assert jax.jit(is_called_by_jax)(X)
    assert not is_called_by_jax(X)


def test_axes_of_devices_are_known():
    axes = []

    def look(x):
        axes.append(tuple(jax.sharding.get_abstract_mesh().manual_axes))
        return x

    jax.jit(look)(jnp.ones(2))
    jax.jit(jax.vmap(look, axis_name="v"))(jnp.ones(2))
    jax.jit(jax.vmap(look))(jnp.ones(2))
    jax.jit(on_one_device(look))(X)
    jax.pmap(look, axis_name="p")(jnp.ones(jax.device_count()))
    assert axes == [(), (), (), ("i",), ("p",)]


def test_axes_that_vary_are_known():
    axes = {}

    def fun(x):
        alike = jnp.zeros(())
        varied = jaxprs.vary(alike, ("i",))
        for name, array in {"x": x, "alike": alike, "varied": varied}.items():
            axes[name] = jaxprs.varying(jax.typeof(array))
        return x

    jax.jit(on_one_device(fun))(X)
    assert axes == {"x": {"i"}, "alike": frozenset(), "varied": {"i"}}


def rename(params):
    return {f"new_{key}": value for key, value in params.items()}


def add_program(params):
    # of a function of its own, as JAX keeps one program for each
    return params | {"second_jaxpr": jax.make_jaxpr(lambda x: x @ W)(X)}


@cases(
    "name, change",
    itertools.product(HOLDING, [rename, add_program]),
    fast=[("jit", rename), ("scan", rename), ("cond", add_program)],
)
@uses_what_goes
def test_a_form_that_is_not_known_runs_as_it_is_written(name, change):
    """And users see a sentence, whatever JAX makes of its loops, calls and rules one day."""
    eqn = holding(name)
    eqn = eqn.replace(params=change(eqn.params))
    with pytest.raises(jaxprs.UnknownFormError):
        read(eqn)
    call = forged(eqn.primitive.name, eqn.params, lambda x: jnp.tanh(x @ W))

    def fun(x):
        return jnp.sum(call(x * 3.0) ** 2)

    reason = f"JAX {re.escape(jax.__version__)} gives it other parameters"
    if jaxprs.class_of_object(eqn):
        reason = "is no program of arrays in a form that jaxscale knows"
    tested = re.escape(jaxprs.TESTED)
    message = f"`{eqn.primitive.name}` run as they are written.*{reason}.*{tested}"
    with pytest.warns(UserWarning, match=message) as warnings:
        assert jaxscale.autocast(fun)(X) == fun(X)
    assert len(warnings) == 1
    # without a warning
    assert jaxscale.autocast(jaxscale.full_precision(fun))(X) == fun(X)

    # A trace names it, of gradients that do not go through it.
    report = diagnostics.trace(lambda w: w * fun(X), SCALING)(jnp.float32(2))
    assert report.not_entered == (eqn.primitive.name,)
    assert f"looked at as one: {eqn.primitive.name}" in str(report)
    assert eqn.primitive.name in jaxprs.FORMS


@cases("name", [name for name in HOLDING if name != "shard_map"])
def test_a_new_option_is_passed_on(name):
    eqn = holding(name)
    more = eqn.replace(params=eqn.params | {"new_option": 1})
    assert str(read(more)) == str(read(eqn))
    if eqn.primitive.name != jaxprs.OBJECT:
        params = jaxprs.with_programs(more, list(jaxprs.programs(eqn)))
        assert params["new_option"] == 1
