"""What jaxscale assumes about the inside of JAX, and what it does where that no longer holds.

If a row of `ASSUMED` or a test before `forged` fails with a new version of JAX, its name says what
changed: mend that entry of `jaxscale/_jax`. Until then users of that version see a warning.
"""

import functools
import itertools
import pathlib
import re
import tomllib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from autodiff import FORMS as AUTODIFF
from autodiff import HAS_NEW_FORM, form
from forged import forged
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, PartitionSpec
from tables import cases

import jaxscale
from jaxscale import _jax, diagnostics
from jaxscale.diagnostics._trace.needs import HOLDERS

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
X, W = jnp.linspace(-1.0, 1.0, 12).reshape(3, 4), jnp.eye(4) * 0.5


def test_only_one_module_knows_the_inside_of_jax():
    found = {
        str(file.relative_to(PROJECT)): names
        for file in (PROJECT / "jaxscale").rglob("*.py")
        if file.parent.name != "_jax" and (names := INSIDE.findall(file.read_text()))
    }
    assert not found


def test_the_versions_that_were_tested_are_those_that_are_promised():
    oldest, newest = _jax.TESTED.split(" to ")
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    assert f"jax>={oldest}" in project["dependencies"]
    assert f" JAX {newest.rpartition('.')[0]} " in (PROJECT / "README.md").read_text()


def equation(fun, *args):
    return jax.make_jaxpr(fun)(*args).eqns[0]


def names(program):
    return [e.primitive.name for e in program.jaxpr.eqns]


def own_backward(kept, cotangent):
    return (cotangent @ W.T,)


own_vjp = jax.custom_vjp(lambda x: x @ W)
own_vjp.defvjp(lambda x: (x @ W, None), own_backward)
own_jvp = jax.custom_jvp(lambda x: x @ W)
own_jvp.defjvp(lambda primals, tangents: (primals[0] @ W, tangents[0] @ W))


