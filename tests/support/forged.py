"""Equations as a JAX of tomorrow may make them."""

import inspect

from jax.extend.core import Primitive
from jax.interpreters import mlir


def forged(name, params, fun):
    """A function whose one equation has the name of a primitive of JAX, and other parameters."""
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(lambda *args, **params: [fun(*args)])
    # it makes what it is given
    primitive.def_abstract_eval(lambda *avals, **params: avals[:1])
    lower = mlir.lower_fun(lambda *args: [fun(*args)], multiple_results=True)
    # A cached rule would get the parameters beside arguments of JAX's own, under the same names.
    known = inspect.signature(mlir.register_lowering).parameters
    options = {"cacheable": False} if "cacheable" in known else {}
    mlir.register_lowering(
        primitive, lambda c, *args, **params: lower(c, *args), **options
    )
    return lambda *args: primitive.bind(*args, **params)[0]
