"""Both forms of `jax.checkpoint` and of functions with rules of their own, by the flags of JAX."""

import contextlib

import jax

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
