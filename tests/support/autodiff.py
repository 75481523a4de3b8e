"""Derivatives that a function may be asked for, and both forms of JAX's autodiff, by its flags."""

import contextlib

import jax
import jax.numpy as jnp

FLAGS = ("jax_remat3", "jax_custom_vjp3", "jax_custom_jvp3")
HAS_NEW_FORM = all(hasattr(jax.config, flag) for flag in FLAGS)
# Whether there is a new form, for tests that go through both.
FORMS = {"old": False, "new": True} if HAS_NEW_FORM else {"old": False}


@contextlib.contextmanager
def form(is_new, flags=FLAGS):
    """Inside of this context JAX makes the new form, or the old one, whatever the environment.

    The new form is that of some flags, and the old one of the others.
    """
    before = {
        flag: getattr(jax.config, flag) for flag in FLAGS if hasattr(jax.config, flag)
    }
    try:
        if HAS_NEW_FORM:
            for flag in FLAGS:
                jax.config.update(flag, is_new and flag in flags)
        yield
    finally:
        for flag, value in before.items():
            jax.config.update(flag, value)


def _weigh(array):
    """The sum of an array whose elements count differently, by numbers that are exact in any dtype.

    So a derivative that is transposed, or that belongs to another element, is not taken for it.
    """
    weights = 1 + jnp.arange(array.size) % 3
    return jnp.sum(array * weights.reshape(array.shape).astype(array.dtype))


def _gradients(fun):
    return jax.grad(lambda *args: _weigh(fun(*args)), (0, 1))


def _first(fun):
    def derivatives(*args):
        return fun(*args), _gradients(fun)(*args), jax.jvp(fun, args, args)

    return derivatives


def _second(fun):
    return jax.grad(lambda *args: sum(map(_weigh, _gradients(fun)(*args))), (0, 1))


def _forward_over_reverse(fun):
    return lambda *args: jax.jvp(_gradients(fun), args, args)


def _reverse_over_forward(fun):
    return _gradients(lambda *args: jax.jvp(fun, args, args)[1])


def _in_batches(left, right, differentiate=_first):
    """An argument is a batch along the axis that is given for it, if there is one."""

    def transform(fun):
        def derivatives(*args):
            batches = []
            for arg, axis in zip(args, (left, right), strict=True):
                if axis is not None:
                    arg = jnp.stack([arg, 1 - arg, arg], axis)
                batches.append(arg)
            return differentiate(jax.vmap(fun, (left, right)))(*batches)

        return derivatives

    return transform


# Each takes a function of two arrays that returns one, and returns a function of the same arrays.
FIRST_DERIVATIVES = {
    "eager": _first,
    "jit": lambda fun: jax.jit(_first(fun)),
    "jit inside": lambda fun: _first(jax.jit(fun)),
    "checkpoint": lambda fun: jax.jit(_first(jax.checkpoint(fun))),
    "left batch": _in_batches(-1, None),
    "right batch": _in_batches(None, 0),
    "both batches": _in_batches(-1, 0),
}
SECOND_DERIVATIVES = {
    "second": lambda fun: jax.jit(_second(fun)),
    "forward over reverse": _forward_over_reverse,
    "reverse over forward": _reverse_over_forward,
    "second of a batch": _in_batches(None, 0, _second),
}
DERIVATIVES = FIRST_DERIVATIVES | SECOND_DERIVATIVES
