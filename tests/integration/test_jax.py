"""What jaxscale assumes about the inside of JAX, and what it does where that no longer holds.

If one of the tests before `forged` fails with a new version of JAX, its name says what changed:
mend that entry of `jaxscale/_jax`. Until then users of that version see a warning.
"""

import functools
import inspect
import itertools
import pathlib
import re
import tomllib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import AxisType, PartitionSpec
from tables import cases

import jaxscale
from jaxscale import _jax, diagnostics
from jaxscale.diagnostics._trace.jaxpr import HOLDERS

pytestmark = pytest.mark.standard_promotion

PROJECT = pathlib.Path(__file__).parent.parent.parent
INSIDE = re.compile(
    r"jax\._src|jax\.extend|_getframe|f_locals|get_bind_params|source_info|inner_aval|\.vma\b"
    r"|manual_axis_type|\.ctx\b|to_tangent_aval|call_wrapped|eqn\.params(?:\[|\.get)|primitive\.bind\("
    r"|[\"'](?:call_jaxpr|fun_jaxpr|num_consts|num_carry|preferred_element_type)[\"']"
)
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


def equation(fun, *args, at=0):
    return jax.make_jaxpr(fun)(*args).eqns[at]


def names(program):
    return [e.primitive.name for e in program.jaxpr.eqns]


@jax.custom_vjp
def own_vjp(x):
    return x @ W


def own_backward(kept, cotangent):
    return (cotangent @ W.T,)


own_vjp.defvjp(lambda x: (x @ W, None), own_backward)


@jax.custom_jvp
def own_jvp(x):
    return x @ W


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
    "scan": lambda x: jax.lax.scan(lambda c, row: (c @ W + row, c), x[0], x, reverse=True),
    "while": lambda x: jax.lax.while_loop(lambda c: c[0, 0] > 9.0, lambda c: c @ W, x),
    "cond": lambda x: jax.lax.cond(x[0, 0] > 0.0, lambda x: x @ W, lambda x: x, x),
    "shard_map": on_one_device(lambda x: x @ W),
}
if jax.__version_info__ >= (0, 12):  # before, its equations stand in place of the call
    HOLDING["eval_jaxpr"] = jax.jit(lambda x: x @ W).trace(X)
NAMES = {"jit": ("jit", "pjit")}
READERS = {"scan": _jax.scan, "while": _jax.while_loop, "cond": _jax.branches}
READERS |= {"shard_map": _jax.mapped}


def holding(name):
    """The equation of a name in its program."""
    eqns = jax.make_jaxpr(HOLDING[name])(X).eqns
    (eqn,) = (e for e in eqns if e.primitive.name in NAMES.get(name, (name,)))
    return eqn


def test_calls_are_read():
    for name in HOLDING.keys() - READERS.keys():
        program = _jax.callee(holding(name))
        assert names(program) == ["dot_general"], name
        assert len(program.jaxpr.invars) == len(holding(name).invars), name


def test_loops_are_read():
    loop = _jax.scan(holding("scan"))
    assert (loop.consts, loop.carries, loop.length, loop.reverse) == (1, 1, 3, True)
    assert len(loop.body.jaxpr.outvars) == 2
    loop = _jax.while_loop(holding("while"))
    assert (loop.test_consts, loop.body_consts) == (0, 1)
    assert names(loop.body) == ["dot_general"]


def test_branches_are_read_and_replaced_in_order():
    eqn = holding("cond")
    first, second = _jax.branches(eqn)
    assert (names(first), names(second)) == ([], ["dot_general"])
    swapped = _jax.bind(eqn, [0, W, X], _jax.with_programs(eqn, [second, first]))
    np.testing.assert_array_equal(swapped[0], X @ W)


def test_maps_over_devices_are_read():
    mapped = _jax.mapped(holding("shard_map"))
    assert "dot_general" in names(mapped.program)
    assert mapped.map(lambda *args: (args[-1],))(W, X)[0].shape == X.shape


def test_programs_give_their_constants():
    program = jax.make_jaxpr(lambda x: x * np.arange(4.0, dtype=np.float32))(X)
    jaxpr, constants = _jax.without_constants(program)
    assert not jaxpr.constvars
    assert len(jaxpr.invars) == 1 + len(constants)


def test_calls_are_divided():
    """A call of a part of a program is the same kind of call, and means the same."""
    for name in ("jit", "remat2"):
        eqn = holding(name)
        assert _jax.is_divisible(eqn)
        call = functools.partial(_jax.call_part, eqn, lambda x: [x * 2])
        assert equation(call, [X]).primitive is eqn.primitive
        assert (call([X])[0] == X * 2).all()
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    for place in ("in_shardings", "out_shardings"):
        assert not _jax.is_divisible(equation(jax.jit(jnp.sin, **{place: device}), X))


def test_casts_and_checkpoints_are_one_equation():
    cast = equation(lambda x: _jax.cast(x, jnp.float16), X)
    assert cast.primitive.name == "convert_element_type"
    program = jax.make_jaxpr(jnp.sin)(X)
    for barrier in (False, True):
        fun = functools.partial(_jax.rematerialize, program, prevent_cse=barrier)
        assert equation(fun, [X]).params["prevent_cse"] is barrier
        np.testing.assert_array_equal(fun([X])[0], jnp.sin(X))


