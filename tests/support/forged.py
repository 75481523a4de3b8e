"""Equations as a JAX of tomorrow may make them."""

import inspect

from jax.extend.core import Primitive
from jax.interpreters import mlir


def forged(name, params, fun):
    """A function whose one equation has the name of a primitive of JAX, and other parameters."""

    def run(*args, **params):
        return [fun(*args)]

    def lower(context, *args, **params):
        return mlir.lower_fun(run, multiple_results=True)(context, *args)

    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(run)
    # it returns an array like its first argument
    primitive.def_abstract_eval(lambda *avals, **params: avals[:1])
    options = {}
    if "cacheable" in inspect.signature(mlir.register_lowering).parameters:
        # A cached rule would get the parameters beside arguments of JAX's own, under the same
        # names.
        options = {"cacheable": False}
    mlir.register_lowering(primitive, lower, **options)
    return lambda *args: primitive.bind(*args, **params)[0]