def on_one_device(fun):
    mesh = jax.make_mesh((1,), ("i",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("i")
    return jax.shard_map(fun, mesh=mesh, in_specs=spec, out_specs=spec)


# What holds programs: a function of `x`, and where its equation is.
HOLDING = {
    "jit": jax.jit(lambda x: x @ W),
    "remat2": jax.checkpoint(lambda x: x @ W),
    "custom_jvp_call": own_jvp,
    "custom_vjp_call": own_vjp,
    "scan": lambda x: jax.lax.scan(
        lambda c, y: ((c[1] @ W, y), c[0]), (x[0], x[0]), x, reverse=True
    ),
    "while": lambda x: jax.lax.while_loop(lambda c: c[0, 0] > 9.0, lambda c: c @ W, x),
    "cond": lambda x: jax.lax.cond(x[0, 0] > 0.0, lambda x: x @ W, lambda x: x, x),
    "shard_map": on_one_device(lambda x: x @ W),
}
if jax.__version_info__ >= (0, 12):  # before, its equations stand in place of the call
    HOLDING["eval_jaxpr"] = jax.jit(lambda x: x @ W).trace(X)
# In JAX's new form of autodiff all of these are one primitive, without any flag a `custom_root`.
OLD_AND_NEW = ["remat2", "custom_jvp_call", "custom_vjp_call"]
if HAS_NEW_FORM:
    HOLDING["call_hi_primitive"] = lambda x: jax.lax.custom_root(
        lambda y: y @ W - x, x, lambda f, y: y @ W, lambda f, y: y
    )
NAMES = {"jit": ("jit", "pjit")}
READERS = {"scan": _jax.scan, "while": _jax.while_loop, "cond": _jax.branches}
READERS |= {"shard_map": _jax.mapped}


def holding(name):
    eqns = jax.make_jaxpr(HOLDING[name])(X).eqns
    (eqn,) = (e for e in eqns if _jax.operation(e) in NAMES.get(name, (name,)))
    return eqn


def read(eqn):
    return READERS.get(eqn.primitive.name, _jax.callee)(eqn)


def is_called(eqn):
    called = read(eqn)
    return names(called) == ["dot_general"] and len(called.jaxpr.invars) == len(
        eqn.invars
    )


def ends_in_product(eqn):
    (program,) = _jax.programs(eqn)
    inner = [each for eqn in program.jaxpr.eqns for each in _jax.programs(eqn)]
    return [*map(names, inner)] == [["dot_general"]]


def is_divided(eqn):
    """A call of a part of a program is the same kind of call, and means the same."""
    call = functools.partial(_jax.call_part, eqn, lambda x: [x * 2])
    same = _jax.operation(equation(call, [X])) == _jax.operation(eqn)
    return same and (call([X])[0] == X * 2).all() and _jax.is_divisible(eqn)


def made_again(eqn):
    def again(x):
        with _jax.context(eqn), _jax.source(eqn, _jax.current_scopes()):
            return _jax.bind(eqn, [x])[0]

    return equation(again, X)


def with_half(eqn):
    params = _jax.with_preferred_type(eqn, np.float32, np.float16)
    return _jax.bind(eqn, [jnp.asarray(a, jnp.float16) for a in (X, W)], params)


def swapped(eqn):
    return _jax.bind(eqn, [0, W, X], _jax.with_programs(eqn, read(eqn)[::-1]))


def options(eqn):
    """The parameters of a `jax.checkpoint`, in either form."""
    return getattr(eqn.params.get("_prim"), "params", eqn.params)


def is_pinned(eqn):
    """A program that takes two arrays in the place of one pins both, and not its constants."""
    jaxpr = jax.make_jaxpr(lambda constant, a, b: a + b)(X, X, X).jaxpr
    again = eqn.replace(params=_jax.with_rematted(eqn, jaxpr, [2]))
    part = eqn.replace(params=_jax.with_rematted(eqn, jaxpr))
    return [options(e)["prevent_cse"] for e in (again, part)] == [
        (False, True, True),
        True,
    ]


def run_again(eqn):
    """A scan of another body is as long, and runs in the same direction."""
    outputs = _jax.scan_again(eqn, read(eqn).body, [W], [X[0], X[0]], [X])
    return (outputs[2] == HOLDING["scan"](X)[1]).all()


def is_assembled(eqn):
    """A copy of an equation is a program that runs, and an equal one is the same object."""
    aval = jax.typeof(X)
    one, other = (_jax.assemble([aval], [_jax.copy_of(eqn, [0])], 1) for _ in range(2))
    is_same = (_jax.jaxpr_as_fun(one)(X)[0] == jnp.sin(X)).all()
    return is_same and _jax.closed(one).jaxpr is _jax.closed(other).jaxpr


HIGHEST = jax.lax.Precision.HIGHEST
DEVICE = jax.sharding.SingleDeviceSharding(jax.devices()[0])
SCOPED = jax.named_scope("inner")(lambda x: -x)
PRODUCT = functools.partial(jnp.dot, b=W, precision=HIGHEST)
# What holds programs, or another function of `x`, and what its first equation shows.
ASSUMED = {name: (name, is_called) for name in HOLDING if name not in READERS} | {
    "scan": (
        "scan",
        lambda e: (len(read(e)[0].jaxpr.outvars), *read(e)[1:]) == (3, 1, 2, 3, True),
    ),
    "while": (
        "while",
        lambda e: (names(read(e)[2]), *read(e)[1::2]) == (["dot_general"], 0, 1),
    ),
    "cond": ("cond", lambda e: [*map(names, read(e))] == [[], ["dot_general"]]),
    "another scan": ("scan", run_again),
    "copies of equations": (jnp.sin, is_assembled),
    "order of branches": ("cond", lambda e: (swapped(e)[0] == X @ W).all()),
    "shard_map": ("shard_map", lambda e: "dot_general" in names(read(e).program)),
    "map": (
        "shard_map",
        lambda e: read(e).map(lambda w, x: (x,))(W, X)[0].shape == X.shape,
    ),
    "division of a jit": ("jit", is_divided),
    "division of a remat": ("remat2", is_divided),
    "placed inputs": (
        jax.jit(jnp.sin, in_shardings=DEVICE),
        lambda e: not _jax.is_divisible(e),
    ),
    "placed outputs": (
        jax.jit(jnp.sin, out_shardings=DEVICE),
        lambda e: not _jax.is_divisible(e),
    ),
    "cast": (
        lambda x: _jax.cast(x, "float16"),
        lambda e: e.params["new_dtype"] == np.float16,
    ),
    "scopes": (
        SCOPED,
        lambda e: [*map(_jax.scope_names, (e, made_again(e)))] == [["inner"]] * 2,
    ),
    "lines": (SCOPED, lambda e: __file__ in [file for file, *_ in _jax.frames(e)]),
    "lines again": (
        SCOPED,
        lambda e: [*_jax.frames(made_again(e))] == [*_jax.frames(e)],
    ),
    "backward rule": (
        "custom_vjp_call",
        lambda e: _jax.backward_rule(e) == "own_backward",
    ),
    "no backward rule": ("jit", lambda e: _jax.backward_rule(e) is None),
    "ref": (lambda x: _jax.new_ref(x)[...], lambda e: _jax.is_ref(e.outvars[0])),
    "no ref": (jnp.sin, lambda e: not _jax.is_ref(e.outvars[0])),
    "name": (lambda x: checkpoint_name(x, "x"), lambda e: _jax.operation(e) == "name"),
    "name of another type": (
        lambda x: checkpoint_name(x, "x"),
        lambda e: _jax.bind(e, [X.astype("float16")])[0].dtype == np.float16,
    ),
    "precision": (PRODUCT, lambda e: HIGHEST in _jax.product_precision(e)),
    "preferred type": (PRODUCT, lambda e: with_half(e)[0].dtype == np.float16),
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
            lambda e: len(_jax.callee(e).out_avals) == 2,
        ),
        "a root": ("call_hi_primitive", lambda e: _jax.differentiated_by(e) == "jvp"),
        # Its program takes what its rules need, too.
        "call_hi_primitive": (
            "call_hi_primitive",
            lambda e: (
                len(_jax.callee(e).in_avals) == len(e.invars) and ends_in_product(e)
            ),
        ),
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
        assert (eqn.primitive.name == _jax.OBJECT) == (name in OF_NEW or kind == "new")
        assert holds(eqn)


@cases("kind", AUTODIFF)
def test_programs_give_their_constants_and_are_called_again_backward(kind):
    program = jax.make_jaxpr(lambda x: x * np.arange(4.0, dtype=np.float32))(X)
    jaxpr, constants = _jax.without_constants(program)
    assert not jaxpr.constvars
    assert len(jaxpr.invars) == 1 + len(constants)
    for barrier in (False, True):
        with form(AUTODIFF[kind]):
            fun = _jax.rematerialized(program, prevent_cse=barrier)
            assert options(equation(fun, X))["prevent_cse"] is barrier
            np.testing.assert_array_equal(fun(X)[0], X * np.arange(4.0))


def test_callers_in_jax_and_the_numbers_that_it_casts_are_seen():
    report = diagnostics.trace(lambda x: jnp.sum(x * 1e-9), SCALING)(jnp.float16(1))
    assert [constant.value for constant in report.constants] == [1e-9]

    def is_called_by_jax(x):
        return _jax.is_called_by_jax()

    assert jax.jit(is_called_by_jax)(X)
    assert not is_called_by_jax(X)


def test_axes_of_devices_are_known():
    seen = []

    def look(x):
        seen.append(_jax.axes_of_devices())
        return x

    # Before JAX 0.8 the named axis of a `vmap` is among them.
    named = ("v",) if jax.__version_info__ < (0, 8) else ()
    jax.jit(look)(jnp.ones(2))
    jax.jit(jax.vmap(look, axis_name="v"))(jnp.ones(2))
    jax.jit(jax.vmap(look))(jnp.ones(2))
    jax.jit(on_one_device(look))(X)
    jax.pmap(look, axis_name="p")(jnp.ones(jax.device_count()))
    assert seen == [(), named, (), ("i",), ("p",)]


def test_axes_that_vary_are_known():
    seen = []

    def fun(x):
        alike = jnp.zeros(())
        seen.extend(
            map(_jax.varying, map(jax.typeof, (x, alike, _jax.vary(alike, ("i",)))))
        )
        return x

    jax.jit(on_one_device(fun))(X)
    assert seen[:3] == [{"i"}, frozenset(), {"i"}]


FORMS = {
    "renamed": lambda params: {f"new_{key}": value for key, value in params.items()},
    "added": lambda params: (
        params | {"second_jaxpr": jax.make_jaxpr(lambda x: x @ W)(X)}
    ),
}


@cases(
    "name, form",
    itertools.product(HOLDING, FORMS),
    fast=[("jit", "renamed"), ("scan", "renamed"), ("cond", "added")],
)
def test_a_form_that_is_not_known_runs_as_it_is_written(name, form):
    """And users see a sentence, whatever JAX makes of its loops, calls and rules one day."""
    eqn = holding(name)
    name, params = eqn.primitive.name, FORMS[form](eqn.params)
    with pytest.raises(_jax.UnknownFormError):
        read(eqn.replace(params=params))
    call = forged(name, params, lambda x: jnp.tanh(x @ W))

    def fun(x):
        return jnp.sum(call(x * 3.0) ** 2)

    with pytest.warns(UserWarning, match=f"`{name}` run as they are written") as found:
        assert jaxscale.autocast(fun)(X) == fun(X)
    (message,) = (str(warning.message) for warning in found)
    assert f"JAX {jax.__version__} gives it other parameters" in message
    assert _jax.TESTED in message
    # without a warning
    assert jaxscale.autocast(jaxscale.full_precision(fun))(X) == fun(X)
    # And the doctor's trace, of gradients that do not go through it.
    report = diagnostics.trace(lambda w: w * jax.lax.stop_gradient(fun(X)), SCALING)(
        jnp.float32(2)
    )
    assert report.loss == 2 * fun(X)
    assert report.not_entered == (name,)
    assert f"looked at as one: {name}" in str(report)
    assert name in HOLDERS


def test_a_new_option_is_passed_on():
    for name in HOLDING.keys() - {"shard_map"}:
        eqn = holding(name)
        more = eqn.replace(params=eqn.params | {"new_option": 1})
        assert str(read(more)) == str(read(eqn))
        if eqn.primitive.name != _jax.OBJECT:
            assert _jax.with_programs(more, list(_jax.programs(eqn)))["new_option"] == 1