def test_scopes_and_lines_are_kept():
    eqn = equation(jax.named_scope("inner")(lambda x: -x), X)
    assert _jax.scope_names(eqn) == ["inner"]
    assert __file__ in [file for file, *_ in _jax.frames(eqn)]

    def again(x):
        with _jax.context(eqn), _jax.source(eqn, _jax.current_scopes()):
            return _jax.bind(eqn, [x])[0]

    copy = equation(again, X)
    assert _jax.scope_names(copy) == ["inner"]
    assert list(_jax.frames(copy)) == list(_jax.frames(eqn))


def test_numbers_of_the_source_are_seen():
    scaling = jaxscale.NoOpLossScale().init()
    report = diagnostics.trace(lambda x: jnp.sum(x * 1e-9), scaling)(jnp.float16(1))
    assert [constant.value for constant in report.constants] == [1e-9]


def test_callers_in_jax_are_seen():
    called = []

    def fun(x):
        called.append(_jax.is_called_by_jax())
        return x

    jax.jit(fun)(X)
    (lambda: fun(X))()
    assert called == [True, False]


def test_backward_rules_have_names():
    assert _jax.backward_rule(holding("custom_vjp_call")) == "own_backward"
    assert _jax.backward_rule(holding("jit")) is None


def test_refs_are_known():
    def fun(x):
        ref = _jax.new_ref(x)
        ref[...] = x + 1.0
        return ref[...]

    eqns = jax.make_jaxpr(fun)(X).eqns
    assert any(_jax.is_ref(var) for e in eqns for var in e.outvars)
    assert not any(map(_jax.is_ref, eqns[-1].outvars))


def test_axes_that_vary_are_known():
    seen = []

    def fun(x):
        alike = jnp.zeros(())
        seen.extend(map(_jax.varying, map(jax.typeof, (x, alike, _jax.vary(alike, ("i",))))))
        return x

    jax.jit(on_one_device(fun))(X)
    assert seen[:3] == [{"i"}, frozenset(), {"i"}]


def test_products_name_their_precision():
    eqn = equation(lambda x: jnp.dot(x, W, precision=jax.lax.Precision.HIGHEST), X)
    assert jax.lax.Precision.HIGHEST in _jax.product_precision(eqn)
    params = _jax.with_preferred_type(eqn, np.float32, np.float16)
    given = [jnp.asarray(a, jnp.float16) for a in (X, W)]
    assert _jax.bind(eqn, given, params)[0].dtype == np.float16


def forged(name, params, fun):
    """A function whose one equation has the name of a primitive of JAX, and other parameters."""
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(lambda *args, **params: [fun(*args)])

    def abstract(*avals, **params):
        out = jax.eval_shape(fun, *avals)
        return [avals[0].update(shape=out.shape, dtype=out.dtype)]

    lower = mlir.lower_fun(lambda *args: [fun(*args)], multiple_results=True)
    primitive.def_abstract_eval(abstract)
    # A cached rule would get the parameters beside arguments of JAX's own, under the same names.
    uncached = "cacheable" in inspect.signature(mlir.register_lowering).parameters
    options = {"cacheable": False} if uncached else {}
    mlir.register_lowering(
        primitive, lambda context, *args, **params: lower(context, *args), **options
    )
    return lambda *args: primitive.bind(*args, **params)[0]


FORMS = {
    "renamed": lambda params: {f"new_{key}": value for key, value in params.items()},
    "added": lambda params: params | {"second_jaxpr": jax.make_jaxpr(lambda x: x @ W)(X)},
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
        READERS.get(name, _jax.callee)(eqn.replace(params=params))
    call = forged(name, params, lambda x: jnp.tanh(x @ W))

    def fun(x):
        return jnp.sum(call(x * 3.0) ** 2)

    with pytest.warns(UserWarning, match=f"`{name}` run as they are written") as found:
        assert jaxscale.autocast(fun)(X) == fun(X)
    (message,) = (str(warning.message) for warning in found)
    assert f"JAX {jax.__version__} gives it other parameters" in message
    assert _jax.TESTED in message
    assert jaxscale.autocast(jaxscale.full_precision(fun))(X) == fun(X)  # without a warning

    # And the doctor's trace, of gradients that do not go through it.
    scaling = jaxscale.NoOpLossScale().init()
    report = diagnostics.trace(lambda w: w * jax.lax.stop_gradient(fun(X)), scaling)(jnp.float32(2))
    assert report.loss == 2 * fun(X)
    assert report.not_entered == (name,)
    assert f"looked at as one: {name}" in str(report)
    assert name in HOLDERS


def test_a_new_option_is_passed_on():
    for name in HOLDING.keys() - {"shard_map"}:
        eqn, read = holding(name), READERS.get(name, _jax.callee)
        more = eqn.replace(params=eqn.params | {"new_option": 1})
        assert str(read(more)) == str(read(eqn))
        assert _jax.with_programs(more, list(_jax.programs(eqn)))["new_option"] == 1
