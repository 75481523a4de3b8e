"""Transformations of JAX around whole steps: `vmap`, `scan`, no `jit`, derivatives."""

import jax
import jax.numpy as jnp
import optax
import pytest
from tables import POLICIES, assert_same_bits, avals, cases, member, unchanged
from training import FACTORS, INF, MLP, NAN, X, amplified, mlp_loss, trainer, x64

import jaxscale

pytestmark = pytest.mark.standard_promotion


def test_each_member_of_a_population_has_a_scale_of_its_own():
    tx = jaxscale.loss_scaled(optax.sgd(1.0))
    params = jnp.ones(2)
    _, state = jax.vmap(tx.update)(
        jnp.array([1.0, jnp.inf]), jax.vmap(tx.init)(params), params
    )
    assert state.scaling.loss_scale.tolist() == [2.0**15, 2.0**14]


DYNAMIC = POLICIES["dynamic"]
# All numbers of this model are short binary fractions, so that its arithmetic is exact, and
# two different compiled programs must agree on every bit. `MLP` rounds, as real ones do.
EXACT = {"w": jnp.array([1.0, -2.0, 0.5]), "b": jnp.array(4.0, jnp.float32)}
EXACT_TX = jaxscale.loss_scaled(optax.sgd(0.25, momentum=0.5), DYNAMIC)


def exact_loss(params, batch):
    x, factor = batch
    return amplified(jnp.sum(params["w"] * x) + params["b"] * x[0], factor)


def small_integers(*shape):
    return jnp.round(2 * jax.random.normal(jax.random.key(len(shape)), shape))


def scanned(train_step):
    def run(carry, batches):
        carry, _ = jax.lax.scan(lambda c, b: (train_step(c, b), None), carry, batches)
        return carry

    return run


# What the gradients of each member of a population are multiplied by, step by step.
MEMBERS = [FACTORS, jnp.ones(8), jnp.full(8, NAN), jnp.ones(8).at[6].set(INF)]
POPULATION = jnp.stack(MEMBERS, axis=1)
SKIPPED = [3, 0, 8, 1]


@pytest.mark.worlds
@pytest.mark.device
def test_each_member_of_a_population_trains_as_if_it_were_alone():
    """In a scan of steps of all; `tests/step/test_runs.py` has members that scan by themselves."""
    train_step = trainer(EXACT_TX, exact_loss)
    steps, members = POPULATION.shape
    batches = small_integers(steps, members, 3), POPULATION
    numbers = jnp.arange(members)
    start = {"w": EXACT["w"] + numbers[:, None], "b": EXACT["b"] + numbers}
    carry = start, jax.vmap(EXACT_TX.init)(start)
    together = jax.jit(scanned(jax.vmap(train_step)))(carry, batches)
    assert avals(together) == avals(carry)
    alone = jax.jit(scanned(train_step))
    for i in range(members):
        params = member(start, i)
        own_batches = tuple(batch[:, i] for batch in batches)
        one = alone((params, EXACT_TX.init(params)), own_batches)
        assert_same_bits(member(together, i), one)
    _, state = together
    metrics = jaxscale.metrics(state)
    assert metrics["total_notfinite"].tolist() == SKIPPED
    assert len(set(metrics["loss_scale"].tolist())) == members


def ways_to_train(tx, loss_fn):
    train_step = trainer(tx, loss_fn)

    def loop(carry, batches):
        for batch in zip(*batches, strict=True):
            carry = train_step(carry, batch)
        return carry

    def population(*args):
        carry = jax.vmap(loop)(*jax.tree.map(lambda leaf: leaf[None], args))
        return jax.tree.map(lambda leaf: leaf[0], carry)

    return {"loop": loop, "scan": scanned(train_step), "vmap": population}


@pytest.mark.worlds
@cases("way", ["scan", "vmap"], fast=["scan"])  # which is a loop then
def test_without_jit_every_way_gives_the_same(way):
    batches = small_integers(3, 3), FACTORS[:3]
    start = EXACT, EXACT_TX.init(EXACT)
    run = ways_to_train(EXACT_TX, exact_loss)[way]
    with jax.disable_jit():
        carry = run(start, batches)
    assert_same_bits(carry, jax.jit(run)(start, batches))
    assert avals(carry) == avals(start)
    _, state = carry
    assert state.total_notfinite == 1


@cases("policy", POLICIES, fast=["dynamic"])
def test_64_bit_numbers_change_nothing_of_32_bit_training(policy):
    tx = jaxscale.loss_scaled(optax.sgd(0.25, momentum=0.5), POLICIES[policy])
    batches = small_integers(8, 3), FACTORS
    start = EXACT, tx.init(EXACT)
    run = jax.jit(scanned(trainer(tx, exact_loss)))
    expected, expected_state = run(start, batches)
    with x64():
        assert jnp.zeros(()).dtype == jnp.float64
        assert_same_bits((EXACT, tx.init(EXACT)), start)
        params, state = run(start, batches)
    assert avals((params, state)) == avals(start)
    assert_same_bits(params, expected)
    assert_same_bits(state, expected_state)


