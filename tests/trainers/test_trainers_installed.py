"""Trainers whose step is not ours to edit train in float16: the real ones, where installed.

Each program's `train` runs one trainer; `README.md` has what they print.
"""

import importlib
import math
from typing import NamedTuple

import pytest
from runs import RUNS

import jaxscale


class Program(NamedTuple):
    """What a program imports, and how near its runs come to each other.

    Attributes:
      library: what must be installed.
      lost: how much worse float16 alone ends at least, as a share of the loss in float32.
      near: how far the scaled run may end from float32, as a share of what float16 alone loses.
    """

    library: str
    lost: float = 0.5
    near: float = 0.01


PROGRAMS = {
    "keras_fit": Program("keras"),
    "flax_example": Program("flax"),
    "numpyro_svi": Program("numpyro"),
    "tunix_peft": Program("tunix"),
    "tunix_grpo": Program("tunix"),
    "jaxopt_fit": Program("jaxopt", lost=0.3),
    "optimistix_min": Program("optimistix", lost=0.3),
    "flowjax_fit": Program("flowjax", lost=0.03, near=0.2),
    "gpjax_fit": Program("gpjax", lost=0.1, near=0.05),
    "netket_vmc": Program("netket"),
    "haiku_vae": Program("haiku", lost=0.15),
    "diffrax_ode": Program("diffrax"),
    "jinns_solve": Program("jinns", lost=0.2, near=0.1),
    "ott_flow": Program("ott", lost=0.05),
    "brax_ppo": Program("brax"),
    # Two runs that round differently sample different actions.
    "purejaxrl_ppo": Program("gymnax", near=0.3),
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.standard_promotion,
    # The trainers call what JAX and Optax deprecate, and that is theirs to change.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    # Tunix's GRPO takes statistics of an inf reward.
    pytest.mark.filterwarnings(
        "ignore:(Mean of empty slice|invalid value):RuntimeWarning"
    ),
    # diffrax checks its solution in one, which has no products.
    pytest.mark.filterwarnings(
        "ignore:.*inside of the JAX primitive `pure_callback`:UserWarning"
    ),
    # gpjax prefers float64.
    pytest.mark.filterwarnings("ignore:[Xy] is not of type float64:UserWarning"),
]


def program(name):
    pytest.importorskip(PROGRAMS[name].library)
    return importlib.import_module(name)


@pytest.fixture(params=PROGRAMS)
def name(request, monkeypatch, tmp_path):
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    monkeypatch.setenv("NETKET_SHARDING", "0")  # there are eight devices
    return request.param


def test_float16_ends_where_float32_does_if_its_backward_pass_is_scaled(name):
    train = program(name).train
    float32, _ = train(*RUNS["float32"])
    float16, _ = train(*RUNS["float16"])
    scaled, skipped = train(*RUNS["float16, scaled"])
    lost = float16 - float32
    limits = PROGRAMS[name]
    assert lost > limits.lost * abs(float32), "the loss is too large to show anything"
    assert abs(scaled - float32) < limits.near * lost
    assert skipped == 0


def test_a_bad_batch_ends_the_run_unless_skipped_and_then_is_as_if_left_out(name):
    module = program(name)
    spoiled, _ = module.train(*RUNS["bad batch"])
    loss, skipped = module.train(*RUNS["bad batch, skipped"])
    left_out, _ = module.train(*RUNS["batch left out"])
    if math.isfinite(spoiled):
        # Episodes of a policy that is NaN still have a length.
        assert name == "purejaxrl_ppo"
        assert spoiled > 0.5 * loss
    assert skipped == getattr(module, "BAD_STEPS", 1)
    assert loss == left_out, "the same programs ran on the same batches"


def test_accumulate_in_the_optimizer_not_by_tunix():
    """Tunix accumulates as Optax does: an inf stays in its sum for ever, as 0 * inf."""
    peft = program("tunix_peft")
    skipped = []
    for run in peft.MORE_RUNS.values():
        _, count = peft.train(*run)
        skipped.append(count)
    assert skipped == [peft.STEPS // peft.WINDOW, 1]


def descend(solve):
    """Returns where `solve` ends. Gradients are NaN on the way to the optimum at 3."""
    import jax
    import jax.numpy as jnp
    import optax

    @jax.custom_vjp
    def loss(x):
        return (x - 3.0) ** 2

    def backward(x, cotangent):
        return (jnp.where((x > 0.6) & (x < 0.8), jnp.nan, 2 * (x - 3.0) * cotangent),)

    loss.defvjp(lambda x: (loss(x), x), backward)
    return solve(loss, jaxscale.skip_nonfinite(optax.adam(0.05)), jnp.float32(0.0))


@pytest.mark.parametrize(("tolerance", "believes"), [(1e-3, True), (0.0, False)])
def test_optimistix_takes_a_skipped_step_for_convergence_unless_its_tolerances_are_0(
    tolerance, believes
):
    optx = pytest.importorskip("optimistix")

    def solve(loss, tx, start):
        solver = optx.OptaxMinimiser(tx, rtol=tolerance, atol=tolerance)
        return optx.minimise(
            lambda x, _: loss(x), solver, start, max_steps=300, throw=False
        )

    solution = descend(solve)
    assert solution.value < 0.8, "it cannot get through"
    assert bool(solution.result == optx.RESULTS.successful) == believes
    assert jaxscale.metrics(solution.state)["total_notfinite"] > 0


@pytest.mark.parametrize("tolerance", [1e-3, 0.0])
def test_the_run_of_jaxopt_stops_at_the_first_gradient_that_is_nan(tolerance):
    jaxopt = pytest.importorskip("jaxopt")

    def solve(loss, tx, start):
        solver = jaxopt.OptaxSolver(loss, tx, maxiter=300, tol=tolerance)
        return solver.run(start)

    params, state = descend(solve)
    assert params < 0.8
    assert state.iter_num < 300
    assert jaxscale.metrics(state)["total_notfinite"] == 1
