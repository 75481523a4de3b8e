"""A program with a switch at each line: all on it is the model, all off the model in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from departing import uses_what_goes
from jax.sharding import Mesh, PartitionSpec
from tables import cases

import jaxscale
from jaxscale import diagnostics
from jaxscale.diagnostics._switches.backward import Backward
from jaxscale.diagnostics._switches.board import Switchboard
from jaxscale.diagnostics._switches.search import Search
from jaxscale.diagnostics._switches.switches import Variant

pytestmark = [pytest.mark.standard_promotion, uses_what_goes]


def test_a_third_is_0_33325195_with_its_switch_on():
    def loss_fn(w):
        return (w / jnp.float16(3)).astype(jnp.float32)

    scaling = jaxscale.FixedLossScale(1.0).init()
    report = diagnostics.trace(loss_fn, scaling)(jnp.float16(1.0))
    assert report.loss == 0.333251953125
    assert report.float32_loss == pytest.approx(1 / 3, rel=1e-6)


HALF = jnp.float16
# Of JAX: NumPy would round its own arrays before anything is traced.
W = jnp.asarray(np.random.default_rng(0).standard_normal((4, 4)), jnp.float32)
X = jnp.asarray(np.random.default_rng(1).standard_normal((8, 4)), jnp.float32)
LOSS_SCALE = 64.0


def layer(w, x, dtype):
    # No function that XLA approximates in another way in each format, such as a `tanh`.
    return jnp.maximum(x.astype(dtype) @ w.astype(dtype), 0)


def mean_square(x):
    return jnp.mean(x.astype(jnp.float32) ** 2)


def called(w, x, dtype):
    return mean_square(jax.jit(layer, static_argnums=2)(w, layer(w, x, dtype), dtype))


def rematted(w, x, dtype):
    return jax.checkpoint(called, static_argnums=2)(w, x, dtype)


def scanned(w, x, dtype):
    def body(carried, _):
        carried = layer(w, carried, dtype)
        return carried, jnp.max(carried)

    carried, largest = jax.lax.scan(body, x.astype(dtype), None, length=3)
    return mean_square(carried) + mean_square(largest)


def in_a_while(w, x, dtype):
    def body(state):
        step = layer(jax.lax.stop_gradient(w), state[1], dtype)
        return state[0] + 1, state[1] + step

    _, y = jax.lax.while_loop(
        lambda state: state[0] < 3, body, (0, jax.lax.stop_gradient(x).astype(dtype))
    )
    return called(w, y, dtype)


def branched(w, x, dtype):
    return jax.lax.cond(
        x[0, 0] > 0, lambda: called(w, x, dtype), lambda: called(w, 2 * x, dtype)
    )


def with_a_rule(w, x, dtype):
    square = jax.custom_vjp(jnp.square)
    square.defvjp(lambda x: (x * x, x), lambda x, g: (g * x + x * g,))
    return mean_square(square(x.astype(dtype) @ w.astype(dtype)))


def on_devices(w, x, dtype):
    mesh = Mesh(np.array(jax.devices("cpu")), ("data",))
    spec = PartitionSpec("data")
    mapped = jax.shard_map(
        lambda w, x: layer(w, layer(w, x, dtype), dtype),
        mesh=mesh,
        in_specs=(PartitionSpec(), spec),
        out_specs=spec,
    )
    return mean_square(mapped(w, x))


def with_a_ref(w, x, dtype):
    ref = jax.new_ref(jnp.zeros((8, 4), dtype))
    ref[...] = layer(w, x, dtype)
    ref[...] = layer(w, ref[...], dtype)
    return mean_square(ref[...])


PROGRAMS = [
    called, rematted, scanned, in_a_while, branched, with_a_rule, on_devices, with_a_ref,
]  # fmt: skip


def make_board(fun, *args):
    return Switchboard(Backward(fun, args, {}))


def compute(program, dtype):
    """The gradient of a program compiled as JAX does it, each operation rounding its result."""
    compiled = jax.jit(
        jax.grad(lambda w, x: program(w, x, dtype) * LOSS_SCALE),
        compiler_options={"xla_allow_excess_precision": False},
    )
    return np.asarray(compiled(W, X)) / LOSS_SCALE


@cases(
    ("program", "notes_births"),
    [(program, noting) for program in PROGRAMS for noting in (False, True)],
    fast=[(with_a_ref, False)],
)
def test_switches_choose_between_half_precision_and_float32(program, notes_births):
    board = make_board(lambda w, x: program(w, x, HALF), W, X)
    variant = Variant(notes_births=notes_births)
    exact = compute(program, jnp.float32)
    for places, expected in ((board.places, compute(program, HALF)), ([], exact)):
        outcome = board.evaluate(LOSS_SCALE, places, variant=variant)
        (grad,) = outcome.grads.values()
        # Not to the last bit: a compiled program may reorder the sums within a product.
        spread = np.abs(expected - exact).max()
        np.testing.assert_allclose(grad, expected, atol=1e-6 + spread / 2)
        assert not outcome.births
    # They differ by more than what is allowed.
    assert np.abs(compute(program, HALF) - exact).max() > 1e-5


def test_noise_is_what_float32_rounds():
    def loss_fn(w):
        # Whole numbers are exact, and an index would be another one.
        positions = jnp.cumsum(jnp.ones(4, HALF)).astype(int) - 1
        return mean_square(w.astype(HALF)[positions] * HALF(0.3))

    (noise,) = Search(make_board(loss_fn, W)).noise.values()
    assert 2.0**-25 < noise < 2.0**-20


def test_shaking_changes_arguments_but_no_positions():
    def loss_fn(w, positions):
        return mean_square(w[positions.astype(int)])

    search = Search(make_board(loss_fn, W, jnp.arange(32.0) % 4))
    assert all(shaken.loss != search.exact.loss for shaken in search.shaken)
    (noise,) = search.noise.values()
    assert noise < 2.0**-20


def test_what_should_be_zero_is_noise_if_all_arguments_are_whole_too():
    def loss_fn(params):
        # A softmax does not see what is added to all of its arguments.
        x = jax.nn.softmax(params["w"] * jnp.arange(4.0) + params["bias"])
        return mean_square(x.astype(HALF))

    params = {"w": jnp.float32(1), "bias": jnp.float32(1)}
    noise = Search(make_board(loss_fn, params)).noise
    assert noise["bias"] > 0.3
    assert noise["w"] < 1e-5


def number_in_a_call(x):
    return jnp.minimum(x, 1 - 1e-4)


def number_of_a_variable(x):
    decay = jnp.asarray(0.9999, HALF)
    return decay * x + (1 - decay) * x


def number_beside_a_one(x):
    return 1 - x * 0.9999


def number_of_another_function(x):
    def other():
        factor = 0.9999
        return factor

    factor = jnp.asarray(1, HALF)
    return x * factor + other() * 0


def numbers_that_stay(x):
    return x * 1 + 0.5 - 0 * x


def numbers_that_vanish(x):
    return x / (x + 1e-9) + jnp.maximum(x * 70000, 1e-9)


ROUNDED = {
    number_in_a_call: {(1 - 1e-4, 1)},
    number_of_a_variable: {(0.9999, 1)},
    number_beside_a_one: {(0.9999, 1)},
    number_of_another_function: set(),
    numbers_that_stay: set(),
    numbers_that_vanish: {(1e-9, 0), (70000, np.inf)},
}


@cases("fun", ROUNDED)
@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
def test_numbers_that_a_format_rounds_to_others_are_known(fun):
    board = make_board(lambda x: mean_square(fun(x)), jnp.full(3, 0.7, HALF))
    constants = board.operations.constants.values()
    assert {(rounded.exact, rounded.became) for rounded in constants} == ROUNDED[fun]
