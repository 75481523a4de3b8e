"""What JAX does to functions, done to whole steps: `vmap`, `scan`, no `jit`, derivatives."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tables import POLICIES, assert_close, assert_same_bits, avals, cases
from training import FACTORS, INF, MLP, NAN, X, amplified, mlp_loss, trainer, x64

import jaxscale
from jaxscale import presets

pytestmark = pytest.mark.standard_promotion

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
    return lambda carry, batches: jax.lax.scan(
        lambda c, b: (train_step(c, b), None), carry, batches
    )[0]


# Of a population, by steps and members: what each member's gradients are multiplied by.
POPULATION = jnp.stack(
    [FACTORS, jnp.ones(8), jnp.full(8, NAN), jnp.ones(8).at[6].set(INF)], axis=1
)


@cases("order", ["vmap in scan", "scan in vmap"], fast=["vmap in scan"])
def test_each_member_of_a_population_trains_as_if_it_were_alone(order):
    train_step = trainer(EXACT_TX, exact_loss, fused=order == "vmap in scan")
    steps, members = POPULATION.shape
    batches = small_integers(steps, members, 3), POPULATION
    start = jax.tree.map(
        lambda p: p + jnp.arange(members).reshape(-1, *[1] * p.ndim), EXACT
    )
    carry = start, jax.vmap(EXACT_TX.init)(start)
    inside = jax.vmap(scanned(train_step), in_axes=(0, 1))
    run = scanned(jax.vmap(train_step)) if order == "vmap in scan" else inside
    together = jax.jit(run)(carry, batches)
    assert avals(together) == avals(carry)
    alone = jax.jit(scanned(train_step))
    for i in range(members):
        params = {name: leaf[i] for name, leaf in start.items()}
        mine = tuple(batch[:, i] for batch in batches)
        one = alone((params, EXACT_TX.init(params)), mine)
        assert_same_bits(jax.tree.map(lambda leaf, i=i: leaf[i], together), one)
    metrics = jaxscale.metrics(together[1])
    skipped = np.sum(~np.isfinite(POPULATION), axis=0)
    assert metrics["total_notfinite"].tolist() == skipped.tolist() == [3, 0, 8, 1]
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


@cases("way", ["scan", "vmap"], fast=["scan"])  # which is a loop then
def test_without_jit_every_way_gives_the_same(way):
    batches = small_integers(3, 3), FACTORS[:3]
    start = EXACT, EXACT_TX.init(EXACT)
    run = ways_to_train(EXACT_TX, exact_loss)[way]
    with jax.disable_jit():
        carry = run(start, batches)
    assert_same_bits(carry, jax.jit(run)(start, batches))
    assert avals(carry) == avals(start)
    assert carry[1].total_notfinite == 1


ALL_POLICIES = POLICIES | {
    "tolerance": presets.ToleranceLossScale(),
    "logmax": presets.LogMaxLossScale(),
    "adaptive": jaxscale.AdaptiveLossScale(),
}


@cases("policy", ALL_POLICIES, fast=["dynamic"])
def test_64_bit_numbers_change_nothing_of_32_bit_training(policy):
    tx = jaxscale.loss_scaled(optax.sgd(0.25, momentum=0.5), ALL_POLICIES[policy])
    batches = small_integers(8, 3), FACTORS
    start = EXACT, tx.init(EXACT)
    run = jax.jit(scanned(trainer(tx, exact_loss)))
    expected = run(start, batches)
    with x64():
        assert jnp.zeros(()).dtype == jnp.float64
        assert_same_bits((EXACT, tx.init(EXACT)), start)
        carry = run(start, batches)
    assert avals(carry) == avals(start)
    # LogMax takes logarithms, which may come out differently in another program.
    assert_close(carry[1].scaling, expected[1].scaling)
    assert_same_bits(carry[0], expected[0])
    assert_same_bits(
        carry[1]._replace(scaling=None), expected[1]._replace(scaling=None)
    )


@cases(
    "policy, jit, way",
    [(policy, False, "loop") for policy in ALL_POLICIES]
    + [
        ("dynamic", False, "scan"),
        ("dynamic", True, "scan"),
        ("dynamic", True, "vmap"),
    ],
    fast=[("dynamic", True, "scan"), ("logmax", False, "loop")],
)
def test_a_skipped_step_raises_nothing_where_nans_are_errors(policy, jit, way):
    # Infinite gradients are what an overflow is. What makes NaNs of them, inf / inf in Adam
    # or inf - inf, must not see them; bare optax does.
    tx = jaxscale.loss_scaled(optax.adam(0.1), ALL_POLICIES[policy])
    # no 0, as 0 * inf would be a NaN of the model
    x = 1 + jnp.abs(small_integers(2, 3))
    batches = x, jnp.array([INF, 1])
    run = ways_to_train(tx, exact_loss)[way]
    run = jax.jit(run) if jit else run
    with jax.debug_nans(True):
        params, state = run((EXACT, tx.init(EXACT)), batches)
        jax.block_until_ready(params)
        zeros = jax.tree.map(jnp.zeros_like, EXACT)  # which are no NaNs to any policy
        jax.jit(ALL_POLICIES[policy].update)(ALL_POLICIES[policy].init(), zeros)
    assert (state.total_notfinite, state.total_steps) == (1, 2)
    assert jaxscale.all_finite(params)


def test_where_nans_are_errors_one_in_a_compiled_step_that_is_skipped_is_none():
    tx = jaxscale.skip_nonfinite(optax.adam(0.1))
    train_step = jax.jit(
        lambda carry, x: trainer(tx, mlp_loss)(carry, (x, x[0, 0] / x[0, 0]))
    )
    with jax.debug_nans(True):
        params, state = train_step((MLP, tx.init(MLP)), jnp.zeros((5, 3)))
    assert_same_bits(params, MLP)
    assert state.total_notfinite == 1


# Functions of a differentiation and an optimizer: rematerialized models, and gradients that are
# differentiated once more. The loss is, too: its derivative has nothing of the scale.
BATCH, STATE = (X[0], jnp.array(1.0)), DYNAMIC.init()
W = jnp.array([1.0, -2.0])


def remat(d, _, policy=None):
    fun = d(jax.checkpoint(mlp_loss, policy=policy))
    # The forward pass is there twice, as its intermediate results are not kept.
    assert str(jax.make_jaxpr(fun)(MLP, BATCH)).count("= tanh") == 2
    return fun(MLP, BATCH)


def gradient_penalty(d, _):
    # Loss and penalty from one inner call, as a user writes it: both have to be unscaled.
    def loss_fn(params, batch):
        loss, grads = d(lambda p: mlp_loss(p, (batch[0], 1.0)))(params)
        penalty = sum(jnp.sum(grad**2) for grad in jax.tree.leaves(grads))
        return amplified(loss + 0.1 * penalty, batch[1])

    return d(loss_fn)(MLP, BATCH)  # op by op, and all scales are powers of two


def step(d, tx, jit=lambda fun: fun):
    # As in meta-learning: how does the loss after a step depend on where it started?
    def cubic(params, batch):
        return jnp.sum(params["w"] ** 3 * batch) + params["b"] ** 2

    def after(params):
        return cubic(train_step((params, tx.init(params)), batch)[0], batch)

    batch, train_step = (
        jnp.array([2.0, -1.0, 1.0]),
        jit(trainer(tx, cubic, jit is jax.jit, d)),
    )
    return jax.grad(after)(EXACT), jax.jvp(after, (EXACT,), (EXACT,))


def more(differentiated):
    def polynomial(w):
        return jnp.sum(w**3) + w[0] * w[1], jnp.sum(w**2)

    def both(d, _):
        alone = d(lambda w: polynomial(w)[0])
        return differentiated(alone), differentiated(d(polynomial, has_aux=True))

    return both


DIFFERENTIATED = {
    "remat": remat,
    "remat of products": lambda *args: remat(
        *args, jax.checkpoint_policies.dots_saveable
    ),
    "gradient penalty": gradient_penalty,
    "step": step,
    "compiled step": lambda *args: step(*args, jax.jit),
    "jvp": more(lambda fun: jax.jvp(fun, (W,), (jnp.array([1.0, 2.0]),))),
    "jacrev": more(lambda fun: jax.jacrev(fun)(W)),
    "hessian": more(lambda fun: jax.hessian(fun)(W)),
    "vmapped jvp": more(
        lambda fun: jax.vmap(lambda t: jax.jvp(fun, (W,), (t,)))(jnp.eye(2))
    ),
}


@cases(
    "name", DIFFERENTIATED, fast=["remat", "gradient penalty", "compiled step", "jvp"]
)
def test_value_and_grad_is_that_of_jax(name):
    def bare(fun, state=None, **kwargs):
        return jax.value_and_grad(fun, **kwargs)

    def ours(fun, state=STATE, **kwargs):
        return jaxscale.value_and_grad(fun, state, **kwargs)

    tx = optax.sgd(0.25)
    actual = DIFFERENTIATED[name](ours, jaxscale.loss_scaled(tx, DYNAMIC))
    assert_same_bits(actual, DIFFERENTIATED[name](bare, tx))
