"""jinns' `solve`, which takes the optimizer and a loss: here, that a network solves an equation.

It sees each time once, and one of these is bad.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import jinns
import optax
from runs import BATCH, FACTOR, WIDTH
from watch import Journal, in_precision, train_by

STEPS = 300
FIRST = 0.3


class Driven(jinns.loss.ODE):
    """u' = sin(3 t) - u."""

    def equation(self, t, u, params):
        slope = jax.jacrev(lambda t: u(t, params))(t)[..., 0]
        return slope + u(t, params) - jnp.sin(3 * t)


class SmallLoss(jinns.loss.LossODE):
    """Each of its terms is small, and computed as asked."""

    precision: tuple = eqx.field(static=True, default=("float32", False))

    def __init__(self, precision, **kwargs):
        self.precision = precision
        super().__init__(**kwargs)

    def _get_evaluate_by_terms_lambda(self, *args, **kwargs):
        terms = super()._get_evaluate_by_terms_lambda(*args, **kwargs)

        def replace(term):
            def small_term(params):
                return jax.tree.map(lambda x: FACTOR * x, term(params))

            return in_precision(small_term, *self.precision)

        return jax.tree.map(replace, terms)


def fit(dtype, scaled, skips, batch, left_out=()):
    """Returns how far the network is from the solution, and what the optimizer met."""
    network = (
        (eqx.nn.Linear, 1, WIDTH),
        (jnp.tanh,),
        (eqx.nn.Linear, WIDTH, WIDTH),
        (jnp.tanh,),
        (eqx.nn.Linear, WIDTH, 1),
    )
    u, params = jinns.nn.PINN_MLP.create(
        key=jax.random.key(0), eqx_list=network, eq_type="ODE"
    )
    params = jinns.parameters.Params(nn_params=params, eq_params={})
    times = jinns.data.DataGeneratorODE(
        key=jax.random.key(1),
        nt=STEPS * BATCH,
        tmin=0.0,
        tmax=3.0,
        temporal_batch_size=BATCH,
    )
    if batch == "bad":
        bad_times = times.times.at[0].set(jnp.nan)
        times = eqx.tree_at(lambda data: data.times, times, bad_times)
    loss = SmallLoss(
        (dtype, scaled),
        u=u,
        dynamic_loss=Driven(),
        initial_condition=(0.0, FIRST),
        loss_weights=jinns.loss.LossWeightsODE(dyn_loss=1.0, initial_condition=1.0),
        params=params,
    )
    journal = Journal()
    trained, *_ = jinns.solve(
        n_iter=STEPS,
        init_params=params,
        data=times,
        loss=loss,
        optimizer=journal.optimizer(skips, left_out, optax.adam(3e-3)),
        verbose=False,
    )
    if journal.steps < STEPS:  # it stops at parameters that are NaN
        return float("nan"), journal
    t = jnp.linspace(0.0, 3.0, 100)
    waves = jnp.sin(3 * t) - 3 * jnp.cos(3 * t)
    solution = (waves + (3 + 10 * FIRST) * jnp.exp(-t)) / 10
    learned = jax.vmap(lambda t: u(t[None], trained)[0])(t)
    return float(jnp.mean((learned - solution) ** 2)), journal


train = train_by(fit)
