"""Functions that are no target of the doctor, and losses that it cannot run."""

import jax
import jax.numpy as jnp
import numpy as np


def needs_arguments(x):
    return x


def one_value():
    return 3


def two_values():
    return 3, 4


def no_loss():
    return None, 1.0, 2


def empty_tree():
    return len, {}, 2


def integers():
    return len, {"n": np.arange(3)}, 2


def look_up(params, name):
    return params[name]  # fault


def loss_that_fails():
    return lambda p, b: look_up(p, b), {"w": 1.0}, "v"


def loss_for_each_example():
    return lambda p, b: p * jnp.ones(3), 1.0, 2


def loss_and_two_others():
    return lambda p, b: (p, b, b), 1.0, 2


def pair_without_a_loss():
    return lambda p, b: (b, p), 1.0, 2


def integer_loss():
    return lambda p, b: jnp.int32(1), 1.0, 2


def no_derivative():
    def loss_fn(p, b):
        return jax.lax.while_loop(lambda c: c < 9, lambda c: c * 2, p)

    return loss_fn, 1.0, 2


def fails_only_when_it_is_run():
    def look(p):
        raise ZeroDivisionError("now")

    def loss_fn(p, b):
        jax.debug.callback(look, p)
        return p * 1.0

    return loss_fn, 1.0, 2


def divides_by_zero():
    return 1 / 0