@pytest.mark.worlds
@cases(
    "policy, jit, way",
    [
        *((policy, unchanged, "loop") for policy in POLICIES),
        ("dynamic", unchanged, "scan"),
        ("dynamic", jax.jit, "scan"),
        ("dynamic", jax.jit, "vmap"),
    ],
    fast=[("dynamic", jax.jit, "scan"), ("following", unchanged, "loop")],
)
def test_a_skipped_step_raises_nothing_where_nans_are_errors(policy, jit, way):
    # Infinite gradients are what an overflow is. What makes NaNs of them, inf / inf in Adam
    # or inf - inf, must not see them; bare optax does.
    tx = jaxscale.loss_scaled(optax.adam(0.1), POLICIES[policy])
    integers = small_integers(2, 3)
    # no 0, as 0 * inf would be a NaN of the model
    x = 1 + jnp.abs(integers)
    factors = jnp.array([INF, 1])
    ways = ways_to_train(tx, exact_loss)
    run = jit(ways[way])
    with jax.debug_nans(True):
        start = EXACT, tx.init(EXACT)
        params, state = run(start, (x, factors))
        jax.block_until_ready(params)
    assert state.total_notfinite == 1
    assert state.total_steps == 2
    assert jaxscale.all_finite(params)


@cases("name", POLICIES, fast=["dynamic", "following"])
def test_gradients_of_0_make_no_nans_in_a_policy(name):
    policy = POLICIES[name]
    zeros = jax.tree.map(jnp.zeros_like, EXACT)
    with jax.debug_nans(True):
        jax.jit(policy.update)(policy.init(), zeros)


# Functions of a differentiation and an optimizer: rematerialized models, and gradients that are
# differentiated once more. The loss is, too: its derivative has nothing of the scale.
BATCH = X[0], jnp.array(1.0)
STATE = DYNAMIC.init()
W = jnp.array([1.0, -2.0])


def remat(d, _, policy=None):
    fun = d(jax.checkpoint(mlp_loss, policy=policy))
    # The forward pass is there twice, as its intermediate results are not kept.
    assert str(jax.make_jaxpr(fun)(MLP, BATCH)).count("= tanh") == 2
    return fun(MLP, BATCH)


def gradient_penalty(d, _):
    # Loss and penalty from one inner call, as a user writes it: both have to be unscaled.
    def loss_fn(params, batch):
        x, factor = batch
        loss, grads = d(lambda p: mlp_loss(p, (x, 1.0)))(params)
        penalty = sum(jnp.sum(grad**2) for grad in jax.tree.leaves(grads))
        return amplified(loss + 0.1 * penalty, factor)

    return d(loss_fn)(MLP, BATCH)  # op by op, and all scales are powers of two


def cubic_loss(params, batch):
    return jnp.sum(params["w"] ** 3 * batch) + params["b"] ** 2


def step(d, tx, jit=unchanged):
    # As in meta-learning: how does the loss after a step depend on where it started?
    batch = jnp.array([2.0, -1.0, 1.0])
    train_step = jit(trainer(tx, cubic_loss, jit is jax.jit, d))

    def loss_after(params):
        new_params, _ = train_step((params, tx.init(params)), batch)
        return cubic_loss(new_params, batch)

    return jax.grad(loss_after)(EXACT), jax.jvp(loss_after, (EXACT,), (EXACT,))


def polynomial(w):
    return jnp.sum(w**3) + w[0] * w[1]


def polynomial_and_aux(w):
    return polynomial(w), jnp.sum(w**2)


def more(differentiate):
    """Differentiates a gradient once more, alone and with an auxiliary output."""

    def both(d, _):
        alone = differentiate(d(polynomial))
        return alone, differentiate(d(polynomial_and_aux, has_aux=True))

    return both


DIFFERENTIATED = {
    "remat": remat,
    "gradient penalty": gradient_penalty,
    "step": step,
    "compiled step": lambda *args: step(*args, jax.jit),
    "jvp": more(lambda fun: jax.jvp(fun, (W,), (jnp.array([1.0, 2.0]),))),
    "hessian": more(lambda fun: jax.hessian(fun)(W)),
}


@pytest.mark.worlds
@cases("name", DIFFERENTIATED, fast=["remat", "gradient penalty", "jvp"])
def test_value_and_grad_is_that_of_jax(name):
    def bare(fun, state=None, **kwargs):
        return jax.value_and_grad(fun, **kwargs)

    def ours(fun, state=STATE, **kwargs):
        return jaxscale.value_and_grad(fun, state, **kwargs)

    tx = optax.sgd(0.25)
    actual = DIFFERENTIATED[name](ours, jaxscale.loss_scaled(tx, DYNAMIC))
    assert_same_bits(actual, DIFFERENTIATED[name](bare, tx))
