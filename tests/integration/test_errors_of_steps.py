"""Wrong calls of `train_step` and of the step that it returns; wrong losses and hooks."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import optax.contrib
import pytest
from bad_input import (
    OPT_STATE,
    PAIR,
    SGD,
    TX,
    W,
    assert_says,
    flax_state,
    never_traced,
    product_sum,
    without_return,
)
from tables import cases

import jaxscale
from jaxscale import train_step

SKIPPING = jaxscale.skip_nonfinite(SGD)
SKIPPING_ADAM = jaxscale.skip_nonfinite(optax.adam(0.1))
LBFGS = jaxscale.skip_nonfinite(optax.lbfgs())
RULE = jaxscale.SpikeRule()
SAM = jaxscale.skip_nonfinite(optax.contrib.sam(SGD, SGD, opaque_mode=True))


def run(loss_fn, *more, tx=TX, **options):
    """Makes a step from right parameters and a right state."""
    return train_step(loss_fn, tx, **options)(W, tx.init(W), *more)


def step_from(params, opt_state, tx=TX):
    """Makes a step from wrong parameters or a wrong state: an error before anything is traced."""
    return train_step(never_traced, tx)(params, opt_state)


# Losses with a state, and hooks.
def without_state(w, state):
    return jnp.sum(w)


def with_state(w, state):
    return jnp.sum(w), state


def with_shorter_state(w, state):
    return jnp.sum(w), state[:1]


def state_and_output_in_a_row(w, state):
    return jnp.sum(w), state, w


def with_output(w):
    return jnp.sum(w), {"w": w}


def no_gradients(grads):
    return None


def half_gradients(grads):
    return grads.astype("float16")


def state_before_params(params, state):
    return state, params


CASES = {
    "step: spikes over a state without them": (
        lambda: step_from(W, OPT_STATE, tx=jaxscale.loss_scaled(SGD, spikes=RULE)),
        (
            "ValueError: `train_step(...)(opt_state=...)` is the state of an optimizer "
            "without `spikes`.  ... jaxscale.from_state_dict(tx.init(params), "
        ),
    ),
    "step: optimizer is not called": (
        lambda: train_step(jnp.sum, optax.adamw),
        (
            "TypeError: train_step(tx,  ... got <function adamw ... as in "
            "`optax.adamw(1e-3)`"
        ),
    ),
    "step: retries below 0": (
        lambda: train_step(jnp.sum, TX, retries=-1),
        "ValueError: train_step(retries= ... at least 0, got -1",
    ),
    "step: retries of a bare optimizer": (
        lambda: train_step(jnp.sum, SGD, retries=1),
        (
            "ValueError: train_step(retries=1) ... needs a loss scale ... a bare optimizer. "
            "Write ... loss_scaled(tx)"
        ),
    ),
    "step: retries at a fixed scale": (
        lambda: train_step(jnp.sum, jaxscale.loss_scaled(SGD, 8), retries=1),
        (
            "ValueError: train_step(retries=1) ... can be lowered, got one with a "
            "FixedLossScale"
        ),
    ),
    "step: a TrainState": (
        lambda: step_from({"w": W}, flax_state()),
        (
            "TypeError: train_step(...)(opt_state= ... TrainState ... Pass its "
            "`opt_state`"
        ),
    ),
    "step: arguments of the step swapped": (
        lambda: step_from(OPT_STATE, W),
        (
            "TypeError: train_step(...)(opt_state= ... Array ... order of "
            "arguments is (params, opt_state, ."
        ),
    ),
    "step: the state of another optimizer": (
        lambda: step_from(W, jaxscale.loss_scaled(optax.adam(0.1)).init(W)),
        (
            "ValueError: train_step(...)(opt_state= ... another optimizer ... "
            "`init` of this"
        ),
    ),
    "step: the state of other parameters": (
        lambda: step_from({"w": W}, SKIPPING_ADAM.init(PAIR), SKIPPING_ADAM),
        "ValueError: train_step(...)(opt_state= ... of other parameters",
    ),
    "step: the state of parameters of another shape": (
        lambda: step_from(
            {"w": W}, SKIPPING_ADAM.init({"w": jnp.ones(3)}), SKIPPING_ADAM
        ),
        (
            "ValueError: train_step(...)(opt_state= ... of other parameters ... (2,) at "
            "[0].mu['w'], got  ... (3,). Pass"
        ),
    ),
    "step: no batch": (
        lambda: run(product_sum),
        (
            "TypeError: train_step(loss_fn)`: `loss_fn` takes (w, x): missing a "
            "required argument: 'x'. The step called it with (an array): what is "
            "trained, and whatever else the step was given."
        ),
    ),
    "step: no has_state": (
        lambda: run(product_sum, {"mean": W}, W),
        (
            "TypeError: takes (w, x): too many positional ... with (an array, "
            "dict, an array) ... Pass has_state=True"
        ),
    ),
    "step: has_state that is too much": (
        lambda: run(product_sum, W, W, has_state=True),
        (
            "TypeError: train_step(loss_fn) ... too many positional ... what is "
            "trained, the state, and whatever ... given."
        ),
    ),
    "step: another keyword": (
        lambda: train_step(product_sum, TX)(W, OPT_STATE, W, key=W),
        (
            "TypeError: takes (w, x): got an unexpected keyword argument 'key' ... "
            "(an array, an array, key=...)"
        ),
    ),
    "step: no batch, in autocast": (
        lambda: run(jaxscale.autocast(product_sum)),
        (
            "TypeError: train_step(loss_fn)`: `loss_fn` takes (w, x): missing a "
            "required argument: 'x'"
        ),
    ),
    "step: no batch, compiled": (
        lambda: run(eqx.filter_jit(jax.jit(product_sum))),
        (
            "TypeError: train_step(loss_fn)`: `loss_fn` takes (w, x): missing a "
            "required argument: 'x'"
        ),
    ),
    "step: the state of another policy": (
        lambda: step_from(W, OPT_STATE, SKIPPING),
        (
            "TypeError: train_step(...)(opt_state= ... another optimizer ... "
            "LossScaleState ... NoOpLossScale"
        ),
    ),
    "step: a wrapped state of a bare optimizer": (
        lambda: step_from(W, OPT_STATE, SGD),
        (
            "TypeError: train_step(...)(opt_state= ... `tx` is a bare optimizer "
            "... inner_state"
        ),
    ),
    "step: no state": (
        lambda: run(never_traced, has_state=True),
        ("TypeError: train_step(has_state=True) ... (params, opt_state, state, ...)"),
    ),
    "step: state that is not returned": (
        lambda: run(without_state, W, has_state=True),
        (
            "TypeError: train_step(loss_fn, has_state=True) ... must return (loss, "
            "state), got an array"
        ),
    ),
    "step: an output that is not asked for": (
        lambda: run(with_output),
        (
            "TypeError: train_step(loss_fn) ... must return a loss, got (an array, "
            "dict) ... has_aux ... has_state"
        ),
    ),
    "step: state and output in a row": (
        lambda: run(state_and_output_in_a_row, W, has_state=True, has_aux=True),
        (
            "TypeError: has_state=True, has_aux=True ... return (loss, (state, "
            "aux)), got (an array, an array"
        ),
    ),
    "step: a state that changes its shape": (
        lambda: run(with_shorter_state, W, has_state=True),
        (
            "ValueError: train_step(has_state=True)` needs leaves of equal shapes "
            "... (1,) and (2,)"
        ),
    ),
    "hook: no state": (
        lambda: train_step(jnp.sum, TX, after=never_traced),
        "ValueError: train_step(after=...)` needs has_state=True",
    ),
    "hook: nothing returned": (
        lambda: run(jnp.sum, on_grads=no_gradients),
        (
            "ValueError: train_step(on_grads= ... gradients like those that it got,  ... "
            "returned PyTreeDef(None) ... all"
        ),
    ),
    "hook: a norm in the place of the gradients": (
        lambda: run(jnp.sum, on_grads=jnp.linalg.norm),
        (
            "ValueError: train_step(on_grads= ... at the root it got the shape "
            "(2,) ... returned ()"
        ),
    ),
    "hook: gradients in half precision": (
        lambda: run(jnp.sum, on_grads=half_gradients),
        (
            "TypeError: train_step(on_grads= ... got float32 and returned float16 "
            "... Cast"
        ),
    ),
    "hook: another structure after": (
        lambda: run(with_state, W, has_state=True, after=state_before_params),
        "ValueError: train_step(after=...)` needs two trees of one structure",
    ),
    "step: an output that is missing": (
        lambda: run(jnp.sum, has_aux=True),
        (
            "TypeError: train_step(loss_fn, has_aux=True) ... (loss, aux), got an "
            "array. Return it so, or leave"
        ),
    ),
    "step: a loss with a shape": (
        lambda: run(lambda w: w),
        (
            "TypeError: train_step(loss_fn)`: `loss_fn` must return a floating "
            "scalar, got float32[2]"
        ),
    ),
    "step: a transform without the loss": (
        lambda: run(jnp.sum, transform=jax.grad),
        (
            "TypeError: train_step(transform= ... gradients alone. Pass "
            "`jax.value_and_grad`"
        ),
    ),
    "step: a loss without return": (
        lambda: run(without_return),
        (
            "TypeError: `train_step(loss_fn)` ... got NoneType. Does `loss_fn` end "
            "without `return loss`"
        ),
    ),
    "step: a count as the loss": (
        lambda: run(lambda w: jnp.sum(w > 0)),
        (
            "TypeError: `train_step(loss_fn)` ... got int32[].  ... no gradient. Return a "
            "loss ... not a count"
        ),
    ),
    "step: a Python integer as the loss": (
        lambda: run(lambda w: 3),
        (
            "TypeError: `train_step(loss_fn)` ... got int[].  ... no gradient. Return a "
            "loss"
        ),
    ),
}


@pytest.mark.standard_promotion
@pytest.mark.filterwarnings("ignore:.*bare optimizer:UserWarning")
@cases("name", CASES)
def test_bad_input(name):
    assert_says(*CASES[name])


def with_data(fun):
    """Returns a function with the signature of `fun` that passes it one more argument."""
    return functools.wraps(fun)(lambda *args, **kwargs: fun(*args, W, **kwargs))


def calls_wrongly(w):
    return product_sum(w)


def raises_type_error(w, x):
    return len(w, x)


LOSSES = {
    "alone": calls_wrongly,
    "in autocast": jaxscale.autocast(calls_wrongly),
    "compiled": jax.jit(calls_wrongly),
    "with data": with_data(raises_type_error),
}


@cases("name", LOSSES)
def test_a_type_error_of_the_loss_itself_is_left_alone(name):
    message = r"^product_sum\(\) missing 1|^len\(\) takes exactly one"
    with pytest.raises(TypeError, match=message):
        run(LOSSES[name])


def test_a_loss_with_the_signature_of_another_is_called_as_it_is():
    _, opt_state, _ = run(with_data(product_sum))
    assert opt_state.step_applied
